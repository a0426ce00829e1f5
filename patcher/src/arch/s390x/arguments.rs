//! The logging trampoline of s390x that records arguments as well: it writes them into slots of the ring
//! behind the record's first one, before it writes that.

use super::trampoline::{append_then, end_record, load, load_address};
use crate::addr::Gva;
use crate::arch::{ArgumentWord, CONTINUATION_FIELDS, Logger, OutOfReach};
use crate::region::{CONTINUATIONS_AT, HEADER_BYTES, RECORD_BYTES};

/// Where the caller's register save area has `%r0`, and further ones behind it, in bytes.
const SAVED: u16 = 0;

/// Where the words of a function's arguments begin on the stack.
const ON_STACK: u16 = 160;

/// The code, to be placed at `at`.
///
/// # Errors
/// As without arguments.
pub(super) fn assemble(logger: &Logger, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    let (rings, slots) = (&logger.rings, logger.arguments.slots() as u8);
    let shift = |factor: u64| factor.trailing_zeros() as u8;
    let [header, record] = [shift(HEADER_BYTES), shift(RECORD_BYTES)];
    let mut code = Vec::with_capacity(256);
    code.extend([0xeb, 0x25, 0xf0, 0x10, 0x00, 0x24]); // stmg %r2,%r5,16(%r15)

    // Reserve: %r3 = index of the record in the ring of CPU %r2.
    load(&mut code, logger.cpu_number)?; //               llgf %r2,cpu_nr
    load_address(&mut code, at, rings.headers())?; //     larl %r1,headers
    code.extend([0xeb, 0x32, 0x00, header, 0x00, 0x0d]); // sllg %r3,%r2,log2(header)
    code.extend([0xb9, 0x08, 0x00, 0x13]); //             agr %r1,%r3
    code.extend([0xe3, 0x30, 0x10, 0x00, 0x00, 0x04]); // lg %r3,0(%r1)
    code.extend([0x41, 0x40, 0x30, slots + 1]); //     1: la %r4,slots + 1(%r3)
    code.extend([0xeb, 0x34, 0x10, 0x00, 0x00, 0x30]); // csg %r3,%r4,0(%r1)
    code.extend([0xa7, 0x44, 0xff, 0xfb]); //             jl 1b
    let count = CONTINUATIONS_AT as u8;
    code.extend([0xe3, 0x40, 0x10, count, 0x00, 0x04]); // lg %r4,8(%r1)
    code.extend([0x41, 0x50, 0x40, slots]); //         2: la %r5,slots(%r4)
    code.extend([0xeb, 0x45, 0x10, count, 0x00, 0x30]); // csg %r4,%r5,8(%r1)
    code.extend([0xa7, 0x44, 0xff, 0xfb]); //             jl 2b

    // %r2 = the ring's place.
    load_address(&mut code, at, rings.slots())?; //       larl %r1,slots
    code.extend([0xeb, 0x22, 0x00, rings.ring_shift(), 0x00, 0x0d]); // sllg %r2,%r2,log2(ring)
    code.extend([0xb9, 0x08, 0x00, 0x21]); //             agr %r2,%r1
    let place = |code: &mut Vec<u8>| {
        code.extend([0xb9, 0x16, 0x00, 0x44]); //         llgfr %r4,%r4
        code.extend([0xc0, 0x4b]);
        code.extend(rings.index_mask().to_be_bytes()); // nilf %r4,slots - 1
        code.extend([0xeb, 0x44, 0x00, record, 0x00, 0x0d]); // sllg %r4,%r4,log2(record)
        code.extend([0x41, 0x14, 0x20, 0x00]); //         la %r1,0(%r4,%r2)
    };
    for (number, words) in (1_u8..).zip(logger.arguments.by_slot()) {
        code.extend([0x41, 0x40, 0x30, number]); //       la %r4,number(%r3)
        place(&mut code);
        code.extend([0xe5, 0x4c, 0x10, 0x08, 0x00, number]); // mvhi 8(%r1),number
        for (word, field) in words.into_iter().zip(CONTINUATION_FIELDS) {
            let from = match word {
                // The last of the five is in its register still.
                ArgumentWord::Register(4) => None,
                ArgumentWord::Register(register) => Some(SAVED + 8 * (2 + u16::from(register))),
                ArgumentWord::Stack(word) => Some(ON_STACK + 8 * u16::from(word)),
            };
            let register = from.map_or(6, |from| {
                let [high, low] = from.to_be_bytes();
                code.extend([0xe3, 0x50, 0xf0 | high, low, 0x00, 0x04]); // lg %r5,from(%r15)
                5
            });
            code.extend([0xe3, register << 4, 0x10, field, 0x00, 0x24]); // stg register,field(%r1)
        }
        code.extend([0x41, 0x50, 0x30, number + 1]); //   la %r5,number + 1(%r3)
        code.extend([0x50, 0x50, 0x10, 0x1c]); //         st %r5,28(%r1)        sequence
    }
    code.extend([0xb9, 0x04, 0x00, 0x43]); //             lgr %r4,%r3
    place(&mut code);
    code.extend([0x41, 0x40, 0x30, 0x01]); //             la %r4,1(%r3)
    if logger.clock {
        code.extend([0xb2, 0x7c, 0x10, 0x00]); //         stckf 0(%r1)
    } else {
        code.extend([0xe5, 0x48, 0x10, 0x00, 0x00, 0x00]); // mvghi 0(%r1),0
    }
    code.extend([0x50, 0x00, 0x10, 0x08]); //             st %r0,8(%r1)         function
    code.extend([0x50, 0xe0, 0x10, 0x0c]); //             st %r14,12(%r1)       caller, low half
    code.extend([0xeb, 0x2e, 0x00, 0x20, 0x00, 0x0c]); // srlg %r2,%r14,32
    code.extend([0x50, 0x20, 0x10, 0x10]); //             st %r2,16(%r1)        caller, high half
    end_record(&mut code, &logger.task, 3)?;

    code.extend([0xeb, 0x25, 0xf0, 0x10, 0x00, 0x04]); // lmg %r2,%r5,16(%r15)
    append_then(&mut code, at, logger.then)?;
    Ok(code)
}
