//! What an engine gives: a [`Machine`] that runs, and a [`Stopped`] one that may be changed.
//!
//! [`Stopped::write_text`] exists on no other type, so code that patches a running guest does not
//! compile. Dropping a [`Stopped`] resumes the guest.

use std::sync::Arc;
use std::time::Duration;

use crate::addr::Gpa;
use crate::journal::Journal;
use crate::mem::PhysMem;
use crate::region::{NoTraps, Part, RegionWindow, Traps};

/// A guest under an engine's control.
///
/// All methods take `&self`: one thread may drain rings while another stops the guest.
pub trait Machine: Sync {
    /// The guest's RAM.
    fn ram(&self) -> &dyn PhysMem;

    /// How many vCPUs the guest has, online or not.
    fn vcpus(&self) -> usize;

    /// One part of the region, the memory that the hypervisor provides. What the guest may do with it
    /// is what [`Part`] says.
    fn region(&self, part: Part) -> RegionWindow<'_>;

    /// The frequency in Hz of the clock that the guest's time-stamp instruction reads.
    fn clock_hz(&self) -> u64;

    /// Where to note what is written into a guest that may outlive this process; `None` for one that
    /// ends with it.
    fn journal(&self) -> Option<&Journal> {
        None
    }

    /// How often the guest was reset since it is under the engine's control, as far as the engine is
    /// told: each time its kernel was gone, and all that was in it. A reset that ends the guest does
    /// not count.
    fn resets(&self) -> u64 {
        0
    }

    /// Has the engine answer these traps, and no others, from now on.
    ///
    /// # Errors
    /// The engine can't; that is what one says that knows nothing of them.
    fn set_traps(&self, _traps: Arc<Traps>) -> Result<(), NoTraps> {
        Err(NoTraps)
    }

    /// Takes one vCPU out of the guest, reads its registers and lets it run on. The others are not
    /// touched.
    ///
    /// # Errors
    /// As [`Machine::stop`].
    fn sample(&self, vcpu: usize) -> Result<Registers, StopError>;

    /// Stops every vCPU at an instruction boundary with no device access half done.
    ///
    /// # Errors
    /// A vCPU that does not stop in time, or a guest that is gone. Every vCPU then runs as before.
    fn stop(&self) -> Result<Box<dyn Stopped + '_>, StopError>;
}

/// A guest whose vCPUs all stand still. Dropping it resumes them.
pub trait Stopped {
    /// The registers of one vCPU.
    ///
    /// # Errors
    /// [`StopError::NoSuchVcpu`], or what the engine says.
    fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError>;

    /// Writes text, in the order given, so that vCPUs execute it from the moment they resume: in the
    /// guest's RAM, or in the region's code part ([`Part::Code`]).
    ///
    /// # Errors
    /// Stops at the first write that fails and says which; the guest may have seen any part of that
    /// one, all of those before it and none of those behind it.
    fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError>;

    /// Has one vCPU execute one instruction while the others stand.
    ///
    /// # Errors
    /// What the engine says; one that can't says so.
    fn step(&mut self, _vcpu: usize) -> Result<(), StopError> {
        Err(StopError::Engine {
            what: "step a vCPU",
            source: std::io::ErrorKind::Unsupported.into(),
        })
    }

    /// Resumes the guest and tells what the stop cost.
    ///
    /// # Errors
    /// What the engine says; the vCPUs that can still run do.
    fn resume(self: Box<Self>) -> Result<StopTimes, StopError>;
}

/// One write of guest text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextWrite<'a> {
    /// Where, in guest-physical memory.
    pub at: Gpa,
    /// The bytes to be there.
    pub bytes: &'a [u8],
}

/// How long a stop took, phase by phase, by the host's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StopTimes {
    /// From the first kick until the last vCPU had left the guest.
    pub quiesce: Duration,
    /// From then until the resume was asked for: what was done with the guest at a standstill.
    pub held: Duration,
    /// From then until every vCPU had been let go.
    pub resume: Duration,
}

impl StopTimes {
    /// The whole stop, from the first kick until every vCPU runs again.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.quiesce + self.held + self.resume
    }
}

/// The registers of one vCPU that introspection needs, per architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Registers {
    /// An x86_64 vCPU.
    X86_64(X86Registers),
    /// An s390x vCPU.
    S390x(S390xRegisters),
    /// An aarch64 vCPU.
    Aarch64(Aarch64Registers),
}

