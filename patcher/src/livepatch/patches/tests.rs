use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use proptest::prelude::*;
use vm_memory::Bytes;

use super::*;
use crate::arch::x86_64::X86_64;
use crate::arch::{Arch, PadBytes, PadState};
use crate::hook::place::{FUNCTIONS, Place};
use crate::hook::{HookError, Method, Want};
use crate::journal::Journal;
use crate::kernel::{Refusal, Site};
use crate::livepatch::tests::compiler;
use crate::machine::Machine;
use crate::patch::Foreign;
use crate::region::{PART_BYTES, Part};
use crate::synthetic::{Faulty, Kind};
use crate::trace::filter::Glob;

/// A payload that replaces these functions of the synthetic guest.
fn payload(functions: &[usize]) -> Vec<u8> {
    let define = |function: &usize| {
        format!("long {}(long x) {{ return (counter += x) + {function}; }}\n", name(*function))
    };
    let source =
        format!("static long counter = 7;\n{}", functions.iter().map(define).collect::<String>());
    compiler::X86_64.compile(&source, &[])
}

fn name(function: usize) -> String {
    match function {
        0 => "vfs_read".to_owned(),
        1 => "vfs_write".to_owned(),
        other => format!("function_{other:05}"),
    }
}

static ONE: LazyLock<Vec<u8>> = LazyLock::new(|| payload(&[0]));
static TWO: LazyLock<Vec<u8>> = LazyLock::new(|| payload(&[0, 1]));
static OTHERS: LazyLock<Vec<u8>> = LazyLock::new(|| payload(&[1, 2, 3]));

impl Place {
    /// Where each function's pad jumps to, as far as it does.
    fn jumps(&self) -> Vec<Option<Gva>> {
        let jump = |(site, bytes): (&Site, PadBytes)| match X86_64.pad_state(site.at, &bytes, None)
        {
            PadState::GuestEnabled { target } if bytes[0] == 0xe9 => Some(target),
            _ => None,
        };
        self.sites.iter().zip(self.pads()).map(jump).collect()
    }

    /// What the payload room of a part holds.
    fn memory(&self, part: Part) -> Vec<u8> {
        let mut bytes = vec![0; PART_BYTES as usize];
        self.guest.region(part).memory.read_slice(&mut bytes, 0).unwrap();
        bytes
    }

    /// Has a task sleep with this address on its stack.
    fn sleep_at(&self, at: u64) {
        self.guest.poke_u64(self.guest.task("sleeper/3").sp + 0x40, at);
    }

    /// An address in the body of a function.
    fn inside(&self, function: usize) -> u64 {
        self.sites[function].at.0 + 17
    }
}

fn apply<'m>(
    patches: &mut Patches<'m>,
    hooks: &mut Hooks<'m>,
    file: &[u8],
    options: &PatchOptions,
) -> AppliedPatch {
    let pending = patches.prepare(hooks, file, options).unwrap();
    match patches.attempt(hooks, pending).unwrap() {
        Attempt::Applied(applied) => applied,
        Attempt::Busy(_, standers) => panic!("{standers:?}"),
    }
}

fn revert<'m>(patches: &mut Patches<'m>, hooks: &mut Hooks<'m>, id: PatchId) -> RevertedPatch {
    match patches.revert(hooks, id, None).unwrap() {
        RevertAttempt::Reverted(reverted) => reverted,
        RevertAttempt::Busy(standers) => panic!("{standers:?}"),
    }
}

fn refused<'m>(
    patches: &mut Patches<'m>,
    hooks: &mut Hooks<'m>,
    file: &[u8],
    options: &PatchOptions,
) -> PatchError {
    match patches.prepare(hooks, file, options) {
        Ok(pending) => patches.attempt(hooks, pending).unwrap_err(),
        Err(error) => error,
    }
}

fn plain() -> PatchOptions {
    PatchOptions::default()
}

fn replacing() -> PatchOptions {
    PatchOptions { replace: true, ..plain() }
}

