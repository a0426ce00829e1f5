//! What of a patch can be done while the guest runs: all but the stop.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use super::{Fixed, FixedFunction, PatchError};
use crate::addr::{Gpa, Gva};
use crate::hook::Hooks;
use crate::journal::Journal;
use crate::kernel::{Kernel, MappedRegion, Site};
use crate::livepatch::options::other_release;
use crate::livepatch::{Linked, Map, Payload, Replacement};
use crate::machine::TextWrite;
use crate::region::Placement;
use crate::trace::filter::Glob;

/// How a payload is to be applied.
#[derive(Debug, Clone, Default)]
pub struct PatchOptions {
    /// What replaces what, beyond what the payload says itself.
    pub maps: Vec<Map>,
    /// Whether it takes the place of all patches before it (a cumulative patch).
    pub replace: bool,
    /// Whether nobody may stand in a replaced function, also if there is but one. If there are several
    /// that is so anyway.
    pub consistent: bool,
    /// How long the guest may have stood by the first write; as long as it takes if `None`.
    pub max_stop: Option<Duration>,
    /// The release that the guest's kernel has to have; any if `None`.
    pub release: Option<Glob>,
    /// The build-id that it has to have, in hexadecimal; any if `None`.
    pub build_id: Option<String>,
}

/// A function that a patch replaces.
#[derive(Debug, Clone)]
pub(super) struct Function {
    pub name: Arc<str>,
    pub site: Site,
    /// The kernel's.
    pub old: Range<Gva>,
    /// Parts of it that lie elsewhere.
    pub parts: Vec<Range<Gva>>,
    /// The one that replaces it.
    pub new: Gva,
}

/// A payload that is in the region, to which nothing leads yet. Dropping it gives up its room.
#[derive(Debug)]
pub struct Pending<'m> {
    pub(super) functions: Vec<Function>,
    pub(super) room: Room<'m>,
    pub(super) replace: bool,
    /// Whether nobody may stand in a replaced function.
    pub(super) is_consistent: bool,
    pub(super) max_stop: Option<Duration>,
    /// The code, if it can be written only in a stop.
    pub(super) text: Vec<(Gpa, Vec<u8>)>,
    pub(super) digest: String,
    pub(super) prepared: SystemTime,
}

impl Pending<'_> {
    /// The functions that it replaces.
    pub fn functions(&self) -> impl ExactSizeIterator<Item = &Arc<str>> {
        self.functions.iter().map(|function| &function.name)
    }

    /// Whether nobody may stand in one of them.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        self.is_consistent
    }

    /// The writes of code that have to be done in the stop.
    pub(super) fn writes(&self) -> Vec<TextWrite<'_>> {
        self.text.iter().map(|(at, bytes)| TextWrite { at: *at, bytes }).collect()
    }
}

/// A payload's memory. It is given up when it is dropped, until something may lead there.
#[derive(Debug)]
pub(super) struct Room<'m> {
    region: &'m MappedRegion,
    journal: Option<&'m Journal>,
    pub placement: Placement,
    is_kept: bool,
}

impl Room<'_> {
    /// Keeps it from here on: a task may come to stand in it.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Gives it up after all.
    pub fn give_up(mut self) {
        self.is_kept = false;
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.region.payloads().release(&self.placement, self.journal);
        }
    }
}

/// Bytes that are written at once at most: more would not fit a packet of some engine's.
const PIECE: u64 = 1024;

/// Reads a payload, finds what it is for, and puts it where it is going to be executed.
pub(super) fn prepare<'m>(
    hooks: &Hooks<'m>,
    file: &[u8],
    options: &PatchOptions,
) -> Result<Pending<'m>, PatchError> {
    let (machine, kernel) = (hooks.machine(), hooks.kernel());
    if !kernel.is_current(machine.ram()) {
        return Err(crate::hook::HookError::OtherKernel.into());
    }
    let payload = Payload::parse(file)?;
    guard(hooks, &payload, options)?;
    let resolved = payload.resolve(&kernel.view(machine.ram())?, &options.maps)?;
    let replaced = redirectable(hooks, resolved.replacements())?;

    let (region, journal) = (hooks.region(), machine.journal());
    let placement = region.payloads().reserve(resolved.sizes(), journal)?;
    let room = Room { region, journal, placement, is_kept: false };
    let linked = resolved.link(&room.placement)?;
    let text = fill(hooks, &room.placement, &linked)?;
    let functions = replaced.into_iter().zip(&linked.entries).map(|((replacement, site), new)| {
        let Replacement { name, old, parts, .. } = replacement.clone();
        Function { name, site, old, parts, new: *new }
    });
    Ok(Pending {
        functions: functions.collect(),
        is_consistent: options.consistent || resolved.is_consistent(),
        replace: options.replace,
        max_stop: options.max_stop,
        text,
        digest: digest(file),
        prepared: SystemTime::now(),
        room,
    })
}

