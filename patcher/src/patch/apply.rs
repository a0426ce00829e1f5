//! The way in: verify, write, read back, or put back.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use super::revert::write_out;
use super::text::{Form, Found, Text};
use super::{Applied, Left, Patchset, Site};
use crate::addr::Gva;
use crate::arch::PadBytes;
use crate::machine::{StopError, Stopped, TextWrite};
use crate::mem::{MemError, PhysMem};

/// Guest text is not what a patchset expects; nothing was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// A site holds other bytes.
    #[error(
        "{function} at {at} holds [{found}] where [{expected}] was expected; nothing was written"
    )]
    Mismatch {
        /// The function.
        function: Arc<str>,
        /// Where.
        at: Gva,
        /// What is there.
        found: PadBytes,
        /// What should be.
        expected: PadBytes,
    },
    /// A vCPU's next instruction begins inside a site. It is somewhere else in a moment.
    #[error("vCPU {vcpu} stands at {pc:#x}, inside the site of {function}; nothing was written")]
    VcpuInside {
        /// Which.
        vcpu: usize,
        /// Where it stands.
        pc: u64,
        /// The function.
        function: Arc<str>,
    },
    /// A site can't be read.
    #[error("{function} at {at} can't be read: {source}; nothing was written")]
    Unreadable {
        /// The function.
        function: Arc<str>,
        /// Where.
        at: Gva,
        /// Why.
        source: MemError,
    },
    /// A vCPU's registers can't be read.
    #[error("the registers of vCPU {vcpu} can't be read: {reason}; nothing was written")]
    NoRegisters {
        /// Which.
        vcpu: usize,
        /// Why.
        reason: String,
    },
}

/// A patchset was verified and could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The originals are back at every site.
    #[error("patching {function} failed: {reason}; every site holds again what it held before")]
    RolledBack {
        /// The function at which it failed.
        function: Arc<str>,
        /// Why.
        reason: String,
    },
    /// The originals could not be put back everywhere.
    #[error(
        "patching {function} failed: {reason}; and {} sites from {} on could not be put back: end \
         this guest",
        left.len(), left.first().map_or("none", |site| &site.function)
    )]
    Torn {
        /// The function at which it failed.
        function: Arc<str>,
        /// Why.
        reason: String,
        /// Sites that do not hold their original bytes.
        left: Vec<Left>,
    },
}

/// Sites that are written before they are read back: as many as stay in a processor's nearer caches.
const PIECE: usize = 1024;

impl VerifyError {
    /// What it means that a site does not hold what is expected.
    fn of(site: &Site, found: Found) -> Self {
        let (function, at) = (Arc::clone(&site.function), site.at);
        match found.bytes(&site.original, &site.replacement) {
            Ok(found) => Self::Mismatch { function, at, found, expected: site.original },
            Err(source) => Self::Unreadable { function, at, source },
        }
    }
}

fn writes<'a>(sites: &'a [Site], bytes: impl Fn(&'a Site) -> &'a PadBytes) -> Vec<TextWrite<'a>> {
    sites.iter().map(|site| TextWrite { at: site.gpa, bytes: bytes(site) }).collect()
}

/// A patchset ready for a stop.
#[derive(Debug)]
pub struct Prepared<'p> {
    patchset: &'p Patchset,
    text: Text<'p>,
    by_address: Vec<&'p Site>,
    replacements: Vec<TextWrite<'p>>,
    originals: Vec<TextWrite<'p>>,
}

/// What becomes of a patchset if one of its sites holds neither its original nor its replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Foreign {
    /// Nothing is written.
    Refuse,
    /// The guest has taken that memory for something else, and may keep it: the others are written.
    Leave,
}

impl<'p> Prepared<'p> {
    pub(super) fn new(patchset: &'p Patchset, ram: &'p dyn PhysMem) -> Self {
        let sites = &patchset.sites;
        let mut by_address: Vec<&Site> = sites.iter().collect();
        by_address.sort_unstable_by_key(|site| site.at);
        let replacements = writes(sites, |site| &site.replacement);
        let originals = writes(sites, |site| &site.original);
        // Last, so that it is what the caches still have when the guest stands.
        let forms = sites.iter().map(|site| (site.gpa, &site.original, &site.replacement));
        let text = Text::new(ram, forms);
        Self { patchset, text, by_address, replacements, originals }
    }

