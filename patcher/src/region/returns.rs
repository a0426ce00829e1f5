//! The calls whose return is taken, and have not returned yet.
//!
//! Each has a slot, and each slot a stub in the region's code that its caller's return address is replaced
//! by. So a function that returns tells by itself which call that is, whatever became of its task
//! meanwhile: it slept, was moved to another CPU, was interrupted, has called on. Nothing is kept by task,
//! and two calls never share anything.
//!
//! ```text
//! 0x0000  magic (u64)
//! 0x0008  address of the stubs (u64)
//! 0x0040  calls for which no slot was left (u64)
//! 0x1000  free list for all CPUs: head (u64), rest unused
//! 0x1040  free list of CPU 0, and so on up to 512 CPUs
//! 0xa000  slots
//! ```
//!
//! A list's head is the number of its first slot, counted from 1, in the low half, and in the high half a
//! number that every change makes larger by one: a CPU that was interrupted between looking at the head
//! and changing it so notices whatever happened meanwhile. A slot is 32 bytes:
//!
//! ```text
//! 0   u64  the return address that was replaced
//! 8   u64  the clock at the call, where that is asked for
//! 16  u32  the function, as in the record of the call
//! 20  u32  what is to be done at the return: bit 31 is for a record, bit 29 for adding to the histogram
//!          whose number is in the low half
//! 24  u32  the next free slot
//! 28  u32  1 from when the stub's address is in place until the function has returned
//! ```
//!
//! All of it is in the guest's byte order, and written by the guest.

use vm_memory::{Bytes, VolatileSlice};

use super::{HEADER_BYTES, HEADERS_BYTES, PART_BYTES, RegionError};
use crate::addr::Gva;
use crate::arch::ByteOrder;

/// How many calls may be out at the same time.
pub const RETURN_SLOTS: u32 = 1 << 14;

/// Bytes of a slot.
pub const RETURN_SLOT_BYTES: u64 = 32;

/// Bytes of a stub.
pub const RETURN_STUB_BYTES: u64 = 8;

/// Stubs begin on a page of the smallest size, which is what aarch64 names addresses by.
pub const RETURN_STUBS_ALIGN: u64 = 4096;

/// Bytes of a free list.
pub const FREE_LIST_BYTES: u64 = 64;

/// CPUs that have a free list.
const MAX_CPUS: usize = (HEADERS_BYTES / HEADER_BYTES) as usize;

/// Where things are in the pool, in bytes.
const MISSED: u64 = 0x40;
const LISTS: u64 = 0x1000;
const SLOTS: u64 = 0xa000;

/// Bytes of the pool.
pub const RETURN_POOL_BYTES: u64 = SLOTS + RETURN_SLOTS as u64 * RETURN_SLOT_BYTES;

/// Where the pool begins in the data part: at its end, behind what payloads have.
pub const RETURN_POOL_OFFSET: u64 = PART_BYTES - RETURN_POOL_BYTES;

/// The magic of a pool that was laid out: its name and the edition of this layout.
const MAGIC: u64 = u64::from_be_bytes(*b"vmmret01");

/// Where the fields of a slot are, in bytes.
pub(crate) mod slot {
    /// The return address that was replaced.
    pub const RETURN: u8 = 0;
    /// The clock at the call.
    pub const TIME: u8 = 8;
    /// The function.
    pub const FUNCTION: u8 = 16;
    /// What is to be done at the return.
    pub const DUTIES: u8 = 20;
    /// The next free slot.
    pub const NEXT: u8 = 24;
    /// Whether the stub's address is in place.
    pub const PLACED: u8 = 28;
}

/// The duty to record the return.
pub const RECORD_RETURN: u32 = 1 << 31;

/// The duty to add what the call has taken to the histogram whose number is in the low half.
pub const MEASURE_CALL: u32 = 1 << 29;

/// Where the pool and its stubs are in guest-virtual memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReturnPool {
    /// Where the pool begins.
    pub at: Gva,
    /// Where the stubs begin.
    pub stubs: Gva,
}

impl ReturnPool {
    /// Address of the count of calls for which no slot was left.
    #[must_use]
    pub fn missed(&self) -> Gva {
        self.at + MISSED
    }

    /// Address of the free list for all CPUs; those of the CPUs follow it.
    #[must_use]
    pub fn lists(&self) -> Gva {
        self.at + LISTS
    }

    /// Address of the first slot.
    #[must_use]
    pub fn slots(&self) -> Gva {
        self.at + SLOTS
    }

    /// Address of the last byte of the last slot.
    #[must_use]
    pub fn end(&self) -> Gva {
        self.at + (RETURN_POOL_BYTES - 1)
    }

