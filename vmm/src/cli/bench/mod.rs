//! `vmm bench`: measures what this program costs, on this host.

use anyhow::Result;
use clap::{Args, Subcommand};

use super::status::Status;

mod guests;
mod options;
mod stop_all;

pub use options::Conflict;

/// Measure what tracing and patching cost on this host
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP, disable_help_subcommand = true)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    StopAll(Box<options::Options>),
}

const AFTER_HELP: &str = "\
Example:
  vmm bench stop-all --cpus 1,2 --sites 1,all";

/// Measures.
///
/// # Errors
/// What is wanted can't be measured.
pub fn run(options: &Options) -> Result<Status> {
    match &options.what {
        What::StopAll(options) => stop_all::run(options),
    }
}
