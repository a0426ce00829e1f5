//! The stops of patches: applying one, reverting one, and finding memory that nobody is in.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::check::{Check, Found, TRAMPOLINE};
use super::prepare::{Function, Room};
use super::{
    AppliedPatch, Attempt, Patch, PatchError, PatchId, PatchInfo, PatchState, Patches, Pending,
    Retired, RevertAttempt, RevertedPatch, watched_room,
};
use crate::addr::Gva;
use crate::hook::{HookError, Hooks, Want};
use crate::kernel::Site;
use crate::patch::{ApplyError, Foreign};
use crate::stacks::{StackError, Watched};

/// How often a stop is tried again because the guest was just changing its lists of tasks.
const TRIES: u32 = 5;

/// How long a try waits before the next.
const BACKOFF: Duration = Duration::from_millis(2);

impl<'m> Patches<'m> {
    /// Tries once to apply a patch, all of its functions or none.
    ///
    /// # Errors
    /// [`PatchError`]; nothing is left of the patch.
    pub fn attempt(
        &mut self,
        hooks: &mut Hooks<'m>,
        pending: Pending<'m>,
    ) -> Result<Attempt<'m>, PatchError> {
        let id = PatchId(self.last_id + 1);
        let dropped = if pending.replace { self.only_below(&pending) } else { Vec::new() };
        let redirect =
            |function: &Function, to| Want { redirect: to, ..hooks.want(function.site.at) };
        let new = pending.functions.iter().map(|f| (&f.site, redirect(f, Some(f.new))));
        let old = dropped.iter().map(|f| (&f.site, redirect(f, None)));
        let wants: Vec<(&Site, Want)> = new.chain(old).collect();

