//! Pads of x86_64 kernels: five bytes at a function's entry, made by `gcc -pg -mfentry`.

use crate::addr::Gva;
use crate::arch::{OutOfReach, PadBytes, PadState, Pattern, Prefix};

/// A pad's length: one near call, or one no-operation as long.
pub(super) const LEN: usize = 5;

/// What stands before the pad: nothing; the landing pad of indirect branches; or what the kernel
/// overwrites that with in functions it knows not to be called indirectly
/// (`gen_endbr_poison` of arch/x86/include/asm/ibt.h, up to 6.17 and since).
pub(super) static PREFIXES: [Prefix; 4] = [
    Prefix { name: "none", bytes: &[], signs: false },
    Prefix { name: "endbr64", bytes: &[0xf3, 0x0f, 0x1e, 0xfa], signs: false },
    Prefix { name: "sealed endbr64 (nopw)", bytes: &[0x66, 0x0f, 0x1f, 0x00], signs: false },
    Prefix { name: "sealed endbr64 (nopl)", bytes: &[0x0f, 0x1f, 0x40, 0xd6], signs: false },
];

/// What the kernel writes over the compiler's call as it boots.
///
/// Before 5.13 it chose by processor; the second form is what it took for AMD's up to family 15
/// (`arch_init_ideal_nops` of 5.10, arch/x86/kernel/alternative.c).
const IDLE: [[u8; LEN]; 2] = [[0x0f, 0x1f, 0x44, 0x00, 0x00], [0x66, 0x66, 0x66, 0x66, 0x90]];

const CALL: u8 = 0xe8;
const JMP: u8 = 0xe9;
const INT3: u8 = 0xcc;

/// `int3`.
pub(super) const BREAKPOINT: Pattern = Pattern::new("cc");

/// One-byte no-operations, as `-fpatchable-function-entry` makes them.
const SHORT: [u8; LEN] = [0x90; LEN];

/// How far a near branch reaches, measured from its end.
const REACH: u64 = 1 << 31;

pub(super) fn state(at: Gva, bytes: &[u8], hook: Option<Gva>) -> PadState {
    let Ok(bytes) = <[u8; LEN]>::try_from(bytes) else {
        return PadState::Unknown;
    };
    if IDLE.contains(&bytes) {
        return PadState::Idle;
    }
    if bytes == SHORT {
        return PadState::Several;
    }
    match bytes[0] {
        INT3 => PadState::Changing,
        // From 7.0 on a direct caller may be jumped to (ftrace_is_jmp).
        opcode @ (CALL | JMP) => {
            let target = branch_target(at, bytes);
            if opcode == CALL && hook == Some(target) {
                PadState::NotYet
            } else {
                PadState::GuestEnabled { target }
            }
        }
        _ => PadState::Unknown,
    }
}

pub(super) fn encode_call(at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    encode(CALL, at, to)
}

/// `jmp` in the pad's place. A landing pad in front of it has been executed, which changes nothing: the
/// new function finds the stack as its caller left it, and a direct jump needs no landing pad there.
pub(super) fn encode_jump(at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    encode(JMP, at, to)
}

/// The port that traps write to. A PC has nothing there.
pub const TRAP_PORT: u16 = 0xe8;

/// `out %al, $TRAP_PORT` in place of an instruction's first two bytes. The bytes behind them stay, so that
/// its length does.
///
/// A write to a port leaves the guest on every KVM and changes no register and no flag. `int3` does not
/// leave guests of the AMD-V that QEMU emulates, nor can a KVM that emulates execute it, and it is what the
/// guest's own probes are made of.
pub(super) fn encode_trap(original: &[u8]) -> Option<PadBytes> {
    const OUT: u8 = 0xe6;
    let mut bytes = PadBytes::new(original);
    bytes.get_mut(..2)?.copy_from_slice(&[OUT, TRAP_PORT as u8]);
    Some(bytes)
}

fn encode(opcode: u8, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    let distance = to.0.wrapping_sub((at + LEN as u64).0) as i64;
    let displacement =
        i32::try_from(distance).map_err(|_| OutOfReach { from: at, to, reach: REACH })?;
    let mut bytes = [opcode; LEN];
    bytes[1..].copy_from_slice(&displacement.to_le_bytes());
    Ok(PadBytes::new(&bytes))
}

