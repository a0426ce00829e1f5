//! One of those who trace a guest: which records are its own, and what became of them.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::calls::CallConditions;
use super::counts::Counts;
use super::filter::Filter;
use super::gaps::Gaps;
use super::graph::Graph;
use super::latency::Latencies;
use super::names::Names;
use super::ring::{RawRecord, RingCorrupt, RingReader};
use super::select::WantedValues;
use super::sink::Event;
use crate::hook::Method;
use crate::machine::StopTimes;
use crate::patch::Reverted;

/// Where a client's trace stands.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Events that the client has taken.
    pub events: u64,
    /// Events that it had no room for.
    pub overrun: u64,
    /// Records that came too late to be read, by CPU. Which functions they were of is not known: if
    /// others trace the guest too, they may be theirs.
    pub lost: Vec<u64>,
    /// Of a client that overwrites: records that later ones have taken the place of, by CPU; likewise.
    pub overwritten: Vec<u64>,
    /// Records that were reserved and never written, by CPU; likewise.
    pub unwritten: Vec<u64>,
    /// Events given out behind later ones.
    pub late: u64,
    /// Rings that the guest has spoilt.
    pub corrupt: Vec<RingCorrupt>,
    /// Calls of every function that was called, most first; of a trace with a threshold, returns.
    pub functions: Vec<(Arc<str>, u64)>,
    /// How often a counter of calls, or a part of a histogram, was lower than before, which only the guest can have done.
    pub set_back: u64,
    /// Calls that have not returned, by function, most first.
    pub outstanding: Vec<(Arc<str>, u64)>,
    /// Calls that have returned although no return of theirs was seen.
    pub lost_returns: u64,
    /// Returns of which no call was seen, behind records that were lost.
    pub lost_calls: u64,
    /// Calls of which no return is recorded, since as many as can be were out at the same time. If others
    /// trace returns too, they may be theirs.
    pub without_slot: u64,
    /// Calls that the guest itself has left out, by function, most first. If others trace with the same
    /// filter, these are the same calls.
    pub turned_away: Vec<(Arc<str>, u64)>,
    /// The stops that this client was the reason of.
    pub stops: Vec<StopTimes>,
    /// What disarming found, once it was done.
    pub reverted: Option<Reverted>,
}

impl Summary {
    /// Records that are missing in the trace, where it was not wanted that they are.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.overrun + self.lost.iter().chain(&self.unwritten).sum::<u64>()
    }

    /// Records that there were: those in the trace and those that are missing.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.events + self.dropped() + self.overwritten.iter().sum::<u64>()
    }
}

/// What a tracer keeps of a client.
#[derive(Debug)]
pub(super) struct Client<S> {
    pub id: u64,
    pub sink: S,
    /// Its open calls, if it is given returns.
    pub graph: Option<Graph>,
    /// Which values it is told.
    pub values: WantedValues,
    /// What it has counted, if it counts.
    pub counts: Option<Counts>,
    /// Its records stay in the rings until they are asked for.
    pub overwrites: bool,
    /// The calls of its functions that the guest leaves out.
    pub turned_away: Option<Counts>,
    /// How long calls took, if it measures that.
    pub latencies: Option<Latencies>,
    /// Calls that had found no slot when it began, and until it ended.
    pub slots_missed: Range<u64>,
    /// The records between these indices, by CPU, are its own if they are of its functions.
    from: Heads,
    to: Option<Heads>,
    pub stops: Vec<StopTimes>,
    pub reverted: Option<Reverted>,
    /// Why its sink is given nothing any more.
    pub failure: Option<io::Error>,
    /// Calls by index of the function, or returns where those alone are given out.
    calls: Vec<u64>,
    counts_returns: bool,
    events: u64,
    overrun: u64,
    lost: Vec<u64>,
    /// Slots for more of its records, by CPU.
    continuations: Vec<Continuations>,
    /// Where events are missing, by CPU.
    gaps: Vec<Gaps>,
    late: u64,
    last_time: u64,
    later: Later,
}

/// Where the rings were at some moment, by CPU.
#[derive(Debug, Clone, Default)]
pub(super) struct Heads {
    /// The first slots that were not reserved.
    pub slots: Vec<u64>,
    /// What the guest had counted of slots for more of records.
    continuations: Vec<u64>,
}

impl Heads {
    /// As these readers have last looked.
    pub fn of(readers: &[RingReader]) -> Self {
        Self {
            slots: readers.iter().map(RingReader::head).collect(),
            continuations: readers.iter().map(RingReader::continuations).collect(),
        }
    }
}

/// What became of the slots of a ring that were there for more of records.
#[derive(Debug, Clone, Copy, Default)]
struct Continuations {
    read: u64,
    /// Those that were taken off what was lost.
    lost: u64,
}

