//! Calls that have not returned, and those that never will.
//!
//! A call's slot is given back when the call returns. A task that ends leaves the calls behind that it
//! ended in, as does a function that never returns. Every word of every stack is looked at while the guest
//! stands: what no stack holds cannot be returned to any more. A task that has left all lists and still
//! waits for a CPU, to end, is not found so ([`stacks`](crate::stacks)); so a slot is given back only if it
//! was held by no stack some time before, too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Hooks;
use crate::kernel::{Comm, TaskLayout};
use crate::machine::{StopError, StopTimes};
use crate::region::{RETURN_SLOTS, RETURN_STUB_BYTES, RegionError, ReturnSlot};
use crate::stacks::{StackCheck, StackCheckError, StackError, Watched};

/// A call that has not returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outstanding {
    /// The function, as in the record of its call: the low half of the address behind its pad's
    /// instruction.
    pub function: u32,
    /// The number of the task that will return from it.
    pub pid: u32,
    /// The task's name.
    pub comm: Comm,
}

/// What looking at all stacks has come to.
#[derive(Debug, Clone, Default)]
pub struct Swept {
    /// The calls that have not returned, in no order.
    pub outstanding: Vec<Outstanding>,
    /// Calls that never will, whose slots are free again.
    pub freed: u32,
    /// Calls that no stack holds, and that were not freed yet.
    pub suspected: u32,
    /// The stop that it took.
    pub stop: StopTimes,
}

