use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use vm_memory::Bytes;

use super::place::{FUNCTIONS, Place};
use super::*;
use crate::arch::Arch;
use crate::arch::x86_64::X86_64;
use crate::journal::Journal;
use crate::patch::{Foreign, LeftBehind, VerifyError};
use crate::region::Part;
use crate::synthetic::{Faulty, Kind};

impl Place {
    /// Where a function may be redirected to.
    fn target(&self, nth: u64) -> Gva {
        self.region.range(Part::Code).start + 0x10_0000 + 64 * nth
    }

    /// Where the near branch in the pad of a function goes, and whether it is a call.
    fn branch(&self, function: usize) -> (Gva, bool) {
        branch_of(self.sites[function].at, &self.pad(function))
    }

    /// The bytes of the region's code at an address of it.
    fn code(&self, at: Gva, len: usize) -> Vec<u8> {
        let mut code = vec![0; len];
        let window = self.guest.region(Part::Code).memory;
        window
            .read_slice(&mut code, (at.0 - self.region.range(Part::Code).start.0) as usize)
            .unwrap();
        code
    }
}

fn branch_of(at: Gva, bytes: &[u8]) -> (Gva, bool) {
    let crate::arch::PadState::GuestEnabled { target } = X86_64.pad_state(at, bytes, None) else {
        panic!("{bytes:02x?} is no branch");
    };
    (target, bytes[0] == 0xe8)
}

const TRACED: Want = Want {
    traced: Some(Method::Call),
    counted: false,
    redirect: None,
    returns: false,
    arguments: ArgumentWords::NONE,
    measured: false,
    gate: None,
};

fn redirected(to: Gva) -> Want {
    Want { redirect: Some(to), ..Want::default() }
}

#[test]
fn a_pad_does_what_it_is_wanted_for() {
    let place = Place::new();
    let mut hooks = place.hooks();
    let site = &place.sites[0];
    let change = |hooks: &mut Hooks<'_>, want| {
        let changed = hooks.change(&[(site, want)], Foreign::Refuse, &mut ()).unwrap();
        assert_eq!((changed.written, changed.stops.len()), (1, 1));
        assert_eq!(
            (hooks.want(site.at), hooks.is_in_force(site.at)),
            (want, want != Want::default())
        );
    };
    change(&mut hooks, TRACED);
    let (logger, is_call) = place.branch(0);
    assert!(is_call);
    change(&mut hooks, redirected(place.target(0)));
    assert_eq!(place.branch(0), (place.target(0), false));
    change(&mut hooks, Want { redirect: Some(place.target(0)), ..TRACED });
    let [stub] = hooks.stubs() else { panic!("{:?}", hooks.stubs()) };
    assert_eq!(place.branch(0), (stub.at, false));
    assert_eq!((stub.pad, stub.to, stub.ip), (site.at, place.target(0), stub.at + 5));
    let code = place.code(stub.at, stub.len as usize);
    assert_eq!(branch_of(stub.at, &code[..5]), (logger, true));
    assert_eq!(branch_of(stub.ip, &code[5..]), (place.target(0), false));
    // The same stub serves again.
    change(&mut hooks, TRACED);
    change(&mut hooks, Want { redirect: Some(place.target(0)), ..TRACED });
    assert_eq!(hooks.stubs().len(), 1);
    change(&mut hooks, Want::default());
    assert_eq!(place.pads(), place.originals());
    // What is wanted already takes no stop.
    let changed = hooks.change(&[(site, Want::default())], Foreign::Refuse, &mut ()).unwrap();
    assert_eq!((changed.written, changed.stops.len()), (0, 0));
}

#[test]
fn hooks_that_are_dropped_leave_the_original_bytes() {
    let place = Place::new();
    let mut hooks = place.hooks();
    let wants: Vec<_> =
        place.sites.iter().map(|site| (site, redirected(place.target(1)))).collect();
    hooks.change(&wants, Foreign::Refuse, &mut ()).unwrap();
    hooks.change(&[(&place.sites[2], TRACED)], Foreign::Refuse, &mut ()).unwrap();
    let listed = hooks.pads().unwrap().sites;
    assert!(place.sites.iter().all(|site| listed.contains(site)));
    assert_eq!(hooks.in_force().count(), 4);
    drop(hooks);
    assert_eq!(place.pads(), place.originals());
}

