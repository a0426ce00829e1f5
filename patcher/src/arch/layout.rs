//! How a pad is laid out around the one instruction of it that is ever changed.

use super::{Arch, PadState};
use crate::addr::Gva;

/// Bytes of text, some of which may be anything.
///
/// Written in hexadecimal; a dot stands for four bits that do not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern(&'static str);

impl Pattern {
    /// No bytes, which everything begins with.
    pub const EMPTY: Self = Self("");

    /// The pattern that `digits` describes.
    ///
    /// # Panics
    /// If `digits` are not pairs of lower-case hexadecimal digits, dots and spaces between pairs; in
    /// a constant that is an error of the build.
    #[must_use]
    pub const fn new(digits: &'static str) -> Self {
        let bytes = digits.as_bytes();
        let (mut at, mut count) = (0, 0);
        while at < bytes.len() {
            match bytes[at] {
                b'0'..=b'9' | b'a'..=b'f' | b'.' => count += 1,
                b' ' => assert!(count % 2 == 0, "a space within a byte"),
                _ => panic!("a pattern is made of hexadecimal digits, dots and spaces"),
            }
            at += 1;
        }
        assert!(count % 2 == 0, "half a byte");
        Self(digits)
    }

    /// How many bytes it describes.
    #[must_use]
    pub fn len(self) -> usize {
        self.digits().count() / 2
    }

    /// Whether it describes none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether `text` begins with such bytes.
    #[must_use]
    pub fn begins(self, text: &[u8]) -> bool {
        text.len() >= self.len() && {
            let halves = text.iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
            self.digits().zip(halves).all(|(digit, half)| match digit {
                b'.' => true,
                digit => char::from(digit).to_digit(16) == Some(half.into()),
            })
        }
    }

    /// Whether `text` is such bytes and no more.
    #[must_use]
    pub fn is(self, text: &[u8]) -> bool {
        text.len() == self.len() && self.begins(text)
    }

    fn digits(self) -> impl Iterator<Item = u8> {
        self.0.bytes().filter(|digit| *digit != b' ')
    }
}

/// What an instruction means in the layout that it stands in, where that is not what it means by
/// itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// It leads past the rest of the pad: nobody traces the function.
    Idle,
    /// It is as the compiler made it: the kernel has not come to this pad in its boot.
    Compiled,
}

/// A pad of more than the instruction that changes.
///
/// While the function is not traced the rest of the pad has no effect or is skipped, and it never
/// changes: a task that was preempted in the middle of a pad finds what it stands on as it was.
#[derive(Debug, PartialEq, Eq)]
pub struct PadLayout {
    /// What it is called in lists.
    pub name: &'static str,
    /// What stands in front of the instruction that changes.
    pub before: &'static [u8],
    /// What that instruction may be, beside what every pad's may be.
    pub forms: &'static [(Pattern, Form)],
    /// What stands behind it.
    pub behind: Pattern,
    /// How far behind it a traced function goes on, in bytes.
    pub resume: u16,
}

impl PadLayout {
    /// A pad that is nothing but one instruction.
    pub const SINGLE: Self = Self {
        name: "one instruction",
        before: &[],
        forms: &[],
        behind: Pattern::EMPTY,
        resume: 0,
    };

    /// No pad at all: the first instruction of a function that has none. It can only be trapped.
    pub const NONE: Self = Self { name: "no pad", ..Self::SINGLE };
}

/// What the pad is whose changeable instruction is at `at`: its state and its layout. `before` is text
/// that ends in front of that instruction, `text` begins with it.
///
/// `hook` is as in [`Arch::pad_state`]. `text` should hold [`text_len`] bytes.
#[must_use]
pub fn read_pad(
    arch: &dyn Arch,
    at: Gva,
    before: &[u8],
    text: &[u8],
    hook: Option<Gva>,
) -> (PadState, &'static PadLayout) {
    let (instruction, behind) = text.split_at(arch.pad_len().min(text.len()));
    let own = arch.pad_state(at, instruction, hook);
    for layout in arch.pad_layouts() {
        let start = before.len().checked_sub(layout.before.len());
        let fits = start
            .is_some_and(|start| is_but_for_breakpoint(arch, layout.before, &before[start..]))
            && layout.behind.begins(behind);
        let form = layout.forms.iter().find(|(pattern, _)| pattern.is(instruction));
        match (fits, form) {
            (false, _) => {}
            (true, Some((_, Form::Idle))) => return (PadState::Idle, layout),
            (true, Some((_, Form::Compiled))) => return (PadState::NotYet, layout),
            // Without an instruction of its own the next layout may still know it.
            (true, None) if own == PadState::Unknown => {}
            (true, None) => return (own, layout),
        }
    }
    (own, &PadLayout::SINGLE)
}

/// How many bytes of text from a pad's changeable instruction on tell everything about the pad.
#[must_use]
pub fn text_len(arch: &dyn Arch) -> usize {
    let behind = arch.pad_layouts().iter().map(|layout| layout.behind.len()).max();
    arch.pad_len() + behind.unwrap_or(0)
}

/// Whether `found` is `expected`, or that with a breakpoint on its first instruction.
pub(crate) fn is_but_for_breakpoint(arch: &dyn Arch, expected: &[u8], found: &[u8]) -> bool {
    let breakpoint = arch.breakpoint();
    expected == found
        || (expected.len() == found.len()
            && breakpoint.begins(found)
            && expected[breakpoint.len()..] == found[breakpoint.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_stand_for_any_four_bits() {
        let pattern = Pattern::new("c0.4 ..12");
        assert_eq!((pattern.len(), Pattern::EMPTY.len()), (4, 0));
        for (bytes, begins, is) in [
            (&[0xc0, 0xf4, 0x99, 0x12][..], true, true),
            (&[0xc0, 0x04, 0x00, 0x12, 0x55], true, false),
            (&[0xc0, 0xf5, 0x99, 0x12], false, false),
            (&[0xc0, 0xf4, 0x99], false, false),
            (&[], false, false),
        ] {
            assert_eq!((pattern.begins(bytes), pattern.is(bytes)), (begins, is), "{bytes:02x?}");
        }
        assert!(Pattern::EMPTY.begins(&[]) && Pattern::EMPTY.is(&[]));
    }
}
