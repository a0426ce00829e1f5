//! The functions of modules: whose code an address lies in, and what is called there.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::Kernel;
use super::modules::{MAX_SYMBOLS, Module, ModuleState, ModulesError, Walk};
use crate::addr::Gva;
use crate::mem::PhysMem;

/// The code of all modules that run, with its symbols.
#[derive(Debug, Clone, Default)]
pub struct ModuleCode {
    /// Ascending by address.
    loaded: Vec<Arc<Loaded>>,
}

/// A module that runs.
#[derive(Debug)]
struct Loaded {
    module: Arc<Module>,
    /// Where its symbols are, ascending, and their names in `names`.
    begins: Vec<(u64, Range<u32>)>,
    names: String,
}

/// What an address in a module's code lies in.
#[derive(Debug, Clone, Copy)]
pub struct ModulePlace<'a> {
    /// The module.
    pub module: &'a Arc<Module>,
    /// The name of the symbol that begins at or last before the address.
    pub symbol: &'a str,
    /// Where that begins.
    pub function: Gva,
    /// How far into it the address is, in bytes.
    pub offset: u64,
}

impl fmt::Display for ModulePlace<'_> {
    /// As the kernel writes such a function: with its module behind it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.symbol, self.module.name)
    }
}

impl ModuleCode {
    /// What `address` lies in; of several symbols at one address the first in the module's table, as the
    /// kernel has it. `None` if it is no module's, or in front of all of its symbols.
    #[must_use]
    pub fn lookup(&self, address: Gva) -> Option<ModulePlace<'_>> {
        let after = self.loaded.partition_point(|loaded| loaded.module.text.start <= address);
        let loaded = self.loaded.get(after.checked_sub(1)?)?;
        if !loaded.module.text.contains(&address) {
            return None;
        }
        let above = loaded.begins.partition_point(|(begin, _)| *begin <= address.0);
        let (begin, _) = *loaded.begins.get(above.checked_sub(1)?)?;
        let first = loaded.begins[..above].partition_point(|(other, _)| *other < begin);
        let name = &loaded.begins[first].1;
        Some(ModulePlace {
            module: &loaded.module,
            symbol: &loaded.names[name.start as usize..name.end as usize],
            function: Gva(begin),
            offset: address.0 - begin,
        })
    }

    /// The modules, ascending by address.
    pub fn modules(&self) -> impl Iterator<Item = &Arc<Module>> {
        self.loaded.iter().map(|loaded| &loaded.module)
    }

    /// Takes out the modules that `gone` says are gone.
    pub fn forget(&mut self, mut gone: impl FnMut(&Module) -> bool) {
        self.loaded.retain(|loaded| !gone(&loaded.module));
    }

    /// Those of its modules that `which` picks.
    #[must_use]
    pub fn only(&self, mut which: impl FnMut(&Module) -> bool) -> Self {
        let picked = self.loaded.iter().filter(|loaded| which(&loaded.module));
        Self { loaded: picked.cloned().collect() }
    }

    /// Reads the symbols of those of these modules that run and are not known yet.
    ///
    /// # Errors
    /// [`ModulesError`]; a module of which the symbols can't be read has none.
    pub fn learn(
        &mut self,
        kernel: &Kernel,
        ram: &dyn PhysMem,
        modules: &[Module],
    ) -> Result<(), ModulesError> {
        let mut walk = Walk::new(kernel, ram)?;
        let known: u64 = self.loaded.iter().map(|loaded| loaded.begins.len() as u64).sum();
        let mut left = MAX_SYMBOLS.saturating_sub(known);
        for module in modules.iter().filter(|module| module.state == ModuleState::Live) {
            if module.text.is_empty() || self.modules().any(|known| known.is_same(module)) {
                continue;
            }
            self.loaded.push(Arc::new(Loaded::read(module.clone(), &mut walk, &mut left)));
        }
        self.loaded.sort_by_key(|loaded| loaded.module.text.start);
        Ok(())
    }
}

impl Loaded {
    fn read(module: Module, walk: &mut Walk<'_>, left: &mut u64) -> Self {
        let (mut begins, mut names) = (Vec::new(), String::new());
        walk.symbols(module.at, left, |symbol, value| {
            // An assembler's own labels are nobody's name (is_mapping_symbol()).
            let is_label = symbol.starts_with('$') || symbol.starts_with(".L");
            if module.text.contains(&Gva(value)) && !is_label {
                let begin = names.len() as u32;
                names.push_str(symbol);
                begins.push((value, begin..names.len() as u32));
            }
        });
        // Stable: the first of several at one address stays the first.
        begins.sort_by_key(|(begin, _)| *begin);
        Self { module: Arc::new(module), begins, names }
    }
}

impl Kernel {
    /// The code of all modules that run now.
    ///
    /// # Errors
    /// [`ModulesError`].
    pub fn module_code(&self, ram: &dyn PhysMem) -> Result<ModuleCode, ModulesError> {
        let mut code = ModuleCode::default();
        code.learn(self, ram, &self.modules(ram)?)?;
        Ok(code)
    }
}
