//! Clients whose records stay in the rings.

use super::*;
use crate::trace::graph::Options;
use crate::trace::sink::EventKind;

/// What a client was given: function, time, and in a trace of returns how deep it is and whether it returns.
type Shown = Vec<(String, u64, u32, bool)>;

fn show(shown: &mut Shown, event: &Event<'_>) -> io::Result<()> {
    let depth = event.kind.depth().unwrap_or(0);
    let is_return = matches!(event.kind, EventKind::Return(_));
    shown.push((event.function.to_string(), event.time_ns, depth, is_return));
    Ok(())
}

fn record<'m>(
    hooks: &mut Hooks<'m>,
    tracer: &mut Tracer<'m, Shown>,
    globs: &[&str],
    graph: Option<Options>,
) -> ClientId {
    let selection = Selection::beside(hooks, &only(globs)).unwrap();
    let selection = match graph {
        Some(options) => selection.with_returns(options),
        None => selection,
    };
    let selection = Selection { overwrite: true, ..selection };
    tracer.add(hooks, &selection, Shown::new()).unwrap().0
}

/// Everything that is held, and what it came to.
fn held<'m>(
    hooks: &Hooks<'m>,
    tracer: &mut Tracer<'m, Shown>,
    client: ClientId,
) -> (Shown, Summary) {
    let mut held = tracer.hold(hooks, client).unwrap();
    let mut shown = Shown::new();
    while held.left() > 0 {
        tracer.give_held(&mut held, 7, Some(&mut shown), show);
    }
    (shown, tracer.summary_of_held(&held))
}

fn times(shown: &Shown) -> Vec<u64> {
    shown.iter().map(|(_, time, ..)| *time).collect()
}

/// The last of all records that a ring holds.
fn capacity(traced: &Traced) -> u64 {
    traced.region.rings().capacity()
}

#[test]
fn the_last_calls_of_each_cpu_are_held_and_the_others_counted() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let client = record(&mut hooks, &mut tracer, &["vfs_*"], None);
    let full = capacity(&traced) + 5;
    (0..full).for_each(|call| traced.call(0, READ, 10 * call + 10));
    (0..3).for_each(|call| traced.call(1, WRITE, 10 * call + 5 + 10 * full));
    assert_eq!(tracer.drain(&hooks, show), 0, "nothing is read meanwhile");
    assert_eq!(tracer.progress(client).unwrap().events, full + 3);
    let (shown, summary) = held(&hooks, &mut tracer, client);
    assert_eq!(shown.len() as u64, capacity(&traced) + 3);
    assert!(shown.is_sorted_by_key(|(_, time, ..)| *time));
    assert_eq!((shown[0].1, summary.overwritten), (60, vec![5, 0]));
    assert_eq!((summary.events, summary.events + 5), (shown.len() as u64, full + 3));

    // It goes on, and what comes next is there as well the next time.
    traced.call(0, READ, 1_000_000);
    tracer.remove(&mut hooks, client).unwrap();
    traced.call(0, READ, 2_000_000);
    let mut last = tracer.hold(&hooks, client).unwrap();
    let all = last.left();
    tracer.give_held(&mut last, all, None, show);
    let finished = tracer.finish_held(last).unwrap();
    assert_eq!(finished.sink.last().unwrap().1, 1_000_000);
    let summary = finished.summary;
    assert_eq!((summary.overwritten.clone(), summary.entries()), (vec![6, 0], full + 4));
    assert_eq!(summary.dropped(), 0);
    assert_eq!(
        summary.functions,
        [("vfs_read".into(), capacity(&traced)), ("vfs_write".into(), 3)]
    );
    assert!(!traced.is_armed(READ) && tracer.hold(&hooks, client).is_none());
}

#[test]
fn others_are_given_what_they_always_are_beside_a_recorder() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let recorder = record(&mut hooks, &mut tracer, &["vfs_read"], None);
    traced.call(0, READ, 10);
    tracer.drain(&hooks, show);
    let selection = Selection::beside(&hooks, &only(&["vfs_*"])).unwrap();
    let (other, _) = tracer.add(&mut hooks, &selection, Shown::new()).unwrap();
    traced.call(0, WRITE, 20);
    traced.call(1, READ, 21);
    tracer.drain(&hooks, show);
    assert_eq!(times(&held(&hooks, &mut tracer, recorder).0), [10, 21]);
    traced.call(1, READ, 30);
    tracer.remove(&mut hooks, other).unwrap();
    tracer.drain(&hooks, show);
    let other = tracer.finish(other, show).unwrap();
    assert_eq!(times(&other.sink), [20, 21, 30]);
    traced.call(0, WRITE, 40);
    assert_eq!(times(&held(&hooks, &mut tracer, recorder).0), [10, 21, 30]);
    assert!(tracer.hold(&hooks, ClientId(99)).is_none());
}

