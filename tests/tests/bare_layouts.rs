//! Every pad that kernels have had, in every state, in bare guests: what it is taken for, and what
//! being traced does to the guest.

use std::collections::{BTreeMap, BTreeSet};

use guest_images::{Architecture, Bare};
use patcher::addr::{Gpa, Gva};
use patcher::arch::Arch;
use patcher::arch::aarch64::Aarch64;
use patcher::arch::gate::{Comparison, Conditions, GatedValue, Operator, Rate};
use patcher::arch::s390x::S390X;
use patcher::arch::x86_64::X86_64;
use patcher::kernel::Refusal;
use patcher::machine::{Machine, Stopped};
use patcher::patch::{Patchset, Reverted, VerifyError};
use patcher::region::{Part, RETURN_SLOTS};
use tests::bare::{CALLS, CPUS, Driver, RegionAt};
use tests::redirects;
use vmm::devices::Console;
use vmm::kvm::{BareGuest, Hardware, Vm};
use vmm::qemu::{Architecture as Board, Launch, Qemu};

/// What the tests know about a bare guest.
struct Expected {
    /// What each function's pad is taken for: how far behind the changed instruction the function goes
    /// on, or the label of why it is refused.
    pads: &'static [(&'static str, Result<u16, &'static str>)],
    /// How many rounds the guest is to be busy with while functions are armed and put back.
    busy: u64,
    /// A breakpoint.
    breakpoint: &'static [u8],
    /// Functions whose first instruction is another than ours.
    probed_beside: &'static [&'static str],
    /// Whether the machine executes breakpoints: a KVM that emulates may end the guest at one.
    has_breakpoints: bool,
    /// Functions whose first instruction is ours.
    probed_at: &'static [&'static str],
    /// Whether a step is one instruction: to a KVM that emulates, `endbr64` and what follows are one.
    steps_are_single: bool,
}

const TRACED: Result<u16, &str> = Err("traced by the guest");
const NOT_YET: Result<u16, &str> = Err("not prepared yet");
const SHORT: Result<u16, &str> = Err("of short instructions");
const UNKNOWN: Result<u16, &str> = Err("of unknown bytes");

const ON_S390X: Expected = Expected {
    pads: &[
        ("block_316", Ok(12)),
        ("block_316_traced", TRACED),
        ("block_318", Ok(12)),
        ("block_318_traced", TRACED),
        ("block_319", Ok(18)),
        ("block_319_traced", TRACED),
        ("block_compiled", NOT_YET),
        ("block_compiled_316", NOT_YET),
        ("slot_idle", Ok(0)),
        ("slot_traced", TRACED),
        ("slot_foreign", UNKNOWN),
        ("plain_traced", TRACED),
        ("no_pad", UNKNOWN),
        ("fentry_nop", Ok(0)),
        ("fentry", NOT_YET),
        ("mcount", NOT_YET),
        ("mcount_nop", Ok(0)),
        ("hotpatch_0_3", Ok(0)),
        ("hotpatch_0_12", Ok(0)),
        ("hotpatch_3_3", Ok(0)),
        ("hotpatch_0_2", SHORT),
        ("patchable_3", SHORT),
    ],
    busy: 200,
    breakpoint: &[0, 2],
    has_breakpoints: true,
    probed_beside: &["block_316", "block_318"],
    probed_at: &["block_319", "slot_idle", "hotpatch_0_3"],
    steps_are_single: true,
};

const ON_X86_64: Expected = Expected {
    pads: &[
        ("nop", Ok(0)),
        ("nop_k8", Ok(0)),
        ("endbr_nop", Ok(0)),
        ("endbr_nop_k8", Ok(0)),
        ("sealed_nopw", Ok(0)),
        ("sealed_nopl", Ok(0)),
        ("traced", TRACED),
        ("endbr_traced", TRACED),
        ("jump_traced", TRACED),
        ("unknown_prefix", Err("behind unknown bytes")),
        ("no_pad", UNKNOWN),
        ("fentry_nop", Ok(0)),
        ("fentry", NOT_YET),
        ("fentry_nop_endbr", Ok(0)),
        ("fentry_endbr", NOT_YET),
        ("fentry_nop_padded", Ok(0)),
        ("patchable_5", SHORT),
    ],
    busy: 200,
    breakpoint: &[0xcc],
    has_breakpoints: true,
    probed_beside: &["endbr_nop", "fentry_nop_endbr"],
    probed_at: &["nop", "endbr_nop_k8"],
    steps_are_single: true,
};

