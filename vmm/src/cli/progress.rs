//! One line on a terminal that changes while something goes on.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use rustix::termios::tcgetwinsize;

/// How often the line changes at most.
const INTERVAL: Duration = Duration::from_millis(250);

/// Columns of a terminal that does not tell, or claims too few to be read.
const NARROWEST: usize = 40;

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
            // A line that is wrapped can't be written over.
            let columns = tcgetwinsize(io::stderr()).map_or(0, |size| usize::from(size.ws_col));
            let text = cut(&text(), columns.max(NARROWEST) - 1);
            // Whether somebody sees it changes nothing.
            let _ = write!(io::stderr(), "\r{text}\x1b[K");
        }
    }

    /// Takes the line away, so that lasting ones can be printed.
    pub fn clear(&mut self) {
        if self.shown.take().is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// As much of `text` as fits `columns`, which is seen to be cut.
fn cut(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return text.to_string();
    }
    text.chars().take(columns.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_never_has_more_columns_than_there_are() {
        assert_eq!(cut("12 µs", 5), "12 µs");
        assert_eq!(cut("waiting for long", 8), "waiting…");
    }
}
