//! How s390x kernels return: `br %r14`, or where speculation is to be kept from it a jump to an
//! expoline thunk, which executes that instruction from elsewhere (arch/s390/lib/expoline.S).
//!
//! A kernel built with such thunks puts plain returns back as it boots where it is told to
//! (`nospec_revert`), so what counts is its text as it runs.

use crate::addr::Gva;
use crate::arch::ReturnCount;
use crate::arch::s390x::pads;

/// `br %r14`
const RETURN: [u8; 2] = [0x07, 0xfe];
/// `jg`
const JUMP: [u8; 2] = [0xc0, 0xf4];

/// Whether `name` is the thunk that functions return through: gcc's own, or its copy in assembly.
pub(super) fn is_thunk(name: &str) -> bool {
    ["__s390_indirect_jump_r14", "__s390x_indirect_jump_r14"].contains(&name)
}

pub(super) fn count(text: &[u8], at: Gva, thunks: &[Gva]) -> ReturnCount {
    let mut count = ReturnCount { plain: 0, through: vec![0; thunks.len()] };
    let mut offset = 0;
    while let Some([first, second, ..]) = text.get(offset..) {
        // The first two bits of an instruction tell its length.
        let len = [2, 4, 4, 6][usize::from(first >> 6)];
        let instruction = [*first, *second];
        if instruction == RETURN {
            count.plain += 1;
        } else if instruction == JUMP
            && let Some(displacement) = text.get(offset + 2..).and_then(|rest| rest.first_chunk())
        {
            let target = pads::branch_target(at + offset as u64, *displacement);
            if let Some(index) = thunks.iter().position(|thunk| *thunk == target) {
                count.through[index] += 1;
            }
        }
        offset += len;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Gva = Gva(0x10_0000);

    #[test]
    fn plain_returns_and_jumps_to_thunks_are_counted_instruction_by_instruction() {
        let text = [
            &[0x07, 0xfe][..],                     // br %r14
            &[0xc0, 0xf4, 0, 0, 0, 0x7f],          // jg AT + 0x100
            &[0xc0, 0xf4, 0, 0, 0, 0x10],          // jg elsewhere
            &[0xc0, 0x18, 0x07, 0xfe, 0x07, 0xfe], // an immediate that looks like two returns
            &[0xa7, 0x08, 0x07, 0xfe],             // and another
            &[0x07, 0xfe],                         // br %r14
            &[0xc0, 0xf4],                         // cut off
        ]
        .concat();
        let count = count(&text, AT, &[AT, AT + 0x100]);
        assert_eq!(count, ReturnCount { plain: 2, through: vec![0, 1] });
    }

    #[test]
    fn only_the_thunk_of_the_return_register_is_one() {
        assert!(is_thunk("__s390_indirect_jump_r14"));
        assert!(!is_thunk("__s390_indirect_jump_r1"));
        assert!(!is_thunk("__s390_indirect_jump_r14use_r9"));
    }
}
