mod recorder;

use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use vm_memory::{Bytes, VolatileMemory};

use super::*;
use crate::kernel::{Kernel, MappedRegion};
use crate::region::{COUNTER_BYTES, COUNTERS_OFFSET, RECORD_BYTES};
use crate::synthetic::tasks::field;
use crate::synthetic::{Blueprint, Faulty, Guest, Kind};
use crate::trace::calls::{self, CallFilter};
use crate::trace::filter::{Filter, Glob};
use crate::trace::sink::Context;

mod latency;

/// A guest whose calls the test makes: it does to the rings what the trampoline does.
struct Traced {
    guest: Guest,
    kernel: Kernel,
    region: MappedRegion,
}

/// What a client in these tests was given: function and time.
type Given = Vec<(String, u64)>;

impl Traced {
    fn new() -> Self {
        let guest = Guest::new(&Blueprint { functions: 1100, ..Blueprint::default() });
        let kernel = guest.kernel();
        let region = MappedRegion::new(&guest, &kernel).unwrap();
        Self { guest, kernel, region }
    }

    fn tracer<S>(&self) -> (Hooks<'_>, Tracer<'_, S>) {
        let mut hooks = Hooks::new(&self.guest, &self.kernel, &self.region);
        let tracer = Tracer::new(&mut hooks).unwrap();
        (hooks, tracer)
    }

    fn is_armed(&self, function: usize) -> bool {
        self.guest.peek(self.guest.functions[function].pad, 1) == [0xe8]
    }

    fn reserve(&self, cpu: usize) -> u64 {
        let window = self.guest.region(Part::Rings).memory;
        let header = self.region.rings().header_offset(cpu);
        window.get_atomic_ref::<AtomicU64>(header).unwrap().fetch_add(1, Ordering::AcqRel)
    }

    fn fill(&self, cpu: usize, index: u64, function: usize, time: u64) {
        let window = self.guest.region(Part::Rings).memory;
        let slot = self.region.rings().slot_offset(cpu, index);
        window.write_obj(time, slot).unwrap();
        window.write_obj((self.guest.functions[function].pad.0 + 5) as u32, slot + 8).unwrap();
        window.write_obj(self.guest.functions[0].entry.0 as u32 + 40, slot + 12).unwrap();
        window.write_obj(index as u32 + 1, slot + RECORD_BYTES as usize - 4).unwrap();
    }

    /// A call of a function; makes a record if the function is armed.
    fn call(&self, cpu: usize, function: usize, time: u64) {
        if self.is_armed(function) {
            let index = self.reserve(cpu);
            self.fill(cpu, index, function, time);
        }
    }
}

fn only(globs: &[&str]) -> Filter {
    Filter { only: globs.iter().map(|glob| Glob::new(glob)).collect(), except: Vec::new() }
}

fn keep(given: &mut Given, event: &Event<'_>) -> io::Result<()> {
    given.push((event.function.to_string(), event.time_ns));
    Ok(())
}

fn add<'m>(
    hooks: &mut Hooks<'m>,
    tracer: &mut Tracer<'m, Given>,
    globs: &[&str],
) -> (ClientId, Armed) {
    let selection = Selection::beside(hooks, &only(globs)).unwrap();
    tracer.add(hooks, &selection, Given::new()).unwrap()
}

/// Ends a client and gives what it got.
fn end<'m>(
    hooks: &mut Hooks<'m>,
    tracer: &mut Tracer<'m, Given>,
    client: ClientId,
) -> Finished<Given> {
    tracer.remove(hooks, client).unwrap();
    tracer.drain(hooks, keep);
    assert!(tracer.is_settled(client));
    tracer.finish(client, keep).unwrap()
}

fn times(finished: &Finished<Given>) -> Vec<u64> {
    finished.sink.iter().map(|(_, time)| *time).collect()
}

const READ: usize = 0;
const WRITE: usize = 1;

