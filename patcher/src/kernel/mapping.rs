//! Where the region goes in the kernel's address space, and the page-table entries that put it
//! there.

use super::Kernel;
use crate::addr::{Gpa, Gva};
use crate::arch::Access;
use crate::arch::paging::WalkError;
use crate::mem::{MemError, PhysMem};

/// How the region is to be mapped: code, and the rings right behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Where the guest sees the region's code.
    pub code: Gva,
    /// Where the guest sees the rings.
    pub rings: Gva,
    /// The page-table entries to install, in this order.
    pub entries: Vec<MappingEntry>,
}

/// One page-table entry of a [`Mapping`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappingEntry {
    /// Where the entry is; it was empty when the mapping was planned.
    pub at: Gpa,
    /// What it is to hold.
    pub value: u64,
}

/// No place for the region was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanMappingError {
    /// The region's memory does not lie as leaves need it.
    #[error(
        "the region's {what} at {gpa}, {len:#x} bytes, is not a whole number of {leaf:#x}-byte pages"
    )]
    Unaligned {
        /// Which part of it.
        what: &'static str,
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
        wanted: usize,
        /// How many there are at most.
        longest: usize,
    },
}

/// The region could not be mapped. Entries installed before the one that failed stay: they map
/// nothing that the guest could misuse, and taking one away again would need the guest's TLBs
/// flushed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("entry {index} of the region's mapping could not be installed: {source}")]
pub struct InstallError {
    /// Which of the mapping's entries failed.
    pub index: usize,
    /// Why.
    pub source: MemError,
}

/// Plans where in the kernel's address space the region's code and rings go: in one row, within
/// reach of every pad, at entries of the kernel's own tables that are empty.
///
/// Those tables are shared by every process, so an entry made there is seen by all of them.
///
/// # Errors
/// [`PlanMappingError`].
pub fn plan_mapping(
    kernel: &Kernel,
    ram: &dyn PhysMem,
    code: (Gpa, u64),
    rings: (Gpa, u64),
) -> Result<Mapping, PlanMappingError> {
    let arch = kernel.arch();
    let size = arch.region_leaf_size();
    for (what, (gpa, len)) in [("code", code), ("rings", rings)] {
        if gpa.0 % size != 0 || len % size != 0 || len == 0 {
            return Err(PlanMappingError::Unaligned { what, gpa, len, leaf: size });
        }
    }
    let text_leaf = kernel.root().walk(ram, kernel.text().start)?.entry;

    let leaves = |(gpa, len): (Gpa, u64), access| {
        (0..len).step_by(size as usize).map(move |at| (gpa + at, access))
    };
    let wanted = leaves(code, Access::Code).chain(leaves(rings, Access::Data));
    let values: Vec<u64> =
        wanted.map(|(gpa, access)| arch.region_leaf(text_leaf, gpa, access)).collect();

    // From the top down: the kernel's image is at the bottom.
    let window = arch.region_window(&kernel.image().range, kernel.is_relocatable());
    let mut row: Vec<Gpa> = Vec::new();
    let mut longest = 0;
    let mut va = window.end;
    while row.len() < values.len() && va > window.start {
        va = va - size;
        match kernel.root().walk(ram, va) {
            Err(WalkError::Absent { entry: 0, entry_at, span, .. }) if span == size => {
                row.push(entry_at);
            }
            _ => row.clear(),
        }
        longest = longest.max(row.len());
    }
    if row.len() < values.len() {
        return Err(PlanMappingError::NoRoom { wanted: values.len(), longest });
    }
    row.reverse();
    let entries =
        row.into_iter().zip(values).map(|(at, value)| MappingEntry { at, value }).collect();
    Ok(Mapping { code: va, rings: va + code.1, entries })
}

impl Mapping {
    /// Makes every entry present. Entries that hold what they are to hold are left alone, so a
    /// mapping may be installed again.
    ///
    /// # Errors
    /// [`InstallError`].
    pub fn install(&self, ram: &dyn PhysMem) -> Result<(), InstallError> {
        for (index, entry) in self.entries.iter().enumerate() {
            match ram.replace_entry(entry.at, 0, entry.value) {
                Err(MemError::EntryChanged { found, .. }) if found == entry.value => {}
                other => other.map_err(|source| InstallError { index, source })?,
            }
        }
        Ok(())
    }
}

impl Kernel {
    /// Whether the kernel was built so that it can be moved (CONFIG_RANDOMIZE_BASE), as far as its
    /// symbols show.
    fn is_relocatable(&self) -> bool {
        ["kaslr_regions", "module_load_offset", "kernel_randomize_memory"]
            .iter()
            .any(|symbol| self.symbols().address(symbol).is_some())
    }
}