        let stacks = match pending.is_consistent {
            true => {
                let functions = pending.functions.iter().chain(&dropped);
                let watched = self.watched_functions(hooks, functions);
                Some(self.stack_check(hooks, watched)?)
            }
            false => None,
        };
        let text = pending.writes();
        let mut tries = 0;
        let changed = loop {
            tries += 1;
            let mut check = Check {
                machine: hooks.machine(),
                stacks: stacks.as_ref(),
                trampolines: trampolines(hooks),
                is_strict: pending.is_consistent,
                max_stop: pending.max_stop,
                text: &text,
                found: Found::Nothing,
            };
            let error = match hooks.change(&wants, Foreign::Refuse, &mut check) {
                Ok(changed) => break changed,
                Err(error) => error,
            };
            match (error, check.found) {
                (HookError::HeldBack, Found::Standers(standers)) => {
                    return Ok(Attempt::Busy(Box::new(pending), standers));
                }
                (HookError::HeldBack, Found::Wrong(error))
                    if is_passing(&error) && tries < TRIES =>
                {
                    std::thread::sleep(BACKOFF * tries);
                }
                (HookError::HeldBack, Found::Wrong(error)) => return Err(error),
                (error, _) => {
                    return Err(self.failed(id, pending, error));
                }
            }
        };
        let stop = changed.stops.last().copied().unwrap_or_default();
        let functions = pending.functions.len();
        let replaced = if pending.replace { self.retire_all(id) } else { Vec::new() };
        let Pending { functions: list, mut room, is_consistent, digest, prepared, .. } = pending;
        room.keep();
        self.last_id = id.0;
        self.active.push(Patch {
            id,
            functions: list,
            room,
            is_consistent,
            digest,
            applied: prepared,
            stop,
        });
        Ok(Attempt::Applied(AppliedPatch {
            id,
            functions,
            replaced,
            stop,
            verify: changed.verify,
            write: changed.write,
        }))
    }

    /// What is to become of a payload's memory when its pads could not be changed.
    fn failed(&mut self, id: PatchId, mut pending: Pending<'m>, error: HookError) -> PatchError {
        match &error {
            // Some pad may lead there.
            HookError::Apply(ApplyError::Torn { .. }) => pending.room.keep(),
            HookError::OtherKernel => self.forget(),
            // For a moment it may have.
            HookError::Undone(_) => {
                pending.room.keep();
                self.last_id = id.0;
                self.retired.push(Retired { id, room: pending.room });
            }
            _ => {}
        }
        error.into()
    }

    /// Tries once to revert a patch: the functions of it that are in force give way to those of the next
    /// patch below, or to the kernel's own. Those that the guest has written over are left alone.
    ///
    /// # Errors
    /// [`PatchError`]; the patch is applied as before.
    pub fn revert(
        &mut self,
        hooks: &mut Hooks<'m>,
        id: PatchId,
        max_stop: Option<Duration>,
    ) -> Result<RevertAttempt, PatchError> {
        let index = self.find(id)?;
        let is_consistent = self.active[index].is_consistent;
        let watched = watched_room(hooks, id, &self.active[index].room);
        let stacks = match self.stack_check(hooks, watched) {
            Ok(stacks) => Some(stacks),
            Err(error) if is_consistent => return Err(error),
            // Then nobody can tell when its memory is free.
            Err(_) => None,
        };
        let patch = &self.active[index];
        let mine = patch.functions.iter().filter(|function| {
            self.top(function.site.at, None).is_some_and(|(top, _)| top.id == id)
        });
        let wants: Vec<(&Site, Want)> = mine
            .map(|function| {
                let pad = function.site.at;
                let redirect = self.top(pad, Some(id)).map(|(_, below)| below.new);
                (&function.site, Want { redirect, ..hooks.want(pad) })
            })
            .collect();
        let mut tries = 0;
        let (changed, found) = loop {
            tries += 1;
            let mut check = Check {
                machine: hooks.machine(),
                stacks: stacks.as_ref(),
                trampolines: trampolines(hooks),
                is_strict: is_consistent,
                max_stop,
                text: &[],
                found: Found::Nothing,
            };
            let error = match hooks.change(&wants, Foreign::Leave, &mut check) {
                Ok(changed) => break (changed, check.found),
                Err(error) => error,
            };
            match (error, check.found) {
                (HookError::HeldBack, Found::Standers(standers)) => {
                    return Ok(RevertAttempt::Busy(standers));
                }
                (HookError::HeldBack, Found::Wrong(error))
                    if is_passing(&error) && tries < TRIES =>
                {
                    std::thread::sleep(BACKOFF * tries);
                }
                (HookError::HeldBack, Found::Wrong(error)) => return Err(error),
                (error, _) => return Err(error.into()),
            }
        };
        let functions = patch.functions.len();
        if changed.gone {
            self.forget();
        } else {
            let patch = self.end(index, PatchState::Reverted);
            match found {
                Found::Clear if stacks.is_some() => patch.room.give_up(),
                _ => self.retired.push(Retired { id, room: patch.room }),
            }
        }
        Ok(RevertAttempt::Reverted(RevertedPatch {
            id,
            functions,
            foreign: changed.foreign.into_iter().map(|left| left.function).collect(),
            is_gone: changed.gone,
            stop: changed.stops.last().copied(),
        }))
    }

    /// Gives up the memory of patches that are no more if nobody is in it, in a stop of its own; there is
    /// none if there is no such memory.
    pub fn collect(&mut self, hooks: &Hooks<'m>) {
        if self.retired.is_empty() || !hooks.kernel().is_current(hooks.machine().ram()) {
            return;
        }
        let watched = self.retired.iter().flat_map(|old| watched_room(hooks, old.id, &old.room));
        let watched = watched.collect();
        // What can't be told now is asked again with the next.
        let Ok(stacks) = self.stack_check(hooks, watched) else { return };
        let machine = hooks.machine();
        let Ok(mut stopped) = machine.stop() else { return };
        let check = Check {
            machine,
            stacks: Some(&stacks),
            trampolines: trampolines(hooks),
            is_strict: false,
            max_stop: None,
            text: &[],
            found: Found::Nothing,
        };
        let standers = check.standers(&mut *stopped);
        let resumed = stopped.resume();
        let (Ok(standers), Ok(_)) = (standers, resumed) else { return };
        let in_use: BTreeSet<&str> = standers.iter().map(|stander| &*stander.function).collect();
        let is_anywhere = in_use.contains(TRAMPOLINE);
        let retired = std::mem::take(&mut self.retired);
        for old in retired {
            if is_anywhere || in_use.contains(&*format!("patch {}", old.id)) {
                self.retired.push(old);
            } else {
                old.room.give_up();
            }
        }
    }

    fn find(&self, id: PatchId) -> Result<usize, PatchError> {
        if let Some(index) = self.active.iter().position(|patch| patch.id == id) {
            return Ok(index);
        }
        match self.ended.iter().find(|info| info.id == id) {
            Some(info) => Err(PatchError::NotApplied { id, state: info.state.to_string() }),
            None => Err(PatchError::NoSuchPatch(id)),
        }
    }

    fn end(&mut self, index: usize, state: PatchState) -> Patch<'m> {
        let info = self.info(&self.active[index], None);
        self.remember(PatchInfo { state, ..info });
        self.active.remove(index)
    }

    /// Ends all patches, since patch `by` has taken their place.
    fn retire_all(&mut self, by: PatchId) -> Vec<PatchId> {
        let mut replaced = Vec::new();
        while !self.active.is_empty() {
            let Patch { id, room, .. } = self.end(0, PatchState::Replaced(by));
            self.retired.push(Retired { id, room });
            replaced.push(id);
        }
        replaced
    }

    /// The functions that patches replace and this one does not.
    fn only_below(&self, pending: &Pending<'_>) -> Vec<Function> {
        let mut seen: BTreeSet<Gva> = pending.functions.iter().map(|f| f.site.at).collect();
        let below = self.active.iter().flat_map(|patch| &patch.functions);
        below.filter(|function| seen.insert(function.site.at)).cloned().collect()
    }

    /// The code in which nobody may stand when these functions are replaced: the kernel's own, whatever
    /// replaces it by now, since somebody may have stayed in it, and what has replaced it since.
    fn watched_functions<'f>(
        &self,
        hooks: &Hooks<'m>,
        functions: impl Iterator<Item = &'f Function>,
    ) -> Vec<Watched> {
        let mut watched = Vec::new();
        let mut rooms: BTreeMap<PatchId, &Room<'m>> =
            self.retired.iter().map(|old| (old.id, &old.room)).collect();
        for Function { name, site, old, parts, .. } in functions {
            let behind_pad = site.at + site.original.len() as u64;
            watched.extend(Watched::function(hooks.kernel(), name, old, behind_pad));
            let part = |code: &Range<Gva>| Watched { name: Arc::clone(name), code: code.clone() };
            watched.extend(parts.iter().map(part));
            let patches = self.active.iter().filter(|patch| patch.replaces(site.at).is_some());
            rooms.extend(patches.map(|patch| (patch.id, &patch.room)));
        }
        watched.extend(rooms.into_iter().flat_map(|(id, room)| watched_room(hooks, id, room)));
        watched
    }
}

/// Whether it may be otherwise in a moment: the guest was changing its lists of tasks.
fn is_passing(error: &PatchError) -> bool {
    matches!(error, PatchError::Stack(StackError::Tasks(_) | StackError::Unreadable { .. }))
}

/// Where loggers and stubs are.
fn trampolines(hooks: &Hooks<'_>) -> Range<Gva> {
    let start = hooks.region().range(crate::region::Part::Code).start;
    start..start + hooks.region().code().used()
}
