//! The code that a traced aarch64 function calls: it writes one ring record and returns.
//!
//! A site's pad becomes `bl` to this code, so `x30` holds the address behind the pad and `x9`, by the
//! instruction in front of it, that of the caller. `x16` and `x17` are free at a function's entry, as
//! a veneer between it and its caller may use them. All others are kept on the stack; no instruction
//! here touches the flags.
//!
//! * The CPU's number is read from the current task, which `SP_EL0` names wherever the kernel runs C
//!   code. The hardware's own number (`MPIDR_EL1`) need not be the kernel's.
//! * A slot is reserved by an exclusive load and store, which every processor has; the single
//!   instruction of newer ones (`ldadd`) would be an undefined one on the others. The ring is this
//!   CPU's own, so hardly anyone interferes.
//! * `isb` keeps the clock from being read before the slot is reserved.
//! * What is told of the task is read from the current task: its number, which `DAIF`, shifted, joins in
//!   bits that the number leaves free, and the count, whose upper half is 0 if the task is to leave the
//!   CPU, and becomes bit 31 of the lower.
//! * The sequence number is stored with release semantics: this processor keeps stores in no order.
//! * It returns by `ret` with a register, which is no branch that needs a landing pad (BTI), and
//!   which the return stack of the processor expects after a `bl`.

use super::arguments;
use super::pads::encode_jump;
use crate::addr::Gva;
use crate::arch::{Logger, OutOfReach, PidPlace, TaskPlaces, Then};
use crate::region::{HEADER_BYTES, RECORD_BYTES};

/// How far `adrp` reaches, in bytes.
const PAGE_REACH: u64 = 4 << 30;

/// What `adrp` counts in, whatever the size of a page is.
const PAGE: u64 = 1 << 12;

/// `sp` or the zero register, by instruction.
pub(super) const R31: u32 = 31;

/// The code, to be placed at `at`.
///
/// # Errors
/// The rings are not within 4 GiB of `at` or do not begin on a page, or the field that holds the CPU's
/// number, or one that is recorded of the task, is not within 16 KiB of the current task's beginning.
pub(super) fn assemble(logger: &Logger, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    let rings = &logger.rings;
    let number = scaled(logger.cpu_number, 4)?;
    let shift = |factor: u64| factor.trailing_zeros();
    let here = |words: &Vec<u32>| at + 4 * words.len() as u64;

    let mut words = Vec::with_capacity(48);
    words.push(0xa9be_0000 | pair(10, R31, 11)); //     stp x10, x11, [sp, #-32]!
    words.push(0xf900_0be0 | 12); //                    str x12, [sp, #16]

    // Reserve: x16 = CPU, x10 = index of the record in that CPU's ring, x11 = the one behind.
    words.push(0xd538_4100 | 16); //                    mrs x16, sp_el0
    words.push(0xb940_0000 | number << 10 | 16 << 5 | 16); // ldr w16, [x16, #number]
    words.push(page_address(here(&words), rings.headers(), 17)?); // adrp x17, headers
    words.push(add_shifted(17, 17, 16, shift(HEADER_BYTES))); // add x17, x17, x16, lsl #header
    words.push(0xc85f_7c00 | 17 << 5 | 10); //          ldxr x10, [x17]
    let slots = 1 + logger.arguments.slots() as u32;
    words.push(0x9100_0000 | slots << 10 | 10 << 5 | 11); // add x11, x10, #slots
    words.push(0xc800_7c00 | 12 << 16 | 17 << 5 | 11); // stxr w12, x11, [x17]
    words.push(0x35ff_ffa0 | 12); //                    cbnz w12, three instructions back
    if slots > 1 {
        arguments::count(&mut words, logger.arguments);
    }

    // x17 = the slot.
    words.push(page_address(here(&words), rings.slots(), 17)?); // adrp x17, slots
    words.push(add_shifted(17, 17, 16, rings.ring_shift().into())); // add x17, x17, x16, lsl #ring
    arguments::store(&mut words, logger.arguments, rings);
    let index_bits = rings.index_mask().count_ones();
    words.push(0x9240_0000 | (index_bits - 1) << 10 | 10 << 5 | 10); // and x10, x10, #slots - 1
    words.push(add_shifted(17, 17, 10, shift(RECORD_BYTES))); // add x17, x17, x10, lsl #record

    if logger.clock {
        words.push(0xd503_3fdf); //                     isb
        words.push(0xd53b_e040 | 16); //                mrs x16, cntvct_el0
    } else {
        words.push(0xaa1f_03e0 | 16); //                mov x16, xzr
    }
    words.push(0xf900_0000 | 17 << 5 | 16); //          str x16, [x17]            time
    words.push(0x2901_0000 | pair(30, 17, 9)); //       stp w30, w9, [x17, #8]    function, caller
    words.push(0xd360_fc00 | 9 << 5 | 16); //           lsr x16, x9, #32
    words.push(0xb900_1000 | 17 << 5 | 16); //          str w16, [x17, #16]       caller, high half

    end_record(&mut words, &logger.task, 17, 12)?;

    words.push(0xf940_0be0 | 12); //                    ldr x12, [sp, #16]
    words.push(0xa8c2_0000 | pair(10, R31, 11)); //     ldp x10, x11, [sp], #32
    append_then(&mut words, at, logger.then)?;
    Ok(words.into_iter().flat_map(u32::to_le_bytes).collect())
}

