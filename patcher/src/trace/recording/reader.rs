//! Reads a recording back, which may be anything.

use std::fmt;
use std::io::{self, ErrorKind, Read};

use super::block::{HEADER, Header, Kind};
use super::{MAGIC, MAX_KNOWN, MAX_KNOWN_BYTES, MAX_MORE, MAX_NAME, MORE, OLDEST, VALUES, VERSION};
use crate::arch::ByteOrder;
use crate::trace::sink::{Beginning, Context, Event, EventKind, Name, Task, Tracer, Values};

/// A recording can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// It is something else.
    #[error("it is no recording of vmm's: it does not begin as one")]
    NotOne,
    /// It is of another version.
    #[error(
        "it is a recording of version {found}, and this vmm reads versions {OLDEST} to {VERSION}: use the vmm \
         that made it"
    )]
    Version {
        /// Which.
        found: u32,
    },
    /// It ends before there is anything in it.
    #[error("it ends before it tells of which guest it is: {0}")]
    Empty(Tail),
    /// A block that is whole makes no sense.
    #[error("the block at byte {at} makes no sense: {what}")]
    Malformed {
        /// Where the block begins.
        at: u64,
        /// What is wrong.
        what: String,
    },
    /// It can't be read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Where a recording that was not ended in order can't be read on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tail {
    /// From which byte on.
    pub at: u64,
    /// Why.
    pub why: &'static str,
}

impl fmt::Display for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "from byte {} on {}", self.at, self.why)
    }
}

/// A recording that is read.
#[derive(Debug)]
pub struct Recording<R> {
    input: R,
    /// Where the next block begins.
    at: u64,
    content: Vec<u8>,
    guest: Guest,
    pub(super) names: Vec<Known>,
    tasks: Vec<(u32, Option<Box<str>>)>,
    known_bytes: usize,
    /// How often all names were forgotten.
    pub(super) generation: u64,
    ended: Option<(u64, u64)>,
    tail: Option<Tail>,
}

#[derive(Debug)]
struct Guest {
    tracer: Tracer,
    interrupts: (u64, u64),
    cpus: u16,
    contexts: bool,
    order: ByteOrder,
    release: String,
    architecture: String,
}

#[derive(Debug)]
pub(super) struct Known {
    text: Box<str>,
    address: u64,
    offset: u64,
}

