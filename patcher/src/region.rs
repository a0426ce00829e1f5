//! The memory that the hypervisor provides: one page run of trampoline code, and the rings.
//!
//! ```text
//! code window   trampolines, 64-byte aligned, append-only      guest: read + execute
//!               at its end page tables that map the region, where the guest has none for it
//! rings window  0       header of CPU 0: head (u64), rest unused
//!               128     header of CPU 1, and so on up to 512 CPUs
//!               64 KiB  ring of CPU 0: a power of two of bytes
//!               ...     ring of CPU 1, and so on                guest: read + write
//! ```
//!
//! A record is 32 bytes, in the guest's byte order:
//!
//! ```text
//! 0   u64  time, in ticks of the guest's time-stamp clock
//! 8   u32  low half of the address behind the site's instruction
//! 12  u32  low half of the caller's return address
//! 16  u32  high half of it, where the architecture records it; unused elsewhere
//! 20  u32  unused
//! 24  u64  sequence number: the record's index in this ring since the region was made, plus one
//! ```
//!
//! A kernel's image is smaller than 4 GiB, so that the low half of an address there tells the whole.
//! On x86_64 modules lie in the same 2 GiB.

use std::sync::Mutex;

use vm_memory::Bytes;

use crate::addr::Gva;
use crate::machine::RegionWindow;

/// Bytes of a ring's header. Two cache lines, since CPUs fetch them in pairs: one CPU's head must
/// not share any with another's.
pub const HEADER_BYTES: u64 = 128;

/// Bytes before the first ring: as many headers as Linux distributions have CPUs, at most.
pub const HEADERS_BYTES: u64 = 64 << 10;

/// Bytes of a record.
pub const RECORD_BYTES: u64 = 32;

/// The smallest ring: one page.
pub const MIN_RING_BYTES: u64 = 4096;

/// Unit in which region memory is mapped into guests: an x86_64 large page.
pub const LEAF_BYTES: u64 = 2 << 20;

/// The length that a rings window must have for `vcpus` rings of `ring_bytes` each, which is a
/// power of two: a multiple of [`LEAF_BYTES`].
#[must_use]
pub fn rings_window_len(vcpus: usize, ring_bytes: u64) -> u64 {
    (HEADERS_BYTES + vcpus as u64 * ring_bytes).next_multiple_of(LEAF_BYTES)
}

/// Where the rings are in guest-virtual memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingLayout {
    base: Gva,
    ring_bytes: u64,
    cpus: usize,
}

/// Rings could not be laid out, or code not be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The window is too small for that many CPUs.
    #[error(
        "the region has {len:#x} bytes for the rings of {cpus} CPUs, and each needs at least \
         {MIN_RING_BYTES:#x} beside {HEADERS_BYTES:#x} for all; give it more memory"
    )]
    TooSmall {
        /// Bytes of the window.
        len: u64,
        /// CPUs to serve.
        cpus: usize,
    },
    /// The headers do not suffice.
    #[error("the region has ring headers for {most} CPUs and the guest has {cpus}", most = HEADERS_BYTES / HEADER_BYTES)]
    TooManyCpus {
        /// CPUs to serve.
        cpus: usize,
    },
    /// No room for more code.
    #[error("{wanted} bytes of trampoline code do not fit: {used} of the region's {len} are taken")]
    CodeFull {
        /// Bytes wanted.
        wanted: usize,
        /// Bytes taken.
        used: usize,
        /// Bytes that there are for code.
        len: usize,
    },
    /// The code was made for one address and would have landed at another.
    #[error("the region's memory could not be written: {0}")]
    Memory(String),
}

impl RingLayout {
    /// Lays out rings for `cpus` CPUs, as large as fit, in a window of `len` bytes at `base`.
    ///
    /// # Errors
    /// [`RegionError::TooSmall`], [`RegionError::TooManyCpus`].
    pub fn new(base: Gva, len: u64, cpus: usize) -> Result<Self, RegionError> {
        if cpus as u64 > HEADERS_BYTES / HEADER_BYTES {
            return Err(RegionError::TooManyCpus { cpus });
        }
        let too_small = RegionError::TooSmall { len, cpus };
        let each = len.saturating_sub(HEADERS_BYTES).checked_div(cpus as u64);
        match each {
            // Indices are masked as 32 bits in the trampoline, offsets into a ring as well.
            Some(each) if each >= MIN_RING_BYTES => {
                Ok(Self { base, ring_bytes: (1 << each.ilog2()).min(1 << 31), cpus })
            }
            _ => Err(too_small),
        }
    }

    /// Address of the first ring header.
    #[must_use]
    pub fn headers(&self) -> Gva {
        self.base
    }

    /// Address of the first ring.
    #[must_use]
    pub fn slots(&self) -> Gva {
        self.base + HEADERS_BYTES
    }

    /// Address of the last byte of the last ring.
    #[must_use]
    pub fn end(&self) -> Gva {
        self.slots() + (self.cpus as u64 * self.ring_bytes - 1)
    }

    /// How many rings there are.
    #[must_use]
    pub fn cpus(&self) -> usize {
        self.cpus
    }

