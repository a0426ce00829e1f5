//! The region as one kernel sees it.

use std::ops::Range;

use vm_memory::Bytes;

use super::{InstallError, Kernel, PlanMappingError, plan_mapping};
use crate::addr::{Gpa, Gva};
use crate::journal::{Journal, JournalError, RegionMark};
use crate::machine::{Machine, RegionWindow};
use crate::mem::{MemError, PhysMem};
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
    /// Where it is can't be noted.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// It does not hold what it has to.
    #[error(transparent)]
    Layout(#[from] RegionError),
}

impl MappedRegion {
    /// Maps the region of `machine` into `kernel`, or finds it where the machine's journal says that
    /// it is. The guest runs meanwhile: entries that were absent
    /// become present, which no processor remembers.
    ///
    /// # Errors
    /// [`MapRegionError`].
    pub fn new(machine: &dyn Machine, kernel: &Kernel) -> Result<Self, MapRegionError> {
        let (code, rings) = (machine.region_code(), machine.region_rings());
        let journal = machine.journal();
        let mark = journal.and_then(Journal::region);
        if let Some(mark) = mark.filter(|mark| is_mapped(kernel, machine, mark)) {
            let layout = RingLayout::new(mark.rings, mark.rings_len, machine.vcpus())?;
            let space = CodeSpace::with_code(mark.code, mark.code_len, mark.used);
            return Ok(Self { code: space, rings: layout, at: mark.code });
        }
        let (code_len, rings_len) = (code.memory.len() as u64, rings.memory.len() as u64);
        let mapping =
            plan_mapping(kernel, machine.ram(), (code.gpa, code_len), (rings.gpa, rings_len))?;
        let layout = RingLayout::new(mapping.rings, rings_len, machine.vcpus())?;
        if let Some(journal) = journal {
            // Before the first entry is made: none is ever taken away again.
            journal.note_region(RegionMark {
                code: mapping.code,
                code_len: mapping.code_len,
                rings: mapping.rings,
                rings_len,
                used: 0,
            })?;
        }
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

/// Whether the whole region is mapped where `mark` says: a guest that was reset since has other
/// tables, and nobody in it can stand in our code.
fn is_mapped(kernel: &Kernel, machine: &dyn Machine, mark: &RegionMark) -> bool {
    let leaf = kernel.arch().region_leaf_size();
    let Some(tables) = WithCode::new(machine) else { return false };
    let maps = |at: Gva, len: u64, window: &RegionWindow<'_>| {
        len > 0
            && len <= window.memory.len() as u64
            && (0..len).step_by(leaf as usize).all(|offset| {
                let found = kernel.root().walk(&tables, at + offset);
                found.is_ok_and(|found| found.gpa == window.gpa + offset)
            })
    };
    maps(mark.code, mark.code_len, &machine.region_code())
        && mark.rings_len == machine.region_rings().memory.len() as u64
        && maps(mark.rings, mark.rings_len, &machine.region_rings())
        && mark.used <= mark.code_len
}

/// The guest's RAM with the region's code part, where the tables lie that we have made.
struct WithCode<'m> {
    ram: &'m dyn PhysMem,
    at: Gpa,
    code: Vec<u8>,
}

impl<'m> WithCode<'m> {
    /// The code part as it is now; `None` if it can't be read.
    fn new(machine: &'m dyn Machine) -> Option<Self> {
        let window = machine.region_code();
        let mut code = vec![0; window.memory.len()];
        window.memory.read_slice(&mut code, 0).ok()?;
        Some(Self { ram: machine.ram(), at: window.gpa, code })
    }
}

impl PhysMem for WithCode<'_> {
    fn read(&self, at: Gpa, buf: &mut [u8]) -> Result<(), MemError> {
        let ours = at.offset_from(self.at).and_then(|offset| {
            let start = usize::try_from(offset).ok()?;
            self.code.get(start..start.checked_add(buf.len())?)
        });
        match ours {
            Some(bytes) => {
                buf.copy_from_slice(bytes);
                Ok(())
            }
            None => self.ram.read(at, buf),
        }
    }

    fn extents(&self) -> Vec<Range<Gpa>> {
        self.ram.extents()
    }

    fn replace_entry(&self, at: Gpa, old: [u8; 8], new: [u8; 8]) -> Result<(), MemError> {
        self.ram.replace_entry(at, old, new)
    }
}
