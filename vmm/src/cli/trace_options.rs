//! What the commands that begin to watch a guest can be told about tracing it.

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use vmm::control::protocol::{self, CallsRequest, TraceRequest};

use super::call_options::CallOptions;
use super::count_options::CountOptions;
use super::graph_options::{Contradiction, GraphOptions, checked};
use super::output::{Destination, Format, Output};
use super::value_options::ValueOptions;

/// A trace that is wanted from the beginning.
#[derive(Debug, Args)]
pub struct TraceOptions {
    /// Trace the kernel while it runs
    #[arg(long, value_name = "TRACER")]
    pub trace: Option<Tracer>,

    /// Trace only functions that match, with the globs of set_ftrace_filter: *, ?, [a-z]; may be
    /// given several times. By default every function is traced. 'vfs_read: count > 4096' asks for
    /// calls by their arguments
    #[arg(
        short,
        long,
        value_name = "GLOB",
        requires = "trace",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub filter: Vec<String>,

    /// Don't trace functions that match, even if a filter does; may be given several times
    #[arg(
        short,
        long,
        value_name = "GLOB",
        requires = "trace",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub notrace: Vec<String>,

    /// How calls are noticed
    #[arg(long, value_name = "METHOD", requires = "trace", default_value = "call")]
    pub method: Method,

    /// The trace's form. By default what the file's name ends with tells: .dat, .json, .pftrace,
    /// .vmmrec; else it is ftrace
    #[arg(long, value_name = "FORMAT", requires = "trace")]
    pub format: Option<Format>,

    /// Write the trace to a file; - is standard output, the default
    #[arg(short, long, value_name = "FILE", requires = "trace")]
    pub output: Option<Output>,

    /// Keep only the last calls, as many as each CPU's ring holds: nothing is written until the trace
    /// ends, the guest crashes, or vmm trace NAME snapshot asks for it
    #[arg(long, requires = "trace")]
    pub overwrite: bool,

    #[command(flatten)]
    pub values: ValueOptions,

    #[command(flatten)]
    pub calls: CallOptions,

    #[command(flatten)]
    pub graph: GraphOptions,

    #[command(flatten)]
    pub count: CountOptions,
}

/// What is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Tracer {
    /// Each call of a function, with its caller
    Func,
    /// Each call and each return, as ftrace's function_graph: who called what, and for how long
    Graph,
    /// How often each function is called: counted by the guest itself, as by bcc's funccount
    Count,
    /// How long the calls of each function take: histograms made by the guest itself, as by bcc's funclatency
    Latency,
}

/// How calls are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Method {
    /// The function calls code that vmm provides, and the guest goes on by itself
    Call,
    /// Each call takes the CPU out of the guest, like a breakpoint: far slower, on KVM only, and
    /// good also for functions that the kernel can't trace itself, which a filter names in full
    Trap,
}

impl From<Method> for protocol::Method {
    fn from(method: Method) -> Self {
        match method {
            Method::Call => Self::Call,
            Method::Trap => Self::Trap,
        }
    }
}

impl From<Tracer> for protocol::Tracer {
    fn from(tracer: Tracer) -> Self {
        match tracer {
            Tracer::Func => Self::Func,
            Tracer::Graph => Self::Graph,
            Tracer::Count => Self::Count,
            Tracer::Latency => Self::Latency,
        }
    }
}

impl TraceOptions {
    /// Where the records go, if there are any.
    pub fn records(&self) -> Option<Destination> {
        let output = self.output.clone().unwrap_or(Output::Stdout);
        let columns = self.graph.columns();
        let counts = self.count.form(self.trace, &self.filter);
        let (format, flame) = (self.format, self.graph.flame());
        self.trace.map(|_| Destination { output, format, columns, counts, flame })
    }

    /// What is traced, if anything is.
    ///
    /// # Errors
    /// It makes no sense.
    pub fn request(&self) -> Result<Option<TraceRequest>, Contradiction> {
        self.count.check(self.trace, self.format)?;
        self.graph.check_flame(self.trace)?;
        let Some(tracer) = self.trace else {
            if !self.values.is_unused() {
                return Err(Contradiction("--args and --ret need --trace".into()));
            }
            if self.calls.request() != CallsRequest::default() {
                return Err(Contradiction("which calls are traced needs --trace".into()));
            }
            return match self.graph.is_unused() {
                true => Ok(None),
                false => Err(Contradiction("what a graph is to show needs --trace graph".into())),
            };
        };
        let tracer = tracer.into();
        let request = TraceRequest {
            tracer,
            filter: self.filter.clone(),
            notrace: self.notrace.clone(),
            method: self.method.into(),
            graph: self.graph.request(),
            args: self.values.args,
            ret: self.values.ret,
            count: self.count.request(),
            overwrite: self.overwrite,
            calls: self.calls.request(),
        };
        checked(request).map(Some)
    }
}
