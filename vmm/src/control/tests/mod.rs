//! Both ends of the control socket, with clients and servers that break the rules. No guest is there:
//! a thread answers in the watcher's place.

use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{env, fs, process};

use patcher::trace::sink::{
    Context, Event, EventKind, Name as EventName, Return, Sink, Task, Values,
};
use patcher::trace::tracer::ClientId;
use proptest::prelude::*;

use super::outbox::Fed;
use super::protocol::*;
use super::server::MAX_CONNECTIONS;
use super::*;

mod counts;
mod patches;

use patches::Patching;

const LONG: Duration = Duration::from_secs(60);

/// A server with a thread in the watcher's place.
struct Guest {
    place: Place,
    name: Name,
    server: Option<Server>,
    watcher: Option<JoinHandle<()>>,
    /// The traces that are armed.
    armed: Arc<Mutex<HashSet<ClientId>>>,
    /// Where traces' outboxes are handed to the test.
    outboxes: Receiver<Outbox>,
    patching: Patching,
}

impl Guest {
    fn new(test: &str) -> Self {
        let path: PathBuf = env::temp_dir().join(format!("vmm-control-{}-{test}", process::id()));
        let place = Place::at(&path);
        let claim = place.claim(None).unwrap();
        let name = claim.name().clone();
        let (server, commands) = Server::start(claim).unwrap();
        let armed = Arc::new(Mutex::new(HashSet::new()));
        let (outbox, outboxes) = mpsc::channel();
        let patching = Patching::default();
        let (theirs, patched) = (Arc::clone(&armed), patching.clone());
        let watcher = thread::spawn(move || watch(&commands, &theirs, &outbox, &patched));
        let (server, watcher) = (Some(server), Some(watcher));
        Self { place, name, server, watcher, armed, outboxes, patching }
    }

    fn client(&self) -> Client {
        Client::connect(&self.place, &self.name).unwrap()
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.place.socket(&self.name)).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    /// A client that traces, and the outbox through which it is given calls.
    fn trace(&self) -> (Calls, Outbox) {
        let mut client = self.client();
        let armed = client.trace(&request(), || false).unwrap().unwrap();
        (client.into_calls(&armed), self.outboxes.recv_timeout(LONG).unwrap())
    }