#[test]
fn each_client_gets_the_calls_of_its_functions_in_its_time_and_no_others() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let (reads, armed) = add(&mut hooks, &mut tracer, &["vfs_read"]);
    assert_eq!((armed.functions, armed.written), (1, 1));
    traced.call(0, READ, 10);
    traced.call(1, WRITE, 11);
    let (both, armed) = add(&mut hooks, &mut tracer, &["vfs_*"]);
    assert_eq!((armed.functions, armed.written), (2, 1), "one of them was armed already");
    traced.call(1, READ, 20);
    traced.call(0, WRITE, 21);
    tracer.drain(&hooks, keep);
    let first = end(&mut hooks, &mut tracer, reads);
    traced.call(0, READ, 30);
    let second = end(&mut hooks, &mut tracer, both);
    traced.call(0, READ, 40);
    assert_eq!(times(&first), [10, 20]);
    assert_eq!(first.summary.functions, [("vfs_read".into(), 2)]);
    assert_eq!(times(&second), [20, 21, 30]);
    assert_eq!(second.summary.functions, [("vfs_read".into(), 2), ("vfs_write".into(), 1)]);
    assert_eq!((first.summary.dropped(), second.summary.dropped()), (0, 0));
}

/// Tasks, as text, and contexts of the records that were given out.
type Told = Vec<(String, Context)>;

#[test]
fn records_tell_the_task_and_what_its_cpu_was_in_the_middle_of() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer::<Told>();
    assert!(tracer.contexts());
    let filter = only(&["vfs_read"]);
    let selection = Selection::beside(&hooks, &filter).unwrap();
    let (client, _) = tracer.add(&mut hooks, &selection, Told::new()).unwrap();
    // Flags with interrupts on or off, number, count.
    let records: [[u32; 3]; 5] = [
        [0x202, 203, 0x8000_0000],
        [0x002, 150, 0x8001_0001],
        [0x202, 0, 0x0000_0101],
        [0x202, 99_999, 0x8000_0200],
        [0x202, 2, 0x8010_0000],
    ];
    for (time, words) in (1..).zip(records) {
        let index = traced.reserve(0);
        traced.fill(0, index, READ, time);
        let slot = traced.region.rings().slot_offset(0, index);
        let window = traced.guest.region(Part::Rings).memory;
        for (at, word) in (16..).step_by(4).zip(words) {
            window.write_obj(word, slot + at).unwrap();
        }
    }
    traced.guest.poke(traced.guest.task("kthreadd").at + field::COMM, b"a\x1bb\nc\0\0\0\0");
    let tell = |told: &mut Told, event: &Event<'_>| {
        let task = event.task.unwrap();
        told.push((format!("{}-{}", task.shown(), task.pid), event.context.unwrap()));
        Ok(())
    };
    tracer.drain(&hooks, tell);
    tracer.remove(&mut hooks, client).unwrap();
    let none = Context::default();
    let expected = [
        ("sleeper/3-203", none),
        ("init-150", Context { irqs_off: true, hardirq: true, preempt_depth: 1, ..none }),
        ("<idle>-0", Context { need_resched: true, softirq: true, preempt_depth: 1, ..none }),
        ("<...>-99999", Context { bottom_halves_off: true, ..none }),
        ("a?b?c-2", Context { nmi: true, ..none }),
    ];
    let told = tracer.finish(client, tell).unwrap().sink;
    assert_eq!(told, expected.map(|(task, context)| (task.to_owned(), context)));
}

