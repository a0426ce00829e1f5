//! The code of an s390x gate. It is entered as the code that counts is: its thunk has put the number of the
//! function's first cell into `%r1`.
//!
//! `%r2` to `%r5` are kept in the register save area that every caller provides, as in the other pieces; the
//! clock is stored in the place of `%r6` there, which the function itself does not use before it begins.

use super::trampoline::{append_then, displacement, load, load_address};
use crate::addr::Gva;
use crate::arch::gate::{Comparison, Conditions, Gate, GatedValue, Label, Labels, Operator, Rate};
use crate::arch::{CommPlace, OutOfReach, PidPlace};
use crate::region::COUNTER_BYTES;

/// Where a caller's frame has the place of `%r2`, and of what is passed on the stack.
const SAVED: u16 = 16;
const ARGUMENTS: u16 = 160;

/// The code, to be placed at `at`.
///
/// # Errors
/// The cells or what is executed behind it are not within 4 GiB of `at`, or what is asked of the task is
/// not within 512 KiB of address 0 or of the task's beginning.
pub(super) fn assemble(at: Gva, gate: &Gate<'_>) -> Result<Vec<u8>, OutOfReach> {
    let conditions = gate.conditions;
    let shift = COUNTER_BYTES.trailing_zeros() as u8;
    let mut code = Code::default();
    let away = code.labels.label();
    code.put(&[0xeb, 0x25, 0xf0, 0x10, 0x00, 0x24]); //  stmg %r2,%r5,16(%r15)
    code.put(&[0xeb, 0x51, 0x00, shift, 0x00, 0x0d]); // sllg %r5,%r1,log2(cell)
    load_address(&mut code.bytes, at, gate.counters.at(0))?; // larl %r1,cells
    code.put(&[0xb9, 0x08, 0x00, 0x51]); //              agr %r5,%r1
    if let Some(PidPlace::Fixed(pid)) = gate.places.pid
        && !conditions.pids.is_empty()
    {
        code.pids(&conditions.pids, pid, away)?;
    }
    if let (Some(comm), Some(place)) = (&conditions.comm, gate.places.comm) {
        code.comm(comm.halves(u64::from_be_bytes), place, away)?;
    }
    if !conditions.any.is_empty() {
        code.any(&conditions.any, away)?;
    }
    if let Some(n) = conditions.one_in {
        code.one_in(n, away);
    }
    if let Some(rate) = conditions.rate {
        code.rate(rate, conditions.rate_cell(), away);
    }
    code.restore();
    append_then(&mut code.bytes, at, gate.pass)?;
    code.set(away);
    code.put(&[0xe3, 0x20, 0x50, 0x00, 0x00, 0x04]); //  lg %r2,0(%r5)
    code.put(&[0x41, 0x30, 0x20, 0x01]); //           1: la %r3,1(%r2)
    code.put(&[0xeb, 0x23, 0x50, 0x00, 0x00, 0x30]); //  csg %r2,%r3,0(%r5)
    code.put(&[0xa7, 0x44, 0xff, 0xfb]); //              jl 1b
    code.restore();
    append_then(&mut code.bytes, at, gate.away)?;
    Ok(code.finish())
}

/// The conditions of branches: one bit for each condition code, that of 0 the highest.
mod when {
    pub const ALWAYS: u8 = 0xf;
    pub const EQUAL: u8 = 0x8;
    pub const LOW: u8 = 0x4;
    pub const HIGH: u8 = 0x2;
    pub const NOT_EQUAL: u8 = LOW | HIGH;
    pub const NOT_LOW: u8 = EQUAL | HIGH;
    pub const NOT_HIGH: u8 = EQUAL | LOW;
    /// Of an and whose result is not zero.
    pub const NOT_ZERO: u8 = 0x7;
}

#[derive(Default)]
struct Code {
    bytes: Vec<u8>,
    labels: Labels,
}

impl Code {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn set(&mut self, label: Label) {
        self.labels.set(label, self.bytes.len());
    }

    fn set_new(&mut self) -> Label {
        let label = self.labels.label();
        self.set(label);
        label
    }

