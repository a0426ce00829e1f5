//! Traces for Perfetto (ui.perfetto.dev).
//!
//! Every call is an instant on the track of its task, with its caller and what the CPU was in the
//! middle of as annotations; in a trace that tells of returns it is a slice, with what was returned. Beside these there is a track for each CPU, with a slice for each stretch
//! of calls of one task: whom the trace saw there, which need not be all that ran.

use std::io::{self, Write};

use prost::Message;
use rustc_hash::FxHashMap;

use super::{
    Beginning, Event, EventKind, Gathered, Name, Return, Returned, Sink, Task, Value, no_such_cpu,
};

mod schema;
#[cfg(test)]
mod tests;

use schema::{
    DebugAnnotation, EventType, InternedData, InternedName, ProcessDescriptor, ThreadDescriptor,
    TracePacket, TrackDescriptor, TrackEvent,
};

/// Functions and callers that have numbers at a time, and tasks that are remembered.
const MAX_KNOWN: usize = 1 << 18;

/// What stands in front of a packet's length: a file is one message `Trace`, of which packets are the
/// field 1.
const PACKET: u8 = 1 << 3 | 2;

/// All packets are one sequence.
const SEQUENCE: u32 = 1;

/// `SEQ_INCREMENTAL_STATE_CLEARED`: all numbers of names are void.
const CLEARED: u32 = 1;

/// `SEQ_NEEDS_INCREMENTAL_STATE`: names are told by their numbers.
const NEEDS_STATE: u32 = 2;

/// The process that all tasks are shown in, as it is not known to which they belong. No task has this
/// number: it is one more than the most that a kernel gives (`PID_MAX_LIMIT`).
const PROCESS: i32 = (4 << 20) + 1;

/// Numbers of tracks: of the guest, of all CPUs together, and the first of each CPU's, each CPU's idle
/// task's and each task's.
const GUEST_TRACK: u64 = 1;
const CPUS_TRACK: u64 = 2;
const CPU_TRACKS: u64 = 1 << 32;
const IDLE_TRACKS: u64 = 2 << 32;
const TASK_TRACKS: u64 = 3 << 32;

/// Names of annotations, by their numbers less one.
const ANNOTATIONS: [&str; 6] =
    ["caller", "cpu", "flags", "preempt_depth", "missed_before", "returned"];
const CALLER: u64 = 1;
const CPU: u64 = 2;
const FLAGS: u64 = 3;
const PREEMPT_DEPTH: u64 = 4;
const MISSED: u64 = 5;
const RETURNED: u64 = 6;

/// Slices that are open on a track at most: events may come from a file that holds anything.
const MAX_OPEN: usize = 1024;

/// A trace for Perfetto. It can be written to a pipe, and what there is of one that was cut opens too.
pub struct Perfetto<W> {
    packets: Gathered<W>,
    /// Whether the next packet has to say that no names have numbers.
    cleared: bool,
    functions: FxHashMap<u64, u64>,
    callers: FxHashMap<u64, u64>,
    /// Names under which tasks have tracks.
    tasks: FxHashMap<u32, String>,
    /// How deep the slices are that are open, by track.
    open: FxHashMap<u64, Vec<u32>>,
    cpus: Vec<Cpu>,
}

/// What is going on on a CPU.
#[derive(Default)]
struct Cpu {
    has_idle_track: bool,
    /// The task that was seen last, and when.
    seen: Option<(u32, u64)>,
}

impl<W: Write> Perfetto<W> {
    /// A trace to be written to `out`, which is only appended to.
    pub fn new(out: W) -> Self {
        Self {
            packets: Gathered::new(out),
            cleared: true,
            functions: FxHashMap::default(),
            callers: FxHashMap::default(),
            tasks: FxHashMap::default(),
            open: FxHashMap::default(),
            cpus: Vec::new(),
        }
    }

