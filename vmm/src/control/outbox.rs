//! A trace on its way to a client, with a bound on what waits for it.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use patcher::region::Histogram;
use patcher::trace::sink::{Beginning, Event, Name, Sink};
use rustc_hash::FxHashMap;

use super::protocol::{
    BatchHeader, CALL_BYTES, Call, Counted, End, Latency, MAX_BATCH, MAX_BEHIND, MAX_CALLS,
    MAX_COUNTED, MAX_MEASURED, MAX_NAME, MAX_NAMES, MAX_NAMES_IN_FORCE, Measured,
};

/// Full batches that wait for a client at most: half a million calls, in 16 MiB if nothing is behind them.
const MAX_WAITING: usize = 64;

/// Batches that [`Outbox::SOME`] events make at most, if each brings three names of the longest.
const ROOM: usize = Outbox::SOME * 3 * (MAX_NAME + PLACE_BYTES) / MAX_NAMES + 2;

/// What a name's place counts beside the name's own bytes.
const PLACE_BYTES: usize = 8;

/// Calls, ready to be sent.
#[derive(Debug, Default)]
pub struct Batch {
    /// What is said about them.
    pub header: BatchHeader,
    /// The calls themselves.
    pub calls: Vec<u8>,
    name_bytes: usize,
}

impl Batch {
    fn is_full(&self) -> bool {
        self.header.calls >= MAX_CALLS
            || self.name_bytes >= MAX_NAMES
            || self.calls.len() + CALL_BYTES + MAX_BEHIND > MAX_BATCH
    }

    /// Takes all of `other`, which comes later, if there is room for it.
    fn absorb(&mut self, other: &mut Self) -> bool {
        let fits = self.header.calls + other.header.calls <= MAX_CALLS
            && self.name_bytes + other.name_bytes <= MAX_NAMES
            && self.calls.len() + other.calls.len() <= MAX_BATCH
            && !other.header.forget;
        if fits {
            let behind = self.header.calls;
            let gaps = other.header.gaps.iter().map(|(call, count)| (behind + call, *count));
            self.header.gaps.extend(gaps);
            self.header.calls += other.header.calls;
            self.header.bytes += other.header.bytes;
            self.header.names.append(&mut other.header.names);
            self.header.places.append(&mut other.header.places);
            self.header.missed = other.header.missed;
            self.calls.append(&mut other.calls);
            self.name_bytes += other.name_bytes;
            *other = Self::default();
        }
        fits
    }
}

/// What a guest has added up and was not taken out yet. A later reading says all that an earlier one does, so
/// that there is never more than one.
#[derive(Debug)]
struct Reading<T> {
    functions: usize,
    elapsed: Duration,
    last: bool,
    sums: BTreeMap<u32, (T, Arc<str>)>,
}

impl<T> Default for Reading<T> {
    fn default() -> Self {
        Self { functions: 0, elapsed: Duration::ZERO, last: false, sums: BTreeMap::new() }
    }
}

impl<T> Reading<T> {
    /// The next of its functions, `most` at most.
    fn take(&mut self, most: usize) -> impl Iterator<Item = (u32, (T, Arc<str>))> {
        std::iter::from_fn(|| self.sums.pop_first()).take(most)
    }
}

impl Reading<u64> {
    /// As much as a message holds, and whether there is more.
    fn counted(&mut self) -> Counted {
        let calls = self.take(MAX_COUNTED);
        let calls = calls.map(|(number, (calls, name))| (number, calls, cut(&name).to_owned()));
        let calls = calls.collect();
        let Self { functions, elapsed, last, .. } = *self;
        Counted { functions, elapsed, more: !self.sums.is_empty(), last, calls }
    }
}

impl Reading<Histogram> {
    /// As much as a message holds, and whether there is more.
    fn measured(&mut self) -> Measured {
        let latencies = self.take(MAX_MEASURED);
        let latencies = latencies
            .map(|(number, (histogram, name))| Latency::new(number, cut(&name), &histogram))
            .collect();
        let Self { functions, elapsed, last, .. } = *self;
        Measured { functions, elapsed, more: !self.sums.is_empty(), last, latencies }
    }
}

/// As much of a name as is told.
fn cut(name: &str) -> &str {
    let mut length = name.len().min(MAX_NAME);
    while !name.is_char_boundary(length) {
        length -= 1;
    }
    &name[..length]
}