    /// `brcl when,to`.
    fn branch(&mut self, when: u8, to: Label) {
        self.labels.branch(self.bytes.len(), to);
        self.put(&[0xc0, when << 4 | 0x4, 0, 0, 0, 0]);
    }

    fn finish(mut self) -> Vec<u8> {
        for (here, to) in self.labels.branches() {
            // Code is a few KiB at most.
            let halfwords = (to as i32 - here as i32) / 2;
            self.bytes[here + 2..here + 6].copy_from_slice(&halfwords.to_be_bytes());
        }
        self.bytes
    }

    fn restore(&mut self) {
        self.put(&[0xeb, 0x25, 0xf0, 0x10, 0x00, 0x04]); // lmg %r2,%r5,16(%r15)
    }

    /// `llihf register,value` and `oilf register,value`.
    fn constant(&mut self, register: u8, value: u64) {
        let [high, low] = [(value >> 32) as u32, value as u32].map(u32::to_be_bytes);
        self.put(&[0xc0, register << 4 | 0xe]);
        self.put(&high);
        self.put(&[0xc0, register << 4 | 0xd]);
        self.put(&low);
    }

    fn pids(&mut self, pids: &[u32], pid: i32, away: Label) -> Result<(), OutOfReach> {
        let pass = self.labels.label();
        load(&mut self.bytes, pid)?; //                  llgf %r2,pid
        for pid in pids {
            self.put(&[0xc2, 0x2f]);
            self.put(&pid.to_be_bytes()); //             clfi %r2,pid
            self.branch(when::EQUAL, pass);
        }
        self.branch(when::ALWAYS, away);
        self.set(pass);
        Ok(())
    }

    fn comm(
        &mut self,
        halves: impl Iterator<Item = (u64, u64)>,
        CommPlace { current, comm }: CommPlace,
        away: Label,
    ) -> Result<(), OutOfReach> {
        self.load_long(0x20, 0, current)?; //            lg %r2,current
        for (index, (mask, value)) in (0_i32..).zip(halves) {
            self.load_long(0x32, 0, comm + 8 * index)?; // lg %r3,comm(%r2)
            if mask != u64::MAX {
                self.constant(4, mask);
                self.put(&[0xb9, 0x80, 0x00, 0x34]); //  ngr %r3,%r4
            }
            self.constant(4, value);
            self.put(&[0xb9, 0x21, 0x00, 0x34]); //      clgr %r3,%r4
            self.branch(when::NOT_EQUAL, away);
        }
        Ok(())
    }

    /// `lg` with these registers: which is loaded and the index in one byte, the base in the other.
    fn load_long(&mut self, to_index: u8, base: u8, at: i32) -> Result<(), OutOfReach> {
        let [low, high] = displacement(at)?;
        let [first, second] = low.to_be_bytes();
        self.put(&[0xe3, to_index, base << 4 | first, second, high as u8, 0x04]);
        Ok(())
    }

    fn any(&mut self, any: &[Vec<Comparison>], away: Label) -> Result<(), OutOfReach> {
        let pass = self.labels.label();
        for all in any {
            let next = self.labels.label();
            for comparison in all {
                self.compare(comparison, next)?;
            }
            self.branch(when::ALWAYS, pass);
            self.set(next);
        }
        self.branch(when::ALWAYS, away);
        self.set(pass);
        Ok(())
    }

