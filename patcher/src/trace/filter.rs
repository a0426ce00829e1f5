//! Which functions: globs as tracefs' `set_ftrace_filter` and `set_ftrace_notrace` take them.

use std::ops::RangeInclusive;

/// A glob over function names.
///
/// `*` is any string, `?` any character, `[a-z]` one of a set, `[!a-z]` one that is not, `\` takes
/// the next character as it is (the kernel's `lib/glob.c`).
///
/// `FUNCTION:mod:MODULE` names functions of modules, as the command of `set_ftrace_filter` does: both
/// are globs, an empty one is any, and `!` in front of the module means all functions but its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    pattern: String,
    /// How much of it is about the function's name.
    function: usize,
    module: Option<ModuleGlob>,
}

/// What a glob says of modules.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ModuleGlob {
    pattern: String,
    negated: bool,
}

/// What stands between a function's name and its module's.
const MODULE_COMMAND: &str = ":mod:";

impl Glob {
    /// A glob of that pattern.
    #[must_use]
    pub fn new(pattern: &str) -> Self {
        let Some((function, module)) = pattern.split_once(MODULE_COMMAND) else {
            return Self { pattern: pattern.to_owned(), function: pattern.len(), module: None };
        };
        let negated = module.starts_with('!');
        let module = module.strip_prefix('!').unwrap_or(module);
        // The kernel has no `-` in the names of modules, whatever their files are called.
        let module =
            if module.contains('[') { module.to_owned() } else { module.replace('-', "_") };
        let module = if module.is_empty() { "*".to_owned() } else { module };
        Self {
            pattern: pattern.to_owned(),
            function: function.len(),
            module: Some(ModuleGlob { pattern: module, negated }),
        }
    }

    /// The pattern as it was given.
    #[must_use]
    pub fn pattern(&self) -> &str {
        &self.pattern
    }

    /// Whether it names functions of certain modules, which may be loaded later.
    #[must_use]
    pub fn names_modules(&self) -> bool {
        self.module.as_ref().is_some_and(|module| !module.negated)
    }

    /// Whether it matches the whole of `name`, that of a module's function with the module behind it:
    /// `ext4_sync_fs [ext4]`.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let (function, module) = match name.split_once(" [") {
            Some((function, module)) => (function, module.strip_suffix(']')),
            None => (name, None),
        };
        let of_module = self.module.as_ref().is_none_or(|wanted| {
            module.is_some_and(|module| matches(&wanted.pattern, module)) != wanted.negated
        });
        let pattern = &self.pattern[..self.function];
        let is_any = pattern.is_empty() && self.module.is_some();
        of_module && (is_any || matches(pattern, function))
    }
}

/// Whether the whole of `name` matches.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    // Where to go on when a match fails: behind the last `*`, one character further in the name.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        if pattern.get(p) == Some(&b'*') {
            p += 1;
            retry = Some((p, n));
            continue;
        }
        match (pattern.get(p), name.get(n)) {
            (None, None) => return true,
            (Some(_), Some(character)) => {
                if let Some(length) = matches_one(&pattern[p..], *character) {
                    p += length;
                    n += 1;
                    continue;
                }
            }
            (Some(_), None) => return false,
            (None, Some(_)) => {}
        }
        match &mut retry {
            Some((star, from)) => {
                *from += 1;
                (p, n) = (*star, *from);
            }
            None => return false,
        }
    }
}

/// Length of the pattern's first element if it matches `character`.
fn matches_one(pattern: &[u8], character: u8) -> Option<usize> {
    match pattern[0] {
        b'?' => Some(1),
        b'\\' if pattern.len() > 1 => (pattern[1] == character).then_some(2),
        b'[' => match set(pattern) {
            Some(set) => {
                let within = set.ranges.iter().any(|range| range.contains(&character));
                (within != set.negated).then_some(set.length)
            }
            // A bracket that is never closed stands for itself.
            None => (character == b'[').then_some(1),
        },
        literal => (literal == character).then_some(1),
    }
}

/// `[...]` in a pattern.
struct CharacterSet {
    length: usize,
    negated: bool,
    ranges: Vec<RangeInclusive<u8>>,
}

