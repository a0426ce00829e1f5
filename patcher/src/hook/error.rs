//! Why pads could not be made to do what they are wanted for.

use std::sync::Arc;

use super::{HeldBack, ReturnPoolError};
use crate::arch::OutOfReach;
use crate::journal::JournalError;
use crate::kernel::{CpuNumberError, ReturnFormError, TaskPlaceError};
use crate::machine::StopError;
use crate::patch::{ApplyError, PlanError, VerifyError};
use crate::region::{COUNTERS, HISTOGRAMS, NoTraps, RegionError};

/// Wants could not be changed; the guest runs on, and its text is as it was, but for
/// [`ApplyError::Torn`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HookError {
    /// It could not be told how the guest's functions return.
    #[error(transparent)]
    ReturnForm(#[from] ReturnFormError),
    /// It could not be told where a CPU's number is.
    #[error(transparent)]
    CpuNumber(#[from] CpuNumberError),
    /// The region has no room for the trampoline.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// An instruction does not reach.
    #[error(transparent)]
    OutOfReach(#[from] OutOfReach),
    /// No other function can be called in place of this one.
    #[error(
        "{function} can't be redirected: its {prefix} has signed the return address before its pad \
         comes, and the new function would not expect that"
    )]
    Signed {
        /// The function.
        function: Box<str>,
        /// What stands in front of its pad.
        prefix: &'static str,
    },
    /// The return of this function can't be taken.
    #[error("the returns of {function} can't be taken: {why}; leave it out with -n {function}")]
    ReturnNotTaken {
        /// The function.
        function: Box<str>,
        /// Why not.
        why: &'static str,
    },
    /// No returns can be taken.
    #[error(transparent)]
    ReturnPool(#[from] ReturnPoolError),
    /// What is to be redirected has no pad.
    #[error("{0} can't be redirected: it has no pad")]
    NoPad(Box<str>),
    /// What is to be counted has no pad.
    #[error("calls of {0} can't be counted: it has no pad")]
    NotCounted(Box<str>),
    /// More functions, and more filters of their calls, than there are counters.
    #[error(
        "the region has {COUNTERS} counters for functions and for filters of their calls, and none is \
         left for {0}; trace fewer functions, or those without counting and filters"
    )]
    CountersFull(Box<str>),
    /// Calls can't be told apart by their tasks.
    #[error("calls can't be filtered by their tasks in the guest: {0}")]
    TaskUnknown(#[source] TaskPlaceError),
    /// Somebody else has this function's calls let through by other conditions.
    #[error(
        "{0} is traced by somebody else with another filter of its calls, or without one; end that          trace first, or ask for the same filter"
    )]
    OtherGate(Box<str>),
    /// What is trapped has no gate.
    #[error(
        "calls of {0} are noticed by traps, which can't be filtered in the guest; use --method call"
    )]
    TrapGate(Box<str>),
    /// More functions than there are histograms.
    #[error(
        "{wanted} functions were to be measured, and there are histograms for no more than {left}, of \
         {HISTOGRAMS} in all, each of which stays its function's: name fewer functions by -f"
    )]
    HistogramsFull {
        /// Functions that have none.
        wanted: usize,
        /// Histograms that are left.
        left: usize,
    },
    /// Guests of this architecture can't be trapped.
    #[error("functions of {0} guests can't be trapped; use --method call")]
    NoTrap(&'static str),
    /// The engine answers no traps.
    #[error(transparent)]
    Traps(#[from] NoTraps),
    /// The sites can't be patched together.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The guest could not be stopped.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// The guest was not resumed as it should have been, and nobody knows whether it ran meanwhile.
    #[error("{0}; what had been changed until then was put back")]
    Undone(#[source] StopError),
    /// A site is not what it was a moment ago.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// Writing failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// What is going to be written can't be noted.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The kernel is not there any more.
    #[error("the guest does not run the kernel any more that was found in it; nothing was written")]
    OtherKernel,
    /// A module has gone, with its functions.
    #[error("the guest has unloaded the module {0} meanwhile; nothing was written, try again")]
    ModuleGone(Arc<str>),
    /// The witness did not want it.
    #[error("it was not the time for it; nothing was written")]
    HeldBack,
}

impl From<HeldBack> for HookError {
    fn from(HeldBack: HeldBack) -> Self {
        Self::HeldBack
    }
}

/// The armed functions could not all be put back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReleaseError {
    /// The guest could not be stopped; its functions stay armed.
    #[error("the guest could not be stopped to put its functions back: {0}")]
    Stop(#[from] StopError),
    /// What is to be there instead could not be made or noted; the functions stay armed.
    #[error("functions could not be put back: {0}")]
    Hook(#[source] Box<HookError>),
    /// Some sites could not be written.
    #[error("{count} functions could not be put back, {first} the first of them: end this guest")]
    Failed {
        /// How many.
        count: usize,
        /// The first.
        first: Arc<str>,
    },
}
