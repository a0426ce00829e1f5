//! How a guest ends.

use std::fmt;

use patcher::machine::X86Registers;

/// Why a guest runs no more.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum GuestExit {
    /// The guest powered itself off.
    PowerOff,
    /// The guest asked to be reset, which ends it too.
    Reboot,
    /// The guest's kernel panicked, as its machine tells.
    Panicked,
    /// A vCPU could not deliver a fault nor the double fault after it: a crash without a trace in
    /// the guest, unless the guest uses it to reboot.
    TripleFault {
        /// The vCPU.
        vcpu: usize,
        /// Its registers; nothing where the CPU does not keep them, as AMD's does not.
        registers: Option<X86Registers>,
    },
    /// The host's CPU refused the guest's state.
    EntryFailed {
        /// The vCPU.
        vcpu: usize,
        /// The hardware's reason, a code of its manufacturer's.
        reason: u64,
        /// The host CPU on which it happened.
        host_cpu: u32,
    },
    /// KVM could not go on.
    InternalError {
        /// The vCPU.
        vcpu: usize,
        /// What KVM reported, in words.
        what: String,
        /// Where the vCPU was, if that is known.
        registers: Option<X86Registers>,
    },
    /// QEMU, which ran the guest, has ended by itself.
    QemuEnded {
        /// How, and what it said last.
        what: String,
    },
    /// It was ended from outside.
    Killed,
}

impl GuestExit {
    /// Whether the guest ended in a way that it, or its user, meant.
    #[must_use]
    pub fn is_orderly(&self) -> bool {
        matches!(self, GuestExit::PowerOff | GuestExit::Reboot | GuestExit::Killed)
    }
}

impl fmt::Display for GuestExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GuestExit::PowerOff => f.write_str("the guest powered off"),
            GuestExit::Reboot => f.write_str("the guest asked for a reboot"),
            GuestExit::Panicked => f.write_str("the guest's kernel has panicked"),
            GuestExit::TripleFault { vcpu, registers: Some(registers) } => {
                write!(f, "vCPU {vcpu} died of a triple fault{}", At(registers))
            }
            GuestExit::TripleFault { vcpu, registers: None } => write!(
                f,
                "vCPU {vcpu} died of a triple fault; this host's CPU does not keep the registers"
            ),
            GuestExit::EntryFailed { vcpu, reason, host_cpu } => write!(
                f,
                "host CPU {host_cpu} refused to run vCPU {vcpu}, hardware reason {reason:#x}"
            ),
            GuestExit::InternalError { vcpu, what, registers } => {
                write!(f, "KVM gave up on vCPU {vcpu}: {what}")?;
                registers.as_ref().map_or(Ok(()), |registers| At(registers).fmt(f))
            }
            GuestExit::QemuEnded { what } => {
                write!(f, "QEMU has ended and the guest with it: {what}")
            }
            GuestExit::Killed => f.write_str("the guest was killed"),
        }
    }
}

struct At<'a>(&'a X86Registers);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let X86Registers { rip, rsp, rflags, cs, cr3, .. } = self.0;
        write!(f, " at rip {rip:#x} (cs {cs:#x}, rsp {rsp:#x}, rflags {rflags:#x}, cr3 {cr3:#x})")
    }
}
