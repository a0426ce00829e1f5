//! Where rings, their headers and their records lie.

use super::{LEAF_BYTES, RegionError};
use crate::addr::Gva;

/// Bytes of a ring's header. Two cache lines, since CPUs fetch them in pairs: one CPU's head must
/// not share any with another's.
pub const HEADER_BYTES: u64 = 128;

/// Bytes before the first ring: as many headers as Linux distributions have CPUs, at most.
pub const HEADERS_BYTES: u64 = 64 << 10;

/// Bytes of a record.
pub const RECORD_BYTES: u64 = 32;

/// Where in a ring's header it is counted how many slots were reserved for more of a record, in bytes.
pub(crate) const CONTINUATIONS_AT: u64 = 8;

/// Words of a call's arguments that a slot holds which is there for more of a record: at 0, 12 and 20.
/// Between the first and the second it says, in 32 bits, the how-manieth it is, from 1: no function is so
/// near to an address whose lower half is 0.
pub const CONTINUATION_WORDS: usize = 3;

/// Slots that a record has behind its first one at most.
pub const MAX_CONTINUATIONS: usize = 4;

/// The smallest ring: one page.
pub const MIN_RING_BYTES: u64 = 4096;

/// The length that a rings window must have for `vcpus` rings of `ring_bytes` each, which is a
/// power of two: a multiple of [`LEAF_BYTES`].
#[must_use]
pub fn rings_window_len(vcpus: usize, ring_bytes: u64) -> u64 {
    (HEADERS_BYTES + vcpus as u64 * ring_bytes).next_multiple_of(LEAF_BYTES)
}

/// Where the rings are in guest-virtual memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingLayout {
    base: Gva,
    ring_bytes: u64,
    cpus: usize,
}

impl RingLayout {
    /// Lays out rings for `cpus` CPUs, as large as fit, in a window of `len` bytes at `base`.
    ///
    /// # Errors
    /// [`RegionError::TooSmall`], [`RegionError::TooManyCpus`].
    pub fn new(base: Gva, len: u64, cpus: usize) -> Result<Self, RegionError> {
        if cpus as u64 > HEADERS_BYTES / HEADER_BYTES {
            return Err(RegionError::TooManyCpus { cpus });
        }
        let too_small = RegionError::TooSmall { len, cpus };
        let each = len.saturating_sub(HEADERS_BYTES).checked_div(cpus as u64);
        match each {
            // Indices are masked as 32 bits in the trampoline, offsets into a ring as well.
            Some(each) if each >= MIN_RING_BYTES => {
                Ok(Self { base, ring_bytes: (1 << each.ilog2()).min(1 << 31), cpus })
            }
            _ => Err(too_small),
        }
    }

    /// Address of the first ring header.
    #[must_use]
    pub fn headers(&self) -> Gva {
        self.base
    }

    /// Address of the first ring.
    #[must_use]
    pub fn slots(&self) -> Gva {
        self.base + HEADERS_BYTES
    }

    /// Address of the last byte of the last ring.
    #[must_use]
    pub fn end(&self) -> Gva {
        self.slots() + (self.cpus as u64 * self.ring_bytes - 1)
    }

    /// How many rings there are.
    #[must_use]
    pub fn cpus(&self) -> usize {
        self.cpus
    }

    /// Records that one ring holds: a power of two.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.ring_bytes / RECORD_BYTES
    }

    /// Base-two logarithm of a ring's bytes.
    #[must_use]
    pub fn ring_shift(&self) -> u8 {
        self.ring_bytes.trailing_zeros() as u8
    }

    /// What an index is masked with to give a slot.
    #[must_use]
    pub fn index_mask(&self) -> u32 {
        (self.capacity() - 1) as u32
    }

    /// Offset of a CPU's header from the window's beginning.
    #[must_use]
    pub fn header_offset(&self, cpu: usize) -> usize {
        cpu * HEADER_BYTES as usize
    }

    /// Offset from the window's beginning of the slot that holds record `index` of a CPU.
    #[must_use]
    pub fn slot_offset(&self, cpu: usize, index: u64) -> usize {
        let slot = index & u64::from(self.index_mask());
        (HEADERS_BYTES + cpu as u64 * self.ring_bytes + slot * RECORD_BYTES) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_made_for_a_ring_size_holds_rings_of_that_size() {
        for (cpus, ring) in [(1, 4096), (2, 16 << 20), (3, 1 << 20), (64, 2 << 20)] {
            let len = rings_window_len(cpus, ring);
            assert_eq!(len % LEAF_BYTES, 0);
            let layout = RingLayout::new(Gva(0xffff_ffff_b000_0000), len, cpus).unwrap();
            assert!(layout.capacity() * RECORD_BYTES >= ring);
            let last = layout.slot_offset(cpus - 1, layout.capacity() - 1) as u64;
            assert!(last + RECORD_BYTES <= len);
            assert_eq!(layout.headers() + last + RECORD_BYTES - 1, layout.end());
        }
    }

    #[test]
    fn a_window_without_room_is_refused() {
        let base = Gva(0);
        assert!(matches!(
            RingLayout::new(base, HEADERS_BYTES + 4095, 1),
            Err(RegionError::TooSmall { .. })
        ));
        assert!(matches!(RingLayout::new(base, 1 << 30, 0), Err(RegionError::TooSmall { .. })));
        assert!(matches!(
            RingLayout::new(base, 1 << 40, 513),
            Err(RegionError::TooManyCpus { cpus: 513 })
        ));
    }

    #[test]
    fn slots_wrap_within_their_own_ring() {
        let layout = RingLayout::new(Gva(0), rings_window_len(2, 4096), 2).unwrap();
        let capacity = layout.capacity();
        assert_eq!(layout.slot_offset(0, 0), layout.slot_offset(0, capacity));
        assert_eq!(layout.slot_offset(1, 3), layout.slot_offset(1, 5 * capacity + 3));
        assert!(layout.slot_offset(0, capacity - 1) < layout.slot_offset(1, 0));
    }
}
