//! A payload as it comes: a relocatable ELF object, read and judged without any guest.

use std::sync::Arc;

use object::elf;
use object::read::elf::{FileHeader, SectionHeader, SectionTable, Sym, SymbolTable};
use object::{Endianness, SectionIndex, SymbolIndex};

use super::klp::{self, KlpError};
use super::options::{Map, OptionsError, PayloadOptions};
use super::sections::{self, Fate, SectionPart};
use crate::arch::relocation::Relocation;
use crate::arch::{self, Arch, ByteOrder};
use crate::trace::filter::Glob;

/// The most bytes of a file.
pub const MAX_FILE: usize = 16 << 20;

/// The most bytes that the contents of a payload take in the guest.
pub const MAX_LOADED: u64 = 16 << 20;

/// The most sections, symbols and relocations.
const MAX_SECTIONS: usize = 1 << 14;
const MAX_SYMBOLS: usize = 1 << 18;
const MAX_RELOCATIONS: usize = 1 << 20;

/// The most that a section is aligned to: a page.
const MAX_ALIGN: u64 = 4096;

/// The most bytes of all names together.
const MAX_NAMES: usize = 32 << 20;

/// The longest name: one longer than the kernel's longest (`KSYM_NAME_LEN`) means nothing to it.
pub(super) const MAX_NAME: usize = 512;

type Header = elf::FileHeader64<Endianness>;
pub(super) type Section<'a> = elf::SectionHeader64<Endianness>;
pub(super) type Sections<'a> = SectionTable<'a, Header>;
pub(super) type Symbols<'a> = SymbolTable<'a, Header>;

/// A payload: functions that are to replace a kernel's, and what they need.
///
/// It is cheap to clone.
#[derive(Debug, Clone)]
pub struct Payload {
    pub(super) object: Arc<Contents>,
}

/// What a payload consists of.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) arch: &'static dyn Arch,
    pub(super) sections: Vec<PayloadSection>,
    pub(super) symbols: Vec<PayloadSymbol>,
    pub(super) options: PayloadOptions,
    pub(super) dropped: Vec<Dropped>,
    /// The functions that replace, by the number of their symbol, and what they replace, where a table
    /// of a livepatch module says it; names then say nothing.
    pub(super) table: Option<Vec<(usize, Map)>>,
}

/// A section that is placed.
#[derive(Debug)]
pub(super) struct PayloadSection {
    pub(super) name: Arc<str>,
    pub(super) part: SectionPart,
    pub(super) align: u64,
    pub(super) len: u64,
    /// What it holds; zeros behind the end of it.
    pub(super) bytes: Vec<u8>,
    pub(super) relocations: Vec<Place>,
}

/// A place that is written when addresses are known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Where in the section.
    pub(super) offset: usize,
    pub(super) relocation: &'static Relocation,
    /// The number of the symbol.
    pub(super) symbol: usize,
    pub(super) addend: i64,
}

/// A symbol of the object's.
#[derive(Debug)]
pub(super) struct PayloadSymbol {
    pub(super) name: Arc<str>,
    pub(super) home: Home,
    pub(super) value: u64,
    pub(super) is_function: bool,
    pub(super) is_variable: bool,
    pub(super) is_weak: bool,
}

/// Where a symbol is defined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    /// Nowhere in the object.
    Undefined,
    /// It is a number.
    Absolute,
    /// In the section of that number among those placed.
    Section(usize),
    /// Where nothing may refer to it, for this reason.
    Unusable(&'static str),
}

/// A section that was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// The section.
    pub section: Arc<str>,
    /// Why that does no harm.
    pub reason: &'static str,
}

