use std::cell::Cell;
use std::rc::Rc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::machine::{Registers, StopTimes, X86Registers};
use crate::machine::{StopError, Stopped, TextWrite, TextWriteError};
use crate::mem::{MemError, PhysMem};

const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
const CALL: [u8; 5] = [0xe8, 1, 2, 3, 4];
const TEXT: u64 = 0x1000;
const VA: u64 = 0xffff_ffff_8100_0000;

/// One thing that can be made to fail, counted over everything that is asked of the guest.
#[derive(Clone, Default)]
struct Fault(Rc<Cell<Option<usize>>>);

impl Fault {
    fn at(nth: usize) -> Self {
        Self(Rc::new(Cell::new(Some(nth))))
    }

    fn strikes(&self) -> bool {
        match self.0.get() {
            Some(0) => {
                self.0.set(None);
                true
            }
            Some(left) => {
                self.0.set(Some(left - 1));
                false
            }
            None => false,
        }
    }

    /// Whether there was nothing left to fail.
    fn never_struck(&self) -> bool {
        self.0.get().is_some()
    }
}

struct Guest {
    ram: GuestMemoryMmap<()>,
    pcs: Vec<u64>,
    fault: Fault,
    /// Writes that fail whenever they are tried, by address.
    broken: Vec<Gpa>,
}

impl Guest {
    fn new() -> Self {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        for index in 0..8 {
            ram.write_slice(&NOP, GuestAddress(TEXT + index * 0x40)).unwrap();
        }
        Self { ram, pcs: vec![VA, VA + 0x40], fault: Fault::default(), broken: Vec::new() }
    }

    fn sites() -> Vec<Site> {
        (0..8)
            .map(|index| Site {
                function: format!("function_{index}").into(),
                at: Gva(VA + index * 0x40),
                gpa: Gpa(TEXT + index * 0x40),
                original: PadBytes::new(&NOP),
                replacement: PadBytes::new(&CALL),
            })
            .collect()
    }

    fn text(&self) -> Vec<u8> {
        let mut text = vec![0; 0x400];
        self.ram.read_slice(&mut text, GuestAddress(TEXT)).unwrap();
        text
    }
}

impl Stopped for Guest {
    fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError> {
        if self.fault.strikes() {
            return Err(StopError::Gone);
        }
        Ok(Registers::X86_64(X86Registers { rip: self.pcs[vcpu], ..Default::default() }))
    }

    fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError> {
        for (index, write) in writes.iter().enumerate() {
            let struck = self.fault.strikes();
            if struck || self.broken.contains(&write.at) {
                // The worst that failing writes do: half of it, or something else.
                let half = if struck { &write.bytes[..2] } else { &[0xff; 2] };
                self.ram.write_slice(half, write.at.into()).unwrap();
                return Err(TextWriteError { index, at: write.at, reason: "injected".into() });
            }
            self.ram.write_slice(write.bytes, write.at.into()).unwrap();
        }
        Ok(())
    }

    fn resume(self: Box<Self>) -> Result<StopTimes, StopError> {
        Ok(StopTimes::default())
    }
}

/// Guest RAM whose reads can be made to fail.
struct FaultyRam {
    ram: GuestMemoryMmap<()>,
    left: std::sync::atomic::AtomicUsize,
}

impl FaultyRam {
    fn new(guest: &Guest, nth: usize) -> Self {
        Self { ram: guest.ram.clone(), left: nth.into() }
    }

    fn never_struck(&self) -> bool {
        self.left.load(std::sync::atomic::Ordering::Relaxed) < usize::MAX / 2
    }
}

impl PhysMem for FaultyRam {
    fn read(&self, at: Gpa, buf: &mut [u8]) -> Result<(), MemError> {
        if self.left.fetch_sub(1, std::sync::atomic::Ordering::Relaxed) == 0 {
            return Err(MemError::NotRam { at, len: buf.len() });
        }
        PhysMem::read(&self.ram, at, buf)
    }

    fn extents(&self) -> Vec<std::ops::Range<Gpa>> {
        self.ram.extents()
    }

    fn replace_entry(&self, at: Gpa, old: [u8; 8], new: [u8; 8]) -> Result<(), MemError> {
        self.ram.replace_entry(at, old, new)
    }
}

fn apply(guest: &mut Guest, ram: &dyn PhysMem, patchset: &Patchset) -> Result<Applied, String> {
    let prepared = patchset.prepare(ram);
    let verified = prepared.verify(guest, 2).map_err(|error| error.to_string())?;
    verified.apply().map_err(|error| error.to_string())
}

