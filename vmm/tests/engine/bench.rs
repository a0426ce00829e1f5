//! Whether `vmm bench stop-all` tells the truth, on the guest that it brings along.

use std::ops::ControlFlow;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use patcher::hook::Hooks;
use patcher::kernel::{Kernel, Located, MappedRegion, locate};
use patcher::machine::{
    Machine, Registers, StopError, StopTimes, Stopped, TextWrite, TextWriteError,
};
use patcher::mem::PhysMem;
use patcher::region::{Part, RegionWindow};
use patcher::trace::filter::Filter;
use patcher::trace::select::Selection;
use vmm::bench::{
    FORMAT, FUNCTIONS, Host, Measured, Report, Round, SharedGaps, Stand, StopAll, Subject,
    busy_guest, hardware, plot, spread, table,
};
use vmm::kvm::Vm;

use crate::toys::console;

/// What is slept: far longer than any phase takes on a machine that does little else.
const SLEEP: Duration = Duration::from_millis(40);

/// A phase of a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Out,
    Verified,
    Written,
    Running,
}

/// An engine that is slow in one phase of each stop, and measures its stops as engines have to.
struct Slow<'m> {
    machine: &'m dyn Machine,
    phase: Option<Phase>,
}

struct SlowStop<'m> {
    stopped: Box<dyn Stopped + 'm>,
    phase: Option<Phase>,
    quiesce: Duration,
    still: Instant,
}

impl Slow<'_> {
    fn sleep(phase: &mut Option<Phase>, now: Phase) {
        if *phase == Some(now) {
            // Once a stop.
            *phase = None;
            thread::sleep(SLEEP);
        }
    }
}

impl Machine for Slow<'_> {
    fn ram(&self) -> &dyn PhysMem {
        self.machine.ram()
    }

    fn vcpus(&self) -> usize {
        self.machine.vcpus()
    }

    fn region(&self, part: Part) -> RegionWindow<'_> {
        self.machine.region(part)
    }

    fn clock_hz(&self) -> u64 {
        self.machine.clock_hz()
    }

    fn sample(&self, vcpu: usize) -> Result<Registers, StopError> {
        self.machine.sample(vcpu)
    }

    fn stop(&self) -> Result<Box<dyn Stopped + '_>, StopError> {
        let mut phase = self.phase;
        let begun = Instant::now();
        Slow::sleep(&mut phase, Phase::Out);
        let stopped = self.machine.stop()?;
        let still = Instant::now();
        Ok(Box::new(SlowStop { stopped, phase, quiesce: still - begun, still }))
    }
}

impl Stopped for SlowStop<'_> {
    fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError> {
        Slow::sleep(&mut self.phase, Phase::Verified);
        self.stopped.registers(vcpu)
    }

    fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError> {
        Slow::sleep(&mut self.phase, Phase::Written);
        self.stopped.write_text(writes)
    }

    fn resume(mut self: Box<Self>) -> Result<StopTimes, StopError> {
        let asked = Instant::now();
        Slow::sleep(&mut self.phase, Phase::Running);
        self.stopped.resume()?;
        let (quiesce, held) = (self.quiesce, asked - self.still);
        Ok(StopTimes { quiesce, held, resume: asked.elapsed() })
    }
}

/// The busy guest with so many vCPUs, and its kernel.
fn busy(cpus: usize) -> (Vm, Kernel) {
    let vm = Vm::bare(&hardware(cpus), busy_guest(cpus), console()).unwrap();
    vm.start();
    let begun = Instant::now();
    loop {
        match locate(vm.ram(), &[vm.sample(0).unwrap()]).unwrap() {
            Located::Found(kernel) => {
                kernel.readiness(vm.ram()).unwrap();
                return (vm, *kernel);
            }
            Located::NotYet(why) => assert!(begun.elapsed() < crate::toys::PATIENCE, "{why}"),
        }
    }
}

