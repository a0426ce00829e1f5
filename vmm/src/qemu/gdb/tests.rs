use std::thread;

use proptest::prelude::*;

use super::*;

/// A gdbstub that gives `replies` in order, each to the next packet, and tells the packets it got.
fn stub(
    mut peer: UnixStream,
    mut reply: impl FnMut(&str) -> Option<String> + Send + 'static,
) -> thread::JoinHandle<Vec<String>> {
    thread::spawn(move || {
        let (mut asked, mut packet, mut byte) = (Vec::new(), None::<Vec<u8>>, [0]);
        while let Ok(1) = peer.read(&mut byte) {
            match (byte[0], &mut packet) {
                (b'$', _) => packet = Some(Vec::new()),
                (b'#', Some(text)) => {
                    let text = String::from_utf8(std::mem::take(text)).unwrap();
                    let mut sum = [0; 2];
                    peer.read_exact(&mut sum).unwrap();
                    assert_eq!(unhex(&sum).unwrap(), [super::packet::checksum(text.as_bytes())]);
                    packet = None;
                    let answer = reply(&text);
                    asked.push(text);
                    let mut out = b"+".to_vec();
                    if let Some(answer) = answer {
                        frame(answer.as_bytes(), &mut out);
                    }
                    if peer.write_all(&out).is_err() {
                        break;
                    }
                }
                (byte, Some(text)) => text.push(byte),
                (0x03, None) => {
                    asked.push("^C".into());
                    if let Some(answer) = reply("^C") {
                        let mut out = Vec::new();
                        frame(answer.as_bytes(), &mut out);
                        peer.write_all(&out).unwrap();
                    }
                }
                (other, None) => panic!("the stub got {other:#x} outside a packet"),
            }
        }
        asked
    })
}

/// What a stub of two vCPUs and two registers says.
fn usual(question: &str) -> Option<String> {
    Some(match question {
        "Qqemu.PhyMemMode:1" => "OK".into(),
        "qfThreadInfo" => "m01".into(),
        "qsThreadInfo" => "l".into(),
        _ if question.starts_with("qXfer:features:read:target.xml:0") => {
            "m<target><xi:include href=\"c.xml\"/>".into()
        }
        _ if question.starts_with("qXfer:features:read:target.xml") => "l</target>".into(),
        _ if question.starts_with("qXfer:features:read:c.xml") => {
            "l<reg name=\"rip\" bitsize=\"64\"/><reg name=\"cs\" bitsize=\"32\"/>".into()
        }
        "Hg01" => "OK".into(),
        "p0" => "efcdab8967452301".into(),
        "p1" => "10000000".into(),
        "c" => return None,
        "^C" => "T02thread:01;".into(),
        _ if question.starts_with('M') => "OK".into(),
        _ => String::new(),
    })
}

fn connected(
    reply: impl FnMut(&str) -> Option<String> + Send + 'static,
) -> (Result<Gdb, GdbError>, thread::JoinHandle<Vec<String>>) {
    let (ours, peer) = UnixStream::pair().unwrap();
    let stub = stub(peer, reply);
    (Gdb::connect(ours, ByteOrder::Little), stub)
}

#[test]
fn registers_are_read_by_the_names_of_the_target_description() {
    let (gdb, stub) = connected(usual);
    let mut gdb = gdb.unwrap();
    assert_eq!(gdb.vcpus(), 1);
    let places = ["rip", "cs"].map(|name| gdb.place(name).unwrap());
    assert_eq!(gdb.registers(0, &places).unwrap(), [0x0123_4567_89ab_cdef, 0x10]);
    assert!(matches!(gdb.place("cr3"), Err(GdbError::NoRegister("cr3"))));
    assert!(matches!(gdb.registers(1, &places), Err(GdbError::NoVcpu(1))));
    drop(gdb);
    assert!(stub.join().unwrap().contains(&"Hg01".to_owned()));
}

#[test]
fn many_writes_arrive_whole_and_in_order() {
    let (gdb, stub) = connected(usual);
    let mut gdb = gdb.unwrap();
    let long = vec![0xab; WRITE_LIMIT + 1];
    let short = [1, 2, 0xff];
    let writes = (0..500).map(|n| (n * 0x1000, &short[..])).chain([(0x10_0000, &long[..])]);
    gdb.write(writes).unwrap();
    drop(gdb);
    let asked = stub.join().unwrap();
    let written: Vec<_> = asked.iter().filter(|packet| packet.starts_with('M')).collect();
    assert_eq!(written.len(), 502);
    assert_eq!(written[0], "M0,3:0102ff");
    assert_eq!(written[499], "M1f3000,3:0102ff");
    assert!(written[500].starts_with("M100000,7c0:abab"));
    assert_eq!(written[501], "M1007c0,1:ab");
}

#[test]
fn a_write_that_is_refused_is_named() {
    let mut count = 0;
    let (gdb, _stub) = connected(move |question| {
        count += u32::from(question.starts_with('M'));
        if question.starts_with('M') && count == 8 { Some("E14".into()) } else { usual(question) }
    });
    let bytes = [0];
    let (index, error) = gdb.unwrap().write((0..20).map(|n| (n, &bytes[..]))).unwrap_err();
    assert_eq!(index, 7);
    assert_eq!(error.to_string(), "QEMU's gdbstub answered \"E14\" when asked to write memory");
}

