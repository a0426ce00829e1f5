//! Benchmarks of `vmm`.
