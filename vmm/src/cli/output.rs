//! Where records and what the guest prints go: opened before the guest starts, so that a path
//! that can't be written costs no boot.

use std::convert::Infallible;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patcher::trace::sink::{Beginning, Event, FtraceText, Sink};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::PIPE_BUF;

/// How long whoever reads the trace may stand in the way of its end.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often a reader that takes nothing is asked again.
const ASK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Where the records go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// To standard output.
    Stdout,
    /// To a file.
    File(PathBuf),
}

impl FromStr for Output {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "-" => Output::Stdout,
            file => Output::File(file.into()),
        })
    }
}

/// Where the records go, opened.
pub struct Records {
    text: Text,
    name: String,
    on_stdout: bool,
}

enum Text {
    /// A regular file. What it held before stays until the trace begins.
    File(File, FtraceText<File>),
    /// A pipe, a terminal, a device.
    Stream(FtraceText<Stream>),
}

impl Records {
    /// Opens `output`, and refuses to write over any of `inputs`. Once `stop` is set, a reader that
    /// takes nothing is not waited for much longer.
    ///
    /// # Errors
    /// It can't be written, or is one of `inputs`.
    pub fn open(output: &Output, inputs: &[&Path], stop: Arc<AtomicBool>) -> Result<Self> {
        let (file, name) = match output {
            Output::Stdout => {
                (File::from(io::stdout().as_fd().try_clone_to_owned()?), "standard output".into())
            }
            Output::File(path) => (create(path, inputs)?, path.display().to_string()),
        };
        let on_stdout = *output == Output::Stdout;
        let text = if file.metadata()?.is_file() && !on_stdout {
            Text::File(file.try_clone()?, FtraceText::file(file))
        } else {
            Text::Stream(FtraceText::stream(Stream { out: file, stop }))
        };
        Ok(Self { text, name, on_stdout })
    }

    /// Whether the records go to standard output.
    pub fn are_on_stdout(&self) -> bool {
        self.on_stdout
    }

    /// What that is called in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn sink(&mut self) -> &mut dyn Sink {
        match &mut self.text {
            Text::File(_, text) => text,
            Text::Stream(text) => text,
        }
    }
}

impl Sink for Records {
    fn begin(&mut self, beginning: &Beginning) -> io::Result<()> {
        if let Text::File(file, _) = &self.text {
            file.set_len(0)?;
        }
        self.sink().begin(beginning)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        // Not by `sink`: this is called ten million times a second.
        match &mut self.text {
            Text::File(_, text) => text.event(event),
            Text::Stream(text) => text.event(event),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink().flush()
    }

    fn end(&mut self, written: u64, entries: u64) -> io::Result<()> {
        self.sink().end(written, entries)
    }
}

/// A file that may take nothing for as long as it pleases.
struct Stream {
    out: File,
    stop: Arc<AtomicBool>,
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stopped = None;
        loop {
            let mut ready = [PollFd::new(&self.out, PollFlags::OUT)];
            match poll(&mut ready, Some(&ASK)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => break,
                Err(error) => return Err(error.into()),
            }
            if self.stop.load(Ordering::SeqCst) {
                let since = *stopped.get_or_insert_with(Instant::now);
                if since.elapsed() >= PATIENCE {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "its reader takes nothing",
                    ));
                }
            }
        }
        // A pipe that is ready takes that much at once; more might be waited for.
        self.out.write(&bytes[..bytes.len().min(PIPE_BUF)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Opens the file that is to hold what the guest prints, empty.
///
/// # Errors
/// It can't be written, or is one of `inputs`.
pub fn console_file(path: &Path, inputs: &[&Path]) -> Result<File> {
    let file = create(path, inputs)?;
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Opens `path` for writing and leaves what it holds.
fn create(path: &Path, inputs: &[&Path]) -> Result<File> {
    let shown = path.display();
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .with_context(|| format!("{shown} can't be written"))?;
    let ours = file.metadata()?;
    for input in inputs {
        let is_input = fs::metadata(input).is_ok_and(|input| same_file(&input, &ours));
        ensure!(!is_input, "{shown} can't be written: it is an input of the guest");
    }
    Ok(file)
}

fn same_file(a: &Metadata, b: &Metadata) -> bool {
    a.is_file() && (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::{env, process, thread};

    use patcher::trace::sink::Name;

    use super::*;

    const EVENT: Event<'_> = Event {
        time_ns: 1_000_000,
        cpu: 0,
        function: Name { id: 0, text: "f" },
        caller: Name { id: 1, text: "g" },
        task: None,
        context: None,
    };

    #[test]
    fn a_file_keeps_what_it_held_until_the_trace_begins() {
        let path = env::temp_dir().join(format!("vmm-records-{}", process::id()));
        fs::write(&path, "an earlier trace").unwrap();
        let mut records = Records::open(&Output::File(path.clone()), &[], Arc::default()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "an earlier trace");
        records.begin(&Beginning { cpus: 1, contexts: false }).unwrap();
        records.event(&EVENT).unwrap();
        records.end(1, 1).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(
            text.starts_with("# tracer: function\n#\n# entries-in-buffer/entries-written: 1/1")
        );
        assert!(text.ends_with("f <-g\n"), "{text}");
    }

    #[test]
    fn inputs_are_not_written_over_whatever_they_are_called() {
        let folder = env::temp_dir();
        let path = folder.join(format!("vmm-input-{}", process::id()));
        fs::write(&path, "a kernel").unwrap();
        let alias = folder.join(".").join(path.file_name().unwrap());
        let refused = console_file(&alias, &[&path]).unwrap_err().to_string();
        let kept = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(refused.contains("is an input of the guest"), "{refused}");
        assert_eq!(kept, "a kernel");
    }

    #[test]
    fn a_reader_that_takes_nothing_does_not_hold_up_the_end() {
        let (mut reader, writer) = io::pipe().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let out = File::from(std::os::fd::OwnedFd::from(writer));
        let mut stream = Stream { out, stop: Arc::clone(&stop) };
        thread::scope(|scope| {
            let writing = scope.spawn(|| {
                let result = stream.write_all(&[b'x'; 1 << 20]);
                drop(stream);
                result
            });
            stop.store(true, Ordering::SeqCst);
            assert_eq!(writing.join().unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        });
        let mut taken = vec![];
        reader.read_to_end(&mut taken).unwrap();
        assert!(!taken.is_empty() && taken.len() < 1 << 20);
    }

    #[test]
    fn a_reader_that_is_gone_is_a_broken_pipe() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let out = File::from(std::os::fd::OwnedFd::from(writer));
        let error = Stream { out, stop: Arc::default() }.write(b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
