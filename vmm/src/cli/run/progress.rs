//! One line on a terminal that changes while something goes on.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// How often the line changes at most.
const INTERVAL: Duration = Duration::from_millis(250);

/// A line on standard error that is written over again and again; nothing at all unless standard
/// error is a terminal that nothing else is printed on.
#[derive(Debug)]
pub struct Progress {
    on: bool,
    shown: Option<Instant>,
}

impl Progress {
    /// A line that is shown unless `stdout_in_use` puts something else on the same terminal.
    pub fn new(stdout_in_use: bool) -> Self {
        let shared = stdout_in_use && io::stdout().is_terminal();
        Self { on: io::stderr().is_terminal() && !shared, shown: None }
    }

    /// Whether anything is shown.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Shows what `text` gives, if it is time to.
    pub fn show(&mut self, text: impl FnOnce() -> String) {
        if self.on && self.shown.is_none_or(|shown| shown.elapsed() >= INTERVAL) {
            self.shown = Some(Instant::now());
            // Whether somebody sees it changes nothing.
            let _ = write!(io::stderr(), "\r{}\x1b[K", text());
        }
    }

    /// Takes the line away, so that lasting ones can be printed.
    pub fn clear(&mut self) {
        if self.shown.take().is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
