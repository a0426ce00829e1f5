//! Where functions are given their arguments.
//!
//! The supplements of the architectures' ABIs differ in little that matters to a kernel, whose functions
//! have no floating-point arguments: how many registers there are, how large a structure may be that
//! registers hold, and what becomes of one of which only a part would fit. That is data
//! ([`CallingConvention`]), and one rule reads it.

/// How a function is given its arguments, as the code that a pad leads to finds them.
#[derive(Debug, PartialEq, Eq)]
pub struct CallingConvention {
    /// The registers of the first arguments, as they are called.
    pub registers: &'static [&'static str],
    /// Where the register is among [`CallingConvention::registers`] that holds the address to which a
    /// value is to be returned that is returned in memory; `None` if that is in a register of its own.
    pub memory_return: Option<u8>,
    /// How far above the stack pointer at the function's entry the words of further arguments begin, in
    /// bytes.
    pub stack: u16,
    /// How structures and unions are given.
    pub aggregates: Aggregates,
    /// How large a structure may be that is returned in registers, in bytes; 0 if none is.
    pub returned: u64,
    /// What becomes of an argument of two words.
    pub pairs: Pairs,
}

/// How structures and unions are given that are no scalars.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aggregates {
    /// Those of up to two words by value in registers, larger ones by value on the stack; and all of those
    /// that have an unaligned field (System V, x86_64).
    ByValue,
    /// Those of up to two words by value, of larger ones the address (AAPCS64).
    UpToTwoWords,
    /// Those of 1, 2, 4 or 8 bytes by value, of others the address; of integers of 128 bits, too (s390x).
    UpToOneWord,
}

/// What becomes of an argument of two words of which only the first has a register left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// It is on the stack, and later arguments may have the register (System V).
    LeaveRegister,
    /// It is on the stack, and so is what follows; integers of 128 bits begin with an even register
    /// (AAPCS64).
    TakeAll,
    /// There are none (s390x).
    Never,
}

/// What of an argument's type decides where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Its size in bytes.
    pub size: u64,
    /// Whether it is aligned to 16 bytes.
    pub wide: bool,
    /// What it is.
    pub class: ShapeClass,
}

/// What an argument is, as conventions tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShapeClass {
    /// An integer, a pointer, an enumeration.
    Scalar,
    /// A structure or union without floating-point fields.
    Aggregate {
        /// Whether a field of it is not aligned as its type wants.
        unaligned: bool,
    },
    /// Something whose place is not known.
    Unknown,
}

/// Where an argument is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// In so many registers from that one on, counted from 0.
    Registers {
        /// The first.
        first: u8,
        /// How many; none for a type without any bytes.
        count: u8,
    },
    /// In words of the stack.
    Stack {
        /// The first, from 0, of those for arguments.
        first: u16,
        /// How many.
        count: u16,
    },
    /// The register holds its address.
    AtRegister(u8),
    /// The word of the stack, from 0, holds its address.
    AtStack(u16),
    /// Not known.
    Unknown,
}

impl CallingConvention {
    /// Where the arguments of a function are that returns such a value; `None` if it returns none.
    #[must_use]
    pub fn place(&self, returns: Option<Shape>, arguments: &[Shape]) -> Vec<Place> {
        let mut next = Next { convention: self, register: 0, word: Some(0), known: true };
        if let Some(value) = returns {
            next.known = value.class != ShapeClass::Unknown;
            let is_aggregate = matches!(value.class, ShapeClass::Aggregate { .. });
            let unaligned = matches!(value.class, ShapeClass::Aggregate { unaligned: true });
            // One without any bytes is returned in no way at all, or in memory.
            next.known &= !(is_aggregate && value.size == 0);
            let scalars = if self.pairs == Pairs::Never { 8 } else { 16 };
            let in_memory = match is_aggregate {
                true => value.size > self.returned || (unaligned && self.leaves_unaligned()),
                false => value.size > scalars,
            };
            if in_memory {
                next.register = self.memory_return.map_or(0, |register| usize::from(register) + 1);
            }
        }
        arguments.iter().map(|shape| next.place(*shape)).collect()
    }

