//! Reads the rings while the guest writes them.
//!
//! The guest overwrites: its code never waits and never looks at what was read. Each record's index
//! counts every call there ever was, so what a slow reader misses is known exactly. The rules:
//!
//! * A record is there when its slot holds the sequence number `index + 1`, of which it has 32 bits.
//! * A slot that is reserved and not yet written (its writer was interrupted, or preempted) is
//!   remembered and visited again; the records behind it are taken meanwhile.
//! * A record is believed only if, after it was copied, nobody had yet reserved its slot anew.
//! * A record that needs more room has further slots behind its own (`continuations`).
//! * A writer that was passed by a whole ring while it stood still may write into a slot that is no
//!   longer its own. Where the reader saw it stand, nothing is believed of that slot from then on.
//!
//! Everything here may be written by the guest at any time: indices are never trusted further than
//! to a slot of the ring.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use vm_memory::{VolatileMemory, VolatileSlice};

use crate::arch::ByteOrder;
use crate::region::{CONTINUATIONS_AT, RingLayout};

mod continuations;

pub use continuations::RecordedWords;

/// One record as the trampoline wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawRecord {
    /// Ticks of the guest's time-stamp clock.
    pub time: u64,
    /// How many records were reserved in that ring before this one.
    pub index: u64,
    /// The CPU in whose ring it was.
    pub cpu: u16,
    /// Low half of the address behind the site's instruction.
    pub ip: u32,
    /// The caller's return address; its high half is 0 where the architecture's records lack it
    /// (see [`Arch::records_whole_callers`](crate::arch::Arch::records_whole_callers)).
    pub parent: u64,
    /// What it tells of the task: the words behind the caller's address
    /// (see [`Arch::task_words`](crate::arch::Arch::task_words)).
    pub task: [u32; 2],
    /// The arguments of the call, where its function's trampoline records them.
    pub arguments: Option<Box<RecordedWords>>,
}

/// The guest wrote into its rings what no trampoline writes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingCorrupt {
    /// The head went backwards, or further than any guest could have filled it.
    #[error("the ring of CPU {cpu} is corrupt: its head went from {from} to {to}")]
    Head {
        /// Whose ring.
        cpu: usize,
        /// The head when it was last read.
        from: u64,
        /// The head now.
        to: u64,
    },
    /// A slot carries a sequence number that was never given to it.
    #[error("the ring of CPU {cpu} is corrupt: record {index} carries sequence number {found}")]
    Sequence {
        /// Whose ring.
        cpu: usize,
        /// Index of the record that should have been there.
        index: u64,
        /// What is there.
        found: u32,
    },
    /// A record names a function that is not traced.
    #[error("the ring of CPU {cpu} is corrupt: a record names {ip:#x}, where nothing is traced")]
    Function {
        /// Whose ring.
        cpu: usize,
        /// Low half of the address that it names.
        ip: u32,
    },
}

/// More records than this between two looks at a ring were not written by a trampoline: at one a
/// nanosecond it is more than an hour's.
const MAX_ADVANCE: u64 = 1 << 42;

/// Slots copied between two looks at the head.
const BATCH: usize = 256;

/// Reads one CPU's ring.
#[derive(Debug)]
pub struct RingReader {
    cpu: usize,
    layout: RingLayout,
    order: ByteOrder,
    /// Index of the next record that was not looked at yet.
    next: u64,
    /// Head when it was last read.
    head: u64,
    /// Reserved slots that were not yet written when they were passed.
    pending: BTreeSet<u64>,
    /// Slots (indices modulo capacity) whose writer was passed by a whole ring.
    tainted: BTreeSet<u64>,
    lost: u64,
    /// Indices of what was lost since the last look, in pieces.
    losses: Vec<Range<u64>>,
    /// What the guest has counted of slots for more of records, when the head was last looked at.
    continuations: u64,
    /// Indices of such slots that were found since then, in pieces.
    continuations_read: Vec<Range<u64>>,
    corrupt: Option<RingCorrupt>,
}

/// One ring's memory, bounds checked once.
struct RingMemory<'a> {
    header: &'a AtomicU64,
    /// Where slots for more of records are counted.
    counted: usize,
    window: &'a VolatileSlice<'a>,
    order: ByteOrder,
}