    /// Goes on if it is true.
    fn compare(&mut self, comparison: &Comparison, otherwise: Label) -> Result<(), OutOfReach> {
        let stacked = |behind: u16| i32::from(behind);
        match comparison.place {
            GatedValue::Register(number @ 0..=3) => {
                let at = stacked(SAVED + 8 * u16::from(number));
                self.load_long(0x20, 15, at)?; //        lg %r2,..(%r15)
            }
            GatedValue::Register(_) => self.put(&[0xb9, 0x04, 0x00, 0x26]), // lgr %r2,%r6
            GatedValue::Stack(behind) => {
                // A value that is narrower has been made as wide by the caller.
                let at = stacked(ARGUMENTS) + stacked(behind);
                self.load_long(0x20, 15, at)?; //        lg %r2,..(%r15)
            }
        }
        match (comparison.bytes, comparison.signed) {
            (1, true) => self.put(&[0xb9, 0x06, 0x00, 0x22]), //  lgbr %r2,%r2
            (1, false) => self.put(&[0xb9, 0x84, 0x00, 0x22]), // llgcr %r2,%r2
            (2, true) => self.put(&[0xb9, 0x07, 0x00, 0x22]), //  lghr %r2,%r2
            (2, false) => self.put(&[0xb9, 0x85, 0x00, 0x22]), // llghr %r2,%r2
            (4, true) => self.put(&[0xb9, 0x14, 0x00, 0x22]), //  lgfr %r2,%r2
            (4, false) => self.put(&[0xb9, 0x16, 0x00, 0x22]), // llgfr %r2,%r2
            _ => {}
        }
        self.constant(4, comparison.value);
        match (comparison.operator, comparison.signed) {
            (Operator::AnyBit, _) => self.put(&[0xb9, 0x80, 0x00, 0x24]), // ngr %r2,%r4
            (_, true) => self.put(&[0xb9, 0x20, 0x00, 0x24]),             // cgr %r2,%r4
            (_, false) => self.put(&[0xb9, 0x21, 0x00, 0x24]),            // clgr %r2,%r4
        }
        let not = match comparison.operator {
            Operator::Equal => when::NOT_EQUAL,
            Operator::NotEqual | Operator::AnyBit => when::EQUAL,
            Operator::Less => when::NOT_LOW,
            Operator::AtMost => when::HIGH,
            Operator::Greater => when::NOT_HIGH,
            Operator::AtLeast => when::LOW,
        };
        self.branch(not, otherwise);
        Ok(())
    }

    /// The cell counts from 0 up to `n`, where it begins anew; at 0 a call is let through.
    fn one_in(&mut self, n: u32, away: Label) {
        let cell = Conditions::ONE_IN_CELL;
        self.put(&[0xe3, 0x20, 0x50, cell, 0x00, 0x04]); // lg %r2,8(%r5)
        let again = self.set_new();
        let keep = self.labels.label();
        self.put(&[0x41, 0x30, 0x20, 0x01]); //          la %r3,1(%r2)
        self.put(&[0xc2, 0x3e]);
        self.put(&n.to_be_bytes()); //                   clgfi %r3,n
        self.branch(when::LOW, keep);
        self.put(&[0xa7, 0x39, 0x00, 0x00]); //          lghi %r3,0
        self.set(keep);
        self.put(&[0xeb, 0x23, 0x50, cell, 0x00, 0x30]); // csg %r2,%r3,8(%r5)
        self.branch(when::LOW, again);
        self.put(&[0xb9, 0x02, 0x00, 0x22]); //          ltgr %r2,%r2
        self.branch(when::NOT_ZERO, away);
    }

