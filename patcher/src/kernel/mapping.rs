//! Where the region goes in the kernel's address space, and the page-table entries that put it
//! there.

use std::ops::Range;

use vm_memory::Bytes;

use super::Kernel;
use super::entries::{Entries, MapError, NewTable};
use crate::addr::{Gpa, Gva};
use crate::arch::paging::{AddressSpace, WalkError};
use crate::arch::{Access, KernelPlace};
use crate::mem::{MemError, PhysMem};
use crate::region::{Part, RegionWindow};

/// A part of the region as an engine has it, to be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartMemory {
    /// Which one.
    pub part: Part,
    /// Where it is in guest-physical memory.
    pub gpa: Gpa,
    /// How long it is, in bytes.
    pub len: u64,
}

/// A part of the region as a guest's kernel sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedPart {
    /// Which one.
    pub part: Part,
    /// Where it is in guest-physical memory.
    pub gpa: Gpa,
    /// Where it begins in the kernel's address space.
    pub at: Gva,
    /// How many bytes are mapped: all of them, but for those of the code part that hold page tables.
    pub len: u64,
}

/// How the region is to be mapped: its parts one behind the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// The parts, in the order in which they were asked for.
    pub parts: Vec<MappedPart>,
    /// The page tables to make. They lie at the end of the region's code part, which is not mapped
    /// there.
    pub tables: Vec<NewTable>,
    /// The entries of existing tables to install, in this order.
    pub entries: Vec<MappingEntry>,
}

/// One page-table entry of a [`Mapping`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappingEntry {
    /// Where the entry is.
    pub at: Gpa,
    /// What it held when the mapping was planned: nothing, as its table writes it.
    pub empty: [u8; 8],
    /// What it is to hold.
    pub value: [u8; 8],
}

/// No place for the region was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanMappingError {
    /// The region's memory does not lie as leaves need it.
    #[error(
        "the region's {part} part at {gpa}, {len:#x} bytes, is not a whole number of {leaf:#x}-byte pages"
    )]
    Unaligned {
        /// Which part of it.
        part: Part,
        /// Where it begins.
        gpa: Gpa,
        /// How long it is, in bytes.
        len: u64,
        /// The size of a leaf, in bytes.
        leaf: u64,
    },
    /// The kernel's own text does not translate.
    #[error("the kernel's text cannot be walked: {0}")]
    Text(#[from] WalkError),
    /// No row of empty entries is long enough.
    #[error(
        "no {wanted} empty page-table entries in a row within reach of the kernel's text \
         (the longest row has {longest}): smaller rings need fewer"
    )]
    NoRoom {
        /// How many entries the region needs.
        wanted: u64,
        /// How many there are at most.
        longest: u64,
    },
    /// The page tables that have to be made take the place of the code.
    #[error(
        "the page tables that map the region do not fit into the {len:#x} bytes that hold its code \
         as well: smaller rings need fewer"
    )]
    NoRoomForTables {
        /// Bytes of the region's code part.
        len: u64,
    },
    /// The guest changed its page tables while they were looked at.
    #[error("the guest changed its page tables at {at} while they were looked at; try again")]
    Changed {
        /// The address that was to be mapped.
        at: Gva,
    },
}

/// The region could not be mapped. Entries installed before the one that failed stay: they map
/// nothing that the guest could misuse, and taking one away again would need the guest's TLBs
/// flushed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// An entry could not be made present.
    #[error("entry {index} of the region's mapping could not be installed: {source}")]
    Entry {
        /// Which of the mapping's entries failed.
        index: usize,
        /// Why.
        source: MemError,
    },
    /// A new table could not be written into the region.
    #[error("the page table at guest-physical {at} lies outside of the region's code part")]
    Table {
        /// Where it was to be.
        at: Gpa,
    },
}

/// Plans where in the kernel's address space the parts of the region go: one behind the other, within
/// reach of every pad, where the kernel's own tables have nothing.
///
/// Those tables are shared by every process, so an entry made there is seen by all of them. Where a
/// table is missing on the way, a new one is planned, at the end of the code part.
///
/// # Errors
/// [`PlanMappingError`].
pub fn plan_mapping(
    kernel: &Kernel,
    ram: &dyn PhysMem,
    parts: &[PartMemory],
) -> Result<Mapping, PlanMappingError> {
    let arch = kernel.arch();
    let size = arch.region_leaf_size();
    for &PartMemory { part, gpa, len } in parts {
        if gpa.0 % size != 0 || len % size != 0 || len == 0 {
            return Err(PlanMappingError::Unaligned { part, gpa, len, leaf: size });
        }
    }
    let text_leaf = kernel.root().walk(ram, kernel.text().start)?.entry;
    let begin = parts.iter().map(|memory| memory.gpa).min().unwrap_or_default();
    let end = parts.iter().map(|memory| memory.gpa + memory.len).max().unwrap_or_default();
    let window = arch.region_window(&kernel.place(), &(begin..end));
    let leaf = |gpa, access| arch.region_leaf(text_leaf, gpa, access);
    plan(kernel.root(), ram, &window, size, &leaf, parts)
}

/// What a guest may do with a part.
fn access(part: Part) -> Access {
    match part {
        Part::Code => Access::Code,
        Part::Constants => Access::Constants,
        Part::Data | Part::Rings => Access::Data,
    }
}