/// Rounds with `count` functions on a machine, and what a report says of them.
fn rounds(
    machine: &dyn Machine,
    kernel: &Kernel,
    region: &MappedRegion,
    (count, rounds): (usize, usize),
) -> (Vec<Round>, Measured) {
    let selection = Selection::new(kernel, machine, &Filter::default()).unwrap();
    assert_eq!((selection.sites.len(), selection.refused.len()), (FUNCTIONS, 0));
    let sites = spread(&selection.sites, count);
    assert_eq!(sites.len(), count);
    let mut hooks = Hooks::new(machine, kernel, region);
    let mut gaps = SharedGaps::begin(machine).unwrap();
    let (mut made, mut measured) = (Vec::new(), Measured::default());
    let stop_all = StopAll { sites: &sites, warm_up: 1, rounds };
    stop_all
        .run(&mut hooks, &mut gaps, |round| {
            made.push(*round);
            measured.add(round);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(made.len(), rounds);
    (made, measured)
}

fn stands(round: &Round) -> [(Stand, Duration); 3] {
    let gap = |gap: Option<vmm::bench::Gap>| gap.expect("the guest measures").shortest;
    [
        (round.bare, gap(round.bare_gap)),
        (round.patch, gap(round.patch_gap)),
        (round.revert, gap(round.revert_gap)),
    ]
}

/// The guest's clock is read before and behind what it measures, and told in whole kHz.
fn has_seen(gap: Duration, held: Duration) -> bool {
    gap + Duration::from_micros(1) + gap / 1000 >= held
}

#[test]
fn a_sleep_in_one_phase_is_seen_in_that_phase_only_and_by_the_guest() {
    const ROUNDS: usize = 5;
    let (vm, kernel) = busy(2);
    let region = MappedRegion::new(&vm, &kernel).unwrap();
    let injected = [Phase::Out, Phase::Verified, Phase::Written, Phase::Running].map(Some);
    for phase in injected.into_iter().chain([None]) {
        let slow = Slow { machine: &vm, phase };
        let (made, _) = rounds(&slow, &kernel, &region, (100, ROUNDS));
        let of = |now: Phase, stand: &Stand| match now {
            Phase::Out => stand.out,
            Phase::Verified => stand.verified,
            Phase::Written => stand.written,
            Phase::Running => stand.running,
        };
        for now in [Phase::Out, Phase::Verified, Phase::Written, Phase::Running] {
            let mut times: Vec<Duration> = made.iter().map(|round| of(now, &round.patch)).collect();
            times.sort_unstable();
            if phase == Some(now) {
                assert!(times[0] >= SLEEP, "{now:?} with a sleep in it: {times:?}");
            } else {
                // The median: a busy host may take a CPU away in any phase.
                assert!(
                    times[ROUNDS / 2] < SLEEP / 2,
                    "{now:?} with a sleep in {phase:?}: {times:?}"
                );
            }
        }
        for round in &made {
            for (stand, gap) in stands(round) {
                // No vCPU ran from the last one's way out until the first one's way in.
                assert!(has_seen(gap, stand.held()), "{gap:?} of {stand:?}");
            }
            if matches!(phase, Some(Phase::Verified | Phase::Written)) {
                assert!(has_seen(stands(round)[1].1, SLEEP), "{round:?}");
            }
        }
    }
}

#[test]
fn the_phases_of_a_stop_are_all_of_it() {
    /// Adds up what the machine says of its stops.
    struct Sum<'m>(&'m dyn Machine, Mutex<Vec<StopTimes>>);
    struct SumStop<'m>(Box<dyn Stopped + 'm>, &'m Mutex<Vec<StopTimes>>);
    impl Machine for Sum<'_> {
        fn ram(&self) -> &dyn PhysMem {
            self.0.ram()
        }
        fn vcpus(&self) -> usize {
            self.0.vcpus()
        }
        fn region(&self, part: Part) -> RegionWindow<'_> {
            self.0.region(part)
        }
        fn clock_hz(&self) -> u64 {
            self.0.clock_hz()
        }
        fn sample(&self, vcpu: usize) -> Result<Registers, StopError> {
            self.0.sample(vcpu)
        }
        fn stop(&self) -> Result<Box<dyn Stopped + '_>, StopError> {
            Ok(Box::new(SumStop(self.0.stop()?, &self.1)))
        }
    }
    impl Stopped for SumStop<'_> {
        fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError> {
            self.0.registers(vcpu)
        }
        fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError> {
            self.0.write_text(writes)
        }
        fn resume(self: Box<Self>) -> Result<StopTimes, StopError> {
            let times = self.0.resume()?;
            self.1.lock().unwrap().push(times);
            Ok(times)
        }
    }

    let (vm, kernel) = busy(1);
    let region = MappedRegion::new(&vm, &kernel).unwrap();
    let text = || {
        let range = kernel.text();
        let mut text = vec![0; (range.end.0 - range.start.0) as usize];
        kernel.read_virt(vm.ram(), range.start, &mut text).unwrap();
        text
    };
    let before = text();
    let sum = Sum(&vm, Mutex::default());
    let mut runs = Vec::new();
    for count in [1, FUNCTIONS] {
        let (made, measured) = rounds(&sum, &kernel, &region, (count, 3));
        let said = std::mem::take(&mut *sum.1.lock().unwrap());
        // Three stops a round, the first round's being those that do not count.
        assert_eq!(said.len(), 3 * (1 + made.len()));
        let shown = made.iter().flat_map(stands).map(|(stand, _)| stand);
        for (times, stand) in said[3..].iter().zip(shown) {
            let Stand { out, verified, written, running } = stand;
            assert_eq!(out + verified + written + running, times.total());
            assert_eq!((out, running), (times.quiesce, times.resume));
            assert_eq!(stand.whole(), times.total());
        }
        assert!(made.iter().all(|round| round.patch.verified > Duration::ZERO));
        runs.push(measured.finish(1, count));
    }
    assert!(text() == before, "what was patched has been put back");

    let report = Report {
        format: FORMAT,
        benchmark: "stop-all".into(),
        vmm: "0".into(),
        host: Host { model: "<&\"of\" a\u{1}test>".into(), kvm: None, ..Host::this() },
        guest: Subject {
            kind: "bare".into(),
            engine: "KVM".into(),
            kernel: kernel.release().into(),
            functions: FUNCTIONS,
        },
        warm_up: 1,
        runs,
    };
    the_json_has_what_the_table_has(&report);
    the_plot_has_a_line_for_each_series(&report);
}

