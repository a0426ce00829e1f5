//! A launched guest's memory: one file, mapped by QEMU and by us.
//!
//! ```text
//! 0                 what the guest is told of by `mem=`
//!                   the region: its parts one behind the other, rings last; large-page aligned
//!                   room for what QEMU puts at the end of RAM: the initrd, ACPI tables
//! ```
//!
//! A PC with more than about 2 GiB has the rest of it from 4 GiB on; the layout is the same, and the
//! region lies up there.

use std::fs::File;
use std::io;
use std::ops::Range;

use patcher::addr::Gpa;
use patcher::region::{LEAF_BYTES, Part, RegionWindow};
use rustix::fs::MemfdFlags;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

use super::board::{Board, Hole};

const MIB: u64 = 1 << 20;

/// Bytes of the region in front of its rings.
const BEFORE_RINGS: u64 = Part::Rings.offset();

/// QEMU's tables at the end of RAM need less (`ACPI_DATA_SIZE` and firmware tables).
const TABLES: u64 = 16 * MIB;

/// Where things are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Where RAM begins.
    base: u64,
    /// The hole in RAM, if RAM is so large that it has one.
    hole: Option<Hole>,
    /// Bytes that the guest is told of.
    told: u64,
    rings: u64,
    /// Bytes that QEMU has.
    pub total: u64,
}

impl Layout {
    /// For a machine with `told` bytes of RAM, so many for rings and an initrd of so many; `None` if
    /// that is more than can be counted.
    pub(super) fn new(board: &Board, told: u64, rings: u64, initrd: u64) -> Option<Self> {
        let initrd = initrd.checked_next_multiple_of(LEAF_BYTES)?;
        let region = told.checked_next_multiple_of(LEAF_BYTES)?;
        let behind = region.checked_add(BEFORE_RINGS)?.checked_add(rings)?;
        let mut total = behind.checked_add(initrd)?.checked_add(TABLES)?;
        let hole = board.hole.filter(|hole| total >= hole.from);
        // A guest just below the hole would have its region across it: then all of the region and
        // what is behind it goes above.
        if let Some(hole) = hole.filter(|hole| told < hole.start) {
            total = (hole.start + BEFORE_RINGS).checked_add(rings)?.checked_add(TABLES)?;
            total = total.max(hole.from);
        }
        if let Some(steps) = board.steps {
            let step = total.div_ceil(steps).checked_next_power_of_two()?.max(MIB);
            total = total.checked_next_multiple_of(step)?;
        }
        i64::try_from(total.checked_add(board.ram_base)?).ok()?;
        Some(Self { base: board.ram_base, hole, told, rings, total })
    }

    /// For a machine that somebody else has started with `total` bytes of RAM, whose kernel has the
    /// parameter `mem`: all of what that keeps from it is for the region, but for the end, where firmware
    /// may have its tables. `None` if that is too little, or lies around a hole.
    pub(super) fn found(base: u64, hole: Option<Hole>, total: u64, mem: u64) -> Option<Self> {
        let mut layout = Self::whole(base, hole, total);
        layout.told = match layout.hole {
            // The parameter is an address.
            Some(Hole { start, end, .. }) if mem >= end => mem - end + start,
            Some(Hole { start, .. }) => mem.min(start),
            None => mem,
        };
        if layout.told > total {
            return None;
        }
        let region = layout.file_offset(layout.region());
        let room = total.checked_sub(region.checked_add(BEFORE_RINGS + TABLES)?)?;
        layout.rings = room - room % LEAF_BYTES;
        let behind_hole = layout.hole.is_none_or(|hole| layout.told >= hole.start);
        (mem > 0 && layout.rings >= LEAF_BYTES && behind_hole).then_some(layout)
    }

    /// For a machine with `total` bytes of RAM and no region in it.
    pub(super) fn whole(base: u64, hole: Option<Hole>, total: u64) -> Self {
        let hole = hole.filter(|hole| total >= hole.from);
        Self { base, hole, told: total, rings: 0, total }
    }

    /// The same with no more than so many bytes for rings.
    pub(super) fn with_rings(self, most: u64) -> Self {
        Self { rings: self.rings.min(most), ..self }
    }