fn states(patches: &Patches<'_>, hooks: &Hooks<'_>) -> Vec<(u64, PatchState)> {
    patches.list(hooks).into_iter().map(|info| (info.id.0, info.state)).collect()
}

#[test]
fn a_patch_is_applied_and_taken_back() {
    let place = Place::new();
    let (mut hooks, mut patches) = (place.hooks(), Patches::new());
    let applied = apply(&mut patches, &mut hooks, &TWO, &plain());
    assert_eq!((applied.id, applied.functions, applied.replaced.len()), (PatchId(1), 2, 0));
    let [info] = &patches.list(&hooks)[..] else { panic!("one patch") };
    assert_eq!(
        (info.state, info.is_consistent, info.digest.len()),
        (PatchState::Applied, true, 64)
    );
    let jumps = place.jumps();
    for (function, info) in info.functions.iter().enumerate() {
        assert_eq!((&*info.name, info.in_force), (&*name(function), Some(PatchId(1))));
        assert_eq!(jumps[function], Some(info.new));
    }
    assert_eq!(jumps[2..], [None, None]);
    let text = place.memory(Part::Code);
    let start = (info.functions[0].new.0 - place.region.range(Part::Code).start.0) as usize;
    assert_ne!(text[start..start + 8], [0; 8]);
    assert_eq!(place.memory(Part::Data)[..8], 7_u64.to_le_bytes());

    let reverted = revert(&mut patches, &mut hooks, PatchId(1));
    assert_eq!((reverted.functions, reverted.is_gone, reverted.foreign.len()), (2, false, 0));
    assert_eq!(place.pads(), place.originals());
    assert_eq!(states(&patches, &hooks), [(1, PatchState::Reverted)]);
    let again = patches.revert(&mut hooks, PatchId(1), None).unwrap_err();
    assert_eq!(again.to_string(), "patch 1 is not applied: it is reverted");
    let never = patches.revert(&mut hooks, PatchId(9), None).unwrap_err();
    assert_eq!(never.to_string(), "there is no patch 9");
}

#[test]
fn patches_stack_and_are_reverted_in_any_order() {
    let place = Place::new();
    let (mut hooks, mut patches) = (place.hooks(), Patches::new());
    apply(&mut patches, &mut hooks, &TWO, &plain());
    let below = place.jumps();
    apply(&mut patches, &mut hooks, &ONE, &plain());
    apply(&mut patches, &mut hooks, &OTHERS, &plain());
    let superseded = PatchState::Superseded(PatchId(3));
    let applied = PatchState::Applied;
    assert_eq!(states(&patches, &hooks), [(1, superseded), (2, applied), (3, applied)]);
    let reverted = revert(&mut patches, &mut hooks, PatchId(3));
    assert!(reverted.stop.is_some());
    assert_eq!(place.jumps()[1..], [below[1], None, None]);
    assert_eq!(states(&patches, &hooks)[0], (1, applied));
    // What is not in force goes without a stop, and nothing changes.
    let before = place.pads();
    apply(&mut patches, &mut hooks, &TWO, &plain());
    let over = place.pads();
    assert!(revert(&mut patches, &mut hooks, PatchId(2)).stop.is_none());
    assert_eq!(place.pads(), over);
    assert_ne!(before, over);
    revert(&mut patches, &mut hooks, PatchId(4));
    assert_eq!(place.jumps(), below);
    revert(&mut patches, &mut hooks, PatchId(1));
    assert_eq!(place.pads(), place.originals());
    assert!(patches.is_empty());
}

#[test]
fn a_cumulative_patch_takes_the_place_of_all_before_it() {
    let place = Place::new();
    let (mut hooks, mut patches) = (place.hooks(), Patches::new());
    apply(&mut patches, &mut hooks, &ONE, &plain());
    apply(&mut patches, &mut hooks, &OTHERS, &plain());
    let applied = apply(&mut patches, &mut hooks, &TWO, &replacing());
    assert_eq!(applied.replaced, [PatchId(1), PatchId(2)]);
    assert_eq!(place.pads()[2..], place.originals()[2..]);
    let replaced = PatchState::Replaced(PatchId(3));
    let expected = [(1, replaced), (2, replaced), (3, PatchState::Applied)];
    assert_eq!(states(&patches, &hooks), expected);
    revert(&mut patches, &mut hooks, PatchId(3));
    assert_eq!(place.pads(), place.originals());
}

