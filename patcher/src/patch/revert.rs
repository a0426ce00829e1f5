//! The way out: original bytes go back wherever ours are still there.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::text::{Form, Found, Text};
use super::{Patchset, PlanError, Site};
use crate::addr::{Gpa, Gva};
use crate::arch::{MAX_PAD, PadBytes};
use crate::journal::{Entry, Journal};
use crate::machine::{Stopped, TextWrite, TextWriteError};
use crate::mem::PhysMem;

/// A patchset that is in force.
#[derive(Debug)]
pub struct Applied {
    pub(super) patchset: Patchset,
    pub(super) already: usize,
    pub(super) foreign: Vec<Left>,
}

impl Applied {
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

    /// The sites that were left as they are ([`Foreign::Leave`](super::Foreign::Leave)).
    #[must_use]
    pub fn foreign(&self) -> &[Left] {
        &self.foreign
    }

    /// Makes everything that a revert needs during the stop, outside of it.
    #[must_use]
    pub fn prepare_revert<'p>(&'p self, ram: &'p dyn PhysMem) -> Revert<'p> {
        Revert::new(ram, self.sites().iter().map(Ours::from).collect())
    }
}

/// What a process that has ended may have left in a guest.
#[derive(Debug)]
pub struct LeftBehind {
    /// With the first form of ours that each may hold.
    patchset: Patchset,
    /// All forms of ours that each may hold.
    forms: Vec<Vec<PadBytes>>,
}

impl LeftBehind {
    /// What the journal says; `None` for nothing.
    ///
    /// # Errors
    /// The journal names sites that nobody can have armed.
    pub fn new(journal: &Journal) -> Result<Option<Self>, PlanError> {
        let (mut sites, mut forms) = (Vec::new(), Vec::new());
        for Entry { function, at, gpa, original, ours } in journal.sites() {
            let fits = |bytes: &Vec<u8>| bytes.len() == original.len() && bytes.len() <= MAX_PAD;
            let Some(first) = ours.first().filter(|_| ours.iter().all(fits)) else {
                return Err(PlanError::NotOneInstruction { function, at });
            };
            let (original, replacement) = (PadBytes::new(&original), PadBytes::new(first));
            sites.push(Site { function, at, gpa, original, replacement });
            forms.push(ours.iter().map(|bytes| PadBytes::new(bytes)).collect());
        }
        // The journal has its sites in the order of a patchset.
        match Patchset::plan(sites) {
            Ok(patchset) => Ok(Some(Self { patchset, forms })),
            Err(PlanError::Empty) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The sites; what replaces their original bytes is one of several forms.
    #[must_use]
    pub fn sites(&self) -> &[Site] {
        self.patchset.sites()
    }

    /// Makes everything that a revert needs during the stop, outside of it. Only what holds our bytes
    /// is reverted.
    #[must_use]
    pub fn prepare_revert<'p>(&'p self, ram: &'p dyn PhysMem) -> Revert<'p> {
        let sites = self.sites().iter().zip(&self.forms);
        Revert::new(ram, sites.map(|(site, forms)| Ours { forms, ..Ours::from(site) }).collect())
    }
}

/// A site that may hold bytes of ours, and what goes there instead.
#[derive(Debug, Clone, Copy)]
pub struct Ours<'p> {
    /// The function that it belongs to.
    pub function: &'p Arc<str>,
    /// Where the guest executes it.
    pub at: Gva,
    /// Where it is in guest-physical memory.
    pub gpa: Gpa,
    /// What goes there.
    pub back: &'p PadBytes,
    /// What may be there of ours.
    pub forms: &'p [PadBytes],
    /// Whether a write of it has failed half-way: it is ours then whatever it holds.
    pub torn: bool,
}

impl<'p> From<&'p Site> for Ours<'p> {
    fn from(site: &'p Site) -> Self {
        Self {
            function: &site.function,
            at: site.at,
            gpa: site.gpa,
            back: &site.original,
            forms: std::slice::from_ref(&site.replacement),
            torn: false,
        }
    }
}

impl Ours<'_> {
    /// The form of ours that it holds most likely.
    fn form(&self) -> &PadBytes {
        self.forms.first().unwrap_or(self.back)
    }

    fn left(&self, found: Option<PadBytes>) -> Left {
        Left { function: Arc::clone(self.function), at: self.at, found }
    }
}