    fn wait_until_nothing_is_armed(&self) {
        let begun = Instant::now();
        while !self.armed.lock().unwrap().is_empty() {
            assert!(begun.elapsed() < LONG, "a trace is left armed");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_until_nothing_waits(&self) {
        let begun = Instant::now();
        while self.patching.waiting() > 0 {
            assert!(begun.elapsed() < LONG, "a patch still waits");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.server = None;
        self.watcher.take().unwrap().join().unwrap();
        let _ = fs::remove_dir_all(self.place.path());
    }
}

fn request() -> TraceRequest {
    TraceRequest {
        tracer: protocol::Tracer::Func,
        filter: vec!["a*".into()],
        notrace: vec![],
        method: protocol::Method::Call,
        ..TraceRequest::default()
    }
}

fn status() -> Status {
    Status {
        name: "guest".into(),
        pid: 1,
        engine: "none".into(),
        vcpus: 2,
        state: State::Ready,
        reason: None,
        arch: Some("x86_64".into()),
        release: Some("6.1".into()),
        traces: 0,
        patches: 0,
    }
}

fn pad(number: u64) -> Pad {
    Pad {
        function: format!("function_{number}"),
        address: Address(u64::MAX - number),
        prefix: None,
        state: PadState::Idle,
        reason: None,
        traced_by: 0,
        patched: false,
    }
}

/// Answers as whoever watches a guest does.
fn watch(
    commands: &Receiver<Command>,
    armed: &Mutex<HashSet<ClientId>>,
    outboxes: &Sender<Outbox>,
    patching: &Patching,
) {
    let mut ids = client_ids();
    while let Ok(command) = commands.recv() {
        match command {
            Command::Status(answer) => answer.give(Ok(status())),
            Command::Info(answer) => {
                let (who, patched) = (vec![], vec![]);
                answer.give(Ok(Info { status: status(), kernel: None, region: None, who, patched }))
            }
            Command::Pads(_, answer) => answer.give(Ok((0..1200).map(pad).collect())),
            Command::Trace(wanted) => {
                let client = ids.next().unwrap();
                armed.lock().unwrap().insert(client);
                let described = Armed {
                    interrupts: (1, 2),
                    release: "6.1".into(),
                    kaslr_offset: -1,
                    symbols: 1,
                    pads: 1,
                    cpus: 2,
                    functions: 1,
                    written: 1,
                    refused: vec![],
                    stop: Duration::from_micros(3),
                    contexts: true,
                    missing: None,
                    arch: "x86_64".into(),
                    big_endian: false,
                    recorded_by: None,
                };
                // A test that only looks at what is armed has no use for it.
                let _ = outboxes.send(wanted.outbox);
                wanted.answer.give(Ok((client, described)));
            }
            Command::Snapshot(wanted) => {
                let _ = outboxes.send(wanted.outbox);
                let recorded_by = Some(protocol::Tracer::Graph);
                wanted.answer.give(Ok(Armed { recorded_by, ..Armed::default() }));
            }
            Command::Stop(client) => {
                armed.lock().unwrap().remove(&client);
            }
            Command::PatchApply(wanted) => patching.apply(*wanted),
            Command::PatchList(answer) => answer.give(Ok(patching.list())),
            Command::PatchRevert(request, waiter, answer) => {
                patching.revert(&request, waiter, answer);
            }
        }
    }
}

/// Ids of clients, which only a tracer makes.
fn client_ids() -> impl Iterator<Item = ClientId> {
    use patcher::hook::Hooks;
    use patcher::kernel::MappedRegion;
    use patcher::synthetic::{Blueprint, Guest};
    use patcher::trace::filter::Filter;
    use patcher::trace::select::Selection;
    use patcher::trace::tracer::Tracer;

    let guest: &'static Guest = Box::leak(Box::new(Guest::new(&Blueprint::default())));
    let kernel: &'static _ = Box::leak(Box::new(guest.kernel()));
    let region: &'static _ = Box::leak(Box::new(MappedRegion::new(guest, kernel).unwrap()));
    let mut hooks = Hooks::new(guest, kernel, region);
    let mut tracer = Tracer::new(&mut hooks).unwrap();
    std::iter::from_fn(move || {
        let selection = Selection::beside(&hooks, &Filter::default()).unwrap();
        let (client, _) = tracer.add(&mut hooks, &selection, ()).unwrap();
        tracer.remove(&mut hooks, client).unwrap();
        tracer.finish(client, |(), _| Ok(())).map(|_| client)
    })
}

fn name(id: u64, text: &str) -> EventName<'_> {
    EventName { id, text, address: id << 8, offset: 4 }
}

fn event(time_ns: u64, function: u64) -> Event<'static> {
    let (function, caller) = (name(function, NAMES[function as usize]), name(9, "c"));
    let (task, context) = of_time(time_ns);
    let (kind, context) = (kind_of(time_ns), Some(context));
    Event {
        time_ns,
        kind,
        cpu: 1,
        function,
        caller,
        task,
        context,
        values: Values::NONE,
        missed: 0,
    }
}

/// One in three is of each kind.
fn kind_of(time_ns: u64) -> EventKind {
    let back = Return { depth: 3, value: !time_ns, duration_ns: Some(time_ns) };
    match time_ns % 3 {
        0 => EventKind::Call,
        1 => EventKind::Entry { depth: time_ns as u32 },
        _ => EventKind::Return(back),
    }
}

/// What the calls of these tests tell of their tasks.
fn of_time(time_ns: u64) -> (Option<Task<'static>>, Context) {
    let comm = (time_ns % 5 > 1).then_some(NAMES[time_ns as usize % 4]);
    let task = (!time_ns.is_multiple_of(5)).then_some(Task { pid: time_ns as u32, comm });
    (task, Context::of_flags(time_ns as u8, (time_ns >> 8) as u8))
}

const NAMES: [&str; 4] = ["zero", "one", "two", "three"];

/// What a client is given until the end of its trace: times and functions.
fn received(calls: &mut Calls) -> (Vec<(u64, String)>, End) {
    let mut all = Vec::new();
    loop {
        let take = |event: &Event<'_>| {
            assert_eq!((event.cpu, event.caller.text), (1, "c"));
            let (task, context) = of_time(event.time_ns);
            assert_eq!((event.task, event.context), (task, Some(context)));
            assert_eq!(event.kind, kind_of(event.time_ns));
            all.push((event.time_ns, event.function.to_string()));
        };
        match calls.next(take).unwrap() {
            Message::Counted(_) | Message::Measured(_) => {}
            Message::Calls(_) => {}
            Message::End(end) => return (all, *end),
        }
    }
}

