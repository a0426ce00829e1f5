//! What is said of a trace.

use std::sync::Arc;
use std::time::Duration;

use patcher::trace::calls::{self, MAX_PIDS};
use patcher::trace::filter::Glob;
use patcher::trace::graph;
use patcher::trace::sink::{self, Context, EventKind, Values};
use patcher::trace::tracer::Summary;
use serde::{Deserialize, Serialize};

use super::MAX_GLOBS;
use super::counts::{COUNT_INTERVALS, CountRequest};

/// What is to be traced.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TraceRequest {
    /// How.
    pub tracer: Tracer,
    /// Globs of the functions to trace, each perhaps with what is asked of their arguments; all if there are
    /// none.
    #[serde(default)]
    pub filter: Vec<String>,
    /// Globs of the functions not to trace.
    #[serde(default)]
    pub notrace: Vec<String>,
    /// How calls are noticed of functions that are not traced yet.
    #[serde(default, skip_serializing_if = "Method::is_call")]
    pub method: Method,
    /// What of calls and returns is wanted; of no meaning to other tracers.
    #[serde(default, skip_serializing_if = "GraphRequest::is_all")]
    pub graph: GraphRequest,
    /// Whether calls tell their arguments.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub args: bool,
    /// Whether returns tell what was returned; of no meaning to other tracers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ret: bool,
    /// When counts or latencies are wanted; of no meaning to other tracers.
    #[serde(default, skip_serializing_if = "CountRequest::is_usual")]
    pub count: CountRequest,
    /// Whether calls stay in the guest's rings, where later ones overwrite them, until the trace ends.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overwrite: bool,
    /// Which calls are traced; of no meaning to the tracer that counts.
    #[serde(default, skip_serializing_if = "CallsRequest::is_all")]
    pub calls: CallsRequest,
}

impl TraceRequest {
    /// Whether it makes sense.
    ///
    /// # Errors
    /// Why not, in a sentence.
    pub fn check(&self) -> Result<(), String> {
        let globs = self.filter.len() + self.notrace.len() + self.graph.functions.len();
        if globs > MAX_GLOBS {
            return Err(format!("a trace has at most {MAX_GLOBS} globs"));
        }
        if self.tracer != Tracer::Graph && !self.graph.is_all() {
            let message = "a greatest depth, functions that others are called from, and a threshold \
                           are for the tracer graph";
            return Err(message.into());
        }
        if self.tracer != Tracer::Graph && self.ret {
            return Err("what calls return is told by the tracer graph".into());
        }
        if matches!(self.tracer, Tracer::Count | Tracer::Latency) && self.args {
            return Err("calls that are only counted or measured have no arguments to show".into());
        }
        if self.method == Method::Trap && self.args {
            let message = "arguments are recorded only of calls that are noticed by the method call, \
                           not by traps";
            return Err(message.into());
        }
        if self.overwrite && self.tracer.adds_up() {
            let message = "counts and latencies are not recorded: there is nothing to overwrite";
            return Err(message.into());
        }
        let arguments = self.filter.iter().any(|filter| calls::has_expression(filter));
        if arguments || !self.calls.is_all() {
            if matches!(self.tracer, Tracer::Count | Tracer::Latency) {
                let message = "all calls are counted and measured: the tracers count and latency take no \
                               filter of calls, only names of functions";
                return Err(message.into());
            }
            if self.method == Method::Trap {
                let message = "calls are filtered in the guest by the method call, not by traps";
                return Err(message.into());
            }
        }
        self.calls.check()?;
        if self.tracer == Tracer::Count && self.method == Method::Trap {
            return Err("calls are counted by the method call, not by traps".into());
        }
        if self.tracer == Tracer::Latency && self.method == Method::Trap {
            let message = "how long calls take is measured by the method call, not by traps";
            return Err(message.into());
        }
        if !COUNT_INTERVALS.contains(&self.count.interval_ms) {
            return Err(format!(
                "counts and latencies come every {} ms at most and every {} ms at least",
                COUNT_INTERVALS.start(),
                COUNT_INTERVALS.end()
            ));
        }
        if self.tracer == Tracer::Graph && self.method == Method::Trap {
            let message = "returns are recorded only of calls that are noticed by the method call, \
                           not by traps";
            return Err(message.into());
        }
        Ok(())
    }
}

/// What of calls and returns is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GraphRequest {
    /// Only calls that are nested in fewer than so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_depth: Option<u32>,
    /// Globs: only functions that match, and what is called from them; all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub functions: Vec<String>,
    /// Only returns, of calls that took no less than so many nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold_ns: Option<u64>,
}

