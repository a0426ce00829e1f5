//! What is said on the control socket, message by message.
//!
//! Every message is one line of JSON. A [`Reply::Batch`] is followed by as many records of
//! [`CALL_BYTES`] bytes as it says.

use std::time::Duration;

use patcher::trace::tracer::Summary;
use serde::{Deserialize, Serialize};

/// The one version of the protocol that there is.
pub const VERSION: u32 = 1;

/// The longest line that a client may send, in bytes without its newline.
pub const MAX_REQUEST: usize = 64 << 10;

/// The longest line that a server sends, likewise.
pub const MAX_REPLY: usize = 1 << 20;

/// Globs that a request may have, of both kinds together.
pub const MAX_GLOBS: usize = 1024;

/// Calls in a batch at most.
pub const MAX_CALLS: usize = 8192;

/// Pads in one [`Reply::Pads`] at most.
pub const MAX_PADS: usize = 512;

/// Bytes of a name at most; what is longer is cut.
pub const MAX_NAME: usize = 1024;

/// Bytes of all new names in a batch, after which no more calls go into it.
pub const MAX_NAMES: usize = 64 << 10;

/// Names that are in force at the same time. Before there are more, all are forgotten.
pub const MAX_NAMES_IN_FORCE: usize = 1 << 18;

/// The first line that a client sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// Always "control".
    pub vmm: String,
    /// The versions that the client speaks.
    pub versions: Vec<u32>,
}

impl Default for Greeting {
    fn default() -> Self {
        Self { vmm: "control".into(), versions: vec![VERSION] }
    }
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum Request {
    /// In short, what guest this is: [`Reply::Status`].
    Status,
    /// All there is to say about it: [`Reply::Info`].
    Info,
    /// The kernel's pads: any number of [`Reply::Pads`], then [`Reply::Done`].
    Pads {
        /// Only those of functions that match.
        #[serde(default)]
        glob: Option<String>,
    },
    /// Trace: [`Reply::Armed`], any number of [`Reply::Batch`], then [`Reply::End`].
    Trace(TraceRequest),
    /// End the trace. Only while there is one.
    Stop,
}

/// What is to be traced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceRequest {
    /// How.
    pub tracer: Tracer,
    /// Globs of the functions to trace; all if there are none.
    #[serde(default)]
    pub filter: Vec<String>,
    /// Globs of the functions not to trace.
    #[serde(default)]
    pub notrace: Vec<String>,
}

/// What is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tracer {
    /// Each call of a function, with its caller.
    Func,
}