/// A file is no payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PayloadError {
    /// The file is longer than any payload.
    #[error("the file has {len} bytes, and a payload has at most {MAX_FILE}")]
    FileTooLarge {
        /// Its length.
        len: usize,
    },
    /// It is no ELF file, or ends too early.
    #[error("the file is no whole ELF object of 64 bits: {0} (is it truncated?)")]
    Malformed(#[from] object::Error),
    /// It is an ELF file of another kind.
    #[error("the file is {found}, not a relocatable object: give what the compiler makes with -c")]
    NotRelocatable {
        /// What it is.
        found: &'static str,
    },
    /// It is for a processor whose guests are not patched.
    #[error(
        "the object is for {order}-endian machine {machine}: payloads are for x86_64, s390x and \
         little-endian aarch64"
    )]
    Machine {
        /// The number or name of the machine.
        machine: String,
        /// Its byte order.
        order: &'static str,
    },
    /// There is more of something than any payload has.
    #[error("the object has {count} {what}, and a payload has at most {most}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// Its contents are larger than any region.
    #[error(
        "the object takes {len:#x} bytes in the guest, and a payload takes at most {MAX_LOADED:#x}"
    )]
    TooLarge {
        /// Bytes that it takes.
        len: u64,
    },
    /// A section is both writable and executable.
    #[error(
        "section {section} is both writable and executable, which nothing in a guest is to be: \
         put code and data into sections of their own"
    )]
    WritableCode {
        /// The section.
        section: Arc<str>,
    },
    /// A section can't be had in a payload.
    #[error("section {section} is not possible in a payload: {advice}")]
    Section {
        /// The section.
        section: Arc<str>,
        /// Why, and what to do instead.
        advice: &'static str,
    },
    /// A section is not as sections are.
    #[error("section {section} {problem}")]
    SectionShape {
        /// The section.
        section: Arc<str>,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A relocation is of a kind that is not known here.
    #[error(
        "section {section} has at {offset:#x} a relocation {kind}, which is not for code of kernels: \
         compile with the kernel's own flags"
    )]
    Relocation {
        /// The section.
        section: Arc<str>,
        /// Where in it.
        offset: u64,
        /// Its name, or its number where it has none.
        kind: String,
    },
    /// A relocation leads out of its section, or to no symbol.
    #[error("section {section} has at {offset:#x} a relocation that {problem}")]
    RelocationShape {
        /// The section.
        section: Arc<str>,
        /// Where in it.
        offset: u64,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Something refers to what is left out.
    #[error("section {section} refers at {offset:#x} to {symbol}, which {problem}")]
    Symbol {
        /// The section.
        section: Arc<str>,
        /// Where in it.
        offset: u64,
        /// What it refers to.
        symbol: Arc<str>,
        /// Why that can't be.
        problem: &'static str,
    },
    /// The name of a symbol or a section is no name.
    #[error("the object has a {what} whose name is too long or not printable: `{name}`")]
    Name {
        /// Symbol or section.
        what: &'static str,
        /// The beginning of the name, escaped.
        name: String,
    },
    /// What the payload says about itself is not understood.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// It is a livepatch module that can't be had as a payload.
    #[error(transparent)]
    Klp(#[from] KlpError),
}

impl Payload {
    /// Reads an object, and judges all that can be judged without a guest.
    ///
    /// # Errors
    /// [`PayloadError`].
    pub fn parse(file: &[u8]) -> Result<Self, PayloadError> {
        if file.len() > MAX_FILE {
            return Err(PayloadError::FileTooLarge { len: file.len() });
        }
        let header = Header::parse(file)?;
        let endian = header.endian()?;
        check_kind(header.e_type(endian))?;
        let arch = find_arch(header.e_machine(endian), endian)?;
        let sections = header.sections(endian, file)?;
        check_count("sections", sections.len(), MAX_SECTIONS)?;
        let symbols = sections.symbols(endian, file, elf::SHT_SYMTAB)?;
        check_count("symbols", symbols.len(), MAX_SYMBOLS)?;
        let tables = klp::Tables { file, endian, sections: &sections, symbols: &symbols };
        let module = klp::Module::read(tables)?;
        let reader = Reader { file, endian, arch, sections, symbols, module };
        Ok(Self { object: Arc::new(reader.read()?) })
    }

    /// The architecture that it was compiled for.
    #[must_use]
    pub fn arch(&self) -> &'static dyn Arch {
        self.object.arch
    }

    /// What it says about itself.
    #[must_use]
    pub fn options(&self) -> &PayloadOptions {
        &self.object.options
    }

    /// The sections that a kernel would load and that are left out here.
    #[must_use]
    pub fn dropped(&self) -> &[Dropped] {
        &self.object.dropped
    }
}

