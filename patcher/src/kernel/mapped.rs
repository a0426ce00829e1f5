//! The region as one kernel sees it.

use super::{InstallError, Kernel, PlanMappingError, plan_mapping};
use crate::addr::Gva;
use crate::machine::Machine;
use crate::region::{CodeSpace, RegionError, RingLayout};

/// The region, mapped into a kernel's address space.
#[derive(Debug)]
pub struct MappedRegion {
    code: CodeSpace,
    rings: RingLayout,
    at: Gva,
}

/// The region could not be brought into a guest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapRegionError {
    /// There is no place for it.
    #[error(transparent)]
    Plan(#[from] PlanMappingError),
    /// The entries could not be made.
    #[error(transparent)]
    Install(#[from] InstallError),
    /// It does not hold what it has to.
    #[error(transparent)]
    Layout(#[from] RegionError),
}

impl MappedRegion {
    /// Maps the region of `machine` into `kernel`. The guest runs meanwhile: entries that were absent
    /// become present, which no processor remembers.
    ///
    /// # Errors
    /// [`MapRegionError`].
    pub fn new(machine: &dyn Machine, kernel: &Kernel) -> Result<Self, MapRegionError> {
        let (code, rings) = (machine.region_code(), machine.region_rings());
        let (code_len, rings_len) = (code.memory.len() as u64, rings.memory.len() as u64);
        let mapping =
            plan_mapping(kernel, machine.ram(), (code.gpa, code_len), (rings.gpa, rings_len))?;
        let layout = RingLayout::new(mapping.rings, rings_len, machine.vcpus())?;
        mapping.install(machine.ram(), &code)?;
        let space = CodeSpace::new(mapping.code, mapping.code_len);
        Ok(Self { code: space, rings: layout, at: mapping.code })
    }

    /// Where trampolines are placed.
    #[must_use]
    pub fn code(&self) -> &CodeSpace {
        &self.code
    }

    /// Where the rings are.
    #[must_use]
    pub fn rings(&self) -> RingLayout {
        self.rings
    }

    /// The first address of the region.
    #[must_use]
    pub fn start(&self) -> Gva {
        self.at
    }
}
