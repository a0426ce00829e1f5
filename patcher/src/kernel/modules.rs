//! The modules that are loaded: which, where their code is, and their symbols.
//!
//! A module may go at any time, and another may take its place. What is read here is what was true at one
//! moment of a guest that runs; whoever writes into a module's code asks again while the guest stands.

use std::ops::Range;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::Kernel;
use super::tasks::Reader;
use super::types::{Types, TypesError};
use crate::addr::Gva;
use crate::mem::PhysMem;

/// A module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its name, as /proc/modules has it.
    pub name: Arc<str>,
    /// Where the kernel keeps what it knows of it (`struct module`).
    pub at: Gva,
    /// The addresses of its code that stays; what only its beginning needs lies elsewhere.
    pub text: Range<Gva>,
    /// How far its life has come.
    pub state: ModuleState,
}

impl Module {
    /// Whether `other`, which was seen at another time, is the same but for its state. One that was loaded
    /// anew into the same memory looks the same, too.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.at == other.at && self.name == other.name && self.text == other.text
    }
}

/// `enum module_state` (include/linux/module.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleState {
    /// It runs.
    Live,
    /// It has been linked and begins.
    Coming,
    /// It ends.
    Going,
    /// It is being put together or taken apart, or in no state that is known.
    Unformed,
}

/// The modules that are loaded can't be told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModulesError {
    /// The list has no name.
    #[error(
        "the kernel does not name its list of modules: it is built without CONFIG_KALLSYMS_ALL, so \
         functions of modules can't be traced"
    )]
    NoList,
    /// It is not known what the kernel keeps of a module, and where.
    #[error("what the kernel keeps of its modules can't be told: {0}")]
    Types(#[from] TypesError),
    /// The list is not one that a kernel makes. A guest that is just unloading a module may show this
    /// once.
    #[error("the kernel's list of modules can't be followed at {at}")]
    Unsound {
        /// Where it ends.
        at: Gva,
    },
}

/// Which module has which symbols.
#[derive(Debug, Default)]
pub struct ModuleSymbols {
    module_of: FxHashMap<Box<str>, Arc<str>>,
}

impl ModuleSymbols {
    /// The module that defines a symbol of that name; the first loaded last, if several do.
    #[must_use]
    pub fn module_of(&self, name: &str) -> Option<Arc<str>> {
        self.module_of.get(name).cloned()
    }

    /// How many names there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.module_of.len()
    }

    /// Whether no module has any symbol, or none could be read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.module_of.is_empty()
    }
}

/// The most modules that are looked at, and the most symbols of all.
const MAX_MODULES: usize = 4096;
pub(super) const MAX_SYMBOLS: u64 = 1 << 19;

/// The most code believed of a module, in bytes: the largest drivers have 10 MiB.
const MAX_TEXT: u64 = 256 << 20;

/// `MODULE_NAME_LEN` (include/linux/module.h).
const MODULE_NAME: usize = 56;
/// `KSYM_NAME_LEN` (include/linux/kallsyms.h).
const SYMBOL_NAME: usize = 512;
/// Bytes of an ELF symbol, and how many of them are read at a time.
const SYMBOL: usize = 24;
const CHUNK: u64 = 512;

/// Distances in `struct module` and `struct mod_kallsyms` (include/linux/module.h), in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields {
    list: u64,
    name: u64,
    state: u64,
    text: u64,
    text_size: u64,
    kallsyms: u64,
    symtab: u64,
    num_symtab: u64,
    strtab: u64,
}

impl Kernel {
    /// The modules that are loaded, in the order of the kernel's list: those that came last first.
    ///
    /// # Errors
    /// [`ModulesError`].
    pub fn modules(&self, ram: &dyn PhysMem) -> Result<Vec<Module>, ModulesError> {
        let mut walk = Walk::new(self, ram)?;
        let mut modules = Vec::new();
        walk.each(|walk, at| {
            modules.push(walk.module(at).ok_or(ModulesError::Unsound { at })?);
            Ok(())
        })?;
        Ok(modules)
    }

    /// The symbols of all modules that are loaded, as far as they can be read: none in a kernel that
    /// does not name its list of modules (no CONFIG_KALLSYMS_ALL) or describe its types.
    #[must_use]
    pub fn module_symbols(&self, ram: &dyn PhysMem) -> ModuleSymbols {
        let mut found = ModuleSymbols::default();
        let Ok(mut walk) = Walk::new(self, ram) else { return found };
        let mut left = MAX_SYMBOLS;
        // What ends early for whatever reason leaves what was found before.
        let _ = walk.each(|walk, at| {
            if let Some(name) = walk.name(at) {
                walk.symbols(at, &mut left, |symbol, _| {
                    found.module_of.insert(symbol.into(), Arc::clone(&name));
                });
            }
            Ok(())
        });
        found
    }

    pub(super) fn module_fields(&self, ram: &dyn PhysMem) -> Result<Fields, ModulesError> {
        self.module_fields.get_or_init(|| self.find_module_fields(ram)).clone()
    }

