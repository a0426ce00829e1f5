//! Changes a set of sites as one: all of them or none.
//!
//! ```text
//! Patchset::plan      sites in order, disjoint, within pages          outside the stop
//! .prepare()          where the sites are in our memory, the list of writes: nothing is looked up or allocated
//! journal             in guests that outlive us: what is going to be written, on the disk
//! machine.stop()
//! .verify(stopped)    every site holds what is expected or already what is wanted, no vCPU stands
//!                     inside one
//! .apply()            write, read back; on any failure the originals   inside the stop
//! resume
//! ```
//!
//! A [`Revert`] is the way out: it puts back as many as it can, and leaves alone what is no longer ours.
//!
//! A site is one instruction. Since its length does not change, a vCPU or a sleeping task can only
//! stand before it or behind it, never half-way, and either is good with either instruction.

use std::sync::Arc;

use crate::addr::{Gpa, Gva};
use crate::arch::PadBytes;
use crate::mem::PhysMem;

mod apply;
mod revert;
#[cfg(test)]
mod tests;
mod text;

pub use apply::{ApplyError, Foreign, Prepared, Verified, VerifyError};
pub use revert::{Applied, Left, LeftBehind, Ours, Revert, Reverted};

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

    /// Makes everything that is needed during the stop, outside of it, for the guest with that RAM.
    #[must_use]
    pub fn prepare<'p>(&'p self, ram: &'p dyn PhysMem) -> Prepared<'p> {
        Prepared::new(self, ram)
    }
}
