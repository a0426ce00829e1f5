//! Traps: writes to a port by which functions leave the guest to be recorded.

use std::io;

use kvm_bindings::Msrs;
use kvm_ioctls::VcpuFd;
use patcher::addr::{Gpa, Gva};
use patcher::arch::{PidPlace, TaskPlaces};
use patcher::mem::PhysMem;
use patcher::region::{Part, Trap, TrappedCall, Traps};

use super::vcpu::{End, Vcpu};

/// Bytes of `out %al, $imm8`.
const OUT_LEN: u64 = 2;

impl Vcpu {
    /// Answers a write to the port of traps: records the call and has the vCPU go on where the trap says.
    /// A write that the guest makes by itself goes nowhere, as there is no such device.
    pub(super) fn trapped(&mut self) -> Result<(), End> {
        let traps = self.shared.traps();
        self.record(&traps)
            .map_err(|error| End::Unexpected(format!("a trapped call can't go on: {error}")))
    }

    fn record(&mut self, traps: &Traps) -> io::Result<()> {
        let mut registers = self.fd.get_regs()?;
        // KVM still has the vCPU at the instruction, and goes behind it by itself unless it finds it moved.
        // One that emulates the instruction has gone behind it already.
        let at = [registers.rip, registers.rip.wrapping_sub(OUT_LEN)];
        let Some(trap) = at.into_iter().find_map(|at| traps.at(Gva(at))) else { return Ok(()) };
        let call = TrappedCall {
            cpu: self.index,
            // 0 if there is none.
            parent: self.word(registers.rsp).unwrap_or(0),
            task: self.task_words(traps.task(), registers.rflags)?,
        };
        self.write(traps, &trap, &call);
        registers.rip = trap.resume.0;
        Ok(self.fd.set_regs(&registers)?)
    }

    fn write(&mut self, traps: &Traps, trap: &Trap, call: &TrappedCall) {
        let Self { shared, fd, clock, .. } = self;
        let window = shared.memory.part(Part::Rings);
        // Guests number their CPUs as the table of processors does, by vCPU.
        traps.record(&window.memory, trap, call, || guest_clock(fd, clock));
    }

    /// What a trampoline would have written of the task: the flags, its number, and the count of what it
    /// is in the middle of.
    fn task_words(&self, places: &TaskPlaces, rflags: u64) -> io::Result<[u32; 3]> {
        let gs = self.fd.get_sregs()?.gs.base;
        let from_gs = |offset: i32| self.word(gs.wrapping_add_signed(offset.into()));
        let pid = match places.pid {
            Some(PidPlace::InTask { current, pid }) => {
                from_gs(current).and_then(|task| self.word(task.wrapping_add_signed(pid.into())))
            }
            Some(PidPlace::Fixed(_)) | None => None,
        };
        let count = places.preempt_count.and_then(from_gs);
        Ok([rflags, pid.unwrap_or(0), count.unwrap_or(0)].map(|word| word as u32))
    }

    /// The word at a guest-virtual address, if there is one.
    fn word(&self, at: u64) -> Option<u64> {
        let ram: &dyn PhysMem = self.shared.memory.ram();
        let place = self.fd.translate_gva(at).ok().filter(|place| place.valid != 0)?;
        ram.u64_le(Gpa(place.physical_address)).ok()
    }
}

/// What the guest's time-stamp instruction would read now.
fn guest_clock(fd: &VcpuFd, clock: &mut Msrs) -> u64 {
    match fd.get_msrs(clock) {
        Ok(1) => clock.as_slice()[0].data,
        // Every vCPU has this MSR.
        _ => 0,
    }
}
