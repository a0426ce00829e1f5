//! What a vCPU's thread does: enter the guest, answer its exits, stand still when told to.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvm_bindings::{
    KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP,
    KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_SIMUL_EX,
    KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON, Msrs, kvm_guest_debug, kvm_msr_entry,
};
use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd};
use patcher::arch::x86_64::TRAP_PORT;
use patcher::machine::X86Registers;

use super::crew::{Enlisted, Next};
use super::shared::Shared;
use super::state::{self, MSR_IA32_TSC, MSR_KERNEL_GS_BASE};
use crate::devices::PowerRequest;
use crate::exit::GuestExit;

/// One vCPU, on its way into its thread.
pub(super) struct Vcpu {
    pub(super) index: usize,
    pub(super) fd: VcpuFd,
    pub(super) shared: Arc<Shared>,
    /// Made once: nothing is allocated when the vCPU comes to a stand.
    gs_base: Msrs,
    /// The same for the clock, read at each trap.
    pub(super) clock: Msrs,
}

/// How a KVM_RUN ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ran {
    /// With a device access that is answered now and completed by the next KVM_RUN.
    Access,
    /// With nothing to do.
    Interrupted,
    /// With one instruction executed, as was asked for.
    Stepped,
    /// With the guest's end.
    Over,
}

/// Why the guest is over.
pub(super) enum End {
    Asked(PowerRequest),
    Shutdown,
    EntryFailed { reason: u64, host_cpu: u32 },
    InternalError,
    Unexpected(String),
}

impl Vcpu {
    pub(super) fn new(index: usize, fd: VcpuFd, shared: Arc<Shared>) -> std::io::Result<Self> {
        let msr = |index| {
            let entry = kvm_msr_entry { index, ..Default::default() };
            let msrs = Msrs::from_entries(&[entry]);
            msrs.map_err(|error| std::io::Error::other(error.to_string()))
        };
        let (gs_base, clock) = (msr(MSR_KERNEL_GS_BASE)?, msr(MSR_IA32_TSC)?);
        Ok(Self { index, fd, shared, gs_base, clock })
    }

