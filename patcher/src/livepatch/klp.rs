//! Livepatch modules of the guest's own kind, for plain functions: what kpatch-build and klp-build make.
//!
//! Such a module is a relocatable object like any payload, with a table of the functions that it
//! replaces, symbols that say by their names what they stand for, and code that hands the table to the
//! guest as the module is loaded. Here the table is read instead, and that code is left out.
//!
//! | | kpatch-build | klp-build (Linux 6.19 on) |
//! |---|---|---|
//! | table | `.kpatch.funcs`: `struct kpatch_patch_func` (kmod/patch/kpatch-patch.h) | `.init.klp_objects` and `.init.klp_funcs`: `struct klp_object_ext`, `struct klp_func_ext` (include/linux/livepatch_external.h) |
//! | callbacks | `.kpatch.callbacks.*` | in `struct klp_object_ext` |
//! | module's own code | livepatch-patch-hook.c | scripts/livepatch/init.c |
//!
//! What both have in common is the kernel's (Documentation/livepatch/module-elf-format.rst): symbols
//! `.klp.sym.OBJECT.NAME,POSITION` in the section `SHN_LIVEPATCH`, and relocations for them in sections
//! `.klp.rela.OBJECT.SECTION`, of which a section then has two tables.

use std::sync::Arc;

use object::read::elf::{SectionHeader, Sym};
use object::{Endianness, SectionIndex, SymbolIndex, elf};
use rustc_hash::FxHashMap;

use super::PayloadError;
use super::options::Map;
use super::payload::{MAX_NAME, Section, Sections, Symbols, name};
use super::sections::{Fate, advice};

/// The section number of symbols that the guest's livepatch would resolve (include/linux/elf.h).
const SHN_LIVEPATCH: u16 = 0xff20;

/// What symbols and sections of relocations begin with.
const SYMBOL: &str = ".klp.sym.";
const RELOCATIONS: &str = ".klp.rela.";

/// The kernel itself, among the objects that a livepatch is for.
const KERNEL: &str = "vmlinux";

/// The most functions of a table, and the most symbols that the guest's livepatch would resolve.
const MAX_FUNCTIONS: u64 = 4096;
pub(super) const MAX_SYMBOLS: usize = 4096;

/// An object is a livepatch module that can't be a payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KlpError {
    /// Its table of functions is made by its code.
    #[error(
        "the object is a livepatch module whose code says what it replaces, which nothing from \
         outside can read: build it with kpatch-build or klp-build, or give the object that was \
         compiled from its functions, with --map NEW=OLD for each"
    )]
    NoTable,
    /// It is a module, and none that patches.
    #[error(
        "the object is a kernel module and no livepatch: give the object that was compiled from \
         the functions alone"
    )]
    OtherModule,
    /// It patches a module.
    #[error(
        "the livepatch is for functions of the module {object} too, and only functions of the \
         kernel itself are replaced: build one without them"
    )]
    OtherObject {
        /// The module.
        object: String,
    },
    /// It wants to be called.
    #[error(
        "the livepatch has a callback ({place}), and nobody would call it: build it without, and \
         initialise data statically"
    )]
    Callback {
        /// Where.
        place: String,
    },
    /// It has code of its own for its beginning or its end.
    #[error(
        "the livepatch runs {function} as it is loaded or unloaded, which is not kpatch-build's or \
         klp-build's own code, and nobody would call it: build it without"
    )]
    Initialises {
        /// A function.
        function: String,
    },
    /// Its table is not as the builders make it.
    #[error("the livepatch's table of functions {section} is not sound: entry {entry} {problem}")]
    Table {
        /// The section.
        section: &'static str,
        /// Which of its entries, counted from 0.
        entry: u64,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A symbol does not say what it stands for.
    #[error("the livepatch's symbol {name} is not of the form .klp.sym.OBJECT.NAME,POSITION")]
    Symbol {
        /// The symbol.
        name: Arc<str>,
    },
}

/// What a livepatch module says.
#[derive(Debug)]
pub(super) struct Module {
    /// The numbers of the symbols that replace, and what they replace.
    pub(super) table: Vec<(usize, Map)>,
    /// The release of the kernel that it was built for.
    pub(super) release: Option<String>,
}

/// An object's tables.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    pub(super) file: &'a [u8],
    pub(super) endian: Endianness,
    pub(super) sections: &'a Sections<'a>,
    pub(super) symbols: &'a Symbols<'a>,
}

/// A table of functions as one of the builders makes it.
struct TableFormat {
    section: &'static str,
    /// The size of an entry, and where in it things are, in bytes.
    size: u64,
    new: u64,
    old: u64,
    position: u64,
    /// Where the name of the object is, if entries have one.
    object: Option<u64>,
}

