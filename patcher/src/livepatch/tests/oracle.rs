//! Payloads compared with what the toolchain's own linker makes of the same object, at the same
//! addresses.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection};

use super::compiler::{Folder, run};
use super::guests::{SETTINGS, Setting};
use crate::addr::Gva;
use crate::arch::ReturnForm;
use crate::kernel::Symbols;
use crate::livepatch::{Linked, Payload, Resolved, SectionPart};
use crate::region::Placement;

/// Code that refers to all kinds of things in all kinds of ways.
const SOURCE: &str = r#"
typedef unsigned long ul;
extern ul guest_first(ul), guest_second(ul), guest_third(ul);
extern int guest_number;
extern ul guest_table[64];
extern char guest_bytes[];

struct step { ul (*call)(ul); const char *name; struct step *next; };

static __attribute__((noinline)) ul helper(ul value)
{
    return guest_first(value) ^ guest_table[value & 63];
}

static struct step last = { guest_third, "the last step", 0 };
static struct step first = { helper, "the first step", &last };
static const struct step fixed[] = { { guest_second, "b", &first }, { helper, "c", &last } };
static ul zeros[100];
static unsigned char flags[3];
ul shared[4] = { 1, 2, 3, 4 };

struct step *cursor = &first;

ul chosen(ul which, ul value)
{
    switch (which) {
    case 0: return guest_first(value);
    case 1: return guest_second(value) + 1;
    case 2: return guest_third(value) + shared[value & 3];
    case 3: return guest_number;
    case 4: return guest_bytes[value];
    case 5: return zeros[value % 100]++;
    case 6: return helper(value) - 1;
    case 7: return (ul)fixed[value & 1].name;
    case 8: return flags[value % 3] = value;
    case 9: guest_number = value; return 3;
    }
    return helper(which);
}

ul victim(ul value)
{
    ul sum = 0;
    const struct step *step;

    for (step = cursor; step; step = step->next)
        sum += step->call(value) + step->name[value & 3];
    if (__builtin_expect(sum == 77, 0))
        sum = fixed[value & 1].call(sum) + chosen(sum, value);
    guest_table[3] = sum;
    return guest_second(sum) ? sum : guest_third(sum);
}

ul jumps_away(ul value) { return victim(value + 1); }
ul jumps_to_guest(ul value) { return guest_third(value + 1); }
"#;

const NAMES: [&str; 7] = [
    "victim",
    "guest_first",
    "guest_second",
    "guest_third",
    "guest_number",
    "guest_table",
    "guest_bytes",
];

/// The flags that kernels' configurations add.
fn variants(arch: &str) -> Vec<Vec<&'static str>> {
    let thunks = ["-mindirect-branch=thunk-extern", "-mfunction-return=thunk-extern"];
    match arch {
        "x86_64" => vec![
            vec![],
            vec!["-O1", "-ffunction-sections", "-fdata-sections"],
            vec!["-fcf-protection=branch", "-fno-omit-frame-pointer"],
            vec![thunks[0], thunks[1], "-mindirect-branch-register"],
            vec!["-fPIE", "-mcmodel=small", "-fjump-tables"],
            vec!["-fPIC", "-mcmodel=small"],
            vec!["-Os", "-mcmodel=large"],
        ],
        "s390x" => vec![
            vec!["-fno-PIE"],
            vec!["-fPIE"],
            vec!["-fPIC"],
            vec!["-fno-PIE", "-march=z13", "-ffunction-sections", "-fdata-sections"],
            vec!["-fPIE", "-mindirect-branch=thunk", "-mfunction-return=thunk"],
            vec!["-fno-PIE", "-march=z13", "-mindirect-branch=thunk", "-mfunction-return=thunk"],
        ],
        _ => vec![
            vec![],
            vec!["-mbranch-protection=pac-ret+bti"],
            vec!["-Os", "-fpatchable-function-entry=2"],
            vec!["-fPIE", "-ffunction-sections", "-fdata-sections"],
            vec!["-fPIC"],
            vec!["-mcmodel=large"],
        ],
    }
}

/// What the linker makes of the object: each section of ours at its address.
fn by_linker(
    setting: &Setting,
    folder: &Folder,
    object: &Path,
    resolved: &Resolved,
    placement: &Placement,
    symbols: &[(u64, u8, &str)],
) -> Vec<(String, Vec<u8>)> {
    let mut script = String::new();
    for (at, _, name) in symbols {
        writeln!(script, "PROVIDE({name} = {at:#x});").unwrap();
    }
    writeln!(script, "SECTIONS {{").unwrap();
    // Strings are not merged here, and a linker would.
    let mut unmerge = setting.compiler.tool("objcopy");
    for (index, section) in resolved.object.sections.iter().enumerate() {
        let at = resolved.section_at(placement, index).0;
        writeln!(script, ".s{index} {at:#x} : {{ *({}) }}", section.name).unwrap();
        if section.name.contains(".str") || section.name.contains(".cst") {
            let flags = format!("{}=alloc,readonly,data", section.name);
            unmerge.arg("--set-section-flags").arg(flags);
        }
    }
    let table = resolved.table_at(placement).0 - setting.table_header;
    writeln!(script, ".got {table:#x} : {{ *(.got) }} .got.plt : {{ *(.got.plt) }}").unwrap();
    writeln!(script, "/DISCARD/ : {{ *(*) }} }}").unwrap();
    let [plain, file, linked] = ["plain.o", "script", "linked"].map(|name| folder.file(name));
    fs::write(&file, script).unwrap();
    run(unmerge.arg(object).arg(&plain));
    let mut linker = setting.compiler.tool("ld");
    linker
        .args(["-static", "--no-relax", "--no-check-sections", "-m", setting.emulation, "-T"])
        .arg(file);
    run(linker.args(["-e", "0", "-o"]).arg(&linked).arg(plain));
    let bytes = fs::read(linked).unwrap();
    let linked = ElfFile64::<Endianness>::parse(&*bytes).unwrap();
    let contents = linked
        .sections()
        .map(|section| (section.name().unwrap().to_owned(), section.data().unwrap().to_vec()));
    contents.collect()
}

