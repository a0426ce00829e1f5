//! Guests that QEMU runs: of other architectures too, and by its own processor emulation where there
//! is no KVM for them.
//!
//! [`Qemu`] starts a QEMU of its own and is a [`patcher::machine::Machine`]; [`Attached`] is a guest that
//! somebody else's QEMU runs. The guest's memory is a
//! file that QEMU and this process both map. vCPUs are stopped, looked at and given new text through
//! QEMU's gdbstub: translated code does not notice what is written to shared memory, but it does
//! notice what the gdbstub writes. Everything else goes through the mapping.

mod attach;
mod board;
mod claim;
mod clock;
mod end;
mod found;
mod gdb;
mod guest;
mod ivshmem;
mod launch;
mod machine;
mod memory;
mod process;
mod qmp;
mod stub;
mod xml;

pub use crate::exit::GuestExit;
pub use attach::{Attach, AttachError, Attached, DetachError};
pub use board::{Architecture, NoArchitecture};
pub use claim::{ClaimError, journals_folder};
pub use found::RegionMemory;
pub use gdb::GdbError;
pub use ivshmem::IvshmemError;
pub use launch::{Accelerator, Launch, QemuError};
pub use machine::Qemu;
pub use qmp::QmpError;
