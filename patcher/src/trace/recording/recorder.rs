//! Writes a recording.

use std::io::{self, Write};

use rustc_hash::FxHashMap;

use super::block::{Kind, append};
use super::{
    CALL_BYTES, MAGIC, MAX_BLOCK, MAX_KNOWN, MAX_KNOWN_BYTES, MAX_MORE, MAX_NAME, MORE, VALUES,
    VERSION,
};
use crate::arch::ByteOrder;
use crate::trace::sink::{Beginning, Context, Event, EventKind, Name, Sink, Task, Tracer};

/// Events are written out when they have this many bytes. With gaps in front of all of them and the longest
/// behind them they fit a block.
const CALLS_BYTES: usize = 8192 * CALL_BYTES;

const _: () =
    assert!(CALLS_BYTES / CALL_BYTES * 12 + CALLS_BYTES + CALL_BYTES + MAX_MORE <= MAX_BLOCK);

/// Bytes of names, or of tasks, that are written out without waiting for more calls. With the longest
/// name behind them they fit a block.
const NAMES: usize = MAX_BLOCK / 2;

/// A recording that is written.
pub struct Recorder<W> {
    out: W,
    /// Blocks that are ready to be written.
    ready: Vec<u8>,
    calls: Vec<u8>,
    /// How many those are.
    count: u32,
    /// Numbers of calls in front of which events are missing, and how many.
    gaps: Vec<(u32, u64)>,
    names: Known<u64, ()>,
    tasks: Known<u32, Option<Box<str>>>,
}

/// What has a number in the file, by what it is told from others.
struct Known<K, V> {
    numbers: FxHashMap<K, (u32, V)>,
    next: u32,
    bytes: usize,
    /// Of the next block: whether all earlier numbers are void, and the content.
    forget: bool,
    content: Vec<u8>,
}

impl<K, V> Known<K, V> {
    fn new() -> Self {
        let numbers = FxHashMap::default();
        Self { numbers, next: 0, bytes: 0, forget: false, content: Vec::new() }
    }

    /// Whether there may be no room for what two more need.
    fn is_full(&self) -> bool {
        self.next as usize + 2 > MAX_KNOWN || self.bytes + 2 * MAX_NAME > MAX_KNOWN_BYTES
    }

    fn clear(&mut self) {
        self.numbers.clear();
        (self.next, self.bytes, self.forget) = (0, 0, true);
    }

    /// The number of what is added now.
    fn add(&mut self, text: &str) -> u32 {
        self.bytes += text.len();
        self.next += 1;
        self.next - 1
    }

    /// Moves what is new to a block.
    fn pass_on(&mut self, kind: Kind, ready: &mut Vec<u8>) {
        if !self.content.is_empty() || self.forget {
            self.content.insert(0, u8::from(self.forget));
            append(ready, kind, &self.content);
            self.content.clear();
            self.forget = false;
        }
    }
}

impl<W: Write> Recorder<W> {
    /// A recording to be written to `out`, which is only appended to.
    pub fn new(out: W) -> Self {
        Self {
            out,
            ready: Vec::new(),
            calls: Vec::with_capacity(CALLS_BYTES),
            count: 0,
            gaps: Vec::new(),
            names: Known::new(),
            tasks: Known::new(),
        }
    }

    fn name(&mut self, name: Name<'_>) -> u32 {
        let known = &mut self.names;
        if let Some((number, ())) = known.numbers.get(&name.id) {
            return *number;
        }
        let text = cut(name.text);
        let number = known.add(text);
        known.numbers.insert(name.id, (number, ()));
        known.content.extend_from_slice(&name.address.to_le_bytes());
        known.content.extend_from_slice(&name.offset.to_le_bytes());
        known.content.extend_from_slice(&(text.len() as u16).to_le_bytes());
        known.content.extend_from_slice(text.as_bytes());
        number
    }

    fn task(&mut self, task: Task<'_>) -> u32 {
        let known = &mut self.tasks;
        if let Some((number, comm)) = known.numbers.get(&task.pid)
            && comm.as_deref() == task.comm
        {
            return *number;
        }
        let text = task.comm.map(cut);
        let number = known.add(text.unwrap_or_default());
        known.numbers.insert(task.pid, (number, task.comm.map(Into::into)));
        known.content.extend_from_slice(&task.pid.to_le_bytes());
        let length = text.map_or(u16::MAX, |text| text.len() as u16);
        known.content.extend_from_slice(&length.to_le_bytes());
        known.content.extend_from_slice(text.unwrap_or_default().as_bytes());
        number
    }