const KPATCH: TableFormat = TableFormat {
    section: ".kpatch.funcs",
    size: 56,
    new: 0,
    old: 40,
    position: 32,
    object: Some(48),
};

const KLP_BUILD: TableFormat = TableFormat {
    section: ".init.klp_funcs",
    size: 24,
    new: 8,
    old: 0,
    position: 16,
    object: None,
};

/// klp-build's objects: their section, the size of one, and where in it things are.
mod objects {
    pub(super) const SECTION: &str = ".init.klp_objects";
    pub(super) const SIZE: u64 = 64;
    pub(super) const NAME: u64 = 0;
    pub(super) const CALLBACKS: [(u64, &str); 4] =
        [(16, "pre_patch"), (24, "post_patch"), (32, "pre_unpatch"), (40, "post_unpatch")];
}

/// Functions by which the builders' own code begins and ends.
const OWN_CODE: [&str; 6] = [
    "patch_init",
    "patch_exit",
    "livepatch_mod_init",
    "livepatch_mod_exit",
    "init_module",
    "cleanup_module",
];

/// A place that a relocation fills with an address.
type Pointers = FxHashMap<u64, (usize, i64)>;

impl Module {
    /// What the object says as a livepatch module; `None` if it is no module at all.
    pub(super) fn read(tables: Tables<'_>) -> Result<Option<Self>, PayloadError> {
        let Some(info) = tables.section(".modinfo")? else { return Ok(None) };
        let info = info.1.data(tables.endian, tables.file)?;
        let value = |key: &str| {
            let pairs = info.split(|byte| *byte == 0);
            let value = pairs.filter_map(|pair| pair.strip_prefix(key.as_bytes())).next()?;
            std::str::from_utf8(value).ok()
        };
        if value("livepatch=").is_none() {
            let is_module = tables.section(".gnu.linkonce.this_module")?.is_some();
            return if is_module { Err(KlpError::OtherModule.into()) } else { Ok(None) };
        }
        let mut format = None;
        for known in [KPATCH, KLP_BUILD] {
            if tables.section(known.section)?.is_some() {
                format = Some(known);
                break;
            }
        }
        let format = format.ok_or(KlpError::NoTable)?;
        tables.check_objects()?;
        tables.check_callbacks()?;
        tables.check_code()?;
        let table = tables.table(&format)?;
        if table.is_empty() {
            return Err(KlpError::NoTable.into());
        }
        let release = value("vermagic=").and_then(|magic| magic.split(' ').next());
        let release = release.filter(|release| release.len() <= MAX_NAME).map(str::to_owned);
        Ok(Some(Self { table, release }))
    }

    /// What becomes of a section that only such a module has; `None` for any other.
    pub(super) fn fate(&self, name: &str) -> Option<Fate> {
        /// What tells one from another here: nothing but beginnings of names.
        const FATES: [(&str, Fate); 14] = [
            (KPATCH.section, Fate::Dropped("the table of functions, which was read")),
            (".kpatch.strings", Fate::Dropped("the table of functions, which was read")),
            (".init.klp_", Fate::Dropped("the table of functions, which was read")),
            (".kpatch.callbacks.", Fate::Dropped("no callbacks are in it")),
            (".kpatch.force", Fate::Dropped("nobody may be inside a replaced function")),
            (".kpatch.ignore.", Fate::Dropped("meant for tools of the build alone")),
            (RELOCATIONS, Fate::Dropped("relocations, which are applied")),
            (".klp.arch.", Fate::Refused(advice::ALTERNATIVES)),
            (".init.text", Fate::Dropped("hands the table to the guest's own livepatch")),
            (".exit.text", Fate::Dropped("takes the table from the guest's own livepatch")),
            (".init.data", Fate::Dropped("of what hands the table to the guest's own livepatch")),
            (".exit.data", Fate::Dropped("of what takes the table from the guest's own livepatch")),
            (".init.eh_frame", Fate::Dropped("the kernel has no use for it")),
            (".codetag.", Fate::Dropped("the guest does not account what payloads allocate")),
        ];
        let mut fates = FATES.iter();
        fates.find(|(beginning, _)| name.starts_with(beginning)).map(|(_, fate)| *fate)
    }
}

/// Whether a symbol of that name is one that the guest's livepatch would resolve.
pub(super) fn is_symbol(name: &str) -> bool {
    name.starts_with(SYMBOL)
}

