//! The code that counts the calls of an s390x function, and the thunks that lead there.
//!
//! A thunk has the number of its function's counter in `%r1`, which is free at a function's entry, and
//! branches to the end of its block, where a branch leads to the code that counts for all of them. The
//! counter is incremented by compare-and-swap, as slots of rings are reserved: no count is lost to another
//! CPU or an interrupt.

use super::pads::halfwords;
use super::trampoline::{append_then, load_address};
use crate::addr::Gva;
use crate::arch::{OutOfReach, Then, ThunkShape, Thunks};
use crate::region::{COUNTER_BYTES, Counters, THUNK_BLOCK_BYTES};

/// `llill` and `j`.
const THUNK_BYTES: u8 = 8;
const IN_BLOCK: u8 = 15;

/// Where the branch is that all thunks of a block end in.
const EXIT: u8 = THUNK_BYTES * IN_BLOCK;

pub(super) const SHAPE: ThunkShape =
    ThunkShape { bytes: THUNK_BYTES as u64, in_block: IN_BLOCK as u32 };

/// The code that counts, to be placed at `at`.
///
/// # Errors
/// The counters or the next piece of code are not within 4 GiB of `at`.
pub(super) fn assemble(at: Gva, counters: Counters, then: Then) -> Result<Vec<u8>, OutOfReach> {
    let shift = COUNTER_BYTES.trailing_zeros() as u8;
    let mut code = Vec::with_capacity(64);
    code.extend([0xeb, 0x24, 0xf0, 0x10, 0x00, 0x24]); // stmg %r2,%r4,16(%r15)
    code.extend([0xeb, 0x31, 0x00, shift, 0x00, 0x0d]); // sllg %r3,%r1,log2(counter)
    load_address(&mut code, at, counters.at(0))?; //      larl %r1,counters
    code.extend([0xb9, 0x08, 0x00, 0x13]); //             agr %r1,%r3
    code.extend([0xe3, 0x30, 0x10, 0x00, 0x00, 0x04]); // lg %r3,0(%r1)
    code.extend([0x41, 0x40, 0x30, 0x01]); //          1: la %r4,1(%r3)
    code.extend([0xeb, 0x34, 0x10, 0x00, 0x00, 0x30]); // csg %r3,%r4,0(%r1)
    code.extend([0xa7, 0x44, 0xff, 0xfb]); //             jl 1b
    code.extend([0xeb, 0x24, 0xf0, 0x10, 0x00, 0x04]); // lmg %r2,%r4,16(%r15)
    append_then(&mut code, at, then)?;
    Ok(code)
}

/// A block of thunks, to be placed at `at`.
///
/// # Errors
/// The code that counts is not within 4 GiB of `at`, or a counter's number has more than 16 bits.
pub(super) fn assemble_thunks(
    at: Gva,
    thunks: &Thunks,
) -> Result<[u8; THUNK_BLOCK_BYTES as usize], OutOfReach> {
    let mut block = [0x07; THUNK_BLOCK_BYTES as usize]; //   bcr 0,%r7
    for index in 0..IN_BLOCK {
        let number = thunks.first + u32::from(index) * thunks.stride;
        let to = thunks.counters.at(number);
        let number =
            u16::try_from(number).map_err(|_| OutOfReach { from: at, to, reach: 1 << 16 })?;
        let from = usize::from(THUNK_BYTES * index);
        let branch = from + 4;
        block[from..from + 2].copy_from_slice(&[0xa5, 0x1f]);
        block[from + 2..branch].copy_from_slice(&number.to_be_bytes()); // llill %r1,number
        let ahead = (usize::from(EXIT) - branch) / 2;
        block[branch..branch + 4].copy_from_slice(&[0xa7, 0xf4, 0, ahead as u8]); // j the block's end
    }
    let exit = usize::from(EXIT);
    let displacement = halfwords(at + exit as u64, thunks.to)?;
    block[exit..exit + 2].copy_from_slice(&[0xc0, 0xf4]); // jg the code that counts
    block[exit + 2..exit + 6].copy_from_slice(&displacement);
    Ok(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ReturnForm;
    use crate::arch::listing::s390x as listing;

    const AT: Gva = Gva(0x3ff_fa8f_8000);
    const COUNTERS: Counters = Counters(Gva(0x3ff_faaf_8000));

    #[test]
    fn the_code_is_what_its_comments_say() {
        let go_on = Then::GoOn { behind: 0, form: ReturnForm::Plain };
        let code = assemble(AT, COUNTERS, go_on).unwrap();
        assert_eq!(
            listing(&code, AT),
            [
                "stmg %r2, %r4, 0x10(%r15)",
                "sllg %r3, %r1, 3",
                "larl %r1, 0x3fffaaf8000",
                "agr %r1, %r3",
                "lg %r3, 0(%r1)",
                "la %r4, 1(%r3)",
                "csg %r3, %r4, 0(%r1)",
                "jl 0x3fffa8f801c",
                "lmg %r2, %r4, 0x10(%r15)",
                "lgr %r1, %r0",
                "br %r1",
            ]
        );
    }

    #[test]
    fn each_thunk_has_its_own_counters_number_and_all_lead_to_the_same_code() {
        let counter = AT + 0x1000;
        let thunks = Thunks { counters: COUNTERS, first: 40_000, stride: 1, to: counter };
        let block = assemble_thunks(AT, &thunks).unwrap();
        let listing = listing(&block[..usize::from(EXIT) + 6], AT);
        let exit = AT.0 + u64::from(EXIT);
        for index in 0..usize::from(IN_BLOCK) {
            assert_eq!(listing[2 * index], format!("llill %r1, {:#x}", 40_000 + index));
            assert_eq!(listing[2 * index + 1], format!("j {exit:#x}"));
        }
        assert_eq!(listing[30..], [format!("jg {:#x}", counter.0)]);
    }

    #[test]
    fn what_no_instruction_can_reach_is_refused() {
        let far = AT + (8 << 30);
        let thunks = Thunks { counters: COUNTERS, first: 0, stride: 1, to: far };
        assert_eq!(assemble_thunks(AT, &thunks).unwrap_err().to, far);
        let thunks = Thunks { first: 1 << 16, to: AT, ..thunks };
        assert_eq!(assemble_thunks(AT, &thunks).unwrap_err().reach, 1 << 16);
        let go_on = Then::GoOn { behind: 0, form: ReturnForm::Plain };
        assert_eq!(assemble(AT, Counters(far), go_on).unwrap_err().to, far);
    }
}
