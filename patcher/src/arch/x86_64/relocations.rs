//! Relocations of x86_64 objects (System V ABI, AMD64 supplement, 4.4), and the instructions of
//! payloads that a loader changes.
//!
//! Addresses of per-CPU variables of kernels up to 6.14 are small numbers, and code reaches them
//! relative to itself: arithmetic that wraps gives what the kernel's own loader gives.

use object::elf;

use crate::arch::relocation::{Misfit, Relocation, Value, either, row, signed, unsigned};

/// What gcc and clang emit with the kernel's flags, and what assembly may hold beside it.
pub(super) const RELOCATIONS: &[Relocation] = &[
    row(elf::R_X86_64_NONE, Value::Nothing, 0, |_, _| Ok(())),
    row(elf::R_X86_64_64, Value::Absolute, 8, whole),
    row(elf::R_X86_64_PC32, Value::Relative, 4, signed_32),
    row(elf::R_X86_64_PLT32, Value::Relative, 4, signed_32),
    row(elf::R_X86_64_GOTPCREL, Value::EntryRelative, 4, signed_32),
    row(elf::R_X86_64_32, Value::Absolute, 4, |at, value| put(at, unsigned(value, 32)?)),
    row(elf::R_X86_64_32S, Value::Absolute, 4, signed_32),
    row(elf::R_X86_64_16, Value::Absolute, 2, |at, value| put(at, either(value, 16)?)),
    row(elf::R_X86_64_PC16, Value::Relative, 2, |at, value| put(at, signed(value, 16)? as u64)),
    row(elf::R_X86_64_8, Value::Absolute, 1, |at, value| put(at, either(value, 8)?)),
    row(elf::R_X86_64_PC8, Value::Relative, 1, |at, value| put(at, signed(value, 8)? as u64)),
    row(elf::R_X86_64_PC64, Value::Relative, 8, whole),
    row(elf::R_X86_64_GOTPCREL64, Value::EntryRelative, 8, whole),
    row(elf::R_X86_64_GOTPCRELX, Value::EntryRelative, 4, signed_32),
    row(elf::R_X86_64_REX_GOTPCRELX, Value::EntryRelative, 4, signed_32),
];

fn whole(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    put(at, value)
}

fn signed_32(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    put(at, signed(value, 32)? as u64)
}

fn put(at: &mut [u8], value: u64) -> Result<(), Misfit> {
    let len = at.len();
    at.copy_from_slice(&value.to_le_bytes()[..len]);
    Ok(())
}

/// `call` with a 32-bit displacement, which relocations are for.
const CALL: u8 = 0xe8;
/// `call` through an address in memory, relative to itself.
const CALL_THROUGH: [u8; 2] = [0xff, 0x15];
/// `jmp` with a 32-bit displacement.
const JMP: u8 = 0xe9;

/// Makes the call whose displacement is at `field` a no-operation of the same length.
pub(super) fn silence_call(text: &mut [u8], field: usize) -> bool {
    let (begin, nop): (_, &[u8]) = match text.get(..field) {
        Some([.., CALL]) => (field - 1, &[0x0f, 0x1f, 0x44, 0x00, 0x00]),
        Some([.., first, second]) if [*first, *second] == CALL_THROUGH => {
            (field - 2, &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00])
        }
        _ => return false,
    };
    let Some(at) = text.get_mut(begin..begin + nop.len()) else { return false };
    at.copy_from_slice(nop);
    true
}

/// A plain return, with what keeps speculation from going past it.
pub(super) const PLAIN_RETURN: &[u8] = &[0xc3, 0xcc, 0xcc, 0xcc, 0xcc];

/// Makes the jump whose displacement is at `field` a plain return, as the kernel does with its own
/// (`apply_returns`, arch/x86/kernel/alternative.c).
pub(super) fn plain_return(text: &mut [u8], field: usize) -> bool {
    match text.get_mut(field.wrapping_sub(1)..).and_then(|at| at.get_mut(..PLAIN_RETURN.len())) {
        Some(jump) if jump[0] == JMP => {
            jump.copy_from_slice(PLAIN_RETURN);
            true
        }
        _ => false,
    }
}
