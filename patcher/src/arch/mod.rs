//! Everything that differs between architectures.

pub mod x86_64;