impl<R: Read> Recording<R> {
    /// Begins to read.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn open(mut input: R) -> Result<Self, RecordingError> {
        let mut start = [0; MAGIC.len() + 4];
        let got = fill(&mut input, &mut start)?;
        if got < MAGIC.len() || start[..MAGIC.len()] != MAGIC {
            return Err(RecordingError::NotOne);
        }
        let version = u32::from_le_bytes([start[8], start[9], start[10], start[11]]);
        if got == start.len() && !(OLDEST..=VERSION).contains(&version) {
            return Err(RecordingError::Version { found: version });
        }
        let (release, architecture) = (String::new(), String::new());
        let order = ByteOrder::Little;
        let (tracer, interrupts) = (Tracer::Function, (0, 0));
        let guest =
            Guest { tracer, interrupts, cpus: 0, contexts: false, order, release, architecture };
        let mut recording = Self {
            input,
            at: start.len() as u64,
            content: Vec::new(),
            guest,
            names: Vec::new(),
            tasks: Vec::new(),
            known_bytes: 0,
            generation: 0,
            ended: None,
            tail: None,
        };
        let at = recording.at;
        match recording.block()? {
            Some(Kind::Begin) => {}
            Some(_) => return Err(malformed(at, "the first one does not tell of the guest")),
            None => {
                let cut = Tail { at, why: "there is nothing" };
                return Err(RecordingError::Empty(recording.tail.unwrap_or(cut)));
            }
        }
        recording.guest = guest_of(&recording.content)
            .ok_or_else(|| malformed(at, "what it tells of the guest is cut or no text"))?;
        Ok(recording)
    }

    /// What it is a trace of.
    pub fn beginning(&self) -> Beginning<'_> {
        Beginning {
            tracer: self.guest.tracer,
            interrupts: self.guest.interrupts,
            cpus: usize::from(self.guest.cpus),
            contexts: self.guest.contexts,
            release: &self.guest.release,
            architecture: &self.guest.architecture,
            order: self.guest.order,
        }
    }

    /// How many bytes have been read.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// How many events are in it, and how many there were, if it was ended in order; known once
    /// everything is read.
    pub fn ended(&self) -> Option<(u64, u64)> {
        self.ended
    }

    /// What can't be read at its end; known once everything else is read.
    pub fn tail(&self) -> Option<&Tail> {
        self.tail.as_ref()
    }

    /// Reads on, and gives calls that it comes to, some thousands at most, to `take`. `false` at the
    /// end.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn next(&mut self, take: impl FnMut(&Event<'_>)) -> Result<bool, RecordingError> {
        let at = self.at;
        let Some(kind) = self.block()? else { return Ok(false) };
        if self.ended.is_some() {
            return Err(malformed(at, "there is one behind the end"));
        }
        let content = std::mem::take(&mut self.content);
        let result = match kind {
            Kind::Begin => Err("the guest is told of a second time"),
            Kind::Names => self.learn_names(&content),
            Kind::Tasks => self.learn_tasks(&content),
            Kind::Calls => self.calls(&content, take),
            Kind::End => self.end(&content),
        };
        self.content = content;
        result.map(|()| true).map_err(|what| malformed(at, what))
    }

    /// Reads the next block's content; `None` if there is no whole one.
    fn block(&mut self) -> Result<Option<Kind>, RecordingError> {
        let at = self.at;
        if self.tail.is_some() {
            return Ok(None);
        }
        let mut torn = |why| {
            self.tail = Some(Tail { at, why });
            Ok(None)
        };
        let mut header = [0; HEADER];
        match fill(&mut self.input, &mut header)? {
            0 => return Ok(None),
            HEADER => {}
            _ => return torn("a block is cut"),
        }
        let Some(header) = Header::new(header) else { return torn("there is no block") };
        self.content.resize(header.content(), 0);
        if fill(&mut self.input, &mut self.content)? < self.content.len() {
            return torn("a block is cut");
        }
        if !header.is_of(&self.content) {
            return torn("a block's check sum is wrong");
        }
        self.at += (HEADER + self.content.len()) as u64;
        match header.kind() {
            Ok(kind) => Ok(Some(kind)),
            Err(number) => Err(malformed(at, &format!("its kind, {number}, is not known"))),
        }
    }

    fn learn_names(&mut self, content: &[u8]) -> Result<(), &'static str> {
        let mut fields = Fields(content);
        if fields.u8().ok_or("it is empty")? != 0 {
            self.names.clear();
            self.known_bytes = self.tasks.iter().map(|(_, comm)| length(comm)).sum();
            self.generation += 1;
        }
        while !fields.0.is_empty() {
            let mut name = || Some((fields.u64()?, fields.u64()?, fields.text()??));
            let (address, offset, text) = name().ok_or("a name is cut, too long, or no text")?;
            self.makes_room(text.len(), self.names.len())?;
            self.names.push(Known { text: text.into(), address, offset });
        }
        Ok(())
    }

    fn learn_tasks(&mut self, content: &[u8]) -> Result<(), &'static str> {
        let mut fields = Fields(content);
        if fields.u8().ok_or("it is empty")? != 0 {
            self.tasks.clear();
            self.known_bytes = self.names.iter().map(|name| name.text.len()).sum();
        }
        while !fields.0.is_empty() {
            let mut task = || Some((fields.u32()?, fields.text()?));
            let (pid, comm) = task().ok_or("a task is cut, or its name too long or no text")?;
            let comm = comm.map(Into::into);
            self.makes_room(length(&comm), self.tasks.len())?;
            self.tasks.push((pid, comm));
        }
        Ok(())
    }

    fn makes_room(&mut self, bytes: usize, count: usize) -> Result<(), &'static str> {
        self.known_bytes += bytes;
        // Names and tasks each have that much.
        if count >= MAX_KNOWN || self.known_bytes > 2 * MAX_KNOWN_BYTES {
            return Err("it has more names than a recording can have");
        }
        Ok(())
    }

    fn calls(&self, content: &[u8], mut take: impl FnMut(&Event<'_>)) -> Result<(), &'static str> {
        let mut fields = Fields(content);
        let count = fields.u32().ok_or("it is empty")? as usize;
        let gaps = fields.take(count.saturating_mul(12)).ok_or("its gaps are cut")?;
        let mut gaps = gaps.as_chunks::<12>().0.iter().peekable();
        for index in 0_usize.. {
            if fields.0.is_empty() {
                break;
            }
            let mut missed = 0_u64;
            let is_here =
                |gap: &&[u8; 12]| Fields(&gap[..]).u32().is_some_and(|at| at as usize <= index);
            while let Some(gap) = gaps.next_if(is_here) {
                missed = missed.saturating_add(Fields(&gap[4..]).u64().unwrap_or(0));
            }
            let call = Call::of(&mut fields).ok_or("a call is cut, or of no known kind")?;
            let event =
                self.call(&call).ok_or("a call refers to a name, task or CPU that is none")?;
            take(&Event { missed, ..event });
        }
        Ok(())
    }

    fn call<'e>(&'e self, call: &Call<'e>) -> Option<Event<'e>> {
        let Call { time_ns, kind, cpu, flags, preempt_depth, values, .. } = *call;
        let name = |number: u32| {
            let Known { text, address, offset } = self.names.get(number as usize)?;
            let id = self.generation << 32 | u64::from(number);
            Some(Name { id, text, address: *address, offset: *offset })
        };
        let (function, caller) = (name(call.function)?, name(call.caller)?);
        let task = match call.task {
            u32::MAX => None,
            number => {
                let (pid, comm) = self.tasks.get(number as usize)?;
                Some(Task { pid: *pid, comm: comm.as_deref() })
            }
        };
        if cpu >= self.guest.cpus {
            return None;
        }
        let is_set = |bit: u32| flags & 1 << bit != 0;
        let context = is_set(7).then(|| Context {
            irqs_off: is_set(0),
            bottom_halves_off: is_set(1),
            need_resched: is_set(2),
            hardirq: is_set(3),
            softirq: is_set(4),
            nmi: is_set(5),
            preempt_depth,
        });
        Some(Event { time_ns, kind, cpu, function, caller, task, context, values, missed: 0 })
    }

    fn end(&mut self, content: &[u8]) -> Result<(), &'static str> {
        let mut fields = Fields(content);
        let mut counts = || Some((fields.u64()?, fields.u64()?));
        self.ended = Some(counts().ok_or("the end's counts are cut")?);
        Ok(())
    }
}