#[test]
fn a_function_stays_armed_until_the_last_client_that_traces_it_goes() {
    let traced = Traced::new();
    let text = traced.guest.peek(traced.guest.blueprint().base, 0x20_0000);
    let (mut hooks, mut tracer) = traced.tracer();
    let (first, _) = add(&mut hooks, &mut tracer, &["vfs_*"]);
    let (second, armed) = add(&mut hooks, &mut tracer, &["vfs_read", "function_00002"]);
    assert_eq!(armed.written, 1);
    let (third, armed) = add(&mut hooks, &mut tracer, &["vfs_read"]);
    assert_eq!((armed.functions, armed.written, armed.stop), (1, 0, StopTimes::default()));
    let armed = |traced: &Traced| [0, 1, 2].map(|function| traced.is_armed(function));
    assert_eq!(armed(&traced), [true, true, true]);
    assert_eq!(end(&mut hooks, &mut tracer, first).summary.reverted.unwrap().restored, 1);
    assert_eq!(armed(&traced), [true, false, true]);
    let finished = end(&mut hooks, &mut tracer, third);
    assert_eq!((finished.summary.stops.len(), armed(&traced)), (0, [true, false, true]));
    assert_eq!(end(&mut hooks, &mut tracer, second).summary.stops.len(), 2);
    assert!(traced.guest.peek(traced.guest.blueprint().base, 0x20_0000) == text);
}

#[test]
fn hooks_that_are_dropped_leave_nothing_armed() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    add(&mut hooks, &mut tracer, &["vfs_*"]);
    add(&mut hooks, &mut tracer, &["function_0000*"]);
    assert!(traced.is_armed(READ));
    drop(hooks);
    assert!((0..1100).all(|function| !traced.is_armed(function)));
}

#[test]
fn pads_of_its_own_are_told_from_those_that_the_guest_traces() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let idle = hooks.pads().unwrap();
    add(&mut hooks, &mut tracer, &["vfs_*"]);
    add(&mut hooks, &mut tracer, &["vfs_read"]);
    assert_eq!(hooks.pads().unwrap().sites, idle.sites);
    let function = |at| traced.guest.functions.iter().position(|f| f.pad == at).unwrap();
    let armed: Vec<_> =
        tracer.armed_pads(&hooks).map(|(at, clients)| (function(at), clients)).collect();
    assert_eq!(armed, [(READ, 2), (WRITE, 1)]);
    // The guest writes over one of them: it is nobody's that we know.
    traced.guest.poke(traced.guest.functions[READ].pad, &[0x0f, 0x0b, 0, 0, 0]);
    let refused = hooks.pads().unwrap().refused;
    assert!(refused.iter().any(|refused| &*refused.name == "vfs_read"));
}

#[test]
fn a_client_without_room_or_that_fails_costs_no_other_anything() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer::<&'static str>();
    let mut seen = Vec::new();
    let mut clients = Vec::new();
    for name in ["good", "full", "broken"] {
        let selection = Selection::beside(&hooks, &only(&["vfs_*"])).unwrap();
        clients.push(tracer.add(&mut hooks, &selection, name).unwrap().0);
    }
    let mut give = |name: &mut &'static str, event: &Event<'_>| match *name {
        "full" if event.time_ns < 3 => Err(ErrorKind::WouldBlock.into()),
        "broken" if event.time_ns == 2 => Err(ErrorKind::BrokenPipe.into()),
        name => {
            seen.push((name, event.time_ns));
            Ok(())
        }
    };
    (1..=4).for_each(|time| traced.call(0, READ, time));
    tracer.drain(&hooks, &mut give);
    tracer.drain(&hooks, &mut give);
    let events = clients.iter().map(|client| tracer.progress(*client).unwrap().events);
    assert_eq!(events.collect::<Vec<_>>(), [4, 2, 1]);
    for (client, (overrun, failed)) in clients.into_iter().zip([(0, false), (2, false), (3, true)])
    {
        tracer.remove(&mut hooks, client).unwrap();
        let finished = tracer.finish(client, &mut give).unwrap();
        assert_eq!((finished.summary.overrun, finished.failure.is_some()), (overrun, failed));
        assert_eq!(finished.summary.events + finished.summary.dropped(), 4);
    }
    assert!(seen.iter().filter(|(name, _)| *name == "good").count() == 4);
}

