//! `vmm trace`: traces a guest that runs already, from another terminal.
//!
//! The guest's process sends calls as it orders them, and this one makes text of them: the guest's
//! process then spends as little as it can on each client, and knows nothing of formats.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail};
use clap::builder::{NonEmptyStringValueParser, PossibleValue};
use clap::{Args, ValueEnum};
use patcher::arch::ByteOrder;
use patcher::trace::sink::{self, Beginning, Sink};
use vmm::control::protocol::{
    self, Armed, Counted, EndReason, Measured, RefusalKind, TraceRequest,
};
use vmm::control::{Client, ClientError, Message, Name, Stopper};

use super::call_options::CallOptions;
use super::count_options::CountOptions;
use super::graph_options::{Contradiction, GraphOptions, checked};
use super::output::{Destination, Format, Output, Records};
use super::progress::Progress;
use super::reach::connect;
use super::status::Status;
use super::trace_options::{Method, Tracer};
use super::value_options::ValueOptions;
use super::{is_broken_pipe, say, summary};
use crate::signals::{self, EndSignal};

/// Trace the kernel of a guest that runs already
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// The guest, as vmm ps lists it
    name: Name,

    /// How to trace, or snapshot: write what a trace with --overwrite holds now, which goes on recording
    #[arg(value_name = "TRACER")]
    what: What,

    /// Trace only functions that match, with the globs of set_ftrace_filter: *, ?, [a-z]; may be
    /// given several times. By default every function is traced. 'vfs_read: count > 4096' asks for
    /// calls by their arguments
    #[arg(short, long, value_name = "GLOB", value_parser = NonEmptyStringValueParser::new())]
    filter: Vec<String>,

    /// Don't trace functions that match, even if a filter does; may be given several times
    #[arg(short, long, value_name = "GLOB", value_parser = NonEmptyStringValueParser::new())]
    notrace: Vec<String>,

    /// How calls are noticed
    #[arg(long, value_name = "METHOD", default_value = "call")]
    method: Method,

    /// The trace's form. By default what the file's name ends with tells: .dat, .json, .pftrace,
    /// .vmmrec; else it is ftrace
    #[arg(long, value_name = "FORMAT")]
    format: Option<Format>,

    /// Write the trace to a file; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    output: Output,

    /// Keep only the last calls, as many as each CPU's ring holds: nothing is written until the trace
    /// ends, the guest crashes, or vmm trace NAME snapshot asks for it
    #[arg(long)]
    overwrite: bool,

    #[command(flatten)]
    values: ValueOptions,

    #[command(flatten)]
    calls: CallOptions,

    #[command(flatten)]
    graph: GraphOptions,

    #[command(flatten)]
    count: CountOptions,

    /// End the trace after so many seconds
    #[arg(
        short,
        long,
        value_name = "SECONDS",
        help_heading = "Options of the tracers count and latency",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    duration: Option<u64>,
}

/// What is wanted of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// A trace.
    Trace(Tracer),
    /// What a trace that overwrites holds.
    Snapshot,
}

impl ValueEnum for What {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<What>> = LazyLock::new(|| {
            let tracers = Tracer::value_variants().iter().map(|tracer| What::Trace(*tracer));
            tracers.chain([What::Snapshot]).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Trace(tracer) => tracer.to_possible_value(),
            Self::Snapshot => {
                Some(PossibleValue::new("snapshot").help("What a trace with --overwrite holds now"))
            }
        }
    }
}

const AFTER_HELP: &str = "\
The trace goes on until the guest ends or Ctrl-C is pressed; the functions that nobody else traces
are put back then. Others may trace the same guest at the same time.

Exit status:
  0    the guest has ended, or the trace's reader closed the pipe
  1    something failed; standard error says what
  2    the command line makes no sense
  129  SIGHUP
  130  SIGINT
  143  SIGTERM

Examples:
  Watch which functions of the VFS a guest calls, but for one:
    vmm trace guest1 func -f 'vfs_*' -n vfs_getattr

  See what the VFS's reading calls, and how long each of it takes:
    vmm trace guest1 graph --graph-function vfs_read --max-depth 4

  Show which calls of the page allocator took longer than a tenth of a millisecond:
    vmm trace guest1 graph -f '*alloc_pages*' --threshold 100us

  See which files are opened, how, and what comes of it:
    vmm trace guest1 graph -f do_sys_openat2 -f getname_flags --args --ret

  See only the large reads of one process, and of them no more than a hundred a second:
    vmm trace guest1 func -l 1234 -f 'vfs_read: count > 65536' --rate 100

  Count the calls of ext4's functions, and print the ten that are called most every second:
    vmm trace guest1 count -f 'ext4_*' --interval 1 --top 10

  Show how long reads of files take, as a histogram every five seconds:
    vmm trace guest1 latency -f vfs_read --interval 5 -u

  Keep the last calls of each CPU, in case that the guest crashes, and look at them meanwhile:
    vmm trace guest1 func --overwrite -o crash.dat
    vmm trace guest1 snapshot | less

  Record every call, and look at it in KernelShark:
    vmm trace guest1 func -o all.vmmrec
    vmm report all.vmmrec -o all.dat && kernelshark all.dat";

