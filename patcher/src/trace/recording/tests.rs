use proptest::prelude::*;

use super::*;
use crate::arch::ByteOrder;
use crate::trace::sink::{
    Beginning, Context, Event, EventKind, JsonLines, Name, Return, Sink, Task, Tracer, Values,
};

const BEGINNING: Beginning<'_> = Beginning {
    tracer: Tracer::Graph,
    interrupts: (0x100, 0x200),
    cpus: 2,
    contexts: true,
    release: "6.1",
    architecture: "s390x",
    order: ByteOrder::Big,
};

const TEXTS: [&str; 5] = ["vfs_read", "vfs_write", "f", "", "0xffffffffc0001234"];
const COMMS: [&str; 3] = ["busybox", "a b", ""];

/// None that were asked for, none that there are, and two, of which one has no name.
const VALUES: [Values<'_>; 3] = [
    Values::NONE,
    Values::new(&[]),
    Values::new(b"\x02\x03dfd\x9c\xff\xff\xff\xff\xff\xff\xff\x00\x00"),
];

fn event(step: u64) -> Event<'static> {
    let name = |id: u64| Name { id, text: TEXTS[id as usize], address: !id, offset: id };
    let bit = |bit: u64| step & 1 << bit != 0;
    Event {
        time_ns: step.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        kind: match step / 3 % 3 {
            0 => EventKind::Call,
            1 => EventKind::Entry { depth: step as u32 },
            _ => EventKind::Return(Return {
                depth: step as u32,
                value: !step,
                duration_ns: (!step.is_multiple_of(4)).then_some(step),
            }),
        },
        cpu: (step % 2) as u16,
        function: name(step % 4),
        caller: name(step / 2 % 5),
        task: (!step.is_multiple_of(5)).then(|| Task {
            pid: step as u32 % 3,
            comm: COMMS.get(step as usize / 7 % 4).copied(),
        }),
        context: (!step.is_multiple_of(3)).then(|| Context {
            irqs_off: bit(0),
            bottom_halves_off: bit(1),
            need_resched: bit(2),
            hardirq: bit(3),
            softirq: bit(4),
            nmi: bit(5),
            preempt_depth: step as u8,
        }),
        values: VALUES[step as usize % VALUES.len()],
        missed: if step % 11 == 3 { step } else { 0 },
    }
}

/// A recording of these events, flushed after each that is a multiple of `flush`.
fn recording(events: u64, flush: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut recorder = Recorder::new(&mut bytes);
    recorder.begin(&BEGINNING).unwrap();
    for step in 0..events {
        recorder.event(&event(step)).unwrap();
        if step % flush == 0 {
            recorder.flush().unwrap();
        }
    }
    recorder.end(events, events + 7).unwrap();
    bytes
}

/// Events of a recording as JSON, which shows all there is of them, and what is said at its end.
type Read = (Vec<String>, Option<(u64, u64)>, Option<Tail>);

fn read(bytes: &[u8]) -> Result<Read, RecordingError> {
    let mut recording = Recording::open(bytes)?;
    let mut lines = Vec::new();
    while recording.next(|event| lines.push(line(event)))? {}
    let (ended, tail) = (recording.ended(), recording.tail().cloned());
    Ok((lines, ended, tail))
}

fn line(event: &Event<'_>) -> String {
    let mut text = Vec::new();
    let mut sink = JsonLines::new(&mut text);
    sink.event(event).unwrap();
    sink.flush().unwrap();
    drop(sink);
    String::from_utf8(text).unwrap()
}

fn lines(events: u64) -> Vec<String> {
    (0..events).map(|step| line(&event(step))).collect()
}

#[test]
fn what_was_recorded_is_read_back() {
    for (events, flush) in [(0, 1), (1, 1), (500, 1), (30_000, 700), (30_000, 1 << 40)] {
        let bytes = recording(events, flush);
        let opened = Recording::open(&bytes[..]).unwrap();
        assert_eq!(opened.beginning(), BEGINNING);
        let (read, ended, tail) = read(&bytes).unwrap();
        assert!(read == lines(events), "{events} events, flushed every {flush}");
        assert_eq!((ended, tail), (Some((events, events + 7)), None));
    }
}