    /// Records that one ring holds: a power of two.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.ring_bytes / RECORD_BYTES
    }

    /// Base-two logarithm of a ring's bytes.
    #[must_use]
    pub fn ring_shift(&self) -> u8 {
        self.ring_bytes.trailing_zeros() as u8
    }

    /// What an index is masked with to give a slot.
    #[must_use]
    pub fn index_mask(&self) -> u32 {
        (self.capacity() - 1) as u32
    }

    /// Offset of a CPU's header from the window's beginning.
    #[must_use]
    pub fn header_offset(&self, cpu: usize) -> usize {
        cpu * HEADER_BYTES as usize
    }

    /// Offset from the window's beginning of the slot that holds record `index` of a CPU.
    #[must_use]
    pub fn slot_offset(&self, cpu: usize, index: u64) -> usize {
        let slot = index & u64::from(self.index_mask());
        (HEADERS_BYTES + cpu as u64 * self.ring_bytes + slot * RECORD_BYTES) as usize
    }
}

/// Hands out trampoline code, never the same bytes twice.
///
/// A task may be preempted inside a trampoline and stay there for as long as it likes, so code that
/// was once reachable is neither overwritten nor reused; only a check of all stacks could clear it.
#[derive(Debug)]
pub struct CodeSpace {
    base: Gva,
    len: usize,
    used: Mutex<usize>,
}

/// Trampolines begin on a cache line.
const CODE_ALIGN: usize = 64;

impl CodeSpace {
    /// An empty code window, of which the guest sees `len` bytes at `base`.
    #[must_use]
    pub fn new(base: Gva, len: u64) -> Self {
        Self::with_code(base, len, 0)
    }

    /// The same with `used` bytes of code at its beginning, which stay.
    #[must_use]
    pub fn with_code(base: Gva, len: u64, used: u64) -> Self {
        let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        Self { base, len: size(len), used: Mutex::new(size(used)) }
    }

    /// How many bytes are taken.
    #[must_use]
    pub fn used(&self) -> u64 {
        *self.used.lock().unwrap_or_else(std::sync::PoisonError::into_inner) as u64
    }

    /// Places the code that `assemble` makes for the address it is given; nothing is taken when
    /// `assemble` fails.
    ///
    /// # Errors
    /// [`RegionError::CodeFull`], or what `assemble` says.
    pub fn place<E: From<RegionError>>(
        &self,
        window: &RegionWindow<'_>,
        assemble: impl FnOnce(Gva) -> Result<Vec<u8>, E>,
    ) -> Result<Gva, E> {
        let mut used = self.used.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let at = self.base + *used as u64;
        let code = assemble(at)?;
        let len = self.len.min(window.memory.len());
        let end = used
            .checked_add(code.len())
            .filter(|end| *end <= len)
            .ok_or(RegionError::CodeFull { wanted: code.len(), used: *used, len })?;
        window
            .memory
            .write_slice(&code, *used)
            .map_err(|error| RegionError::Memory(error.to_string()))?;
        *used = end.next_multiple_of(CODE_ALIGN);
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::VolatileSlice;

    use super::*;
    use crate::addr::Gpa;

    #[test]
    fn a_window_made_for_a_ring_size_holds_rings_of_that_size() {
        for (cpus, ring) in [(1, 4096), (2, 16 << 20), (3, 1 << 20), (64, 2 << 20)] {
            let len = rings_window_len(cpus, ring);
            assert_eq!(len % LEAF_BYTES, 0);
            let layout = RingLayout::new(Gva(0xffff_ffff_b000_0000), len, cpus).unwrap();
            assert!(layout.capacity() * RECORD_BYTES >= ring);
            let last = layout.slot_offset(cpus - 1, layout.capacity() - 1) as u64;
            assert!(last + RECORD_BYTES <= len);
            assert_eq!(layout.headers() + last + RECORD_BYTES - 1, layout.end());
        }
    }

    #[test]
    fn a_window_without_room_is_refused() {
        let base = Gva(0);
        assert!(matches!(
            RingLayout::new(base, HEADERS_BYTES + 4095, 1),
            Err(RegionError::TooSmall { .. })
        ));
        assert!(matches!(RingLayout::new(base, 1 << 30, 0), Err(RegionError::TooSmall { .. })));
        assert!(matches!(
            RingLayout::new(base, 1 << 40, 513),
            Err(RegionError::TooManyCpus { cpus: 513 })
        ));
    }

    #[test]
    fn slots_wrap_within_their_own_ring() {
        let layout = RingLayout::new(Gva(0), rings_window_len(2, 4096), 2).unwrap();
        let capacity = layout.capacity();
        assert_eq!(layout.slot_offset(0, 0), layout.slot_offset(0, capacity));
        assert_eq!(layout.slot_offset(1, 3), layout.slot_offset(1, 5 * capacity + 3));
        assert!(layout.slot_offset(0, capacity - 1) < layout.slot_offset(1, 0));
    }

    #[test]
    fn code_is_appended_and_never_overwritten() {
        let mut bytes = vec![0_u8; 512];
        let window = RegionWindow { gpa: Gpa(0), memory: VolatileSlice::from(&mut bytes[..]) };
        let space = CodeSpace::new(Gva(0x1000), 256);
        let place = |code: Vec<u8>| space.place::<RegionError>(&window, |_| Ok(code));
        assert_eq!(place(vec![1; 65]), Ok(Gva(0x1000)));
        assert_eq!(place(vec![2; 100]), Ok(Gva(0x1080)));
        assert_eq!(
            place(vec![3; 1]),
            Err(RegionError::CodeFull { wanted: 1, used: 256, len: 256 })
        );
        assert_eq!(bytes[..65], [1; 65]);
        assert_eq!(bytes[128..228], [2; 100]);
    }
}