#[test]
fn a_patchset_is_applied_and_reverted_whole() {
    let mut guest = Guest::new();
    let before = guest.text();
    let ram = guest.ram.clone();
    let patchset = Patchset::plan(Guest::sites()).unwrap();
    let applied = apply(&mut guest, &ram, &patchset).unwrap();
    for index in 0..8 {
        assert_eq!(guest.text()[index * 0x40..][..5], CALL);
    }
    let reverted = applied.prepare_revert(&ram).run(&mut guest);
    assert_eq!(reverted, Reverted { restored: 8, ..Default::default() });
    assert_eq!(guest.text(), before);
    let again = applied.prepare_revert(&ram).run(&mut guest);
    assert_eq!(again, Reverted { already: 8, ..Default::default() });
}

#[test]
fn what_is_as_wanted_already_is_neither_written_nor_reverted() {
    let mut guest = Guest::new();
    let ram = guest.ram.clone();
    let mut sites = Guest::sites();
    let first = apply(&mut guest, &ram, &Patchset::plan(sites.split_off(5)).unwrap()).unwrap();
    assert_eq!((first.sites().len(), first.already()), (3, 0));

    let all = Patchset::plan(Guest::sites()).unwrap();
    let second = apply(&mut guest, &ram, &all).unwrap();
    assert_eq!((second.sites(), second.already()), (&Guest::sites()[..5], 3));
    // A third time there is nothing to write: a guest in which every write fails does not notice.
    guest.broken = Guest::sites().iter().map(|site| site.gpa).collect();
    let third = apply(&mut guest, &ram, &all).unwrap();
    assert_eq!((third.sites(), third.already()), (&[][..], 8));
    assert_eq!(third.prepare_revert(&ram).run(&mut guest), Reverted::default());
    guest.broken.clear();

    let reverted = second.prepare_revert(&ram).run(&mut guest);
    assert_eq!(reverted, Reverted { restored: 5, ..Default::default() });
    assert_eq!(guest.text()[5 * 0x40..][..5], CALL);
    first.prepare_revert(&ram).run(&mut guest);
    assert_eq!(guest.text(), Guest::new().text());
}

#[test]
fn a_failure_beside_what_is_as_wanted_puts_back_only_what_was_written() {
    let mut guest = Guest::new();
    let ram = guest.ram.clone();
    let first = apply(&mut guest, &ram, &Patchset::plan(Guest::sites()[..3].to_vec()).unwrap());
    assert!(first.is_ok());
    let between = guest.text();
    let all = Patchset::plan(Guest::sites()).unwrap();
    // Two vCPUs' registers, then three of the five writes.
    guest.fault = Fault::at(2 + 3);
    let error = apply(&mut guest, &ram, &all).unwrap_err();
    assert!(error.starts_with("patching function_6 failed"), "{error}");
    assert_eq!(guest.text(), between);
}

#[test]
fn one_unknown_site_and_nothing_is_written_anywhere() {
    let mut guest = Guest::new();
    let ram = guest.ram.clone();
    guest.ram.write_slice(&[0x90, 0x90], GuestAddress(TEXT + 5 * 0x40)).unwrap();
    let before = guest.text();
    let patchset = Patchset::plan(Guest::sites()).unwrap();
    assert_eq!(
        apply(&mut guest, &ram, &patchset).unwrap_err(),
        "function_5 at 0xffffffff81000140 holds [90 90 44 00 00] where [0f 1f 44 00 00] was \
         expected; nothing was written"
    );
    assert_eq!(guest.text(), before);
}

#[test]
fn a_vcpu_inside_a_site_refuses_and_at_its_edges_does_not() {
    let patchset = Patchset::plan(Guest::sites()).unwrap();
    for (offset, fine) in [(0, true), (1, false), (4, false), (5, true)] {
        let mut guest = Guest::new();
        let ram = guest.ram.clone();
        guest.pcs[1] = VA + 3 * 0x40 + offset;
        let result = apply(&mut guest, &ram, &patchset);
        assert_eq!(result.is_ok(), fine, "at +{offset}: {result:?}");
        if !fine {
            assert!(result.unwrap_err().contains("inside the site of function_3"));
            assert_eq!(guest.text(), Guest::new().text());
        }
    }
}

#[test]
fn whatever_step_of_applying_fails_the_originals_are_there() {
    let patchset = Patchset::plan(Guest::sites()).unwrap();
    let original = Guest::new().text();
    // Registers and writes.
    let mut steps = 0;
    for nth in 0.. {
        let mut guest = Guest { fault: Fault::at(nth), ..Guest::new() };
        let ram = guest.ram.clone();
        let result = apply(&mut guest, &ram, &patchset);
        if guest.fault.never_struck() {
            assert!(result.is_ok());
            break;
        }
        steps += 1;
        assert!(result.is_err(), "step {nth}");
        assert_eq!(guest.text(), original, "step {nth}");
    }
    assert_eq!(steps, 2 + 8, "two vCPUs' registers and eight writes can fail");
    // Reads, before and after the writes.
    let mut steps = 0;
    for nth in 0.. {
        let mut guest = Guest::new();
        let ram = FaultyRam::new(&guest, nth);
        let result = apply(&mut guest, &ram, &patchset);
        if ram.never_struck() {
            assert!(result.is_ok());
            break;
        }
        steps += 1;
        assert!(result.is_err(), "read {nth}");
        assert_eq!(guest.text(), original, "read {nth}");
    }
    assert_eq!(steps, 8 + 8, "eight sites are compared and read back");
}

