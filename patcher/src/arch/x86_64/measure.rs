//! The part of the code behind all stubs that adds what a call has taken to its function's histogram.
//!
//! What is added to is in memory for all CPUs, and added to by locked instructions: nothing is lost to
//! another CPU, an interrupt or a task that is moved in between.

use super::return_hook::absolute;
use crate::addr::Gva;
use crate::arch::{OutOfReach, ReturnExit};
use crate::region::{HISTOGRAM_BYTES, MEASURE_CALL, SUM_AT, slot};

/// Appends it to `code`, which is for `at`. `rbx` is where the slot is behind the first, which stays, as
/// `rcx` does; `rax`, `rdx`, `rsi`, `rdi` and the flags are free.
///
/// # Errors
/// The histograms are not within the lowest or highest 2 GiB of the address space.
pub(super) fn append(code: &mut Vec<u8>, at: Gva, exit: &ReturnExit) -> Result<(), OutOfReach> {
    let slots = absolute(at, exit.pool.slots())?;
    let histograms = absolute(at, exit.histograms.0)?;
    absolute(at, exit.histograms.end())?;
    let field = |offset: u8| slots.wrapping_add(offset.into()).to_le_bytes();
    let sum = histograms.wrapping_add(SUM_AT as i32).to_le_bytes();
    let (scale, histograms) = (histograms.to_le_bytes(), histograms.to_le_bytes());
    let histogram_shift = HISTOGRAM_BYTES.trailing_zeros() as u8;
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));

    put(&[&[0xf7, 0x83], &field(slot::DUTIES), &MEASURE_CALL.to_le_bytes()]); // test dword [..], measure
    let skip = [0x74, 0]; //                  jz 1f
    put(&[&skip]);
    let unmeasured_from = code.len();
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));

    // rax = what it has taken, in nanoseconds: nothing where another CPU's clock is behind.
    put(&[&[0x0f, 0x31]]); //                 rdtsc
    put(&[&[0x48, 0xc1, 0xe2, 32]]); //       shl rdx, 32
    put(&[&[0x48, 0x09, 0xd0]]); //           or rax, rdx
    put(&[&[0x48, 0x2b, 0x83], &field(slot::TIME)]); // sub rax, [rbx+slots+time]
    put(&[&[0x73, 0x02]]); //                 jnc 2f
    put(&[&[0x31, 0xc0]]); //                 xor eax, eax
    put(&[&[0x48, 0xf7, 0x24, 0x25], &scale]); // 2: mul qword [scale]
    put(&[&[0x48, 0x0f, 0xac, 0xd0, 32]]); // shrd rax, rdx, 32
    put(&[&[0x48, 0x0f, 0xba, 0xf0, 63]]); // btr rax, 63

    put(&[&[0x0f, 0xb7, 0xbb], &field(slot::DUTIES)]); // movzx edi, word [rbx+slots+duties]
    put(&[&[0xc1, 0xe7, histogram_shift]]); // shl edi, log2(histogram)
    put(&[&[0xf0, 0x48, 0x01, 0x87], &sum]); // lock add [rdi+histograms+sum], rax
    put(&[&[0x48, 0x83, 0xc8, 1]]); //        or rax, 1
    put(&[&[0x48, 0x0f, 0xbd, 0xc0]]); //     bsr rax, rax
    put(&[&[0xf0, 0x48, 0xff, 0x84, 0xc7], &histograms]); // lock inc qword [rdi+rax*8+histograms]
    let unmeasured = code.len() - unmeasured_from;
    debug_assert!(unmeasured < 0x80, "a short jump reaches so far");
    code[unmeasured_from - 1] = unmeasured as u8; // 1:
    Ok(())
}
