//! The lines of tracefs with the `function_graph` tracer.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::super::context::UNKNOWN;
use super::{Beginning, Event, EventKind, Return, Returned, Values, decimal};

#[cfg(test)]
mod tests;

/// Columns that tracefs shows when it is told to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GraphColumns {
    /// The time of each line's event (`funcgraph-abstime`).
    pub absolute_time: bool,
    /// Its task (`funcgraph-proc`).
    pub task: bool,
}

/// Makes lines of events.
///
/// The formats are those of `kernel/trace/trace_functions_graph.c` as of 6.12. Whether a call is shown on one
/// line with its return is told by the next event of its CPU, so a call is held until there is one, and
/// what comes behind it as long.
#[derive(Debug)]
pub struct GraphLines {
    columns: GraphColumns,
    /// How wide CPUs' numbers are.
    cpu_width: usize,
    interrupts: (u64, u64),
    /// Whether a call that takes long is shown before it is known whether it calls others.
    is_live: bool,
    cpus: Vec<Cpu>,
    held: VecDeque<Held>,
    /// Events that have left `held`.
    passed: u64,
    functions: FxHashMap<u64, Arc<str>>,
    comms: FxHashMap<u32, Box<str>>,
}

/// What is known of a CPU.
#[derive(Debug, Clone)]
struct Cpu {
    /// The task of the last line.
    task: Option<u32>,
    /// By depth, the functions whose calls were shown on lines of their own.
    entered: [u64; DEPTHS],
    /// The call that is held until the next event comes, by its number among all events.
    waiting: Option<u64>,
}

#[derive(Debug)]
struct Held {
    time_ns: u64,
    cpu: u16,
    pid: u32,
    missed: u64,
    address: u64,
    function: Arc<str>,
    kind: EventKind,
    /// Of a call: how long it took if it called nothing, once that is known.
    leaf: Leaf,
    /// Of a call its arguments, and of a return the value, if they are told.
    values: Option<Box<[u8]>>,
    /// What a call has returned that called nothing.
    returned: Option<Box<[u8]>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaf {
    NotYetKnown,
    No,
    Yes(u64),
}

/// `FTRACE_RETFUNC_DEPTH`: how many levels are remembered.
const DEPTHS: usize = 50;

/// Events that are held at most, and for how long where somebody looks on.
const MAX_HELD: usize = 4096;
const MAX_WAIT_NS: u64 = 1_000_000_000;

/// Names of functions, and of tasks, that are kept at most.
const MAX_NAMES: usize = 1 << 18;

/// What [`Cpu::entered`] holds where no call was shown.
const NOTHING: u64 = 0;

impl GraphLines {
    /// Lines with these columns; for somebody who looks on if `is_live`.
    pub fn new(columns: GraphColumns, is_live: bool) -> Self {
        Self {
            columns,
            cpu_width: 1,
            interrupts: (0, 0),
            is_live,
            cpus: Vec::new(),
            held: VecDeque::new(),
            passed: 0,
            functions: FxHashMap::default(),
            comms: FxHashMap::default(),
        }
    }

    /// Takes note of what a trace is of, and appends the names of the columns.
    pub fn begin(&mut self, beginning: &Beginning<'_>, text: &mut Vec<u8>) {
        self.cpu_width = beginning.cpus.saturating_sub(1).to_string().len();
        self.interrupts = beginning.interrupts;
        let cpu = Cpu { task: None, entered: [NOTHING; DEPTHS], waiting: None };
        self.cpus = vec![cpu; beginning.cpus];
        let GraphColumns { absolute_time, task } = self.columns;
        text.extend_from_slice(b"# tracer: function_graph\n#\n");
        let mut line = |parts: [(&str, bool); 4]| {
            text.push(b'#');
            let shown = parts.into_iter().filter(|(_, is_shown)| *is_shown);
            shown.for_each(|(part, _)| text.extend_from_slice(part.as_bytes()));
            text.push(b'\n');
        };
        line([
            ("     TIME       ", absolute_time),
            (" CPU", true),
            ("  TASK/PID       ", task),
            ("  DURATION                  FUNCTION CALLS", true),
        ]);
        line([
            ("      |         ", absolute_time),
            (" |  ", true),
            ("   |    |        ", task),
            ("   |   |                     |   |   |   |", true),
        ]);
    }

