//! The decoder of symbol tables alone, in both byte orders.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::addr::{Gpa, Gva};
use crate::arch::x86_64::X86_64;
use crate::arch::x86_64::paging::FOUR_LEVELS;
use crate::arch::{Arch, ByteOrder};
use crate::kernel::image::Image;
use crate::kernel::kallsyms::{KallsymsError, decode};
use crate::kernel::symbols::Symbols;
use crate::synthetic::{Encoding, SymbolSpec, TableOrder, encode};

const BASE: Gva = Gva(0xffff_ffff_8100_0000);
const TABLES: u64 = 0x1_0000;
const LEN: u64 = 0x8_0000;

fn image(bytes: &[u8]) -> (GuestMemoryMmap<()>, Image) {
    let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap();
    ram.write_slice(bytes, GuestAddress(TABLES)).unwrap();
    (ram, Image { range: BASE..BASE + LEN, phys: Gpa(0) })
}

fn decode_bytes(bytes: &[u8], order: ByteOrder) -> Result<Symbols, KallsymsError> {
    let (ram, image) = image(bytes);
    let window = X86_64.image_window(&FOUR_LEVELS);
    decode(&ram, &image, &window, order)
}

fn specs(count: u64) -> Vec<SymbolSpec> {
    let mut specs = vec![SymbolSpec { address: BASE.0, kind: b'T', name: "_text".into() }];
    for index in 0..count {
        let name = match index % 7 {
            0 => format!("vfs_read_{index}"),
            1 => "__func__.0".into(),
            // Rust's names need two bytes for their length.
            2 if index % 5 == 0 => format!("_R{}", "N0".repeat(90 + index as usize % 20)),
            3 => format!("exceptionally_long_token_of_a_name_{index}"),
            _ => format!("function_{index:x}"),
        };
        specs.push(SymbolSpec { address: BASE.0 + index * 24 / 16 * 16, kind: b't', name });
    }
    specs
}

fn encoding(order: TableOrder, byte_order: ByteOrder) -> Encoding {
    Encoding { order, byte_order, per_cpu_from_zero: false, base: BASE, at: BASE + TABLES }
}

#[test]
fn every_order_of_tables_in_either_byte_order_decodes_to_what_was_encoded() {
    for count in [1100, 1279, 1280, 3000] {
        let specs = specs(count);
        for order in TableOrder::ALL {
            for byte_order in [ByteOrder::Little, ByteOrder::Big] {
                let symbols =
                    decode_bytes(&encode(&specs, &encoding(order, byte_order)), byte_order)
                        .unwrap_or_else(|error| panic!("{order:?} {byte_order:?}: {error}"));
                let decoded: Vec<_> = symbols
                    .iter()
                    .map(|s| SymbolSpec { address: s.address.0, kind: s.kind, name: s.name.into() })
                    .collect();
                assert_eq!(decoded, specs, "{order:?} {byte_order:?}");
            }
        }
    }
}

#[test]
fn symbols_that_count_from_zero_are_kept_apart_from_addresses() {
    let mut specs = specs(1100);
    for (address, name) in [(0x1_fbc0, "current_task"), (0, "fixed_percpu_data")] {
        specs.insert(0, SymbolSpec { address, kind: b'A', name: name.into() });
    }
    for order in [TableOrder::OffsetsFirst, TableOrder::OffsetsLast] {
        let encoding = Encoding { per_cpu_from_zero: true, ..encoding(order, ByteOrder::Little) };
        let symbols = decode_bytes(&encode(&specs, &encoding), ByteOrder::Little).unwrap();
        assert_eq!(symbols.address("fixed_percpu_data"), Some(Gva(0)));
        assert_eq!(symbols.address("current_task"), Some(Gva(0x1_fbc0)));
        assert_eq!(symbols.address("_text"), Some(BASE));
    }
}

#[test]
fn tables_cut_off_anywhere_are_refused() {
    let specs = specs(1100);
    for order in TableOrder::ALL {
        let whole = encode(&specs, &encoding(order, ByteOrder::Little));
        // The name-sorted sequence at the end is not needed; and offsets that count from where they
        // are stored are sound addresses when they are zero.
        let behind_tokens = match order {
            TableOrder::OffsetsLast => 3 * specs.len(),
            TableOrder::SelfRelative => 7 * specs.len(),
            _ => 0,
        };
        let needed = whole.len() - behind_tokens;
        for end in (0..needed - 16).step_by(997) {
            let mut cut = whole.clone();
            cut[end..].fill(0);
            assert!(decode_bytes(&cut, ByteOrder::Little).is_err(), "{order:?} cut at {end}");
        }
    }
}

#[test]
fn lying_counts_and_markers_are_refused() {
    let specs = specs(1100);
    let whole = encode(&specs, &encoding(TableOrder::OffsetsLast, ByteOrder::Little));
    for count in [0u32, 1, 1000, 1280, 1 << 20, u32::MAX] {
        let mut lying = whole.clone();
        lying[..4].copy_from_slice(&count.to_le_bytes());
        assert!(decode_bytes(&lying, ByteOrder::Little).is_err(), "count {count}");
    }
    let tokens = whole.windows(4).position(|window| window == b"0\x001\0").unwrap();
    let markers = whole[..tokens]
        .chunks_exact(4)
        .rposition(|chunk| chunk == [0; 4])
        .map(|index| index * 4)
        .unwrap();
    for marker in 1..4 {
        for value in [0u32, 1, u32::MAX] {
            let mut lying = whole.clone();
            lying[markers + 4 * marker..][..4].copy_from_slice(&value.to_le_bytes());
            assert!(decode_bytes(&lying, ByteOrder::Little).is_err(), "marker {marker}: {value}");
        }
    }
}

#[test]
fn a_table_full_of_beginnings_is_given_up_on() {
    // Everything in front of the tokens looks like markers, or like a count and names.
    let specs = specs(1100);
    let whole = encode(&specs, &encoding(TableOrder::SelfRelative, ByteOrder::Little));
    let tokens = whole.windows(4).position(|window| window == b"0\x001\0").unwrap();
    let mut bytes = vec![0; 0x2_0000];
    for (index, word) in bytes.chunks_exact_mut(4).enumerate() {
        let value = [0u32, 600, 1200, 1800, 0x0000_0503][index % 5];
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes.extend(&whole[tokens - 0x400..]);
    assert!(decode_bytes(&bytes, ByteOrder::Little).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_change_to_the_tables_makes_the_decoder_panic(
        order in prop::sample::select(TableOrder::ALL.to_vec()),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
    ) {
        let mut bytes = encode(&specs(1100), &encoding(order, ByteOrder::Little));
        for (index, value) in changes {
            let at = index.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(symbols) = decode_bytes(&bytes, ByteOrder::Little) {
            prop_assert_eq!(symbols.address("_text"), Some(BASE));
        }
    }

    #[test]
    fn random_bytes_around_the_digits_never_make_the_decoder_panic(
        before in prop::collection::vec(any::<u8>(), 0..4096),
        after in prop::collection::vec(any::<u8>(), 0..4096),
    ) {
        let mut bytes = before;
        bytes.extend(b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0");
        bytes.extend(after);
        prop_assert!(decode_bytes(&bytes, ByteOrder::Little).is_err());
    }
}
