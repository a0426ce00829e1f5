//! Values that a call was given, or that it returned: with their names, and as much of their types as is
//! needed to show them.
//!
//! They travel in one piece of memory that says everything by itself, from the tracer to whoever shows
//! them: nobody in between knows a kernel's types. A value is:
//!
//! ```text
//! u8   what it is (see Value)
//! u8   bytes of its name, and these
//! ...  an integer or address: u64
//!      text: u64 address; u8, whether there is more of it; u8 bytes, and these
//!      an enumeration: u64; u8 bytes of the value's name, and these
//!      words: u8 how many, and u64 each
//! ```
//!
//! All of it little-endian.

use std::fmt;

use super::errors;

/// A value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// It was not recorded.
    Unknown,
    /// A word of which the type is not known.
    Word(u64),
    /// An integer that may be negative.
    Signed(i64),
    /// Any other integer.
    Unsigned(u64),
    /// A truth value.
    Bool(u64),
    /// A character.
    Char(u8),
    /// An address.
    Pointer(u64),
    /// An address, and the text that was there shortly after the call.
    Text {
        /// The address.
        address: u64,
        /// The text, in whatever bytes it had.
        text: &'a [u8],
        /// Whether there is more of it.
        is_cut: bool,
    },
    /// A value of an enumeration.
    Enumerator {
        /// Which.
        value: i64,
        /// Its name.
        name: &'a str,
    },
    /// A structure: its words.
    Words(Words<'a>),
    /// There are more values that were not recorded.
    More,
}

/// Words of a structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Words<'a>(&'a [u8]);

impl Words<'_> {
    /// The words.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.0.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
    }
}

/// The values of one call: of its arguments, or the one that it returned. None were asked for by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Values<'a>(Option<&'a [u8]>);

/// Bytes that the values of a call have at most.
pub const MAX_VALUES: usize = 2048;

/// Bytes of a name, or of a text, at most.
pub const MAX_TEXT: usize = 64;

/// Bytes of a value at most, with its name.
const MAX_VALUE: usize = 2 + MAX_TEXT + 10 + MAX_TEXT;

impl<'a> Values<'a> {
    /// None were asked for.
    pub const NONE: Self = Self(None);

    /// Values that were written down by [`Encoder`]; bytes that are none end them.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(Some(bytes))
    }

    /// As they are written down; `None` if they were not asked for.
    #[must_use]
    pub fn bytes(self) -> Option<&'a [u8]> {
        self.0
    }

    /// Whether they were asked for.
    #[must_use]
    pub fn are_told(self) -> bool {
        self.0.is_some()
    }

    /// The values with their names.
    pub fn iter(self) -> impl Iterator<Item = (&'a str, Value<'a>)> {
        let mut rest = Bytes(self.0.unwrap_or_default());
        std::iter::from_fn(move || {
            let value = rest.value();
            if value.is_none() {
                rest.0 = &[];
            }
            value
        })
    }
}

/// Bytes that may be anything.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let length = usize::from(self.u8()?);
        self.take(length).filter(|text| text.len() <= MAX_TEXT)
    }

    /// A name: nothing in it disturbs a line or a terminal.
    fn name(&mut self) -> Option<&'a str> {
        let name = std::str::from_utf8(self.text()?).ok()?;
        name.bytes().all(|byte| matches!(byte, b' '..=b'~')).then_some(name)
    }

    fn value(&mut self) -> Option<(&'a str, Value<'a>)> {
        let kind = self.u8()?;
        let name = self.name()?;
        let value = match kind {
            0 => Value::Unknown,
            1 => Value::Word(self.u64()?),
            2 => Value::Signed(self.u64()?.cast_signed()),
            3 => Value::Unsigned(self.u64()?),
            4 => Value::Bool(self.u64()?),
            5 => Value::Char(self.u64()? as u8),
            6 => Value::Pointer(self.u64()?),
            7 => {
                let (address, is_cut) = (self.u64()?, self.u8()? != 0);
                Value::Text { address, text: self.text()?, is_cut }
            }
            8 => Value::Enumerator { value: self.u64()?.cast_signed(), name: self.name()? },
            9 => {
                let count = usize::from(self.u8()?);
                Value::Words(Words(self.take(8 * count).filter(|_| count <= MAX_TEXT / 8)?))
            }
            10 => Value::More,
            _ => return None,
        };
        Some((name, value))
    }
}

