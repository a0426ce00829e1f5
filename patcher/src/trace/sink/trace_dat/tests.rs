//! Files are read by trace-cmd itself, and compared with our own text.

use std::fs;
use std::io::Cursor;
use std::process::Command;
use std::{env, process};

use super::super::tests::BEGINNING;
use super::super::{Context, EventKind, FtraceText, Return, Task, Tracer, Values};
use super::*;

const CPUS: usize = 3;

/// Events of tasks on all CPUs, more than a page of each holds, with steps of time of all lengths, and
/// some that are missing.
fn events() -> Vec<Event<'static>> {
    let comms = ["busybox", "kworker/0:1", "a b"];
    let texts = ["vfs_read", "vfs_write", "do_syscall_64", "0xffffffffc0001234"];
    let name = |id: u64| Name {
        id,
        text: texts[id as usize],
        address: 0xffff_ffff_8100_0000 + id * 0x100 + 4,
        offset: if id == 3 { 0 } else { 4 },
    };
    let mut time_ns = 1_000_000_499;
    let mut all = Vec::new();
    for step in 0..2000_u64 {
        time_ns += match step % 500 {
            77 => 1 << 27,
            99 => 3_600_000_000_000,
            _ => step * 37 % 1900,
        };
        let task = step as u32 % 4;
        let comm = comms.get(task as usize).copied();
        let context = Context {
            irqs_off: step % 3 == 0,
            need_resched: step % 5 == 0,
            hardirq: step % 7 == 0,
            softirq: step % 11 == 0,
            preempt_depth: (step % 4) as u8,
            ..Context::default()
        };
        all.push(Event {
            time_ns,
            kind: EventKind::Call,
            cpu: (step * 7 % 13 % CPUS as u64) as u16,
            function: name(step % 3),
            caller: name(step / 3 % 4),
            // A task without a name, and the idle one.
            task: Some(Task { pid: if task == 3 { 0 } else { 100 + task }, comm }),
            context: Some(context),
            values: Values::NONE,
            missed: if step % 400 == 123 { step } else { 0 },
        });
    }
    all
}

fn beginning(order: ByteOrder) -> Beginning<'static> {
    Beginning { cpus: CPUS, order, ..BEGINNING }
}

