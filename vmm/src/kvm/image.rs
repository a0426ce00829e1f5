//! What a kernel file says about itself, checked before anything is built from it.
//!
//! Offsets and meanings are those of the Linux/x86 boot protocol
//! (`Documentation/arch/x86/boot.rst`).

use std::fs::File;
use std::io::{self, Seek};
use std::path::{Path, PathBuf};

use linux_loader::loader::bootparam::setup_header;

use super::layout::PAGE;
use crate::image::{Identity, NotBegun, begin, bzimage, identify};

/// The first protocol that says whether there is a 64-bit entry point (Linux 3.8).
const PROTOCOL_XLOADFLAGS: u16 = 0x20c;
const LOADED_HIGH: u8 = 1 << 0;
const XLF_KERNEL_64: u16 = 1 << 0;

/// The 64-bit entry point lies so far behind the beginning of the protected-mode code.
pub(super) const ENTRY_64: u64 = 0x200;

/// A kernel file that can be booted.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) file: File,
    pub(super) header: setup_header,
}

/// A file cannot be booted as a kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// There is no such file.
    #[error("there is no kernel {}; give the path of a bzImage, often /boot/vmlinuz-VERSION",
        path.display())]
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
    /// The file is something else.
    #[error("{} is not a bzImage but {found}; give a kernel as distributions install it, often \
             /boot/vmlinuz-VERSION", path.display())]
    NotAKernel {
        /// Where it is.
        path: PathBuf,
        /// What it is.
        found: String,
    },
    /// A kernel, for another architecture.
    #[error("the kernel {} is for {found}; give one for x86_64", path.display())]
    Architecture {
        /// Where it is.
        path: PathBuf,
        /// What it is for.
        found: &'static str,
    },
    /// A kernel from before Linux 3.8.
    #[error("the kernel {} speaks boot protocol {}.{:02}; give one that speaks 2.12 or newer, \
             Linux 3.8 or newer", path.display(), version >> 8, version & 0xff)]
    TooOld {
        /// Where it is.
        path: PathBuf,
        /// The protocol, major in the high byte.
        version: u16,
    },
    /// The file ends before the kernel does.
    #[error("the kernel {} is cut short: it has {found} bytes and its header asks for {expected}; \
             copy or install it again", path.display())]
    Truncated {
        /// Where it is.
        path: PathBuf,
        /// Its size in bytes.
        found: u64,
        /// What its header asks for, in bytes.
        expected: u64,
    },
}

impl Image {
    /// Opens and checks the kernel at `path`.
    pub(super) fn open(path: &Path) -> Result<Self, ImageError> {
        let unreadable = |source| ImageError::Unreadable { path: path.to_owned(), source };
        let not_a_kernel =
            |found: &str| ImageError::NotAKernel { path: path.to_owned(), found: found.into() };
        let (mut file, len, head) = begin(path).map_err(|error| match error {
            NotBegun::Missing => ImageError::Missing { path: path.to_owned() },
            NotBegun::Unreadable(source) => unreadable(source),
            NotBegun::NoFile(found) => not_a_kernel(found),
        })?;
        file.rewind().map_err(unreadable)?;

        let Some(header) = bzimage::header(&head) else {
            return Err(match identify(&head) {
                Identity::Kernel(found) => {
                    ImageError::Architecture { path: path.to_owned(), found }
                }
                Identity::Other(found) => not_a_kernel(found),
            });
        };
        let image = Self { file, header };
        image.check(path, len)?;
        Ok(image)
    }

    fn check(&self, path: &Path, found: u64) -> Result<(), ImageError> {
        let header = &self.header;
        let path = || path.to_owned();
        if header.version < PROTOCOL_XLOADFLAGS {
            return Err(ImageError::TooOld { path: path(), version: header.version });
        }
        if header.loadflags & LOADED_HIGH == 0 {
            let found = "a zImage, which loads below 1 MiB".into();
            return Err(ImageError::NotAKernel { path: path(), found });
        }
        if header.xloadflags & XLF_KERNEL_64 == 0 {
            return Err(ImageError::Architecture { path: path(), found: "32-bit x86" });
        }
        // The payload is what the decompressor reads; syssize counts all protected-mode code in
        // units of 16 bytes. A signature may follow either.
        let payload = u64::from(header.payload_offset) + u64::from(header.payload_length);
        let code = u64::from(header.syssize) * 16;
        let expected = bzimage::setup_bytes(header) + payload.max(code);
        if found < expected {
            return Err(ImageError::Truncated { path: path(), found, expected });
        }
        Ok(())
    }

