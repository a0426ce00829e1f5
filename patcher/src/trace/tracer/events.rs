//! What records become: events with names, times and tasks.

use crate::trace::context::Context;
use crate::trace::graph::{Entered, Graph, Left, TaskKey};
use crate::trace::names::Names;
use crate::trace::ring::RawRecord;
use crate::trace::select::WantedValues;
use crate::trace::sink::{Event, EventKind, Task, Values};
use crate::trace::tasks::Tasks;
use crate::trace::values::Encoder;

use super::values::{Format, Memory};

/// A record of which it is known what function it is of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Told<'r> {
    pub record: &'r RawRecord,
    /// Index of the function.
    pub index: usize,
    /// Whether it is of a return.
    pub is_return: bool,
}

impl<'r> Told<'r> {
    /// `None` if it is of no function that was ever traced.
    pub fn of(record: &'r RawRecord, names: &Names<'_>) -> Option<Self> {
        let (index, is_return) = names.record_of(record)?;
        Some(Self { record, index, is_return })
    }

    /// The event that it is for a client with these open calls, or that traces calls only: none if the
    /// client is not told of it.
    pub fn event<'n>(
        &self,
        graph: Option<&mut Graph>,
        names: &'n mut Names<'_>,
        tasks: &'n mut Tasks<'_>,
        ticks: Ticks,
    ) -> Option<Event<'n>> {
        let Self { record, index, is_return } = *self;
        let time_ns = ticks.nanoseconds(record.time);
        let Left { kind, parent } = match (graph, is_return) {
            (None, true) => return None,
            (None, false) => Left { kind: EventKind::Call, parent: Some(record.parent) },
            (Some(graph), true) => {
                let task = TaskKey::new(tasks.pid(record), record.cpu);
                graph.leave(task, index as u32, time_ns, record.parent)?
            }
            (Some(graph), false) => {
                let task = TaskKey::new(tasks.pid(record), record.cpu);
                let (_, caller) = names.of(Some(record.parent), index);
                let begins = caller.address.wrapping_sub(caller.offset);
                // Where new tasks begin, on each architecture; for kernel threads and others.
                let is_first = caller.text.starts_with("ret_from_fork");
                let entered = Entered {
                    function: index as u32,
                    time_ns,
                    parent: record.parent,
                    caller: names.index_of_beginning(begins),
                    is_first,
                };
                Left { kind: graph.enter(task, entered)?, parent: Some(record.parent) }
            }
        };
        let (task, context) = context_of(record, parent, is_return, tasks);
        let (function, caller) = names.of(parent, index);
        Some(Event {
            time_ns,
            kind,
            cpu: record.cpu,
            function,
            caller,
            task,
            context,
            values: Values::NONE,
            missed: 0,
        })
    }
}

impl Told<'_> {
    /// The values of an event that it became, for a client that wants these.
    pub fn values<'e>(
        &self,
        event: &Event<'_>,
        wanted: WantedValues,
        format: Option<&Format>,
        memory: Memory<'_>,
        encoder: &'e mut Encoder,
    ) -> Values<'e> {
        let Some(format) = format else { return Values::NONE };
        match event.kind {
            EventKind::Return(back) if wanted.returned => {
                match format.returned(back.value, memory, encoder) {
                    true => encoder.values(),
                    false => Values::NONE,
                }
            }
            EventKind::Call | EventKind::Entry { .. } if wanted.arguments => {
                format.arguments(self.record.arguments.as_deref(), memory, encoder);
                encoder.values()
            }
            _ => Values::NONE,
        }
    }
}

/// What a record tells of its task. A return's tells less: whether interrupts were off is what it was when the
/// call was made, and nothing is known of the context if that is not.
fn context_of<'n>(
    record: &RawRecord,
    parent: Option<u64>,
    is_return: bool,
    tasks: &'n mut Tasks<'_>,
) -> (Option<Task<'n>>, Option<Context>) {
    let (task, context) = tasks.of(parent.unwrap_or_default(), record.task);
    (task, context.filter(|_| !is_return || parent.is_some()))
}

/// Turns ticks of the guest's clock into nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticks {
    /// Nanoseconds in 2³² ticks.
    scale: u128,
}

impl Ticks {
    pub fn new(hz: u64) -> Self {
        Self { scale: (1_000_000_000_u128 << 32) / u128::from(hz.max(1)) }
    }

    pub fn nanoseconds(self, ticks: u64) -> u64 {
        u64::try_from((u128::from(ticks) * self.scale) >> 32).unwrap_or(u64::MAX)
    }
}
