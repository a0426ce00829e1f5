//! The registers of a vCPU that say where its kernel and its page tables are.

use std::fmt;
use std::ops::Index;

use crate::architecture::Architecture;

/// A register that is read.
#[derive(Debug)]
pub(crate) struct Register {
    /// Its name here and in captures.
    pub(crate) name: &'static str,
    /// Its name in the description that QEMU's gdb server gives of itself.
    pub(crate) described: &'static str,
}

const fn register(name: &'static str, described: &'static str) -> Register {
    Register { name, described }
}

/// Registers whose names here are QEMU's.
macro_rules! plain {
    ($($name:literal),+) => { [$(register($name, $name)),+] };
}

static X86_64: [Register; 10] = [
    register("rip", "rip"),
    register("rsp", "rsp"),
    register("rflags", "eflags"),
    register("cs", "cs"),
    register("cr0", "cr0"),
    register("cr3", "cr3"),
    register("cr4", "cr4"),
    register("efer", "efer"),
    register("gs_base", "gs_base"),
    // The one that SWAPGS would bring in.
    register("kernel_gs_base", "k_gs_base"),
];

/// Both halves of the PSW, the general registers, the control registers that turn protections on
/// (0) and hold the roots of the address spaces (1 primary, 7 secondary, 13 home), and the address
/// of the CPU's lowcore.
static S390X: [Register; 23] = plain![
    "pswm", "pswa", "r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7", "r8", "r9", "r10", "r11",
    "r12", "r13", "r14", "r15", "cr0", "cr1", "cr7", "cr13", "prefix"
];

/// QEMU's plain `SCTLR` is that of exception level 1.
static AARCH64: [Register; 14] = [
    register("pc", "pc"),
    register("sp", "sp"),
    register("cpsr", "cpsr"),
    register("sp_el0", "SP_EL0"),
    register("ttbr0_el1", "TTBR0_EL1"),
    register("ttbr1_el1", "TTBR1_EL1"),
    register("tcr_el1", "TCR_EL1"),
    register("sctlr_el1", "SCTLR"),
    register("mair_el1", "MAIR_EL1"),
    register("tpidr_el1", "TPIDR_EL1"),
    // Where addresses to return to may be that are on no stack yet.
    register("x9", "x9"),
    register("x16", "x16"),
    register("x17", "x17"),
    register("x30", "x30"),
];

/// The registers that are read of a vCPU of that architecture.
pub(crate) fn of(architecture: Architecture) -> &'static [Register] {
    match architecture {
        Architecture::X86_64 => &X86_64,
        Architecture::S390x => &S390X,
        Architecture::Aarch64 => &AARCH64,
    }
}

/// The registers of a vCPU, by name:
///
/// | architecture | registers |
/// |---|---|
/// | x86_64 | `rip rsp rflags cs cr0 cr3 cr4 efer gs_base kernel_gs_base` |
/// | s390x | `pswm pswa` (the PSW's halves) `r0`…`r15 cr0 cr1 cr7 cr13 prefix` |
/// | aarch64 | `pc sp cpsr sp_el0 ttbr0_el1 ttbr1_el1 tcr_el1 sctlr_el1 mair_el1 tpidr_el1 x9 x16 x17 x30` |
#[derive(Clone, PartialEq, Eq)]
pub struct VcpuRegisters {
    architecture: Architecture,
    /// In the order of [`of`] that architecture.
    values: Vec<u64>,
}

impl VcpuRegisters {
    /// Takes each register from `value`; the first that fails ends it.
    pub(crate) fn read<E>(
        architecture: Architecture,
        value: impl FnMut(&'static Register) -> Result<u64, E>,
    ) -> Result<Self, E> {
        let values = of(architecture).iter().map(value).collect::<Result<_, _>>()?;
        Ok(Self { architecture, values })
    }

    /// The register of that name, if the architecture has it and it is read.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<u64> {
        self.fields().find(|(own, _)| *own == name).map(|(_, value)| value)
    }

    /// Names and values.
    pub(crate) fn fields(&self) -> impl Iterator<Item = (&'static str, u64)> {
        of(self.architecture).iter().map(|register| register.name).zip(self.values.iter().copied())
    }
}

impl fmt::Debug for VcpuRegisters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.fields()).finish()
    }
}

impl Index<&str> for VcpuRegisters {
    type Output = u64;

    /// # Panics
    /// There is no such register.
    fn index(&self, name: &str) -> &u64 {
        let place = of(self.architecture).iter().position(|register| register.name == name);
        let Some(place) = place else { panic!("{} has no register {name}", self.architecture) };
        &self.values[place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_found_by_their_names() {
        for architecture in Architecture::ALL {
            let mut next = 0;
            let registers = VcpuRegisters::read(architecture, |_| {
                next += 1;
                Ok::<u64, ()>(next)
            })
            .unwrap();
            for (number, register) in (1..).zip(of(architecture)) {
                assert_eq!(registers.get(register.name), Some(number));
                assert_eq!(registers[register.name], number);
            }
            assert_eq!(registers.get("no such register"), None);
        }
    }
}
