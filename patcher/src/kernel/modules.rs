//! The symbols of modules.
//!
//! Nothing of ours refers to them, since a module may go. They serve to say where a name is that the
//! kernel itself lacks.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::Kernel;
use super::tasks::Reader;
use super::types::Types;
use crate::addr::Gva;
use crate::mem::PhysMem;

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
const MAX_SYMBOLS: u64 = 1 << 19;

/// `MODULE_NAME_LEN` (include/linux/module.h).
const MODULE_NAME: usize = 56;
/// `KSYM_NAME_LEN` (include/linux/kallsyms.h).
const SYMBOL_NAME: usize = 512;
/// Bytes of an ELF symbol, and how many of them are read at a time.
const SYMBOL: usize = 24;
const CHUNK: u64 = 512;

/// Distances in `struct module` and `struct mod_kallsyms` (include/linux/module.h), in bytes.
struct Fields {
    list: u64,
    name: u64,
    kallsyms: u64,
    symtab: u64,
    num_symtab: u64,
    strtab: u64,
}

impl Kernel {
    /// The symbols of all modules that are loaded, as far as they can be read: none in a kernel that
    /// does not name its list of modules (no CONFIG_KALLSYMS_ALL) or describe its types.
    #[must_use]
    pub fn module_symbols(&self, ram: &dyn PhysMem) -> ModuleSymbols {
        let mut found = ModuleSymbols::default();
        let Some(head) = self.symbols.address("modules") else { return found };
        let Some(fields) = self.module_fields(ram) else { return found };
        let mut walk = Walk { reader: Reader::new(self, ram), fields, left: MAX_SYMBOLS };
        let mut link = head;
        for _ in 0..MAX_MODULES {
            // What ends early for whatever reason leaves what was found before.
            match walk.reader.u64(link) {
                Ok(next) if next != head.0 => link = Gva(next),
                _ => break,
            }
            let module = link - walk.fields.list;
            walk.add(module, &mut found);
        }
        found
    }

    fn module_fields(&self, ram: &dyn PhysMem) -> Option<Fields> {
        let order = self.arch.byte_order();
        let types = Types::read(ram, &self.image, &self.symbols, order).ok()?;
        let module = |field| types.offset("module", field).ok();
        let kallsyms = |field| types.offset("mod_kallsyms", field).ok();
        Some(Fields {
            list: module("list")?,
            name: module("name")?,
            kallsyms: module("kallsyms")?,
            symtab: kallsyms("symtab")?,
            num_symtab: kallsyms("num_symtab")?,
            strtab: kallsyms("strtab")?,
        })
    }
}

struct Walk<'a> {
    reader: Reader<'a>,
    fields: Fields,
    /// How many symbols are still looked at.
    left: u64,
}

impl Walk<'_> {
    /// Adds the symbols of a module; `None` where something can't be read.
    fn add(&mut self, module: Gva, found: &mut ModuleSymbols) -> Option<()> {
        let name: Arc<str> = self.string(module + self.fields.name, MODULE_NAME)?.into();
        let tables = Gva(self.reader.u64(module + self.fields.kallsyms).ok()?);
        let symbols = Gva(self.reader.u64(tables + self.fields.symtab).ok()?);
        let strings = Gva(self.reader.u64(tables + self.fields.strtab).ok()?);
        let count = u64::from(self.reader.u32(tables + self.fields.num_symtab).ok()?);
        let count = count.min(self.left);
        self.left -= count;
        let order = self.reader.kernel.arch().byte_order();
        for begin in (0..count).step_by(CHUNK as usize) {
            let mut chunk = vec![0; SYMBOL * (count - begin).min(CHUNK) as usize];
            self.reader.read(symbols + begin * SYMBOL as u64, &mut chunk).ok()?;
            for symbol in chunk.chunks_exact(SYMBOL) {
                let (at, section) = (symbol.first_chunk::<4>()?, symbol[6..].first_chunk::<2>()?);
                let at = order.u32(*at);
                // What is defined elsewhere, and what has no name.
                if order.u16(*section) == 0 || at == 0 {
                    continue;
                }
                if let Some(symbol) = self.string(strings + u64::from(at), SYMBOL_NAME) {
                    found.module_of.insert(symbol.into(), Arc::clone(&name));
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
            let from = at + text.len() as u64;
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
