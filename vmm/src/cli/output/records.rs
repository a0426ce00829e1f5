//! A trace that is written.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Result, ensure};
use patcher::trace::recording::Recorder;
use patcher::trace::sink::{
    Beginning, Event, FtraceText, JsonLines, Perfetto, Sink, TraceDat, Tracer,
};

use vmm::control::protocol::{Counted, Measured};

use super::counts::CountText;
use super::flame::Flame;
use super::latencies::LatencyText;
use super::profile::Profile;
use super::stream::Out;
use super::{Destination, Format, FunctionTime, Opened, Output, Stream};

/// Where the records go, opened.
pub struct Records {
    writing: Writing,
    /// A regular file, emptied when the trace begins: what it held before stays until then.
    file: Option<File>,
    name: String,
    on_stdout: bool,
    /// Of a trace of returns: which functions took how long.
    profile: Option<Profile>,
    /// The picture that is to be made of that, until the trace begins.
    flame: Option<Flame>,
}

enum Writing {
    TextFile(FtraceText<File>),
    Text(FtraceText<Stream>),
    Json(JsonLines<Out>),
    TraceDat(TraceDat<BufWriter<File>, File>),
    Perfetto(Perfetto<Out>),
    Recording(Recorder<Out>),
    Counts(CountText<Out>),
    Latencies(LatencyText<Out>),
}

impl Records {
    /// Opens the destination, and refuses to write over any of `inputs`. Once `stop` is set, a reader
    /// that takes nothing is not waited for much longer.
    ///
    /// # Errors
    /// It can't be written, is one of `inputs`, or can't have that form.
    pub fn open(to: &Destination, inputs: &[&Path], stop: Arc<AtomicBool>) -> Result<Self> {
        let Opened { file, name, is_file } = to.output.open(inputs)?;
        let is_binary = matches!(to.format(), Format::Perfetto | Format::Vmm);
        ensure!(
            !(is_binary && file.is_terminal()),
            "what was asked for is no text, and can't be shown on a terminal; name a file by -o, or \
             send it through a pipe"
        );
        let kept = if is_file { Some(file.try_clone()?) } else { None };
        let out = |file| match is_file {
            true => Out::File(file),
            false => Out::Stream(Stream { out: file, stop: Arc::clone(&stop) }),
        };
        let writing = match (&to.counts, to.format()) {
            (Some(form), _) => match form.times {
                None => Writing::Counts(CountText::new(form.clone(), out(file))),
                Some(unit) => Writing::Latencies(LatencyText::new(form.clone(), unit, out(file))),
            },
            (None, format) => match format {
                Format::Ftrace => match out(file) {
                    Out::File(file) => {
                        Writing::TextFile(FtraceText::file(file).with_columns(to.columns))
                    }
                    Out::Stream(stream) => {
                        Writing::Text(FtraceText::stream(stream).with_columns(to.columns))
                    }
                },
                Format::Perfetto => Writing::Perfetto(Perfetto::new(out(file))),
                Format::Vmm => Writing::Recording(Recorder::new(out(file))),
                Format::Json => Writing::Json(JsonLines::new(out(file))),
                Format::TraceDat => {
                    ensure!(
                        is_file,
                        "a trace.dat can't be written to {name}: it is put together at the end from \
                     what each CPU did, which takes a file; name one by -o"
                    );
                    let folder = folder(&to.output);
                    let spool = move || tempfile::tempfile_in(&folder);
                    Writing::TraceDat(TraceDat::new(BufWriter::new(file), spool))
                }
            },
        };
        let on_stdout = to.output == Output::Stdout;
        let flame = to.flame.as_ref().map(|path| {
            let output = match &to.output {
                Output::File(output) => Some(output.as_path()),
                Output::Stdout => None,
            };
            let others: Vec<&Path> = inputs.iter().copied().chain(output).collect();
            Flame::open(path, &others)
        });
        let flame = flame.transpose()?;
        Ok(Self { writing, file: kept, name, on_stdout, profile: None, flame })
    }

    /// Whether the records go to standard output.
    pub fn are_on_stdout(&self) -> bool {
        self.on_stdout
    }

    /// What that is called in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The functions that took most time, if the trace tells of returns; so many at most.
    pub fn times(&self, count: usize) -> Vec<FunctionTime> {
        self.profile.as_ref().map(|profile| profile.top(count)).unwrap_or_default()
    }

    /// Takes how often functions were called, which only counts show.
    ///
    /// # Errors
    /// What writing says.
    pub fn counted(&mut self, counted: &Counted) -> io::Result<()> {
        match &mut self.writing {
            Writing::Counts(text) => text.counted(counted),
            _ => Ok(()),
        }
    }

    /// Takes how long calls took, which only latencies show.
    ///
    /// # Errors
    /// What writing says.
    pub fn measured(&mut self, measured: &Measured) -> io::Result<()> {
        match &mut self.writing {
            Writing::Latencies(text) => text.measured(measured),
            _ => Ok(()),
        }
    }

