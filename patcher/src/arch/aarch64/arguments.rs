//! What a logging trampoline of aarch64 does beside if it records arguments: it writes them into slots of
//! the ring behind the record's first one, before it writes that.

use super::trampoline::{R31, add_shifted};
use crate::arch::{ArgumentWord, ArgumentWords, CONTINUATION_FIELDS};
use crate::region::{CONTINUATIONS_AT, RECORD_BYTES, RingLayout};

/// How many bytes the trampoline has put on the stack.
const PUSHED: u32 = 32;

/// Appends what counts the slots that were reserved beside the first: `x17` is the address of the CPU's
/// header. It and `x12` are lost, and `x11` is one more than `x10`.
pub(super) fn count(words: &mut Vec<u32>, arguments: ArgumentWords) {
    let slots = arguments.slots() as u32;
    words.push(0x9100_0000 | (CONTINUATIONS_AT as u32) << 10 | 17 << 5 | 17); // add x17, x17, #8
    words.push(0xc85f_7c00 | 17 << 5 | 12); //          ldxr x12, [x17]
    words.push(0x9100_0000 | slots << 10 | 12 << 5 | 12); // add x12, x12, #slots
    words.push(0xc800_7c00 | 11 << 16 | 17 << 5 | 12); // stxr w11, x12, [x17]
    words.push(0x35ff_ffa0 | 11); //                    cbnz w11, three instructions back
    words.push(0x9100_0400 | 10 << 5 | 11); //          add x11, x10, #1
}

/// Appends what writes the arguments: `x17` is the CPU's ring, and `x10` the index of the record. `x12` and
/// `x16` are lost.
pub(super) fn store(words: &mut Vec<u32>, arguments: ArgumentWords, rings: &RingLayout) {
    let index_bits = rings.index_mask().count_ones();
    for (number, slot) in (1_u32..).zip(arguments.by_slot()) {
        words.push(0x9100_0000 | number << 10 | 10 << 5 | 12); // add x12, x10, #number
        words.push(0x9240_0000 | (index_bits - 1) << 10 | 12 << 5 | 12); // and x12, x12, #slots - 1
        words.push(add_shifted(12, 17, 12, RECORD_BYTES.trailing_zeros())); // add x12, x17, x12, lsl #record
        words.push(0x5280_0000 | number << 5 | 16); //  mov w16, #number
        words.push(0xb900_0800 | 12 << 5 | 16); //      str w16, [x12, #8]
        for (word, field) in slot.into_iter().zip(CONTINUATION_FIELDS) {
            let register = match word {
                ArgumentWord::Register(register) => u32::from(register),
                ArgumentWord::Stack(word) => {
                    let units = PUSHED / 8 + u32::from(word);
                    words.push(0xf940_0000 | units << 10 | R31 << 5 | 16); // ldr x16, [sp, #at]
                    16
                }
            };
            words.push(0xf800_0000 | u32::from(field) << 12 | 12 << 5 | register); // stur register, [x12, #field]
        }
        words.push(0x1100_0000 | (number + 1) << 10 | 10 << 5 | 16); // add w16, w10, #number + 1
        words.push(0x9100_7000 | 12 << 5 | 12); //      add x12, x12, #28
        words.push(0x889f_fc00 | 12 << 5 | 16); //      stlr w16, [x12]           sequence
    }
}
