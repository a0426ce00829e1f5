//! The guest's RAM and the region, as memory slots.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use patcher::addr::Gpa;
use patcher::region::{Part, RegionWindow};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

use super::layout::{self, PAGE};

/// Everything the guest can reach that is memory.
pub(super) struct Memory {
    ram: GuestMemoryMmap<()>,
    /// In the order of [`Part::ALL`].
    region: Vec<(Part, GuestRegionMmap<()>)>,
}

impl Memory {
    /// Maps `memory` bytes of RAM and a region with `rings` bytes for rings.
    pub(super) fn new(memory: u64, rings: u64) -> io::Result<Self> {
        let ranges: Vec<_> = layout::ram(memory)
            .into_iter()
            .map(|extent| (GuestAddress(extent.start.0), (extent.end.0 - extent.start.0) as usize))
            .collect();
        let ram = GuestMemoryMmap::from_ranges(&ranges).map_err(io::Error::other)?;
        let region = Part::ALL.into_iter().map(|part| -> io::Result<_> {
            let memory = anonymous(layout::region(memory) + part.offset(), part.len(rings))?;
            // The first event of a trace is not to wait for the host's page faults.
            prefault(&memory)?;
            Ok((part, memory))
        });
        Ok(Self { ram, region: region.collect::<io::Result<_>>()? })
    }

    pub(super) fn ram(&self) -> &GuestMemoryMmap<()> {
        &self.ram
    }

    pub(super) fn part(&self, part: Part) -> RegionWindow<'_> {
        let found = self.region.iter().find(|(found, _)| *found == part);
        window(&found.expect("a region has every part").1)
    }

    /// Where the region lies, all parts of it.
    pub(super) fn region(&self) -> Range<Gpa> {
        let (first, last) = (self.part(Part::Code), self.part(Part::Rings));
        first.gpa..last.gpa + last.memory.len() as u64
    }

    /// Whether a guest's access to `at` hits a part that it may not write.
    pub(super) fn is_read_only(&self, at: u64) -> bool {
        self.region.iter().any(|(part, memory)| {
            let offset = at.checked_sub(memory.start_addr().0);
            !part.is_writable() && offset.is_some_and(|offset| offset < memory.len())
        })
    }

    /// Writes text: into RAM, or into the region's code part.
    ///
    /// # Errors
    /// It is neither.
    pub(super) fn write_text(&self, at: Gpa, bytes: &[u8]) -> io::Result<()> {
        let code = self.part(Part::Code);
        match at.offset_from(code.gpa).filter(|offset| *offset < code.memory.len() as u64) {
            Some(offset) => {
                let end = offset + bytes.len() as u64;
                if end > code.memory.len() as u64 {
                    return Err(io::Error::other("it goes beyond the region's code part"));
                }
                code.memory.write_slice(bytes, offset as usize).map_err(io::Error::other)
            }
            None => self.ram.write_slice(bytes, at.into()).map_err(io::Error::other),
        }
    }

    /// Makes all of it visible to the guest.
    ///
    /// # Errors
    /// What KVM says.
    pub(super) fn install(&self, vm: &VmFd) -> io::Result<()> {
        let region = self
            .region
            .iter()
            .map(|(part, memory)| (memory, if part.is_writable() { 0 } else { KVM_MEM_READONLY }));
        let all = self.ram.iter().map(|ram| (ram, 0)).chain(region);
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
        for (part, at, len) in
            [(Part::Code, 0, 2), (Part::Constants, 2, 2), (Part::Data, 4, 2), (Part::Rings, 6, 4)]
        {
            let window = memory.part(part);
            assert_eq!(window.gpa, Gpa(4 * GIB + at * MIB));
            assert_eq!(window.memory.len(), len << 20);
        }
        assert_eq!(memory.region(), Gpa(4 * GIB)..Gpa(4 * GIB + 10 * MIB));
        assert!(memory.is_read_only(4 * GIB) && memory.is_read_only(4 * GIB + 4 * MIB - 1));
        assert!(!memory.is_read_only(4 * GIB - 1) && !memory.is_read_only(4 * GIB + 4 * MIB));
    }
}