fn end(events: u64) -> End {
    let totals = Totals { events, ..Totals::default() };
    End { reason: EndReason::Stopped, error: None, totals, lasted: Duration::from_secs(1) }
}

/// The error that a server gives last, before it closes the connection.
fn last_error(stream: &UnixStream) -> RefusalKind {
    let mut last = None;
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        last = Some(line);
    }
    match serde_json::from_str(&last.expect("an answer")) {
        Ok(Reply::Error(refusal)) => refusal.kind,
        other => panic!("no error: {other:?}"),
    }
}

#[test]
fn questions_are_answered_one_after_the_other() {
    let guest = Guest::new("questions");
    let mut client = guest.client();
    assert_eq!(client.hello().name, "guest1");
    assert_eq!(client.status(LONG).unwrap(), status());
    assert_eq!(client.info(LONG).unwrap().status, status());
    let pads = client.pads(None, LONG).unwrap();
    assert_eq!(pads, (0..1200).map(pad).collect::<Vec<_>>());
    assert_eq!(client.status(LONG).unwrap(), status());
}

#[test]
fn a_trace_arrives_whole_and_in_order_and_the_connection_stays() {
    let guest = Guest::new("trace");
    let (mut calls, mut outbox) = guest.trace();
    for time in 0..20_000 {
        outbox.event(&event(time, time % 4)).unwrap();
    }
    outbox.end(end(20_000));
    let (all, ended) = received(&mut calls);
    let expected = (0..20_000).map(|time| (time, NAMES[time as usize % 4].to_owned()));
    assert!(all.into_iter().eq(expected));
    assert_eq!(ended, end(20_000));
    let is_call = |time: &usize| kind_of(*time as u64).is_call();
    let count = |n| (0..20_000).filter(is_call).filter(|time| time % 4 == n).count() as u64;
    let counts = [0, 1, 2, 3].map(|n| (NAMES[n].to_owned(), count(n)));
    assert_eq!(calls.counts(), counts.sorted());
    guest.wait_until_nothing_is_armed();
}

/// Sorts as counts do.
trait Sorted {
    fn sorted(self) -> Vec<(String, u64)>;
}

impl Sorted for [(String, u64); 4] {
    fn sorted(mut self) -> Vec<(String, u64)> {
        self.sort_by(|(a_name, a), (b_name, b)| b.cmp(a).then_with(|| a_name.cmp(b_name)));
        self.into()
    }
}

#[test]
fn whoever_stops_or_goes_leaves_nothing_armed() {
    let guest = Guest::new("gone");
    let (calls, _outbox) = guest.trace();
    let (others, _their_outbox) = guest.trace();
    assert_eq!(guest.armed.lock().unwrap().len(), 2);
    drop(calls);
    let begun = Instant::now();
    while guest.armed.lock().unwrap().len() > 1 {
        assert!(begun.elapsed() < LONG, "the trace of a client that has gone stays armed");
        thread::sleep(Duration::from_millis(1));
    }
    others.stopper().unwrap().stop();
    guest.wait_until_nothing_is_armed();
}

