//! Kernels from their files: the image that a distribution installs, unpacked and laid out, without a
//! guest.
//!
//! | architecture | files |
//! |---|---|
//! | x86_64 | bzImage (an ELF file, packed) |
//! | aarch64 | Image; the same packed; in an EFI program that unpacks itself (zboot) |
//! | s390x | bzImage (an image, packed) |
//! | all three | vmlinux (ELF), also packed |
//!
//! A file is as hostile as a guest: memory and time are bounded, and what is unpacked is read by the same
//! code that reads a guest's memory.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use memchr::memmem;
use patcher::addr::Gva;
use patcher::arch::{Arch, aarch64::Aarch64, s390x::S390X};
use patcher::kernel::offline::{OfflineError, OfflineKernel};

pub(crate) mod bzimage;
mod elf;
mod identity;
#[cfg(test)]
mod tests;
mod unpack;

use elf::Vmlinux;
use identity::HEAD;
pub(crate) use identity::{Identity, identify};
pub use unpack::{MAX_UNPACKED, Packing, UnpackError};

/// The largest file read, in bytes; distribution kernels have up to 65 MiB.
const MAX_FILE: u64 = 512 << 20;

/// A packed kernel unpacks to more than this: what is less only looks like one.
const LEAST_IMAGE: usize = 1 << 20;

/// How many places of a file are taken for packed data that only look like it; s390x kernels of
/// distributions have up to four.
const MAX_TRIES: usize = 16;

/// How deep files are packed within each other: a packed file that holds packed data.
const MAX_DEPTH: usize = 2;

/// A kernel could not be had from a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelFileError {
    /// There is no such file.
    #[error("there is no kernel {}; give the path of one as distributions install it, often \
             /boot/vmlinuz-VERSION", path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The file cannot be read.
    #[error("the kernel {} cannot be read: {source}", path.display())]
    Unreadable {
        /// Where it is.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// What the file holds is not a kernel that can be worked with.
    #[error("the kernel {}: {source}", path.display())]
    Format {
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
}

/// A file's content is not that of a kernel that can be worked with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// It is something else.
    #[error(
        "this is no kernel but {found}; give one as distributions install it, often \
         /boot/vmlinuz-VERSION"
    )]
    NotAKernel {
        /// What it is.
        found: &'static str,
    },
    /// It is larger than any kernel's.
    #[error("it has {len} bytes, more than the {MAX_FILE} that are believed")]
    TooLarge {
        /// Its size in bytes.
        len: u64,
    },
    /// It ends before the kernel does.
    #[error(
        "it is cut short, or damaged: its header says that there is more; copy or install it again"
    )]
    Truncated,
    /// What is packed in it can't be unpacked.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// Nothing in it can be unpacked.
    #[error(
        "nothing in it unpacks to a kernel: it is damaged, or packed in a way that is not supported"
    )]
    NoPayload,
    /// It is no ELF file that a kernel could be.
    #[error("its ELF headers are not a kernel's: {what}")]
    Elf {
        /// What is wrong.
        what: String,
    },
    /// Its image is not that of a kernel that can be worked with.
    #[error(transparent)]
    Kernel(#[from] OfflineError),
}

/// A kernel's file could not be begun to be read.
pub(crate) enum NotBegun {
    /// There is none.
    Missing,
    /// It can't be read.
    Unreadable(io::Error),
    /// It is not what has contents of its own, but this.
    NoFile(&'static str),
}

impl From<io::Error> for NotBegun {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

/// Opens the file at `path` and reads its first [`HEAD`] bytes; gives it with how long it is.
pub(crate) fn begin(path: &Path) -> Result<(File, u64, Vec<u8>), NotBegun> {
    let mut file = File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => NotBegun::Missing,
        _ => NotBegun::Unreadable(error),
    })?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(NotBegun::NoFile("a directory"));
    }
    if !metadata.is_file() {
        return Err(NotBegun::NoFile("a device or pipe"));
    }
    let mut head = Vec::with_capacity(HEAD);
    (&mut file).take(HEAD as u64).read_to_end(&mut head)?;
    Ok((file, metadata.len(), head))
}

/// The kernel in the file at `path`.
///
/// # Errors
/// [`KernelFileError`].
pub fn open(path: &Path) -> Result<OfflineKernel, KernelFileError> {
    let unreadable = |source| KernelFileError::Unreadable { path: path.to_owned(), source };
    let format = |source| KernelFileError::Format { path: path.to_owned(), source };
    let (file, len, mut bytes) = begin(path).map_err(|error| match error {
        NotBegun::Missing => KernelFileError::Missing { path: path.to_owned() },
        NotBegun::Unreadable(source) => unreadable(source),
        NotBegun::NoFile(found) => format(FormatError::NotAKernel { found }),
    })?;
    // A vmlinux may have gigabytes of debug information behind what is loaded.
    let wanted =
        if is_elf(&bytes) { Vmlinux::parse(&bytes).map_err(format)?.loaded() } else { len };
    if wanted > MAX_FILE {
        return Err(format(FormatError::TooLarge { len: wanted }));
    }
    let rest = wanted.saturating_sub(bytes.len() as u64);
    file.take(rest).read_to_end(&mut bytes).map_err(unreadable)?;
    kernel_in(bytes).map_err(format)
}

