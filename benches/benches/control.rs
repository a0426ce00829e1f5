//! How many calls a second reach a client of the control socket.

use std::io;
use std::sync::mpsc;
use std::time::Duration;
use std::{env, fs, process, thread};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use patcher::hook::Hooks;
use patcher::kernel::MappedRegion;
use patcher::synthetic::{Blueprint, Guest};
use patcher::trace::filter::Filter;
use patcher::trace::select::Selection;
use patcher::trace::sink::{Event, EventKind, FtraceText, Name, Sink, Values};
use patcher::trace::tracer::Tracer;
use vmm::control::protocol::{self, Armed, End, EndReason, Totals, TraceRequest};
use vmm::control::{Client, Command, Message, Outbox, Place, Server};

/// Calls in a run.
const CALLS: u64 = 1 << 20;

/// Functions that are called in turn, each by two callers.
const FUNCTIONS: u64 = 1000;

/// Puts calls into an outbox as fast as it takes them.
fn feed(mut outbox: Outbox) {
    let names: Vec<String> = (0..3 * FUNCTIONS).map(|id| format!("function_{id}")).collect();
    let name = |id: u64| Name { id, text: &names[id as usize], address: id << 8, offset: 4 };
    for time_ns in 0..CALLS {
        let function = name(time_ns % FUNCTIONS);
        let caller = name(FUNCTIONS + time_ns * 7 % (2 * FUNCTIONS));
        let kind = EventKind::Call;
        let event = Event {
            time_ns,
            kind,
            cpu: 0,
            function,
            caller,
            task: None,
            context: None,
            values: Values::NONE,
            missed: 0,
        };
        while let Err(error) = outbox.event(&event) {
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            thread::yield_now();
        }
    }
    let totals = Totals { events: CALLS, ..Totals::default() };
    let (reason, lasted) = (EndReason::Stopped, Duration::ZERO);
    outbox.end(End { reason, error: None, totals, lasted });
}

fn stream(criterion: &mut Criterion) {
    let guest = Guest::new(&Blueprint::default());
    let kernel = guest.kernel();
    let region = MappedRegion::new(&guest, &kernel).expect("a region");
    let mut hooks = Hooks::new(&guest, &kernel, &region);
    let mut tracer = Tracer::new(&mut hooks).expect("a tracer");
    let selection = Selection::beside(&hooks, &Filter::default()).expect("functions");
    let (id, _) = tracer.add(&mut hooks, &selection, ()).expect("a client");

    let place = Place::at(&env::temp_dir().join(format!("vmm-bench-{}", process::id())));
    let claim = place.claim(None).expect("a socket");
    let name = claim.name().clone();
    let (server, commands) = Server::start(claim).expect("a server");
    let (outboxes, taken) = mpsc::channel();
    let watcher = thread::spawn(move || {
        while let Ok(command) = commands.recv() {
            if let Command::Trace(wanted) = command {
                outboxes.send(wanted.outbox).expect("the bench takes it");
                wanted.answer.give(Ok((id, Armed::default())));
            }
        }
    });

    let request = TraceRequest {
        tracer: protocol::Tracer::Func,
        filter: Vec::new(),
        notrace: Vec::new(),
        method: protocol::Method::Call,
        ..TraceRequest::default()
    };
    let mut group = criterion.benchmark_group("control");
    group.throughput(Throughput::Elements(CALLS)).sample_size(10);
    for (title, format) in [("counted", false), ("made text of", true)] {
        group.bench_function(title, |bencher| {
            bencher.iter(|| {
                let mut client = Client::connect(&place, &name).expect("a connection");
                let armed = client.trace(&request, || false).expect("a trace").expect("a trace");
                let outbox = taken.recv().expect("an outbox");
                let feeder = thread::spawn(move || feed(outbox));
                let mut calls = client.into_calls(&armed);
                let mut text = FtraceText::stream(io::sink());
                let mut count = 0;
                let take = |event: &Event<'_>| {
                    count += 1;
                    if format {
                        text.event(event).expect("a sink takes everything");
                    }
                };
                let mut take = take;
                while let Message::Calls(_) = calls.next(&mut take).expect("calls") {}
                assert_eq!(count, CALLS);
                feeder.join().expect("the feeder");
            });
        });
    }
    group.finish();
    drop(server);
    watcher.join().expect("the watcher");
    fs::remove_dir_all(place.path()).expect("the bench's own folder");
}

criterion_group!(control, stream);
criterion_main!(control);
