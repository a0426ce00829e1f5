//! The stacks of tasks and CPUs.

use crate::addr::{Gpa, Gva};
use crate::arch::{CpuArea, CpuStack, CpuVariable, Extent, Standing, TaskStacks};
use crate::machine::Registers;

/// All registers that a task keeps are on its stack.
pub const TASK: TaskStacks =
    TaskStacks { sp: &[("task_struct", "thread"), ("thread_struct", "ksp")], registers: None };

const fn lowcore(offset: u64) -> CpuVariable {
    CpuVariable { symbol: None, offset }
}

const fn stack(offset: u64) -> CpuStack {
    CpuStack { at: lowcore(offset), extent: Extent::AsTasks }
}

/// The fields of struct lowcore (arch/s390/include/asm/lowcore.h) are at these distances from 5.10
/// on: the current task, and in front of the address of its stack those of the stacks for machine
/// checks, restarts, code without address translation, and interrupts.
pub const CURRENT_TASK: CpuVariable = lowcore(0x340);
pub static CPU: [CpuStack; 4] = [stack(0x368), stack(0x360), stack(0x358), stack(0x350)];

/// PSW: the processor runs a process (problem state).
const PROBLEM_STATE: u64 = 1 << 48;

pub fn standing(registers: &Registers) -> Standing {
    match registers {
        Registers::S390x(s390x) if super::paging::address_spaces(s390x).is_ok() => {
            if s390x.psw_mask & PROBLEM_STATE != 0 {
                return Standing::User;
            }
            // Calls leave the address to return to in any register, by convention in the 14th; a
            // trampoline has a pad's in the first two.
            Standing::Kernel { sp: Gva(s390x.gprs[15]), links: s390x.gprs.to_vec() }
        }
        _ => Standing::Elsewhere,
    }
}

pub fn cpu_area(registers: &Registers) -> Option<CpuArea> {
    let Registers::S390x(s390x) = registers else { return None };
    s390x.prefix.map(|prefix| CpuArea::Fixed(Gpa(prefix)))
}
