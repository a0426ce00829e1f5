//! Relocations of aarch64 objects (ELF for the Arm 64-bit Architecture, 5.7), and the instructions
//! of payloads that a loader changes.

use object::elf;

use crate::arch::relocation::{Misfit, Relocation, Value, aligned, either, row, signed, unsigned};

/// What gcc and clang emit with the kernel's flags, and what assembly may hold beside it.
pub(super) const RELOCATIONS: &[Relocation] = &[
    row(elf::R_AARCH64_NONE, Value::Nothing, 0, |_, _| Ok(())),
    row(elf::R_AARCH64_ABS64, Value::Absolute, 8, put),
    row(elf::R_AARCH64_ABS32, Value::Absolute, 4, |at, value| put(at, either(value, 32)?)),
    row(elf::R_AARCH64_ABS16, Value::Absolute, 2, |at, value| put(at, either(value, 16)?)),
    row(elf::R_AARCH64_PREL64, Value::Relative, 8, put),
    row(elf::R_AARCH64_PREL32, Value::Relative, 4, |at, value| {
        put(at, signed(value, 32)?.cast_unsigned())
    }),
    row(elf::R_AARCH64_PREL16, Value::Relative, 2, |at, value| {
        put(at, signed(value, 16)?.cast_unsigned())
    }),
    row(elf::R_AARCH64_PLT32, Value::Relative, 4, |at, value| {
        put(at, signed(value, 32)?.cast_unsigned())
    }),
    row(elf::R_AARCH64_GOTPCREL32, Value::EntryRelative, 4, |at, value| {
        put(at, signed(value, 32)?.cast_unsigned())
    }),
    row(elf::R_AARCH64_MOVW_UABS_G0, Value::Absolute, 4, move_unsigned::<0>),
    row(elf::R_AARCH64_MOVW_UABS_G0_NC, Value::Absolute, 4, move_part::<0>),
    row(elf::R_AARCH64_MOVW_UABS_G1, Value::Absolute, 4, move_unsigned::<16>),
    row(elf::R_AARCH64_MOVW_UABS_G1_NC, Value::Absolute, 4, move_part::<16>),
    row(elf::R_AARCH64_MOVW_UABS_G2, Value::Absolute, 4, move_unsigned::<32>),
    row(elf::R_AARCH64_MOVW_UABS_G2_NC, Value::Absolute, 4, move_part::<32>),
    row(elf::R_AARCH64_MOVW_UABS_G3, Value::Absolute, 4, move_part::<48>),
    row(elf::R_AARCH64_MOVW_SABS_G0, Value::Absolute, 4, move_signed::<0>),
    row(elf::R_AARCH64_MOVW_SABS_G1, Value::Absolute, 4, move_signed::<16>),
    row(elf::R_AARCH64_MOVW_SABS_G2, Value::Absolute, 4, move_signed::<32>),
    row(elf::R_AARCH64_MOVW_PREL_G0, Value::Relative, 4, move_signed::<0>),
    row(elf::R_AARCH64_MOVW_PREL_G0_NC, Value::Relative, 4, move_part::<0>),
    row(elf::R_AARCH64_MOVW_PREL_G1, Value::Relative, 4, move_signed::<16>),
    row(elf::R_AARCH64_MOVW_PREL_G1_NC, Value::Relative, 4, move_part::<16>),
    row(elf::R_AARCH64_MOVW_PREL_G2, Value::Relative, 4, move_signed::<32>),
    row(elf::R_AARCH64_MOVW_PREL_G2_NC, Value::Relative, 4, move_part::<32>),
    row(elf::R_AARCH64_MOVW_PREL_G3, Value::Relative, 4, move_signed::<48>),
    row(elf::R_AARCH64_LD_PREL_LO19, Value::Relative, 4, words::<19, 5>),
    row(elf::R_AARCH64_ADR_PREL_LO21, Value::Relative, 4, |at, value| {
        address(at, signed(value, 21)?.cast_unsigned())
    }),
    row(elf::R_AARCH64_ADR_PREL_PG_HI21, Value::PageRelative, 4, page),
    row(elf::R_AARCH64_ADR_PREL_PG_HI21_NC, Value::PageRelative, 4, |at, value| {
        address(at, value >> 12)
    }),
    row(elf::R_AARCH64_ADD_ABS_LO12_NC, Value::Absolute, 4, low_12::<0>),
    row(elf::R_AARCH64_LDST8_ABS_LO12_NC, Value::Absolute, 4, low_12::<0>),
    row(elf::R_AARCH64_LDST16_ABS_LO12_NC, Value::Absolute, 4, low_12::<1>),
    row(elf::R_AARCH64_LDST32_ABS_LO12_NC, Value::Absolute, 4, low_12::<2>),
    row(elf::R_AARCH64_LDST64_ABS_LO12_NC, Value::Absolute, 4, low_12::<3>),
    row(elf::R_AARCH64_LDST128_ABS_LO12_NC, Value::Absolute, 4, low_12::<4>),
    row(elf::R_AARCH64_TSTBR14, Value::Relative, 4, words::<14, 5>),
    row(elf::R_AARCH64_CONDBR19, Value::Relative, 4, words::<19, 5>),
    row(elf::R_AARCH64_JUMP26, Value::Relative, 4, words::<26, 0>),
    row(elf::R_AARCH64_CALL26, Value::Relative, 4, words::<26, 0>),
    row(elf::R_AARCH64_GOT_LD_PREL19, Value::EntryRelative, 4, words::<19, 5>),
    row(elf::R_AARCH64_ADR_GOT_PAGE, Value::EntryPageRelative, 4, page),
    row(elf::R_AARCH64_LD64_GOT_LO12_NC, Value::Entry, 4, low_12::<3>),
];

