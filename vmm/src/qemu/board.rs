//! The machines that QEMU emulates: all that differs between them, as data.

use std::fmt;
use std::str::FromStr;

use patcher::arch::ByteOrder;
use patcher::machine::{Aarch64Registers, Registers, S390xRegisters, X86Registers};

/// The processor architecture of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// 64-bit x86.
    X86_64,
    /// IBM Z.
    S390x,
    /// 64-bit Arm.
    Aarch64,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::X86_64, Self::S390x, Self::Aarch64];

    /// The architecture of this host, if guests can have it.
    #[must_use]
    pub fn host() -> Option<Self> {
        std::env::consts::ARCH.parse().ok()
    }

    /// Its name, as `uname -m` has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::S390x => "s390x",
            Self::Aarch64 => "aarch64",
        }
    }

    /// The kernel parameters that a launched guest always has, but for `mem=`: console on the first
    /// serial line, and a panic ends the guest.
    #[must_use]
    pub fn base_cmdline(self) -> &'static str {
        self.board().cmdline
    }

    pub(super) fn board(self) -> &'static Board {
        match self {
            Self::X86_64 => &Q35,
            Self::S390x => &CCW,
            Self::Aarch64 => &VIRT,
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no architecture of guests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no architecture of guests; they are x86_64, s390x and aarch64")]
pub struct NoArchitecture(String);

impl FromStr for Architecture {
    type Err = NoArchitecture;

    fn from_str(name: &str) -> Result<Self, NoArchitecture> {
        let found = Self::ALL.into_iter().find(|architecture| architecture.name() == name);
        found.ok_or_else(|| NoArchitecture(name.chars().take(40).collect()))
    }
}

/// A machine as QEMU emulates it.
#[derive(Debug)]
pub(super) struct Board {
    /// QEMU's program for it.
    pub program: &'static str,
    /// The value of `-machine`.
    pub machine: &'static str,
    /// How the types of such machines begin in QEMU's object model.
    pub types: &'static [&'static str],
    /// The processor with everything that QEMU emulates.
    pub emulated_cpu: &'static str,
    /// Kernel parameters.
    pub cmdline: &'static str,
    /// The guest-physical address at which RAM begins.
    pub ram_base: u64,
    /// Where RAM that is large has a hole.
    pub hole: Option<Hole>,
    /// The most steps that all of RAM is cut into; a step is a power of two of MiB.
    pub steps: Option<u64>,
    /// How the gdbstub sends the bytes of registers.
    pub order: ByteOrder,
    /// How fast the clock ticks that time stamps are taken from.
    pub clock: ClockRate,
    /// The registers that are wanted.
    pub registers: RegisterFile,
}

/// A hole in guest-physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hole {
    /// RAM smaller than this has none.
    pub from: u64,
    /// Where it begins.
    pub start: u64,
    /// Where RAM goes on.
    pub end: u64,
}

/// How fast a guest's clock ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClockRate {
    /// As this host's time-stamp counter.
    HostTsc,
    /// Always so many ticks a second.
    Fixed(u64),
    /// As this register says, in Hz.
    Register(&'static str),
}

/// The registers of a vCPU: how they are called and where they go.
#[derive(Debug)]
pub(super) struct RegisterFile {
    pub blank: fn() -> Registers,
    pub fields: &'static [Field],
}

/// One register.
#[derive(Debug)]
pub(super) struct Field {
    /// Its name in target descriptions.
    pub name: &'static str,
    /// A QEMU may not tell it.
    pub optional: bool,
    /// Puts its value where it belongs.
    pub set: fn(&mut Registers, u64),
}

/// The fields of a register file; behind `or_none`, those that need not be there.
macro_rules! register_file {
    ($kind:ident, $registers:ident: $($name:literal => $field:ident $([$index:literal])?),+
     $(; or_none: $(($absent:literal => $option:ident)),+)? $(,)?) => {
        RegisterFile {
            blank: || Registers::$kind($registers::default()),
            fields: &[
                $(Field {
                    name: $name,
                    optional: false,
                    set: |registers, value| {
                        if let Registers::$kind(registers) = registers {
                            registers.$field $([$index])? = value as _;
                        }
                    },
                },)+
                $($(Field {
                    name: $absent,
                    optional: true,
                    set: |registers, value| {
                        if let Registers::$kind(registers) = registers {
                            registers.$option = Some(value);
                        }
                    },
                },)+)?
            ],
        }
    };
}

