//! What names of payloads stand for, and what is said where they stand for nothing.

use std::sync::Arc;

use super::guests::{SETTINGS, Setting};
use crate::addr::Gva;
use crate::arch::ReturnForm;
use crate::kernel::Symbols;
use crate::livepatch::{LinkError, Linked, Map, Payload, ResolveError, ResolveErrors, Resolved};

/// Compiles for x86_64 and resolves.
fn resolve(
    source: &str,
    list: &[(u64, u8, &str)],
    maps: &[&str],
) -> Result<Resolved, ResolveErrors> {
    let setting = Setting::of("x86_64");
    let payload = Payload::parse(&setting.compiler.compile(source, &[])).unwrap();
    let symbols = Symbols::listed(list);
    let maps: Vec<Map> = maps.iter().map(|map| Map::parse(map).unwrap()).collect();
    payload.resolve(&setting.view(&symbols, ReturnForm::Plain), &maps)
}

fn link(setting: &Setting, resolved: &Resolved) -> Linked {
    resolved.link(&setting.placement(resolved)).unwrap()
}

/// Symbols of an x86_64 kernel, 64 bytes from one to the next.
fn kernel<'a>(names: &[&'a str]) -> Vec<(u64, u8, &'a str)> {
    Setting::of("x86_64").functions(names)
}

const AT: u64 = 0xffff_ffff_8100_0000;

