//! Which functions of a payload replace which of the kernel's.

use std::ops::Range;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::errors::ResolveError;
use super::options::Map;
use super::payload::{Contents, Home};
use super::resolve::{KernelView, Positions};
use super::sections::SectionPart;
use crate::addr::Gva;
use crate::kernel::Symbol;

/// A function of the kernel's that is replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replacement {
    /// Its name.
    pub name: Arc<str>,
    /// The payload's function that replaces it.
    pub new: Arc<str>,
    /// Where it is: from its entry to the next symbol.
    pub old: Range<Gva>,
    /// Parts of it that the compiler put elsewhere (`.cold`, `.part`). Where several functions have
    /// the name, nothing tells whose such a part is, and it counts for each.
    pub parts: Vec<Range<Gva>>,
    /// Copies of it that the compiler fitted to some of its callers (`.constprop`, `.isra`), which are
    /// functions of their own and not replaced.
    pub copies: Vec<Arc<str>>,
}

/// What is behind a function's name when the compiler has split or copied it.
const SPLIT: [&str; 2] = [".cold", ".part"];
const COPIED: [&str; 2] = [".constprop", ".isra"];

/// The function that `name` is a part or a copy of, and the rest of the name.
fn split(name: &str) -> Option<(&str, &str)> {
    name.find('.').filter(|at| *at > 0).map(|at| name.split_at(at))
}

fn begins(rest: &str, with: &[&str]) -> bool {
    with.iter().any(|beginning| rest.starts_with(beginning))
}

/// Whether a function of that name can replace one of the same name: the compiler's own names, and
/// those of padding (`__pfx_`), mean nothing outside the object.
fn is_own_name(name: &str) -> bool {
    !name.contains('.') && !name.starts_with("__pfx_") && !name.starts_with("__cfi_")
}

fn is_function(symbol: &Symbol<'_>) -> bool {
    matches!(symbol.kind, b't' | b'T' | b'w' | b'W')
}

/// Whether a function of that name replaces the kernel's of the same name, where nothing says
/// otherwise.
fn replaces_its_namesake(kernel: &KernelView<'_>, name: &str) -> bool {
    is_own_name(name)
        && !kernel.arch.is_branch_thunk(name)
        && kernel.arch.payload_return_thunk() != Some(name)
        && kernel.symbols.named(name).any(|symbol| is_function(&symbol))
}

/// A function of the kernel's: its name and where it is.
type Entry = (Arc<str>, Range<Gva>);

/// A replacement and the number of the payload's symbol.
pub(super) type Numbered = (usize, Replacement);

/// Finds the functions that are replaced, in the order of the object's symbols.
pub(super) fn find(
    object: &Contents,
    kernel: &KernelView<'_>,
    maps: &[Map],
    errors: &mut Vec<ResolveError>,
) -> Vec<Numbered> {
    let helpers: FxHashSet<&str> = object.options.helpers.iter().map(|name| &**name).collect();
    let mut by_new: FxHashMap<&str, Vec<&Map>> = FxHashMap::default();
    for map in maps {
        by_new.entry(&map.new).or_default().push(map);
    }
    let mut by_index: FxHashMap<usize, Vec<&Map>> = FxHashMap::default();
    for (index, map) in object.table.iter().flatten() {
        by_index.entry(*index).or_default().push(map);
    }
    let mut found: Vec<Numbered> = Vec::new();
    let mut taken: FxHashMap<Gva, Arc<str>> = FxHashMap::default();
    // A name is looked up once, however many functions of a made-up object have it.
    let mut looked_up: FxHashMap<&str, Vec<Entry>> = FxHashMap::default();
    for (index, symbol) in object.symbols.iter().enumerate() {
        let Home::Section(section) = symbol.home else { continue };
        if !symbol.is_function || object.sections[section].part != SectionPart::Text {
            continue;
        }
        let name = &symbol.name;
        // A table says which symbol it means, and maps which name.
        let tabled = object.table.as_ref().map(|_| {
            let maps = by_index.get(&index).into_iter().flatten();
            maps.filter_map(|map| entry(kernel, map, errors)).collect::<Vec<_>>()
        });
        let wanted = match &tabled {
            Some(wanted) => wanted,
            None => looked_up.entry(name).or_insert_with(|| {
                let own = Map { new: name.clone(), old: name.clone(), position: None };
                let maps = match by_new.get(&**name) {
                    Some(maps) => maps.clone(),
                    None if helpers.contains(&**name) || !replaces_its_namesake(kernel, name) => {
                        vec![]
                    }
                    None => vec![&own],
                };
                maps.into_iter().filter_map(|map| entry(kernel, map, errors)).collect()
            }),
        };
        for (old_name, old) in wanted.iter().cloned() {
            if let Some(first) = taken.insert(old.start, name.clone()) {
                let (old, second) = (old_name, name.clone());
                errors.push(ResolveError::TwoDefinitions { old, first, second });
                continue;
            }
            let new = name.clone();
            let (parts, copies) = (Vec::new(), Vec::new());
            found.push((index, Replacement { name: old_name, new, old, parts, copies }));
        }
    }
    add_parts(kernel, &mut found);
    found
}

/// Where the function is that `map` says is to be replaced.
fn entry(kernel: &KernelView<'_>, map: &Map, errors: &mut Vec<ResolveError>) -> Option<Entry> {
    let positions = Positions::of(kernel.symbols, &map.old, is_function);
    let at = match positions.choose(map) {
        Ok(Some(at)) => at,
        Ok(None) => {
            let (old, new) = (map.old.clone(), map.new.clone());
            errors.push(match kernel.module_of(&old) {
                Some(module) => ResolveError::InModule { name: old, module },
                None => ResolveError::NoOldFunction { old, new },
            });
            return None;
        }
        Err(error) => {
            errors.push(error);
            return None;
        }
    };
    let end = kernel.symbols.lookup(at).and_then(|place| place.end);
    match end {
        Some(end) if kernel.text.contains(&at) => {
            Some((map.old.clone(), at..end.min(kernel.text.end)))
        }
        _ => {
            errors.push(ResolveError::NotInText { old: map.old.clone(), at });
            None
        }
    }
}

/// Adds the parts and copies of functions, in one pass over all symbols.
fn add_parts(kernel: &KernelView<'_>, found: &mut [Numbered]) {
    let mut of: FxHashMap<Arc<str>, Vec<usize>> = FxHashMap::default();
    for (index, (_, replacement)) in found.iter().enumerate() {
        of.entry(replacement.name.clone()).or_default().push(index);
    }
    if of.is_empty() {
        return;
    }
    for symbol in kernel.symbols.iter().filter(is_function) {
        let Some((whole, rest)) = split(symbol.name) else { continue };
        let Some(indices) = of.get(whole) else { continue };
        for index in indices {
            let replacement = &mut found[*index].1;
            if begins(rest, &SPLIT) {
                let end = kernel.symbols.lookup(symbol.address).and_then(|place| place.end);
                replacement.parts.push(symbol.address..end.unwrap_or(symbol.address));
            } else if begins(rest, &COPIED) {
                replacement.copies.push(symbol.name.into());
            }
        }
    }
}
