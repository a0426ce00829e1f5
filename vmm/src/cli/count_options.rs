//! What the tracers `count` and `latency` can be told.

use clap::Args;
use vmm::control::protocol::{self, CountRequest};

use super::graph_options::Contradiction;
use super::output::{CountForm, Format, TimeUnit};
use super::trace_options::Tracer;

/// When counts and latencies are shown, and how.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Options of the tracers count and latency")]
pub struct CountOptions {
    /// Print what was added up every so many seconds, and begin anew
    #[arg(short, long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    interval: Option<u64>,

    /// Print the time of day above each table
    #[arg(short = 'T', long)]
    timestamp: bool,

    /// Print only the N functions that were called most, or whose calls took most time together
    #[arg(long, value_name = "N")]
    top: Option<usize>,

    /// Print one JSON object in place of each table
    #[arg(long)]
    json: bool,

    /// Print latencies in microseconds; in nanoseconds by default
    #[arg(short = 'u', long)]
    microseconds: bool,

    /// Print latencies in milliseconds
    #[arg(short = 'm', long, conflicts_with = "microseconds")]
    milliseconds: bool,
}

impl CountOptions {
    /// Whether nothing is asked for.
    pub fn is_unused(&self) -> bool {
        let is_plain = !self.timestamp && !self.json && !self.has_unit();
        self.interval.is_none() && self.top.is_none() && is_plain
    }

    /// Whether a unit of time is asked for.
    fn has_unit(&self) -> bool {
        self.microseconds || self.milliseconds
    }

    /// Sees whether what is asked for makes sense with that tracer.
    ///
    /// # Errors
    /// [`Contradiction`].
    pub fn check(
        &self,
        tracer: Option<Tracer>,
        format: Option<Format>,
    ) -> Result<(), Contradiction> {
        let adds_up = tracer.is_some_and(|tracer| protocol::Tracer::from(tracer).adds_up());
        let message = match tracer {
            _ if !adds_up && !self.is_unused() => {
                "intervals, timestamps, --top, --json and units of time are of the tracers count and \
                 latency"
            }
            Some(Tracer::Count) if self.has_unit() => "counts are no times, and have no unit",
            _ if adds_up && format.is_some() => {
                "counts and latencies are printed as text, or with --json; they have no --format"
            }
            _ => return Ok(()),
        };
        Err(Contradiction(message.into()))
    }

    /// What is asked for.
    pub fn request(&self) -> CountRequest {
        match self.interval {
            Some(seconds) => CountRequest { interval_ms: seconds * 1000 },
            None => CountRequest::default(),
        }
    }

    /// How it is shown, if `tracer` counts or measures the calls of the functions that `filter` names.
    pub fn form(&self, tracer: Option<Tracer>, filter: &[String]) -> Option<CountForm> {
        let unit = match (self.microseconds, self.milliseconds) {
            (true, _) => TimeUnit::Microseconds,
            (false, true) => TimeUnit::Milliseconds,
            (false, false) => TimeUnit::Nanoseconds,
        };
        let times = match tracer {
            Some(Tracer::Count) => None,
            Some(Tracer::Latency) => Some(unit),
            _ => return None,
        };
        Some(CountForm {
            pattern: if filter.is_empty() { "*".to_owned() } else { filter.join(" ") },
            each_interval: self.interval.is_some(),
            timestamp: self.timestamp,
            top: self.top,
            json: self.json,
            times,
        })
    }
}