impl Registers {
    /// The address of the next instruction, as the vCPU's own address space sees it.
    #[must_use]
    pub fn pc(&self) -> u64 {
        match self {
            Registers::X86_64(x86) => x86.rip,
            Registers::S390x(s390x) => s390x.psw_addr,
            Registers::Aarch64(aarch64) => aarch64.pc,
        }
    }
}

/// Registers of an x86_64 vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct X86Registers {
    /// Instruction pointer.
    pub rip: u64,
    /// Stack pointer.
    pub rsp: u64,
    /// Flags.
    pub rflags: u64,
    /// Code segment selector; its low two bits are the privilege level.
    pub cs: u16,
    /// Control register 0.
    pub cr0: u64,
    /// Root of the page tables in use, with PCID bits.
    pub cr3: u64,
    /// Control register 4; bit 12 is LA57.
    pub cr4: u64,
    /// Extended feature enable register; bit 10 is LMA.
    pub efer: u64,
    /// Base of GS as it is now.
    pub gs_base: u64,
    /// The GS base that SWAPGS would bring in.
    pub kernel_gs_base: u64,
}

/// Registers of an s390x vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct S390xRegisters {
    /// First half of the PSW; its bit 5 from the left is DAT.
    pub psw_mask: u64,
    /// Second half of the PSW: the address of the next instruction.
    pub psw_addr: u64,
    /// General registers.
    pub gprs: [u64; 16],
    /// Control register 1: the primary address space.
    pub cr1: u64,
    /// Control register 7: the secondary address space.
    pub cr7: u64,
    /// Control register 13: the home address space, which is the kernel's.
    pub cr13: u64,
    /// Where this CPU's lowcore is in absolute memory, if the engine can tell.
    pub prefix: Option<u64>,
}

/// Registers of an aarch64 vCPU, named as in the Arm Architecture Reference Manual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Aarch64Registers {
    /// The address of the next instruction.
    pub pc: u64,
    /// The stack pointer in use: `SP_EL0` or that of the exception level.
    pub sp: u64,
    /// Process state; bits 3:2 are the exception level, bit 4 is AArch32.
    pub pstate: u64,
    /// `SP_EL0`: while the kernel runs, its current task.
    pub sp_el0: u64,
    /// `TTBR1_EL1`: the root of the upper half's page tables, with the ASID in bits 63:48. With KPTI
    /// it is not the kernel's own while the vCPU is in user mode.
    pub ttbr1: u64,
    /// `TCR_EL1`: sizes, granules and the 52-bit format of both halves.
    pub tcr: u64,
    /// `SCTLR_EL1`; its bit 0 says whether there is translation at all.
    pub sctlr: u64,
    /// `MAIR_EL1`: the memory types that leaves name by index.
    pub mair: u64,
    /// `TPIDR_EL1`: while the kernel runs, the offset of this CPU's variables.
    pub tpidr_el1: u64,
    /// `X9`, `X16`, `X17` and `X30`: where an address to return to may be that is on no stack yet.
    pub links: [u64; 4],
}

/// A guest could not be stopped, sampled or resumed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StopError {
    /// A vCPU did not leave the guest in time. All vCPUs run as before.
    #[error(
        "{} did not stop within {} ms; the guest runs on unchanged",
        vcpu.map_or_else(|| "the vCPUs".to_owned(), |vcpu| format!("vCPU {vcpu}")),
        waited.as_millis()
    )]
    Silent {
        /// The first vCPU that did not answer, where the engine can tell.
        vcpu: Option<usize>,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The guest has ended.
    #[error("the guest has ended")]
    Gone,
    /// The calling thread holds the guest stopped already, so waiting for its turn would be
    /// forever.
    #[error("this thread holds the guest stopped already; resume it first")]
    AlreadyStopped,
    /// There is no vCPU of that number.
    #[error("the guest has no vCPU {vcpu}; its vCPUs are numbered from 0 to {}", count - 1)]
    NoSuchVcpu {
        /// The number asked for.
        vcpu: usize,
        /// How many there are.
        count: usize,
    },
    /// The engine failed.
    #[error("the engine could not {what}: {source}")]
    Engine {
        /// What was asked of it.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
}

/// Guest text could not be written.
#[derive(Debug, thiserror::Error)]
#[error("writing guest text at guest-physical {at} failed: {reason}")]
pub struct TextWriteError {
    /// Index of the write that failed; all before it are done.
    pub index: usize,
    /// Where it was to go.
    pub at: Gpa,
    /// Why it failed.
    pub reason: String,
}