fn put(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    let len = at.len();
    at.copy_from_slice(&value.to_le_bytes()[..len]);
    Ok(())
}

/// Writes the value into `bits` of an instruction, from `low` on.
fn insert(at: &mut [u8], value: u64, low: u32, bits: u32) -> Result<(), Misfit> {
    let mask = ((1_u64 << bits) - 1) << low;
    let old = at.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    put(at, old & !mask | value << low & mask)
}

/// A distance in words of four bytes, in `BITS` from `LOW` on.
fn words<const BITS: u32, const LOW: u32>(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    let value = aligned(signed(value, BITS + 2)?.cast_unsigned(), 4)?;
    insert(at, value >> 2, LOW, BITS)
}

/// `adr` and `adrp`: 21 bits, of which the low two stand by themselves.
fn address(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    insert(at, value, 29, 2)?;
    insert(at, value >> 2, 5, 19)
}

fn page(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    address(at, signed(value, 33)?.cast_unsigned() >> 12)
}

/// The place within a page, counted in what the instruction loads or stores: 1 << `SCALE` bytes.
fn low_12<const SCALE: u32>(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    let value = aligned(value & 0xfff, 1 << SCALE)?;
    insert(at, value >> SCALE, 10, 12)
}

/// 16 bits of the value, from bit `SHIFT` on, into `movz` or `movk`.
fn move_part<const SHIFT: u32>(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    insert(at, value >> SHIFT, 5, 16)
}

/// The same, with nothing above these bits.
fn move_unsigned<const SHIFT: u32>(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    move_part::<SHIFT>(at, unsigned(value, SHIFT + 16)?)
}

/// The same with a sign: `movz` becomes `movn`, which inverts, for a value below zero.
fn move_signed<const SHIFT: u32>(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    const MOVZ: u32 = 30;
    if SHIFT < 48 {
        signed(value, SHIFT + 17)?;
    }
    let is_negative = value.cast_signed() < 0;
    insert(at, u64::from(!is_negative), MOVZ, 1)?;
    move_part::<SHIFT>(at, if is_negative { !value } else { value })
}

/// `nop`
const NOP: u32 = 0xd503_201f;

/// Makes the `bl` at `field` a no-operation.
pub(super) fn silence_call(text: &mut [u8], field: usize) -> bool {
    match text.get_mut(field..).and_then(|at| at.first_chunk_mut::<4>()) {
        Some(at) if at[3] & 0xfc == 0x94 => {
            *at = NOP.to_le_bytes();
            true
        }
        _ => false,
    }
}