#[test]
fn somebody_in_a_function_is_waited_for_where_that_matters() {
    let place = Place::new();
    let (mut hooks, mut patches) = (place.hooks(), Patches::new());
    place.sleep_at(place.inside(1));
    let pending = patches.prepare(&hooks, &TWO, &plain()).unwrap();
    let Attempt::Busy(pending, standers) = patches.attempt(&mut hooks, pending).unwrap() else {
        panic!("a task sleeps there")
    };
    let [stander] = &standers[..] else { panic!("{standers:?}") };
    assert_eq!((&*stander.function, &*stander.comm.to_string()), ("vfs_write", "sleeper/3"));
    assert_eq!(place.pads(), place.originals());
    // It has left.
    place.sleep_at(0);
    let Attempt::Applied(applied) = patches.attempt(&mut hooks, *pending).unwrap() else {
        panic!("nobody is there")
    };
    // The same on the way back, in the new functions.
    let new = patches.list(&hooks)[0].functions[1].new;
    place.sleep_at(new.0);
    let busy = patches.revert(&mut hooks, applied.id, None).unwrap();
    assert!(matches!(busy, RevertAttempt::Busy(standers) if &*standers[0].function == "patch 1"));
    assert_eq!(place.jumps()[1], Some(new));
    place.sleep_at(0);
    revert(&mut patches, &mut hooks, applied.id);
    assert_eq!(place.pads(), place.originals());

    // A single function may be replaced while somebody is in it, unless it is asked otherwise.
    place.sleep_at(place.inside(0));
    let consistent = PatchOptions { consistent: true, ..plain() };
    let pending = patches.prepare(&hooks, &ONE, &consistent).unwrap();
    let busy = patches.attempt(&mut hooks, pending).unwrap();
    assert!(matches!(busy, Attempt::Busy(..)));
    drop(busy);
    apply(&mut patches, &mut hooks, &ONE, &plain());
    // Who has stayed in the kernel's own function is still there for the next patch.
    let pending = patches.prepare(&hooks, &TWO, &plain()).unwrap();
    let busy = patches.attempt(&mut hooks, pending).unwrap();
    assert!(matches!(busy, Attempt::Busy(_, standers) if &*standers[0].function == "vfs_read"));
}

#[test]
fn memory_is_not_used_again_while_somebody_may_be_in_it() {
    let place = Place::new();
    let (mut hooks, mut patches) = (place.hooks(), Patches::new());
    let new = |patches: &Patches<'_>, hooks: &Hooks<'_>| {
        patches.list(hooks).last().unwrap().functions[0].new
    };
    let first = apply(&mut patches, &mut hooks, &ONE, &plain()).id;
    let there = new(&patches, &hooks);
    // It sleeps in the new function, and that is taken back all the same.
    place.sleep_at(there.0 + 3);
    revert(&mut patches, &mut hooks, first);
    assert_eq!(place.pads(), place.originals());
    let second = apply(&mut patches, &mut hooks, &ONE, &plain()).id;
    let elsewhere = new(&patches, &hooks);
    assert_ne!(elsewhere, there);
    revert(&mut patches, &mut hooks, second);
    place.sleep_at(0);
    // Now that it is gone both are free, and used again by a write in the stop.
    let third = patches.prepare(&hooks, &ONE, &plain()).unwrap();
    assert!(!third.text.is_empty());
    assert!(matches!(patches.attempt(&mut hooks, third).unwrap(), Attempt::Applied(_)));
    assert_eq!(new(&patches, &hooks), there);
}

