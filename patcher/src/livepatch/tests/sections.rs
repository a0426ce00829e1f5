//! What becomes of sections, and of files that are no payloads.

use super::guests::{SETTINGS, Setting};
use crate::addr::Gva;
use crate::arch::ReturnForm;
use crate::kernel::Symbols;
use crate::livepatch::{MAX_FILE, Payload, PayloadError};
use crate::region::Placement;

/// An x86_64 object with a function and this.
fn object(rest: &str) -> Vec<u8> {
    let function = ".text\n.globl victim\n.type victim, @function\nvictim: ret\n";
    Setting::of("x86_64").compiler.assemble(&format!("{function}{rest}\n"))
}

fn refused(rest: &str) -> String {
    match Payload::parse(&object(rest)) {
        Ok(_) => panic!("not refused: {rest}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn sections_that_need_the_guests_help_are_refused_by_name() {
    for section in [
        ".altinstructions",
        ".altinstr_replacement",
        "__jump_table",
        "__ex_table",
        "__bug_table",
        ".static_call_sites",
        ".static_call.text",
        ".data..percpu",
        ".data..percpu..read_mostly",
        ".parainstructions",
        "__ksymtab",
        "___ksymtab_gpl+victim",
        "__ksymtab_strings",
        ".init.text",
        ".init.data",
        ".exit.text",
        ".initcall6.init",
        "__tracepoints",
        "__tracepoints_ptrs",
        "_ftrace_events",
        ".data..ro_after_init",
        "__param",
        "__dyndbg",
        "__verbose",
        ".tdata",
        ".noinstr.text",
        ".entry.text",
        ".kcfi_traps",
        ".init_array",
        ".export_symbol",
        "__syscalls_metadata",
    ] {
        let said = refused(&format!(".section {section:?}, \"aw\"\n.long 0"));
        let wanted = format!("section {section} is not possible in a payload: ");
        assert!(said.starts_with(&wanted) && said.len() > wanted.len() + 20, "{said}");
        // One that is empty says nothing.
        Payload::parse(&object(&format!(".section {section:?}, \"aw\""))).unwrap();
    }
}

#[test]
fn sections_that_nobody_needs_are_dropped_with_the_reason() {
    for section in [
        ".smp_locks",
        ".retpoline_sites",
        ".return_sites",
        ".call_sites",
        ".ibt_endbr_seal",
        ".orc_unwind",
        ".orc_unwind_ip",
        ".orc_header",
        "__mcount_loc",
        "__patchable_function_entries",
        ".eh_frame",
        ".note.Linux",
        ".note.gnu.property",
        ".comment",
        ".s390_indirect_jump",
        ".s390_return_mem",
        ".discard.reachable",
        ".modinfo",
        ".gnu.linkonce.this_module",
    ] {
        let rest = format!(".section {section:?}, \"a\"\n.long victim - .");
        let payload = Payload::parse(&object(&rest)).unwrap();
        let dropped = payload.dropped().iter().find(|one| &*one.section == section);
        assert!(dropped.is_some_and(|one| one.reason.len() > 10), "{section}");
        let sections = payload.object.sections.iter();
        assert!(sections.filter(|one| one.len > 0).all(|one| &*one.name == ".text"), "{section}");
    }
}

#[test]
fn unknown_sections_are_refused_and_those_for_debuggers_ignored() {
    let said = refused(".section .mystery, \"a\"\n.long 0");
    assert!(said.starts_with("section .mystery is not possible in a payload: "), "{said}");
    Payload::parse(&object(".section .mystery, \"\"\n.long victim")).unwrap();
}

#[test]
fn code_that_can_be_written_is_refused() {
    let said = refused(".section .text.hot, \"awx\"\nnop");
    assert!(said.starts_with("section .text.hot is both writable and executable"), "{said}");
}

#[test]
fn text_constants_and_data_go_to_their_own_parts() {
    let rest = "
        .section .rodata, \"a\"\n.quad 1
        .section .rodata.str1.1, \"aMS\", @progbits, 1\n.asciz \"text\"
        .section .data.rel.ro.local, \"aw\"\n.quad victim
        .section .rodata.page, \"a\"\n.balign 4096\n.long 7
        .data\n.quad 2
        .section .data..read_mostly, \"aw\"\n.quad 3
        .bss\n.zero 100
    ";
    let setting = Setting::of("x86_64");
    let payload = Payload::parse(&object(rest)).unwrap();
    let symbols = Symbols::listed(&setting.functions(&["victim"]));
    let resolved = payload.resolve(&setting.view(&symbols, ReturnForm::Plain), &[]).unwrap();
    let sizes = resolved.sizes();
    assert_eq!((sizes.text, sizes.data), (1, 116));
    // A page's alignment is had in any room.
    for start in [0x40, 0x1000, 0x1fc0] {
        let room = |at: u64, len| Gva(setting.room + at)..Gva(setting.room + at + len);
        let placement = Placement {
            text: room(0, sizes.text),
            constants: room(start, sizes.constants),
            data: room(0x1_0000, sizes.data),
            text_is_used: false,
        };
        let linked = resolved.link(&placement).unwrap();
        let seven = linked.constants.windows(4).position(|bytes| bytes == [7, 0, 0, 0]).unwrap();
        assert_eq!((setting.room + start + seven as u64) % 4096, 0);
        let pointer = (setting.room).to_le_bytes();
        assert!(linked.constants.windows(8).any(|bytes| bytes == pointer));
        let data: Vec<u8> = linked.data.iter().copied().filter(|byte| *byte != 0).collect();
        assert_eq!((data, linked.data.len()), (vec![2, 3], 116));
    }
}

#[test]
fn what_does_not_belong_into_kernels_is_refused_by_its_name() {
    let said = refused(".text\n.reloc ., R_X86_64_TPOFF32, own\n.long 0");
    assert!(said.contains("a relocation R_X86_64_TPOFF32"), "{said}");
    let said = refused(".comm shared, 8, 8\n.text\nmovq shared(%rip), %rax");
    assert!(said.contains("-fno-common"), "{said}");
    let said = refused(".section .comment, \"a\"\nnote: .long 0\n.text\nmovq note(%rip), %rax");
    assert!(said.contains("lies in a section that is not loaded"), "{said}");
    let said = refused(".section .rodata, \"a\"\n.balign 8192\n.long 0");
    assert!(said.contains("is aligned to no power of two up to 4096"), "{said}");
    let said = refused(".bss\n.zero 0x2000000");
    assert!(said.contains("a payload takes at most 0x1000000"), "{said}");
}

#[test]
fn files_that_are_no_objects_for_guests_are_refused() {
    let parse = |file: &[u8]| Payload::parse(file).unwrap_err();
    assert!(matches!(parse(b""), PayloadError::Malformed(_)));
    assert!(matches!(parse(b"int main(void) { return 0; }"), PayloadError::Malformed(_)));
    let large = vec![0; MAX_FILE + 1];
    assert!(matches!(parse(&large), PayloadError::FileTooLarge { .. }));
    // This very program is linked.
    let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let head = &own[..own.len().min(MAX_FILE)];
    assert!(matches!(parse(head), PayloadError::NotRelocatable { .. }));
    let source = "long victim(void) { return 1; }";
    let mut riscv = SETTINGS[0].compiler.compile(source, &[]);
    riscv[18..20].copy_from_slice(&243_u16.to_le_bytes());
    let said = parse(&riscv).to_string();
    assert!(said.contains("little-endian machine EM_RISCV"), "{said}");
    let big = Setting::of("aarch64").compiler.compile(source, &["-mbig-endian"]);
    let said = parse(&big).to_string();
    assert!(said.contains("big-endian machine EM_AARCH64"), "{said}");
    let x32 = SETTINGS[0].compiler.compile(source, &["-m32", "-mcmodel=32"]);
    assert!(matches!(parse(&x32), PayloadError::Malformed(_)));
}

#[test]
fn options_are_read_and_mistakes_in_them_named() {
    let section = |text: &str| format!(".section .vmm.livepatch, \"a\"\n.asciz {text:?}");
    let rest = [
        "release=6.1.*",
        "release=6.12.?",
        "build-id=0123456789ABCDEF",
        "consistent=yes",
        "replace=victim:old,2",
    ]
    .map(section);
    let payload = Payload::parse(&object(&rest.join("\n"))).unwrap();
    let options = payload.options();
    assert!(options.consistent && options.releases[0].matches("6.1.0-57"));
    assert_eq!((options.releases.len(), &*options.build_ids[0]), (2, "0123456789abcdef"));
    assert_eq!((&*options.maps[0].old, options.maps[0].position), ("old", Some(2)));
    for (text, said) in [
        ("relase=6.1", "the key `relase`"),
        ("release", "holds `release`, which is no key=value"),
        ("consistent=maybe", "consistent=maybe: yes or no is wanted"),
        ("build-id=xyz", "hexadecimal digits"),
        ("replace=victim", "`victim` does not say which function replaces which"),
        ("replace=a:b,c", "`a:b,c` does not say"),
    ] {
        let error = refused(&section(text));
        assert!(error.contains(said), "{error}");
    }
}
