//! The code that takes the return of an s390x function: a piece in front of it, and what it returns to.
//!
//! The piece takes a slot and puts the address of the slot's stub into `%r14`. The stub branches to the code
//! behind all stubs with an address of its own in `%r1`, which is how that learns which slot it is; it
//! records, gives the slot back, and returns by `%r14` to where the function would have.
//!
//! Neither takes a lock. Either may be interrupted at every instruction, by calls whose returns are taken,
//! too: a list's head changes by one compare-and-swap that notices any change since it was read, and a task
//! that is moved to another CPU before that changes the list of the CPU that it has left.
//!
//! `%r0`, `%r1` and the condition code are free at a function's entry, and `%r1`, `%r14` and the condition
//! code behind its return; all else is kept in the register save area that the caller provides for the
//! function, which at either moment nobody uses.

use super::measure;
use super::pads::halfwords;
use super::trampoline::{append_then, begin_record, end_record, load, load_address};
use crate::addr::Gva;
use crate::arch::{OutOfReach, ReturnExit, ReturnForm, ReturnHook};
use crate::region::{FREE_LIST_BYTES, RETURN_SLOT_BYTES, RETURN_STUB_BYTES, slot};

/// Bytes of the branch in a stub.
const BRANCH_BYTES: u64 = 6;

const fn shift(factor: u64) -> u8 {
    factor.trailing_zeros() as u8
}