impl RingReader {
    /// A reader that begins with the next record to be written, by a guest of that byte order.
    ///
    /// # Errors
    /// [`RingCorrupt::Head`] if the window does not hold such a ring.
    pub fn new(
        window: &VolatileSlice<'_>,
        layout: RingLayout,
        cpu: usize,
        order: ByteOrder,
    ) -> Result<Self, RingCorrupt> {
        let mut reader = Self::anywhere(layout, cpu, order);
        let memory = reader.memory(window)?;
        let (continuations, head) = (memory.continuations(), memory.head(Ordering::Acquire));
        reader.continuations = continuations;
        reader.next = head;
        reader.head = head;
        Ok(reader)
    }

    /// A reader of what the ring still holds of the records with indices in `range`, up to the head as it
    /// is now. What it no longer holds of them is found lost.
    #[must_use]
    pub fn over(
        window: &VolatileSlice<'_>,
        layout: RingLayout,
        cpu: usize,
        order: ByteOrder,
        range: Range<u64>,
    ) -> Self {
        let mut reader =
            Self { next: range.start, head: range.start, ..Self::anywhere(layout, cpu, order) };
        let memory = reader.memory(window);
        let memory = memory.map(|memory| (memory.continuations(), memory.head(Ordering::Acquire)));
        match memory.map(|(continuations, head)| {
            reader.continuations = continuations;
            head
        }) {
            Ok(head) if head >= range.start => reader.head = head.min(range.end.max(range.start)),
            Ok(head) => reader.give_up(RingCorrupt::Head { cpu, from: range.start, to: head }),
            Err(corrupt) => reader.give_up(corrupt),
        }
        reader
    }

    fn anywhere(layout: RingLayout, cpu: usize, order: ByteOrder) -> Self {
        Self {
            cpu,
            layout,
            order,
            next: 0,
            head: 0,
            pending: BTreeSet::new(),
            tainted: BTreeSet::new(),
            lost: 0,
            losses: Vec::new(),
            continuations: 0,
            continuations_read: Vec::new(),
            corrupt: None,
        }
    }

    /// Records that were written and could not be read in time.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// The indices of the records that were found lost since the last [`RingReader::look`].
    #[must_use]
    pub fn losses(&self) -> &[Range<u64>] {
        &self.losses
    }

    /// Records that were reserved, and not written when last looked at.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// How many of the pending records have an index in `range`.
    #[must_use]
    pub fn pending_within(&self, range: Range<u64>) -> usize {
        if range.is_empty() { 0 } else { self.pending.range(range).count() }
    }

    /// Index of the first record that was not yet reserved at the last [`RingReader::look`].
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Why nothing more is read from this ring, if so.
    #[must_use]
    pub fn corrupt(&self) -> Option<&RingCorrupt> {
        self.corrupt.as_ref()
    }

    /// Looks at the head: what was reserved until now is what [`RingReader::read`] will look for.
    pub fn look(&mut self, window: &VolatileSlice<'_>) {
        self.losses.clear();
        self.continuations_read.clear();
        if self.corrupt.is_some() {
            return;
        }
        // A slot is counted once it is reserved: what is counted by now is below the head.
        let (continuations, head) = match self.memory(window) {
            Ok(memory) => (memory.continuations(), memory.head(Ordering::Acquire)),
            Err(corrupt) => return self.give_up(corrupt),
        };
        if head < self.head || head - self.head > MAX_ADVANCE {
            let (from, cpu) = (self.head, self.cpu);
            return self.give_up(RingCorrupt::Head { cpu, from, to: head });
        }
        (self.head, self.continuations) = (head, continuations);
    }

    /// Appends to `records` what was written, at most `limit` records, and tells whether the ring
    /// has been read up to the head of the last [`RingReader::look`].
    pub fn read(
        &mut self,
        window: &VolatileSlice<'_>,
        records: &mut Vec<RawRecord>,
        limit: usize,
    ) -> bool {
        match self.try_read(window, records, limit) {
            Ok(complete) => complete,
            Err(corrupt) => {
                self.give_up(corrupt);
                true
            }
        }
    }

