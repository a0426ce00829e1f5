//! The patches of one kernel: applied, stacked, taken back.
//!
//! A patch is prepared while the guest runs: its payload is resolved, placed in the region and linked.
//! An attempt is one stop, in which everything is looked at before the first pad is written; if somebody
//! stands in a function that is to be replaced, the caller tries again when it likes.
//!
//! Patches stack. Of those that replace a function the last one counts, so that whichever is reverted the
//! next one below is in force again, or the kernel's own function. A cumulative patch takes the place of
//! all before it.
//!
//! The memory of a patch that is no more is reused when a check of all stacks has found nobody in it: in
//! its text, or in a stub that leads there.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::addr::Gva;
use crate::hook::Hooks;
use crate::kernel::TaskLayout;
use crate::machine::StopTimes;
use crate::region::PayloadSizes;
use crate::stacks::{StackCheck, StackCheckError, Stander, Watched};

mod change;
mod check;
mod error;
mod prepare;
#[cfg(test)]
mod tests;

pub use error::{Fixed, FixedFunction, PatchError};
use prepare::{Function, Room};
pub use prepare::{PatchOptions, Pending};

/// A patch; never given out twice for a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PatchId(pub u64);

impl fmt::Display for PatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What has become of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchState {
    /// Some of its functions are in force, if not all.
    Applied,
    /// All of its functions are replaced by later patches, of which this is the last.
    Superseded(PatchId),
    /// A cumulative patch has taken its place.
    Replaced(PatchId),
    /// It was taken back.
    Reverted,
    /// The guest was reset, or runs another kernel.
    Gone,
}

impl fmt::Display for PatchState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PatchState::Applied => f.write_str("applied"),
            PatchState::Superseded(by) => write!(f, "superseded by patch {by}"),
            PatchState::Replaced(by) => write!(f, "replaced by patch {by}"),
            PatchState::Reverted => f.write_str("reverted"),
            PatchState::Gone => f.write_str("gone with the kernel that it was applied to"),
        }
    }
}

/// What is to be known of a patch.
#[derive(Debug, Clone)]
pub struct PatchInfo {
    /// Which.
    pub id: PatchId,
    /// What has become of it.
    pub state: PatchState,
    /// The SHA-256 digest of its file, in hexadecimal.
    pub digest: String,
    /// When it was applied, by this host's clock.
    pub applied: SystemTime,
    /// The stop in which it was.
    pub stop: StopTimes,
    /// Whether nobody may have stood in its functions.
    pub is_consistent: bool,
    /// How much of the region it takes.
    pub sizes: PayloadSizes,
    /// Its functions.
    pub functions: Vec<FunctionInfo>,
}

/// What is to be known of a function that a patch replaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Its name.
    pub name: Arc<str>,
    /// The kernel's function.
    pub old: Gva,
    /// Its pad.
    pub pad: Gva,
    /// The one that replaces it.
    pub new: Gva,
    /// The patch whose function is called; `None` if that is the kernel's own, or if the guest has
    /// written something else over the pad.
    pub in_force: Option<PatchId>,
}

/// A patch that was applied.
#[derive(Debug, Clone)]
pub struct AppliedPatch {
    /// Which.
    pub id: PatchId,
    /// How many functions it replaces.
    pub functions: usize,
    /// The patches whose place it has taken.
    pub replaced: Vec<PatchId>,
    /// The stop.
    pub stop: StopTimes,
    /// The part of [`StopTimes::held`] that comparing took.
    pub verify: Duration,
    /// The part of it that checking stacks, writing and reading back took.
    pub write: Duration,
}

/// What came of an attempt to apply a patch.
#[derive(Debug)]
pub enum Attempt<'m> {
    /// It is applied.
    Applied(AppliedPatch),
    /// Nothing was written: these stand in functions that are to be replaced.
    Busy(Box<Pending<'m>>, Vec<Stander>),
}

/// A patch that was taken back.
#[derive(Debug, Clone)]
pub struct RevertedPatch {
    /// Which.
    pub id: PatchId,
    /// How many functions it had replaced.
    pub functions: usize,
    /// Those of them that the guest had written over; they were left alone.
    pub foreign: Vec<Arc<str>>,
    /// Whether the guest has ended or runs another kernel: then nothing was written, and all patches are
    /// gone.
    pub is_gone: bool,
    /// The stop; `None` if nothing of it was in force.
    pub stop: Option<StopTimes>,
}

/// What came of an attempt to revert a patch.
#[derive(Debug)]
pub enum RevertAttempt {
    /// It is reverted.
    Reverted(RevertedPatch),
    /// Nothing was written: these stand in its functions.
    Busy(Vec<Stander>),
}

/// A patch that was applied and is not reverted.
#[derive(Debug)]
struct Patch<'m> {
    id: PatchId,
    functions: Vec<Function>,
    room: Room<'m>,
    is_consistent: bool,
    digest: String,
    applied: SystemTime,
    stop: StopTimes,
}

impl Patch<'_> {
    fn replaces(&self, pad: Gva) -> Option<&Function> {
        self.functions.iter().find(|function| function.site.at == pad)
    }

    fn sizes(&self) -> PayloadSizes {
        let placement = &self.room.placement;
        let len = |range: &std::ops::Range<Gva>| range.end.0 - range.start.0;
        PayloadSizes {
            text: len(&placement.text),
            constants: len(&placement.constants),
            data: len(&placement.data),
        }
    }
}