/// Where the near branch `bytes` at `at` goes.
fn branch_target(at: Gva, bytes: [u8; LEN]) -> Gva {
    let [_, displacement @ ..] = bytes;
    at + LEN as u64 + i64::from(i32::from_le_bytes(displacement)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Gva = Gva(0xffff_ffff_8123_4564);
    const HOOK: Gva = Gva(0xffff_ffff_8106_f7c0);

    #[test]
    fn both_forms_that_kernels_write_are_idle() {
        for bytes in [[0x0f, 0x1f, 0x44, 0x00, 0x00], [0x66, 0x66, 0x66, 0x66, 0x90]] {
            assert_eq!(state(AT, &bytes, Some(HOOK)), PadState::Idle);
        }
    }

    #[test]
    fn a_call_is_the_compilers_or_the_guests_own_by_its_target() {
        let hook = encode_call(AT, HOOK).unwrap();
        assert_eq!(state(AT, &hook, Some(HOOK)), PadState::NotYet);
        assert_eq!(state(AT, &hook, None), PadState::GuestEnabled { target: HOOK });
        let target = Gva(0xffff_ffff_c020_1000);
        let mut bytes = encode_call(AT, target).unwrap().to_vec();
        assert_eq!(state(AT, &bytes, Some(HOOK)), PadState::GuestEnabled { target });
        bytes[0] = 0xe9;
        assert_eq!(state(AT, &bytes, Some(HOOK)), PadState::GuestEnabled { target });
    }

    #[test]
    fn a_breakpoint_is_a_change_under_way_and_anything_else_is_unknown() {
        assert_eq!(state(AT, &[0xcc, 0x1f, 0x44, 0x00, 0x00], None), PadState::Changing);
        let others: [&[u8]; 5] = [
            &[],
            &[0x0f, 0x1f, 0x44, 0x00],
            &[0x0f, 0x1f, 0x44, 0x00, 0x00, 0x90],
            &[0x0f, 0x1f, 0x44, 0x00, 0x08],
            &[0x90, 0x90, 0x90, 0x90, 0x0f],
        ];
        for bytes in others {
            assert_eq!(state(AT, bytes, None), PadState::Unknown, "{bytes:02x?}");
        }
    }

    #[test]
    fn several_no_operations_are_not_one() {
        assert_eq!(state(AT, &[0x90; 5], None), PadState::Several);
    }

    #[test]
    fn a_call_reaches_two_gibibytes_either_way_and_no_farther() {
        let end = AT + LEN as u64;
        for target in [end + 0x7fff_ffff, end - 0x8000_0000, AT] {
            let bytes = encode_call(AT, target).unwrap();
            assert_eq!(bytes[0], 0xe8);
            assert_eq!(branch_target(AT, bytes[..].try_into().unwrap()), target);
        }
        for target in [end + 0x8000_0000, end - 0x8000_0001, Gva(0x7fff_0000_0000)] {
            let error = OutOfReach { from: AT, to: target, reach: 1 << 31 };
            assert_eq!(encode_call(AT, target), Err(error));
            assert_eq!(encode_jump(AT, target), Err(error));
        }
    }

    #[test]
    fn calls_and_jumps_are_what_a_disassembler_takes_them_for() {
        use capstone::arch::BuildsCapstone as _;
        let capstone = capstone::Capstone::new()
            .x86()
            .mode(capstone::arch::x86::ArchMode::Mode64)
            .build()
            .unwrap();
        for (bytes, name) in [(encode_call(AT, HOOK), "call"), (encode_jump(AT, HOOK), "jmp")] {
            let disassembled = capstone.disasm_all(&bytes.unwrap(), AT.0).unwrap();
            let [instruction] = &disassembled[..] else { panic!("{disassembled}") };
            assert_eq!(instruction.mnemonic(), Some(name));
            assert_eq!(instruction.op_str(), Some(HOOK.to_string().as_str()));
        }
    }
}