    /// Takes note that the ring can't be believed any more.
    pub fn give_up(&mut self, corrupt: RingCorrupt) {
        self.corrupt.get_or_insert(corrupt);
    }

    fn try_read(
        &mut self,
        window: &VolatileSlice<'_>,
        records: &mut Vec<RawRecord>,
        limit: usize,
    ) -> Result<bool, RingCorrupt> {
        if self.corrupt.is_some() {
            return Ok(true);
        }
        let memory = self.memory(window)?;
        let before = records.len();

        let pending: Vec<u64> = std::mem::take(&mut self.pending).into_iter().collect();
        for batch in pending.chunks(BATCH) {
            self.read_batch(&memory, batch.iter().copied(), true, records)?;
        }
        let capacity = self.layout.capacity();
        while self.next < self.head && records.len() - before < limit {
            // What is a whole ring behind is gone; it need not be looked for one by one.
            let oldest = self.head.saturating_sub(capacity);
            if self.next < oldest {
                self.lose(self.next..oldest);
                self.next = oldest;
            }
            let end = self.head.min(self.next + BATCH as u64);
            self.read_batch(&memory, self.next..end, false, records)?;
            self.next = end;
        }
        Ok(self.next >= self.head)
    }

    /// Copies at most [`BATCH`] slots, then asks once, for all of them, how far the guest has come
    /// meanwhile: each look at the head takes its cache line away from the guest's CPU.
    fn read_batch(
        &mut self,
        memory: &RingMemory<'_>,
        indices: impl Iterator<Item = u64>,
        was_pending: bool,
        records: &mut Vec<RawRecord>,
    ) -> Result<(), RingCorrupt> {
        let copies: Vec<(u64, u32, RawRecord)> = indices
            .map(|index| {
                let (sequence, record) = self.copy(memory, index);
                (index, sequence, record)
            })
            .collect();
        // The copies have to be complete before it is asked whether their slots were reserved anew.
        fence(Ordering::Acquire);
        let head = memory.head(Ordering::Relaxed);
        if head < self.head || head - self.head > MAX_ADVANCE {
            return Err(RingCorrupt::Head { cpu: self.cpu, from: self.head, to: head });
        }
        let capacity = self.layout.capacity();
        for (index, sequence, record) in copies {
            let wanted = (index + 1) as u32;
            // How many records ago the one was reserved that the slot holds.
            let age = wanted.wrapping_sub(sequence);
            let is_older = sequence == 0 || age.cast_signed() > 0;
            if head - index > capacity {
                self.pass(index, was_pending || is_older);
            } else if age == 0 {
                if self.is_tainted(index) {
                    self.lose(index..index + 1);
                } else if continuations::number(record.ip).is_some() {
                    self.note_continuation(index);
                } else {
                    records.push(record);
                }
            } else if is_older && (sequence == 0 || u64::from(age).is_multiple_of(capacity)) {
                // An earlier lap's record, or none, is what a slot holds until it is written.
                self.pending.insert(index);
            } else {
                return Err(RingCorrupt::Sequence { cpu: self.cpu, index, found: sequence });
            }
        }
        Ok(())
    }

    /// A record is lost. If its writer had not come by the time its slot was passed by a whole ring,
    /// it may still come, and what it leaves in the slot can't be told from its successors'.
    fn pass(&mut self, index: u64, unwritten: bool) {
        self.lose(index..index + 1);
        if unwritten {
            self.tainted.insert(index & (self.layout.capacity() - 1));
        }
    }

    fn is_tainted(&self, index: u64) -> bool {
        self.tainted.contains(&(index & (self.layout.capacity() - 1)))
    }

    fn lose(&mut self, records: Range<u64>) {
        self.lost += records.end - records.start;
        match self.losses.last_mut() {
            Some(last) if last.end == records.start => last.end = records.end,
            _ => self.losses.push(records),
        }
    }

    fn copy(&self, memory: &RingMemory<'_>, index: u64) -> (u32, RawRecord) {
        let offset = self.layout.slot_offset(self.cpu, index);
        let sequence = memory.sequence(offset);
        let word = |at| memory.word(offset + at);
        let is_complete = sequence == (index + 1) as u32;
        let record = RawRecord {
            time: memory.u64(offset),
            index,
            cpu: self.cpu as u16,
            ip: word(8),
            parent: u64::from(word(16)) << 32 | u64::from(word(12)),
            task: [word(20), word(24)],
            arguments: is_complete.then(|| self.more(memory, index)).flatten(),
        };
        (sequence, record)
    }

