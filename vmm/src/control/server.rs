//! Listens on a guest's socket, and carries on the conversations.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use patcher::trace::tracer::ClientId;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::connection::converse;
use super::outbox::Outbox;
use super::place::{Claim, Name};
use super::protocol::{
    Armed, Info, Pad, Patch, PatchRequest, Patched, Refusal, RefusalKind, Reply, RevertRequest,
    Reverted, Status, TraceRequest, Waiting,
};
use super::wire::Wire;

/// Conversations at the same time.
pub const MAX_CONNECTIONS: usize = 32;

/// Questions that wait for whoever watches the guest.
const MAX_COMMANDS: usize = 2 * MAX_CONNECTIONS;

/// How long a client that is turned away may take to hear it.
const TURN_AWAY: Duration = Duration::from_millis(200);

/// Payloads that are received or wait at the same time: 64 MiB of memory.
pub(super) const MAX_PAYLOADS: usize = 4;

/// Where an answer goes.
#[derive(Debug)]
pub struct Answer<T>(SyncSender<Result<T, Refusal>>);

impl<T> Answer<T> {
    pub(super) fn new() -> (Self, Receiver<Result<T, Refusal>>) {
        let (sender, receiver) = mpsc::sync_channel(1);
        (Self(sender), receiver)
    }

    /// Answers. Whoever asked may be gone.
    pub fn give(self, answer: Result<T, Refusal>) {
        // There is room for one, and this is it.
        let _ = self.0.try_send(answer);
    }
}

/// What is asked of whoever watches the guest. One that is dropped is answered with "the guest is
/// about to end".
#[derive(Debug)]
pub enum Command {
    /// In short, what guest this is.
    Status(Answer<Status>),
    /// All there is to say about it.
    Info(Answer<Info>),
    /// The pads of functions that match the glob.
    Pads(Option<String>, Answer<Vec<Pad>>),
    /// Trace.
    Trace(Box<TraceWanted>),
    /// Give what the trace that overwrites holds now.
    Snapshot(Box<SnapshotWanted>),
    /// End that trace. Its outbox is told when it is over.
    Stop(ClientId),
    /// Apply a payload.
    PatchApply(Box<PatchWanted>),
    /// What is patched, in order.
    PatchList(Answer<Vec<Patch>>),
    /// Take a patch back.
    PatchRevert(RevertRequest, Waiter, Answer<Reverted>),
}

/// A payload that is to be applied.
#[derive(Debug)]
pub struct PatchWanted {
    /// How.
    pub request: PatchRequest,
    /// The object file.
    pub file: Vec<u8>,
    /// Whom to tell while it waits.
    pub waiter: Waiter,
    /// What it came to.
    pub answer: Answer<Patched>,
}

/// Somebody who waits for the text to be changed.
#[derive(Debug, Clone)]
pub struct Waiter {
    news: SyncSender<Waiting>,
    gone: Arc<AtomicBool>,
}

impl Waiter {
    pub(super) fn new() -> (Self, Waited) {
        // Only the latest news are of interest, and old ones are taken at once.
        let (news, received) = mpsc::sync_channel(1);
        let gone = Arc::new(AtomicBool::new(false));
        (Self { news, gone: Arc::clone(&gone) }, Waited { news: received, gone })
    }

    /// Tells who is in the way, unless there is no room for it at the moment.
    pub fn tell(&self, waiting: Waiting) {
        // The next attempt has newer ones.
        let _ = self.news.try_send(waiting);
    }

    /// Whether nobody wants it any more.
    #[must_use]
    pub fn has_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }
}

/// The other side of a [`Waiter`]: dropping it tells that nobody waits any more.
#[derive(Debug)]
pub(super) struct Waited {
    pub news: Receiver<Waiting>,
    gone: Arc<AtomicBool>,
}