/// What a client asks for of modules that are loaded later.
#[derive(Debug, Clone)]
pub(super) struct Later {
    pub filter: Filter,
    pub method: Method,
    /// Whether it is given returns.
    pub returns: bool,
    /// Which values it is told.
    pub values: WantedValues,
    /// Which calls are traced, if not all are.
    pub calls: Option<Arc<CallConditions>>,
}

impl<S> Client<S> {
    pub fn new(
        id: u64,
        sink: S,
        (graph, counts): (Option<Graph>, Option<Counts>),
        from: Heads,
        stops: Vec<StopTimes>,
        later: Later,
    ) -> Self {
        let counts_returns = graph.as_ref().is_some_and(Graph::has_threshold);
        Self {
            id,
            sink,
            graph,
            values: later.values,
            counts,
            overwrites: false,
            turned_away: None,
            latencies: None,
            slots_missed: 0..0,
            lost: vec![0; from.slots.len()],
            continuations: vec![Continuations::default(); from.slots.len()],
            gaps: from.slots.iter().map(|_| Gaps::default()).collect(),
            from,
            to: None,
            stops,
            reverted: None,
            failure: None,
            calls: Vec::new(),
            counts_returns,
            events: 0,
            overrun: 0,
            late: 0,
            last_time: 0,
            later,
        }
    }

    /// Another with the same records, to which none was given yet.
    pub fn anew(&self) -> Client<()> {
        let graph = self.graph.as_ref().map(Graph::anew);
        let (from, later) = (self.from.clone(), self.later.clone());
        let client = Client::new(self.id, (), (graph, None), from, Vec::new(), later);
        Client { to: self.to.clone(), overwrites: self.overwrites, ..client }
    }

    /// No record from these indices on, by CPU, is its own. Only the first call counts.
    pub fn end_at(&mut self, heads: Heads) {
        self.to.get_or_insert(heads);
    }

    /// What it asks for of modules that are loaded now; `None` once it has ended, and of one that counts or
    /// measures: its functions are those that there were when it began.
    pub fn later(&self) -> Option<&Later> {
        let records = self.counts.is_none() && self.latencies.is_none();
        (self.to.is_none() && records).then_some(&self.later)
    }

    /// Whether the returns of its functions are taken.
    pub fn takes_returns(&self) -> bool {
        self.graph.is_some() || self.latencies.is_some()
    }

    /// Indices of its records in the ring of `cpu`.
    pub fn range(&self, cpu: usize) -> Range<u64> {
        let end = |to: &Heads| to.slots.get(cpu).copied();
        let from = self.from.slots.get(cpu).copied().unwrap_or(u64::MAX);
        from..self.to.as_ref().and_then(end).unwrap_or(u64::MAX)
    }

    pub fn owns(&self, record: &RawRecord) -> bool {
        self.range(usize::from(record.cpu)).contains(&record.index)
    }

    /// Takes note of what `reader` has lost in its last pass. Where nothing but the last is to be kept,
    /// open calls are told of it by whoever gives out the records behind it.
    pub fn note_losses(&mut self, cpu: usize, reader: &RingReader) {
        let own = self.range(cpu);
        let overlap =
            |range: &Range<u64>| range.end.min(own.end).saturating_sub(range.start.max(own.start));
        let read: u64 = reader.continuations_read().iter().map(overlap).sum();
        self.continuations[cpu].read += read;
        // What is pending may be there for more as well.
        let pending = self.pending(cpu, reader) as u64;
        let mut more = self.continuations_left(cpu, reader).saturating_sub(pending);
        for lost in reader.losses() {
            let overlap = overlap(lost);
            if overlap > 0 {
                let calls = overlap - more.min(overlap);
                self.continuations[cpu].lost += overlap - calls;
                more -= overlap - calls;
                self.lost[cpu] += calls;
                self.gaps[cpu].lost(lost.end.min(own.end), calls);
                if let Some(graph) = self.graph.as_mut().filter(|_| !self.overwrites) {
                    graph.lose();
                }
            }
        }
    }

    /// Slots for more of its records that the guest has counted and that were neither read nor taken off what
    /// was lost.
    fn continuations_left(&self, cpu: usize, reader: &RingReader) -> u64 {
        let counted = |heads: &Heads| heads.continuations.get(cpu).copied();
        let until = self.to.as_ref().and_then(counted).unwrap_or(reader.continuations());
        let Continuations { read, lost } = self.continuations[cpu];
        let of_others = counted(&self.from).unwrap_or(until);
        until.saturating_sub(of_others).saturating_sub(read).saturating_sub(lost)
    }

    /// How many records of its own there were until those heads, of its functions or of others.
    pub fn records(&self, readers: &[RingReader]) -> u64 {
        let until = |(cpu, reader): (usize, &RingReader)| {
            let own = self.range(cpu);
            reader.head().min(own.end).saturating_sub(own.start)
        };
        readers.iter().enumerate().map(until).sum()
    }