#[test]
fn all_names_that_stand_for_nothing_are_said_at_once() {
    let source = "
        extern long missing(void), twice(void), fine(void); extern int gone;
        long victim(void) { return missing() + twice() + fine() + gone; }
    ";
    let list = kernel(&["victim", "twice", "fine", "twice"]);
    let errors = resolve(source, &list, &[]).unwrap_err();
    let said = errors.to_string();
    for part in [
        "the kernel has no symbol missing,",
        "the kernel has no symbol gone,",
        "2 symbols twice, 1 at 0xffffffff81000040, 2 at 0xffffffff810000c0",
        "--map twice=twice,POSITION",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(errors.iter().len(), 3, "{said}");
}

#[test]
fn a_position_says_which_of_several_is_meant() {
    let source = "
        extern long twice(void);
        long victim(void) { return twice() + 1; }
    ";
    let list = kernel(&["victim", "twice", "fine", "twice"]);
    let setting = Setting::of("x86_64");
    for (position, at) in [(1, AT + 0x40), (2, AT + 0xc0)] {
        let map = format!("twice=twice,{position}");
        let resolved = resolve(source, &list, &[&map]).unwrap();
        let linked = link(&setting, &resolved);
        let call = linked.text.windows(5).position(|bytes| bytes[0] == 0xe8).unwrap();
        let distance = i32::from_le_bytes(linked.text[call + 1..call + 5].try_into().unwrap());
        let target = (setting.room + call as u64 + 5).wrapping_add_signed(i64::from(distance));
        assert_eq!(target, at);
    }
    let errors = resolve(source, &list, &["twice=twice,3"]).unwrap_err();
    let wanted = "the kernel has 2 symbols twice, and number 3 is wanted";
    assert_eq!(errors.to_string(), wanted);
}

#[test]
fn several_functions_of_one_name_are_replaced_by_position_only() {
    let source = "long twice(void) { return 1; }";
    let list = kernel(&["twice", "fine", "twice"]);
    let errors = resolve(source, &list, &[]).unwrap_err();
    assert!(matches!(errors.iter().next(), Some(ResolveError::Ambiguous { .. })), "{errors}");
    let resolved = resolve(source, &list, &["twice=twice,2"]).unwrap();
    assert_eq!(resolved.replacements()[0].old, Gva(AT + 0x80)..Gva(AT + 16 * 0x10_0000));
    // Data of the same name is no candidate for a function, but counts as livepatch counts.
    let mut list = kernel(&["twice", "fine", "twice"]);
    list[0].1 = b'd';
    let resolved = resolve(source, &list, &[]).unwrap();
    assert_eq!(resolved.replacements()[0].old.start, Gva(AT + 0x80));
}

#[test]
fn names_for_one_address_are_one_function() {
    let mut list = kernel(&["alias", "other", "victim"]);
    list[0].2 = "victim";
    list[1].0 = AT;
    list[2].0 = AT;
    let resolved = resolve("long victim(void) { return 1; }", &list, &[]).unwrap();
    assert_eq!(resolved.replacements()[0].old.start, Gva(AT));
    let both = "long victim(void) { return 1; } long other(void) { return 2; }";
    let errors = resolve(both, &list, &[]).unwrap_err();
    assert!(matches!(errors.iter().next(), Some(ResolveError::TwoDefinitions { .. })), "{errors}");
}

#[test]
fn what_only_a_module_has_is_refused_by_the_modules_name() {
    let setting = Setting::of("x86_64");
    let source = "extern long in_module(void); long victim(void) { return in_module(); }";
    let payload = Payload::parse(&setting.compiler.compile(source, &[])).unwrap();
    let symbols = Symbols::listed(&kernel(&["victim"]));
    let mut view = setting.view(&symbols, ReturnForm::Plain);
    view.modules = Box::new(|name| (name == "in_module").then(|| Arc::from("ext4")));
    let errors = payload.resolve(&view, &[]).unwrap_err();
    assert!(
        errors.to_string().starts_with("the symbol in_module is in the module ext4"),
        "{errors}"
    );
}

#[test]
fn weak_symbols_that_the_kernel_lacks_are_null() {
    let source = "
        extern long maybe(void) __attribute__((weak));
        long (*chosen)(void) = maybe;
        long victim(void) { return chosen ? chosen() : 0; }
    ";
    let setting = Setting::of("x86_64");
    let resolved = resolve(source, &kernel(&["victim"]), &[]).unwrap();
    assert_eq!(link(&setting, &resolved).data[..8], [0; 8]);
    let resolved = resolve(source, &kernel(&["victim", "maybe"]), &[]).unwrap();
    assert_eq!(link(&setting, &resolved).data[..8], (AT + 64).to_le_bytes());
}

#[test]
fn static_functions_replace_and_what_the_compiler_splits_off_does_not() {
    let source = r#"
        extern void report(const char *);
        extern long sum;
        static __attribute__((noinline, cold)) void helper(long value) { report("bad"); sum += value; }
        static __attribute__((noinline)) long inner(long value) { return value * sum; }
        __attribute__((noinline, used)) static long same_name(long value) { return value + 3; }
        long victim(long value)
        {
            if (__builtin_expect(value == 77, 0)) { report("odd"); helper(value); helper(sum); }
            return inner(value) + inner(sum);
        }
    "#;
    // The kernel has a function `victim` with a part and a copy.
    let names = [
        "victim",
        "same_name",
        "victim.cold",
        "report",
        "sum",
        "victim.constprop.0",
        "inner",
        "victim.part.0",
        "victim.isra.0",
        "victimised",
    ];
    let resolved = resolve(source, &kernel(&names), &[]).unwrap();
    let mut replaced: Vec<_> = resolved.replacements().iter().map(|one| &*one.name).collect();
    replaced.sort_unstable();
    assert_eq!(replaced, ["inner", "same_name", "victim"]);
    let victim = resolved.replacements().iter().find(|one| &*one.name == "victim").unwrap();
    assert_eq!(victim.old, Gva(AT)..Gva(AT + 64));
    assert_eq!(victim.parts, [Gva(AT + 128)..Gva(AT + 192), Gva(AT + 7 * 64)..Gva(AT + 8 * 64)]);
    let copies: Vec<&str> = victim.copies.iter().map(|name| &**name).collect();
    assert_eq!(copies, ["victim.constprop.0", "victim.isra.0"]);
}

#[test]
fn a_payload_may_say_that_a_function_is_only_its_helper() {
    let source = r#"
        static const char options[] __attribute__((used, section(".vmm.livepatch"))) =
            "helper=inner\0replace=newer:victim";
        __attribute__((noinline)) long inner(long value) { return value * 5; }
        long newer(long value) { return inner(value) + 1; }
    "#;
    let resolved = resolve(source, &kernel(&["victim", "inner"]), &[]).unwrap();
    let replaced: Vec<_> =
        resolved.replacements().iter().map(|one| (&*one.name, &*one.new)).collect();
    assert_eq!(replaced, [("victim", "newer")]);
    // The operator's word counts more than the author's.
    let resolved = resolve(source, &kernel(&["victim", "inner"]), &["newer=inner"]).unwrap();
    assert_eq!(&*resolved.replacements()[0].name, "inner");
}

#[test]
fn a_payload_that_replaces_nothing_is_refused() {
    let source = "long brand_new(void) { return 1; }";
    let errors = resolve(source, &kernel(&["victim"]), &[]).unwrap_err();
    assert_eq!(errors.iter().collect::<Vec<_>>(), [&ResolveError::ReplacesNothing]);
    let errors = resolve(source, &kernel(&["victim"]), &["brand_new=gone"]).unwrap_err();
    let wanted = "the kernel has no function gone, which brand_new is to replace";
    assert_eq!(errors.to_string(), wanted);
    let errors = resolve(source, &kernel(&["victim"]), &["mistyped=victim"]).unwrap_err();
    assert!(errors.to_string().contains("a map names mistyped"), "{errors}");
}

#[test]
fn two_definitions_of_one_function_are_refused() {
    let source = "long victim(void) { return 1; } long other(void) { return 2; }";
    let errors = resolve(source, &kernel(&["victim"]), &["other=victim"]).unwrap_err();
    let wanted = "both victim and other of the object are to replace the kernel's victim";
    assert_eq!(errors.to_string(), wanted);
}

#[test]
fn a_function_that_is_gone_after_boot_is_refused() {
    let mut list = kernel(&["other"]);
    list.push((AT + 17 * 0x10_0000, b't', "victim"));
    list.push((AT + 18 * 0x10_0000, b't', "_einittext"));
    let errors = resolve("long victim(void) { return 1; }", &list, &[]).unwrap_err();
    assert!(matches!(errors.iter().next(), Some(ResolveError::NotInText { .. })), "{errors}");
}

#[test]
fn an_object_for_another_architecture_is_refused() {
    let [x86, s390x, _] = SETTINGS;
    let object = s390x.compiler.compile("long victim(void) { return 1; }", &[]);
    let symbols = Symbols::listed(&kernel(&["victim"]));
    let payload = Payload::parse(&object).unwrap();
    let errors = payload.resolve(&x86.view(&symbols, ReturnForm::Plain), &[]).unwrap_err();
    assert_eq!(errors.to_string(), "the object is for s390x and the kernel runs on x86_64");
}

#[test]
fn what_is_too_far_is_refused_with_all_that_tells_why() {
    let setting = Setting::of("x86_64");
    let source = "extern long far_away(void); long victim(void) { return far_away() + 1; }";
    let mut list = vec![(0xffff_8880_0000_0000, b'T', "far_away")];
    list.extend(kernel(&["victim"]));
    let resolved = resolve(source, &list, &[]).unwrap();
    let error = resolved.link(&setting.placement(&resolved)).unwrap_err();
    let LinkError::OutOfRange { kind, place, value, most, .. } = &error else { panic!("{error}") };
    assert_eq!(kind, "R_X86_64_PLT32");
    assert_eq!(
        (place.0.wrapping_add_signed(*value), *most),
        (0xffff_8880_0000_0000 - 4, 0x7fff_ffff)
    );
    let said = error.to_string();
    assert!(said.contains(".text") && said.contains("far_away"), "{said}");

    // The smallest code model of aarch64 reaches no farther than a mebibyte.
    let setting = Setting::of("aarch64");
    let source = "extern long number; long victim(void) { return number; }";
    let payload = Payload::parse(&setting.compiler.compile(source, &["-mcmodel=tiny"])).unwrap();
    let symbols = Symbols::listed(&setting.functions(&["victim", "number"]));
    let resolved = payload.resolve(&setting.view(&symbols, ReturnForm::Plain), &[]).unwrap();
    let error = resolved.link(&setting.placement(&resolved)).unwrap_err();
    assert!(matches!(error, LinkError::OutOfRange { .. }), "{error}");
}

#[test]
fn a_room_of_another_size_is_refused() {
    let setting = Setting::of("x86_64");
    let resolved = resolve("long victim(void) { return 1; }", &kernel(&["victim"]), &[]).unwrap();
    let mut placement = setting.placement(&resolved);
    placement.text.end = placement.text.end - 1;
    let error = resolved.link(&placement).unwrap_err();
    assert!(matches!(error, LinkError::Room { part: "text", .. }), "{error}");
}

#[test]
fn per_cpu_variables_are_reached_by_numbers_that_wrap() {
    let setting = Setting::of("x86_64");
    let source = r#"
        int victim(void)
        {
            int number;
            asm("movl %%gs:cpu_number(%%rip), %0" : "=r"(number));
            return number;
        }
    "#;
    let mut list = vec![(0x1_fb80, b'A', "cpu_number")];
    list.extend(kernel(&["victim"]));
    let linked = link(&setting, &resolve(source, &list, &[]).unwrap());
    // movl %gs:disp32(%rip), %eax
    let load = linked.text.windows(3).position(|bytes| bytes == [0x65, 0x8b, 0x05]).unwrap();
    let field: [u8; 4] = linked.text[load + 3..load + 7].try_into().unwrap();
    let behind = setting.room + load as u64 + 7;
    let reached = behind.wrapping_add_signed(i64::from(i32::from_le_bytes(field)));
    assert_eq!(reached, 0x1_fb80);
}

#[test]
fn what_may_be_meant_otherwise_is_remarked_upon() {
    let source = "
        int jiffies; static long limit = 4;
        long victim(void) { return jiffies + limit++; }
    ";
    let names = ["victim", "victim.constprop.0", "limit", "other"];
    let resolved = resolve(source, &kernel(&names), &[]).unwrap();
    let said: Vec<String> = resolved.remarks().iter().map(ToString::to_string).collect();
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].contains("victim.constprop.0"), "{said:?}");
    assert!(said[1].contains("a variable limit of its own"), "{said:?}");
}
