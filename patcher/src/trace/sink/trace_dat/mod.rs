//! `trace.dat`, which trace-cmd and KernelShark open.
//!
//! Version 6 of the format, as `trace-cmd.dat.v6(5)` describes it: the events of the kernel's tracers
//! `function` and `function_graph`, and each CPU's ring in pages. Integers are in the guest's byte
//! order. The file tells first what is known last: the names of all functions, and how long each
//! CPU's ring is. So the rings are spooled, one file a CPU, and put together at the end; in memory are
//! 64 KiB a CPU and the names, of which there is a bound.

use std::io::{self, Read, Seek, Write};

use rustc_hash::{FxHashMap, FxHashSet};

use super::{Beginning, Event, Name, Sink, no_such_cpu};
use crate::arch::ByteOrder;

mod formats;
mod pages;
#[cfg(test)]
mod tests;

use formats::{FORMATS, encode};
use pages::{PAGE, Pages};

/// Names that are kept at most; functions beyond that are shown by their addresses.
const MAX_NAMES: usize = 1 << 20;

/// Tasks whose names are kept at most.
const MAX_TASKS: usize = 1 << 18;

const HEADER_PAGE: &str = "\
\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;
\tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;
\tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;
\tfield: char data;\toffset:16;\tsize:4080;\tsigned:1;
";

const HEADER_EVENT: &str = "\
# compressed entry header
\ttype_len    :    5 bits
\ttime_delta  :   27 bits
\tarray       :   32 bits

\tpadding     : type == 29
\ttime_extend : type == 30
\ttime_stamp : type == 31
\tdata max type_len  == 28
";

/// Numbers of what may follow the tables (`trace-cmd.dat.v6(5)`).
const OPTION_UNAME: u16 = 5;
const OPTION_CPU_COUNT: u16 = 8;

/// What a CPU's ring is kept in until the end.
pub trait Spool: Read + Write + Seek {}

impl<S: Read + Write + Seek> Spool for S {}

/// A `trace.dat`. It is written at the end, as a whole.
pub struct TraceDat<W, S> {
    out: W,
    new_spool: Box<dyn FnMut() -> io::Result<S> + Send>,
    order: ByteOrder,
    uname: String,
    cpus: Vec<Pages<S>>,
    /// Numbers of names that are in `symbols`.
    known: FxHashSet<u64>,
    /// Names by where they begin.
    symbols: FxHashMap<u64, Box<str>>,
    /// Names of tasks by their numbers.
    tasks: FxHashMap<u32, Box<str>>,
    /// Room for an event's fields.
    fields: Vec<u8>,
}

impl<W: Write, S: Spool> TraceDat<W, S> {
    /// A file to be written to `out`. Rings are kept in what `new_spool` gives, which is called once
    /// a CPU.
    pub fn new(out: W, new_spool: impl FnMut() -> io::Result<S> + Send + 'static) -> Self {
        Self {
            out,
            new_spool: Box::new(new_spool),
            order: ByteOrder::Little,
            uname: String::new(),
            cpus: Vec::new(),
            known: FxHashSet::default(),
            symbols: FxHashMap::default(),
            tasks: FxHashMap::default(),
            fields: Vec::new(),
        }
    }

    fn learn(&mut self, name: Name<'_>) {
        if self.known.contains(&name.id) || self.symbols.len() >= MAX_NAMES {
            return;
        }
        // There may be more numbers than names.
        if self.known.len() >= MAX_NAMES {
            self.known.clear();
        }
        self.known.insert(name.id);
        let begins = name.address.wrapping_sub(name.offset);
        self.symbols.entry(begins).or_insert_with(|| name.text.into());
    }

    /// Everything in front of the rings, which have these lengths. It ends where a page begins.
    fn head(&self, lengths: &[u64]) -> Vec<u8> {
        let mut head = Head { bytes: Vec::new(), order: self.order };
        head.bytes.extend_from_slice(b"\x17\x08\x44tracing6\0");
        head.bytes.push(u8::from(self.order == ByteOrder::Big));
        head.bytes.push(8);
        head.u32(PAGE as u32);
        for (title, text) in [("header_page", HEADER_PAGE), ("header_event", HEADER_EVENT)] {
            head.bytes.extend_from_slice(title.as_bytes());
            head.bytes.push(0);
            head.u64(text.len() as u64);
            head.bytes.extend_from_slice(text.as_bytes());
        }
        head.u32(FORMATS.len() as u32);
        for format in FORMATS {
            head.u64(format.len() as u64);
            head.bytes.extend_from_slice(format.as_bytes());
        }
        // No systems of events beside ftrace's own.
        head.u32(0);
        let kallsyms = self.kallsyms();
        head.u32(kallsyms.len() as u32);
        head.bytes.extend_from_slice(kallsyms.as_bytes());
        // No formats of trace_printk.
        head.u32(0);
        let tasks = self.comms();
        head.u64(tasks.len() as u64);
        head.bytes.extend_from_slice(tasks.as_bytes());
        head.u32(lengths.len() as u32);
        head.bytes.extend_from_slice(b"options  \0");
        head.option(OPTION_UNAME, |head| {
            head.bytes.extend_from_slice(self.uname.as_bytes());
            head.bytes.push(0);
        });
        head.option(OPTION_CPU_COUNT, |head| head.u32(lengths.len() as u32));
        head.u16(0);
        head.bytes.extend_from_slice(b"flyrecord\0");
        let rings = (head.bytes.len() + 16 * lengths.len()).next_multiple_of(PAGE);
        let mut at = rings as u64;
        for length in lengths {
            head.u64(at);
            head.u64(*length);
            at += length;
        }
        head.bytes.resize(rings, 0);
        head.bytes
    }

