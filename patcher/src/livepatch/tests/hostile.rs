//! Objects that no compiler made: whatever they hold, they are refused or linked, and nothing panics.

use std::sync::LazyLock;

use proptest::prelude::*;

use super::guests::SETTINGS;
use crate::arch::ReturnForm;
use crate::kernel::Symbols;
use crate::livepatch::Payload;

/// Real objects of every architecture, small so that a change hits something that counts.
static OBJECTS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let source = r#"
        extern unsigned long guest_first(unsigned long);
        extern unsigned long guest_number;
        static unsigned long count = 3, zeros[8];
        static const char options[] __attribute__((used, section(".vmm.livepatch"))) =
            "replace=other:guest_first\0release=6.*\0build-id=0123456789abcdef\0consistent=yes";
        unsigned long other(unsigned long value) { return value ? guest_number : zeros[value]++; }
        unsigned long victim(unsigned long value)
        {
            static const char *const names[] = { "one", "two", "three" };
            count += guest_first(value);
            return names[value % 3][0] + other(count);
        }
    "#;
    let settings = SETTINGS.iter();
    settings.map(|setting| setting.compiler.compile(source, &[])).collect()
});

/// Reads the file and goes as far as it can be gone.
fn load(file: &[u8]) {
    let Ok(payload) = Payload::parse(file) else { return };
    let setting = SETTINGS.iter().find(|setting| setting.arch.name() == payload.arch().name());
    let setting = setting.unwrap();
    let list = setting.functions(&["victim", "guest_first", "guest_number"]);
    let symbols = Symbols::listed(&list);
    let Ok(resolved) = payload.resolve(&setting.view(&symbols, ReturnForm::Plain), &[]) else {
        return;
    };
    let sizes = resolved.sizes();
    assert!(sizes.text + sizes.constants + sizes.data < 64 << 20);
    let placement = setting.placement(&resolved);
    if let Ok(linked) = resolved.link(&placement) {
        assert_eq!(linked.entries.len(), resolved.replacements().len());
        assert_eq!(linked.text.len() as u64, sizes.text);
    }
}

#[test]
fn the_objects_are_sound_before_they_are_spoilt() {
    for (object, setting) in OBJECTS.iter().zip(SETTINGS) {
        let payload = Payload::parse(object).unwrap();
        let list = setting.functions(&["victim", "guest_first", "guest_number"]);
        let symbols = Symbols::listed(&list);
        let resolved = payload.resolve(&setting.view(&symbols, ReturnForm::Plain), &[]).unwrap();
        assert_eq!(resolved.replacements().len(), 2);
        resolved.link(&setting.placement(&resolved)).unwrap();
    }
}

#[test]
fn an_object_that_ends_anywhere_is_refused() {
    for object in OBJECTS.iter() {
        for len in 0..object.len() {
            // The table of sections is the last thing in a file: nothing is whole without its end.
            assert!(Payload::parse(&object[..len]).is_err(), "{len} of {}", object.len());
        }
    }
}

/// Where an object's table of sections begins.
fn section_table(object: &[u8]) -> usize {
    let bytes: [u8; 8] = object[40..48].try_into().unwrap();
    let big_endian = object[5] == 2;
    (if big_endian { u64::from_be_bytes(bytes) } else { u64::from_le_bytes(bytes) }) as usize
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4000) })]

    #[test]
    fn bits_may_be_flipped_anywhere(
        which in 0..3_usize,
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u32), 1..12),
    ) {
        let mut object = OBJECTS[which].clone();
        for (at, bit) in flips {
            let at = at.index(object.len());
            object[at] ^= 1 << bit;
        }
        load(&object);
    }

    #[test]
    fn headers_of_sections_may_say_anything(
        which in 0..3_usize,
        fields in prop::collection::vec(
            (any::<prop::sample::Index>(), prop_oneof![
                any::<u64>(), 0..64_u64, Just(u64::MAX), Just(1 << 20), Just(1 << 40), Just(6), Just(7),
            ]),
            1..6,
        ),
    ) {
        let mut object = OBJECTS[which].clone();
        let table = section_table(&object);
        let big_endian = object[5] == 2;
        for (at, value) in fields {
            // The fields have four bytes or eight, and begin at multiples of four.
            let at = table + at.index((object.len() - table) / 4 - 1) * 4;
            let bytes = if big_endian { value.to_be_bytes() } else { value.to_le_bytes() };
            object[at..at + 8].copy_from_slice(&bytes);
        }
        load(&object);
    }

    #[test]
    fn pieces_may_stand_where_others_were(
        which in 0..3_usize,
        moves in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1..64_usize), 1..6,
        ),
    ) {
        let mut object = OBJECTS[which].clone();
        for (from, to, len) in moves {
            let len = len.min(object.len() / 2);
            let (from, to) = (from.index(object.len() - len), to.index(object.len() - len));
            object.copy_within(from..from + len, to);
        }
        load(&object);
    }
}