/// What the x86_64 kernel itself calls a PC. The hole's borders are in QEMU's `hw/i386/pc_q35.c`.
static Q35: Board = Board {
    program: "qemu-system-x86_64",
    machine: "q35",
    types: &["pc-q35-"],
    emulated_cpu: "max",
    cmdline: "console=ttyS0 reboot=k panic=-1",
    ram_base: 0,
    hole: Some(Hole { from: 0xb000_0000, start: 2 << 30, end: 4 << 30 }),
    steps: None,
    order: ByteOrder::Little,
    clock: ClockRate::HostTsc,
    registers: register_file!(X86_64, X86Registers:
        "rip" => rip, "rsp" => rsp, "eflags" => rflags, "cs" => cs, "cr0" => cr0, "cr3" => cr3,
        "cr4" => cr4, "efer" => efer, "gs_base" => gs_base, "k_gs_base" => kernel_gs_base),
};

/// A Z mainframe with the console of its service element. Its clock counts 4096 to the microsecond
/// (z/Architecture Principles of Operation, "TOD clock").
static CCW: Board = Board {
    program: "qemu-system-s390x",
    machine: "s390-ccw-virtio",
    types: &["s390-ccw-virtio-"],
    emulated_cpu: "max",
    cmdline: "console=ttysclp0 panic=-1",
    ram_base: 0,
    hole: None,
    // `MAX_STORAGE_INCREMENTS` of QEMU's `include/hw/s390x/sclp.h`.
    steps: Some(1020),
    order: ByteOrder::Big,
    clock: ClockRate::Fixed(4_096_000_000),
    registers: register_file!(S390x, S390xRegisters:
        "pswm" => psw_mask, "pswa" => psw_addr,
        "r0" => gprs[0], "r1" => gprs[1], "r2" => gprs[2], "r3" => gprs[3], "r4" => gprs[4],
        "r5" => gprs[5], "r6" => gprs[6], "r7" => gprs[7], "r8" => gprs[8], "r9" => gprs[9],
        "r10" => gprs[10], "r11" => gprs[11], "r12" => gprs[12], "r13" => gprs[13],
        "r14" => gprs[14], "r15" => gprs[15],
        "cr1" => cr1, "cr7" => cr7, "cr13" => cr13;
        or_none: ("prefix" => prefix)),
};

/// The machine that exists only in QEMU. Its `SCTLR` is that of EL1. Pointers are signed in the
/// guest's own way, which nothing depends on, as the architected one takes much of an emulated
/// guest's time.
static VIRT: Board = Board {
    program: "qemu-system-aarch64",
    machine: "virt,gic-version=max",
    types: &["virt-"],
    emulated_cpu: "max,pauth-impdef=on",
    cmdline: "console=ttyAMA0 panic=-1",
    ram_base: 1 << 30,
    hole: None,
    steps: None,
    order: ByteOrder::Little,
    clock: ClockRate::Register("CNTFRQ_EL0"),
    registers: register_file!(Aarch64, Aarch64Registers:
        "pc" => pc, "sp" => sp, "cpsr" => pstate, "SP_EL0" => sp_el0, "TTBR1_EL1" => ttbr1,
        "TCR_EL1" => tcr, "SCTLR" => sctlr, "MAIR_EL1" => mair, "TPIDR_EL1" => tpidr_el1,
        "x9" => links[0], "x16" => links[1], "x17" => links[2], "x30" => links[3]),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_known_by_their_names() {
        for architecture in Architecture::ALL {
            assert_eq!(architecture.to_string().parse(), Ok(architecture));
        }
        let error = "riscv64".parse::<Architecture>().unwrap_err().to_string();
        assert!(error.contains("riscv64") && error.contains("s390x"), "{error}");
    }

    #[test]
    fn every_register_has_a_place_of_its_own() {
        for architecture in Architecture::ALL {
            let RegisterFile { blank, fields } = architecture.board().registers;
            let mut seen = vec![blank()];
            for (number, field) in fields.iter().enumerate() {
                let mut registers = blank();
                (field.set)(&mut registers, number as u64 + 1);
                assert!(!seen.contains(&registers), "{architecture} {}", field.name);
                seen.push(registers);
            }
        }
    }
}