#[test]
fn x86_64_functions_do_not_notice_that_they_are_traced() {
    let bare = Bare::new(Architecture::X86_64).unwrap();
    let mut segments = bare.segments().unwrap().into_iter();
    let (_, text) = segments.next().unwrap();
    let mut guest = BareGuest::new(&text).with_root(Gpa(bare.symbol("pml4").unwrap()));
    for (at, bytes) in segments {
        guest = guest.with_memory(Gpa(at), &bytes);
    }
    let hardware =
        Hardware { cpus: CPUS, memory: 4 << 20, rings: Some(2 << 20), ..Hardware::default() };
    let console = Console::new(Box::new(std::io::sink())).unwrap();
    let vm = Vm::bare(&hardware, guest, console).unwrap();
    vm.start();
    // Where the guest's own tables map the region.
    let gpas = Part::ALL.map(|part| vm.region(part).gpa.0);
    assert_eq!(gpas, [0, 2, 4, 6].map(|mib| (4 << 30) + (mib << 20)));
    let region = RegionAt { code: Gva(1 << 30), rings: Gva((1 << 30) + (6 << 20)) };
    let number = bare.symbol("cpu_number").unwrap() as i32;
    // A KVM that only emulates is slow, and may end the guest at a breakpoint.
    let expected =
        Expected { busy: 8, has_breakpoints: false, steps_are_single: false, ..ON_X86_64 };
    check(Driver::new(&vm, &X86_64, bare, region, number), &expected);
}

#[test]
fn x86_64_functions_under_qemu_do_not_either() {
    let bare = Bare::new(Architecture::X86_64).unwrap();
    let qemu = launch(Board::X86_64, &bare);
    let number = bare.symbol("cpu_number").unwrap() as i32;
    check(on_physical_addresses(&qemu, &X86_64, bare, number), &ON_X86_64);
}

const ON_AARCH64: Expected = Expected {
    pads: &[
        ("prepared", Ok(0)),
        ("prepared_traced", TRACED),
        ("signed", Ok(0)),
        ("bti_prepared", Ok(0)),
        ("bti_traced", TRACED),
        ("paciasp_prepared", Ok(0)),
        ("literal_prepared", Ok(0)),
        ("literal_traced", TRACED),
        ("no_pad", UNKNOWN),
        ("patchable_2", NOT_YET),
        ("patchable_2_bti", NOT_YET),
        ("patchable_4_2", NOT_YET),
    ],
    busy: 200,
    // brk #4
    breakpoint: &[0x80, 0x00, 0x20, 0xd4],
    has_breakpoints: true,
    probed_beside: &["prepared", "bti_prepared", "literal_prepared"],
    probed_at: &["prepared", "paciasp_prepared"],
    steps_are_single: true,
};

#[test]
fn aarch64_functions_do_not_notice_that_they_are_traced() {
    let bare = Bare::new(Architecture::Aarch64).unwrap();
    let qemu = launch(Board::Aarch64, &bare);
    let number = bare.symbol("cpu_number").unwrap() as i32;
    check(on_physical_addresses(&qemu, &Aarch64, bare, number), &ON_AARCH64);
}

