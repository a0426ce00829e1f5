//! Where events go once they have names and an order.

use std::io::{self, Write};
use std::ops::Deref;

use crate::arch::ByteOrder;
use crate::kernel::Kernel;

mod ftrace;
mod graph_text;
mod json;
mod perfetto;
mod trace_dat;

pub use ftrace::FtraceText;
pub use graph_text::GraphColumns;
pub use json::JsonLines;
pub use perfetto::Perfetto;
pub use trace_dat::TraceDat;

pub use super::context::{Context, Task};
pub use super::kind::{EventKind, Return};
pub use super::values::{Returned, Value, Values};

/// The name of a function, and a number that stands for nothing else in the same trace. A name may
/// have several numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name<'a> {
    /// The number.
    pub id: u64,
    /// The name.
    pub text: &'a str,
    /// The address that is meant: of the pad of a function that is called, as in ftrace's own
    /// records, and the one that is returned to in its caller.
    pub address: u64,
    /// How far that is behind the beginning of what has the name, in bytes.
    pub offset: u64,
}

impl Deref for Name<'_> {
    type Target = str;
    fn deref(&self) -> &str {
        self.text
    }
}

/// One traced call, or the return from one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// Nanoseconds since the guest's time-stamp clock read zero.
    pub time_ns: u64,
    /// Which of the two it is.
    pub kind: EventKind,
    /// On which CPU it was.
    pub cpu: u16,
    /// The function that was called.
    pub function: Name<'a>,
    /// The function that called it. Of a return whose call was lost it is not known: its address is 0.
    pub caller: Name<'a>,
    /// The task that made the call; `None` where records do not tell.
    pub task: Option<Task<'a>>,
    /// What the CPU was in the middle of; `None` where records do not tell.
    pub context: Option<Context>,
    /// Of a call its arguments, and of a return the value, if there is one: where they are asked for.
    pub values: Values<'a>,
    /// How many events of this CPU are missing right before this one.
    pub missed: u64,
}

/// What a trace tells of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tracer {
    /// Calls.
    #[default]
    Function,
    /// Calls and returns.
    Graph,
}

/// What a sink is told of a trace as it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beginning<'a> {
    /// What its events are.
    pub tracer: Tracer,
    /// Where the kernel's code that interrupts enter begins and ends, in which functions may be traced;
    /// both 0 if that is not known.
    pub interrupts: (u64, u64),
    /// How many CPUs the guest has.
    pub cpus: usize,
    /// Whether its events have a [`Context`].
    pub contexts: bool,
    /// The kernel's release.
    pub release: &'a str,
    /// The guest's architecture, as `uname -m` has it.
    pub architecture: &'a str,
    /// How the guest's integers lie in memory.
    pub order: ByteOrder,
}

impl<'a> Beginning<'a> {
    /// Of a trace of a guest with so many CPUs that runs this kernel.
    #[must_use]
    pub fn of(kernel: &'a Kernel, tracer: Tracer, cpus: usize, contexts: bool) -> Self {
        Self {
            tracer,
            interrupts: interrupt_entries(kernel),
            cpus,
            contexts,
            release: kernel.release(),
            architecture: kernel.arch().name(),
            order: kernel.arch().byte_order(),
        }
    }
}

/// Where the code that interrupts enter begins and ends (`__irqentry_text_start` and `_end`); both 0 in
/// a kernel that does not name it.
#[must_use]
pub fn interrupt_entries(kernel: &Kernel) -> (u64, u64) {
    let address = |name| kernel.symbols().address(name).map(|address| address.0);
    let range = address("__irqentry_text_start").zip(address("__irqentry_text_end"));
    range.unwrap_or_default()
}

/// Takes events in the order of their time.
pub trait Sink {
    /// Begins a trace.
    ///
    /// # Errors
    /// What writing says.
    fn begin(&mut self, beginning: &Beginning<'_>) -> io::Result<()>;

    /// Takes one event.
    ///
    /// # Errors
    /// What writing says. [`io::ErrorKind::WouldBlock`] means that there is no room for this one:
    /// it is counted as dropped, and the next one is tried.
    fn event(&mut self, event: &Event<'_>) -> io::Result<()>;

    /// Lets a reader see everything up to now.
    ///
    /// # Errors
    /// What writing says.
    fn flush(&mut self) -> io::Result<()>;

    /// Ends the trace: `written` events are in it, out of `entries` that there were.
    ///
    /// # Errors
    /// What writing says.
    fn end(&mut self, written: u64, entries: u64) -> io::Result<()>;
}

/// Bytes are written out when this many have come together.
const GATHERED: usize = 256 << 10;

/// What an event adds to them at most, or nearly.
const EVENT: usize = 4096;

/// Bytes that are gathered, to be written out many at a time.
struct Gathered<W> {
    out: W,
    bytes: Vec<u8>,
}

impl<W: Write> Gathered<W> {
    fn new(out: W) -> Self {
        Self { out, bytes: Vec::with_capacity(GATHERED + EVENT) }
    }

    /// Writes out what there is if that is much.
    fn write_many(&mut self) -> io::Result<()> {
        if self.bytes.len() >= GATHERED { self.write_out() } else { Ok(()) }
    }

    /// What can't be written is not kept.
    fn write_out(&mut self) -> io::Result<()> {
        let result = self.out.write_all(&self.bytes);
        self.bytes.clear();
        result
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_out()?;
        self.out.flush()
    }
}

/// An event can't be taken, as the guest has no such CPU.
fn no_such_cpu(cpu: u16, cpus: usize) -> io::Error {
    let what = format!("an event of CPU {cpu}, of a guest with {cpus} CPUs");
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Appends a decimal number at least `width` wide; `write!` would take most of the time that an
/// event costs.
fn decimal(line: &mut Vec<u8>, mut value: u64, width: usize, pad: u8) {
    let mut digits = [0_u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    let len = digits.len() - at;
    line.resize(line.len() + width.saturating_sub(len), pad);
    line.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The beginning of the trace that [`EVENTS`] are in.
    pub const BEGINNING: Beginning<'_> = Beginning {
        tracer: Tracer::Function,
        interrupts: (0, 0),
        cpus: 13,
        contexts: true,
        release: "6.1",
        architecture: "x86_64",
        order: ByteOrder::Little,
    };

    const fn name(id: u64, text: &'static str, address: u64, offset: u64) -> Name<'static> {
        Name { id, text, address, offset }
    }

    /// One of which all is known, and one of which little is, from a caller without a name.
    pub const EVENTS: [Event<'static>; 2] = [
        Event {
            time_ns: 7_754_083_999,
            kind: EventKind::Call,
            cpu: 1,
            function: name(0, "vfs_read", 0xffff_ffff_8100_0104, 4),
            caller: name(1, "ksys_read", 0xffff_ffff_8100_024c, 0x4c),
            task: Some(Task { pid: 94, comm: Some("busybox") }),
            context: Some(Context {
                irqs_off: true,
                bottom_halves_off: false,
                need_resched: false,
                hardirq: true,
                softirq: false,
                nmi: false,
                preempt_depth: 1,
            }),
            values: Values::NONE,
            missed: 0,
        },
        Event {
            time_ns: 123_456_000_001_000,
            kind: EventKind::Call,
            cpu: 12,
            function: name(2, "f", 0xffff_ffff_8100_0300, 0),
            caller: name(3, "0xffffffffc0001234", 0xffff_ffff_c000_1234, 0),
            task: None,
            context: None,
            values: Values::NONE,
            missed: 3,
        },
    ];
}
