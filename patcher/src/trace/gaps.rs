//! Where in a trace events are missing.

use std::collections::VecDeque;

/// Pieces of a ring that are remembered apart from each other; more are taken for one.
const MAX_PIECES: usize = 1024;

/// What is missing in a trace, in front of events of one CPU that are still to come.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    /// Where in the ring pieces end, and how many records each had.
    lost: VecDeque<(u64, u64)>,
    /// Events that are missing in front of the next.
    due: u64,
}

impl Gaps {
    /// Takes note of records that were lost in front of the one with the index `end`.
    pub fn lost(&mut self, end: u64, count: u64) {
        let is_full = self.lost.len() >= MAX_PIECES;
        match self.lost.back_mut().filter(|_| is_full) {
            Some((last, sum)) => (*last, *sum) = (end.max(*last), *sum + count),
            None => self.lost.push_back((end, count)),
        }
    }

    /// How many events are missing in front of the record with that index.
    pub fn before(&mut self, index: u64) -> u64 {
        while let Some((_, count)) = self.lost.front().filter(|(end, _)| *end <= index) {
            self.due += count;
            self.lost.pop_front();
        }
        self.due
    }

    /// That event was given out, with what is missing in front of it, or is missing itself.
    pub fn settle(&mut self, is_given: bool) {
        self.due = if is_given { 0 } else { self.due + 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lost_is_missing_in_front_of_the_next_record_behind_it() {
        let mut gaps = Gaps::default();
        gaps.lost(10, 4);
        gaps.lost(20, 1);
        assert_eq!(gaps.before(5), 0);
        gaps.settle(true);
        assert_eq!(gaps.before(10), 4);
        gaps.settle(true);
        assert_eq!(gaps.before(11), 0);
        gaps.settle(true);
        assert_eq!(gaps.before(30), 1);
    }

    #[test]
    fn what_nobody_took_is_missing_in_front_of_what_somebody_takes() {
        let mut gaps = Gaps::default();
        gaps.lost(1, 2);
        assert_eq!(gaps.before(1), 2);
        gaps.settle(false);
        assert_eq!(gaps.before(2), 3);
        gaps.settle(false);
        assert_eq!(gaps.before(3), 4);
        gaps.settle(true);
        assert_eq!(gaps.before(4), 0);
    }

    #[test]
    fn nothing_is_forgotten_however_many_pieces_there_are() {
        let mut gaps = Gaps::default();
        (1..5000).for_each(|end| gaps.lost(end, 1));
        assert!(gaps.lost.len() <= MAX_PIECES);
        assert_eq!(gaps.before(5000), 4999);
    }
}
