//! `vmm run`: boots a guest, traces it, and ends both in good order.
//!
//! The main thread waits for the first reason to end: a signal, the guest's own end, a key, a
//! failure. Beside it one thread waits for the guest, one watches the guest's kernel and traces it,
//! and one carries what is typed. Whatever the reason, the end goes the same way: the watcher puts
//! the kernel's text back and drains the rings, the guest is killed, the terminal is restored, and
//! only then is anything summed up.

use std::panic;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;

use anyhow::{Context, Result, bail};
use vmm::control::protocol::Totals;
use vmm::devices::Console as SerialConsole;
use vmm::kvm::GuestExit;

use super::output::{Destination, Records};
use super::serving::{Serving, claim, serve};
use super::status::Status;
use super::watch::{self, OwnTrace, Plan, Watched, panic_said};
use super::{is_broken_pipe, say, summary};
use crate::signals::{self, EndSignal};

mod console;
pub mod engine;
mod options;

use console::Typing;
use options::Console;
pub use options::{Conflict, Options};

/// Why a run ends.
#[derive(Debug)]
pub enum Reason {
    /// A signal asked for it.
    Signal(EndSignal),
    /// The user left by the console's escape.
    Quit,
    /// The guest has ended.
    Guest(GuestExit),
    /// Nobody reads standard output any more.
    ReaderGone,
    /// The watcher has stopped watching, which it says more about itself.
    Watcher,
    /// What the guest prints can't be written.
    Console(anyhow::Error),
}

/// Sends [`Reason::Watcher`] when the watcher ends, by a panic too: nobody waits for ever then.
struct Farewell(Sender<Reason>);

impl Drop for Farewell {
    fn drop(&mut self) {
        // The main thread may be past the point of listening.
        let _ = self.0.send(Reason::Watcher);
    }
}

/// Runs a guest until it, or its user, has had enough.
///
/// # Errors
/// The guest can't be started, or something failed while it ran.
pub fn run(options: &Options) -> Result<Status> {
    let console = options.console()?;
    let rings = options.rings()?;
    let request = options.tracing.request()?;
    let inputs: Vec<&Path> =
        std::iter::once(&options.kernel).chain(&options.initrd).map(PathBuf::as_path).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let (sender, reasons) = mpsc::channel();
    let sink = console::sink(&console, &inputs, &sender)?;
    let records = options.tracing.records();
    let records =
        records.map(|output| Records::open(&output, &inputs, Arc::clone(&stop))).transpose()?;
    let claim = claim(options.name.as_ref())?;

    let serial = SerialConsole::new(sink).context("the guest's console can't be had")?;
    let guest = engine::build(options, rings, serial)?;
    let Serving { server, commands, identity } = serve(claim, guest.engine())?;
    let trace = records.zip(request);
    let plan = Plan::new(trace, console == Console::Stdio, identity, commands);

    let on_signal = sender.clone();
    signals::on_end_signal(move |signal| {
        // The end may be under way for another reason.
        let _ = on_signal.send(Reason::Signal(signal));
    })
    .context("signals can't be handled")?;
    let typing = match console {
        Console::Stdio => Typing::lend(guest.console_input(), sender.clone())?,
        Console::Off | Console::File(_) => None,
    };

    guest.start()?;
    let (reason, watched) = thread::scope(|scope| {
        let (guest, stop) = (&*guest, &*stop);
        let ended = sender.clone();
        scope.spawn(move || {
            if let Some(exit) = guest.wait() {
                // As above.
                let _ = ended.send(Reason::Guest(exit));
            }
        });
        let farewell = Farewell(sender.clone());
        let watcher = scope.spawn(move || {
            let _farewell = farewell;
            watch::watch(guest.machine(), plan, stop)
        });
        let reason = reasons.recv().expect("this thread has a sender itself");
        stop.store(true, Ordering::SeqCst);
        let watched = watcher.join();
        guest.kill();
        (reason, watched)
    });
    drop(typing);
    // Clients have been given the end of their traces; they get a moment to take it.
    drop(server);
    let watched = watched.unwrap_or_else(|panic| panic::resume_unwind(panic));
    conclude(reason, watched, options.tracing.records().as_ref())
}

/// Sums up and says how it ended.
fn conclude(reason: Reason, watched: Watched, to: Option<&Destination>) -> Result<Status> {
    let Watched { panicked, summary, too_early, error, .. } = watched;
    if let Some(OwnTrace { summary, lasted, times }) = summary {
        let text = summary::summary(&Totals::from(&summary), &summary.functions, lasted);
        let times = summary::times(&times);
        let file = to.filter(|_| error.is_none()).and_then(Destination::told);
        say(format!("{text}{times}{}", file.unwrap_or_default()).trim_end());
    }
    let reader_gone = error.as_ref().is_some_and(is_broken_pipe);
    if let Some(error) = error.filter(|_| !reader_gone) {
        return Err(error);
    }
    let status = match reason {
        Reason::Signal(signal) => return Ok(Status::Interrupted(signal)),
        Reason::Quit => return Ok(Status::Interrupted(EndSignal::Interrupt)),
        Reason::Console(error) => return Err(error),
        Reason::ReaderGone => return Ok(Status::Success),
        _ if reader_gone => return Ok(Status::Success),
        Reason::Guest(GuestExit::Panicked) => panic_said(),
        _ if panicked => panic_said(),
        Reason::Guest(GuestExit::PowerOff) => Status::Success,
        Reason::Guest(GuestExit::Reboot) => {
            say("the guest asked for a reboot, which ends it here");
            Status::GuestRebooted
        }
        Reason::Guest(exit) => {
            say(exit);
            Status::GuestCrashed
        }
        Reason::Watcher => bail!("the guest's kernel is no longer watched"),
    };
    match status {
        Status::Success if too_early => {
            bail!("the guest powered itself off before its kernel could be traced")
        }
        status => {
            if too_early {
                say("there is no trace: the guest ended before its kernel could be traced");
            }
            Ok(status)
        }
    }
}
