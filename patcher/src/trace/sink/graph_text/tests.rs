use super::super::tests::BEGINNING;
use super::super::{FtraceText, Name, Sink, Task, Tracer, Values};
use super::*;

const NAMES: [&str; 4] = ["rw_verify_area", "vfs_read", "common_interrupt", "f"];

fn at(time_ns: u64, cpu: u16, pid: u32, function: u64, kind: EventKind) -> Event<'static> {
    let name = |id: u64| Name {
        id,
        text: NAMES[id as usize],
        address: 0x1000 + id * 0x100 + 4,
        offset: 4,
    };
    let comm = match pid {
        1 => Some("init"),
        147 => Some("busybox"),
        9 => Some("a-long-name"),
        _ => None,
    };
    let task = Some(Task { pid, comm });
    let (function, caller) = (name(function), name(3));
    Event {
        time_ns,
        kind,
        cpu,
        function,
        caller,
        task,
        context: None,
        values: Values::NONE,
        missed: 0,
    }
}

/// An entry on CPU 1.
fn entry(time_ns: u64, pid: u32, function: u64, depth: u32) -> Event<'static> {
    at(time_ns, 1, pid, function, EventKind::Entry { depth })
}

/// A return on CPU 1, of a call that took so long.
fn back(time_ns: u64, pid: u32, function: u64, depth: u32, took: u64) -> Event<'static> {
    let back = Return { depth, value: 0, duration_ns: Some(took) };
    at(time_ns, 1, pid, function, EventKind::Return(back))
}

fn on(cpu: u16, event: Event<'static>) -> Event<'static> {
    Event { cpu, ..event }
}

fn text_of(events: &[Event<'_>], columns: GraphColumns, cpus: usize) -> String {
    let mut bytes = Vec::new();
    let mut sink = FtraceText::stream(&mut bytes).with_columns(columns);
    let interrupts = (0x1200, 0x1300);
    sink.begin(&Beginning { tracer: Tracer::Graph, interrupts, cpus, ..BEGINNING }).unwrap();
    events.iter().for_each(|event| sink.event(event).unwrap());
    sink.end(1, 2).unwrap();
    drop(sink);
    String::from_utf8(bytes).unwrap()
}

/// The lines behind the header, of a guest with two CPUs.
fn lines(events: &[Event<'_>]) -> String {
    let text = text_of(events, GraphColumns::default(), 2);
    let header = "\
# tracer: function_graph
#
# CPU  DURATION                  FUNCTION CALLS
# |     |   |                     |   |   |   |
";
    text.strip_prefix(header).expect(&text).to_owned()
}

#[test]
fn calls_that_call_nothing_take_one_line_and_others_are_blocks() {
    let shown = lines(&[
        entry(100, 147, 1, 0),
        entry(200, 147, 0, 1),
        back(1_604, 147, 0, 1, 1_404),
        entry(2_000, 147, 3, 1),
        entry(2_100, 147, 0, 2),
        back(2_200, 147, 0, 2, 99),
        back(2_300, 147, 3, 1, 300),
        back(12_300, 147, 1, 0, 12_200),
        entry(13_000, 147, 1, 0),
    ]);
    assert_eq!(
        shown,
        " 1)               |  vfs_read() {
 1)   1.404 us    |    rw_verify_area();
 1)               |    f() {
 1)   0.099 us    |      rw_verify_area();
 1)   0.300 us    |    }
 1) + 12.200 us   |  }
 1)               |  vfs_read() {
"
    );
}

#[test]
fn long_durations_are_marked_and_keep_seven_digits() {
    let durations = [
        10_000,
        10_001,
        171_513,
        1_404_612,
        14_046_129,
        140_461_299,
        1_404_612_999,
        14_046_129_999,
        140_461_299_999,
    ];
    let events: Vec<_> =
        durations.iter().flat_map(|took| [entry(0, 1, 3, 0), back(1, 1, 3, 0, *took)]).collect();
    assert_eq!(
        lines(&events),
        " 1)   10.000 us   |  f();
 1) + 10.001 us   |  f();
 1) ! 171.513 us  |  f();
 1) # 1404.612 us |  f();
 1) * 14046.12 us |  f();
 1) @ 140461.2 us |  f();
 1) $ 1404612 us  |  f();
 1) $ 14046129 us |  f();
 1) $ 140461299 us |  f();
"
    );
}

