//! How often functions were called: counters in the region's data, which the guest increments.
//!
//! There is one set for all CPUs, 64 bits each, in the guest's byte order. They only ever rise, so that
//! several readers can each take differences from where they began. What the guest writes there is its
//! own business: a reader that finds one lower than before has found out that the guest is at fault.

use vm_memory::{Bytes, VolatileSlice};

use super::{RETURN_POOL_OFFSET, RegionError};
use crate::addr::Gva;
use crate::arch::ByteOrder;

/// How many counters there are: more than kernels have functions with pads, and whole blocks of thunks on
/// every architecture.
pub const COUNTERS: u32 = 65_280;

/// Bytes of a counter.
pub const COUNTER_BYTES: u64 = 8;

/// Where the counters begin in the data part: in front of the calls whose return is taken, and on a page,
/// which is what aarch64 names addresses by.
pub const COUNTERS_OFFSET: u64 = RETURN_POOL_OFFSET - (512 << 10);

const _: () = assert!(COUNTERS as u64 * COUNTER_BYTES <= RETURN_POOL_OFFSET - COUNTERS_OFFSET);

const _: () = assert!(COUNTERS_OFFSET.is_multiple_of(4096));

/// Bytes of a block of thunks, each of which leads its function to the code that counts.
pub const THUNK_BLOCK_BYTES: u64 = 128;

/// Blocks that are placed together.
pub const THUNK_BLOCKS: u32 = 32;

/// Where the counters are in guest-virtual memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Counters(pub Gva);

impl Counters {
    /// Address of a counter.
    #[must_use]
    pub fn at(self, index: u32) -> Gva {
        self.0 + u64::from(index) * COUNTER_BYTES
    }
}

/// What the first `count` counters in `data`, the window of the data part, are now.
///
/// # Errors
/// [`RegionError::Memory`].
pub fn read_counters(
    data: &VolatileSlice<'_>,
    order: ByteOrder,
    count: u32,
) -> Result<Vec<u64>, RegionError> {
    let mut bytes = vec![0; count.min(COUNTERS) as usize * COUNTER_BYTES as usize];
    data.read_slice(&mut bytes, COUNTERS_OFFSET as usize)
        .map_err(|error| RegionError::Memory(error.to_string()))?;
    let (counters, _) = bytes.as_chunks::<{ COUNTER_BYTES as usize }>();
    Ok(counters.iter().map(|bytes| order.u64(*bytes)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::PART_BYTES;

    #[test]
    fn counters_are_read_in_the_guests_byte_order() {
        let mut bytes = vec![0_u8; PART_BYTES as usize];
        let at = COUNTERS_OFFSET as usize + 8;
        bytes[at..at + 8].copy_from_slice(&[1, 0, 0, 0, 0, 0, 0, 2]);
        let data = VolatileSlice::from(&mut bytes[..]);
        let read = |order| read_counters(&data, order, 2).unwrap();
        assert_eq!(read(ByteOrder::Little), [0, 0x0200_0000_0000_0001]);
        assert_eq!(read(ByteOrder::Big), [0, 0x0100_0000_0000_0002]);
        assert_eq!(
            read_counters(&data, ByteOrder::Big, u32::MAX).unwrap().len(),
            COUNTERS as usize
        );
    }
}
