//! The flight recorder: a client whose records nobody reads while they come. They stay in the rings, which
//! overwrite themselves, until it is asked what is there: the last calls of each CPU.
//!
//! What is held is copied in one go, put in order by time, and given out piece by piece, by itself: beside
//! it the other clients get what they always do.

use std::collections::VecDeque;
use std::io;
use std::vec::IntoIter;

use rustc_hash::FxHashMap;

use super::events::Told;
use super::{ClientId, Finished, Summary, Tracer, memory, read_ring};
use crate::hook::Hooks;
use crate::region::Part;
use crate::trace::client::Client;
use crate::trace::graph::TaskKey;
use crate::trace::ring::{RawRecord, RingReader};
use crate::trace::sink::{Event, EventKind, Return};

/// What a client that overwrites held at one moment.
#[derive(Debug)]
pub struct Held {
    client: ClientId,
    /// In order of time.
    records: IntoIter<Kept>,
    missing: Missing,
    /// What is made of the records.
    account: Client<()>,
    readers: Vec<RingReader>,
}

/// A record, and what it is of.
#[derive(Debug)]
struct Kept {
    record: RawRecord,
    /// Index of the function.
    index: usize,
    is_return: bool,
}

impl Kept {
    fn told(&self) -> Told<'_> {
        Told { record: &self.record, index: self.index, is_return: self.is_return }
    }
}

/// Indices of the records, by CPU, in front of which others are missing: first ones first.
#[derive(Debug, Clone, Default)]
struct Missing(Vec<VecDeque<u64>>);

impl Missing {
    /// Whether records are missing between the last one of its CPU that was asked for and this one.
    fn before(&mut self, record: &RawRecord) -> bool {
        let Some(missing) = self.0.get_mut(usize::from(record.cpu)) else { return false };
        let before = missing.partition_point(|index| *index <= record.index);
        missing.drain(..before).count() > 0
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(VecDeque::is_empty)
    }
}

/// Where the records of a task are, as far as they are there.
struct Seen {
    first: u64,
    /// The one CPU, if it is one.
    cpu: Option<u16>,
    /// Functions that it has returned from without having called them, in that order.
    returned: Vec<u32>,
}

impl Held {
    /// Records that were begun and not finished: a moment later they may be.
    #[must_use]
    pub fn unwritten(&self) -> usize {
        self.readers.iter().map(RingReader::pending).sum()
    }

    /// How many records are still to be given out.
    #[must_use]
    pub fn left(&self) -> usize {
        self.records.len()
    }

    /// Why it is given to nobody any more.
    #[must_use]
    pub fn failure(&self) -> Option<&io::Error> {
        self.account.failure.as_ref()
    }

    /// Gives up what was not given out yet; it is counted as if there had been no room for it.
    pub fn give_up(&mut self) {
        self.account.leave_out(self.records.len() as u64);
        self.records = Vec::new().into_iter();
    }
}

impl<'m, S> Tracer<'m, S> {
    /// What a client that overwrites holds now. It goes on recording as if it had not been asked. `None` for
    /// any other.
    pub fn hold(&mut self, hooks: &Hooks<'m>, client: ClientId) -> Option<Held> {
        self.learn_stubs(hooks);
        let slot = self.slot(client)?;
        let mut account = self.clients[slot].as_ref().filter(|client| client.overwrites)?.anew();
        let window = self.machine.region(Part::Rings);
        // All heads first, so that they are of about the same moment.
        let mut readers: Vec<RingReader> = (0..self.rings.cpus())
            .map(|cpu| (cpu, account.range(cpu)))
            .map(|(cpu, own)| RingReader::over(&window.memory, self.rings, cpu, self.order, own))
            .collect();
        let mut records = Vec::new();
        let mut missing = Missing::default();
        // From when on there is every record of every CPU.
        let mut whole_since = 0;
        for (cpu, reader) in readers.iter_mut().enumerate() {
            let before = records.len();
            read_ring(reader, &window.memory, cpu, &self.names, &mut records);
            account.note_losses(cpu, reader);
            let ends: VecDeque<u64> = reader.losses().iter().map(|lost| lost.end).collect();
            if let Some(end) = ends.back() {
                let next = records[before..].iter().find(|record| record.index >= *end);
                whole_since = next.map_or(u64::MAX, |record| record.time).max(whole_since);
            }
            missing.0.push(ends);
        }
        self.tasks.meet_last(&records, self.machine.ram());
        let (names, members) = (&self.names, &self.members);
        let mut records: Vec<Kept> = records
            .into_iter()
            .filter_map(|record| {
                let (index, is_return) = names.record_of(&record)?;
                Some(Kept { record, index, is_return })
            })
            .filter(|kept| members[kept.index].heard_by & 1 << slot != 0)
            .collect();
        // Stable: records of one time stay in the order of their ring.
        records.sort_by_key(|kept| kept.record.time);
        if !missing.is_empty() {
            self.assume_calls(&mut account, &records, missing.clone(), whole_since);
        }
        Some(Held { client, records: records.into_iter(), missing, account, readers })
    }

