//! Replaces functions of a running kernel by others that come in a relocatable object.
//!
//! A [`Payload`] is read from the file alone. [`Payload::resolve`] finds in a kernel's symbols what it
//! replaces and what it refers to. [`Resolved::link`] makes the bytes for given addresses.
//! A [`StackCheck`](crate::stacks::StackCheck) tells who stands in the code that is to be replaced. [`Patches`] puts all of it
//! together: patches that are applied, stacked and reverted.

mod check;
mod errors;
mod klp;
mod link;
mod options;
mod patches;
mod payload;
mod remarks;
mod replace;
mod resolve;
mod sections;
#[cfg(test)]
mod tests;

pub use check::{CheckError, CheckOptions, CheckReport, CheckedFunction};
pub use errors::{ResolveError, ResolveErrors};
pub use klp::KlpError;
pub use link::{LinkError, Linked};
pub use options::{Map, OptionsError, PayloadOptions};
pub use patches::{
    AppliedPatch, Attempt, Fixed, FixedFunction, FunctionInfo, PatchError, PatchId, PatchInfo,
    PatchOptions, PatchState, Patches, Pending, RevertAttempt, RevertedPatch,
};
pub use payload::{Dropped, MAX_FILE, MAX_LOADED, Payload, PayloadError};
pub use remarks::Remark;
pub use replace::Replacement;
pub use resolve::{KernelView, Resolved};
pub use sections::{OPTIONS_SECTION, SectionPart};