#[test]
fn what_the_rings_lost_is_counted_for_those_who_were_there() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let (early, _) = add(&mut hooks, &mut tracer, &["vfs_read"]);
    let capacity = traced.region.rings().capacity();
    (0..100).for_each(|time| traced.call(0, READ, time));
    let (late, _) = add(&mut hooks, &mut tracer, &["vfs_*"]);
    (0..capacity + 10).for_each(|time| traced.call(0, READ, 100 + time));
    let late = end(&mut hooks, &mut tracer, late).summary;
    let early = end(&mut hooks, &mut tracer, early).summary;
    assert_eq!((late.events, &late.lost[..]), (capacity, &[10, 0][..]));
    assert_eq!((early.events, &early.lost[..]), (capacity, &[110, 0][..]));
}

#[test]
fn events_tell_how_many_are_missing_right_before_them() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer::<Vec<u64>>();
    let selection = Selection::beside(&hooks, &only(&["vfs_*"])).unwrap();
    let (client, _) = tracer.add(&mut hooks, &selection, Vec::new()).unwrap();
    let mut give = |missed: &mut Vec<u64>, event: &Event<'_>| {
        if [3, 4].contains(&event.time_ns) {
            return Err(ErrorKind::WouldBlock.into());
        }
        missed.push(event.missed);
        Ok(())
    };
    (1..=6).for_each(|time| traced.call(0, READ, time));
    traced.call(1, READ, 7);
    tracer.drain(&hooks, &mut give);
    let capacity = traced.region.rings().capacity();
    (0..capacity + 10).for_each(|time| traced.call(0, READ, 100 + time));
    traced.call(1, READ, 100);
    tracer.drain(&hooks, &mut give);
    tracer.remove(&mut hooks, client).unwrap();
    tracer.drain(&hooks, &mut give);
    let finished = tracer.finish(client, &mut give).unwrap();
    let gaps: Vec<_> = finished.sink.iter().filter(|missed| **missed > 0).collect();
    assert_eq!(gaps, [&2, &10]);
    assert_eq!(finished.sink[2], 2, "in front of the fifth of the first six");
    let missing: u64 = finished.sink.iter().sum();
    assert_eq!(missing, finished.summary.dropped());
}

#[test]
fn a_record_that_is_not_written_is_its_clients_loss_and_a_late_one_nobodys() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let (other, _) = add(&mut hooks, &mut tracer, &["vfs_write"]);
    let (client, _) = add(&mut hooks, &mut tracer, &["vfs_read"]);
    let stuck = traced.reserve(1);
    tracer.remove(&mut hooks, client).unwrap();
    tracer.drain(&hooks, keep);
    assert!(!tracer.is_settled(client));
    let summary = tracer.finish(client, keep).unwrap().summary;
    assert_eq!((summary.unwritten, summary.events), (vec![0, 1], 0));
    // Its writer goes on when the function is armed no more. No ring is taken to be spoilt by that.
    traced.fill(1, stuck, READ, 5);
    let index = traced.reserve(0);
    traced.fill(0, index, READ, 6);
    traced.call(0, WRITE, 7);
    let summary = end(&mut hooks, &mut tracer, other);
    assert_eq!((times(&summary), summary.summary.corrupt), (vec![7], vec![]));
}

#[test]
fn no_more_clients_are_taken_than_there_is_room_for() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let clients: Vec<_> =
        (0..MAX_CLIENTS).map(|_| add(&mut hooks, &mut tracer, &["vfs_read"]).0).collect();
    let selection = Selection::beside(&hooks, &only(&["vfs_write"])).unwrap();
    assert!(matches!(
        tracer.add(&mut hooks, &selection, Given::new()),
        Err(ArmError::TooManyClients)
    ));
    assert!(!traced.is_armed(WRITE));
    end(&mut hooks, &mut tracer, clients[3]);
    tracer.add(&mut hooks, &selection, Given::new()).unwrap();
    assert!(traced.is_armed(WRITE));
}