/// Which calls have not returned can't be told. The guest runs on, and nothing was freed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// It can't be told where tasks are.
    #[error(transparent)]
    Layout(#[from] StackCheckError),
    /// The stacks can't be looked at. It may be possible at another moment.
    #[error(transparent)]
    Stacks(#[from] StackError),
    /// The guest could not be stopped.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// The pool of slots can't be read or written.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// How long no stack holds a slot until it is given back.
const GRACE: Duration = Duration::from_secs(2);

/// How often it is looked whether slots run out.
const LOOK: Duration = Duration::from_secs(1);

/// What is remembered from one sweep to the next.
#[derive(Debug, Default)]
pub(super) struct Sweeper {
    layout: Option<TaskLayout>,
    /// Slots that no stack held, and since when.
    suspects: BTreeMap<u32, Instant>,
    looked: Option<Instant>,
}

impl Hooks<'_> {
    /// Sweeps if slots run out, and that was not done a moment ago; `None` if there is no need.
    ///
    /// # Errors
    /// [`SweepError`].
    pub fn tend_returns(&mut self, now: Instant) -> Option<Result<Swept, SweepError>> {
        self.chains.pool?;
        if self.sweeper.looked.is_some_and(|looked| now.saturating_duration_since(looked) < LOOK) {
            return None;
        }
        self.sweeper.looked = Some(now);
        let free = self.taken_returns()?.memory.free(self.machine.vcpus());
        (free < RETURN_SLOTS / 2).then(|| self.sweep_returns(now))
    }

    /// Tells which calls have not returned, and gives the slots back of those that never will. The guest
    /// stands meanwhile.
    ///
    /// # Errors
    /// [`SweepError`].
    pub fn sweep_returns(&mut self, now: Instant) -> Result<Swept, SweepError> {
        let Some(returns) = self.taken_returns() else { return Ok(Swept::default()) };
        let layout = match self.sweeper.layout.clone() {
            Some(layout) => layout,
            None => {
                let layout = self.kernel.task_layout(self.machine.ram());
                self.sweeper.layout.insert(layout.map_err(StackCheckError::from)?).clone()
            }
        };
        // Each stub is watched under the number of its slot.
        let stubs = returns.pool.stubs;
        let watched = (0..RETURN_SLOTS).map(|index| {
            let at = stubs + u64::from(index) * RETURN_STUB_BYTES;
            Watched { name: Arc::from(index.to_string()), code: at..at + RETURN_STUB_BYTES }
        });
        let check = StackCheck::with_layout(self.kernel, layout, watched.collect());
        let check = check.with_returns(self.taken_returns());

        let mut stopped = self.machine.stop()?;
        let standers = check.run(self.machine.ram(), &mut *stopped, self.machine.vcpus())?;
        let slots = returns.memory.all()?;
        let mut swept = Swept::default();
        let mut held = BTreeSet::new();
        for stander in standers {
            let Ok(index) = stander.function.parse::<u32>() else { continue };
            let slot = slots.get(index as usize).filter(|slot| slot.placed);
            if let Some(ReturnSlot { function, .. }) = slot
                && held.insert(index)
            {
                let (pid, comm) = (stander.pid, stander.comm);
                swept.outstanding.push(Outstanding { function: *function, pid, comm });
            }
        }
        let placed = (0..).zip(&slots).filter(|(_, slot)| slot.placed).map(|(index, _)| index);
        let unheld: BTreeSet<u32> = placed.filter(|index| !held.contains(index)).collect();
        self.sweeper.suspects.retain(|index, _| unheld.contains(index));
        for index in unheld {
            let since = *self.sweeper.suspects.entry(index).or_insert(now);
            if now.saturating_duration_since(since) < GRACE {
                swept.suspected += 1;
                continue;
            }
            returns.memory.give_back(index)?;
            self.sweeper.suspects.remove(&index);
            swept.freed += 1;
        }
        swept.stop = stopped.resume()?;
        Ok(swept)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;
    use crate::hook::{Method, Want};
    use crate::kernel::MappedRegion;
    use crate::machine::Machine;
    use crate::patch::Foreign;
    use crate::region::{Part, RETURN_POOL_OFFSET, RETURN_SLOT_BYTES, TakenReturns};
    use crate::synthetic::{Blueprint, Guest};

    /// The first slot, from the beginning of the data part.
    const SLOTS: usize = RETURN_POOL_OFFSET as usize + 0xa000;

    /// Has a call be out, as the guest's code would.
    fn call(guest: &Guest, index: u32, function: u32, returns_to: u64) {
        let data = guest.region(Part::Data).memory;
        let at = SLOTS + index as usize * RETURN_SLOT_BYTES as usize;
        data.write_obj(returns_to.to_le(), at).unwrap();
        data.write_obj(function.to_le(), at + 16).unwrap();
        data.write_obj(1_u32.to_le(), at + 28).unwrap();
    }

    fn stub(returns: &TakenReturns<'_>, index: u64) -> u64 {
        returns.pool.stubs.0 + index * RETURN_STUB_BYTES
    }

    #[test]
    fn calls_that_no_stack_holds_are_given_back_after_a_while_and_others_are_told() {
        let guest = Guest::new(&Blueprint::default());
        let kernel = guest.kernel();
        let region = MappedRegion::new(&guest, &kernel).unwrap();
        let mut hooks = Hooks::new(&guest, &kernel, &region);
        let begun = Instant::now();
        assert!(
            hooks.sweep_returns(begun).unwrap().outstanding.is_empty(),
            "nothing was ever taken"
        );
        assert!(hooks.tend_returns(begun).is_none());

        let site = hooks.pads().unwrap().sites[3].clone();
        let want = Want { traced: Some(Method::Call), returns: true, redirect: None };
        hooks.change(&[(&site, want)], Foreign::Refuse, &mut ()).unwrap();
        let returns = hooks.taken_returns().unwrap();
        // The first hundred are taken.
        let list = SLOTS - 0x9000;
        guest.region(Part::Data).memory.write_obj(101_u64.to_le(), list).unwrap();
        let inside = kernel.text().start.0 + 0x123;
        for (index, function, returns_to) in
            [(4, 11, inside), (5, 12, stub(&returns, 4)), (6, 13, inside), (7, 14, inside)]
        {
            call(&guest, index, function, returns_to);
        }
        // Of a function that was jumped to, which has taken the place of what jumped there; and an
        // address that the stub's own call has left.
        let task = guest.task("sleeper/3");
        guest.poke_u64(task.sp + 8, stub(&returns, 5));
        guest.poke_u64(guest.task("sleeper/1").sp, stub(&returns, 7) + 5);

        let swept = hooks.sweep_returns(begun).unwrap();
        let mut told: Vec<_> = swept.outstanding.iter().map(|o| (o.function, o.pid)).collect();
        told.sort_unstable();
        let other = guest.task("sleeper/1").pid;
        assert_eq!(told, [(11, task.pid), (12, task.pid), (14, other)]);
        assert_eq!((swept.freed, swept.suspected), (0, 1));
        assert_eq!(hooks.sweep_returns(begun + GRACE / 2).unwrap().freed, 0);
        let swept = hooks.sweep_returns(begun + GRACE).unwrap();
        assert_eq!((swept.freed, swept.suspected, swept.outstanding.len()), (1, 0, 3));
        assert!(!returns.memory.slot(6).placed && returns.memory.slot(5).placed);

        // There are enough free ones.
        assert!(hooks.tend_returns(begun).is_none());
        for index in 8..8 + RETURN_SLOTS / 2 {
            call(&guest, index, 15, inside);
        }
        guest.region(Part::Data).memory.write_obj(0_u64, list).unwrap();
        assert!(hooks.tend_returns(begun + LOOK / 2).is_none(), "it was looked a moment ago");
        let swept = hooks.tend_returns(begun + LOOK).unwrap().unwrap();
        assert_eq!(swept.suspected, RETURN_SLOTS / 2);
    }

    #[test]
    fn who_returns_to_a_function_by_a_stub_stands_in_it() {
        let guest = Guest::new(&Blueprint::default());
        let kernel = guest.kernel();
        let region = MappedRegion::new(&guest, &kernel).unwrap();
        let mut hooks = Hooks::new(&guest, &kernel, &region);
        let site = hooks.pads().unwrap().sites[3].clone();
        let want = Want { traced: Some(Method::Call), returns: true, redirect: None };
        hooks.change(&[(&site, want)], Foreign::Refuse, &mut ()).unwrap();
        let returns = hooks.taken_returns().unwrap();
        let code = kernel.text().start..kernel.text().start + 64;
        call(&guest, 9, 1, code.start.0 + 8);
        guest.poke_u64(guest.task("sleeper/2").sp, stub(&returns, 9));
        let watched = || vec![Watched { name: "first".into(), code: code.clone() }];
        let standers = |check: StackCheck<'_>| {
            let mut stopped = guest.stop().unwrap();
            check.run(&guest.ram, &mut *stopped, guest.vcpus()).unwrap()
        };
        let check = StackCheck::new(&kernel, &guest.ram, watched()).unwrap();
        assert_eq!(standers(check), []);
        let check = StackCheck::new(&kernel, &guest.ram, watched()).unwrap();
        let found = standers(check.with_returns(hooks.taken_returns()));
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].comm.to_string().as_str(), &*found[0].function),
            ("sleeper/2", "first")
        );
        // A ring of stubs ends, too.
        call(&guest, 9, 1, stub(&returns, 9));
        let check = StackCheck::new(&kernel, &guest.ram, watched()).unwrap();
        assert_eq!(standers(check.with_returns(hooks.taken_returns())), []);
    }

    #[test]
    fn a_later_process_goes_on_with_the_returns_that_an_earlier_one_has_taken() {
        let guest = Guest::new(&Blueprint::default());
        let kernel = guest.kernel();
        let region = MappedRegion::new(&guest, &kernel).unwrap();
        let want = Want { traced: Some(Method::Call), returns: true, redirect: None };
        let mut hooks = Hooks::new(&guest, &kernel, &region);
        let site = hooks.pads().unwrap().sites[3].clone();
        hooks.change(&[(&site, want)], Foreign::Refuse, &mut ()).unwrap();
        let stubs = hooks.taken_returns().unwrap().pool.stubs;
        drop(hooks);
        call(&guest, 9, 77, 0x1234);

        let mut hooks = Hooks::new(&guest, &kernel, &region);
        hooks.change(&[(&site, want)], Foreign::Refuse, &mut ()).unwrap();
        let returns = hooks.taken_returns().unwrap();
        assert_eq!(returns.pool.stubs, stubs);
        assert_eq!(returns.returns_to(stub(&returns, 9)), Some(0x1234), "it is still out");
        drop(hooks);

        // What is not there is not gone on with.
        let data = guest.region(Part::Data).memory;
        data.write_obj((stubs.0 + 8).to_le(), RETURN_POOL_OFFSET as usize + 8).unwrap();
        let mut hooks = Hooks::new(&guest, &kernel, &region);
        let error = hooks.change(&[(&site, want)], Foreign::Refuse, &mut ()).unwrap_err();
        assert!(error.to_string().contains("another edition of vmm"), "{error}");
        assert_eq!(hooks.pads().unwrap().sites[3], site);
    }
}