    /// The addresses of all stubs.
    #[must_use]
    pub fn stub_range(&self) -> std::ops::Range<Gva> {
        self.stubs..self.stubs + u64::from(RETURN_SLOTS) * RETURN_STUB_BYTES
    }

    /// The addresses of a slot.
    #[must_use]
    pub fn slot_range(&self, index: u32) -> std::ops::Range<Gva> {
        let at = self.slots() + u64::from(index) * RETURN_SLOT_BYTES;
        at..at + RETURN_SLOT_BYTES
    }

    /// The slot whose stub `address` lies in.
    #[must_use]
    pub fn slot_of(&self, address: u64) -> Option<u32> {
        let range = self.stub_range();
        let inside = range.contains(&Gva(address));
        inside.then(|| ((address - range.start.0) / RETURN_STUB_BYTES) as u32)
    }
}

/// A slot as the guest has left it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReturnSlot {
    /// The return address that was replaced.
    pub returns_to: u64,
    /// The function, as in the record of the call.
    pub function: u32,
    /// What is to be done at the return.
    pub duties: u32,
    /// Whether the stub's address is in place.
    pub placed: bool,
}

impl ReturnSlot {
    /// The histogram that what it holds is to be added to, if it holds a call that is to be.
    #[must_use]
    pub fn histogram(&self) -> Option<u16> {
        (self.placed && self.duties & MEASURE_CALL != 0).then_some(self.duties as u16)
    }
}

/// The pool as this process sees it.
#[derive(Debug)]
pub struct ReturnPoolMemory<'a> {
    memory: VolatileSlice<'a>,
    order: ByteOrder,
}

