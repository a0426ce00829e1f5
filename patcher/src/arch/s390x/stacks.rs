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
/// PSW: addresses have 64 bits.
const WIDE: u64 = 3 << 31;

pub fn standing(registers: &Registers) -> Standing {
    match registers {
        // Kernels run some code without address translation.
        Registers::S390x(s390x) if s390x.psw_mask & WIDE == WIDE => {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::S390xRegisters;

    #[test]
    fn a_cpu_in_problem_state_runs_a_process() {
        // As kernels have them: home space, waiting; primary space, problem state; without translation.
        let mut gprs = [0; 16];
        (gprs[14], gprs[15]) = (0x12_3456, 0x37f_fd00_3b58);
        let standing = |psw_mask| {
            standing(&Registers::S390x(S390xRegisters { psw_mask, gprs, ..Default::default() }))
        };
        let kernel = Standing::Kernel { sp: Gva(gprs[15]), links: gprs.to_vec() };
        assert_eq!(standing(0x0706_c001_8000_0000), kernel);
        assert_eq!(standing(0x0404_c001_8000_0000), kernel);
        assert_eq!(standing(0x0000_0001_8000_0000), kernel);
        assert_eq!(standing(0x0705_2001_8000_0000), Standing::User);
        assert_eq!(standing(0), Standing::Elsewhere);
    }

    #[test]
    fn a_cpu_without_a_known_prefix_has_no_known_area() {
        let registers = |prefix| Registers::S390x(S390xRegisters { prefix, ..Default::default() });
        assert_eq!(cpu_area(&registers(None)), None);
        assert_eq!(cpu_area(&registers(Some(0x1db_4000))), Some(CpuArea::Fixed(Gpa(0x1db_4000))));
    }
}