#[test]
fn aarch64_functions_can_be_traced_once_the_kernel_has_prepared_them() {
    // mov x9, x30, as ftrace_init_nop writes it
    const KEEP_CALLER: [u8; 4] = [0xe9, 0x03, 0x1e, 0xaa];
    let bare = Bare::new(Architecture::Aarch64).unwrap();
    let qemu = launch(Board::Aarch64, &bare);
    let number = bare.symbol("cpu_number").unwrap() as i32;
    let mut driver = on_physical_addresses(&qemu, &Aarch64, bare, number);
    for name in ["patchable_2", "patchable_2_bti", "patchable_4_2"] {
        driver.write(driver.function(name).pad - 4, &KEEP_CALLER);
        let prepared = driver.text();
        one_function_is_armed_and_put_back(&mut driver, name);
        a_processor_may_stand_at_any_instruction(&mut driver, name, true);
        assert_eq!(driver.text(), prepared, "{name}");
    }
}

#[test]
fn s390x_functions_do_not_notice_that_they_are_traced() {
    let bare = Bare::new(Architecture::S390x).unwrap();
    let qemu = launch(Board::S390x, &bare);
    let driver = on_physical_addresses(&qemu, &S390X, bare, 0x3a0);
    check(driver, &ON_S390X);
}

fn launch(board: Board, bare: &Bare) -> Qemu {
    let launch =
        Launch { cpus: CPUS, memory: 16 << 20, rings: 2 << 20, ..Launch::new(board, bare.elf()) };
    let console = Console::new(Box::new(std::io::sink())).unwrap();
    let qemu = Qemu::launch(&launch, console).unwrap();
    qemu.start().unwrap();
    qemu
}

/// Drives a guest whose addresses are physical ones.
fn on_physical_addresses<'m>(
    machine: &'m dyn Machine,
    arch: &'static dyn Arch,
    bare: Bare,
    cpu_number: i32,
) -> Driver<'m> {
    let [code, rings] = [Part::Code, Part::Rings].map(|part| Gva(machine.region(part).gpa.0));
    Driver::new(machine, arch, bare, RegionAt { code, rings }, cpu_number)
}

fn check(mut driver: Driver<'_>, expected: &Expected) {
    pads_are_taken_for_what_they_are(&driver, expected);
    let idle: Vec<&str> =
        expected.pads.iter().filter(|(_, pad)| pad.is_ok()).map(|(name, _)| *name).collect();
    let untouched = driver.text();
    driver.run(1);
    assert_eq!(driver.recorded(), BTreeMap::new());

    for name in &idle {
        one_function_is_armed_and_put_back(&mut driver, name);
        assert_eq!(driver.text(), untouched, "{name}");
    }
    all_functions_are_armed_and_put_back_under_load(&mut driver, &idle, expected.busy);
    assert_eq!(driver.text(), untouched);
    redirects::check(&mut driver, &idle, expected.busy);
    returns_are_taken_under_load(&mut driver, &idle, expected.busy);
    assert_eq!(driver.text(), untouched);
    calls_are_measured_under_load(&mut driver, &idle, expected.busy);
    assert_eq!(driver.text(), untouched);
    calls_are_counted_under_load(&mut driver, &idle, expected.busy);
    assert_eq!(driver.text(), untouched);
    calls_are_filtered_under_load(&mut driver, &idle, expected.busy);
    assert_eq!(driver.text(), untouched);
    what_is_not_known_is_refused_and_nothing_is_written(&mut driver, &idle);
    assert_eq!(driver.text(), untouched);
    for name in expected.probed_beside {
        a_breakpoint_and_ours_both_work(&mut driver, name, expected);
        assert_eq!(driver.text(), untouched, "{name}");
    }
    for name in expected.probed_at {
        a_breakpoint_where_ours_would_be_is_refused(&mut driver, name, expected.breakpoint);
        assert_eq!(driver.text(), untouched, "{name}");
    }
    let mut trampolines = BTreeSet::new();
    for name in &idle {
        a_processor_may_stand_at_any_instruction(&mut driver, name, expected.steps_are_single);
        if trampolines.insert(driver.trampoline_of(name).start) {
            a_processor_may_stand_at_any_instruction_for_two_changes(&mut driver, name);
        }
        assert_eq!(driver.text(), untouched, "{name}");
    }
    driver.run(1);
    assert_eq!(driver.recorded(), BTreeMap::new());
}

