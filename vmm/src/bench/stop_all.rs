//! The rounds: a bare stop, a stop that patches, a stop that reverts.

use std::ops::ControlFlow;
use std::time::Duration;

use patcher::hook::{Changed, HookError, Hooks, Method, ReleaseError, Want};
use patcher::kernel::Site;
use patcher::machine::{StopError, StopTimes};
use patcher::patch::Foreign;

use super::gaps::{GapError, Gaps};

/// What is measured: some functions of a guest, patched and put back again and again.
#[derive(Debug, Clone, Copy)]
pub struct StopAll<'a> {
    /// The functions.
    pub sites: &'a [Site],
    /// Rounds that do not count, in which caches and page tables come to be as they will be.
    pub warm_up: usize,
    /// Rounds that do.
    pub rounds: usize,
}

/// The parts of a standstill. Each begins where the one before ends, so that their sum is the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stand {
    /// From the first kick until the last vCPU was out of the guest.
    pub out: Duration,
    /// From then until every site was found to hold what it should; of no length where nothing is
    /// verified on its own.
    pub verified: Duration,
    /// From then until the resume was asked for: writing, and reading back.
    pub written: Duration,
    /// From then until all vCPUs had been let go.
    pub running: Duration,
}

impl Stand {
    /// The whole of it.
    #[must_use]
    pub fn whole(&self) -> Duration {
        self.out + self.held() + self.running
    }

    /// How long the guest is known to have stood: from the last vCPU's way out until the first one
    /// could be let in.
    #[must_use]
    pub fn held(&self) -> Duration {
        self.verified + self.written
    }

    /// A stop whose verification took `verify` of the time in which the guest was held.
    fn new(times: StopTimes, verify: Duration) -> Self {
        let verified = verify.min(times.held);
        Self { out: times.quiesce, verified, written: times.held - verified, running: times.resume }
    }
}

/// The longest time between two readings of a vCPU's own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// On the vCPU where it was longest.
    pub longest: Duration,
    /// On the vCPU where it was shortest.
    pub shortest: Duration,
}

/// One round. What the guest saw is there if somebody measures it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// A stop in which nothing is done.
    pub bare: Stand,
    /// What the guest saw of that.
    pub bare_gap: Option<Gap>,
    /// The stop in which the functions are patched.
    pub patch: Stand,
    /// What the guest saw of it.
    pub patch_gap: Option<Gap>,
    /// The stop in which they are put back.
    pub revert: Stand,
    /// What the guest saw of it.
    pub revert_gap: Option<Gap>,
    /// Stops beyond these three: a vCPU was silent or stood inside a site, so that it was tried again.
    pub again: usize,
}

/// A round could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StopAllError {
    /// The guest could not be stopped, or not be resumed.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// Functions could not be patched.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// They could not be put back.
    #[error(transparent)]
    Release(#[from] ReleaseError),
    /// The guest does not say what it saw.
    #[error(transparent)]
    Gap(#[from] GapError),
    /// Something else than all functions was written.
    #[error(
        "{written} of {sites} functions were written: somebody else patches this guest, or it has \
         ended"
    )]
    Written {
        /// How many were.
        written: usize,
        /// How many should have been.
        sites: usize,
    },
}

impl StopAll<'_> {
    /// Makes the rounds, and shows each that counts to `each`, which may end it early.
    ///
    /// # Errors
    /// [`StopAllError`]; what is patched then is put back when `hooks` are dropped.
    pub fn run(
        &self,
        hooks: &mut Hooks<'_>,
        gaps: &mut dyn Gaps,
        mut each: impl FnMut(&Round) -> ControlFlow<()>,
    ) -> Result<(), StopAllError> {
        let wants = |traced: Option<Method>| -> Vec<(&Site, Want)> {
            let want = Want { traced, ..Want::default() };
            self.sites.iter().map(|site| (site, want)).collect()
        };
        let (patched, reverted) = (wants(Some(Method::Call)), wants(None));
        for round in 0..self.warm_up + self.rounds {
            let done = self.round(hooks, gaps, &patched, &reverted)?;
            if round >= self.warm_up && each(&done).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn round(
        &self,
        hooks: &mut Hooks<'_>,
        gaps: &mut dyn Gaps,
        patched: &[(&Site, Want)],
        reverted: &[(&Site, Want)],
    ) -> Result<Round, StopAllError> {
        gaps.take()?;
        let bare = Stand::new(hooks.machine().stop()?.resume()?, Duration::ZERO);
        let bare_gap = gaps.take()?;
        let patch = hooks.change(patched, Foreign::Refuse, &mut ())?;
        let patch_gap = gaps.take()?;
        let revert = hooks.release(reverted, &mut ())?;
        let revert_gap = gaps.take()?;
        Ok(Round {
            bare,
            bare_gap,
            patch: self.stand(&patch)?,
            patch_gap,
            revert: self.stand(&revert)?,
            revert_gap,
            again: patch.stops.len() + revert.stops.len() - 2,
        })
    }

    /// The last stop of a change, in which all functions must have been written.
    fn stand(&self, changed: &Changed) -> Result<Stand, StopAllError> {
        match changed.stops.last() {
            Some(last) if changed.written == self.sites.len() => {
                Ok(Stand::new(*last, changed.verify))
            }
            _ => Err(StopAllError::Written { written: changed.written, sites: self.sites.len() }),
        }
    }
}

/// `count` of these sites, evenly over all of them; all if there are no more.
#[must_use]
pub fn spread(sites: &[Site], count: usize) -> Vec<Site> {
    let count = count.min(sites.len());
    (0..count).map(|index| sites[(2 * index + 1) * sites.len() / (2 * count)].clone()).collect()
}
