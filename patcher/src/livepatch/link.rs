//! The bytes of a payload for the addresses that it is given.

use std::ops::Range;
use std::sync::Arc;

use super::payload::{Contents, Place};
use super::resolve::{Resolved, Target};
use super::sections::SectionPart;
use crate::addr::Gva;
use crate::arch::relocation::{Misfit, Value};
use crate::region::{ALIGN, PayloadSizes, Placement};

/// A payload's bytes, for one placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linked {
    /// What goes to the placement's text.
    pub text: Vec<u8>,
    /// What goes to its constants.
    pub constants: Vec<u8>,
    /// What goes to its data, zeros included.
    pub data: Vec<u8>,
    /// Where the new functions begin, in the order of [`Resolved::replacements`].
    pub entries: Vec<Gva>,
}

/// A payload can't be where it was to be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The room is not what was asked for.
    #[error("the room for the payload's {part} is {range:?}, and {wanted:#x} bytes are needed")]
    Room {
        /// Which part.
        part: &'static str,
        /// The room.
        range: Range<Gva>,
        /// Bytes needed.
        wanted: u64,
    },
    /// A value does not fit the instruction or the field that is to hold it.
    #[error(
        "{section} cannot reach {symbol}: the {kind} at {offset:#x} would hold {value:#x} and holds \
         {least:#x} to {most:#x}; the payload lies at {place}: {advice}"
    )]
    OutOfRange {
        /// The section.
        section: Arc<str>,
        /// What it refers to.
        symbol: Arc<str>,
        /// The relocation's name.
        kind: String,
        /// Where in the section.
        offset: usize,
        /// Where the field is in the guest.
        place: Gva,
        /// The value: a distance, or the address itself.
        value: i64,
        /// The least that it holds.
        least: i64,
        /// The most.
        most: i64,
        /// What to try.
        advice: &'static str,
    },
    /// A value is not a multiple of what its field counts in.
    #[error(
        "{section} cannot refer to {symbol}: the {kind} at {offset:#x} would hold {value:#x}, which \
         is no multiple of {to}"
    )]
    Unaligned {
        /// The section.
        section: Arc<str>,
        /// What it refers to.
        symbol: Arc<str>,
        /// The relocation's name.
        kind: String,
        /// Where in the section.
        offset: usize,
        /// The value.
        value: i64,
        /// What it would have to be a multiple of.
        to: u64,
    },
    /// A return that is none of the compiler's.
    #[error(
        "{section} refers at {offset:#x} to the return thunk {symbol} other than by a jump, and the \
         kernel has none"
    )]
    NoReturnThunk {
        /// The section.
        section: Arc<str>,
        /// The thunk.
        symbol: Arc<str>,
        /// Where in the section.
        offset: usize,
    },
}

/// An address in the table of addresses (the global offset table).
const ENTRY: u64 = 8;

/// Where everything is within the parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    /// Where each section is in its part.
    offsets: Vec<u64>,
    /// Where each symbol's entry is in the table of addresses.
    entries: Vec<Option<u64>>,
    /// Where the table is in the constants.
    table: u64,
    /// What each part is aligned to.
    aligns: [u64; 3],
    pub(super) sizes: PayloadSizes,
}

fn part_index(part: SectionPart) -> usize {
    match part {
        SectionPart::Text => 0,
        SectionPart::Constants => 1,
        SectionPart::Data => 2,
    }
}

