//! What a payload says about itself, and what the operator adds: which function replaces which, and
//! for which kernel it is.

use std::sync::Arc;

use crate::trace::filter::Glob;

/// A name of the payload's stands for one of the kernel's, by the operator's or the author's word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    /// The payload's: a function of its own that replaces the kernel's, or a symbol that it refers to.
    pub new: Arc<str>,
    /// The kernel's.
    pub old: Arc<str>,
    /// Which of several symbols of that name, counted from 1 in the order of the kernel's own table,
    /// as in livepatch (`sympos`); `None` if there is but one.
    pub position: Option<u32>,
}

impl Map {
    /// Reads `NEW=OLD` or `NEW=OLD,POSITION`. Position 0 says, as in livepatch, that there is one only.
    ///
    /// # Errors
    /// [`OptionsError::Map`].
    pub fn parse(text: &str) -> Result<Self, OptionsError> {
        Self::parse_by(text, '=')
    }

    fn parse_by(text: &str, separator: char) -> Result<Self, OptionsError> {
        let error = || OptionsError::Map { text: text.to_owned(), separator };
        let (new, old) = text.split_once(separator).ok_or_else(error)?;
        let (old, position) = match old.split_once(',') {
            Some((old, position)) => (old, position.parse::<u32>().map_err(|_| error())?),
            None => (old, 0),
        };
        if new.is_empty() || old.is_empty() {
            return Err(error());
        }
        let position = Some(position).filter(|position| *position > 0);
        Ok(Self { new: new.into(), old: old.into(), position })
    }
}

/// What a payload's section `.vmm.livepatch` says: strings `key=value`, each with a NUL behind it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PayloadOptions {
    /// `replace=NEW:OLD[,POSITION]`: what stands for what.
    pub maps: Vec<Map>,
    /// `helper=NAME`: functions that replace nothing, although the kernel has one of that name.
    pub helpers: Vec<Arc<str>>,
    /// `release=GLOB`: releases of kernels that the payload is for; any if there is none.
    pub releases: Vec<Glob>,
    /// `build-id=HEX`: kernels that the payload is for, lower-case; any if there is none.
    pub build_ids: Vec<Arc<str>>,
    /// `consistent=yes`: nobody may stand in a replaced function as the payload is applied, also if
    /// there is but one.
    pub consistent: bool,
}

/// The releases that are wanted, if there are any and the one that was `found` is none of them.
pub(super) fn other_release(wanted: &[Glob], found: &str) -> Option<String> {
    if wanted.is_empty() || wanted.iter().any(|release| release.matches(found)) {
        return None;
    }
    let patterns: Vec<&str> = wanted.iter().map(Glob::pattern).collect();
    Some(patterns.join(" or "))
}

/// What a payload says about itself, or a map, can't be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A map is none.
    #[error(
        "`{text}` does not say which function replaces which: \
         write NEW{separator}OLD or NEW{separator}OLD,POSITION"
    )]
    Map {
        /// What was given.
        text: String,
        /// What stands between the names.
        separator: char,
    },
    /// A string is no `key=value`.
    #[error("the section .vmm.livepatch holds `{text}`, which is no key=value")]
    NoPair {
        /// The string.
        text: String,
    },
    /// A key is not known.
    #[error(
        "the section .vmm.livepatch has the key `{key}`, which is not known: \
         there are replace, helper, release, build-id and consistent"
    )]
    UnknownKey {
        /// The key.
        key: String,
    },
    /// A value means nothing.
    #[error("the section .vmm.livepatch says {key}={value}: {wanted} is wanted")]
    Value {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// There is too much of it, or it is no text.
    #[error(
        "the section .vmm.livepatch is no list of at most {most} bytes of text, each with a NUL behind it"
    )]
    NoText {
        /// Bytes that there may be.
        most: usize,
    },
}

/// The most bytes of options.
const MAX_BYTES: usize = 64 << 10;

impl PayloadOptions {
    /// Reads the section's contents.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, OptionsError> {
        let no_text = OptionsError::NoText { most: MAX_BYTES };
        let text = match std::str::from_utf8(bytes) {
            Ok(text) if text.len() <= MAX_BYTES => text,
            _ => return Err(no_text),
        };
        let mut options = Self::default();
        if text.chars().any(|c| c.is_control() && c != '\0') {
            return Err(no_text);
        }
        for pair in text.split('\0').filter(|pair| !pair.is_empty()) {
            options.add(pair)?;
        }
        Ok(options)
    }

    fn add(&mut self, pair: &str) -> Result<(), OptionsError> {
        let (key, value) =
            pair.split_once('=').ok_or_else(|| OptionsError::NoPair { text: pair.to_owned() })?;
        match key {
            "replace" => self.maps.push(Map::parse_by(value, ':')?),
            "helper" => self.helpers.push(value.into()),
            "release" => self.releases.push(Glob::new(value)),
            "build-id" => {
                let digits = value.bytes().all(|digit| digit.is_ascii_hexdigit());
                if !digits || value.len() < 8 {
                    let (value, wanted) = (value.to_owned(), "hexadecimal digits, 8 or more,");
                    return Err(OptionsError::Value { key: "build-id", value, wanted });
                }
                self.build_ids.push(value.to_ascii_lowercase().into());
            }
            "consistent" => {
                self.consistent = match value {
                    "yes" => true,
                    "no" => false,
                    _ => {
                        let (value, wanted) = (value.to_owned(), "yes or no");
                        return Err(OptionsError::Value { key: "consistent", value, wanted });
                    }
                };
            }
            _ => return Err(OptionsError::UnknownKey { key: key.to_owned() }),
        }
        Ok(())
    }
}