    /// Moves everything to blocks: names in front of the calls that refer to them.
    fn pass_on(&mut self) {
        self.names.pass_on(Kind::Names, &mut self.ready);
        self.tasks.pass_on(Kind::Tasks, &mut self.ready);
        if !self.calls.is_empty() {
            let mut content = Vec::with_capacity(4 + self.gaps.len() * 12 + self.calls.len());
            content.extend_from_slice(&(self.gaps.len() as u32).to_le_bytes());
            for (call, count) in self.gaps.drain(..) {
                content.extend_from_slice(&call.to_le_bytes());
                content.extend_from_slice(&count.to_le_bytes());
            }
            content.append(&mut self.calls);
            self.count = 0;
            append(&mut self.ready, Kind::Calls, &content);
        }
    }

    fn write_out(&mut self) -> io::Result<()> {
        self.pass_on();
        let result = self.out.write_all(&self.ready);
        self.ready.clear();
        result
    }
}

/// As much of a name as is kept.
fn cut(text: &str) -> &str {
    let mut length = text.len().min(MAX_NAME);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    &text[..length]
}

/// A context in one byte. The highest bit says that there is one.
fn flags(context: Context) -> u8 {
    let flags = [
        context.irqs_off,
        context.bottom_halves_off,
        context.need_resched,
        context.hardirq,
        context.softirq,
        context.nmi,
    ];
    (0..).zip(flags).fold(0x80, |all, (bit, flag)| all | u8::from(flag) << bit)
}

impl<W: Write> Sink for Recorder<W> {
    fn begin(&mut self, beginning: &Beginning<'_>) -> io::Result<()> {
        self.ready.extend_from_slice(&MAGIC);
        self.ready.extend_from_slice(&VERSION.to_le_bytes());
        let mut content = Vec::new();
        content.push(u8::from(beginning.order == ByteOrder::Big));
        content.push(u8::from(beginning.contexts));
        content.push(u8::from(beginning.tracer == Tracer::Graph));
        content.extend_from_slice(&beginning.interrupts.0.to_le_bytes());
        content.extend_from_slice(&beginning.interrupts.1.to_le_bytes());
        content.extend_from_slice(&(beginning.cpus as u16).to_le_bytes());
        for text in [cut(beginning.release), cut(beginning.architecture)] {
            content.extend_from_slice(&(text.len() as u16).to_le_bytes());
            content.extend_from_slice(text.as_bytes());
        }
        append(&mut self.ready, Kind::Begin, &content);
        self.flush()
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        // What is void must not be referred to by calls that come behind.
        if self.names.is_full() || self.tasks.is_full() {
            self.pass_on();
            self.names.clear();
            self.tasks.clear();
        }
        let (function, caller) = (self.name(event.function), self.name(event.caller));
        let task = event.task.map_or(u32::MAX, |task| self.task(task));
        if event.missed > 0 {
            self.gaps.push((self.count, event.missed));
        }
        let mut call = [0; CALL_BYTES];
        call[..8].copy_from_slice(&event.time_ns.to_le_bytes());
        call[8..12].copy_from_slice(&function.to_le_bytes());
        call[12..16].copy_from_slice(&caller.to_le_bytes());
        call[16..20].copy_from_slice(&task.to_le_bytes());
        call[20..22].copy_from_slice(&event.cpu.to_le_bytes());
        call[22] = event.context.map_or(0, flags);
        call[23] = event.context.map_or(0, |context| context.preempt_depth);
        let values = event.values.bytes();
        let has_more = event.kind != EventKind::Call || values.is_some();
        if has_more {
            call[22] |= MORE;
        }
        self.calls.extend_from_slice(&call);
        if has_more {
            self.calls.push(event.kind.tag() | values.map_or(0, |_| VALUES));
            let length_at = self.calls.len();
            self.calls.extend_from_slice(&[0; 2]);
            event.kind.encode(&mut self.calls);
            self.calls.extend_from_slice(values.unwrap_or_default());
            let length = (self.calls.len() - length_at - 2) as u16;
            self.calls[length_at..length_at + 2].copy_from_slice(&length.to_le_bytes());
        }
        self.count += 1;
        let is_full = self.calls.len() >= CALLS_BYTES
            || self.names.content.len() >= NAMES
            || self.tasks.content.len() >= NAMES;
        if is_full { self.write_out() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_out()?;
        self.out.flush()
    }

    fn end(&mut self, written: u64, entries: u64) -> io::Result<()> {
        self.pass_on();
        let content = [written.to_le_bytes(), entries.to_le_bytes()].concat();
        append(&mut self.ready, Kind::End, &content);
        self.flush()
    }
}
