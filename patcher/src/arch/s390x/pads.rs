//! Pads of s390x kernels: six bytes at a function's entry, made by `gcc -pg -mfentry -mnop-mcount`.
//!
//! The form is told from the bytes, whatever the kernel's version says:
//!
//! | bytes | instruction | meaning |
//! |---|---|---|
//! | `c004 00000000` | `brcl 0,0` | idle, as the compiler made it |
//! | `c004 disp` | `brcl 0,slot` | idle; `slot` is the function's own hotpatch trampoline |
//! | `c0f4 disp` | `brcl 15,slot` | the guest's own tracing is on |
//! | `c005 disp` | `brasl %r0,target` | the same, without a slot |
//!
//! A branch's displacement counts halfwords from the branch itself.

use crate::addr::Gva;
use crate::arch::{OutOfReach, PadBytes, PadState, Prefix, SLOT_LEN};

/// A pad's length: one relative-long branch.
pub(super) const LEN: usize = 6;

/// Nothing stands before a pad.
pub(super) static PREFIXES: [Prefix; 1] = [Prefix { name: "none", bytes: &[] }];

const BRANCH_NEVER: [u8; 2] = [0xc0, 0x04];
const BRANCH_ALWAYS: [u8; 2] = [0xc0, 0xf4];
/// `brasl %r0`: the register holds the address behind the pad, which tells the function.
const CALL: [u8; 2] = [0xc0, 0x05];

/// How far a relative-long branch reaches, in bytes.
const REACH: u64 = 1 << 32;

/// `brasl %r1`, with which a slot begins.
const SLOT_CALL: [u8; 2] = [0xc0, 0x15];

/// The slot that the idle pad `bytes` at `at` names.
pub(super) fn slot(at: Gva, bytes: &[u8]) -> Option<Gva> {
    match <[u8; LEN]>::try_from(bytes) {
        Ok([_, _, 0, 0, 0, 0]) | Err(_) => None,
        Ok([first, second, displacement @ ..]) => {
            ([first, second] == BRANCH_NEVER).then(|| branch_target(at, displacement))
        }
    }
}

/// Whether `slot` (struct ftrace_hotpatch_trampoline of arch/s390/include/asm/ftrace.lds.h) leads
/// back behind the pad at `at`.
pub(super) fn is_slot_of(at: Gva, slot: &[u8; SLOT_LEN]) -> bool {
    slot.starts_with(&SLOT_CALL) && slot[8..] == (at + LEN as u64).0.to_be_bytes()
}

/// Where a relative-long branch at `at` goes.
fn branch_target(at: Gva, displacement: [u8; 4]) -> Gva {
    at + (i64::from(i32::from_be_bytes(displacement)) * 2) as u64
}

pub(super) fn state(at: Gva, bytes: &[u8], hook: Option<Gva>) -> PadState {
    let Ok([first, second, displacement @ ..]) = <[u8; LEN]>::try_from(bytes) else {
        return PadState::Unknown;
    };
    let target = branch_target(at, displacement);
    match [first, second] {
        BRANCH_NEVER => PadState::Idle,
        CALL if hook == Some(target) => PadState::NotYet,
        BRANCH_ALWAYS | CALL => PadState::GuestEnabled { target },
        _ => PadState::Unknown,
    }
}

pub(super) fn encode_call(at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    let mut bytes = [0; LEN];
    bytes[..2].copy_from_slice(&CALL);
    bytes[2..].copy_from_slice(&halfwords(at, to)?);
    Ok(PadBytes::new(&bytes))
}

/// The displacement of a relative-long instruction at `from` that names `to`.
///
/// # Errors
/// `to` is farther away than it reaches, or at an odd distance.
pub(super) fn halfwords(from: Gva, to: Gva) -> Result<[u8; 4], OutOfReach> {
    let distance = to.0.wrapping_sub(from.0).cast_signed();
    i32::try_from(distance / 2)
        .ok()
        .filter(|_| distance % 2 == 0)
        .map(i32::to_be_bytes)
        .ok_or(OutOfReach { from, to, reach: REACH })
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Gva = Gva(0x3ff_fe8f_8100);

    #[test]
    fn both_forms_of_a_branch_never_are_idle() {
        for bytes in [[0xc0, 0x04, 0, 0, 0, 0], [0xc0, 0x04, 0, 0x12, 0x34, 0x56]] {
            assert_eq!(state(AT, &bytes, None), PadState::Idle);
        }
    }

    #[test]
    fn what_branches_away_is_the_guests_own() {
        let target = AT + 0x100;
        let jump = [0xc0, 0xf4, 0, 0, 0, 0x80];
        assert_eq!(state(AT, &jump, None), PadState::GuestEnabled { target });
        let back = [0xc0, 0x05, 0xff, 0xff, 0xff, 0x80];
        let target = AT - 0x100;
        assert_eq!(state(AT, &back, None), PadState::GuestEnabled { target });
        assert_eq!(state(AT, &back, Some(target)), PadState::NotYet);
    }

    #[test]
    fn a_slot_belongs_to_the_pad_behind_which_it_leads() {
        assert_eq!(slot(AT, &[0xc0, 0x04, 0, 0, 0, 0]), None);
        assert_eq!(slot(AT, &[0xc0, 0xf4, 0, 0, 0, 0x80]), None);
        assert_eq!(slot(AT, &[0xc0, 0x04, 0, 0, 0, 0x80]), Some(AT + 0x100));
        let mut bytes = [0; SLOT_LEN];
        bytes[..2].copy_from_slice(&[0xc0, 0x15]);
        bytes[8..].copy_from_slice(&(AT + 6).0.to_be_bytes());
        assert!(is_slot_of(AT, &bytes));
        assert!(!is_slot_of(AT + 8, &bytes));
        bytes[1] = 0x05;
        assert!(!is_slot_of(AT, &bytes));
    }

    #[test]
    fn anything_else_is_unknown() {
        let others: [&[u8]; 5] = [
            &[],
            &[0xc0, 0x04, 0, 0, 0],
            &[0xc0, 0x04, 0, 0, 0, 0, 0],
            &[0xc0, 0x14, 0, 0, 0, 0],
            &[0x07, 0x00, 0x07, 0x00, 0x07, 0x00],
        ];
        for bytes in others {
            assert_eq!(state(AT, bytes, None), PadState::Unknown, "{bytes:02x?}");
        }
    }

    #[test]
    fn a_call_reaches_four_gibibytes_either_way_and_no_farther() {
        for target in [AT + 0xffff_fffe, AT - 0x1_0000_0000, AT] {
            let bytes = encode_call(AT, target).unwrap();
            assert_eq!(state(AT, &bytes, None), PadState::GuestEnabled { target });
        }
        for to in [AT + 0x1_0000_0000, AT - 0x1_0000_0002, AT + 3, Gva(0)] {
            assert_eq!(encode_call(AT, to), Err(OutOfReach { from: AT, to, reach: 1 << 32 }));
        }
    }
}