/// Appends what stores the rest of the record at `record`: what is known of the task, and last the sequence
/// number, which is in `w11`. `record`, `x10`, `x16` and `scratch` are lost.
///
/// # Errors
/// What is recorded of the task is not within 16 KiB of the current task's beginning.
pub(super) fn end_record(
    words: &mut Vec<u32>,
    task: &TaskPlaces,
    record: u32,
    scratch: u32,
) -> Result<(), OutOfReach> {
    let pid = match task.pid {
        Some(PidPlace::InTask { pid, .. }) => Some(scaled(pid, 4)?),
        Some(PidPlace::Fixed(_)) | None => None,
    };
    let count = task.preempt_count.map(|count| scaled(count, 8)).transpose()?;
    // w10 = the task's number and the mask of interrupts, scratch = the count.
    words.push(0xd538_4100 | 16); //                    mrs x16, sp_el0
    match pid {
        Some(pid) => words.push(0xb940_0000 | pid << 10 | 16 << 5 | 10), // ldr w10, [x16, #pid]
        None => words.push(0x2a1f_03e0 | 10),                            //        mov w10, wzr
    }
    words.push(0xd53b_4220 | scratch); //               mrs scratch, daif
    words.push(0x2a00_0000 | scratch << 16 | 24 << 10 | 10 << 5 | 10); // orr w10, w10, scratch, lsl #24
    match count {
        Some(count) => {
            words.push(0xf940_0000 | count << 10 | 16 << 5 | 16); // ldr x16, [x16, #count]
            words.push(0xd360_fc00 | 16 << 5 | scratch); // lsr scratch, x16, #32
            words.push(0x2a00_0000 | scratch << 16 | 31 << 10 | 16 << 5 | scratch); // orr .., lsl #31
        }
        None => words.push(0x2a1f_03e0 | scratch), //   mov scratch, wzr
    }
    words.push(0x2902_8000 | pair(10, record, scratch)); // stp w10, scratch, [record, #20]  task, count
    words.push(0x9100_7000 | record << 5 | record); //  add record, record, #28
    words.push(0x889f_fc00 | record << 5 | 11); //      stlr w11, [record]        sequence
    Ok(())
}

/// Appends to the code `words`, which is for `at`, what leads to what is executed behind it. `x16` is
/// lost.
///
/// # Errors
/// It is not within 128 MiB.
pub(super) fn append_then(words: &mut Vec<u32>, at: Gva, then: Then) -> Result<(), OutOfReach> {
    match then {
        Then::GoOn { behind, .. } => {
            words.push(0x9100_0000 | u32::from(behind) << 10 | 30 << 5 | 16); // add x16, x30, #behind
            words.push(0xaa09_03e0 | 30); //            mov x30, x9
            words.push(0xd65f_0000 | 16 << 5); //       ret x16
        }
        Then::Next(to) => {
            let mut branch = [0; 4];
            branch.copy_from_slice(&encode_jump(at + 4 * words.len() as u64, to)?);
            words.push(u32::from_le_bytes(branch)); //  b to
        }
    }
    Ok(())
}

/// The operands of an instruction that loads or stores the registers `first` and `second` at the
/// address in `base`.
pub(super) fn pair(first: u32, base: u32, second: u32) -> u32 {
    second << 10 | base << 5 | first
}

/// `add to, a, b, lsl #shift`, 64 bits.
pub(super) fn add_shifted(to: u32, a: u32, b: u32, shift: u32) -> u32 {
    0x8b00_0000 | b << 16 | shift << 10 | a << 5 | to
}

/// `adrp register, to` at `from`.
pub(super) fn page_address(from: Gva, to: Gva, register: u32) -> Result<u32, OutOfReach> {
    let pages = (to.0 / PAGE).wrapping_sub(from.0 / PAGE).cast_signed();
    // Pages of the highest and the lowest addresses are 2⁵² apart.
    let pages = pages << 12 >> 12;
    if !to.0.is_multiple_of(PAGE) || !(-(1 << 20)..1 << 20).contains(&pages) {
        return Err(OutOfReach { from, to, reach: PAGE_REACH });
    }
    let pages = pages as u32 & 0x1f_ffff;
    Ok(0x9000_0000 | (pages & 3) << 29 | pages >> 2 << 5 | register)
}

