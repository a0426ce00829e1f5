//! The part of the code behind all stubs that adds what a call has taken to its function's histogram.
//!
//! What is added to is in memory for all CPUs, and changed by compare-and-swap: nothing is lost to another
//! CPU, an interrupt or a task that is moved in between.

use super::trampoline::load_address;
use crate::addr::Gva;
use crate::arch::{OutOfReach, ReturnExit};
use crate::region::{HISTOGRAM_BYTES, MEASURE_CALL, SUM_AT, slot};

/// Appends it to `code`, which is for `at`. `%r3` is the slot's address, which stays, as `%r14` does; `%r1`,
/// `%r2`, `%r4`, `%r5`, the condition code and what is from 48 on in the register save area are free.
///
/// # Errors
/// The histograms are not within 4 GiB of `at`.
pub(super) fn append(code: &mut Vec<u8>, at: Gva, exit: &ReturnExit) -> Result<(), OutOfReach> {
    let histogram_shift = HISTOGRAM_BYTES.trailing_zeros() as u8;
    let [sum_high, sum_low] = (SUM_AT as u16).to_be_bytes();
    code.extend([0x91, (MEASURE_CALL >> 24) as u8, 0x30, slot::DUTIES]); // tm duties(%r3),measure
    code.extend([0xa7, 0x84, 0x00, 0x00]); //             jz 1f
    let unmeasured_from = code.len();

    // %r5 = what it has taken, in nanoseconds: nothing where another CPU's clock is behind.
    code.extend([0xb2, 0x7c, 0xf0, 0x30]); //             stckf 48(%r15)
    code.extend([0xe3, 0x50, 0xf0, 0x30, 0x00, 0x04]); // lg %r5,48(%r15)
    code.extend([0xe3, 0x50, 0x30, slot::TIME, 0x00, 0x0b]); // slg %r5,time(%r3)
    code.extend([0xa7, 0xb4, 0x00, 0x04]); //             jnl 2f, that is: nothing was borrowed
    code.extend([0xa7, 0x59, 0x00, 0x00]); //             lghi %r5,0
    load_address(code, at, exit.histograms.0)?; //     2: larl %r1,histograms
    code.extend([0xe3, 0x40, 0x10, 0x00, 0x00, 0x86]); // mlg %r4,0(%r1)        the scale
    code.extend([0xeb, 0x55, 0x00, 32, 0x00, 0x0c]); //   srlg %r5,%r5,32
    code.extend([0xeb, 0x44, 0x00, 32, 0x00, 0x0d]); //   sllg %r4,%r4,32
    code.extend([0xb9, 0x81, 0x00, 0x54]); //             ogr %r5,%r4
    code.extend([0xa5, 0x54, 0x7f, 0xff]); //             nihh %r5,0x7fff

    code.extend([0xe3, 0x20, 0x30, slot::DUTIES + 2, 0x00, 0x91]); // llgh %r2,duties+2(%r3)
    code.extend([0xeb, 0x22, 0x00, histogram_shift, 0x00, 0x0d]); // sllg %r2,%r2,log2(histogram)
    code.extend([0xb9, 0x08, 0x00, 0x12]); //             agr %r1,%r2
    code.extend([0xe3, 0x20, 0x10 | sum_high, sum_low, 0x00, 0x04]); // lg %r2,sum(%r1)
    code.extend([0xb9, 0x04, 0x00, 0x42]); //          3: lgr %r4,%r2
    code.extend([0xb9, 0x08, 0x00, 0x45]); //             agr %r4,%r5
    code.extend([0xeb, 0x24, 0x10 | sum_high, sum_low, 0x00, 0x30]); // csg %r2,%r4,sum(%r1)
    code.extend([0xa7, 0x44, 0xff, 0xf9]); //             jl 3b

    // %r4 = the highest bit of that.
    code.extend([0xa5, 0x5b, 0x00, 0x01]); //             oill %r5,1
    code.extend([0xb9, 0x83, 0x00, 0x45]); //             flogr %r4,%r5
    code.extend([0xc0, 0x47, 0x00, 0x00, 0x00, 63]); //   xilf %r4,63
    code.extend([0xeb, 0x44, 0x00, 3, 0x00, 0x0d]); //    sllg %r4,%r4,3
    code.extend([0xb9, 0x08, 0x00, 0x14]); //             agr %r1,%r4
    code.extend([0xe3, 0x20, 0x10, 0x00, 0x00, 0x04]); // lg %r2,0(%r1)
    code.extend([0x41, 0x40, 0x20, 0x01]); //          4: la %r4,1(%r2)
    code.extend([0xeb, 0x24, 0x10, 0x00, 0x00, 0x30]); // csg %r2,%r4,0(%r1)
    code.extend([0xa7, 0x44, 0xff, 0xfb]); //             jl 4b
    let unmeasured = ((code.len() - unmeasured_from + 4) / 2) as u16;
    code[unmeasured_from - 2..unmeasured_from].copy_from_slice(&unmeasured.to_be_bytes()); // 1:
    Ok(())
}
