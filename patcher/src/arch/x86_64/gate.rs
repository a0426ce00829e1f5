//! The code of an x86_64 gate. It is entered as the code that counts is: its thunk has pushed the address of
//! the function's first cell.

use super::trampoline::append_then;
use crate::addr::Gva;
use crate::arch::gate::{Comparison, Conditions, Gate, GatedValue, Label, Labels, Operator, Rate};
use crate::arch::{CommPlace, OutOfReach, PidPlace};

/// Where things are on the stack once the code has saved what it changes.
const RDX: u8 = 8;
const RCX: u8 = 16;
const CELL: u8 = 40;
const ARGUMENTS: u32 = 64;

/// The code, to be placed at `at`.
///
/// # Errors
/// What is executed behind it is not within 2 GiB of `at`.
pub(super) fn assemble(at: Gva, gate: &Gate<'_>) -> Result<Vec<u8>, OutOfReach> {
    let conditions = gate.conditions;
    let mut code = Code::default();
    let away = code.labels.label();
    code.put(&[0x50]); //                       push rax
    code.put(&[0x9f]); //                       lahf               SF ZF AF PF CF
    code.put(&[0x0f, 0x90, 0xc0]); //           seto al
    code.put(&[0x50, 0x51, 0x52, 0x53]); //     push rax, rcx, rdx, rbx
    if let Some(PidPlace::InTask { current, pid }) = gate.places.pid
        && !conditions.pids.is_empty()
    {
        code.pids(&conditions.pids, current, pid, away);
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
    append_then(&mut code.bytes, at, gate.pass)?;
    code.set(away);
    code.put(&[0x48, 0x8b, 0x4c, 0x24, CELL]); // mov rcx, [rsp+40]
    code.put(&[0xf0, 0x48, 0xff, 0x01]); //     lock inc qword [rcx]
    code.restore();
    append_then(&mut code.bytes, at, gate.away)?;
    Ok(code.finish())
}

#[derive(Default)]
struct Code {
    bytes: Vec<u8>,
    labels: Labels,
}

/// The conditions of `jcc`, by the low half of its opcode.
mod when {
    pub const BELOW: u8 = 0x2;
    pub const NOT_BELOW: u8 = 0x3;
    pub const EQUAL: u8 = 0x4;
    pub const NOT_EQUAL: u8 = 0x5;
    pub const NOT_ABOVE: u8 = 0x6;
    pub const ABOVE: u8 = 0x7;
    pub const LESS: u8 = 0xc;
    pub const NOT_LESS: u8 = 0xd;
    pub const NOT_GREATER: u8 = 0xe;
    pub const GREATER: u8 = 0xf;
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

    /// `jcc to`.
    fn jump_if(&mut self, when: u8, to: Label) {
        self.put(&[0x0f, 0x80 | when]);
        self.distance(to);
    }

    /// `jmp to`.
    fn jump(&mut self, to: Label) {
        self.put(&[0xe9]);
        self.distance(to);
    }

    fn distance(&mut self, to: Label) {
        self.labels.branch(self.bytes.len(), to);
        self.put(&[0; 4]);
    }

    fn finish(mut self) -> Vec<u8> {
        for (here, to) in self.labels.branches() {
            // Code is a few KiB at most.
            let distance = to as i32 - (here as i32 + 4);
            self.bytes[here..here + 4].copy_from_slice(&distance.to_le_bytes());
        }
        self.bytes
    }

    fn restore(&mut self) {
        self.put(&[0x5b, 0x5a, 0x59, 0x58]); //  pop rbx, rdx, rcx, rax
        self.put(&[0x04, 0x7f]); //              add al, 0x7f       overflows if al is 1: OF as it was
        self.put(&[0x9e]); //                    sahf               the others as they were
        self.put(&[0x58]); //                    pop rax
        self.put(&[0x48, 0x8d, 0x64, 0x24, 0x08]); // lea rsp, [rsp+8]
    }

    /// `mov rax, gs:[current]`.
    fn task(&mut self, current: i32) {
        self.put(&[0x65, 0x48, 0x8b, 0x04, 0x25]);
        self.put(&current.to_le_bytes());
    }

    /// `mov rcx, value`.
    fn constant(&mut self, value: u64) {
        self.put(&[0x48, 0xb9]);
        self.put(&value.to_le_bytes());
    }

    /// `mov rdx, value`.
    fn constant_rdx(&mut self, value: u64) {
        self.put(&[0x48, 0xba]);
        self.put(&value.to_le_bytes());
    }

    fn pids(&mut self, pids: &[u32], current: i32, pid: i32, away: Label) {
        let pass = self.labels.label();
        self.task(current);
        self.put(&[0x8b, 0x80]);
        self.put(&pid.to_le_bytes()); //         mov eax, [rax+pid]
        for pid in pids {
            self.put(&[0x3d]);
            self.put(&pid.to_le_bytes()); //     cmp eax, pid
            self.jump_if(when::EQUAL, pass);
        }
        self.jump(away);
        self.set(pass);
    }

    fn comm(
        &mut self,
        halves: impl Iterator<Item = (u64, u64)>,
        CommPlace { current, comm }: CommPlace,
        away: Label,
    ) {
        self.task(current);
        for (index, (mask, value)) in (0_i32..).zip(halves) {
            self.put(&[0x48, 0x8b, 0x90]);
            self.put(&(comm + 8 * index).to_le_bytes()); // mov rdx, [rax+comm]
            if mask != u64::MAX {
                self.constant(mask);
                self.put(&[0x48, 0x21, 0xca]); // and rdx, rcx
            }
            self.constant(value);
            self.put(&[0x48, 0x39, 0xca]); //    cmp rdx, rcx
            self.jump_if(when::NOT_EQUAL, away);
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
            GatedValue::Register(0) => self.put(&[0x48, 0x89, 0xf8]), // mov rax, rdi
            GatedValue::Register(1) => self.put(&[0x48, 0x89, 0xf0]), // mov rax, rsi
            GatedValue::Register(2) => self.put(&[0x48, 0x8b, 0x44, 0x24, RDX]),
            GatedValue::Register(3) => self.put(&[0x48, 0x8b, 0x44, 0x24, RCX]),
            GatedValue::Register(4) => self.put(&[0x4c, 0x89, 0xc0]), // mov rax, r8
            GatedValue::Register(_) => self.put(&[0x4c, 0x89, 0xc8]), // mov rax, r9
            GatedValue::Stack(behind) => {
                self.put(&[0x48, 0x8b, 0x84, 0x24]); // mov rax, [rsp+..]
                self.put(&(ARGUMENTS + u32::from(behind)).to_le_bytes());
            }
        }
        match (comparison.bytes, comparison.signed) {
            (1, true) => self.put(&[0x48, 0x0f, 0xbe, 0xc0]), // movsx rax, al
            (1, false) => self.put(&[0x0f, 0xb6, 0xc0]),      // movzx eax, al
            (2, true) => self.put(&[0x48, 0x0f, 0xbf, 0xc0]), // movsx rax, ax
            (2, false) => self.put(&[0x0f, 0xb7, 0xc0]),      // movzx eax, ax
            (4, true) => self.put(&[0x48, 0x63, 0xc0]),       // movsxd rax, eax
            (4, false) => self.put(&[0x89, 0xc0]),            // mov eax, eax
            _ => {}
        }
        self.constant(comparison.value);
        if comparison.operator == Operator::AnyBit {
            self.put(&[0x48, 0x85, 0xc8]); //    test rax, rcx
        } else {
            self.put(&[0x48, 0x39, 0xc8]); //    cmp rax, rcx
        }
        let not = match (comparison.operator, comparison.signed) {
            (Operator::Equal, _) => when::NOT_EQUAL,
            (Operator::NotEqual | Operator::AnyBit, _) => when::EQUAL,
            (Operator::Less, true) => when::NOT_LESS,
            (Operator::Less, false) => when::NOT_BELOW,
            (Operator::AtMost, true) => when::GREATER,
            (Operator::AtMost, false) => when::ABOVE,
            (Operator::Greater, true) => when::NOT_GREATER,
            (Operator::Greater, false) => when::NOT_ABOVE,
            (Operator::AtLeast, true) => when::LESS,
            (Operator::AtLeast, false) => when::BELOW,
        };
        self.jump_if(not, otherwise);
    }

    /// The cell counts from 0 up to `n`, where it begins anew; at 0 a call is let through.
    fn one_in(&mut self, n: u32, away: Label) {
        let cell = Conditions::ONE_IN_CELL;
        self.put(&[0x48, 0x8b, 0x4c, 0x24, CELL]); // mov rcx, [rsp+40]
        self.put(&[0x48, 0x8b, 0x41, cell]); //  mov rax, [rcx+8]
        let again = self.set_new();
        let keep = self.labels.label();
        self.put(&[0x48, 0x8d, 0x50, 0x01]); //  lea rdx, [rax+1]
        self.put(&[0xbb]);
        self.put(&n.to_le_bytes()); //           mov ebx, n
        self.put(&[0x48, 0x39, 0xda]); //        cmp rdx, rbx
        self.jump_if(when::BELOW, keep);
        self.put(&[0x31, 0xd2]); //              xor edx, edx
        self.set(keep);
        self.put(&[0xf0, 0x48, 0x0f, 0xb1, 0x51, cell]); // lock cmpxchg [rcx+8], rdx
        self.jump_if(when::NOT_EQUAL, again);
        self.put(&[0x48, 0x85, 0xc0]); //        test rax, rax
        self.jump_if(when::NOT_EQUAL, away);
    }

    fn rate(&mut self, rate: Rate, cell: u8, away: Label) {
        self.put(&[0x0f, 0x31]); //              rdtsc
        self.put(&[0x48, 0xc1, 0xe2, 32]); //    shl rdx, 32
        self.put(&[0x48, 0x09, 0xd0]); //        or rax, rdx
        self.put(&[0x48, 0x89, 0xc3]); //        mov rbx, rax       now
        self.put(&[0x48, 0x8b, 0x4c, 0x24, CELL]); // mov rcx, [rsp+40]
        self.put(&[0x48, 0x8b, 0x41, cell]); //  mov rax, [rcx+cell]
        let again = self.set_new();
        self.constant_rdx(rate.slack);
        self.put(&[0x48, 0x01, 0xda]); //        add rdx, rbx
        self.put(&[0x48, 0x39, 0xd0]); //        cmp rax, rdx
        self.jump_if(when::ABOVE, away);
        let (late, set) = (self.labels.label(), self.labels.label());
        self.constant_rdx(rate.every);
        self.put(&[0x48, 0x39, 0xd8]); //        cmp rax, rbx
        self.jump_if(when::BELOW, late);
        self.put(&[0x48, 0x01, 0xc2]); //        add rdx, rax
        self.jump(set);
        self.set(late);
        self.put(&[0x48, 0x01, 0xda]); //        add rdx, rbx
        self.set(set);
        self.put(&[0xf0, 0x48, 0x0f, 0xb1, 0x51, cell]); // lock cmpxchg [rcx+cell], rdx
        self.jump_if(when::NOT_EQUAL, again);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::gate::everything;
    use crate::arch::listing::x86_64 as listing;
    use crate::arch::{GatePlaces, ReturnForm, Then};
    use crate::region::Counters;

    const AT: Gva = Gva(0xffff_ffff_be00_0000);

    fn gate(conditions: &Conditions) -> Vec<String> {
        let gate = Gate {
            conditions,
            counters: Counters(AT + (2 << 20)),
            places: GatePlaces {
                pid: Some(PidPlace::InTask { current: 0x1_fb80, pid: 2416 }),
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
                "push rax",
                "lahf",
                "seto al",
                "push rax",
                "push rcx",
                "push rdx",
                "push rbx",
                "mov rax, qword ptr gs:[0x1fb80]",
                "mov eax, dword ptr [rax + 0x970]",
                "cmp eax, 0x2a",
                "je 0xffffffffbe000033",
                "cmp eax, 0x10001",
                "je 0xffffffffbe000033",
                "jmp 0xffffffffbe000175",
                "mov rax, qword ptr gs:[0x340]",
                "mov rdx, qword ptr [rax + 0xb40]",
                "movabs rcx, 0x2f72656b726f776b",
                "cmp rdx, rcx",
                "jne 0xffffffffbe000175",
                "mov rdx, qword ptr [rax + 0xb48]",
                "movabs rcx, 0xffff",
                "and rdx, rcx",
                "movabs rcx, 0x30",
                "cmp rdx, rcx",
                "jne 0xffffffffbe000175",
                "mov rax, qword ptr [rsp + 8]",
                "movsxd rax, eax",
                "movabs rcx, 0x1000",
                "cmp rax, rcx",
                "jle 0xffffffffbe0000b6",
                "mov rax, r8",
                "movzx eax, al",
                "movabs rcx, 7",
                "cmp rax, rcx",
                "je 0xffffffffbe0000b6",
                "jmp 0xffffffffbe0000db",
                "mov rax, qword ptr [rsp + 0x48]",
                "movabs rcx, 0x10000000000",
                "test rax, rcx",
                "je 0xffffffffbe0000d6",
                "jmp 0xffffffffbe0000db",
                "jmp 0xffffffffbe000175",
                "mov rcx, qword ptr [rsp + 0x28]",
                "mov rax, qword ptr [rcx + 8]",
                "lea rdx, [rax + 1]",
                "mov ebx, 0xa",
                "cmp rdx, rbx",
                "jb 0xffffffffbe0000f8",
                "xor edx, edx",
                "lock cmpxchg qword ptr [rcx + 8], rdx",
                "jne 0xffffffffbe0000e4",
                "test rax, rax",
                "jne 0xffffffffbe000175",
                "rdtsc",
                "shl rdx, 0x20",
                "or rax, rdx",
                "mov rbx, rax",
                "mov rcx, qword ptr [rsp + 0x28]",
                "mov rax, qword ptr [rcx + 0x10]",
                "movabs rdx, 0x200000000",
                "add rdx, rbx",
                "cmp rax, rdx",
                "ja 0xffffffffbe000175",
                "movabs rdx, 0x3e8",
                "cmp rax, rbx",
                "jb 0xffffffffbe000153",
                "add rdx, rax",
                "jmp 0xffffffffbe000156",
                "add rdx, rbx",
                "lock cmpxchg qword ptr [rcx + 0x10], rdx",
                "jne 0xffffffffbe000122",
                "pop rbx",
                "pop rdx",
                "pop rcx",
                "pop rax",
                "add al, 0x7f",
                "sahf",
                "pop rax",
                "lea rsp, [rsp + 8]",
                "jmp 0xffffffffbe001000",
                "int3",
                "mov rcx, qword ptr [rsp + 0x28]",
                "lock inc qword ptr [rcx]",
                "pop rbx",
                "pop rdx",
                "pop rcx",
                "pop rax",
                "add al, 0x7f",
                "sahf",
                "pop rax",
                "lea rsp, [rsp + 8]",
                "ret",
                "int3",
            ]
        );
    }
}
