//! The code that takes the return of an aarch64 function: a piece in front of it, and what it returns to.
//!
//! The piece takes a slot and puts the address of the slot's stub into `x9`, which is what the function
//! returns to and, where it signs that, what it signs. The stub branches to the code behind all stubs with
//! an address of its own in `x30`, which is how that learns which slot it is; it records, gives the slot
//! back, and returns by `x30` to where the function would have.
//!
//! Neither takes a lock. Either may be interrupted at every instruction, by calls whose returns are taken,
//! too: a list's head changes by one exclusive store, if it is still what it was, and every change makes
//! the number in its upper half another one. Nothing but the head is looked at between the exclusive load
//! and the store. A task that is moved to another CPU before that changes the list of the CPU that it has
//! left.
//!
//! `x16` and `x17` are free at a function's entry and behind its return; all else is kept on the stack, and
//! no instruction here touches the flags.

use super::measure;
use super::pads::encode_call;
use super::trampoline::{R31, add_shifted, append_then, end_record, page_address, pair, scaled};
use crate::addr::Gva;
use crate::arch::{OutOfReach, ReturnExit, ReturnHook};
use crate::region::{
    FREE_LIST_BYTES, HEADER_BYTES, RECORD_BYTES, RETURN_SLOT_BYTES, RETURN_STUB_BYTES, slot,
};

/// `add to, from, #value`, 64 bits.
pub(super) fn add(to: u32, from: u32, value: u32) -> u32 {
    0x9100_0000 | value << 10 | from << 5 | to
}

/// `sub to, from, #value`, 64 bits.
fn subtract(to: u32, from: u32, value: u32) -> u32 {
    0xd100_0000 | value << 10 | from << 5 | to
}

/// `ldr register, [base, #field]` or `str`, by `opcode`, of 32 bits.
fn field32(opcode: u32, register: u32, base: u32, field: u8) -> u32 {
    opcode | u32::from(field / 4) << 10 | base << 5 | register
}

/// The same of 64 bits.
pub(super) fn field64(opcode: u32, register: u32, base: u32, field: u8) -> u32 {
    opcode | u32::from(field / 8) << 10 | base << 5 | register
}

const LDR32: u32 = 0xb940_0000;
const STR32: u32 = 0xb900_0000;
pub(super) const LDR64: u32 = 0xf940_0000;
const STR64: u32 = 0xf900_0000;

/// `cbz register, by` (32 or 64 bits, by `opcode`), `by` in instructions.
pub(super) fn if_zero(opcode: u32, register: u32, by: i32) -> u32 {
    opcode | (by as u32 & 0x7_ffff) << 5 | register
}

const CBZ32: u32 = 0x3400_0000;
pub(super) const CBNZ32: u32 = 0x3500_0000;
const CBNZ64: u32 = 0xb500_0000;

/// `tbz register, #bit, by`, `bit` below 32 and `by` in instructions.
pub(super) fn if_bit_is_clear(register: u32, bit: u32, by: i32) -> u32 {
    0x3600_0000 | bit << 19 | (by as u32 & 0x3fff) << 5 | register
}

/// `b by`, in instructions.
fn branch(by: i32) -> u32 {
    0x1400_0000 | by as u32 & 0x3ff_ffff
}

/// How many instructions lead from the one at `from` to the one at `to`.
pub(super) fn distance(from: usize, to: usize) -> i32 {
    to as i32 - from as i32
}

/// Instructions that are put together for an address.
pub(super) struct Code {
    at: Gva,
    words: Vec<u32>,
}

impl Code {
    fn new(at: Gva) -> Self {
        Self { at, words: Vec::with_capacity(80) }
    }

    pub(super) fn put(&mut self, words: impl IntoIterator<Item = u32>) {
        self.words.extend(words);
    }

    /// Where the next instruction is, counted from the first.
    pub(super) fn here(&self) -> usize {
        self.words.len()
    }

    /// Puts `word` in the place of the one at `place`.
    pub(super) fn set(&mut self, place: usize, word: u32) {
        self.words[place] = word;
    }

    /// `register = to`, which lies within 4 KiB behind the beginning of `page`.
    pub(super) fn address(&mut self, register: u32, page: Gva, to: Gva) -> Result<(), OutOfReach> {
        let next = self.at + 4 * self.words.len() as u64;
        self.words.push(page_address(next, page, register)?); // adrp register, page
        let offset = (to.0 - page.0) as u32;
        if offset != 0 {
            self.words.push(add(register, register, offset)); // add register, register, #offset
        }
        Ok(())
    }

