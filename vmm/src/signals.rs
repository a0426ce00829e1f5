//! Signals: those that ask for an end in good order, and those that leave no time for one.

// Handlers for faults are installed by sigaction itself: the safe wrappers refuse these signals.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::thread;

use libc::{SIGABRT, SIGBUS, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGQUIT, SIGSEGV, SIGTERM};
use signal_hook::iterator::Signals;

use crate::terminal;

/// A signal by which somebody asks the program to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndSignal {
    /// The terminal went away.
    Hangup,
    /// Ctrl-C.
    Interrupt,
    /// `kill`.
    Terminate,
}

impl EndSignal {
    const ALL: [Self; 3] = [Self::Hangup, Self::Interrupt, Self::Terminate];

    fn number(self) -> i32 {
        match self {
            EndSignal::Hangup => SIGHUP,
            EndSignal::Interrupt => SIGINT,
            EndSignal::Terminate => SIGTERM,
        }
    }

    fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|signal| signal.number() == number)
    }

    /// The exit status by which a shell shows that this signal ended a program: 128 and its number.
    pub fn exit_status(self) -> u8 {
        match self {
            EndSignal::Hangup => 129,
            EndSignal::Interrupt => 130,
            EndSignal::Terminate => 143,
        }
    }
}

/// Calls `on_first` at the first signal that asks for an end. A second one, should the orderly end
/// take longer than the user's patience, ends the process at once with the terminal restored.
///
/// # Errors
/// The handlers or the thread that waits for them can't be installed.
pub fn on_end_signal(on_first: impl FnOnce(EndSignal) + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new(EndSignal::ALL.map(EndSignal::number))?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        let mut on_first = Some(on_first);
        for signal in signals.forever().filter_map(EndSignal::from_number) {
            match on_first.take() {
                Some(on_first) => on_first(signal),
                None => {
                    terminal::restore();
                    signal_hook::low_level::exit(signal.exit_status().into());
                }
            }
        }
    })?;
    Ok(())
}

/// Signals after which the process is dead at once.
const FATAL: [i32; 6] = [SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGQUIT, SIGSEGV];

/// What handled each of [`FATAL`] before; the standard library's own handler reports stack
/// overflows and must have its turn.
static EARLIER: OnceLock<[libc::sigaction; FATAL.len()]> = OnceLock::new();

/// Has the terminal restored before a fatal signal ends the process.
///
/// # Errors
/// The handlers can't be installed.
pub fn restore_terminal_on_fatal_signals() -> io::Result<()> {
    let mut earlier = [const { MaybeUninit::<libc::sigaction>::zeroed() }; FATAL.len()];
    for (signal, earlier) in FATAL.into_iter().zip(&mut earlier) {
        // SAFETY: a null new action only reads the present one into `earlier`, which is large
        // enough.
        check(unsafe { libc::sigaction(signal, ptr::null(), earlier.as_mut_ptr()) })?;
    }
    // SAFETY: sigaction has filled in every element, and all-zero is a valid value besides.
    if EARLIER.set(earlier.map(|action| unsafe { action.assume_init() })).is_err() {
        return Ok(());
    }
    for signal in FATAL {
        // SAFETY: all-zero is a valid sigaction: default action, empty mask, no flags.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction =
            fatal as extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `fatal` has the signature that SA_SIGINFO asks for and does only what may be
        // done in a signal handler.
        check(unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) })?;
    }
    Ok(())
}

/// Restores the terminal and lets the signal end the process, by the handler that was there earlier
/// if that has something to say.
extern "C" fn fatal(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    terminal::restore();
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo.
    let by_kernel = unsafe { (*info).si_code > 0 };
    let is_fault = matches!(signal, SIGBUS | SIGFPE | SIGILL | SIGSEGV);
    let index = FATAL.iter().position(|&fatal| fatal == signal);
    if let (true, true, Some(index), Some(earlier)) = (is_fault, by_kernel, index, EARLIER.get()) {
        // The instruction at fault is run again, and the earlier handler sees it as it was.
        // SAFETY: `earlier` is what sigaction itself reported for this signal.
        unsafe { libc::sigaction(signal, &raw const earlier[index], ptr::null_mut()) };
        return;
    }
    // Nothing comes again by itself. The signal sent here waits until this handler is left.
    // SAFETY: both may be called in a signal handler.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

fn check(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