#[derive(Debug, Default)]
struct Queue {
    batches: VecDeque<Batch>,
    counted: Option<Reading<u64>>,
    measured: Option<Reading<Histogram>>,
    end: Option<End>,
    /// Nobody puts anything in any more, or takes anything out.
    outbox_gone: bool,
    feed_gone: bool,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Whoever panicked left it whole: every change is one push, pop or store.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a trace's events are put in. It never waits: an event for which there is no room is refused
/// with [`ErrorKind::WouldBlock`].
#[derive(Debug)]
pub struct Outbox {
    shared: Arc<Shared>,
    batch: Batch,
    /// The numbers that names have in the conversation.
    numbers: FxHashMap<u64, u32>,
    /// The numbers that names of tasks have, which are counted with them.
    comms: FxHashMap<Box<str>, u32>,
}

/// Where they are taken out.
#[derive(Debug)]
pub struct Feed {
    shared: Arc<Shared>,
}

/// What comes out of a [`Feed`].
#[derive(Debug)]
pub enum Fed {
    /// Calls.
    Batch(Batch),
    /// How often functions were called.
    Counted(Counted),
    /// How long calls took.
    Measured(Measured),
    /// No more.
    End(End),
    /// The other side has gone without a word.
    Gone,
    /// Nothing for the moment.
    Nothing,
}

impl Outbox {
    /// An outbox, and where its events come out.
    #[must_use]
    pub fn new() -> (Self, Feed) {
        let shared = Arc::new(Shared::default());
        let feed = Feed { shared: Arc::clone(&shared) };
        let outbox = Self {
            shared,
            batch: Batch::default(),
            numbers: FxHashMap::default(),
            comms: FxHashMap::default(),
        };
        (outbox, feed)
    }

    /// Says how many events were missed until now.
    pub fn missed(&mut self, missed: u64) {
        self.batch.header.missed = missed;
    }

    /// Whether there is room for some more events at least, as many as [`Outbox::SOME`].
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.shared.queue().batches.len() + ROOM <= MAX_WAITING
    }

    /// How many events [`Outbox::has_room`] looks for room for.
    pub const SOME: usize = 256;

    /// Puts in how often functions were called, by numbers and names, of `functions` that are counted.
    ///
    /// # Errors
    /// Nobody takes it out any more.
    pub fn counted<'n>(
        &mut self,
        reading: (usize, Duration, bool),
        calls: impl Iterator<Item = (u32, u64, &'n Arc<str>)>,
    ) -> io::Result<()> {
        self.read(reading, calls, |queue| &mut queue.counted)
    }

    /// Puts in how long calls took, by numbers and names, of `functions` that are measured.
    ///
    /// # Errors
    /// Nobody takes it out any more.
    pub fn measured<'n>(
        &mut self,
        reading: (usize, Duration, bool),
        latencies: impl Iterator<Item = (u32, Histogram, &'n Arc<str>)>,
    ) -> io::Result<()> {
        self.read(reading, latencies, |queue| &mut queue.measured)
    }

