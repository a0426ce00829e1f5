//! What the benchmarks share: a place in this process where a guest's trampolines run natively.

pub mod native;