fn pads_are_taken_for_what_they_are(driver: &Driver<'_>, expected: &Expected) {
    let judged: Vec<(&str, Result<u16, &str>)> = driver
        .functions()
        .iter()
        .map(|function| {
            let pad = driver.judge(&function.name);
            (&*function.name, pad.map(|pad| pad.layout.resume).map_err(|why| why.label()))
        })
        .collect();
    assert_eq!(judged, expected.pads);
}

/// So many rounds' calls.
fn calls(rounds: u64) -> [u64; CPUS] {
    [rounds * CALLS; CPUS]
}

fn one_function_is_armed_and_put_back(driver: &mut Driver<'_>, name: &str) {
    let sites = driver.sites(&[name]);
    let applied = driver.arm(sites.clone());
    assert_eq!((applied.sites().len(), applied.already()), (1, 0));
    driver.run(1);
    assert_eq!(driver.recorded(), [(name.to_owned(), calls(1))].into());

    // What is armed already is as wanted: there is nothing to write, and nothing to put back.
    let again = driver.arm(sites);
    assert_eq!((again.sites().len(), again.already()), (0, 1), "{name}");
    assert_eq!(driver.disarm(&again), Reverted::default());
    assert!(matches!(driver.judge(name), Err(Refusal::GuestTraces { target: Some(_) })), "{name}");
    driver.run(1);
    assert_eq!(driver.recorded(), [(name.to_owned(), calls(1))].into());

    assert_eq!(driver.disarm(&applied), Reverted { restored: 1, ..Reverted::default() });
    assert_eq!(driver.disarm(&applied), Reverted { already: 1, ..Reverted::default() });
    driver.run(1);
    assert_eq!(driver.recorded(), BTreeMap::new(), "{name}");
}

fn all_functions_are_armed_and_put_back_under_load(
    driver: &mut Driver<'_>,
    idle: &[&str],
    busy: u64,
) {
    let sites = driver.sites(idle);
    // Both processors are anywhere at all.
    driver.ask(busy);
    for _ in 0..50 {
        let applied = driver.arm(sites.clone());
        let restored = idle.len();
        assert_eq!(driver.disarm(&applied), Reverted { restored, ..Reverted::default() });
        driver.check();
    }
    driver.wait();
    driver.forget_recorded();

    let applied = driver.arm(sites);
    driver.run(3);
    driver.disarm(&applied);
    let expected = idle.iter().map(|name| ((*name).to_owned(), calls(3))).collect();
    assert_eq!(driver.recorded(), expected);
}

fn returns_are_taken_under_load(driver: &mut Driver<'_>, idle: &[&str], busy: u64) {
    let names: Vec<&str> = idle.iter().filter(|name| !driver.signs(name)).copied().collect();
    let sites = driver.returning(&names);
    driver.forget_recorded();
    driver.allow_other_returns(true);
    let applied = driver.arm(sites.clone());
    driver.run(3);
    driver.disarm(&applied);
    let both =
        |name: &&str| [((*name).to_owned(), calls(3)), (format!("{name} returns"), calls(3))];
    assert_eq!(driver.recorded(), names.iter().flat_map(both).collect());

    // Both processors are anywhere at all.
    driver.ask(busy);
    for _ in 0..50 {
        let applied = driver.arm(sites.clone());
        driver.disarm(&applied);
        driver.check();
    }
    driver.wait();
    driver.forget_recorded();
    assert_eq!(driver.slots(), (0, RETURN_SLOTS, 0), "calls out, slots free, calls without one");
    driver.allow_other_returns(false);
    driver.run(1);
}