    /// The guest-physical ranges of the RAM that the guest is told of.
    fn told_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let ranges = match self.hole {
            Some(Hole { start, end, .. }) if self.told > start => {
                [Some(0..start), Some(end..end + (self.told - start))]
            }
            _ => [Some(self.base..self.base + self.told), None],
        };
        ranges.into_iter().flatten()
    }

    /// The guest-physical address behind the RAM that the guest is told of.
    fn told_end(&self) -> u64 {
        self.told_ranges().last().map_or(self.base, |range| range.end)
    }

    /// What the kernel is to be told by `mem=`, in bytes.
    pub(super) fn mem(&self) -> u64 {
        self.told_end() - self.base
    }

    /// Where the region begins in guest-physical memory.
    pub(super) fn region(&self) -> u64 {
        let end = self.told_end().next_multiple_of(LEAF_BYTES);
        self.hole.map_or(end, |hole| end.max(hole.end))
    }

    fn file_offset(&self, gpa: u64) -> u64 {
        match self.hole {
            Some(hole) if gpa >= hole.end => gpa - hole.end + hole.start,
            _ => gpa - self.base,
        }
    }
}

/// The memory itself.
#[derive(Debug)]
pub(super) struct Memory {
    file: File,
    ram: GuestMemoryMmap<()>,
    /// In the order of [`Part::ALL`].
    region: Vec<(Part, GuestRegionMmap<()>)>,
}

impl Memory {
    /// Makes a file without a name and maps it.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn new(layout: &Layout) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("guest-ram", MemfdFlags::CLOEXEC)?);
        file.set_len(layout.total)?;
        Self::of(file, layout)
    }

    /// Maps a file that QEMU has as the guest's RAM.
    ///
    /// # Errors
    /// What the host says, or that the file is too small.
    pub(super) fn of(file: File, layout: &Layout) -> io::Result<Self> {
        let ram = ram(&file, layout)?;
        let region = Piece { file: &file, offset: layout.file_offset(layout.region()) };
        let region = region.map(layout.region(), layout.rings)?;
        Ok(Self { file, ram, region })
    }

    /// The same with the region at `gpa`, with so many bytes for rings, which is a file of its own.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub(super) fn beside(
        file: File,
        layout: &Layout,
        region: &File,
        gpa: Gpa,
        rings: u64,
    ) -> io::Result<Self> {
        let ram = ram(&file, layout)?;
        if region.metadata()?.len() < BEFORE_RINGS + rings {
            return Err(io::Error::other("it is smaller than the device's memory"));
        }
        let region = Piece { file: region, offset: 0 }.map(gpa.0, rings)?;
        Ok(Self { file, ram, region })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn ram(&self) -> &GuestMemoryMmap<()> {
        &self.ram
    }

    pub(super) fn part(&self, part: Part) -> RegionWindow<'_> {
        let found = self.region.iter().find(|(found, _)| *found == part);
        window(&found.expect("a region has every part").1)
    }

    /// Whether nobody has written anything where code and payloads are to go.
    ///
    /// # Errors
    /// It can't be read.
    pub(super) fn is_empty(&self) -> io::Result<bool> {
        for part in [Part::Code, Part::Constants, Part::Data] {
            let window = self.part(part);
            let mut bytes = vec![0; window.memory.len()];
            window.memory.read_slice(&mut bytes, 0).map_err(io::Error::other)?;
            if bytes.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn ram(file: &File, layout: &Layout) -> io::Result<GuestMemoryMmap<()>> {
    if file.metadata()?.len() < layout.total {
        return Err(io::Error::other("it is smaller than the guest's memory"));
    }
    let ranges = layout.told_ranges().map(|range| {
        map(file, layout.file_offset(range.start), range.start, range.end - range.start)
    });
    let ranges = ranges.collect::<io::Result<Vec<_>>>()?;
    GuestMemoryMmap::from_regions(ranges).map_err(io::Error::other)
}

/// Where the region's memory is.
struct Piece<'a> {
    file: &'a File,
    offset: u64,
}

impl Piece<'_> {
    /// Maps the parts, which the guest has from `gpa` on.
    fn map(&self, gpa: u64, rings: u64) -> io::Result<Vec<(Part, GuestRegionMmap<()>)>> {
        let parts = Part::ALL.into_iter().map(|part| {
            let (begin, len) = (part.offset(), part.len(rings));
            Ok((part, map(self.file, self.offset + begin, gpa + begin, len)?))
        });
        parts.collect()
    }
}

fn map(file: &File, offset: u64, gpa: u64, bytes: u64) -> io::Result<GuestRegionMmap<()>> {
    let file = FileOffset::new(file.try_clone()?, offset);
    let mapping = MmapRegion::from_file(file, bytes as usize).map_err(io::Error::other)?;
    GuestRegionMmap::new(mapping, GuestAddress(gpa))
        .ok_or_else(|| io::Error::other("memory would end above the last address"))
}

fn window(region: &GuestRegionMmap<()>) -> RegionWindow<'_> {
    let memory = region.as_volatile_slice().expect("the whole of a region lies within it");
    RegionWindow { gpa: Gpa::from(region.start_addr()), memory }
}

#[cfg(test)]
mod tests {
    use patcher::mem::PhysMem;