    /// `list` = the current CPU's free list, with `number` the place of its number in the task.
    fn own_list(
        &mut self,
        list: u32,
        scratch: u32,
        number: u32,
        lists: Gva,
    ) -> Result<(), OutOfReach> {
        self.put([0xd538_4100 | scratch]); //           mrs scratch, sp_el0
        self.put([LDR32 | number << 10 | scratch << 5 | scratch]); // ldr scratch, [scratch, #number]
        self.address(list, lists, lists)?; //           adrp list, lists
        let shift = FREE_LIST_BYTES.trailing_zeros();
        self.put([add_shifted(list, list, scratch, shift)]); // add list, list, scratch, lsl #list
        self.put([add(list, list, FREE_LIST_BYTES as u32)]); // add list, list, #list
        Ok(())
    }

    /// Stores `new` as the head at `list` if that is still `old`, else goes back to `again`.
    fn swap(&mut self, list: u32, old: u32, new: u32, scratch: u32, again: usize) {
        self.put([0xc85f_fc00 | list << 5 | scratch]); // ldaxr scratch, [list]
        self.put([0xca00_0000 | old << 16 | scratch << 5 | scratch]); // eor scratch, scratch, old
        self.put([if_zero(CBNZ64, scratch, distance(self.here(), again))]); // cbnz scratch, again
        self.put([0xc800_fc00 | scratch << 16 | list << 5 | new]); // stlxr scratch, new, [list]
        self.put([if_zero(CBNZ32, scratch, distance(self.here(), again))]); // cbnz scratch, again
    }

    fn bytes(self) -> Vec<u8> {
        self.words.into_iter().flat_map(u32::to_le_bytes).collect()
    }
}

