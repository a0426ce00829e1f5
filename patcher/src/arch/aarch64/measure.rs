//! The part of the code behind all stubs that adds what a call has taken to its function's histogram.
//!
//! What is added to is in memory for all CPUs, and changed by exclusive loads and stores, which every
//! processor has: nothing is lost to another CPU, an interrupt or a task that is moved in between.

use super::return_hook::{CBNZ32, Code, LDR64, add, distance, field64, if_bit_is_clear, if_zero};
use super::trampoline::{R31, add_shifted};
use crate::arch::{OutOfReach, ReturnExit};
use crate::region::{HISTOGRAM_BYTES, MEASURE_CALL, SUM_AT, slot};

/// Appends it. `x17` is the slot's address and `w9` its duties, both of which stay, as `x30` does; `x10` to
/// `x13` and `x16` are free.
///
/// # Errors
/// The histograms are not within 4 GiB, or do not begin on a page.
pub(super) fn append(code: &mut Code, exit: &ReturnExit) -> Result<(), OutOfReach> {
    let histograms = exit.histograms.0;
    let unmeasured = code.here();
    code.put([0]); //                                   tbz w9, #measure, 1f

    // x16 = what it has taken, in nanoseconds: nothing where another CPU's clock is behind.
    code.put([0xd503_3fdf]); //                         isb
    code.put([0xd53b_e040 | 16]); //                    mrs x16, cntvct_el0
    code.put([field64(LDR64, 10, 17, slot::TIME)]); //  ldr x10, [x17, #time]
    code.put([0xcb00_0000 | 10 << 16 | 16 << 5 | 16]); // sub x16, x16, x10
    code.put([0x8aa0_0000 | 16 << 16 | 63 << 10 | 16 << 5 | 16]); // bic x16, x16, x16, asr #63
    code.address(12, histograms, histograms)?; //       adrp x12, histograms
    code.put([field64(LDR64, 10, 12, 0)]); //           ldr x10, [x12]            the scale
    code.put([0x9bc0_7c00 | 10 << 16 | 16 << 5 | 11]); // umulh x11, x16, x10
    code.put([0x9b00_0000 | 10 << 16 | R31 << 10 | 16 << 5 | 16]); // mul x16, x16, x10
    code.put([0x93c0_0000 | 16 << 16 | 32 << 10 | 11 << 5 | 16]); // extr x16, x11, x16, #32
    code.put([0x9240_0000 | 62 << 10 | 16 << 5 | 16]); // and x16, x16, #0x7fffffffffffffff

    code.put([0x1200_0000 | 15 << 10 | 9 << 5 | 10]); // and w10, w9, #0xffff
    let histogram_shift = HISTOGRAM_BYTES.trailing_zeros();
    code.put([add_shifted(12, 12, 10, histogram_shift)]); // add x12, x12, x10, lsl #histogram
    code.put([add(13, 12, SUM_AT)]); //                 add x13, x12, #sum
    let again = code.here();
    code.put([0xc85f_7c00 | 13 << 5 | 10]); //       2: ldxr x10, [x13]
    code.put([0x8b00_0000 | 16 << 16 | 10 << 5 | 10]); // add x10, x10, x16
    code.put([0xc800_7c00 | 11 << 16 | 13 << 5 | 10]); // stxr w11, x10, [x13]
    code.put([if_zero(CBNZ32, 11, distance(code.here(), again))]); // cbnz w11, 2b

    // x16 = the highest bit of that.
    code.put([0xb240_0000 | 16 << 5 | 16]); //          orr x16, x16, #1
    code.put([0xdac0_1000 | 16 << 5 | 16]); //          clz x16, x16
    code.put([0x5200_0000 | 5 << 10 | 16 << 5 | 16]); // eor w16, w16, #63
    code.put([add_shifted(12, 12, 16, 3)]); //          add x12, x12, x16, lsl #3
    let again = code.here();
    code.put([0xc85f_7c00 | 12 << 5 | 10]); //       3: ldxr x10, [x12]
    code.put([add(10, 10, 1)]); //                      add x10, x10, #1
    code.put([0xc800_7c00 | 11 << 16 | 12 << 5 | 10]); // stxr w11, x10, [x12]
    code.put([if_zero(CBNZ32, 11, distance(code.here(), again))]); // cbnz w11, 3b
    let here = code.here(); //                       1:
    let bit = MEASURE_CALL.trailing_zeros();
    code.set(unmeasured, if_bit_is_clear(9, bit, distance(unmeasured, here)));
    Ok(())
}
