//! Images that are made up. Those of stock kernels are read by the end-to-end tests.

use proptest::prelude::*;

use super::linked::{base, relocate};
use super::*;
use crate::arch::{self, aarch64::Aarch64, s390x::S390X, x86_64::X86_64};
use crate::synthetic::{Blueprint, Guest};

/// An image whose words, from `at` on, are these.
fn image(len: usize, order: ByteOrder, at: usize, words: &[u64]) -> Vec<u8> {
    let mut image = vec![0; len];
    for (index, word) in words.iter().enumerate() {
        image[at + 8 * index..][..8].copy_from_slice(&order.bytes(*word));
    }
    image
}

fn word(image: &[u8], at: usize, order: ByteOrder) -> u64 {
    order.u64(*image[at..].first_chunk().unwrap())
}

#[test]
fn an_image_begins_where_most_of_its_words_lead_into_it() {
    let linked = 0xffff_8000_0800_0000;
    let mut words: Vec<u64> = (0..5000).map(|index| linked + index * 8).collect();
    words.extend((0..1000).map(|index| 0xffff_8000_1000_0000 + index * 8));
    let image = image(1 << 20, ByteOrder::Little, 0x1000, &words);
    assert_eq!(base(&Aarch64, &image).unwrap(), Gva(linked));
    let none = base(&Aarch64, &vec![0; 1 << 20]).unwrap_err();
    assert!(matches!(none, OfflineError::NoBase { found: 0, .. }), "{none}");
}

const LINKED: u64 = 0x10_0000;

/// An s390x image with a table of relocations behind one of symbols, as kernels up to 6.9 have them.
fn relocated() -> Vec<u8> {
    let symbols = [[0; 3], [0, LINKED + 0x40, 0], [0, 0, 0], [0, LINKED + 0x80, 8]];
    let relative = (0..300_u64).map(|index| [LINKED + 8 * index, 12, LINKED + 0x100 + index]);
    let named = [[LINKED + 0x4000, 1 << 32 | 22, 4], [LINKED + 0x4008, 3 << 32 | 10, 0]];
    let words: Vec<u64> =
        symbols.into_iter().chain(relative).chain(named).collect::<Vec<_>>().concat();
    image(0x8000, ByteOrder::Big, 0x5000, &words)
}

#[test]
fn addresses_that_a_linker_left_to_relocations_are_written() {
    let mut image = relocated();
    relocate(&S390X, Gva(LINKED), &mut image);
    let word = |at| word(&image, at, ByteOrder::Big);
    assert_eq!((word(0), word(8 * 299)), (LINKED + 0x100, LINKED + 0x100 + 299));
    assert_eq!((word(0x4000), word(0x4008)), (LINKED + 0x44, LINKED + 0x80));
}

#[test]
fn relocations_that_lead_out_of_the_image_or_into_their_own_table_write_nothing() {
    let order = ByteOrder::Big;
    let mut image = relocated();
    let table = 0x5000 + 4 * 24;
    for (index, place) in
        [u64::MAX - 3, LINKED - 8, LINKED + 0x7ffc, LINKED + table as u64].into_iter().enumerate()
    {
        image[table + 24 * index..][..8].copy_from_slice(&order.bytes(place));
    }
    let before = image.clone();
    relocate(&S390X, Gva(LINKED), &mut image);
    assert_eq!(image[0x4010..], before[0x4010..]);
    assert_eq!(word(&image, 8 * 4, order), LINKED + 0x104);
}

#[test]
fn an_image_that_was_taken_out_of_a_guest_is_the_same_kernel() {
    let guest = Guest::new(&Blueprint::default());
    let running = guest.kernel();
    let mut bytes = vec![0; running.image().len() as usize];
    guest.ram.read(running.image().phys, &mut bytes).unwrap();
    let base = running.image().range.start;
    let offline = OfflineKernel::new(&X86_64, bytes, Some(base)).unwrap();
    let kernel = offline.kernel();
    assert_eq!(kernel.banner(), running.banner());
    assert!(kernel.symbols().iter().eq(running.symbols().iter()));
    assert_eq!(kernel.image().range, running.image().range);
    // It has no page tables, and so nothing outside of its image.
    let mut byte = [0];
    let behind = kernel.image().range.end + (1 << 20);
    kernel.read_virt(offline.memory(), behind, &mut byte).unwrap_err();
    // Its pads are not as compiled.
    assert_eq!(offline.pads().unwrap_err(), OfflinePadsError::None);
}

#[test]
fn an_image_larger_than_any_kernels_is_refused() {
    let huge = vec![0; MAX_IMAGE as usize + 1];
    let error = OfflineKernel::new(&X86_64, huge, Some(Gva(0))).unwrap_err();
    assert!(matches!(error, OfflineError::TooLarge { .. }));
}

proptest! {
    #[test]
    fn words_of_any_image_are_taken_for_what_they_are_or_refused(
        which in 0..arch::ALL.len(),
        words in prop::collection::vec(
            prop_oneof![
                Just(12), Just(1027), Just(1 << 32 | 22), Just(2 << 32 | 257), Just(0),
                any::<u64>(), (0..0x2000_u64).prop_map(|at| LINKED + at),
                (0..0x2000_u64).prop_map(|at| 0xffff_8000_8000_0000 + at),
            ],
            0..2000,
        ),
        given in prop::option::of(any::<u64>()),
        runs in 0..3_usize,
    ) {
        let arch = arch::ALL[which];
        let mut words = words;
        for run in 0..runs {
            let kind = arch.image_relocations().map_or(0, |kinds| kinds.relative.into());
            let begin = words.first().copied().unwrap_or(LINKED);
            words.extend((0..260).flat_map(|index| [begin + 8 * index, kind, run as u64]));
        }
        let bytes = image(words.len() * 8, arch.byte_order(), 0, &words);
        let mut relocated = bytes.clone();
        relocate(arch, Gva(given.unwrap_or(LINKED)), &mut relocated);
        // Symbols are missing in any case.
        prop_assert!(OfflineKernel::new(arch, bytes, given.map(Gva)).is_err());
    }
}
