//! What a guest says on its serial console, as it comes.

use std::io::Read;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most of a console that is kept, in bytes. A guest that says more than this has gone wrong.
const LIMIT: usize = 64 << 20;

/// A guest's console output so far; clones show the same console.
#[derive(Debug, Clone, Default)]
pub struct Console {
    shared: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    ended: bool,
}

/// What was waited for did not come.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConsoleError {
    /// Not in time.
    #[error("the guest's console did not show {pattern:?} within {} s; its last lines are: {tail}", waited.as_secs())]
    Timeout {
        /// What was waited for.
        pattern: String,
        /// For how long.
        waited: Duration,
        /// The end of what was shown.
        tail: String,
    },
    /// The console ended.
    #[error(
        "the guest ended without showing {pattern:?} on its console; its last lines are: {tail}"
    )]
    Ended {
        /// What was waited for.
        pattern: String,
        /// The end of what was shown.
        tail: String,
    },
}

impl Console {
    /// Takes in all that comes from `source`, until it ends.
    pub(crate) fn fill_from(&self, mut source: impl Read) {
        let mut buffer = [0; 4096];
        loop {
            match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(got) => {
                    let mut state = self.state();
                    let room = LIMIT.saturating_sub(state.bytes.len());
                    state.bytes.extend_from_slice(&buffer[..got.min(room)]);
                    self.shared.1.notify_all();
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.state().ended = true;
        self.shared.1.notify_all();
    }

    /// All that was shown so far, with line ends as `\n`.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.state().bytes).replace('\r', "")
    }

    /// The first whole line that contains `pattern`, waiting for it if it has not come yet.
    ///
    /// # Errors
    /// It does not come within `timeout`, or the console ends before.
    pub fn wait_for(&self, pattern: &str, timeout: Duration) -> Result<String, ConsoleError> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        let mut seen = 0;
        loop {
            if let Some(line) = find_line(&state.bytes, &mut seen, pattern) {
                return Ok(line);
            }
            let pattern = || pattern.to_owned();
            if state.ended {
                return Err(ConsoleError::Ended { pattern: pattern(), tail: tail(&state.bytes) });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ConsoleError::Timeout {
                    pattern: pattern(),
                    waited: timeout,
                    tail: tail(&state.bytes),
                });
            }
            state =
                self.shared.1.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the guest has gone, and with it its console.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state().ended
    }

    /// The last lines, on one line, for an error message.
    pub(crate) fn tail(&self) -> String {
        tail(&self.state().bytes)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Searches whole lines from `seen` on, and moves `seen` behind those searched.
fn find_line(bytes: &[u8], seen: &mut usize, pattern: &str) -> Option<String> {
    while let Some(len) = bytes[*seen..].iter().position(|byte| *byte == b'\n') {
        let line = String::from_utf8_lossy(&bytes[*seen..*seen + len]);
        *seen += len + 1;
        if line.contains(pattern) {
            return Some(line.trim_end_matches('\r').to_owned());
        }
    }
    None
}

fn tail(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(2000)..]).into_owned();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if lines.is_empty() {
        return "(it said nothing)".to_owned();
    }
    lines[lines.len().saturating_sub(5)..].join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_only_when_it_is_whole() {
        let console = Console::default();
        let (reader, mut writer) = std::io::pipe().unwrap();
        let filler = std::thread::spawn({
            let console = console.clone();
            move || console.fill_from(reader)
        });
        let write = |writer: &mut std::io::PipeWriter, text: &str| {
            std::io::Write::write_all(writer, text.as_bytes()).unwrap();
        };
        write(&mut writer, "one\r\nVMM-READY x");
        let short = Duration::from_millis(20);
        assert!(matches!(
            console.wait_for("VMM-READY", short),
            Err(ConsoleError::Timeout { tail, .. }) if tail == "one | VMM-READY x"
        ));
        write(&mut writer, "yz\r\n");
        let long = Duration::from_secs(10);
        assert_eq!(console.wait_for("VMM-READY", long).unwrap(), "VMM-READY xyz");
        drop(writer);
        assert!(matches!(console.wait_for("more", long), Err(ConsoleError::Ended { .. })));
        assert_eq!(console.text(), "one\nVMM-READY xyz\n");
        filler.join().unwrap();
    }
}
