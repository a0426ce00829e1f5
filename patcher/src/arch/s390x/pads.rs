//! Pads of s390x kernels. The layout and the state are told from the bytes, whatever the kernel's
//! version says.
//!
//! Since 3.19 a pad may be six bytes at the function's entry, made by `gcc -mhotpatch=0,3` or `gcc -pg
//! -mfentry -mnop-mcount`:
//!
//! | bytes | instruction | meaning |
//! |---|---|---|
//! | `c004 00000000` | `brcl 0,0` | idle, as the compiler made it; from 6.12 on machines with facility 85 for good |
//! | `c004 disp` | `brcl 0,slot` | idle; `slot` is the function's own hotpatch trampoline (since 5.15) |
//! | `c0f4 disp` | `brcl 15,slot` | the guest's own tracing is on |
//! | `c005 disp` | `brasl %r0,target` | the same, without a slot |
//!
//! A branch's displacement counts halfwords from the branch itself.
//!
//! Before, and up to 5.14 with compilers that make no such pads, it is a block of 24 bytes that `gcc
//! -pg` made and the kernel rewrites as it boots ([`LAYOUTS`]; arch/s390/kernel/ftrace.c of the
//! versions named). One instruction in it changes:
//!
//! | | up to 3.16 | 3.17, 3.18 | from 3.19 on |
//! |---|---|---|---|
//! | compiled | `stg %r14; larl %r1; brasl %r14,_mcount; lg %r14` | the same | the same |
//! | idle | `stg %r14;` **`jg .+18`** `; lgr; basr; lg %r14` | `larl %r0,.+24;` **`jg .+18`** `; br %r1; brcl 0; brc 0` | **`jg .+24`** `; larl; brasl; lg` |
//! | traced by the guest | **`lg %r1,lowcore`** | the same | **`brasl %r0`** |
//! | goes on at | the end | the end | the end |

use crate::addr::Gva;
use crate::arch::{Form, OutOfReach, PadBytes, PadLayout, PadState, Pattern, Prefix, SLOT_LEN};

/// The length of the instruction that changes: one relative-long branch.
pub(super) const LEN: usize = 6;

/// Nothing stands before a pad.
pub(super) static PREFIXES: [Prefix; 1] = [Prefix { name: "none", bytes: &[], signs: false }];

/// `stg %r14,8(%r15)`
const STORE: &[u8] = &[0xe3, 0xe0, 0xf0, 0x08, 0x00, 0x24];

/// `larl %r0,.+24`
const LOAD_RETURN: &[u8] = &[0xc0, 0x00, 0x00, 0x00, 0x00, 0x0c];

/// `jg .+18`, to the end of a block whose second instruction it is.
const SKIP_18: Pattern = Pattern::new("c0f4 00000009");

/// The blocks that `gcc -pg` and the kernel after it made.
pub(super) static LAYOUTS: [PadLayout; 5] = [
    PadLayout {
        name: "mcount block, jump behind the store (to 3.16)",
        before: STORE,
        forms: &[(SKIP_18, Form::Idle)],
        // lgr %r0,%r0; basr %r14,%r1; lg %r14,8(%r15)
        behind: Pattern::new("b9040000 0de1 e3e0f0080004"),
        resume: 12,
    },
    PadLayout {
        name: "mcount block, jump behind the return address (3.17, 3.18)",
        before: LOAD_RETURN,
        forms: &[(SKIP_18, Form::Idle)],
        // br %r1; brcl 0,.; brc 0,.
        behind: Pattern::new("07f1 c00400000000 a7040000"),
        resume: 12,
    },
    PadLayout {
        name: "mcount block, jump first (from 3.19)",
        before: &[],
        // jg .+24; stg %r14,8(%r15)
        forms: &[
            (Pattern::new("c0f4 0000000c"), Form::Idle),
            (Pattern::new("e3e0f0080024"), Form::Compiled),
        ],
        // larl %r1,counter; brasl %r14,_mcount; lg %r14,8(%r15)
        behind: Pattern::new("c010........ c0e5........ e3e0f0080004"),
        resume: 18,
    },
    PadLayout {
        name: "mcount block as compiled (to 3.18)",
        before: STORE,
        // larl %r1,counter
        forms: &[(Pattern::new("c010........"), Form::Compiled)],
        // brasl %r14,_mcount; lg %r14,8(%r15)
        behind: Pattern::new("c0e5........ e3e0f0080004"),
        resume: 12,
    },
    PadLayout {
        name: "mcount block without a counter, as compiled",
        before: &[],
        // stg %r14,8(%r15)
        forms: &[(Pattern::new("e3e0f0080024"), Form::Compiled)],
        // brasl %r14,_mcount; lg %r14,8(%r15)
        behind: Pattern::new("c0e5........ e3e0f0080004"),
        resume: 12,
    },
];

/// `lg %r1,disp` without a register: the address of the guest's tracing is in its lowcore.
const LOAD_LOWCORE: Pattern = Pattern::new("e310 0... ..04");

