//! Counting calls: which function has which counter, and the thunks that lead to the code that counts, or
//! to gates.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{HookError, Hooks};
use crate::addr::Gva;
use crate::arch::Thunks;
use crate::kernel::Site;
use crate::region::{
    COUNTERS, COUNTERS_OFFSET, Counters, Part, RegionError, THUNK_BLOCK_BYTES, THUNK_BLOCKS,
    read_counters,
};

/// The counters that functions have, and the thunks that there are. Neither is ever given to another
/// function: a task may be on its way through a thunk for as long as it likes.
#[derive(Debug, Default)]
pub(super) struct KnownThunks {
    /// By pad; the name tells functions apart that a module had there, and then another one.
    counters: BTreeMap<Gva, (Arc<str>, u32)>,
    pub(super) taken: u32,
    /// Thunks that were placed together: where, by what they lead to and by the first one's counter.
    placed: BTreeMap<(Gva, u32), Gva>,
}

impl Hooks<'_> {
    /// The number of the counter of the pad at `at`, if its function was ever counted.
    #[must_use]
    pub fn counter(&self, at: Gva) -> Option<u32> {
        self.chains.thunks.counters.get(&at).map(|(_, index)| *index)
    }

    /// What the counters are now, by number. One set of them is read at a glance; none of them is exact
    /// while the guest runs, and each is as soon as its function is at rest.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn read_counters(&self) -> Result<Vec<u64>, RegionError> {
        let data = self.machine.region(Part::Data).memory;
        read_counters(&data, self.kernel.arch().byte_order(), self.chains.thunks.taken)
    }

    /// Gives a function its counter, unless it has one.
    ///
    /// # Errors
    /// [`HookError::CountersFull`].
    pub fn take_counter(&mut self, site: &Site) -> Result<u32, HookError> {
        let known = &mut self.chains.thunks;
        if let Some((name, index)) = known.counters.get(&site.at)
            && **name == *site.name
        {
            return Ok(*index);
        }
        let index = known.taken;
        if index >= COUNTERS {
            return Err(HookError::CountersFull(site.name.clone()));
        }
        known.taken += 1;
        known.counters.insert(site.at, (Arc::from(&*site.name), index));
        Ok(index)
    }

    pub(super) fn counters(&self) -> Counters {
        Counters(self.region.range(Part::Data).start + COUNTERS_OFFSET)
    }

    /// Where the thunk of a function is that leads to the code at `counter`, to which those of others lead
    /// as well if it is `shared`.
    pub(super) fn thunk(
        &mut self,
        site: &Site,
        counter: Gva,
        shared: bool,
    ) -> Result<Gva, HookError> {
        let index = self.take_counter(site)?;
        let in_block = self.kernel.arch().thunk_shape().in_block;
        let together = if shared { in_block * THUNK_BLOCKS } else { in_block };
        let first = index / together * together;
        // The last ones are of no counters that there are.
        let blocks = together.min(COUNTERS - first).div_ceil(in_block);
        self.thunk_in(Together { to: counter, first, stride: 1, blocks }, index - first)
    }

    /// Where the thunk of that number is among those that are placed together, which is done if it was not
    /// done before.
    pub(super) fn thunk_in(&mut self, together: Together, number: u32) -> Result<Gva, HookError> {
        let Together { to, first, stride, blocks } = together;
        let arch = self.kernel.arch();
        let shape = arch.thunk_shape();
        let at = match self.chains.thunks.placed.get(&(to, first)) {
            Some(at) => *at,
            None => {
                let counters = self.counters();
                let at = self.place(|at| {
                    let block = |block: u32| {
                        let first = first + block * shape.in_block * stride;
                        let at = at + u64::from(block) * THUNK_BLOCK_BYTES;
                        arch.assemble_thunks(at, &Thunks { counters, first, stride, to })
                    };
                    let blocks = (0..blocks).map(block).collect::<Result<Vec<_>, _>>()?;
                    Ok(blocks.concat())
                })?;
                self.chains.thunks.placed.insert((to, first), at);
                at
            }
        };
        let (block, within) = (number / shape.in_block, number % shape.in_block);
        Ok(at + u64::from(block) * THUNK_BLOCK_BYTES + u64::from(within) * shape.bytes)
    }
}

/// Thunks that are placed together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Together {
    /// Where they lead to.
    pub to: Gva,
    /// The first one's counter, and how far the others' are from each other.
    pub first: u32,
    pub stride: u32,
    pub blocks: u32,
}
