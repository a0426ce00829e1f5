//! The code that counts the calls of an aarch64 function, and the thunks that lead there.
//!
//! A thunk has the number of its function's counter in `x16`, which a veneer between a function and its
//! caller may use as well, and branches to the code that counts. The counter is incremented by an exclusive
//! load and store, as slots of rings are reserved, which every processor has: no count is lost to another
//! CPU or an interrupt.

use super::pads::encode_jump;
use super::trampoline::{add_shifted, append_then, page_address, pair};
use crate::addr::Gva;
use crate::arch::{OutOfReach, Then, ThunkShape, Thunks};
use crate::region::{COUNTER_BYTES, Counters, THUNK_BLOCK_BYTES};

/// `movz` and `b`.
const THUNK_BYTES: usize = 8;
const IN_BLOCK: usize = THUNK_BLOCK_BYTES as usize / THUNK_BYTES;

pub(super) const SHAPE: ThunkShape =
    ThunkShape { bytes: THUNK_BYTES as u64, in_block: IN_BLOCK as u32 };

/// `sp`, by instruction.
const SP: u32 = 31;

/// The code that counts, to be placed at `at`.
///
/// # Errors
/// The counters are not within 4 GiB of `at` or do not begin on a page, or what is executed behind it is
/// not within 128 MiB.
pub(super) fn assemble(at: Gva, counters: Counters, then: Then) -> Result<Vec<u8>, OutOfReach> {
    let mut words = Vec::with_capacity(12);
    words.push(0xa9be_0000 | pair(10, SP, 11)); //      stp x10, x11, [sp, #-32]!
    words.push(page_address(at + 4, counters.at(0), 17)?); // adrp x17, counters
    words.push(add_shifted(17, 17, 16, COUNTER_BYTES.trailing_zeros())); // add x17, x17, x16, lsl #3
    words.push(0xc85f_7c00 | 17 << 5 | 10); //          ldxr x10, [x17]
    words.push(0x9100_0400 | 10 << 5 | 10); //          add x10, x10, #1
    words.push(0xc800_7c00 | 11 << 16 | 17 << 5 | 10); // stxr w11, x10, [x17]
    words.push(0x35ff_ffa0 | 11); //                    cbnz w11, three instructions back
    words.push(0xa8c2_0000 | pair(10, SP, 11)); //      ldp x10, x11, [sp], #32
    append_then(&mut words, at, then)?;
    Ok(words.into_iter().flat_map(u32::to_le_bytes).collect())
}

/// A block of thunks, to be placed at `at`.
///
/// # Errors
/// The code that counts is not within 128 MiB of `at`, or a counter's number has more than 16 bits.
pub(super) fn assemble_thunks(
    at: Gva,
    thunks: &Thunks,
) -> Result<[u8; THUNK_BLOCK_BYTES as usize], OutOfReach> {
    let mut block = [0; THUNK_BLOCK_BYTES as usize];
    let (each, _) = block.as_chunks_mut::<THUNK_BYTES>();
    for (index, thunk) in each.iter_mut().enumerate() {
        let from = at + (index * THUNK_BYTES) as u64;
        let number = thunks.first + index as u32 * thunks.stride;
        let to = thunks.counters.at(number);
        let number = u16::try_from(number).map_err(|_| OutOfReach { from, to, reach: 1 << 16 })?;
        let number = 0xd280_0000 | u32::from(number) << 5 | 16; // movz x16, #number
        thunk[..4].copy_from_slice(&number.to_le_bytes());
        thunk[4..].copy_from_slice(&encode_jump(from + 4, thunks.to)?); // b the code that counts
    }
    Ok(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ReturnForm;
    use crate::arch::listing::aarch64 as listing;

    const AT: Gva = Gva(0xffff_924e_9fa0_0000);
    const COUNTERS: Counters = Counters(Gva(0xffff_924e_9fc0_0000));

    #[test]
    fn the_code_is_what_its_comments_say() {
        let go_on = Then::GoOn { behind: 0, form: ReturnForm::Plain };
        let code = assemble(AT, COUNTERS, go_on).unwrap();
        assert_eq!(
            listing(&code, AT),
            [
                "stp x10, x11, [sp, #-0x20]!",
                "adrp x17, #0xffff924e9fc00000",
                "add x17, x17, x16, lsl #3",
                "ldxr x10, [x17]",
                "add x10, x10, #1",
                "stxr w11, x10, [x17]",
                "cbnz w11, #0xffff924e9fa0000c",
                "ldp x10, x11, [sp], #0x20",
                "add x16, x30, #0",
                "mov x30, x9",
                "ret x16",
            ]
        );
    }

    #[test]
    fn each_thunk_has_its_own_counters_number_and_all_lead_to_the_same_code() {
        let counter = AT + 0x1000;
        let thunks = Thunks { counters: COUNTERS, first: 40_000, stride: 1, to: counter };
        let listing = listing(&assemble_thunks(AT, &thunks).unwrap(), AT);
        assert_eq!(listing.len(), 2 * IN_BLOCK);
        for (index, thunk) in listing.chunks(2).enumerate() {
            let number = format!("mov x16, #{:#x}", 40_000 + index);
            assert_eq!(*thunk, [number, format!("b #{:#x}", counter.0)]);
        }
    }

    #[test]
    fn what_no_instruction_can_reach_is_refused() {
        let far = AT + (1 << 30);
        let thunks = Thunks { counters: COUNTERS, first: 0, stride: 1, to: far };
        assert_eq!(assemble_thunks(AT, &thunks).unwrap_err().to, far);
        let thunks = Thunks { first: 1 << 16, to: AT, ..thunks };
        assert_eq!(assemble_thunks(AT, &thunks).unwrap_err().reach, 1 << 16);
    }
}
