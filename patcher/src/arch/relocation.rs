//! What a relocation is: how its value is computed, and how it is written into an instruction.
//!
//! The names of the terms are those of the architectures' ELF supplements: `S` is the symbol's
//! address, `A` the addend, `P` the address of the place that is written, `G` the address of the
//! eight bytes that hold `S` (an entry of the global offset table).

use object::elf::RelocationType;

/// One kind of relocation.
#[derive(Debug)]
pub struct Relocation {
    /// Its number in the architecture's ELF supplement.
    pub kind: u32,
    /// How the value is computed.
    pub value: Value,
    /// How many bytes are written.
    pub len: usize,
    /// Writes the value, which is passed in 64 bits, into these bytes; what else they hold stays.
    pub write: fn(&mut [u8], u64) -> Result<(), Misfit>,
}

/// A row of an architecture's table.
pub(super) const fn row(
    kind: RelocationType,
    value: Value,
    len: usize,
    write: fn(&mut [u8], u64) -> Result<(), Misfit>,
) -> Relocation {
    Relocation { kind: kind.0, value, len, write }
}

/// How a relocation's value is computed. All arithmetic wraps at 64 bits, as the guest's own does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// There is none, and nothing is written.
    Nothing,
    /// `S + A`
    Absolute,
    /// `S + A - P`
    Relative,
    /// The 4 KiB page of `S + A`, less that of `P`.
    PageRelative,
    /// `G + A`
    Entry,
    /// `G + A - P`
    EntryRelative,
    /// The 4 KiB page of `G + A`, less that of `P`.
    EntryPageRelative,
}

impl Value {
    /// Whether the symbol needs an entry in the table of addresses.
    #[must_use]
    pub fn needs_entry(self) -> bool {
        matches!(self, Value::Entry | Value::EntryRelative | Value::EntryPageRelative)
    }

    /// Whether the value is a distance from the place that is written.
    #[must_use]
    pub fn is_distance(self) -> bool {
        match self {
            Value::Relative
            | Value::PageRelative
            | Value::EntryRelative
            | Value::EntryPageRelative => true,
            Value::Nothing | Value::Absolute | Value::Entry => false,
        }
    }

    /// The value of a relocation at `place`, with `target` being `S` or, where an entry is
    /// [needed](Value::needs_entry), `G`.
    #[must_use]
    pub fn compute(self, target: u64, addend: i64, place: u64) -> u64 {
        const PAGE: u64 = !0xfff;
        let to = target.wrapping_add_signed(addend);
        match self {
            Value::Nothing => 0,
            Value::Absolute | Value::Entry => to,
            Value::Relative | Value::EntryRelative => to.wrapping_sub(place),
            Value::PageRelative | Value::EntryPageRelative => {
                (to & PAGE).wrapping_sub(place & PAGE)
            }
        }
    }
}

/// A value that its field can't hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misfit {
    /// It is less or more than the field holds.
    Range {
        /// The least that it holds.
        least: i64,
        /// The most.
        most: i64,
    },
    /// It is no multiple of what the field counts in.
    Unaligned {
        /// What it would have to be a multiple of.
        to: u64,
    },
}

/// The value, if it lies in a signed field of so many bits.
pub(super) fn signed(value: u64, bits: u32) -> Result<i64, Misfit> {
    let most = (1_i64 << (bits - 1)) - 1;
    within(value, -most - 1, most)
}

/// The value, if it lies in an unsigned field of so many bits, fewer than 64.
pub(super) fn unsigned(value: u64, bits: u32) -> Result<u64, Misfit> {
    within(value, 0, (1_i64 << bits) - 1).map(|value| value as u64)
}

/// The value, if a field of so many bits, fewer than 64, holds it with or without a sign.
pub(super) fn either(value: u64, bits: u32) -> Result<u64, Misfit> {
    within(value, -(1_i64 << (bits - 1)), (1_i64 << bits) - 1).map(|value| value as u64)
}

fn within(value: u64, least: i64, most: i64) -> Result<i64, Misfit> {
    let value = value.cast_signed();
    if (least..=most).contains(&value) { Ok(value) } else { Err(Misfit::Range { least, most }) }
}

/// The value, if it is a multiple of `to`, a power of two.
pub(super) fn aligned(value: u64, to: u64) -> Result<u64, Misfit> {
    if value & (to - 1) == 0 { Ok(value) } else { Err(Misfit::Unaligned { to }) }
}