struct Refuses(usize);

impl Witness for Refuses {
    fn before(&mut self, _: &mut dyn Stopped, _: Instant) -> Result<(), HeldBack> {
        self.0 += 1;
        Err(HeldBack)
    }
}

#[test]
fn what_the_witness_refuses_is_not_done_and_not_tried_again() {
    let place = Place::new();
    let mut hooks = place.hooks();
    hooks.change(&[(&place.sites[0], TRACED)], Foreign::Refuse, &mut ()).unwrap();
    let before = place.pads();
    let wants = [0, 1].map(|index| (&place.sites[index], redirected(place.target(0))));
    let mut witness = Refuses(0);
    let result = hooks.change(&wants, Foreign::Refuse, &mut witness);
    assert!(matches!(result, Err(HookError::HeldBack)));
    assert_eq!((witness.0, place.pads()), (1, before));
    assert_eq!(
        (hooks.want(place.sites[0].at), hooks.want(place.sites[1].at)),
        (TRACED, Want::default())
    );
}

#[test]
fn foreign_bytes_are_refused_or_left_alone_as_the_caller_wants() {
    let place = Place::new();
    let mut hooks = place.hooks();
    let [first, second, third] = [0, 1, 2].map(|index| &place.sites[index]);
    let wants = [first, second].map(|site| (site, redirected(place.target(0))));
    hooks.change(&wants, Foreign::Refuse, &mut ()).unwrap();
    let theirs = [0xcc; 5];
    place.guest.poke(first.at, &theirs);
    let foreign = PadBytes::new(&theirs);
    // Nothing is written where it must not be.
    let before = place.pads();
    let wants = [(first, TRACED), (third, TRACED)];
    let refused = hooks.change(&wants, Foreign::Refuse, &mut ()).unwrap_err();
    assert!(
        matches!(refused, HookError::Verify(VerifyError::Mismatch { found, .. }) if found == foreign)
    );
    assert_eq!(place.pads(), before);
    // And the rest is where it may.
    let wants = [first, second].map(|site| (site, redirected(place.target(1))));
    let changed = hooks.change(&wants, Foreign::Leave, &mut ()).unwrap();
    let left = [Left { function: first.name.clone().into(), at: first.at, found: Some(foreign) }];
    assert_eq!((changed.written, &changed.foreign[..]), (1, &left[..]));
    assert_eq!((place.pad(0), place.branch(1)), (foreign, (place.target(1), false)));
    assert_eq!((hooks.want(first.at), hooks.is_in_force(first.at)), (Want::default(), false));
    place.guest.poke(second.at, &theirs);
    let changed = hooks.release_all(&mut ()).unwrap();
    assert_eq!((changed.written, changed.foreign.len()), (0, 1));
    assert_eq!(place.pad(1), foreign);
}

#[test]
fn a_kernel_that_is_gone_is_not_written_to() {
    let place = Place::new();
    let mut hooks = place.hooks();
    let want = redirected(place.target(0));
    hooks.change(&[(&place.sites[0], want)], Foreign::Refuse, &mut ()).unwrap();
    let before = place.pads();
    place.guest.poke(place.guest.symbol("linux_banner"), b"Linux version 0.0");
    let refused = hooks.change(&[(&place.sites[1], want)], Foreign::Refuse, &mut ()).unwrap_err();
    assert!(matches!(refused, HookError::OtherKernel));
    assert_eq!(place.pads(), before);
    let wants = [(&place.sites[0], Want::default())];
    let changed = hooks.change(&wants, Foreign::Leave, &mut ()).unwrap();
    assert!(changed.gone && changed.written == 0);
    assert_eq!(hooks.want(place.sites[0].at), Want::default());
    drop(hooks);
    assert_eq!(place.pads(), before);
}

#[derive(Debug, Clone)]
enum Change {
    Trace(usize, Option<Method>),
    Redirect(usize, Option<u64>),
    Several(Vec<(usize, Option<Method>, Option<u64>)>),
}

