//! What the benchmarks share: a place in this process where a guest's trampolines run natively, clocks, and
//! how figures are shown.

pub mod clock;
pub mod figures;
pub mod native;