/// How often a guest that is not ready yet is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// How long a guest's process may take to copy its rings.
const SNAPSHOT: Duration = Duration::from_secs(10);

/// What asks for the end of the trace once there is one, and what has asked for it.
#[derive(Default)]
struct Ends {
    signal: Mutex<Option<EndSignal>>,
    stopper: Mutex<Option<Stopper>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Each is only ever replaced as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Traces.
///
/// # Errors
/// The guest can't be reached, its functions not be armed, or the trace not be written.
pub fn run(options: &Options) -> Result<Status> {
    let tracer = match options.what {
        What::Trace(tracer) => Some(tracer),
        What::Snapshot => None,
    };
    let request = checked(TraceRequest {
        tracer: tracer.map_or(protocol::Tracer::Func, protocol::Tracer::from),
        filter: options.filter.clone(),
        notrace: options.notrace.clone(),
        method: options.method.into(),
        graph: options.graph.request(),
        args: options.values.args,
        ret: options.values.ret,
        count: options.count.request(),
        overwrite: options.overwrite,
        calls: options.calls.request(),
    })?;
    if tracer.is_none() && request != TraceRequest::default() {
        let message = "a snapshot is of what is recorded already: what to trace, and how, is told to the \
                       trace with --overwrite";
        return Err(Contradiction(message.into()).into());
    }
    let counts = options.count.form(tracer, &options.filter);
    options.count.check(tracer, options.format)?;
    if counts.is_none() && options.duration.is_some() {
        let message = "--duration is of the tracers count and latency";
        return Err(Contradiction(message.into()).into());
    }
    let stop = Arc::new(AtomicBool::new(false));
    let ends = Arc::new(Ends::default());
    options.graph.check_flame(tracer)?;
    let (columns, flame) = (options.graph.columns(), options.graph.flame());
    let (output, format) = (options.output.clone(), options.format);
    let to = Destination { output, format, columns, counts, flame };
    let records = Records::open(&to, &[] as &[&Path], Arc::clone(&stop))?;
    let mut progress = Progress::new(records.are_on_stdout());
    let (on_signal, stopped) = (Arc::clone(&ends), Arc::clone(&stop));
    signals::on_end_signal(move |signal| {
        *lock(&on_signal.signal) = Some(signal);
        stopped.store(true, Ordering::SeqCst);
        if let Some(stopper) = &mut *lock(&on_signal.stopper) {
            stopper.stop();
        }
    })
    .context("signals can't be handled")?;

    let begun = match tracer {
        Some(_) => begin(&options.name, &request, &stop, &mut progress),
        None => snapshot(&options.name).map(Some),
    };
    progress.clear();
    let result = match begun? {
        Some((client, armed)) => {
            if tracer.is_some() {
                say(summary::armed(&armed));
            }
            if request.overwrite {
                say(summary::RECORDING);
            }
            if let Some(missing) = &armed.missing {
                say(missing);
            }
            let tracer = armed.recorded_by.unwrap_or(request.tracer).into();
            let duration = options.duration.map(Duration::from_secs);
            let lasts = Lasts { ends: &ends, stop: &stop, duration };
            receive(client, (tracer, &armed), (records, &to), &lasts, &mut progress)
        }
        None => Ok(()),
    };
    progress.clear();
    match (result, *lock(&ends.signal)) {
        (Err(error), _) if !is_broken_pipe(&error) => Err(error),
        (_, Some(signal)) => Ok(Status::Interrupted(signal)),
        _ => Ok(Status::Success),
    }
}

/// Has the functions armed, once the guest is ready; `None` if that is no longer wanted.
///
/// # Errors
/// The guest can't be reached, or its functions not be armed.
pub fn begin(
    name: &Name,
    request: &TraceRequest,
    stop: &AtomicBool,
    progress: &mut Progress,
) -> Result<Option<(Client, Armed)>> {
    let mut client = connect(name)?;
    let stopped = || stop.load(Ordering::SeqCst);
    loop {
        match client.trace(request, stopped) {
            Ok(armed) => return Ok(armed.map(|armed| (client, armed))),
            Err(ClientError::Refused(refusal)) if refusal.kind == RefusalKind::NotReady => {
                progress.show(|| refusal.message.clone());
            }
            Err(error) => return Err(error.into()),
        }
        let until = Instant::now() + ASK_AGAIN;
        while Instant::now() < until {
            if stopped() {
                return Ok(None);
            }
            thread::sleep(ASK_AGAIN / 10);
        }
    }
}

/// Asks for what a trace that overwrites holds.
fn snapshot(name: &Name) -> Result<(Client, Armed)> {
    let mut client = connect(name)?;
    let armed = client.snapshot(SNAPSHOT)?;
    Ok((client, armed))
}

/// What ends a trace.
struct Lasts<'e> {
    ends: &'e Ends,
    stop: &'e AtomicBool,
    /// Of one that counts or measures.
    duration: Option<Duration>,
}

