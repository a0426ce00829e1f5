//! The stacks of tasks and CPUs.
//!
//! A CPU has one for interrupts, beside that for overflows of others, from which nothing returns. Up to
//! 6.1 no symbol tells where it is; there are unmapped pages on both sides of it.

use crate::addr::Gva;
use crate::arch::paging::TableFormat;
use crate::arch::{Standing, TaskStacks};
use crate::machine::Registers;

/// The registers that a task keeps for whoever switched to another are in the task: ten that
/// functions preserve, the frame pointer, the stack pointer and the address where it goes on
/// (struct cpu_context, arch/arm64/include/asm/processor.h).
pub const TASK: TaskStacks = TaskStacks {
    sp: &[("task_struct", "thread"), ("thread_struct", "cpu_context"), ("cpu_context", "sp")],
    registers: Some((
        &[("task_struct", "thread"), ("thread_struct", "cpu_context"), ("cpu_context", "x19")],
        13,
    )),
};

/// PSTATE: the exception level.
const LEVEL: u64 = 0xc;

pub fn standing(registers: &Registers) -> Standing {
    match registers {
        Registers::Aarch64(aarch64) if super::paging::address_spaces(aarch64).is_ok() => {
            if aarch64.pstate & LEVEL == 0 {
                return Standing::User;
            }
            Standing::Kernel { sp: Gva(aarch64.sp), links: aarch64.links.to_vec() }
        }
        _ => Standing::Elsewhere,
    }
}

/// The address without the bits that authenticate it: those above the addresses that are translated
/// are all one in the kernel's half, which bit 55 tells.
pub fn code_address(format: &TableFormat, word: u64) -> u64 {
    if word >> 55 & 1 == 1 { word | u64::MAX << format.va_bits } else { word }
}