#[test]
fn a_client_that_takes_nothing_bounds_what_waits_for_it_and_holds_up_nobody() {
    let guest = Guest::new("slow");
    let (mut slow, mut full) = guest.trace();
    let (mut quick, mut outbox) = guest.trace();
    let mut refused = 0;
    for time in 0..1_500_000 {
        match full.event(&event(time, 0)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 500_000, "only {refused} were refused");
    outbox.event(&event(7, 1)).unwrap();
    outbox.end(end(1));
    assert_eq!(received(&mut quick).0, [(7, "one".to_owned())]);
    // When it takes again, it is given what had waited, and the rest goes on.
    full.end(end(1_500_000 - refused));
    let (all, _) = received(&mut slow);
    assert_eq!(all.len() as u64, 1_500_000 - refused);
    assert!(all.is_sorted());
}

#[test]
fn a_server_that_ends_tells_those_who_trace() {
    let mut guest = Guest::new("ends");
    let (mut calls, mut outbox) = guest.trace();
    let idle = guest.client();
    outbox.event(&event(1, 2)).unwrap();
    outbox.end(end(1));
    guest.server = None;
    assert_eq!(received(&mut calls), (vec![(1, "two".into())], end(1)));
    let mut idle = idle;
    assert!(matches!(
        idle.status(LONG),
        Err(ClientError::Refused(Refusal { kind: RefusalKind::Ended, .. }))
    ));
    let gone = Client::connect(&guest.place, &guest.name);
    assert!(matches!(gone, Err(ClientError::NoGuest { .. })));
}

#[test]
fn whoever_breaks_the_rules_is_told_and_turned_away() {
    let guest = Guest::new("rules");
    let hello = super::wire::line(&Greeting::default());
    let after_hello = |line: &str| [&hello[..], line.as_bytes(), b"\n"].concat();
    let globs = serde_json::to_string(&vec!["a"; MAX_GLOBS + 1]).unwrap();
    for (said, kind) in [
        (b"hello\n".to_vec(), RefusalKind::Malformed),
        (b"{\"vmm\":\"other\",\"versions\":[3]}\n".to_vec(), RefusalKind::Malformed),
        (b"{\"vmm\":\"control\",\"versions\":[]}\n".to_vec(), RefusalKind::Version),
        (vec![b' '; MAX_REQUEST + 1], RefusalKind::Malformed),
        (after_hello("{\"request\":\"trace\",\"tracer\":\"stack\"}"), RefusalKind::Malformed),
        (after_hello("{\"request\":\"stop\"}"), RefusalKind::Malformed),
        (patches::announced(&hello, MAX_PAYLOAD + 1), RefusalKind::Malformed),
        (after_hello(&"[".repeat(MAX_REQUEST)), RefusalKind::Malformed),
    ] {
        let mut stream = guest.connect();
        stream.write_all(&said).unwrap();
        assert_eq!(
            last_error(&stream),
            kind,
            "{}",
            String::from_utf8_lossy(&said[..20.min(said.len())])
        );
    }
    let mut client = guest.client();
    let many = TraceRequest { filter: serde_json::from_str(&globs).unwrap(), ..request() };
    let (tracer, method) = (protocol::Tracer::Graph, protocol::Method::Trap);
    for request in [many, TraceRequest { tracer, method, ..request() }] {
        let refused = client.trace(&request, || false).unwrap_err();
        assert!(matches!(refused, ClientError::Refused(r) if r.kind == RefusalKind::Refused));
    }
    assert_eq!(client.status(LONG).unwrap(), status(), "it may still ask for something else");

    let (calls, _outbox) = guest.trace();
    let mut stream = calls.stopper().unwrap().into_stream();
    stream.write_all(b"{\"request\":\"info\"}\n").unwrap();
    guest.wait_until_nothing_is_armed();
}

#[test]
fn connections_are_bounded_and_places_are_given_back() {
    let guest = Guest::new("many");
    let clients: Vec<Client> = (0..MAX_CONNECTIONS).map(|_| guest.client()).collect();
    let refused = Client::connect(&guest.place, &guest.name).unwrap_err();
    assert!(matches!(refused, ClientError::Refused(r) if r.kind == RefusalKind::Busy));
    drop(clients);
    let begun = Instant::now();
    while Client::connect(&guest.place, &guest.name).is_err() {
        assert!(begun.elapsed() < LONG, "no place is given back");
    }
}

/// Lines that a client might send, and what is none.
fn words() -> impl Strategy<Value = Vec<u8>> {
    let lines = [
        "{\"vmm\":\"control\",\"versions\":[3]}\n",
        "{\"request\":\"status\"}\n",
        "{\"request\":\"info\"}\n",
        "{\"request\":\"pads\",\"glob\":\"*\"}\n",
        "{\"request\":\"trace\",\"tracer\":\"func\",\"filter\":[\"a*\"]}\n",
        "{\"request\":\"stop\"}\n",
        "{\"request\":\"patch-list\"}\n",
        "{\"request\":\"patch-revert\",\"id\":1,\"timeout_ms\":1}\n",
        "{\"request\":\"patch-revert\",\"id\":0,\"timeout_ms\":1}\n",
        "{\"request\":\"patch-apply\",\"bytes\":3,\"file\":\"f\",\"timeout_ms\":1}\nELF",
        "{\"request\":\"patch-apply\",\"bytes\":3,\"file\":\"wait\",\"timeout_ms\":1}\nELF",
        "{\"request\":\"patch-apply\",\"bytes\":400,\"file\":\"f\",\"timeout_ms\":1}\nELF",
    ];
    let line = prop::sample::select(lines.to_vec()).prop_map(|line| line.as_bytes().to_vec());
    let mutated = (line.clone(), any::<prop::sample::Index>(), any::<u8>()).prop_map(
        |(mut line, at, byte)| {
            let at = at.index(line.len());
            line[at] = byte;
            line
        },
    );
    let cut = (line.clone(), any::<prop::sample::Index>()).prop_map(|(mut line, at)| {
        line.truncate(at.index(line.len()));
        line
    });
    let noise = prop::collection::vec(any::<u8>(), 0..300);
    let word = prop_oneof![6 => line, 2 => mutated, 1 => cut, 1 => noise];
    prop::collection::vec(word, 0..6).prop_map(|words| words.concat())
}

#[test]
fn whatever_clients_say_the_server_lives_and_nothing_stays_armed() {
    let guest = Guest::new("fuzz");
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() };
    let greeted = (any::<bool>(), words());
    proptest::test_runner::TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(Default::default()),
    )
    .run(&greeted, |(greet, words)| {
        let mut stream = guest.connect();
        let hello = if greet { super::wire::line(&Greeting::default()) } else { Vec::new() };
        // The server may close the connection before all is said.
        let _ = stream.write_all(&[hello, words].concat());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut heard = Vec::new();
        let _ = stream.read_to_end(&mut heard);
        drop(stream);
        // Nobody puts anything into these outboxes.
        while guest.outboxes.try_recv().is_ok() {}
        guest.wait_until_nothing_is_armed();
        guest.wait_until_nothing_waits();
        Ok(())
    })
    .unwrap();
    assert_eq!(guest.client().status(LONG).unwrap(), status());
}