fn calls_are_measured_under_load(driver: &mut Driver<'_>, idle: &[&str], busy: u64) {
    let names: Vec<&str> = idle.iter().filter(|name| !driver.signs(name)).copied().collect();
    // A thousand nanoseconds a tick.
    let sites = driver.measuring(&names, 1_000_000);
    driver.forget_recorded();
    driver.allow_other_returns(true);
    let applied = driver.arm(sites.clone());
    driver.run(3);
    let histograms = driver.measured(names.len());
    let both =
        |name: &&str| [((*name).to_owned(), calls(3)), (format!("{name} returns"), calls(3))];
    assert_eq!(driver.recorded(), names.iter().flat_map(both).collect());
    for (name, histogram) in names.iter().zip(&histograms) {
        assert_eq!(histogram.calls(), CPUS as u64 * calls(3)[0], "{name}");
        let lowest = |(bit, calls): (usize, &u64)| if bit == 0 { 0 } else { calls << bit };
        let lowest: u64 = histogram.buckets.iter().enumerate().map(lowest).sum();
        assert!((lowest..2 * lowest.max(1)).contains(&histogram.total_ns), "{name}: {histogram:?}");
        assert_eq!(histogram.total_ns % 1000, 0, "{name}: {histogram:?}");
    }
    assert!(histograms.iter().any(|histogram| histogram.total_ns > 0), "{histograms:?}");

    // Both processors are anywhere at all.
    driver.ask(busy);
    for _ in 0..50 {
        driver.disarm(&driver.arm(sites.clone()));
        driver.check();
    }
    driver.wait();
    driver.disarm(&applied);
    driver.forget_recorded();
    assert_eq!(driver.slots(), (0, RETURN_SLOTS, 0), "calls out, slots free, calls without one");
    driver.allow_other_returns(false);
    driver.run(1);
}

/// Every way through a gate, of which one call in four comes out to be recorded.
fn calls_are_filtered_under_load(driver: &mut Driver<'_>, idle: &[&str], busy: u64) {
    driver.forget_recorded();
    let compare = |place, bytes, signed, operator, value| Comparison {
        place,
        bytes,
        signed,
        operator,
        value,
    };
    // What no argument is: each of them is loaded, and made as wide as numbers are.
    let mut any: Vec<Vec<Comparison>> = [(1, true), (2, false), (4, true), (8, false), (1, false)]
        .into_iter()
        .zip(0..)
        .map(|((bytes, signed), register)| {
            let place = GatedValue::Register(register);
            vec![compare(place, bytes, signed, Operator::Greater, u64::MAX >> 1)]
        })
        .collect();
    any[3][0].value = u64::MAX;
    any.push(vec![
        compare(GatedValue::Stack(8), 8, false, Operator::AtLeast, 0),
        compare(GatedValue::Register(0), 2, true, Operator::AtMost, 0x7fff),
    ]);
    let rate = Some(Rate { every: 1, slack: 1 << 40 });
    let conditions = Conditions { any, one_in: Some(4), rate, ..Conditions::default() };
    let sites = driver.gating(idle, &conditions);
    let functions = idle.len() as u32;
    let before = driver.turned_away(functions, &conditions);
    let applied = driver.arm(sites.clone());
    driver.run(2 + busy);
    driver.disarm(&applied);
    let calls = (2 + busy) * CALLS * CPUS as u64;
    let away = driver.turned_away(functions, &conditions);
    let away: Vec<u64> = away.iter().zip(before).map(|(now, before)| now - before).collect();
    assert_eq!(away, vec![calls / 4 * 3; idle.len()]);
    for (name, recorded) in driver.recorded() {
        assert_eq!(recorded.iter().sum::<u64>(), calls / 4, "{name}");
    }

    // Both processors are anywhere at all.
    driver.ask(busy);
    for _ in 0..50 {
        let applied = driver.arm(sites.clone());
        driver.disarm(&applied);
        driver.check();
    }
    driver.wait();
    driver.run(1);
    driver.forget_recorded();
}