#[derive(Debug, Clone)]
enum Step {
    Add(Vec<usize>),
    Remove(usize),
    Call(usize, usize),
    Drain,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => prop::collection::btree_set(2_usize..12, 1..6)
            .prop_map(|functions| Step::Add(functions.into_iter().collect())),
        2 => (0_usize..8).prop_map(Step::Remove),
        8 => (0_usize..2, 2_usize..12).prop_map(|(cpu, function)| Step::Call(cpu, function)),
        2 => Just(Step::Drain),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_comes_and_goes_each_client_gets_its_own(steps in prop::collection::vec(step(), 1..60)) {
        let traced = Traced::new();
        let (mut hooks, mut tracer) = traced.tracer();
        // What each client is to trace, and the calls that it has to get.
        let mut clients: Vec<(ClientId, Vec<usize>, Vec<u64>)> = Vec::new();
        let check = |finished: Finished<Given>, expected: &[u64]| {
            assert_eq!(times(&finished), expected);
            assert_eq!(finished.summary.dropped(), 0);
        };
        for (time, step) in (1..).zip(steps) {
            match step {
                Step::Add(functions) if clients.len() < 8 => {
                    let names: Vec<String> =
                        functions.iter().map(|f| format!("function_{f:05}")).collect();
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    let (client, _) = add(&mut hooks, &mut tracer, &names);
                    clients.push((client, functions, Vec::new()));
                }
                Step::Remove(nth) if nth < clients.len() => {
                    let (client, _, expected) = clients.remove(nth);
                    check(end(&mut hooks, &mut tracer, client), &expected);
                }
                Step::Call(cpu, function) => {
                    traced.call(cpu, function, time);
                    for (_, functions, expected) in &mut clients {
                        if functions.contains(&function) {
                            expected.push(time);
                        }
                    }
                }
                Step::Drain => {
                    tracer.drain(&hooks, keep);
                }
                Step::Add(_) | Step::Remove(_) => {}
            }
            for function in 2..12 {
                let wanted = clients.iter().any(|(_, functions, _)| functions.contains(&function));
                prop_assert_eq!(traced.is_armed(function), wanted);
            }
        }
        for (client, _, expected) in clients {
            check(end(&mut hooks, &mut tracer, client), &expected);
        }
        prop_assert!((2..12).all(|function| !traced.is_armed(function)));
    }
}

#[test]
fn whatever_fails_once_the_union_is_armed_and_in_the_end_nothing() {
    for nth in 0.. {
        let traced = Traced::new();
        let machine = Faulty::new(&traced.guest, &[Kind::Stop, Kind::Write], nth);
        let mut hooks = Hooks::new(&machine, &traced.kernel, &traced.region);
        let mut tracer: Tracer<'_, ()> = Tracer::new(&mut hooks).unwrap();
        let mut wanted: Vec<(ClientId, Vec<usize>)> = Vec::new();
        let mut failures = 0;
        for (globs, functions) in [
            (&["vfs_*"][..], vec![0, 1]),
            (&["vfs_read", "function_00002", "function_00003"], vec![0, 2, 3]),
            (&["function_0000[34]"], vec![3, 4]),
        ] {
            let selection = Selection::beside(&hooks, &only(globs)).unwrap();
            match tracer.add(&mut hooks, &selection, ()) {
                Ok((client, _)) => wanted.push((client, functions)),
                Err(_) => failures += 1,
            }
            let is_wanted = |function| wanted.iter().any(|(_, all)| all.contains(&function));
            assert!((0..6).all(|f| traced.is_armed(f) == is_wanted(f)), "adding, fault {nth}");
        }
        while let Some((client, _)) = wanted.pop() {
            failures += usize::from(tracer.remove(&mut hooks, client).is_err());
            tracer.finish(client, |(), _| Ok(()));
            let is_wanted = |function| wanted.iter().any(|(_, all)| all.contains(&function));
            // What could not be put back is put back with the next one that goes.
            assert!((0..6).all(|f| traced.is_armed(f) || !is_wanted(f)), "removing, fault {nth}");
        }
        drop(hooks);
        assert!((0..6).all(|function| !traced.is_armed(function)), "the end, fault {nth}");
        if !machine.has_struck() {
            assert_eq!(failures, 0);
            assert!(nth > 12, "only {nth} things were made to fail");
            return;
        }
    }
}

