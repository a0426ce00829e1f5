//! Tracing: which functions, what is recorded, and how it comes out.

pub mod filter;
pub mod merge;
mod names;
pub mod ring;
pub mod session;
pub mod sink;