/// What a server might say, the greeting first; and what is none.
fn sayings() -> impl Strategy<Value = Vec<u8>> {
    let replies = [
        hello(),
        Reply::Batch(BatchHeader { calls: 2, names: vec!["f".into()], ..Default::default() }),
        Reply::Batch(BatchHeader { calls: MAX_CALLS + 1, ..Default::default() }),
        Reply::Batch(BatchHeader { calls: 0, forget: true, ..Default::default() }),
        Reply::Status(status()),
        Reply::Done {},
        Reply::Waiting(patches::waiting(0)),
        Reply::Patch(Box::new(patches::patch(1, 2))),
        Reply::Functions(vec![patches::function(1)]),
    ];
    let lines: Vec<Vec<u8>> = replies.iter().map(super::wire::line).collect();
    let line = prop::sample::select(lines);
    let noise = prop::collection::vec(any::<u8>(), 0..100);
    let zeros = (0_usize..60).prop_map(|len| vec![0; len]);
    let said = prop::collection::vec(prop_oneof![4 => line, 2 => zeros, 1 => noise], 0..8);
    said.prop_map(|said| [super::wire::line(&hello()), said.concat()].concat())
}

fn hello() -> Reply {
    Reply::Hello(Hello { version: VERSION, name: "a".into(), program: "0".into() })
}

/// A client of a server that says all that and hangs up.
fn told(said: &[u8]) -> (Client, UnixStream) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(said).unwrap();
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    (Client::greet(ours, &"a".parse().unwrap()).unwrap(), theirs)
}

