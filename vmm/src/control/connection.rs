//! One conversation, as the guest's process leads it.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TrySendError};
use std::time::{Duration, Instant};

use patcher::trace::tracer::ClientId;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

use super::outbox::{Fed, Feed, Outbox};
use super::protocol::{
    Greeting, Hello, MAX_GLOBS, MAX_PADS, MAX_REQUEST, Refusal, RefusalKind, Reply, Request,
    TraceRequest, VERSION,
};
use super::server::{Answer, Command, Shared, TraceWanted};
use super::wire::{Wire, WireError, line};

/// How long a client may take to greet, or to hear an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a client may be silent between two requests.
const IDLE: Duration = Duration::from_secs(60);

/// How long a client may take to hear the end of its trace when the guest is about to end.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How often a trace that has nothing to say looks whether its client does.
const LOOK: Duration = Duration::from_millis(50);

/// Talks with a client until one of the two has had enough.
pub(super) fn converse(wire: Wire, shared: &Shared) {
    let mut conversation = Conversation { wire, shared, pid: 0 };
    if let Err(Stop::Say(refusal)) = conversation.run() {
        // The last word; who does not hear it is gone.
        let _ = conversation.say(&Reply::Error(refusal));
    }
}

/// Why a conversation ends.
enum Stop {
    /// There is nobody to talk to, or nothing to say.
    Silently,
    /// The client is told first.
    Say(Refusal),
}

impl From<WireError> for Stop {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Closed | WireError::Cut | WireError::Io(_) => Stop::Silently,
            WireError::TimedOut
            | WireError::TooLong { .. }
            | WireError::Malformed(_)
            | WireError::Unexpected => {
                Stop::Say(Refusal::new(RefusalKind::Malformed, error.to_string()))
            }
        }
    }
}

struct Conversation<'s> {
    wire: Wire,
    shared: &'s Shared,
    pid: u32,
}