#[test]
fn another_task_on_a_cpu_is_told_of_in_between() {
    let shown = lines(&[
        entry(1, 147, 0, 0),
        back(2, 147, 0, 0, 1),
        on(0, entry(3, 7, 0, 0)),
        entry(4, 1, 1, 0),
        on(0, back(5, 7, 0, 0, 2)),
        back(6, 0, 0, 0, 1),
        entry(7, 9, 0, 0),
    ]);
    assert_eq!(
        shown,
        " 1)   0.001 us    |  rw_verify_area();
 0)   0.002 us    |  rw_verify_area();
 ------------------------------------------
 1)  busybox-147   =>     init-1    \n \
------------------------------------------

 1)               |  vfs_read() {
 ------------------------------------------
 1)     init-1     =>    <idle>-0   \n \
------------------------------------------

 1)   0.001 us    |  } /* rw_verify_area */
 ------------------------------------------
 1)    <idle>-0    =>   a-long--9   \n \
------------------------------------------

 1)               |  rw_verify_area() {
"
    );
}

#[test]
fn a_return_whose_call_was_not_shown_on_its_cpu_is_named() {
    let unknown = Return { depth: 2, value: 0, duration_ns: None };
    let lost = Event { missed: 5, ..back(4, 1, 1, 0, 7) };
    let shown = lines(&[
        entry(1, 1, 1, 0),
        on(0, back(2, 1, 1, 0, 1_000)),
        on(0, at(3, 0, 1, 0, EventKind::Return(unknown))),
        lost,
    ]);
    assert_eq!(
        shown,
        " 1)               |  vfs_read() {
 0)   1.000 us    |  } /* vfs_read */
 0)               |      } /* rw_verify_area */
CPU:1 [LOST 5 EVENTS]
 1)   0.007 us    |  }
"
    );
}

#[test]
fn functions_that_interrupts_enter_are_marked() {
    let shown = lines(&[
        entry(1, 1, 1, 0),
        entry(2, 1, 2, 1),
        back(3, 1, 2, 1, 1),
        entry(4, 1, 2, 1),
        entry(5, 1, 0, 2),
        back(6, 1, 0, 2, 1),
        back(7, 1, 2, 1, 3),
    ]);
    assert_eq!(
        shown,
        " 1)               |  vfs_read() {
 1)   ==========> |
 1)   0.001 us    |    common_interrupt();
 1)   <========== |
 1)   ==========> |
 1)               |    common_interrupt() {
 1)   0.001 us    |      rw_verify_area();
 1)   0.003 us    |    }
 1)   <========== |
"
    );
}

#[test]
fn more_columns_are_shown_when_they_are_asked_for() {
    let events =
        [on(11, entry(1_234_567_999, 147, 0, 0)), on(11, back(1_234_568_999, 147, 0, 0, 1000))];
    let columns = GraphColumns { absolute_time: true, task: true };
    assert_eq!(
        text_of(&events, columns, 12),
        "\
# tracer: function_graph
#
#     TIME        CPU  TASK/PID         DURATION                  FUNCTION CALLS
#      |          |     |    |           |   |                     |   |   |   |
    1.234567 |   11)  busybox-147   |   1.000 us    |  rw_verify_area();
"
    );
    let text = text_of(&[on(2, entry(1, 1, 3, 0))], GraphColumns::default(), 12);
    assert!(text.ends_with("\n  2)               |  f() {\n"), "{text}");
}

#[test]
fn what_is_held_has_a_bound_and_live_text_does_not_wait_for_long() {
    let mut sleeping = vec![on(0, entry(0, 1, 1, 0))];
    sleeping.extend((0..2 * MAX_HELD as u64).map(|time| back(time, 9, 3, 0, 1)));
    let shown = lines(&sleeping);
    assert!(shown.starts_with(" 0)               |  vfs_read() {\n"), "{shown:.200}");
    assert_eq!(shown.lines().count(), sleeping.len());

    let mut text = Vec::new();
    let mut lines = GraphLines::new(GraphColumns::default(), true);
    lines.begin(&Beginning { cpus: 2, ..BEGINNING }, &mut text);
    text.clear();
    lines.event(&on(0, entry(0, 1, 1, 0)), &mut text);
    lines.event(&entry(MAX_WAIT_NS, 9, 3, 0), &mut text);
    assert_eq!(text, b"");
    lines.event(&entry(MAX_WAIT_NS + 1, 9, 3, 1), &mut text);
    assert_eq!(String::from_utf8(text.clone()).unwrap().lines().count(), 2);
    // Its return is no longer one with it.
    lines.event(&on(0, back(MAX_WAIT_NS + 2, 1, 1, 0, 9)), &mut text);
    lines.end(&mut text);
    let text = String::from_utf8(text).unwrap();
    assert!(text.ends_with(" 1)               |    f() {\n 0)   0.009 us    |  }\n"), "{text}");
}