    fn packet(&mut self, packet: TracePacket) {
        let packet = TracePacket { trusted_packet_sequence_id: SEQUENCE, ..packet };
        let bytes = &mut self.packets.bytes;
        bytes.push(PACKET);
        packet.encode_length_delimited(bytes).expect("a Vec has room");
    }

    fn track(&mut self, track: TrackDescriptor) {
        self.packet(TracePacket { track_descriptor: Some(track), ..TracePacket::default() });
    }

    fn track_event(&mut self, time: u64, event: TrackEvent, new: Option<InternedData>) {
        self.packet(TracePacket {
            timestamp: Some(time),
            track_event: Some(event),
            interned_data: new,
            sequence_flags: NEEDS_STATE,
            ..TracePacket::default()
        });
    }

    /// Voids the numbers of all names if there may be no room for more.
    fn make_room(&mut self) {
        self.cleared |= self.functions.len().max(self.callers.len()) >= MAX_KNOWN;
        if self.tasks.len() >= MAX_KNOWN {
            // Their tracks stay; they are only told of again.
            self.tasks.clear();
            self.open.clear();
        }
        if !std::mem::take(&mut self.cleared) {
            return;
        }
        self.functions.clear();
        self.callers.clear();
        let names =
            (1..).zip(ANNOTATIONS).map(|(iid, name)| InternedName { iid, name: name.into() });
        let interned =
            InternedData { debug_annotation_names: names.collect(), ..InternedData::default() };
        self.packet(TracePacket {
            interned_data: Some(interned),
            sequence_flags: CLEARED,
            ..TracePacket::default()
        });
    }

    /// The track of a task, which is made if there is none or the task has another name now.
    fn task_track(&mut self, cpu: u16, task: Option<Task<'_>>) -> u64 {
        let Some(task) = task.filter(|task| task.pid != 0) else {
            let uuid = IDLE_TRACKS + u64::from(cpu);
            if !std::mem::replace(&mut self.cpus[usize::from(cpu)].has_idle_track, true) {
                let name = match task {
                    Some(_) => format!("swapper/{cpu} (idle)"),
                    None => format!("CPU {cpu}"),
                };
                let parent_uuid = GUEST_TRACK;
                self.track(TrackDescriptor { uuid, name, parent_uuid, ..Default::default() });
            }
            return uuid;
        };
        let uuid = TASK_TRACKS + u64::from(task.pid);
        if self.tasks.get(&task.pid).is_none_or(|name| name != task.shown()) {
            let thread_name = task.shown().to_owned();
            self.tasks.insert(task.pid, thread_name.clone());
            let tid = i64::from(task.pid);
            let thread = Some(ThreadDescriptor { pid: PROCESS, tid, thread_name });
            let parent_uuid = GUEST_TRACK;
            self.track(TrackDescriptor { uuid, thread, parent_uuid, ..Default::default() });
        }
        uuid
    }

    /// Takes note that a task was seen on a CPU: its stretch there goes on or begins.
    fn see(&mut self, cpu: u16, task: Task<'_>, time: u64, missed: u64) {
        let seen = self.cpus[usize::from(cpu)].seen.replace((task.pid, time));
        if seen.is_some_and(|(pid, _)| pid == task.pid && missed == 0) {
            return;
        }
        if let Some((_, last)) = seen {
            self.stretch(cpu, last, EventType::SliceEnd, String::new());
        }
        let name = format!("{} {}", task.shown(), task.pid);
        self.stretch(cpu, time, EventType::SliceBegin, name);
    }