#[test]
fn a_stub_that_leads_to_a_payload_counts_as_part_of_it() {
    let place = Place::new();
    let (mut hooks, mut patches) = (place.hooks(), Patches::new());
    let id = apply(&mut patches, &mut hooks, &ONE, &plain()).id;
    let there = place.jumps()[0];
    let want = Want { traced: Some(Method::Call), ..hooks.want(place.sites[0].at) };
    hooks.change(&[(&place.sites[0], want)], Foreign::Refuse, &mut ()).unwrap();
    assert_eq!(place.jumps()[0], Some(hooks.stubs()[0].at));
    // Preempted in the logger, with the stub's address on the stack.
    place.sleep_at(hooks.stubs()[0].ip.0);
    revert(&mut patches, &mut hooks, id);
    // It is still traced.
    assert_eq!(place.guest.peek(place.sites[0].at, 1), [0xe8]);
    apply(&mut patches, &mut hooks, &ONE, &plain());
    assert_ne!(patches.list(&hooks)[1].functions[0].new, there.unwrap());
    assert!(hooks.want(place.sites[0].at).traced.is_some());
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_left_of_it() {
    let place = Place::new();
    let (mut hooks, mut patches) = (place.hooks(), Patches::new());
    let code = place.memory(Part::Code);
    let release = |text: &str| PatchOptions { release: Some(Glob::new(text)), ..plain() };
    let error = refused(&mut patches, &mut hooks, &ONE, &release("6.1.*")).to_string();
    assert!(error.starts_with("the guest runs 6.9.42-synthetic, and the payload is for 6.1.*"));
    let build = PatchOptions { build_id: Some("ab12".to_owned()), ..plain() };
    let error = refused(&mut patches, &mut hooks, &ONE, &build);
    assert!(matches!(error, PatchError::BuildId { .. }), "{error}");
    let error = refused(&mut patches, &mut hooks, b"no object", &plain());
    assert!(matches!(error, PatchError::Payload(_)), "{error}");
    // Pads that must not be written: all that are wrong are named.
    place.guest.poke(place.sites[1].at, &[0xcc]);
    place.guest.poke(place.sites[2].at, &[0xe8, 1, 2, 3, 4]);
    let error = refused(&mut patches, &mut hooks, &OTHERS, &plain());
    let PatchError::Functions(fixed) = &error else { panic!("{error}") };
    assert_eq!(fixed[0].why, Fixed::Refused(Refusal::Changing));
    assert!(matches!(fixed[1].why, Fixed::Refused(Refusal::GuestTraces { .. })));
    assert!(error.to_string().contains("function_00002 can't be replaced: its pad is left alone"));
    let thunk = "long its_return_thunk(void) { return 1; }".to_owned();
    let thunk = compiler::X86_64.compile(&thunk, &[]);
    let error = refused(&mut patches, &mut hooks, &thunk, &plain());
    assert!(
        matches!(&error, PatchError::Functions(fixed) if fixed[0].why == Fixed::NoPad),
        "{error}"
    );
    // None of it came as far as memory.
    assert!(place.memory(Part::Code) == code);
    // Larger than the room for it.
    let large = "static char data[3 << 20]; void *vfs_read(void) { return data; }";
    let large = compiler::X86_64.compile(large, &[]);
    let error = refused(&mut patches, &mut hooks, &large, &plain());
    assert!(matches!(error, PatchError::Region(_)), "{error}");
    // Too long a stop.
    let at_once = PatchOptions { max_stop: Some(Duration::ZERO), ..plain() };
    let before = place.pads();
    let error = refused(&mut patches, &mut hooks, &ONE, &at_once);
    assert!(matches!(error, PatchError::TooLong { .. }), "{error}");
    assert_eq!((place.pads(), patches.len()), (before, 0));
}

#[test]
fn a_guest_that_was_reset_has_no_patches_and_is_not_written_to() {
    let place = Place::new();
    let (mut hooks, mut patches) = (place.hooks(), Patches::new());
    let id = apply(&mut patches, &mut hooks, &TWO, &plain()).id;
    let late = patches.prepare(&hooks, &OTHERS, &plain()).unwrap();
    place.guest.poke(place.guest.symbol("linux_banner"), b"Linux version 0.0");
    let (pads, memory) = (place.pads(), Part::ALL.map(|part| place.memory(part)));
    let error = refused(&mut patches, &mut hooks, &ONE, &plain());
    assert!(matches!(error, PatchError::Hook(HookError::OtherKernel)), "{error}");
    let reverted = revert(&mut patches, &mut hooks, id);
    assert!(reverted.is_gone && reverted.stop.is_none());
    let gone = patches.attempt(&mut hooks, late).unwrap_err();
    assert!(matches!(gone, PatchError::Hook(HookError::OtherKernel)), "{gone}");
    assert_eq!(states(&patches, &hooks), [(1, PatchState::Gone)]);
    drop(hooks);
    assert_eq!((place.pads(), Part::ALL.map(|part| place.memory(part))), (pads, memory));
}

#[test]
fn a_pad_that_the_guest_has_written_over_is_told_and_left_alone() {
    let place = Place::new();
    let (mut hooks, mut patches) = (place.hooks(), Patches::new());
    let id = apply(&mut patches, &mut hooks, &TWO, &plain()).id;
    place.guest.poke(place.sites[0].at, &[0xcc; 5]);
    assert_eq!(patches.list(&hooks)[0].functions[0].in_force, None);
    let reverted = revert(&mut patches, &mut hooks, id);
    assert_eq!(reverted.foreign, ["vfs_read".into()]);
    assert_eq!(place.pads()[0], PadBytes::new(&[0xcc; 5]));
    assert_eq!(place.pads()[1..], place.originals()[1..]);
}

/// A journal's file of a test's own, removed with it.
struct File(PathBuf);

impl File {
    fn new(test: &str) -> Self {
        Self(std::env::temp_dir().join(format!("patches-{}-{test}", std::process::id())))
    }

    /// The pads that it says may hold bytes of ours.
    fn noted(&self) -> Vec<Gva> {
        let journal = Journal::open(&self.0).unwrap();
        let mut noted: Vec<Gva> = journal.sites().iter().map(|site| site.at).collect();
        noted.sort_unstable();
        noted
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // It may never have been made.
        let _ = fs::remove_file(&self.0);
    }
}

/// What is done in the tests of faults, once patch 1 has replaced two functions.
#[derive(Debug, Clone, Copy)]
enum Deed {
    Apply,
    Replace,
    Revert,
}

fn does<'m>(
    deed: Deed,
    patches: &mut Patches<'m>,
    hooks: &mut Hooks<'m>,
) -> Result<(), PatchError> {
    let options = if matches!(deed, Deed::Replace) { replacing() } else { plain() };
    match deed {
        Deed::Apply | Deed::Replace => {
            let pending = patches.prepare(hooks, &OTHERS, &options)?;
            assert!(matches!(patches.attempt(hooks, pending)?, Attempt::Applied(_)));
        }
        Deed::Revert => {
            let attempt = patches.revert(hooks, PatchId(1), None)?;
            let RevertAttempt::Reverted(reverted) = attempt else { panic!("nobody is there") };
            assert!(!reverted.is_gone);
        }
    }
    Ok(())
}

