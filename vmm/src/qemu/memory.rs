//! A launched guest's memory: one file, mapped by QEMU and by us.
//!
//! ```text
//! 0                 what the guest is told of by `mem=`
//!                   the region: 2 MiB of code, then rings; large-page aligned
//!                   room for what QEMU puts at the end of RAM: the initrd, ACPI tables
//! ```
//!
//! With 2 GiB or more, QEMU's q35 puts the rest of RAM at 4 GiB; the layout is the same, and the
//! region lies up there.

use std::fs::File;
use std::io;

use patcher::addr::Gpa;
use patcher::machine::RegionWindow;
use rustix::fs::MemfdFlags;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The size of the region's code part, and the alignment of its parts.
const CODE_BYTES: u64 = 2 * MIB;

/// From this size on q35 keeps only [`LOW`] of RAM below 4 GiB (QEMU's `hw/i386/pc_q35.c`).
const SPLIT_FROM: u64 = 0xb000_0000;
const LOW: u64 = 2 * GIB;
const HIGH: u64 = 4 * GIB;

/// QEMU's tables at the end of RAM need less (`ACPI_DATA_SIZE` and firmware tables).
const TABLES: u64 = 16 * MIB;

/// Where things are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Bytes that the guest is told of.
    told: u64,
    rings: u64,
    /// Bytes that QEMU has.
    pub total: u64,
}

impl Layout {
    /// For `told` bytes of RAM, so many for rings and an initrd of so many; `None` if that is more
    /// than can be counted.
    pub(super) fn new(told: u64, rings: u64, initrd: u64) -> Option<Self> {
        let initrd = initrd.checked_next_multiple_of(CODE_BYTES)?;
        let region = told.checked_next_multiple_of(CODE_BYTES)?.checked_add(CODE_BYTES)?;
        let total = region.checked_add(rings)?.checked_add(initrd)?.checked_add(TABLES)?;
        // A guest just below the split would have its region across the hole: then all of the region
        // and what is behind it goes above.
        let total = match total {
            split if split >= SPLIT_FROM && told < LOW => {
                (LOW + CODE_BYTES).checked_add(rings)?.checked_add(TABLES)?.max(SPLIT_FROM)
            }
            total => total,
        };
        i64::try_from(total).ok()?;
        Some(Self { told, rings, total })
    }

    fn is_split(&self) -> bool {
        self.total >= SPLIT_FROM
    }

    /// The guest-physical address behind the RAM that the guest is told of.
    pub(super) fn told_end(&self) -> u64 {
        if self.is_split() && self.told > LOW { HIGH + (self.told - LOW) } else { self.told }
    }

    fn region(&self) -> u64 {
        let end = self.told_end().next_multiple_of(CODE_BYTES);
        if self.is_split() { end.max(HIGH) } else { end }
    }

    fn file_offset(&self, gpa: u64) -> u64 {
        if gpa >= HIGH { gpa - HIGH + LOW } else { gpa }
    }
}

/// The memory itself.
#[derive(Debug)]
pub(super) struct Memory {
    file: File,
    ram: GuestMemoryMmap<()>,
    code: GuestRegionMmap<()>,
    rings: GuestRegionMmap<()>,
}

impl Memory {
    /// Makes a file without a name and maps it.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn new(layout: &Layout) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("guest-ram", MemfdFlags::CLOEXEC)?);
        file.set_len(layout.total)?;
        let low = layout.told.min(if layout.is_split() { LOW } else { layout.told });
        let mut extents = vec![(0, low)];
        if layout.told > low {
            extents.push((HIGH, layout.told - low));
        }
        let map = |(at, bytes)| -> io::Result<GuestRegionMmap<()>> {
            let file = FileOffset::new(file.try_clone()?, layout.file_offset(at));
            let mapping = MmapRegion::from_file(file, bytes as usize).map_err(io::Error::other)?;
            GuestRegionMmap::new(mapping, GuestAddress(at))
                .ok_or_else(|| io::Error::other("memory would end above the last address"))
        };
        let ram = extents.into_iter().map(map).collect::<io::Result<Vec<_>>>()?;
        let ram = GuestMemoryMmap::from_regions(ram).map_err(io::Error::other)?;
        let code = map((layout.region(), CODE_BYTES))?;
        let rings = map((layout.region() + CODE_BYTES, layout.rings))?;
        Ok(Self { file, ram, code, rings })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
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
}

fn window(region: &GuestRegionMmap<()>) -> RegionWindow<'_> {
    let memory = region.as_volatile_slice().expect("the whole of a region lies within it");
    RegionWindow { gpa: Gpa::from(region.start_addr()), memory }
}

#[cfg(test)]
mod tests {
    use patcher::mem::PhysMem;

    use super::*;

    #[test]
    fn the_region_lies_behind_what_the_guest_is_told_of_and_before_the_initrd() {
        let layout = Layout::new(449 * MIB, 32 * MIB, 5 * MIB).unwrap();
        assert_eq!((layout.told_end(), layout.region()), (449 * MIB, 450 * MIB));
        assert_eq!(layout.total, (450 + 2 + 32 + 6 + 16) * MIB);
        let memory = Memory::new(&layout).unwrap();
        assert_eq!(PhysMem::extents(memory.ram()), [Gpa(0)..Gpa(449 * MIB)]);
        assert_eq!((memory.code().gpa, memory.rings().gpa), (Gpa(450 * MIB), Gpa(452 * MIB)));
        assert_eq!(memory.rings().memory.len() as u64, 32 * MIB);
    }

    #[test]
    fn large_guests_go_on_above_4_gib_and_their_region_with_them() {
        let layout = Layout::new(3 * GIB, 32 * MIB, 0).unwrap();
        assert_eq!((layout.told_end(), layout.region()), (5 * GIB, 5 * GIB));
        assert_eq!(layout.file_offset(layout.region()), 3 * GIB);
        assert_eq!(layout.total, 3 * GIB + (2 + 32 + 16) * MIB);
    }

    #[test]
    fn no_part_ever_lies_in_the_hole_and_all_parts_lie_in_the_file() {
        for told in (64..6 * 1024).step_by(7).map(|mib| mib * MIB) {
            for (rings, initrd) in [(2 * MIB, 0), (256 * MIB, 0), (256 * MIB, 900 * MIB)] {
                let layout = Layout::new(told, rings, initrd).unwrap();
                let end = layout.region() + CODE_BYTES + rings;
                let low = if layout.is_split() { LOW } else { layout.total };
                assert!(layout.told_end() <= layout.region());
                assert!(end <= low || layout.region() >= HIGH, "{layout:?}");
                assert!(layout.file_offset(end) <= layout.total, "{layout:?}");
                assert_eq!(layout.is_split(), layout.total >= SPLIT_FROM);
            }
        }
        assert_eq!(Layout::new(u64::MAX, 2 * MIB, 0), None);
    }
}