#[test]
fn a_return_that_an_earlier_session_waited_for_is_passed_over_and_what_nobody_writes_is_not() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let (client, _) = add(&mut hooks, &mut tracer, &["vfs_read"]);
    let window = traced.guest.region(Part::Rings).memory;
    let rings = traced.region.rings();
    let write = |ip: u32| {
        let index = traced.reserve(0);
        traced.fill(0, index, READ, 10 + index);
        window.write_obj(ip, rings.slot_offset(0, index) + 8).unwrap();
    };
    write(traced.guest.functions[WRITE].pad.0 as u32 + 6);
    traced.call(0, READ, 20);
    tracer.drain(&hooks, keep);
    assert_eq!(tracer.corrupt().count(), 0);
    write(traced.kernel.text().end.0 as u32 + 0x10_0000);
    tracer.drain(&hooks, keep);
    assert!(matches!(tracer.corrupt().next(), Some(RingCorrupt::Function { cpu: 0, .. })));
    let finished = end(&mut hooks, &mut tracer, client);
    assert_eq!(times(&finished), [20]);
}

#[test]
fn returns_go_to_those_who_want_them_and_functions_are_hooked_while_somebody_does() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let (calls, _) = add(&mut hooks, &mut tracer, &["vfs_read"]);
    let read = traced.guest.functions[READ].pad;
    assert!(!hooks.want(read).returns);
    let selection = Selection::beside(&hooks, &only(&["vfs_read"])).unwrap();
    let selection = selection.with_returns(crate::trace::graph::Options::default());
    let (graph, armed) = tracer.add(&mut hooks, &selection, Given::new()).unwrap();
    assert_eq!((armed.functions, armed.written), (1, 1), "its chain is another");
    assert!(hooks.want(read).returns);
    traced.call(0, READ, 10);
    let window = traced.guest.region(Part::Rings).memory;
    let index = traced.reserve(0);
    traced.fill(0, index, READ, 30);
    let slot = traced.region.rings().slot_offset(0, index);
    window.write_obj(read.0 as u32 + 6, slot + 8).unwrap();
    tracer.drain(&hooks, keep);
    let graph = end(&mut hooks, &mut tracer, graph);
    assert!(!hooks.want(read).returns && hooks.want(read).traced.is_some());
    let calls = end(&mut hooks, &mut tracer, calls);
    assert_eq!((times(&calls), times(&graph)), (vec![10], vec![10, 30]));
    assert_eq!(graph.summary.functions, [("vfs_read".into(), 1)]);
    assert_eq!(graph.summary.outstanding, []);
    assert!(!traced.is_armed(READ));
}

/// A guest's call of a function that is counted.
fn count_call(traced: &Traced, hooks: &Hooks<'_>, function: usize) {
    let pad = traced.guest.functions[function].pad;
    let index = hooks.counter(pad).expect("it is counted");
    let data = traced.guest.region(Part::Data).memory;
    let at = (COUNTERS_OFFSET + u64::from(index) * COUNTER_BYTES) as usize;
    data.get_atomic_ref::<AtomicU64>(at).unwrap().fetch_add(1, Ordering::AcqRel);
}

fn add_counting<'m>(
    hooks: &mut Hooks<'m>,
    tracer: &mut Tracer<'m, Given>,
    globs: &[&str],
) -> (ClientId, Armed) {
    let selection = Selection::beside(hooks, &only(globs)).unwrap();
    tracer.add(hooks, &Selection { counts: true, ..selection }, Given::new()).unwrap()
}

fn counted<'m>(
    hooks: &Hooks<'m>,
    tracer: &mut Tracer<'m, Given>,
    client: ClientId,
) -> Vec<(String, u64)> {
    let news = tracer.counts(hooks, client).expect("it counts").unwrap();
    news.iter().map(|(index, calls)| (tracer.function(*index).to_string(), *calls)).collect()
}

