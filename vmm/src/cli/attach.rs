//! `vmm attach`: traces a guest of a QEMU that somebody else has started, and leaves it as it was.
//!
//! As in `vmm run`, the main thread waits for the first reason to end, and the watcher puts the
//! kernel's text back. Here the guest is left to run then.

use std::io::{self, BufRead, IsTerminal, Write};
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use vmm::control::Name;
use vmm::control::protocol::Totals;
use vmm::kvm::GuestExit;
use vmm::qemu::{Attach, AttachError, Attached, journals_folder};

use super::output::{Destination, Records};
use super::serving::{Serving, claim, serve};
use super::size::Size;
use super::status::Status;
use super::trace_options::TraceOptions;
use super::watch::{self, OwnTrace, Plan, Watched, panic_said};
use super::{is_broken_pipe, say, summary};
use crate::signals::{self, EndSignal};

/// Attach to the guest of a QEMU that runs already, and trace its kernel's functions
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// The Unix socket of a QMP monitor that nobody else uses
    #[arg(long, value_name = "SOCKET")]
    qmp: PathBuf,

    /// What the guest is called in vmm ps, info, pads and trace. By default guest1, guest2 and so on
    #[arg(long, value_name = "NAME")]
    name: Option<Name>,

    #[command(flatten)]
    tracing: TraceOptions,

    /// How much memory the guest's kernel was told of by its parameter mem=, if QEMU's command line
    /// does not show that; a size as for vmm run --memory
    #[arg(long, value_name = "SIZE")]
    mem: Option<Size>,

    /// Put back what a vmm that was killed has left in the guest
    #[arg(long)]
    restore: bool,
}

const AFTER_HELP: &str = "\
QEMU has to be started so that its memory can be shared, and with some that the guest's kernel does
not use, which a device has:
  qemu-system-x86_64 ... -m 1024M -qmp unix:/run/guest.qmp,server=on,wait=off
    -object memory-backend-memfd,id=ram,size=1024M,share=on -machine memory-backend=ram
    -object memory-backend-memfd,id=vmm,size=64M,share=on -device ivshmem-plain,memdev=vmm
