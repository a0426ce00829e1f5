//! Payloads and patches on the socket.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::control::server::{MAX_PAYLOADS, PatchWanted, Waiter};

/// Functions that each patch replaces here: more than one message holds.
const FUNCTIONS: usize = 2 * MAX_FUNCTIONS + 100;

/// What a watcher does with patches, in a test's way: a file called "wait" finds somebody in the way
/// for ever.
#[derive(Debug, Clone, Default)]
pub struct Patching {
    waiting: Arc<AtomicUsize>,
    applied: Arc<Mutex<Vec<Patch>>>,
}

impl Patching {
    /// How many patches wait.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    pub fn list(&self) -> Vec<Patch> {
        self.applied.lock().unwrap().clone()
    }

    pub fn apply(&self, wanted: PatchWanted) {
        if wanted.request.file == "wait" {
            return self.wait(wanted.waiter, wanted.answer);
        }
        let mut applied = self.applied.lock().unwrap();
        let mut patch = patch(applied.len() as u64 + 1, FUNCTIONS);
        patch.file = wanted.request.file;
        patch.sha256 = sum(&wanted.file);
        applied.push(patch.clone());
        patch.functions.truncate(1);
        let (attempts, waited) = (1, Duration::ZERO);
        let patched = Patched { patch, functions: FUNCTIONS, replaced: vec![], attempts, waited };
        wanted.answer.give(Ok(patched));
    }

    pub fn revert(&self, request: &RevertRequest, waiter: Waiter, answer: Answer<Reverted>) {
        if request.id == 0 {
            return self.wait(waiter, answer);
        }
        self.applied.lock().unwrap().retain(|patch| patch.id != request.id);
        answer.give(Ok(Reverted {
            id: request.id,
            functions: FUNCTIONS,
            foreign: 0,
            stop: Duration::from_micros(3),
            attempts: 1,
            waited: Duration::ZERO,
        }));
    }

    fn wait<T: Send + 'static>(&self, waiter: Waiter, answer: Answer<T>) {
        let waiting = Arc::clone(&self.waiting);
        waiting.fetch_add(1, Ordering::SeqCst);
        thread::spawn(move || {
            let mut attempts = 0;
            while !waiter.has_gone() {
                attempts += 1;
                waiter.tell(super::patches::waiting(attempts));
                thread::sleep(Duration::from_millis(1));
            }
            waiting.fetch_sub(1, Ordering::SeqCst);
            answer.give(Err(Refusal::new(RefusalKind::Stopped, "nothing was changed")));
        });
    }
}

/// Tells whether all bytes are there, in their order.
fn sum(bytes: &[u8]) -> String {
    let sum = bytes
        .iter()
        .fold(bytes.len() as u64, |sum, byte| sum.wrapping_mul(0x100_0000_01b3) ^ u64::from(*byte));
    format!("{sum:016x}")
}

pub fn waiting(attempts: u64) -> Waiting {
    let stander =
        Stander { pid: 81, comm: "work".into(), function: "pipe_read".into(), vcpu: None };
    Waiting { standers: vec![stander], more: 0, attempts, waited: Duration::from_millis(attempts) }
}

pub fn function(number: u64) -> Function {
    Function {
        name: format!("function_{number}"),
        old: Address(number),
        new: Address(u64::MAX - number),
        in_force: Some(1),
    }
}

pub fn patch(id: u64, functions: usize) -> Patch {
    Patch {
        id,
        file: "fix.o".into(),
        sha256: "00".repeat(32),
        applied: "2026-11-30T12:00:00Z".into(),
        state: PatchState::InForce,
        sites: functions,
        stop: Duration::from_micros(3),
        functions: (0..functions as u64).map(function).collect(),
    }
}

pub fn request(file: &str) -> PatchRequest {
    PatchRequest {
        bytes: 0,
        file: file.into(),
        maps: vec![],
        replace: false,
        consistent: false,
        timeout_ms: 1000,
        max_stop_us: None,
        release: None,
        build_id: None,
    }
}

/// A greeting, and a payload of that length that is announced and does not come.
pub fn announced(hello: &[u8], bytes: usize) -> Vec<u8> {
    let request = PatchRequest { bytes, ..request("f") };
    [hello, &super::super::wire::line(&Request::PatchApply(request))].concat()
}

#[test]
fn a_payload_arrives_whole_and_what_is_patched_is_listed_in_pieces() {
    let guest = Guest::new("payload");
    let mut client = guest.client();
    let files = [vec![], b"ELF".to_vec(), (0..MAX_PAYLOAD).map(|at| (at / 3) as u8).collect()];
    for file in &files {
        let patched = client.patch_apply(request("fix.o"), file, || false, |_| {}).unwrap();
        assert_eq!((patched.patch.sha256, patched.functions), (sum(file), FUNCTIONS));
    }
    let listed = client.patches(LONG).unwrap();
    assert_eq!(listed, guest.patching.list());
    assert_eq!(listed.iter().map(|patch| patch.functions.len()).sum::<usize>(), 3 * FUNCTIONS);
    let revert = RevertRequest { id: 2, timeout_ms: 0, max_stop_us: None };
    assert_eq!(client.patch_revert(&revert, || false, |_| {}).unwrap().id, 2);
    let ids: Vec<u64> = client.patches(LONG).unwrap().iter().map(|patch| patch.id).collect();
    assert_eq!(ids, [1, 3]);
}