    fn sink(&mut self) -> &mut dyn Sink {
        match &mut self.writing {
            Writing::TextFile(sink) => sink,
            Writing::Text(sink) => sink,
            Writing::Json(sink) => sink,
            Writing::TraceDat(sink) => sink,
            Writing::Perfetto(sink) => sink,
            Writing::Recording(sink) => sink,
            Writing::Counts(text) => text,
            Writing::Latencies(text) => text,
        }
    }
}

/// The folder that a file is in: what is kept for it until the end goes to the same disk.
fn folder(output: &Output) -> PathBuf {
    let parent = match output {
        Output::File(path) => path.parent(),
        Output::Stdout => None,
    };
    match parent {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

impl Sink for Records {
    fn begin(&mut self, beginning: &Beginning<'_>) -> io::Result<()> {
        if let Some(file) = &self.file {
            file.set_len(0)?;
        }
        let mut flame = self.flame.take();
        flame.iter_mut().for_each(|flame| flame.begin(beginning.release));
        self.profile = (beginning.tracer == Tracer::Graph).then(|| Profile::new(flame));
        self.sink().begin(beginning)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        if let Some(profile) = &mut self.profile {
            profile.event(event);
        }
        // Not by `sink`: this is called ten million times a second.
        match &mut self.writing {
            Writing::TextFile(sink) => sink.event(event),
            Writing::Text(sink) => sink.event(event),
            Writing::Json(sink) => sink.event(event),
            Writing::TraceDat(sink) => sink.event(event),
            Writing::Perfetto(sink) => sink.event(event),
            Writing::Recording(sink) => sink.event(event),
            Writing::Counts(text) => Sink::event(text, event),
            Writing::Latencies(text) => Sink::event(text, event),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink().flush()
    }

    fn end(&mut self, written: u64, entries: u64) -> io::Result<()> {
        self.sink().end(written, entries)?;
        self.profile.as_mut().map_or(Ok(()), Profile::draw)
    }
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process};

    use patcher::arch::ByteOrder;
    use patcher::trace::recording::Recording;
    use patcher::trace::sink::{EventKind, GraphColumns, Name, Values};

    use super::*;

    const EVENT: Event<'_> = Event {
        time_ns: 1_000_000,
        kind: EventKind::Call,
        cpu: 0,
        function: Name { id: 0, text: "f", address: 0x1004, offset: 4 },
        caller: Name { id: 1, text: "g", address: 0x2020, offset: 0x20 },
        task: None,
        context: None,
        values: Values::NONE,
        missed: 0,
    };

    const BEGINNING: Beginning<'_> = Beginning {
        tracer: Tracer::Function,
        interrupts: (0, 0),
        cpus: 1,
        contexts: false,
        release: "6.1",
        architecture: "x86_64",
        order: ByteOrder::Little,
    };

    fn to(path: &Path, format: Format) -> Destination {
        let (format, columns) = (Some(format), GraphColumns::default());
        let output = Output::File(path.to_owned());
        Destination { output, format, columns, counts: None, flame: None }
    }

    #[test]
    fn a_file_keeps_what_it_held_until_the_trace_begins() {
        for (format, begins, has) in [
            (
                Format::Ftrace,
                "# tracer: function\n#\n# entries-in-buffer/entries-written: 1/1",
                "f <-g",
            ),
            (Format::Json, "{\"type\":\"begin\"", "\"function\":\"f\""),
            (Format::TraceDat, "\u{17}\u{8}Dtracing6\0", "0000000000001000 T f\n"),
            (Format::Perfetto, "\n", "CPUs, by the tasks"),
        ] {
            let path = env::temp_dir().join(format!("vmm-records-{}", process::id()));
            fs::write(&path, "an earlier trace").unwrap();
            let mut records = Records::open(&to(&path, format), &[], Arc::default()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "an earlier trace");
            records.begin(&BEGINNING).unwrap();
            records.event(&EVENT).unwrap();
            records.end(1, 1).unwrap();
            let written = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            let text = String::from_utf8_lossy(&written);
            assert!(text.starts_with(begins) && text.contains(has), "{text}");
            assert!(!text.contains("an earlier trace"), "{text}");
        }
    }

    #[test]
    fn a_recording_is_flushed_event_by_event() {
        let path = env::temp_dir().join(format!("vmm-recording-{}", process::id()));
        let mut records = Records::open(&to(&path, Format::Vmm), &[], Arc::default()).unwrap();
        records.begin(&BEGINNING).unwrap();
        records.event(&EVENT).unwrap();
        records.flush().unwrap();
        // As if it were killed here.
        let mut recording = Recording::open(File::open(&path).unwrap()).unwrap();
        let mut read = 0;
        assert!(recording.beginning() == BEGINNING);
        while recording.next(|event| read += u32::from(*event == EVENT)).unwrap() {}
        fs::remove_file(&path).unwrap();
        assert_eq!((read, recording.ended(), recording.tail()), (1, None, None));
    }

    #[test]
    fn a_trace_dat_is_not_written_to_a_pipe() {
        let to = Destination { output: Output::Stdout, ..to(Path::new(""), Format::TraceDat) };
        let refused = Records::open(&to, &[], Arc::default()).err().expect("an error").to_string();
        assert!(
            refused.starts_with("a trace.dat can't be written to standard output"),
            "{refused}"
        );
    }
}