/// What the symbol of that name in that section number stands for, if it is one that the guest's
/// livepatch would resolve: a map, or `None` for one in a module of the guest's.
pub(super) fn symbol(name: &Arc<str>, section: u16) -> Option<Result<Option<Map>, KlpError>> {
    if section != SHN_LIVEPATCH {
        return None;
    }
    let unsound = || KlpError::Symbol { name: name.clone() };
    // Names of objects have no dots, those of symbols may.
    let parsed = name.strip_prefix(SYMBOL).and_then(|rest| rest.split_once('.'));
    let Some((object, symbol)) = parsed else { return Some(Err(unsound())) };
    let Some((old, position)) = symbol.rsplit_once(',') else { return Some(Err(unsound())) };
    let Ok(position) = position.parse::<u32>() else { return Some(Err(unsound())) };
    let position = Some(position).filter(|position| *position > 0);
    let map = Map { new: name.clone(), old: old.into(), position };
    Some(Ok((object == KERNEL).then_some(map)))
}

impl<'a> Tables<'a> {
    /// The first section of that name.
    fn section(
        self,
        wanted: &str,
    ) -> Result<Option<(SectionIndex, &'a Section<'a>)>, PayloadError> {
        for (index, section) in self.sections.enumerate() {
            if self.sections.section_name(self.endian, section)? == wanted.as_bytes() {
                return Ok(Some((index, section)));
            }
        }
        Ok(None)
    }

    /// Refuses relocations that wait for a module of the guest's.
    fn check_objects(self) -> Result<(), PayloadError> {
        for section in self.sections.iter() {
            let name = name("section", self.sections.section_name(self.endian, section)?)?;
            let object = name.strip_prefix(RELOCATIONS).and_then(|rest| rest.split('.').next());
            if let Some(object) = object.filter(|object| *object != KERNEL) {
                return Err(KlpError::OtherObject { object: object.to_owned() }.into());
            }
        }
        Ok(())
    }

    /// Refuses callbacks as kpatch-build notes them; its sections for them are there also without.
    fn check_callbacks(self) -> Result<(), PayloadError> {
        for section in self.sections.iter() {
            let Some((rows, _)) = section.rela(self.endian, self.file)? else { continue };
            let of = SectionIndex(section.sh_info(self.endian) as usize);
            if rows.is_empty() || of.0 == 0 {
                continue;
            }
            let of = self.sections.section(of)?;
            let name = name("section", self.sections.section_name(self.endian, of)?)?;
            if name.starts_with(".kpatch.callbacks.") {
                return Err(KlpError::Callback { place: name.to_string() }.into());
            }
        }
        Ok(())
    }

    /// Refuses code for the module's beginning and end that is not the builder's own.
    fn check_code(self) -> Result<(), PayloadError> {
        for (index, symbol) in self.symbols.enumerate() {
            if symbol.st_type() != elf::STT_FUNC {
                continue;
            }
            let Some(section) = self.symbols.symbol_section(self.endian, symbol, index)? else {
                continue;
            };
            let section = self.sections.section(section)?;
            let section = self.sections.section_name(self.endian, section)?;
            if !section.starts_with(b".init.text") && !section.starts_with(b".exit.text") {
                continue;
            }
            let function = name("symbol", self.symbols.symbol_name(self.endian, symbol)?)?;
            let whole = function.split('.').next().unwrap_or_default();
            let whole = whole.strip_prefix("__pfx_").unwrap_or(whole);
            if !OWN_CODE.contains(&whole) {
                return Err(KlpError::Initialises { function: function.to_string() }.into());
            }
        }
        Ok(())
    }

    /// The places in a section that the object's own relocations fill, and with what: the number of a
    /// symbol, and how far behind it.
    fn pointers(self, of: SectionIndex) -> Result<Pointers, PayloadError> {
        let mut pointers = Pointers::default();
        for section in self.sections.iter() {
            if section.sh_info(self.endian) as usize != of.0 {
                continue;
            }
            let Some((rows, _)) = section.rela(self.endian, self.file)? else { continue };
            for row in rows {
                let symbol = row.r_sym(self.endian, false) as usize;
                let to = (symbol, row.r_addend.get(self.endian));
                pointers.insert(row.r_offset.get(self.endian), to);
            }
        }
        Ok(pointers)
    }

