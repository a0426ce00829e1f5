//! Files of every kind, sound and damaged. Whole kernels are read by the end-to-end tests.

use std::io::Write;

use proptest::prelude::*;

use super::*;

const TEXT: &[u8] = b"a kernel, packed for a test\n";

/// What the tools made of [`TEXT`]: `gzip -9n`, `xz --check=crc32 --x86 --lzma2=dict=32MiB`, `zstd -19`,
/// `lz4 -l -9`.
const PACKED: [(Packing, &[u8]); 4] = [
    (
        Packing::Gzip,
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03KT\xc8N-\xcaK\xcd\xd1\
          Q(HL\xceNMQH\xcb/RHT(I-.\xe1\x02\x00C\xd9\xaf\xfe\x1c\x00\x00\x00",
    ),
    (
        Packing::Xz,
        b"\xfd7zXZ\x00\x00\x01i\"\xde6\x02\x01\x04\x00!\x01\x1a\x00\x01\xc9\x80\xb3\x01\x00\x1b\
          a kernel, packed for a test\n\
          \x00C\xd9\xaf\xfe\x00\x010\x1c\x97\xdf\xc1\xeb\x90B\x99\x0d\x01\x00\x00\x00\x00\x01YZ",
    ),
    (Packing::Zstd, b"(\xb5/\xfd\x04h\xe1\x00\x00a kernel, packed for a test\n\"p\x03\xe1"),
    (Packing::Lz4, b"\x02!L\x18\x1e\x00\x00\x00\xf0\x0da kernel, packed for a test\n"),
];

#[test]
fn every_packing_is_told_and_unpacked_with_the_size_behind_it_or_without() {
    for (packing, packed) in PACKED {
        assert_eq!(Packing::of(packed).unwrap(), packing);
        assert_eq!(packing.unpack(packed).unwrap(), TEXT, "{packing:?}");
        let size = (TEXT.len() as u32).to_le_bytes();
        assert_eq!(packing.unpack(&[packed, &size].concat()).unwrap(), TEXT, "{packing:?}");
    }
}

#[test]
fn packings_that_are_not_unpacked_are_refused_by_name() {
    for (found, head) in
        [("bzip2", &b"BZh91AY"[..]), ("LZO", b"\x89LZO\0"), ("LZMA", b"\x5d\0\0\x80")]
    {
        let error = Packing::of(head).unwrap_err();
        assert!(
            matches!(error, UnpackError::Unsupported { found: name } if name == found),
            "{error}"
        );
    }
    assert!(matches!(Packing::of(b"").unwrap_err(), UnpackError::Unknown { .. }));
}

#[test]
fn data_that_is_cut_or_damaged_is_refused() {
    for (packing, packed) in PACKED {
        for len in [0, 3, 5, packed.len() / 2] {
            let unpacked = packing.unpack(&packed[..len]);
            // Nothing at all is nothing packed by lz4, whose blocks have no end.
            let nothing = unpacked.as_ref().is_ok_and(Vec::is_empty) && packing == Packing::Lz4;
            assert!(unpacked.is_err() || nothing, "{packing:?} of {len}: {unpacked:?}");
        }
    }
}

#[test]
fn what_would_be_larger_than_any_kernel_is_not_unpacked() {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let zeros = vec![0; 1 << 20];
    for _ in 0..=MAX_UNPACKED >> 20 {
        encoder.write_all(&zeros).unwrap();
    }
    let bomb = encoder.finish().unwrap();
    assert!(matches!(Packing::Gzip.unpack(&bomb), Err(UnpackError::TooLarge)));
}

/// A program that unpacks itself, as EFI starts it.
fn zboot(payload: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 64];
    file[..2].copy_from_slice(b"MZ");
    file[4..8].copy_from_slice(b"zimg");
    file[8..12].copy_from_slice(&64_u32.to_le_bytes());
    file[12..16].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    file.extend(payload);
    file
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An aarch64 Image with no kernel in it that takes `size` bytes of memory.
fn arm64(size: u64) -> Vec<u8> {
    let mut image = vec![0; 4096];
    image[ARM64_SIZE_AT..][..8].copy_from_slice(&size.to_le_bytes());
    image[ARM64_MAGIC_AT..][..4].copy_from_slice(b"ARM\x64");
    image
}

#[test]
fn an_aarch64_image_is_found_bare_packed_and_in_an_efi_program() {
    let image = arm64(0x3000);
    for file in [image.clone(), gzip(&image), zboot(&gzip(&image))] {
        let (arch, found, base) = image_in(file, MAX_DEPTH).unwrap();
        assert_eq!((arch.name(), found.len(), base), ("aarch64", 0x3000, None));
        assert_eq!(found[..4096], image);
    }
    // A size that no kernel has is not believed.
    assert_eq!(image_in(arm64(u64::MAX), 1).unwrap().1.len(), 4096);
    assert!(matches!(image_in(gzip(&gzip(&gzip(&image))), 2), Err(FormatError::NoPayload)));
    let mut cut = zboot(&gzip(&image));
    cut.truncate(70);
    assert!(matches!(image_in(cut, 2), Err(FormatError::Truncated)));
}

#[test]
fn an_s390x_image_is_the_first_data_that_unpacks_to_as_much_as_a_kernel() {
    let image = vec![7; LEAST_IMAGE];
    let mut file = vec![0; 0x2_0000];
    file[S390_MAGIC_AT..][..6].copy_from_slice(b"S390EP");
    // Decompressors hold the magic numbers that they look for.
    file[0x1_5000..][..4].copy_from_slice(&[0x28, 0xb5, 0x2f, 0xfd]);
    file[0x1_6000..][..PACKED[0].1.len()].copy_from_slice(PACKED[0].1);
    assert!(matches!(image_in(file.clone(), 1), Err(FormatError::NoPayload)));
    file.extend(gzip(&image));
    let (arch, found, base) = image_in(file, 1).unwrap();
    assert_eq!((arch.name(), base), ("s390x", None));
    assert_eq!(found, image);
}

/// An ELF file for x86_64 with these segments: virtual and physical address, bytes, size in memory.
fn vmlinux(segments: &[(u64, u64, &[u8], u64)]) -> Vec<u8> {
    let mut file = vec![0; 64 + 56 * segments.len()];
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    file[16..20].copy_from_slice(&[2, 0, 62, 0]);
    file[20] = 1;
    file[32] = 64;
    file[52] = 64;
    file[54] = 56;
    file[56] = segments.len() as u8;
    for (index, (virt, phys, bytes, len)) in segments.iter().enumerate() {
        let at = file.len() as u64;
        let fields = [at, *virt, *phys, bytes.len() as u64, *len, 0x1000];
        let header =
            [&[1, 0, 0, 0, 5, 0, 0, 0][..], &fields.map(u64::to_le_bytes).concat()].concat();
        file[64 + 56 * index..][..56].copy_from_slice(&header);
        file.extend(*bytes);
    }
    file
}

#[test]
fn a_vmlinux_is_laid_out_by_its_physical_addresses() {
    let base = 0xffff_ffff_8100_0000;
    // Variables of CPUs have addresses of their own, from zero.
    let file = vmlinux(&[
        (0, 0x100_1000, b"per-cpu", 7),
        (base, 0x100_0000, b"text", 0x1000),
        (base + 0x2000, 0x100_2000, b"data", 0x800),
    ]);
    for file in [file.clone(), gzip(&file)] {
        let (arch, image, found) = image_in(file, 2).unwrap();
        assert_eq!((arch.name(), image.len(), found), ("x86_64", 0x2800, Some(Gva(base))));
        assert_eq!(&image[..4], b"text");
        assert_eq!(&image[0x1000..0x1007], b"per-cpu");
        assert_eq!(&image[0x2000..0x2004], b"data");
    }
}

#[test]
fn headers_that_no_vmlinux_has_are_refused() {
    let far = vmlinux(&[(0, 0, b"a", 1), (0, 1 << 40, b"b", 1)]);
    let more_in_the_file = vmlinux(&[(0, 0, b"abcd", 1)]);
    let mut cut = vmlinux(&[(0, 0, b"abcd", 4)]);
    cut.pop();
    let mut foreign = vmlinux(&[(0, 0, b"abcd", 4)]);
    foreign[18] = 8;
    for file in [far, more_in_the_file, cut, foreign, vmlinux(&[]), b"\x7fELF".to_vec()] {
        let error = image_in(file, 1).unwrap_err();
        assert!(matches!(error, FormatError::Elf { .. }), "{error}");
    }
}

#[test]
fn a_file_that_is_no_kernel_is_named_for_what_it_is() {
    let said = kernel_in(b"#!/bin/sh\n".to_vec()).unwrap_err().to_string();
    assert!(said.contains("something without"), "{said}");
    let missing = open(Path::new("/nonexistent/vmlinuz")).unwrap_err();
    assert!(matches!(missing, KernelFileError::Missing { .. }));
    for path in ["/", "/dev/null"] {
        let error = open(Path::new(path)).unwrap_err();
        let not = matches!(
            &error,
            KernelFileError::Format { source: FormatError::NotAKernel { .. }, .. }
        );
        assert!(not, "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_damaged_file_is_read_or_refused(
        kind in 0..8_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut file = match kind {
            0..4 => PACKED[kind].1.to_vec(),
            4 => zboot(&gzip(&arm64(0x8000))),
            5 => gzip(&arm64(0x8000)),
            6 => vmlinux(&[(0, 0, b"abcd", 4), (8, 8, b"efgh", 64)]),
            _ => crate::kvm::image::tests::kernel(),
        };
        for (at, byte) in changes {
            let len = file.len();
            file[at.index(len)] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        // None of these is a whole kernel.
        prop_assert!(kernel_in(file).is_err());
    }
}