/// Writes values down, one behind the other.
#[derive(Debug, Default)]
pub struct Encoder {
    bytes: Vec<u8>,
    is_full: bool,
}

impl Encoder {
    /// Begins anew.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.is_full = false;
    }

    /// What was written.
    #[must_use]
    pub fn values(&self) -> Values<'_> {
        Values(Some(&self.bytes))
    }

    /// Appends a value. Where there is no room for more, it says that there are more.
    pub fn push(&mut self, name: &str, value: &Value<'_>) {
        if self.is_full {
            return;
        }
        if self.bytes.len() + 2 * MAX_VALUE > MAX_VALUES {
            self.is_full = true;
            self.head(10, "");
            return;
        }
        match *value {
            Value::Unknown => self.head(0, name),
            Value::Word(word) => self.word(1, name, word),
            Value::Signed(value) => self.word(2, name, value.cast_unsigned()),
            Value::Unsigned(value) => self.word(3, name, value),
            Value::Bool(value) => self.word(4, name, value),
            Value::Char(value) => self.word(5, name, value.into()),
            Value::Pointer(address) => self.word(6, name, address),
            Value::Text { address, text, is_cut } => {
                self.word(7, name, address);
                self.bytes.push(u8::from(is_cut || text.len() > MAX_TEXT));
                self.text(text);
            }
            Value::Enumerator { value, name: of } => {
                self.word(8, name, value.cast_unsigned());
                self.text(of.as_bytes());
            }
            Value::Words(words) => self.words(name, words.iter()),
            Value::More => self.head(10, name),
        }
    }

    /// Appends the words of a structure, of which as many count as there is room for.
    pub fn words(&mut self, name: &str, words: impl Iterator<Item = u64>) {
        if self.is_full {
            return;
        }
        self.head(9, name);
        let at = self.bytes.len();
        self.bytes.push(0);
        for word in words.take(MAX_TEXT / 8) {
            self.bytes.extend_from_slice(&word.to_le_bytes());
            self.bytes[at] += 1;
        }
    }

    fn head(&mut self, kind: u8, name: &str) {
        self.bytes.push(kind);
        self.text(name.as_bytes());
    }

    fn word(&mut self, kind: u8, name: &str, word: u64) {
        self.head(kind, name);
        self.bytes.extend_from_slice(&word.to_le_bytes());
    }

    fn text(&mut self, text: &[u8]) {
        let text = &text[..text.len().min(MAX_TEXT)];
        // No more than MAX_TEXT, which a byte holds.
        self.bytes.push(text.len() as u8);
        self.bytes.extend_from_slice(text);
    }
}

/// As the kernel's own tracers show arguments (`print_function_args` in kernel/trace/trace_output.c, from 6.14
/// on), with what a text leads to and the names of values.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Unknown => f.write_str("?"),
            Self::Word(value) | Self::Unsigned(value) | Self::Pointer(value) => {
                write!(f, "{value:#x}")
            }
            Self::Signed(value) => write!(f, "{value}"),
            Self::Bool(0) => f.write_str("false"),
            Self::Bool(1) => f.write_str("true"),
            Self::Bool(value) => write!(f, "{value:#x}"),
            Self::Char(value) if value.is_ascii_graphic() || value == b' ' => {
                write!(f, "'{}'", char::from(value))
            }
            Self::Char(value) => write!(f, "{value:#x}"),
            Self::Text { address, text, is_cut } => {
                let more = if is_cut { "..." } else { "" };
                write!(f, "{address:#x} \"{}\"{more}", text.escape_ascii())
            }
            Self::Enumerator { value, name } => write!(f, "{value} [{name}]"),
            Self::Words(words) => {
                f.write_str("[")?;
                for (index, word) in words.iter().enumerate() {
                    let between = if index > 0 { ":" } else { "" };
                    write!(f, "{between}{word:#x}")?;
                }
                f.write_str("]")
            }
            Self::More => f.write_str("..."),
        }
    }
}

/// As arguments between their parentheses.
impl fmt::Display for Values<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, value)) in self.iter().enumerate() {
            let between = if index > 0 { ", " } else { "" };
            let equals = if name.is_empty() { "" } else { "=" };
            write!(f, "{between}{name}{equals}{value}")?;
        }
        Ok(())
    }
}

/// A value that was returned, as text: errors with their names.
#[derive(Debug, Clone, Copy)]
pub struct Returned<'a>(pub Value<'a>);