    /// Where the memory ends that the kernel needs before it knows the memory map: it decompresses
    /// itself there.
    pub(super) fn end_in_memory(&self) -> u64 {
        let end = self.header.pref_address.saturating_add(u64::from(self.header.init_size));
        end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::PathBuf;

    use vm_memory::ByteValued;
    use vmm_sys_util::tempdir::TempDir;

    use super::*;
    use crate::image::bzimage::{BOOT_FLAG, HEADER_AT, MAGIC, SECTOR};

    /// A file that says what a stock kernel says, with nothing in it.
    pub(crate) fn kernel() -> Vec<u8> {
        let mut header = setup_header {
            setup_sects: 1,
            syssize: 0x2000 / 16,
            boot_flag: BOOT_FLAG,
            header: MAGIC,
            version: 0x20f,
            loadflags: LOADED_HIGH,
            code32_start: 0x10_0000,
            initrd_addr_max: 0x7fff_ffff,
            kernel_alignment: 0x20_0000,
            relocatable_kernel: 1,
            xloadflags: 0x7f,
            cmdline_size: 2047,
            payload_offset: 0x100,
            payload_length: 0x1e00,
            pref_address: 0x100_0000,
            init_size: 0x337_8000,
            ..Default::default()
        };
        let mut file = vec![0; 2 * SECTOR as usize + 0x2000];
        file[HEADER_AT..][..size_of::<setup_header>()].copy_from_slice(header.as_mut_slice());
        file
    }

    /// A directory with one file in it.
    pub(in crate::kvm) fn file(bytes: &[u8]) -> (TempDir, PathBuf) {
        let dir = TempDir::new().unwrap();
        let path = dir.as_path().join("file");
        std::fs::write(&path, bytes).unwrap();
        (dir, path)
    }

    fn refused(bytes: &[u8]) -> ImageError {
        let (_dir, path) = file(bytes);
        Image::open(&path).unwrap_err()
    }

    /// `kernel` with the bytes at `offset` replaced.
    fn with(offset: usize, bytes: &[u8]) -> Vec<u8> {
        let mut kernel = kernel();
        kernel[offset..offset + bytes.len()].copy_from_slice(bytes);
        kernel
    }

    #[test]
    fn a_stock_kernel_is_taken_and_tells_where_it_ends_in_memory() {
        let (_dir, path) = file(&kernel());
        assert_eq!(Image::open(&path).unwrap().end_in_memory(), 0x437_8000);
        let (_dir, path) = file(&with(0x258, &u64::MAX.to_le_bytes()));
        assert_eq!(Image::open(&path).unwrap().end_in_memory(), u64::MAX);
    }

    #[test]
    fn a_kernel_cut_anywhere_behind_its_head_is_truncated() {
        let whole = kernel();
        for len in [HEADER_AT + size_of::<setup_header>(), 1024, 4096, whole.len() - 1] {
            match refused(&whole[..len]) {
                ImageError::Truncated { found, expected, .. } => {
                    assert_eq!((found, expected), (len as u64, whole.len() as u64));
                }
                other => panic!("{len} bytes: {other}"),
            }
        }
    }

    #[test]
    fn a_payload_that_no_file_could_hold_is_truncated_too() {
        let huge = with(0x248, &[0xff; 8]);
        assert!(matches!(refused(&huge), ImageError::Truncated { expected, .. }
            if expected == 2 * SECTOR + 2 * u64::from(u32::MAX)));
    }

    #[test]
    fn other_files_are_named_for_what_they_are() {
        let elf =
            |machine: u16| [b"\x7fELF\x02\x01", &[0; 12][..], &machine.to_le_bytes()].concat();
        let at = |offset: usize, magic: &[u8]| [&vec![0; offset], magic].concat();
        for (bytes, expected) in [
            (vec![], "an empty file"),
            (b"#!/bin/sh\n".to_vec(), "without a Linux setup header"),
            (elf(62), "vmlinux"),
            (b"070701".to_vec(), "cpio"),
            (vec![0x1f, 0x8b, 8], "gzip"),
            (vec![0x28, 0xb5, 0x2f, 0xfd], "zstd"),
            (b"\xfd7zXZ\0".to_vec(), "xz"),
            (b"MZ\x90".to_vec(), "EFI"),
            (with(0x211, &[0]), "zImage"),
        ] {
            match refused(&bytes) {
                ImageError::NotAKernel { found, .. } => {
                    assert!(found.contains(expected), "{found}")
                }
                other => panic!("{expected}: {other}"),
            }
        }
        for (bytes, expected) in [
            (at(56, b"ARM\x64"), "arm64"),
            (elf(183), "arm64"),
            (at(0x30, b"RISCV\0\0\0"), "RISC-V"),
            (at(0x1_0008, b"S390EP"), "s390x"),
            (elf(0x1600), "s390x"),
            (elf(21), "another architecture (ELF)"),
            (with(0x236, &[0, 0]), "32-bit x86"),
        ] {
            match refused(&bytes) {
                ImageError::Architecture { found, .. } => assert_eq!(found, expected),
                other => panic!("{expected}: {other}"),
            }
        }
        assert!(matches!(
            refused(&with(0x206, &[0x0b, 2])),
            ImageError::TooOld { version: 0x20b, .. }
        ));
    }

    #[test]
    fn what_is_not_there_or_not_a_file_is_told_apart() {
        let open = |path: &str| Image::open(Path::new(path)).unwrap_err();
        assert!(matches!(open("/nonexistent/vmlinuz"), ImageError::Missing { .. }));
        assert!(
            matches!(open("/"), ImageError::NotAKernel { found, .. } if found == "a directory")
        );
        assert!(matches!(open("/dev/null"), ImageError::NotAKernel { .. }));
        assert!(matches!(open("/dev/null/kernel"), ImageError::Unreadable { .. }));
    }
}
