//! Which calls are traced of the functions that are.

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use vmm::control::protocol::{CallsRequest, MAX_ONE_IN};

/// What the guest itself leaves out.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Which calls are traced; the guest itself leaves out the others")]
pub struct CallOptions {
    /// Trace only calls of the task with that number, as ps -L in the guest shows it; may be given several
    /// times, or several with commas
    #[arg(short = 'l', long, value_name = "PID", value_delimiter = ',')]
    pid: Vec<u32>,

    /// Trace only calls of tasks with that name
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    comm: Option<String>,

    /// Trace of each function one call in N, of those that all other filters let through
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_ONE_IN)))]
    sample: Option<u32>,

    /// Trace of each function at most N calls a second, likewise; after a pause up to N at once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_ONE_IN)))]
    rate: Option<u32>,
}

impl CallOptions {
    /// What is asked for.
    pub fn request(&self) -> CallsRequest {
        CallsRequest {
            pids: self.pid.clone(),
            comm: self.comm.clone(),
            one_in: self.sample,
            per_second: self.rate,
        }
    }
}
