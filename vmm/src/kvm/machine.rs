//! The machine as the patcher sees it: something that can be stopped.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use patcher::addr::Gpa;
use patcher::machine::{
    Machine, Registers, StopError, StopTimes, Stopped, TextWrite, TextWriteError,
};
use patcher::mem::PhysMem;
use patcher::region::{NoTraps, Part, RegionWindow, Traps};

use super::crew::NotStepped;
use super::vm::Vm;
use crate::turn::Held;

impl Machine for Vm {
    fn ram(&self) -> &dyn PhysMem {
        self.shared.memory.ram()
    }

    fn vcpus(&self) -> usize {
        self.shared.crew.len()
    }

    fn region(&self, part: Part) -> RegionWindow<'_> {
        self.shared.memory.part(part)
    }

    fn clock_hz(&self) -> u64 {
        self.clock_hz
    }

    fn set_traps(&self, traps: Arc<Traps>) -> Result<(), NoTraps> {
        self.shared.set_traps(traps);
        Ok(())
    }

    fn sample(&self, vcpu: usize) -> Result<Registers, StopError> {
        let count = self.vcpus();
        if vcpu >= count {
            return Err(StopError::NoSuchVcpu { vcpu, count });
        }
        let standstill = Standstill::new(self, vcpu..vcpu + 1)?;
        Ok(standstill.published(vcpu))
    }

    fn stop(&self) -> Result<Box<dyn Stopped + '_>, StopError> {
        Ok(Box::new(Standstill::new(self, 0..self.vcpus())?))
    }
}

/// vCPUs that stand, until this is dropped.
struct Standstill<'a> {
    vm: &'a Vm,
    which: Range<usize>,
    times: StopTimes,
    since: Instant,
    released: bool,
    /// Given up last, after the vCPUs were let go.
    _turn: Held<'a>,
}

impl<'a> Standstill<'a> {
    fn new(vm: &'a Vm, which: Range<usize>) -> Result<Self, StopError> {
        let turn = vm.turn.take()?;
        let crew = &vm.shared.crew;
        if crew.is_ending() {
            return Err(StopError::Gone);
        }
        let begun = Instant::now();
        crew.hold(which.clone(), vm.stop_deadline)
            .map_err(|vcpu| StopError::Silent { vcpu: Some(vcpu), waited: begun.elapsed() })?;
        let since = Instant::now();
        let times = StopTimes { quiesce: since - begun, ..StopTimes::default() };
        let standstill = Self { vm, which, times, since, released: false, _turn: turn };
        // vCPUs that have ended stand too; then it is no stop but the end.
        if crew.is_ending() { Err(StopError::Gone) } else { Ok(standstill) }
    }

    fn published(&self, vcpu: usize) -> Registers {
        Registers::X86_64(self.vm.shared.crew.registers(vcpu))
    }

    fn release(&mut self) {
        if !std::mem::replace(&mut self.released, true) {
            let asked = Instant::now();
            self.vm.shared.crew.release(self.which.clone());
            self.times.held = asked - self.since;
            self.times.resume = asked.elapsed();
        }
    }
}

impl Stopped for Standstill<'_> {
    fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError> {
        match self.vm.vcpus() {
            count if vcpu >= count => Err(StopError::NoSuchVcpu { vcpu, count }),
            _ => Ok(self.published(vcpu)),
        }
    }

    fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError> {
        // Entering the guest is a serialising event: no vCPU can execute what it fetched before.
        self.vm.shared.memory.write_text(writes).map_err(|(index, error)| TextWriteError {
            index,
            at: writes.get(index).map_or(Gpa(0), |write| write.at),
            reason: error.to_string(),
        })
    }

    fn step(&mut self, vcpu: usize) -> Result<(), StopError> {
        let count = self.vm.vcpus();
        if vcpu >= count {
            return Err(StopError::NoSuchVcpu { vcpu, count });
        }
        let failed = |source| StopError::Engine { what: "step a vCPU", source };
        let crew = &self.vm.shared.crew;
        let stepped = crew.step(vcpu, self.vm.stop_deadline);
        if crew.is_ending() {
            return Err(StopError::Gone);
        }
        stepped.map_err(|error| match error {
            NotStepped::Refused(source) => failed(source),
            NotStepped::Endless => failed(io::Error::new(
                io::ErrorKind::TimedOut,
                "it does not come to the end of the instruction",
            )),
            NotStepped::Silent => {
                StopError::Silent { vcpu: Some(vcpu), waited: self.vm.stop_deadline }
            }
        })
    }

    fn resume(mut self: Box<Self>) -> Result<StopTimes, StopError> {
        self.release();
        if self.vm.shared.crew.is_ending() { Err(StopError::Gone) } else { Ok(self.times) }
    }
}

impl Drop for Standstill<'_> {
    fn drop(&mut self) {
        self.release();
    }
}
