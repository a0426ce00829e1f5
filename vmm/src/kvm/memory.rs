//! The guest's RAM and the region, as memory slots.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use patcher::addr::Gpa;
use patcher::machine::RegionWindow;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

use super::layout::{self, LARGE_PAGE, PAGE};

/// The size of the region's code part in bytes.
pub(super) const CODE_BYTES: u64 = LARGE_PAGE;

/// Everything the guest can reach that is memory.
pub(super) struct Memory {
    ram: GuestMemoryMmap<()>,
    code: GuestRegionMmap<()>,
    rings: GuestRegionMmap<()>,
}

impl Memory {
    /// Maps `memory` bytes of RAM and a region with `rings` bytes for rings.
    pub(super) fn new(memory: u64, rings: u64) -> io::Result<Self> {
        let ranges: Vec<_> = layout::ram(memory)
            .into_iter()
            .map(|extent| (GuestAddress(extent.start.0), (extent.end.0 - extent.start.0) as usize))
            .collect();
        let ram = GuestMemoryMmap::from_ranges(&ranges).map_err(io::Error::other)?;
        let code_at = layout::region(memory);
        let code = anonymous(code_at, CODE_BYTES)?;
        let rings = anonymous(code_at + CODE_BYTES, rings)?;
        // The first event of a trace is not to wait for the host's page faults.
        prefault(&code)?;
        prefault(&rings)?;
        Ok(Self { ram, code, rings })
    }

    pub(super) fn ram(&self) -> &GuestMemoryMmap<()> {
        &self.ram
    }

    pub(super) fn code(&self) -> RegionWindow<'_> {
        window(&self.code)
    }

    pub(super) fn rings(&self) -> RegionWindow<'_> {
        window(&self.rings)
    }

    /// Where the region lies, code and rings.
    pub(super) fn region(&self) -> Range<Gpa> {
        let (code, rings) = (self.code(), self.rings());
        code.gpa..rings.gpa + rings.memory.len() as u64
    }

    /// Whether a guest's access to `at` hits the part that it may not write.
    pub(super) fn is_code(&self, at: u64) -> bool {
        at.checked_sub(self.code.start_addr().0).is_some_and(|offset| offset < self.code.len())
    }

    /// Makes all of it visible to the guest.
    ///
    /// # Errors
    /// What KVM says.
    pub(super) fn install(&self, vm: &VmFd) -> io::Result<()> {
        let writable = self.ram.iter().chain([&self.rings]).map(|region| (region, 0));
        let all = writable.chain([(&self.code, KVM_MEM_READONLY)]);
        for (slot, (region, flags)) in (0..).zip(all) {
            let slot = kvm_userspace_memory_region {
                slot,
                flags,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the memory is a private anonymous mapping of that size which lives as long
            // as `self`, and the machine keeps `self` until its vCPU threads have ended. It is
            // never given out as a Rust reference, only as volatile slices.
            unsafe { vm.set_user_memory_region(slot) }?;
        }
        Ok(())
    }
}

fn anonymous(at: Gpa, bytes: u64) -> io::Result<GuestRegionMmap<()>> {
    let mapping = MmapRegion::new(bytes as usize).map_err(io::Error::other)?;
    GuestRegionMmap::new(mapping, GuestAddress::from(at))
        .ok_or_else(|| io::Error::other("the region would end above the last address"))
}

fn prefault(region: &GuestRegionMmap<()>) -> io::Result<()> {
    for offset in (0..region.len()).step_by(PAGE as usize) {
        let byte = region.get_slice(vm_memory::MemoryRegionAddress(offset), 1);
        byte.map_err(io::Error::other)?.copy_from(&[0u8]);
    }
    Ok(())
}

fn window(region: &GuestRegionMmap<()>) -> RegionWindow<'_> {
    let memory = region.as_volatile_slice().expect("the whole of a region lies within it");
    RegionWindow { gpa: Gpa::from(region.start_addr()), memory }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::layout::{GIB, MIB};

    #[test]
    fn the_region_lies_apart_from_ram_on_large_page_boundaries() {
        let memory = Memory::new(64 * MIB, 4 * MIB).unwrap();
        let (code, rings) = (memory.code(), memory.rings());
        assert_eq!((code.gpa, rings.gpa), (Gpa(4 * GIB), Gpa(4 * GIB + 2 * MIB)));
        assert_eq!((code.memory.len(), rings.memory.len()), (2 << 20, 4 << 20));
        assert!(memory.is_code(4 * GIB) && memory.is_code(4 * GIB + 2 * MIB - 1));
        assert!(!memory.is_code(4 * GIB - 1) && !memory.is_code(4 * GIB + 2 * MIB));
    }
}
