//! Changes a set of sites as one: all of them or none.
//!
//! ```text
//! Patchset::plan      sites in order, disjoint, within pages          outside the stop
//! .prepare()          the list of writes, so that nothing is allocated
//! journal             in guests that outlive us: what is going to be written, on the disk
//! machine.stop()
//! .verify(stopped)    every site holds what is expected or already what is wanted, no vCPU stands
//!                     inside one
//! .apply()            write, read back; on any failure the originals   inside the stop
//! resume
//! ```
//!
//! A site is one instruction. Since its length does not change, a vCPU or a sleeping task can only
//! stand before it or behind it, never half-way, and either is good with either instruction.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::addr::{Gpa, Gva};
use crate::arch::{MAX_PAD, PadBytes};
use crate::journal::{Entry, Journal};
use crate::machine::{StopError, Stopped, TextWrite, TextWriteError};
use crate::mem::{MemError, PhysMem};

/// One instruction that is to change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The function that it belongs to.
    pub function: Arc<str>,
    /// Where the guest executes it.
    pub at: Gva,
    /// Where it is in guest-physical memory.
    pub gpa: Gpa,
    /// The exact bytes that are there, and that go back.
    pub original: PadBytes,
    /// The bytes to be there; as many as `original`.
    pub replacement: PadBytes,
}

/// Sites that change together.
#[derive(Debug, Clone)]
pub struct Patchset {
    sites: Arc<[Site]>,
}

/// Sites do not make a patchset.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Two sites share bytes.
    #[error("{first} and {second} would both be patched at {at}")]
    Overlap {
        /// One function.
        first: Arc<str>,
        /// The other.
        second: Arc<str>,
        /// Where the second begins.
        at: Gva,
    },
    /// A site is not one instruction within one page.
    #[error("the site of {function} at {at} is not one instruction within one page")]
    NotOneInstruction {
        /// The function.
        function: Arc<str>,
        /// Where.
        at: Gva,
    },
    /// There is nothing to change.
    #[error("there is nothing to patch")]
    Empty,
}

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
    #[error("patching {function} failed: {reason}; every site holds its original bytes again")]
    RolledBack {
        /// The function at which it failed.
        function: Arc<str>,
        /// Why.
        reason: String,
    },
    /// The originals could not be put back everywhere.
    #[error(
        "patching {function} failed: {reason}; and {left} sites from {first} on could not be put \
         back: end this guest"
    )]
    Torn {
        /// The function at which it failed.
        function: Arc<str>,
        /// Why.
        reason: String,
        /// Sites that do not hold their original bytes.
        left: usize,
        /// The first of them.
        first: Arc<str>,
    },
}

impl Patchset {
    /// Orders sites and checks that they can be changed as one.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn plan(mut sites: Vec<Site>) -> Result<Self, PlanError> {
        if sites.is_empty() {
            return Err(PlanError::Empty);
        }
        sites.sort_unstable_by_key(|site| site.gpa);
        for site in &sites {
            let len = site.original.len() as u64;
            let one_page = (site.gpa.0 & 0xfff) + len <= 0x1000;
            if len == 0 || site.replacement.len() != site.original.len() || !one_page {
                let function = Arc::clone(&site.function);
                return Err(PlanError::NotOneInstruction { function, at: site.at });
            }
        }
        for pair in sites.windows(2) {
            if pair[0].gpa + pair[0].original.len() as u64 > pair[1].gpa {
                return Err(PlanError::Overlap {
                    first: Arc::clone(&pair[0].function),
                    second: Arc::clone(&pair[1].function),
                    at: pair[1].at,
                });
            }
        }
        Ok(Self { sites: sites.into() })
    }

    /// The same without the sites of these indices, which ascend.
    fn without(&self, indices: &[usize]) -> Self {
        let sites = self.sites.iter().enumerate();
        let kept = sites.filter(|(index, _)| indices.binary_search(index).is_err());
        Self { sites: kept.map(|(_, site)| site.clone()).collect() }
    }

    /// The sites, in the order of their guest-physical addresses.
    #[must_use]
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    /// Makes everything that is needed during the stop, outside of it.
    #[must_use]
    pub fn prepare(&self) -> Prepared<'_> {
        let mut by_address: Vec<&Site> = self.sites.iter().collect();
        by_address.sort_unstable_by_key(|site| site.at);
        Prepared {
            patchset: self,
            by_address,
            replacements: writes(&self.sites, |site| &site.replacement),
            originals: writes(&self.sites, |site| &site.original),
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
    by_address: Vec<&'p Site>,
    replacements: Vec<TextWrite<'p>>,
    originals: Vec<TextWrite<'p>>,
}

