//! The stacks of tasks and CPUs.

use crate::addr::Gva;
use crate::arch::{CpuArea, CpuStack, CpuVariable, Extent, Standing, TaskStacks};
use crate::machine::Registers;

/// All registers that a task keeps are on its stack.
pub const TASK: TaskStacks =
    TaskStacks { sp: &[("task_struct", "thread"), ("thread_struct", "sp")], registers: None };

/// The most bytes of the stack for interrupts (`IRQ_STACK_SIZE`), of one for exceptions
/// (`EXCEPTION_STKSZ`), and of the one on which the kernel is entered from user mode.
const INTERRUPTS: u64 = 16 << 10;
const EXCEPTIONS: u64 = 8 << 10;
const ENTRY: u64 = 4 << 10;

const fn stack(symbol: &'static str, offset: u64, at_most: u64) -> CpuStack {
    let at = CpuVariable { symbol: Some(symbol), offset };
    CpuStack { at, extent: Extent::EndsThere { at_most } }
}

/// The task state segment, in the processor's own format (Intel SDM volume 3, "Task management in
/// 64-bit mode"), has the stacks for exceptions and the one for entries. The stack for interrupts is
/// told by a variable of its own up to 6.1 and again from 6.15; between, by one of the two last fields
/// of struct pcpu_hot, by configuration, the other of which tells the current task's
/// (arch/x86/include/asm/current.h).
pub static CPU: [CpuStack; 11] = [
    stack("cpu_tss_rw", 36, EXCEPTIONS),
    stack("cpu_tss_rw", 44, EXCEPTIONS),
    stack("cpu_tss_rw", 52, EXCEPTIONS),
    stack("cpu_tss_rw", 60, EXCEPTIONS),
    stack("cpu_tss_rw", 68, EXCEPTIONS),
    stack("cpu_tss_rw", 76, EXCEPTIONS),
    stack("cpu_tss_rw", 84, EXCEPTIONS),
    stack("cpu_tss_rw", 4, ENTRY),
    stack("hardirq_stack_ptr", 0, INTERRUPTS),
    stack("pcpu_hot", 32, INTERRUPTS),
    stack("pcpu_hot", 24, INTERRUPTS),
];

pub fn standing(registers: &Registers) -> Standing {
    /// CR0: paging. EFER: long mode is active.
    const PAGING: u64 = 1 << 31;
    const LONG_MODE: u64 = 1 << 10;
    match registers {
        Registers::X86_64(x86) if x86.cr0 & PAGING != 0 && x86.efer & LONG_MODE != 0 => {
            match x86.cs & 3 {
                0 => Standing::Kernel { sp: Gva(x86.rsp), links: Vec::new() },
                _ => Standing::User,
            }
        }
        _ => Standing::Elsewhere,
    }
}

/// Of the two bases of GS the one in the kernel's half: which of them is in use is not told by the
/// privilege, as a vCPU may stand between an entry and its SWAPGS.
pub fn cpu_area(registers: &Registers) -> Option<CpuArea> {
    let Registers::X86_64(x86) = registers else { return None };
    let bases = [x86.gs_base, x86.kernel_gs_base];
    bases.into_iter().find(|base| base >> 63 == 1).map(CpuArea::Offset)
}
