//! The page-table entries of a mapping, and the tables that have to be made for them.

use std::collections::BTreeMap;

use super::mapping::MappingEntry;
use crate::addr::{Gpa, Gva};
use crate::arch::paging::{AddressSpace, Level};
use crate::mem::PhysMem;

/// A page table that does not exist in the guest yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTable {
    /// Where it is to be, in memory that the guest does not own.
    pub at: Gpa,
    /// Its entries as they lie in memory.
    pub bytes: Vec<u8>,
}

/// Collects the entries that map one leaf after the other; writes nothing.
pub(super) struct Entries<'a> {
    space: &'a AddressSpace,
    ram: &'a dyn PhysMem,
    /// What a leaf maps, in bytes.
    leaf: u64,
    /// Memory for new tables: taken from its end.
    free_end: u64,
    free_begin: u64,
    /// New tables by their addresses, each with its entries.
    tables: BTreeMap<Gpa, Vec<u64>>,
    /// Entries of tables that exist: what they hold, and what they are to hold.
    changes: BTreeMap<Gpa, (u64, u64)>,
}

/// An address could not be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MapError {
    /// There is no memory left for a table.
    NoMemory,
    /// An entry on the way is not what it was a moment ago.
    Changed,
}

impl<'a> Entries<'a> {
    /// Begins with no entries. New tables go to the end of `free`, as far as need be.
    pub fn new(
        space: &'a AddressSpace,
        ram: &'a dyn PhysMem,
        leaf: u64,
        free: std::ops::Range<Gpa>,
    ) -> Self {
        Self {
            space,
            ram,
            leaf,
            free_end: free.end.0,
            free_begin: free.start.0,
            tables: BTreeMap::new(),
            changes: BTreeMap::new(),
        }
    }

    /// The first byte that new tables have taken.
    pub fn taken_from(&self) -> Gpa {
        Gpa(self.free_end)
    }

    /// Makes the tables that a leaf at `va` needs, and gives the address of its entry.
    pub fn reach(&mut self, va: Gva) -> Result<Gpa, MapError> {
        let mut table = self.space.root;
        for pair in self.space.format.levels.windows(2) {
            let [level, lower] = pair else { break };
            let entry_at = entry_at(table, level, va);
            if 1 << level.shift == self.leaf {
                return Ok(entry_at);
            }
            let entry = self.read(entry_at)?;
            table = if level.present.hold_in(entry) {
                if level.leaf.is_some_and(|leaf| leaf.hold_in(entry)) {
                    return Err(MapError::Changed);
                }
                Gpa(entry & level.table_address)
            } else {
                let made = level.new_table.ok_or(MapError::Changed)?;
                let new = self.make_table(lower)?;
                self.write(entry_at, level, new.0 | made)?;
                new
            };
        }
        match self.space.format.levels.last() {
            Some(level) if 1 << level.shift == self.leaf => Ok(entry_at(table, level, va)),
            _ => Err(MapError::Changed),
        }
    }

    /// Has the leaf entry at `entry_at`, which [`reach`](Self::reach) gave, hold `value`.
    pub fn set_leaf(&mut self, entry_at: Gpa, value: u64) -> Result<(), MapError> {
        let mut levels = self.space.format.levels.iter();
        let level = levels.find(|level| 1 << level.shift == self.leaf).ok_or(MapError::Changed)?;
        self.write(entry_at, level, value)
    }

    /// The tables to be made, and then the entries to be changed, ascending.
    pub fn finish(self) -> (Vec<NewTable>, Vec<MappingEntry>) {
        let order = self.space.format.byte_order;
        let tables = self.tables.into_iter().map(|(at, entries)| NewTable {
            at,
            bytes: entries.into_iter().flat_map(|entry| order.bytes(entry)).collect(),
        });
        let changes = self.changes.into_iter().map(|(at, (empty, value))| MappingEntry {
            at,
            empty: order.bytes(empty),
            value: order.bytes(value),
        });
        (tables.collect(), changes.collect())
    }

    fn make_table(&mut self, level: &Level) -> Result<Gpa, MapError> {
        let count = 1 << level.index_bits;
        let bytes = count * 8;
        let at = self.free_end.checked_sub(bytes).ok_or(MapError::NoMemory)? & !(bytes - 1);
        if at < self.free_begin {
            return Err(MapError::NoMemory);
        }
        self.free_end = at;
        self.tables.insert(Gpa(at), vec![level.empty; count as usize]);
        Ok(Gpa(at))
    }

    /// The new table that the entry at `at` belongs to, and which of its entries it is.
    fn in_new_table(&mut self, at: Gpa) -> Option<&mut u64> {
        let (begin, entries) = self.tables.range_mut(..=at).next_back()?;
        entries.get_mut(((at.0 - begin.0) / 8) as usize)
    }

    fn read(&mut self, at: Gpa) -> Result<u64, MapError> {
        if let Some(entry) = self.in_new_table(at) {
            return Ok(*entry);
        }
        if let Some((_, value)) = self.changes.get(&at) {
            return Ok(*value);
        }
        let bytes = self.ram.array(at).map_err(|_| MapError::Changed)?;
        Ok(self.space.format.byte_order.u64(bytes))
    }

    fn write(&mut self, at: Gpa, level: &Level, value: u64) -> Result<(), MapError> {
        if let Some(entry) = self.in_new_table(at) {
            *entry = value;
            return Ok(());
        }
        if self.read(at)? != level.empty {
            return Err(MapError::Changed);
        }
        self.changes.insert(at, (level.empty, value));
        Ok(())
    }
}

fn entry_at(table: Gpa, level: &Level, va: Gva) -> Gpa {
    let index = (va.0 >> level.shift) & ((1 << level.index_bits) - 1);
    table + index * 8
}