#[test]
fn each_client_that_counts_has_the_calls_of_its_own_time() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let pads = [READ, WRITE].map(|function| traced.guest.functions[function].pad);
    let read = |calls| vec![("vfs_read".to_owned(), calls)];

    let (first, armed) = add_counting(&mut hooks, &mut tracer, &["vfs_read"]);
    assert_eq!((armed.functions, armed.written), (1, 1));
    count_call(&traced, &hooks, READ);
    count_call(&traced, &hooks, READ);
    let (second, armed) = add_counting(&mut hooks, &mut tracer, &["vfs_read", "vfs_write"]);
    assert_eq!((armed.functions, armed.written), (2, 1));
    count_call(&traced, &hooks, READ);
    count_call(&traced, &hooks, WRITE);
    assert_eq!(counted(&hooks, &mut tracer, first), read(3));
    assert_eq!(counted(&hooks, &mut tracer, first), []);
    let both = [("vfs_read".to_owned(), 1), ("vfs_write".to_owned(), 1)];
    assert_eq!(counted(&hooks, &mut tracer, second), both);

    // One that records is armed beside them, and its end leaves what is counted.
    let (recording, armed) = add(&mut hooks, &mut tracer, &["vfs_read"]);
    assert_eq!((armed.functions, armed.written), (1, 1));
    let both = Want { traced: Some(Method::Call), counted: true, ..Want::default() };
    assert_eq!(hooks.want(pads[READ]), both);
    traced.call(0, READ, 10);
    assert_eq!(times(&end(&mut hooks, &mut tracer, recording)), [10]);
    assert_eq!(hooks.want(pads[READ]), Want { counted: true, ..Want::default() });
    assert!(tracer.counts(&hooks, recording).is_none());

    let finished = end(&mut hooks, &mut tracer, first);
    assert_eq!(finished.summary.functions, [("vfs_read".into(), 3)]);
    assert_eq!((finished.summary.events, finished.summary.set_back), (3, 0));
    count_call(&traced, &hooks, READ);
    assert_eq!(counted(&hooks, &mut tracer, second), read(2));
    assert!(traced.is_armed(READ) && traced.is_armed(WRITE));
    // What is counted behind its end is not its own.
    tracer.remove(&mut hooks, second).unwrap();
    assert!(!traced.is_armed(READ) && !traced.is_armed(WRITE));
    count_call(&traced, &hooks, WRITE);
    assert_eq!(tracer.finish(second, keep).unwrap().summary.events, 3);

    // Its thunk is the same again.
    let before = hooks.region().code().used();
    let (third, armed) = add_counting(&mut hooks, &mut tracer, &["vfs_write"]);
    assert_eq!((armed.written, hooks.region().code().used()), (1, before));
    assert_eq!(counted(&hooks, &mut tracer, third), []);
}

#[test]
fn every_function_of_a_kernel_can_be_counted_and_each_has_its_own_thunk() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let (_, armed) = add_counting(&mut hooks, &mut tracer, &["*"]);
    assert!(armed.functions > 1000, "{armed:?}");
    let mut targets = std::collections::BTreeSet::new();
    for (index, function) in traced.guest.functions.iter().enumerate() {
        if !traced.is_armed(index) {
            continue;
        }
        let bytes = traced.guest.peek(function.pad, 5);
        let distance = i32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]);
        let thunk = function.pad + (5 + i64::from(distance)) as u64;
        assert!(targets.insert(thunk), "{index}");
        // It pushes the address of its function's counter.
        let gpa = hooks.region().gpa(thunk).expect("a thunk is in the region");
        let code = traced.guest.region(Part::Code);
        let mut pushed = [0; 5];
        code.memory.read_slice(&mut pushed, (gpa.0 - code.gpa.0) as usize).unwrap();
        let counter = hooks.counter(function.pad).unwrap();
        let data = hooks.region().range(Part::Data).start;
        let expected = data + COUNTERS_OFFSET + u64::from(counter) * COUNTER_BYTES;
        assert_eq!(pushed[0], 0x68);
        assert_eq!(pushed[1..], (expected.0 as u32).to_le_bytes());
    }
    assert_eq!(targets.len(), armed.functions);
}

