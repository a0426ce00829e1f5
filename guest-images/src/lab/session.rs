//! One script in the lab, from its start to its end.

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::wire::{FRAME_MAX, Report, Request};
use super::{Disconnected, LabError, RunningLab};

/// How long the lab may take to end a script that is killed.
const KILL: Duration = Duration::from_secs(20);

/// The most of each output that is kept, in bytes.
const OUTPUT_LIMIT: usize = 256 << 20;

/// How a script ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Its exit status, or 128 and the number of the signal that ended it.
    pub status: u32,
    /// What it wrote to standard output, or its terminal, less what [`Session::next_event`] gave.
    pub stdout: Vec<u8>,
    /// What it wrote to standard error, likewise.
    pub stderr: Vec<u8>,
}

impl Outcome {
    /// Standard output as text, with line ends as `\n`.
    #[must_use]
    pub fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).replace('\r', "")
    }

    /// Standard error as text, with line ends as `\n`.
    #[must_use]
    pub fn stderr_text(&self) -> String {
        String::from_utf8_lossy(&self.stderr).replace('\r', "")
    }
}

/// For messages of tests: status and both outputs, whole.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "status {}\n--- standard output\n{}\n--- standard error\n{}",
            self.status,
            self.stdout_text(),
            self.stderr_text()
        )
    }
}

/// Something that a script did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It wrote to standard output, or its terminal.
    Stdout(Vec<u8>),
    /// It wrote to standard error.
    Stderr(Vec<u8>),
    /// It ended, with that status.
    Exit(u32),
}

/// Standard input and signals for a script; another thread may hold it.
#[derive(Debug)]
pub struct Input {
    stream: UnixStream,
}

/// A script that runs. Dropping it kills what runs of it.
#[derive(Debug)]
pub struct Session<'lab> {
    lab: &'lab mut RunningLab,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    status: Option<u32>,
}

impl Input {
    /// Gives the script bytes to read.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        bytes.chunks(FRAME_MAX).try_for_each(|piece| Request::Input(piece).write_to(&self.stream))
    }

    /// Ends the script's standard input.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn close(&mut self) -> io::Result<()> {
        Request::EndOfInput.write_to(&self.stream)
    }

    /// Sends a signal to the script and the processes that it started.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn signal(&mut self, number: u8) -> io::Result<()> {
        Request::Signal(number).write_to(&self.stream)
    }
}

impl<'lab> Session<'lab> {
    pub(super) fn new(lab: &'lab mut RunningLab) -> Self {
        Self { lab, stdout: Vec::new(), stderr: Vec::new(), status: None }
    }

    /// A way to give the script input and signals.
    ///
    /// # Panics
    /// Never in practice: if the process has no file descriptors left.
    #[must_use]
    pub fn input(&self) -> Input {
        Input { stream: self.lab.stream.try_clone().expect("a socket can be duplicated") }
    }

    /// The next thing that the script does, or `None` if it does nothing for `patience`. After
    /// [`Event::Exit`] it does nothing more. What is given here is not kept: an [`Outcome`] does not
    /// have it, and [`Session::wait_for`] does not search it.
    ///
    /// # Errors
    /// The lab ends.
    pub fn next_event(&mut self, patience: Duration) -> Result<Option<Event>, LabError> {
        let deadline = Instant::now() + patience;
        while self.status.is_none() {
            let report = self
                .lab
                .report(deadline)
                .map_err(|Disconnected| self.lab.ended("running a script"))?;
            return Ok(Some(match report {
                None => return Ok(None),
                Some(Report::Stdout(bytes)) => Event::Stdout(bytes),
                Some(Report::Stderr(bytes)) => Event::Stderr(bytes),
                Some(Report::Exit(status)) => {
                    self.status = Some(status);
                    Event::Exit(status)
                }
                // The rest of a file whose fetching timed out.
                Some(_) => continue,
            }));
        }
        Ok(None)
    }