/// Writes out what comes until it ends.
fn receive(
    client: Client,
    (tracer, armed): (sink::Tracer, &Armed),
    (mut records, to): (Records, &Destination),
    &Lasts { ends, stop, duration }: &Lasts<'_>,
    progress: &mut Progress,
) -> Result<()> {
    let mut calls = client.into_calls(armed);
    *lock(&ends.stopper) = Some(calls.stopper().context("the connection can't be shared")?);
    if stop.load(Ordering::SeqCst) {
        ask_for_the_end(ends);
    }
    let begun = Instant::now();
    let name = records.name().to_owned();
    let broken = |error: io::Error| {
        Error::new(error).context(format!("the trace can't be written to {name}"))
    };
    let mut written = records.begin(&Beginning {
        tracer,
        interrupts: armed.interrupts,
        cpus: armed.cpus,
        contexts: armed.contexts,
        release: &armed.release,
        architecture: &armed.arch,
        order: if armed.big_endian { ByteOrder::Big } else { ByteOrder::Little },
    });
    let mut events = 0;
    let end = loop {
        if written.is_err() {
            ask_for_the_end(ends);
        }
        let mut result = Ok(());
        let message = calls.next(|event| {
            if written.is_ok() && result.is_ok() {
                result = records.event(event);
                events += u64::from(result.is_ok());
            }
        });
        if written.is_ok() {
            written = result.and_then(|()| records.flush());
        }
        match message {
            Ok(Message::Calls(_)) => {}
            Ok(Message::Counted(counted)) => {
                let is_over = duration.is_some_and(|duration| counted.elapsed >= duration);
                // What comes when the time is over belongs to the last table.
                let last = counted.last || is_over;
                if written.is_ok() {
                    written = records.counted(&Counted { last, ..counted });
                }
                if is_over {
                    ask_for_the_end(ends);
                }
                continue;
            }
            Ok(Message::Measured(measured)) => {
                let is_over = duration.is_some_and(|duration| measured.elapsed >= duration);
                let last = measured.last || is_over;
                if written.is_ok() {
                    written = records.measured(&Measured { last, ..measured });
                }
                if is_over {
                    ask_for_the_end(ends);
                }
                continue;
            }
            Ok(Message::End(end)) => break end,
            Err(error) => {
                // What there is until now is worth having.
                progress.clear();
                written.and_then(|()| records.end(events, events)).map_err(broken)?;
                return Err(error.into());
            }
        }
        progress.show(|| summary::progress(events, calls.missed(), begun.elapsed()));
    };
    progress.clear();
    let written = written.and_then(|()| records.end(events, end.totals.entries()));
    let text = summary::summary(&end.totals, &calls.counts(), end.lasted);
    let file = to.told().filter(|_| written.is_ok());
    let times = summary::times(&records.times(summary::TOP));
    say(format!("{text}{times}{}", file.unwrap_or_default()).trim_end());
    written.map_err(broken)?;
    match (end.error, end.reason) {
        (Some(error), _) => bail!(error),
        (None, EndReason::GuestPanicked) => say("the guest's kernel has panicked"),
        (None, EndReason::GuestReset) => say("the guest was reset, and its kernel is gone"),
        (None, EndReason::GuestEnded) => say("the guest has ended, or its vmm was told to"),
        (None, EndReason::Stopped | EndReason::ClientGone) => {}
    }
    Ok(())
}

fn ask_for_the_end(ends: &Ends) {
    // Once is enough.
    if let Some(mut stopper) = lock(&ends.stopper).take() {
        stopper.stop();
    }
}