#[test]
fn whatever_fails_once_the_guest_is_as_it_was_and_the_next_try_succeeds() {
    const ALL: [Kind; 4] = [Kind::Read, Kind::Registers, Kind::Stop, Kind::Write];
    let place = Place::new();
    for deed in [Deed::Apply, Deed::Replace, Deed::Revert] {
        // A fault at each of the first things, then at some of the many words of stacks.
        let mut nth = 0;
        loop {
            let file = File::new(&format!("{deed:?}-{nth}"));
            let journal = Journal::open(&file.0).unwrap();
            let machine = Faulty::sound(&place.guest, &ALL).with_journal(journal);
            let mut hooks = Hooks::new(&machine, &place.kernel, &place.region);
            let mut patches = Patches::new();
            apply(&mut patches, &mut hooks, &TWO, &plain());
            let before = (place.pads(), states(&patches, &hooks));
            machine.strike_at(nth);
            let result = does(deed, &mut patches, &mut hooks);
            let struck = machine.has_struck();
            machine.mend();
            assert!(result.is_ok() || struck, "{deed:?}, fault {nth}: {result:?}");
            if result.is_err() {
                let after = (place.pads(), states(&patches, &hooks));
                assert_eq!(after, before, "{deed:?}, fault {nth}: {result:?}");
            }
            let ours = place.sites.iter().zip(place.pads());
            let ours = ours.filter(|(site, now)| *now != site.original).map(|(site, _)| site.at);
            assert_eq!(file.noted(), ours.collect::<Vec<_>>(), "{deed:?}, fault {nth}");
            if let Err(error) = result {
                let again = does(deed, &mut patches, &mut hooks);
                assert!(again.is_ok(), "{deed:?}, fault {nth}, {error}: {again:?}");
            }
            drop(hooks);
            assert_eq!(place.pads(), place.originals(), "{deed:?}, fault {nth}");
            assert_eq!(file.noted(), []);
            if !struck {
                assert!(nth > 50, "only {nth} things were made to fail");
                break;
            }
            nth += if nth < 60 { 1 } else { 1 + nth / 12 };
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Trace(usize, bool),
    Apply(usize, bool),
    Revert(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..FUNCTIONS.len(), any::<bool>()).prop_map(|(function, on)| Step::Trace(function, on)),
        (0..3_usize, prop::bool::weighted(0.2)).prop_map(|(file, all)| Step::Apply(file, all)),
        (0..6_usize).prop_map(Step::Revert),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn whatever_is_traced_applied_and_reverted_every_pad_does_what_the_last_of_them_say(
        steps in prop::collection::vec(step(), 1..30),
    ) {
        let files: [(&[u8], &[usize]); 3] =
            [(&ONE, &[0]), (&TWO, &[0, 1]), (&OTHERS, &[1, 2, 3])];
        let place = Place::new();
        let (mut hooks, mut patches) = (place.hooks(), Patches::new());
        let mut traced = [false; FUNCTIONS.len()];
        // Patches that are applied, with their functions and where the new ones are.
        let mut model: Vec<(PatchId, Vec<(usize, Gva)>)> = Vec::new();
        for step in steps {
            match step {
                Step::Trace(function, on) => {
                    traced[function] = on;
                    let site = &place.sites[function];
                    let want = Want { traced: on.then_some(Method::Call), ..hooks.want(site.at) };
                    hooks.change(&[(site, want)], Foreign::Refuse, &mut ()).unwrap();
                }
                Step::Apply(file, replace) => {
                    let (bytes, functions) = files[file];
                    let options = PatchOptions { replace, ..plain() };
                    let id = apply(&mut patches, &mut hooks, bytes, &options).id;
                    if replace {
                        model.clear();
                    }
                    let info = patches.list(&hooks).pop().unwrap();
                    let new = info.functions.iter().map(|function| function.new);
                    model.push((id, functions.iter().copied().zip(new).collect()));
                }
                Step::Revert(nth) if nth < model.len() => {
                    let (id, _) = model.remove(nth);
                    revert(&mut patches, &mut hooks, id);
                }
                Step::Revert(_) => {}
            }
            for function in FUNCTIONS {
                let site = &place.sites[function];
                let of = |(_, all): &(PatchId, Vec<(usize, Gva)>)| {
                    all.iter().find(|(index, _)| *index == function).map(|(_, new)| *new)
                };
                let to = model.iter().rev().find_map(of);
                let bytes = place.pads()[function];
                let jump = place.jumps()[function];
                let stub = || hooks.stubs().iter().find(|s| s.pad == site.at && Some(s.to) == to);
                match (traced[function], to) {
                    (false, None) => prop_assert_eq!(bytes, site.original),
                    (true, None) => prop_assert_eq!(bytes[0], 0xe8),
                    (false, to) => prop_assert_eq!(jump, to),
                    (true, _) => prop_assert_eq!(jump, stub().map(|stub| stub.at)),
                }
            }
            prop_assert_eq!(patches.len(), model.len());
        }
        drop(hooks);
        prop_assert_eq!(place.pads(), place.originals());
    }
}
