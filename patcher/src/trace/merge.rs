//! Brings the records of all CPUs into one order of time.
//!
//! A record's slot is reserved before its time is read. So whatever was reserved after a look at the
//! heads has a later time than every record that had been *read* before that look. One pass of a
//! reader, over all rings, is: look at every head, then read. With `seen[k]` the latest time that
//! pass `k` or one before it read, all records up to `seen[k - 1]` have been read when pass `k` is
//! complete, but for those that were reserved and not yet written. Such a one, first met in pass
//! `p`, was reserved after the look of pass `p - 1` and is later than `seen[p - 2]`: nothing later
//! than that is given out before it has been read, or its patience is at an end.

use std::time::{Duration, Instant};

use super::ring::RawRecord;

/// Merges by time.
#[derive(Debug, Default)]
pub struct Merger {
    held: Vec<RawRecord>,
    /// `seen` of this pass and the two before it, latest first.
    seen: [u64; 3],
    /// Nothing later than this is given out while a slot is pending, and since when one is.
    hold: Option<(u64, Instant)>,
}

/// For how long later records wait for one that is reserved and not written. Its writer was preempted
/// within a few instructions; a guest that keeps a task off the CPU for longer than this gets its
/// record out of order, and it is counted.
const PATIENCE: Duration = Duration::from_secs(1);

/// Records held back at most, whatever they wait for: 128 MiB.
const MAX_HELD: usize = 4 << 20;

impl Merger {
    /// Room for the records of the pass that begins.
    pub fn incoming(&mut self) -> &mut Vec<RawRecord> {
        &mut self.held
    }

    /// Ends a pass: all rings were read up to the heads that it began with, and `pending` slots are
    /// reserved and not written. Gives out what no later record can precede, in order of time. `now`
    /// is when the pass ends.
    pub fn pass(&mut self, pending: usize, now: Instant, mut out: impl FnMut(&RawRecord)) {
        let latest = self.held.iter().map(|record| record.time).max().unwrap_or(0);
        self.seen = [latest.max(self.seen[0]), self.seen[0], self.seen[1]];
        self.hold = match pending {
            0 => None,
            _ => self.hold.or(Some((self.seen[2], now))),
        };
        let until = match self.hold {
            Some((until, since)) if now - since <= PATIENCE && self.held.len() <= MAX_HELD => until,
            _ => self.seen[1],
        };
        self.give_out(until, &mut out);
    }

    /// The records that are held back, in no order.
    #[must_use]
    pub fn held(&self) -> &[RawRecord] {
        &self.held
    }

    fn give_out(&mut self, until: u64, out: &mut impl FnMut(&RawRecord)) {
        // Stable, so that records of one time stay in the order of their ring; nearly sorted runs,
        // which the sort takes in one go each.
        self.held.sort_by_key(|record| record.time);
        let count = self.held.partition_point(|record| record.time <= until);
        self.held.drain(..count).for_each(|record| out(&record));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(time: u64, cpu: u16) -> RawRecord {
        RawRecord { time, index: 0, cpu, ip: 0, parent: 0, task: [0; 2], arguments: None }
    }

    fn pass(merger: &mut Merger, records: &[(u64, u16)], pending: usize) -> Vec<u64> {
        pass_at(merger, records, pending, Instant::now())
    }

    fn pass_at(
        merger: &mut Merger,
        records: &[(u64, u16)],
        pending: usize,
        now: Instant,
    ) -> Vec<u64> {
        merger.incoming().extend(records.iter().map(|(time, cpu)| record(*time, *cpu)));
        let mut out = Vec::new();
        merger.pass(pending, now, |record| out.push(record.time));
        out
    }

    #[test]
    fn what_another_cpu_might_still_precede_is_held_back() {
        let mut merger = Merger::default();
        assert_eq!(pass(&mut merger, &[(10, 0), (20, 0)], 0), [] as [u64; 0]);
        assert_eq!(pass(&mut merger, &[(15, 1), (30, 0)], 0), [10, 15, 20]);
        assert_eq!(pass(&mut merger, &[], 0), [30]);
        assert_eq!(merger.held(), []);
    }

    #[test]
    fn records_wait_for_one_that_is_not_written_yet() {
        let mut merger = Merger::default();
        pass(&mut merger, &[(10, 0)], 0);
        assert_eq!(pass(&mut merger, &[(20, 0)], 0), [10]);
        assert_eq!(pass(&mut merger, &[(30, 0)], 1), [] as [u64; 0]);
        assert_eq!(pass(&mut merger, &[(40, 0)], 1), [] as [u64; 0]);
        assert_eq!(pass(&mut merger, &[(12, 1), (50, 0)], 0), [12, 20, 30, 40]);
        assert_eq!(merger.held(), [record(50, 0)]);
    }

    #[test]
    fn a_writer_that_never_comes_does_not_hold_the_trace_for_ever() {
        let mut merger = Merger::default();
        let begin = Instant::now();
        pass_at(&mut merger, &[(10, 0)], 1, begin);
        for _ in 0..1000 {
            assert_eq!(pass_at(&mut merger, &[], 1, begin + PATIENCE), [] as [u64; 0]);
        }
        assert_eq!(pass_at(&mut merger, &[], 1, begin + 2 * PATIENCE), [10]);
        assert_eq!(pass(&mut merger, &[(5, 1)], 0), [5], "late, and not kept for ever");
    }
}
