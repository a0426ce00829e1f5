//! Sizes as they are typed: `512M`, `2G`, `512`.

use std::fmt;
use std::str::FromStr;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// An amount of memory in bytes; never zero.
///
/// Units are powers of two. A bare number is a number of MiB, as in QEMU's `-m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u64);

impl Size {
    /// The size in bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = match unit.to_ascii_lowercase().as_str() {
            "k" | "kib" => KIB,
            "" | "m" | "mib" => MIB,
            "g" | "gib" => GIB,
            "t" | "tib" => TIB,
            _ => return Err(SizeError::Malformed),
        };
        if number.is_empty() {
            return Err(SizeError::Malformed);
        }
        // Only digits are left, so a number that does not parse is one that does not fit.
        let bytes = number.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
        match bytes {
            Some(0) => Err(SizeError::Zero),
            Some(bytes) => Ok(Self(bytes)),
            None => Err(SizeError::TooLarge),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, name) in [(TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")] {
            if self.0.is_multiple_of(unit) {
                return write!(f, "{} {name}", self.0 / unit);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

/// A size could not be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Not a whole number with a unit.
    #[error("a size is a whole number with K, M, G or T behind it (a bare number means MiB)")]
    Malformed,
    /// Nothing at all was asked for.
    #[error("a size must be more than zero")]
    Zero,
    /// More than 64 bits can say.
    #[error("a size must be less than 16777216 TiB")]
    TooLarge,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_two_and_a_bare_number_is_mebibytes() {
        for (text, bytes) in [
            ("1", MIB),
            ("512", 512 * MIB),
            ("64k", 64 * KIB),
            ("512M", 512 * MIB),
            ("2G", 2 * GIB),
            ("2GiB", 2 * GIB),
            ("1t", TIB),
            ("16777215T", 16_777_215 * TIB),
        ] {
            assert_eq!(text.parse::<Size>().map(Size::bytes), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused_with_its_reason() {
        for (text, error) in [
            ("", SizeError::Malformed),
            ("M", SizeError::Malformed),
            ("-1", SizeError::Malformed),
            ("1.5G", SizeError::Malformed),
            ("12x", SizeError::Malformed),
            ("1 G", SizeError::Malformed),
            ("٣", SizeError::Malformed),
            ("0", SizeError::Zero),
            ("0G", SizeError::Zero),
            ("16777216T", SizeError::TooLarge),
            ("99999999999999999999", SizeError::TooLarge),
        ] {
            assert_eq!(text.parse::<Size>(), Err(error), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_divides_them() {
        for (text, shown) in
            [("1536", "1536 MiB"), ("2048M", "2 GiB"), ("3k", "3 KiB"), ("1T", "1 TiB")]
        {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), shown);
        }
        assert_eq!(Size(1025).to_string(), "1025 bytes");
    }
}
