//! `vmm report`: reads a recording back, and makes it into any other form.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result, bail};
use clap::Args;
use patcher::trace::recording::Recording;
use patcher::trace::sink::{Event, Sink, Tracer};
use rustc_hash::FxHashMap;

use super::graph_options::ColumnOptions;
use super::output::{Destination, Format, Output, Records};
use super::progress::Progress;
use super::status::Status;
use super::summary::{self, grouped};
use super::{is_broken_pipe, say};

/// Read a recording of a trace back, as text or in another form
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// The recording: what vmm run, attach or trace have written with --format vmm
    #[arg(value_name = "FILE")]
    recording: PathBuf,

    /// The form. By default what the output's name ends with tells: .dat, .json, .pftrace, .vmmrec;
    /// else it is ftrace
    #[arg(long, value_name = "FORMAT")]
    format: Option<Format>,

    /// Write to a file; - is standard output
    #[arg(short, long, value_name = "OUT", default_value = "-")]
    output: Output,

    /// Draw a flame graph of a trace of returns: where the time went, by task and stack of calls, as a picture
    /// that browsers open
    #[arg(long, value_name = "FILE.svg")]
    flame: Option<PathBuf>,

    #[command(flatten)]
    columns: ColumnOptions,
}

const AFTER_HELP: &str = "\
A recording whose writer was killed is read up to the last flush; what can't be read is told.

Exit status:
  0  all that there is was written
  1  it is no recording, or can't be read or written; standard error says which
  2  the command line makes no sense

Examples:
  Show a recording as tracefs would:
    vmm report trace.vmmrec | less

  Open it in KernelShark:
    vmm report trace.vmmrec -o trace.dat && kernelshark trace.dat

  See where the time went:
    vmm report graph.vmmrec -o /dev/null --flame graph.svg";

/// What a recording held, for those who want it in short.
#[derive(Default)]
struct Tally {
    events: u64,
    missed: u64,
    first_ns: Option<u64>,
    last_ns: u64,
    /// Calls by the function's name.
    calls: FxHashMap<Box<str>, u64>,
    /// Calls of functions beyond those.
    others: u64,
}

/// Functions that are told apart at most: a file can name any number.
const MAX_FUNCTIONS: usize = 1 << 18;

impl Tally {
    fn count(&mut self, event: &Event<'_>) {
        self.events += 1;
        self.missed = self.missed.saturating_add(event.missed);
        self.first_ns.get_or_insert(event.time_ns);
        self.last_ns = event.time_ns;
        if !event.kind.is_call() {
            return;
        }
        if let Some(calls) = self.calls.get_mut(event.function.text) {
            *calls += 1;
        } else if self.calls.len() < MAX_FUNCTIONS {
            self.calls.insert(event.function.text.into(), 1);
        } else {
            self.others += 1;
        }
    }

    fn lasted(&self) -> Duration {
        let first = self.first_ns.unwrap_or(self.last_ns);
        Duration::from_nanos(self.last_ns.saturating_sub(first))
    }

    /// Calls of each function, most first.
    fn calls(&mut self) -> Vec<(Box<str>, u64)> {
        let mut calls: Vec<_> = self.calls.drain().collect();
        calls.sort_by(|(a_name, a), (b_name, b)| b.cmp(a).then_with(|| a_name.cmp(b_name)));
        calls
    }
}

/// Reads it.
///
/// # Errors
/// It is no recording, or it can't be read or written.
pub fn run(options: &Options) -> Result<Status> {
    let shown = options.recording.display();
    let unreadable = || format!("the recording {shown} can't be read");
    let file = File::open(&options.recording).with_context(unreadable)?;
    let size = file.metadata().with_context(unreadable)?.len();
    let mut recording =
        Recording::open(BufReader::with_capacity(1 << 20, file)).with_context(unreadable)?;
    let columns = options.columns.columns();
    let to = Destination {
        output: options.output.clone(),
        format: options.format,
        columns,
        counts: None,
        flame: options.flame.clone(),
    };
    if options.flame.is_some() && recording.beginning().tracer != Tracer::Graph {
        bail!(
            "{shown} tells of no returns, so that there is no flame graph of it: record it by graph"
        );
    }
    let mut records = Records::open(&to, &[&options.recording], Arc::default())?;
    let name = records.name().to_owned();
    let broken = |error: io::Error| {
        Error::new(error).context(format!("the trace can't be written to {name}"))
    };
    let mut progress = Progress::new(records.are_on_stdout());
    let mut tally = Tally::default();
    let release = recording.beginning().release.to_owned();
    let converted = convert(&mut recording, &mut records, &mut tally, |at, events| {
        progress.show(|| {
            let share = at.min(size) * 100 / size.max(1);
            format!("{share} % of {shown}, {}", summary::counted(events, "event"))
        });
    });
    progress.clear();
    // What there is in front of what makes no sense is worth having, as is what was flushed.
    let entries = recording.ended().map_or(tally.events + tally.missed, |(_, entries)| entries);
    let read = match converted {
        Ok(read) => records.end(tally.events, entries.max(tally.events)).map(|()| read),
        Err(error) => Err(error),
    };
    let read = match read.map_err(broken) {
        Err(error) if is_broken_pipe(&error) => return Ok(Status::Success),
        read => read?,
    };
    let lost = entries.saturating_sub(tally.events);
    let (lasted, calls) = (tally.lasted(), tally.calls());
    let text = summary::recorded(&release, (tally.events, lost), &calls, tally.others, lasted);
    let times = summary::times(&records.times(summary::TOP));
    say(format!("{text}{times}{}", to.told().unwrap_or_default()).trim_end());
    if let Some(tail) = recording.tail() {
        let left = size.saturating_sub(tail.at);
        say(format!(
            "{shown} was not ended in order: {tail}, and {} bytes are left out",
            grouped(left)
        ));
    } else if read.is_ok() && recording.ended().is_none() {
        say(format!("{shown} was not ended in order; what was written last may be missing"));
    }
    read.with_context(unreadable)?;
    Ok(Status::Success)
}

/// Writes all that can be read. An error of writing is the outer one, of reading the inner.
fn convert<R: io::Read>(
    recording: &mut Recording<R>,
    records: &mut Records,
    tally: &mut Tally,
    mut tell: impl FnMut(u64, u64),
) -> io::Result<Result<(), patcher::trace::recording::RecordingError>> {
    records.begin(&recording.beginning())?;
    loop {
        let mut written = Ok(());
        let more = recording.next(|event| {
            if written.is_ok() {
                tally.count(event);
                written = records.event(event);
            }
        });
        written?;
        tell(recording.position(), tally.events);
        match more {
            Ok(true) => {}
            Ok(false) => return Ok(Ok(())),
            Err(error) => return Ok(Err(error)),
        }
    }
}
