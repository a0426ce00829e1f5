//! x86_64.

pub mod trampoline;
