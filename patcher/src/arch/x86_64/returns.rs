//! How x86_64 kernels return from functions.
//!
//! Kernels with return thunks are compiled with `jmp __x86_return_thunk` in place of each return.
//! As they boot they rewrite every one of these five bytes: to `ret` and four `int3`, or to a jump
//! to the thunk that the processor needs (`apply_returns`, arch/x86/kernel/alternative.c).

use crate::addr::Gva;
use crate::arch::ReturnCount;

const RET: u8 = 0xc3;
const JMP: u8 = 0xe9;
const INT3: u8 = 0xcc;
/// What stands behind a plain return: the `int3` of a kernel that has return thunks and does not
/// need them, or else what fills the room up to the next function.
const FILLERS: [&[u8]; 6] = [
    &[INT3; LEN - 1],
    &[0x90; LEN - 1],
    &[0x0f, 0x1f],
    &[0x66, 0x90],
    &[0x66, 0x2e, 0x0f, 0x1f],
    &[0x66, 0x66, 0x2e, 0x0f],
];

/// The length of a near jump.
const LEN: usize = 5;

pub(super) fn is_thunk(name: &str) -> bool {
    name.ends_with("return_thunk") && !name.starts_with("__pfx_")
}

pub(super) fn count(text: &[u8], at: Gva, thunks: &[Gva]) -> ReturnCount {
    let mut count = ReturnCount { plain: 0, through: vec![0; thunks.len()] };
    for (offset, window) in text.windows(LEN).enumerate() {
        match window[0] {
            RET if FILLERS.iter().any(|filler| window[1..].starts_with(filler)) => {
                count.plain += 1;
            }
            JMP => {
                let displacement = i32::from_le_bytes([window[1], window[2], window[3], window[4]]);
                let target = at + (offset + LEN) as u64 + i64::from(displacement) as u64;
                if let Some(which) = thunks.iter().position(|&thunk| thunk == target) {
                    count.through[which] += 1;
                }
            }
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Gva = Gva(0xffff_ffff_8100_0000);
    const THUNK: Gva = Gva(0xffff_ffff_81c0_1ee0);

    #[test]
    fn returns_are_counted_by_form_and_chance_bytes_are_not() {
        let mut text = vec![0x48, 0x89, 0xe5];
        let jump_at = AT + text.len() as u64;
        text.push(JMP);
        text.extend((THUNK.0.wrapping_sub((jump_at + 5).0) as u32).to_le_bytes());
        text.extend([RET, INT3, INT3, INT3, INT3]);
        text.extend([RET, 0x0f, 0x1f, 0x44, 0x00, 0x00]);
        // The middle of an instruction, and a jump within the function.
        text.extend([0x48, 0x89, RET, 0x48, 0x85, 0xdb, JMP, 0x10, 0x00, 0x00, 0x00]);
        let other = Gva(0xffff_ffff_81c0_2000);
        assert_eq!(
            count(&text, AT, &[other, THUNK]),
            ReturnCount { plain: 2, through: vec![0, 1] }
        );
    }

    #[test]
    fn thunks_are_told_by_their_names() {
        for name in ["__x86_return_thunk", "srso_alias_return_thunk", "its_return_thunk"] {
            assert!(is_thunk(name), "{name}");
        }
        for name in ["__pfx_set_return_thunk", "__ksymtab___x86_return_thunk_", "return_to_handler"]
        {
            assert!(!is_thunk(name), "{name}");
        }
    }
}
