//! The code that a traced s390x function calls: it writes one ring record and returns.
//!
//! A site's pad becomes `brasl %r0` to this code, so `%r0` holds the address behind the pad and
//! `%r14` still that of the caller. `%r0`, `%r1` and the condition code are free at a function's
//! entry (the guest's own ftrace changes them too); `%r2` to `%r4` are kept in the register save
//! area that every caller provides. As on other architectures the slot is reserved first, then the
//! clock is read, and the sequence number is stored last: this processor keeps stores in order.
//!
//! The byte that says whether interrupts are on is stored by `stosm` into the record itself, as the first
//! one of the task's number, which is always zero. It changes nothing: no bit is turned on.
//!
//! It goes back by `br`, as the guest's functions return, or from an expoline where they do.
//!
//! The slot is reserved by compare-and-swap, which every processor has; interlocked addition needs a
//! facility that the oldest ones lack, and would not be told of by any kernel's symbols.

use super::arguments;
use super::pads::halfwords;
use crate::addr::Gva;
use crate::arch::{Logger, OutOfReach, PidPlace, ReturnForm, TaskPlaces, Then};
use crate::region::{HEADER_BYTES, RECORD_BYTES, RingLayout};

/// The code, to be placed at `at`.
///
/// # Errors
/// The rings or the next piece of code are not within 4 GiB of `at`, or the CPU's number and what is recorded of the task are not
/// within 512 KiB of address 0.
pub(super) fn assemble(logger: &Logger, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    if logger.arguments.slots() > 0 {
        return arguments::assemble(logger, at);
    }
    let rings = &logger.rings;
    let mut code = Vec::with_capacity(128);
    code.extend([0xeb, 0x24, 0xf0, 0x10, 0x00, 0x24]); // stmg %r2,%r4,16(%r15)

    begin_record(&mut code, at, (logger.cpu_number, rings, logger.clock), 3)?;
    code.extend([0x50, 0x00, 0x10, 0x08]); //             st %r0,8(%r1)         function
    code.extend([0x50, 0xe0, 0x10, 0x0c]); //             st %r14,12(%r1)       caller, low half
    code.extend([0xeb, 0x2e, 0x00, 0x20, 0x00, 0x0c]); // srlg %r2,%r14,32
    code.extend([0x50, 0x20, 0x10, 0x10]); //             st %r2,16(%r1)        caller, high half
    end_record(&mut code, &logger.task, 3)?;

    code.extend([0xeb, 0x24, 0xf0, 0x10, 0x00, 0x04]); // lmg %r2,%r4,16(%r15)
    append_then(&mut code, at, logger.then)?;
    Ok(code)
}

/// Appends what reserves a record in the ring of the CPU that runs it, and stores the time in it if `clock`
/// says so: `%r1` is the record's place then, `index` its index and the register behind that one more;
/// `%r2` is lost.
///
/// # Errors
/// The rings are not within 4 GiB of `at`, or the CPU's number not within 512 KiB of address 0.
pub(super) fn begin_record(
    code: &mut Vec<u8>,
    at: Gva,
    (cpu_number, rings, clock): (i32, &RingLayout, bool),
    index: u8,
) -> Result<(), OutOfReach> {
    let shift = |factor: u64| factor.trailing_zeros() as u8;
    let next = index + 1;

    // Reserve: %r2 = CPU.
    load(code, cpu_number)?; //                           llgf %r2,cpu_nr
    load_address(code, at, rings.headers())?; //          larl %r1,headers
    code.extend([0xeb, index << 4 | 2, 0x00, shift(HEADER_BYTES), 0x00, 0x0d]); // sllg index,%r2,log2(header)
    code.extend([0xb9, 0x08, 0x00, 0x10 | index]); //     agr %r1,index
    code.extend([0xe3, index << 4, 0x10, 0x00, 0x00, 0x04]); // lg index,0(%r1)
    code.extend([0x41, next << 4, index << 4, 0x01]); //  1: la next,1(index)
    code.extend([0xeb, index << 4 | next, 0x10, 0x00, 0x00, 0x30]); // csg index,next,0(%r1)
    code.extend([0xa7, 0x44, 0xff, 0xfb]); //             jl 1b

    // %r1 = the record's place.
    load_address(code, at, rings.slots())?; //            larl %r1,slots
    code.extend([0xeb, 0x22, 0x00, rings.ring_shift(), 0x00, 0x0d]); // sllg %r2,%r2,log2(ring)
    code.extend([0xb9, 0x08, 0x00, 0x12]); //             agr %r1,%r2
    code.extend([0xb9, 0x16, 0x00, index << 4 | index]); // llgfr index,index
    code.extend([0xc0, index << 4 | 0xb]);
    code.extend(rings.index_mask().to_be_bytes()); //     nilf index,slots - 1
    code.extend([0xeb, index << 4 | index, 0x00, shift(RECORD_BYTES), 0x00, 0x0d]); // sllg index,index,log2(record)
    code.extend([0xb9, 0x08, 0x00, 0x10 | index]); //     agr %r1,index

    if clock {
        code.extend([0xb2, 0x7c, 0x10, 0x00]); //         stckf 0(%r1)
    } else {
        code.extend([0xe5, 0x48, 0x10, 0x00, 0x00, 0x00]); // mvghi 0(%r1),0
    }
    Ok(())
}

