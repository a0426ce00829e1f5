//! Lays out an uncompressed kernel, a vmlinux, as it lies in memory.

use object::Endianness;
use object::elf::{FileHeader64, PT_LOAD};
use object::read::elf::{FileHeader, ProgramHeader};
use patcher::addr::Gva;
use patcher::arch::{self, Arch, ByteOrder};

use super::FormatError;
use super::unpack::MAX_UNPACKED;

/// The most segments believed; kernels have up to six.
const MAX_SEGMENTS: usize = 64;

/// A piece of a file that is loaded.
struct Segment {
    virt: u64,
    phys: u64,
    /// Where it is in the file, and how long there.
    file: (u64, u64),
    /// How long it is in memory.
    len: u64,
}

/// What the ELF header and the program headers of a vmlinux say.
pub(super) struct Vmlinux {
    arch: &'static dyn Arch,
    segments: Vec<Segment>,
}

impl Vmlinux {
    /// Reads the headers of the ELF file that begins with `head`.
    pub(super) fn parse(head: &[u8]) -> Result<Self, FormatError> {
        let damaged = |error: object::read::Error| FormatError::Elf { what: error.to_string() };
        let unsound = |what: &str| FormatError::Elf { what: what.into() };
        let header = FileHeader64::<Endianness>::parse(head).map_err(damaged)?;
        let endian = header.endian().map_err(damaged)?;
        let machine = header.e_machine(endian);
        let order = match endian {
            Endianness::Little => ByteOrder::Little,
            Endianness::Big => ByteOrder::Big,
        };
        let arch = arch::ALL
            .into_iter()
            .find(|arch| arch.elf_machine() == machine.0 && arch.byte_order() == order)
            .ok_or_else(|| unsound("it is for an architecture that is not supported"))?;
        let headers = header.program_headers(endian, head).map_err(damaged)?;
        if headers.len() > MAX_SEGMENTS {
            return Err(unsound("it has more segments than a kernel"));
        }
        let loaded = headers.iter().filter(|segment| segment.p_type(endian) == PT_LOAD);
        let segments: Vec<_> = loaded
            .map(|segment| Segment {
                virt: segment.p_vaddr(endian),
                phys: segment.p_paddr(endian),
                file: segment.file_range(endian),
                len: segment.p_memsz(endian),
            })
            .filter(|segment| segment.len > 0)
            .collect();
        if segments.is_empty() {
            return Err(unsound("it has nothing that is loaded: is it an object file?"));
        }
        Ok(Self { arch, segments })
    }

    /// How much of the file is loaded: up to where, in bytes.
    pub(super) fn loaded(&self) -> u64 {
        let ends =
            self.segments.iter().map(|segment| segment.file.0.saturating_add(segment.file.1));
        ends.max().unwrap_or(0)
    }

    /// The image that `file`, which may end where nothing more is loaded, makes in memory, and where it
    /// begins.
    pub(super) fn layout(
        &self,
        file: &[u8],
    ) -> Result<(&'static dyn Arch, Vec<u8>, Gva), FormatError> {
        let unsound = |what: &str| FormatError::Elf { what: what.into() };
        // By physical addresses: up to 6.14 x86_64's per-CPU variables have virtual ones from zero.
        let first = self.segments.iter().min_by_key(|segment| segment.phys);
        let Some(first) = first else { return Err(unsound("it has nothing that is loaded")) };
        let mut image = Vec::new();
        for segment in &self.segments {
            let begin = segment.phys - first.phys;
            let end = begin.checked_add(segment.len).filter(|end| *end <= MAX_UNPACKED as u64);
            let end =
                end.ok_or_else(|| unsound("its segments are farther apart than a kernel's"))?;
            let (at, len) = segment.file;
            let bytes = usize::try_from(at)
                .ok()
                .zip(usize::try_from(len).ok())
                .filter(|_| len <= segment.len)
                .and_then(|(at, len)| file.get(at..at.checked_add(len)?))
                .ok_or_else(|| unsound("a segment goes beyond the file's end"))?;
            if image.len() < end as usize {
                image.resize(end as usize, 0);
            }
            image[begin as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        Ok((self.arch, image, Gva(first.virt)))
    }
}
