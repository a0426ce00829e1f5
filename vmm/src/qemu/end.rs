//! How a guest under QEMU ends, as far as it can be told from outside.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::qmp::Qmp;
use crate::exit::GuestExit;

/// How the guest ended.
#[derive(Default)]
pub(super) struct End {
    /// QEMU has ended.
    pub over: AtomicBool,
    /// We have ended it.
    pub killed: AtomicBool,
    /// How often it was reset.
    pub resets: AtomicU64,
    state: Mutex<EndState>,
    changed: Condvar,
}

#[derive(Default)]
struct EndState {
    /// What QEMU's monitor said about it.
    reason: Option<GuestExit>,
    /// The monitor says no more.
    all_said: bool,
    /// Nobody wants to know any more.
    released: bool,
    exit: Option<GuestExit>,
}

impl End {
    fn state(&self) -> MutexGuard<'_, EndState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn exit(&self) -> Option<GuestExit> {
        self.state().exit.clone()
    }

    pub(super) fn wait(&self, longest: Option<Duration>) -> Option<GuestExit> {
        let until = longest.map(|longest| Instant::now() + longest);
        let mut state = self.state();
        while state.exit.is_none() {
            state = match until {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.checked_duration_since(Instant::now())?;
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        state.exit.clone()
    }

    /// Waits until the monitor says no more, which it does at QEMU's end, or nobody wants to know; tells
    /// whether somebody does.
    pub(super) fn wait_for_silence(&self) -> bool {
        let mut state = self.state();
        while !state.all_said && !state.released {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.released
    }

    /// Lets go whoever waits for the silence.
    pub(super) fn release(&self) {
        self.state().released = true;
        self.changed.notify_all();
    }

    /// Whether [`End::release`] was called.
    pub(super) fn is_released(&self) -> bool {
        self.state().released
    }

    /// Waits for what the monitor says about the guest's end.
    pub(super) fn listen(&self, mut qmp: Qmp) {
        while let Ok(event) = qmp.next_event() {
            if event.name == "RESET" {
                self.resets.fetch_add(1, Ordering::SeqCst);
            }
            if event.name == "SHUTDOWN" {
                self.state().reason = match event.reason.as_deref() {
                    Some("guest-shutdown") => Some(GuestExit::PowerOff),
                    Some("guest-reset" | "subsystem-reset") => Some(GuestExit::Reboot),
                    Some("guest-panic") => Some(GuestExit::Panicked),
                    _ => None,
                };
            }
        }
        self.no_reason_comes();
    }

    pub(super) fn no_reason_comes(&self) {
        self.state().all_said = true;
        self.changed.notify_all();
    }

    /// QEMU has ended, by itself or not.
    pub(super) fn conclude(&self, what: String) {
        let mut state = self.state();
        while !state.all_said {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let killed = self.killed.load(Ordering::SeqCst).then_some(GuestExit::Killed);
        let exit = state.reason.take().or(killed).unwrap_or(GuestExit::QemuEnded { what });
        state.exit = Some(exit);
        self.changed.notify_all();
    }
}
