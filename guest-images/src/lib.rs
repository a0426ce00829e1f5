//! Guests for tests and demos: Debian's stock kernels, initramfs archives whose workloads make a
//! known number of calls, captures of a guest's memory, bare guests with every pad that kernels have
//! had, and the nested-KVM lab.
//!
//! What is slow to make is kept in a [`Cache`] on disk, so the first use of a kernel downloads it
//! and later ones do not.

mod apt;
mod architecture;
mod bare;
mod cache;
mod capture;
mod command;
mod console;
mod cpio;
mod gdb;
mod index;
mod initramfs;
mod kernel;
mod lab;
mod qemu;
mod registers;

pub use apt::AptError;
pub use architecture::{Architecture, UnknownArchitecture};
pub use bare::{Bare, BareError, BareFunction};
pub use cache::{Cache, CacheError};
pub use capture::{Capture, CaptureError, CaptureOptions, capture, capture_in};
pub use command::CommandError;
pub use console::{Console, ConsoleError};
pub use cpio::{Archive, FileTooLarge};
pub use index::{Series, UnknownSeries};
pub use initramfs::{Initramfs, InitramfsError};
pub use kernel::{Kernel, KernelError, Module, kernel, kernel_for};
pub use lab::{Event, Input, LAB_CPU, Lab, LabError, Outcome, RunningLab, Session};
pub use qemu::{Qemu, QemuError, QemuOptions};
pub use registers::VcpuRegisters;