/// What probes put on an instruction's first two bytes: the kernel's `0002`, gdb's `0001`.
pub(super) const BREAKPOINT: Pattern = Pattern::new("000.");

/// `nopr` and `nop`, shorter than any branch that reaches: `-fpatchable-function-entry=3` makes three of
/// the former, `-mhotpatch=0,2` one of the latter.
const SHORT: [Pattern; 2] = [Pattern::new("0700"), Pattern::new("47000000")];

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

/// The length of a slot: struct ftrace_hotpatch_trampoline of arch/s390/include/asm/ftrace.lds.h.
pub(super) const WHOLE_SLOT: u64 = 24;

/// The pad that `slot` leads back behind.
pub(super) fn of_slot(slot: &[u8; SLOT_LEN]) -> Option<Gva> {
    let rest = u64::from_be_bytes(*slot.last_chunk()?);
    (slot.starts_with(&SLOT_CALL)).then(|| Gva(rest) - LEN as u64)
}

/// Where a relative-long branch at `at` goes.
pub(super) fn branch_target(at: Gva, displacement: [u8; 4]) -> Gva {
    at + (i64::from(i32::from_be_bytes(displacement)) * 2) as u64
}

pub(super) fn state(at: Gva, bytes: &[u8], hook: Option<Gva>) -> PadState {
    let Ok([first, second, displacement @ ..]) = <[u8; LEN]>::try_from(bytes) else {
        return PadState::Unknown;
    };
    if LOAD_LOWCORE.is(bytes) {
        return PadState::GuestEnabledElsewhere;
    }
    if BREAKPOINT.begins(bytes) {
        return PadState::Changing;
    }
    if SHORT.iter().any(|short| short.begins(bytes)) {
        return PadState::Several;
    }
    let target = branch_target(at, displacement);
    match [first, second] {
        BRANCH_NEVER => PadState::Idle,
        CALL if hook == Some(target) => PadState::NotYet,
        BRANCH_ALWAYS | CALL => PadState::GuestEnabled { target },
        _ => PadState::Unknown,
    }
}

pub(super) fn encode_call(at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    encode(CALL, at, to)
}

/// `jg` in the place of the instruction that changes, to a function that is called instead of this one.
///
/// It never comes back, so what the rest of a block would have done is not missed, and where the
/// function's body begins does not matter. What counts is what has been executed in front of it:
///
/// * nothing, where that is the function's first instruction (all pads since 3.19);
/// * `stg %r14,8(%r15)` (to 3.16): the caller's address goes into the part of the caller's frame that
///   belongs to whomever it calls, `%r14` keeps it, and the block's `lg %r14,8(%r15)` would only undo
///   what its `basr` does to the register;
/// * `larl %r0,.+24` (3.17, 3.18): `%r0` is nobody's at a function's entry.
///
/// So the new function finds `%r14`, `%r15`, arguments and stack as its caller left them.
pub(super) fn encode_jump(at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    encode(BRANCH_ALWAYS, at, to)
}

