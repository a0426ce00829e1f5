//! One conversation, as the guest's process leads it.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TrySendError};
use std::time::{Duration, Instant};

use patcher::trace::tracer::ClientId;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

use super::outbox::{Fed, Feed, Outbox};
use super::protocol::{
    Function, Greeting, Hello, MAX_FILE_NAME, MAX_FUNCTIONS, MAX_MAPS, MAX_PADS, MAX_PATCH_TIMEOUT,
    MAX_PAYLOAD, MAX_REQUEST, Patch, PatchRequest, Refusal, RefusalKind, Reply, Request,
    TraceRequest, VERSION,
};
use super::server::{
    Answer, Command, MAX_PAYLOADS, PatchWanted, Shared, SnapshotWanted, Taken, TraceWanted, Waited,
    Waiter,
};
use super::wire::{Wire, WireError, line};

/// How long a client may take to greet, or to hear an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a client may be silent between two requests.
const IDLE: Duration = Duration::from_secs(60);

/// How long a client may take to hear the end of its trace when the guest is about to end.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long the bytes of a payload may take.
const UPLOAD: Duration = Duration::from_secs(60);

/// How often a trace that has nothing to say looks whether its client does.
const LOOK: Duration = Duration::from_millis(50);

/// Talks with a client until one of the two has had enough.
pub(super) fn converse(wire: Wire, shared: &Shared) {
    let mut conversation = Conversation { wire, shared, pid: 0 };
    if let Err(Stop::Say(refusal) | Stop::Close(refusal)) = conversation.run() {
        // The last word; who does not hear it is gone.
        let _ = conversation.say(&Reply::Error(refusal));
    }
}