Instead of the device, QEMU can have more memory than the guest is told of (-m 1088M, size=1088M, and
mem=1024M among the kernel's parameters), which s390x guests need.

Ctrl-C detaches: what was changed in the guest is put back, and it runs on.

Exit status:
  0    the guest powered itself off, or the trace's reader closed the pipe
  1    something failed; standard error says what
  2    the command line makes no sense
  3    the guest rebooted, and QEMU ended with that, or the trace did
  4    the guest's kernel panicked
  5    QEMU has ended for another reason
  129  SIGHUP
  130  SIGINT
  143  SIGTERM

Examples:
  Watch which functions of the VFS a guest calls:
    vmm attach --qmp /run/guest.qmp --trace func -f 'vfs_*'

  See what its reading of files calls, and how long each of it takes:
    vmm attach --qmp /run/guest.qmp --trace graph --graph-function vfs_read

  Attach, and trace from other terminals by vmm trace web func:
    vmm attach --qmp /run/guest.qmp --name web";

/// The most memory for rings, in bytes.
const RINGS: u64 = 32 << 20;

/// How long a stop may take to bring all vCPUs to a stand.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// Why it ends.
enum Reason {
    Signal(EndSignal),
    Guest(GuestExit),
    /// QEMU's monitor has hung up, and QEMU lives.
    MonitorLost,
    /// The watcher has stopped watching, which it says more about itself.
    Watcher,
}

/// Attaches, until the guest ends or somebody has had enough.
///
/// # Errors
/// The guest can't be attached to or be left, or something failed meanwhile.
pub fn run(options: &Options) -> Result<Status> {
    let request = options.tracing.request()?;
    let stop = Arc::new(AtomicBool::new(false));
    let records = options.tracing.records();
    let records = records
        .map(|output| Records::open(&output, &[] as &[&Path], Arc::clone(&stop)))
        .transpose()?;
    let claim = claim(options.name.as_ref())?;
    let attached = attach(options)?;
    // Before anything is said: whoever reads that this is attached may have it end in order.
    let (sender, reasons) = mpsc::channel();
    let on_signal = sender.clone();
    signals::on_end_signal(move |signal| {
        // The end may be under way for another reason.
        let _ = on_signal.send(Reason::Signal(signal));
    })
    .context("signals can't be handled")?;
    if let Some(restored) = attached.restored() {
        let foreign = match restored.foreign.len() {
            0 => String::new(),
            count => format!(", and {count} are no longer what was left and were left alone"),
        };
        say(format!(
            "put back {} functions that an earlier vmm has left changed{foreign}",
            restored.restored
        ));
    }
    say(format!(
        "attached to a guest of {}, QEMU is process {}",
        attached.architecture(),
        attached.pid()
    ));
    say(attached.region_memory());
    let Serving { server, commands, identity } = serve(claim, "QEMU, attached")?;
    let trace = records.zip(request);
    let plan = Plan::new(trace, false, identity, commands);
    let (reason, watched) = thread::scope(|scope| {
        let (attached, stop) = (&attached, &*stop);
        let ended = sender.clone();
        scope.spawn(move || {
            // As above.
            let _ = ended.send(attached.wait().map_or(Reason::MonitorLost, Reason::Guest));
        });
        let watcher = scope.spawn(move || {
            let watched = panic::catch_unwind(panic::AssertUnwindSafe(|| {
                watch::watch(attached.machine(), plan, stop)
            }));
            // As above.
            let _ = sender.send(Reason::Watcher);
            watched
        });
        let reason = reasons.recv().expect("the watcher sends one");
        stop.store(true, Ordering::SeqCst);
        let watched = watcher.join().and_then(|watched| watched);
        attached.stop_waiting();
        (reason, watched)
    });
    // Clients have been given the end of their traces; they get a moment to take it.
    drop(server);
    let left = attached.detach();
    let watched = watched.unwrap_or_else(|panic| panic::resume_unwind(panic));
    let status = conclude(reason, watched, options.tracing.records().as_ref())?;
    left?;
    Ok(status)
}

/// Attaches; asks on a terminal whether what an earlier process has left is to be put back.
fn attach(options: &Options) -> Result<Attached> {
    let mut attach = Attach {
        qmp: options.qmp.clone(),
        told: options.mem.map(|size| size.bytes()),
        rings: RINGS,
        stop_deadline: STOP_DEADLINE,
        journals: journals_folder(),
        restore: options.restore,
    };
    match Attached::new(&attach) {
        Err(AttachError::LeftBehind { sites, .. })
            if io::stdin().is_terminal() && io::stderr().is_terminal() && wants_back(sites)? =>
        {
            attach.restore = true;
            Ok(Attached::new(&attach)?)
        }
        other => Ok(other?),
    }
}

fn wants_back(sites: usize) -> io::Result<bool> {
    let mut terminal = io::stderr();
    write!(
        terminal,
        "vmm: an earlier vmm was killed and has left {sites} functions of this guest changed. \
         Put them back? [y/N] "
    )?;
    terminal.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Sums up and says how it ended.
fn conclude(reason: Reason, watched: Watched, to: Option<&Destination>) -> Result<Status> {
    let Watched { panicked, reset, summary, too_early, error } = watched;
    if let Some(OwnTrace { summary, lasted, times }) = summary {
        let text = summary::summary(&Totals::from(&summary), &summary.functions, lasted);
        let times = summary::times(&times);
        let file = to.filter(|_| error.is_none()).and_then(Destination::told);
        say(format!("{text}{times}{}", file.unwrap_or_default()).trim_end());
    }
    match error {
        Some(error) if is_broken_pipe(&error) => return Ok(Status::Success),
        Some(error) => return Err(error),
        None => {}
    }
    if too_early {
        say("there is no trace: it ended before the guest's kernel could be traced");
    }
    Ok(match reason {
        Reason::Signal(signal) => Status::Interrupted(signal),
        Reason::MonitorLost => bail!(
            "QEMU's monitor has hung up although QEMU runs; the guest was left as it was found"
        ),
        Reason::Guest(GuestExit::Panicked) => panic_said(),
        _ if panicked => panic_said(),
        Reason::Watcher if reset => {
            say("the guest was reset, which ends the trace; it runs on");
            Status::GuestRebooted
        }
        Reason::Guest(GuestExit::PowerOff) => Status::Success,
        Reason::Guest(exit) => {
            say(&exit);
            if exit == GuestExit::Reboot { Status::GuestRebooted } else { Status::GuestCrashed }
        }
        Reason::Watcher => bail!("the guest's kernel is no longer watched"),
    })
}
