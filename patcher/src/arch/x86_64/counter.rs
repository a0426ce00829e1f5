//! The code that counts the calls of an x86_64 function, and the thunks that lead there.
//!
//! A thunk pushes the address of its function's counter and jumps to the end of its block, where a jump
//! leads to the code that counts for all of them. That increments the counter by one locked instruction,
//! so that no count is lost to another CPU, an interrupt or a task that is moved in between, and takes
//! the address off the stack.

use super::trampoline::append_then;
use crate::addr::Gva;
use crate::arch::{OutOfReach, Then, ThunkShape, Thunks};
use crate::region::THUNK_BLOCK_BYTES;

/// `push imm32` and `jmp rel8`.
const THUNK_BYTES: u8 = 7;
const IN_BLOCK: u8 = 17;

/// Where the jump is that all thunks of a block end in.
const EXIT: u8 = THUNK_BYTES * IN_BLOCK;

pub(super) const SHAPE: ThunkShape =
    ThunkShape { bytes: THUNK_BYTES as u64, in_block: IN_BLOCK as u32 };

/// The code that counts, to be placed at `at`.
///
/// # Errors
/// What is executed behind it is not within 2 GiB of `at`.
pub(super) fn assemble(at: Gva, then: Then) -> Result<Vec<u8>, OutOfReach> {
    let mut code = Vec::with_capacity(40);
    for part in [
        &[0x50][..],                     // push rax
        &[0x9f],                         // lahf                   SF ZF AF PF CF
        &[0x0f, 0x90, 0xc0],             // seto al
        &[0x51],                         // push rcx
        &[0x48, 0x8b, 0x4c, 0x24, 0x10], // mov rcx, [rsp+16]      the counter
        &[0xf0, 0x48, 0xff, 0x01],       // lock inc qword [rcx]
        &[0x59],                         // pop rcx
        &[0x04, 0x7f], // add al, 0x7f           overflows if al is 1: OF as it was
        &[0x9e],       // sahf                   the others as they were
        &[0x58],       // pop rax
        &[0x48, 0x8d, 0x64, 0x24, 0x08], // lea rsp, [rsp+8]
    ] {
        code.extend_from_slice(part);
    }
    append_then(&mut code, at, then)?;
    Ok(code)
}

/// A block of thunks, to be placed at `at`.
///
/// # Errors
/// The counters are not within the lowest or highest 2 GiB of the address space, which is what can be
/// pushed, or the code that counts is not within 2 GiB of `at`.
pub(super) fn assemble_thunks(
    at: Gva,
    thunks: &Thunks,
) -> Result<[u8; THUNK_BLOCK_BYTES as usize], OutOfReach> {
    let reach = 1 << 31;
    let mut block = [0xcc; THUNK_BLOCK_BYTES as usize];
    for index in 0..IN_BLOCK {
        let counter = thunks.counters.at(thunks.first + u32::from(index) * thunks.stride);
        let pushed = i32::try_from(counter.0.cast_signed()).map_err(|_| OutOfReach {
            from: at,
            to: counter,
            reach,
        })?;
        let end = THUNK_BYTES * (index + 1);
        let [from, jump] = [usize::from(end - THUNK_BYTES), usize::from(end) - 2];
        block[from] = 0x68; // push counter
        block[from + 1..jump].copy_from_slice(&pushed.to_le_bytes());
        block[jump..usize::from(end)].copy_from_slice(&[0xeb, EXIT - end]); // jmp the block's end
    }
    let exit = usize::from(EXIT);
    let behind = at + exit as u64 + 5;
    let distance = i32::try_from(thunks.to.0.wrapping_sub(behind.0).cast_signed())
        .map_err(|_| OutOfReach { from: at, to: thunks.to, reach })?;
    block[exit] = 0xe9; // jmp the code that counts
    block[exit + 1..exit + 5].copy_from_slice(&distance.to_le_bytes());
    Ok(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ReturnForm;
    use crate::arch::listing::x86_64 as listing;
    use crate::region::Counters;

    const AT: Gva = Gva(0xffff_ffff_be00_0000);

    #[test]
    fn the_code_is_what_its_comments_say() {
        let code = assemble(AT, Then::GoOn { behind: 0, form: ReturnForm::Plain }).unwrap();
        assert_eq!(
            listing(&code, AT),
            [
                "push rax",
                "lahf",
                "seto al",
                "push rcx",
                "mov rcx, qword ptr [rsp + 0x10]",
                "lock inc qword ptr [rcx]",
                "pop rcx",
                "add al, 0x7f",
                "sahf",
                "pop rax",
                "lea rsp, [rsp + 8]",
                "ret",
                "int3",
            ]
        );
    }

    #[test]
    fn each_thunk_pushes_its_own_counter_and_all_lead_to_the_same_code() {
        let counter = AT + 0x1000;
        let thunks =
            Thunks { counters: Counters(AT + (2 << 20)), first: 34, stride: 1, to: counter };
        let block = assemble_thunks(AT, &thunks).unwrap();
        let listing = listing(&block, AT);
        let (counters, exit) = (AT.0 + (2 << 20) + 34 * 8, AT.0 + u64::from(EXIT));
        for index in 0..usize::from(IN_BLOCK) {
            let pushed = counters as i64 + 8 * index as i64;
            assert_eq!(listing[2 * index], format!("push -{:#x}", -pushed));
            assert_eq!(listing[2 * index + 1], format!("jmp {exit:#x}"));
        }
        assert_eq!(listing[34], format!("jmp {:#x}", counter.0));
        assert!(listing[35..].iter().all(|line| line == "int3"), "{listing:?}");
    }

    #[test]
    fn counters_that_can_not_be_pushed_are_refused() {
        let far = Gva(0xffff_8880_0000_0000);
        let thunks = Thunks { counters: Counters(far), first: 0, stride: 1, to: AT };
        assert_eq!(assemble_thunks(AT, &thunks).unwrap_err().to, far);
        let thunks = Thunks { counters: Counters(AT), first: 0, stride: 1, to: far };
        assert_eq!(assemble_thunks(AT, &thunks).unwrap_err().to, far);
    }
}
