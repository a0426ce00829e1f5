//! Pads of aarch64 kernels: two no-operations at a function's entry, made by
//! `gcc -fpatchable-function-entry=2` (or `=4,2`, where the two in front of the function become a
//! pointer that is the guest's own business and is never touched).
//!
//! As the kernel boots it turns the first of the two into `mov x9, x30`, which keeps the caller's
//! address, and from then on only the second one ever changes (arch/arm64/kernel/ftrace.c):
//!
//! | first | second | meaning |
//! |---|---|---|
//! | `nop` | `nop` | as the compiler made it: not prepared yet |
//! | `mov x9, x30` | `nop` | idle |
//! | `mov x9, x30` | `bl target` | the guest's own tracing is on |
//!
//! A kprobe on the function's first instruction stands in the place of the first one, and executes what
//! stood there.

use crate::addr::Gva;
use crate::arch::{Form, OutOfReach, PadBytes, PadLayout, PadState, Pattern, Prefix};

/// The length of the instruction that changes.
pub(super) const LEN: usize = 4;

/// What lies in front of a function where kernels keep a pointer for each (`DYNAMIC_FTRACE_WITH_CALL_OPS`).
pub(super) const LEAD_IN: u64 = 8;

/// `nop`
const NOP: &[u8] = &[0x1f, 0x20, 0x03, 0xd5];
const IS_NOP: Pattern = Pattern::new("1f2003d5");
/// `mov x9, x30`, which is `orr x9, xzr, x30`
const KEEP_CALLER: &[u8] = &[0xe9, 0x03, 0x1e, 0xaa];

/// The pad in both of its states: a no-operation means nothing without the one in front of it.
pub(super) static LAYOUTS: [PadLayout; 2] = [
    PadLayout {
        name: "two instructions",
        before: KEEP_CALLER,
        forms: &[(IS_NOP, Form::Idle)],
        behind: Pattern::EMPTY,
        resume: 0,
    },
    PadLayout {
        name: "two instructions, as compiled",
        before: NOP,
        forms: &[(IS_NOP, Form::Compiled)],
        behind: Pattern::EMPTY,
        resume: 0,
    },
];

/// What probes put in the place of an instruction: `brk`, the kernel's with number 4
/// (arch/arm64/include/asm/brk-imm.h), gdb's with 0.
pub(super) const BREAKPOINT: Pattern = Pattern::new("..0020d4");

/// `bl` and `b`, and the bits that hold an opcode.
const CALL: u32 = 0x9400_0000;
const BRANCH: u32 = 0x1400_0000;
const BRANCH_MASK: u32 = 0xfc00_0000;

/// How far a branch reaches, in bytes.
pub(super) const REACH: u64 = 128 << 20;

/// What stands in front of the pad in kernels that check the targets of indirect branches, or sign
/// return addresses before anything else.
pub(super) static PREFIXES: [Prefix; 3] = [
    Prefix { name: "none", bytes: &[], signs: false },
    Prefix { name: "bti c", bytes: &[0x5f, 0x24, 0x03, 0xd5], signs: false },
    Prefix { name: "paciasp", bytes: &[0x3f, 0x23, 0x03, 0xd5], signs: true },
];

pub(super) fn state(at: Gva, bytes: &[u8]) -> PadState {
    if BREAKPOINT.is(bytes) {
        return PadState::Changing;
    }
    match bytes.try_into().map(u32::from_le_bytes) {
        Ok(call) if call & BRANCH_MASK == CALL => {
            // The low 26 bits are a signed count of instructions.
            let distance = i64::from((call << 6).cast_signed() >> 6) * 4;
            PadState::GuestEnabled { target: at + distance as u64 }
        }
        _ => PadState::Unknown,
    }
}

pub(super) fn encode_call(at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    encode(CALL, at, to)
}

/// `b` in the place of the instruction that changes. In front of it nothing was executed but a landing
/// pad and `mov x9, x30`, and `x9` is nobody's at a function's entry: `x30` is still the caller's. A
/// direct branch needs no landing pad where it goes. (Behind a `paciasp` in front of the pad `x30` is
/// signed; see [`Prefix::signs`].)
pub(super) fn encode_jump(at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    encode(BRANCH, at, to)
}

fn encode(opcode: u32, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    let distance = to.0.wrapping_sub(at.0).cast_signed();
    let reach = REACH.cast_signed();
    if distance % 4 != 0 || !(-reach..reach).contains(&distance) {
        return Err(OutOfReach { from: at, to, reach: REACH });
    }
    let instructions = (distance / 4) as u32 & !BRANCH_MASK;
    Ok(PadBytes::new(&(opcode | instructions).to_le_bytes()))
}