#[test]
fn a_guest_is_stopped_and_let_go() {
    let (gdb, stub) = connected(usual);
    let mut gdb = gdb.unwrap();
    for _ in 0..3 {
        gdb.resume().unwrap();
        gdb.stop(PATIENCE).unwrap();
    }
    drop(gdb);
    let asked = stub.join().unwrap();
    assert_eq!(asked[asked.len() - 4..], ["c", "^C", "c", "^C"]);
}

#[test]
fn a_stop_that_is_late_lets_the_guest_go_and_is_not_taken_for_the_next() {
    let (ours, mut peer) = UnixStream::pair().unwrap();
    let (buffer, threads, places) = (Vec::new(), Vec::new(), Vec::new());
    let mut gdb =
        Gdb { stream: ours, order: ByteOrder::Little, buffer, at: 0, threads, places, stale: 0 };
    assert!(matches!(gdb.stop(Duration::from_millis(20)), Err(GdbError::Silent(_))));
    let mut got = [0; 6];
    peer.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"\x03$c#63");
    let mut packets = Vec::new();
    frame(b"T02thread:01;", &mut packets);
    packets.push(b'+');
    peer.write_all(&packets).unwrap();
    assert!(matches!(gdb.stop(Duration::from_millis(20)), Err(GdbError::Silent(_))));
    let mut second = Vec::new();
    frame(b"T02thread:01;", &mut second);
    frame(b"T02thread:01;", &mut second);
    peer.write_all(&second).unwrap();
    gdb.stop(PATIENCE).unwrap();
}

/// What a client makes of a peer that says all of this at once and hangs up.
fn told(script: &[u8]) -> Result<Gdb, GdbError> {
    let (ours, mut peer) = UnixStream::pair().unwrap();
    let script = script.to_vec();
    // It reads until the client hangs up, which may be after this has returned.
    thread::spawn(move || {
        // The client may have hung up on nonsense.
        let _ = peer.write_all(&script);
        let _ = peer.shutdown(std::net::Shutdown::Write);
        let _ = peer.read_to_end(&mut Vec::new());
    });
    Gdb::connect(ours, ByteOrder::Little)
}

fn framed(packets: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    packets.iter().for_each(|packet| frame(packet.as_bytes(), &mut out));
    out
}

#[test]
fn what_a_peer_gets_wrong_is_named() {
    assert!(matches!(told(b""), Err(GdbError::Closed)));
    assert!(matches!(told(b"+$OK#00"), Err(GdbError::Checksum { found: 0, computed: 0x9a })));
    assert!(matches!(told(b"+$OK#xx"), Err(GdbError::NotAPacket(_))));
    assert!(matches!(told(b"-"), Err(GdbError::NotAPacket(_))));
    assert!(matches!(told(b"hello"), Err(GdbError::NotAPacket(_))));
    assert!(matches!(told(&vec![b'$'; 2 * PACKET_LIMIT]), Err(GdbError::NotAPacket(_))));
    assert!(matches!(told(&framed(&[""])), Err(GdbError::Answer { .. })));
    assert!(matches!(told(&framed(&["OK", "mx y"])), Err(GdbError::Answer { .. })));
    assert!(matches!(told(&framed(&["OK", "l"])), Err(GdbError::Answer { .. })));
    assert!(matches!(told(&framed(&["W00"])), Err(GdbError::Closed)));
    assert!(matches!(told(&framed(&["T02"; 100])), Err(GdbError::NotAPacket(_))));
    // A file that includes itself for ever.
    let mut endless = vec!["OK", "m1", "l"];
    endless.extend(["l<xi:include href='a'/>"; 100]);
    assert!(matches!(told(&framed(&endless)), Err(GdbError::NotAPacket(_))));
    // A file without an end, and one that makes no progress.
    assert!(matches!(told(&framed(&["OK", "m1", "l", "m"])), Err(GdbError::Answer { .. })));
}

proptest! {
    #[test]
    fn no_peer_makes_it_panic_or_hang(
        noise in proptest::collection::vec(any::<u8>(), 0..300),
        packets in proptest::collection::vec("[OKlmT<>/=\"a-z0-9,:}]{0,40}", 0..8),
        proper in 0..6_usize,
    ) {
        let usual = ["OK", "m1,2", "l", "m<reg name=\"a\" bitsize=\"64\"/>", "l", "OK"];
        let mut script = framed(&usual[..proper]);
        script.extend(framed(&packets.iter().map(String::as_str).collect::<Vec<_>>()));
        script.extend(noise);
        if let Ok(mut gdb) = told(&script) {
            if let Ok(place) = gdb.place("a") {
                let _ = gdb.registers(0, &[place]);
            }
            let _ = gdb.write([(0, &[0_u8][..])].into_iter());
            let _ = gdb.stop(Duration::from_millis(1));
        }
    }
}
