//! Livepatch modules, laid out as kpatch-build and klp-build lay out theirs.
//!
//! They are written here section by section: assemblers make neither symbols in the section
//! `SHN_LIVEPATCH` nor a second table of relocations for a section. What stands in them is what
//! kpatch's create-diff-object and create-klp-module made of a change to fs/proc/cmdline.c of 6.1.

use proptest::prelude::*;

use crate::addr::Gva;
use crate::arch::{self, ReturnForm};
use crate::kernel::Symbols;
use crate::livepatch::{KernelView, KlpError, Map, Payload, PayloadError, ResolveError};
use crate::region::Placement;

const SHN_LIVEPATCH: u16 = 0xff20;
const SHF_RELA_LIVEPATCH: u64 = 0x0010_0000;
const ALLOC: u64 = 2;
const EXECUTED: u64 = 6;

const R_64: u32 = 1;
const R_PC32: u32 = 2;
const R_PLT32: u32 = 4;

/// A relocation: where, which, for which symbol, and how far behind it.
type Rela = (u64, u32, &'static str, i64);

#[derive(Clone)]
struct Section {
    name: &'static str,
    flags: u64,
    bytes: Vec<u8>,
    /// Its own relocations.
    relocations: Vec<Rela>,
    /// Those that the guest's livepatch would apply, and the name of their section.
    livepatch: Option<(&'static str, Vec<Rela>)>,
}

#[derive(Clone)]
struct Object {
    sections: Vec<Section>,
    /// Name, section by its name or none, value, and whether it is a function.
    symbols: Vec<(&'static str, Option<&'static str>, u64, bool)>,
}

fn section(name: &'static str, flags: u64, bytes: &[u8], relocations: &[Rela]) -> Section {
    let relocations = relocations.to_vec();
    Section { name, flags, bytes: bytes.to_vec(), relocations, livepatch: None }
}

impl Object {
    fn section(&mut self, name: &str) -> &mut Section {
        self.sections.iter_mut().find(|section| section.name == name).unwrap()
    }

    fn symbol(&self, name: &str) -> u64 {
        let named = self.symbols.iter().position(|symbol| symbol.0 == name);
        // Behind the first symbol, which is nothing, stands one for each section.
        let number = named.map(|at| at + 1 + self.sections.len()).or_else(|| {
            self.sections.iter().position(|section| section.name == name).map(|at| at + 1)
        });
        number.unwrap_or_else(|| panic!("no symbol {name}")) as u64
    }

    fn relas(&self, list: &[Rela]) -> Vec<u8> {
        let row = |(at, kind, symbol, addend): &Rela| {
            let info = self.symbol(symbol) << 32 | u64::from(*kind);
            [at.to_le_bytes(), info.to_le_bytes(), addend.to_le_bytes()].concat()
        };
        list.iter().flat_map(row).collect()
    }

    /// The file: sections as they are listed, then tables of relocations, symbols and names.
    fn file(&self) -> Vec<u8> {
        let mut names = vec![0];
        let mut name = |text: &str| {
            let at = names.len() as u32;
            names.extend([text.as_bytes(), &[0]].concat());
            at
        };
        // Name, type, flags, bytes, info, size of an entry.
        type Row = (u32, u32, u64, Vec<u8>, u32, u64);
        let rela = 24;
        let mut rows: Vec<Row> = Vec::new();
        for section in &self.sections {
            rows.push((name(section.name), 1, section.flags, section.bytes.clone(), 0, 0));
        }
        for (index, section) in self.sections.iter().enumerate() {
            let of = index as u32 + 1;
            if !section.relocations.is_empty() {
                let bytes = self.relas(&section.relocations);
                rows.push((name(&format!(".rela{}", section.name)), 4, 0x40, bytes, of, rela));
            }
            if let Some((own, list)) = &section.livepatch {
                let flags = SHF_RELA_LIVEPATCH | 0x40 | ALLOC;
                rows.push((name(own), 4, flags, self.relas(list), of, rela));
            }
        }
        let mut symbols = vec![0; 24];
        let mut symbol = |name: u32, info: u8, section: u16, value: u64| {
            symbols.extend(name.to_le_bytes());
            symbols.extend([info, 0]);
            symbols.extend(section.to_le_bytes());
            symbols.extend([value.to_le_bytes(), [0; 8]].concat());
        };
        for index in 0..self.sections.len() {
            symbol(0, 3, index as u16 + 1, 0);
        }
        for (text, home, value, is_function) in &self.symbols {
            let home = match home {
                Some(home) => {
                    let at = self.sections.iter().position(|section| section.name == *home);
                    at.unwrap() as u16 + 1
                }
                None if text.starts_with(".klp.sym.") => SHN_LIVEPATCH,
                None => 0,
            };
            symbol(name(text), if *is_function { 2 } else { 0 }, home, *value);
        }
        let table = rows.len() as u32 + 1;
        rows.push((name(".symtab"), 2, 0, symbols, 1, 24));
        rows.push((name(".strtab"), 3, 0, names, 0, 0));

        let mut file = vec![0; 64];
        let mut headers = vec![0; 64];
        for (name, kind, flags, bytes, info, entry) in &rows {
            file.resize(file.len().next_multiple_of(8), 0);
            let link = match kind {
                4 => table,
                2 => table + 1,
                _ => 0,
            };
            headers.extend([name.to_le_bytes(), kind.to_le_bytes()].concat());
            let (at, len) = (file.len() as u64, bytes.len() as u64);
            headers.extend([*flags, 0, at, len].map(u64::to_le_bytes).concat());
            headers.extend([link.to_le_bytes(), info.to_le_bytes()].concat());
            headers.extend([8, *entry].map(u64::to_le_bytes).concat());
            file.extend(bytes);
        }
        file.resize(file.len().next_multiple_of(8), 0);
        let at = file.len() as u64;
        file.extend(headers);
        file[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
        file[16..20].copy_from_slice(&[1, 0, 62, 0]);
        file[20] = 1;
        file[40..48].copy_from_slice(&at.to_le_bytes());
        file[52] = 64;
        file[58] = 64;
        file[60..62].copy_from_slice(&(table as u16 + 2).to_le_bytes());
        file[62..64].copy_from_slice(&(table as u16 + 1).to_le_bytes());
        file
    }

    fn parse(&self) -> Result<Payload, PayloadError> {
        Payload::parse(&self.file())
    }

    fn refusal(&self) -> KlpError {
        match self.parse().unwrap_err() {
            PayloadError::Klp(error) => error,
            other => panic!("{other}"),
        }
    }
}

/// `call __fentry__; mov saved(%rip),%rax; call seq_puts; jmp __x86_return_thunk`
const CODE: &[u8] =
    &[0xe8, 0, 0, 0, 0, 0x48, 0x8b, 0x05, 0, 0, 0, 0, 0xe8, 0, 0, 0, 0, 0xe9, 0, 0, 0, 0];

const MODINFO: &[u8] =
    b"license=GPL\0livepatch=Y\0depends=\0vermagic=6.1.0-57-cloud-amd64 SMP preempt mod_unload \0";

/// What both builders' modules have in common.
fn module() -> Object {
    let code = &[(1, R_PLT32, "__fentry__", -4), (13, R_PLT32, "seq_puts", -4)];
    let mut text = section(".text.show", EXECUTED, CODE, code);
    text.relocations.push((18, R_PLT32, "__x86_return_thunk", -4));
    // What a linker wrote of the same before objtool made it nothing.
    text.relocations.push((8, 0, ".klp.sym.vmlinux.saved_command_line,0", -4));
    text.livepatch = Some((
        ".klp.rela.vmlinux..text.show",
        vec![(8, R_PC32, ".klp.sym.vmlinux.saved_command_line,0", -4)],
    ));
    Object {
        sections: vec![
            section(".modinfo", ALLOC, MODINFO, &[]),
            text,
            section(".init.text", EXECUTED, &[0xc3], &[]),
            section(".init.data", ALLOC | 1, &[0; 8], &[(0, R_64, "init_module", 0)]),
            section(
                ".gnu.linkonce.this_module",
                ALLOC | 1,
                &[0; 64],
                &[(8, R_64, "init_module", 0)],
            ),
            section(".orc_unwind", ALLOC, &[0; 6], &[]),
            section("__mcount_loc", ALLOC, &[0; 8], &[(0, R_64, ".text.show", 0)]),
        ],
        symbols: vec![
            ("show", Some(".text.show"), 0, true),
            ("init_module", Some(".init.text"), 0, true),
            ("__fentry__", None, 0, false),
            ("seq_puts", None, 0, false),
            ("__x86_return_thunk", None, 0, false),
            (".klp.sym.vmlinux.saved_command_line,0", None, 0, false),
        ],
    }
}

/// A module of kpatch-build's that replaces the second `show` of the kernel's.
fn kpatch_build() -> Object {
    let mut object = module();
    let mut entry = [0; 56];
    entry[32] = 2;
    object.sections.extend([
        section(".kpatch.strings", ALLOC, b"vmlinux\0show\0ext4\0", &[]),
        section(
            ".kpatch.funcs",
            ALLOC,
            &entry,
            &[
                (0, R_64, "show", 0),
                (40, R_64, ".kpatch.strings", 8),
                (48, R_64, ".kpatch.strings", 0),
            ],
        ),
        section(".kpatch.callbacks.pre_patch", ALLOC | 1, &[0; 8], &[]),
        section(".kpatch.force", ALLOC | 1, &[0; 8], &[]),
    ]);
    object.symbols.push(("patch_init", Some(".init.text"), 0, true));
    object
}

/// The same of klp-build's, whose table names the function by its section.
fn klp_build() -> Object {
    let mut object = module();
    let mut entry = [0; 24];
    entry[16] = 2;
    let mut patched = [0; 64];
    patched[56] = 1;
    object.sections.extend([
        section(".rodata.klp.str1.1", ALLOC | 0x30, b"\0show\0", &[]),
        section(
            ".init.klp_funcs",
            ALLOC | 1,
            &entry,
            &[(0, R_64, ".rodata.klp.str1.1", 1), (8, R_64, ".text.show", 0)],
        ),
        section(".init.klp_objects", ALLOC | 1, &patched, &[(8, R_64, ".init.klp_funcs", 0)]),
    ]);
    object.symbols.push(("livepatch_mod_init", Some(".init.text"), 0, true));
    object
}

const TEXT: u64 = 0xffff_ffff_8100_0000;

fn kernel() -> Symbols {
    Symbols::listed(&[
        (TEXT, b'T', "_stext"),
        (TEXT + 0x100, b't', "show"),
        (TEXT + 0x200, b't', "show"),
        (TEXT + 0x300, b'T', "seq_puts"),
        (TEXT + 0x400, b'T', "__x86_return_thunk"),
        (TEXT + 0x500, b'T', "init_module"),
        (TEXT + 0x1000, b'T', "_etext"),
        (TEXT + 0x2000, b'B', "saved_command_line"),
    ])
}

fn view(symbols: &Symbols) -> KernelView<'_> {
    let (text, returns) = (Gva(TEXT)..Gva(TEXT + 0x1000), ReturnForm::Plain);
    KernelView { arch: &arch::x86_64::X86_64, symbols, text, returns, modules: Box::new(|_| None) }
}

#[test]
fn what_either_builder_makes_replaces_what_its_table_says() {
    for object in [kpatch_build(), klp_build()] {
        let payload = object.parse().unwrap();
        assert!(payload.options().consistent);
        let release = &payload.options().releases[0];
        assert_eq!(release.pattern(), "6.1.0-57-cloud-amd64");
        let symbols = kernel();
        let resolved = payload.resolve(&view(&symbols), &[]).unwrap();
        // Neither `init_module`, which the kernel has too, nor the first `show`.
        let [replacement] = resolved.replacements() else { panic!("{resolved:?}") };
        assert_eq!((&*replacement.name, replacement.old.start), ("show", Gva(TEXT + 0x200)));

        let at = Gva(0xffff_ffff_a000_0000);
        let sizes = resolved.sizes();
        let placement = Placement {
            text: at..at + sizes.text,
            constants: at + 0x20_0000..at + 0x20_0000 + sizes.constants,
            data: at + 0x40_0000..at + 0x40_0000 + sizes.data,
            text_is_used: false,
        };
        let linked = resolved.link(&placement).unwrap();
        assert_eq!(linked.entries, [at]);
        let field =
            |offset: usize| i32::from_le_bytes(*linked.text[offset..].first_chunk().unwrap());
        let leads = |offset: usize| at + offset as u64 + 4 + i64::from(field(offset)) as u64;
        assert_eq!(&linked.text[..5], [0x0f, 0x1f, 0x44, 0, 0]);
        assert_eq!(leads(8), Gva(TEXT + 0x2000));
        assert_eq!(leads(13), Gva(TEXT + 0x300));
        assert_eq!(linked.text[17], 0xc3);
    }
}

#[test]
fn positions_are_livepatchs_own() {
    let mut object = kpatch_build();
    object.section(".kpatch.funcs").bytes[32] = 0;
    let symbols = kernel();
    let errors = object.parse().unwrap().resolve(&view(&symbols), &[]).unwrap_err();
    assert!(errors.iter().any(|error| matches!(error, ResolveError::Ambiguous { .. })), "{errors}");
    object.section(".kpatch.funcs").bytes[32] = 3;
    let errors = object.parse().unwrap().resolve(&view(&symbols), &[]).unwrap_err();
    let no_third = |error: &ResolveError| {
        matches!(error, ResolveError::NoSuchPosition { position: 3, count: 2, .. })
    };
    assert!(errors.iter().any(no_third), "{errors}");
}

#[test]
fn an_operators_map_does_not_change_what_the_table_says() {
    let map = Map::parse("show=seq_puts").unwrap();
    let symbols = kernel();
    let errors = kpatch_build().parse().unwrap().resolve(&view(&symbols), &[map]).unwrap_err();
    assert!(errors.iter().any(|error| matches!(error, ResolveError::NothingToMap { .. })));
}

#[test]
fn what_a_livepatch_needs_beyond_plain_functions_is_refused_by_name() {
    let changed = |base: Object, change: &dyn Fn(&mut Object)| {
        let mut object = base;
        change(&mut object);
        object.refusal().to_string()
    };
    let kpatch = |change: &dyn Fn(&mut Object)| changed(kpatch_build(), change);
    let klp = |change: &dyn Fn(&mut Object)| changed(klp_build(), change);
    let refusals = [
        (
            "callback (.kpatch.callbacks.pre_patch)",
            kpatch(&|object| {
                let callbacks = object.section(".kpatch.callbacks.pre_patch");
                callbacks.relocations.push((0, R_64, "show", 0));
            }),
        ),
        (
            "callback (post_unpatch)",
            klp(&|object| {
                let objects = object.section(".init.klp_objects");
                objects.relocations.push((40, R_64, "show", 0));
            }),
        ),
        (
            "functions of the module ext4",
            kpatch(&|object| object.section(".kpatch.funcs").relocations[2].3 = 13),
        ),
        (
            "functions of the module show",
            klp(&|object| {
                let objects = object.section(".init.klp_objects");
                objects.relocations.push((0, R_64, ".rodata.klp.str1.1", 1));
            }),
        ),
        (
            "functions of the module xfs",
            kpatch(&|object| {
                object.section(".text.show").livepatch =
                    Some((".klp.rela.xfs..text.show", Vec::new()));
            }),
        ),
        (
            "runs my_init",
            kpatch(&|object| object.symbols.push(("my_init", Some(".init.text"), 0, true))),
        ),
        (
            "whose code says what it replaces",
            kpatch(&|object| object.sections.retain(|s| s.name != ".kpatch.funcs")),
        ),
        (
            "whose code says what it replaces",
            klp(&|object| object.sections.retain(|s| s.name != ".init.klp_objects")),
        ),
        (
            "no livepatch",
            kpatch(&|object| object.section(".modinfo").bytes = b"license=GPL\0".to_vec()),
        ),
        (
            "entry 0 has no function",
            kpatch(&|object| object.section(".kpatch.funcs").relocations[0].3 = 1),
        ),
        (
            "entry 0 does not name a function",
            kpatch(&|object| object.section(".kpatch.funcs").relocations[1].3 = 400),
        ),
        (
            "entry 0 does not name an object",
            kpatch(&|object| object.section(".kpatch.funcs").relocations.truncate(2)),
        ),
        ("impossible position", kpatch(&|object| object.section(".kpatch.funcs").bytes[39] = 1)),
        ("cut short", klp(&|object| object.section(".init.klp_funcs").bytes.truncate(20))),
    ];
    for (expected, said) in refusals {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let mut object = kpatch_build();
    object.symbols.push((".klp.sym.vmlinux.nameless", None, 0, false));
    assert!(matches!(object.refusal(), KlpError::Symbol { .. }));
    for name in [".klp.arch.vmlinux..altinstructions", "__ex_table", "__jump_table"] {
        let mut object = kpatch_build();
        object.sections.push(section(name, ALLOC, &[0; 16], &[]));
        let error = object.parse().unwrap_err();
        assert!(
            matches!(&error, PayloadError::Section { section, .. } if **section == *name),
            "{error}"
        );
    }
}

#[test]
fn a_symbol_of_a_module_is_refused_where_it_is_referred_to() {
    let mut object = kpatch_build();
    object.symbols.push((".klp.sym.ext4.ext4_error,0", None, 0, false));
    object.parse().unwrap();
    object.section(".text.show").relocations[1].2 = ".klp.sym.ext4.ext4_error,0";
    let error = object.parse().unwrap_err();
    assert!(matches!(&error, PayloadError::Symbol { .. }), "{error}");
}

proptest! {
    #[test]
    fn a_damaged_livepatch_module_is_read_or_refused(
        is_klp_build in any::<bool>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let object = if is_klp_build { klp_build() } else { kpatch_build() };
        let mut file = object.file();
        for (at, byte) in changes {
            let len = file.len();
            file[at.index(len)] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        if let Ok(payload) = Payload::parse(&file) {
            let symbols = kernel();
            let _ = payload.resolve(&view(&symbols), &[]);
        }
    }
}
