//! Guests that QEMU runs, by its own processor emulation: no KVM is needed.
//!
//! [`Qemu`] starts a `qemu-system-x86_64` of its own and is a [`patcher::machine::Machine`]. The
//! guest's memory is a file that QEMU and this process both map. vCPUs are stopped, looked at and
//! given new text through QEMU's gdbstub: translated code does not notice what is written to shared
//! memory, but it does notice what the gdbstub writes. Everything else goes through the mapping.

mod clock;
mod gdb;
mod launch;
mod machine;
mod memory;
mod process;
mod qmp;
mod xml;

pub use crate::exit::GuestExit;
pub use gdb::GdbError;
pub use launch::{BASE_CMDLINE, Launch, QemuError};
pub use machine::Qemu;
pub use qmp::QmpError;