fn change() -> impl Strategy<Value = Change> {
    let function = || 0..FUNCTIONS.len();
    let traced = || prop::option::of(prop_oneof![Just(Method::Call), Just(Method::Trap)]);
    let target = || prop::option::weighted(0.7, 0..3_u64);
    prop_oneof![
        (function(), traced()).prop_map(|(function, traced)| Change::Trace(function, traced)),
        (function(), target()).prop_map(|(function, to)| Change::Redirect(function, to)),
        prop::collection::btree_map(function(), (traced(), target()), 1..4).prop_map(|all| {
            Change::Several(all.into_iter().map(|(at, (traced, to))| (at, traced, to)).collect())
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn whatever_is_wanted_in_whatever_order_every_pad_holds_what_it_says(
        changes in prop::collection::vec((change(), any::<bool>()), 1..40),
    ) {
        let place = Place::new();
        let mut hooks = place.hooks();
        let mut model = [Want::default(); FUNCTIONS.len()];
        for (change, released) in changes {
            let before = model;
            match change {
                Change::Trace(function, traced) => model[function].traced = traced,
                Change::Redirect(function, to) => {
                    model[function].redirect = to.map(|nth| place.target(nth));
                }
                Change::Several(all) => for (function, traced, to) in all {
                    let redirect = to.map(|nth| place.target(nth));
                    model[function] = Want { traced, redirect, ..Want::default() };
                },
            }
            let wants: Vec<_> = FUNCTIONS.into_iter()
                .filter(|function| model[*function] != before[*function])
                .map(|function| (&place.sites[function], model[function]))
                .collect();
            if released {
                hooks.release(&wants, &mut ()).unwrap();
            } else {
                hooks.change(&wants, Foreign::Refuse, &mut ()).unwrap();
            }
            for function in FUNCTIONS {
                let site = &place.sites[function];
                match model[function] {
                    Want { traced: None, redirect: None, .. } => {
                        prop_assert_eq!(place.pad(function), site.original);
                    }
                    Want { traced: Some(Method::Call), redirect: None, .. } => {
                        prop_assert!(place.branch(function).1);
                    }
                    Want { traced: Some(Method::Trap), redirect: None, .. } => {
                        let pad = place.pad(function);
                        prop_assert_eq!((&pad[..2], &pad[2..]), (&[0xe6, 0xe8][..], &site.original[2..]));
                    }
                    Want { traced: None, redirect: Some(to), .. } => {
                        prop_assert_eq!(place.branch(function), (to, false));
                    }
                    Want { traced: Some(_), redirect: Some(to), .. } => {
                        let stub = hooks.stubs().iter().find(|s| s.pad == site.at && s.to == to);
                        prop_assert_eq!(place.branch(function), (stub.unwrap().at, false));
                    }
                }
                prop_assert_eq!(hooks.want(site.at), model[function]);
                // The engine answers the traps that are there and no others.
                let is_trapped = place.pad(function)[0] == 0xe6;
                prop_assert_eq!(place.guest.traps().at(site.at).is_some(), is_trapped);
            }
        }
        drop(hooks);
        prop_assert_eq!(place.pads(), place.originals());
    }
}

/// A journal's file of a test's own, removed with it.
struct File(PathBuf);

impl File {
    fn new(test: &str) -> Self {
        Self(std::env::temp_dir().join(format!("hooks-{}-{test}", std::process::id())))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // It may never have been made.
        let _ = fs::remove_file(&self.0);
    }
}

/// What happens to these functions one after the other in the tests of faults and of kills.
fn story(place: &Place) -> Vec<Vec<(&Site, Want)>> {
    let [a, b, c, _] = &place.sites[..] else { panic!("there are four") };
    let both = Want { redirect: Some(place.target(0)), ..TRACED };
    vec![
        vec![(a, TRACED), (b, TRACED)],
        vec![(a, both), (b, both), (c, redirected(place.target(1)))],
        vec![(a, redirected(place.target(2))), (c, redirected(place.target(2)))],
        vec![(a, TRACED), (b, Want::default()), (c, Want::default())],
        vec![(a, Want::default())],
    ]
}

/// Keeps the journal's file as it is while the guest stands, before the first write.
struct Keeps<'f> {
    file: &'f File,
    journal: Vec<u8>,
}

impl Witness for Keeps<'_> {
    fn before(&mut self, _: &mut dyn Stopped, _: Instant) -> Result<(), HeldBack> {
        self.journal = fs::read(&self.file.0).unwrap();
        Ok(())
    }
}

/// Puts back what the journal says, as the process does that finds it.
fn restore(place: &Place, file: &File) {
    let journal = Journal::open(&file.0).unwrap();
    let Some(left) = LeftBehind::new(&journal).unwrap() else { return };
    let mut stopped = place.guest.stop().unwrap();
    let reverted = left.prepare_revert(place.guest.ram()).run(&mut *stopped);
    assert_eq!((reverted.foreign.len(), reverted.failed.len()), (0, 0));
}

#[test]
fn a_process_that_is_killed_at_any_write_leaves_what_the_journal_can_restore() {
    for step in 0..story(&Place::new()).len() {
        // How many of the step's writes were done when it was killed; `None` if it was afterwards.
        for done in [Some(0), Some(1), Some(2), Some(3), None] {
            let place = Place::new();
            let file = File::new(&format!("killed-{step}-{done:?}"));
            let journal = Journal::open(&file.0).unwrap();
            let machine = Faulty::sound(&place.guest, &[]).with_journal(journal);
            let mut hooks = Hooks::new(&machine, &place.kernel, &place.region);
            let story = story(&place);
            for wants in &story[..step] {
                hooks.change(wants, Foreign::Refuse, &mut ()).unwrap();
            }
            let before = place.pads();
            let mut keeps = Keeps { file: &file, journal: Vec::new() };
            hooks.change(&story[step], Foreign::Refuse, &mut keeps).unwrap();
            // Nobody puts anything back.
            std::mem::forget(hooks);
            if let Some(done) = done {
                fs::write(&file.0, &keeps.journal).unwrap();
                for function in FUNCTIONS.into_iter().skip(done) {
                    place.guest.poke(place.sites[function].at, &before[function]);
                }
            }
            restore(&place, &file);
            assert_eq!(place.pads(), place.originals(), "step {step}, {done:?} writes");
        }
    }
}

#[test]
fn whatever_fails_once_a_change_is_made_whole_or_not_at_all_and_the_journal_knows_of_it() {
    const ALL: [Kind; 4] = [Kind::Read, Kind::Registers, Kind::Stop, Kind::Write];
    for step in 0..story(&Place::new()).len() {
        for nth in 0.. {
            let place = Place::new();
            let file = File::new(&format!("faults-{step}-{nth}"));
            let journal = Journal::open(&file.0).unwrap();
            let machine = Faulty::sound(&place.guest, &ALL).with_journal(journal);
            let mut hooks = Hooks::new(&machine, &place.kernel, &place.region);
            let story = story(&place);
            for wants in &story[..step] {
                hooks.change(wants, Foreign::Refuse, &mut ()).unwrap();
            }
            let before = (place.pads(), FUNCTIONS.map(|f| hooks.want(place.sites[f].at)));
            machine.strike_at(nth);
            let result = hooks.change(&story[step], Foreign::Refuse, &mut ());
            let struck = machine.has_struck();
            machine.mend();
            assert!(result.is_ok() || struck, "step {step}, fault {nth}: {result:?}");
            if result.is_err() {
                let after = (place.pads(), FUNCTIONS.map(|f| hooks.want(place.sites[f].at)));
                assert_eq!(after, before, "step {step}, fault {nth}");
            }
            let ours = |function: &usize| place.pad(*function) != place.sites[*function].original;
            let ours: Vec<Gva> =
                FUNCTIONS.iter().filter(|f| ours(f)).map(|f| place.sites[*f].at).collect();
            let noted = Journal::open(&file.0).unwrap().sites();
            let noted: Vec<Gva> = noted.iter().map(|site| site.at).collect();
            assert_eq!(noted, ours, "step {step}, fault {nth}");
            drop(hooks);
            assert_eq!(place.pads(), place.originals(), "step {step}, fault {nth}");
            assert_eq!(Journal::open(&file.0).unwrap().sites(), []);
            if !struck {
                assert!(nth > 10, "only {nth} things were made to fail");
                break;
            }
        }
    }
}
