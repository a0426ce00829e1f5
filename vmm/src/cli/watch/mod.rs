//! Watches the guest's kernel from outside while it runs: finds it, traces it for whoever wants that,
//! and notices when it panics.

use std::cell::OnceCell;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, ensure};
use patcher::kernel::{Kernel, Located, Unready, locate};
use patcher::machine::{Machine, Registers};
use patcher::trace::tracer::Summary;
use vmm::control::Command;
use vmm::control::protocol::{EndReason, TraceRequest};
use vmm::kvm::GuestExit;

use super::output::{FunctionTime, Records};
use super::progress::Progress;
use super::say;
use super::status::Status;

mod answers;
mod condition;
mod patching;
mod recorder;
mod service;
mod writer;

use answers::{Desk, Phase};
use condition::{Condition, has_panicked};
use service::Service;

/// How often a guest that boots is looked at: that takes each vCPU out of it for a moment.
const LOOK: Duration = Duration::from_millis(100);

/// What nobody on a terminal sees is said once if it takes this long.
const LONG: Duration = Duration::from_secs(30);

/// What the watcher is to do.
pub struct Plan {
    trace: Option<(Records, TraceRequest)>,
    desk: Desk,
    waiting: Progress,
    tracing: Progress,
}

/// Who a guest is, for those who ask.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its name.
    pub name: String,
    /// What runs it.
    pub engine: String,
}

impl Plan {
    /// A plan to trace what is asked for into some records, if that is wanted, and to answer
    /// `commands` about the guest meanwhile. Its console is `on_terminal` or elsewhere.
    pub fn new(
        trace: Option<(Records, TraceRequest)>,
        on_terminal: bool,
        identity: Identity,
        commands: Option<Receiver<Command>>,
    ) -> Self {
        let records_shown = trace.as_ref().is_some_and(|(records, _)| records.are_on_stdout());
        Self {
            trace,
            desk: Desk::new(identity, commands),
            waiting: Progress::new(on_terminal),
            tracing: Progress::new(on_terminal || records_shown),
        }
    }
}

/// Says that the guest's kernel has panicked, which ends whatever was done with it.
pub fn panic_said() -> Status {
    say(GuestExit::Panicked);
    Status::GuestPanicked
}

/// What the run's own trace came to.
#[derive(Debug)]
pub struct OwnTrace {
    /// Events, and what became of them.
    pub summary: Summary,
    /// How long it lasted.
    pub lasted: Duration,
    /// The functions that took most time, if it told of returns.
    pub times: Vec<FunctionTime>,
}

/// What the watcher has seen.
#[derive(Debug, Default)]
pub struct Watched {
    /// The kernel has panicked.
    pub panicked: bool,
    /// The guest was reset, which has ended the trace.
    pub reset: bool,
    /// What the trace came to, if there was one.
    pub summary: Option<OwnTrace>,
    /// A trace was wanted and the guest ended before there was one.
    pub too_early: bool,
    /// Why watching, or the trace, was given up.
    pub error: Option<Error>,
}

/// Watches the guest until `stop` says so, its kernel has panicked, or tracing fails.
pub fn watch(machine: &dyn Machine, plan: Plan, stop: &AtomicBool) -> Watched {
    let Plan { trace, desk, mut waiting, mut tracing } = plan;
    let mut watcher = Watcher { machine, stop, desk, watched: Watched::default() };
    if let Err(error) = watcher.run(trace, &mut waiting, &mut tracing) {
        watcher.watched.error.get_or_insert(error);
    }
    waiting.clear();
    tracing.clear();
    watcher.watched
}

struct Watcher<'a> {
    machine: &'a dyn Machine,
    stop: &'a AtomicBool,
    desk: Desk,
    watched: Watched,
}

