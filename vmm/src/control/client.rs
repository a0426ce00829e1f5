//! The other end of the control socket: what `vmm ps`, `info`, `pads`, `trace` and `patch` talk through.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use patcher::trace::sink::Event;

use super::names::Names;
use super::place::{Found, Name, Place};
use super::protocol::{
    Armed, BatchHeader, Counted, End, Greeting, Hello, Info, Latency, MAX_BATCH, MAX_CALLS,
    MAX_COUNTED, MAX_MEASURED, MAX_NAMES_IN_FORCE, MAX_REPLY, Measured, Pad, Patch, PatchRequest,
    Patched, Refusal, Reply, Request, RevertRequest, Reverted, Status, TraceRequest, VERSION,
    Waiting,
};
use super::wire::{Wire, WireError, line};

/// How long a guest's process may take to greet, and to hear a request.
const GREETING: Duration = Duration::from_secs(5);

/// Pads that are taken from a guest's process at most.
const MAX_PADS_IN_ALL: usize = 1 << 20;

/// Functions of patches that are taken from it at most, and patches.
const MAX_FUNCTIONS_IN_ALL: usize = 1 << 20;

/// What the numbers of functions that are counted are below.
const MAX_NUMBER: u32 = 1 << 20;

/// How long the bytes of a payload may take.
const UPLOAD: Duration = Duration::from_secs(60);

/// A guest could not be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// There is no such guest.
    #[error("there is no guest named {name}; `vmm ps` lists those that there are")]
    NoGuest {
        /// The name.
        name: Name,
    },
    /// Its socket can't be used.
    #[error("the guest {name} can't be reached: {source}")]
    Unreachable {
        /// The name.
        name: Name,
        /// Why not.
        source: io::Error,
    },
    /// It says no.
    #[error("{}", .0.message)]
    Refused(Refusal),
    /// It does not answer in time.
    #[error("the guest {name} does not answer; its process may be stopped, or hang")]
    Silent {
        /// The name.
        name: Name,
    },
    /// The conversation broke off.
    #[error("the guest {name} is gone: {reason}")]
    Lost {
        /// The name.
        name: Name,
        /// How.
        reason: String,
    },
    /// It says something that is not of the protocol.
    #[error("the guest {name} breaks the control protocol: {what}; use the same vmm for both")]
    Protocol {
        /// The name.
        name: Name,
        /// What it does.
        what: String,
    },
}

/// A conversation with a guest's process.
#[derive(Debug)]
pub struct Client {
    wire: Wire,
    name: Name,
    hello: Hello,
}