fn set(pattern: &[u8]) -> Option<CharacterSet> {
    let negated = pattern.get(1) == Some(&b'!');
    let first = 1 + usize::from(negated);
    let mut at = first;
    let mut ranges = Vec::new();
    loop {
        let low = *pattern.get(at)?;
        // A bracket right at the beginning is a member.
        if low == b']' && at > first {
            return Some(CharacterSet { length: at + 1, negated, ranges });
        }
        match (pattern.get(at + 1), pattern.get(at + 2)) {
            (Some(b'-'), Some(high)) if *high != b']' => {
                ranges.push(low..=*high);
                at += 3;
            }
            _ => {
                ranges.push(low..=low);
                at += 1;
            }
        }
    }
}

/// Which functions are traced: all, or those that a glob names, but for those that another excludes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Functions to trace; all if empty.
    pub only: Vec<Glob>,
    /// Functions not to trace, whatever `only` says.
    pub except: Vec<Glob>,
}

/// A filter selects nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FilterError {
    /// A glob that names no function, as tracefs refuses it too.
    #[error("no traceable function matches '{pattern}'")]
    NoMatch {
        /// The glob.
        pattern: String,
    },
    /// A glob that names only functions that can't be traced now.
    #[error("'{pattern}' matches only functions that can't be traced: {function} is {why}")]
    Refused {
        /// The glob.
        pattern: String,
        /// The first function that it names.
        function: String,
        /// Why that can't be traced.
        why: &'static str,
    },
    /// All that was named is excluded again.
    #[error("the filters leave no function to trace")]
    NothingLeft,
}

impl Filter {
    /// Whether a function of that name is to be traced.
    #[must_use]
    pub fn selects(&self, name: &str) -> bool {
        (self.only.is_empty() || self.only.iter().any(|glob| glob.matches(name)))
            && !self.except.iter().any(|glob| glob.matches(name))
    }

    /// Whether it asks for functions of certain modules: those may be loaded later, so it is no error
    /// that there are none now.
    #[must_use]
    pub fn names_modules(&self) -> bool {
        self.only.iter().any(Glob::names_modules)
    }

