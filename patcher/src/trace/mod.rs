//! Tracing: which functions, what is recorded, and how it comes out.
//!
//! A [`tracer::Tracer`] traces one guest for several clients at once; a [`session::Session`] is one
//! with a single client.

pub mod calls;
mod client;
mod context;
mod counts;
mod errors;
pub mod filter;
mod gaps;
pub mod graph;
mod kind;
mod latency;
pub mod merge;
mod names;

pub mod recording;
pub mod ring;
pub mod select;
pub mod session;
pub mod sink;
mod tasks;
pub mod tracer;
pub mod values;