/// The piece in front of the function, to be placed at `at`.
///
/// # Errors
/// The pool is not within 4 GiB of `at`, what is executed behind the piece not within 128 MiB, or the field
/// that holds the CPU's number not within 16 KiB of the current task's beginning.
pub(super) fn assemble_hook(hook: &ReturnHook, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    let pool = &hook.pool;
    let number = scaled(hook.cpu_number, 4)?;
    let mut code = Code::new(at);
    code.put([0xa9be_0000 | pair(10, R31, 11)]); //     stp x10, x11, [sp, #-32]!
    code.put([0xa901_0000 | pair(12, R31, 13)]); //     stp x12, x13, [sp, #16]

    // A slot of this CPU's list, or else of the one for all: w11 = its number, x12 = its address.
    code.own_list(17, 16, number, pool.lists())?;
    let again = code.here();
    code.put([0xc8df_fc00 | 17 << 5 | 10]); //       1: ldar x10, [x17]
    code.put([0x2a00_03e0 | 10 << 16 | 11]); //         mov w11, w10
    let empty = code.here();
    code.put([0]); //                                   cbz w11, 2f
    code.address(12, pool.slots(), pool.slots())?; //   adrp x12, slots
    let slot_shift = RETURN_SLOT_BYTES.trailing_zeros();
    code.put([add_shifted(12, 12, 11, slot_shift)]); // add x12, x12, x11, lsl #slot
    code.put([subtract(12, 12, RETURN_SLOT_BYTES as u32)]); // sub x12, x12, #slot
    code.put([field32(LDR32, 13, 12, slot::NEXT)]); //  ldr w13, [x12, #next]
    code.put([0xd360_fc00 | 10 << 5 | 16]); //          lsr x16, x10, #32
    code.put([add(16, 16, 1)]); //                      add x16, x16, #1
    code.put([0xaa00_0000 | 16 << 16 | 32 << 10 | 13 << 5 | 13]); // orr x13, x13, x16, lsl #32
    code.swap(17, 10, 13, 16, again);

    // Fill it, and have its stub be returned to.
    code.put([field64(STR64, 9, 12, slot::RETURN)]); // str x9, [x12, #return]
    if hook.clock {
        code.put([0xd503_3fdf]); //                     isb
        code.put([0xd53b_e040 | 16]); //                mrs x16, cntvct_el0
        code.put([field64(STR64, 16, 12, slot::TIME)]); // str x16, [x12, #time]
    }
    code.put([field32(STR32, 30, 12, slot::FUNCTION)]); // str w30, [x12, #function]
    let [low, high] = [hook.duties & 0xffff, hook.duties >> 16];
    code.put([0x5280_0000 | low << 5 | 16]); //         mov w16, #low
    code.put([0x72a0_0000 | high << 5 | 16]); //        movk w16, #high, lsl #16
    code.put([field32(STR32, 16, 12, slot::DUTIES)]); // str w16, [x12, #duties]
    code.address(16, pool.stubs, pool.stubs)?; //       adrp x16, stubs
    let stub_shift = RETURN_STUB_BYTES.trailing_zeros();
    code.put([add_shifted(9, 16, 11, stub_shift)]); //  add x9, x16, x11, lsl #stub
    code.put([subtract(9, 9, RETURN_STUB_BYTES as u32)]); // sub x9, x9, #stub
    code.put([0x5280_0000 | 1 << 5 | 16]); //           mov w16, #1
    code.put([add(12, 12, slot::PLACED.into())]); //    add x12, x12, #placed
    code.put([0x889f_fc00 | 12 << 5 | 16]); //          stlr w16, [x12]
    let filled = code.here();
    code.put([0]); //                                   b 4f

    let here = code.here();
    code.words[empty] = if_zero(CBZ32, 11, distance(empty, here));
    code.address(16, pool.lists(), pool.lists())?; // 2: adrp x16, lists
    code.put([0xca00_0000 | 16 << 16 | 17 << 5 | 10]); // eor x10, x17, x16
    code.put([0xaa00_03e0 | 16 << 16 | 17]); //         mov x17, x16
    code.put([if_zero(CBNZ64, 10, distance(code.here(), again))]); // cbnz x10, 1b
    code.address(17, pool.at, pool.missed())?; //       adrp, add x17, missed
    let add_again = code.here();
    code.put([0xc85f_7c00 | 17 << 5 | 10]); //       3: ldxr x10, [x17]
    code.put([add(10, 10, 1)]); //                      add x10, x10, #1
    code.put([0xc800_7c00 | 16 << 16 | 17 << 5 | 10]); // stxr w16, x10, [x17]
    code.put([if_zero(CBNZ32, 16, distance(code.here(), add_again))]); // cbnz w16, 3b

    let here = code.here();
    code.words[filled] = branch(distance(filled, here));
    code.put([0xa941_0000 | pair(12, R31, 13)]); //  4: ldp x12, x13, [sp, #16]
    code.put([0xa8c2_0000 | pair(10, R31, 11)]); //     ldp x10, x11, [sp], #32
    append_then(&mut code.words, at, hook.then)?;
    Ok(code.bytes())
}

