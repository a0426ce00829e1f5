//! What the tracer `count` can be told.

use clap::Args;
use vmm::control::protocol::CountRequest;

use super::output::CountForm;
use super::trace_options::Tracer;

/// When counts are shown, and how.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Options of the tracer count")]
pub struct CountOptions {
    /// Print what was counted every so many seconds, and begin anew
    #[arg(short, long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    interval: Option<u64>,

    /// Print the time of day above each table
    #[arg(short = 'T', long)]
    timestamp: bool,

    /// Print only the N functions that were called most
    #[arg(long, value_name = "N")]
    top: Option<usize>,

    /// Print one JSON object in place of each table
    #[arg(long)]
    json: bool,
}

impl CountOptions {
    /// Whether nothing is asked for.
    pub fn is_unused(&self) -> bool {
        self.interval.is_none() && !self.timestamp && self.top.is_none() && !self.json
    }

    /// What is asked for.
    pub fn request(&self) -> CountRequest {
        match self.interval {
            Some(seconds) => CountRequest { interval_ms: seconds * 1000 },
            None => CountRequest::default(),
        }
    }

    /// How it is shown, if `tracer` counts the functions that `filter` names.
    pub fn form(&self, tracer: Option<Tracer>, filter: &[String]) -> Option<CountForm> {
        (tracer == Some(Tracer::Count)).then(|| CountForm {
            pattern: if filter.is_empty() { "*".to_owned() } else { filter.join(" ") },
            each_interval: self.interval.is_some(),
            timestamp: self.timestamp,
            top: self.top,
            json: self.json,
        })
    }
}
