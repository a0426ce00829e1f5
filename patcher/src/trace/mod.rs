//! Tracing: which functions, what is recorded, and how it comes out.

pub mod filter;
pub mod merge;
pub mod ring;