#[test]
fn whatever_write_of_a_revert_fails_once_the_originals_are_there() {
    let patchset = Patchset::plan(Guest::sites()).unwrap();
    let original = Guest::new().text();
    for nth in 0.. {
        let mut guest = Guest::new();
        let ram = guest.ram.clone();
        let applied = apply(&mut guest, &ram, &patchset).unwrap();
        guest.fault = Fault::at(nth);
        let reverted = applied.prepare_revert(&ram).run(&mut guest);
        assert_eq!(reverted, Reverted { restored: 8, ..Default::default() }, "write {nth}");
        assert_eq!(guest.text(), original, "write {nth}");
        if guest.fault.never_struck() {
            assert_eq!(nth, 8);
            break;
        }
    }
}

#[test]
fn a_site_that_can_not_be_written_keeps_no_other_from_being_put_back() {
    let patchset = Patchset::plan(Guest::sites()).unwrap();
    let mut guest = Guest::new();
    let ram = guest.ram.clone();
    let applied = apply(&mut guest, &ram, &patchset).unwrap();
    guest.broken = vec![Gpa(TEXT + 2 * 0x40)];
    let mut revert = applied.prepare_revert(&ram);
    let first = revert.run(&mut guest);
    assert_eq!(first.restored, 7);
    let half = PadBytes::new(&[0xff, 0xff, 2, 3, 4]);
    assert_eq!(first.failed, [Left::of(&Guest::sites()[2], Some(half))]);
    // It is half-written now, and still known to be ours.
    guest.broken.clear();
    let second = revert.run(&mut guest);
    assert_eq!(second, Reverted { restored: 1, already: 7, ..Default::default() });
    assert_eq!(guest.text(), Guest::new().text());
}

#[test]
fn a_failed_apply_that_can_not_be_undone_says_so() {
    let patchset = Patchset::plan(Guest::sites()).unwrap();
    let mut guest = Guest { broken: vec![Gpa(TEXT + 0x40)], ..Guest::new() };
    let ram = guest.ram.clone();
    assert_eq!(
        apply(&mut guest, &ram, &patchset).unwrap_err(),
        "patching function_1 failed: injected; and 1 sites from function_1 on could not be put \
         back: end this guest"
    );
    let others = |text: Vec<u8>| [&text[..0x40], &text[0x80..]].concat();
    assert_eq!(others(guest.text()), others(Guest::new().text()));
}

#[test]
fn memory_that_the_guest_took_back_is_left_alone() {
    let patchset = Patchset::plan(Guest::sites()).unwrap();
    let mut guest = Guest::new();
    let ram = guest.ram.clone();
    let applied = apply(&mut guest, &ram, &patchset).unwrap();
    let theirs = [0xcc; 5];
    guest.ram.write_slice(&theirs, GuestAddress(TEXT + 6 * 0x40)).unwrap();
    let reverted = applied.prepare_revert(&ram).run(&mut guest);
    assert_eq!((reverted.restored, reverted.failed.len()), (7, 0));
    assert_eq!(reverted.foreign, [Left::of(&Guest::sites()[6], Some(PadBytes::new(&theirs)))]);
    assert_eq!(guest.text()[6 * 0x40..][..5], theirs);
}

#[test]
fn sites_that_are_not_one_instruction_each_make_no_patchset() {
    let plan = |change: fn(&mut Vec<Site>)| {
        let mut sites = Guest::sites();
        change(&mut sites);
        Patchset::plan(sites).unwrap_err()
    };
    assert_eq!(plan(Vec::clear), PlanError::Empty);
    assert!(matches!(plan(|s| s[1].gpa = s[0].gpa + 4), PlanError::Overlap { .. }));
    assert!(matches!(plan(|s| s[1].gpa = s[0].gpa), PlanError::Overlap { .. }));
    let short = PadBytes::new(&[0xe9]);
    for error in [plan(|s| s[3].gpa = Gpa(0x1ffc)), plan(|s| s[3].original = PadBytes::new(&[]))] {
        assert!(matches!(error, PlanError::NotOneInstruction { .. }));
    }
    let mut sites = Guest::sites();
    sites[0].replacement = short;
    assert!(matches!(Patchset::plan(sites), Err(PlanError::NotOneInstruction { .. })));
}