impl<'a> ReturnPoolMemory<'a> {
    /// The pool in `data`, the window of the data part.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn new(data: &VolatileSlice<'a>, order: ByteOrder) -> Result<Self, RegionError> {
        let memory = data.subslice(RETURN_POOL_OFFSET as usize, RETURN_POOL_BYTES as usize);
        let memory = memory.map_err(|error| RegionError::Memory(error.to_string()))?;
        Ok(Self { memory, order })
    }

    /// Where the stubs of a pool are that was laid out before; `None` if it was not.
    #[must_use]
    pub fn stubs(&self) -> Option<Gva> {
        (self.u64(0) == MAGIC).then(|| Gva(self.u64(8)))
    }

    /// Has it forgotten that it was laid out: nobody is left who could return through it.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn forget(&self) -> Result<(), RegionError> {
        self.put_u64(0, 0)
    }

    /// Lays it out: every slot is free.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn lay_out(&self, stubs: Gva) -> Result<(), RegionError> {
        self.put(0, &vec![0; SLOTS as usize])?;
        for index in 0..RETURN_SLOTS {
            let mut bytes = [0; RETURN_SLOT_BYTES as usize];
            // From 1 on; the last is followed by none.
            let next = if index + 1 < RETURN_SLOTS { index + 2 } else { 0 };
            let at = usize::from(slot::NEXT);
            bytes[at..at + 4].copy_from_slice(&self.order.bytes_of_u32(next));
            self.put(SLOTS + u64::from(index) * RETURN_SLOT_BYTES, &bytes)?;
        }
        self.put_u64(LISTS, 1)?;
        self.put_u64(8, stubs.0)?;
        self.put_u64(0, MAGIC)
    }

    /// How many calls found no slot that was free, since the pool was laid out.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.u64(MISSED)
    }

    /// How many slots are in the free lists of a guest with so many CPUs, each counted once: all that hold
    /// no call and are not just being taken or given back.
    #[must_use]
    pub fn free(&self, cpus: usize) -> u32 {
        let mut seen = vec![false; RETURN_SLOTS as usize];
        for list in 0..=cpus.min(MAX_CPUS) as u64 {
            let mut next = self.u64(LISTS + list * FREE_LIST_BYTES) as u32;
            // A list that the guest has made a ring of ends where it comes back.
            while let Some(seen) =
                next.checked_sub(1).and_then(|index| seen.get_mut(index as usize))
                && !*seen
            {
                *seen = true;
                let at = SLOTS + u64::from(next - 1) * RETURN_SLOT_BYTES;
                next = self.u32(at + u64::from(slot::NEXT));
            }
        }
        seen.into_iter().filter(|seen| *seen).count() as u32
    }

    /// What all slots hold.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn all(&self) -> Result<Vec<ReturnSlot>, RegionError> {
        let mut bytes = vec![0; (u64::from(RETURN_SLOTS) * RETURN_SLOT_BYTES) as usize];
        let read = self.memory.read_slice(&mut bytes, SLOTS as usize);
        read.map_err(|error| RegionError::Memory(error.to_string()))?;
        let (slots, _) = bytes.as_chunks();
        Ok(slots.iter().map(|slot| self.decode(slot)).collect())
    }

    fn decode(&self, bytes: &[u8; RETURN_SLOT_BYTES as usize]) -> ReturnSlot {
        let word = |at: u8| {
            let at = usize::from(at);
            self.order.u32([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (halves, _) = bytes.as_chunks();
        ReturnSlot {
            returns_to: self.order.u64(halves[usize::from(slot::RETURN) / 8]),
            function: word(slot::FUNCTION),
            duties: word(slot::DUTIES),
            placed: word(slot::PLACED) == 1,
        }
    }

    /// Gives a slot back that no stack holds. The guest stands, and none of its CPUs or tasks is about to
    /// return through it.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn give_back(&self, index: u32) -> Result<(), RegionError> {
        let at = SLOTS + u64::from(index) * RETURN_SLOT_BYTES;
        let head = self.u64(LISTS);
        self.put(at + u64::from(slot::PLACED), &self.order.bytes_of_u32(0))?;
        self.put(at + u64::from(slot::NEXT), &self.order.bytes_of_u32(head as u32))?;
        let changes = (head >> 32) as u32;
        self.put_u64(LISTS, u64::from(changes.wrapping_add(1)) << 32 | u64::from(index + 1))
    }

    /// Whether the list for all CPUs is empty. What the CPUs have for themselves can then be unevenly
    /// spread: tasks that sleep in calls take slots from one to the other.
    #[must_use]
    pub fn shares_nothing(&self) -> bool {
        self.u64(LISTS) as u32 == 0
    }

    /// Moves the slots that the CPUs of a guest with so many have for themselves to the list for all. The
    /// guest stands: a CPU in the middle of a change notices, and begins it again. A list that is none is
    /// left as it is.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn share(&self, cpus: usize) -> Result<(), RegionError> {
        for list in 1..=cpus.min(MAX_CPUS) as u64 {
            let at = LISTS + list * FREE_LIST_BYTES;
            let head = self.u64(at);
            let Some(last) = self.last_of(head as u32) else { continue };
            let changed = |head: u64| u64::from(((head >> 32) as u32).wrapping_add(1)) << 32;
            let shared = self.u64(LISTS);
            self.put_u64(at, changed(head))?;
            let next = SLOTS + u64::from(last) * RETURN_SLOT_BYTES + u64::from(slot::NEXT);
            self.put(next, &self.order.bytes_of_u32(shared as u32))?;
            self.put_u64(LISTS, changed(shared) | u64::from(head as u32))?;
        }
        Ok(())
    }

    /// The last slot, from 0, of the list that begins with `first`, from 1; `None` if it is empty or does
    /// not end.
    fn last_of(&self, first: u32) -> Option<u32> {
        let mut last = first.checked_sub(1)?;
        for _ in 0..RETURN_SLOTS {
            if last >= RETURN_SLOTS {
                return None;
            }
            let at = SLOTS + u64::from(last) * RETURN_SLOT_BYTES + u64::from(slot::NEXT);
            match self.u32(at).checked_sub(1) {
                Some(next) => last = next,
                None => return Some(last),
            }
        }
        None
    }

    /// What a slot holds; it is below [`RETURN_SLOTS`].
    #[must_use]
    pub fn slot(&self, index: u32) -> ReturnSlot {
        let at = SLOTS + u64::from(index) * RETURN_SLOT_BYTES;
        let mut bytes = [0; RETURN_SLOT_BYTES as usize];
        let read = self.memory.read_slice(&mut bytes, at as usize);
        debug_assert!(read.is_ok(), "{at:#x} is in the pool");
        self.decode(&bytes)
    }

    // Every place asked for lies in the pool, which can be read as a whole.
    fn u64(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        let read = self.memory.read_slice(&mut bytes, at as usize);
        debug_assert!(read.is_ok(), "{at:#x} is in the pool");
        self.order.u64(bytes)
    }

    fn u32(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        let read = self.memory.read_slice(&mut bytes, at as usize);
        debug_assert!(read.is_ok(), "{at:#x} is in the pool");
        self.order.u32(bytes)
    }

    fn put_u64(&self, at: u64, value: u64) -> Result<(), RegionError> {
        self.put(at, &self.order.bytes(value))
    }

    fn put(&self, at: u64, bytes: &[u8]) -> Result<(), RegionError> {
        let written = self.memory.write_slice(bytes, at as usize);
        written.map_err(|error| RegionError::Memory(error.to_string()))
    }
}

/// Returns that are taken in a guest: what stands for what.
#[derive(Debug)]
pub struct TakenReturns<'a> {
    /// Where the guest sees it.
    pub pool: ReturnPool,
    /// What it holds.
    pub memory: ReturnPoolMemory<'a>,
}

