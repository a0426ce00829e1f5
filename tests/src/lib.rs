//! End-to-end tests of `vmm`.
