//! Slots: pieces of code that a kernel gives its pads as it boots, one to each, where its architecture
//! has them. Their table lies in the kernel's text and is named in every kernel's symbols, so it tells
//! the pads where the list of records has no name (no CONFIG_KALLSYMS_ALL).

use std::ops::Range;

use super::Kernel;
use super::records::{Flags, Record, RecordsError};
use crate::addr::Gva;
use crate::arch::{PadSlots, SLOT_LEN};
use crate::mem::PhysMem;

/// The most slots believed; distribution kernels have up to 40,000.
const MAX_SLOTS: u64 = 1 << 20;

impl Kernel {
    /// Where the table of slots is and what they are like, if the kernel has them.
    fn slots(&self) -> Option<(Range<Gva>, PadSlots)> {
        let slots = self.arch.pad_slots()?;
        let begin = self.symbols.address(slots.begin)?;
        let len = self.symbols.address(slots.end)?.offset_from(begin)?;
        let sound = len > 0 && len % slots.len == 0 && len / slots.len <= MAX_SLOTS;
        sound.then(|| (begin..begin + len, slots))
    }

    /// The pads that slots were given to, in the order in which they were. Whether the guest uses one is
    /// told by the pad itself. `None` if the kernel has no slots.
    pub(super) fn slotted_records(
        &self,
        ram: &dyn PhysMem,
    ) -> Option<Result<Vec<Record>, RecordsError>> {
        let (table, slots) = self.slots()?;
        let mut bytes = vec![0; (table.end.0 - table.start.0) as usize];
        if let Err(source) = self.read_virt(ram, table.start, &mut bytes) {
            return Some(Err(RecordsError::Unreadable { at: table.start, source }));
        }
        // The slots of pads in init text outlive it.
        let freed = if self.has_init_text(ram, &slots) { Gva(0)..Gva(0) } else { self.init_text() };
        let given = bytes.chunks_exact(slots.len as usize).filter_map(|slot| {
            let ip = self.arch.pad_of_slot(slot.first_chunk()?)?;
            (!freed.contains(&ip)).then(|| Record { ip, flags: Flags::default() })
        });
        Some(Ok(given.collect()))
    }

    /// Whether a pad that names no slot is one to which the kernel has not come yet. Where the processor
    /// needs no slots, none is ever given; that is known once the kernel has booted.
    pub(super) fn expects_slots(&self, ram: &dyn PhysMem) -> bool {
        /// `enum system_state`: from here on the kernel frees what only its boot needed, or has.
        const BOOTED: u32 = 2;
        let Some((table, _)) = self.slots() else { return false };
        let mut first = [0; SLOT_LEN];
        let given = self.read_virt(ram, table.start, &mut first).is_ok()
            && self.arch.pad_of_slot(&first).is_some();
        given || self.variable_u32(ram, "system_state").is_ok_and(|state| state < BOOTED)
    }

    /// Where slots tell the pads, a slot that the kernel has still to give to one: the last, until it has
    /// booted.
    pub(super) fn pending_slot(&self, ram: &dyn PhysMem) -> Result<Option<Gva>, RecordsError> {
        let Some((table, slots)) = self.slots() else { return Ok(None) };
        if self.symbols.address("ftrace_pages_start").is_some() || !self.has_init_text(ram, &slots)
        {
            return Ok(None);
        }
        let at = table.end - slots.len;
        let mut slot = [0; SLOT_LEN];
        self.read_virt(ram, at, &mut slot)
            .map_err(|source| RecordsError::Unreadable { at, source })?;
        Ok(self.arch.pad_of_slot(&slot).is_none().then_some(at))
    }

    /// The addresses of the text that the kernel frees when it has booted.
    pub(super) fn init_text(&self) -> Range<Gva> {
        let symbol = |name| self.symbols.address(name).unwrap_or_default();
        symbol("_sinittext")..symbol("_einittext")
    }

    /// Whether the kernel's init text is still code: it is not, once the kernel has booted.
    fn has_init_text(&self, ram: &dyn PhysMem, slots: &PadSlots) -> bool {
        self.symbols.address("_sinittext").is_some_and(|at| {
            self.root.walk(ram, at).is_ok_and(|leaf| slots.code.hold_in(leaf.entry))
        })
    }
}