/// Writes the payload into its room, but for code that can be written only in a stop, which is given back
/// in pieces.
fn fill(
    hooks: &Hooks<'_>,
    placement: &Placement,
    linked: &Linked,
) -> Result<Vec<(Gpa, Vec<u8>)>, PatchError> {
    let (machine, region) = (hooks.machine(), hooks.region());
    let parts = [(&placement.constants, &linked.constants), (&placement.data, &linked.data)];
    for (range, bytes) in parts.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
        region.write(machine, range.start, bytes)?;
    }
    let start = placement.text.start;
    if !placement.text_is_used {
        region.write(machine, start, &linked.text)?;
        return Ok(Vec::new());
    }
    let outside = crate::region::RegionError::Outside { at: start, len: linked.text.len() };
    let gpa = region.gpa(start).ok_or(outside)?;
    let pieces = linked.text.chunks(PIECE as usize).zip((0..).step_by(PIECE as usize));
    Ok(pieces.map(|(piece, offset)| (gpa + offset, piece.to_vec())).collect())
}

/// Checks that the kernel is the one that the payload is for.
fn guard(hooks: &Hooks<'_>, payload: &Payload, options: &PatchOptions) -> Result<(), PatchError> {
    let kernel = hooks.kernel();
    let found = kernel.release();
    let for_payload = &payload.options().releases[..];
    for releases in [for_payload, options.release.as_slice()] {
        if let Some(wanted) = other_release(releases, found) {
            return Err(PatchError::Release { wanted, found: found.to_owned() });
        }
    }
    let for_payload: Vec<String> =
        payload.options().build_ids.iter().map(|id| id.to_string()).collect();
    let from_operator: Vec<String> =
        options.build_id.iter().map(|id| id.to_ascii_lowercase()).collect();
    for wanted in [for_payload, from_operator].into_iter().filter(|wanted| !wanted.is_empty()) {
        let found = build_id(kernel, hooks);
        if !found.as_ref().is_some_and(|found| wanted.contains(found)) {
            return Err(PatchError::BuildId { wanted: wanted.join(" or "), found });
        }
    }
    Ok(())
}

fn build_id(kernel: &Kernel, hooks: &Hooks<'_>) -> Option<String> {
    kernel.build_id(hooks.machine().ram()).ok().map(|id| id.to_string())
}

/// The pads of the functions that are to be replaced.
fn redirectable<'r>(
    hooks: &Hooks<'_>,
    replacements: &'r [Replacement],
) -> Result<Vec<(&'r Replacement, Site)>, PatchError> {
    let pads = hooks.pads()?;
    let (mut found, mut fixed) = (Vec::new(), Vec::new());
    for replacement in replacements {
        let site = pads.sites.iter().find(|site| site.function == replacement.old.start);
        let why = match site {
            Some(site) if site.prefix.signs => Fixed::Signed(site.prefix.name),
            Some(site) => {
                found.push((replacement, site.clone()));
                continue;
            }
            None => {
                let mut refused = pads.refused.iter();
                let refused = refused.find(|refused| replacement.old.contains(&refused.at));
                refused.map_or(Fixed::NoPad, |refused| Fixed::Refused(refused.why.clone()))
            }
        };
        fixed.push(FixedFunction { name: replacement.name.clone(), why });
    }
    match fixed.is_empty() {
        true => Ok(found),
        false => Err(PatchError::Functions(fixed)),
    }
}

/// The SHA-256 digest of a file, in hexadecimal.
fn digest(file: &[u8]) -> String {
    Sha256::digest(file).iter().fold(String::new(), |mut text, byte| {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