fn check_kind(kind: elf::FileType) -> Result<(), PayloadError> {
    let found = match kind {
        elf::ET_REL => return Ok(()),
        elf::ET_EXEC => "an executable",
        elf::ET_DYN => "a shared library or an executable",
        elf::ET_CORE => "a core dump",
        _ => "no object",
    };
    Err(PayloadError::NotRelocatable { found })
}

fn find_arch(machine: elf::Machine, endian: Endianness) -> Result<&'static dyn Arch, PayloadError> {
    let order = match endian {
        Endianness::Little => ByteOrder::Little,
        Endianness::Big => ByteOrder::Big,
    };
    arch::ALL
        .into_iter()
        .find(|arch| arch.elf_machine() == machine.0 && arch.byte_order() == order)
        .ok_or_else(|| PayloadError::Machine {
            machine: machine.name().map_or_else(|| machine.0.to_string(), str::to_owned),
            order: if endian == Endianness::Big { "big" } else { "little" },
        })
}

fn check_count(what: &'static str, count: usize, most: usize) -> Result<(), PayloadError> {
    if count <= most { Ok(()) } else { Err(PayloadError::TooMany { what, count, most }) }
}

pub(super) fn name(what: &'static str, bytes: &[u8]) -> Result<Arc<str>, PayloadError> {
    match std::str::from_utf8(bytes) {
        Ok(name) if bytes.len() <= MAX_NAME && bytes.iter().all(u8::is_ascii_graphic) => {
            Ok(name.into())
        }
        _ => {
            let name = bytes[..bytes.len().min(64)].escape_ascii().to_string();
            Err(PayloadError::Name { what, name })
        }
    }
}

/// Reads an object's tables.
struct Reader<'a> {
    file: &'a [u8],
    endian: Endianness,
    arch: &'static dyn Arch,
    sections: Sections<'a>,
    symbols: Symbols<'a>,
    /// What it says as a livepatch module, if it is one.
    module: Option<klp::Module>,
}

/// What becomes of each section of the file, by its number there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    Placed(usize),
    Out,
}

