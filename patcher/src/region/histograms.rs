//! How long functions took: histograms in the region's data, which the guest adds to as they return.
//!
//! ```text
//! 0x000  nanoseconds in 2³² ticks of the guest's clock (u64), rest unused
//! 0x200  histogram 1, and so on
//! ```
//!
//! A histogram is 512 bytes: word `n` of 64 counts the calls that took from 2ⁿ nanoseconds to less than
//! twice as long, the first one those below as well, and the last word adds up what all of them took. So
//! there is one multiplication in the guest, and borders are powers of two of nanoseconds whatever the rate
//! of its clock. What it computes is below 2⁶³.
//!
//! There is one set for all CPUs, in the guest's byte order. They only ever rise, as counters do.

use vm_memory::{Bytes, VolatileSlice};

use super::{COUNTERS_OFFSET, RegionError};
use crate::addr::Gva;
use crate::arch::ByteOrder;

/// How many functions can be measured. Histograms are numbered from 1 to this.
pub const HISTOGRAMS: u16 = 511;

/// Bytes of a histogram.
pub const HISTOGRAM_BYTES: u64 = 512;

/// Counts of a histogram.
pub const BUCKETS: usize = 63;

/// Where the sum is in a histogram, in bytes.
pub(crate) const SUM_AT: u32 = BUCKETS as u32 * 8;

/// Where the histograms begin in the data part: in front of the counters, and on a page, which is what
/// aarch64 names addresses by.
pub const HISTOGRAMS_OFFSET: u64 = COUNTERS_OFFSET - (HISTOGRAMS as u64 + 1) * HISTOGRAM_BYTES;

const _: () = assert!(HISTOGRAMS_OFFSET.is_multiple_of(4096));

/// Where the histograms are in guest-virtual memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Histograms(pub Gva);

impl Histograms {
    /// Address of the last byte of the last histogram.
    #[must_use]
    pub fn end(self) -> Gva {
        self.0 + ((u64::from(HISTOGRAMS) + 1) * HISTOGRAM_BYTES - 1)
    }
}

/// How long the calls of a function took, or what a part of them did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Histogram {
    /// Calls by the highest bit of what they took in nanoseconds; the first are those of 0 and of 1.
    pub buckets: [u64; BUCKETS],
    /// What they took together, in nanoseconds.
    pub total_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: [0; BUCKETS], total_ns: 0 }
    }
}

impl Histogram {
    /// What was added since it was `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let bucket = |bit: usize| self.buckets[bit].saturating_sub(earlier.buckets[bit]);
        let total_ns = self.total_ns.saturating_sub(earlier.total_ns);
        Self { buckets: std::array::from_fn(bucket), total_ns }
    }

    /// How many calls are in it.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, calls| sum.saturating_add(*calls))
    }
}

/// The histograms as this process sees them.
#[derive(Debug)]
pub struct HistogramsMemory<'a> {
    data: VolatileSlice<'a>,
    order: ByteOrder,
}

impl<'a> HistogramsMemory<'a> {
    /// Those in `data`, the window of the data part.
    #[must_use]
    pub fn new(data: VolatileSlice<'a>, order: ByteOrder) -> Self {
        Self { data, order }
    }

    /// Says how fast the guest's clock ticks, before anything is measured.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn set_clock(&self, hz: u64) -> Result<(), RegionError> {
        let written =
            self.data.write_slice(&self.order.bytes(scale(hz)), HISTOGRAMS_OFFSET as usize);
        written.map_err(|error| RegionError::Memory(error.to_string()))
    }

    /// What the first so many histograms hold, in their order.
    ///
    /// # Errors
    /// [`RegionError::Memory`].
    pub fn read(&self, count: u16) -> Result<Vec<Histogram>, RegionError> {
        let mut bytes = vec![0; usize::from(count.min(HISTOGRAMS)) * HISTOGRAM_BYTES as usize];
        let read = self.data.read_slice(&mut bytes, (HISTOGRAMS_OFFSET + HISTOGRAM_BYTES) as usize);
        read.map_err(|error| RegionError::Memory(error.to_string()))?;
        let (histograms, _) = bytes.as_chunks::<{ HISTOGRAM_BYTES as usize }>();
        Ok(histograms.iter().map(|bytes| self.decode(bytes)).collect())
    }

    fn decode(&self, bytes: &[u8; HISTOGRAM_BYTES as usize]) -> Histogram {
        let (words, _) = bytes.as_chunks();
        let word = |index: usize| self.order.u64(words[index]);
        Histogram { buckets: std::array::from_fn(word), total_ns: word(BUCKETS) }
    }
}

/// Nanoseconds in 2³² ticks of a clock.
fn scale(hz: u64) -> u64 {
    // Of no more than 62 bits.
    ((1_000_000_000_u128 << 32) / u128::from(hz.max(1))) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::PART_BYTES;

    #[test]
    fn histograms_are_read_in_the_guests_byte_order_behind_the_clocks_rate() {
        for order in [ByteOrder::Little, ByteOrder::Big] {
            let mut bytes = vec![0_u8; PART_BYTES as usize];
            let at = (HISTOGRAMS_OFFSET + 2 * HISTOGRAM_BYTES) as usize;
            bytes[at + 80..at + 88].copy_from_slice(&order.bytes(7));
            bytes[at + 496..at + 504].copy_from_slice(&order.bytes(2));
            bytes[at + 504..at + 512].copy_from_slice(&order.bytes(7777));
            let memory = HistogramsMemory::new(VolatileSlice::from(&mut bytes[..]), order);
            memory.set_clock(2_000_000_000).unwrap();
            let read = memory.read(2).unwrap();
            let [first, second] = read[..] else { panic!("{} histograms", read.len()) };
            assert_eq!(first, Histogram::default());
            assert_eq!((second.buckets[10], second.buckets[62], second.calls()), (7, 2, 9));
            assert_eq!(second.total_ns, 7777);
            assert_eq!(memory.read(u16::MAX).unwrap().len(), usize::from(HISTOGRAMS));
            let at = HISTOGRAMS_OFFSET as usize;
            assert_eq!(bytes[at..at + 8], order.bytes(1 << 31));
        }
    }

    #[test]
    fn every_clock_has_a_rate() {
        assert_eq!([1_000_000_000, 62_500_000].map(scale), [1 << 32, 16 << 32]);
        assert!(scale(0) < 1 << 62 && scale(u64::MAX) == 0);
    }
}