impl Client {
    /// Calls on the guest of that name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn connect(place: &Place, name: &Name) -> Result<Self, ClientError> {
        match place.find(name) {
            Found::Alive(stream) => Self::greet(stream, name),
            Found::Dead => Err(ClientError::NoGuest { name: name.clone() }),
            Found::Unknown(source) => Err(ClientError::Unreachable { name: name.clone(), source }),
        }
    }

    pub(super) fn greet(stream: UnixStream, name: &Name) -> Result<Self, ClientError> {
        let wire = Wire::new(stream);
        let wire =
            wire.map_err(|source| ClientError::Unreachable { name: name.clone(), source })?;
        let hello = Hello { version: VERSION, name: name.to_string(), program: String::new() };
        let mut client = Self { wire, name: name.clone(), hello };
        client.say(&Greeting::default())?;
        match client.hear(GREETING)? {
            Reply::Hello(hello) if hello.version == VERSION => {
                client.hello = hello;
                Ok(client)
            }
            other => Err(client.unexpected(&other)),
        }
    }

    /// Who answered.
    #[must_use]
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// In short, what guest this is.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn status(&mut self, patience: Duration) -> Result<Status, ClientError> {
        self.say(&Request::Status)?;
        match self.hear(patience)? {
            Reply::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    /// All there is to say about it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn info(&mut self, patience: Duration) -> Result<Info, ClientError> {
        self.say(&Request::Info)?;
        match self.hear(patience)? {
            Reply::Info(info) => Ok(*info),
            other => Err(self.unexpected(&other)),
        }
    }

    /// The kernel's pads, of functions that match the glob.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn pads(
        &mut self,
        glob: Option<String>,
        patience: Duration,
    ) -> Result<Vec<Pad>, ClientError> {
        self.say(&Request::Pads { glob })?;
        let mut pads = Vec::new();
        loop {
            match self.hear(patience)? {
                Reply::Pads(some) if pads.len() + some.len() <= MAX_PADS_IN_ALL => {
                    pads.extend(some);
                }
                Reply::Done {} => return Ok(pads),
                other => return Err(self.unexpected(&other)),
            }
        }
    }

    /// Begins a trace. While the functions are being armed, `stop` tells whether it is still wanted;
    /// `None` if it is not.
    ///
    /// # Errors
    /// [`ClientError`]; after a refusal another request may be made.
    pub fn trace(
        &mut self,
        request: &TraceRequest,
        stop: impl Fn() -> bool,
    ) -> Result<Option<Armed>, ClientError> {
        self.say(&Request::Trace(request.clone()))?;
        match self.wire.read(MAX_REPLY, None, &stop) {
            Ok(Reply::Armed(armed)) => Ok(Some(*armed)),
            Ok(Reply::Error(refusal)) => Err(ClientError::Refused(refusal)),
            Ok(other) => Err(self.unexpected(&other)),
            Err(WireError::TimedOut) => Ok(None),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Asks for what the trace holds that overwrites; see [`Request::Snapshot`].
    ///
    /// # Errors
    /// [`ClientError`]; after a refusal another request may be made.
    pub fn snapshot(&mut self, patience: Duration) -> Result<Armed, ClientError> {
        self.say(&Request::Snapshot)?;
        match self.hear(patience)? {
            Reply::Armed(armed) => Ok(*armed),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Applies the payload in `file`, which `request` describes. While somebody is in the way, `tell`
    /// is told who; when `stop` says that it is no longer wanted it is given up.
    ///
    /// # Errors
    /// [`ClientError`]; after a refusal another request may be made.
    pub fn patch_apply(
        &mut self,
        request: PatchRequest,
        file: &[u8],
        stop: impl Fn() -> bool,
        tell: impl FnMut(&Waiting),
    ) -> Result<Patched, ClientError> {
        let request = PatchRequest { bytes: file.len(), ..request };
        let mut message = line(&Request::PatchApply(request));
        message.extend_from_slice(file);
        let until = Instant::now() + UPLOAD;
        let sent = self.wire.write(&message, |_| match Instant::now() < until {
            true => Ok(()),
            false => Err(WireError::TimedOut),
        });
        self.is_said(sent)?;
        match self.wait(stop, tell)? {
            Reply::Patched(patched) => Ok(*patched),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Takes a patch back; `stop` and `tell` are as for [`Client::patch_apply`].
    ///
    /// # Errors
    /// [`ClientError`]; after a refusal another request may be made.
    pub fn patch_revert(
        &mut self,
        request: &RevertRequest,
        stop: impl Fn() -> bool,
        tell: impl FnMut(&Waiting),
    ) -> Result<Reverted, ClientError> {
        self.say(&Request::PatchRevert(request.clone()))?;
        match self.wait(stop, tell)? {
            Reply::Reverted(reverted) => Ok(reverted),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What is patched, with all functions, in the order in which it was applied.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn patches(&mut self, patience: Duration) -> Result<Vec<Patch>, ClientError> {
        self.say(&Request::PatchList)?;
        let mut patches: Vec<Patch> = Vec::new();
        let mut taken = 0;
        loop {
            let reply = self.hear(patience)?;
            taken += match &reply {
                Reply::Patch(patch) => 1 + patch.functions.len(),
                Reply::Functions(some) => some.len(),
                _ => 0,
            };
            match (reply, patches.last_mut()) {
                (Reply::Done {}, _) => return Ok(patches),
                (Reply::Patch(patch), _) if taken <= MAX_FUNCTIONS_IN_ALL => patches.push(*patch),
                (Reply::Functions(some), Some(patch)) if taken <= MAX_FUNCTIONS_IN_ALL => {
                    patch.functions.extend(some);
                }
                (other, _) => return Err(self.unexpected(&other)),
            }
        }
    }

    /// The answer to what may take long.
    fn wait(
        &mut self,
        stop: impl Fn() -> bool,
        mut tell: impl FnMut(&Waiting),
    ) -> Result<Reply, ClientError> {
        let mut given_up = false;
        loop {
            let heard = self.wire.read(MAX_REPLY, None, || !given_up && stop());
            match heard {
                Ok(Reply::Waiting(waiting)) => tell(&waiting),
                Ok(Reply::Error(refusal)) => return Err(ClientError::Refused(refusal)),
                Ok(reply) => return Ok(reply),
                // It may have been done at this moment, which only the answer tells.
                Err(WireError::TimedOut) => {
                    given_up = true;
                    self.say(&Request::Stop)?;
                }
                Err(error) => return Err(self.failed(&error)),
            }
        }
    }

    /// The calls of the trace that has begun.
    #[must_use]
    pub fn into_calls(self, armed: &Armed) -> Calls {
        let names = Names::new(armed.contexts);
        Calls { client: self, names, missed: 0 }
    }

    fn say(&mut self, message: &impl serde::Serialize) -> Result<(), ClientError> {
        let sent = self.wire.send(message, Instant::now() + GREETING);
        self.is_said(sent)
    }

    fn is_said(&self, sent: Result<(), WireError>) -> Result<(), ClientError> {
        sent.or_else(|error| match error {
            // What the other side said before it closed is still to be read, and says more.
            WireError::Closed => Ok(()),
            other => Err(self.failed(&other)),
        })
    }

    fn hear(&mut self, patience: Duration) -> Result<Reply, ClientError> {
        match self.wire.read(MAX_REPLY, Some(Instant::now() + patience), || false) {
            Ok(Reply::Error(refusal)) => Err(ClientError::Refused(refusal)),
            Ok(reply) => Ok(reply),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn failed(&self, error: &WireError) -> ClientError {
        let name = self.name.clone();
        match error {
            WireError::TimedOut => ClientError::Silent { name },
            WireError::Closed | WireError::Cut | WireError::Io(_) => {
                ClientError::Lost { name, reason: error.to_string() }
            }
            WireError::TooLong { .. } | WireError::Malformed(_) | WireError::Unexpected => {
                ClientError::Protocol { name, what: error.to_string() }
            }
        }
    }

    fn unexpected(&self, reply: &Reply) -> ClientError {
        let what = match reply {
            Reply::Error(refusal) => return ClientError::Refused(refusal.clone()),
            other => format!("{other:.60?} was not asked for"),
        };
        ClientError::Protocol { name: self.name.clone(), what }
    }
}

/// The calls of a trace.
#[derive(Debug)]
pub struct Calls {
    client: Client,
    names: Names,
    missed: u64,
}

/// What comes next in a trace.
#[derive(Debug)]
pub enum Message {
    /// Calls came, so many.
    Calls(usize),
    /// How often functions were called.
    Counted(Counted),
    /// How long calls took.
    Measured(Measured),
    /// It is over.
    End(Box<End>),
}

impl Calls {
    /// Waits for what comes next and gives every call that it brings to `take`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn next(&mut self, mut take: impl FnMut(&Event<'_>)) -> Result<Message, ClientError> {
        let Self { client, names, missed } = self;
        let reply = client.wire.read(MAX_REPLY, None, || false);
        let mut header: BatchHeader = match reply.map_err(|error| client.failed(&error))? {
            Reply::Batch(header) => header,
            Reply::End(end) => return Ok(Message::End(end)),
            Reply::Counted(counted) => {
                let numbers = counted.calls.iter().all(|(number, _, _)| *number < MAX_NUMBER);
                if counted.calls.len() > MAX_COUNTED || !numbers {
                    let what = "it counts more functions than a guest has".to_owned();
                    return Err(ClientError::Protocol { name: client.name.clone(), what });
                }
                return Ok(Message::Counted(counted));
            }
            Reply::Measured(measured) => {
                let is_sound = |one: &Latency| one.number < MAX_NUMBER && one.histogram().is_some();
                let latencies = &measured.latencies;
                if latencies.len() > MAX_MEASURED || !latencies.iter().all(is_sound) {
                    let what = "it measures more than a guest has functions or time".to_owned();
                    return Err(ClientError::Protocol { name: client.name.clone(), what });
                }
                return Ok(Message::Measured(measured));
            }
            other => return Err(client.unexpected(&other)),
        };
        let broken = |what: String, name: &Name| ClientError::Protocol { name: name.clone(), what };
        if header.calls > MAX_CALLS || header.bytes > MAX_BATCH {
            let what = format!("{} calls in a batch of {} bytes", header.calls, header.bytes);
            return Err(broken(what, &client.name));
        }
        *missed = header.missed;
        names.learn(&mut header);
        if names.in_force() > MAX_NAMES_IN_FORCE {
            return Err(broken("too many names".into(), &client.name));
        }
        let name = client.name.clone();
        let bytes = client.wire.read_bytes(header.bytes);
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(error) => return Err(ClientError::Lost { name, reason: error.to_string() }),
        };
        let given = names.events(&header, bytes, &mut take);
        given.ok_or_else(|| broken("a call is cut, or names nothing".into(), &name))?;
        Ok(Message::Calls(header.calls))
    }

    /// How many events were missed until now.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// Ends the trace from another thread.
    ///
    /// # Errors
    /// The socket can't be had a second time.
    pub fn stopper(&self) -> io::Result<Stopper> {
        Ok(Stopper(self.client.wire.stream().try_clone()?))
    }

    /// Calls of every function that was called, most first.
    #[must_use]
    pub fn counts(self) -> Vec<(String, u64)> {
        self.names.counts()
    }
}

/// Ends a trace.
#[derive(Debug)]
pub struct Stopper(UnixStream);

impl Stopper {
    /// Asks for the end of the trace; its last calls are still to come. A guest's process that is gone
    /// needs not be told.
    pub fn stop(&mut self) {
        let _ = self.0.write_all(&line(&Request::Stop));
    }

    #[cfg(test)]
    pub(super) fn into_stream(self) -> UnixStream {
        self.0
    }
}
