//! A client for the gdb remote protocol as QEMU's gdbstub speaks it.
//!
//! QEMU acknowledges packets and takes the beginning of the next one for our acknowledgement, so
//! none is ever sent: while the guest runs, any byte at all would stop it. For the same reason
//! nothing but [`Gdb::stop`] may be called while it runs. Not waiting for an answer before the next
//! question is sent is what makes thousands of writes affordable.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use patcher::arch::ByteOrder;

use self::packet::{frame, hex, is_thread, unescape, unhex};
use super::xml;

mod packet;

/// How long QEMU may take to answer a question while the guest stands.
const PATIENCE: Duration = Duration::from_secs(10);

/// The longest packet that is taken in, in bytes. QEMU's own limit is 4096.
const PACKET_LIMIT: usize = 1 << 14;

/// Memory bytes in one packet. From 0x800 on QEMU 7.2 gives no answer at all.
const WRITE_LIMIT: usize = 0x7c0;

/// How many questions may be without an answer at a time.
const DEPTH: usize = 64;

/// Stops that may be announced unasked before an answer.
const STOPS_BETWEEN: usize = 64;

/// The most text of a target description's file, in bytes, and the most files and threads.
const TEXT_LIMIT: usize = 1 << 20;
const FILES_LIMIT: usize = 64;
const THREADS_LIMIT: usize = 4096;

/// QEMU's gdbstub gave no usable answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GdbError {
    /// QEMU has gone, or has closed the connection.
    #[error("QEMU's gdbstub has closed the connection")]
    Closed,
    /// No answer in time.
    #[error("QEMU's gdbstub did not answer within {} ms", .0.as_millis())]
    Silent(Duration),
    /// The connection failed.
    #[error("the connection to QEMU's gdbstub failed: {0}")]
    Connection(io::Error),
    /// A packet whose checksum is that of another.
    #[error(
        "QEMU's gdbstub sent a packet whose checksum is {found:#04x} where {computed:#04x} was computed"
    )]
    Checksum {
        /// What the packet says.
        found: u8,
        /// What its bytes come to.
        computed: u8,
    },
    /// Bytes that are no packet.
    #[error("QEMU's gdbstub sent what is not a packet: {0}")]
    NotAPacket(&'static str),
    /// An answer that makes no sense.
    #[error("QEMU's gdbstub answered {reply:?} when asked {question}")]
    Answer {
        /// What was asked.
        question: &'static str,
        /// The beginning of what was answered.
        reply: String,
    },
    /// The target description lacks a register.
    #[error("QEMU describes no register {0}; use QEMU 7.2 or newer")]
    NoRegister(&'static str),
    /// There is no such vCPU.
    #[error("QEMU's gdbstub knows no vCPU {0}")]
    NoVcpu(usize),
}

/// A register's number and its length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RegisterPlace {
    pub number: u64,
    pub bytes: usize,
}

/// A conversation with a gdbstub. The guest stands when it begins.
#[derive(Debug)]
pub(super) struct Gdb {
    stream: UnixStream,
    order: ByteOrder,
    buffer: Vec<u8>,
    at: usize,
    threads: Vec<String>,
    places: Vec<xml::Register>,
    /// Stops that were given up and whose announcement is still to come.
    stale: usize,
}

impl Gdb {
    /// Begins a conversation about a guest that stands: physical addresses, its vCPUs, its registers,
    /// whose bytes come in this order.
    ///
    /// # Errors
    /// What the peer says, or that it says nothing.
    pub(super) fn connect(stream: UnixStream, order: ByteOrder) -> Result<Self, GdbError> {
        let mut gdb = Self {
            stream,
            order,
            buffer: Vec::new(),
            at: 0,
            threads: Vec::new(),
            places: Vec::new(),
            stale: 0,
        };
        gdb.expect_ok("Qqemu.PhyMemMode:1", "for physical addresses")?;
        gdb.threads = gdb.list_threads()?;
        gdb.places = gdb.describe()?;
        Ok(gdb)
    }