/// What a server answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// To the greeting.
    Hello(Hello),
    /// A request is refused, or something failed.
    Error(Refusal),
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Info`].
    Info(Box<Info>),
    /// Some pads.
    Pads(Vec<Pad>),
    /// There are no more.
    Done {},
    /// The functions are armed: every call from now on is recorded.
    Armed(Box<Armed>),
    /// Calls follow.
    Batch(BatchHeader),
    /// The trace is over, and its functions are put back unless someone else traces them.
    End(Box<End>),
}

/// Who answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version that is spoken from now on.
    pub version: u32,
    /// The guest's name.
    pub name: String,
    /// The version of the program.
    pub program: String,
}

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// What kind of reason it is.
    pub kind: RefusalKind,
    /// The reason, as a sentence.
    pub message: String,
}

/// Kinds of reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// No version is spoken by both.
    Version,
    /// It is no message of the protocol, or not one for this moment. The connection is closed.
    Malformed,
    /// Another user's process asks. The connection is closed.
    Forbidden,
    /// There are as many connections, or traces, as there can be.
    Busy,
    /// The kernel is not found yet, or not ready; the same request may be granted later.
    NotReady,
    /// It can't be done, whenever it is asked.
    Refused,
    /// It was tried and failed.
    Failed,
    /// The guest has ended, or is about to.
    Ended,
}

impl Refusal {
    /// A refusal of that kind.
    pub fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// What is said when the guest's process is about to end.
    #[must_use]
    pub fn ended() -> Self {
        Self::new(RefusalKind::Ended, "the guest is about to end")
    }
}

/// How far the guest has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// No kernel has been found in it, or not one that is ready to be traced.
    Booting,
    /// It can be traced.
    Ready,
    /// Its kernel has panicked.
    Panicked,
    /// Its kernel can't be traced.
    Untraceable,
}

/// In short, what a guest is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// The process that controls it.
    pub pid: u32,
    /// What runs it.
    pub engine: String,
    /// How many vCPUs it has.
    pub vcpus: usize,
    /// How far it has come.
    pub state: State,
    /// What is waited for, or why it can't be traced.
    pub reason: Option<String>,
    /// The architecture, as `uname -m` prints it, once a kernel is found.
    pub arch: Option<String>,
    /// The kernel's release, likewise.
    pub release: Option<String>,
    /// Traces that go on.
    pub traces: usize,
}

/// All there is to say about a guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Info {
    /// The short of it.
    #[serde(flatten)]
    pub status: Status,
    /// Its kernel, once it is found.
    pub kernel: Option<KernelInfo>,
    /// The region, once it is mapped.
    pub region: Option<RegionInfo>,
    /// Who traces what.
    pub who: Vec<TraceInfo>,
}

/// A kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// The line with which it names itself.
    pub banner: String,
    /// Where `_text` is.
    pub base: Address,
    /// The same in guest-physical memory.
    pub physical_base: Address,
    /// How far KASLR has moved it, in bytes.
    pub kaslr_offset: i64,
    /// How many symbols it has.
    pub symbols: usize,
    /// How many pads, by state; none if they can't be listed.
    pub pads: Vec<(String, usize)>,
}

/// The memory that the hypervisor provides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionInfo {
    /// Where the guest's kernel sees trampolines.
    pub code: Address,
    /// Bytes for them.
    pub code_bytes: u64,
    /// Where it sees the rings' headers.
    pub rings: Address,
    /// Bytes for rings.
    pub rings_bytes: u64,
    /// Records that each CPU's ring holds.
    pub ring_records: u64,
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

/// An address, as a hexadecimal number in a string: JSON's numbers are not exact up there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address(pub u64);

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl Serialize for Address {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.strip_prefix("0x").unwrap_or(&text);
        let number = u64::from_str_radix(digits, 16);
        number.map(Address).map_err(|_| serde::de::Error::custom("an address is 0x and hex digits"))
    }
}

/// A pad.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pad {
    /// The function; empty for one of a module.
    pub function: String,
    /// Where the pad is.
    pub address: Address,
    /// What stands between the function's beginning and the pad; none if that was not looked at.
    pub prefix: Option<String>,
    /// Its state.
    pub state: PadState,
    /// Why it is refused.
    pub reason: Option<String>,
    /// How many clients trace the function.
    pub traced_by: u32,
}

/// What a pad is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PadState {
    /// Nobody traces the function.
    Idle,
    /// We do.
    Ours,
    /// The guest's own tracing does.
    GuestEnabled,
    /// It is left alone.
    Refused,
}

impl PadState {
    /// As it is printed.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            PadState::Idle => "idle",
            PadState::Ours => "ours",
            PadState::GuestEnabled => "guest-enabled",
            PadState::Refused => "refused",
        }
    }
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
}

/// Calls follow, [`CALL_BYTES`] bytes each.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchHeader {
    /// How many.
    pub calls: usize,
    /// All names that were given before are void.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forget: bool,
    /// Names that calls from here on refer to. They are numbered in the order in which they come,
    /// from 0 on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// How many events were missed until now.
    #[serde(default)]
    pub missed: u64,
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
}

impl From<&Summary> for Totals {
    fn from(summary: &Summary) -> Self {
        Self {
            events: summary.events,
            overrun: summary.overrun,
            lost: summary.lost.clone(),
            unwritten: summary.unwritten.clone(),
            late: summary.late,
            corrupt: summary.corrupt.iter().map(ToString::to_string).collect(),
            stops: summary.stops.iter().map(|stop| stop.total()).collect(),
            foreign: summary.reverted.as_ref().map_or(0, |reverted| reverted.foreign.len()),
        }
    }
}

impl Totals {
    /// Events that are missing in the trace.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        let each = self.lost.iter().chain(&self.unwritten);
        each.fold(self.overrun, |sum, count| sum.saturating_add(*count))
    }
}

/// Bytes of one call in a batch.
pub const CALL_BYTES: usize = 20;

/// One call in a batch; names are told by their numbers.
///
/// ```text
/// 0   u64  nanoseconds since the guest's time-stamp clock read zero
/// 8   u32  number of the function's name
/// 12  u32  number of the caller's name
/// 16  u16  CPU
/// 18  u16  0
/// ```
///
/// All of it little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Nanoseconds since the guest's time-stamp clock read zero.
    pub time_ns: u64,
    /// Number of the function's name.
    pub function: u32,
    /// Number of the caller's name.
    pub caller: u32,
    /// The CPU.
    pub cpu: u16,
}

impl Call {
    /// Appends the call's bytes.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let mut call = [0; CALL_BYTES];
        call[..8].copy_from_slice(&self.time_ns.to_le_bytes());
        call[8..12].copy_from_slice(&self.function.to_le_bytes());
        call[12..16].copy_from_slice(&self.caller.to_le_bytes());
        call[16..18].copy_from_slice(&self.cpu.to_le_bytes());
        bytes.extend_from_slice(&call);
    }

    /// The call in these bytes.
    #[must_use]
    pub fn decode(bytes: &[u8; CALL_BYTES]) -> Self {
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Self {
            time_ns: u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32,
            function: u32_at(8),
            caller: u32_at(12),
            cpu: u16::from_le_bytes([bytes[16], bytes[17]]),
        }
    }
}