/// Appends what stores the rest of a record that was begun so: what is known of the task, and last the
/// sequence number. `%r2` is lost.
///
/// # Errors
/// What is recorded of the task is not within 512 KiB of address 0.
pub(super) fn end_record(
    code: &mut Vec<u8>,
    task: &TaskPlaces,
    index: u8,
) -> Result<(), OutOfReach> {
    let pid = match task.pid {
        Some(PidPlace::Fixed(pid)) => Some(pid),
        Some(PidPlace::InTask { .. }) | None => None,
    };
    for (place, at) in [(pid, 0x14), (task.preempt_count, 0x18)] {
        match place {
            Some(place) => load(code, place)?, //         llgf %r2,current_pid or preempt_count
            None => code.extend([0xa7, 0x29, 0x00, 0x00]), // lghi %r2,0
        }
        code.extend([0x50, 0x20, 0x10, at]); //           st %r2,20(%r1) or 24  task, count
    }
    code.extend([0xad, 0x00, 0x10, 0x14]); //             stosm 20(%r1),0       system mask
    code.extend([0x50, (index + 1) << 4, 0x10, 0x1c]); // st next,28(%r1)       sequence
    Ok(())
}

/// Appends to `code`, which is for `at`, what leads to what is executed behind it. `%r1` is lost.
///
/// # Errors
/// It is not within 4 GiB.
pub(super) fn append_then(code: &mut Vec<u8>, at: Gva, then: Then) -> Result<(), OutOfReach> {
    let (behind, form) = match then {
        Then::GoOn { behind, form } => (behind, form),
        Then::Next(to) => {
            let displacement = halfwords(at + code.len() as u64, to)?;
            code.extend([0xc0, 0xf4]); //                 jg to
            code.extend(displacement);
            return Ok(());
        }
    };
    code.extend([0xb9, 0x04, 0x00, 0x10]); //             lgr %r1,%r0: `br %r0` branches nowhere
    if behind != 0 {
        let [high, low] = behind.to_be_bytes();
        debug_assert!(high < 16, "a displacement has twelve bits");
        code.extend([0x41, 0x10, 0x10 | high, low]); //   la %r1,behind(%r1)
    }
    if let ReturnForm::Thunk(_) = form {
        // What the guest's thunks do; theirs for %r1 need not be where its functions' for %r14 is.
        code.extend([0xc6, 0x00, 0x00, 0x00, 0x00, 0x05]); // exrl %r0,1f
        code.extend([0xa7, 0xf4, 0x00, 0x00]); //         j .
    }
    code.extend([0x07, 0xf1]); //                      1: br %r1
    Ok(())
}

/// Appends `larl %r1,to`.
pub(super) fn load_address(code: &mut Vec<u8>, at: Gva, to: Gva) -> Result<(), OutOfReach> {
    let displacement = halfwords(at + code.len() as u64, to)?;
    code.extend([0xc0, 0x10]);
    code.extend(displacement);
    Ok(())
}

/// Appends `llgf %r2,address`.
pub(super) fn load(code: &mut Vec<u8>, address: i32) -> Result<(), OutOfReach> {
    let [low, high] = displacement(address)?;
    code.extend([0xe3, 0x20]);
    code.extend(low.to_be_bytes());
    code.extend([high as u8, 0x16]);
    Ok(())
}