impl From<&GraphRequest> for graph::Options {
    fn from(request: &GraphRequest) -> Self {
        Self {
            max_depth: request.max_depth,
            functions: request.functions.iter().map(|glob| Glob::new(glob)).collect(),
            threshold_ns: request.threshold_ns,
        }
    }
}

impl GraphRequest {
    fn is_all(&self) -> bool {
        *self == Self::default()
    }
}

/// Which calls of the functions are wanted. What is not is left out by the guest itself.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CallsRequest {
    /// Those of tasks with these numbers; of all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pids: Vec<u32>,
    /// Those of tasks with that name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm: Option<String>,
    /// Of each function one in so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_in: Option<u32>,
    /// Of each function at most so many a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_second: Option<u32>,
}

impl CallsRequest {
    fn is_all(&self) -> bool {
        *self == Self::default()
    }

    fn check(&self) -> Result<(), String> {
        if self.pids.len() > MAX_PIDS {
            return Err(format!("calls are filtered by at most {MAX_PIDS} tasks' numbers"));
        }
        let counts = [self.one_in, self.per_second];
        if counts.into_iter().flatten().any(|calls| calls == 0 || calls > MAX_ONE_IN) {
            return Err(format!(
                "one call in so many, and so many a second, are numbers from 1 to {MAX_ONE_IN}"
            ));
        }
        Ok(())
    }
}

/// The largest number that one call in so many is asked for by, and so many a second.
pub const MAX_ONE_IN: u32 = 1_000_000_000;

/// How calls of a function are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The function's pad calls a trampoline.
    #[default]
    Call,
    /// Each call takes the CPU out of the guest, like a breakpoint.
    Trap,
}

impl Method {
    fn is_call(&self) -> bool {
        *self == Self::Call
    }
}

/// What is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tracer {
    /// Each call of a function, with its caller.
    #[default]
    Func,
    /// Each call and each return.
    Graph,
    /// How often each function is called.
    Count,
    /// How long the calls of each function take.
    Latency,
}

impl Tracer {
    /// Whether the guest itself adds up what is wanted, and nothing is recorded.
    #[must_use]
    pub fn adds_up(self) -> bool {
        matches!(self, Self::Count | Self::Latency)
    }
}

impl From<Tracer> for sink::Tracer {
    fn from(tracer: Tracer) -> Self {
        match tracer {
            // What is counted or measured is not recorded.
            Tracer::Func | Tracer::Count | Tracer::Latency => Self::Function,
            Tracer::Graph => Self::Graph,
        }
    }
}

/// A trace that goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceInfo {
    /// The process that asked for it; none for the one that controls the guest.
    pub pid: Option<u32>,
    /// What was asked for.
    pub request: TraceRequest,
    /// Functions that are traced.
    pub functions: usize,
    /// Events until now.
    pub events: u64,
    /// Events that were missed.
    pub missed: u64,
    /// How long it has been going on, in seconds.
    pub seconds: u64,
}

/// A trace has begun.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Armed {
    /// The kernel's release.
    pub release: String,
    /// How far KASLR has moved it, in bytes.
    pub kaslr_offset: i64,
    /// How many symbols it has.
    pub symbols: usize,
    /// How many pads.
    pub pads: usize,
    /// How many CPUs the guest has.
    pub cpus: usize,
    /// Functions that are traced.
    pub functions: usize,
    /// Those of them that were not armed before.
    pub written: usize,
    /// Functions that the filter names and that can't be traced, by reason.
    pub refused: Vec<(String, usize)>,
    /// How long the guest stood.
    pub stop: Duration,
    /// Whether calls tell what their CPU was in the middle of.
    #[serde(default)]
    pub contexts: bool,
    /// What calls do not tell of their tasks, and why, in one sentence.
    #[serde(default)]
    pub missing: Option<String>,
    /// Where the kernel's code that interrupts enter begins and ends; both 0 if that is not known.
    #[serde(default)]
    pub interrupts: (u64, u64),
    /// The guest's architecture.
    #[serde(default)]
    pub arch: String,
    /// Whether its integers are big-endian.
    #[serde(default)]
    pub big_endian: bool,
    /// Of a snapshot: by which tracer that was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded_by: Option<Tracer>,
}

