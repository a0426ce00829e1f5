//! The stops in which functions are armed and put back.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::ring::RingCorrupt;
use super::tracer::MAX_CLIENTS;
use crate::arch::OutOfReach;
use crate::journal::JournalError;
use crate::kernel::{CpuNumberError, Kernel, ReturnFormError};
use crate::machine::{Machine, StopError, StopTimes, Stopped};
use crate::patch::{Applied, ApplyError, Patchset, PlanError, Reverted, VerifyError};
use crate::region::RegionError;

/// Functions could not be armed; the guest runs on, and its text is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArmError {
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
    /// The sites can't be patched together.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The guest could not be stopped.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// A site is not what it was a moment ago.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// Writing failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// What is going to be written can't be noted.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A ring can't be read.
    #[error(transparent)]
    Ring(#[from] RingCorrupt),
    /// There are as many clients as there can be.
    #[error("the guest is traced by {MAX_CLIENTS} clients already; end one of them first")]
    TooManyClients,
}

/// How arming went.
#[derive(Debug, Clone, Copy, Default)]
pub struct Armed {
    /// Functions that are traced.
    pub functions: usize,
    /// Those of them that were not armed before.
    pub written: usize,
    /// The stop in which they were; of no length if there was none to arm.
    pub stop: StopTimes,
    /// The part of [`StopTimes::held`] that comparing took.
    pub verify: Duration,
    /// The part of [`StopTimes::held`] that writing and reading back took.
    pub write: Duration,
}

/// The armed functions could not all be put back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DisarmError {
    /// The guest could not be stopped; its functions stay armed.
    #[error("the guest could not be stopped to put its functions back: {0}")]
    Stop(#[from] StopError),
    /// Some sites could not be written.
    #[error("{count} functions could not be put back, {first} the first of them: end this guest")]
    Failed {
        /// How many.
        count: usize,
        /// The first.
        first: Arc<str>,
    },
}

/// How often a stop is tried again when a vCPU is silent, or stands where it must not.
const STOP_TRIES: u32 = 10;

/// How long a try waits before the next; the first is followed by the shortest wait.
const STOP_BACKOFF: Duration = Duration::from_millis(2);

/// Stops, verifies, writes, looks while the guest stands, resumes; tries again while a vCPU is silent
/// or stands inside a site.
pub(super) fn apply(
    machine: &dyn Machine,
    kernel: &Kernel,
    patchset: &Patchset,
    look: &mut dyn FnMut(),
) -> Result<(Applied, Armed), ArmError> {
    let Some(journal) = machine.journal() else {
        return apply_now(machine, kernel, patchset, look);
    };
    journal.intend(patchset.sites().iter().map(Into::into))?;
    let result = apply_now(machine, kernel, patchset, look);
    match &result {
        Ok(_)
        | Err(
            ArmError::Apply(ApplyError::Torn { .. }) | ArmError::Stop(StopError::Engine { .. }),
        ) => {}
        // Nothing of ours is there. A journal that says otherwise would do no harm.
        Err(_) => drop(journal.settle(patchset.sites().iter().map(|site| site.gpa))),
    }
    result
}

fn apply_now(
    machine: &dyn Machine,
    kernel: &Kernel,
    patchset: &Patchset,
    look: &mut dyn FnMut(),
) -> Result<(Applied, Armed), ArmError> {
    let prepared = patchset.prepare();
    let mut tries = 0;
    loop {
        tries += 1;
        let retry = |error: ArmError| match error {
            ArmError::Stop(StopError::Silent { .. })
            | ArmError::Verify(VerifyError::VcpuInside { .. })
                if tries < STOP_TRIES =>
            {
                thread::sleep(STOP_BACKOFF * tries);
                Ok(())
            }
            other => Err(other),
        };
        let mut stopped = match machine.stop() {
            Ok(stopped) => stopped,
            Err(error) => {
                retry(error.into())?;
                continue;
            }
        };
        let begin = Instant::now();
        let result = prepared.verify(machine.ram(), &mut *stopped, machine.vcpus());
        let verified = begin.elapsed();
        let result = match result {
            Ok(ready) => ready.apply().map_err(ArmError::from),
            Err(error) => Err(error.into()),
        };
        let write = begin.elapsed() - verified;
        look();
        // A guest that ended meanwhile is told of by whoever waits for it.
        let stop = match stopped.resume() {
            Ok(times) => times,
            Err(StopError::Gone) => StopTimes::default(),
            Err(error) => {
                // Nobody is told of what is armed, so it must not be.
                if let Ok(applied) = result {
                    let _ = revert(machine, kernel, &applied, &mut Vec::new(), look);
                }
                return Err(error.into());
            }
        };
        match result {
            Ok(applied) => {
                let functions = patchset.sites().len();
                let written = functions;
                return Ok((applied, Armed { functions, written, stop, verify: verified, write }));
            }
            Err(error) => retry(error)?,
        }
    }
}

/// Puts `applied` back in one stop and looks while the guest stands. A guest that has ended needs
/// nothing put back; memory that it has taken for something else, or a kernel that is no longer this
/// one, is left alone. Each stop is added to `stops`.
pub(super) fn revert(
    machine: &dyn Machine,
    kernel: &Kernel,
    applied: &Applied,
    stops: &mut Vec<StopTimes>,
    look: &mut dyn FnMut(),
) -> Result<Reverted, DisarmError> {
    let mut revert = applied.prepare_revert();
    let mut tries = 0;
    loop {
        tries += 1;
        let mut stopped = match machine.stop() {
            Ok(stopped) => stopped,
            Err(StopError::Gone) => return Ok(Reverted::default()),
            Err(StopError::Silent { .. }) if tries < STOP_TRIES => {
                thread::sleep(STOP_BACKOFF * tries);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let reverted = if is_ours(machine, kernel, &mut *stopped) {
            revert.run(machine.ram(), &mut *stopped)
        } else {
            Reverted::default()
        };
        look();
        match stopped.resume() {
            Ok(times) => stops.push(times),
            // It ends by itself: what was written is written.
            Err(StopError::Gone) => {}
            Err(error) => return Err(error.into()),
        }
        match reverted.failed.first() {
            Some(_) if tries < STOP_TRIES => thread::sleep(STOP_BACKOFF * tries),
            Some(site) => {
                return Err(DisarmError::Failed {
                    count: reverted.failed.len(),
                    first: Arc::clone(&site.function),
                });
            }
            None => {
                if let Some(journal) = machine.journal() {
                    // As above.
                    let _ = journal.settle(applied.sites().iter().map(|site| site.gpa));
                }
                return Ok(reverted);
            }
        }
    }
}

/// Whether the guest still runs the kernel that was armed: its tables and its banner are in place, and
/// some vCPU uses them. A warm reset leaves the former lie in RAM.
fn is_ours(machine: &dyn Machine, kernel: &Kernel, stopped: &mut dyn Stopped) -> bool {
    let ram = machine.ram();
    kernel.is_current(ram)
        && (0..machine.vcpus()).any(|vcpu| {
            stopped.registers(vcpu).is_ok_and(|registers| kernel.is_run_by(ram, &registers))
        })
}
