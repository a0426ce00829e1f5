use super::super::tests::{AT, blob, read, string};
use super::*;
use crate::arch::ByteOrder;

/// Integers, an enumeration, structures, and functions of which two share a name.
fn types() -> Vec<u32> {
    let mut types = Vec::new();
    let mut add = |words: &[u32]| types.extend_from_slice(words);
    add(&[string("int"), 1 << 24, 4, SIGNED | 32]); //                        1
    add(&[string("u8"), 1 << 24, 8, 64]); //                                  2
    add(&[string("char"), 1 << 24, 1, SIGNED | 8]); //                        3
    add(&[0, 9 << 24, 3]); //                                              4: const char
    add(&[0, super::super::POINTER << 24, 4]); //                          5: const char *
    add(&[string("inner"), 1 << 31 | ENUM << 24 | 2, 4]); //               6: enum
    add(&[string("cpu"), 3, string("pid"), (-1_i32).cast_unsigned()]);
    add(&[string("thread_info"), 4 << 24 | 2, 16]); //                     7: struct of two words
    add(&[string("cpu"), 2, 0, string("pid"), 2, 64]);
    add(&[string("task_struct"), 4 << 24 | 2, 12]); //                     8: a field of it is unaligned
    add(&[string("cpu"), 1, 0, string("pid"), 2, 32]);
    add(&[string("inner"), 16 << 24, 8]); //                               9: a floating-point number
    // 10: int (const char *inner, enum, struct, int)
    add(&[0, PROTOTYPE << 24 | 4, 1, string("inner"), 5, string("cpu"), 6, string("pid"), 7, 0, 1]);
    // 11: void (struct with an unaligned field, u8, ...)
    add(&[0, PROTOTYPE << 24 | 3, 0, string("inner"), 8, string("cpu"), 2, 0, 0]);
    // 12: void (float, int)
    add(&[0, PROTOTYPE << 24 | 2, 0, string("inner"), 9, string("cpu"), 1]);
    add(&[string("vfs_read"), FUNCTION << 24, 10]);
    add(&[string("vfs_write"), FUNCTION << 24 | 1, 11]);
    add(&[string("flags"), FUNCTION << 24, 10]);
    add(&[string("flags"), FUNCTION << 24, 10]);
    add(&[string("pid"), FUNCTION << 24, 10]);
    add(&[string("pid"), FUNCTION << 24, 11]);
    add(&[string("cpu"), FUNCTION << 24, 12]);
    add(&[string("inner"), FUNCTION << 24, 7]);
    types
}

fn prototypes(types: &[u32]) -> Prototypes {
    let order = ByteOrder::Little;
    Prototypes::new(read(order, &[(AT, &blob(order, types))]).unwrap())
}

/// Where the function's arguments are, on such an architecture.
fn places(all: &Prototypes, function: &str, arch: &dyn crate::arch::Arch) -> Vec<Place> {
    let prototype = all.of(function).unwrap();
    let shapes: Vec<Shape> =
        prototype.parameters.iter().map(|this| all.shape(&this.value)).collect();
    let returns = prototype.returns.as_ref().map(|value| all.shape(value));
    arch.calling_convention().place(returns, &shapes)
}

#[test]
fn a_prototype_is_what_the_types_say() {
    let all = prototypes(&types());
    let read = all.of("vfs_read").unwrap();
    let kinds: Vec<_> = (read.parameters.iter())
        .map(|this| (this.name.as_str(), this.value.kind, this.value.size))
        .collect();
    assert_eq!(
        kinds,
        [
            ("inner", ValueKind::Pointer { to_text: true }, 8),
            ("cpu", ValueKind::Enumeration { signed: true, number: 6 }, 4),
            ("pid", ValueKind::Aggregate { number: 7 }, 16),
            ("", ValueKind::Integer { signed: true }, 4),
        ]
    );
    assert_eq!(read.returns.unwrap().kind, ValueKind::Integer { signed: true });
    assert!(!read.variadic);
    let write = all.of("vfs_write").unwrap();
    assert_eq!((write.returns, write.variadic, write.parameters.len()), (None, true, 2));
    assert_eq!(all.enumerator(6, 3).as_deref(), Some("cpu"));
    assert_eq!(all.enumerator(6, 0xffff_ffff).as_deref(), Some("pid"));
    assert_eq!(all.enumerator(6, 0xabcd_0000_0003).as_deref(), Some("cpu"), "32 bits count");
    assert_eq!(
        (all.enumerator(6, 4), all.enumerator(7, 3), all.enumerator(99, 3)),
        (None, None, None)
    );
}

#[test]
fn arguments_are_where_each_architecture_has_them() {
    let all = prototypes(&types());
    let register = |first| Place::Registers { first, count: 1 };
    let pair = |first| Place::Registers { first, count: 2 };
    let [x86_64, s390x, aarch64] = crate::arch::ALL;
    for arch in [x86_64, aarch64] {
        let found = places(&all, "vfs_read", arch);
        assert_eq!(found, [register(0), register(1), pair(2), register(4)]);
    }
    let found = places(&all, "vfs_read", s390x);
    assert_eq!(found, [register(0), register(1), Place::AtRegister(2), register(3)]);
    // A structure with a field that is not aligned is on the stack on x86_64 alone.
    let on_stack = Place::Stack { first: 0, count: 2 };
    assert_eq!(places(&all, "vfs_write", x86_64), [on_stack, register(0)]);
    assert_eq!(places(&all, "vfs_write", aarch64), [pair(0), register(2)]);
    assert_eq!(places(&all, "cpu", x86_64), [Place::Unknown; 2]);
}

#[test]
fn a_function_without_one_prototype_has_none() {
    let all = prototypes(&types());
    assert!(all.of("flags").is_ok(), "two of the same type");
    for (name, error) in [
        ("pid", NoPrototype::Ambiguous("pid".into())),
        ("vfs_rea", NoPrototype::Unknown("vfs_rea".into())),
        ("", NoPrototype::Unknown(String::new())),
        ("inner", NoPrototype::Unsound("inner".into())),
    ] {
        assert_eq!(all.of(name).unwrap_err(), error);
    }
}

#[test]
fn no_types_make_us_panic() {
    let sound = types();
    for at in 0..sound.len() {
        for word in [0, 1, 7, 0x8400_ffff, u32::MAX, 0x0d00_ffff, 16 << 24] {
            let mut spoilt = sound.clone();
            spoilt[at] = word;
            let all = prototypes(&spoilt);
            for name in ["vfs_read", "vfs_write", "pid", "cpu", "inner"] {
                let Ok(prototype) = all.of(name) else { continue };
                for parameter in &prototype.parameters {
                    let _ = all.shape(&parameter.value);
                    if let ValueKind::Enumeration { number, .. } = parameter.value.kind {
                        let _ = all.enumerator(number, u64::from(word));
                    }
                }
            }
        }
    }
}

#[test]
fn a_structure_that_contains_itself_ends() {
    let mut types = types();
    let at = types.iter().position(|word| *word == string("thread_info")).unwrap();
    // Its first field is of its own type.
    types[at + 4] = 7;
    let all = prototypes(&types);
    assert_eq!(places(&all, "vfs_read", crate::arch::ALL[0])[2], Place::Unknown);
}