impl TakenReturns<'_> {
    /// The return address that was replaced by `address`, if that lies in a stub: also when the slot was
    /// given back a moment ago, by a CPU that stands between that and its return.
    #[must_use]
    pub fn returns_to(&self, address: u64) -> Option<u64> {
        self.pool.slot_of(address).map(|index| self.memory.slot(index).returns_to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_was_laid_out_says_where_its_stubs_are_and_that_every_slot_is_free() {
        let mut bytes = vec![0xee_u8; PART_BYTES as usize];
        for order in [ByteOrder::Little, ByteOrder::Big] {
            let data = VolatileSlice::from(&mut bytes[..]);
            let pool = ReturnPoolMemory::new(&data, order).unwrap();
            assert_eq!(pool.stubs(), None);
            pool.lay_out(Gva(0x1234_5000)).unwrap();
            assert_eq!(pool.stubs(), Some(Gva(0x1234_5000)));
            let (mut next, mut seen) = (pool.u64(LISTS), 0);
            while next != 0 {
                seen += 1;
                assert_eq!(next, seen);
                assert!(!pool.slot(next as u32 - 1).placed);
                next = pool.u32(SLOTS + (next - 1) * RETURN_SLOT_BYTES + 24).into();
            }
            assert_eq!((seen, pool.missed()), (u64::from(RETURN_SLOTS), 0));
            assert_eq!(pool.free(512), RETURN_SLOTS);
            pool.give_back(7).unwrap();
            assert_eq!((pool.u64(LISTS), pool.slot(7).placed), (1 << 32 | 8, false));
            pool.forget().unwrap();
            assert_eq!(pool.stubs(), None);
        }
        assert!(bytes[..RETURN_POOL_OFFSET as usize].iter().all(|byte| *byte == 0xee));
    }

    #[test]
    fn what_cpus_have_for_themselves_can_be_shared_again_and_a_ring_is_left_alone() {
        let mut bytes = vec![0_u8; PART_BYTES as usize];
        for order in [ByteOrder::Little, ByteOrder::Big] {
            let data = VolatileSlice::from(&mut bytes[..]);
            let pool = ReturnPoolMemory::new(&data, order).unwrap();
            pool.lay_out(Gva(0)).unwrap();
            let next = |index: u64| SLOTS + index * RETURN_SLOT_BYTES + u64::from(slot::NEXT);
            let put = |at, value: u32| pool.put(at, &order.bytes_of_u32(value)).unwrap();
            // All are in the list of the first CPU but for one that is in that of the second, and one
            // that the third has made a ring of.
            pool.put_u64(LISTS, 5 << 32).unwrap();
            pool.put_u64(LISTS + FREE_LIST_BYTES, 6 << 32 | 3).unwrap();
            pool.put_u64(LISTS + 2 * FREE_LIST_BYTES, 7 << 32 | 1).unwrap();
            pool.put_u64(LISTS + 3 * FREE_LIST_BYTES, 8 << 32 | 2).unwrap();
            put(next(0), 0);
            put(next(1), 2);
            assert!(pool.shares_nothing());
            assert_eq!(pool.free(3), RETURN_SLOTS);
            pool.share(3).unwrap();
            assert!(!pool.shares_nothing());
            // Two changes, each noticed by who was in the middle of one.
            assert_eq!(pool.u64(LISTS), 7 << 32 | 1);
            assert_eq!(pool.u64(LISTS + FREE_LIST_BYTES), 7 << 32);
            assert_eq!(pool.u64(LISTS + 2 * FREE_LIST_BYTES), 8 << 32);
            assert_eq!(pool.u64(LISTS + 3 * FREE_LIST_BYTES), 8 << 32 | 2);
            assert_eq!(pool.free(0), RETURN_SLOTS - 1);
            // One that leads out of the pool is left as it is, too.
            pool.put_u64(LISTS + FREE_LIST_BYTES, u64::from(RETURN_SLOTS + 1)).unwrap();
            pool.share(1).unwrap();
            assert_eq!(pool.u64(LISTS), 7 << 32 | 1);
        }
    }

    #[test]
    fn an_address_in_a_stub_tells_the_slot() {
        let pool = ReturnPool { at: Gva(0x10_0000), stubs: Gva(0x4000) };
        assert_eq!(pool.slot_of(0x3fff), None);
        assert_eq!((pool.slot_of(0x4000), pool.slot_of(0x4007)), (Some(0), Some(0)));
        assert_eq!(pool.slot_of(0x4000 + 8 * 5 + 3), Some(5));
        assert_eq!(pool.slot_of(0x4000 + 8 * u64::from(RETURN_SLOTS)), None);
        assert!(RETURN_POOL_OFFSET.is_multiple_of(4096));
    }
}