impl<'p> Prepared<'p> {
    /// Compares every site with its original bytes and checks that no vCPU stands inside one. A site
    /// that holds its replacement already is as wanted: it will not be written, and not be reverted
    /// with the others.
    ///
    /// # Errors
    /// [`VerifyError`]; nothing has been written.
    pub fn verify<'s>(
        &'s self,
        ram: &'s dyn PhysMem,
        stopped: &'s mut dyn Stopped,
        vcpus: usize,
    ) -> Result<Verified<'s>, VerifyError> {
        let mut already = Vec::new();
        for (index, site) in self.patchset.sites.iter().enumerate() {
            let found = read_site(ram, site)?;
            if found == site.replacement {
                already.push(index);
            } else if found != site.original {
                return Err(VerifyError::Mismatch {
                    function: Arc::clone(&site.function),
                    at: site.at,
                    found,
                    expected: site.original,
                });
            }
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
        Ok(Verified { prepared: self, already, ram, stopped })
    }

    /// The site that `pc` lies strictly inside of.
    fn around(&self, pc: u64) -> Option<&Site> {
        let before = self.by_address.partition_point(|site| site.at.0 < pc);
        let site = self.by_address.get(before.checked_sub(1)?)?;
        (pc < site.at.0 + site.original.len() as u64).then_some(site)
    }
}

fn read_bytes(ram: &dyn PhysMem, site: &Site) -> Result<PadBytes, MemError> {
    let mut bytes = site.original;
    ram.read(site.gpa, &mut bytes)?;
    Ok(bytes)
}

fn read_site(ram: &dyn PhysMem, site: &Site) -> Result<PadBytes, VerifyError> {
    read_bytes(ram, site).map_err(|source| VerifyError::Unreadable {
        function: Arc::clone(&site.function),
        at: site.at,
        source,
    })
}

/// A patchset whose sites hold what is expected, in a guest that stands still.
pub struct Verified<'s> {
    prepared: &'s Prepared<'s>,
    /// Indices of the sites that hold their replacements, ascending.
    already: Vec<usize>,
    ram: &'s dyn PhysMem,
    stopped: &'s mut dyn Stopped,
}

impl Verified<'_> {
    /// Writes every site that does not hold its replacement yet, and reads it back.
    ///
    /// # Errors
    /// [`ApplyError`]; with [`ApplyError::RolledBack`] the guest's text is as it was.
    pub fn apply(self) -> Result<Applied, ApplyError> {
        let Self { prepared, already, ram, stopped } = self;
        let (some, some_prepared);
        let (patchset, prepared) = if already.is_empty() {
            (prepared.patchset, prepared)
        } else {
            // Nobody arms a function twice in a hurry: this may allocate.
            some = prepared.patchset.without(&already);
            some_prepared = some.prepare();
            (&some, &some_prepared)
        };
        let applied = Applied { patchset: patchset.clone(), already: already.len() };
        let sites = &patchset.sites;
        if sites.is_empty() {
            return Ok(applied);
        }
        let failed = match stopped.write_text(&prepared.replacements) {
            Ok(()) => {
                sites.iter().enumerate().find_map(|(index, site)| match read_site(ram, site) {
                    Ok(found) if found == site.replacement => None,
                    Ok(found) => Some((index, format!("it reads back as [{found}]"))),
                    Err(error) => Some((index, error.to_string())),
                })
            }
            Err(error) => Some((error.index, error.reason)),
        };
        let Some((index, reason)) = failed else {
            return Ok(applied);
        };
        let function = Arc::clone(&sites[index.min(sites.len() - 1)].function);
        write_out(stopped, &prepared.originals);
        let left: Vec<&Site> = sites.iter().filter(|site| !holds_original(ram, site)).collect();
        Err(match left.first() {
            None => ApplyError::RolledBack { function, reason },
            Some(first) => ApplyError::Torn {
                function,
                reason,
                left: left.len(),
                first: Arc::clone(&first.function),
            },
        })
    }
}

/// A patchset that is in force.
#[derive(Debug)]
pub struct Applied {
    patchset: Patchset,
    already: usize,
}

impl From<&Site> for Entry {
    fn from(site: &Site) -> Self {
        Self {
            function: Arc::clone(&site.function),
            at: site.at,
            gpa: site.gpa,
            original: site.original.to_vec(),
            replacement: site.replacement.to_vec(),
        }
    }
}

