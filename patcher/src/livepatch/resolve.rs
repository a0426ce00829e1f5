//! What a payload's names stand for in a kernel.

use std::cell::OnceCell;
use std::ops::Range;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::errors::{ResolveError, ResolveErrors};
use super::klp;
use super::link::Layout;
use super::options::Map;
use super::payload::{Contents, Home, Payload, PayloadSymbol};
use super::remarks::{self, Remark};
use super::replace::{self, Replacement};
use crate::addr::Gva;
use crate::arch::{Arch, ReturnForm};
use crate::kernel::{Kernel, ReturnFormError, Symbol, Symbols};
use crate::mem::PhysMem;
use crate::region::PayloadSizes;

/// Tells the module that has a symbol of that name.
pub type ModuleOf<'a> = dyn Fn(&str) -> Option<Arc<str>> + 'a;

/// What a payload needs to know of the kernel that it is for.
pub struct KernelView<'a> {
    /// The architecture that it runs on.
    pub arch: &'static dyn Arch,
    /// Its symbols.
    pub symbols: &'a Symbols,
    /// Its text, but for that which is freed after boot.
    pub text: Range<Gva>,
    /// How its functions return.
    pub returns: ReturnForm,
    /// The module that has a symbol of that name, for what the kernel itself does not have.
    pub modules: Box<ModuleOf<'a>>,
}

impl KernelView<'_> {
    pub(super) fn module_of(&self, name: &str) -> Option<Arc<str>> {
        (self.modules)(name)
    }
}

/// A payload for a kernel: everything but its own addresses is known.
#[derive(Debug, Clone)]
pub struct Resolved {
    pub(super) object: Arc<Contents>,
    pub(super) replacements: Vec<Replacement>,
    /// The number of the symbol that each replaces by.
    pub(super) new: Vec<usize>,
    /// What each symbol stands for; [`Target::Unused`] where nothing refers to it.
    pub(super) targets: Vec<Target>,
    pub(super) layout: Layout,
    remarks: Vec<Remark>,
}

/// What a symbol stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// Nothing refers to it.
    Unused,
    /// So far into a section of the payload's.
    Section(usize, u64),
    /// An address of the kernel's, or a number.
    Address(u64),
    /// A return: jumps there become one; the address is that of the kernel's thunk, if it has one, for
    /// whatever else leads there.
    PlainReturn(Option<u64>),
}

impl Payload {
    /// Finds what the payload replaces in a kernel, and what it refers to. `maps` are the operator's;
    /// where the payload says something else about the same name, they count.
    ///
    /// # Errors
    /// Everything that does not fit.
    pub fn resolve(
        &self,
        kernel: &KernelView<'_>,
        maps: &[Map],
    ) -> Result<Resolved, ResolveErrors> {
        let object = Arc::clone(&self.object);
        let (mine, theirs) = (object.arch.name(), kernel.arch.name());
        if mine != theirs {
            let error = ResolveError::Architecture { object: mine, kernel: theirs };
            return Err(ResolveErrors(vec![error]));
        }
        let mut errors = Vec::new();
        let maps = merge(&object.options.maps, maps);
        let found = replace::find(&object, kernel, &maps, &mut errors);
        let targets = Targets { object: &object, kernel, maps: &maps }.find(&mut errors);
        if found.is_empty() && errors.is_empty() {
            errors.push(ResolveError::ReplacesNothing);
        }
        if !errors.is_empty() {
            return Err(ResolveErrors(errors));
        }
        let (new, replacements): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        let layout = Layout::new(&object);
        let remarks = remarks::find(&object, kernel, &replacements);
        Ok(Resolved { object, replacements, new, targets, layout, remarks })
    }
}

impl Resolved {
    /// How much room the payload needs.
    #[must_use]
    pub fn sizes(&self) -> PayloadSizes {
        self.layout.sizes
    }

    /// What may be meant otherwise.
    #[must_use]
    pub fn remarks(&self) -> &[Remark] {
        &self.remarks
    }

    /// Whether nobody may stand in a replaced function as the payload is applied: it says so, or it
    /// replaces several.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        self.object.options.consistent || self.replacements.len() > 1
    }

    /// The functions that are replaced.
    #[must_use]
    pub fn replacements(&self) -> &[Replacement] {
        &self.replacements
    }
}

/// The author's maps, but for what the operator says otherwise, and the operator's.
fn merge(author: &[Map], operator: &[Map]) -> Vec<Map> {
    let named: FxHashSet<&str> = operator.iter().map(|map| &*map.new).collect();
    let kept = author.iter().filter(|map| !named.contains(&*map.new));
    let mut all: Vec<Map> = Vec::new();
    for map in kept.chain(operator) {
        if !all.contains(map) {
            all.push(map.clone());
        }
    }
    all
}

/// The addresses of the kernel's symbols of one name, by position.
pub(super) struct Positions {
    all: Vec<Gva>,
    /// Those that are of the wanted kind, each address once.
    wanted: Vec<Gva>,
}

