//! Traces and live-patches Linux guests from the hypervisor's side.
//!
//! This library knows what a guest kernel looks like in memory, where its compiler left patchable
//! bytes, and how to redirect them without the guest noticing. It knows no KVM, no QEMU and no
//! terminal: an engine hands it a [`machine::Machine`], and that is all it ever sees of one.
//!
//! The modules stand on each other in this order, each using only those above it:
//! [`addr`], [`mem`], [`journal`], [`region`], [`machine`], [`arch`], [`kernel`], [`stacks`],
//! [`patch`], [`hook`], [`trace`], [`livepatch`].

pub mod addr;
pub mod arch;
pub mod hook;
pub mod journal;
pub mod kernel;
pub mod livepatch;
pub mod machine;
pub mod mem;
pub mod patch;
pub mod region;
pub mod stacks;
#[cfg(any(test, feature = "synthetic"))]
pub mod synthetic;
pub mod trace;