    /// The thread's whole life.
    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _on_panic = Panicked(&shared, self.index);
        let enlisted = shared.crew.enlist(self.index);
        loop {
            let mut stood = false;
            let next = enlisted.next(|enlisted| {
                stood = true;
                if enlisted.is_step_wanted() {
                    self.step(enlisted);
                }
                self.settle(enlisted)
            });
            if next == Next::Leave {
                return;
            }
            if stood {
                // The guest's watchdogs are told that time passed without it. A guest without
                // kvmclock cannot be told: EINVAL.
                let _ = self.fd.kvmclock_ctrl();
            }
            if self.enter() == Ran::Over {
                return;
            }
        }
    }

    /// Comes to a stand: completes the device access that is under way, without which RIP would
    /// still point to the instruction that made it, and reads the registers.
    ///
    /// An access may come in pieces (wide ones, string instructions), so this goes on until KVM
    /// says that it would have entered the guest. KVM bounds how many pieces that are.
    fn settle(&mut self, enlisted: &Enlisted<'_>) -> Option<X86Registers> {
        let synced = [SyncReg::Register, SyncReg::SystemRegister];
        for set in synced {
            self.fd.set_sync_valid_reg(set);
        }
        loop {
            enlisted.only_complete();
            match self.enter() {
                Ran::Access | Ran::Stepped => {}
                Ran::Interrupted => break,
                Ran::Over => return None,
            }
        }
        for set in synced {
            self.fd.clear_sync_valid_reg(set);
        }
        let synced = self.fd.sync_regs();
        // Every 64-bit host has this MSR; should it not, there is no such base to tell.
        let kernel_gs_base = match self.fd.get_msrs(&mut self.gs_base) {
            Ok(1) => self.gs_base.as_slice()[0].data,
            _ => 0,
        };
        Some(state::registers(&synced.regs, &synced.sregs, kernel_gs_base))
    }

    /// Executes one instruction, all but the completion of a device access that it makes, or as much of
    /// it as there is time for.
    fn step(&mut self, enlisted: &Enlisted<'_>) {
        const STEP: u32 = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
        let debug = |control| kvm_guest_debug { control, ..Default::default() };
        // An interrupt that is pending would be the instruction otherwise; kernels before 5.15 do
        // not know that they can be kept from that.
        let set = self.fd.set_guest_debug(&debug(STEP | KVM_GUESTDBG_BLOCKIRQ));
        if let Err(error) = set.or_else(|_| self.fd.set_guest_debug(&debug(STEP))) {
            return enlisted.stepped(Err(error));
        }
        while enlisted.is_step_wanted() {
            match self.enter() {
                Ran::Interrupted => {}
                // Settling completes the instruction that makes the access. Not every KVM counts it as
                // one then, and executes the next as well.
                Ran::Access | Ran::Stepped => enlisted.stepped(Ok(())),
                Ran::Over => return,
            }
        }
        if let Err(error) = self.fd.set_guest_debug(&debug(0)) {
            let what = format!("a vCPU can't be taken out of single steps: {error}");
            let exit = self.explain(End::Unexpected(what));
            self.shared.end(exit);
        }
    }

    /// One KVM_RUN and the answer to its exit.
    fn enter(&mut self) -> Ran {
        match self.run_once() {
            Ok(ran) => ran,
            Err(end) => {
                let exit = self.explain(end);
                self.shared.end(exit);
                Ran::Over
            }
        }
    }

    fn run_once(&mut self) -> Result<Ran, End> {
        let Self { index, shared, .. } = self;
        let index = *index;
        match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => shared.ports.read(port, data),
            Ok(VcpuExit::IoOut(TRAP_PORT, _)) if shared.is_trapping() => self.trapped()?,
            Ok(VcpuExit::IoOut(port, data)) => {
                let is_wanted = || shared.crew.is_wanted(index);
                if let Some(request) = shared.ports.write(index, port, data, is_wanted) {
                    return Err(End::Asked(request));
                }
            }
            // No device is there; a bus without a device floats high.
            Ok(VcpuExit::MmioRead(_, data)) => data.fill(0xff),
            Ok(VcpuExit::MmioWrite(at, _)) => {
                if shared.memory.is_read_only(at) {
                    shared.refused_writes.fetch_add(1, Ordering::Relaxed);
                }
            }
            Ok(VcpuExit::Intr) => return Ok(Ran::Interrupted),
            Ok(VcpuExit::Debug(_)) => return Ok(Ran::Stepped),
            // EINTR: a kick. EAGAIN: a vCPU that waits to be woken was woken.
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                return Ok(Ran::Interrupted);
            }
            Ok(VcpuExit::Shutdown) => return Err(End::Shutdown),
            Ok(VcpuExit::FailEntry(reason, host_cpu)) => {
                return Err(End::EntryFailed { reason, host_cpu });
            }
            Ok(VcpuExit::InternalError) => return Err(End::InternalError),
            Ok(other) => return Err(End::Unexpected(format!("unexpected exit {other:?}"))),
            Err(error) => return Err(End::Unexpected(format!("KVM_RUN failed: {error}"))),
        }
        Ok(Ran::Access)
    }

    /// Says how the guest ended, with what is still to be found out about it.
    fn explain(&mut self, end: End) -> GuestExit {
        let vcpu = self.index;
        match end {
            End::Asked(PowerRequest::PowerOff) => GuestExit::PowerOff,
            End::Asked(PowerRequest::Reset) => GuestExit::Reboot,
            End::Shutdown => {
                let registers = self.registers().filter(|registers| !is_reset(registers));
                GuestExit::TripleFault { vcpu, registers }
            }
            End::EntryFailed { reason, host_cpu } => {
                GuestExit::EntryFailed { vcpu, reason, host_cpu }
            }
            End::InternalError => {
                let what = self.internal_error();
                GuestExit::InternalError { vcpu, what, registers: self.registers() }
            }
            End::Unexpected(what) => {
                GuestExit::InternalError { vcpu, what, registers: self.registers() }
            }
        }
    }

    /// The registers of a vCPU whose guest is over.
    fn registers(&self) -> Option<X86Registers> {
        let (regs, sregs) = (self.fd.get_regs().ok()?, self.fd.get_sregs().ok()?);
        Some(state::registers(&regs, &sregs, 0))
    }

    /// Puts the internal error that KVM has just reported into words.
    fn internal_error(&mut self) -> String {
        // SAFETY: KVM_RUN has just returned with KVM_EXIT_INTERNAL_ERROR, for which the kernel
        // fills in this member; all of it are integers, so any bytes are valid.
        let internal = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal };
        let data = internal.data.iter().take(internal.ndata as usize);
        let data = data.map(|word| format!("{word:#x}")).collect::<Vec<_>>().join(" ");
        let what = match internal.suberror {
            KVM_INTERNAL_ERROR_EMULATION => "it could not emulate an instruction".to_owned(),
            KVM_INTERNAL_ERROR_SIMUL_EX => "two exceptions came at once".to_owned(),
            KVM_INTERNAL_ERROR_DELIVERY_EV => "delivering an event exited".to_owned(),
            KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => {
                "the hardware exited for an unknown reason".to_owned()
            }
            other => format!("suberror {other}"),
        };
        if data.is_empty() { what } else { format!("{what} (data {data})") }
    }
}

/// Whether a vCPU is where INIT puts it: on AMD's CPUs a triple fault leaves nothing else.
fn is_reset(registers: &X86Registers) -> bool {
    const RESET_VECTOR: u64 = 0xfff0;
    registers.rip == RESET_VECTOR && registers.cr0 & 1 == 0
}

/// Ends the guest if its vCPU's thread panics: nobody else would.
struct Panicked<'a>(&'a Shared, usize);

impl Drop for Panicked<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let what = "its thread panicked".to_owned();
            self.0.end(GuestExit::InternalError { vcpu: self.1, what, registers: None });
        }
        self.0.left();
    }
}
