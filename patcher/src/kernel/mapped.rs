//! The region as one kernel sees it.

use std::ops::Range;

use vm_memory::Bytes;

use super::mapping::{MappedPart, PartMemory};
use super::{InstallError, Kernel, PlanMappingError, plan_mapping};
use crate::addr::{Gpa, Gva};
use crate::journal::{Journal, JournalError, PartMark, PayloadMarks, RegionMark};
use crate::machine::Machine;
use crate::mem::{MemError, PhysMem};
use crate::region::{
    CodeSpace, HISTOGRAMS_OFFSET, Part, PayloadSpace, RegionError, RegionWindow, ReturnPoolMemory,
    RingLayout, TEXT_OFFSET,
};

/// The region, mapped into a kernel's address space.
#[derive(Debug)]
pub struct MappedRegion {
    code: CodeSpace,
    payloads: PayloadSpace,
    rings: RingLayout,
    parts: [MappedPart; Part::ALL.len()],
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
        let journal = machine.journal();
        let memory = machine.region(Part::Code).gpa;
        let known = journal.and_then(Journal::region).filter(|mark| mark.memory == memory);
        if let Some(mark) = known.filter(|mark| is_mapped(kernel, machine, mark)) {
            return Ok(Self::of(machine, &mark)?);
        }
        let parts = Part::ALL.map(|part| {
            let window = machine.region(part);
            PartMemory { part, gpa: window.gpa, len: window.memory.len() as u64 }
        });
        let mapping = plan_mapping(kernel, machine.ram(), &parts)?;
        let place = |part| {
            let found = mapping.parts.iter().find(|mapped| mapped.part == part);
            found.map_or(PartMark { at: Gva(0), len: 0 }, |found| PartMark {
                at: found.at,
                len: found.len,
            })
        };
        // Nobody in a guest that was reset is in what was there before. But an emulator may still
        // have translations of that code, so it is not written over.
        let executed = known.map_or(0, |known| known.payloads.executed);
        let mark = RegionMark {
            memory,
            code: place(Part::Code),
            constants: place(Part::Constants),
            data: place(Part::Data),
            rings: place(Part::Rings),
            used: known.map_or(0, |known| known.used),
            payloads: PayloadMarks { executed, ..PayloadMarks::default() },
        };
        let region = Self::of(machine, &mark)?;
        let data = machine.region(Part::Data).memory;
        ReturnPoolMemory::new(&data, kernel.arch().byte_order())?.forget()?;
        if let Some(journal) = journal {
            // Before the first entry is made: none is ever taken away again.
            journal.note_region(mark)?;
        }
        mapping.install(machine.ram(), &machine.region(Part::Code))?;
        Ok(region)
    }

    /// The region as it is mapped by `mark`.
    fn of(machine: &dyn Machine, mark: &RegionMark) -> Result<Self, RegionError> {
        let parts = Part::ALL.map(|part| {
            let PartMark { at, len } = *mark_of(mark, part);
            MappedPart { part, gpa: machine.region(part).gpa, at, len }
        });
        let whole = |mark: PartMark| mark.at..mark.at + mark.len;
        let RegionMark { code, constants, data, rings, .. } = *mark;
        let trampolines = code.len.min(TEXT_OFFSET);
        let text = code.at + trampolines..code.at + code.len;
        let variables = data.at..data.at + data.len.min(HISTOGRAMS_OFFSET);
        Ok(Self {
            code: CodeSpace::with_code(code.at, trampolines, mark.used),
            payloads: PayloadSpace::new(text, whole(constants), variables, mark.payloads),
            rings: RingLayout::new(rings.at, rings.len, machine.vcpus())?,
            parts,
        })
    }

    /// Where trampolines are placed.
    #[must_use]
    pub fn code(&self) -> &CodeSpace {
        &self.code
    }

    /// Where payloads are placed.
    #[must_use]
    pub fn payloads(&self) -> &PayloadSpace {
        &self.payloads
    }

    /// Where the rings are.
    #[must_use]
    pub fn rings(&self) -> RingLayout {
        self.rings
    }

    /// Where the guest sees a part.
    #[must_use]
    pub fn range(&self, part: Part) -> Range<Gva> {
        let found = self.parts.iter().find(|mapped| mapped.part == part);
        found.map_or(Gva(0)..Gva(0), |mapped| mapped.at..mapped.at + mapped.len)
    }

    /// Where in guest-physical memory the region's byte at `at` is; `None` for what is not in it.
    #[must_use]
    pub fn gpa(&self, at: Gva) -> Option<Gpa> {
        self.find(at, 1).map(|(mapped, offset)| mapped.gpa + offset)
    }

    /// Writes bytes into the region, through its window. Text that a guest may have executed before
    /// must not be written so; see [`Placement::text_is_used`](crate::region::Placement::text_is_used).
    ///
    /// # Errors
    /// [`RegionError::Outside`], [`RegionError::Memory`].
    pub fn write(&self, machine: &dyn Machine, at: Gva, bytes: &[u8]) -> Result<(), RegionError> {
        let outside = RegionError::Outside { at, len: bytes.len() };
        let (mapped, offset) = self.find(at, bytes.len()).ok_or(outside)?;
        let window = machine.region(mapped.part);
        let written = window.memory.write_slice(bytes, offset as usize);
        written.map_err(|error| RegionError::Memory(error.to_string()))
    }

    /// The part in which `len` bytes at `at` lie, and where in it they begin.
    fn find(&self, at: Gva, len: usize) -> Option<(&MappedPart, u64)> {
        self.parts.iter().find_map(|mapped| {
            let offset = at.offset_from(mapped.at)?;
            let end = offset.checked_add(len as u64)?;
            (end <= mapped.len).then_some((mapped, offset))
        })
    }
}

fn mark_of(mark: &RegionMark, part: Part) -> &PartMark {
    match part {
        Part::Code => &mark.code,
        Part::Constants => &mark.constants,
        Part::Data => &mark.data,
        Part::Rings => &mark.rings,
    }
}

/// Whether the whole region is mapped where `mark` says: a guest that was reset since has other
/// tables, and nobody in it can stand in our code.
fn is_mapped(kernel: &Kernel, machine: &dyn Machine, mark: &RegionMark) -> bool {
    let leaf = kernel.arch().region_leaf_size();
    let Some(tables) = WithCode::new(machine) else { return false };
    let is_mapped = |part: Part| {
        let (&PartMark { at, len }, window) = (mark_of(mark, part), machine.region(part));
        let all = window.memory.len() as u64;
        // The end of the code part may hold page tables.
        (len == all || part == Part::Code && (1..all).contains(&len))
            && (0..len).step_by(leaf as usize).all(|offset| {
                let found = kernel.root().walk(&tables, at + offset);
                found.is_ok_and(|found| found.gpa == window.gpa + offset)
            })
    };
    Part::ALL.into_iter().all(is_mapped) && mark.used <= mark.code.len
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
        let window: RegionWindow<'_> = machine.region(Part::Code);
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
