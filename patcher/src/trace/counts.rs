//! Calls that the guest has counted by itself, for one client.

use crate::hook::{HookError, Hooks};
use crate::kernel::Site;
use crate::region::RegionError;

/// A function and how often it was called since its counting began.
#[derive(Debug)]
struct Counted {
    /// Its index among the functions that are traced.
    function: u32,
    /// Its counter.
    counter: u32,
    /// What that was when it was last looked at.
    seen: u64,
    calls: u64,
    /// Calls that were told.
    told: u64,
}

/// What a client has counted.
#[derive(Debug, Default)]
pub(super) struct Counts {
    counted: Vec<Counted>,
    /// How often a counter was lower than before.
    set_back: u64,
    ended: bool,
}

impl Counts {
    /// Counts these functions, each with its index, from now on. To be made before they are armed: so
    /// that no call is missed of those that nobody has counted yet.
    pub fn new(
        hooks: &mut Hooks<'_>,
        functions: impl Iterator<Item = (u32, Site)>,
    ) -> Result<Self, HookError> {
        let mut counters = Vec::new();
        for (function, site) in functions {
            counters.push((function, hooks.take_counter(&site)?));
        }
        let mut counts = Self::default();
        counts.add(hooks, counters)?;
        Ok(counts)
    }

    /// Counts, from now on, what these counters count of functions with these indices.
    pub fn add(&mut self, hooks: &Hooks<'_>, counters: Vec<(u32, u32)>) -> Result<(), RegionError> {
        let values = hooks.read_counters()?;
        self.counted.extend(counters.into_iter().map(|(function, counter)| {
            let seen = values.get(counter as usize).copied().unwrap_or(0);
            Counted { function, counter, seen, calls: 0, told: 0 }
        }));
        Ok(())
    }

    /// Looks at the counters, unless the counting has ended.
    pub fn look(&mut self, hooks: &Hooks<'_>) -> Result<(), RegionError> {
        if !self.ended {
            self.take(&hooks.read_counters()?);
        }
        Ok(())
    }

    fn take(&mut self, counters: &[u64]) {
        for counted in &mut self.counted {
            let Some(now) = counters.get(counted.counter as usize) else { continue };
            match now.checked_sub(counted.seen) {
                Some(more) => counted.calls = counted.calls.saturating_add(more),
                None => self.set_back += 1,
            }
            counted.seen = *now;
        }
    }

    /// What comes from now on is no longer its own.
    pub fn end(&mut self, hooks: &Hooks<'_>) -> Result<(), RegionError> {
        let looked = self.look(hooks);
        self.ended = true;
        looked
    }

    /// The functions that were called since this was last asked, and how often since the beginning.
    pub fn news(&mut self) -> Vec<(u32, u64)> {
        let mut news = Vec::new();
        for counted in &mut self.counted {
            if counted.calls != counted.told {
                counted.told = counted.calls;
                news.push((counted.function, counted.calls));
            }
        }
        news
    }

    /// Calls of all functions together.
    pub fn sum(&self) -> u64 {
        self.counted.iter().fold(0, |sum, counted| sum.saturating_add(counted.calls))
    }

    /// Calls by function of those that were called.
    pub fn calls(&self) -> impl Iterator<Item = (usize, u64)> {
        let called = self.counted.iter().filter(|counted| counted.calls > 0);
        called.map(|counted| (counted.function as usize, counted.calls))
    }

    /// How often a counter was found lower than before, which only the guest can have done.
    pub fn set_back(&self) -> u64 {
        self.set_back
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_rises_is_counted_and_what_falls_is_told() {
        let counted =
            |function, counter| Counted { function, counter, seen: 10, calls: 0, told: 0 };
        let mut counts = Counts {
            counted: vec![counted(7, 1), counted(9, 0), counted(3, 5)],
            ..Counts::default()
        };
        counts.take(&[10, 13]);
        assert_eq!(counts.news(), [(7, 3)]);
        assert_eq!(counts.news(), []);
        // Set back by the guest, and then as high as it goes.
        counts.take(&[4, 14]);
        counts.take(&[u64::MAX, 14]);
        assert_eq!(counts.news(), [(7, 4), (9, u64::MAX - 4)]);
        assert_eq!((counts.sum(), counts.set_back()), (u64::MAX, 1));
        assert_eq!(counts.calls().collect::<Vec<_>>(), [(7, 4), (9, u64::MAX - 4)]);
    }
}