fn calls_are_counted_under_load(driver: &mut Driver<'_>, idle: &[&str], busy: u64) {
    driver.forget_recorded();
    let all = |calls: u64| idle.iter().map(|name| ((*name).to_owned(), calls)).collect();
    let of_both = |rounds: u64| rounds * CALLS * CPUS as u64;
    let sites = driver.counting(idle, false);
    assert_eq!(driver.counted(), all(0));
    let applied = driver.arm(sites.clone());
    driver.run(3);
    assert_eq!(driver.counted(), all(of_both(3)));
    assert_eq!(driver.recorded(), BTreeMap::new());
    driver.run(busy);
    driver.disarm(&applied);
    assert_eq!(driver.counted(), all(of_both(3 + busy)));

    // The same counters, and records of the same calls.
    let applied = driver.counting(idle, true);
    let applied = driver.arm(applied);
    driver.run(2);
    driver.disarm(&applied);
    assert_eq!(driver.counted(), all(of_both(5 + busy)));
    let recorded = idle.iter().map(|name| ((*name).to_owned(), calls(2))).collect();
    assert_eq!(driver.recorded(), recorded);

    // Both processors are anywhere at all.
    driver.ask(busy);
    for _ in 0..50 {
        let applied = driver.arm(sites.clone());
        driver.disarm(&applied);
        driver.check();
    }
    driver.wait();
    driver.run(1);
}

fn what_is_not_known_is_refused_and_nothing_is_written(driver: &mut Driver<'_>, idle: &[&str]) {
    let sites = driver.sites(idle);
    let last = sites.iter().max_by_key(|site| site.at).unwrap().clone();
    let mut strange = last.original.to_vec();
    strange[1] ^= 0x80;
    driver.write(last.at.0, &strange);
    let before = driver.text();
    assert_eq!(driver.judge(&last.function).unwrap_err().label(), "of unknown bytes");
    assert!(
        matches!(refused(driver, sites), VerifyError::Mismatch { function, .. } if function == last.function)
    );
    assert_eq!(driver.text(), before);
    driver.write(last.at.0, &last.original);
}

/// Why sites can't be armed.
fn refused(driver: &Driver<'_>, sites: Vec<patcher::patch::Site>) -> VerifyError {
    let patchset = Patchset::plan(sites).unwrap();
    let prepared = patchset.prepare(driver.machine.ram());
    driver.stopped(|stopped| prepared.verify(stopped, CPUS).map(drop).unwrap_err())
}

fn a_breakpoint_and_ours_both_work(driver: &mut Driver<'_>, name: &str, expected: &Expected) {
    let breakpoint = expected.breakpoint;
    let first = driver.function(name).address;
    let mut under = vec![0; breakpoint.len()];
    driver.machine.ram().read(Gpa(first), &mut under).unwrap();
    let both = |driver: &mut Driver<'_>| {
        if !expected.has_breakpoints {
            return;
        }
        let before = driver.probes();
        driver.run(2);
        assert_eq!(driver.probes(), before.map(|count| count + 2 * CALLS), "{name}");
        assert_eq!(driver.recorded(), [(name.to_owned(), calls(2))].into());
    };
    // The guest's first, then ours.
    driver.write(first, breakpoint);
    let sites = driver.sites(&[name]);
    let applied = driver.arm(sites.clone());
    both(driver);
    // It goes while ours is there, and comes again.
    driver.write(first, &under);
    driver.run(1);
    assert_eq!(driver.recorded(), [(name.to_owned(), calls(1))].into());
    driver.write(first, breakpoint);
    both(driver);
    driver.disarm(&applied);
    driver.write(first, &under);
}

fn a_breakpoint_where_ours_would_be_is_refused(
    driver: &mut Driver<'_>,
    name: &str,
    breakpoint: &[u8],
) {
    let sites = driver.sites(&[name]);
    driver.write(sites[0].at.0, breakpoint);
    let before = driver.text();
    assert_eq!(
        driver.judge(name).unwrap_err().to_string(),
        "a breakpoint stands on it: the guest probes the function, or is changing the pad"
    );
    assert!(matches!(refused(driver, sites.clone()), VerifyError::Mismatch { .. }));
    assert_eq!(driver.text(), before);
    driver.write(sites[0].at.0, &sites[0].original);
}

