//! Watches the guest's kernel from outside while it runs: finds it, traces it if that is wanted,
//! and notices when it panics.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, ensure};
use patcher::kernel::{Kernel, Located, MappedRegion, Unready, locate};
use patcher::machine::{Machine, Registers};
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::session::{Selection, Session, Summary};
use patcher::trace::sink::Sink;

use super::options::Options;
use super::output::Records;
use super::progress::Progress;
use super::report;
use crate::cli::say;

/// How often a guest that boots is looked at: that takes each vCPU out of it for a moment.
const LOOK: Duration = Duration::from_millis(100);

/// How often the rings are read when little comes. At ten million events a second and CPU this is
/// a third of the smallest ring that is worth having.
const DRAIN: Duration = Duration::from_millis(5);

/// The rings are read again at once when this many events came.
const MANY: u64 = 4096;

/// How often the kernel is asked whether it has panicked.
const PANIC: Duration = Duration::from_millis(250);

/// How long a kernel that has panicked may go on, to print what it has to say and to reboot.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// What nobody on a terminal sees is said once if it takes this long.
const LONG: Duration = Duration::from_secs(30);

/// What the watcher is to do.
pub struct Plan {
    trace: Option<(Records, Filter)>,
    waiting: Progress,
    tracing: Progress,
}

impl Plan {
    /// What `options` ask for. Records go to `records`, and the guest's console is `on_terminal` or
    /// elsewhere.
    pub fn new(options: &Options, records: Option<Records>, on_terminal: bool) -> Self {
        let globs = |globs: &[String]| globs.iter().map(|glob| Glob::new(glob)).collect();
        let filter = Filter { only: globs(&options.filter), except: globs(&options.notrace) };
        let records_shown = records.as_ref().is_some_and(Records::are_on_stdout);
        Self {
            trace: records.map(|records| (records, filter)),
            waiting: Progress::new(on_terminal),
            tracing: Progress::new(on_terminal || records_shown),
        }
    }
}

/// What the watcher has seen.
#[derive(Debug, Default)]
pub struct Watched {
    /// The kernel has panicked.
    pub panicked: bool,
    /// What the trace came to and how long it lasted, if there was one.
    pub summary: Option<(Summary, Duration)>,
    /// A trace was wanted and the guest ended before there was one.
    pub too_early: bool,
    /// Why watching, or the trace, was given up.
    pub error: Option<Error>,
}

/// Watches the guest until `stop` says so, its kernel has panicked, or tracing fails.
pub fn watch(machine: &dyn Machine, mut plan: Plan, stop: &AtomicBool) -> Watched {
    let mut watcher = Watcher { machine, stop, watched: Watched::default() };
    if let Err(error) = watcher.run(&mut plan) {
        watcher.watched.error.get_or_insert(error);
    }
    plan.waiting.clear();
    plan.tracing.clear();
    watcher.watched
}

struct Watcher<'a> {
    machine: &'a dyn Machine,
    stop: &'a AtomicBool,
    watched: Watched,
}