    fn leaves_unaligned(&self) -> bool {
        self.aggregates == Aggregates::ByValue
    }
}

/// What is left while arguments are placed.
struct Next<'a> {
    convention: &'a CallingConvention,
    register: usize,
    /// `None` once there are too many words.
    word: Option<u16>,
    /// Whether it is known where the next argument is.
    known: bool,
}

impl Next<'_> {
    fn place(&mut self, shape: Shape) -> Place {
        let convention = self.convention;
        let is_aggregate = matches!(shape.class, ShapeClass::Aggregate { .. });
        // Compilers do not agree about what has no bytes, and kernels give none.
        self.known &= shape.class != ShapeClass::Unknown && shape.size != 0;
        if !self.known {
            return Place::Unknown;
        }
        let by_value = match convention.aggregates {
            Aggregates::ByValue => true,
            Aggregates::UpToTwoWords => shape.size <= 16,
            Aggregates::UpToOneWord if is_aggregate => matches!(shape.size, 1 | 2 | 4 | 8),
            Aggregates::UpToOneWord => shape.size <= 8,
        };
        if !by_value {
            return match self.registers(1) {
                Some(first) => Place::AtRegister(first),
                None => self.words(1, false).map_or(Place::Unknown, Place::AtStack),
            };
        }
        let unaligned = shape.class == (ShapeClass::Aggregate { unaligned: true });
        let words = shape.size.div_ceil(8);
        let fits = words <= 2 && !(unaligned && convention.leaves_unaligned());
        if fits {
            if words == 2 && shape.wide && convention.pairs == Pairs::TakeAll {
                self.register = self.register.next_multiple_of(2);
            }
            if let Some(first) = self.registers(words as usize) {
                return Place::Registers { first, count: words as u8 };
            }
            if convention.pairs == Pairs::TakeAll {
                self.register = convention.registers.len();
            }
        }
        let count = u16::try_from(words).ok();
        let placed = count.and_then(|count| Some((self.words(count, shape.wide)?, count)));
        self.known &= placed.is_some();
        placed.map_or(Place::Unknown, |(first, count)| Place::Stack { first, count })
    }

    fn registers(&mut self, count: usize) -> Option<u8> {
        let first = self.register;
        let end = first + count;
        if end > self.convention.registers.len() {
            return None;
        }
        self.register = end;
        // As many as a convention has.
        Some(first as u8)
    }

    fn words(&mut self, count: u16, wide: bool) -> Option<u16> {
        let first = self.word?;
        let first = if wide { first.checked_next_multiple_of(2) } else { Some(first) };
        self.word = first.and_then(|first| first.checked_add(count));
        self.known = self.word.is_some();
        self.word.and(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Arch, aarch64::Aarch64, s390x::S390X, x86_64::X86_64};

    const WORD: Shape = Shape { size: 8, wide: false, class: ShapeClass::Scalar };
    const WIDE: Shape = Shape { size: 16, wide: true, class: ShapeClass::Scalar };
    const FLOAT: Shape = Shape { size: 8, wide: false, class: ShapeClass::Unknown };

    fn structure(size: u64) -> Shape {
        Shape { size, wide: false, class: ShapeClass::Aggregate { unaligned: false } }
    }

    fn packed(size: u64) -> Shape {
        Shape { class: ShapeClass::Aggregate { unaligned: true }, ..structure(size) }
    }

    fn places(arch: &dyn Arch, arguments: &[Shape]) -> Vec<Place> {
        arch.calling_convention().place(None, arguments)
    }

    fn register(first: u8) -> Place {
        Place::Registers { first, count: 1 }
    }

    fn two(first: u8) -> Place {
        Place::Registers { first, count: 2 }
    }

    fn stack(first: u16, count: u16) -> Place {
        Place::Stack { first, count }
    }

    #[test]
    fn words_are_in_registers_and_then_on_the_stack() {
        for (arch, registers) in [(&X86_64 as &dyn Arch, 6), (&S390X, 5), (&Aarch64, 8)] {
            let found = places(arch, &[WORD; 10]);
            for (index, place) in found.into_iter().enumerate() {
                let on_stack = index.checked_sub(registers).map(|word| stack(word as u16, 1));
                assert_eq!(place, on_stack.unwrap_or(register(index as u8)), "{}", arch.name());
            }
        }
    }

    #[test]
    fn of_two_words_none_is_in_a_register_alone() {
        let five = [WORD, WORD, WORD, WORD, WORD, structure(16), WORD, WORD];
        let found = places(&X86_64, &five);
        assert_eq!(found[5..], [stack(0, 2), register(5), stack(2, 1)]);
        let seven = [WORD, WORD, WORD, WORD, WORD, WORD, WORD, structure(12), WORD];
        assert_eq!(places(&Aarch64, &seven)[7..], [stack(0, 2), stack(2, 1)]);
        assert_eq!(places(&X86_64, &[structure(9), structure(16)]), [two(0), two(2)]);
        assert_eq!(
            places(&Aarch64, &[WORD, structure(9), WORD]),
            [register(0), two(1), register(3)]
        );
    }

    #[test]
    fn integers_of_128_bits_are_aligned_where_they_have_to_be() {
        assert_eq!(places(&X86_64, &[WORD, WIDE, WORD]), [register(0), two(1), register(3)]);
        assert_eq!(places(&Aarch64, &[WORD, WIDE, WORD]), [register(0), two(2), register(4)]);
        let late = [WORD, WORD, WORD, WORD, WORD, WORD, WORD, WORD, WORD, WIDE];
        assert_eq!(places(&Aarch64, &late)[8..], [stack(0, 1), stack(2, 2)]);
        assert_eq!(places(&S390X, &[WIDE, WORD]), [Place::AtRegister(0), register(1)]);
    }

    #[test]
    fn larger_structures_are_given_as_each_architecture_does() {
        let given = [structure(24), WORD];
        assert_eq!(places(&X86_64, &given), [stack(0, 3), register(0)]);
        assert_eq!(places(&Aarch64, &given), [Place::AtRegister(0), register(1)]);
        assert_eq!(places(&S390X, &given), [Place::AtRegister(0), register(1)]);
        assert_eq!(
            places(&S390X, &[structure(8), structure(16)])[..],
            [register(0), Place::AtRegister(1)]
        );
        assert_eq!(places(&S390X, &[structure(3)]), [Place::AtRegister(0)]);
        let sixth = [WORD, WORD, WORD, WORD, WORD, structure(16)];
        assert_eq!(places(&S390X, &sixth)[5], Place::AtStack(0));
        assert_eq!(places(&X86_64, &[packed(12), WORD]), [stack(0, 2), register(0)]);
        assert_eq!(places(&Aarch64, &[packed(12)]), [two(0)]);
    }

    #[test]
    fn what_is_returned_in_memory_takes_the_first_register_where_it_does() {
        for (arch, size, first) in [
            (&X86_64 as &dyn Arch, 16, 0),
            (&X86_64, 17, 1),
            (&S390X, 4, 1),
            (&Aarch64, 16, 0),
            (&Aarch64, 100, 0),
        ] {
            let found = arch.calling_convention().place(Some(structure(size)), &[WORD]);
            assert_eq!(found, [register(first)], "{} {size}", arch.name());
        }
        let wide = |arch: &dyn Arch| arch.calling_convention().place(Some(WIDE), &[WORD])[0];
        assert_eq!(
            (wide(&X86_64), wide(&S390X), wide(&Aarch64)),
            (register(0), register(1), register(0))
        );
        let packed = X86_64.calling_convention().place(Some(packed(12)), &[WORD]);
        assert_eq!(packed, [register(1)]);
    }

    #[test]
    fn behind_what_is_not_known_nothing_is() {
        for arch in crate::arch::ALL {
            let found = places(arch, &[WORD, FLOAT, WORD]);
            assert_eq!(found, [register(0), Place::Unknown, Place::Unknown]);
            let found = places(arch, &[structure(0), WORD]);
            assert_eq!(found, [Place::Unknown; 2]);
            assert_eq!(arch.calling_convention().place(Some(FLOAT), &[WORD]), [Place::Unknown]);
        }
        assert_eq!(places(&X86_64, &[structure(1 << 40), WORD]), [Place::Unknown; 2]);
    }
}