fn written(order: ByteOrder, events: &[Event<'_>]) -> Vec<u8> {
    let mut out = Cursor::new(Vec::new());
    let mut sink = TraceDat::new(&mut out, || Ok(Cursor::new(Vec::new())));
    sink.begin(&beginning(order)).unwrap();
    events.iter().for_each(|event| sink.event(event).unwrap());
    sink.flush().unwrap();
    sink.end(events.len() as u64, events.len() as u64).unwrap();
    drop(sink);
    out.into_inner()
}

/// What trace-cmd says of a file.
fn trace_cmd(arguments: &[&str], file: &[u8]) -> String {
    let thread = format!("{:?}", std::thread::current().id());
    let path = env::temp_dir().join(format!("vmm-trace-dat-{}-{thread}", process::id()));
    fs::write(&path, file).unwrap();
    let output = Command::new("trace-cmd").args(arguments).arg("-i").arg(&path).output();
    fs::remove_file(&path).unwrap();
    let output = output.expect("trace-cmd, which scripts/setup.sh installs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert_eq!(said, "", "trace-cmd complains");
    String::from_utf8(output.stdout).unwrap()
}

fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Our own text: its lines' words.
fn of_text(events: &[Event<'_>], contexts: bool) -> Vec<String> {
    let mut text = Vec::new();
    let mut sink = FtraceText::stream(&mut text);
    sink.begin(&Beginning { contexts, ..beginning(ByteOrder::Little) }).unwrap();
    events.iter().for_each(|event| sink.event(event).unwrap());
    sink.end(0, 0).unwrap();
    drop(sink);
    let text = String::from_utf8(text).unwrap();
    text.lines().filter(|line| !line.starts_with('#')).map(words).collect()
}

/// The words of a line of trace-cmd's, as our text would have them.
fn of_report(line: &str) -> String {
    let line = line.replace(" function: ", " ").replace(" <-- ", " <-");
    match line.strip_suffix(" EVENTS DROPPED]") {
        Some(lost) => format!("{} EVENTS]", lost.replace('[', "[LOST ")),
        None => words(&line),
    }
}

#[test]
fn trace_cmd_shows_what_our_text_shows() {
    let events = events();
    for order in [ByteOrder::Little, ByteOrder::Big] {
        let file = written(order, &events);
        let report = trace_cmd(&["report", "-O", "parent=1", "-O", "indent=0"], &file);
        let mut lines = report.lines();
        assert_eq!(lines.next(), Some("cpus=3"));
        assert_eq!(lines.map(of_report).collect::<Vec<_>>(), of_text(&events, false));
    }
}

#[test]
fn trace_cmd_shows_the_flags_that_our_text_shows() {
    let events = events();
    let report = trace_cmd(&["report", "-l"], &written(ByteOrder::Little, &events));
    // "TASK-PID     CPUFLAGS     TIME: ..."
    let flags = |line: &str| {
        line.split_once(": ")?.0.split_whitespace().nth_back(1)?.get(1..).map(str::to_owned)
    };
    let shown: Vec<_> = report.lines().filter_map(flags).collect();
    let text = of_text(&events, true);
    // "TASK-PID [CPU] FLAGS TIME: ..."
    let flags = |line: &String| Some(line.split_once(": ")?.0.split(' ').nth_back(1)?.to_owned());
    assert_eq!(shown.len(), events.len());
    assert_eq!(shown, text.iter().filter_map(flags).collect::<Vec<_>>());
}

#[test]
fn a_trace_without_events_and_names_that_are_none_can_be_read() {
    assert_eq!(trace_cmd(&["report"], &written(ByteOrder::Big, &[])), "cpus=3\n");
    let odd = Name { id: 0, text: "a b\n[c]\u{1}", address: 0x1004, offset: 4 };
    let task = Some(Task { pid: 7, comm: Some("x\ny") });
    let events = [Event { function: odd, caller: odd, task, ..events()[0] }];
    let report = trace_cmd(&["report"], &written(ByteOrder::Little, &events));
    let line = report.lines().nth(1).unwrap();
    assert!(line.contains("x?y-7") && line.ends_with("a?b??c??"), "{line}");
}

#[test]
fn a_cpu_that_the_guest_does_not_have_is_an_error() {
    let mut sink = TraceDat::new(Vec::new(), || Ok(Cursor::new(Vec::new())));
    sink.begin(&beginning(ByteOrder::Little)).unwrap();
    let error = sink.event(&Event { cpu: 3, ..events()[0] }).unwrap_err();
    assert_eq!(error.to_string(), "an event of CPU 3, of a guest with 3 CPUs");
}

/// Trees of calls on two CPUs. No event of the one is between a call of the other and its return, which
/// trace-cmd would take for a call that calls others.
fn tree() -> Vec<Event<'static>> {
    let template = events();
    let mut time_ns = 5_000_000_000;
    let mut event = |cpu, pid, function: usize, kind| {
        time_ns += 1_000;
        let comm = Some(if pid == 7 { "seven" } else { "eight" });
        let task = Some(Task { pid, comm });
        Event { time_ns, cpu, kind, task, missed: 0, ..template[function] }
    };
    let entry = |depth| EventKind::Entry { depth };
    let back = |depth, took| EventKind::Return(Return { depth, value: 5, duration_ns: Some(took) });
    vec![
        event(0, 7, 0, entry(0)),
        event(0, 7, 1, entry(1)),
        event(0, 7, 1, back(1, 2_000)),
        event(1, 8, 2, entry(0)),
        event(1, 8, 2, back(0, 6_000)),
        event(0, 7, 1, entry(1)),
        event(0, 7, 2, entry(2)),
        event(0, 7, 2, back(2, 1_000)),
        event(0, 7, 1, back(1, 3_000)),
        event(0, 7, 0, back(0, 12_345)),
    ]
}

#[test]
fn trace_cmd_shows_the_tree_that_our_text_shows() {
    let events = tree();
    let mut text = Vec::new();
    let mut sink = FtraceText::stream(&mut text);
    sink.begin(&Beginning { tracer: Tracer::Graph, ..beginning(ByteOrder::Little) }).unwrap();
    events.iter().for_each(|event| sink.event(event).unwrap());
    sink.end(0, 0).unwrap();
    drop(sink);
    // What stands behind the columns, and the duration in front of it.
    let of = |line: &str| {
        let (columns, call) = line.split_once('|')?;
        let duration = columns.split_whitespace().rev().nth(1);
        let duration = duration.filter(|_| columns.trim_end().ends_with("us"));
        Some((duration.map(str::to_owned), call.trim_end().get(2..)?.to_owned()))
    };
    let text = String::from_utf8(text).unwrap();
    let expected: Vec<_> =
        text.lines().filter(|line| !line.starts_with('#')).filter_map(of).collect();
    assert_eq!(expected.len(), 7, "{text}");
    for order in [ByteOrder::Little, ByteOrder::Big] {
        let report = trace_cmd(&["report"], &written(order, &events));
        let shown: Vec<_> = report.lines().filter(|line| line.contains("funcgraph_")).collect();
        let shown: Vec<_> = shown.into_iter().filter_map(of).collect();
        assert_eq!(shown, expected, "{report}");
        let raw = trace_cmd(&["report", "-R"], &written(order, &events));
        assert!(raw.contains("retval="), "{raw}");
    }
}