fn the_json_has_what_the_table_has(report: &Report) {
    let json = serde_json::to_string(report).unwrap();
    let read: Report = serde_json::from_str(&json).unwrap();
    assert_eq!((&read, table(&read)), (report, table(report)));
    let table = table(report);
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    // Whatever stands in the table as a time is one of the JSON's.
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    for run in value["runs"].as_array().unwrap() {
        for (kind, phase) in [
            ("patch", "out"),
            ("patch", "verified"),
            ("patch", "written"),
            ("patch", "running"),
            ("patch", "whole"),
            ("bare", "whole"),
            ("revert", "whole"),
            ("patch", "guest_saw"),
            ("bare", "guest_saw"),
        ] {
            let summary = &run[kind][phase];
            assert_eq!(summary["count"], 3, "{kind} {phase}");
            for field in ["p50", "p90", "p99", "p99_9", "max"] {
                let time =
                    summary[field].as_u64().unwrap_or_else(|| panic!("{kind} {phase} {field}"));
                let microseconds = time as f64 / 1000.0;
                let shown = if time < 100_000_000 {
                    format!(" {microseconds:.1}")
                } else {
                    format!(" {microseconds:.0}")
                };
                assert!(table.contains(&shown), "{shown} of {kind} {phase} {field}:\n{table}");
            }
        }
    }
}

fn the_plot_has_a_line_for_each_series(report: &Report) {
    let svg = plot(report);
    let document =
        roxmltree::Document::parse(&svg).unwrap_or_else(|error| panic!("{error}: {svg}"));
    let series = document.descendants().filter(|node| node.attribute("class") == Some("series"));
    let marks = series.map(|group| {
        let marks = group.children().filter(|node| node.has_tag_name("circle"));
        for mark in marks.clone() {
            for (coordinate, size) in [("cx", "width"), ("cy", "height")] {
                let at: f64 = mark.attribute(coordinate).unwrap().parse().unwrap();
                let size: f64 = document.root_element().attribute(size).unwrap().parse().unwrap();
                assert!((0.0..=size).contains(&at), "{coordinate} is {at} of {size}");
            }
        }
        marks.count()
    });
    // One panel, and in it four phases, the whole, the bare stop, and what the guest saw.
    assert_eq!(marks.collect::<Vec<_>>(), [report.runs.len(); 7]);

    // Without what the guest saw there is a line less.
    let mut less = report.clone();
    for run in &mut less.runs {
        for timing in [&mut run.bare, &mut run.patch, &mut run.revert] {
            timing.guest_saw = None;
        }
    }
    assert_eq!(plot(&less).matches("class=\"series\"").count(), 6);
    assert!(table(&less).contains("What the guest saw is not known"));
    assert!(!serde_json::to_string(&less).unwrap().contains("guest_saw"));
}
