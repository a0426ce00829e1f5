//! What is said on the control socket, message by message.
//!
//! Every message is one line of JSON. A [`Reply::Batch`] is followed by as many bytes of calls as it
//! says, and a [`Request::PatchApply`] by as many bytes of a payload.

use serde::{Deserialize, Serialize};

mod counts;
mod latencies;
mod patches;
mod traces;

pub use counts::{COUNT_INTERVALS, CountRequest, Counted, MAX_COUNTED};
pub use latencies::{Latency, MAX_MEASURED, Measured};
pub use patches::{
    Function, MAX_FILE_NAME, MAX_FUNCTIONS, MAX_MAPS, MAX_PATCH_TIMEOUT, MAX_PAYLOAD, MAX_STANDERS,
    Patch, PatchRequest, PatchState, Patched, RevertRequest, Reverted, Stander, Waiting,
};
pub use traces::{
    Armed, BatchHeader, CALL_BYTES, Call, CallsRequest, End, EndReason, GraphRequest, MAX_BEHIND,
    MAX_ONE_IN, MAX_OUTSTANDING, Method, NONE, Totals, TraceInfo, TraceRequest, Tracer,
};

/// The one version of the protocol that there is.
pub const VERSION: u32 = 4;

/// The longest line that a client may send, in bytes without its newline.
pub const MAX_REQUEST: usize = 64 << 10;

/// The longest line that a server sends, likewise.
pub const MAX_REPLY: usize = 1 << 20;

/// Globs that a request may have, of both kinds together.
pub const MAX_GLOBS: usize = 1024;

/// Calls in a batch at most.
pub const MAX_CALLS: usize = 8192;

/// Bytes of a batch's calls at most.
pub const MAX_BATCH: usize = 1 << 20;

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
    /// Trace: [`Reply::Armed`], any number of [`Reply::Batch`], or of [`Reply::Counted`], or of
    /// [`Reply::Measured`], then [`Reply::End`].
    Trace(TraceRequest),
    /// What the trace that overwrites holds now, of several the one that began first: as
    /// [`Request::Trace`]. It goes on recording.
    Snapshot,
    /// Apply a payload: any number of [`Reply::Waiting`], then [`Reply::Patched`]. Its bytes follow.
    PatchApply(PatchRequest),
    /// What is patched: any number of [`Reply::Patch`] and [`Reply::Functions`], then
    /// [`Reply::Done`].
    PatchList,
    /// Take a patch back: any number of [`Reply::Waiting`], then [`Reply::Reverted`].
    PatchRevert(RevertRequest),
    /// End the trace, or give up what waits. Only while there is one.
    Stop,
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
    /// How often functions were called, in a trace that counts.
    Counted(Counted),
    /// How long calls took, in a trace that measures.
    Measured(Measured),
    /// The trace is over, and its functions are put back unless someone else traces them.
    End(Box<End>),
    /// Nothing could be changed yet, and it is tried again.
    Waiting(Waiting),
    /// The payload is applied.
    Patched(Box<Patched>),
    /// A patch.
    Patch(Box<Patch>),
    /// More functions of the patch before.
    Functions(Vec<Function>),
    /// The patch is taken back.
    Reverted(Reverted),
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
    /// Until the time was over somebody was inside a function that was to be replaced. Nothing was
    /// changed.
    InUse,
    /// Nobody wants it any more. Nothing was changed.
    Stopped,
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
    /// Patches that are applied.
    #[serde(default)]
    pub patches: usize,
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
    /// What is patched and the last that was, in the order in which it was applied; without the
    /// functions.
    #[serde(default)]
    pub patched: Vec<Patch>,
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
    /// Whether a patch replaces it.
    #[serde(default)]
    pub patched: bool,
}

/// What a pad is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PadState {
    /// The function is neither traced nor patched.
    Idle,
    /// It is by us.
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
