//! Engines that run guests, and the `vmm` program on top of them.
//!
//! [`kvm`] is our own virtual machine monitor; [`devices`] are what its guests find on their ports.

pub mod devices;
pub mod kvm;
