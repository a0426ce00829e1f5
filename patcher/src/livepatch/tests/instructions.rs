//! Instructions that a loader changes: calls for tracing, returns, and branches by thunks.

use capstone::Capstone;
use capstone::prelude::*;

use super::guests::Setting;
use crate::addr::Gva;
use crate::arch::ReturnForm;
use crate::kernel::Symbols;
use crate::livepatch::Payload;

/// The instructions of the object's text, linked for a kernel with these symbols.
fn text(
    setting: &Setting,
    source: &str,
    flags: &[&str],
    names: &[&str],
    returns: ReturnForm,
) -> Vec<String> {
    let payload = Payload::parse(&setting.compiler.compile(source, flags)).unwrap();
    let symbols = Symbols::listed(&setting.functions(names));
    let resolved = payload.resolve(&setting.view(&symbols, returns), &[]).unwrap();
    let linked = resolved.link(&setting.placement(&resolved)).unwrap();
    let capstone = match setting.arch.name() {
        "x86_64" => Capstone::new().x86().mode(arch::x86::ArchMode::Mode64).build(),
        "s390x" => Capstone::new().sysz().mode(arch::sysz::ArchMode::Default).build(),
        _ => Capstone::new().arm64().mode(arch::arm64::ArchMode::Arm).build(),
    };
    let capstone = capstone.unwrap();
    let instructions = capstone.disasm_all(&linked.text, setting.room).unwrap();
    let shown = instructions.iter().map(|one| {
        let (name, operands) = (one.mnemonic().unwrap(), one.op_str().unwrap());
        format!("{name} {operands}").trim().to_owned()
    });
    shown.collect()
}

const CALLS: &str = "
    extern long guest_first(long);
    long victim(long value) { return guest_first(value) + 1; }
";

#[test]
fn calls_for_tracing_become_no_operations() {
    let x86 = Setting::of("x86_64");
    let names = ["victim", "guest_first"];
    for (flags, nop) in [
        (&["-pg", "-mfentry", "-mrecord-mcount"][..], "nop dword ptr [rax + rax]"),
        (&["-pg", "-mfentry", "-fPIC", "-mcmodel=small"], "nop word ptr [rax + rax]"),
        (&["-pg", "-mfentry", "-mnop-mcount", "-mrecord-mcount"], "nop dword ptr [rax + rax]"),
    ] {
        let text = text(&x86, CALLS, flags, &names, ReturnForm::Plain);
        assert_eq!(text[0], nop, "{flags:?} {text:?}");
    }
    let s390x = Setting::of("s390x");
    for flags in [&["-pg", "-mfentry"][..], &["-pg", "-mfentry", "-mnop-mcount", "-mrecord-mcount"]]
    {
        let text = text(&s390x, CALLS, flags, &names, ReturnForm::Plain);
        // A branch that is never taken.
        assert!(text[0].starts_with("brcl 0,") || text[0].starts_with("jgnop"), "{text:?}");
    }
    let text =
        text(&s390x, CALLS, &["-pg", "-fasynchronous-unwind-tables"], &names, ReturnForm::Plain);
    assert!(
        text.iter().any(|one| one.starts_with("brcl 0,") || one.starts_with("jgnop")),
        "{text:?}"
    );
    let aarch64 = Setting::of("aarch64");
    let text =
        self::text(&aarch64, CALLS, &["-fpatchable-function-entry=2"], &names, ReturnForm::Plain);
    assert_eq!(text[..2], ["nop", "nop"], "{text:?}");
    let text = self::text(&aarch64, CALLS, &["-pg"], &names, ReturnForm::Plain);
    let calls = text.iter().filter(|one| one.starts_with("bl ")).count();
    assert_eq!((calls, text.contains(&"nop".to_owned())), (1, true), "{text:?}");
}

#[test]
fn functions_return_as_the_guests_do() {
    let x86 = Setting::of("x86_64");
    let names = ["victim", "guest_first", "__x86_return_thunk", "srso_return_thunk"];
    let flags = ["-mfunction-return=thunk-extern"];
    let plain = text(&x86, CALLS, &flags, &names, ReturnForm::Plain);
    assert_eq!(plain[plain.len() - 5..], ["ret", "int3", "int3", "int3", "int3"], "{plain:?}");
    // A kernel without any thunk.
    assert_eq!(text(&x86, CALLS, &flags, &names[..2], ReturnForm::Plain), plain);
    let thunk = x86.kernel + 3 * 64;
    let jumps = text(&x86, CALLS, &flags, &names, ReturnForm::Thunk(Gva(thunk)));
    assert_eq!(jumps.last(), Some(&format!("jmp {thunk:#x}")));
    // A copy of the compiler's own does not count either.
    let own =
        text(&x86, CALLS, &["-mfunction-return=thunk"], &names, ReturnForm::Thunk(Gva(thunk)));
    assert!(own.contains(&format!("jmp {thunk:#x}")), "{own:?}");
}

#[test]
fn branches_to_computed_addresses_go_by_the_guests_thunks() {
    let source = "long victim(long (*call)(long)) { return call(3) + 1; }";
    let x86 = Setting::of("x86_64");
    let thunk = x86.kernel + 64;
    for flag in ["-mindirect-branch=thunk-extern", "-mindirect-branch=thunk"] {
        let flags = [flag, "-mindirect-branch-register"];
        let names = ["victim", "__x86_indirect_thunk_rdi", "__x86_indirect_thunk_rax"];
        let text = text(&x86, source, &flags, &names, ReturnForm::Plain);
        let calls = [thunk, thunk + 64].map(|thunk| format!("call {thunk:#x}"));
        assert!(text.iter().any(|one| calls.contains(one)), "{flag} {text:?}");
    }
    let s390x = Setting::of("s390x");
    let flags = ["-mindirect-branch=thunk", "-mfunction-return=thunk"];
    let thunks = ["__s390_indirect_jump_r1", "__s390_indirect_jump_r4", "__s390_indirect_jump_r14"];
    let names = [&["victim"][..], &thunks].concat();
    let guests = text(&s390x, source, &flags, &names, ReturnForm::Plain);
    let thunk = format!("jg {:#x}", s390x.kernel + 2 * 64);
    assert!(guests.contains(&thunk), "{thunk} {guests:?}");
    // Where the guest has none, the copies in the object do.
    let own = text(&s390x, source, &flags, &["victim"], ReturnForm::Plain);
    let room = format!("jg {:#x}", s390x.room);
    assert!(own.iter().any(|one| one.starts_with(&room[..room.len() - 4])), "{own:?}");
    assert!(!own.contains(&thunk), "{own:?}");
}