/// The kernel in a file that holds `bytes`.
///
/// # Errors
/// [`FormatError`].
pub fn kernel_in(bytes: Vec<u8>) -> Result<OfflineKernel, FormatError> {
    let (arch, image, base) = image_in(bytes, MAX_DEPTH)?;
    Ok(OfflineKernel::new(arch, image, base)?)
}

/// An architecture, an image, and where it begins if the file says so.
type Image = (&'static dyn Arch, Vec<u8>, Option<Gva>);

/// The image in `bytes`, which may be packed in `depth` layers.
fn image_in(bytes: Vec<u8>, depth: usize) -> Result<Image, FormatError> {
    if is_elf(&bytes) {
        let (arch, image, base) = Vmlinux::parse(&bytes)?.layout(&bytes)?;
        return Ok((arch, image, Some(base)));
    }
    if let Some(header) = bzimage::header(&bytes) {
        let payload = bzimage::payload(&bytes, &header).ok_or(FormatError::Truncated)?;
        return unpacked(payload, depth);
    }
    if let Some(payload) = zboot_payload(&bytes) {
        return unpacked(payload.ok_or(FormatError::Truncated)?, depth);
    }
    if bytes.get(ARM64_MAGIC_AT..).is_some_and(|magic| magic.starts_with(b"ARM\x64")) {
        return Ok((&Aarch64, arm64_image(bytes), None));
    }
    if bytes.get(S390_MAGIC_AT..).is_some_and(|magic| magic.starts_with(b"S390EP")) {
        return Ok((&S390X, s390_payload(&bytes)?, None));
    }
    if Packing::of(&bytes).is_ok() {
        return unpacked(&bytes, depth);
    }
    let (Identity::Kernel(found) | Identity::Other(found)) = identify(&bytes);
    Err(FormatError::NotAKernel { found })
}

/// The image in the packed `payload`.
fn unpacked(payload: &[u8], depth: usize) -> Result<Image, FormatError> {
    let depth = depth.checked_sub(1).ok_or(FormatError::NoPayload)?;
    image_in(Packing::of(payload)?.unpack(payload)?, depth)
}

fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Where an aarch64 Image says what it is (Documentation/arch/arm64/booting.rst).
const ARM64_MAGIC_AT: usize = 56;
/// Where it says how much memory it takes, in bytes.
const ARM64_SIZE_AT: usize = 16;

/// An aarch64 Image as it lies in memory: with the zeros behind it that the file leaves out.
fn arm64_image(mut image: Vec<u8>) -> Vec<u8> {
    let size = image[ARM64_SIZE_AT..].first_chunk().map_or(0, |size| u64::from_le_bytes(*size));
    if (image.len() as u64..=MAX_UNPACKED as u64).contains(&size) {
        image.resize(size as usize, 0);
    }
    image
}

/// What is packed in an EFI program that unpacks itself, if that is what `bytes` are; `Some(None)` if the
/// file ends before it does. The header is that of drivers/firmware/efi/libstub/zboot-header.S.
fn zboot_payload(bytes: &[u8]) -> Option<Option<&[u8]>> {
    if !bytes.starts_with(b"MZ") || bytes.get(4..8) != Some(b"zimg") {
        return None;
    }
    let field = |at: usize| {
        let field = bytes.get(at..)?.first_chunk()?;
        usize::try_from(u32::from_le_bytes(*field)).ok()
    };
    let payload = || bytes.get(field(8)?..field(8)?.checked_add(field(12)?)?);
    Some(payload())
}

/// Where an s390x bzImage says what it is (arch/s390/boot/head.S).
const S390_MAGIC_AT: usize = 0x1_0008;

/// The image that is packed in an s390x bzImage: the first data in it that unpacks to something as large
/// as a kernel. No header says where it is.
fn s390_payload(file: &[u8]) -> Result<Vec<u8>, FormatError> {
    let mut places: Vec<(usize, Packing)> = Packing::ALL
        .iter()
        .flat_map(|(packing, magic)| {
            memmem::find_iter(file, magic).take(MAX_TRIES).map(|at| (at, *packing))
        })
        .collect();
    places.sort_unstable_by_key(|(at, _)| *at);
    places
        .into_iter()
        .take(MAX_TRIES)
        .filter_map(|(at, packing)| packing.unpack(&file[at..]).ok())
        .find(|image| image.len() >= LEAST_IMAGE)
        .ok_or(FormatError::NoPayload)
}
