//! The kernel's own list of pads: the records of its ftrace.
//!
//! After boot this list is the one truth about which bytes are pads. A five-byte no-operation at a
//! symbol is none: it may be a jump label or an alternative, and whoever changes one of those kills
//! the guest. The list is reached through the variable `ftrace_pages_start`; where that symbol is left
//! out of the kernel's table (no CONFIG_KALLSYMS_ALL) the variable is found by what it leads to.
//!
//! Layouts (kernel/trace/ftrace.c, include/linux/ftrace.h; the same from 5.10 to 7.3 on all 64-bit
//! kernels): `struct ftrace_page { next, records, int index, int order }` and
//! `struct dyn_ftrace { unsigned long ip, flags }`.

use super::{Kernel, PAGE, ReadError, VariableError};
use crate::addr::Gva;
use crate::arch::PadState;
use crate::mem::PhysMem;

/// One of the kernel's ftrace records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    /// Address of the pad.
    pub ip: Gva,
    /// Who uses it.
    pub flags: Flags,
}

/// The flags of a record (`FTRACE_FL_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Flags(u64);

impl std::ops::BitOr for Flags {
    type Output = Self;

    /// The flags of a record that is listed twice: it is in use if either is.
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Flags {
    const ENABLED: u64 = 1 << 31;
    const DISABLED: u64 = 1 << 25;
    /// The bits below the lowest flag of any version count the tracers that want the function.
    const REFERENCES: u64 = (1 << 19) - 1;

    /// Whether the guest traces the function, or is about to.
    pub fn in_use(self) -> bool {
        self.0 & (Self::ENABLED | Self::REFERENCES) != 0
    }

    /// Whether the guest has given the record up: it lies in the dead code of a weak function that
    /// another one overrides.
    pub fn disabled(self) -> bool {
        self.0 & Self::DISABLED != 0
    }
}

/// The kernel's ftrace records could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordsError {
    /// The head of their list can't be read.
    #[error(transparent)]
    Variable(#[from] VariableError),
    /// A part of their list can't be read.
    #[error("the kernel's ftrace records at {at} cannot be read: {source}")]
    Unreadable {
        /// Where the part is.
        at: Gva,
        /// Why not.
        source: ReadError,
    },
    /// Their list is not one that a kernel would make. A guest that is just loading a module may
    /// show this once.
    #[error("the kernel's list of ftrace records is not sound: {what} at {at}")]
    Unsound {
        /// What is wrong.
        what: &'static str,
        /// Where.
        at: Gva,
    },
    /// There are no records: the kernel has not made them yet, or is built without
    /// CONFIG_DYNAMIC_FTRACE.
    #[error("the kernel has no ftrace records: it has just begun to boot, or has no ftrace")]
    None,
}

/// Size of a record.
const RECORD: usize = 16;
/// Size of what describes a group of records.
const GROUP: usize = 24;
/// The most groups followed; a module has one or two.
const MAX_GROUPS: usize = 1 << 16;
/// The most records believed; distribution kernels have up to 60,000.
const MAX_RECORDS: usize = 1 << 20;
/// How many variables that lead into the list are looked at; kernels have two or three.
const MAX_HEADS: usize = 8;
/// How much of the image is searched for them at a time.
const CHUNK: u64 = 1 << 20;
/// The largest order of pages that the kernel's allocator gives (MAX_PAGE_ORDER).
const MAX_ORDER: u32 = 10;

impl Kernel {
    /// Reads the kernel's ftrace records in its own order: those of the image, then those of
    /// modules.
    pub(super) fn records(&self, ram: &dyn PhysMem) -> Result<Vec<Record>, RecordsError> {
        let records = match self.variable_u64(ram, "ftrace_pages_start") {
            Ok(first) => self.listed_records(ram, Gva(first))?,
            Err(VariableError::NoSymbol { .. }) => match self.slotted_records(ram) {
                Some(records) => records?,
                None => self.unnamed_records(ram),
            },
            Err(error) => return Err(error.into()),
        };
        if records.is_empty() { Err(RecordsError::None) } else { Ok(records) }
    }

