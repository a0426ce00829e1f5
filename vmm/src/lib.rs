//! Engines that run guests, and the `vmm` program on top of them.
//!
//! [`kvm`] is our own virtual machine monitor; [`devices`] are what its guests find on their ports.
//! [`qemu`] has QEMU run a guest, where there is no KVM that can. [`control`] makes guests reachable
//! from other terminals. [`image`] reads kernels from their files. [`mod@bench`] measures what
//! stops cost.

pub mod bench;
pub mod control;
pub mod devices;
mod exit;
pub mod image;
pub mod kvm;
pub mod qemu;
mod turn;
