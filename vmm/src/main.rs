//! The `vmm` program.

fn main() {}
