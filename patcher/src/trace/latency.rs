//! How long calls took, which the guest has added up by itself, for one client.

use crate::hook::{HookError, Hooks};
use crate::kernel::Site;
use crate::region::{Histogram, RegionError};

/// A function and how long its calls took since its measuring began.
#[derive(Debug)]
struct Measured {
    /// Its index among the functions that are traced.
    function: u32,
    /// The number of its histogram.
    histogram: u16,
    /// What that was when it was last looked at.
    seen: Histogram,
    taken: Histogram,
    /// How many calls were told.
    told: u64,
    /// Calls that were made and had not returned when it ended.
    out: u64,
}

/// What a client has measured.
#[derive(Debug, Default)]
pub(super) struct Latencies {
    measured: Vec<Measured>,
    /// How often a part of a histogram was lower than before.
    set_back: u64,
    ended: bool,
}

impl Latencies {
    /// Measures these functions, of which the indices are told as well, from now on. To be made before they are armed: so
    /// that no call is missed of those that nobody has measured yet.
    pub fn new(
        hooks: &mut Hooks<'_>,
        (functions, sites): (impl Iterator<Item = u32>, &[Site]),
    ) -> Result<Self, HookError> {
        let histograms = hooks.take_histograms(sites.iter())?;
        let now = hooks.read_histograms()?;
        let begin = |(function, histogram)| {
            let seen = of(&now, histogram).unwrap_or_default();
            Measured { function, histogram, seen, taken: Histogram::default(), told: 0, out: 0 }
        };
        let measured = functions.zip(histograms).map(begin).collect();
        Ok(Self { measured, set_back: 0, ended: false })
    }

    /// Looks at the histograms, unless the measuring has ended.
    pub fn look(&mut self, hooks: &Hooks<'_>) -> Result<(), RegionError> {
        if !self.ended {
            self.take(&hooks.read_histograms()?);
        }
        Ok(())
    }

    fn take(&mut self, histograms: &[Histogram]) {
        for measured in &mut self.measured {
            let Some(now) = of(histograms, measured.histogram) else { continue };
            let Measured { seen, taken, .. } = measured;
            let sums = taken.buckets.iter_mut().zip(seen.buckets).zip(now.buckets);
            let total = ((&mut taken.total_ns, seen.total_ns), now.total_ns);
            for ((sum, seen), now) in sums.chain([total]) {
                match now.checked_sub(seen) {
                    Some(more) => *sum = sum.saturating_add(more),
                    None => self.set_back += 1,
                }
            }
            *seen = now;
        }
    }

    /// What comes from now on is no longer its own.
    pub fn end(&mut self, hooks: &Hooks<'_>) -> Result<(), RegionError> {
        let looked = self.look(hooks);
        self.ended = true;
        let out = hooks.measured_calls_out()?;
        for measured in &mut self.measured {
            measured.out = out.get(&measured.histogram).copied().unwrap_or(0);
        }
        looked
    }

    /// The functions of which calls have returned since this was last asked, and how long all took since the
    /// beginning.
    pub fn news(&mut self) -> Vec<(u32, Histogram)> {
        let mut news = Vec::new();
        for measured in &mut self.measured {
            let calls = measured.taken.calls();
            if calls != measured.told {
                measured.told = calls;
                news.push((measured.function, measured.taken));
            }
        }
        news
    }

    /// Calls of all functions together.
    pub fn sum(&self) -> u64 {
        self.measured.iter().fold(0, |sum, one| sum.saturating_add(one.taken.calls()))
    }

    /// Calls by function of those that were called.
    pub fn calls(&self) -> impl Iterator<Item = (usize, u64)> {
        let calls = self.measured.iter().map(|one| (one.function as usize, one.taken.calls()));
        calls.filter(|(_, calls)| *calls > 0)
    }

    /// Calls that were made and had not returned when it ended, by function.
    pub fn outstanding(&self) -> impl Iterator<Item = (usize, u64)> {
        let out = self.measured.iter().map(|one| (one.function as usize, one.out));
        out.filter(|(_, calls)| *calls > 0)
    }

    /// How often a part of a histogram was found lower than before, which only the guest can have done.
    pub fn set_back(&self) -> u64 {
        self.set_back
    }
}

/// The histogram of that number.
fn of(histograms: &[Histogram], number: u16) -> Option<Histogram> {
    histograms.get(usize::from(number.checked_sub(1)?)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(bucket: usize, calls: u64, total_ns: u64) -> Histogram {
        let mut histogram = Histogram { total_ns, ..Histogram::default() };
        histogram.buckets[bucket] = calls;
        histogram
    }

    #[test]
    fn only_what_rises_is_taken_and_what_falls_is_told() {
        let measured = |function, histogram| Measured {
            function,
            histogram,
            seen: Histogram::default(),
            taken: Histogram::default(),
            told: 0,
            out: u64::from(function),
        };
        let mut latencies = Latencies {
            measured: vec![measured(7, 2), measured(9, 1), measured(3, 5)],
            ..Latencies::default()
        };
        latencies.take(&[Histogram::default(), histogram(10, 3, 4000)]);
        assert_eq!(latencies.news(), [(7, histogram(10, 3, 4000))]);
        assert_eq!(latencies.news(), []);
        // Set back by the guest, and then as high as it goes.
        latencies.take(&[histogram(0, 1, 1), histogram(10, 2, 5000)]);
        latencies.take(&[histogram(0, 1, 1), histogram(10, u64::MAX, 5000)]);
        assert_eq!(latencies.news(), [(7, histogram(10, u64::MAX, 5000)), (9, histogram(0, 1, 1))]);
        assert_eq!((latencies.sum(), latencies.set_back()), (u64::MAX, 1));
        assert_eq!(latencies.calls().collect::<Vec<_>>(), [(7, u64::MAX), (9, 1)]);
        assert_eq!(latencies.outstanding().collect::<Vec<_>>(), [(7, 7), (9, 9), (3, 3)]);
    }
}