/// Calls follow, [`CALL_BYTES`] bytes each and what is behind it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchHeader {
    /// How many.
    pub calls: usize,
    /// How many bytes they have together.
    pub bytes: usize,
    /// All names that were given before are void.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forget: bool,
    /// Names that calls from here on refer to. They are numbered in the order in which they come,
    /// from 0 on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// Where each of these names is meant: the address, and how far that is behind the beginning of
    /// what has the name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<(u64, u64)>,
    /// How many events were missed until now.
    #[serde(default)]
    pub missed: u64,
    /// In front of which calls of this batch events of their CPU are missing, and how many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gaps: Vec<(usize, u64)>,
}

/// A trace is over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Why.
    pub reason: EndReason,
    /// What failed, if something did.
    pub error: Option<String>,
    /// What it came to.
    pub totals: Totals,
    /// How long it lasted.
    pub lasted: Duration,
}

/// Why a trace is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndReason {
    /// The client wanted it.
    Stopped,
    /// The guest has ended, or is about to.
    GuestEnded,
    /// The guest's kernel has panicked.
    GuestPanicked,
    /// The guest was reset, or runs another kernel.
    GuestReset,
    /// Its client can't be given anything any more.
    ClientGone,
}

/// What a trace came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Events in it.
    pub events: u64,
    /// Events for which the client was too slow.
    pub overrun: u64,
    /// Records that came too late to be read, by CPU.
    pub lost: Vec<u64>,
    /// Records that later ones have taken the place of, by CPU, where only the last were to be kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overwritten: Vec<u64>,
    /// Records that were begun and never finished, by CPU.
    pub unwritten: Vec<u64>,
    /// Events given out behind later ones.
    pub late: u64,
    /// What was wrong with rings that the guest has spoilt.
    pub corrupt: Vec<String>,
    /// How long the guest was stopped, each time, for this trace.
    pub stops: Vec<Duration>,
    /// Functions that the guest has changed meanwhile, and that were left alone.
    pub foreign: usize,
    /// Functions of which calls have not returned, and how many, most first; [`MAX_OUTSTANDING`] at most.
    #[serde(default)]
    pub outstanding: Vec<(String, u64)>,
    /// Calls of others that have not returned.
    #[serde(default)]
    pub others_outstanding: u64,
    /// Calls that have returned although no return of theirs was seen.
    #[serde(default)]
    pub lost_returns: u64,
    /// Returns of which no call was seen, behind records that were lost.
    #[serde(default)]
    pub lost_calls: u64,
    /// Calls of which no return was recorded, since as many as can be were out at the same time.
    #[serde(default)]
    pub without_slot: u64,
    /// Functions of which the guest itself has left out calls, and how many, most first;
    /// [`MAX_OUTSTANDING`] at most.
    #[serde(default)]
    pub turned_away: Vec<(String, u64)>,
    /// Calls of others that it has left out.
    #[serde(default)]
    pub others_turned_away: u64,
}

/// Functions that an end names at most of which calls have not returned, or were left out.
pub const MAX_OUTSTANDING: usize = 16;

/// The first of them by their names, and what the others come to.
fn first(functions: &[(Arc<str>, u64)]) -> (Vec<(String, u64)>, u64) {
    let (named, others) = functions.split_at(functions.len().min(MAX_OUTSTANDING));
    let named = named.iter().map(|(name, count)| (name.to_string(), *count)).collect();
    (named, others.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count)))
}

impl From<&Summary> for Totals {
    fn from(summary: &Summary) -> Self {
        let (outstanding, others_outstanding) = first(&summary.outstanding);
        let (turned_away, others_turned_away) = first(&summary.turned_away);
        Self {
            outstanding,
            others_outstanding,
            turned_away,
            others_turned_away,
            lost_returns: summary.lost_returns,
            lost_calls: summary.lost_calls,
            without_slot: summary.without_slot,
            events: summary.events,
            overrun: summary.overrun,
            lost: summary.lost.clone(),
            overwritten: summary.overwritten.clone(),
            unwritten: summary.unwritten.clone(),
            late: summary.late,
            corrupt: (summary.corrupt.iter().map(ToString::to_string))
                .chain((summary.set_back > 0).then(|| {
                    format!(
                        "counters or histograms of calls, which the guest has set back {} times",
                        summary.set_back
                    )
                }))
                .collect(),
            stops: summary.stops.iter().map(|stop| stop.total()).collect(),
            foreign: summary.reverted.as_ref().map_or(0, |reverted| reverted.foreign.len()),
        }
    }
}