    fn find_module_fields(&self, ram: &dyn PhysMem) -> Result<Fields, ModulesError> {
        if self.symbols.address("modules").is_none() {
            return Err(ModulesError::NoList);
        }
        let order = self.arch.byte_order();
        let types = Types::read(ram, &self.image, &self.symbols, order)?;
        let module = |field| types.offset("module", field);
        let kallsyms = |field| types.offset("mod_kallsyms", field);
        // From 6.4 on a row of memories, of which the first is the code (MOD_TEXT).
        let text = |new, old| {
            types.first_path(&[
                &[("module", "mem"), ("module_memory", new)],
                &[("module", "core_layout"), ("module_layout", old)],
            ])
        };
        Ok(Fields {
            list: module("list")?,
            name: module("name")?,
            state: module("state")?,
            text: text("base", "base")?,
            text_size: text("size", "text_size")?,
            kallsyms: module("kallsyms")?,
            symtab: kallsyms("symtab")?,
            num_symtab: kallsyms("num_symtab")?,
            strtab: kallsyms("strtab")?,
        })
    }
}

/// Reads what the kernel keeps of its modules.
pub(super) struct Walk<'a> {
    reader: Reader<'a>,
    fields: Fields,
    head: Gva,
}

impl<'a> Walk<'a> {
    pub fn new(kernel: &'a Kernel, ram: &'a dyn PhysMem) -> Result<Self, ModulesError> {
        let head = kernel.symbols.address("modules").ok_or(ModulesError::NoList)?;
        let fields = kernel.module_fields(ram)?;
        Ok(Self { reader: Reader::new(kernel, ram), fields, head })
    }

    /// Hands out where each module is described, until that fails.
    fn each(
        &mut self,
        mut out: impl FnMut(&mut Self, Gva) -> Result<(), ModulesError>,
    ) -> Result<(), ModulesError> {
        let mut link = self.head;
        for _ in 0..MAX_MODULES {
            let next = self.reader.u64(link).map_err(|_| ModulesError::Unsound { at: link })?;
            if next == self.head.0 {
                return Ok(());
            }
            link = Gva(next);
            out(self, Gva(next.wrapping_sub(self.fields.list)))?;
        }
        Err(ModulesError::Unsound { at: link })
    }

    fn name(&mut self, at: Gva) -> Option<Arc<str>> {
        let name = self.string(Gva(at.0.wrapping_add(self.fields.name)), MODULE_NAME)?;
        Some(name.into()).filter(|name: &Arc<str>| !name.is_empty())
    }

    fn module(&mut self, at: Gva) -> Option<Module> {
        let field = |offset: u64| at.checked_add(offset);
        let fields = self.fields;
        let state = match self.reader.u32(field(fields.state)?).ok()? {
            0 => ModuleState::Live,
            1 => ModuleState::Coming,
            2 => ModuleState::Going,
            _ => ModuleState::Unformed,
        };
        let begin = Gva(self.reader.u64(field(fields.text)?).ok()?);
        let len = u64::from(self.reader.u32(field(fields.text_size)?).ok()?);
        // One without code, or with what can't be any, has none.
        let end = begin.checked_add(len).filter(|_| len <= MAX_TEXT).unwrap_or(begin);
        Some(Module { name: self.name(at)?, at, text: begin..end, state })
    }

    /// Hands out the names and values of a module's symbols, at most `left` of them, of which it takes
    /// those that were looked at; `None` where something can't be read.
    pub fn symbols(
        &mut self,
        module: Gva,
        left: &mut u64,
        mut out: impl FnMut(&str, u64),
    ) -> Option<()> {
        let tables = Gva(self.reader.u64(module.checked_add(self.fields.kallsyms)?).ok()?);
        let field = |offset: u64| tables.checked_add(offset);
        let fields = self.fields;
        let symbols = Gva(self.reader.u64(field(fields.symtab)?).ok()?);
        let strings = Gva(self.reader.u64(field(fields.strtab)?).ok()?);
        let count = u64::from(self.reader.u32(field(fields.num_symtab)?).ok()?).min(*left);
        *left -= count;
        let order = self.reader.kernel.arch().byte_order();
        for begin in (0..count).step_by(CHUNK as usize) {
            let mut chunk = vec![0; SYMBOL * (count - begin).min(CHUNK) as usize];
            self.reader.read(symbols.checked_add(begin * SYMBOL as u64)?, &mut chunk).ok()?;
            for symbol in chunk.chunks_exact(SYMBOL) {
                let (at, section) = (symbol.first_chunk::<4>()?, symbol[6..].first_chunk::<2>()?);
                let at = order.u32(*at);
                // What is defined elsewhere, and what has no name.
                if order.u16(*section) == 0 || at == 0 {
                    continue;
                }
                let value = order.u64(*symbol[8..].first_chunk::<8>()?);
                if let Some(symbol) = self.string(strings.checked_add(at.into())?, SYMBOL_NAME) {
                    out(&symbol, value);
                }
            }
        }
        Some(())
    }

    /// The text at `at`, of at most so many bytes with the NUL behind it.
    fn string(&mut self, at: Gva, most: usize) -> Option<String> {
        const PIECE: usize = 32;
        let mut text = Vec::new();
        while text.len() < most {
            // Within a page: what lies behind it need not be mapped.
            let from = at.checked_add(text.len() as u64)?;
            let mut piece = [0; PIECE];
            let len = PIECE - from.0 as usize % PIECE;
            self.reader.read(from, &mut piece[..len]).ok()?;
            let end = piece[..len].iter().position(|byte| *byte == 0);
            text.extend_from_slice(&piece[..end.unwrap_or(len)]);
            if end.is_some() {
                let text = String::from_utf8(text).ok()?;
                return Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic()));
            }
        }
        None
    }
}