#[test]
fn who_waits_hears_who_is_in_the_way_until_it_is_given_up() {
    let guest = Guest::new("waits");
    let mut client = guest.client();
    let refused = |result: Result<(), ClientError>| match result {
        Err(ClientError::Refused(refusal)) => assert_eq!(refusal.kind, RefusalKind::Stopped),
        other => panic!("{other:?}"),
    };
    let heard = Mutex::new(Vec::new());
    let enough = || heard.lock().unwrap().len() > 2;
    let hear = |news: &Waiting| heard.lock().unwrap().push(news.clone());
    refused(client.patch_apply(request("wait"), b"ELF", enough, hear).map(drop));
    assert_eq!(heard.lock().unwrap()[0].standers, waiting(0).standers);
    assert!(heard.lock().unwrap().is_sorted_by_key(|news| news.attempts));
    heard.lock().unwrap().clear();
    let revert = RevertRequest { id: 0, timeout_ms: 1000, max_stop_us: None };
    refused(client.patch_revert(&revert, enough, hear).map(drop));
    assert_eq!(guest.patching.waiting(), 0);
    assert_eq!(client.status(LONG).unwrap(), status(), "it may still ask for something else");

    // Who goes does not wait any more.
    let mut stream = guest.connect();
    let hello = super::super::wire::line(&Greeting::default());
    let wait = Request::PatchApply(PatchRequest { bytes: 3, ..request("wait") });
    let wait = [&hello[..], &super::super::wire::line(&wait), b"ELF"].concat();
    stream.write_all(&wait).unwrap();
    let mut words = BufReader::new(&stream).lines().map(Result::unwrap);
    assert!(words.any(|line| line.starts_with("{\"waiting\":")));
    drop(words);
    assert_eq!(guest.patching.waiting(), 1);
    drop(stream);
    guest.wait_until_nothing_waits();

    // Neither does one who asks for something else meanwhile.
    let mut stream = guest.connect();
    stream.write_all(&[&wait[..], b"{\"request\":\"info\"}\n"].concat()).unwrap();
    assert_eq!(last_error(&stream), RefusalKind::Malformed);
    guest.wait_until_nothing_waits();
}

/// Whether a conversation has ended, on whose stream nobody waits.
fn is_closed(mut stream: &UnixStream) -> bool {
    let ended = io::copy(&mut stream, &mut io::sink());
    ended.map_or_else(|error| error.kind() != io::ErrorKind::WouldBlock, |_| true)
}

#[test]
fn what_is_asked_of_patches_is_bounded() {
    let guest = Guest::new("bounds");
    let mut client = guest.client();
    let most = MAX_PATCH_TIMEOUT.as_millis() as u64;
    for request in [
        PatchRequest { maps: vec!["a=b".into(); MAX_MAPS + 1], ..request("f") },
        PatchRequest { timeout_ms: most + 1, ..request("f") },
        request(&"f".repeat(MAX_FILE_NAME + 1)),
    ] {
        let refused = client.patch_apply(request, b"ELF", || false, |_| {}).unwrap_err();
        assert!(matches!(refused, ClientError::Refused(r) if r.kind == RefusalKind::Refused));
    }
    let revert = RevertRequest { id: 1, timeout_ms: most + 1, max_stop_us: None };
    let refused = client.patch_revert(&revert, || false, |_| {}).unwrap_err();
    assert!(matches!(refused, ClientError::Refused(r) if r.kind == RefusalKind::Refused));
    assert_eq!(guest.patching.list(), []);

    // Payloads that do not come keep others out, until whoever announced them goes.
    let hello = super::super::wire::line(&Greeting::default());
    let announce = || {
        let mut stream = guest.connect();
        stream.write_all(&announced(&hello, MAX_PAYLOAD)).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let mut streams = [(); MAX_PAYLOADS].map(|()| announce());
    let apply = || guest.client().patch_apply(request("f"), b"ELF", || false, |_| {});
    let begun = Instant::now();
    while apply().is_ok() {
        assert!(begun.elapsed() < LONG, "announced payloads take no place");
        // The one that was applied may have had the place that one of these was refused for.
        streams
            .iter_mut()
            .filter(|stream| is_closed(stream))
            .for_each(|stream| *stream = announce());
    }
    assert!(matches!(apply(), Err(ClientError::Refused(r)) if r.kind == RefusalKind::Busy));
    drop(streams);
    let begun = Instant::now();
    while apply().is_err() {
        assert!(begun.elapsed() < LONG, "no place is given back");
    }
}

#[test]
fn the_largest_messages_about_patches_fit_a_line() {
    let mut patch = patch(u64::MAX, MAX_FUNCTIONS);
    patch.file = "\u{1}".repeat(MAX_FILE_NAME);
    for function in &mut patch.functions {
        // A name in the kernel's symbols has 511 bytes at most (KSYM_NAME_LEN).
        function.name = "n".repeat(511);
    }
    assert!(super::super::wire::line(&Reply::Patch(Box::new(patch))).len() < MAX_REPLY);
    let mut waiting = waiting(u64::MAX);
    waiting.standers[0].function = "n".repeat(511);
    // What is no text in a task's name comes as three bytes for each.
    waiting.standers[0].comm = "\u{fffd}".repeat(15);
    waiting.standers = vec![waiting.standers[0].clone(); MAX_STANDERS];
    assert!(super::super::wire::line(&Reply::Waiting(waiting)).len() < MAX_REPLY);
}
