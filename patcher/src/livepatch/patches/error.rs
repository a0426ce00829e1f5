//! Why a patch could not be applied, or not be reverted.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::PatchId;
use crate::hook::HookError;
use crate::kernel::{PadsError, Refusal, ReturnFormError};
use crate::livepatch::{LinkError, PayloadError, ResolveErrors};
use crate::machine::TextWriteError;
use crate::region::RegionError;
use crate::stacks::{StackCheckError, StackError};

/// A patch could not be applied, or not be reverted. The guest is as it was, but for
/// [`ApplyError::Torn`](crate::patch::ApplyError::Torn).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PatchError {
    /// The file is no payload.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// It does not fit the kernel.
    #[error(transparent)]
    Resolve(#[from] ResolveErrors),
    /// It could not be told how the guest's functions return.
    #[error(transparent)]
    ReturnForm(#[from] ReturnFormError),
    /// It is for another release.
    #[error(
        "the guest runs {found}, and the payload is for {wanted}: build it for that kernel, or apply it \
         to the guest that it is for"
    )]
    Release {
        /// The releases that it is for.
        wanted: String,
        /// The kernel's release.
        found: String,
    },
    /// It is for another build.
    #[error(
        "the guest's kernel has {}, and the payload is for the one with build-id {wanted}",
        found.as_ref().map_or("no build-id that can be found".to_owned(), |id| format!("build-id {id}"))
    )]
    BuildId {
        /// The builds that it is for, in hexadecimal.
        wanted: String,
        /// The kernel's.
        found: Option<String>,
    },
    /// The kernel's pads can't be listed.
    #[error(transparent)]
    Pads(#[from] PadsError),
    /// Functions can't be redirected.
    #[error("{}", list(.0))]
    Functions(Vec<FixedFunction>),
    /// The region has no room for it, or can't be written.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// It can't be where there is room for it.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// Who stands in its functions can't be told in this kernel.
    #[error(transparent)]
    StackCheck(#[from] StackCheckError),
    /// Who stands in its functions could not be told.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// The stop would have been too long.
    #[error(
        "the guest had stood still for {} µs when everything was checked, and {} were allowed; nothing \
         was written: allow more (--max-stop), or try when it is less busy",
        took.as_micros(), limit.as_micros()
    )]
    TooLong {
        /// How long it had been.
        took: Duration,
        /// How long it was allowed to be.
        limit: Duration,
    },
    /// The new code could not be written; nothing leads to it.
    #[error("the payload's code could not be written: {0}; no function was changed")]
    Text(#[from] TextWriteError),
    /// The pads could not be changed.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// There is no such patch.
    #[error("there is no patch {0}")]
    NoSuchPatch(PatchId),
    /// It is not in force.
    #[error("patch {id} is not applied: it is {state}")]
    NotApplied {
        /// Which.
        id: PatchId,
        /// What has become of it.
        state: String,
    },
}

/// A function that can't be redirected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FixedFunction {
    /// Its name.
    pub name: Arc<str>,
    /// Why not.
    pub why: Fixed,
}

/// Why a function can't be redirected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fixed {
    /// It has no pad.
    #[error("it has no pad at its entry: the kernel's own tracing does not know it either")]
    NoPad,
    /// Its pad must not be written.
    #[error("its pad is left alone: {0}")]
    Refused(#[from] Refusal),
    /// Its return address is signed when its pad comes.
    #[error("its {0} has signed the return address before its pad comes")]
    Signed(&'static str),
}

fn list(functions: &[FixedFunction]) -> impl fmt::Display {
    let each = functions.iter().map(|f| format!("{} can't be replaced: {}", f.name, f.why));
    each.collect::<Vec<_>>().join("; ")
}