    /// Finds what calls tasks were in already when the first of their records was written that is still there:
    /// those that they return from later. So calls are shown as deep as they were.
    ///
    /// The rings go back for different times. Of a task that was seen on one CPU only all is taken to be
    /// there since its first record, of others if that is not older than what all rings hold. What other
    /// tasks return from may have been called in between, where nobody knows how deep that was.
    fn assume_calls(
        &mut self,
        account: &mut Client<()>,
        records: &[Kept],
        mut missing: Missing,
        whole_since: u64,
    ) {
        let Some(graph) = &mut account.graph else { return };
        let mut all = graph.of_everything();
        all.lose();
        let mut tasks: FxHashMap<TaskKey, Seen> = FxHashMap::default();
        for kept in records {
            let Kept { record, index, .. } = kept;
            if missing.before(record) {
                all.lose();
            }
            let task = TaskKey::new(self.tasks.pid(record), record.cpu);
            let seen = tasks.entry(task).or_insert_with(|| Seen {
                first: record.time,
                cpu: Some(record.cpu),
                returned: Vec::new(),
            });
            seen.cpu = seen.cpu.filter(|cpu| *cpu == record.cpu);
            let event =
                kept.told().event(Some(&mut all), &mut self.names, &mut self.tasks, self.ticks);
            if let Some(Event {
                kind: EventKind::Return(Return { duration_ns: None, .. }), ..
            }) = event
            {
                seen.returned.push(*index as u32);
            }
        }
        graph.lose();
        for (task, Seen { first, cpu, returned }) in tasks {
            if !returned.is_empty() && (cpu.is_some() || first >= whole_since) {
                graph.assume(task, returned.into_iter().rev());
            }
        }
    }

    /// Gives out what is held, at most so many records, in order of time: to `sink`, or if there is none to
    /// the client's own.
    pub fn give_held(
        &mut self,
        held: &mut Held,
        most: usize,
        sink: Option<&mut S>,
        mut give: impl FnMut(&mut S, &Event<'_>) -> io::Result<()>,
    ) {
        let slot = self.slot(held.client);
        let own = slot.and_then(|slot| self.clients[slot].as_mut());
        let Some(sink) = sink.or(own.map(|client| &mut client.sink)) else {
            return held.give_up();
        };
        let mut give = |(): &mut (), event: &Event<'_>| give(sink, event);
        let Held { records, missing, account, .. } = held;
        let memory = memory(self.kernel, self.machine, &self.prototypes);
        for kept in records.by_ref().take(most) {
            if missing.before(&kept.record)
                && let Some(graph) = &mut account.graph
            {
                graph.lose();
            }
            let graph = account.graph.as_mut();
            let told = kept.told();
            if let Some(event) = told.event(graph, &mut self.names, &mut self.tasks, self.ticks) {
                let format = self.members[kept.index].format.as_deref();
                let encoder = &mut self.encoder;
                let values = told.values(&event, account.values, format, memory, encoder);
                account.give(&kept.record, kept.index, &Event { values, ..event }, &mut give);
            }
        }
    }

    /// What was held, and what became of it.
    #[must_use]
    pub fn summary_of_held(&self, held: &Held) -> Summary {
        held.account.summary(&held.readers, &self.names)
    }

    /// Forgets a client that was removed, of which `held` was the last that it held. `None` if there is no
    /// such client.
    pub fn finish_held(&mut self, held: Held) -> Option<Finished<S>> {
        let of_held = self.summary_of_held(&held);
        let Finished { summary, sink, failure } = self.finish(held.client, |_, _| Ok(()))?;
        let Summary { stops, reverted, without_slot, turned_away, set_back, .. } = summary;
        let summary = Summary { stops, reverted, without_slot, turned_away, set_back, ..of_held };
        Some(Finished { summary, sink, failure: failure.or(held.account.failure) })
    }
}