    /// Puts in what a guest has added up, in its place.
    fn read<'n, T>(
        &mut self,
        (functions, elapsed, last): (usize, Duration, bool),
        sums: impl Iterator<Item = (u32, T, &'n Arc<str>)>,
        place: impl FnOnce(&mut Queue) -> &mut Option<Reading<T>>,
    ) -> io::Result<()> {
        let mut queue = self.shared.queue();
        if queue.feed_gone {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let reading = place(&mut queue).get_or_insert_default();
        (reading.functions, reading.elapsed, reading.last) = (functions, elapsed, last);
        reading.sums.extend(sums.map(|(number, sum, name)| (number, (sum, Arc::clone(name)))));
        drop(queue);
        self.shared.more.notify_one();
        Ok(())
    }

    /// Puts in what comes last.
    pub fn end(mut self, end: End) {
        // What does not fit is in nobody's way any more: nothing comes after it.
        let mut queue = self.shared.queue();
        if self.batch.header.calls > 0 {
            queue.batches.push_back(std::mem::take(&mut self.batch));
        }
        queue.end = Some(end);
    }

    /// Moves the batch to the queue, if there is room.
    fn pass_on(&mut self) -> io::Result<()> {
        let mut queue = self.shared.queue();
        if queue.feed_gone {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let missed = self.batch.header.missed;
        if !queue.batches.back_mut().is_some_and(|last| last.absorb(&mut self.batch)) {
            if queue.batches.len() >= MAX_WAITING {
                return Err(ErrorKind::WouldBlock.into());
            }
            queue.batches.push_back(std::mem::take(&mut self.batch));
        }
        drop(queue);
        self.batch.header.missed = missed;
        self.shared.more.notify_one();
        Ok(())
    }

    /// How many names are in force.
    fn in_force(&self) -> usize {
        self.numbers.len() + self.comms.len()
    }

    fn number_of_task(&mut self, comm: &str) -> u32 {
        if let Some(number) = self.comms.get(comm) {
            return *number;
        }
        let next = self.in_force() as u32;
        self.batch.name_bytes += comm.len() + PLACE_BYTES;
        self.batch.header.places.push((0, 0));
        self.batch.header.names.push(comm.to_owned());
        self.comms.insert(comm.into(), next);
        next
    }

    fn number(&mut self, name: Name<'_>) -> u32 {
        let next = self.in_force() as u32;
        let (header, name_bytes) = (&mut self.batch.header, &mut self.batch.name_bytes);
        *self.numbers.entry(name.id).or_insert_with(|| {
            let text = cut(name.text);
            *name_bytes += text.len() + PLACE_BYTES;
            header.places.push((name.address, name.offset));
            header.names.push(text.to_owned());
            next
        })
    }
}

impl Sink for Outbox {
    fn begin(&mut self, _beginning: &Beginning<'_>) -> io::Result<()> {
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        if self.batch.is_full() {
            self.pass_on()?;
        }
        if self.in_force() + 3 > MAX_NAMES_IN_FORCE {
            if self.batch.header.calls > 0 {
                self.pass_on()?;
            }
            self.numbers.clear();
            self.comms.clear();
            self.batch.header.forget = true;
        }
        let function = self.number(event.function);
        let caller = self.number(event.caller);
        if event.missed > 0 {
            self.batch.header.gaps.push((self.batch.header.calls, event.missed));
        }
        let comm = event.task.and_then(|task| task.comm).map(|comm| self.number_of_task(comm));
        let call = Call {
            time_ns: event.time_ns,
            function,
            caller,
            cpu: event.cpu,
            context: event.context.unwrap_or_default(),
            pid: event.task.map(|task| task.pid),
            comm,
            kind: event.kind,
            values: event.values,
        };
        if self.batch.calls.capacity() == 0 {
            self.batch.calls.reserve(MAX_CALLS.min(1024) * CALL_BYTES);
        }
        call.encode(&mut self.batch.calls);
        self.batch.header.calls += 1;
        self.batch.header.bytes = self.batch.calls.len();
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.batch.header.calls == 0 {
            return if self.shared.queue().feed_gone {
                Err(ErrorKind::BrokenPipe.into())
            } else {
                Ok(())
            };
        }
        match self.pass_on() {
            // It waits here as well as there.
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }

    fn end(&mut self, _written: u64, _entries: u64) -> io::Result<()> {
        self.flush()
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.shared.queue().outbox_gone = true;
        self.shared.more.notify_one();
    }
}

impl Feed {
    /// The next of what was put in, for which it waits at most for `patience`.
    #[must_use]
    pub fn next(&self, patience: Duration) -> Fed {
        let queue = self.shared.queue();
        let is_empty = |queue: &mut Queue| {
            queue.batches.is_empty()
                && queue.counted.is_none()
                && queue.measured.is_none()
                && queue.end.is_none()
                && !queue.outbox_gone
        };
        let waited = self.shared.more.wait_timeout_while(queue, patience, is_empty);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(batch) = queue.batches.pop_front() {
            return Fed::Batch(batch);
        }
        if let Some(mut reading) = queue.counted.take() {
            let counted = reading.counted();
            queue.counted = counted.more.then_some(reading);
            return Fed::Counted(counted);
        }
        if let Some(mut reading) = queue.measured.take() {
            let measured = reading.measured();
            queue.measured = measured.more.then_some(reading);
            return Fed::Measured(measured);
        }
        match queue.end.take() {
            Some(end) => Fed::End(end),
            None if queue.outbox_gone => Fed::Gone,
            None => Fed::Nothing,
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.feed_gone = true;
        queue.batches.clear();
    }
}