    use super::super::Architecture;
    use super::*;

    const GIB: u64 = 1 << 30;

    fn pc(told: u64, rings: u64, initrd: u64) -> Option<Layout> {
        Layout::new(Architecture::X86_64.board(), told, rings, initrd)
    }

    #[test]
    fn the_region_lies_behind_what_the_guest_is_told_of_and_before_the_initrd() {
        let layout = pc(449 * MIB, 32 * MIB, 5 * MIB).unwrap();
        assert_eq!((layout.told_end(), layout.region()), (449 * MIB, 450 * MIB));
        assert_eq!(layout.total, (450 + 6 + 32 + 6 + 16) * MIB);
        let memory = Memory::new(&layout).unwrap();
        assert_eq!(PhysMem::extents(memory.ram()), [Gpa(0)..Gpa(449 * MIB)]);
        let places = Part::ALL.map(|part| memory.part(part).gpa.0 / MIB);
        assert_eq!(places, [450, 452, 454, 456]);
        let lengths = Part::ALL.map(|part| memory.part(part).memory.len() as u64 / MIB);
        assert_eq!(lengths, [2, 2, 2, 32]);
    }

    #[test]
    fn large_guests_go_on_above_4_gib_and_their_region_with_them() {
        let layout = pc(3 * GIB, 32 * MIB, 0).unwrap();
        assert_eq!((layout.told_end(), layout.region()), (5 * GIB, 5 * GIB));
        assert_eq!(layout.file_offset(layout.region()), 3 * GIB);
        assert_eq!(layout.total, 3 * GIB + (6 + 32 + 16) * MIB);
    }

    #[test]
    fn no_part_ever_lies_in_the_hole_and_all_parts_lie_in_the_file() {
        for told in (64..6 * 1024).step_by(7).map(|mib| mib * MIB) {
            for (rings, initrd) in [(2 * MIB, 0), (256 * MIB, 0), (256 * MIB, 900 * MIB)] {
                let layout = pc(told, rings, initrd).unwrap();
                let end = layout.region() + BEFORE_RINGS + rings;
                let low = if layout.hole.is_some() { 2 * GIB } else { layout.total };
                assert!(layout.told_end() <= layout.region());
                assert!(end <= low || layout.region() >= 4 * GIB, "{layout:?}");
                assert!(layout.file_offset(end) <= layout.total, "{layout:?}");
                assert_eq!(layout.hole.is_some(), layout.total >= 0xb000_0000);
            }
        }
        assert_eq!(pc(u64::MAX, 2 * MIB, 0), None);
    }
    #[test]
    fn what_somebody_else_kept_from_a_guest_is_the_regions() {
        let found = |total, told| Layout::found(0, Architecture::X86_64.board().hole, total, told);
        let layout = found(576 * MIB, 512 * MIB).unwrap();
        assert_eq!((layout.region(), layout.rings), (512 * MIB, 42 * MIB));
        assert_eq!(layout.with_rings(32 * MIB).rings, 32 * MIB);
        assert_eq!(found(512 * MIB, 512 * MIB), None);
        assert_eq!(found(536 * MIB, 514 * MIB), None, "tables may lie at the end");
        assert_eq!(found(4 * GIB, GIB), None, "part of it lies below the hole");
        // The parameter is an address: 2 GiB lie below the hole, and 1 GiB above it.
        let layout = found(4 * GIB, 5 * GIB).unwrap();
        assert_eq!((layout.region(), layout.file_offset(layout.region())), (5 * GIB, 3 * GIB));
        assert_eq!(found(4 * GIB, 3 * GIB).unwrap().region(), 4 * GIB);
        assert_eq!(found(4 * GIB, 6 * GIB), None);
        assert_eq!(found(4 * GIB, u64::MAX), None);
    }

    #[test]
    fn ram_may_begin_anywhere_and_goes_in_steps() {
        let arm = Layout::new(Architecture::Aarch64.board(), 512 * MIB, 16 * MIB, 0).unwrap();
        assert_eq!((arm.told_end(), arm.mem()), (GIB + 512 * MIB, 512 * MIB));
        assert_eq!(arm.file_offset(arm.region()), 512 * MIB);
        let memory = Memory::new(&arm).unwrap();
        assert_eq!(PhysMem::extents(memory.ram()), [Gpa(GIB)..Gpa(GIB + 512 * MIB)]);

        let z = |told| Layout::new(Architecture::S390x.board(), told, 16 * MIB, 0).unwrap();
        assert_eq!(z(511 * MIB).total, (512 + 6 + 16 + 16) * MIB);
        let large = z(5 * GIB);
        assert_eq!((large.total % (8 * MIB), large.region()), (0, 5 * GIB));
    }
}
