//! The guest's console: what it prints goes to a sink, what is typed comes from standard input.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use anyhow::{Context, Result};
use vmm::devices::ConsoleInput;

use super::Reason;
use super::options::Console;
use crate::cli::{LINE_OPEN, output, say};
use crate::terminal::{self, Command, OnCommand, Pump, RawTerminal};

/// What the guest prints, on its way out. A sink that fails is a reason to end.
struct Sink {
    out: File,
    /// Lines of our own appear among the guest's.
    shared: bool,
    name: String,
    reasons: Sender<Reason>,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes);
        if let (true, Ok(length @ 1..)) = (self.shared, &written) {
            LINE_OPEN.store(bytes[length - 1] != b'\n', Ordering::Relaxed);
        }
        if let Err(error) = &written
            && error.kind() != io::ErrorKind::Interrupted
        {
            let reason =
                match error.kind() {
                    io::ErrorKind::BrokenPipe => Reason::ReaderGone,
                    kind => Reason::Console(anyhow::Error::new(io::Error::from(kind)).context(
                        format!("what the guest prints can't be written to {}", self.name),
                    )),
                };
            // Nobody listens any more if the end is under way.
            let _ = self.reasons.send(reason);
        }
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Opens what the guest's console prints to.
///
/// # Errors
/// The file can't be written, or is one of `inputs`.
pub fn sink(
    console: &Console,
    inputs: &[&Path],
    reasons: &Sender<Reason>,
) -> Result<Box<dyn Write + Send>> {
    let (out, name) = match console {
        Console::Off => return Ok(Box::new(io::sink())),
        Console::Stdio => {
            (File::from(io::stdout().as_fd().try_clone_to_owned()?), "standard output".into())
        }
        Console::File(path) => (output::console_file(path, inputs)?, path.display().to_string()),
    };
    let shared = out.is_terminal() && io::stderr().is_terminal();
    Ok(Box::new(Sink { out, shared, name, reasons: reasons.clone() }))
}

/// Standard input, lent to the guest. Dropping it takes it back.
pub struct Typing {
    // In this order: nobody reads from the terminal any more when it is restored.
    _pump: Pump,
    _raw: Option<RawTerminal>,
}

impl Typing {
    /// Carries standard input to the guest, a terminal's keys one by one.
    ///
    /// # Errors
    /// The terminal refuses to be made raw.
    pub fn lend(guest: ConsoleInput, reasons: Sender<Reason>) -> Result<Option<Self>> {
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        let raw = RawTerminal::enter(input.as_fd()).context("the terminal can't be made raw")?;
        if raw.is_none() && input.is_terminal() {
            // In the background: reading would stop the process.
            return Ok(None);
        }
        let keys = raw.is_some().then(|| -> OnCommand {
            say("keys go to the guest; Ctrl-a x leaves, Ctrl-a h shows more");
            Box::new(move |command| match command {
                Command::Quit => drop(reasons.send(Reason::Quit)),
                Command::Help => say(terminal::ESCAPE_HELP),
            })
        });
        let pump = Pump::start(input, Box::new(move |bytes| guest.try_send(bytes)), keys)
            .context("standard input can't be read")?;
        Ok(Some(Self { _pump: pump, _raw: raw }))
    }
}