    /// Takes in the next event and keeps what was written; false if nothing comes until `deadline`.
    fn keep_next(&mut self, deadline: Instant) -> Result<bool, LabError> {
        let event = self.next_event(deadline.saturating_duration_since(Instant::now()))?;
        let (kept, bytes) = match event {
            None => return Ok(false),
            Some(Event::Exit(_)) => return Ok(true),
            Some(Event::Stdout(bytes)) => (&mut self.stdout, bytes),
            Some(Event::Stderr(bytes)) => (&mut self.stderr, bytes),
        };
        if kept.len() + bytes.len() > OUTPUT_LIMIT {
            return Err(LabError::TooMuch { what: "its script wrote", limit: OUTPUT_LIMIT });
        }
        kept.extend_from_slice(&bytes);
        Ok(true)
    }

    /// Waits until standard output or standard error holds `pattern`, from their beginnings on.
    ///
    /// # Errors
    /// It does not within `timeout`, the script ends before, or the lab does.
    pub fn wait_for(&mut self, pattern: &str, timeout: Duration) -> Result<(), LabError> {
        let deadline = Instant::now() + timeout;
        let mut searched = (0, 0);
        loop {
            if find(&self.stdout, &mut searched.0, pattern)
                || find(&self.stderr, &mut searched.1, pattern)
            {
                return Ok(());
            }
            if let Some(status) = self.status {
                return Err(LabError::ScriptEnded {
                    status,
                    pattern: pattern.to_owned(),
                    tail: self.tail(),
                });
            }
            if !self.keep_next(deadline)? {
                return Err(self.timed_out(format!("show {pattern:?}"), timeout));
            }
        }
    }

    /// Waits until the script ends.
    ///
    /// # Errors
    /// It does not within `timeout` (it is killed then), or the lab ends.
    pub fn wait(mut self, timeout: Duration) -> Result<Outcome, LabError> {
        let deadline = Instant::now() + timeout;
        while self.status.is_none() {
            if !self.keep_next(deadline)? {
                return Err(self.timed_out("end".to_owned(), timeout));
            }
        }
        Ok(Outcome {
            status: self.status.unwrap_or_default(),
            stdout: std::mem::take(&mut self.stdout),
            stderr: std::mem::take(&mut self.stderr),
        })
    }

    fn timed_out(&self, what: String, waited: Duration) -> LabError {
        LabError::Timeout { what, waited, tail: self.tail() }
    }

    /// The last lines of both outputs and of the first level's console.
    fn tail(&self) -> String {
        let last = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes);
            let lines: Vec<&str> =
                text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            lines[lines.len().saturating_sub(5)..].join(" | ")
        };
        format!(
            "{} || {} || on the console: {}",
            last(&self.stdout),
            last(&self.stderr),
            self.lab.console().tail()
        )
    }
}

impl Drop for Session<'_> {
    /// The lab runs one script at a time: the next must not find this one.
    fn drop(&mut self) {
        if self.status.is_none() && self.input().signal(9).is_ok() {
            let deadline = Instant::now() + KILL;
            while Instant::now() < deadline {
                match self.next_event(KILL) {
                    Ok(Some(Event::Exit(_)) | None) | Err(_) => break,
                    Ok(Some(_)) => {}
                }
            }
        }
    }
}

/// Whether `bytes` hold `pattern`, which is known not to begin before `searched`.
fn find(bytes: &[u8], searched: &mut usize, pattern: &str) -> bool {
    let pattern = pattern.as_bytes();
    let found = bytes[*searched..].windows(pattern.len().max(1)).any(|window| window == pattern);
    *searched = (bytes.len() + 1).saturating_sub(pattern.len().max(1)).max(*searched);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_found_that_came_in_pieces() {
        let mut searched = 0;
        assert!(!find(b"", &mut searched, "two"));
        assert!(!find(b"one t", &mut searched, "two"));
        assert!(!find(b"one tw", &mut searched, "two"));
        assert!(find(b"one two", &mut searched, "two"));
        assert!(find(b"one two", &mut 0, "one"));
    }

    #[test]
    fn an_outcome_shows_status_and_both_outputs() {
        let outcome = Outcome { status: 3, stdout: b"out\r\n".to_vec(), stderr: b"err\n".to_vec() };
        assert_eq!(
            outcome.to_string(),
            "status 3\n--- standard output\nout\n\n--- standard error\nerr\n"
        );
    }
}