    /// Ends what is open on a track as deep as that or deeper.
    fn close(&mut self, track_uuid: u64, depth: u32, time: u64) {
        while self
            .open
            .get_mut(&track_uuid)
            .is_some_and(|open| open.pop_if(|at| *at >= depth).is_some())
        {
            let kind = EventType::SliceEnd as i32;
            self.track_event(
                time,
                TrackEvent { r#type: kind, track_uuid, ..Default::default() },
                None,
            );
        }
    }

    /// Ends a call's slice. One that was not begun, as its call was not told of, is begun with it, if it is
    /// known when that was; `begin` tells of it.
    fn end_slice(
        &mut self,
        time: u64,
        (back, returned): (Return, DebugAnnotation),
        mut begin: TrackEvent,
        new: Option<InternedData>,
    ) {
        let track_uuid = begin.track_uuid;
        self.close(track_uuid, back.depth.saturating_add(1), time);
        let open = self.open.get_mut(&track_uuid);
        let is_open = open.is_some_and(|open| open.pop_if(|at| *at == back.depth).is_some());
        match back.duration_ns {
            None if !is_open => {
                begin.debug_annotations.push(returned);
                return self.track_event(time, begin, new);
            }
            Some(duration) if !is_open => {
                begin.r#type = EventType::SliceBegin as i32;
                self.track_event(time.saturating_sub(duration), begin, new);
            }
            // Names that are told of for the first time must not be lost.
            _ if new.is_some() => self.packet(TracePacket {
                interned_data: new,
                sequence_flags: NEEDS_STATE,
                ..TracePacket::default()
            }),
            _ => {}
        }
        let end = TrackEvent {
            debug_annotations: vec![returned],
            r#type: EventType::SliceEnd as i32,
            track_uuid,
            ..TrackEvent::default()
        };
        self.track_event(time, end, None);
    }

    fn stretch(&mut self, cpu: u16, time: u64, kind: EventType, name: String) {
        let track_uuid = CPU_TRACKS + u64::from(cpu);
        let event = TrackEvent { r#type: kind as i32, track_uuid, name, ..TrackEvent::default() };
        self.track_event(time, event, None);
    }
}

/// The number of a name, and the name itself if it has none yet.
fn number(known: &mut FxHashMap<u64, u64>, name: Name<'_>) -> (u64, Vec<InternedName>) {
    let next = known.len() as u64 + 1;
    let iid = *known.entry(name.id).or_insert(next);
    let new = (iid == next).then(|| InternedName { iid, name: name.text.to_owned() });
    (iid, new.into_iter().collect())
}

fn number_of(name_iid: u64, value: u64) -> DebugAnnotation {
    DebugAnnotation { name_iid, uint_value: Some(value), ..DebugAnnotation::default() }
}

/// What a call has returned: an error is a negative number, and everything else may be anything.
fn returned(value: u64) -> DebugAnnotation {
    const MAX_ERRNO: i64 = 4095;
    let signed = value.cast_signed();
    let is_error = (-MAX_ERRNO..0).contains(&signed);
    DebugAnnotation {
        name_iid: RETURNED,
        uint_value: (!is_error).then_some(value),
        int_value: is_error.then_some(signed),
        ..DebugAnnotation::default()
    }
}

/// An argument of a call.
fn argument(name: &str, value: Value<'_>) -> DebugAnnotation {
    DebugAnnotation { name: Some(format!("args.{name}")), ..annotation(value) }
}

/// What a call has returned, by its type.
fn typed(value: Returned<'_>) -> DebugAnnotation {
    let annotation = match value.error_name() {
        Some(_) => {
            DebugAnnotation { string_value: Some(value.to_string()), ..DebugAnnotation::default() }
        }
        None => annotation(value.0),
    };
    DebugAnnotation { name_iid: RETURNED, ..annotation }
}

fn annotation(value: Value<'_>) -> DebugAnnotation {
    let none = DebugAnnotation::default();
    match value {
        Value::Signed(value) => DebugAnnotation { int_value: Some(value), ..none },
        Value::Unsigned(value) => DebugAnnotation { uint_value: Some(value), ..none },
        Value::Word(word) | Value::Pointer(word) => {
            DebugAnnotation { pointer_value: Some(word), ..none }
        }
        other => DebugAnnotation { string_value: Some(other.to_string()), ..none },
    }
}

impl<W: Write> Sink for Perfetto<W> {
    fn begin(&mut self, beginning: &Beginning<'_>) -> io::Result<()> {
        self.cpus = (0..beginning.cpus).map(|_| Cpu::default()).collect();
        self.make_room();
        let process_name = format!("Linux {} {}", beginning.release, beginning.architecture);
        let process = Some(ProcessDescriptor { pid: PROCESS, process_name });
        self.track(TrackDescriptor { uuid: GUEST_TRACK, process, ..Default::default() });
        let name = "CPUs, by the tasks that calls were seen of".to_owned();
        self.track(TrackDescriptor { uuid: CPUS_TRACK, name, ..Default::default() });
        for cpu in 0..beginning.cpus as u64 {
            let (uuid, parent_uuid) = (CPU_TRACKS + cpu, CPUS_TRACK);
            let name = format!("CPU {cpu}");
            self.track(TrackDescriptor { uuid, name, parent_uuid, ..Default::default() });
        }
        self.flush()
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        if usize::from(event.cpu) >= self.cpus.len() {
            return Err(no_such_cpu(event.cpu, self.cpus.len()));
        }
        self.make_room();
        let track_uuid = self.task_track(event.cpu, event.task);
        if let Some(task) = event.task {
            self.see(event.cpu, task, event.time_ns, event.missed);
        }
        let (name_iid, event_names) = number(&mut self.functions, event.function);
        let (caller, debug_annotation_string_values) = number(&mut self.callers, event.caller);
        let mut debug_annotations = vec![
            DebugAnnotation {
                name_iid: CALLER,
                string_value_iid: Some(caller),
                ..DebugAnnotation::default()
            },
            number_of(CPU, u64::from(event.cpu)),
        ];
        if let Some(context) = event.context {
            let letters = context.letters().into_iter().map(char::from).collect();
            debug_annotations.push(DebugAnnotation {
                name_iid: FLAGS,
                string_value: Some(letters),
                ..DebugAnnotation::default()
            });
            debug_annotations.push(number_of(PREEMPT_DEPTH, u64::from(context.preempt_depth)));
        }
        if event.kind.is_call() {
            debug_annotations
                .extend(event.values.iter().map(|(name, value)| argument(name, value)));
        }
        if event.missed > 0 {
            debug_annotations.push(number_of(MISSED, event.missed));
        }
        let is_new = !event_names.is_empty() || !debug_annotation_string_values.is_empty();
        let new = is_new.then(|| InternedData {
            event_names,
            debug_annotation_string_values,
            ..InternedData::default()
        });
        let mut begin = TrackEvent {
            debug_annotations,
            r#type: EventType::Instant as i32,
            name_iid,
            track_uuid,
            name: String::new(),
        };
        match event.kind {
            EventKind::Call => self.track_event(event.time_ns, begin, new),
            EventKind::Entry { depth } => {
                self.close(track_uuid, depth, event.time_ns);
                let open = self.open.entry(track_uuid).or_default();
                if open.len() < MAX_OPEN {
                    open.push(depth);
                    begin.r#type = EventType::SliceBegin as i32;
                }
                self.track_event(event.time_ns, begin, new);
            }
            EventKind::Return(back) => {
                let value = event.values.iter().next().map(|(_, value)| Returned(value));
                let returned = value.map_or_else(|| returned(back.value), typed);
                self.end_slice(event.time_ns, (back, returned), begin, new)
            }
        }
        self.packets.write_many()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.packets.flush()
    }

    fn end(&mut self, _written: u64, _entries: u64) -> io::Result<()> {
        for cpu in 0..self.cpus.len() {
            if let Some((_, last)) = self.cpus[cpu].seen.take() {
                self.stretch(cpu as u16, last, EventType::SliceEnd, String::new());
            }
        }
        self.flush()
    }
}