impl Layout {
    pub(super) fn new(object: &Contents) -> Self {
        let mut ends = [0_u64; 3];
        // Sections that need more than the room has get it by what is left out in front.
        let mut aligns = [ALIGN; 3];
        let mut offsets = Vec::with_capacity(object.sections.len());
        for section in &object.sections {
            let part = part_index(section.part);
            // The sum of all lengths and alignments was bounded as the object was read.
            let offset = ends[part].next_multiple_of(section.align);
            ends[part] = offset + section.len;
            aligns[part] = aligns[part].max(section.align);
            offsets.push(offset);
        }
        let constants = part_index(SectionPart::Constants);
        let table = ends[constants].next_multiple_of(ENTRY);
        let mut entries = vec![None; object.symbols.len()];
        let mut end = table;
        let places = object.sections.iter().flat_map(|section| &section.relocations);
        for place in places.filter(|place| place.relocation.value.needs_entry()) {
            let entry = &mut entries[place.symbol];
            if entry.is_none() {
                *entry = Some(end - table);
                end += ENTRY;
            }
        }
        if end > table {
            ends[constants] = end;
        }
        let room = |part: usize| match ends[part] {
            0 => 0,
            len => len + aligns[part] - ALIGN,
        };
        let sizes = PayloadSizes { text: room(0), constants: room(1), data: room(2) };
        Self { offsets, entries, table, aligns, sizes }
    }
}

impl Resolved {
    /// The payload's bytes at these addresses.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn link(&self, placement: &Placement) -> Result<Linked, LinkError> {
        let linker = Linker::new(self, placement)?;
        linker.link()
    }
}

#[cfg(test)]
impl Resolved {
    /// Where a section is.
    pub(super) fn section_at(&self, placement: &Placement, index: usize) -> Gva {
        Linker::new(self, placement).expect("the room was asked for").section(index)
    }

    /// Where the table of addresses is.
    pub(super) fn table_at(&self, placement: &Placement) -> Gva {
        let linker = Linker::new(self, placement).expect("the room was asked for");
        linker.bases[part_index(SectionPart::Constants)] + self.layout.table
    }

    /// Gives the entries of that table the order of `addresses`.
    pub(super) fn sort_table(&mut self, placement: &Placement, addresses: &[u64]) {
        let linker = Linker::new(self, placement).expect("the room was asked for");
        let symbols = 0..self.layout.entries.len();
        let entries = symbols.map(|symbol| {
            self.layout.entries[symbol]?;
            let wanted = linker.address(symbol)?;
            let index = addresses.iter().position(|address| *address == wanted);
            Some(ENTRY * index.expect("the linker's table has every address") as u64)
        });
        self.layout.entries = entries.collect();
    }
}

/// Puts the bytes together.
struct Linker<'a> {
    resolved: &'a Resolved,
    /// Where each part's contents begin.
    bases: [Gva; 3],
    /// How far that is from where its room begins.
    skips: [u64; 3],
    lens: [u64; 3],
}

impl<'a> Linker<'a> {
    fn new(resolved: &'a Resolved, placement: &Placement) -> Result<Self, LinkError> {
        let sizes = resolved.layout.sizes;
        let rooms = [
            ("text", &placement.text, sizes.text),
            ("constants", &placement.constants, sizes.constants),
            ("data", &placement.data, sizes.data),
        ];
        let mut linker = Self { resolved, bases: [Gva(0); 3], skips: [0; 3], lens: [0; 3] };
        for (index, (part, range, wanted)) in rooms.into_iter().enumerate() {
            let align = resolved.layout.aligns[index];
            let room = range.end.offset_from(range.start).unwrap_or(0);
            if room < wanted || wanted > 0 && range.start.0 % ALIGN != 0 {
                return Err(LinkError::Room { part, range: range.clone(), wanted });
            }
            let skip = range.start.0.wrapping_neg() % align;
            linker.skips[index] = if wanted == 0 { 0 } else { skip };
            linker.bases[index] = range.start + linker.skips[index];
            linker.lens[index] = wanted;
        }
        Ok(linker)
    }

