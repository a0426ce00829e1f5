//! Unpacks what kernels are packed with, into no more memory than a kernel takes.

use std::io::{self, Read};

/// The most bytes that a kernel is unpacked to; distribution kernels have 20 to 65 MiB.
pub const MAX_UNPACKED: usize = 256 << 20;

/// The most memory that a format's window of earlier output may take, in bytes: what kernels are
/// packed with, and so what any of these decoders would need for one.
const MAX_WINDOW: u64 = 128 << 20;

/// What a packed block of the older format of lz4 unpacks to at most, in bytes.
const LZ4_BLOCK: usize = 8 << 20;

/// How a kernel is packed (`CONFIG_KERNEL_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// gzip, RFC 1952.
    Gzip,
    /// xz, of which kernels use LZMA2 and the filters for branches.
    Xz,
    /// zstd, RFC 8878.
    Zstd,
    /// The older format of lz4 (`lz4 -l`).
    Lz4,
}

/// Packed data could not be unpacked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    /// It is packed in a way that is not supported.
    #[error("it is packed with {found}, which is not supported; unpack it first")]
    Unsupported {
        /// The way.
        found: &'static str,
    },
    /// It is not packed in any way that is known.
    #[error("what it holds is packed in no known way (it begins with {head:02x?})")]
    Unknown {
        /// How it begins.
        head: Vec<u8>,
    },
    /// The data is damaged.
    #[error("its {packing:?} data is damaged: {source}")]
    Damaged {
        /// How it is packed.
        packing: Packing,
        /// What the decoder says.
        source: io::Error,
    },
    /// It would be larger than any kernel.
    #[error("it unpacks to more than {MAX_UNPACKED} bytes, more than is believed")]
    TooLarge,
}

impl Packing {
    /// Every way, with the bytes that its data begins with.
    pub(super) const ALL: [(Self, &'static [u8]); 4] = [
        (Self::Gzip, &[0x1f, 0x8b, 8]),
        (Self::Xz, b"\xfd7zXZ\0"),
        (Self::Zstd, &[0x28, 0xb5, 0x2f, 0xfd]),
        (Self::Lz4, &[0x02, 0x21, 0x4c, 0x18]),
    ];

    /// Ways that kernels may be packed and that are not unpacked here.
    const OTHERS: [(&'static str, &'static [u8]); 3] =
        [("bzip2", b"BZh"), ("LZMA", &[0x5d, 0, 0]), ("LZO", &[0x89, b'L', b'Z', b'O'])];

    /// How `data` is packed, by its first bytes.
    ///
    /// # Errors
    /// [`UnpackError::Unsupported`], [`UnpackError::Unknown`].
    pub fn of(data: &[u8]) -> Result<Self, UnpackError> {
        if let Some((packing, _)) = Self::ALL.iter().find(|(_, magic)| data.starts_with(magic)) {
            return Ok(*packing);
        }
        match Self::OTHERS.iter().find(|(_, magic)| data.starts_with(magic)) {
            Some((found, _)) => Err(UnpackError::Unsupported { found }),
            None => Err(UnpackError::Unknown { head: data[..data.len().min(8)].to_vec() }),
        }
    }

    /// Unpacks `data`. Whatever follows the packed data is left alone: a kernel's build puts the
    /// unpacked size there.
    ///
    /// # Errors
    /// [`UnpackError::Damaged`], [`UnpackError::TooLarge`].
    pub fn unpack(self, data: &[u8]) -> Result<Vec<u8>, UnpackError> {
        let damaged = |source| UnpackError::Damaged { packing: self, source };
        match self {
            Packing::Gzip => bounded(flate2::bufread::GzDecoder::new(data)).map_err(damaged),
            Packing::Xz => {
                let kib = (MAX_WINDOW >> 10) as u32 + 1024;
                bounded(lzma_rust2::XzReader::new_mem_limit(data, false, kib)).map_err(damaged)
            }
            Packing::Zstd => {
                let decoder =
                    ruzstd::decoding::StreamingDecoder::new_with_max_window_size(data, MAX_WINDOW);
                bounded(decoder.map_err(|error| damaged(io::Error::other(error)))?).map_err(damaged)
            }
            Packing::Lz4 => lz4(data).map_err(damaged),
        }
        .and_then(|unpacked| unpacked.ok_or(UnpackError::TooLarge))
    }
}

/// Everything that `decoder` gives, if that is no more than a kernel has.
fn bounded(decoder: impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut unpacked = Vec::new();
    decoder.take(MAX_UNPACKED as u64 + 1).read_to_end(&mut unpacked)?;
    Ok((unpacked.len() <= MAX_UNPACKED).then_some(unpacked))
}

/// Unpacks a magic number and then blocks, each with its packed length in front.
fn lz4(data: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut unpacked = Vec::new();
    let mut block = vec![0; LZ4_BLOCK];
    let mut rest = data.get(4..).unwrap_or_default();
    while let Some((len, behind)) = rest.split_first_chunk() {
        // What is no block any more: the unpacked size, and nothing behind it.
        if behind.is_empty() && !unpacked.is_empty() {
            break;
        }
        let len = u32::from_le_bytes(*len) as usize;
        let cut = || io::Error::new(io::ErrorKind::UnexpectedEof, "a block is cut short");
        let (packed, next) = behind.split_at_checked(len).ok_or_else(cut)?;
        let count = lz4_flex::block::decompress_into(packed, &mut block)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        if unpacked.len() + count > MAX_UNPACKED {
            return Ok(None);
        }
        unpacked.extend_from_slice(&block[..count]);
        rest = next;
    }
    Ok(Some(unpacked))
}