impl Conversation<'_> {
    fn run(&mut self) -> Result<(), Stop> {
        self.check_peer()?;
        self.greet()?;
        loop {
            let until = Some(Instant::now() + IDLE);
            let request = self.wire.read(MAX_REQUEST, until, || self.shared.is_ending());
            let request = match request {
                Err(WireError::TimedOut) if self.shared.is_ending() => {
                    return Err(Stop::Say(Refusal::ended()));
                }
                request => request?,
            };
            match self.answer(request) {
                // The client may ask for something else.
                Err(Stop::Say(refusal)) if refusal.kind != RefusalKind::Malformed => {
                    self.say(&Reply::Error(refusal))?;
                }
                result => result?,
            }
        }
    }

    /// Only this user and root are talked to. The socket's mode says the same; but it has been another
    /// for a moment, and the directory may be one that somebody else has made.
    fn check_peer(&mut self) -> Result<(), Stop> {
        let peer = socket_peercred(self.wire.stream()).map_err(|_| Stop::Silently)?;
        if !peer.uid.is_root() && peer.uid != geteuid() {
            let message = "this guest is another user's";
            return Err(Stop::Say(Refusal::new(RefusalKind::Forbidden, message)));
        }
        self.pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
        Ok(())
    }

    fn greet(&mut self) -> Result<(), Stop> {
        let until = Some(Instant::now() + PATIENCE);
        let greeting: Greeting = self.wire.read(MAX_REQUEST, until, || self.shared.is_ending())?;
        if greeting.vmm != "control" {
            let message = "this is the control socket of a guest of vmm's";
            return Err(Stop::Say(Refusal::new(RefusalKind::Malformed, message)));
        }
        if !greeting.versions.contains(&VERSION) {
            let message = format!(
                "this guest's vmm speaks version {VERSION} of the control protocol and the client \
                 only others; use the same vmm for both"
            );
            return Err(Stop::Say(Refusal::new(RefusalKind::Version, message)));
        }
        let name = self.shared.name.to_string();
        let program = env!("CARGO_PKG_VERSION").to_owned();
        self.say(&Reply::Hello(Hello { version: VERSION, name, program }))
    }

    fn say(&mut self, reply: &Reply) -> Result<(), Stop> {
        Ok(self.wire.send(reply, Instant::now() + PATIENCE)?)
    }

    fn answer(&mut self, request: Request) -> Result<(), Stop> {
        match request {
            Request::Status => {
                let status = self.ask(Command::Status)?;
                self.say(&Reply::Status(status))
            }
            Request::Info => {
                let info = self.ask(Command::Info)?;
                self.say(&Reply::Info(Box::new(info)))
            }
            Request::Pads { glob } => {
                let pads = self.ask(|answer| Command::Pads(glob, answer))?;
                for some in pads.chunks(MAX_PADS) {
                    self.say(&Reply::Pads(some.to_vec()))?;
                }
                self.say(&Reply::Done {})
            }
            Request::Trace(request) => self.trace(request),
            Request::Stop => {
                let message = "there is no trace to stop on this connection";
                Err(Stop::Say(Refusal::new(RefusalKind::Malformed, message)))
            }
        }
    }

    /// Puts a question to whoever watches the guest.
    fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, Stop> {
        let (answer, answered) = Answer::new();
        self.put(command(answer))?;
        wait(&answered)
    }

    fn put(&self, command: Command) -> Result<(), Stop> {
        self.shared.commands.try_send(command).map_err(|error| {
            Stop::Say(match error {
                TrySendError::Full(_) => {
                    let message = "the guest's process is busy; try again later";
                    Refusal::new(RefusalKind::Busy, message)
                }
                TrySendError::Disconnected(_) => Refusal::ended(),
            })
        })
    }

    fn trace(&mut self, request: TraceRequest) -> Result<(), Stop> {
        if request.filter.len() + request.notrace.len() > MAX_GLOBS {
            let message = format!("a trace has at most {MAX_GLOBS} globs");
            return Err(Stop::Say(Refusal::new(RefusalKind::Refused, message)));
        }
        let (outbox, feed) = Outbox::new();
        let pid = self.pid;
        let wanted = |answer| Command::Trace(TraceWanted { request, pid, outbox, answer });
        let (client, armed) = self.ask(wanted)?;
        // From here on, however this ends, the trace does too.
        let tracing = Tracing { client, shared: self.shared, asked: Cell::new(false) };
        self.say(&Reply::Armed(Box::new(armed)))?;
        self.stream(&tracing, &feed)
    }

    /// Hands on what comes out of the feed, until its end.
    fn stream(&mut self, tracing: &Tracing<'_>, feed: &Feed) -> Result<(), Stop> {
        let mut last_words = None;
        loop {
            if hear(&mut self.wire)? {
                tracing.stop();
            }
            let bytes = match feed.next(LOOK) {
                Fed::Nothing => continue,
                Fed::Batch(batch) => {
                    let mut bytes = line(&Reply::Batch(batch.header));
                    bytes.extend_from_slice(&batch.calls);
                    bytes
                }
                Fed::End(end) => {
                    let patience = if self.shared.is_ending() { LAST_WORDS } else { PATIENCE };
                    let until = Instant::now() + patience;
                    return Ok(self.wire.send(&Reply::End(Box::new(end)), until)?);
                }
                Fed::Gone => return Err(Stop::Say(Refusal::ended())),
            };
            let shared = self.shared;
            self.wire
                .write(&bytes, |wire| {
                    // A client may be as slow as it likes, while the guest runs.
                    if hear(wire)? {
                        tracing.stop();
                    }
                    if shared.is_ending() {
                        let until = *last_words.get_or_insert_with(|| Instant::now() + LAST_WORDS);
                        if Instant::now() >= until {
                            return Err(WireError::TimedOut);
                        }
                    }
                    Ok(())
                })
                // In the middle of a batch nothing else can be said.
                .map_err(|_| Stop::Silently)?;
        }
    }
}

/// Whether the client asks for the end of its trace.
fn hear(wire: &mut Wire) -> Result<bool, WireError> {
    match wire.poll(MAX_REQUEST)? {
        Some(Request::Stop) => Ok(true),
        Some(_) => Err(WireError::Unexpected),
        None => Ok(false),
    }
}

fn wait<T>(answered: &Receiver<Result<T, Refusal>>) -> Result<T, Stop> {
    // Whoever watches the guest answers, or drops the question when the guest ends.
    answered.recv().unwrap_or_else(|_| Err(Refusal::ended())).map_err(Stop::Say)
}

/// A trace for this conversation, which ends with it.
struct Tracing<'s> {
    client: ClientId,
    shared: &'s Shared,
    /// Its end has been asked for.
    asked: Cell<bool>,
}

impl Tracing<'_> {
    fn stop(&self) {
        if self.asked.replace(true) {
            return;
        }
        // It waits for room: a trace that nobody wants must not stay armed. Whoever takes commands
        // takes them all the time, or is gone and has ended every trace.
        let _ = self.shared.commands.send(Command::Stop(self.client));
    }
}

impl Drop for Tracing<'_> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn is_ending(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}
