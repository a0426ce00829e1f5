//! One script in the lab, from its start to its end.

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::wire::{FRAME_MAX, Report, Request};
use super::{Disconnected, LabError, RunningLab};

/// How long the lab may take to end a script that is killed.
const KILL: Duration = Duration::from_secs(20);

/// How a script ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Its exit status, or 128 and the number of the signal that ended it.
    pub status: u32,
    /// All that it wrote to standard output, or its terminal.
    pub stdout: Vec<u8>,
    /// All that it wrote to standard error.
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
    /// [`Event::Exit`] it does nothing more.
    ///
    /// # Errors
    /// The lab ends.
    pub fn next_event(&mut self, patience: Duration) -> Result<Option<Event>, LabError> {
        let deadline = Instant::now() + patience;
        if self.status.is_some() {
            return Ok(None);
        }
        loop {
            let report = self
                .lab
                .report(deadline)
                .map_err(|Disconnected| self.lab.ended("running a script"))?;
            return Ok(Some(match report {
                None => return Ok(None),
                Some(Report::Stdout(bytes)) => {
                    self.stdout.extend_from_slice(&bytes);
                    Event::Stdout(bytes)
                }
                Some(Report::Stderr(bytes)) => {
                    self.stderr.extend_from_slice(&bytes);
                    Event::Stderr(bytes)
                }
                Some(Report::Exit(status)) => {
                    self.status = Some(status);
                    Event::Exit(status)
                }
                // The rest of a file whose fetching timed out.
                Some(_) => continue,
            }));
        }
    }

    /// Waits until standard output or standard error holds `pattern`, from their beginnings on.
    ///
    /// # Errors
    /// It does not within `timeout`, the script ends before, or the lab does.
    pub fn wait_for(&mut self, pattern: &str, timeout: Duration) -> Result<(), LabError> {
        let deadline = Instant::now() + timeout;
        loop {
            if contains(&self.stdout, pattern) || contains(&self.stderr, pattern) {
                return Ok(());
            }
            if let Some(status) = self.status {
                return Err(LabError::ScriptEnded {
                    status,
                    pattern: pattern.to_owned(),
                    tail: self.tail(),
                });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if self.next_event(left)?.is_none() {
                return Err(LabError::Timeout {
                    what: format!("show {pattern:?}"),
                    waited: timeout,
                    tail: self.tail(),
                });
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
            let left = deadline.saturating_duration_since(Instant::now());
            if self.next_event(left)?.is_none() {
                return Err(LabError::Timeout {
                    what: "end".to_owned(),
                    waited: timeout,
                    tail: self.tail(),
                });
            }
        }
        Ok(Outcome {
            status: self.status.unwrap_or_default(),
            stdout: std::mem::take(&mut self.stdout),
            stderr: std::mem::take(&mut self.stderr),
        })
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

fn contains(bytes: &[u8], pattern: &str) -> bool {
    bytes.windows(pattern.len().max(1)).any(|window| window == pattern.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_found_anywhere() {
        assert!(contains(b"one two", "two"));
        assert!(!contains(b"one tw", "two"));
        assert!(!contains(b"", "two"));
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