/// The code behind all stubs, to be placed at `at`.
///
/// # Errors
/// As [`assemble_hook`]; also for the rings and what is recorded of the task.
pub(super) fn assemble_exit(exit: &ReturnExit, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    let (pool, rings) = (&exit.pool, &exit.rings);
    let number = scaled(exit.cpu_number, 4)?;
    let slot_shift = RETURN_SLOT_BYTES.trailing_zeros();
    let mut code = Code::new(at);
    code.put([0xa9bd_0000 | pair(10, R31, 11)]); //     stp x10, x11, [sp, #-48]!
    code.put([0xa901_0000 | pair(12, R31, 13)]); //     stp x12, x13, [sp, #16]
    code.put([0xf900_13e0 | 9]); //                     str x9, [sp, #32]

    // x17 = the slot, x30 = where the function would have returned to.
    code.address(16, pool.stubs, pool.stubs + 4)?; //   adrp, add x16, first
    code.put([0xcb00_0000 | 16 << 16 | 30 << 5 | 16]); // sub x16, x30, x16
    code.address(17, pool.slots(), pool.slots())?; //   adrp x17, slots
    let from_stub = slot_shift - RETURN_STUB_BYTES.trailing_zeros();
    code.put([add_shifted(17, 17, 16, from_stub)]); //  add x17, x17, x16, lsl #slot/stub
    code.put([field64(LDR64, 30, 17, slot::RETURN)]); // ldr x30, [x17, #return]
    code.put([field32(LDR32, 9, 17, slot::DUTIES)]); // ldr w9, [x17, #duties]
    measure::append(&mut code, exit)?;
    let unrecorded = code.here();
    code.put([0]); //                                   tbz w9, #31, 1f

    // The record, as for a call: x12 = its place, x11 = one more than its index.
    code.put([0xd538_4100 | 16]); //                    mrs x16, sp_el0
    code.put([LDR32 | number << 10 | 16 << 5 | 16]); // ldr w16, [x16, #number]
    code.address(12, rings.headers(), rings.headers())?; // adrp x12, headers
    code.put([add_shifted(12, 12, 16, HEADER_BYTES.trailing_zeros())]); // add x12, x12, x16, lsl #header
    let again = code.here();
    code.put([0xc85f_7c00 | 12 << 5 | 10]); //          ldxr x10, [x12]
    code.put([add(11, 10, 1)]); //                      add x11, x10, #1
    code.put([0xc800_7c00 | 13 << 16 | 12 << 5 | 11]); // stxr w13, x11, [x12]
    code.put([if_zero(CBNZ32, 13, distance(code.here(), again))]); // cbnz w13, back
    code.address(12, rings.slots(), rings.slots())?; // adrp x12, records
    code.put([add_shifted(12, 12, 16, rings.ring_shift().into())]); // add x12, x12, x16, lsl #ring
    let index_bits = rings.index_mask().count_ones();
    code.put([0x9240_0000 | (index_bits - 1) << 10 | 10 << 5 | 10]); // and x10, x10, #records - 1
    code.put([add_shifted(12, 12, 10, RECORD_BYTES.trailing_zeros())]); // add x12, x12, x10, lsl #record
    if exit.clock {
        code.put([0xd503_3fdf]); //                     isb
        code.put([0xd53b_e040 | 16]); //                mrs x16, cntvct_el0
    } else {
        code.put([0xaa1f_03e0 | 16]); //                mov x16, xzr
    }
    code.put([0xf900_0000 | 12 << 5 | 16]); //          str x16, [x12]            time
    code.put([field32(LDR32, 13, 17, slot::FUNCTION)]); // ldr w13, [x17, #function]
    code.put([add(13, 13, 1)]); //                      add x13, x13, #1
    code.put([0x2901_0000 | pair(13, 12, 0)]); //       stp w13, w0, [x12, #8]    function, value
    code.put([0xd360_fc00 | 16]); //                    lsr x16, x0, #32
    code.put([0xb900_1000 | 12 << 5 | 16]); //          str w16, [x12, #16]       value, high half

    end_record(&mut code.words, &exit.task, 12, 13)?;
    let here = code.here();
    code.set(unrecorded, if_bit_is_clear(9, 31, distance(unrecorded, here)));

    // 1: the slot is free from here on; what it says has been read. x9 = its number, from 1.
    code.put([add(16, 17, slot::PLACED.into())]); //    add x16, x17, #placed
    code.put([0x889f_fc00 | 16 << 5 | R31]); //         stlr wzr, [x16]
    code.own_list(12, 16, number, pool.lists())?;
    code.address(16, pool.slots(), pool.slots())?; //   adrp x16, slots
    code.put([0xcb00_0000 | 16 << 16 | 17 << 5 | 9]); // sub x9, x17, x16
    code.put([0xd340_fc00 | slot_shift << 16 | 9 << 5 | 9]); // lsr x9, x9, #slot
    code.put([add(9, 9, 1)]); //                        add x9, x9, #1
    let again = code.here();
    code.put([0xc8df_fc00 | 12 << 5 | 10]); //       2: ldar x10, [x12]
    code.put([field32(STR32, 10, 17, slot::NEXT)]); //  str w10, [x17, #next]
    code.put([0xd360_fc00 | 10 << 5 | 11]); //          lsr x11, x10, #32
    code.put([add(11, 11, 1)]); //                      add x11, x11, #1
    code.put([0xaa00_0000 | 11 << 16 | 32 << 10 | 9 << 5 | 11]); // orr x11, x9, x11, lsl #32
    code.swap(12, 10, 11, 13, again);

    code.put([0xf940_13e0 | 9]); //                     ldr x9, [sp, #32]
    code.put([0xa941_0000 | pair(12, R31, 13)]); //     ldp x12, x13, [sp, #16]
    code.put([0xa8c3_0000 | pair(10, R31, 11)]); //     ldp x10, x11, [sp], #48
    code.put([0xd65f_03c0]); //                         ret
    Ok(code.bytes())
}