    fn link(&self) -> Result<Linked, LinkError> {
        let Resolved { object, layout, .. } = self.resolved;
        let mut parts = self.lens.map(|len| vec![0; len as usize]);
        for (section, offset) in object.sections.iter().zip(&layout.offsets) {
            let part = part_index(section.part);
            let begin = (self.skips[part] + offset) as usize;
            parts[part][begin..begin + section.bytes.len()].copy_from_slice(&section.bytes);
        }
        for (index, section) in object.sections.iter().enumerate() {
            let part = part_index(section.part);
            let begin = (self.skips[part] + layout.offsets[index]) as usize;
            let bytes = &mut parts[part][begin..begin + section.bytes.len()];
            for place in &section.relocations {
                self.relocate(index, bytes, place)?;
            }
        }
        let constants = part_index(SectionPart::Constants);
        for (symbol, entry) in layout.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            let begin = (self.skips[constants] + layout.table + entry) as usize;
            let value = self.address(symbol).unwrap_or_default();
            parts[constants][begin..begin + ENTRY as usize]
                .copy_from_slice(&object.arch.byte_order().bytes(value));
        }
        let entries = self.resolved.new.iter().map(|symbol| self.entry(*symbol)).collect();
        let [text, constants, data] = parts;
        Ok(Linked { text, constants, data, entries })
    }

    /// Where the payload's own function begins.
    fn entry(&self, symbol: usize) -> Gva {
        let symbol = &self.resolved.object.symbols[symbol];
        match symbol.home {
            super::payload::Home::Section(section) => self.section(section) + symbol.value,
            _ => Gva(0),
        }
    }

    fn section(&self, index: usize) -> Gva {
        let part = part_index(self.resolved.object.sections[index].part);
        self.bases[part] + self.resolved.layout.offsets[index]
    }

    /// What a symbol stands for; `None` for a return that has no address.
    fn address(&self, symbol: usize) -> Option<u64> {
        match self.resolved.targets[symbol] {
            Target::Unused => Some(0),
            Target::Section(section, value) => Some((self.section(section) + value).0),
            Target::Address(at) => Some(at),
            Target::PlainReturn(at) => at,
        }
    }

    fn relocate(&self, section: usize, bytes: &mut [u8], place: &Place) -> Result<(), LinkError> {
        let Resolved { object, layout, targets, .. } = self.resolved;
        let Place { offset, relocation, symbol, addend } = *place;
        let name = || object.sections[section].name.clone();
        let to = || object.symbols[symbol].name.clone();
        if let Target::PlainReturn(_) = targets[symbol]
            && object.arch.return_plainly(bytes, offset)
        {
            return Ok(());
        }
        let constants = self.bases[part_index(SectionPart::Constants)] + layout.table;
        let target = match layout.entries[symbol].filter(|_| relocation.value.needs_entry()) {
            Some(entry) => Some((constants + entry).0),
            None => self.address(symbol),
        };
        let Some(target) = target else {
            return Err(LinkError::NoReturnThunk { section: name(), symbol: to(), offset });
        };
        let at = self.section(section) + offset as u64;
        let value = relocation.value.compute(target, addend, at.0);
        let Some(field) = bytes.get_mut(offset..offset + relocation.len) else { return Ok(()) };
        (relocation.write)(field, value).map_err(|misfit| {
            let kind = object.arch.relocation_name(relocation.kind);
            let value = value.cast_signed();
            let (section, symbol) = (name(), to());
            match misfit {
                Misfit::Range { least, most } => {
                    let advice = advice(relocation.value);
                    let place = at;
                    LinkError::OutOfRange {
                        section,
                        symbol,
                        kind,
                        offset,
                        place,
                        value,
                        least,
                        most,
                        advice,
                    }
                }
                Misfit::Unaligned { to } => {
                    LinkError::Unaligned { section, symbol, kind, offset, value, to }
                }
            }
        })
    }
}

/// What to try where a value is out of range.
fn advice(value: Value) -> &'static str {
    if value.is_distance() {
        "compile with the kernel's code model"
    } else {
        "compile for the addresses of kernels, position-independent (-fPIE) or -mcmodel=kernel"
    }
}
