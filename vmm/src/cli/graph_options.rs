//! What the tracer `graph` can be told.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use humantime::parse_duration;
use patcher::trace::sink::GraphColumns;
use vmm::control::protocol::{GraphRequest, TraceRequest};

use super::trace_options::Tracer;

/// What of calls and returns is wanted, and how it is shown.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Options of the tracer graph")]
pub struct GraphOptions {
    /// Show only calls that are nested in fewer than N calls of the trace
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_depth: Option<u32>,

    /// Show only functions that match, and what is called from them as far as it is traced; may be given several
    /// times
    #[arg(long, value_name = "GLOB", value_parser = NonEmptyStringValueParser::new())]
    graph_function: Vec<String>,

    /// Show only returns, of calls that took no less than this: a number with a unit, such as 100us
    #[arg(long, value_name = "TIME", value_parser = parse_threshold)]
    threshold: Option<Duration>,

    /// Draw a flame graph as well: where the time went, by task and stack of calls, as a picture that browsers
    /// open
    #[arg(long, value_name = "FILE.svg")]
    flame: Option<PathBuf>,

    #[command(flatten)]
    columns: ColumnOptions,
}

/// More columns of the text.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ColumnOptions {
    /// Show the task of each line, in text of a trace of returns
    #[arg(long)]
    funcgraph_proc: bool,

    /// Show the time of each line, likewise
    #[arg(long)]
    funcgraph_abstime: bool,
}

/// A time of at least a nanosecond, by its option.
fn parse_threshold(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(Duration::ZERO) => Err("a time must be more than zero".into()),
        Ok(time) if u64::try_from(time.as_nanos()).is_ok() => Ok(time),
        Ok(_) => Err("that is longer than any guest runs".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// What a trace was asked for makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Contradiction(pub String);

/// The request, if it makes sense.
///
/// # Errors
/// [`Contradiction`].
pub fn checked(request: TraceRequest) -> Result<TraceRequest, Contradiction> {
    request.check().map_err(Contradiction)?;
    Ok(request)
}

impl GraphOptions {
    /// Whether nothing is asked for.
    pub fn is_unused(&self) -> bool {
        self.request() == GraphRequest::default() && self.flame.is_none()
    }

    /// Whether the picture that is wanted can be made of a trace by `tracer`, or of what was recorded if there is
    /// none.
    ///
    /// # Errors
    /// It is none of returns.
    pub fn check_flame(&self, tracer: Option<Tracer>) -> Result<(), Contradiction> {
        match (&self.flame, tracer) {
            (None, _) | (_, None | Some(Tracer::Graph)) => Ok(()),
            (Some(_), Some(_)) => Err(Contradiction(
                "a flame graph is made of returns: it needs the tracer graph".into(),
            )),
        }
    }

    /// The picture that is wanted.
    pub fn flame(&self) -> Option<PathBuf> {
        self.flame.clone()
    }

    /// What is asked for.
    pub fn request(&self) -> GraphRequest {
        GraphRequest {
            max_depth: self.max_depth,
            functions: self.graph_function.clone(),
            threshold_ns: self.threshold.and_then(|time| u64::try_from(time.as_nanos()).ok()),
        }
    }

    /// How it is shown.
    pub fn columns(&self) -> GraphColumns {
        self.columns.columns()
    }
}

impl ColumnOptions {
    /// How it is shown.
    pub fn columns(self) -> GraphColumns {
        GraphColumns { absolute_time: self.funcgraph_abstime, task: self.funcgraph_proc }
    }
}