/// Our bytes of a section.
fn ours<'a>(
    resolved: &Resolved,
    placement: &Placement,
    linked: &'a Linked,
    index: usize,
) -> &'a [u8] {
    let section = &resolved.object.sections[index];
    let (part, start) = match section.part {
        SectionPart::Text => (&linked.text, placement.text.start),
        SectionPart::Constants => (&linked.constants, placement.constants.start),
        SectionPart::Data => (&linked.data, placement.data.start),
    };
    let begin = resolved.section_at(placement, index).offset_from(start).unwrap() as usize;
    &part[begin..begin + section.len as usize]
}

/// Compares all sections; says how many bytes were compared.
fn compare(
    setting: &Setting,
    object: &[u8],
    list: &[(u64, u8, &str)],
    returns: ReturnForm,
    what: &str,
) -> usize {
    let folder = Folder::new();
    let file = folder.file("payload.o");
    fs::write(&file, object).unwrap();
    let symbols = Symbols::listed(list);
    let payload = Payload::parse(object).unwrap_or_else(|error| panic!("{what}: {error}"));
    let resolved = payload.resolve(&setting.view(&symbols, returns), &[]);
    let mut resolved = resolved.unwrap_or_else(|error| panic!("{what}: {error}"));
    let placement = setting.placement(&resolved);
    let theirs = by_linker(setting, &folder, &file, &resolved, &placement, list);
    // The order of addresses in the table is anyone's choice.
    let table = theirs.iter().find(|(name, _)| name == ".got");
    if let Some((_, table)) = table.filter(|(_, bytes)| !bytes.is_empty()) {
        let entries = table[setting.table_header as usize..].chunks_exact(8);
        let order = setting.arch.byte_order();
        let addresses: Vec<u64> =
            entries.map(|entry| order.u64(entry.try_into().unwrap())).collect();
        resolved.sort_table(&placement, &addresses);
    }
    let linked = resolved.link(&placement).unwrap_or_else(|error| panic!("{what}: {error}"));
    let mut compared = 0;
    for (index, section) in resolved.object.sections.iter().enumerate() {
        if section.bytes.is_empty() {
            continue;
        }
        let ours = ours(&resolved, &placement, &linked, index);
        let name = format!(".s{index}");
        let (_, theirs) = theirs.iter().find(|(theirs, _)| *theirs == name).unwrap();
        let differs = ours.iter().zip(theirs).position(|(ours, theirs)| ours != theirs);
        assert_eq!(differs, None, "{what}: {} differs\n{ours:02x?}\n{theirs:02x?}", section.name);
        assert_eq!(ours.len(), theirs.len(), "{what}: {}", section.name);
        compared += ours.len();
    }
    compared
}

#[test]
fn every_compiled_payload_is_what_the_linker_makes_of_it() {
    for setting in SETTINGS {
        for flags in variants(setting.arch.name()) {
            let what = format!("{} {flags:?}", setting.arch.name());
            let object = setting.compiler.compile(SOURCE, &flags);
            let mut list = setting.functions(&NAMES);
            let thunk = setting.kernel + 0x8000;
            let at = list.len() - 1;
            list.insert(at, (thunk, b'T', "__x86_return_thunk"));
            for (index, register) in
                ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "r8", "r9", "r10"]
                    .iter()
                    .enumerate()
            {
                let name = format!("__x86_indirect_thunk_{register}").leak();
                list.insert(at + 1 + index, (thunk + 64 + 32 * index as u64, b'T', name));
            }
            let returns = ReturnForm::Thunk(Gva(thunk));
            let compared = compare(&setting, &object, &list, returns, &what);
            assert!(compared > 500, "{what}: only {compared} bytes");
        }
    }
}

#[test]
fn addresses_that_are_loaded_come_from_a_table_as_the_linker_makes_one() {
    let sources = [
        (
            "x86_64",
            "movq guest@GOTPCREL(%rip), %rax
             call *guest@GOTPCREL(%rip)
             .reloc ., R_X86_64_GOTPCREL64, guest
             .quad 0
             .reloc ., R_X86_64_GOTPCREL, guest-4
             .long 0",
        ),
        ("s390x", "lgrl %r1, guest@GOTENT\n larl %r2, guest@GOTENT"),
        ("aarch64", "adrp x0, :got:guest\n ldr x0, [x0, :got_lo12:guest]"),
    ];
    for (arch, source) in sources {
        let setting = Setting::of(arch);
        let source = format!(".text\n.globl victim\n.type victim, %function\nvictim:\n{source}\n");
        let object = setting.compiler.assemble(&source.replace("%function", "@function"));
        let list = setting.functions(&["victim", "guest"]);
        assert!(compare(&setting, &object, &list, ReturnForm::Plain, arch) >= 8);
    }
}