/// The piece in front of the function, to be placed at `at`.
///
/// # Errors
/// The pool or what is executed behind the piece is not within 4 GiB of `at`, or the CPU's number not within
/// 512 KiB of address 0.
pub(super) fn assemble_hook(hook: &ReturnHook, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    let pool = &hook.pool;
    // Slots are counted from 1.
    let slots = pool.slots() - RETURN_SLOT_BYTES;
    let mut code = Vec::with_capacity(192);
    code.extend([0xeb, 0x25, 0xf0, 0x10, 0x00, 0x24]); // stmg %r2,%r5,16(%r15)

    // A slot of this CPU's list, or else of the one for all: %r3 = its address.
    load(&mut code, hook.cpu_number)?; //                 llgf %r2,cpu_nr
    code.extend([0xeb, 0x52, 0x00, shift(FREE_LIST_BYTES), 0x00, 0x0d]); // sllg %r5,%r2,log2(list)
    load_address(&mut code, at, pool.lists())?; //        larl %r1,lists
    code.extend([0x41, 0x55, 0x10, FREE_LIST_BYTES as u8]); // la %r5,list(%r5,%r1)
    code.extend([0xe3, 0x20, 0x50, 0x00, 0x00, 0x04]); // 1: lg %r2,0(%r5)
    code.extend([0xb9, 0x12, 0x00, 0x32]); //          2: ltgfr %r3,%r2
    code.extend([0xa7, 0x84, 0x00, 0x1e]); //             jz 3f
    code.extend([0xeb, 0x33, 0x00, shift(RETURN_SLOT_BYTES), 0x00, 0x0d]); // sllg %r3,%r3,log2(slot)
    load_address(&mut code, at, slots)?; //               larl %r1,slots
    code.extend([0xb9, 0x08, 0x00, 0x31]); //             agr %r3,%r1
    code.extend([0xe3, 0x40, 0x30, slot::NEXT, 0x00, 0x16]); // llgf %r4,next(%r3)
    code.extend([0xeb, 0x12, 0x00, 32, 0x00, 0x0c]); //   srlg %r1,%r2,32
    code.extend([0xa7, 0x1b, 0x00, 0x01]); //             aghi %r1,1
    code.extend([0xeb, 0x11, 0x00, 32, 0x00, 0x0d]); //   sllg %r1,%r1,32
    code.extend([0xb9, 0x81, 0x00, 0x41]); //             ogr %r4,%r1
    code.extend([0xeb, 0x24, 0x50, 0x00, 0x00, 0x30]); // csg %r2,%r4,0(%r5)
    code.extend([0xa7, 0x44, 0xff, 0xe4]); //             jl 2b
    code.extend([0xa7, 0xf4, 0x00, 0x1a]); //             j 4f
    load_address(&mut code, at, pool.lists())?; //     3: larl %r1,lists
    code.extend([0xb9, 0x20, 0x00, 0x51]); //             cgr %r5,%r1
    code.extend([0xb9, 0x04, 0x00, 0x51]); //             lgr %r5,%r1
    code.extend([0xa7, 0x74, 0xff, 0xd6]); //             jne 1b
    load_address(&mut code, at, pool.missed())?; //       larl %r1,missed
    code.extend([0xe3, 0x20, 0x10, 0x00, 0x00, 0x04]); // lg %r2,0(%r1)
    code.extend([0x41, 0x30, 0x20, 0x01]); //          5: la %r3,1(%r2)
    code.extend([0xeb, 0x23, 0x10, 0x00, 0x00, 0x30]); // csg %r2,%r3,0(%r1)
    code.extend([0xa7, 0x44, 0xff, 0xfb]); //             jl 5b
    code.extend([0xa7, 0xf4, 0x00, 0x00]); //             j behind what fills the slot
    let skipped_from = code.len();

    // 4: fill it, and have its stub be returned to.
    code.extend([0xe3, 0xe0, 0x30, slot::RETURN, 0x00, 0x24]); // stg %r14,return(%r3)
    if hook.clock {
        code.extend([0xb2, 0x7c, 0x30, slot::TIME]); //   stckf time(%r3)
    }
    code.extend([0x50, 0x00, 0x30, slot::FUNCTION]); //   st %r0,function(%r3)
    code.extend([0xc0, 0x4f]);
    code.extend(hook.duties.to_be_bytes()); //            llilf %r4,duties
    code.extend([0x50, 0x40, 0x30, slot::DUTIES]); //     st %r4,duties(%r3)
    load_address(&mut code, at, slots)?; //               larl %r1,slots
    code.extend([0xb9, 0x04, 0x00, 0x43]); //             lgr %r4,%r3
    code.extend([0xb9, 0x09, 0x00, 0x41]); //             sgr %r4,%r1
    let to_stub = shift(RETURN_SLOT_BYTES / RETURN_STUB_BYTES);
    code.extend([0xeb, 0x44, 0x00, to_stub, 0x00, 0x0c]); // srlg %r4,%r4,log2(slot/stub)
    load_address(&mut code, at, pool.stubs - RETURN_STUB_BYTES)?; // larl %r1,stubs
    code.extend([0x41, 0xe4, 0x10, 0x00]); //             la %r14,0(%r4,%r1)
    code.extend([0xe5, 0x4c, 0x30, slot::PLACED, 0x00, 0x01]); // mvhi placed(%r3),1
    let skipped = ((code.len() - skipped_from + 4) / 2) as u16;
    code[skipped_from - 2..skipped_from].copy_from_slice(&skipped.to_be_bytes());

    code.extend([0xeb, 0x25, 0xf0, 0x10, 0x00, 0x04]); // lmg %r2,%r5,16(%r15)
    append_then(&mut code, at, hook.then)?;
    Ok(code)
}