/// The form is a promise to older and newer programs.
#[test]
fn the_bytes_are_those_that_are_documented() {
    let mut bytes = Vec::new();
    let mut recorder = Recorder::new(&mut bytes);
    recorder.begin(&BEGINNING).unwrap();
    recorder.event(&event(14)).unwrap();
    recorder.end(1, 15).unwrap();
    let mut expected = b"\x89VMMREC\n\x03\0\0\0".to_vec();
    let mut block = |kind: u8, content: &[u8]| {
        let header = [[kind, 0, 0, 0], (content.len() as u32).to_le_bytes()].concat();
        let sum = crc32fast::hash(&[&header, content].concat());
        expected.extend([&header, &sum.to_le_bytes()[..], content].concat());
    };
    let interrupts = [0x100_u64.to_le_bytes(), 0x200_u64.to_le_bytes()].concat();
    block(1, &[b"\x01\x01\x01", &interrupts[..], b"\x02\0\x03\x006.1\x05\0s390x"].concat());
    let name = |id: u64, text: &[u8]| {
        [&(!id).to_le_bytes()[..], &id.to_le_bytes(), &[text.len() as u8, 0], text].concat()
    };
    block(2, &[&[0][..], &name(2, b"f"), &name(2, b"f")[..0]].concat());
    block(3, b"\0\x02\0\0\0\0\0");
    let time = 14_u64.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let numbers = [[0, 0, 0, 0]; 3].concat();
    // An entry, with its depth and two values behind it.
    let values = b"\x02\x03dfd\x9c\xff\xff\xff\xff\xff\xff\xff\x00\x00";
    let behind = [&[0x81, 4 + values.len() as u8, 0][..], &[14, 0, 0, 0], values].concat();
    let call = [&time[..], &numbers, &[0, 0, 0xc0 | 14, 14], &behind].concat();
    block(4, &[&[1, 0, 0, 0, 0, 0, 0, 0, 14, 0, 0, 0, 0, 0, 0, 0][..], &call].concat());
    block(5, &[1, 0, 0, 0, 0, 0, 0, 0, 15, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes, expected);
}

#[test]
fn a_recording_that_is_cut_anywhere_holds_what_was_flushed_before() {
    let bytes = recording(60, 10);
    let all = lines(60);
    let mut ends = vec![];
    for cut in 0..bytes.len() {
        match read(&bytes[..cut]) {
            Ok((read, ended, tail)) => {
                assert!(all.starts_with(&read));
                assert_eq!(ended, None);
                if tail.is_none() {
                    ends.push(read.len());
                }
            }
            Err(RecordingError::NotOne) => assert!(cut < 8),
            Err(RecordingError::Empty(_)) => assert!(cut < 61, "{cut}"),
            Err(error) => panic!("cut at {cut}: {error}"),
        }
    }
    // Each flush is an end in good order, and nothing that was flushed is ever lost.
    for flushed in [1, 11, 21, 31, 41, 51] {
        assert!(ends.contains(&flushed), "{ends:?}");
    }
}

#[test]
fn a_block_that_is_spoilt_ends_what_can_be_read() {
    let bytes = recording(60, 10);
    let all = lines(60);
    for at in 61..bytes.len() {
        let mut spoilt = bytes.clone();
        spoilt[at] ^= 0x10;
        let (read, _, tail) = read(&spoilt).unwrap();
        assert!(all.starts_with(&read));
        let tail = tail.unwrap_or_else(|| panic!("byte {at} does not matter"));
        assert!(tail.at <= at as u64);
    }
}

#[test]
fn what_is_no_recording_is_told_in_a_sentence() {
    let said = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
    assert_eq!(said(b""), "it is no recording of vmm's: it does not begin as one");
    assert_eq!(said(b"# tracer: function\n"), said(b""));
    let bytes = recording(1, 1);
    let newer = [&bytes[..8], &[4, 0, 0, 0], &bytes[12..]].concat();
    assert!(
        said(&newer)
            .starts_with("it is a recording of version 4, and this vmm reads versions 2 to 3")
    );
    assert_eq!(
        said(&bytes[..20]),
        "it ends before it tells of which guest it is: from byte 12 on a block is cut"
    );
}

/// Blocks whose check sums are right.
fn blocks(blocks: &[(block::Kind, &[u8])]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    blocks.iter().for_each(|(kind, content)| block::append(&mut bytes, *kind, content));
    bytes
}

const GUEST: &[u8] = b"\0\0\0aaaaaaaabbbbbbbb\x02\0\x03\x006.1\x05\0s390x";

#[test]
fn whole_blocks_that_make_no_sense_are_told_in_a_sentence() {
    use block::Kind::*;
    let name = b"\0aaaaaaaabbbbbbbb\x01\0f";
    for (row, what) in [
        (&[(Names, &name[..])][..], "the first one does not tell of the guest"),
        (
            &[(Begin, b"\0\0\0aaaaaaaabbbbbbbb\x02\0\x09\x006.1")],
            "what it tells of the guest is cut or no text",
        ),
        (&[(Begin, GUEST), (Begin, GUEST)], "the guest is told of a second time"),
        (&[(Begin, GUEST), (Names, b"\0aaaaaaaab")], "a name is cut, too long, or no text"),
        (&[(Begin, GUEST), (Names, b"\0aaaaaaaabbbbbbbb\x01\0\xff")], "a name is cut"),
        (&[(Begin, GUEST), (Tasks, b"\0aaaa\x02\0f")], "a task is cut"),
        (&[(Begin, GUEST), (Calls, b"\xff\xff\xff\xff")], "its gaps are cut"),
        (&[(Begin, GUEST), (Calls, b"\0\0\0\0abc")], "a call is cut"),
        (&[(Begin, GUEST), (Names, name), (Calls, &[0; 4 + 24])], "a call refers to a name, task"),
        (&[(Begin, GUEST), (End, b"abc")], "the end's counts are cut"),
        (&[(Begin, GUEST), (End, &[0; 16]), (End, &[0; 16])], "there is one behind the end"),
    ] {
        let error = read(&blocks(row)).unwrap_err().to_string();
        assert!(error.contains("makes no sense") && error.contains(what), "{error}: not {what}");
    }
}

#[test]
fn names_beyond_what_is_kept_begin_anew_and_a_reader_has_a_bound() {
    let mut bytes = Vec::new();
    let mut recorder = Recorder::new(&mut bytes);
    recorder.begin(&BEGINNING).unwrap();
    let text = "n".repeat(2 * MAX_NAME);
    let steps = 3 * (MAX_KNOWN_BYTES / MAX_NAME) as u64;
    for id in 0..steps {
        let name = Name { id, text: &text, address: id, offset: 0 };
        recorder.event(&Event { function: name, caller: name, ..event(1) }).unwrap();
    }
    recorder.end(steps, steps).unwrap();
    let mut recording = Recording::open(&bytes[..]).unwrap();
    let mut next = 0;
    while recording
        .next(|event| {
            assert_eq!((event.function.address, event.function.text.len()), (next, MAX_NAME));
            next += 1;
        })
        .unwrap()
    {
        assert!(recording.names.len() <= MAX_KNOWN_BYTES / MAX_NAME);
    }
    assert_eq!((next, recording.generation), (steps, 3));

    let names = [&b"\0"[..], &b"aaaaaaaabbbbbbbb\0\0".repeat(MAX_KNOWN / 8)].concat();
    let row = [(block::Kind::Names, &names[..]); 9];
    let error = read(&blocks(&[&[(block::Kind::Begin, GUEST)], &row[..]].concat())).unwrap_err();
    assert!(error.to_string().contains("more names than a recording can have"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    #[test]
    fn whatever_a_file_holds_the_reader_ends(
        contents in prop::collection::vec(
            (0_u32..7, prop::collection::vec(prop_oneof![Just(0_u8), Just(1), any::<u8>()], 0..80)),
            0..12,
        ),
        cut in any::<prop::sample::Index>(),
    ) {
        use block::Kind::*;
        let kinds = [Begin, Names, Tasks, Calls, End, Calls, Names];
        let row: Vec<_> = std::iter::once((Begin, GUEST))
            .chain(contents.iter().map(|(kind, content)| (kinds[*kind as usize], &content[..])))
            .collect();
        let bytes = blocks(&row);
        // It is an error or not; it is never a panic.
        let _ = read(&bytes);
        let _ = read(&bytes[..cut.index(bytes.len())]);
    }
}
