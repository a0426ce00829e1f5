//! Blocks: what kind it is, how long, a check sum, and the content.

use super::MAX_BLOCK;

/// Bytes of a block's header: kind, length of the content, check sum.
pub const HEADER: usize = 12;

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// What is known of the guest; the first block.
    Begin = 1,
    /// Names that calls from here on refer to.
    Names = 2,
    /// Tasks that calls from here on refer to.
    Tasks = 3,
    /// Calls.
    Calls = 4,
    /// How many events there are and were; the last block.
    End = 5,
}

impl Kind {
    fn of(number: u32) -> Option<Self> {
        [Self::Begin, Self::Names, Self::Tasks, Self::Calls, Self::End]
            .into_iter()
            .find(|kind| *kind as u32 == number)
    }
}

/// The check sum of a block: CRC-32 as in zlib, over kind, length and content.
fn check_sum(kind_and_length: &[u8], content: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sum.update(kind_and_length);
    sum.update(content);
    sum.finalize()
}

/// Appends a block.
pub fn append(bytes: &mut Vec<u8>, kind: Kind, content: &[u8]) {
    debug_assert!(content.len() <= MAX_BLOCK);
    let at = bytes.len();
    bytes.extend_from_slice(&(kind as u32).to_le_bytes());
    bytes.extend_from_slice(&(content.len() as u32).to_le_bytes());
    let sum = check_sum(&bytes[at..], content);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes.extend_from_slice(content);
}

/// A block's header.
#[derive(Debug, Clone, Copy)]
pub struct Header {
    bytes: [u8; HEADER],
}

impl Header {
    /// The header in these bytes, if the block can be that long.
    pub fn new(bytes: [u8; HEADER]) -> Option<Self> {
        let header = Self { bytes };
        (header.content() <= MAX_BLOCK).then_some(header)
    }

    fn u32_at(&self, at: usize) -> u32 {
        let bytes = &self.bytes[at..at + 4];
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    /// Bytes of the content.
    pub fn content(&self) -> usize {
        self.u32_at(4) as usize
    }

    /// Whether that content is this block's.
    pub fn is_of(&self, content: &[u8]) -> bool {
        self.u32_at(8) == check_sum(&self.bytes[..8], content)
    }

    /// What the block holds; the number of something else.
    pub fn kind(&self) -> Result<Kind, u32> {
        let number = self.u32_at(0);
        Kind::of(number).ok_or(number)
    }
}