impl Returned<'_> {
    /// The error that it stands for, as a negative number.
    #[must_use]
    pub fn error(&self) -> Option<i64> {
        let value = match self.0 {
            Value::Signed(value) => value,
            Value::Pointer(value) => value.cast_signed(),
            // In 32 bits as well, as the kernel's own tracers have it.
            Value::Word(value) => match value >> 32 {
                0 => i64::from(value as i32),
                _ => value.cast_signed(),
            },
            _ => return None,
        };
        (-errors::MAX..0).contains(&value).then_some(value)
    }
}

impl Returned<'_> {
    /// The name of that error, if it has one.
    #[must_use]
    pub fn error_name(&self) -> Option<&'static str> {
        errors::name(-self.error()?)
    }
}

impl fmt::Display for Returned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.error() {
            Some(error) => match self.error_name() {
                Some(name) => write!(f, "{error} ({name})"),
                None => write!(f, "{error}"),
            },
            None => self.0.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encoded(values: &[(&str, Value<'_>)]) -> Encoder {
        let mut encoder = Encoder::default();
        values.iter().for_each(|(name, value)| encoder.push(name, value));
        encoder
    }

    #[test]
    fn values_are_shown_as_the_kernel_shows_them() {
        let values = [
            ("dfd", Value::Signed(-100)),
            ("filename", Value::Pointer(0x5a_c25b)),
            ("flags", Value::Unsigned(0x8241)),
            ("excl", Value::Bool(1)),
            ("c", Value::Char(b'x')),
            ("name", Value::Text { address: 0xffff_8881, text: b"a\"\x1b[2J\xff", is_cut: true }),
            ("type", Value::Enumerator { value: 2, name: "PIDTYPE_PGID" }),
            ("", Value::Unknown),
        ];
        let mut encoder = encoded(&values);
        encoder.words("how", [1, 2].into_iter());
        assert_eq!(
            encoder.values().to_string(),
            "dfd=-100, filename=0x5ac25b, flags=0x8241, excl=true, c='x', \
             name=0xffff8881 \"a\\\"\\x1b[2J\\xff\"..., type=2 [PIDTYPE_PGID], ?, how=[0x1:0x2]"
        );
        let found: Vec<_> = encoder.values().iter().take(values.len()).collect();
        assert_eq!(found, values);
        assert_eq!(Values::default().bytes(), None);
        assert_eq!(encoded(&[]).values().to_string(), "");
    }

    #[test]
    fn errors_that_are_returned_have_names() {
        for (value, text) in [
            (Value::Signed(-2), "-2 (ENOENT)"),
            (Value::Signed(-4095), "-4095"),
            (Value::Signed(-4096), "-4096"),
            (Value::Signed(17), "17"),
            (Value::Pointer(-13_i64 as u64), "-13 (EACCES)"),
            (Value::Pointer(0xffff_8880_0000_0000), "0xffff888000000000"),
            (Value::Word(0xffff_ffea), "-22 (EINVAL)"),
            (Value::Word(-512_i64 as u64), "-512 (ERESTARTSYS)"),
            (Value::Word(2), "0x2"),
            (Value::Unsigned(-2_i64 as u64), "0xfffffffffffffffe"),
            (Value::Bool(0), "false"),
        ] {
            assert_eq!(Returned(value).to_string(), text);
        }
    }

    #[test]
    fn there_are_never_more_bytes_than_may_be_and_the_last_says_that_there_are_more() {
        let name = "n".repeat(300);
        let long = Value::Text { address: 1, text: &[b'x'; 300], is_cut: false };
        let mut encoder = Encoder::default();
        (0..40).for_each(|_| encoder.push(&name, &long));
        assert!(encoder.bytes.len() <= MAX_VALUES);
        assert_eq!(encoder.values().iter().last(), Some(("", Value::More)));
        let (name, value) = encoder.values().iter().next().unwrap();
        assert_eq!(name.len(), MAX_TEXT);
        assert!(matches!(value, Value::Text { text, is_cut: true, .. } if text.len() == MAX_TEXT));
    }

    proptest! {
        #[test]
        fn no_bytes_make_us_panic_or_disturb_a_line(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let shown = Values::new(&bytes).to_string();
            prop_assert!(shown.bytes().all(|byte| matches!(byte, b' '..=b'~')), "{shown:?}");
        }
    }
}
