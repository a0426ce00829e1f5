//! What applying a payload would do, as far as the kernel's file tells: everything but the writing.

use std::ops::Range;
use std::sync::Arc;

use super::options::{Map, other_release};
use super::payload::{Home, Payload};
use super::resolve::{Resolved, Target};
use super::{LinkError, ResolveErrors};
use crate::addr::{Gpa, Gva};
use crate::journal::PayloadMarks;
use crate::kernel::offline::{OfflineKernel, OfflinePad, OfflinePadsError};
use crate::kernel::{Kernel, ReturnFormError};
use crate::region::{
    HISTOGRAMS_OFFSET, PART_BYTES, Part, PayloadSizes, PayloadSpace, RegionError, TEXT_OFFSET,
};
use crate::trace::filter::Glob;

/// What a payload is checked for beside what it says itself.
#[derive(Debug, Clone, Default)]
pub struct CheckOptions {
    /// The operator's maps.
    pub maps: Vec<Map>,
    /// The release that the kernel is to have.
    pub release: Option<Glob>,
    /// The build-id that the kernel is to have, or its beginning: lower-case hexadecimal digits.
    pub build_id: Option<Arc<str>>,
}

/// What applying a payload would do.
#[derive(Debug, Clone)]
pub struct CheckReport {
    /// The kernel's release.
    pub release: String,
    /// The kernel's build-id in hexadecimal digits, if it has one.
    pub build_id: Option<String>,
    /// The functions that would be replaced, in the payload's order.
    pub functions: Vec<CheckedFunction>,
    /// The payload's other functions.
    pub helpers: Vec<Arc<str>>,
    /// How much of the region it would take.
    pub sizes: PayloadSizes,
    /// What the payload refers to in the kernel, by name, and its distance from the kernel's beginning
    /// in bytes; ascending by name.
    pub symbols: Vec<(Arc<str>, i64)>,
    /// Sections that would be left out, and why that does no harm.
    pub dropped: Vec<super::Dropped>,
    /// Releases that the payload says it is for.
    pub releases: Vec<String>,
    /// Build-ids that the payload says it is for.
    pub build_ids: Vec<Arc<str>>,
    /// Whether nobody may be inside the replaced functions as the payload is applied.
    pub consistent: bool,
}

/// A function that would be replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedFunction {
    /// Its name.
    pub name: Arc<str>,
    /// The payload's function that replaces it.
    pub new: Arc<str>,
    /// Where it begins, in bytes from the kernel's beginning.
    pub offset: u64,
    /// How long it is at most, in bytes.
    pub len: u64,
    /// How far into it the instruction is that would be changed, in bytes.
    pub pad: u64,
    /// Copies of it that the compiler fitted to some callers, which would stay as they are.
    pub copies: Vec<Arc<str>>,
}

/// A payload can't be applied to a kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The kernel is of another release.
    #[error(
        "the kernel is {found}, and the payload is for {wanted}: give the payload for this kernel"
    )]
    Release {
        /// What is wanted.
        wanted: String,
        /// The kernel's release.
        found: String,
    },
    /// The kernel has another build-id, or none.
    #[error(
        "the kernel's build-id is {found}, and the payload is for {wanted}: \
         give the payload for this build"
    )]
    BuildId {
        /// What is wanted.
        wanted: String,
        /// The kernel's build-id.
        found: String,
    },
    /// How the kernel's functions return can't be told.
    #[error(transparent)]
    Returns(#[from] ReturnFormError),
    /// The kernel's pads can't be told.
    #[error(transparent)]
    Pads(#[from] OfflinePadsError),
    /// The payload does not fit the kernel's symbols.
    #[error(transparent)]
    Resolve(#[from] ResolveErrors),
    /// Functions can't be redirected.
    #[error(
        "there is no pad at the entry of {}, by which alone a function is replaced: \
         replace its callers instead", names.join(", ")
    )]
    NoPad {
        /// The functions.
        names: Vec<String>,
    },
    /// The return address is signed before a function's pad.
    #[error(
        "{} signs its return address in front of its pad, and a function that is entered there \
         would sign it again: replace its callers instead", names.join(", ")
    )]
    Signed {
        /// The functions.
        names: Vec<String>,
    },
    /// It takes more than the region has.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// It does not reach what it refers to.
    #[error("from {at}, where the region may be: {source}")]
    Link {
        /// Where the region would be.
        at: Gva,
        /// Why not.
        source: LinkError,
    },
}

/// Where the region lies for a kernel that sees memory as it is (s390x up to 6.9), as far as anything
/// depends on it: behind the first GiB of RAM.
const REGION_MEMORY: Gpa = Gpa(1 << 30);

/// The most bytes of the region: its parts for code, constants and data, and rings that are larger than
/// any that engines make.
const REGION_BYTES: u64 = 3 * PART_BYTES + (64 << 20);