#[cfg(test)]
mod tests {
    use capstone::prelude::*;
    use proptest::prelude::*;

    use super::{PREFIXES, REACH, encode_call, encode_jump, state};
    use crate::addr::Gva;
    use crate::arch::aarch64::Aarch64;
    use crate::arch::{OutOfReach, PadState, read_pad};

    const AT: Gva = Gva(0xffff_924e_9823_4564);

    /// The state of a pad of these words.
    fn words(first: u32, second: u32) -> PadState {
        let [first, second] = [first, second].map(u32::to_le_bytes);
        read_pad(&Aarch64, AT, &first, &second, None).0
    }

    const NOP: u32 = 0xd503_201f;
    const KEEP_CALLER: u32 = 0xaa1e_03e9;
    const KPROBE: u32 = 0xd420_0080;

    fn disassembled(bytes: &[u8]) -> String {
        let capstone =
            Capstone::new().arm64().mode(capstone::arch::arm64::ArchMode::Arm).build().unwrap();
        let instructions = capstone.disasm_all(bytes, AT.0).unwrap();
        let [one] = &instructions[..] else { panic!("{instructions}") };
        format!("{} {}", one.mnemonic().unwrap(), one.op_str().unwrap()).trim().to_owned()
    }

    #[test]
    fn the_word_in_front_tells_a_prepared_pad_from_the_compilers() {
        assert_eq!(words(NOP, NOP), PadState::NotYet);
        assert_eq!(words(KEEP_CALLER, NOP), PadState::Idle);
    }

    #[test]
    fn a_probe_on_the_first_word_leaves_a_pad_idle_and_one_on_the_second_does_not() {
        assert_eq!(words(KPROBE, NOP), PadState::Idle);
        assert_eq!(words(KEEP_CALLER, KPROBE), PadState::Changing);
    }

    #[test]
    fn a_call_is_the_guests_own() {
        for target in [AT + 0x100, AT - 0x100, AT] {
            let call = encode_call(AT, target).unwrap();
            assert_eq!(state(AT, &call), PadState::GuestEnabled { target });
        }
    }

    #[test]
    fn anything_else_is_unknown() {
        let branch = 0x1400_0001;
        for (first, second) in [(0, NOP), (KEEP_CALLER, branch), (KEEP_CALLER, 0), (NOP, branch)] {
            assert_eq!(words(first, second), PadState::Unknown, "{first:#x} {second:#x}");
        }
        let nop = NOP.to_le_bytes();
        assert_eq!(read_pad(&Aarch64, AT, &[], &nop, None).0, PadState::Unknown);
        assert_eq!(state(AT, &nop[..2]), PadState::Unknown);
    }

    #[test]
    fn prefixes_are_what_their_names_say() {
        let found = PREFIXES.iter().filter(|prefix| !prefix.bytes.is_empty());
        let hints = ["hint #0x22", "hint #0x19"];
        for (prefix, hint) in found.zip(hints) {
            // Some versions of the disassembler know these by number only.
            let shown = disassembled(prefix.bytes);
            assert!(shown == prefix.name || shown == hint, "{}: {shown}", prefix.name);
        }
        assert_eq!(disassembled(&KEEP_CALLER.to_le_bytes()), "mov x9, x30");
        assert_eq!(disassembled(&NOP.to_le_bytes()), "nop");
    }

    proptest! {
        #[test]
        fn a_branch_is_what_a_disassembler_takes_it_for(distance in -0x200_0000_i64..0x200_0000) {
            let target = AT + (distance * 4) as u64;
            let bytes = encode_call(AT, target).unwrap();
            prop_assert_eq!(disassembled(&bytes), format!("bl #{:#x}", target.0));
            let bytes = encode_jump(AT, target).unwrap();
            prop_assert_eq!(disassembled(&bytes), format!("b #{:#x}", target.0));
        }

        #[test]
        fn what_is_too_far_or_odd_is_refused(
            beyond in 0x800_0000_u64..1 << 47, odd in 1_u64..4, below in any::<bool>(),
        ) {
            let far = if below { AT - 4 - beyond } else { AT + beyond };
            for to in [far, AT + odd] {
                let error = OutOfReach { from: AT, to, reach: REACH };
                prop_assert_eq!(encode_call(AT, to), Err(error));
                prop_assert_eq!(encode_jump(AT, to), Err(error));
            }
        }
    }
}
