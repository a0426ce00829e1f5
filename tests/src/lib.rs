//! What the end-to-end tests share.

pub mod bare;
pub mod capture;
pub mod cycles;
pub mod emulated;
pub mod filtered;
pub mod graph;
pub mod guest;
pub mod lab;
pub mod latency;
pub mod patched;
pub mod recorder;
pub mod redirects;
pub mod samples;
pub mod side_by_side;