/// What is done to a function while a processor is on its way through it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Arm,
    Disarm,
    /// One after the other, in one stop.
    DisarmAndArm,
}

/// Has a processor stand at each instruction on its way through a function's pad and, if it is armed,
/// the trampoline; changes the pad there and lets the processor go on.
fn a_processor_may_stand_at_any_instruction(
    driver: &mut Driver<'_>,
    name: &str,
    steps_are_single: bool,
) {
    let trampoline = driver.trampoline_of(name);
    let pad = driver.function(name).pad;
    driver.call_only(Some(name));
    let through_pad = at_every_instruction(driver, name, Change::Arm);
    let inside = |place: &u64| trampoline.contains(&Gva(*place));
    assert!(
        !through_pad.iter().any(inside) && (!steps_are_single || through_pad.contains(&pad)),
        "{name}: {through_pad:x?}"
    );
    let through_both = at_every_instruction(driver, name, Change::Disarm);
    assert!(
        through_both.iter().filter(|place| inside(place)).count() >= 20,
        "{name}: {through_both:x?}"
    );
    driver.call_only(None);
}

/// The same for a function that is put back and armed again while the processor is on its way. What
/// that depends on is the trampoline.
fn a_processor_may_stand_at_any_instruction_for_two_changes(driver: &mut Driver<'_>, name: &str) {
    driver.call_only(Some(name));
    at_every_instruction(driver, name, Change::DisarmAndArm);
    driver.call_only(None);
}

/// Makes one change at each instruction from the function's first to the end of its pad and of the
/// trampoline, each time in a call of its own; tells where they are.
fn at_every_instruction(driver: &mut Driver<'_>, name: &str, change: Change) -> Vec<u64> {
    let sites = driver.sites(&[name]);
    let (pad, body) = (driver.function(name).pad, driver.symbol("body"));
    let mut places = Vec::new();
    while places.last() != Some(&body) {
        let before = (change != Change::Arm).then(|| driver.arm(sites.clone()));
        driver.hold_before_a_call();
        let mut stopped = driver.machine.stop().unwrap();
        driver.step_to(&mut *stopped, name);
        let begin = driver.function(name).address;
        let place = (0..places.len()).fold(begin, |_, _| driver.step(&mut *stopped));
        let passed = !(begin..=pad).contains(&place);
        let ram = driver.machine.ram();
        let arm = |stopped: &mut dyn Stopped| {
            let patchset = Patchset::plan(sites.clone()).unwrap();
            patchset.prepare(ram).verify(stopped, CPUS).unwrap().apply().unwrap()
        };
        let after = match &before {
            None => Some(arm(&mut *stopped)),
            Some(before) => {
                let reverted = before.prepare_revert(ram).run(&mut *stopped);
                assert_eq!(reverted, Reverted { restored: 1, ..Reverted::default() });
                (change == Change::DisarmAndArm).then(|| arm(&mut *stopped))
            }
        };
        stopped.resume().unwrap();
        driver.wait();
        // The call that was under way is recorded if it met our instruction, and those behind it if
        // they do.
        let first = u64::from(match change {
            Change::Arm => !passed,
            Change::Disarm => passed,
            Change::DisarmAndArm => true,
        });
        let of_first = if after.is_some() { CALLS - 1 + first } else { first };
        let of_second = if before.is_some() { CALLS } else { 0 };
        let expected = match [of_first, of_second] {
            [0, 0] => BTreeMap::new(),
            counts => [(name.to_owned(), counts)].into(),
        };
        assert_eq!(driver.recorded(), expected, "{name}, {change:?} at {place:#x}, {places:x?}");
        driver.run(1);
        let expected = after.iter().map(|_| (name.to_owned(), calls(1))).collect();
        assert_eq!(driver.recorded(), expected, "{name}, {change:?} at {place:#x}, {places:x?}");
        if let Some(after) = after {
            driver.disarm(&after);
        }
        places.push(place);
        assert!(places.len() < 100, "{name}: {places:x?}");
    }
    places
}