    /// Names in the form of /proc/kallsyms, ascending. Behind the last there is one more, as readers
    /// take a name to reach to the next.
    fn kallsyms(&self) -> String {
        let mut symbols: Vec<(u64, &str)> =
            self.symbols.iter().map(|(at, name)| (*at, &**name)).collect();
        symbols.push((u64::MAX, "end"));
        symbols.sort_unstable();
        let line = |(at, name): &(u64, &str)| match name.split_once(" [") {
            Some((name, module)) => {
                format!("{at:016x} t {}\t[{}]\n", word(name), word(module.trim_end_matches(']')))
            }
            None => format!("{at:016x} T {}\n", word(name)),
        };
        symbols.iter().map(line).collect()
    }

    /// Names of tasks in the form of tracefs' `saved_cmdlines`.
    fn comms(&self) -> String {
        let mut tasks: Vec<(u32, &str)> =
            self.tasks.iter().map(|(pid, name)| (*pid, &**name)).collect();
        tasks.sort_unstable();
        tasks.iter().map(|(pid, name)| format!("{pid} {}\n", line(name))).collect()
    }
}

/// A name as one word: who reads it splits lines at white space, and takes what is in brackets for a
/// module.
fn word(name: &str) -> String {
    let fits = |c: char| c.is_ascii_graphic() && c != '[' && c != ']';
    name.chars().map(|c| if fits(c) { c } else { '?' }).collect()
}

/// A name that stays on its line.
fn line(name: &str) -> String {
    name.chars().map(|c| if c == ' ' || c.is_ascii_graphic() { c } else { '?' }).collect()
}

impl<W: Write, S: Spool> Sink for TraceDat<W, S> {
    fn begin(&mut self, beginning: &Beginning<'_>) -> io::Result<()> {
        self.order = beginning.order;
        self.uname = format!("Linux guest {} {}", beginning.release, beginning.architecture);
        let cpus = (0..beginning.cpus).map(|_| Ok(Pages::new((self.new_spool)()?, self.order)));
        self.cpus = cpus.collect::<io::Result<_>>()?;
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        self.learn(event.function);
        self.learn(event.caller);
        let pid = event.task.map_or(0, |task| task.pid);
        if let Some(comm) = event.task.and_then(|task| task.comm)
            && self.tasks.get(&pid).is_none_or(|known| **known != *comm)
            && (self.tasks.len() < MAX_TASKS || self.tasks.contains_key(&pid))
        {
            self.tasks.insert(pid, comm.into());
        }
        self.fields.clear();
        encode(event, self.order, &mut self.fields);
        let cpus = self.cpus.len();
        let Some(cpu) = self.cpus.get_mut(usize::from(event.cpu)) else {
            return Err(no_such_cpu(event.cpu, cpus));
        };
        cpu.push(event.time_ns, event.missed, &self.fields)
    }

    fn flush(&mut self) -> io::Result<()> {
        // Nobody can read a ring that is not in its place.
        Ok(())
    }

    fn end(&mut self, _written: u64, _entries: u64) -> io::Result<()> {
        let cpus = std::mem::take(&mut self.cpus).into_iter().map(Pages::finish);
        let mut cpus: Vec<(S, u64)> = cpus.collect::<io::Result<_>>()?;
        let lengths: Vec<u64> = cpus.iter().map(|(_, length)| *length).collect();
        self.out.write_all(&self.head(&lengths))?;
        // Each spool is given up once it is copied.
        for (mut spool, length) in cpus.drain(..) {
            spool.rewind()?;
            let copied = io::copy(&mut spool.take(length), &mut self.out)?;
            if copied != length {
                let what = "what was kept of a CPU's events until the end is no longer there";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
            }
        }
        self.out.flush()
    }
}

/// What stands in front of the rings.
struct Head {
    bytes: Vec<u8>,
    order: ByteOrder,
}

impl Head {
    fn u16(&mut self, value: u16) {
        self.bytes.extend_from_slice(&self.order.bytes_of_u16(value));
    }

    fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&self.order.bytes_of_u32(value));
    }

    fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&self.order.bytes(value));
    }

    /// An option: its number, the length of its data, and these.
    fn option(&mut self, number: u16, data: impl FnOnce(&mut Self)) {
        self.u16(number);
        let length_at = self.bytes.len();
        self.u32(0);
        data(self);
        let length = (self.bytes.len() - length_at - 4) as u32;
        self.bytes[length_at..length_at + 4].copy_from_slice(&self.order.bytes_of_u32(length));
    }
}