#[test]
fn whatever_a_server_says_the_client_ends_with_an_error() {
    let config = ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() };
    proptest::test_runner::TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(Default::default()),
    )
    .run(&sayings(), |said| {
        let (client, _server) = told(&said);
        let mut calls = client.into_calls(&Armed::default());
        let mut messages = 0;
        while calls.next(|event| assert!(event.function.text == "f")).is_ok() {
            messages += 1;
            prop_assert!(messages < 100);
        }
        let (mut client, _server) = told(&said);
        let mut heard = 0;
        let request = patches::request("f");
        let patched = client.patch_apply(request, b"ELF", || false, |_| heard += 1);
        prop_assert!(patched.is_err());
        prop_assert!(heard <= 8);
        let (mut client, _server) = told(&said);
        // It may be a list.
        let _ = client.patches(LONG);
        Ok(())
    })
    .unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn calls_come_out_as_they_were_put_in(
        time_ns in any::<u64>(), function in any::<u32>(), caller in any::<u32>(), cpu in any::<u16>(),
        flags in any::<u8>(), preempt_depth in any::<u8>(),
        pid in prop::option::of(0..NONE), comm in prop::option::of(0..NONE),
        values in prop::option::of(prop::collection::vec(any::<u8>(), 0..100)),
    ) {
        let values = values.as_deref().map_or(Values::NONE, Values::new);
        let context = Context::of_flags(flags, preempt_depth);
        let kind = kind_of(time_ns);
        let call = Call { time_ns, function, caller, cpu, context, pid, comm, kind, values };
        let mut bytes = Vec::new();
        call.encode(&mut bytes);
        for cut in 0..bytes.len() {
            prop_assert_eq!(Call::decode(&bytes[..cut]), None);
        }
        bytes.push(1);
        prop_assert_eq!(Call::decode(&bytes), Some((call, &[1_u8][..])));
    }

    #[test]
    fn names_are_the_same_on_both_sides_however_calls_are_batched(
        steps in prop::collection::vec((0_usize..40, any::<bool>()), 1..200)
    ) {
        let (mut outbox, feed) = Outbox::new();
        let texts: Vec<String> = (0..40).map(|id| "n".repeat(1 + id * 200)).collect();
        for (time, (id, flush)) in (0..).zip(&steps) {
            let name = name(*id as u64, &texts[*id]);
            outbox.event(&Event { time_ns: time, function: name, caller: name, ..event(0, 0) }).unwrap();
            if *flush {
                outbox.flush().unwrap();
            }
        }
        outbox.end(end(0));
        let (mut names, mut given): (Vec<String>, Vec<String>) = Default::default();
        loop {
            match feed.next(Duration::ZERO) {
                Fed::Batch(batch) => {
                    prop_assert!(super::wire::line(&Reply::Batch(batch.header.clone())).len() < MAX_REPLY);
                    prop_assert_eq!(batch.calls.len(), batch.header.bytes);
                    names.extend(batch.header.names);
                    let mut rest = &batch.calls[..];
                    while let Some((call, behind)) = Call::decode(rest) {
                        rest = behind;
                        prop_assert_eq!(call.time_ns, given.len() as u64);
                        given.push(names[call.function as usize].clone());
                    }
                }
                Fed::End(_) => break,
                other => prop_assert!(false, "{other:?}"),
            }
        }
        let expected = steps.iter().map(|(id, _)| texts[*id][..texts[*id].len().min(MAX_NAME)].to_owned());
        prop_assert!(given.into_iter().eq(expected));
    }
}

#[test]
fn places_of_names_and_what_is_missing_come_out_as_they_were_put_in() {
    let (mut outbox, feed) = Outbox::new();
    for time in 0..20_000 {
        let missed = if time % 3000 == 7 { time } else { 0 };
        outbox.event(&Event { missed, ..event(time, time % 4) }).unwrap();
        if time % 100 == 0 {
            outbox.flush().unwrap();
        }
    }
    outbox.end(end(20_000));
    let mut names = Names::default();
    let mut expected = 0..;
    while let Fed::Batch(mut batch) = feed.next(Duration::ZERO) {
        names.learn(&mut batch.header);
        let read = names.events(&batch.header, &batch.calls, |given| {
            let time = expected.next().unwrap();
            assert_eq!(given.time_ns, time);
            assert_eq!(given.missed, if time % 3000 == 7 { time } else { 0 });
            assert_eq!((given.function.address, given.function.offset), ((time % 4) << 8, 4));
        });
        assert!(read.is_some());
    }
    assert_eq!(expected.next(), Some(20_000));
}

#[test]
fn names_beyond_what_is_kept_begin_anew() {
    let (mut outbox, feed) = Outbox::new();
    let mut forgotten = 0;
    let mut in_force = 0;
    for id in 0..(MAX_NAMES_IN_FORCE as u64 + 10) {
        let name = name(id, "x");
        outbox.event(&Event { time_ns: id, function: name, caller: name, ..event(0, 0) }).unwrap();
        if id % 1000 == 0 {
            outbox.flush().unwrap();
            while let Fed::Batch(batch) = feed.next(Duration::ZERO) {
                forgotten += usize::from(batch.header.forget);
                in_force = if batch.header.forget { 0 } else { in_force };
                in_force += batch.header.names.len();
                assert!(in_force <= MAX_NAMES_IN_FORCE);
            }
        }
    }
    outbox.flush().unwrap();
    while let Fed::Batch(batch) = feed.next(Duration::ZERO) {
        forgotten += usize::from(batch.header.forget);
    }
    assert_eq!(forgotten, 1);
}