impl Waited {
    pub fn give_up(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

impl Drop for Waited {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// A trace that is asked for.
#[derive(Debug)]
pub struct TraceWanted {
    /// What of.
    pub request: TraceRequest,
    /// The process that asks.
    pub pid: u32,
    /// Where the calls go.
    pub outbox: Outbox,
    /// Which trace it is to be, and how it has begun.
    pub answer: Answer<(ClientId, Armed)>,
}

/// What a trace holds that overwrites, as it is asked for.
#[derive(Debug)]
pub struct SnapshotWanted {
    /// Where the calls go.
    pub outbox: Outbox,
    /// How the trace began that it is of.
    pub answer: Answer<Armed>,
}

/// Listens on a guest's socket until it is dropped.
#[derive(Debug)]
pub struct Server {
    name: Name,
    /// Closing it wakes the thread that waits for connections.
    wake: Option<PipeWriter>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What all conversations share.
#[derive(Debug)]
pub(super) struct Shared {
    pub name: Name,
    pub commands: SyncSender<Command>,
    pub stop: Arc<AtomicBool>,
    pub connections: AtomicUsize,
    pub payloads: AtomicUsize,
}

impl Server {
    /// Begins to listen; what is asked comes out of the receiver.
    ///
    /// # Errors
    /// A thread or a pipe can't be had.
    pub fn start(claim: Claim) -> io::Result<(Self, Receiver<Command>)> {
        let (commands, received) = mpsc::sync_channel(MAX_COMMANDS);
        let (sleeper, wake) = io::pipe()?;
        let stop = Arc::new(AtomicBool::new(false));
        let name = claim.name().clone();
        let shared = Arc::new(Shared {
            name: name.clone(),
            commands,
            stop: Arc::clone(&stop),
            connections: AtomicUsize::new(0),
            payloads: AtomicUsize::new(0),
        });
        let thread = thread::Builder::new()
            .name("control".into())
            .spawn(move || listen(claim, &sleeper, &shared))?;
        Ok((Self { name, wake: Some(wake), stop, thread: Some(thread) }, received))
    }

    /// The guest's name.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.name
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            // A panic in there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// Takes connections until it is woken, then waits for the conversations' end.
fn listen(claim: Claim, sleeper: &PipeReader, shared: &Arc<Shared>) {
    let mut conversations: Vec<JoinHandle<()>> = Vec::new();
    while wait_for_client(&claim.listener, sleeper) {
        conversations.retain(|conversation| !conversation.is_finished());
        match claim.listener.accept() {
            Ok((stream, _)) => conversations.extend(begin(stream, shared)),
            // Too many open files, or a client that was gone before it was taken.
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
    // Nobody finds the socket any more while the last words are said.
    drop(claim);
    for conversation in conversations {
        // As above.
        let _ = conversation.join();
    }
}

/// Waits for a client; false if there is to be none any more.
fn wait_for_client(listener: &UnixListener, sleeper: &PipeReader) -> bool {
    loop {
        let mut ready = [
            PollFd::from_borrowed_fd(sleeper.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Ok(_) if !ready[0].revents().is_empty() => return false,
            Ok(_) if !ready[1].revents().is_empty() => return true,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

fn begin(stream: UnixStream, shared: &Arc<Shared>) -> Option<JoinHandle<()>> {
    let wire = Wire::new(stream).ok()?;
    if shared.connections.fetch_add(1, Ordering::SeqCst) >= MAX_CONNECTIONS {
        shared.connections.fetch_sub(1, Ordering::SeqCst);
        turn_away(wire);
        return None;
    }
    let ours = Arc::clone(shared);
    let conversation = thread::Builder::new().name("control-client".into()).spawn(move || {
        let _place = Taken(&ours.connections);
        converse(wire, &ours);
    });
    if conversation.is_err() {
        shared.connections.fetch_sub(1, Ordering::SeqCst);
    }
    conversation.ok()
}

fn turn_away(mut wire: Wire) {
    let message = format!("the guest has {MAX_CONNECTIONS} connections already; try again later");
    let reply = Reply::Error(Refusal::new(RefusalKind::Busy, message));
    // A client that does not listen needs no answer.
    let _ = wire.send(&reply, Instant::now() + TURN_AWAY);
}

/// One of a bounded number of places, free again when it is dropped.
pub(super) struct Taken<'a>(&'a AtomicUsize);

impl<'a> Taken<'a> {
    /// One of `all` places, if there is a free one.
    pub fn one_of(all: usize, taken: &'a AtomicUsize) -> Option<Self> {
        let place = Self(taken);
        (taken.fetch_add(1, Ordering::SeqCst) < all).then_some(place)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