/// A site that could not, or must not, be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// The function that it belongs to.
    pub function: Arc<str>,
    /// Where the guest executes it.
    pub at: Gva,
    /// What it holds, if that can be read.
    pub found: Option<PadBytes>,
}

impl Left {
    pub(super) fn of(site: &Site, found: Option<PadBytes>) -> Self {
        Self { function: Arc::clone(&site.function), at: site.at, found }
    }
}

/// A revert ready for a stop. The same one is used again if it fails: it knows which sites it may
/// have written in part.
#[derive(Debug)]
pub struct Revert<'p> {
    sites: Vec<Ours<'p>>,
    text: Text<'p>,
    /// What is written if every site is still ours.
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
    /// Sites that were no longer ours, left as they are. The guest has freed or rewritten that memory.
    pub foreign: Vec<Left>,
    /// Sites that are ours and could not be written.
    pub failed: Vec<Left>,
}

impl<'p> Revert<'p> {
    /// Makes everything that is needed during the stop, outside of it.
    #[must_use]
    pub fn new(ram: &'p dyn PhysMem, sites: Vec<Ours<'p>>) -> Self {
        let torn = sites.iter().enumerate().filter(|(_, site)| site.torn);
        Self {
            failed: torn.map(|(index, _)| index).collect(),
            writes: sites.iter().map(|site| TextWrite { at: site.gpa, bytes: site.back }).collect(),
            text: Text::new(ram, sites.iter().map(|site| (site.gpa, site.form(), site.back))),
            sites,
        }
    }

    /// Puts the original bytes back at every site that is still ours.
    pub fn run(&mut self, stopped: &mut dyn Stopped) -> Reverted {
        self.run_but_for(stopped, |_| false)
    }

    /// The same, but for sites in memory that `is_lost` says is not what it was when they were written:
    /// nothing is written there, whatever it holds, and they count as foreign.
    pub fn run_but_for(
        &mut self,
        stopped: &mut dyn Stopped,
        is_lost: impl Fn(&Ours<'_>) -> bool,
    ) -> Reverted {
        let mut reverted = Reverted::default();
        let (sites, text) = (&self.sites, &self.text);
        let left = |index: usize, found: Found| {
            let site = &sites[index];
            site.left(found.bytes(site.form(), site.back).ok())
        };
        // Ascending.
        let mut kept: Vec<usize> =
            (0..sites.len()).filter(|index| is_lost(&sites[*index])).collect();
        let lost = kept.len();
        for index in &kept {
            // Whether it can be read makes no difference.
            let found = text.find(*index).bytes(sites[*index].form(), sites[*index].back);
            reverted.foreign.push(sites[*index].left(Some(found.unwrap_or(*sites[*index].back))));
        }
        text.unusual(0..sites.len(), Form::Before, |index, found| {
            if kept[..lost].binary_search(&index).is_ok() {
                return ControlFlow::Continue(());
            }
            let is_form =
                matches!(&found, Found::Other(found) if sites[index].forms.contains(found));
            if found == Found::After {
                reverted.already += 1;
            } else if is_form || self.failed.contains(&index) {
                return ControlFlow::Continue(());
            } else {
                reverted.foreign.push(left(index, found));
            }
            kept.push(index);
            ControlFlow::Continue(())
        });
        kept.sort_unstable();
        if kept.is_empty() {
            write_out(stopped, &self.writes);
        } else {
            let writes = self.writes.iter().enumerate();
            let ours = writes.filter(|(index, _)| kept.binary_search(index).is_err());
            write_out(stopped, &ours.map(|(_, write)| *write).collect::<Vec<_>>());
        }
        self.failed.clear();
        text.unusual(0..sites.len(), Form::After, |index, found| {
            if kept.binary_search(&index).is_err() {
                self.failed.insert(index);
                reverted.failed.push(left(index, found));
            }
            ControlFlow::Continue(())
        });
        reverted.restored = sites.len() - kept.len() - reverted.failed.len();
        reverted
    }
}

/// How often a write of original bytes is tried again: to leave a guest half-patched is worse than
/// to be slow.
const PUT_BACK_TRIES: usize = 3;

/// Writes original bytes, going on behind a write that fails again and again only when there is no
/// try left. Whether the bytes are there is for the caller to see.
pub(super) fn write_out(stopped: &mut dyn Stopped, originals: &[TextWrite<'_>]) {
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