/// An offset in the current task as a load of `size` bytes holds it: in units of as many.
pub(super) fn scaled(offset: i32, size: u32) -> Result<u32, OutOfReach> {
    let units = u32::try_from(offset).ok().filter(|offset| offset % size == 0);
    units.map(|offset| offset / size).filter(|units| *units < 1 << 12).ok_or(OutOfReach {
        from: Gva(0),
        to: Gva(i64::from(offset).cast_unsigned()),
        reach: PAGE * u64::from(size),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ArgumentWords;
    use crate::arch::ReturnForm;
    use crate::arch::listing::aarch64 as listing;
    use crate::region::RingLayout;

    const AT: Gva = Gva(0xffff_924e_9fa0_0000);

    fn logger(base: Gva) -> Logger {
        Logger {
            cpu_number: 0x10,
            rings: RingLayout::new(base, 0x400_0000 + (2 << 20), 2).unwrap(),
            clock: true,
            arguments: ArgumentWords::NONE,
            then: Then::GoOn { behind: 0, form: ReturnForm::Plain },
            task: TaskPlaces {
                pid: Some(PidPlace::InTask { current: 0, pid: 1352 }),
                preempt_count: Some(0x10),
            },
        }
    }

    #[test]
    fn the_code_is_what_its_comments_say() {
        let code = assemble(&logger(AT + (2 << 20)), AT).unwrap();
        assert_eq!(
            listing(&code, AT),
            [
                "stp x10, x11, [sp, #-0x20]!",
                "str x12, [sp, #0x10]",
                "mrs x16, sp_el0",
                "ldr w16, [x16, #0x10]",
                "adrp x17, #0xffff924e9fc00000",
                "add x17, x17, x16, lsl #7",
                "ldxr x10, [x17]",
                "add x11, x10, #1",
                "stxr w12, x11, [x17]",
                "cbnz w12, #0xffff924e9fa00018",
                "adrp x17, #0xffff924e9fc10000",
                "add x17, x17, x16, lsl #25",
                "and x10, x10, #0xfffff",
                "add x17, x17, x10, lsl #5",
                "isb",
                "mrs x16, cntvct_el0",
                "str x16, [x17]",
                "stp w30, w9, [x17, #8]",
                "lsr x16, x9, #0x20",
                "str w16, [x17, #0x10]",
                "mrs x16, sp_el0",
                "ldr w10, [x16, #0x548]",
                "mrs x12, daif",
                "orr w10, w10, w12, lsl #24",
                "ldr x16, [x16, #0x10]",
                "lsr x12, x16, #0x20",
                "orr w12, w16, w12, lsl #31",
                "stp w10, w12, [x17, #0x14]",
                "add x17, x17, #0x1c",
                "stlr w11, [x17]",
                "ldr x12, [sp, #0x10]",
                "ldp x10, x11, [sp], #0x20",
                "add x16, x30, #0",
                "mov x30, x9",
                "ret x16",
            ]
        );
    }

    #[test]
    fn without_a_clock_the_time_is_zero() {
        let mut logger = logger(AT + (2 << 20));
        logger.clock = false;
        let listing = listing(&assemble(&logger, AT).unwrap(), AT);
        assert!(listing.contains(&"mov x16, xzr".to_owned()), "{listing:?}");
        assert!(!listing.iter().any(|line| line.starts_with("mrs x16, cnt")), "{listing:?}");
    }

    #[test]
    fn what_is_not_known_of_tasks_is_recorded_as_zero() {
        let logger = Logger { task: TaskPlaces::default(), ..logger(AT + (2 << 20)) };
        let listing = listing(&assemble(&logger, AT).unwrap(), AT);
        for zero in ["mov w10, wzr", "mov w12, wzr"] {
            assert!(listing.contains(&zero.to_owned()), "{listing:?}");
        }
    }

    #[test]
    fn another_piece_of_code_is_entered_as_this_one_was() {
        let then = Then::Next(AT + 0x1000);
        let code = assemble(&Logger { then, ..logger(AT + (2 << 20)) }, AT).unwrap();
        let listing = listing(&code, AT);
        let next = format!("b #{:#x}", AT.0 + 0x1000);
        assert_eq!(listing[listing.len() - 2..], ["ldp x10, x11, [sp], #0x20".into(), next]);
        let then = Then::Next(AT + (129 << 20));
        assert!(assemble(&Logger { then, ..logger(AT + (2 << 20)) }, AT).is_err());
    }

    #[test]
    fn rings_on_either_side_are_named() {
        for base in [AT - (3 << 20), AT + (3 << 30), AT - (3 << 30)] {
            let listing = listing(&assemble(&logger(base), AT).unwrap(), AT);
            assert_eq!(listing[4], format!("adrp x17, #{:#x}", base.0));
        }
    }

    #[test]
    fn what_no_instruction_can_reach_is_refused() {
        for far in [AT + (4 << 30), AT - (5 << 30), AT + 0x800] {
            assert_eq!(assemble(&logger(far), AT).unwrap_err().to, far);
        }
        for cpu_number in [-4, 2, 1 << 14] {
            let logger = Logger { cpu_number, ..logger(AT + (2 << 20)) };
            assert!(assemble(&logger, AT).is_err(), "{cpu_number}");
        }
        for count in [-8, 4, 1 << 15] {
            let task = TaskPlaces { preempt_count: Some(count), ..TaskPlaces::default() };
            let logger = Logger { task, ..logger(AT + (2 << 20)) };
            assert!(assemble(&logger, AT).is_err(), "{count}");
        }
    }
}
