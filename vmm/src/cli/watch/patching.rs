//! Patches a kernel for clients of the control socket: tries, and tries again while somebody is inside a
//! function concerned, between two looks at the rings.

use std::time::{Duration, Instant, SystemTime};

use humantime::format_rfc3339_seconds;
use patcher::hook::Hooks;
use patcher::livepatch::{
    AppliedPatch, Attempt, PatchError, PatchId, PatchOptions, Patches, Pending, Stander,
};
use vmm::control::protocol::{
    Address, Function, MAX_FUNCTIONS, MAX_STANDERS, Patch, PatchRequest, PatchState, Patched,
    Refusal, RefusalKind, RevertRequest, Reverted, Stander as Named, Waiting,
};
use vmm::control::{Answer, PatchWanted, Waiter};

use crate::cli::patch::text;
use crate::cli::report::counted;

/// How long it is waited before it is tried again, at first and at last; each time it is doubled.
const BACKOFF: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(500)];

/// How long it is tried to find nobody inside when everything has to be taken back.
const LAST_TRIES: Duration = Duration::from_secs(2);

/// The patches of one kernel, and what waits to be one or to be none any more.
#[derive(Default)]
pub struct Patching<'m> {
    patches: Patches<'m>,
    waiting: Option<Try>,
}

/// What somebody waits for.
struct Try {
    wanted: Wanted,
    waiter: Waiter,
    since: Instant,
    timeout: Duration,
    attempts: u64,
    next: Instant,
    backoff: Duration,
}

/// What is to be done, and whom to tell of it.
enum Wanted {
    Apply(Box<Pending>, Answer<Patched>),
    Revert(Box<PendingRevert>, Answer<Reverted>),
}