impl Watcher<'_> {
    fn run(
        &mut self,
        mut trace: Option<(Records, TraceRequest)>,
        waiting: &mut Progress,
        tracing: &mut Progress,
    ) -> Result<()> {
        self.watched.too_early = trace.is_some();
        loop {
            // Looked at first: a reset while the kernel is looked for is noticed later.
            let resets = self.machine.resets();
            let kernel = match self.find(waiting) {
                Ok(Some(kernel)) => kernel,
                Ok(None) => return Ok(()),
                Err(error) if trace.is_some() => return Err(error),
                // Without a trace the kernel is only the business of those who ask.
                Err(error) => {
                    let reason = super::sentence(&error);
                    while !self.stopped() && self.machine.resets() == resets {
                        self.desk.attend(self.machine, &Phase::Untraceable(None, &reason), LOOK);
                    }
                    continue;
                }
            };
            let mut condition = Condition::new(&kernel, resets);
            let traced = trace.is_some();
            let result = self.serve(&kernel, &mut trace, &mut condition, waiting, tracing);
            self.watched.panicked = has_panicked(&kernel, self.machine);
            self.watched.reset = condition.is_gone() && traced && trace.is_none();
            if result.is_err() || self.stopped() || !condition.is_gone() {
                return result;
            }
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Finds the kernel, `None` if the guest ended before it could be found.
    fn find(&self, progress: &mut Progress) -> Result<Option<Box<Kernel>>> {
        let mut waiting = Waiting::new("the guest's kernel");
        let mut seen: Vec<Registers> = Vec::new();
        let mut failed = false;
        loop {
            // Asked first: whatever the guest did until its end is looked at once more.
            let last = self.stopped();
            let samples = (0..self.machine.vcpus()).map(|vcpu| self.machine.sample(vcpu));
            // From a guest that is silent or gone, where it was before tells most.
            if let Ok(registers) = samples.collect() {
                seen = registers;
            }
            let reason = match locate(self.machine.ram(), &seen) {
                Ok(Located::Found(kernel)) => return Ok(Some(kernel)),
                Ok(Located::NotYet(reason)) => {
                    failed = false;
                    reason.to_string()
                }
                // A guest that is just being set up may show this once.
                Err(error) if failed => {
                    return Err(error).context("the guest's kernel can't be traced");
                }
                Err(error) => {
                    failed = true;
                    error.to_string()
                }
            };
            if last {
                return Ok(None);
            }
            waiting.show(progress, &reason);
            self.desk.attend(self.machine, &Phase::Booting(None, &reason), LOOK);
        }
    }

    /// Waits until the kernel's pads may be written; `false` if the guest ended or panicked before.
    fn wait_until_ready(
        &self,
        kernel: &Kernel,
        condition: &mut Condition<'_>,
        progress: Option<&mut Progress>,
    ) -> Result<bool> {
        let mut waiting = Waiting::new("the kernel to be ready to be traced");
        let mut progress = progress;
        while !self.stopped() && !condition.is_over(self.machine) {
            let reason = match kernel.readiness(self.machine.ram()) {
                Ok(()) => return Ok(true),
                Err(reason) => reason,
            };
            // The kernel makes its records in ftrace_init, which it has only with dynamic ftrace.
            let never = kernel.symbols().address("ftrace_init").is_none();
            ensure!(
                !(never && matches!(reason, Unready::Records(_))),
                "the kernel {} has no pads at its functions' entries: it is built without \
                 CONFIG_DYNAMIC_FTRACE, so its functions can't be traced",
                kernel.release()
            );
            let reason = reason.to_string();
            if let Some(progress) = &mut progress {
                waiting.show(progress, &reason);
            }
            self.desk.attend(self.machine, &Phase::Booting(Some(kernel), &reason), LOOK);
        }
        Ok(false)
    }

    /// Waits for the kernel to be ready, then traces it: into `trace`, and for those who ask.
    fn serve(
        &mut self,
        kernel: &Kernel,
        trace: &mut Option<(Records, TraceRequest)>,
        condition: &mut Condition<'_>,
        waiting: &mut Progress,
        tracing: &mut Progress,
    ) -> Result<()> {
        let shown = trace.is_some().then_some(&mut *waiting);
        let ready = self.wait_until_ready(kernel, condition, shown);
        waiting.clear();
        match ready {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) if trace.is_some() => return Err(error),
            Err(error) => {
                let reason = error.to_string();
                while !self.stopped() && !condition.is_over(self.machine) {
                    let phase = Phase::Untraceable(Some(kernel), &reason);
                    self.desk.attend(self.machine, &phase, LOOK);
                }
                return Ok(());
            }
        }

        condition.settle();
        let region = OnceCell::new();
        let mut service = Service::new(self.machine, kernel, &self.desk, &region);
        let name = trace.as_ref().map(|(records, _)| records.name().to_owned());
        if let Some((records, request)) = trace.take() {
            service.trace_own(records, request)?;
            self.watched.too_early = false;
        }
        while !self.stopped() && !condition.is_over(self.machine) && !service.has_own_failed() {
            service.pass(condition.has_panicked(), tracing);
        }
        tracing.clear();
        let is_gone = condition.is_gone() && !self.stopped();
        if !is_gone || name.is_some() {
            // From here on whoever reads the trace is not waited for much longer.
            self.stop.store(true, Ordering::SeqCst);
        }
        let ended = service.end(match (condition.has_panicked(), is_gone) {
            (true, _) => EndReason::GuestPanicked,
            (false, true) => EndReason::GuestReset,
            (false, false) => EndReason::GuestEnded,
        });
        self.watched.summary = ended.own;
        if let (Some(error), Some(name)) = (ended.failure, name) {
            return Err(broken(error, &name));
        }
        Ok(ended.disarmed?)
    }
}