    fn memory<'a>(&self, window: &'a VolatileSlice<'a>) -> Result<RingMemory<'a>, RingCorrupt> {
        let missing = RingCorrupt::Head { cpu: self.cpu, from: self.head, to: 0 };
        let last = self.layout.slot_offset(self.cpu, self.layout.capacity() - 1);
        if last + 32 > window.len() {
            return Err(missing);
        }
        let header = window
            .get_atomic_ref::<AtomicU64>(self.layout.header_offset(self.cpu))
            .map_err(|_| missing)?;
        let counted = self.layout.header_offset(self.cpu) + CONTINUATIONS_AT as usize;
        Ok(RingMemory { header, counted, window, order: self.order })
    }
}

impl RingMemory<'_> {
    /// How many records were ever reserved.
    fn head(&self, ordering: Ordering) -> u64 {
        self.order.u64(self.header.load(ordering).to_ne_bytes())
    }

    /// How many slots were ever reserved for more of a record.
    fn continuations(&self) -> u64 {
        self.u64(self.counted)
    }

    /// The sequence number of the slot at `offset`, before anything else in it is read.
    fn sequence(&self, offset: usize) -> u32 {
        self.u32(offset + 28, Ordering::Acquire)
    }

    fn word(&self, offset: usize) -> u32 {
        self.u32(offset, Ordering::Relaxed)
    }

    /// The 64 bits at `offset`, a multiple of four.
    fn long(&self, offset: usize) -> u64 {
        let [first, second] = [self.word(offset), self.word(offset + 4)].map(u64::from);
        match self.order {
            ByteOrder::Little => second << 32 | first,
            ByteOrder::Big => first << 32 | second,
        }
    }

    // Offsets are computed from the layout, whose end was compared with the window's; a failure
    // would read as an empty slot.
    fn u64(&self, offset: usize) -> u64 {
        self.window
            .get_atomic_ref::<AtomicU64>(offset)
            .map_or(0, |value| self.order.u64(value.load(Ordering::Relaxed).to_ne_bytes()))
    }

    fn u32(&self, offset: usize, ordering: Ordering) -> u32 {
        self.window
            .get_atomic_ref::<AtomicU32>(offset)
            .map_or(0, |value| self.order.u32(value.load(ordering).to_ne_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::Bytes;

    use super::*;
    use crate::addr::Gva;
    use crate::region::rings_window_len;

    /// A guest's side of one ring: does what the trampoline does, a step at a time.
    struct Guest {
        memory: Vec<u64>,
        layout: RingLayout,
    }

    const CPU: usize = 1;

    impl Guest {
        fn new() -> Self {
            let len = rings_window_len(2, 4096);
            let layout = RingLayout::new(Gva(0), HEADERS + 2 * 4096, 2).unwrap();
            assert_eq!(layout.capacity(), 128);
            Self { memory: vec![0; len as usize / 8], layout }
        }

        fn window(&self) -> VolatileSlice<'_> {
            let (pointer, len) = (self.memory.as_ptr(), self.memory.len() * 8);
            shared(pointer, len)
        }

        fn reader(&self) -> RingReader {
            RingReader::new(&self.window(), self.layout, CPU, ByteOrder::Little).unwrap()
        }

        fn reserve(&self) -> u64 {
            let window = self.window();
            let header = self.layout.header_offset(CPU);
            window.get_atomic_ref::<AtomicU64>(header).unwrap().fetch_add(1, Ordering::AcqRel)
        }

        fn fill(&self, index: u64) {
            let window = self.window();
            let slot = self.layout.slot_offset(CPU, index);
            window.write_obj(1000 + index, slot).unwrap();
            window.write_obj(0x8100_0005_u32, slot + 8).unwrap();
            window.write_obj(0x8100_1234_u32, slot + 12).unwrap();
            window.write_obj(77_u32, slot + 20).unwrap();
            window.write_obj(0x8001_0001_u32, slot + 24).unwrap();
            let sequence = window.get_atomic_ref::<AtomicU32>(slot + 28).unwrap();
            sequence.store((index + 1) as u32, Ordering::Release);
        }

        fn call(&self) -> u64 {
            let index = self.reserve();
            self.fill(index);
            index
        }

        /// A call with its arguments in further slots, and what is counted of these.
        fn reserve_more(&self, slots: u64) -> u64 {
            let window = self.window();
            let header = self.layout.header_offset(CPU);
            let add = |at, count| {
                window.get_atomic_ref::<AtomicU64>(at).unwrap().fetch_add(count, Ordering::AcqRel)
            };
            let index = add(header, slots + 1);
            add(header + CONTINUATIONS_AT as usize, slots);
            index
        }

        fn fill_more(&self, index: u64, slots: u64) {
            let window = self.window();
            for number in 1..=slots {
                let slot = self.layout.slot_offset(CPU, index + number);
                for (word, at) in [0, 12, 20].into_iter().enumerate() {
                    window.write_obj(index << 8 | number << 4 | word as u64, slot + at).unwrap();
                }
                window.write_obj(number as u32, slot + 8).unwrap();
                let sequence = window.get_atomic_ref::<AtomicU32>(slot + 28).unwrap();
                sequence.store((index + number + 1) as u32, Ordering::Release);
            }
            self.fill(index);
        }

        fn call_with(&self, slots: u64) -> u64 {
            let index = self.reserve_more(slots);
            self.fill_more(index, slots);
            index
        }

        /// Which calls were read, and how many words of each.
        fn drain_with(&self, reader: &mut RingReader) -> Vec<(u64, usize)> {
            let mut records = Vec::new();
            reader.look(&self.window());
            while !reader.read(&self.window(), &mut records, 50) {}
            let told = records.iter().map(|record| {
                let words = record.arguments.as_ref().map_or(&[][..], |words| words.words());
                for (at, word) in words.iter().enumerate() {
                    let (number, word_in) = (at as u64 / 3 + 1, at as u64 % 3);
                    assert_eq!(*word, record.index << 8 | number << 4 | word_in);
                }
                (record.index, words.len())
            });
            told.collect()
        }

        fn drain(&self, reader: &mut RingReader) -> Vec<u64> {
            let mut records = Vec::new();
            reader.look(&self.window());
            while !reader.read(&self.window(), &mut records, 50) {}
            records.iter().map(|record| record.time - 1000).collect()
        }
    }

    const HEADERS: u64 = crate::region::HEADERS_BYTES;

    #[allow(unsafe_code)]
    fn shared<'a>(pointer: *const u64, len: usize) -> VolatileSlice<'a> {
        // SAFETY: the memory lives as long as the `Guest` that every caller keeps, and is only
        // accessed through such slices, one thread at a time.
        unsafe { VolatileSlice::new(pointer.cast_mut().cast(), len) }
    }

    #[test]
    fn every_call_is_read_once_and_in_order() {
        let guest = Guest::new();
        guest.call();
        let mut reader = guest.reader();
        assert_eq!(guest.drain(&mut reader), [] as [u64; 0]);
        for lap in 0..5 {
            let calls: Vec<u64> = (0..100).map(|_| guest.call()).collect();
            assert_eq!(guest.drain(&mut reader), calls, "lap {lap}");
        }
        assert_eq!((reader.lost(), reader.pending()), (0, 0));
    }

    #[test]
    fn a_slow_reader_knows_exactly_what_it_missed() {
        let guest = Guest::new();
        let mut reader = guest.reader();
        let calls: Vec<u64> = (0..1000).map(|_| guest.call()).collect();
        let read = guest.drain(&mut reader);
        assert_eq!(read, calls[1000 - 128..]);
        assert_eq!(reader.lost() + read.len() as u64, 1000);
        assert_eq!(reader.losses().len(), 1, "in one piece");
        assert_eq!(reader.losses()[0], 0..1000 - 128);
    }

    #[test]
    fn a_slot_that_is_reserved_and_not_written_is_visited_again() {
        let guest = Guest::new();
        let mut reader = guest.reader();
        let slow = guest.reserve();
        let quick = guest.call();
        assert_eq!(guest.drain(&mut reader), [quick]);
        assert_eq!(reader.pending(), 1);
        guest.fill(slow);
        assert_eq!(guest.drain(&mut reader), [slow]);
        assert_eq!((reader.lost(), reader.pending()), (0, 0));
    }

    #[test]
    fn a_writer_passed_by_a_whole_ring_spoils_only_its_own_slot() {
        let guest = Guest::new();
        let mut reader = guest.reader();
        let slow = guest.reserve();
        assert_eq!(guest.drain(&mut reader), [] as [u64; 0]);
        for _ in 0..127 {
            guest.call();
        }
        assert_eq!(guest.drain(&mut reader).len(), 127);
        let successor = guest.call();
        assert_eq!(guest.drain(&mut reader), [] as [u64; 0], "it can't be told from {slow}'s");
        assert_eq!(successor - slow, 128);
        guest.fill(slow);
        assert_eq!(guest.drain(&mut reader), [] as [u64; 0]);
        let after: Vec<u64> = (0..127).map(|_| guest.call()).collect();
        assert_eq!(guest.drain(&mut reader), after);
        assert_eq!(reader.lost(), 2);
        assert_eq!(reader.corrupt(), None);
    }

    #[test]
    fn arguments_come_with_their_call_wherever_its_slots_are() {
        let guest = Guest::new();
        let mut reader = guest.reader();
        let mut counted = 0;
        // Over the ring's end, and over that of what is copied at a time.
        for round in 0..400_u64 {
            let slots = round % 5;
            let calls = [guest.call_with(slots), guest.call()];
            counted += slots;
            let expected = [(calls[0], 3 * slots as usize), (calls[1], 0)];
            assert_eq!(guest.drain_with(&mut reader), expected);
            let read: u64 = reader.continuations_read().iter().map(|r| r.end - r.start).sum();
            assert_eq!((read, reader.continuations()), (slots, counted));
        }
        assert_eq!((reader.lost(), reader.pending(), reader.corrupt()), (0, 0, None));
    }

    #[test]
    fn a_call_that_is_not_written_yet_comes_later_with_its_arguments() {
        let guest = Guest::new();
        let mut reader = guest.reader();
        let slow = guest.reserve_more(2);
        let quick = guest.call_with(1);
        assert_eq!(guest.drain_with(&mut reader), [(quick, 3)]);
        assert_eq!(reader.pending(), 3);
        guest.fill_more(slow, 2);
        assert_eq!(guest.drain_with(&mut reader), [(slow, 6)]);
        assert_eq!((reader.lost(), reader.pending()), (0, 0));
    }

    #[test]
    fn what_is_lost_is_the_slots_and_what_was_counted_tells_the_calls() {
        let guest = Guest::new();
        let mut reader = guest.reader();
        for _ in 0..100 {
            guest.call_with(2);
        }
        let read = guest.drain_with(&mut reader);
        // The ring holds 42 calls, and two slots of one of which the first is lost.
        assert_eq!((read.len(), reader.lost()), (42, 300 - 128));
        let more: u64 = reader.continuations_read().iter().map(|r| r.end - r.start).sum();
        let lost_more = reader.continuations() - more;
        assert_eq!(read.len() as u64 + reader.lost() - lost_more, 100);
    }

    #[test]
    fn slots_of_arguments_without_their_call_are_no_records() {
        let guest = Guest::new();
        let mut reader = guest.reader();
        let index = guest.call_with(3);
        // As if the first one were another's.
        let slot = guest.layout.slot_offset(CPU, index + 1);
        guest.window().write_obj(2_u32, slot + 8).unwrap();
        assert_eq!(guest.drain_with(&mut reader), [(index, 0)]);
    }

    #[test]
    fn a_head_that_goes_backwards_or_leaps_is_corrupt() {
        for head in [3_u64, u64::MAX, 1 << 50] {
            let guest = Guest::new();
            (0..10).for_each(|_| {
                guest.call();
            });
            let mut reader = guest.reader();
            guest.window().write_obj(head, guest.layout.header_offset(CPU)).unwrap();
            assert_eq!(guest.drain(&mut reader), [] as [u64; 0]);
            assert_eq!(reader.corrupt(), Some(&RingCorrupt::Head { cpu: CPU, from: 10, to: head }));
        }
    }

    #[test]
    fn a_sequence_number_of_another_slot_is_corrupt() {
        let guest = Guest::new();
        let mut reader = guest.reader();
        guest.call();
        let slot = guest.layout.slot_offset(CPU, 0);
        guest.window().write_obj(77_u32, slot + 28).unwrap();
        assert_eq!(guest.drain(&mut reader), [] as [u64; 0]);
        assert_eq!(
            reader.corrupt(),
            Some(&RingCorrupt::Sequence { cpu: CPU, index: 0, found: 77 })
        );
    }

    #[test]
    fn sequence_numbers_go_round_and_nothing_is_lost() {
        let guest = Guest::new();
        let begin = u64::from(u32::MAX) - 300;
        guest.window().write_obj(begin, guest.layout.header_offset(CPU)).unwrap();
        let mut reader = guest.reader();
        for lap in 0..6 {
            let slow = guest.reserve();
            let calls: Vec<u64> = (0..99).map(|_| guest.call()).collect();
            assert_eq!(guest.drain(&mut reader), calls, "lap {lap}");
            guest.fill(slow);
            assert_eq!(guest.drain(&mut reader), [slow], "lap {lap}");
        }
        assert_eq!((reader.lost(), reader.pending(), reader.corrupt()), (0, 0, None));
    }

    #[test]
    fn a_window_smaller_than_its_layout_is_an_error() {
        let guest = Guest::new();
        let window = guest.window().subslice(0, HEADERS as usize).unwrap();
        assert!(RingReader::new(&window, guest.layout, CPU, ByteOrder::Little).is_err());
    }

    #[test]
    fn the_rings_of_a_big_endian_guest_are_read_as_it_wrote_them() {
        let guest = Guest::new();
        let (window, layout) = (guest.window(), guest.layout);
        let mut reader = RingReader::new(&window, layout, CPU, ByteOrder::Big).unwrap();
        for index in 0..3_u64 {
            let slot = layout.slot_offset(CPU, index);
            window.write_obj((1000 + index).to_be(), slot).unwrap();
            window.write_obj(0x0010_0006_u32.to_be(), slot + 8).unwrap();
            window.write_obj(0x7fd0_1234_u32.to_be(), slot + 12).unwrap();
            window.write_obj(0x3ff_u32.to_be(), slot + 16).unwrap();
            window.write_obj(0x0300_0051_u32.to_be(), slot + 20).unwrap();
            window.write_obj(0x0001_0000_u32.to_be(), slot + 24).unwrap();
            window.write_obj(((index + 1) as u32).to_be(), slot + 28).unwrap();
        }
        window.write_obj(3_u64.to_be(), layout.header_offset(CPU)).unwrap();
        let mut records = Vec::new();
        reader.look(&window);
        assert!(reader.read(&window, &mut records, 50));
        let times: Vec<u64> = records.iter().map(|record| record.time).collect();
        assert_eq!(times, [1000, 1001, 1002]);
        let first = RawRecord {
            time: 1000,
            index: 0,
            cpu: 1,
            ip: 0x10_0006,
            parent: 0x3ff_7fd0_1234,
            task: [0x0300_0051, 0x0001_0000],
            arguments: None,
        };
        assert_eq!(records[0], first);
    }

    proptest! {
           #[test]
           fn whatever_a_guest_writes_the_reader_ends_and_reads_no_more_than_a_ring(
               head in any::<u64>(),
               writes in proptest::collection::vec((0..4096_usize / 8, any::<u64>()), 0..200),
               calls in 0..300_usize,
           ) {
               let guest = Guest::new();
               let mut reader = guest.reader();
               (0..calls).for_each(|_| {
    guest.call();
    });
               guest.window().write_obj(head, guest.layout.header_offset(CPU)).unwrap();
               for (word, value) in writes {
                   let at = guest.layout.slot_offset(CPU, 0) + word * 8;
                   guest.window().write_obj(value, at).unwrap();
               }
               prop_assert!(guest.drain(&mut reader).len() <= 128);
           }
       }
}