/// Memory of a patch that is no more, in which somebody may still stand.
#[derive(Debug)]
struct Retired<'m> {
    id: PatchId,
    room: Room<'m>,
}

/// How many patches that are no more are remembered.
const REMEMBERED: usize = 64;

/// The patches of one kernel. What they do to its pads is done by [`Hooks`], which put all of it back
/// when they are dropped.
#[derive(Debug, Default)]
pub struct Patches<'m> {
    /// In the order in which they were applied.
    active: Vec<Patch<'m>>,
    /// The last ones that are no more, likewise.
    ended: VecDeque<PatchInfo>,
    retired: Vec<Retired<'m>>,
    /// Where the kernel has its tasks, once that was needed.
    layout: Option<TaskLayout>,
    last_id: u64,
}

impl<'m> Patches<'m> {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many patches are applied, those among them that are superseded.
    #[must_use]
    pub fn len(&self) -> usize {
        self.active.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Reads a payload, and does everything that can be done while the guest runs.
    ///
    /// # Errors
    /// [`PatchError`]; nothing is left of it.
    pub fn prepare(
        &mut self,
        hooks: &Hooks<'m>,
        file: &[u8],
        options: &PatchOptions,
    ) -> Result<Pending<'m>, PatchError> {
        self.collect(hooks);
        prepare::prepare(hooks, file, options)
    }

    /// The patches, in the order of their numbers: those that are applied, and the last ones that were.
    #[must_use]
    pub fn list(&self, hooks: &Hooks<'m>) -> Vec<PatchInfo> {
        let active = self.active.iter().map(|patch| self.info(patch, Some(hooks)));
        let mut all: Vec<PatchInfo> = self.ended.iter().cloned().chain(active).collect();
        all.sort_by_key(|info| info.id);
        all
    }

    fn info(&self, patch: &Patch<'m>, hooks: Option<&Hooks<'m>>) -> PatchInfo {
        let function = |function: &Function| FunctionInfo {
            name: Arc::clone(&function.name),
            old: function.old.start,
            pad: function.site.at,
            new: function.new,
            in_force: self
                .top(function.site.at, None)
                .filter(|_| hooks.is_some_and(|hooks| hooks.is_in_force(function.site.at)))
                .map(|(patch, _)| patch.id),
        };
        let tops = patch.functions.iter().filter_map(|f| Some(self.top(f.site.at, None)?.0.id));
        let state = match tops.clone().any(|top| top == patch.id) {
            true => PatchState::Applied,
            false => tops.max().map_or(PatchState::Applied, PatchState::Superseded),
        };
        PatchInfo {
            id: patch.id,
            state,
            digest: patch.digest.clone(),
            applied: patch.applied,
            stop: patch.stop,
            is_consistent: patch.is_consistent,
            sizes: patch.sizes(),
            functions: patch.functions.iter().map(function).collect(),
        }
    }

    /// The last patch that replaces the function of that pad, and what it calls instead, if it were not
    /// for the patch `but_for`.
    fn top(&self, pad: Gva, but_for: Option<PatchId>) -> Option<(&Patch<'m>, &Function)> {
        let patches = self.active.iter().rev().filter(|patch| Some(patch.id) != but_for);
        patches.filter_map(|patch| Some((patch, patch.replaces(pad)?))).next()
    }

    /// Takes note that the guest was reset, has ended or runs another kernel: nothing is in force any
    /// more.
    pub fn forget(&mut self) {
        for index in (0..self.active.len()).rev() {
            let info = self.info(&self.active[index], None);
            self.remember(PatchInfo { state: PatchState::Gone, ..info });
        }
        self.active.clear();
        // Nobody in that guest is in them any more, but an emulator may still have translated them: what
        // there is for the next kernel is for those to say who map the region for it.
        self.retired.clear();
    }

    fn remember(&mut self, info: PatchInfo) {
        if self.ended.len() == REMEMBERED {
            self.ended.pop_front();
        }
        self.ended.push_back(info);
    }

    /// A check of who stands in this code.
    fn stack_check(
        &mut self,
        hooks: &Hooks<'m>,
        watched: Vec<Watched>,
    ) -> Result<StackCheck<'m>, PatchError> {
        let kernel = hooks.kernel();
        let layout = match self.layout.clone() {
            Some(layout) => layout,
            None => {
                let layout = kernel.task_layout(hooks.machine().ram());
                self.layout.insert(layout.map_err(StackCheckError::from)?).clone()
            }
        };
        let check = StackCheck::with_layout(kernel, layout, watched);
        Ok(check.with_returns(hooks.taken_returns()))
    }
}

/// The text of a patch, and the stubs that lead there.
fn watched_room(hooks: &Hooks<'_>, id: PatchId, room: &Room<'_>) -> Vec<Watched> {
    let name: Arc<str> = format!("patch {id}").into();
    let text = &room.placement.text;
    let stubs = hooks.stubs().iter().filter(|stub| text.contains(&stub.to));
    let stubs = stubs.map(|stub| stub.at..stub.at + stub.len);
    let code = std::iter::once(text.clone()).chain(stubs);
    code.map(|code| Watched { name: Arc::clone(&name), code }).collect()
}