#[test]
fn what_its_sink_does_not_take_is_counted() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let client = record(&mut hooks, &mut tracer, &["vfs_*"], None);
    (1..=10).for_each(|time| traced.call(0, READ, time));
    let mut held = tracer.hold(&hooks, client).unwrap();
    let mut give = |shown: &mut Shown, event: &Event<'_>| match event.time_ns {
        3 => Err(ErrorKind::WouldBlock.into()),
        _ => show(shown, event),
    };
    tracer.give_held(&mut held, 6, None, &mut give);
    assert!(held.failure().is_none());
    held.give_up();
    tracer.remove(&mut hooks, client).unwrap();
    let finished = tracer.finish_held(held).unwrap();
    assert_eq!(times(&finished.sink), [1, 2, 4, 5, 6]);
    assert_eq!((finished.summary.overrun, finished.summary.entries()), (5, 10));
}

#[test]
fn a_ring_that_the_guest_has_emptied_is_spoilt_and_the_others_are_held() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    traced.reserve(0);
    let client = record(&mut hooks, &mut tracer, &["vfs_*"], None);
    traced.call(0, READ, 1);
    traced.call(1, READ, 2);
    let window = traced.guest.region(Part::Rings).memory;
    window.write_obj(0_u64, traced.region.rings().header_offset(0)).unwrap();
    let (shown, summary) = held(&hooks, &mut tracer, client);
    assert_eq!(times(&shown), [2]);
    assert!(matches!(summary.corrupt[..], [RingCorrupt::Head { cpu: 0, from: 1, to: 0 }]));
}

/// A record of a task's call, or of its return.
fn of_task(traced: &Traced, (cpu, pid): (usize, u32), function: usize, is_return: bool, time: u64) {
    let index = traced.reserve(cpu);
    traced.fill(cpu, index, function, time);
    let slot = traced.region.rings().slot_offset(cpu, index);
    let window = traced.guest.region(Part::Rings).memory;
    let ip = traced.guest.functions[function].pad.0 as u32 + 5 + u32::from(is_return);
    window.write_obj(ip, slot + 8).unwrap();
    window.write_obj(pid, slot + 20).unwrap();
}

#[test]
fn calls_are_as_deep_as_they_were_though_their_callers_are_overwritten() {
    const TASK: (usize, u32) = (0, 203);
    for (functions, depths) in
        [(&[][..], [2, 2, 1, 0, 0, 0]), (&["function_00003"][..], [1, 1, 0, 9, 9, 9])]
    {
        let traced = Traced::new();
        let (mut hooks, mut tracer) = traced.tracer();
        let options = Options {
            functions: functions.iter().map(|glob| Glob::new(glob)).collect(),
            ..Options::default()
        };
        let globs = &["vfs_*", "function_0000*"];
        let client = record(&mut hooks, &mut tracer, globs, Some(options));
        // Two calls that are overwritten, then one in them, and all the returns.
        of_task(&traced, TASK, 2, false, 1);
        of_task(&traced, TASK, 3, false, 2);
        (0..capacity(&traced) - 8)
            .for_each(|at| of_task(&traced, (0, 150), READ, at % 2 == 1, 3 + at));
        let then = 3 + capacity(&traced);
        of_task(&traced, TASK, WRITE, false, then);
        of_task(&traced, TASK, WRITE, true, then + 1);
        of_task(&traced, TASK, 3, true, then + 2);
        of_task(&traced, TASK, 2, true, then + 3);
        of_task(&traced, TASK, 4, false, then + 4);
        of_task(&traced, TASK, 4, true, then + 5);
        // Of another task two calls that take the place of the first two.
        (0..2).for_each(|at| of_task(&traced, (0, 150), READ, at % 2 == 1, then + 6 + at));
        let (shown, summary) = held(&hooks, &mut tracer, client);
        assert_eq!(summary.overwritten, [2, 0]);
        assert_eq!((summary.lost_calls, summary.lost_returns), (2, 0));
        let shown: Vec<(u64, u32)> = shown
            .iter()
            .filter(|(_, time, ..)| (then..then + 6).contains(time))
            .map(|(_, time, depth, _)| (time - then, *depth))
            .collect();
        let expected = (0..).zip(depths).filter(|(_, depth)| *depth < 9);
        assert_eq!(shown, expected.collect::<Vec<_>>(), "{functions:?}");
    }
}

#[test]
fn what_may_have_been_called_on_another_cpu_meanwhile_deepens_nothing() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let globs = &["vfs_*", "function_0000*"];
    let client = record(&mut hooks, &mut tracer, globs, Some(Options::default()));
    // A call on CPU 0, long ago; one on CPU 1 that is overwritten, and returns on CPU 0.
    of_task(&traced, (0, 203), READ, false, 1);
    of_task(&traced, (0, 203), READ, true, 2);
    of_task(&traced, (1, 203), 2, false, 3);
    (0..capacity(&traced)).for_each(|at| of_task(&traced, (1, 150), READ, at % 2 == 1, 4 + at));
    let then = 4 + capacity(&traced);
    of_task(&traced, (1, 203), WRITE, false, then);
    of_task(&traced, (1, 203), WRITE, true, then + 1);
    of_task(&traced, (0, 203), 2, true, then + 2);
    let (shown, summary) = held(&hooks, &mut tracer, client);
    assert_eq!(summary.lost_calls, 1);
    assert_eq!(shown[0], ("vfs_read".into(), 1, 0, false));
    assert_eq!(shown[1], ("vfs_read".into(), 2, 0, true));
    assert_eq!(shown.last().unwrap(), &("function_00002".into(), then + 2, 0, true));
}