/// Plans the mapping in `window` with leaves of `size` bytes, which `leaf` makes.
pub(super) fn plan(
    space: &AddressSpace,
    ram: &dyn PhysMem,
    window: &Range<Gva>,
    size: u64,
    leaf: &dyn Fn(Gpa, Access) -> u64,
    memory: &[PartMemory],
) -> Result<Mapping, PlanMappingError> {
    let wanted = memory.iter().map(|memory| memory.len).sum();
    let mut next = highest_gap(space, ram, window, size, wanted).map_err(|longest| {
        PlanMappingError::NoRoom { wanted: wanted / size, longest: longest / size }
    })?;
    let mut parts = Vec::new();
    for &PartMemory { part, gpa, len } in memory {
        parts.push(MappedPart { part, gpa, at: next, len });
        next = next + len;
    }
    let code = memory.iter().find(|memory| memory.part == Part::Code);
    let (free, code_len) = code.map_or((Gpa(0)..Gpa(0), 0), |m| (m.gpa..m.gpa + m.len, m.len));
    let failed = |at| {
        move |error| match error {
            MapError::NoMemory => PlanMappingError::NoRoomForTables { len: code_len },
            MapError::Changed => PlanMappingError::Changed { at },
        }
    };
    let mut entries = Entries::new(space, ram, size, free);
    for mapped in parts.iter().filter(|mapped| mapped.part != Part::Code) {
        for offset in (0..mapped.len).step_by(size as usize) {
            let va = mapped.at + offset;
            let entry = entries.reach(va).map_err(failed(va))?;
            let value = leaf(mapped.gpa + offset, access(mapped.part));
            entries.set_leaf(entry, value).map_err(failed(va))?;
        }
    }
    // New tables take the code part from its end, also while the code is being mapped.
    if let Some(code) = parts.iter_mut().find(|mapped| mapped.part == Part::Code) {
        code.len = 0;
        while code.len < code_len {
            let va = code.at + code.len;
            let entry = entries.reach(va).map_err(failed(va))?;
            if code.gpa + code.len + size > entries.taken_from() {
                break;
            }
            let value = leaf(code.gpa + code.len, Access::Code);
            entries.set_leaf(entry, value).map_err(failed(va))?;
            code.len += size;
        }
        if code.len == 0 {
            return Err(PlanMappingError::NoRoomForTables { len: code_len });
        }
    }
    let (tables, entries) = entries.finish();
    Ok(Mapping { parts, tables, entries })
}

/// The highest `len` bytes of `window` where nothing is mapped and leaves of `size` bytes can be.
///
/// From the top down: on every architecture it is the end of the window that the kernel's own
/// allocations come to last.
///
/// # Errors
/// How many bytes there are in a row, at most.
fn highest_gap(
    space: &AddressSpace,
    ram: &dyn PhysMem,
    window: &Range<Gva>,
    size: u64,
    len: u64,
) -> Result<Gva, u64> {
    let start = Gva(window.start.0.next_multiple_of(size));
    let mut end = window.end.align_down(size);
    // Everything from here to `end` is free.
    let mut at = end;
    let mut longest = 0;
    while at > start && end.0 - at.0 < len {
        let below = at - size;
        match free_span(space, ram, below, size) {
            Some(span) => at = below.align_down(span).max(start),
            None => (at, end) = (below, below),
        }
        longest = longest.max(end.0 - at.0);
    }
    if end.0.saturating_sub(at.0) >= len { Ok(end - len) } else { Err(longest) }
}

/// How many bytes around `va` the entry spans that is empty there, if a leaf of `size` bytes can be
/// put in its place or below it.
fn free_span(space: &AddressSpace, ram: &dyn PhysMem, va: Gva, size: u64) -> Option<u64> {
    let Err(WalkError::Absent { entry, span, .. }) = space.walk(ram, va) else { return None };
    let levels = space.format.levels.iter();
    let mut missing = levels.skip_while(|level| 1 << level.shift != span);
    let empty = missing.clone().next().is_some_and(|level| level.empty == entry);
    let can_be_made = span >= size
        && missing
            .by_ref()
            .take_while(|level| 1 << level.shift > size)
            .all(|level| level.new_table.is_some());
    (empty && can_be_made).then_some(span)
}

impl Mapping {
    /// Writes the new tables into the region's part `code`, then makes every entry present. Entries
    /// that hold what they are to hold are left alone, so a mapping may be installed again.
    ///
    /// # Errors
    /// [`InstallError`].
    pub fn install(&self, ram: &dyn PhysMem, code: &RegionWindow<'_>) -> Result<(), InstallError> {
        for table in &self.tables {
            let outside = InstallError::Table { at: table.at };
            let Some(offset) = table.at.offset_from(code.gpa) else { return Err(outside) };
            code.memory.write_slice(&table.bytes, offset as usize).map_err(|_| outside)?;
        }
        for (index, entry) in self.entries.iter().enumerate() {
            match ram.replace_entry(entry.at, entry.empty, entry.value) {
                Err(MemError::EntryChanged { found, .. }) if found == entry.value => {}
                other => other.map_err(|source| InstallError::Entry { index, source })?,
            }
        }
        Ok(())
    }
}

impl Kernel {
    /// Where the kernel is, for what depends on that.
    pub(crate) fn place(&self) -> KernelPlace {
        KernelPlace {
            image: self.image.range.clone(),
            phys: self.image.phys,
            format: self.root.format,
            relocatable: self.is_relocatable(),
        }
    }

    /// Whether the kernel was built so that it can be moved (CONFIG_RANDOMIZE_BASE), as far as its
    /// symbols show.
    fn is_relocatable(&self) -> bool {
        ["kaslr_regions", "module_load_offset", "kernel_randomize_memory"]
            .iter()
            .any(|symbol| self.symbols().address(symbol).is_some())
    }
}
