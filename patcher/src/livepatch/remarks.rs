//! What may be meant otherwise in a payload that fits.

use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashSet;

use super::payload::{Contents, Home};
use super::replace::Replacement;
use super::resolve::KernelView;

/// Something about a payload that fits its kernel and may still not be what its author meant.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remark {
    /// The payload has a variable that is named like one of the kernel's.
    OwnVariable {
        /// The variable.
        name: Arc<str>,
    },
    /// The compiler made copies of a function that is replaced, and these are not.
    Copies {
        /// The function.
        function: Arc<str>,
        /// Its copies.
        copies: Vec<Arc<str>>,
    },
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remark::OwnVariable { name } => write!(
                f,
                "the payload has a variable {name} of its own beside the kernel's: declare it \
                 extern to use that one"
            ),
            Remark::Copies { function, copies } => write!(
                f,
                "callers of {} go on with the old code, which was compiled from {function} for \
                 them: replace it too (--map NEW=OLD)",
                copies.join(", ")
            ),
        }
    }
}

/// The most variables that are remarked upon.
const MOST: usize = 64;

/// What there is to say.
pub(super) fn find(
    object: &Contents,
    kernel: &KernelView<'_>,
    replacements: &[Replacement],
) -> Vec<Remark> {
    let replaced: FxHashSet<&str> = replacements.iter().map(|one| &*one.name).collect();
    let copies = replacements.iter().filter_map(|one| {
        let left = one.copies.iter().filter(|copy| !replaced.contains(&***copy));
        let copies: Vec<_> = left.cloned().collect();
        let function = one.name.clone();
        (!copies.is_empty()).then_some(Remark::Copies { function, copies })
    });
    let own = object.symbols.iter().filter(|symbol| {
        symbol.is_variable
            && matches!(symbol.home, Home::Section(_))
            && kernel.symbols.named(&symbol.name).next().is_some()
    });
    let own = own.take(MOST).map(|symbol| Remark::OwnVariable { name: symbol.name.clone() });
    copies.chain(own).collect()
}
