//! What the exit status says. `docs/user-guide.md` has the same table.

use std::process::ExitCode;

use crate::signals::EndSignal;

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The command did what was asked; a guest ended by powering itself off.
    Success,
    /// Something failed, and one sentence on stderr said what.
    Failure,
    /// The command line was wrong; nothing was done.
    Usage,
    /// The guest rebooted, which ends it here.
    GuestRebooted,
    /// The guest's kernel panicked.
    GuestPanicked,
    /// The virtual machine can't go on: a triple fault, or KVM gave up on a vCPU.
    GuestCrashed,
    /// Until the time was over somebody was inside a function that was to be patched.
    InUse,
    /// The user ended it by a signal, or by the console's escape, which counts as SIGINT.
    Interrupted(EndSignal),
}

impl Status {
    /// The number that the shell sees.
    pub fn code(self) -> u8 {
        match self {
            Status::Success => 0,
            Status::Failure => 1,
            Status::Usage => 2,
            Status::GuestRebooted => 3,
            Status::GuestPanicked => 4,
            Status::GuestCrashed => 5,
            Status::InUse => 6,
            Status::Interrupted(signal) => signal.exit_status(),
        }
    }
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        ExitCode::from(status.code())
    }
}
