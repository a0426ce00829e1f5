//! Page tables as data, and the one walker for all of them.
//!
//! A [`TableFormat`] lists a table's levels from the root down; an [`AddressSpace`] is a format and
//! a root. A walk reads at most one entry per level, so tables that loop end like any others.

use crate::addr::{Gpa, Gva};
use crate::mem::{MemError, PhysMem};

use super::ByteOrder;

/// How an architecture's page tables look in one mode.
#[derive(Debug, PartialEq, Eq)]
pub struct TableFormat {
    /// What the mode is called in messages.
    pub name: &'static str,
    /// How entries lie in memory.
    pub byte_order: ByteOrder,
    /// How many low bits of a virtual address are translated.
    pub va_bits: u32,
    /// What the bits above are.
    pub above: HighBits,
    /// The levels, root first.
    pub levels: &'static [Level],
}

/// What the bits of a virtual address are that are not translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HighBits {
    /// All zero.
    Zeros,
    /// All one: these are the tables of the upper half, and the lower half has others.
    Ones,
    /// All as the highest bit that is translated.
    AsHighest,
}

/// One level of a page table.
#[derive(Debug, PartialEq, Eq)]
pub struct Level {
    /// What its entries are called in messages.
    pub name: &'static str,
    /// The lowest bit of a virtual address that takes part in indexing it.
    pub shift: u32,
    /// How many bits of a virtual address index it.
    pub index_bits: u32,
    /// What marks an entry as present.
    pub present: Bits,
    /// What an entry holds that maps nothing and is free for use.
    pub empty: u64,
    /// What an entry holds beside the address of a table that we make for the region; `None` where
    /// the kernel always has that table.
    pub new_table: Option<u64>,
    /// What marks a present entry as a leaf; `None` at a level that has no leaves.
    pub leaf: Option<Bits>,
    /// The bits of a non-leaf entry that hold the next table's address.
    pub table_address: u64,
    /// The bits of a leaf that hold the page's address.
    pub leaf_address: u64,
    /// What every valid non-leaf entry holds: its table's type and length, on architectures that
    /// write them down.
    pub table_type: Bits,
    /// Bits that are zero in every valid non-leaf entry.
    pub table_reserved: u64,
    /// Bits that are zero in every valid leaf.
    pub leaf_reserved: u64,
}

/// A condition on an entry: the bits in `mask` are those of `value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bits {
    /// Which bits count.
    pub mask: u64,
    /// What they are to be.
    pub value: u64,
}

impl Bits {
    /// The condition that every entry meets.
    pub const ANY: Self = Self { mask: 0, value: 0 };

    /// Whether `entry` meets the condition.
    #[must_use]
    pub fn hold_in(self, entry: u64) -> bool {
        entry & self.mask == self.value
    }
}

/// A root table and the format it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressSpace {
    /// Guest-physical address of the root table.
    pub root: Gpa,
    /// How it is read.
    pub format: &'static TableFormat,
}

/// Where a walk ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    /// What the address walked for translates to.
    pub gpa: Gpa,
    /// The leaf entry.
    pub entry: u64,
    /// Where the leaf entry is.
    pub entry_at: Gpa,
    /// How many bytes the leaf maps.
    pub size: u64,
}

/// A virtual address that does not translate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WalkError {
    /// An entry on the way is not present.
    #[error("{va} is not mapped: the {level} at guest-physical {entry_at} holds {entry:#x}")]
    Absent {
        /// The address walked for.
        va: Gva,
        /// What the entry's level is called.
        level: &'static str,
        /// Where the entry is.
        entry_at: Gpa,
        /// What it holds.
        entry: u64,
        /// How many bytes of address space the entry covers.
        span: u64,
    },
    /// An entry on the way has bits that no valid entry has: this is not a page table.
    #[error(
        "the page tables for {va} are not sound: \
         the {level} at guest-physical {entry_at} holds {entry:#x}"
    )]
    Unsound {
        /// The address walked for.
        va: Gva,
        /// What the entry's level is called.
        level: &'static str,
        /// Where the entry is.
        entry_at: Gpa,
        /// What it holds.
        entry: u64,
    },
    /// A table on the way is not in RAM.
    #[error("the page tables for {va} lead out of RAM: {source}")]
    TableNotRam {
        /// The address walked for.
        va: Gva,
        /// The read that failed.
        source: MemError,
    },
    /// The address is none in this format.
    #[error("{va} is not an address that {format} page tables translate")]
    NotCanonical {
        /// The address walked for.
        va: Gva,
        /// What the format is called.
        format: &'static str,
    },
}

impl AddressSpace {
    /// Translates `va` and says by which entry.
    ///
    /// # Errors
    /// Why it does not translate.
    pub fn walk(&self, ram: &dyn PhysMem, va: Gva) -> Result<Leaf, WalkError> {
        let format = self.format;
        if !format.is_canonical(va) {
            return Err(WalkError::NotCanonical { va, format: format.name });
        }
        let mut table = self.root;
        let mut levels = format.levels;
        while let [level, lower @ ..] = levels {
            let index = (va.0 >> level.shift) & ((1 << level.index_bits) - 1);
            let entry_at = table + index * 8;
            let bytes =
                ram.array(entry_at).map_err(|source| WalkError::TableNotRam { va, source })?;
            let entry = format.byte_order.u64(bytes);
            let span = 1 << level.shift;
            if !level.present.hold_in(entry) {
                return Err(WalkError::Absent { va, level: level.name, entry_at, entry, span });
            }
            let is_leaf = level.leaf.is_some_and(|leaf| leaf.hold_in(entry));
            let reserved = if is_leaf { level.leaf_reserved } else { level.table_reserved };
            let no_table = !is_leaf && (lower.is_empty() || !level.table_type.hold_in(entry));
            if entry & reserved != 0 || no_table {
                return Err(WalkError::Unsound { va, level: level.name, entry_at, entry });
            }
            if is_leaf {
                let gpa = Gpa(entry & level.leaf_address) + (va.0 & (span - 1));
                return Ok(Leaf { gpa, entry, entry_at, size: span });
            }
            table = Gpa(entry & level.table_address);
            levels = lower;
        }
        // Only a format without levels leads here: it translates nothing.
        Err(WalkError::NotCanonical { va, format: format.name })
    }

    /// The guest-physical address of `va`.
    ///
    /// # Errors
    /// As [`AddressSpace::walk`].
    pub fn translate(&self, ram: &dyn PhysMem, va: Gva) -> Result<Gpa, WalkError> {
        self.walk(ram, va).map(|leaf| leaf.gpa)
    }
}

impl TableFormat {
    /// Whether the bits above [`va_bits`](TableFormat::va_bits) are as the format has them.
    fn is_canonical(&self, va: Gva) -> bool {
        let above = 64 - self.va_bits;
        match self.above {
            HighBits::Zeros => va.0.leading_zeros() >= above,
            HighBits::Ones => va.0.leading_ones() >= above,
            HighBits::AsHighest => va.0.leading_zeros().max(va.0.leading_ones()) > above,
        }
    }
}