/// A signed 20-bit displacement as an instruction holds it: its low 12 bits, then its high 8.
///
/// # Errors
/// It has more bits.
pub(super) fn displacement(value: i32) -> Result<[u16; 2], OutOfReach> {
    let high = i8::try_from(value >> 12).map_err(|_| OutOfReach {
        from: Gva(0),
        to: Gva(i64::from(value).cast_unsigned()),
        reach: 1 << 19,
    })?;
    Ok([(value & 0xfff) as u16, high.cast_unsigned().into()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ArgumentWords;
    use crate::arch::listing::s390x as listing;

    const AT: Gva = Gva(0x3ff_fa8f_8000);

    fn logger(base: Gva) -> Logger {
        Logger {
            cpu_number: 0x3a0,
            rings: RingLayout::new(base, 0x400_0000 + (2 << 20), 2).unwrap(),
            clock: true,
            arguments: ArgumentWords::NONE,
            then: Then::GoOn { behind: 0, form: ReturnForm::Plain },
            task: TaskPlaces { pid: Some(PidPlace::Fixed(0x39c)), preempt_count: Some(0x3a8) },
        }
    }

    #[test]
    fn the_code_is_what_its_comments_say() {
        let base = AT + (2 << 20);
        let code = assemble(&logger(base), AT).unwrap();
        assert_eq!(
            listing(&code, AT),
            [
                "stmg %r2, %r4, 0x10(%r15)",
                "llgf %r2, 0x3a0",
                "larl %r1, 0x3fffaaf8000",
                "sllg %r3, %r2, 7",
                "agr %r1, %r3",
                "lg %r3, 0(%r1)",
                "la %r4, 1(%r3)",
                "csg %r3, %r4, 0(%r1)",
                "jl 0x3fffa8f8022",
                "larl %r1, 0x3fffab08000",
                "sllg %r2, %r2, 0x19",
                "agr %r1, %r2",
                "llgfr %r3, %r3",
                "nilf %r3, 0xfffff",
                "sllg %r3, %r3, 5",
                "agr %r1, %r3",
                "stckf 0(%r1)",
                "st %r0, 8(%r1)",
                "st %r14, 0xc(%r1)",
                "srlg %r2, %r14, 0x20",
                "st %r2, 0x10(%r1)",
                "llgf %r2, 0x39c",
                "st %r2, 0x14(%r1)",
                "llgf %r2, 0x3a8",
                "st %r2, 0x18(%r1)",
                "stosm 0x14(%r1), 0",
                "st %r4, 0x1c(%r1)",
                "lmg %r2, %r4, 0x10(%r15)",
                "lgr %r1, %r0",
                "br %r1",
            ]
        );
    }

    #[test]
    fn without_a_clock_the_time_is_zero() {
        let mut logger = logger(AT + (2 << 20));
        logger.clock = false;
        let code = assemble(&logger, AT).unwrap();
        assert!(listing(&code, AT).contains(&"mvghi 0(%r1), 0".to_owned()));
    }

    #[test]
    fn what_is_not_known_of_tasks_is_recorded_as_zero() {
        let logger = Logger { task: TaskPlaces::default(), ..logger(AT + (2 << 20)) };
        let listing = listing(&assemble(&logger, AT).unwrap(), AT);
        assert_eq!(listing.iter().filter(|line| *line == "lghi %r2, 0").count(), 2, "{listing:?}");
        assert_eq!(listing.iter().filter(|line| line.starts_with("llgf %r2")).count(), 1);
    }

    #[test]
    fn a_function_goes_on_behind_its_block() {
        let then = Then::GoOn { behind: 18, form: ReturnForm::Plain };
        let logger = Logger { then, ..logger(AT + (2 << 20)) };
        let code = assemble(&logger, AT).unwrap();
        let listing = listing(&code, AT);
        assert_eq!(listing[listing.len() - 2..], ["la %r1, 0x12(%r1)", "br %r1"]);
    }

    #[test]
    fn another_piece_of_code_is_entered_as_this_one_was() {
        let then = Then::Next(AT + 0x1000);
        let code = assemble(&Logger { then, ..logger(AT + (2 << 20)) }, AT).unwrap();
        let listing = listing(&code, AT);
        let next = format!("jg {:#x}", AT.0 + 0x1000);
        assert_eq!(listing[listing.len() - 2..], ["lmg %r2, %r4, 0x10(%r15)".into(), next]);
    }

    #[test]
    fn where_functions_return_through_thunks_the_last_branch_is_executed_from_elsewhere() {
        let then = Then::GoOn { behind: 0, form: ReturnForm::Thunk(Gva(0x10_0000)) };
        let code = assemble(&Logger { then, ..logger(AT + (2 << 20)) }, AT).unwrap();
        let listing = listing(&code, AT);
        let [.., execute, trap, branch] = listing.as_slice() else { panic!("{listing:?}") };
        let end = AT.0 + code.len() as u64;
        assert_eq!(*execute, format!("exrl %r0, {:#x}", end - 2));
        assert_eq!(*trap, format!("j {:#x}", end - 6));
        assert_eq!(branch, "br %r1");
    }

    #[test]
    fn what_no_instruction_can_reach_is_refused() {
        let far = AT + (8 << 30);
        assert_eq!(assemble(&logger(far), AT).unwrap_err().to, far);
        let number = Logger { cpu_number: 1 << 20, ..logger(AT + (2 << 20)) };
        assert_eq!(assemble(&number, AT).unwrap_err().to, Gva(1 << 20));
    }
}