/// Why a conversation ends.
enum Stop {
    /// There is nobody to talk to, or nothing to say.
    Silently,
    /// The client is told first, and may ask for something else if it can still be understood.
    Say(Refusal),
    /// The client is told first.
    Close(Refusal),
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
            Request::Snapshot => {
                let (outbox, feed) = Outbox::new();
                let armed = self
                    .ask(|answer| Command::Snapshot(Box::new(SnapshotWanted { outbox, answer })))?;
                self.say(&Reply::Armed(Box::new(armed)))?;
                self.stream(None, &feed)
            }
            Request::PatchApply(request) => self.patch_apply(request),
            Request::PatchList => {
                for patch in self.ask(Command::PatchList)? {
                    self.say_patch(patch)?;
                }
                self.say(&Reply::Done {})
            }
            Request::PatchRevert(request) => {
                check_timeout(request.timeout_ms)?;
                let reverted = self
                    .ask_and_wait(|waiter, answer| Command::PatchRevert(request, waiter, answer))?;
                self.say(&Reply::Reverted(reverted))
            }
            Request::Stop => {
                let message = "there is nothing to stop on this connection";
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

    /// The same for what may take long: tells the client who is in the way meanwhile, and gives up
    /// when the client does.
    fn ask_and_wait<T>(
        &mut self,
        command: impl FnOnce(Waiter, Answer<T>) -> Command,
    ) -> Result<T, Stop> {
        let (answer, answered) = Answer::new();
        let (waiter, waited) = Waiter::new();
        self.put(command(waiter, answer))?;
        loop {
            match answered.recv_timeout(LOOK) {
                Ok(answer) => return answer.map_err(Stop::Say),
                Err(RecvTimeoutError::Disconnected) => return Err(Stop::Say(Refusal::ended())),
                Err(RecvTimeoutError::Timeout) => self.tell_news(&waited)?,
            }
        }
    }

    fn tell_news(&mut self, waited: &Waited) -> Result<(), Stop> {
        if hear(&mut self.wire)? {
            waited.give_up();
        }
        match waited.news.try_recv() {
            Ok(waiting) => self.say(&Reply::Waiting(waiting)),
            Err(_) => Ok(()),
        }
    }

    fn patch_apply(&mut self, request: PatchRequest) -> Result<(), Stop> {
        // Whoever announces more could not be understood any more without its bytes.
        if request.bytes > MAX_PAYLOAD {
            let message = format!("a payload has at most {} MiB", MAX_PAYLOAD >> 20);
            return Err(Stop::Say(Refusal::new(RefusalKind::Malformed, message)));
        }
        let shared = self.shared;
        let Some(place) = Taken::one_of(MAX_PAYLOADS, &shared.payloads) else {
            let message = format!("{MAX_PAYLOADS} payloads are being applied; try again later");
            return Err(Stop::Close(Refusal::new(RefusalKind::Busy, message)));
        };
        let until = Instant::now() + UPLOAD;
        let file = self.wire.take_bytes(request.bytes, until, || shared.is_ending())?;
        check_timeout(request.timeout_ms)?;
        let refused = |message: String| Stop::Say(Refusal::new(RefusalKind::Refused, message));
        if request.maps.len() > MAX_MAPS {
            return Err(refused(format!("a payload is told of at most {MAX_MAPS} functions")));
        }
        if request.file.len() > MAX_FILE_NAME {
            return Err(refused(format!("a file's name has at most {MAX_FILE_NAME} bytes")));
        }
        let wanted = |waiter, answer| {
            Command::PatchApply(Box::new(PatchWanted { request, file, waiter, answer }))
        };
        let patched = self.ask_and_wait(wanted)?;
        // Whoever has the answer may count on the place.
        drop(place);
        self.say(&Reply::Patched(Box::new(patched)))
    }

    /// Says all of a patch, in pieces.
    fn say_patch(&mut self, mut patch: Patch) -> Result<(), Stop> {
        let rest: Vec<Function> =
            patch.functions.split_off(patch.functions.len().min(MAX_FUNCTIONS));
        self.say(&Reply::Patch(Box::new(patch)))?;
        for some in rest.chunks(MAX_FUNCTIONS) {
            self.say(&Reply::Functions(some.to_vec()))?;
        }
        Ok(())
    }

    fn trace(&mut self, request: TraceRequest) -> Result<(), Stop> {
        if let Err(message) = request.check() {
            return Err(Stop::Say(Refusal::new(RefusalKind::Refused, message)));
        }
        let (outbox, feed) = Outbox::new();
        let pid = self.pid;
        let wanted =
            |answer| Command::Trace(Box::new(TraceWanted { request, pid, outbox, answer }));
        let (client, armed) = self.ask(wanted)?;
        // From here on, however this ends, the trace does too.
        let tracing = Tracing { client, shared: self.shared, asked: Cell::new(false) };
        self.say(&Reply::Armed(Box::new(armed)))?;
        self.stream(Some(&tracing), &feed)
    }

    /// Hands on what comes out of the feed, until its end. What is held already has its end in sight, and is
    /// not stopped but left.
    fn stream(&mut self, tracing: Option<&Tracing<'_>>, feed: &Feed) -> Result<(), Stop> {
        let mut last_words = None;
        let stop = || match tracing {
            Some(tracing) => {
                tracing.stop();
                Ok(())
            }
            None => Err(WireError::Closed),
        };
        loop {
            if hear(&mut self.wire)? {
                stop()?;
            }
            let bytes = match feed.next(LOOK) {
                Fed::Nothing => continue,
                Fed::Batch(batch) => {
                    let mut bytes = line(&Reply::Batch(batch.header));
                    bytes.extend_from_slice(&batch.calls);
                    bytes
                }
                Fed::Counted(counted) => line(&Reply::Counted(counted)),
                Fed::Measured(measured) => line(&Reply::Measured(measured)),
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
                        stop()?;
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

fn check_timeout(milliseconds: u64) -> Result<(), Stop> {
    if Duration::from_millis(milliseconds) <= MAX_PATCH_TIMEOUT {
        return Ok(());
    }
    let hours = MAX_PATCH_TIMEOUT.as_secs() / 3600;
    let message = format!("a patch is waited for at most {hours} hours");
    Err(Stop::Say(Refusal::new(RefusalKind::Refused, message)))
}

/// Whether the client asks for the end of its trace, or of its waiting.
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