impl Reader<'_> {
    fn read(&self) -> Result<Contents, PayloadError> {
        let mut contents = Contents {
            arch: self.arch,
            sections: Vec::new(),
            symbols: Vec::new(),
            options: PayloadOptions::default(),
            dropped: Vec::new(),
            table: None,
        };
        let mut kept = vec![Kept::Out; self.sections.len()];
        let mut loaded = 0;
        for (index, section) in self.sections.enumerate() {
            if let Some(placed) = self.read_section(section, &mut contents, &mut loaded)? {
                kept[index.0] = Kept::Placed(contents.sections.len());
                contents.sections.push(placed);
            }
        }
        if let Some(module) = &self.module {
            contents.table = Some(module.table.clone());
            contents.options.consistent = true;
            contents.options.releases.extend(module.release.as_deref().map(Glob::new));
        }
        let mut names = 0;
        for (index, symbol) in self.symbols.enumerate() {
            let symbol = self.read_symbol(index, symbol, &kept, &mut contents.options.maps)?;
            names += symbol.name.len();
            check_count("bytes of names", names, MAX_NAMES)?;
            contents.symbols.push(symbol);
        }
        let mut count = 0;
        for section in self.sections.iter() {
            if let Some(Kept::Placed(of)) = kept.get(section.sh_info(self.endian) as usize) {
                self.read_relocations(section, *of, &mut contents, &mut count)?;
            }
        }
        Ok(contents)
    }

    /// A section that is placed; `None` for any other.
    fn read_section(
        &self,
        section: &Section<'_>,
        contents: &mut Contents,
        loaded: &mut u64,
    ) -> Result<Option<PayloadSection>, PayloadError> {
        let flags = section.sh_flags(self.endian);
        let is_loaded = flags.contains(elf::SHF_ALLOC);
        let name = name("section", self.sections.section_name(self.endian, section)?)?;
        if !is_loaded && &*name != sections::OPTIONS_SECTION {
            return Ok(None);
        }
        let len = section.sh_size(self.endian);
        if flags.contains(elf::SHF_WRITE) && flags.contains(elf::SHF_EXECINSTR) {
            return Err(PayloadError::WritableCode { section: name });
        }
        let own = self.module.as_ref().and_then(|module| module.fate(&name));
        let part = match own.unwrap_or_else(|| sections::fate(&name, flags)) {
            Fate::Placed(part) => part,
            Fate::Options => {
                if contents.options != PayloadOptions::default() {
                    let problem = "is there twice";
                    return Err(PayloadError::SectionShape { section: name, problem });
                }
                contents.options = PayloadOptions::parse(section.data(self.endian, self.file)?)?;
                return Ok(None);
            }
            Fate::Dropped(reason) => {
                contents.dropped.push(Dropped { section: name, reason });
                return Ok(None);
            }
            // Nothing is lost with an empty one.
            Fate::Refused(_) if len == 0 => return Ok(None),
            Fate::Refused(advice) => return Err(PayloadError::Section { section: name, advice }),
        };
        let shape = |problem| PayloadError::SectionShape { section: Arc::clone(&name), problem };
        let align = section.sh_addralign(self.endian).max(1);
        if !align.is_power_of_two() || align > MAX_ALIGN {
            return Err(shape("is aligned to no power of two up to 4096"));
        }
        if flags.contains(elf::SHF_COMPRESSED) {
            return Err(shape("is compressed, which only sections for debuggers may be"));
        }
        // Sections of a made-up file may share its bytes, so that they take more than the file has.
        *loaded = loaded.saturating_add(len).saturating_add(align);
        if *loaded > MAX_LOADED {
            return Err(PayloadError::TooLarge { len: *loaded });
        }
        let bytes = match section.sh_type(self.endian) {
            elf::SHT_PROGBITS => section.data(self.endian, self.file)?.to_vec(),
            elf::SHT_NOBITS => Vec::new(),
            _ => return Err(shape("is of a type that holds neither code nor data")),
        };
        Ok(Some(PayloadSection { name, part, align, len, bytes, relocations: Vec::new() }))
    }

    fn read_symbol(
        &self,
        index: SymbolIndex,
        symbol: &elf::Sym64<Endianness>,
        kept: &[Kept],
        maps: &mut Vec<Map>,
    ) -> Result<PayloadSymbol, PayloadError> {
        let kind = symbol.st_type();
        let home = match self.symbols.symbol_section(self.endian, symbol, index)? {
            Some(SectionIndex(section)) => match kept.get(section) {
                Some(Kept::Placed(section)) => Home::Section(*section),
                _ => Home::Unusable("lies in a section that is not loaded"),
            },
            None => match symbol.st_shndx(self.endian) {
                elf::SHN_UNDEF => Home::Undefined,
                elf::SHN_ABS => Home::Absolute,
                elf::SHN_COMMON => Home::Unusable("has no place yet: compile with -fno-common"),
                _ => Home::Unusable("lies in no section that is known here"),
            },
        };
        let home = match kind {
            elf::STT_GNU_IFUNC => Home::Unusable("is a function that is chosen as it is called"),
            elf::STT_TLS => Home::Unusable("is thread-local, and the kernel has no such data"),
            _ => home,
        };
        let mut name = name("symbol", self.symbols.symbol_name(self.endian, symbol)?)?;
        if name.is_empty()
            && let Home::Section(_) = home
            && let Some(section) = self.symbols.symbol_section(self.endian, symbol, index)?
        {
            let section = self.sections.section(section)?;
            name = self::name("section", self.sections.section_name(self.endian, section)?)?;
        }
        let home = match klp::symbol(&name, symbol.st_shndx(self.endian).0) {
            None => home,
            Some(map) => match map? {
                Some(map) => {
                    maps.push(map);
                    check_count("livepatch symbols", maps.len(), klp::MAX_SYMBOLS)?;
                    Home::Undefined
                }
                None => Home::Unusable("is a symbol of a module, which may go"),
            },
        };
        Ok(PayloadSymbol {
            name,
            home,
            value: symbol.st_value(self.endian),
            is_function: kind == elf::STT_FUNC,
            is_variable: kind == elf::STT_OBJECT,
            is_weak: symbol.is_weak(),
        })
    }

    /// The relocations of the section `of`, if `table` holds any.
    fn read_relocations(
        &self,
        table: &Section<'_>,
        of: usize,
        contents: &mut Contents,
        count: &mut usize,
    ) -> Result<(), PayloadError> {
        let Contents { sections, symbols, .. } = contents;
        let section = &mut sections[of];
        match table.sh_type(self.endian) {
            elf::SHT_RELA => {}
            elf::SHT_REL | elf::SHT_CREL | elf::SHT_RELR => {
                let problem = "has relocations without addends, as compilers for kernels make none";
                return Err(PayloadError::SectionShape { section: section.name.clone(), problem });
            }
            _ => return Ok(()),
        }
        let Some((rows, _)) = table.rela(self.endian, self.file)? else { return Ok(()) };
        *count += rows.len();
        check_count("relocations", *count, MAX_RELOCATIONS)?;
        for row in rows {
            let place = self.read_place(row, section, symbols)?;
            let hook = self.arch.compiler_hooks().contains(&&*symbols[place.symbol].name);
            if hook && self.arch.silence_call(&mut section.bytes, place.offset) {
                continue;
            }
            if place.relocation.len > 0 {
                section.relocations.push(place);
            }
        }
        Ok(())
    }

    fn read_place(
        &self,
        row: &elf::Rela64<Endianness>,
        section: &PayloadSection,
        symbols: &[PayloadSymbol],
    ) -> Result<Place, PayloadError> {
        let at = row.r_offset.get(self.endian);
        let kind = row.r_type(self.endian, false);
        let known = self.arch.relocations().iter().find(|known| known.kind == kind.0);
        let Some(relocation) = known else {
            return Err(PayloadError::Relocation {
                section: section.name.clone(),
                offset: at,
                kind: self.arch.relocation_name(kind.0),
            });
        };
        let shape = |problem| PayloadError::RelocationShape {
            section: section.name.clone(),
            offset: at,
            problem,
        };
        let end =
            at.checked_add(relocation.len as u64).filter(|end| *end <= section.bytes.len() as u64);
        end.ok_or_else(|| shape("lies behind the section's end"))?;
        let symbol = row.r_sym(self.endian, false) as usize;
        let named =
            symbols.get(symbol).ok_or_else(|| shape("refers to a symbol that is not there"))?;
        let problem = match named.home {
            Home::Unusable(problem) if relocation.len > 0 => problem,
            _ => {
                let addend = row.r_addend.get(self.endian);
                return Ok(Place { offset: at as usize, relocation, symbol, addend });
            }
        };
        let (section, symbol) = (section.name.clone(), named.name.clone());
        Err(PayloadError::Symbol { section, offset: at, symbol, problem })
    }
}