    /// How many vCPUs there are.
    pub(super) fn vcpus(&self) -> usize {
        self.threads.len()
    }

    /// Where a register is found.
    ///
    /// # Errors
    /// [`GdbError::NoRegister`].
    pub(super) fn place(&self, name: &'static str) -> Result<RegisterPlace, GdbError> {
        let found = self.places.iter().find(|register| register.name == name);
        let found = found.filter(|register| (8..=64).contains(&register.bits));
        let register = found.ok_or(GdbError::NoRegister(name))?;
        let bytes = register.bits.div_ceil(8) as usize;
        Ok(RegisterPlace { number: register.number, bytes })
    }

    /// Stops the guest that runs.
    ///
    /// # Errors
    /// [`GdbError::Silent`] after `longest`: the guest runs on then.
    pub(super) fn stop(&mut self, longest: Duration) -> Result<(), GdbError> {
        let until = Instant::now() + longest;
        self.send_raw(b"\x03")?;
        let stopped = self.until_stopped(until);
        if let Err(GdbError::Silent(_)) = stopped {
            // QEMU takes what it is sent in order: it lets the guest go as soon as it has stopped it.
            self.stale += 1;
            self.resume()?;
            return Err(GdbError::Silent(longest));
        }
        stopped
    }

    fn until_stopped(&mut self, until: Instant) -> Result<(), GdbError> {
        loop {
            let packet = self.packet(until)?;
            match packet.first() {
                Some(b'T' | b'S') if self.stale > 0 => self.stale -= 1,
                Some(b'T' | b'S') => return Ok(()),
                Some(b'W' | b'X') => return Err(GdbError::Closed),
                _ => return Err(answer("to stop", &packet)),
            }
        }
    }

    /// Has a vCPU of the guest that stands execute one instruction.
    ///
    /// # Errors
    /// What the peer says.
    pub(super) fn step(&mut self, vcpu: usize) -> Result<(), GdbError> {
        let thread = self.threads.get(vcpu).ok_or(GdbError::NoVcpu(vcpu))?;
        self.send(format!("vCont;s:{thread}").as_bytes())?;
        self.until_stopped(Instant::now() + PATIENCE)
    }

    /// Lets the guest go.
    ///
    /// # Errors
    /// The connection failed.
    pub(super) fn resume(&mut self) -> Result<(), GdbError> {
        self.send(b"c")
    }

    /// Lets the guest that stands go and ends the conversation; addresses mean to the next client what
    /// they usually do.
    ///
    /// # Errors
    /// What the peer says.
    pub(super) fn detach(&mut self) -> Result<(), GdbError> {
        self.expect_ok("Qqemu.PhyMemMode:0", "for virtual addresses")?;
        // The process to detach from; QEMU numbers them from 1, one for each kind of processor.
        self.expect_ok("D;1", "to detach")
    }

    /// The values of registers of a vCPU.
    ///
    /// # Errors
    /// What the peer says.
    pub(super) fn registers(
        &mut self,
        vcpu: usize,
        places: &[RegisterPlace],
    ) -> Result<Vec<u64>, GdbError> {
        let thread = self.threads.get(vcpu).ok_or(GdbError::NoVcpu(vcpu))?;
        self.expect_ok(&format!("Hg{thread}"), "for a vCPU")?;
        let order = self.order;
        let mut values = Vec::with_capacity(places.len());
        let questions = places.iter().map(|place| format!("p{:x}", place.number).into_bytes());
        self.pipeline(questions, |index, reply| {
            let bytes = unhex(reply).filter(|bytes| bytes.len() == places[index].bytes);
            let bytes = bytes.ok_or_else(|| answer("for a register", reply))?;
            let mut value = [0; 8];
            let place = match order {
                ByteOrder::Little => &mut value[..bytes.len()],
                ByteOrder::Big => &mut value[8 - bytes.len()..],
            };
            place.copy_from_slice(&bytes);
            values.push(order.u64(value));
            Ok(())
        })
        .map_err(|(_, error)| error)?;
        Ok(values)
    }

