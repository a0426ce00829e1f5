//! The user's terminal as the guest's console: raw input, the keys that leave it, and the way back.

use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, isatty, tcgetattr,
    tcgetpgrp, tcsetattr,
};

use crate::signals;

/// The key that introduces a command to us instead of going to the guest: Ctrl-a.
const ESCAPE: u8 = 0x01;

/// What Ctrl-a h shows.
pub const ESCAPE_HELP: &str = "\
Ctrl-a x  end the guest and leave
Ctrl-a a  send Ctrl-a to the guest
Ctrl-a h  show this help";

/// The terminal as it was found. Set once and never changed, so a signal handler may read it.
static FOUND: OnceLock<Found> = OnceLock::new();

/// Whether the terminal is in raw mode now.
static RAW: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
struct Found {
    terminal: OwnedFd,
    modes: Termios,
}

/// The terminal in raw mode. Dropping it restores the terminal, as do a panic of any thread and a
/// fatal signal.
#[derive(Debug)]
pub struct RawTerminal(());

impl RawTerminal {
    /// Makes the terminal `input` raw: every key, Ctrl-C too, is the guest's. Output processing
    /// stays on, so that lines of our own still start at the left edge.
    ///
    /// `None` if `input` is no terminal, or if this process is in its background, where touching
    /// it would stop the process.
    ///
    /// # Errors
    /// The terminal refuses, or this process has made one raw before; it has only one.
    pub fn enter(input: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        if !is_foreground_terminal(input) {
            return Ok(None);
        }
        let modes = tcgetattr(input)?;
        let raw = raw_input(modes.clone());
        FOUND
            .set(Found { terminal: input.try_clone_to_owned()?, modes })
            .map_err(|_| io::Error::other("a terminal was in raw mode before"))?;
        restore_on_panic();
        signals::restore_terminal_on_fatal_signals()?;
        RAW.store(true, Ordering::SeqCst);
        let guard = Self(());
        tcsetattr(input, OptionalActions::Now, &raw)?;
        Ok(Some(guard))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts the terminal back as it was found, if it is raw. May be called in a signal handler.
pub fn restore() {
    if RAW.swap(false, Ordering::SeqCst)
        && let Some(found) = FOUND.get()
    {
        // A terminal that is gone by now needs no restoring, and nobody is left to be told.
        let _ = tcsetattr(&found.terminal, OptionalActions::Now, &found.modes);
    }
}

/// Whether keys typed at `input` are this process's to read.
fn is_foreground_terminal(input: BorrowedFd<'_>) -> bool {
    isatty(input) && tcgetpgrp(input).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// The modes with input passed on byte by byte, unprocessed and without echo.
fn raw_input(mut modes: Termios) -> Termios {
    modes.input_modes -= InputModes::BRKINT
        | InputModes::ICRNL
        | InputModes::IGNCR
        | InputModes::INLCR
        | InputModes::ISTRIP
        | InputModes::IXON
        | InputModes::PARMRK;
    modes.local_modes -= LocalModes::ECHO
        | LocalModes::ECHONL
        | LocalModes::ICANON
        | LocalModes::IEXTEN
        | LocalModes::ISIG;
    modes.special_codes[SpecialCodeIndex::VMIN] = 1;
    modes.special_codes[SpecialCodeIndex::VTIME] = 0;
    modes
}

/// Restores the terminal before the panic's message is printed, so that it can be read.
fn restore_on_panic() {
    let earlier = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        restore();
        earlier(panic);
    }));
}

/// What a key means to us rather than to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// End the guest.
    Quit,
    /// Show what keys there are.
    Help,
}

/// Separates the escape's commands from what is typed for the guest, across reads.
#[derive(Debug, Default)]
pub struct Escapes {
    pending: bool,
}

impl Escapes {
    /// Appends what is meant for the guest to `guest` and hands each command to `command`, in the
    /// order typed. After the escape, a key that is no command goes to the guest alone.
    pub fn feed(&mut self, typed: &[u8], guest: &mut Vec<u8>, mut command: impl FnMut(Command)) {
        for &key in typed {
            if !self.pending {
                self.pending = key == ESCAPE;
                if !self.pending {
                    guest.push(key);
                }
                continue;
            }
            self.pending = false;
            match key {
                b'x' | b'X' => command(Command::Quit),
                b'h' | b'H' | b'?' => command(Command::Help),
                b'a' | b'A' => guest.push(ESCAPE),
                other => guest.push(other),
            }
        }
    }
}

/// A thread that carries standard input to the guest's console. It ends with its input; dropping
/// this ends it too.
#[derive(Debug)]
pub struct Pump {
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    /// Carries `input` to `guest`, which says by `false` that the guest takes no more.
    ///
    /// Where `keys` are typed by a person, the escape's commands are taken out and handed to it;
    /// otherwise every byte is the guest's.
    ///
    /// # Errors
    /// The thread or its pipe can't be had.
    pub fn start(
        input: OwnedFd,
        guest: impl FnMut(&[u8]) -> bool + Send + 'static,
        keys: Option<Box<dyn FnMut(Command) + Send>>,
    ) -> io::Result<Self> {
        let (stopped, stop) = io::pipe()?;
        let thread = thread::Builder::new()
            .name("console-input".into())
            .spawn(move || pump(&input, &stopped, guest, keys))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        // Closing the pipe's last writer is what the thread sees.
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic in there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

fn pump(
    input: &OwnedFd,
    stopped: &PipeReader,
    mut guest: impl FnMut(&[u8]) -> bool,
    mut keys: Option<Box<dyn FnMut(Command) + Send>>,
) {
    let mut escapes = Escapes::default();
    let mut buffer = [0; 1024];
    let mut for_guest = Vec::with_capacity(buffer.len());
    loop {
        // poll takes files and /dev/null too, which are always ready, where epoll would refuse.
        let mut ready = [
            PollFd::new(input, PollFlags::IN),
            PollFd::from_borrowed_fd(stopped.as_fd(), PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return,
        }
        if !ready[1].revents().is_empty() {
            return;
        }
        // A hang-up is read as well: it gives what is left, then the end.
        let typed = match rustix::io::read(input, &mut buffer) {
            Ok(0) => return,
            Ok(length) => &buffer[..length],
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(_) => return,
        };
        for_guest.clear();
        match &mut keys {
            Some(command) => escapes.feed(typed, &mut for_guest, command),
            None => for_guest.extend_from_slice(typed),
        }
        if !for_guest.is_empty() && !guest(&for_guest) {
            return;
        }
    }
}
