//! Measuring calls: which function has which histogram.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{HookError, Hooks};
use crate::addr::Gva;
use crate::kernel::Site;
use crate::region::{
    HISTOGRAMS, HISTOGRAMS_OFFSET, Histogram, Histograms, HistogramsMemory, Part, RegionError,
};

/// The histograms that functions have. None is ever given to another function: a call may be out for as
/// long as it likes, and is added to the one that was its function's when it was made.
#[derive(Debug, Default)]
pub(super) struct KnownHistograms {
    /// By pad; the name tells functions apart that a module had there, and then another one.
    numbers: BTreeMap<Gva, (Arc<str>, u16)>,
    /// The highest number that was given.
    taken: u16,
    /// What calls are still out for that an earlier process has seen; known once one is given.
    earlier: Option<BTreeSet<u16>>,
}

impl KnownHistograms {
    /// That of a function.
    pub fn of(&self, site: &Site) -> Option<u16> {
        let known = self.numbers.get(&site.at).filter(|(name, _)| **name == *site.name);
        known.map(|(_, number)| *number)
    }

    /// Those that are no function's yet.
    fn free(&self) -> impl Iterator<Item = u16> {
        let numbers = self.taken + 1..=HISTOGRAMS;
        numbers.filter(|number| !self.earlier.iter().flatten().any(|taken| taken == number))
    }
}

impl Hooks<'_> {
    /// The number of the histogram of the pad at `at`, if its function was ever measured.
    #[must_use]
    pub fn histogram(&self, at: Gva) -> Option<u16> {
        self.chains.histograms.numbers.get(&at).map(|(_, number)| *number)
    }

    /// What the histograms hold now, in the order of their numbers, from 1 on. None of them is exact while
    /// the guest runs, and each is as soon as its function is at rest.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn read_histograms(&self) -> Result<Vec<Histogram>, RegionError> {
        self.histograms_memory().read(self.chains.histograms.taken)
    }

    /// How many calls are out that are going to be added to each histogram, by its number.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn measured_calls_out(&self) -> Result<BTreeMap<u16, u64>, RegionError> {
        let mut out = BTreeMap::new();
        let Some(returns) = self.taken_returns() else { return Ok(out) };
        for slot in returns.memory.all()? {
            if let Some(number) = slot.histogram() {
                *out.entry(number).or_insert(0) += 1;
            }
        }
        Ok(out)
    }

    /// Gives functions their histograms, unless they have them, and tells which; all of them or none.
    ///
    /// # Errors
    /// [`HookError::HistogramsFull`], or the region can't be read or written.
    pub fn take_histograms<'s>(
        &mut self,
        sites: impl Iterator<Item = &'s Site> + Clone,
    ) -> Result<Vec<u16>, HookError> {
        if self.chains.histograms.earlier.is_none() {
            let earlier = self.measured_calls_out()?.into_keys().collect();
            self.histograms_memory().set_clock(self.machine.clock_hz())?;
            self.chains.histograms.earlier = Some(earlier);
        }
        let known = &mut self.chains.histograms;
        let wanted = sites.clone().filter(|site| known.of(site).is_none()).count();
        let left = known.free().count();
        if wanted > left {
            return Err(HookError::HistogramsFull { wanted, left });
        }
        let mut numbers = Vec::new();
        for site in sites {
            let free = known.free().next();
            let number = known.of(site).or(free).unwrap_or_default();
            known.taken = known.taken.max(number);
            known.numbers.insert(site.at, (Arc::from(&*site.name), number));
            numbers.push(number);
        }
        Ok(numbers)
    }

    /// Where the guest sees the histograms.
    pub(super) fn histograms(&self) -> Histograms {
        Histograms(self.region.range(Part::Data).start + HISTOGRAMS_OFFSET)
    }

    fn histograms_memory(&self) -> HistogramsMemory<'_> {
        let data = self.machine.region(Part::Data).memory;
        HistogramsMemory::new(data, self.kernel.arch().byte_order())
    }
}
