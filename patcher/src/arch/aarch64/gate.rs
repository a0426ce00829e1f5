//! The code of an aarch64 gate. It is entered as the code that counts is: its thunk has put the number of
//! the function's first cell into `x16`.
//!
//! `x17` is the cell's address from then on; `x10` to `x13` are kept on the stack, and the flags in `x13`.

use super::trampoline::{R31, add_shifted, append_then, page_address, pair, scaled};
use crate::addr::Gva;
use crate::arch::gate::{Comparison, Conditions, Gate, GatedValue, Label, Labels, Operator, Rate};
use crate::arch::{CommPlace, OutOfReach, PidPlace};
use crate::region::COUNTER_BYTES;

/// How many bytes the code takes of the stack.
const FRAME: u16 = 32;

/// The code, to be placed at `at`.
///
/// # Errors
/// The cells are not within 4 GiB of `at` or do not begin on a page, what is executed behind it is not
/// within 128 MiB, or what is asked of the task is not within 16 KiB of its beginning.
pub(super) fn assemble(at: Gva, gate: &Gate<'_>) -> Result<Vec<u8>, OutOfReach> {
    let conditions = gate.conditions;
    let mut code = Code::default();
    let away = code.labels.label();
    code.put(0xa9be_0000 | pair(10, R31, 11)); //    stp x10, x11, [sp, #-32]!
    code.put(0xa901_0000 | pair(12, R31, 13)); //    stp x12, x13, [sp, #16]
    code.put(page_address(at + 8, gate.counters.at(0), 17)?); // adrp x17, cells
    code.put(add_shifted(17, 17, 16, COUNTER_BYTES.trailing_zeros())); // add x17, x17, x16, lsl #3
    code.put(0xd53b_4200 | 13); //                   mrs x13, nzcv
    if let Some(PidPlace::InTask { pid, .. }) = gate.places.pid
        && !conditions.pids.is_empty()
    {
        code.pids(&conditions.pids, pid, away)?;
    }
    if let (Some(comm), Some(place)) = (&conditions.comm, gate.places.comm) {
        code.comm(comm.halves(u64::from_le_bytes), place, away);
    }
    if !conditions.any.is_empty() {
        code.any(&conditions.any, away);
    }
    if let Some(n) = conditions.one_in {
        code.one_in(n, away);
    }
    if let Some(rate) = conditions.rate {
        code.rate(rate, conditions.rate_cell(), away);
    }
    code.restore();
    append_then(&mut code.words, at, gate.pass)?;
    code.set(away);
    let again = code.set_new();
    code.put(0xc85f_7c00 | 17 << 5 | 10); //         ldxr x10, [x17]
    code.put(0x9100_0400 | 10 << 5 | 10); //         add x10, x10, #1
    code.put(0xc800_7c00 | 11 << 16 | 17 << 5 | 10); // stxr w11, x10, [x17]
    code.branch(0x3500_0000 | 11, again); //         cbnz w11, again
    code.restore();
    append_then(&mut code.words, at, gate.away)?;
    Ok(code.finish())
}

/// The conditions of branches.
mod when {
    pub const EQUAL: u32 = 0;
    pub const NOT_EQUAL: u32 = 1;
    pub const NOT_LOWER: u32 = 2;
    pub const LOWER: u32 = 3;
    pub const HIGHER: u32 = 8;
    pub const NOT_HIGHER: u32 = 9;
    pub const NOT_LESS: u32 = 10;
    pub const LESS: u32 = 11;
    pub const GREATER: u32 = 12;
    pub const NOT_GREATER: u32 = 13;
}

#[derive(Default)]
struct Code {
    words: Vec<u32>,
    labels: Labels,
}

impl Code {
    fn put(&mut self, word: u32) {
        self.words.push(word);
    }

    fn set(&mut self, label: Label) {
        self.labels.set(label, self.words.len());
    }

    fn set_new(&mut self) -> Label {
        let label = self.labels.label();
        self.set(label);
        label
    }

    /// A conditional branch, or one that compares with zero: 19 bits tell where to.
    fn branch(&mut self, instruction: u32, to: Label) {
        self.labels.branch(self.words.len(), to);
        self.put(instruction);
    }