    /// Takes note that so many of its events are given to nobody any more.
    pub fn leave_out(&mut self, events: u64) {
        self.overrun += events;
    }

    /// Records of its own, or of others, that are reserved in that ring and not written.
    pub fn pending(&self, cpu: usize, reader: &RingReader) -> usize {
        reader.pending_within(self.range(cpu))
    }

    /// Gives an event, which `record` became and which is of the function with that index, to the sink.
    pub fn give(
        &mut self,
        record: &RawRecord,
        index: usize,
        event: &Event<'_>,
        give: &mut impl FnMut(&mut S, &Event<'_>) -> io::Result<()>,
    ) {
        // It is one of its own, of a CPU that it knows.
        let gaps = &mut self.gaps[usize::from(record.cpu)];
        let missed = gaps.before(record.index);
        let result = match self.failure {
            None => give(&mut self.sink, &Event { missed, ..*event }),
            Some(_) => Err(io::ErrorKind::WouldBlock.into()),
        };
        gaps.settle(result.is_ok());
        match result {
            Ok(()) => {
                self.events += 1;
                if index >= self.calls.len() {
                    self.calls.resize(index + 1, 0);
                }
                self.calls[index] += u64::from(event.kind.is_call() != self.counts_returns);
                self.late += u64::from(event.time_ns < self.last_time);
                self.last_time = self.last_time.max(event.time_ns);
            }
            Err(error) => {
                self.overrun += 1;
                if error.kind() != io::ErrorKind::WouldBlock {
                    self.failure = Some(error);
                }
            }
        }
    }

    pub fn events(&self) -> u64 {
        match (&self.counts, &self.latencies) {
            (Some(counts), _) => counts.sum(),
            (None, Some(latencies)) => latencies.sum(),
            (None, None) => self.events,
        }
    }

    pub fn missed(&self) -> u64 {
        self.overrun + self.lost.iter().sum::<u64>()
    }

    pub fn summary(&self, readers: &[RingReader], names: &Names<'_>) -> Summary {
        let (mut lost, mut unwritten) = (self.lost.clone(), Vec::new());
        for (cpu, reader) in readers.iter().enumerate() {
            let pending = self.pending(cpu, reader) as u64;
            // What is left is there for more of records that were not written, or else were lost.
            let more = self.continuations_left(cpu, reader);
            unwritten.push(pending.saturating_sub(more));
            let lost = lost.get_mut(cpu).into_iter();
            lost.for_each(|lost| *lost = lost.saturating_sub(more.saturating_sub(pending)));
        }
        let called = self.calls.iter().enumerate().filter(|(_, calls)| **calls > 0);
        let functions = match (&self.counts, &self.latencies) {
            (Some(counts), _) => most_first(names, counts.calls()),
            (None, Some(latencies)) => most_first(names, latencies.calls()),
            (None, None) => most_first(names, called.map(|(index, calls)| (index, *calls))),
        };
        let outstanding = self.graph.as_ref().map(Graph::outstanding).unwrap_or_default();
        let outstanding = outstanding.into_iter().map(|(index, calls)| (index as usize, calls));
        let (lost, overwritten) = match self.overwrites {
            true => (Vec::new(), lost),
            false => (lost, Vec::new()),
        };
        let outstanding = outstanding.chain(self.latencies.iter().flat_map(Latencies::outstanding));
        let (lost_returns, lost_calls) = self.graph.as_ref().map_or((0, 0), Graph::unmatched);
        Summary {
            events: self.events(),
            set_back: [&self.counts, &self.turned_away]
                .into_iter()
                .flatten()
                .map(Counts::set_back)
                .sum::<u64>()
                + self.latencies.as_ref().map_or(0, Latencies::set_back),
            overrun: self.overrun,
            lost,
            overwritten,
            unwritten,
            late: self.late,
            corrupt: readers.iter().filter_map(RingReader::corrupt).cloned().collect(),
            functions,
            outstanding: most_first(names, outstanding),
            lost_returns,
            lost_calls,
            without_slot: self.slots_missed.end.saturating_sub(self.slots_missed.start),
            turned_away: most_first(names, self.turned_away.iter().flat_map(Counts::calls)),
            stops: self.stops.clone(),
            reverted: self.reverted.clone(),
        }
    }
}

/// Calls by the names of their functions, which are told by their indices.
fn most_first(
    names: &Names<'_>,
    calls: impl Iterator<Item = (usize, u64)>,
) -> Vec<(Arc<str>, u64)> {
    let named = calls.map(|(index, calls)| (Arc::clone(names.function(index)), calls));
    let mut named: Vec<_> = named.collect();
    named.sort_by(|(a_name, a), (b_name, b)| b.cmp(a).then_with(|| a_name.cmp(b_name)));
    named
}