/// The code behind all stubs, to be placed at `at`.
///
/// # Errors
/// As [`assemble_hook`]; also for the rings and what is recorded of the task.
pub(super) fn assemble_exit(exit: &ReturnExit, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    let (pool, rings) = (&exit.pool, &exit.rings);
    let from_stub = shift(RETURN_SLOT_BYTES / RETURN_STUB_BYTES);
    let mut code = Vec::with_capacity(256);
    code.extend([0xeb, 0x25, 0xf0, 0x10, 0x00, 0x24]); // stmg %r2,%r5,16(%r15)

    // %r3 = the slot, %r14 = where the function would have returned to.
    code.extend([0xb9, 0x04, 0x00, 0x31]); //             lgr %r3,%r1
    load_address(&mut code, at, pool.stubs + BRANCH_BYTES)?; // larl %r1,first
    code.extend([0xb9, 0x09, 0x00, 0x31]); //             sgr %r3,%r1
    code.extend([0xeb, 0x33, 0x00, from_stub, 0x00, 0x0d]); // sllg %r3,%r3,log2(slot/stub)
    load_address(&mut code, at, pool.slots())?; //        larl %r1,slots
    code.extend([0xb9, 0x08, 0x00, 0x31]); //             agr %r3,%r1
    code.extend([0xe3, 0xe0, 0x30, slot::RETURN, 0x00, 0x04]); // lg %r14,return(%r3)
    measure::append(&mut code, at, exit)?;
    code.extend([0x91, 0x80, 0x30, slot::DUTIES]); //     tm duties(%r3),record
    code.extend([0xa7, 0x84, 0x00, 0x00]); //             jz 1f
    let unrecorded_from = code.len();

    // The record, as for a call: %r1 = its place, %r5 = one more than its index.
    begin_record(&mut code, at, (exit.cpu_number, rings, exit.clock), 4)?;
    code.extend([0x58, 0x20, 0x30, slot::FUNCTION]); //   l %r2,function(%r3)
    code.extend([0xa7, 0x2a, 0x00, 0x01]); //             ahi %r2,1
    code.extend([0x50, 0x20, 0x10, 0x08]); //             st %r2,8(%r1)
    code.extend([0xe3, 0x20, 0xf0, 0x10, 0x00, 0x04]); // lg %r2,16(%r15)
    code.extend([0x50, 0x20, 0x10, 0x0c]); //             st %r2,12(%r1)       value, low half
    code.extend([0xeb, 0x22, 0x00, 32, 0x00, 0x0c]); //   srlg %r2,%r2,32
    code.extend([0x50, 0x20, 0x10, 0x10]); //             st %r2,16(%r1)       value, high half
    end_record(&mut code, &exit.task, 4)?;
    let unrecorded = ((code.len() - unrecorded_from + 4) / 2) as u16;
    code[unrecorded_from - 2..unrecorded_from].copy_from_slice(&unrecorded.to_be_bytes());

    // 1: the slot is free from here on; what it says has been read. %r5 = its number, from 1.
    code.extend([0xe5, 0x4c, 0x30, slot::PLACED, 0x00, 0x00]); // mvhi placed(%r3),0
    load_address(&mut code, at, pool.slots() - RETURN_SLOT_BYTES)?; // larl %r1,slots
    code.extend([0xb9, 0x04, 0x00, 0x53]); //             lgr %r5,%r3
    code.extend([0xb9, 0x09, 0x00, 0x51]); //             sgr %r5,%r1
    code.extend([0xeb, 0x55, 0x00, shift(RETURN_SLOT_BYTES), 0x00, 0x0c]); // srlg %r5,%r5,log2(slot)
    load(&mut code, exit.cpu_number)?; //                 llgf %r2,cpu_nr
    code.extend([0xeb, 0x22, 0x00, shift(FREE_LIST_BYTES), 0x00, 0x0d]); // sllg %r2,%r2,log2(list)
    load_address(&mut code, at, pool.lists())?; //        larl %r1,lists
    code.extend([0x41, 0x12, 0x10, FREE_LIST_BYTES as u8]); // la %r1,list(%r2,%r1)
    code.extend([0xe3, 0x20, 0x10, 0x00, 0x00, 0x04]); // lg %r2,0(%r1)
    code.extend([0x50, 0x20, 0x30, slot::NEXT]); //    3: st %r2,next(%r3)
    code.extend([0xeb, 0x42, 0x00, 32, 0x00, 0x0c]); //   srlg %r4,%r2,32
    code.extend([0xa7, 0x4b, 0x00, 0x01]); //             aghi %r4,1
    code.extend([0xeb, 0x44, 0x00, 32, 0x00, 0x0d]); //   sllg %r4,%r4,32
    code.extend([0xb9, 0x81, 0x00, 0x45]); //             ogr %r4,%r5
    code.extend([0xeb, 0x24, 0x10, 0x00, 0x00, 0x30]); // csg %r2,%r4,0(%r1)
    code.extend([0xa7, 0x44, 0xff, 0xf1]); //             jl 3b

    code.extend([0xeb, 0x25, 0xf0, 0x10, 0x00, 0x04]); // lmg %r2,%r5,16(%r15)
    if let ReturnForm::Thunk(_) = exit.returns {
        // What the guest's thunks do.
        code.extend([0xc6, 0x00, 0x00, 0x00, 0x00, 0x05]); // exrl %r0,4f
        code.extend([0xa7, 0xf4, 0x00, 0x00]); //         j .
    }
    code.extend([0x07, 0xfe]); //                      4: br %r14
    Ok(code)
}