    /// `b.when to`.
    fn branch_if(&mut self, when: u32, to: Label) {
        self.branch(0x5400_0000 | when, to);
    }

    /// `cbz xzr, to`, which is always so.
    fn jump(&mut self, to: Label) {
        self.branch(0xb400_0000 | R31, to);
    }

    fn finish(mut self) -> Vec<u8> {
        for (here, to) in self.labels.branches() {
            // Code is a few KiB at most.
            let words = to as i32 - here as i32;
            self.words[here] |= (words.cast_unsigned() & 0x7_ffff) << 5;
        }
        self.words.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    fn restore(&mut self) {
        self.put(0xd51b_4200 | 13); //               msr nzcv, x13
        self.put(0xa941_0000 | pair(12, R31, 13)); // ldp x12, x13, [sp, #16]
        self.put(0xa8c2_0000 | pair(10, R31, 11)); // ldp x10, x11, [sp], #32
    }

    /// `movz` and `movk`.
    fn constant(&mut self, register: u32, value: u64) {
        self.put(0xd280_0000 | (value as u32 & 0xffff) << 5 | register);
        for part in 1..4 {
            let bits = (value >> (16 * part)) as u32 & 0xffff;
            if bits != 0 {
                self.put(0xf280_0000 | part << 21 | bits << 5 | register);
            }
        }
    }

    /// `cmp x{a}, x{b}`.
    fn compare_registers(&mut self, a: u32, b: u32) {
        self.put(0xeb00_0000 | b << 16 | a << 5 | R31);
    }

    fn pids(&mut self, pids: &[u32], pid: i32, away: Label) -> Result<(), OutOfReach> {
        let pass = self.labels.label();
        self.put(0xd538_4100 | 16); //               mrs x16, sp_el0
        self.put(0xb940_0000 | scaled(pid, 4)? << 10 | 16 << 5 | 10); // ldr w10, [x16, #pid]
        for pid in pids {
            self.constant(11, u64::from(*pid));
            self.compare_registers(10, 11);
            self.branch_if(when::EQUAL, pass);
        }
        self.jump(away);
        self.set(pass);
        Ok(())
    }

    fn comm(&mut self, halves: impl Iterator<Item = (u64, u64)>, place: CommPlace, away: Label) {
        self.put(0xd538_4100 | 16); //               mrs x16, sp_el0
        self.constant(11, i64::from(place.comm).cast_unsigned());
        self.put(add_shifted(16, 16, 11, 0)); //     add x16, x16, x11
        for (index, (mask, value)) in (0_u32..).zip(halves) {
            self.put(0xf940_0000 | index << 10 | 16 << 5 | 10); // ldr x10, [x16, #8*index]
            if mask != u64::MAX {
                self.constant(12, mask);
                self.put(0x8a00_0000 | 12 << 16 | 10 << 5 | 10); // and x10, x10, x12
            }
            self.constant(12, value);
            self.compare_registers(10, 12);
            self.branch_if(when::NOT_EQUAL, away);
        }
    }

    fn any(&mut self, any: &[Vec<Comparison>], away: Label) {
        let pass = self.labels.label();
        for all in any {
            let next = self.labels.label();
            for comparison in all {
                self.compare(comparison, next);
            }
            self.jump(pass);
            self.set(next);
        }
        self.jump(away);
        self.set(pass);
    }

    /// Goes on if it is true.
    fn compare(&mut self, comparison: &Comparison, otherwise: Label) {
        match comparison.place {
            GatedValue::Register(number) => {
                self.put(0xaa00_03e0 | u32::from(number) << 16 | 10); // mov x10, x{number}
            }
            GatedValue::Stack(behind) => {
                // Arguments are on multiples of eight bytes there.
                let units = u32::from((FRAME + behind) / 8);
                self.put(0xf940_0000 | units << 10 | R31 << 5 | 10); // ldr x10, [sp, #..]
            }
        }
        let extended = match (comparison.bytes, comparison.signed) {
            (1, true) => Some(0x9340_1c00),  //      sxtb x10, w10
            (1, false) => Some(0x5300_1c00), //      uxtb w10, w10
            (2, true) => Some(0x9340_3c00),  //      sxth x10, w10
            (2, false) => Some(0x5300_3c00), //      uxth w10, w10
            (4, true) => Some(0x9340_7c00),  //      sxtw x10, w10
            (4, false) => Some(0x5300_7c00), //      mov w10, w10, as ubfx has it
            _ => None,
        };
        if let Some(instruction) = extended {
            self.put(instruction | 10 << 5 | 10);
        }
        self.constant(12, comparison.value);
        if comparison.operator == Operator::AnyBit {
            self.put(0xea00_0000 | 12 << 16 | 10 << 5 | R31); // tst x10, x12
        } else {
            self.compare_registers(10, 12);
        }
        let not = match (comparison.operator, comparison.signed) {
            (Operator::Equal, _) => when::NOT_EQUAL,
            (Operator::NotEqual | Operator::AnyBit, _) => when::EQUAL,
            (Operator::Less, true) => when::NOT_LESS,
            (Operator::Less, false) => when::NOT_LOWER,
            (Operator::AtMost, true) => when::GREATER,
            (Operator::AtMost, false) => when::HIGHER,
            (Operator::Greater, true) => when::NOT_GREATER,
            (Operator::Greater, false) => when::NOT_HIGHER,
            (Operator::AtLeast, true) => when::LESS,
            (Operator::AtLeast, false) => when::LOWER,
        };
        self.branch_if(not, otherwise);
    }

    /// `add x16, x17, #cell`.
    fn cell(&mut self, cell: u8) {
        self.put(0x9100_0000 | u32::from(cell) << 10 | 17 << 5 | 16);
    }

    /// The cell counts from 0 up to `n`, where it begins anew; at 0 a call is let through.
    fn one_in(&mut self, n: u32, away: Label) {
        self.cell(Conditions::ONE_IN_CELL);
        let again = self.set_new();
        self.constant(12, u64::from(n));
        self.put(0xc85f_7c00 | 16 << 5 | 10); //     ldxr x10, [x16]
        self.put(0x9100_0400 | 10 << 5 | 11); //     add x11, x10, #1
        self.compare_registers(11, 12);
        self.put(0x9a80_0000 | R31 << 16 | when::LOWER << 12 | 11 << 5 | 11); // csel x11, x11, xzr, lo
        self.put(0xc800_7c00 | 12 << 16 | 16 << 5 | 11); // stxr w12, x11, [x16]
        self.branch(0x3500_0000 | 12, again); //     cbnz w12, again
        self.branch(0xb500_0000 | 10, away); //      cbnz x10, away
    }

    fn rate(&mut self, rate: Rate, cell: u8, away: Label) {
        self.put(0xd53b_e040 | 11); //               mrs x11, cntvct_el0
        self.cell(cell);
        let again = self.set_new();
        self.constant(12, rate.slack);
        self.put(add_shifted(12, 12, 11, 0)); //     add x12, x12, x11
        self.put(0xc85f_7c00 | 16 << 5 | 10); //     ldxr x10, [x16]
        self.compare_registers(10, 12);
        self.branch_if(when::HIGHER, away);
        self.compare_registers(10, 11);
        self.put(0x9a80_0000 | 11 << 16 | when::NOT_LOWER << 12 | 10 << 5 | 10); // csel x10, x10, x11, hs
        self.constant(12, rate.every);
        self.put(add_shifted(10, 10, 12, 0)); //     add x10, x10, x12
        self.put(0xc800_7c00 | 12 << 16 | 16 << 5 | 10); // stxr w12, x10, [x16]
        self.branch(0x3500_0000 | 12, again); //     cbnz w12, again
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::gate::everything;
    use crate::arch::listing::aarch64 as listing;
    use crate::arch::{GatePlaces, ReturnForm, Then};
    use crate::region::Counters;

    const AT: Gva = Gva(0xffff_924e_9fa0_0000);

    fn gate(conditions: &Conditions) -> Vec<String> {
        let gate = Gate {
            conditions,
            counters: Counters(AT + (2 << 20)),
            places: GatePlaces {
                pid: Some(PidPlace::InTask { current: 0, pid: 1352 }),
                comm: Some(CommPlace { current: 0x340, comm: 2880 }),
            },
            pass: Then::Next(AT + 0x1000),
            away: Then::GoOn { behind: 0, form: ReturnForm::Plain },
        };
        listing(&assemble(AT, &gate).unwrap(), AT)
    }

    #[test]
    fn the_code_is_what_its_comments_say() {
        assert_eq!(
            gate(&everything()),
            [
                "stp x10, x11, [sp, #-0x20]!",
                "stp x12, x13, [sp, #0x10]",
                "adrp x17, #0xffff924e9fc00000",
                "add x17, x17, x16, lsl #3",
                "mrs x13, nzcv",
                "mrs x16, sp_el0",
                "ldr w10, [x16, #0x548]",
                "mov x11, #0x2a",
                "cmp x10, x11",
                "b.eq #0xffff924e9fa0003c",
                "mov x11, #1",
                "movk x11, #1, lsl #16",
                "cmp x10, x11",
                "b.eq #0xffff924e9fa0003c",
                "cbz xzr, #0xffff924e9fa00130",
                "mrs x16, sp_el0",
                "mov x11, #0xb40",
                "add x16, x16, x11",
                "ldr x10, [x16]",
                "mov x12, #0x776b",
                "movk x12, #0x726f, lsl #16",
                "movk x12, #0x656b, lsl #32",
                "movk x12, #0x2f72, lsl #48",
                "cmp x10, x12",
                "b.ne #0xffff924e9fa00130",
                "ldr x10, [x16, #8]",
                "mov x12, #0xffff",
                "and x10, x10, x12",
                "mov x12, #0x30",
                "cmp x10, x12",
                "b.ne #0xffff924e9fa00130",
                "mov x10, x2",
                "sxtw x10, w10",
                "mov x12, #0x1000",
                "cmp x10, x12",
                "b.le #0xffff924e9fa000a8",
                "mov x10, x4",
                "uxtb w10, w10",
                "mov x12, #7",
                "cmp x10, x12",
                "b.eq #0xffff924e9fa000a8",
                "cbz xzr, #0xffff924e9fa000c4",
                "ldr x10, [sp, #0x28]",
                "mov x12, #0",
                "movk x12, #0x100, lsl #32",
                "tst x10, x12",
                "b.eq #0xffff924e9fa000c0",
                "cbz xzr, #0xffff924e9fa000c4",
                "cbz xzr, #0xffff924e9fa00130",
                "add x16, x17, #8",
                "mov x12, #0xa",
                "ldxr x10, [x16]",
                "add x11, x10, #1",
                "cmp x11, x12",
                "csel x11, x11, xzr, lo",
                "stxr w12, x11, [x16]",
                "cbnz w12, #0xffff924e9fa000c8",
                "cbnz x10, #0xffff924e9fa00130",
                "mrs x11, cntvct_el0",
                "add x16, x17, #0x10",
                "mov x12, #0",
                "movk x12, #2, lsl #32",
                "add x12, x12, x11",
                "ldxr x10, [x16]",
                "cmp x10, x12",
                "b.hi #0xffff924e9fa00130",
                "cmp x10, x11",
                "csel x10, x10, x11, hs",
                "mov x12, #0x3e8",
                "add x10, x10, x12",
                "stxr w12, x10, [x16]",
                "cbnz w12, #0xffff924e9fa000f0",
                "msr nzcv, x13",
                "ldp x12, x13, [sp, #0x10]",
                "ldp x10, x11, [sp], #0x20",
                "b #0xffff924e9fa01000",
                "ldxr x10, [x17]",
                "add x10, x10, #1",
                "stxr w11, x10, [x17]",
                "cbnz w11, #0xffff924e9fa00130",
                "msr nzcv, x13",
                "ldp x12, x13, [sp, #0x10]",
                "ldp x10, x11, [sp], #0x20",
                "add x16, x30, #0",
                "mov x30, x9",
                "ret x16",
            ]
        );
    }
}