    /// Takes an event of a CPU that the guest has, and appends the lines that can be told by it.
    pub fn event(&mut self, event: &Event<'_>, text: &mut Vec<u8>) {
        let pid = self.learn(event);
        let Some(cpu) = self.cpus.get_mut(usize::from(event.cpu)) else { return };
        let address = event.function.address;
        if let Some(number) = cpu.waiting.take() {
            let call = &mut self.held[(number - self.passed) as usize];
            match event.kind {
                EventKind::Return(Return { duration_ns: Some(duration), .. })
                    if (call.pid, call.address) == (pid, address) && event.missed == 0 =>
                {
                    call.leaf = Leaf::Yes(duration);
                    call.returned = event.values.bytes().map(Into::into);
                    return self.show(text);
                }
                _ => call.leaf = Leaf::No,
            }
        }
        let is_call = event.kind.is_call();
        if is_call {
            cpu.waiting = Some(self.passed + self.held.len() as u64);
        }
        let function = match self.functions.get(&event.function.id) {
            Some(known) => Arc::clone(known),
            None => {
                if self.functions.len() >= MAX_NAMES {
                    self.functions.clear();
                }
                let name: Arc<str> = event.function.text.into();
                self.functions.insert(event.function.id, Arc::clone(&name));
                name
            }
        };
        self.held.push_back(Held {
            time_ns: event.time_ns,
            cpu: event.cpu,
            pid,
            missed: event.missed,
            address,
            function,
            kind: event.kind,
            leaf: if is_call { Leaf::NotYetKnown } else { Leaf::No },
            values: event.values.bytes().map(Into::into),
            returned: None,
        });
        self.show(text);
    }

    /// Appends what is still held.
    pub fn end(&mut self, text: &mut Vec<u8>) {
        for call in &mut self.held {
            if call.leaf == Leaf::NotYetKnown {
                call.leaf = Leaf::No;
            }
        }
        self.cpus.iter_mut().for_each(|cpu| cpu.waiting = None);
        self.show(text);
    }

    /// Takes note of the name of an event's task, and tells its number.
    fn learn(&mut self, event: &Event<'_>) -> u32 {
        let Some(task) = event.task else { return 0 };
        if let Some(comm) = task.comm
            && self.comms.get(&task.pid).is_none_or(|known| **known != *comm)
        {
            if self.comms.len() >= MAX_NAMES {
                self.comms.clear();
            }
            self.comms.insert(task.pid, comm.into());
        }
        task.pid
    }

    /// Appends the lines of all events that nothing has to be waited for.
    fn show(&mut self, text: &mut Vec<u8>) {
        let newest = self.held.back().map_or(0, |last| last.time_ns);
        while let Some(first) = self.held.front() {
            let waits = first.leaf == Leaf::NotYetKnown;
            let is_old = self.held.len() > MAX_HELD
                || self.is_live && newest.saturating_sub(first.time_ns) > MAX_WAIT_NS;
            if waits && !is_old {
                return;
            }
            if waits {
                self.cpus[usize::from(first.cpu)].waiting = None;
            }
            let Some(event) = self.held.pop_front() else { return };
            self.passed += 1;
            self.lines(&event, text);
        }
    }

    fn lines(&mut self, event: &Held, text: &mut Vec<u8>) {
        if event.missed > 0 {
            // "CPU:%d [LOST %lu EVENTS]", as of `print_trace_line`.
            text.extend_from_slice(b"CPU:");
            decimal(text, u64::from(event.cpu), 0, b' ');
            text.extend_from_slice(b" [LOST ");
            decimal(text, event.missed, 0, b' ');
            text.extend_from_slice(b" EVENTS]\n");
        }
        self.switch(event, text);
        let depth = event.kind.depth().unwrap_or(0);
        let entered = |depth: u32| (depth as usize) < DEPTHS;
        match (event.kind, event.leaf) {
            (EventKind::Return(back), _) => {
                let mut is_known = true;
                if entered(depth) {
                    let entered = &mut self.cpus[usize::from(event.cpu)].entered[depth as usize];
                    is_known = std::mem::replace(entered, NOTHING) == event.address;
                }
                self.prologue(event, text);
                duration(text, back.duration_ns);
                indent(text, depth);
                text.push(b'}');
                let value = returned(event.values.as_deref());
                if !is_known || value.is_some() {
                    text.extend_from_slice(b" /* ");
                    text.extend_from_slice(event.function.as_bytes());
                    if let Some(value) = value {
                        // A Vec takes what it is given.
                        let _ = write!(text, " ret={value}");
                    }
                    text.extend_from_slice(b" */");
                }
                text.push(b'\n');
                self.interrupt(event, b"<==========", text);
            }
            (_, Leaf::Yes(took)) => {
                self.interrupt(event, b"==========>", text);
                if entered(depth) {
                    self.cpus[usize::from(event.cpu)].entered[depth as usize] = NOTHING;
                }
                self.prologue(event, text);
                duration(text, Some(took));
                indent(text, depth);
                call(text, event);
                text.push(b';');
                if let Some(value) = returned(event.returned.as_deref()) {
                    let _ = write!(text, " /* ret={value} */");
                }
                text.push(b'\n');
                self.interrupt(event, b"<==========", text);
            }
            _ => {
                self.interrupt(event, b"==========>", text);
                if entered(depth) {
                    self.cpus[usize::from(event.cpu)].entered[depth as usize] = event.address;
                }
                self.prologue(event, text);
                duration(text, None);
                indent(text, depth);
                call(text, event);
                text.extend_from_slice(b" {\n");
            }
        }
    }