impl Positions {
    /// Positions count all symbols of the name, as livepatch does; only those that `wants` chooses
    /// are candidates where no position is given.
    pub(super) fn of(symbols: &Symbols, name: &str, wants: impl Fn(&Symbol<'_>) -> bool) -> Self {
        let (mut all, mut wanted) = (Vec::new(), Vec::new());
        for symbol in symbols.named(name) {
            all.push(symbol.address);
            if wants(&symbol) && !wanted.contains(&symbol.address) {
                wanted.push(symbol.address);
            }
        }
        Self { all, wanted }
    }

    /// The address that is meant; `None` if there is none.
    pub(super) fn choose(&self, map: &Map) -> Result<Option<Gva>, ResolveError> {
        if let Some(position) = map.position {
            let chosen = self.all.get((position as usize).wrapping_sub(1));
            return match chosen {
                Some(at) => Ok(Some(*at)),
                None if self.all.is_empty() => Ok(None),
                None => Err(ResolveError::NoSuchPosition {
                    name: map.old.clone(),
                    position,
                    count: self.all.len(),
                }),
            };
        }
        match self.wanted[..] {
            [] => Ok(None),
            [one] => Ok(Some(one)),
            _ => Err(ResolveError::Ambiguous {
                name: map.old.clone(),
                new: map.new.clone(),
                candidates: self.all.clone(),
            }),
        }
    }
}

/// Looks up what relocations refer to.
struct Targets<'a> {
    object: &'a Contents,
    kernel: &'a KernelView<'a>,
    maps: &'a [Map],
}

impl Targets<'_> {
    fn find(&self, errors: &mut Vec<ResolveError>) -> Vec<Target> {
        let maps: FxHashMap<&str, &Map> = self.maps.iter().map(|map| (&*map.new, map)).collect();
        let mut targets = vec![Target::Unused; self.object.symbols.len()];
        let places = self.object.sections.iter().flat_map(|section| &section.relocations);
        let mut used: Vec<usize> = places.map(|place| place.symbol).collect();
        used.sort_unstable();
        used.dedup();
        // A name is looked up once, however many symbols of a made-up object have it.
        let mut looked_up: FxHashMap<&str, Option<Target>> = FxHashMap::default();
        for index in used {
            let symbol = &self.object.symbols[index];
            let mut look_up = || {
                let target = self.target(symbol, maps.get(&*symbol.name).copied());
                target.map_err(|error| errors.push(error)).ok()
            };
            let target = match symbol.home {
                Home::Undefined => *looked_up.entry(&symbol.name).or_insert_with(look_up),
                _ => look_up(),
            };
            targets[index] = target.unwrap_or(Target::Unused);
        }
        let mapped = looked_up.into_keys().collect();
        self.check_maps(&mapped, errors);
        targets
    }

    /// Every map must name something of the payload's. What a livepatch module's table says is not for
    /// maps to change, and its symbols need not all be referred to.
    fn check_maps(&self, referred: &FxHashSet<&str>, errors: &mut Vec<ResolveError>) {
        let functions: FxHashSet<&str> = self
            .object
            .symbols
            .iter()
            .filter(|symbol| symbol.is_function && matches!(symbol.home, Home::Section(_)))
            .filter(|_| self.object.table.is_none())
            .map(|symbol| &*symbol.name)
            .collect();
        for map in self.maps.iter().filter(|map| !klp::is_symbol(&map.new)) {
            if !functions.contains(&*map.new) && !referred.contains(&*map.new) {
                errors.push(ResolveError::NothingToMap { new: map.new.clone() });
            }
        }
    }

    fn target(&self, symbol: &PayloadSymbol, map: Option<&Map>) -> Result<Target, ResolveError> {
        let name = &symbol.name;
        if self.kernel.arch.payload_return_thunk() == Some(name) {
            return Ok(match self.kernel.returns {
                ReturnForm::Thunk(at) => Target::Address(at.0),
                ReturnForm::Plain => {
                    Target::PlainReturn(self.kernel.symbols.address(name).map(|at| at.0))
                }
            });
        }
        match symbol.home {
            // A copy of a thunk in the object does for kernels that have none.
            Home::Section(section) => {
                let guests = self.kernel.symbols.address(name);
                Ok(match guests.filter(|_| self.kernel.arch.is_branch_thunk(name)) {
                    Some(at) => Target::Address(at.0),
                    None => Target::Section(section, symbol.value),
                })
            }
            Home::Absolute => Ok(Target::Address(symbol.value)),
            // The first symbol has no name and stands for no address.
            Home::Undefined if name.is_empty() => Ok(Target::Address(0)),
            Home::Undefined => self.guests(symbol, map),
            // Nothing refers to such a one: the payload would have been refused.
            Home::Unusable(_) => Ok(Target::Unused),
        }
    }

    /// The address of the kernel's symbol that is meant.
    fn guests(&self, symbol: &PayloadSymbol, map: Option<&Map>) -> Result<Target, ResolveError> {
        let same = Map { new: symbol.name.clone(), old: symbol.name.clone(), position: None };
        let map = map.unwrap_or(&same);
        let positions = Positions::of(self.kernel.symbols, &map.old, |_| true);
        match positions.choose(map)? {
            Some(at) => Ok(Target::Address(at.0)),
            None if symbol.is_weak => Ok(Target::Address(0)),
            None => Err(match self.kernel.module_of(&map.old) {
                Some(module) => ResolveError::InModule { name: map.old.clone(), module },
                None => ResolveError::Undefined { name: map.old.clone() },
            }),
        }
    }
}

impl Kernel {
    /// What a payload needs to know of this kernel, which is [ready](Kernel::readiness). Modules'
    /// symbols are read when the kernel lacks one that is asked for.
    ///
    /// # Errors
    /// [`ReturnFormError`].
    pub fn view<'a>(&'a self, ram: &'a dyn PhysMem) -> Result<KernelView<'a>, ReturnFormError> {
        let modules = OnceCell::new();
        Ok(KernelView {
            arch: self.arch(),
            symbols: self.symbols(),
            text: self.text(),
            returns: self.return_form(ram)?,
            modules: Box::new(move |name| {
                modules.get_or_init(|| self.module_symbols(ram)).module_of(name)
            }),
        })
    }
}