    fn rate(&mut self, rate: Rate, cell: u8, away: Label) {
        self.put(&[0xb2, 0x7c, 0xf0, 0x30]); //          stckf 48(%r15)
        self.put(&[0xe3, 0x40, 0xf0, 0x30, 0x00, 0x04]); // lg %r4,48(%r15)  now
        self.put(&[0xe3, 0x20, 0x50, cell, 0x00, 0x04]); // lg %r2,cell(%r5)
        let again = self.set_new();
        let ahead = self.labels.label();
        self.constant(3, rate.slack);
        self.put(&[0xb9, 0x08, 0x00, 0x34]); //          agr %r3,%r4
        self.put(&[0xb9, 0x21, 0x00, 0x23]); //          clgr %r2,%r3
        self.branch(when::HIGH, away);
        self.constant(1, rate.every);
        self.put(&[0xb9, 0x04, 0x00, 0x32]); //          lgr %r3,%r2
        self.put(&[0xb9, 0x21, 0x00, 0x24]); //          clgr %r2,%r4
        self.branch(when::NOT_LOW, ahead);
        self.put(&[0xb9, 0x04, 0x00, 0x34]); //          lgr %r3,%r4
        self.set(ahead);
        self.put(&[0xb9, 0x08, 0x00, 0x31]); //          agr %r3,%r1
        self.put(&[0xeb, 0x23, 0x50, cell, 0x00, 0x30]); // csg %r2,%r3,cell(%r5)
        self.branch(when::LOW, again);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::gate::everything;
    use crate::arch::listing::s390x as listing;
    use crate::arch::{GatePlaces, ReturnForm, Then};
    use crate::region::Counters;

    const AT: Gva = Gva(0x3ff_fa8f_8000);

    fn gate(conditions: &Conditions) -> Vec<String> {
        let gate = Gate {
            conditions,
            counters: Counters(AT + (2 << 20)),
            places: GatePlaces {
                pid: Some(PidPlace::Fixed(0x39c)),
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
                "stmg %r2, %r5, 0x10(%r15)",
                "sllg %r5, %r1, 3",
                "larl %r1, 0x3fffaaf8000",
                "agr %r5, %r1",
                "llgf %r2, 0x39c",
                "clfi %r2, 0x2a",
                "jge 0x3fffa8f803a",
                "clfi %r2, 0x10001",
                "jge 0x3fffa8f803a",
                "jg 0x3fffa8f8188",
                "lg %r2, 0x340",
                "lg %r3, 0xb40(%r2)",
                "llihf %r4, 0x6b776f72",
                "oilf %r4, 0x6b65722f",
                "clgr %r3, %r4",
                "jglh 0x3fffa8f8188",
                "lg %r3, 0xb48(%r2)",
                "llihf %r4, 0xffff0000",
                "oilf %r4, 0",
                "ngr %r3, %r4",
                "llihf %r4, 0x30000000",
                "oilf %r4, 0",
                "clgr %r3, %r4",
                "jglh 0x3fffa8f8188",
                "lg %r2, 0x20(%r15)",
                "lgfr %r2, %r2",
                "llihf %r4, 0",
                "oilf %r4, 0x1000",
                "cgr %r2, %r4",
                "jgle 0x3fffa8f80cc",
                "lgr %r2, %r6",
                "llgcr %r2, %r2",
                "llihf %r4, 0",
                "oilf %r4, 7",
                "clgr %r2, %r4",
                "jge 0x3fffa8f80cc",
                "jg 0x3fffa8f80f4",
                "lg %r2, 0xa8(%r15)",
                "llihf %r4, 0x100",
                "oilf %r4, 0",
                "ngr %r2, %r4",
                "jge 0x3fffa8f80ee",
                "jg 0x3fffa8f80f4",
                "jg 0x3fffa8f8188",
                "lg %r2, 8(%r5)",
                "la %r3, 1(%r2)",
                "clgfi %r3, 0xa",
                "jgl 0x3fffa8f810e",
                "lghi %r3, 0",
                "csg %r2, %r3, 8(%r5)",
                "jgl 0x3fffa8f80fa",
                "ltgr %r2, %r2",
                "jgne 0x3fffa8f8188",
                "stckf 0x30(%r15)",
                "lg %r4, 0x30(%r15)",
                "lg %r2, 0x10(%r5)",
                "llihf %r3, 2",
                "oilf %r3, 0",
                "agr %r3, %r4",
                "clgr %r2, %r3",
                "jgh 0x3fffa8f8188",
                "llihf %r1, 0",
                "oilf %r1, 0x3e8",
                "lgr %r3, %r2",
                "clgr %r2, %r4",
                "jghe 0x3fffa8f816c",
                "lgr %r3, %r4",
                "agr %r3, %r1",
                "csg %r2, %r3, 0x10(%r5)",
                "jgl 0x3fffa8f8134",
                "lmg %r2, %r5, 0x10(%r15)",
                "jg 0x3fffa8f9000",
                "lg %r2, 0(%r5)",
                "la %r3, 1(%r2)",
                "csg %r2, %r3, 0(%r5)",
                "jl 0x3fffa8f818e",
                "lmg %r2, %r5, 0x10(%r15)",
                "lgr %r1, %r0",
                "br %r1",
            ]
        );
    }
}