    /// Follows the list of groups that begins at `first`.
    fn listed_records(&self, ram: &dyn PhysMem, first: Gva) -> Result<Vec<Record>, RecordsError> {
        let order = self.arch.byte_order();
        let mut records = Vec::new();
        let mut group_at = first;
        for _ in 0..MAX_GROUPS {
            if group_at == Gva(0) {
                return Ok(records);
            }
            let unreadable = |at| move |source| RecordsError::Unreadable { at, source };
            let unsound = |what| RecordsError::Unsound { what, at: group_at };
            let mut group = [0; GROUP];
            self.read_virt(ram, group_at, &mut group).map_err(unreadable(group_at))?;
            let [next, begin] = [0, 8].map(|at| order.u64(array(&group, at)));
            let [count, page_order] = [16, 20].map(|at| order.u32(array(&group, at)));

            let len = count as usize * RECORD;
            if page_order > MAX_ORDER || len > (PAGE as usize) << page_order {
                return Err(unsound("a group with more records than its pages hold"));
            }
            if records.len() + count as usize > MAX_RECORDS {
                return Err(unsound("too many records"));
            }
            let mut bytes = vec![0; len];
            self.read_virt(ram, Gva(begin), &mut bytes).map_err(unreadable(Gva(begin)))?;
            records.extend(bytes.chunks_exact(RECORD).map(|record| Record {
                ip: Gva(order.u64(array(record, 0))),
                flags: Flags(order.u64(array(record, 8))),
            }));
            group_at = Gva(next);
        }
        Err(RecordsError::Unsound { what: "more groups than a kernel has", at: group_at })
    }

    /// Finds the list by the variable that it begins in, which lies somewhere behind the kernel's text
    /// and is not named.
    ///
    /// Several variables lead into the list, and the first of them is the one from which it is longest.
    fn unnamed_records(&self, ram: &dyn PhysMem) -> Vec<Record> {
        let order = self.arch.byte_order();
        let mut heads: Vec<Gva> = Vec::new();
        let mut chunk_at = self.text().end.align_down(8);
        while chunk_at < self.image.range.end && heads.len() < MAX_HEADS {
            let offset = chunk_at.0 - self.image.range.start.0;
            let chunk = self.image.read(ram, offset, CHUNK).unwrap_or_default();
            for word in chunk.chunks_exact(8) {
                let head = Gva(order.u64(array(word, 0)));
                if heads.len() < MAX_HEADS && !heads.contains(&head) && self.is_group(ram, head) {
                    heads.push(head);
                }
            }
            chunk_at = chunk_at + CHUNK;
        }
        let lists = heads.into_iter().filter_map(|head| self.listed_records(ram, head).ok());
        lists.max_by_key(Vec::len).unwrap_or_default()
    }

    /// Whether `at` is a group of records whose first one is about a pad of the image.
    fn is_group(&self, ram: &dyn PhysMem, at: Gva) -> bool {
        let order = self.arch.byte_order();
        // The kernel's allocator has made it: it is no part of the image.
        if at.0 == 0 || !at.0.is_multiple_of(8) || self.image.range.contains(&at) {
            return false;
        }
        let mut group = [0; GROUP];
        if self.read_virt(ram, at, &mut group).is_err() {
            return false;
        }
        let begin = Gva(order.u64(array(&group, 8)));
        let [count, page_order] = [16, 20].map(|at| order.u32(array(&group, at)));
        let mut ip = [0; 8];
        if count == 0 || page_order > MAX_ORDER || !begin.0.is_multiple_of(PAGE) {
            return false;
        }
        if self.read_virt(ram, begin, &mut ip).is_err() {
            return false;
        }
        let first = Record { ip: Gva(order.u64(ip)), flags: Flags::default() };
        self.image.range.contains(&first.ip) && self.is_pad(ram, &first)
    }

    /// Whether there is a pad, in any state that is known, where `record` says.
    fn is_pad(&self, ram: &dyn PhysMem, record: &Record) -> bool {
        let hook = self.symbols.address(self.arch.compiler_hook_symbol());
        self.pad_state_at(ram, record.ip, hook).is_ok_and(|state| state != PadState::Unknown)
    }
}

/// The `N` bytes at `at`, which the caller knows to be there.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}
