//! A synthetic guest as a machine: nothing runs, so stopping it costs nothing.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::Guest;
use crate::addr::Gpa;
use crate::machine::{
    Machine, RegionWindow, Registers, StopError, StopTimes, Stopped, TextWrite, TextWriteError,
};
use crate::mem::PhysMem;

/// Where the region is: beyond the guest's RAM.
const CODE: GuestAddress = GuestAddress(1 << 32);
const RINGS: GuestAddress = GuestAddress((1 << 32) + CODE_LEN as u64);
const CODE_LEN: usize = 2 << 20;
const RINGS_LEN: usize = 2 << 20;

/// The memory that a hypervisor would provide.
#[derive(Debug)]
pub(super) struct Region(Arc<GuestMemoryMmap<()>>);

impl Region {
    pub(super) fn new() -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(CODE, CODE_LEN), (RINGS, RINGS_LEN)])
            .expect("4 MiB can be had");
        Self(Arc::new(memory))
    }

    fn window(&self, at: GuestAddress, len: usize) -> RegionWindow<'_> {
        let memory = self.0.get_slice(at, len).expect("a window is one piece of memory");
        RegionWindow { gpa: at.into(), memory }
    }
}

impl Machine for Guest {
    fn ram(&self) -> &dyn PhysMem {
        &self.ram
    }

    fn vcpus(&self) -> usize {
        self.registers.len()
    }

    fn region_code(&self) -> RegionWindow<'_> {
        self.region.window(CODE, CODE_LEN)
    }

    fn region_rings(&self) -> RegionWindow<'_> {
        self.region.window(RINGS, RINGS_LEN)
    }

    fn clock_hz(&self) -> u64 {
        1_000_000_000
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
        for (index, &TextWrite { at, bytes }) in writes.iter().enumerate() {
            let failed = |error: vm_memory::GuestMemoryError| TextWriteError {
                index,
                at,
                reason: error.to_string(),
            };
            self.0.ram.write_slice(bytes, Gpa::into(at)).map_err(failed)?;
        }
        Ok(())
    }

    fn resume(self: Box<Self>) -> Result<StopTimes, StopError> {
        Ok(StopTimes::default())
    }
}