/// The stub at `at`, which leads to the code at `exit`.
///
/// # Errors
/// That is not within 4 GiB.
pub(super) fn assemble_stub(at: Gva, exit: Gva) -> Result<[u8; 8], OutOfReach> {
    let [a, b, c, d] = halfwords(at, exit)?;
    // brasl %r1,exit; nopr
    Ok([0xc0, 0x15, a, b, c, d, 0x07, 0x00])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::listing::s390x as listing;
    use crate::arch::{PidPlace, TaskPlaces, Then};
    use crate::region::{Histograms, RECORD_RETURN, ReturnPool, RingLayout};

    const AT: Gva = Gva(0x3ff_fa8f_8000);
    const POOL: ReturnPool = ReturnPool { at: Gva(0x3ff_faa0_0000), stubs: Gva(0x3ff_fa90_0000) };

    #[test]
    fn the_code_is_what_its_comments_say() {
        let then = Then::GoOn { behind: 0, form: ReturnForm::Plain };
        let hook =
            ReturnHook { cpu_number: 0x3a0, pool: POOL, clock: true, duties: RECORD_RETURN, then };
        assert_eq!(
            listing(&assemble_hook(&hook, AT).unwrap(), AT),
            [
                "stmg %r2, %r5, 0x10(%r15)",
                "llgf %r2, 0x3a0",
                "sllg %r5, %r2, 6",
                "larl %r1, 0x3fffaa01000",
                "la %r5, 0x40(%r5, %r1)",
                "lg %r2, 0(%r5)",
                "ltgfr %r3, %r2",
                "je 0x3fffa8f8062",
                "sllg %r3, %r3, 5",
                "larl %r1, 0x3fffaa09fe0",
                "agr %r3, %r1",
                "llgf %r4, 0x18(%r3)",
                "srlg %r1, %r2, 0x20",
                "aghi %r1, 1",
                "sllg %r1, %r1, 0x20",
                "ogr %r4, %r1",
                "csg %r2, %r4, 0(%r5)",
                "jl 0x3fffa8f8022",
                "j 0x3fffa8f8092",
                "larl %r1, 0x3fffaa01000",
                "cgr %r5, %r1",
                "lgr %r5, %r1",
                "jne 0x3fffa8f801c",
                "larl %r1, 0x3fffaa00040",
                "lg %r2, 0(%r1)",
                "la %r3, 1(%r2)",
                "csg %r2, %r3, 0(%r1)",
                "jl 0x3fffa8f8080",
                "j 0x3fffa8f80ce",
                "stg %r14, 0(%r3)",
                "stckf 8(%r3)",
                "st %r0, 0x10(%r3)",
                "llilf %r4, 0x80000000",
                "st %r4, 0x14(%r3)",
                "larl %r1, 0x3fffaa09fe0",
                "lgr %r4, %r3",
                "sgr %r4, %r1",
                "srlg %r4, %r4, 2",
                "larl %r1, 0x3fffa8ffff8",
                "la %r14, 0(%r4, %r1)",
                "mvhi 0x1c(%r3), 1",
                "lmg %r2, %r5, 0x10(%r15)",
                "lgr %r1, %r0",
                "br %r1",
            ]
        );
        let exit = ReturnExit {
            cpu_number: 0x3a0,
            rings: RingLayout::new(AT + (4 << 20), 0x400_0000 + (2 << 20), 2).unwrap(),
            clock: true,
            task: TaskPlaces { pid: Some(PidPlace::Fixed(0x39c)), preempt_count: Some(0x3a8) },
            pool: POOL,
            histograms: Histograms(Gva(0x3ff_fa98_0000)),
            returns: ReturnForm::Plain,
        };
        assert_eq!(
            listing(&assemble_exit(&exit, AT).unwrap(), AT),
            [
                "stmg %r2, %r5, 0x10(%r15)",
                "lgr %r3, %r1",
                "larl %r1, 0x3fffa900006",
                "sgr %r3, %r1",
                "sllg %r3, %r3, 2",
                "larl %r1, 0x3fffaa0a000",
                "agr %r3, %r1",
                "lg %r14, 0(%r3)",
                "tm 0x14(%r3), 0x20",
                "je 0x3fffa8f80be",
                "stckf 0x30(%r15)",
                "lg %r5, 0x30(%r15)",
                "slg %r5, 8(%r3)",
                "jnl 0x3fffa8f804a",
                "lghi %r5, 0",
                "larl %r1, 0x3fffa980000",
                "mlg %r4, 0(%r1)",
                "srlg %r5, %r5, 0x20",
                "sllg %r4, %r4, 0x20",
                "ogr %r5, %r4",
                "nihh %r5, 0x7fff",
                "llgh %r2, 0x16(%r3)",
                "sllg %r2, %r2, 9",
                "agr %r1, %r2",
                "lg %r2, 0x1f8(%r1)",
                "lgr %r4, %r2",
                "agr %r4, %r5",
                "csg %r2, %r4, 0x1f8(%r1)",
                "jl 0x3fffa8f8080",
                "oill %r5, 1",
                "flogr %r4, %r5",
                "xilf %r4, 0x3f",
                "sllg %r4, %r4, 3",
                "agr %r1, %r4",
                "lg %r2, 0(%r1)",
                "la %r4, 1(%r2)",
                "csg %r2, %r4, 0(%r1)",
                "jl 0x3fffa8f80b0",
                "tm 0x14(%r3), 0x80",
                "je 0x3fffa8f8154",
                "llgf %r2, 0x3a0",
                "larl %r1, 0x3fffacf8000",
                "sllg %r4, %r2, 7",
                "agr %r1, %r4",
                "lg %r4, 0(%r1)",
                "la %r5, 1(%r4)",
                "csg %r4, %r5, 0(%r1)",
                "jl 0x3fffa8f80e2",
                "larl %r1, 0x3fffad08000",
                "sllg %r2, %r2, 0x19",
                "agr %r1, %r2",
                "llgfr %r4, %r4",
                "nilf %r4, 0xfffff",
                "sllg %r4, %r4, 5",
                "agr %r1, %r4",
                "stckf 0(%r1)",
                "l %r2, 0x10(%r3)",
                "ahi %r2, 1",
                "st %r2, 8(%r1)",
                "lg %r2, 0x10(%r15)",
                "st %r2, 0xc(%r1)",
                "srlg %r2, %r2, 0x20",
                "st %r2, 0x10(%r1)",
                "llgf %r2, 0x39c",
                "st %r2, 0x14(%r1)",
                "llgf %r2, 0x3a8",
                "st %r2, 0x18(%r1)",
                "stosm 0x14(%r1), 0",
                "st %r5, 0x1c(%r1)",
                "mvhi 0x1c(%r3), 0",
                "larl %r1, 0x3fffaa09fe0",
                "lgr %r5, %r3",
                "sgr %r5, %r1",
                "srlg %r5, %r5, 5",
                "llgf %r2, 0x3a0",
                "sllg %r2, %r2, 6",
                "larl %r1, 0x3fffaa01000",
                "la %r1, 0x40(%r2, %r1)",
                "lg %r2, 0(%r1)",
                "st %r2, 0x18(%r3)",
                "srlg %r4, %r2, 0x20",
                "aghi %r4, 1",
                "sllg %r4, %r4, 0x20",
                "ogr %r4, %r5",
                "csg %r2, %r4, 0(%r1)",
                "jl 0x3fffa8f818a",
                "lmg %r2, %r5, 0x10(%r15)",
                "br %r14",
            ]
        );
        let stub = assemble_stub(AT, AT + 0x800).unwrap();
        assert_eq!(listing(&stub, AT)[0], "brasl %r1, 0x3fffa8f8800");
        assert!(assemble_stub(AT, AT + (8 << 30)).is_err());
    }
}