    /// Checks that every glob of `only` names one of `names`, the functions that can be traced, and
    /// that something is left to trace. `refused` are the others, each with the reason.
    ///
    /// # Errors
    /// [`FilterError`].
    pub fn check<'a>(
        &self,
        names: impl Iterator<Item = &'a str> + Clone,
        refused: impl Iterator<Item = (&'a str, &'static str)> + Clone,
    ) -> Result<(), FilterError> {
        for glob in &self.only {
            if names.clone().any(|name| glob.matches(name)) {
                continue;
            }
            let refusal = refused.clone().find(|(name, _)| glob.matches(name));
            if refusal.is_none() && glob.names_modules() {
                continue;
            }
            let pattern = glob.pattern.clone();
            return Err(match refusal {
                Some((name, why)) => FilterError::Refused { pattern, function: name.into(), why },
                None => FilterError::NoMatch { pattern },
            });
        }
        if self.names_modules() || names.clone().any(|name| self.selects(name)) {
            Ok(())
        } else {
            Err(FilterError::NothingLeft)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn globs_match_as_the_kernels_do() {
        let cases: &[(&str, &[&str], &[&str])] = &[
            ("vfs_read", &["vfs_read"], &["vfs_readv", "kvfs_read", ""]),
            ("vfs_*", &["vfs_read", "vfs_"], &["vfs", "xvfs_read"]),
            ("*_read", &["vfs_read", "_read"], &["vfs_readv"]),
            ("*lock*", &["spin_lock", "lock_page", "lock"], &["spin_loc"]),
            ("do_*_at2", &["do_sys_at2", "do_x_at2_at2"], &["do_sys_at", "do_at2"]),
            ("ksys_?rite", &["ksys_write"], &["ksys_rite"]),
            ("ext[234]_*", &["ext4_map", "ext2_"], &["ext5_map"]),
            ("ext[!0-3]_x", &["ext4_x"], &["ext2_x", "ext_x"]),
            ("[]x]a", &["]a", "xa"], &["a"]),
            ("a\\*b", &["a*b"], &["axb"]),
            ("a[b", &["a[b"], &["ab"]),
            ("*", &["", "x"], &[]),
            ("", &[""], &["x"]),
        ];
        for (pattern, yes, no) in cases {
            let glob = Glob::new(pattern);
            yes.iter().for_each(|name| assert!(glob.matches(name), "{pattern} takes {name:?}"));
            no.iter().for_each(|name| assert!(!glob.matches(name), "{pattern} leaves {name:?}"));
        }
    }

    #[test]
    fn a_glob_may_ask_for_functions_of_modules() {
        let cases: &[(&str, &[&str], &[&str])] = &[
            (":mod:ext4", &["ext4_sync_fs [ext4]", "init [ext4]"], &["vfs_read", "x [ext42]"]),
            ("ext4_*:mod:ext4", &["ext4_map [ext4]"], &["ext4_map", "init [ext4]", "ext4_a [x]"]),
            ("*_read", &["vfs_read", "lo_read [loop]"], &["lo_read_x [loop]"]),
            ("*:mod:snd-hda*", &["a [snd_hda]", "b [snd_hda_intel]"], &["a", "a [snd]"]),
            (":mod:", &["a [b]"], &["a"]),
            (":mod:*", &["a [b]"], &["a"]),
            ("*write*:mod:!*", &["vfs_write"], &["vfs_read", "a_write [b]"]),
            (":mod:!ext4", &["vfs_read", "a [b]"], &["a [ext4]"]),
        ];
        for (pattern, yes, no) in cases {
            let glob = Glob::new(pattern);
            yes.iter().for_each(|name| assert!(glob.matches(name), "{pattern} takes {name:?}"));
            no.iter().for_each(|name| assert!(!glob.matches(name), "{pattern} leaves {name:?}"));
        }
    }

    #[test]
    fn a_module_that_is_not_there_yet_is_waited_for() {
        let only = |patterns: &[&str]| Filter {
            only: patterns.iter().map(|pattern| Glob::new(pattern)).collect(),
            except: Vec::new(),
        };
        let names = ["vfs_read"];
        let refused = [("a [far]", "too far away")];
        let check = |patterns: &[&str]| {
            only(patterns).check(names.iter().copied(), refused.iter().copied())
        };
        assert_eq!(check(&[":mod:ext4"]), Ok(()));
        assert_eq!(check(&["vfs_read", "ext4_*:mod:ext4"]), Ok(()));
        assert!(matches!(check(&["ext4_*"]), Err(FilterError::NoMatch { .. })));
        assert!(matches!(check(&["ext4_*:mod:!x"]), Err(FilterError::NoMatch { .. })));
        assert!(matches!(check(&[":mod:far"]), Err(FilterError::Refused { .. })));
    }

    #[test]
    fn a_glob_that_names_nothing_is_an_error() {
        let names = ["vfs_read", "vfs_write"];
        let filter = |only: &[&str], except: &[&str]| Filter {
            only: only.iter().map(|p| Glob::new(p)).collect(),
            except: except.iter().map(|p| Glob::new(p)).collect(),
        };
        let refused = [("do_one_initcall", "init code")];
        let check = |filter: Filter| filter.check(names.iter().copied(), refused.iter().copied());
        assert_eq!(check(filter(&[], &[])), Ok(()));
        assert_eq!(check(filter(&["vfs_*"], &["*read"])), Ok(()));
        assert_eq!(
            check(filter(&["vfs_*", "ext4_*"], &[])),
            Err(FilterError::NoMatch { pattern: "ext4_*".into() })
        );
        assert_eq!(
            check(filter(&["do_*"], &[])).unwrap_err().to_string(),
            "'do_*' matches only functions that can't be traced: do_one_initcall is init code"
        );
        assert_eq!(check(filter(&["*read"], &["vfs*"])), Err(FilterError::NothingLeft));
    }

    proptest! {
        #[test]
        fn any_glob_ends(pattern in r"[\[\]\\*?!a-c-]{0,20}", name in "[a-c*]{0,40}") {
            let glob = Glob::new(&pattern);
            prop_assert!(Glob::new("*").matches(&name) || glob.matches(&name));
        }
    }
}
