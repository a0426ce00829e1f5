//! Traps that the engine answers: each is one record, made by the host instead of a trampoline.
//!
//! An instruction that leaves the guest stands in a function. The engine looks up here whether it is one of
//! ours, records the call in the ring of that vCPU, and has it go on where the trap says. Whoever reads the
//! rings can't tell such records from a trampoline's.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustc_hash::FxHashMap;
use vm_memory::{VolatileMemory, VolatileSlice};

use super::RingLayout;
use crate::addr::Gva;
use crate::arch::TaskPlaces;

/// A trap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trap {
    /// Where it is.
    pub at: Gva,
    /// The address that its records carry.
    pub ip: Gva,
    /// Where a vCPU goes on that has met it.
    pub resume: Gva,
}

/// All traps, and where calls are recorded.
#[derive(Debug, Clone, Default)]
pub struct Traps {
    by_address: FxHashMap<Gva, Trap>,
    rings: Option<RingLayout>,
    task: TaskPlaces,
}

/// A call that a trap has met, as its record tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrappedCall {
    /// On which CPU.
    pub cpu: usize,
    /// The address that the function returns to.
    pub parent: u64,
    /// The words of a record that tell of the task, as a trampoline writes them: what
    /// [`Arch::task_words`](crate::arch::Arch::task_words) reads.
    pub task: [u32; 3],
}

/// The engine answers no traps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "what runs this guest can't answer traps: --method trap needs vmm's own engine, on KVM; \
     use --method call"
)]
pub struct NoTraps;

impl Traps {
    /// These traps, whose calls are recorded in rings that are laid out so, with what is found of the task in
    /// these places.
    #[must_use]
    pub fn new(traps: impl IntoIterator<Item = Trap>, rings: RingLayout, task: TaskPlaces) -> Self {
        let by_address = traps.into_iter().map(|trap| (trap.at, trap)).collect();
        Self { by_address, rings: Some(rings), task }
    }

    /// Where the task of a call is found.
    #[must_use]
    pub fn task(&self) -> &TaskPlaces {
        &self.task
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_address.is_empty()
    }

    /// The trap at an address, if there is one.
    #[must_use]
    pub fn at(&self, pc: Gva) -> Option<Trap> {
        self.by_address.get(&pc).copied()
    }

    /// Records a call that met `trap`, in the window of the rings. `clock` is read as a
    /// trampoline does, behind the reserving of the record: that is what its order in time rests on. Bytes
    /// are in little-endian order, which all guests have whose engines know traps.
    ///
    /// A CPU that has no ring records nothing.
    pub fn record(
        &self,
        window: &VolatileSlice<'_>,
        trap: &Trap,
        call: &TrappedCall,
        clock: impl FnOnce() -> u64,
    ) {
        let TrappedCall { cpu, parent, task } = *call;
        let Some(rings) = self.rings.filter(|rings| cpu < rings.cpus()) else { return };
        // Offsets come from the layout, which was made for this window; one that is shorter has no room.
        let write = || {
            let head = window.get_atomic_ref::<AtomicU64>(rings.header_offset(cpu)).ok()?;
            // The guest's trampolines may reserve on this CPU's ring as well, and the guest may have
            // written anything there: only the slot's number is made of it.
            let index = u64::from_le(head.fetch_add(1_u64.to_le(), Ordering::AcqRel));
            let slot = rings.slot_offset(cpu, index);
            let u64_at = |at| window.get_atomic_ref::<AtomicU64>(slot + at).ok();
            let u32_at = |at| window.get_atomic_ref::<AtomicU32>(slot + at).ok();
            u64_at(0)?.store(clock().to_le(), Ordering::Relaxed);
            u32_at(8)?.store((trap.ip.0 as u32).to_le(), Ordering::Relaxed);
            u32_at(12)?.store((parent as u32).to_le(), Ordering::Relaxed);
            for (at, word) in [16, 20, 24].into_iter().zip(task) {
                u32_at(at)?.store(word.to_le(), Ordering::Relaxed);
            }
            u32_at(28)?.store((index.wrapping_add(1) as u32).to_le(), Ordering::Release);
            Some(())
        };
        write();
    }
}