impl Totals {
    /// Events that are missing in the trace, where it was not wanted that they are.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        let each = self.lost.iter().chain(&self.unwritten);
        each.fold(self.overrun, |sum, count| sum.saturating_add(*count))
    }

    /// Events that there were: those in the trace and those that are missing.
    #[must_use]
    pub fn entries(&self) -> u64 {
        let there = self.events.saturating_add(self.dropped());
        self.overwritten.iter().fold(there, |sum, count| sum.saturating_add(*count))
    }
}

/// Bytes of one call in a batch, without what is behind it.
pub const CALL_BYTES: usize = 32;

/// Bytes that there can be behind a call.
pub const MAX_BEHIND: usize = 4096;

/// In the place of a number: there is none.
pub const NONE: u32 = u32::MAX;

/// One call in a batch; names are told by their numbers.
///
/// ```text
/// 0   u64  nanoseconds since the guest's time-stamp clock read zero
/// 8   u32  number of the function's name
/// 12  u32  number of the caller's name
/// 16  u16  CPU
/// 18  u8   what the CPU was in the middle of (Context::flags)
/// 19  u8   how often preemption had been disabled
/// 20  u32  number of the task; NONE if it is not known
/// 24  u32  number of the task's name; NONE if it is not known
/// 28  u8   kind: 0 a call; 1 a call of which the return comes as well; 2 a return
/// 29  u8   1 if values are behind it (patcher::trace::values), 0 if they were not asked for
/// 30  u16  how many bytes are behind it
/// 32       these: of an entry u32 depth; of a return u32 depth, u64 value, u64 nanoseconds since the
///          call, all bits set if these are not known. Behind that the values
/// ```
///
/// All of it little-endian. Without values, further bytes behind it have no meaning yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call<'a> {
    /// Nanoseconds since the guest's time-stamp clock read zero.
    pub time_ns: u64,
    /// Number of the function's name.
    pub function: u32,
    /// Number of the caller's name.
    pub caller: u32,
    /// The CPU.
    pub cpu: u16,
    /// What the CPU was in the middle of; of no meaning in a trace that does not tell.
    pub context: Context,
    /// Number of the task.
    pub pid: Option<u32>,
    /// Number of its name.
    pub comm: Option<u32>,
    /// What kind it is.
    pub kind: EventKind,
    /// Its values.
    pub values: Values<'a>,
}

impl<'a> Call<'a> {
    /// Appends the call's bytes.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let mut call = [0; CALL_BYTES];
        call[..8].copy_from_slice(&self.time_ns.to_le_bytes());
        call[8..12].copy_from_slice(&self.function.to_le_bytes());
        call[12..16].copy_from_slice(&self.caller.to_le_bytes());
        call[16..18].copy_from_slice(&self.cpu.to_le_bytes());
        call[18] = self.context.flags();
        call[19] = self.context.preempt_depth;
        call[20..24].copy_from_slice(&self.pid.unwrap_or(NONE).to_le_bytes());
        call[24..28].copy_from_slice(&self.comm.unwrap_or(NONE).to_le_bytes());
        call[28] = self.kind.tag();
        call[29] = u8::from(self.values.are_told());
        let at = bytes.len();
        bytes.extend_from_slice(&call);
        self.kind.encode(bytes);
        bytes.extend_from_slice(self.values.bytes().unwrap_or_default());
        let behind = (bytes.len() - at - CALL_BYTES) as u16;
        bytes[at + 30..at + 32].copy_from_slice(&behind.to_le_bytes());
    }

    /// The first of the calls in these bytes, and what comes after it; `None` if it is cut or of no known
    /// kind.
    #[must_use]
    pub fn decode(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (call, rest) = bytes.split_first_chunk::<CALL_BYTES>()?;
        let u32_at =
            |at: usize| u32::from_le_bytes([call[at], call[at + 1], call[at + 2], call[at + 3]]);
        let behind = usize::from(u16::from_le_bytes([call[30], call[31]]));
        let (behind, rest) = rest.split_at_checked(behind).filter(|_| behind <= MAX_BEHIND)?;
        let kind = EventKind::decode(call[28], behind)?;
        let values = match call[29] {
            0 => Values::NONE,
            _ => Values::new(behind.get(kind.bytes()..)?),
        };
        let call = Self {
            time_ns: u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32,
            function: u32_at(8),
            caller: u32_at(12),
            cpu: u16::from_le_bytes([call[16], call[17]]),
            context: Context::of_flags(call[18], call[19]),
            pid: Some(u32_at(20)).filter(|pid| *pid != NONE),
            comm: Some(u32_at(24)).filter(|comm| *comm != NONE),
            kind,
            values,
        };
        Some((call, rest))
    }
}