    /// Writes guest-physical memory, in order, so that translated code notices.
    ///
    /// # Errors
    /// The index of the first write that is not known to be done, and why.
    pub(super) fn write<'w>(
        &mut self,
        writes: impl Iterator<Item = (u64, &'w [u8])>,
    ) -> Result<(), (usize, GdbError)> {
        let mut owners = Vec::new();
        let mut packets = Vec::new();
        for (index, (at, bytes)) in writes.enumerate() {
            for (number, chunk) in bytes.chunks(WRITE_LIMIT).enumerate() {
                let at = at.wrapping_add((number * WRITE_LIMIT) as u64);
                let mut packet = format!("M{at:x},{:x}:", chunk.len()).into_bytes();
                hex(chunk, &mut packet);
                owners.push(index);
                packets.push(packet);
            }
        }
        self.pipeline(packets.into_iter(), |_, reply| match reply {
            b"OK" => Ok(()),
            other => Err(answer("to write memory", other)),
        })
        .map_err(|(packet, error)| (owners.get(packet).copied().unwrap_or(0), error))
    }

    /// Sends questions ahead of their answers, which `take` is given in order.
    fn pipeline(
        &mut self,
        questions: impl Iterator<Item = Vec<u8>>,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), GdbError>,
    ) -> Result<(), (usize, GdbError)> {
        let mut questions = questions.peekable();
        let (mut sent, mut answered) = (0, 0);
        while questions.peek().is_some() || answered < sent {
            let mut batch = Vec::new();
            // Half the depth at once: many packets a system call, and the peer is never idle.
            if sent - answered <= DEPTH / 2 {
                while sent - answered < DEPTH
                    && let Some(question) = questions.next()
                {
                    frame(&question, &mut batch);
                    sent += 1;
                }
            }
            if !batch.is_empty() {
                self.send_raw(&batch).map_err(|error| (answered, error))?;
            }
            let reply = self.reply().map_err(|error| (answered, error))?;
            take(answered, &reply).map_err(|error| (answered, error))?;
            answered += 1;
        }
        Ok(())
    }

    fn list_threads(&mut self) -> Result<Vec<String>, GdbError> {
        let mut threads = Vec::new();
        let mut reply = self.ask("qfThreadInfo")?;
        while let Some(list) = reply.strip_prefix(b"m") {
            for id in list.split(|byte| *byte == b',') {
                let id = std::str::from_utf8(id).ok().filter(|id| is_thread(id));
                threads.push(id.ok_or_else(|| answer("for vCPUs", &reply))?.to_owned());
            }
            if threads.len() > THREADS_LIMIT {
                break;
            }
            reply = self.ask("qsThreadInfo")?;
        }
        if reply != b"l" || threads.is_empty() {
            return Err(answer("for vCPUs", &reply));
        }
        Ok(threads)
    }

    /// Reads the target description with everything that it includes.
    fn describe(&mut self) -> Result<Vec<xml::Register>, GdbError> {
        let mut files = vec!["target.xml".to_owned()];
        let mut registers = xml::Registers::default();
        let mut next = 0;
        while let Some(file) = files.get(next) {
            let text = self.read_file(&file.clone())?;
            files.extend(registers.read(&text));
            next += 1;
            if files.len() > FILES_LIMIT {
                return Err(GdbError::NotAPacket("an endless target description"));
            }
        }
        Ok(registers.list)
    }

    fn read_file(&mut self, name: &str) -> Result<String, GdbError> {
        let mut text = Vec::new();
        loop {
            let question = format!("qXfer:features:read:{name}:{:x},7f0", text.len());
            let reply = self.ask(&question)?;
            let (more, part) = match reply.split_first() {
                Some((b'm', part)) if !part.is_empty() => (true, part),
                Some((b'l', part)) => (false, part),
                _ => return Err(answer("for its target description", &reply)),
            };
            unescape(part, &mut text);
            if text.len() > TEXT_LIMIT {
                return Err(GdbError::NotAPacket("an endless target description"));
            }
            if !more {
                return String::from_utf8(text)
                    .map_err(|_| GdbError::NotAPacket("a target description that is not text"));
            }
        }
    }

    fn expect_ok(&mut self, question: &str, what: &'static str) -> Result<(), GdbError> {
        let reply = self.ask(question)?;
        if reply == b"OK" { Ok(()) } else { Err(answer(what, &reply)) }
    }

    fn ask(&mut self, question: &str) -> Result<Vec<u8>, GdbError> {
        self.send(question.as_bytes())?;
        self.reply()
    }

    /// The next packet that is no announcement of a stop.
    fn reply(&mut self) -> Result<Vec<u8>, GdbError> {
        let until = Instant::now() + PATIENCE;
        for _ in 0..STOPS_BETWEEN {
            let packet = self.packet(until)?;
            match packet.first() {
                Some(b'T') => {}
                Some(b'W' | b'X') => return Err(GdbError::Closed),
                _ => return Ok(packet),
            }
        }
        Err(GdbError::NotAPacket("stop after stop instead of an answer"))
    }

    fn packet(&mut self, until: Instant) -> Result<Vec<u8>, GdbError> {
        loop {
            match self.byte(until)? {
                b'+' => {}
                b'$' => break,
                b'-' => return Err(GdbError::NotAPacket("a request to send a packet again")),
                _ => return Err(GdbError::NotAPacket("bytes between packets")),
            }
        }
        let mut packet = Vec::new();
        loop {
            match self.byte(until)? {
                b'#' => break,
                _ if packet.len() >= PACKET_LIMIT => {
                    return Err(GdbError::NotAPacket("an endless packet"));
                }
                byte => packet.push(byte),
            }
        }
        let digits = [self.byte(until)?, self.byte(until)?];
        let found = unhex(&digits).ok_or(GdbError::NotAPacket("a checksum that is no number"))?[0];
        let computed = packet::checksum(&packet);
        if found == computed { Ok(packet) } else { Err(GdbError::Checksum { found, computed }) }
    }

    fn byte(&mut self, until: Instant) -> Result<u8, GdbError> {
        if self.at == self.buffer.len() {
            self.fill(until)?;
        }
        let byte = self.buffer[self.at];
        self.at += 1;
        Ok(byte)
    }

    fn fill(&mut self, until: Instant) -> Result<(), GdbError> {
        let begun = Instant::now();
        self.buffer.resize(1 << 14, 0);
        self.at = self.buffer.len();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(GdbError::Silent(begun.elapsed()));
            }
            self.stream.set_read_timeout(Some(left)).map_err(GdbError::Connection)?;
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Err(GdbError::Closed),
                Ok(length) => {
                    self.buffer.truncate(length);
                    self.at = 0;
                    return Ok(());
                }
                Err(error) if is_momentary(&error) => {}
                Err(error) => return Err(broken(error)),
            }
        }
    }

    fn send(&mut self, packet: &[u8]) -> Result<(), GdbError> {
        let mut framed = Vec::with_capacity(packet.len() + 4);
        frame(packet, &mut framed);
        self.send_raw(&framed)
    }

    fn send_raw(&mut self, bytes: &[u8]) -> Result<(), GdbError> {
        self.stream.set_write_timeout(Some(PATIENCE)).map_err(GdbError::Connection)?;
        self.stream.write_all(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => GdbError::Silent(PATIENCE),
            _ => broken(error),
        })
    }
}

fn is_momentary(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

fn broken(error: io::Error) -> GdbError {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    match error.kind() {
        BrokenPipe | ConnectionReset => GdbError::Closed,
        _ => GdbError::Connection(error),
    }
}

/// The beginning of an answer that was not expected.
fn answer(question: &'static str, reply: &[u8]) -> GdbError {
    let shown = &reply[..reply.len().min(64)];
    GdbError::Answer { question, reply: String::from_utf8_lossy(shown).into_owned() }
}

#[cfg(test)]
mod tests;