    /// Compares every site with its original bytes and checks that no vCPU stands inside one. A site
    /// that holds its replacement already is as wanted: it will not be written, and not be reverted
    /// with the others.
    ///
    /// # Errors
    /// [`VerifyError`]; nothing has been written.
    pub fn verify<'s>(
        &'s self,
        stopped: &'s mut dyn Stopped,
        vcpus: usize,
    ) -> Result<Verified<'s>, VerifyError> {
        self.verify_but_for(Foreign::Refuse, stopped, vcpus)
    }

    /// The same, but for sites that hold something else.
    ///
    /// # Errors
    /// As [`Prepared::verify`].
    pub fn verify_but_for<'s>(
        &'s self,
        foreign: Foreign,
        stopped: &'s mut dyn Stopped,
        vcpus: usize,
    ) -> Result<Verified<'s>, VerifyError> {
        let (mut already, mut left) = (Vec::new(), Vec::new());
        let sites = &self.patchset.sites;
        let mut refused = None;
        self.text.unusual(0..sites.len(), Form::Before, |index, found| {
            match found {
                Found::After => already.push(index),
                Found::Other(found) if foreign == Foreign::Leave => left.push((index, found)),
                found => {
                    refused = Some((index, found));
                    return ControlFlow::Break(());
                }
            }
            ControlFlow::Continue(())
        });
        if let Some((index, found)) = refused {
            return Err(VerifyError::of(&sites[index], found));
        }
        for vcpu in 0..vcpus {
            let registers = stopped.registers(vcpu).map_err(|error: StopError| {
                VerifyError::NoRegisters { vcpu, reason: error.to_string() }
            })?;
            if let Some(site) = self.around(registers.pc()) {
                return Err(VerifyError::VcpuInside {
                    vcpu,
                    pc: registers.pc(),
                    function: Arc::clone(&site.function),
                });
            }
        }
        Ok(Verified { prepared: self, already, left, stopped })
    }

    /// Writes sites and reads them back; tells which failed and why.
    fn write(&self, stopped: &mut dyn Stopped, sites: Range<usize>) -> Option<(usize, String)> {
        if let Err(error) = stopped.write_text(&self.replacements[sites.clone()]) {
            return Some((sites.start + error.index, error.reason));
        }
        let mut failed = None;
        self.text.unusual(sites, Form::After, |index, found| {
            let reason = match found {
                Found::After => return ControlFlow::Continue(()),
                Found::Before => "it reads back as it was before".to_owned(),
                Found::Other(found) => format!("it reads back as [{found}]"),
                Found::Unreadable(error) => format!("it can't be read back: {error}"),
            };
            failed = Some((index, reason));
            ControlFlow::Break(())
        });
        failed
    }

    /// The site that `pc` lies strictly inside of.
    fn around(&self, pc: u64) -> Option<&Site> {
        let before = self.by_address.partition_point(|site| site.at.0 < pc);
        let site = self.by_address.get(before.checked_sub(1)?)?;
        (pc < site.at.0 + site.original.len() as u64).then_some(site)
    }
}

/// A patchset whose sites hold what is expected, in a guest that stands still.
pub struct Verified<'s> {
    prepared: &'s Prepared<'s>,
    /// Indices of the sites that hold their replacements, ascending.
    already: Vec<usize>,
    /// Indices of the sites that are no longer ours, likewise, and what they hold.
    left: Vec<(usize, PadBytes)>,
    stopped: &'s mut dyn Stopped,
}

impl Verified<'_> {
    /// The guest that stands still, for whatever else has to be seen before the first write.
    pub fn stopped(&mut self) -> &mut dyn Stopped {
        self.stopped
    }

    /// Writes every site that does not hold its replacement yet, and reads it back.
    ///
    /// # Errors
    /// [`ApplyError`]; with [`ApplyError::RolledBack`] the guest's text is as it was.
    pub fn apply(self) -> Result<Applied, ApplyError> {
        let Self { prepared, already, left, stopped } = self;
        let (some, some_prepared);
        let whole = prepared.patchset;
        let (patchset, prepared) = if already.is_empty() && left.is_empty() {
            (whole, prepared)
        } else {
            // Nobody arms a function twice in a hurry: this may allocate.
            let mut skipped: Vec<usize> =
                already.iter().copied().chain(left.iter().map(|(index, _)| *index)).collect();
            skipped.sort_unstable();
            some = whole.without(&skipped);
            some_prepared = some.prepare(prepared.text.ram());
            (&some, &some_prepared)
        };
        let left =
            left.into_iter().map(|(index, found)| Left::of(&whole.sites[index], Some(found)));
        let applied =
            Applied { patchset: patchset.clone(), already: already.len(), foreign: left.collect() };
        let sites = &patchset.sites;
        if sites.is_empty() {
            return Ok(applied);
        }
        let mut failed = None;
        for first in (0..sites.len()).step_by(PIECE) {
            failed = prepared.write(stopped, first..sites.len().min(first + PIECE));
            if failed.is_some() {
                break;
            }
        }
        let Some((index, reason)) = failed else {
            return Ok(applied);
        };
        let function = Arc::clone(&sites[index.min(sites.len() - 1)].function);
        write_out(stopped, &prepared.originals);
        let torn = |(index, site): (usize, &Site)| match prepared.text.find(index) {
            Found::Before => None,
            found => Some(Left::of(site, found.bytes(&site.original, &site.replacement).ok())),
        };
        let left: Vec<Left> = sites.iter().enumerate().filter_map(torn).collect();
        Err(match left.is_empty() {
            true => ApplyError::RolledBack { function, reason },
            false => ApplyError::Torn { function, reason, left },
        })
    }
}
