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

    /// Gives a function its histogram, unless it has one.
    ///
    /// # Errors
    /// [`HookError::HistogramsFull`], or the region can't be read or written.
    pub fn take_histogram(&mut self, site: &Site) -> Result<u16, HookError> {
        if let Some((name, number)) = self.chains.histograms.numbers.get(&site.at)
            && **name == *site.name
        {
            return Ok(*number);
        }
        if self.chains.histograms.earlier.is_none() {
            let earlier = self.measured_calls_out()?.into_keys().collect();
            self.histograms_memory().set_clock(self.machine.clock_hz())?;
            self.chains.histograms.earlier = Some(earlier);
        }
        let known = &mut self.chains.histograms;
        let is_free = |number: &u16| !known.earlier.iter().flatten().any(|taken| taken == number);
        let number = (known.taken + 1..=HISTOGRAMS).find(is_free);
        let number = number.ok_or_else(|| HookError::HistogramsFull(site.name.clone()))?;
        known.taken = number;
        known.numbers.insert(site.at, (Arc::from(&*site.name), number));
        Ok(number)
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
