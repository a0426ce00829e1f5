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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::aarch64::paging::{FIVE_LEVELS, FOUR_LEVELS, THREE_LEVELS};
    use crate::machine::Aarch64Registers;

    #[test]
    fn addresses_are_bare_of_what_authenticates_them() {
        let address = 0xffff_d956_1c66_3380;
        // Whatever stands above the address, but for the bit that tells the half.
        for signature in [0, 0x7f, 0x2a] {
            let signed = address & 0x0080_ffff_ffff_ffff | signature << 56 | signature << 48;
            assert_eq!(code_address(&FOUR_LEVELS, signed), address);
        }
        assert_eq!(code_address(&THREE_LEVELS, 0x0080_0050_1c66_3380), 0xffff_ffd0_1c66_3380);
        assert_eq!(code_address(&FIVE_LEVELS, 0x00a5_8000_1234_5678), 0xfff5_8000_1234_5678);
        // An address of a process has no bits above.
        assert_eq!(code_address(&FOUR_LEVELS, 0x002a_aaaa_1234_5678), 0x002a_aaaa_1234_5678);
    }

    #[test]
    fn a_cpu_below_the_kernels_level_runs_a_process() {
        let at = |pstate| {
            let running = Aarch64Registers {
                pstate,
                sctlr: 1,
                tcr: 0b10 << 30 | 16 << 16,
                sp: 0x1000,
                links: [1, 2, 3, 4],
                ..Default::default()
            };
            standing(&Registers::Aarch64(running))
        };
        assert_eq!(at(0), Standing::User);
        let links = vec![1, 2, 3, 4];
        assert_eq!(at(5), Standing::Kernel { sp: Gva(0x1000), links });
        // A hypervisor's.
        assert_eq!(at(9), Standing::Elsewhere);
        assert_eq!(standing(&Registers::Aarch64(Aarch64Registers::default())), Standing::Elsewhere);
    }
}
