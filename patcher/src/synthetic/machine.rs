//! A synthetic guest as a machine: nothing runs, so stopping it costs nothing.

use std::sync::{Arc, PoisonError};

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::Guest;
use crate::addr::Gpa;
use crate::machine::{
    Machine, Registers, StopError, StopTimes, Stopped, TextWrite, TextWriteError,
};
use crate::mem::PhysMem;
use crate::region::{NoTraps, PART_BYTES, Part, RegionWindow, Traps};

/// Where the region is: beyond the guest's RAM.
const REGION: Gpa = Gpa(1 << 32);
const RINGS: u64 = PART_BYTES;

/// The memory that a hypervisor would provide.
#[derive(Debug)]
pub(super) struct Region(Arc<GuestMemoryMmap<()>>);

impl Region {
    pub(super) fn new() -> Self {
        let parts = Part::ALL.map(|part| (GuestAddress::from(gpa(part)), len(part)));
        Self(Arc::new(GuestMemoryMmap::from_ranges(&parts).expect("8 MiB can be had")))
    }

    fn window(&self, part: Part) -> RegionWindow<'_> {
        let memory = self.0.get_slice(gpa(part).into(), len(part));
        RegionWindow { gpa: gpa(part), memory: memory.expect("a part is one piece of memory") }
    }
}

fn gpa(part: Part) -> Gpa {
    REGION + part.offset()
}

fn len(part: Part) -> usize {
    part.len(RINGS) as usize
}

impl Machine for Guest {
    fn ram(&self) -> &dyn PhysMem {
        &self.ram
    }

    fn vcpus(&self) -> usize {
        self.registers.len()
    }

    fn region(&self, part: Part) -> RegionWindow<'_> {
        self.region.window(part)
    }

    fn clock_hz(&self) -> u64 {
        1_000_000_000
    }

    fn set_traps(&self, traps: Arc<Traps>) -> Result<(), NoTraps> {
        *self.traps.lock().unwrap_or_else(PoisonError::into_inner) = traps;
        Ok(())
    }

    fn sample(&self, vcpu: usize) -> Result<Registers, StopError> {
        let count = self.registers.len();
        self.registers.get(vcpu).copied().ok_or(StopError::NoSuchVcpu { vcpu, count })
    }

    fn stop(&self) -> Result<Box<dyn Stopped + '_>, StopError> {
        Ok(Box::new(StoppedGuest(self)))
    }
}

struct StoppedGuest<'a>(&'a Guest);

impl Stopped for StoppedGuest<'_> {
    fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError> {
        self.0.sample(vcpu)
    }

    fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError> {
        let code = gpa(Part::Code)..gpa(Part::Code) + PART_BYTES;
        for (index, &TextWrite { at, bytes }) in writes.iter().enumerate() {
            let failed = |error: vm_memory::GuestMemoryError| TextWriteError {
                index,
                at,
                reason: error.to_string(),
            };
            let memory = if code.contains(&at) { &*self.0.region.0 } else { &self.0.ram };
            memory.write_slice(bytes, at.into()).map_err(failed)?;
        }
        Ok(())
    }

    fn resume(self: Box<Self>) -> Result<StopTimes, StopError> {
        Ok(StopTimes::default())
    }
}