fn add_filtered<'m>(
    traced: &'m Traced,
    hooks: &mut Hooks<'m>,
    tracer: &mut Tracer<'m, Given>,
    filter: &str,
) -> Result<ClientId, ArmError> {
    let (globs, arguments) = calls::divide(&[filter.to_owned()]).unwrap();
    let names = Filter { only: globs, except: Vec::new() };
    let selection = Selection::beside(hooks, &names).unwrap();
    let filter = CallFilter { arguments, ..CallFilter::default() };
    let selection = selection.filtered(hooks.kernel(), &traced.guest, &filter).unwrap();
    tracer.add(hooks, &selection, Given::new()).map(|(client, _)| client)
}

#[test]
fn a_function_has_one_filter_of_its_calls_whoever_traces_it() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let (large, all) = ("vfs_read: arg3 > 4096", "vfs_read");
    let first = add_filtered(&traced, &mut hooks, &mut tracer, large).unwrap();
    let gate = hooks.want(traced.guest.functions[READ].pad).gate;
    assert!(gate.is_some());
    for other in [all, "vfs_*: arg3 > 4097"] {
        let refused = add_filtered(&traced, &mut hooks, &mut tracer, other).unwrap_err();
        assert!(matches!(refused, ArmError::Hook(HookError::OtherGate(_))), "{refused}");
    }
    // Another function is nobody's yet, and the same filter is the same gate.
    let second = add_filtered(&traced, &mut hooks, &mut tracer, "vfs_write").unwrap();
    let third = add_filtered(&traced, &mut hooks, &mut tracer, large).unwrap();
    // Calls are counted in front of it.
    let (counting, _) = add_counting(&mut hooks, &mut tracer, &["vfs_read"]);
    let want = Want { traced: Some(Method::Call), counted: true, gate, ..Want::default() };
    assert_eq!(hooks.want(traced.guest.functions[READ].pad), want);

    // What the gate turns away the guest counts, and each client has what was in its own time.
    let pads = hooks.pads().unwrap();
    let site = pads.sites.iter().find(|site| &*site.name == "vfs_read").unwrap();
    let counter = hooks.turned_away(site, gate.unwrap()).unwrap();
    let turn_away = |calls| {
        let at = (COUNTERS_OFFSET + u64::from(counter) * COUNTER_BYTES) as usize;
        let data = traced.guest.region(Part::Data).memory;
        data.get_atomic_ref::<AtomicU64>(at).unwrap().fetch_add(calls, Ordering::AcqRel);
    };
    turn_away(3);
    traced.call(0, READ, 10);
    let finished = end(&mut hooks, &mut tracer, first);
    assert_eq!(times(&finished), [10]);
    assert_eq!(finished.summary.turned_away, [("vfs_read".into(), 3)]);
    turn_away(2);
    assert_eq!(end(&mut hooks, &mut tracer, third).summary.turned_away[0].1, 5);
    assert_eq!(end(&mut hooks, &mut tracer, second).summary.turned_away, []);
    assert_eq!(end(&mut hooks, &mut tracer, counting).summary.turned_away, []);

    // Whoever comes when all of them have gone has another one, or none.
    let code = hooks.region().code().used();
    let again = add_filtered(&traced, &mut hooks, &mut tracer, large).unwrap();
    assert_eq!(hooks.region().code().used(), code);
    assert_eq!(end(&mut hooks, &mut tracer, again).summary.turned_away, []);
    let last = add_filtered(&traced, &mut hooks, &mut tracer, all).unwrap();
    assert_eq!(hooks.want(traced.guest.functions[READ].pad).gate, None);
    end(&mut hooks, &mut tracer, last);
}
