//! Our own virtual machine monitor for x86_64 guests on Linux's KVM.
//!
//! [`Vm`] boots a stock distribution kernel, or a bare test guest, and is a
//! [`patcher::machine::Machine`]: it can be stopped as a whole, looked at and changed. [`probe()`]
//! tells whether this host can do that.

mod acpi;
mod bare;
mod boot;
mod config;
mod cpuid;
mod crew;
pub(crate) mod image;
mod kick;
mod layout;
mod machine;
mod memory;
mod paging;
mod probe;
mod shared;
mod state;
mod traps;
mod vcpu;
mod vm;

pub use crate::exit::GuestExit;
pub use bare::BareGuest;
pub use boot::{BASE_CMDLINE, BootError, LinuxBoot};
pub use config::{Hardware, HardwareError, La57, MAX_CPUS, MAX_RINGS};
pub use image::ImageError;
pub use probe::{Extension, KvmKind, probe};
pub use vm::{Vm, VmError};
