//! The synthetic guest on which hooks and patches are tested.

use super::Hooks;
use crate::arch::PadBytes;
use crate::kernel::{Kernel, MappedRegion, Site};
use crate::machine::Machine;
use crate::synthetic::{Blueprint, Guest};

/// Functions that the tests change, by their indices in the guest.
pub(crate) const FUNCTIONS: [usize; 4] = [0, 1, 2, 3];

/// A guest, and what is known of it before anything is armed.
pub(crate) struct Place {
    pub guest: Guest,
    pub kernel: Kernel,
    pub region: MappedRegion,
    pub sites: Vec<Site>,
}

impl Place {
    pub fn new() -> Self {
        let guest = Guest::new(&Blueprint { functions: 1100, ..Blueprint::default() });
        let kernel = guest.kernel();
        let region = MappedRegion::new(&guest, &kernel).unwrap();
        let sites = kernel.pads(guest.ram()).unwrap().sites;
        let sites = FUNCTIONS.map(|index| {
            let pad = guest.functions[index].pad;
            sites.iter().find(|site| site.at == pad).unwrap().clone()
        });
        Self { guest, kernel, region, sites: sites.into() }
    }

    pub fn hooks(&self) -> Hooks<'_> {
        Hooks::new(&self.guest, &self.kernel, &self.region)
    }

    /// What the pad of one of the functions holds.
    pub fn pad(&self, function: usize) -> PadBytes {
        PadBytes::new(&self.guest.peek(self.sites[function].at, 5))
    }

    /// What the pads of all of them hold.
    pub fn pads(&self) -> Vec<PadBytes> {
        FUNCTIONS.map(|function| self.pad(function)).into()
    }

    /// What they held before anything was armed.
    pub fn originals(&self) -> Vec<PadBytes> {
        self.sites.iter().map(|site| site.original).collect()
    }
}