impl Watcher<'_> {
    fn run(&mut self, plan: &mut Plan) -> Result<()> {
        self.watched.too_early = plan.trace.is_some();
        let kernel = match self.find(&mut plan.waiting) {
            Ok(Some(kernel)) => kernel,
            Ok(None) => return Ok(()),
            Err(error) if plan.trace.is_some() => return Err(error),
            // Without a trace the kernel is nobody's business.
            Err(_) => {
                while !self.stopped() {
                    thread::sleep(LOOK);
                }
                return Ok(());
            }
        };
        let result = match &mut plan.trace {
            Some((records, filter)) => {
                let ready = self.wait_until_ready(&kernel, &mut plan.waiting);
                plan.waiting.clear();
                match ready {
                    Ok(true) => self.trace(&kernel, filter, records, &mut plan.tracing),
                    Ok(false) => Ok(()),
                    Err(error) => Err(error),
                }
            }
            None => {
                let mut panic = PanicWatch::new(&kernel);
                while !self.stopped() && !panic.is_over(self.machine) {
                    thread::sleep(LOOK);
                }
                Ok(())
            }
        };
        self.watched.panicked = has_panicked(&kernel, self.machine);
        result
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
            thread::sleep(LOOK);
        }
    }

    /// Waits until the kernel's pads may be written; `false` if the guest ended or panicked before.
    fn wait_until_ready(&self, kernel: &Kernel, progress: &mut Progress) -> Result<bool> {
        let mut waiting = Waiting::new("the kernel to be ready to be traced");
        let mut panic = PanicWatch::new(kernel);
        while !self.stopped() && !panic.is_over(self.machine) {
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
            waiting.show(progress, &reason.to_string());
            thread::sleep(LOOK);
        }
        Ok(false)
    }

    /// Arms what `filter` selects, hands out records until it is time to stop, and puts everything
    /// back.
    fn trace(
        &mut self,
        kernel: &Kernel,
        filter: &Filter,
        records: &mut Records,
        progress: &mut Progress,
    ) -> Result<()> {
        let machine = self.machine;
        let selection = Selection::new(kernel, machine, filter)?;
        let region = MappedRegion::new(machine, kernel)
            .context("the memory for trampolines and rings can't be brought into the guest")?;
        let broken = |error: io::Error, records: &Records| {
            Error::new(error).context(format!("the trace can't be written to {}", records.name()))
        };
        records.begin(machine.vcpus()).map_err(|error| broken(error, records))?;
        let (mut session, armed) = Session::arm(machine, kernel, &region, &selection)?;
        let begun = Instant::now();
        self.watched.too_early = false;
        say(report::armed(kernel, &selection, &armed));

        let mut panic = PanicWatch::new(kernel);
        let mut written = Ok(());
        while written.is_ok() && !self.stopped() && !panic.is_over(machine) {
            let before = session.events();
            written = session.drain(records).and_then(|()| records.flush());
            progress.show(|| report::progress(session.events(), session.lost(), begun.elapsed()));
            if session.events() - before < MANY {
                thread::sleep(DRAIN);
            }
        }
        progress.clear();
        let disarmed = session.disarm();
        let lasted = begun.elapsed();
        let (summary, finished) = session.finish(records);
        self.watched.summary = Some((summary, lasted));
        written.and(finished).map_err(|error| broken(error, records))?;
        Ok(disarmed?)
    }
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

/// Notices that the kernel panics, and gives it time for its last words.
struct PanicWatch<'k> {
    kernel: &'k Kernel,
    asked: Instant,
    panicked: Option<Instant>,
}

impl<'k> PanicWatch<'k> {
    fn new(kernel: &'k Kernel) -> Self {
        Self { kernel, asked: Instant::now(), panicked: None }
    }

    /// Whether the kernel has panicked and had its time. To be asked again and again.
    fn is_over(&mut self, machine: &dyn Machine) -> bool {
        if self.panicked.is_none() && self.asked.elapsed() >= PANIC {
            self.asked = Instant::now();
            self.panicked = has_panicked(self.kernel, machine).then_some(self.asked);
        }
        self.panicked.is_some_and(|panicked| panicked.elapsed() >= LAST_WORDS)
    }
}

/// Whether the kernel has panicked; one that can't be asked has not.
fn has_panicked(kernel: &Kernel, machine: &dyn Machine) -> bool {
    kernel.panicked(machine.ram()).is_ok_and(|cpu| cpu.is_some())
}

#[cfg(test)]
mod tests {
    use patcher::synthetic::{Blueprint, Guest};

    use super::*;

    fn wait_until_ready(guest: &Guest) -> Result<bool> {
        let stop = AtomicBool::new(false);
        let watcher = Watcher { machine: guest, stop: &stop, watched: Watched::default() };
        watcher.wait_until_ready(&guest.kernel(), &mut Progress::new(false))
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
