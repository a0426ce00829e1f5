//! The stops in which pads change.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::presence::Presence;
use super::{Changed, HookError, ReleaseError, Witness};
use crate::addr::Gva;
use crate::kernel::Kernel;
use crate::machine::{Machine, StopError, StopTimes, Stopped};
use crate::patch::{
    Applied, ApplyError, Foreign, Ours, Patchset, Prepared, Revert, Reverted, VerifyError,
};

/// How often a stop is tried again when a vCPU is silent, or stands where it must not.
const TRIES: u32 = 10;

/// How long a try waits before the next; the first is followed by the shortest wait.
const BACKOFF: Duration = Duration::from_millis(2);

/// A patchset could not be applied.
pub(super) struct Failure {
    pub error: HookError,
    /// The sites that may not hold what they held before.
    pub torn: Vec<Gva>,
}

impl<E: Into<HookError>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let torn = match &error {
            HookError::Apply(ApplyError::Torn { left, .. }) => left.iter().map(|l| l.at).collect(),
            _ => Vec::new(),
        };
        Self { error, torn }
    }
}

/// Stops, verifies, asks the witness, writes, resumes; tries again while a vCPU is silent or stands
/// inside a site.
pub(super) fn apply(
    machine: &dyn Machine,
    kernel: &Kernel,
    patchset: &Patchset,
    presence: &Presence,
    foreign: Foreign,
    witness: &mut dyn Witness,
) -> Result<Changed, Failure> {
    let prepared = patchset.prepare(machine.ram());
    let gone = || Changed { gone: true, ..Changed::default() };
    let mut tries = 0;
    let mut stops = Vec::new();
    loop {
        tries += 1;
        let since = Instant::now();
        let mut stopped = match machine.stop() {
            Ok(stopped) => stopped,
            Err(StopError::Gone) if foreign == Foreign::Leave => return Ok(gone()),
            Err(StopError::Silent { .. }) if tries < TRIES => {
                thread::sleep(BACKOFF * tries);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let still = Instant::now();
        if !is_current(machine, kernel, &mut *stopped) {
            witness.after();
            drop(stopped);
            return match foreign {
                Foreign::Leave => Ok(gone()),
                Foreign::Refuse => Err(HookError::OtherKernel.into()),
            };
        }
        let mut at = Marks { since, still, verified: still };
        let lost = presence.lost(kernel, machine.ram(), true).pop_first();
        let result = match lost.and_then(|at| presence.module(at)) {
            Some(module) => Err(HookError::ModuleGone(Arc::clone(&module.name)).into()),
            None => in_stop(machine, &prepared, foreign, &mut *stopped, witness, &mut at),
        };
        let written = Instant::now();
        witness.after();
        // A guest that ended meanwhile is told of by whoever waits for it.
        let stop = match stopped.resume() {
            Ok(stop) => stop,
            Err(StopError::Gone) => StopTimes::default(),
            Err(error) => {
                let undo = |done| undo(machine, kernel, presence, &done);
                let torn = result.map_or_else(|failed| failed.torn, undo);
                return Err(Failure { error: HookError::Undone(error), torn });
            }
        };
        stops.push(stop);
        match result {
            Ok(applied) => {
                return Ok(Changed {
                    written: applied.sites().len(),
                    already: applied.already(),
                    foreign: applied.foreign().to_vec(),
                    gone: false,
                    stops,
                    verify: at.verified - at.still,
                    write: written - at.verified,
                });
            }
            Err(Failure { error: HookError::Verify(VerifyError::VcpuInside { .. }), .. })
                if tries < TRIES =>
            {
                thread::sleep(BACKOFF * tries);
            }
            Err(failure) => return Err(failure),
        }
    }
}

/// Moments of a stop that its measure is made of.
struct Marks {
    /// The guest was asked to stop.
    since: Instant,
    /// It stood.
    still: Instant,
    /// Every site was found to be as expected; until then the same as `still`.
    verified: Instant,
}

/// What is done while the guest stands.
fn in_stop(
    machine: &dyn Machine,
    prepared: &Prepared<'_>,
    foreign: Foreign,
    stopped: &mut dyn Stopped,
    witness: &mut dyn Witness,
    at: &mut Marks,
) -> Result<Applied, Failure> {
    let mut verified = prepared.verify_but_for(foreign, stopped, machine.vcpus())?;
    at.verified = Instant::now();
    witness.before(verified.stopped(), at.since)?;
    Ok(verified.apply()?)
}

/// Nobody is told of what was applied, so it must not be: gives the sites where it may be all the same.
fn undo(
    machine: &dyn Machine,
    kernel: &Kernel,
    presence: &Presence,
    applied: &Applied,
) -> Vec<Gva> {
    let sites = applied.sites();
    let ours = sites.iter().map(Ours::from).collect();
    match release(machine, kernel, ours, presence, &mut ()) {
        (Some(Released { reverted, .. }), _) => {
            reverted.failed.iter().map(|left| left.at).collect()
        }
        (None, _) => sites.iter().map(|site| site.at).collect(),
    }
}

/// What became of sites that were to be put back.
#[derive(Default)]
pub(super) struct Released {
    pub reverted: Reverted,
    /// Whether there is no such kernel any more.
    pub gone: bool,
    pub stops: Vec<StopTimes>,
}

/// Puts sites back in one stop. A guest that has ended needs nothing put back; memory that it has taken
/// for something else, or a kernel that is no longer this one, is left alone. What was done comes beside
/// the error, if there was a stop.
pub(super) fn release(
    machine: &dyn Machine,
    kernel: &Kernel,
    sites: Vec<Ours<'_>>,
    presence: &Presence,
    witness: &mut dyn Witness,
) -> (Option<Released>, Result<(), ReleaseError>) {
    let mut revert = Revert::new(machine.ram(), sites);
    let mut released: Option<Released> = None;
    let mut tries = 0;
    loop {
        tries += 1;
        let mut stopped = match machine.stop() {
            Ok(stopped) => stopped,
            Err(StopError::Gone) => {
                released.get_or_insert_default().gone = true;
                return (released, Ok(()));
            }
            Err(StopError::Silent { .. }) if tries < TRIES => {
                thread::sleep(BACKOFF * tries);
                continue;
            }
            Err(error) => return (released, Err(error.into())),
        };
        let now = released.get_or_insert_default();
        if is_current(machine, kernel, &mut *stopped) {
            let lost = presence.lost(kernel, machine.ram(), false);
            now.reverted = revert.run_but_for(&mut *stopped, |site| lost.contains(&site.at));
        } else {
            now.gone = true;
        }
        witness.after();
        match stopped.resume() {
            Ok(times) => now.stops.push(times),
            // It ends by itself: what was written is written.
            Err(StopError::Gone) => {}
            Err(error) => return (released, Err(error.into())),
        }
        match now.reverted.failed.first() {
            Some(_) if !now.gone && tries < TRIES => thread::sleep(BACKOFF * tries),
            Some(site) if !now.gone => {
                let (count, first) = (now.reverted.failed.len(), Arc::clone(&site.function));
                return (released, Err(ReleaseError::Failed { count, first }));
            }
            _ => return (released, Ok(())),
        }
    }
}

/// Whether the guest still runs the kernel that was armed. It is asked twice before it is said not to: what
/// is taken for gone by mistake stays in the guest for good.
fn is_current(machine: &dyn Machine, kernel: &Kernel, stopped: &mut dyn Stopped) -> bool {
    (0..2).any(|_| is_run(machine, kernel, stopped))
}

/// Whether the kernel's tables and its banner are in place, and some vCPU uses them. A warm reset leaves
/// the former lie in RAM.
fn is_run(machine: &dyn Machine, kernel: &Kernel, stopped: &mut dyn Stopped) -> bool {
    let ram = machine.ram();
    kernel.is_current(ram)
        && (0..machine.vcpus()).any(|vcpu| {
            stopped.registers(vcpu).is_ok_and(|registers| kernel.is_run_by(ram, &registers))
        })
}
