//! Relocations of s390x objects (ELF Application Binary Interface, s390x supplement, 3.6), and the
//! instructions of payloads that a loader changes.
//!
//! Distances in instructions count halfwords: what they lead to has an even address.

use object::elf;

use crate::arch::relocation::{Misfit, Relocation, Value, aligned, either, row, signed, unsigned};

/// For branches that are predicted by instructions of their own (`bprp`), which came later than all
/// others.
const R_390_PC12DBL: elf::RelocationType = elf::RelocationType(62);
const R_390_PLT12DBL: elf::RelocationType = elf::RelocationType(63);
const R_390_PC24DBL: elf::RelocationType = elf::RelocationType(64);
const R_390_PLT24DBL: elf::RelocationType = elf::RelocationType(65);

/// Their names.
pub(super) const NEWER_NAMES: &[(u32, &str)] = &[
    (R_390_PC12DBL.0, "R_390_PC12DBL"),
    (R_390_PLT12DBL.0, "R_390_PLT12DBL"),
    (R_390_PC24DBL.0, "R_390_PC24DBL"),
    (R_390_PLT24DBL.0, "R_390_PLT24DBL"),
];

/// What gcc and clang emit with the kernel's flags, and what assembly may hold beside it.
pub(super) const RELOCATIONS: &[Relocation] = &[
    row(elf::R_390_NONE, Value::Nothing, 0, |_, _| Ok(())),
    row(elf::R_390_8, Value::Absolute, 1, |at, value| put(at, either(value, 8)?)),
    row(elf::R_390_12, Value::Absolute, 2, |at, value| put_low(at, unsigned(value, 12)?, 12)),
    row(elf::R_390_16, Value::Absolute, 2, |at, value| put(at, either(value, 16)?)),
    row(elf::R_390_20, Value::Absolute, 4, long_displacement),
    row(elf::R_390_32, Value::Absolute, 4, |at, value| put(at, either(value, 32)?)),
    row(elf::R_390_64, Value::Absolute, 8, put),
    row(elf::R_390_PC16, Value::Relative, 2, |at, value| put(at, signed(value, 16)? as u64)),
    row(elf::R_390_PC32, Value::Relative, 4, |at, value| put(at, signed(value, 32)? as u64)),
    row(elf::R_390_PC64, Value::Relative, 8, put),
    row(R_390_PC12DBL, Value::Relative, 2, halfwords::<12>),
    row(elf::R_390_PC16DBL, Value::Relative, 2, halfwords::<16>),
    row(R_390_PC24DBL, Value::Relative, 3, halfwords::<24>),
    row(elf::R_390_PC32DBL, Value::Relative, 4, halfwords::<32>),
    row(R_390_PLT12DBL, Value::Relative, 2, halfwords::<12>),
    row(elf::R_390_PLT16DBL, Value::Relative, 2, halfwords::<16>),
    row(R_390_PLT24DBL, Value::Relative, 3, halfwords::<24>),
    row(elf::R_390_PLT32DBL, Value::Relative, 4, halfwords::<32>),
    row(elf::R_390_PLT32, Value::Relative, 4, |at, value| put(at, signed(value, 32)? as u64)),
    row(elf::R_390_PLT64, Value::Relative, 8, put),
    row(elf::R_390_GOTENT, Value::EntryRelative, 4, halfwords::<32>),
];

fn put(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    let bytes = value.to_be_bytes();
    at.copy_from_slice(&bytes[bytes.len() - at.len()..]);
    Ok(())
}

/// Writes the value into the low `bits` of these bytes.
fn put_low(at: &mut [u8], value: u64, bits: u32) -> Result<(), Misfit> {
    let mask = (1_u64 << bits) - 1;
    let old = at.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    put(at, old & !mask | value & mask)
}

/// A distance in halfwords, in the low `BITS` of these bytes.
fn halfwords<const BITS: u32>(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    let value = signed(value, BITS + 1)?.cast_unsigned();
    put_low(at, (aligned(value, 2)?.cast_signed() >> 1).cast_unsigned(), BITS)
}

/// A displacement of 20 bits, whose low 12 stand in front of the high 8.
fn long_displacement(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    let value = signed(value, 20)?.cast_unsigned();
    let field = (value & 0xfff) << 16 | (value & 0xf_f000) >> 4;
    let old = at.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    put(at, old & 0xf000_00ff | field)
}

/// Makes the `brasl` whose displacement is at `field` a branch that is never taken.
pub(super) fn silence_call(text: &mut [u8], field: usize) -> bool {
    let Some(begin) = field.checked_sub(2) else { return false };
    match text.get_mut(begin..).and_then(|at| at.first_chunk_mut::<6>()) {
        Some(at) if at[0] == 0xc0 && at[1] & 0xf == 5 => {
            *at = [0xc0, 0x04, 0, 0, 0, 0];
            true
        }
        _ => false,
    }
}