    /// Tells that a CPU's events are another task's from here on.
    fn switch(&mut self, event: &Held, text: &mut Vec<u8>) {
        let before = self.cpus[usize::from(event.cpu)].task.replace(event.pid);
        let Some(before) = before.filter(|before| *before != event.pid) else { return };
        const RULE: &[u8] = b" ------------------------------------------\n";
        text.extend_from_slice(RULE);
        self.cpu(event.cpu, text);
        self.task(before, text);
        text.extend_from_slice(b" => ");
        self.task(event.pid, text);
        text.push(b'\n');
        text.extend_from_slice(RULE);
        text.push(b'\n');
    }

    /// The columns in front of the duration.
    fn prologue(&self, event: &Held, text: &mut Vec<u8>) {
        if self.columns.absolute_time {
            decimal(text, event.time_ns / 1_000_000_000, 5, b' ');
            text.push(b'.');
            decimal(text, event.time_ns % 1_000_000_000 / 1000, 6, b'0');
            text.extend_from_slice(b" |  ");
        }
        self.cpu(event.cpu, text);
        if self.columns.task {
            self.task(event.pid, text);
            text.extend_from_slice(b" | ");
        }
    }

    fn cpu(&self, cpu: u16, text: &mut Vec<u8>) {
        text.push(b' ');
        decimal(text, u64::from(cpu), self.cpu_width, b' ');
        text.extend_from_slice(b") ");
    }

    /// A task's name, of which seven letters are shown, and its number, in the middle of 14 columns.
    fn task(&self, pid: u32, text: &mut Vec<u8>) {
        let comm = match pid {
            0 => "<idle>",
            _ => self.comms.get(&pid).map_or(UNKNOWN, |comm| comm),
        };
        let shown = format!("{comm:.7}-{pid}");
        let spaces = 14_usize.saturating_sub(shown.len());
        text.resize(text.len() + spaces / 2, b' ');
        text.extend_from_slice(shown.as_bytes());
        text.resize(text.len() + spaces - spaces / 2, b' ');
    }

    /// The mark of a function that interrupts enter.
    fn interrupt(&self, event: &Held, mark: &[u8], text: &mut Vec<u8>) {
        let (begin, end) = self.interrupts;
        if (begin..end).contains(&event.address) {
            self.prologue(event, text);
            text.extend_from_slice(b"  ");
            text.extend_from_slice(mark);
            text.extend_from_slice(b" |\n");
        }
    }
}

/// Appends a call: its function, and between parentheses its arguments as far as they are told
/// (`funcgraph-args`).
fn call(text: &mut Vec<u8>, event: &Held) {
    text.extend_from_slice(event.function.as_bytes());
    // A Vec takes what it is given.
    let _ = match &event.values {
        Some(values) => write!(text, "({})", Values::new(values)),
        None => text.write_all(b"()"),
    };
}

/// What a call has returned, if that is told (`funcgraph-retval`).
fn returned(values: Option<&[u8]>) -> Option<Returned<'_>> {
    let (_, value) = Values::new(values?).iter().next()?;
    Some(Returned(value))
}

/// The column of durations: in microseconds, with a mark in front of long ones (`trace_find_mark`).
fn duration(text: &mut Vec<u8>, nanoseconds: Option<u64>) {
    let Some(nanoseconds) = nanoseconds else {
        return text.extend_from_slice(b"              |  ");
    };
    let marks = [
        (1_000_000_000, b'$'),
        (100_000_000, b'@'),
        (10_000_000, b'*'),
        (1_000_000, b'#'),
        (100_000, b'!'),
        (10_000, b'+'),
    ];
    let mark = marks.into_iter().find(|(longer, _)| nanoseconds > *longer);
    text.extend([mark.map_or(b' ', |(_, mark)| mark), b' ']);
    let begin = text.len();
    decimal(text, nanoseconds / 1000, 0, b' ');
    // With as many digits behind the point as make seven in all.
    let whole = text.len() - begin;
    if whole < 7 {
        text.push(b'.');
        decimal(text, nanoseconds % 1000, 3, b'0');
        text.truncate(text.len() - 3 + 3.min(7 - whole));
    }
    let width = text.len() - begin;
    text.extend_from_slice(b" us ");
    text.resize(text.len() + 8_usize.saturating_sub(width), b' ');
    text.extend_from_slice(b"|  ");
}

/// Two blanks a level. The kernel itself shows no more than fifty levels.
fn indent(text: &mut Vec<u8>, depth: u32) {
    text.resize(text.len() + 2 * depth.min(512) as usize, b' ');
}