/// The trace can't be written to what has that name.
fn broken(error: io::Error, name: &str) -> Error {
    Error::new(error).context(format!("the trace can't be written to {name}"))
}

/// Says what is waited for: over and over on a terminal, elsewhere once if it takes long.
struct Waiting {
    what: &'static str,
    since: Instant,
    said: bool,
}

impl Waiting {
    fn new(what: &'static str) -> Self {
        Self { what, since: Instant::now(), said: false }
    }

    fn show(&mut self, progress: &mut Progress, reason: &str) {
        let Self { what, since, .. } = *self;
        let seconds = since.elapsed().as_secs();
        if progress.is_on() {
            progress.show(|| format!("waiting for {what} ({seconds} s): {reason}"));
        } else if since.elapsed() >= LONG && !self.said {
            self.said = true;
            say(format!("still waiting for {what} after {seconds} s: {reason}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use patcher::synthetic::{Blueprint, Guest};

    use super::*;

    fn wait_until_ready(guest: &Guest) -> Result<bool> {
        let stop = AtomicBool::new(false);
        let identity = Identity { name: "test".into(), engine: "none".into() };
        let desk = Desk::new(identity, None);
        let watcher = Watcher { machine: guest, stop: &stop, desk, watched: Watched::default() };
        let kernel = guest.kernel();
        watcher.wait_until_ready(&kernel, &mut Condition::new(&kernel, 0), None)
    }

    #[test]
    fn a_kernel_without_pads_is_told_from_one_that_still_boots() {
        let mut guest = Guest::new(&Blueprint::default());
        assert!(wait_until_ready(&guest).unwrap());

        // As a kernel without dynamic ftrace: neither the list of pads nor what would make it.
        guest.rename_symbol("ftrace_pages_start", "something_else");
        for group in guest.record_groups.clone() {
            guest.poke(group.records, &vec![0; group.count * 16]);
            guest.poke(group.descriptor, &[0; 24]);
        }
        let release = guest.kernel().release().to_owned();
        assert_eq!(
            wait_until_ready(&guest).unwrap_err().to_string(),
            format!(
                "the kernel {release} has no pads at its functions' entries: it is built without \
                 CONFIG_DYNAMIC_FTRACE, so its functions can't be traced"
            )
        );
    }
}
