//! What is said of live patches.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Address;

/// Bytes of a payload at most.
pub const MAX_PAYLOAD: usize = 16 << 20;

/// Bytes of a file's name at most.
pub const MAX_FILE_NAME: usize = 255;

/// Functions in one [`Reply::Patch`](super::Reply::Patch) or
/// [`Reply::Functions`](super::Reply::Functions) at most.
pub const MAX_FUNCTIONS: usize = 512;

/// Functions that a payload may be told to replace beyond what it says itself.
pub const MAX_MAPS: usize = 1024;

/// Tasks and vCPUs that a [`Waiting`] names at most.
pub const MAX_STANDERS: usize = 32;

/// The longest that a patch may be waited for.
pub const MAX_PATCH_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A payload that is to be applied. Its bytes follow behind the line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatchRequest {
    /// How many bytes it has, [`MAX_PAYLOAD`] at most.
    pub bytes: usize,
    /// What the file is called, for those who ask.
    pub file: String,
    /// What replaces what beyond what the payload says itself, as `new=old` or `new=old,sympos`.
    #[serde(default)]
    pub maps: Vec<String>,
    /// It takes the place of all patches before it.
    #[serde(default)]
    pub replace: bool,
    /// Nobody may be inside a function that is replaced, also if it is only one.
    #[serde(default)]
    pub consistent: bool,
    /// How long to try, in milliseconds.
    pub timeout_ms: u64,
    /// How long the guest may stand, in microseconds.
    #[serde(default)]
    pub max_stop_us: Option<u64>,
    /// The release that the guest's kernel has to have; * and ? stand for whatever.
    #[serde(default)]
    pub release: Option<String>,
    /// The build-id that it has to have, in hexadecimal digits.
    #[serde(default)]
    pub build_id: Option<String>,
}

/// A patch that is to be taken back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevertRequest {
    /// Which one.
    pub id: u64,
    /// How long to try, in milliseconds.
    pub timeout_ms: u64,
    /// How long the guest may stand, in microseconds.
    #[serde(default)]
    pub max_stop_us: Option<u64>,
}

/// Nothing could be changed yet, as somebody is inside a function that is to be replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Who is, [`MAX_STANDERS`] of them at most.
    pub standers: Vec<Stander>,
    /// How many more there are.
    pub more: usize,
    /// How often it was tried.
    pub attempts: u64,
    /// For how long.
    pub waited: Duration,
}

/// Somebody who is inside a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stander {
    /// The task's number in the guest; 0 for a CPU's idle task, and if it is not known which runs.
    pub pid: u32,
    /// Its name there; empty if it is not known.
    pub comm: String,
    /// The function that it is in.
    pub function: String,
    /// The vCPU that runs it; none if it sleeps.
    pub vcpu: Option<usize>,
}

/// A payload that is applied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patched {
    /// The patch, with its first functions.
    pub patch: Patch,
    /// How many functions it replaces.
    pub functions: usize,
    /// Patches whose place it took.
    pub replaced: Vec<u64>,
    /// How often it was tried.
    pub attempts: u64,
    /// For how long.
    pub waited: Duration,
}

/// A patch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patch {
    /// Its number; never given out twice for a guest.
    pub id: u64,
    /// What its file was called.
    pub file: String,
    /// The file's SHA-256 digest, in hexadecimal digits.
    pub sha256: String,
    /// When it was applied, by this host's clock (RFC 3339).
    pub applied: String,
    /// How much of it is in force.
    pub state: PatchState,
    /// How many functions it replaces.
    pub sites: usize,
    /// How long the guest stood for it.
    pub stop: Duration,
    /// Those functions; none in [`Info`](super::Info).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub functions: Vec<Function>,
}

/// How much of a patch is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PatchState {
    /// All of it.
    InForce,
    /// Later patches replace some of its functions.
    Partly,
    /// Later patches replace all of them.
    Covered,
    /// Nothing: another patch has taken its place.
    Replaced,
    /// Nothing: it was taken back.
    Reverted,
    /// Nothing: the guest was reset.
    Gone,
}

impl PatchState {
    /// As it is printed.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            PatchState::InForce => "in force",
            PatchState::Partly => "partly",
            PatchState::Covered => "covered",
            PatchState::Replaced => "replaced",
            PatchState::Reverted => "reverted",
            PatchState::Gone => "gone",
        }
    }
}

/// A function that a patch replaces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// The kernel's function.
    pub name: String,
    /// Where it is.
    pub old: Address,
    /// Where the one is that replaces it.
    pub new: Address,
    /// The patch whose function is called; none if that is the kernel's own, as when the guest has
    /// written over its pad.
    pub in_force: Option<u64>,
}

/// A patch that is taken back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reverted {
    /// Which one.
    pub id: u64,
    /// How many functions it had replaced.
    pub functions: usize,
    /// How many of them the guest has changed meanwhile; they were left alone.
    pub foreign: usize,
    /// How long the guest stood for it; nothing if nothing of it was in force.
    pub stop: Duration,
    /// How often it was tried.
    pub attempts: u64,
    /// For how long.
    pub waited: Duration,
}