impl Payload {
    /// Does everything with the kernel's file that applying does with the kernel but for the writing.
    ///
    /// What only a running guest shows is not looked at: how its functions return on its processor, who
    /// stands in one, and what its own tracing and other patches use.
    ///
    /// # Errors
    /// [`CheckError`]: why applying it would be refused.
    pub fn check(
        &self,
        offline: &OfflineKernel,
        options: &CheckOptions,
    ) -> Result<CheckReport, CheckError> {
        let kernel = offline.kernel();
        let build_id = kernel.build_id(offline.memory()).ok().map(|id| id.to_string());
        self.check_guards(kernel, build_id.as_deref(), options)?;
        let view = kernel.view(offline.memory())?;
        let resolved = self.resolve(&view, &options.maps)?;
        let functions = check_pads(kernel, &offline.pads()?, &resolved)?;
        check_reach(kernel, &resolved)?;

        let said = self.options();
        Ok(CheckReport {
            release: kernel.release().to_owned(),
            build_id,
            functions,
            helpers: helpers(&resolved),
            sizes: resolved.sizes(),
            symbols: symbols(kernel, &resolved),
            dropped: self.dropped().to_vec(),
            releases: said.releases.iter().map(|glob| glob.pattern().to_owned()).collect(),
            build_ids: said.build_ids.clone(),
            consistent: resolved.is_consistent(),
        })
    }

    fn check_guards(
        &self,
        kernel: &Kernel,
        build_id: Option<&str>,
        options: &CheckOptions,
    ) -> Result<(), CheckError> {
        let said = self.options();
        let release = kernel.release();
        for releases in [options.release.as_slice(), &said.releases] {
            if let Some(wanted) = other_release(releases, release) {
                return Err(CheckError::Release { wanted, found: release.to_owned() });
            }
        }
        let refuse = |wanted: String| CheckError::BuildId {
            wanted,
            found: build_id.unwrap_or("not known").to_owned(),
        };
        let is = |wanted: &Arc<str>| build_id.is_some_and(|found| found.starts_with(&**wanted));
        if let Some(wanted) = options.build_id.as_ref().filter(|wanted| !is(wanted)) {
            return Err(refuse(wanted.to_string()));
        }
        if !said.build_ids.is_empty() && !said.build_ids.iter().any(is) {
            return Err(refuse(said.build_ids.join(" or ")));
        }
        Ok(())
    }
}

/// Finds the pad of every function that is replaced.
fn check_pads(
    kernel: &Kernel,
    pads: &[OfflinePad],
    resolved: &Resolved,
) -> Result<Vec<CheckedFunction>, CheckError> {
    let begin = kernel.image().range.start;
    let (mut functions, mut without, mut signed) = (Vec::new(), Vec::new(), Vec::new());
    for replacement in resolved.replacements() {
        let Range { start, end } = replacement.old;
        let pad = pads.binary_search_by_key(&start, |pad| pad.function);
        let Some(pad) = pad.ok().map(|index| &pads[index]) else {
            without.push(replacement.name.to_string());
            continue;
        };
        if pad.prefix.signs {
            signed.push(replacement.name.to_string());
            continue;
        }
        functions.push(CheckedFunction {
            name: replacement.name.clone(),
            new: replacement.new.clone(),
            offset: start.0.wrapping_sub(begin.0),
            len: end.0.wrapping_sub(start.0),
            pad: pad.at.0.wrapping_sub(start.0),
            copies: replacement.copies.clone(),
        });
    }
    if !without.is_empty() {
        return Err(CheckError::NoPad { names: without });
    }
    if !signed.is_empty() {
        return Err(CheckError::Signed { names: signed });
    }
    Ok(functions)
}

/// Links the payload where the region lies at most: at either end of where it may.
fn check_reach(kernel: &Kernel, resolved: &Resolved) -> Result<(), CheckError> {
    let memory = REGION_MEMORY..REGION_MEMORY + REGION_BYTES;
    let window = kernel.arch().region_window(&kernel.place(), &memory);
    let highest = window.end.0.saturating_sub(REGION_BYTES).max(window.start.0);
    for at in [window.start, Gva(highest)] {
        let at = Gva(at.0.next_multiple_of(kernel.arch().region_leaf_size()));
        let part = |part: Part| at + part.offset();
        let text = part(Part::Code) + TEXT_OFFSET..part(Part::Code) + PART_BYTES;
        let constants = part(Part::Constants)..part(Part::Constants) + PART_BYTES;
        let data = part(Part::Data)..part(Part::Data) + HISTOGRAMS_OFFSET;
        let space = PayloadSpace::new(text, constants, data, PayloadMarks::default());
        let placement = space.reserve(resolved.sizes(), None)?;
        resolved.link(&placement).map_err(|source| CheckError::Link { at, source })?;
    }
    Ok(())
}

/// The payload's functions that replace nothing, by name.
fn helpers(resolved: &Resolved) -> Vec<Arc<str>> {
    let symbols = resolved.object.symbols.iter().enumerate();
    let mut names: Vec<_> = symbols
        .filter(|(index, symbol)| {
            symbol.is_function
                && matches!(symbol.home, Home::Section(_))
                && !resolved.new.contains(index)
        })
        .map(|(_, symbol)| symbol.name.clone())
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// What the payload takes from the kernel, by name.
fn symbols(kernel: &Kernel, resolved: &Resolved) -> Vec<(Arc<str>, i64)> {
    let begin = kernel.image().range.start;
    let symbols = resolved.object.symbols.iter().zip(&resolved.targets);
    let mut names: Vec<_> = symbols
        .filter(|(symbol, _)| !symbol.name.is_empty() && symbol.home != Home::Absolute)
        .filter_map(|(symbol, target)| match target {
            Target::Address(at) | Target::PlainReturn(Some(at)) if *at != 0 => {
                Some((symbol.name.clone(), at.wrapping_sub(begin.0).cast_signed()))
            }
            _ => None,
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}
