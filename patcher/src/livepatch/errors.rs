//! Why a payload does not fit a kernel: everything at once.

use std::fmt;
use std::sync::Arc;

use crate::addr::Gva;

/// One reason why a payload does not fit a kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// It was compiled for other processors.
    #[error("the object is for {object} and the kernel runs on {kernel}")]
    Architecture {
        /// What the object is for.
        object: &'static str,
        /// What the kernel runs on.
        kernel: &'static str,
    },
    /// It replaces nothing.
    #[error(
        "no function of the object is named like one of the kernel's, so it replaces nothing: \
         name one so, or map it (--map NEW=OLD)"
    )]
    ReplacesNothing,
    /// The kernel has no such symbol.
    #[error("the kernel has no symbol {name}, which the object refers to")]
    Undefined {
        /// The symbol.
        name: Arc<str>,
    },
    /// The symbol is one of a module's.
    #[error(
        "the symbol {name} is in the module {module}: payloads reach what is in the kernel itself \
         only, since a module may go"
    )]
    InModule {
        /// The symbol.
        name: Arc<str>,
        /// The module.
        module: Arc<str>,
    },
    /// There are several, and nothing says which is meant.
    #[error(
        "the kernel has {} symbols {name}, {}: say which is meant (--map {new}={name},POSITION)",
        candidates.len(),
        Candidates(candidates)
    )]
    Ambiguous {
        /// The symbol.
        name: Arc<str>,
        /// What the object calls it.
        new: Arc<str>,
        /// Where they are, in the order of their positions, the first of which is 1.
        candidates: Vec<Gva>,
    },
    /// There are not so many.
    #[error("the kernel has {count} symbols {name}, and number {position} is wanted")]
    NoSuchPosition {
        /// The symbol.
        name: Arc<str>,
        /// The number wanted.
        position: u32,
        /// How many there are.
        count: usize,
    },
    /// A map names what is not there.
    #[error(
        "a map names {new}, and the object neither has a function of that name nor refers to it"
    )]
    NothingToMap {
        /// What the map names.
        new: Arc<str>,
    },
    /// A function is to replace one that is not there.
    #[error("the kernel has no function {old}, which {new} is to replace")]
    NoOldFunction {
        /// The function that is missing.
        old: Arc<str>,
        /// What was to replace it.
        new: Arc<str>,
    },
    /// Two functions are to replace one.
    #[error("both {first} and {second} of the object are to replace the kernel's {old}")]
    TwoDefinitions {
        /// The kernel's function.
        old: Arc<str>,
        /// A function of the object's.
        first: Arc<str>,
        /// Another, which may have the same name.
        second: Arc<str>,
    },
    /// What is to be replaced is not code that stays.
    #[error(
        "{old} at {at} is not in the kernel's text, and what initialises it is gone after boot"
    )]
    NotInText {
        /// The kernel's symbol.
        old: Arc<str>,
        /// Where it is.
        at: Gva,
    },
}

/// Candidates with their positions, as a list.
struct Candidates<'a>(&'a [Gva]);

/// The most candidates that are shown.
const SHOWN: usize = 16;

impl fmt::Display for Candidates<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, at) in self.0.iter().enumerate().take(SHOWN) {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{} at {at}", index + 1)?;
        }
        if self.0.len() > SHOWN { write!(f, " and more") } else { Ok(()) }
    }
}

/// The most reasons that are shown.
const MOST_SHOWN: usize = 64;

/// All reasons why a payload does not fit a kernel, one at least.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolveErrors(pub(super) Vec<ResolveError>);

impl ResolveErrors {
    /// Each of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &ResolveError> {
        self.0.iter()
    }
}

impl fmt::Display for ResolveErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate().take(MOST_SHOWN) {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{error}")?;
        }
        match self.0.len().checked_sub(MOST_SHOWN) {
            None | Some(0) => Ok(()),
            Some(more) => write!(f, "; and {more} more"),
        }
    }
}

impl std::error::Error for ResolveErrors {}
