//! Traces are decoded by protoc, with names and numbers of the published schema.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use super::super::tests::{BEGINNING, EVENTS};
use super::*;

fn written(events: &[Event<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut sink = Perfetto::new(&mut bytes);
    sink.begin(&Beginning { cpus: 2, ..BEGINNING }).unwrap();
    events.iter().for_each(|event| sink.event(event).unwrap());
    sink.end(0, 0).unwrap();
    drop(sink);
    bytes
}

/// The packets of a trace in protobuf's text form.
fn decoded(trace: &[u8]) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/trace/sink/perfetto");
    let mut child = Command::new("protoc")
        .args(["--decode=perfetto.protos.Trace", "schema.proto"])
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("protoc, which scripts/setup.sh installs");
    let mut input = child.stdin.take().unwrap();
    let trace = trace.to_owned();
    let feeder = std::thread::spawn(move || input.write_all(&trace).unwrap());
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let packet = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    text.split("packet {").skip(1).map(packet).collect()
}

#[test]
fn a_trace_has_the_fields_of_the_published_schema() {
    let unknown = Event { cpu: 1, ..EVENTS[1] };
    let packets = decoded(&written(&[EVENTS[0], EVENTS[0], unknown]));
    let expected = [
        "interned_data { debug_annotation_names { iid: 1 name: \"caller\" } \
         debug_annotation_names { iid: 2 name: \"cpu\" } \
         debug_annotation_names { iid: 3 name: \"flags\" } \
         debug_annotation_names { iid: 4 name: \"preempt_depth\" } \
         debug_annotation_names { iid: 5 name: \"missed_before\" } \
         debug_annotation_names { iid: 6 name: \"returned\" } } sequence_flags: 1",
        "track_descriptor { uuid: 1 process { pid: 4194305 process_name: \"Linux 6.1 x86_64\" } }",
        "track_descriptor { uuid: 2 name: \"CPUs, by the tasks that calls were seen of\" }",
        "track_descriptor { uuid: 4294967296 name: \"CPU 0\" parent_uuid: 2 }",
        "track_descriptor { uuid: 4294967297 name: \"CPU 1\" parent_uuid: 2 }",
        "track_descriptor { uuid: 12884901982 thread { pid: 4194305 tid: 94 thread_name: \"busybox\" } \
         parent_uuid: 1 }",
        "timestamp: 7754083999 track_event { type: TYPE_SLICE_BEGIN track_uuid: 4294967297 \
         name: \"busybox 94\" } sequence_flags: 2",
        "timestamp: 7754083999 track_event { debug_annotations { name_iid: 1 string_value_iid: 1 } \
         debug_annotations { name_iid: 2 uint_value: 1 } \
         debug_annotations { name_iid: 3 string_value: \"d.h1.\" } \
         debug_annotations { name_iid: 4 uint_value: 1 } \
         type: TYPE_INSTANT name_iid: 1 track_uuid: 12884901982 } \
         interned_data { event_names { iid: 1 name: \"vfs_read\" } \
         debug_annotation_string_values { iid: 1 str: \"ksys_read\" } } sequence_flags: 2",
        "timestamp: 7754083999 track_event { debug_annotations { name_iid: 1 string_value_iid: 1 } \
         debug_annotations { name_iid: 2 uint_value: 1 } \
         debug_annotations { name_iid: 3 string_value: \"d.h1.\" } \
         debug_annotations { name_iid: 4 uint_value: 1 } \
         type: TYPE_INSTANT name_iid: 1 track_uuid: 12884901982 } sequence_flags: 2",
        "track_descriptor { uuid: 8589934593 name: \"CPU 1\" parent_uuid: 1 }",
        "timestamp: 123456000001000 track_event { \
         debug_annotations { name_iid: 1 string_value_iid: 2 } \
         debug_annotations { name_iid: 2 uint_value: 1 } \
         debug_annotations { name_iid: 5 uint_value: 3 } \
         type: TYPE_INSTANT name_iid: 2 track_uuid: 8589934593 } \
         interned_data { event_names { iid: 2 name: \"f\" } \
         debug_annotation_string_values { iid: 2 str: \"0xffffffffc0001234\" } } sequence_flags: 2",
        "timestamp: 7754083999 track_event { type: TYPE_SLICE_END track_uuid: 4294967297 } \
         sequence_flags: 2",
    ];
    assert_eq!(packets.len(), expected.len(), "{packets:#?}");
    for (packet, expected) in packets.iter().zip(expected) {
        let mut packet = packet.strip_suffix(" }").expect("a packet's end").to_owned();
        // Fields are in the order of their numbers.
        let sequence = "trusted_packet_sequence_id: 1 ";
        assert!(packet.contains(sequence), "{packet}");
        packet = packet.replacen(sequence, "", 1);
        assert_eq!(packet, expected);
    }
}