/// An event as it is written down.
struct Call<'a> {
    time_ns: u64,
    function: u32,
    caller: u32,
    task: u32,
    cpu: u16,
    flags: u8,
    preempt_depth: u8,
    kind: EventKind,
    values: Values<'a>,
}

impl<'a> Call<'a> {
    fn of(fields: &mut Fields<'a>) -> Option<Self> {
        let time_ns = fields.u64()?;
        let (function, caller, task) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let (cpu, flags, preempt_depth) = (fields.u16()?, fields.u8()?, fields.u8()?);
        let (mut kind, mut values) = (EventKind::Call, Values::NONE);
        if flags & MORE != 0 {
            let (tag, length) = (fields.u8()?, usize::from(fields.u16()?));
            let more = fields.take(length).filter(|more| more.len() <= MAX_MORE)?;
            kind = EventKind::decode(tag & !VALUES, more)?;
            if tag & VALUES != 0 {
                values = Values::new(more.get(kind.bytes()..)?);
            }
        }
        Some(Self { time_ns, function, caller, task, cpu, flags, preempt_depth, kind, values })
    }
}

fn malformed(at: u64, what: &str) -> RecordingError {
    RecordingError::Malformed { at, what: what.to_owned() }
}

fn length(comm: &Option<Box<str>>) -> usize {
    comm.as_ref().map_or(0, |comm| comm.len())
}

fn guest_of(content: &[u8]) -> Option<Guest> {
    let mut fields = Fields(content);
    let order = if fields.u8()? == 0 { ByteOrder::Little } else { ByteOrder::Big };
    let contexts = fields.u8()? != 0;
    let tracer = if fields.u8()? == 0 { Tracer::Function } else { Tracer::Graph };
    let interrupts = (fields.u64()?, fields.u64()?);
    let cpus = fields.u16()?;
    let (release, architecture) = (fields.text()??.to_owned(), fields.text()??.to_owned());
    Some(Guest { tracer, interrupts, cpus, contexts, order, release, architecture })
}

/// Fills `bytes` as far as there is something to read, and tells how far.
fn fill(input: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < bytes.len() {
        match input.read(&mut bytes[got..]) {
            Ok(0) => break,
            Ok(count) => got += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Fields one behind the other, little-endian.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A length and so many bytes of text; nothing in it if the length says that there is none.
    fn text(&mut self) -> Option<Option<&'a str>> {
        match self.u16()? {
            u16::MAX => Some(None),
            length if usize::from(length) > MAX_NAME => None,
            length => std::str::from_utf8(self.take(usize::from(length))?).ok().map(Some),
        }
    }
}
