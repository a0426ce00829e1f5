//! How long a guest stands still natively while text is patched, as ratios to a stop in which nothing
//! is done.
//!
//! The guest is bare: two vCPUs that spin, beside text like that of a large kernel. Its stops differ from
//! a stock guest's in the exits alone. Kinds of stops alternate in one run, so that they meet the same
//! noise.
//!
//! ```text
//! cargo bench --bench standstill [-- --rounds N] [--json FILE]
//! ```

use std::sync::Arc;
use std::time::Duration;

use benches::clock::own_time;
use benches::figures::{Figures, argument, median, publish};
use patcher::addr::{Gpa, Gva};
use patcher::arch::PadBytes;
use patcher::machine::Machine;
use patcher::patch::{Patchset, Site};
use vmm::devices::Console;
use vmm::kvm::{BareGuest, Hardware, Vm};

/// `1: pause; jmp 1b`
const SPIN: &[u8] = &[0xf3, 0x90, 0xeb, 0xfc];

/// Where the text is in guest-physical memory, and where a kernel would have it.
const TEXT: Gpa = Gpa(16 << 20);
const TEXT_AT: Gva = Gva(0xffff_ffff_8100_0000);

/// Pads of a stock kernel, and how much text they lie in.
const PADS: u64 = 40_000;
const TEXT_BYTES: u64 = 14 << 20;

const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];

/// Sites as functions have them: aligned to 16 bytes, some close together and some far apart.
fn sites() -> Vec<Site> {
    let mean = TEXT_BYTES / PADS / 16;
    let mut seed = 1_u64;
    let mut offset = 0;
    let site = |_| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        offset += 16 * (1 + (seed >> 33) % (2 * mean - 1));
        let distance = 0x1000_0000_u32.wrapping_sub(offset as u32).to_le_bytes();
        let call = [&[0xe8], &distance[..]].concat();
        Site {
            function: Arc::from(format!("function_{offset:x}")),
            at: TEXT_AT + offset,
            gpa: TEXT + offset,
            original: PadBytes::new(&NOP),
            replacement: PadBytes::new(&call),
        }
    };
    (0..PADS).map(site).collect()
}

/// Text that is nothing but those sites and what would be between them.
fn text(sites: &[Site]) -> Vec<u8> {
    let mut text = vec![0xcc; TEXT_BYTES as usize + (1 << 20)];
    for site in sites {
        let offset = (site.gpa.0 - TEXT.0) as usize;
        text[offset..][..NOP.len()].copy_from_slice(&NOP);
    }
    text
}

/// The phases of stops of one kind, in nanoseconds.
#[derive(Default)]
struct Kind {
    total: Vec<f64>,
    compare: Vec<f64>,
    write: Vec<f64>,
    revert: Vec<f64>,
}

fn ns(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

fn bare(machine: &dyn Machine, kind: &mut Kind) {
    let times = machine.stop().expect("a stop").resume().expect("to resume");
    kind.total.push(ns(times.total()));
}

/// Patches in one stop and puts back in another.
fn patch(machine: &dyn Machine, patchset: &Patchset, kind: &mut Kind) {
    let prepared = patchset.prepare(machine.ram());
    let mut stopped = machine.stop().expect("a stop");
    let begun = own_time();
    let verified = prepared.verify(&mut *stopped, machine.vcpus()).expect("text as it was");
    let compared = own_time();
    let applied = verified.apply().expect("text that can be written");
    let written = own_time();
    let times = stopped.resume().expect("to resume");
    kind.total.push(ns(times.total()));
    kind.compare.push(ns(compared - begun));
    kind.write.push(ns(written - compared));

    let mut revert = applied.prepare_revert(machine.ram());
    let mut stopped = machine.stop().expect("a stop");
    let begun = own_time();
    let reverted = revert.run(&mut *stopped);
    kind.revert.push(ns(own_time() - begun));
    assert_eq!(reverted.restored, applied.sites().len());
    stopped.resume().expect("to resume");
}

/// A figure: the median, with what is as good as it gets.
fn add(figures: &mut Figures, name: &str, values: &mut [f64]) {
    let middle = median(values);
    figures.add(name, middle, format!("least {:.0}", values[0]));
}

fn main() {
    let rounds = argument("--rounds");
    let rounds: usize = rounds.map_or(300, |rounds| rounds.parse().expect("a number of rounds"));
    let sites = sites();
    let one = Patchset::plan(vec![sites[sites.len() / 2].clone()]).expect("a patchset");
    let all = Patchset::plan(sites.clone()).expect("a patchset");
    let mut tables = Vec::new();
    for cpus in [1, 2] {
        let hardware = Hardware { cpus, memory: 64 << 20, ..Hardware::default() };
        let guest = BareGuest::new(SPIN).with_memory(TEXT, &text(&sites));
        let console = Console::new(Box::new(std::io::sink())).expect("a console");
        let vm = Vm::bare(&hardware, guest, console).expect("a KVM that runs bare guests");
        vm.start();
        let [mut none, mut single, mut whole] = <[Kind; 3]>::default();
        for _ in 0..rounds {
            bare(&vm, &mut none);
            patch(&vm, &one, &mut single);
            patch(&vm, &all, &mut whole);
        }
        let vcpus = if cpus == 1 { "one spinning vCPU" } else { "two spinning vCPUs" };
        let title = format!("stops of {vcpus}, {} sites, medians of {rounds}", sites.len());
        let mut figures = Figures::new(&title);
        add(&mut figures, "bare stop", &mut none.total);
        add(&mut figures, "stop with one site", &mut single.total);
        add(&mut figures, "stop with all sites", &mut whole.total);
        // From here on by the clock of the thread: what others take of the processor is not in it.
        add(&mut figures, "compare all", &mut whole.compare);
        add(&mut figures, "write all and read back", &mut whole.write);
        add(&mut figures, "put all back", &mut whole.revert);
        add(&mut figures, "compare one", &mut single.compare);
        add(&mut figures, "write one and read back", &mut single.write);
        add(&mut figures, "put one back", &mut single.revert);
        tables.push(figures);
    }
    publish(&tables).expect("figures that can be written");
}