    /// Reads the table of functions.
    fn table(self, format: &TableFormat) -> Result<Vec<(usize, Map)>, PayloadError> {
        let Some((index, section)) = self.section(format.section)? else { return Ok(Vec::new()) };
        let bytes = section.data(self.endian, self.file)?;
        let pointers = self.pointers(index)?;
        let count = bytes.len() as u64 / format.size;
        let unsound = |entry, problem| KlpError::Table { section: format.section, entry, problem };
        if count > MAX_FUNCTIONS || !(bytes.len() as u64).is_multiple_of(format.size) {
            return Err(unsound(count, "is more than a table has, or cut short").into());
        }
        if format.object.is_none() {
            self.check_klp_build_objects()?;
        }
        let functions = self.functions()?;
        let mut table = Vec::new();
        for entry in 0..count {
            let at = entry * format.size;
            let pointer = |field: u64| pointers.get(&(at + field)).copied();
            let string = |field, problem| -> Result<Arc<str>, PayloadError> {
                let found = pointer(field).map(|to| self.string(to)).transpose()?.flatten();
                Ok(found.ok_or_else(|| unsound(entry, problem))?)
            };
            if let Some(field) = format.object {
                let object = string(field, "does not name an object")?;
                if &*object != KERNEL {
                    return Err(KlpError::OtherObject { object: object.to_string() }.into());
                }
            }
            let old = string(format.old, "does not name a function")?;
            let new = pointer(format.new).map(|to| self.place(to)).transpose()?.flatten();
            let new = new.and_then(|place| functions.get(&place)).copied();
            let new = new.ok_or_else(|| unsound(entry, "has no function to replace it by"))?;
            let at = (at + format.position) as usize;
            let position = bytes[at..].first_chunk().map_or(0, |word| match self.endian {
                Endianness::Little => u64::from_le_bytes(*word),
                Endianness::Big => u64::from_be_bytes(*word),
            });
            let position = u32::try_from(position)
                .map_err(|_| unsound(entry, "is for a symbol at an impossible position"))?;
            let symbol = self.symbols.symbol(SymbolIndex(new))?;
            let new_name = name("symbol", self.symbols.symbol_name(self.endian, symbol)?)?;
            let position = Some(position).filter(|position| *position > 0);
            table.push((new, Map { new: new_name, old, position }));
        }
        Ok(table)
    }

    /// Refuses what klp-build's objects ask for beside plain functions of the kernel.
    fn check_klp_build_objects(self) -> Result<(), PayloadError> {
        let Some((index, section)) = self.section(objects::SECTION)? else {
            return Err(KlpError::NoTable.into());
        };
        let pointers = self.pointers(index)?;
        let len = section.sh_size(self.endian);
        for at in (0..len.min(MAX_FUNCTIONS * objects::SIZE)).step_by(objects::SIZE as usize) {
            // The kernel itself has no name there.
            if let Some(to) = pointers.get(&(at + objects::NAME)) {
                let object = self.string(*to)?.map_or_else(String::new, |name| name.to_string());
                return Err(KlpError::OtherObject { object }.into());
            }
            let mut callbacks = objects::CALLBACKS.iter();
            if let Some((_, place)) =
                callbacks.find(|(field, _)| pointers.contains_key(&(at + field)))
            {
                return Err(KlpError::Callback { place: (*place).to_owned() }.into());
            }
        }
        Ok(())
    }

    /// Where a pointer leads: a section, and how far into it.
    fn place(
        self,
        (symbol, addend): (usize, i64),
    ) -> Result<Option<(SectionIndex, u64)>, PayloadError> {
        let index = SymbolIndex(symbol);
        let symbol = self.symbols.symbol(index)?;
        let section = self.symbols.symbol_section(self.endian, symbol, index)?;
        let at = symbol.st_value(self.endian).checked_add_signed(addend);
        Ok(section.zip(at))
    }

    /// The string that a pointer leads to; `None` if it leads to none.
    fn string(self, to: (usize, i64)) -> Result<Option<Arc<str>>, PayloadError> {
        let Some((section, at)) = self.place(to)? else { return Ok(None) };
        let section = self.sections.section(section)?;
        let bytes = section.data(self.endian, self.file)?;
        let Some(rest) = usize::try_from(at).ok().and_then(|at| bytes.get(at..)) else {
            return Ok(None);
        };
        let rest = &rest[..rest.len().min(MAX_NAME + 1)];
        let Some(len) = rest.iter().position(|byte| *byte == 0).filter(|len| *len > 0) else {
            return Ok(None);
        };
        Ok(Some(name("symbol", &rest[..len])?))
    }

    /// The numbers of the symbols of functions, by where these are: linkers write references to local
    /// functions by their sections.
    fn functions(self) -> Result<FxHashMap<(SectionIndex, u64), usize>, PayloadError> {
        let mut functions = FxHashMap::default();
        for (index, symbol) in self.symbols.enumerate() {
            if symbol.st_type() == elf::STT_FUNC
                && let Some(place) = self.place((index.0, 0))?
            {
                functions.entry(place).or_insert(index.0);
            }
        }
        Ok(functions)
    }
}