fn encode(opcode: [u8; 2], at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
    let mut bytes = [0; LEN];
    bytes[..2].copy_from_slice(&opcode);
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
    use crate::arch::s390x::S390X;
    use crate::kernel::{Refusal, judge_pad};

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

    /// A block of bytes in hexadecimal.
    fn bytes(digits: &str) -> Vec<u8> {
        let digits: Vec<u32> = digits.chars().filter_map(|digit| digit.to_digit(16)).collect();
        digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
    }

    /// What a block is whose instruction at `lead` changes.
    fn judged(block: &str, lead: usize) -> Result<(&'static str, u16), Refusal> {
        let block = bytes(block);
        let (before, text) = block.split_at(lead);
        judge_pad(&S390X, AT, before, text, None, |_, _| false)
            .map(|pad| (pad.layout.name, pad.layout.resume))
    }

    #[test]
    fn every_historical_block_is_known_in_each_of_its_states() {
        let [to_316, to_318, since] = [0, 1, 2].map(|index| LAYOUTS[index].name);
        let stg = "e3e0f0080024";
        let lg = "e3e0f0080004";
        let compiled = "c010 00001234 c0e5 00000080";
        let elsewhere = || Err(Refusal::GuestTraces { target: None });
        let cases = [
            (format!("{stg} c0f400000009 b9040000 0de1 {lg}"), 6, Ok((to_316, 12))),
            (format!("{stg} e31003900004 b9040000 0de1 {lg}"), 6, elsewhere()),
            (format!("{stg} {compiled} {lg}"), 6, Err(Refusal::NotYet)),
            ("c0000000000c c0f400000009 07f1 c00400000000 a7040000".into(), 6, Ok((to_318, 12))),
            ("c0000000000c e31003900004 07f1 c00400000000 a7040000".into(), 6, elsewhere()),
            (format!("c0f40000000c {compiled} {lg}"), 0, Ok((since, 18))),
            (
                format!("c00500000080 {compiled} {lg}"),
                0,
                Err(Refusal::GuestTraces { target: Some(AT + 0x100) }),
            ),
            (format!("{stg} {compiled} {lg}"), 0, Err(Refusal::NotYet)),
            (format!("{stg} c0e5 00000080 {lg}"), 0, Err(Refusal::NotYet)),
            ("c00400000000 c00400000000 c00400000000".into(), 0, Ok((PadLayout::SINGLE.name, 0))),
        ];
        for (block, lead, expected) in cases {
            assert_eq!(judged(&block, lead), expected, "{block}");
            assert_eq!(judged(&format!("{block} 07fe"), lead), expected, "{block}");
        }
    }

    #[test]
    fn a_breakpoint_elsewhere_in_a_block_is_no_reason_to_refuse_it() {
        let rest = "b9040000 0de1 e3e0f0080004";
        let probed = format!("0002f0080024 c0f400000009 {rest}");
        assert_eq!(judged(&probed, 6), Ok((LAYOUTS[0].name, 12)));
        let ours = format!("e3e0f0080024 000200000009 {rest}");
        assert_eq!(judged(&ours, 6), Err(Refusal::Changing));
        assert_eq!(judged("000200000000", 0), Err(Refusal::Changing));
    }

    #[test]
    fn half_a_block_and_several_instructions_are_refused() {
        let jump = "c0f400000009";
        assert!(matches!(judged(jump, 0), Err(Refusal::GuestTraces { .. })));
        let other = format!("e3e0f0080024 {jump} b9040000 0de1 e3e0f0080014");
        assert!(matches!(judged(&other, 6), Err(Refusal::GuestTraces { .. })));
        for short in ["0700 0700 0700", "4700 0000 c0f4"] {
            assert_eq!(judged(short, 0), Err(Refusal::Several));
        }
        assert!(matches!(judged("a7040000 c00400000000", 4), Err(Refusal::UnknownPrefix { .. })));
        assert!(matches!(judged("e3e0f0080024", 0), Err(Refusal::UnknownBytes { .. })));
    }

    #[test]
    fn a_slot_belongs_to_the_pad_behind_which_it_leads() {
        assert_eq!(slot(AT, &[0xc0, 0x04, 0, 0, 0, 0]), None);
        assert_eq!(slot(AT, &[0xc0, 0xf4, 0, 0, 0, 0x80]), None);
        assert_eq!(slot(AT, &[0xc0, 0x04, 0, 0, 0, 0x80]), Some(AT + 0x100));
        let mut bytes = [0; SLOT_LEN];
        bytes[..2].copy_from_slice(&[0xc0, 0x15]);
        bytes[8..].copy_from_slice(&(AT + 6).0.to_be_bytes());
        assert_eq!(of_slot(&bytes), Some(AT));
        bytes[1] = 0x05;
        assert_eq!(of_slot(&bytes), None);
        assert_eq!(of_slot(&[0; SLOT_LEN]), None);
    }

    #[test]
    fn anything_else_is_unknown() {
        let others: [&[u8]; 5] = [
            &[],
            &[0xc0, 0x04, 0, 0, 0],
            &[0xc0, 0x04, 0, 0, 0, 0, 0],
            &[0xc0, 0x14, 0, 0, 0, 0],
            &[0x07, 0xfe, 0x07, 0x00, 0x07, 0x00],
        ];
        for bytes in others {
            assert_eq!(state(AT, bytes, None), PadState::Unknown, "{bytes:02x?}");
        }
    }

    #[test]
    fn calls_and_jumps_are_what_a_disassembler_takes_them_for() {
        use capstone::arch::BuildsCapstone as _;
        let capstone = capstone::Capstone::new()
            .sysz()
            .mode(capstone::arch::sysz::ArchMode::Default)
            .build()
            .unwrap();
        let to = AT - 0x1234;
        for (bytes, expected) in
            [(encode_call(AT, to), "brasl %r0, "), (encode_jump(AT, to), "jg ")]
        {
            let disassembled = capstone.disasm_all(&bytes.unwrap(), AT.0).unwrap();
            let [one] = &disassembled[..] else { panic!("{disassembled}") };
            let found = format!("{} {}", one.mnemonic().unwrap(), one.op_str().unwrap());
            assert_eq!(found, format!("{expected}{:#x}", to.0));
        }
    }

    #[test]
    fn a_call_reaches_four_gibibytes_either_way_and_no_farther() {
        for target in [AT + 0xffff_fffe, AT - 0x1_0000_0000, AT] {
            let bytes = encode_call(AT, target).unwrap();
            assert_eq!(state(AT, &bytes, None), PadState::GuestEnabled { target });
        }
        for to in [AT + 0x1_0000_0000, AT - 0x1_0000_0002, AT + 3, Gva(0)] {
            let error = OutOfReach { from: AT, to, reach: 1 << 32 };
            assert_eq!(encode_call(AT, to), Err(error));
            assert_eq!(encode_jump(AT, to), Err(error));
        }
    }
}