#[test]
fn a_cpu_shows_one_stretch_for_calls_of_one_task_and_the_next_for_another() {
    let other = Some(Task { pid: 7, comm: None });
    let at = |time_ns, task| Event { time_ns, task, missed: 0, ..EVENTS[0] };
    let idle = Some(Task { pid: 0, comm: None });
    let busy = EVENTS[0].task;
    let packets = decoded(&written(&[
        at(1, busy),
        at(2, busy),
        at(3, other),
        at(4, idle),
        Event { missed: 1, ..at(5, idle) },
    ]));
    let stretches: Vec<&str> =
        packets.iter().filter(|packet| packet.contains("TYPE_SLICE")).map(|p| &p[..13]).collect();
    // Begin and end of each, in the order of the packets.
    let times = [1, 2, 3, 3, 4, 4, 5, 5].map(|time| format!("timestamp: {time} "));
    assert_eq!(stretches, times.each_ref().map(|time| &time[..13]));
    let named = packets.iter().filter(|packet| packet.contains("SLICE_BEGIN"));
    let names: Vec<_> = named.filter_map(|packet| packet.split('"').nth(1)).collect();
    assert_eq!(names, ["busybox 94", "<...> 7", "<idle> 0", "<idle> 0"]);
    assert!(packets.iter().any(|packet| packet.contains("name: \"swapper/1 (idle)\"")));
}

#[test]
fn a_task_with_a_new_name_is_told_of_again() {
    let named = |comm| Event { task: Some(Task { pid: 9, comm: Some(comm) }), ..EVENTS[0] };
    let packets = decoded(&written(&[named("sh"), named("sh"), named("ls")]));
    let names = packets.iter().filter(|packet| packet.contains("tid: 9 "));
    let names: Vec<_> = names.filter_map(|packet| packet.split('"').nth(1)).collect();
    assert_eq!(names, ["sh", "ls"]);
}

#[test]
fn names_beyond_what_is_kept_begin_anew() {
    let mut sink = Perfetto::new(Vec::new());
    sink.begin(&BEGINNING).unwrap();
    for id in 0..(MAX_KNOWN as u64 + 10) {
        let name = Name { id, text: "x", address: 0, offset: 0 };
        sink.event(&Event { function: name, ..EVENTS[1] }).unwrap();
        assert!(sink.functions.len() <= MAX_KNOWN);
    }
    sink.end(0, 0).unwrap();
    let (mut bytes, mut cleared, mut last) = (&sink.packets.out[..], 0, None);
    while let Some(rest) = bytes.strip_prefix(&[PACKET]) {
        bytes = rest;
        let packet = TracePacket::decode_length_delimited(&mut bytes).unwrap();
        cleared += u32::from(packet.sequence_flags == CLEARED);
        last = packet.track_event.or(last);
    }
    assert_eq!((bytes.len(), cleared, last.unwrap().name_iid), (0, 2, 10));
}

#[test]
fn calls_that_return_are_slices_and_what_has_no_return_ends_with_what_called_it() {
    let at = |time_ns, kind| Event { time_ns, kind, missed: 0, ..EVENTS[0] };
    let back = |depth, value, duration_ns| EventKind::Return(Return { depth, value, duration_ns });
    let packets = decoded(&written(&[
        at(10, EventKind::Entry { depth: 0 }),
        at(20, EventKind::Entry { depth: 1 }),
        at(30, back(1, 7, Some(10))),
        at(40, EventKind::Entry { depth: 1 }),
        at(50, EventKind::Entry { depth: 1 }),
        at(60, back(0, -22_i64 as u64, Some(50))),
        at(70, back(3, 1, Some(5))),
        at(80, back(2, 1, None)),
        at(90, EventKind::Entry { depth: 0 }),
    ]));
    let track = format!("track_uuid: {}", TASK_TRACKS + 94);
    let of_task = packets.iter().filter(|packet| packet.contains(&track));
    let shown: Vec<_> = of_task
        .map(|packet| {
            let word =
                |name: &str| packet.split_once(name).and_then(|(_, rest)| rest.split(' ').next());
            (
                word("timestamp: ").unwrap(),
                word("type: TYPE_").unwrap(),
                packet.split_once("name_iid: 6 "),
            )
        })
        .map(|(time, kind, value)| {
            format!(
                "{time} {kind} {}",
                value.map_or("", |(_, rest)| rest.split(" }").next().unwrap())
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            "10 SLICE_BEGIN ",
            "20 SLICE_BEGIN ",
            "30 SLICE_END uint_value: 7",
            "40 SLICE_BEGIN ",
            "50 SLICE_END ",
            "50 SLICE_BEGIN ",
            "60 SLICE_END ",
            "60 SLICE_END int_value: -22",
            "65 SLICE_BEGIN ",
            "70 SLICE_END uint_value: 1",
            "80 INSTANT uint_value: 1",
            "90 SLICE_BEGIN ",
        ]
    );
}