impl Applied {
    /// What a process that has ended may have left in a guest, by its journal; `None` for nothing.
    /// Only what holds its bytes is reverted.
    ///
    /// # Errors
    /// The journal names sites that nobody can have armed.
    pub fn left_behind(journal: &Journal) -> Result<Option<Self>, PlanError> {
        let site = |entry: Entry| {
            let Entry { function, at, gpa, original, replacement } = entry;
            if original.len() > MAX_PAD || replacement.len() > MAX_PAD {
                return Err(PlanError::NotOneInstruction { function, at });
            }
            let (original, replacement) = (PadBytes::new(&original), PadBytes::new(&replacement));
            Ok(Site { function, at, gpa, original, replacement })
        };
        let sites = journal.sites().into_iter().map(site).collect::<Result<Vec<_>, _>>()?;
        match Patchset::plan(sites) {
            Ok(patchset) => Ok(Some(Self { patchset, already: 0 })),
            Err(PlanError::Empty) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// How many sites were as wanted before, and so are not this patchset's to revert.
    #[must_use]
    pub fn already(&self) -> usize {
        self.already
    }

    /// The sites that were written.
    #[must_use]
    pub fn sites(&self) -> &[Site] {
        self.patchset.sites()
    }

    /// This and another one, which shares no site with it, as one.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        let mut sites: Vec<Site> = self.sites().iter().chain(other.sites()).cloned().collect();
        sites.sort_unstable_by_key(|site| site.gpa);
        let already = self.already + other.already;
        Self { patchset: Patchset { sites: sites.into() }, already }
    }

    /// The sites of which `goes` says so, and the others; `None` for none.
    #[must_use]
    pub fn partition(self, goes: impl Fn(&Site) -> bool) -> (Option<Self>, Option<Self>) {
        let (going, staying): (Vec<Site>, Vec<Site>) =
            self.sites().iter().cloned().partition(|site| goes(site));
        let some = |sites: Vec<Site>| {
            (!sites.is_empty())
                .then(|| Self { patchset: Patchset { sites: sites.into() }, already: 0 })
        };
        (some(going), some(staying))
    }

    /// Makes everything that a revert needs during the stop, outside of it.
    #[must_use]
    pub fn prepare_revert(&self) -> Revert<'_> {
        let count = self.sites().len();
        Revert {
            sites: self.sites(),
            originals: writes(self.sites(), |site| &site.original),
            ours: Vec::with_capacity(count),
            writes: Vec::with_capacity(count),
            failed: BTreeSet::new(),
        }
    }
}

/// A revert ready for a stop. The same one is used again if it fails: it knows which sites it may
/// have written in part.
#[derive(Debug)]
pub struct Revert<'p> {
    sites: &'p [Site],
    originals: Vec<TextWrite<'p>>,
    /// Indices of the sites that are written in this run, and the writes.
    ours: Vec<usize>,
    writes: Vec<TextWrite<'p>>,
    /// Indices of the sites that an earlier run could not write.
    failed: BTreeSet<usize>,
}

/// What a revert did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reverted {
    /// Sites that hold their original bytes because of it.
    pub restored: usize,
    /// Sites that did already.
    pub already: usize,
    /// Sites that were no longer ours, left as they are: what they hold now, if they can be read.
    /// The guest has freed or rewritten that memory.
    pub foreign: Vec<(Site, Option<PadBytes>)>,
    /// Sites that are ours and could not be written.
    pub failed: Vec<Site>,
}

impl Revert<'_> {
    /// Puts the original bytes back at every site that is still ours.
    pub fn run(&mut self, ram: &dyn PhysMem, stopped: &mut dyn Stopped) -> Reverted {
        let mut reverted = Reverted::default();
        self.ours.clear();
        self.writes.clear();
        for (index, site) in self.sites.iter().enumerate() {
            let found = read_bytes(ram, site).ok();
            if found == Some(site.replacement) || self.failed.contains(&index) {
                self.ours.push(index);
                self.writes.push(self.originals[index]);
            } else if found == Some(site.original) {
                reverted.already += 1;
            } else {
                reverted.foreign.push((site.clone(), found));
            }
        }
        write_out(stopped, &self.writes);
        self.failed = (self.ours.iter().copied())
            .filter(|index| !holds_original(ram, &self.sites[*index]))
            .collect();
        reverted.restored = self.ours.len() - self.failed.len();
        reverted.failed = self.failed.iter().map(|index| self.sites[*index].clone()).collect();
        reverted
    }
}

/// How often a write of original bytes is tried again: to leave a guest half-patched is worse than
/// to be slow.
const PUT_BACK_TRIES: usize = 3;

/// Writes original bytes, going on behind a write that fails again and again only when there is no
/// try left. Whether the bytes are there is for the caller to see.
fn write_out(stopped: &mut dyn Stopped, originals: &[TextWrite<'_>]) {
    let mut rest = originals;
    let mut tries = PUT_BACK_TRIES;
    while !rest.is_empty() {
        match stopped.write_text(rest) {
            Ok(()) => break,
            Err(TextWriteError { index, .. }) => {
                if index > 0 {
                    tries = PUT_BACK_TRIES;
                }
                tries -= 1;
                // A site that can't be written must not keep the others from being put back.
                let skip = usize::from(tries == 0);
                if skip == 1 {
                    tries = PUT_BACK_TRIES;
                }
                rest = rest.get(index + skip..).unwrap_or_default();
            }
        }
    }
}

fn holds_original(ram: &dyn PhysMem, site: &Site) -> bool {
    read_site(ram, site).is_ok_and(|found| found == site.original)
}

#[cfg(test)]
mod tests;
