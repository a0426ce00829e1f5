//! The guest's RAM and the region, as memory slots.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use patcher::addr::Gpa;
use patcher::machine::TextWrite;
use patcher::region::{Part, RegionWindow};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion, VolatileSlice,
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
        ram.iter().for_each(prefer_large_pages);
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

    /// Writes text, in the order given: into RAM, or into the region's code part.
    ///
    /// # Errors
    /// The index of the first write that goes to neither, of which nothing was written.
    pub(super) fn write_text(&self, writes: &[TextWrite<'_>]) -> Result<(), (usize, io::Error)> {
        // Text is looked up once for all writes to one piece of memory.
        let mut piece: Option<RegionWindow<'_>> = None;
        for (index, &TextWrite { at, bytes }) in writes.iter().enumerate() {
            let place = match piece.as_ref().and_then(|piece| within(piece, at, bytes.len())) {
                Some(place) => place,
                None => {
                    let found = self.text(at).ok_or("it is neither RAM nor the region's code");
                    let found = found.map_err(|why| (index, io::Error::other(why)))?;
                    let place = within(piece.insert(found), at, bytes.len());
                    place.ok_or_else(|| (index, io::Error::other("its memory ends within it")))?
                }
            };
            place.copy_from(bytes);
        }
        Ok(())
    }

    /// The piece of memory with text at `at`.
    fn text(&self, at: Gpa) -> Option<RegionWindow<'_>> {
        let code = self.part(Part::Code);
        if within(&code, at, 1).is_some() {
            return Some(code);
        }
        self.ram.find_region(at.into()).map(window)
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

/// Asks the host for large pages: the guest's memory is walked through two levels of tables, and a stop with
/// every function in it goes through thousands of pages of text.
fn prefer_large_pages(region: &GuestRegionMmap<()>) {
    // SAFETY: the range is a mapping of ours, whose contents this does not change. A host that has no large
    // pages refuses, and then there are small ones.
    unsafe { libc::madvise(region.as_ptr().cast(), region.len() as usize, libc::MADV_HUGEPAGE) };
}

fn prefault(region: &GuestRegionMmap<()>) -> io::Result<()> {
    for offset in (0..region.len()).step_by(PAGE as usize) {
        let byte = region.get_slice(vm_memory::MemoryRegionAddress(offset), 1);
        byte.map_err(io::Error::other)?.copy_from(&[0u8]);
    }
    Ok(())
}

/// The `len` bytes at `at`, if they are all in `piece`.
fn within<'a>(piece: &RegionWindow<'a>, at: Gpa, len: usize) -> Option<VolatileSlice<'a>> {
    let offset = usize::try_from(at.offset_from(piece.gpa)?).ok()?;
    piece.memory.subslice(offset, len).ok()
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
