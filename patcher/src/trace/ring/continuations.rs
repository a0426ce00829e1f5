//! Slots that hold more of a record: the arguments of a call.
//!
//! A record and what there is more of it are reserved at once, and are in consecutive slots. The record's own
//! is written last. So where it is found, what follows it is either its own and complete, or belongs to
//! another record, which does not say that it is there for more of this one.
//!
//! Slots are what is numbered and what can be lost, and calls are what is to be counted. The guest counts the
//! slots that are there for more: what it has counted and nobody has read was lost, or was not read yet.

use std::ops::Range;

use super::{RingMemory, RingReader};
use crate::arch::CONTINUATION_FIELDS;
use crate::region::{CONTINUATION_WORDS, MAX_CONTINUATIONS};

/// Words of a call's arguments, as they were recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedWords {
    words: [u64; CONTINUATION_WORDS * MAX_CONTINUATIONS],
    slots: usize,
}

impl RecordedWords {
    /// The words; behind those that mean something there may be others.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words[..self.slots * CONTINUATION_WORDS]
    }
}

/// The how-manieth slot of a record it is that says this in place of a function; `None` if it is the first.
pub(super) fn number(ip: u32) -> Option<usize> {
    let number = ip as usize;
    (1..=MAX_CONTINUATIONS).contains(&number).then_some(number)
}

impl RingReader {
    /// What there is more of the record with that index, whose own slot was found complete.
    pub(super) fn more(&self, memory: &RingMemory<'_>, index: u64) -> Option<Box<RecordedWords>> {
        let mut found: Option<Box<RecordedWords>> = None;
        for slot in 0..MAX_CONTINUATIONS {
            let index = index + 1 + slot as u64;
            let offset = self.layout.slot_offset(self.cpu, index);
            let is_next = number(memory.word(offset + 8)) == Some(slot + 1)
                && memory.sequence(offset) == (index + 1) as u32
                && !self.is_tainted(index);
            if !is_next {
                break;
            }
            let none = RecordedWords { words: Default::default(), slots: 0 };
            let found = found.get_or_insert_with(|| Box::new(none));
            let into = found.words[slot * CONTINUATION_WORDS..].iter_mut();
            for (word, field) in into.zip(CONTINUATION_FIELDS) {
                *word = memory.long(offset + usize::from(field));
            }
            found.slots = slot + 1;
        }
        found
    }

    /// How many slots the guest had reserved for more of records, at the last [`RingReader::look`].
    #[must_use]
    pub fn continuations(&self) -> u64 {
        self.continuations
    }

    /// The indices of the slots for more of records that were found since the last [`RingReader::look`].
    #[must_use]
    pub fn continuations_read(&self) -> &[Range<u64>] {
        &self.continuations_read
    }

    /// Takes note of such a slot.
    pub(super) fn note_continuation(&mut self, index: u64) {
        match self.continuations_read.last_mut() {
            Some(last) if last.end == index => last.end += 1,
            _ => self.continuations_read.push(index..index + 1),
        }
    }
}
