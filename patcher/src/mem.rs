//! How a guest's physical memory is read, and the one way to change it without a stop.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileMemory,
    VolatileSlice,
};

use crate::addr::Gpa;

/// A guest's RAM as an engine shows it.
///
/// Everything read through this is hostile and may change between two reads.
pub trait PhysMem: Send + Sync {
    /// Fills `buf` with the bytes at `at`.
    ///
    /// # Errors
    /// [`MemError::NotRam`] if any of the bytes is not guest RAM; `buf` is then unspecified.
    fn read(&self, at: Gpa, buf: &mut [u8]) -> Result<(), MemError>;

    /// This process's own mapping of the `len` bytes at `at`, if they are RAM and the engine has them in
    /// one piece: for what is read in a hurry.
    fn mapped(&self, _at: Gpa, _len: usize) -> Option<VolatileSlice<'_>> {
        None
    }

    /// The guest-physical extents that are RAM, ascending and disjoint. The region that the
    /// hypervisor provides is not among them.
    fn extents(&self) -> Vec<Range<Gpa>>;

    /// Replaces the 8 bytes at the 8-aligned address `at` by `new` if they are `old`, atomically
    /// towards vCPUs.
    ///
    /// This exists for page-table entries, which go from absent to present while the guest runs.
    /// Kernel text has another door: [`Stopped::write_text`](crate::machine::Stopped::write_text).
    ///
    /// # Errors
    /// [`MemError::NotRam`], or [`MemError::EntryChanged`] if the value was not `old`; nothing is
    /// written then.
    fn replace_entry(&self, at: Gpa, old: [u8; 8], new: [u8; 8]) -> Result<(), MemError>;
}

/// Guest memory could not be read or changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemError {
    /// The address range is not, or not all, guest RAM.
    #[error("guest-physical {at}..+{len:#x} is not guest RAM")]
    NotRam {
        /// First byte wanted.
        at: Gpa,
        /// Bytes wanted.
        len: usize,
    },
    /// An entry was to be replaced and holds something else by now.
    #[error(
        "the entry at guest-physical {at} holds {found:02x?} where {expected:02x?} was expected"
    )]
    EntryChanged {
        /// Where the entry is.
        at: Gpa,
        /// What was expected.
        expected: [u8; 8],
        /// What is there.
        found: [u8; 8],
    },
}

/// Little- and big-endian integers read from guest memory.
impl dyn PhysMem + '_ {
    /// Reads an array of `N` bytes.
    ///
    /// # Errors
    /// [`MemError::NotRam`].
    pub fn array<const N: usize>(&self, at: Gpa) -> Result<[u8; N], MemError> {
        let mut bytes = [0; N];
        self.read(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a little-endian 64-bit value.
    ///
    /// # Errors
    /// [`MemError::NotRam`].
    pub fn u64_le(&self, at: Gpa) -> Result<u64, MemError> {
        self.array(at).map(u64::from_le_bytes)
    }
}

impl PhysMem for GuestMemoryMmap<()> {
    fn read(&self, at: Gpa, buf: &mut [u8]) -> Result<(), MemError> {
        let len = buf.len();
        // Within one region, which all but a few reads are, there is no need to look for more.
        if let Some(slice) = self.mapped(at, len) {
            slice.copy_to(buf);
            return Ok(());
        }
        self.read_slice(buf, GuestAddress::from(at)).map_err(|_| MemError::NotRam { at, len })
    }

    fn mapped(&self, at: Gpa, len: usize) -> Option<VolatileSlice<'_>> {
        let (region, offset) = self.to_region_addr(GuestAddress::from(at))?;
        region.get_slice(offset, len).ok()
    }

    fn extents(&self) -> Vec<Range<Gpa>> {
        self.iter()
            .map(|region| {
                let start = Gpa::from(region.start_addr());
                start..start + region.len()
            })
            .collect()
    }

    fn replace_entry(&self, at: Gpa, old: [u8; 8], new: [u8; 8]) -> Result<(), MemError> {
        let missing = || MemError::NotRam { at, len: 8 };
        let (region, offset) = self.to_region_addr(GuestAddress::from(at)).ok_or_else(missing)?;
        let slice = region.get_slice(offset, 8).map_err(|_| missing())?;
        let entry = slice.get_atomic_ref::<AtomicU64>(0).map_err(|_| missing())?;
        let [expected, new] = [old, new].map(u64::from_ne_bytes);
        entry
            .compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(|found| MemError::EntryChanged {
                at,
                expected: old,
                found: found.to_ne_bytes(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram() -> GuestMemoryMmap<()> {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000), (GuestAddress(0x4000), 0x1000)])
            .unwrap()
    }

    #[test]
    fn reads_that_leave_ram_are_refused() {
        let ram = ram();
        let mut buf = [0; 16];
        assert_eq!(PhysMem::read(&ram, Gpa(0xff0), &mut buf), Ok(()));
        for at in [0xff8, 0x3ff8, u64::MAX - 4] {
            assert_eq!(
                PhysMem::read(&ram, Gpa(at), &mut buf),
                Err(MemError::NotRam { at: Gpa(at), len: 16 })
            );
        }
        assert_eq!(ram.extents(), [Gpa(0)..Gpa(0x1000), Gpa(0x4000)..Gpa(0x5000)]);
    }

    #[test]
    fn an_entry_that_changed_meanwhile_is_left_alone() {
        let ram = ram();
        let (empty, first, second) = ([0; 8], 0x1e3_u64.to_le_bytes(), 0x2e3_u64.to_le_bytes());
        ram.replace_entry(Gpa(0x4008), empty, first).unwrap();
        assert_eq!(
            ram.replace_entry(Gpa(0x4008), empty, second),
            Err(MemError::EntryChanged { at: Gpa(0x4008), expected: empty, found: first })
        );
        assert_eq!((&ram as &dyn PhysMem).u64_le(Gpa(0x4008)), Ok(0x1e3));
        assert!(ram.replace_entry(Gpa(0x4ffc), empty, first).is_err());
        assert!(ram.replace_entry(Gpa(0x8000), empty, first).is_err());
    }
}