/// The stub at `at`, which leads to the code at `exit`.
///
/// # Errors
/// That is not within 128 MiB.
pub(super) fn assemble_stub(at: Gva, exit: Gva) -> Result<[u8; 8], OutOfReach> {
    let call = encode_call(at, exit)?; //               bl exit
    let mut stub = [0x1f, 0x20, 0x03, 0xd5, 0x1f, 0x20, 0x03, 0xd5]; // nop
    stub[..4].copy_from_slice(&call);
    Ok(stub)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::listing::aarch64 as listing;
    use crate::arch::{PidPlace, ReturnForm, TaskPlaces, Then};
    use crate::region::{Histograms, RECORD_RETURN, ReturnPool, RingLayout};

    const AT: Gva = Gva(0xffff_924e_9fa0_0000);
    const POOL: ReturnPool =
        ReturnPool { at: Gva(0xffff_924e_9ff0_0000), stubs: Gva(0xffff_924e_9fa1_0000) };

    #[test]
    fn the_code_is_what_its_comments_say() {
        let then = Then::GoOn { behind: 0, form: ReturnForm::Plain };
        let hook =
            ReturnHook { cpu_number: 0x10, pool: POOL, clock: true, duties: RECORD_RETURN, then };
        assert_eq!(
            listing(&assemble_hook(&hook, AT).unwrap(), AT),
            [
                "stp x10, x11, [sp, #-0x20]!",
                "stp x12, x13, [sp, #0x10]",
                "mrs x16, sp_el0",
                "ldr w16, [x16, #0x10]",
                "adrp x17, #0xffff924e9ff01000",
                "add x17, x17, x16, lsl #6",
                "add x17, x17, #0x40",
                "ldar x10, [x17]",
                "mov w11, w10",
                "cbz w11, #0xffff924e9fa00094",
                "adrp x12, #0xffff924e9ff0a000",
                "add x12, x12, x11, lsl #5",
                "sub x12, x12, #0x20",
                "ldr w13, [x12, #0x18]",
                "lsr x16, x10, #0x20",
                "add x16, x16, #1",
                "orr x13, x13, x16, lsl #32",
                "ldaxr x16, [x17]",
                "eor x16, x16, x10",
                "cbnz x16, #0xffff924e9fa0001c",
                "stlxr w16, x13, [x17]",
                "cbnz w16, #0xffff924e9fa0001c",
                "str x9, [x12]",
                "isb",
                "mrs x16, cntvct_el0",
                "str x16, [x12, #8]",
                "str w30, [x12, #0x10]",
                "mov w16, #0",
                "movk w16, #0x8000, lsl #16",
                "str w16, [x12, #0x14]",
                "adrp x16, #0xffff924e9fa10000",
                "add x9, x16, x11, lsl #3",
                "sub x9, x9, #8",
                "mov w16, #1",
                "add x12, x12, #0x1c",
                "stlr w16, [x12]",
                "b #0xffff924e9fa000bc",
                "adrp x16, #0xffff924e9ff01000",
                "eor x10, x17, x16",
                "mov x17, x16",
                "cbnz x10, #0xffff924e9fa0001c",
                "adrp x17, #0xffff924e9ff00000",
                "add x17, x17, #0x40",
                "ldxr x10, [x17]",
                "add x10, x10, #1",
                "stxr w16, x10, [x17]",
                "cbnz w16, #0xffff924e9fa000ac",
                "ldp x12, x13, [sp, #0x10]",
                "ldp x10, x11, [sp], #0x20",
                "add x16, x30, #0",
                "mov x30, x9",
                "ret x16",
            ]
        );
        let exit = ReturnExit {
            cpu_number: 0x10,
            rings: RingLayout::new(AT + (4 << 20), 0x400_0000 + (2 << 20), 2).unwrap(),
            clock: true,
            task: TaskPlaces {
                pid: Some(PidPlace::InTask { current: 0, pid: 1352 }),
                preempt_count: Some(0x10),
            },
            pool: POOL,
            histograms: Histograms(Gva(0xffff_924e_9fe4_0000)),
            returns: ReturnForm::Plain,
        };
        assert_eq!(
            listing(&assemble_exit(&exit, AT).unwrap(), AT),
            [
                "stp x10, x11, [sp, #-0x30]!",
                "stp x12, x13, [sp, #0x10]",
                "str x9, [sp, #0x20]",
                "adrp x16, #0xffff924e9fa10000",
                "add x16, x16, #4",
                "sub x16, x30, x16",
                "adrp x17, #0xffff924e9ff0a000",
                "add x17, x17, x16, lsl #2",
                "ldr x30, [x17]",
                "ldr w9, [x17, #0x14]",
                "tbz w9, #0x1d, #0xffff924e9fa00094",
                "isb",
                "mrs x16, cntvct_el0",
                "ldr x10, [x17, #8]",
                "sub x16, x16, x10",
                "bic x16, x16, x16, asr #63",
                "adrp x12, #0xffff924e9fe40000",
                "ldr x10, [x12]",
                "umulh x11, x16, x10",
                "mul x16, x16, x10",
                "extr x16, x11, x16, #0x20",
                "and x16, x16, #0x7fffffffffffffff",
                "and w10, w9, #0xffff",
                "add x12, x12, x10, lsl #9",
                "add x13, x12, #0x1f8",
                "ldxr x10, [x13]",
                "add x10, x10, x16",
                "stxr w11, x10, [x13]",
                "cbnz w11, #0xffff924e9fa00064",
                "orr x16, x16, #1",
                "clz x16, x16",
                "eor w16, w16, #0x3f",
                "add x12, x12, x16, lsl #3",
                "ldxr x10, [x12]",
                "add x10, x10, #1",
                "stxr w11, x10, [x12]",
                "cbnz w11, #0xffff924e9fa00084",
                "tbz w9, #0x1f, #0xffff924e9fa00110",
                "mrs x16, sp_el0",
                "ldr w16, [x16, #0x10]",
                "adrp x12, #0xffff924e9fe00000",
                "add x12, x12, x16, lsl #7",
                "ldxr x10, [x12]",
                "add x11, x10, #1",
                "stxr w13, x11, [x12]",
                "cbnz w13, #0xffff924e9fa000a8",
                "adrp x12, #0xffff924e9fe10000",
                "add x12, x12, x16, lsl #25",
                "and x10, x10, #0xfffff",
                "add x12, x12, x10, lsl #5",
                "isb",
                "mrs x16, cntvct_el0",
                "str x16, [x12]",
                "ldr w13, [x17, #0x10]",
                "add x13, x13, #1",
                "stp w13, w0, [x12, #8]",
                "lsr x16, x0, #0x20",
                "str w16, [x12, #0x10]",
                "mrs x16, sp_el0",
                "ldr w10, [x16, #0x548]",
                "mrs x13, daif",
                "orr w10, w10, w13, lsl #24",
                "ldr x16, [x16, #0x10]",
                "lsr x13, x16, #0x20",
                "orr w13, w16, w13, lsl #31",
                "stp w10, w13, [x12, #0x14]",
                "add x12, x12, #0x1c",
                "stlr w11, [x12]",
                "add x16, x17, #0x1c",
                "stlr wzr, [x16]",
                "mrs x16, sp_el0",
                "ldr w16, [x16, #0x10]",
                "adrp x12, #0xffff924e9ff01000",
                "add x12, x12, x16, lsl #6",
                "add x12, x12, #0x40",
                "adrp x16, #0xffff924e9ff0a000",
                "sub x9, x17, x16",
                "lsr x9, x9, #5",
                "add x9, x9, #1",
                "ldar x10, [x12]",
                "str w10, [x17, #0x18]",
                "lsr x11, x10, #0x20",
                "add x11, x11, #1",
                "orr x11, x9, x11, lsl #32",
                "ldaxr x13, [x12]",
                "eor x13, x13, x10",
                "cbnz x13, #0xffff924e9fa0013c",
                "stlxr w13, x11, [x12]",
                "cbnz w13, #0xffff924e9fa0013c",
                "ldr x9, [sp, #0x20]",
                "ldp x12, x13, [sp, #0x10]",
                "ldp x10, x11, [sp], #0x30",
                "ret",
            ]
        );
        let stub = assemble_stub(AT, AT + 0x800).unwrap();
        assert_eq!(listing(&stub, AT)[0], "bl #0xffff924e9fa00800");
        assert!(assemble_stub(AT, AT + (8 << 30)).is_err());
    }
}
