//! The user's terminal as the guest's console: raw input, the keys that leave it, and the way back.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, isatty, tcgetattr,
    tcgetpgrp, tcsetattr,
};

use crate::signals;

/// The key that introduces a command to us instead of going to the guest: Ctrl-a.
const ESCAPE: u8 = 0x01;

/// What Ctrl-a h shows.
pub const ESCAPE_HELP: &str = "these keys don't go to the guest
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

/// Takes what there is room for and tells how much that was; an error if no more is ever taken.
pub type Deliver = Box<dyn FnMut(&[u8]) -> io::Result<usize> + Send>;

/// Is told what keys mean to us.
pub type OnCommand = Box<dyn FnMut(Command) + Send>;

/// Keys typed while the guest takes none are kept up to here; the rest is dropped, so that the keys
/// that leave a guest which hangs are still seen.
const TYPED_AHEAD: usize = 4096;

/// How often a guest that has no room for input is asked again.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// A thread that carries standard input to the guest's console. It ends with its input; dropping
/// this ends it too.
#[derive(Debug)]
pub struct Pump {
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    /// Carries `input` to the guest by `deliver`.
    ///
    /// Where `keys` are typed by a person, the escape's commands are taken out and handed to it;
    /// otherwise every byte is the guest's.
    ///
    /// # Errors
    /// The thread or its pipe can't be had.
    pub fn start(input: OwnedFd, deliver: Deliver, keys: Option<OnCommand>) -> io::Result<Self> {
        let (stopped, stop) = io::pipe()?;
        let thread = thread::Builder::new()
            .name("console-input".into())
            .spawn(move || pump(&input, &stopped, deliver, keys))?;
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

fn pump(input: &OwnedFd, stopped: &PipeReader, mut deliver: Deliver, mut keys: Option<OnCommand>) {
    let mut escapes = Escapes::default();
    let mut buffer = [0; 1024];
    let mut for_guest = Vec::with_capacity(buffer.len());
    let mut ended = false;
    loop {
        match deliver(&for_guest) {
            Ok(sent) => drop(for_guest.drain(..sent)),
            Err(_) => return,
        }
        if ended && for_guest.is_empty() {
            return;
        }
        // Keys are read even if the guest takes none, other input waits for it.
        let reads = !ended && (keys.is_some() || for_guest.is_empty());
        let interest = if reads { PollFlags::IN } else { PollFlags::empty() };
        let patience = if for_guest.is_empty() { None } else { Some(&PATIENCE) };
        // poll takes files and /dev/null too, which are always ready, where epoll would refuse.
        let mut ready = [
            PollFd::from_borrowed_fd(stopped.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(input.as_fd(), interest),
        ];
        // A hang-up is reported whether wanted or not, so what has ended is not asked about.
        let asked = if reads { 2 } else { 1 };
        match poll(&mut ready[..asked], patience) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        if !ready[0].revents().is_empty() {
            return;
        }
        if !reads || ready[1].revents().is_empty() {
            continue;
        }
        // After a hang-up as well: that gives what is left, then the end.
        let typed = match rustix::io::read(input, &mut buffer) {
            Ok(length) => &buffer[..length],
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(_) => &[],
        };
        ended = typed.is_empty();
        match &mut keys {
            Some(command) => escapes.feed(typed, &mut for_guest, command),
            None => for_guest.extend_from_slice(typed),
        }
        for_guest.truncate(TYPED_AHEAD);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::sync::mpsc;
    use std::time::Duration;

    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    fn pty() -> (File, File) {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
        let slave = rustix::fs::open(name.as_c_str(), flags, rustix::fs::Mode::empty()).unwrap();
        (master.into(), slave.into())
    }

    fn sorted(typed: &[&[u8]]) -> (Vec<u8>, Vec<Command>) {
        let (mut escapes, mut guest, mut commands) = (Escapes::default(), vec![], vec![]);
        for typed in typed {
            escapes.feed(typed, &mut guest, |command| commands.push(command));
        }
        (guest, commands)
    }

    #[test]
    fn keys_behind_the_escape_are_ours_and_all_others_the_guests() {
        assert_eq!(sorted(&[b"ls\r\x03\x1a\x00\xff"]), (b"ls\r\x03\x1a\x00\xff".to_vec(), vec![]));
        assert_eq!(sorted(&[b"a\x01xb"]), (b"ab".to_vec(), vec![Command::Quit]));
        assert_eq!(sorted(&[b"\x01a\x01A"]), (b"\x01\x01".to_vec(), vec![]));
        assert_eq!(sorted(&[b"\x01h\x01?"]), (vec![], vec![Command::Help, Command::Help]));
        assert_eq!(sorted(&[b"\x01\x01x"]), (b"\x01x".to_vec(), vec![]));
        assert_eq!(sorted(&[b"\x01z"]), (b"z".to_vec(), vec![]));
    }

    #[test]
    fn an_escape_may_come_in_two_reads() {
        assert_eq!(sorted(&[b"\x01", b"", b"x"]), (vec![], vec![Command::Quit]));
    }

    #[test]
    fn a_terminal_that_is_not_ours_is_left_alone() {
        let (_master, slave) = pty();
        assert!(RawTerminal::enter(slave.as_fd()).unwrap().is_none(), "not our controlling one");
        let null = File::open("/dev/null").unwrap();
        assert!(RawTerminal::enter(null.as_fd()).unwrap().is_none());
    }

    #[test]
    fn raw_input_keeps_every_byte_and_the_output_as_it_was() {
        let (mut master, slave) = pty();
        let modes = tcgetattr(&slave).unwrap();
        tcsetattr(&slave, OptionalActions::Now, &raw_input(modes.clone())).unwrap();
        assert_eq!(tcgetattr(&slave).unwrap().output_modes, modes.output_modes);

        let typed: Vec<u8> = (0..=255).collect();
        master.write_all(&typed).unwrap();
        let mut read = vec![];
        (&slave).take(256).read_to_end(&mut read).unwrap();
        assert_eq!(read, typed);
    }

    /// Starts a pump, and gives what it sends.
    fn pumped(input: OwnedFd) -> (Pump, mpsc::Receiver<Vec<u8>>) {
        let (sent, received) = mpsc::channel();
        let send = move |bytes: &[u8]| {
            if !bytes.is_empty() {
                sent.send(bytes.to_vec()).map_err(io::Error::other)?;
            }
            Ok(bytes.len())
        };
        (Pump::start(input, Box::new(send), None).unwrap(), received)
    }

    #[test]
    fn piped_input_arrives_whole_and_the_pump_ends_with_it() {
        let (reader, mut writer) = io::pipe().unwrap();
        let (_pump, received) = pumped(reader.into());
        writer.write_all(b"one\x01x").unwrap();
        drop(writer);
        let mut all = vec![];
        while let Ok(bytes) = received.recv_timeout(LONG) {
            all.extend(bytes);
        }
        assert_eq!(all, b"one\x01x");
        assert_eq!(received.recv(), Err(mpsc::RecvError), "the thread let go of its end");
    }

    #[test]
    fn input_that_is_empty_from_the_start_ends_the_pump() {
        let (_pump, received) = pumped(File::open("/dev/null").unwrap().into());
        assert_eq!(received.recv_timeout(LONG), Err(mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn dropping_the_pump_ends_it_while_its_input_is_silent() {
        let (reader, _writer) = io::pipe().unwrap();
        let (pump, received) = pumped(reader.into());
        drop(pump);
        assert_eq!(received.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }

    #[test]
    fn a_guest_that_takes_no_input_can_still_be_left() {
        let (reader, mut writer) = io::pipe().unwrap();
        let (quit, asked) = mpsc::channel();
        let keys: OnCommand = Box::new(move |command| quit.send(command).unwrap());
        let _pump = Pump::start(reader.into(), Box::new(|_| Ok(0)), Some(keys)).unwrap();
        writer.write_all(&[b'a'; 3 * TYPED_AHEAD]).unwrap();
        writer.write_all(b"\x01x").unwrap();
        assert_eq!(asked.recv_timeout(LONG), Ok(Command::Quit));
    }

    #[test]
    fn a_guest_that_is_slow_loses_no_piped_input() {
        let (reader, mut writer) = io::pipe().unwrap();
        let (sent, received) = mpsc::channel();
        let mut turn = 0;
        let send = move |bytes: &[u8]| {
            turn += 1;
            let taken = if turn % 3 == 0 { bytes.len().min(700) } else { 0 };
            sent.send(bytes[..taken].to_vec()).map_err(io::Error::other)?;
            Ok(taken)
        };
        let _pump = Pump::start(reader.into(), Box::new(send), None).unwrap();
        let text: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
        writer.write_all(&text).unwrap();
        drop(writer);
        let mut all = vec![];
        while let Ok(bytes) = received.recv_timeout(LONG) {
            all.extend(bytes);
        }
        assert_eq!(all, text);
    }
}
