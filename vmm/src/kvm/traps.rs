//! Traps: writes to a port by which functions leave the guest to be recorded.

use std::io;

use kvm_bindings::Msrs;
use kvm_ioctls::VcpuFd;
use patcher::addr::{Gpa, Gva};
use patcher::mem::PhysMem;
use patcher::region::{Part, Trap, Traps};

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
        self.write(traps, &trap, self.stack_top(registers.rsp));
        registers.rip = trap.resume.0;
        Ok(self.fd.set_regs(&registers)?)
    }

    fn write(&mut self, traps: &Traps, trap: &Trap, parent: u64) {
        let Self { index, shared, fd, clock, .. } = self;
        let window = shared.memory.part(Part::Rings);
        // Guests number their CPUs as the table of processors does, by vCPU.
        traps.record(&window.memory, *index, trap, parent, || guest_clock(fd, clock));
    }

    /// The word at the top of the stack: where the function returns to. 0 if there is none.
    fn stack_top(&self, rsp: u64) -> u64 {
        let ram: &dyn PhysMem = self.shared.memory.ram();
        let place = self.fd.translate_gva(rsp).ok().filter(|place| place.valid != 0);
        let word = place.map(|place| ram.u64_le(Gpa(place.physical_address)));
        word.and_then(Result::ok).unwrap_or(0)
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
