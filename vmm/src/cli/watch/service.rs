//! Traces a kernel that is ready: for the run itself, and for clients of the control socket.

use std::cell::OnceCell;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use patcher::arch::ByteOrder;
use patcher::hook::{Hooks, ReleaseError};
use patcher::kernel::{Kernel, MappedRegion, Pads, PadsError, RecordedTask};
use patcher::machine::Machine;
use patcher::region::RegionError;
use patcher::trace::calls::{self, CallFilter};
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::select::{SelectError, Selection, WantedValues, refusals};
use patcher::trace::session::LAST_RECORDS;
use patcher::trace::sink::{self, Beginning, Sink};
use patcher::trace::tracer::{ArmError, Armed, ClientId, Tracer};
use vmm::control::protocol::{
    self, CallsRequest, End, EndReason, Info, Method, Pad, Refusal, RefusalKind, State, Totals,
    TraceInfo, TraceRequest,
};
use vmm::control::{Command, Outbox, SnapshotWanted, TraceWanted};

use super::answers::{Counts, Desk, Ours, list};
use super::patching::Patching;
use super::recorder::{self, Giving, MAX_SNAPSHOTS, PanicWatch, Snapshot};
use super::writer::Writer;
use super::{LOOK, OwnTrace, broken};
use crate::cli::output::Records;
use crate::cli::progress::Progress;
use crate::cli::{say, summary};

/// How often the rings are read when little comes. At ten million events a second and CPU this is
/// a third of the smallest ring that is worth having.
const DRAIN: Duration = Duration::from_millis(5);

/// The rings are read again at once when this many events came.
const MANY: usize = 4096;

/// How often the last records are looked for at the end.
const LAST_LOOK: Duration = Duration::from_millis(5);

/// A trace that goes on.
struct Trace {
    client: ClientId,
    /// Who wants it; nobody but the run itself if none.
    pid: Option<u32>,
    request: TraceRequest,
    functions: usize,
    since: Instant,
    /// How often what it counts or measures was read.
    readings: u32,
    /// What was said of it when it began.
    described: protocol::Armed,
    /// What it held last, if it overwrites: when the kernel panicked, or when it ended.
    held: Option<Giving>,
    ending: Option<Ending>,
}

impl Trace {
    /// Whether its records are still to be overwritten.
    fn is_recording(&self) -> bool {
        self.request.overwrite && self.held.is_none() && self.ending.is_none()
    }
}

/// A trace whose functions are put back and whose last records may still come.
struct Ending {
    since: Instant,
    lasted: Duration,
    reason: EndReason,
    disarmed: Result<(), ReleaseError>,
}

/// What became of everything.
pub struct Ended {
    /// What the run's own trace came to, if there was one.
    pub own: Option<OwnTrace>,
    /// Why it could not be written.
    pub failure: Option<io::Error>,
    /// Whether all functions were put back.
    pub disarmed: Result<(), ReleaseError>,
}

/// Traces.
pub struct Service<'m> {
    machine: &'m dyn Machine,
    kernel: &'m Kernel,
    desk: &'m Desk,
    /// Made when the first trace is wanted: until then the guest is not touched.
    region: &'m OnceCell<MappedRegion>,
    hooks: Option<Hooks<'m>>,
    tracer: Option<Tracer<'m, Outbox>>,
    traces: Vec<Trace>,
    patching: Patching<'m>,
    /// What traces that overwrite held when somebody asked, and what is not given to him yet.
    snapshots: Vec<Snapshot>,
    /// Made when the first such trace begins.
    panic_watch: Option<PanicWatch>,
    /// Writes the run's own trace.
    writer: Option<Writer>,
    own_failed: bool,
    /// Whether it was said that calls that never return can't be told from others.
    told_of_returns: bool,
    ended: Ended,
}

impl<'m> Service<'m> {
    /// Answers for a kernel, into which the region is mapped when it is needed; it is kept in `region`.
    pub fn new(
        machine: &'m dyn Machine,
        kernel: &'m Kernel,
        desk: &'m Desk,
        region: &'m OnceCell<MappedRegion>,
    ) -> Self {
        Self {
            machine,
            kernel,
            desk,
            region,
            hooks: None,
            tracer: None,
            traces: Vec::new(),
            patching: Patching::default(),
            snapshots: Vec::new(),
            panic_watch: None,
            writer: None,
            own_failed: false,
            told_of_returns: false,
            ended: Ended { own: None, failure: None, disarmed: Ok(()) },
        }
    }

    /// Begins the run's own trace.
    ///
    /// # Errors
    /// Nothing is selected, or it can't be armed or written.
    pub fn trace_own(&mut self, mut records: Records, request: TraceRequest) -> Result<()> {
        request.check().map_err(Error::msg)?;
        let cpus = self.machine.vcpus();
        let (hooks, tracer) = self.tracer()?;
        let selection = select(hooks, &request)?;
        let contexts = tracer.contexts();
        let beginning = Beginning::of(hooks.kernel(), request.tracer.into(), cpus, contexts);
        records.begin(&beginning).map_err(|error| broken(error, records.name()))?;
        let (writer, outbox) =
            Writer::start(records, contexts).context("no thread can be had to write")?;
        let (client, armed) = tracer.add(hooks, &selection, outbox)?;
        let described = describe(hooks, tracer, &selection, &armed);
        say(summary::armed(&described));
        if let Some(missing) = &described.missing {
            say(missing);
        }
        if request.overwrite {
            say(summary::RECORDING);
        }
        self.writer = Some(writer);
        self.began(client, None, request, described);
        Ok(())
    }

    fn began(
        &mut self,
        client: ClientId,
        pid: Option<u32>,
        request: TraceRequest,
        described: protocol::Armed,
    ) {
        let functions = described.functions;
        let since = Instant::now();
        if request.overwrite {
            let (kernel, machine) = (self.kernel, self.machine);
            self.panic_watch.get_or_insert_with(|| PanicWatch::new(kernel, machine));
        }
        self.traces.push(Trace {
            client,
            pid,
            request,
            functions,
            since,
            readings: 0,
            described,
            held: None,
            ending: None,
        });
    }

    /// What is armed in the kernel, into which the region is brought if that was not done yet.
    fn hooks(&mut self) -> Result<&mut Hooks<'m>> {
        let region = match self.region.get() {
            Some(region) => region,
            None => {
                let made = MappedRegion::new(self.machine, self.kernel).context(
                    "the memory for trampolines and rings can't be brought into the guest",
                )?;
                self.region.get_or_init(|| made)
            }
        };
        let (machine, kernel) = (self.machine, self.kernel);
        Ok(self.hooks.get_or_insert_with(|| Hooks::new(machine, kernel, region)))
    }

    /// The tracer, made if there is none yet, and what it arms.
    fn tracer(&mut self) -> Result<(&mut Hooks<'m>, &mut Tracer<'m, Outbox>)> {
        self.hooks()?;
        let hooks = self.hooks.as_mut().expect("they were made above");
        let tracer = match &mut self.tracer {
            Some(tracer) => tracer,
            none => none.insert(Tracer::new(hooks)?),
        };
        Ok((hooks, tracer))
    }

    /// Both, if there are traces.
    fn at_work(&mut self) -> Option<(&mut Hooks<'m>, &mut Tracer<'m, Outbox>)> {
        Some((self.hooks.as_mut()?, self.tracer.as_mut()?))
    }

    /// Whether the run's own trace can't be written any more.
    pub fn has_own_failed(&self) -> bool {
        self.own_failed
    }

    /// Hands on what the rings hold, and answers one question if there is any.
    pub fn pass(&mut self, panicked: bool, progress: &mut Progress) {
        let (mut taken, mut is_given) = (0, false);
        let is_traced = !self.traces.is_empty();
        if let Some((hooks, tracer)) = self.at_work().filter(|_| is_traced) {
            taken = tracer.drain(hooks, Outbox::event);
            for news in tracer.follow_modules(hooks) {
                progress.clear();
                say(summary::module(&news));
            }
            self.count();
            self.hold_at_panic(progress);
            is_given = self.give_held();
            self.hand_on();
            self.end_what_is_over();
            self.show(progress);
        }
        if let Some(hooks) = &mut self.hooks {
            self.patching.step(hooks);
            if let Some(Err(error)) = hooks.tend_returns(Instant::now())
                && !std::mem::replace(&mut self.told_of_returns, true)
            {
                progress.clear();
                say(format_args!("calls that never return can't be told from others: {error}"));
            }
        }
        let patience = match (self.traces.is_empty(), taken) {
            _ if is_given => Duration::ZERO,
            (false, 0..MANY) if self.traces.iter().any(Trace::is_recording) => recorder::LOOK,
            (true, _) => LOOK.min(self.patching.due()),
            (false, 0..MANY) => DRAIN,
            (false, _) => Duration::ZERO,
        };
        if let Some(command) = self.desk.next(patience) {
            self.answer(command, panicked);
        }
    }

    /// Reads the counts and latencies that are due.
    fn count(&mut self) {
        let (Some(hooks), Some(tracer)) = (&self.hooks, &mut self.tracer) else { return };
        let counting =
            |trace: &&mut Trace| trace.request.tracer.adds_up() && trace.ending.is_none();
        for trace in self.traces.iter_mut().filter(counting) {
            let interval = Duration::from_millis(trace.request.count.interval_ms);
            let elapsed = trace.since.elapsed();
            if elapsed < interval.saturating_mul(trace.readings) {
                continue;
            }
            // The first only says that it has begun.
            let elapsed = if trace.readings == 0 { Duration::ZERO } else { elapsed };
            read_sums(hooks, tracer, trace, (elapsed, false));
            trace.readings = elapsed
                .as_millis()
                .checked_div(interval.as_millis())
                .and_then(|past| u32::try_from(past).ok())
                .map_or(u32::MAX, |past| past.saturating_add(1));
        }
    }

    /// Takes what is held by traces that overwrite once the kernel panics: it goes on for a while, and so
    /// do they.
    fn hold_at_panic(&mut self, progress: &mut Progress) {
        let (Some(hooks), Some(tracer), Some(watch)) =
            (&self.hooks, &mut self.tracer, &self.panic_watch)
        else {
            return;
        };
        let mut recording = self.traces.iter_mut().filter(|trace| trace.is_recording()).peekable();
        if recording.peek().is_none() || !watch.has_panicked(self.kernel, self.machine) {
            return;
        }
        for trace in recording {
            let Some(held) = tracer.hold(hooks, trace.client) else { continue };
            if trace.pid.is_none() {
                progress.clear();
                say(summary::held_at_panic(held.left() as u64));
            }
            trace.held = Some(Giving::new(held));
        }
    }

    /// Gives out what is held, to those who take it; whether that was anything.
    fn give_held(&mut self) -> bool {
        let Some(tracer) = &mut self.tracer else { return false };
        let mut is_any = false;
        for trace in &mut self.traces {
            let Some(giving) = &mut trace.held else { continue };
            is_any |= giving.step(tracer, trace.client, None);
            if let Some(failure) = giving.failure() {
                tracer.fail(trace.client, failure);
            }
        }
        for mut snapshot in std::mem::take(&mut self.snapshots) {
            is_any |= snapshot.step(tracer);
            // Whoever has gone needs nothing more.
            if snapshot.giving.is_over() {
                snapshot.end(tracer);
            } else if snapshot.outbox.flush().is_ok() {
                self.snapshots.push(snapshot);
            }
        }
        is_any
    }

    /// Takes what is held by traces that overwrite and are over, when the last records are written or were
    /// waited for.
    fn hold_last(&mut self) {
        let (Some(hooks), Some(tracer)) = (&self.hooks, &mut self.tracer) else { return };
        let waits = |trace: &&mut Trace| trace.request.overwrite && trace.held.is_none();
        for trace in self.traces.iter_mut().filter(waits) {
            let Some(ending) = &trace.ending else { continue };
            let held = tracer.hold(hooks, trace.client).map(Giving::new);
            trace.held = held.filter(|giving| {
                giving.held.unwritten() == 0 || ending.since.elapsed() >= LAST_RECORDS
            });
        }
    }

    /// Lets everybody see what there is until now.
    fn hand_on(&mut self) {
        let Some(tracer) = &mut self.tracer else { return };
        for trace in &self.traces {
            let Some(progress) = tracer.progress(trace.client) else { continue };
            let (missed, mut failed) = (progress.missed, progress.failure.is_some());
            if let Some(outbox) = tracer.sink_mut(trace.client) {
                outbox.missed(missed);
                if let Err(error) = outbox.flush() {
                    failed = true;
                    tracer.fail(trace.client, error);
                }
            }
            self.own_failed |= failed && trace.pid.is_none();
        }
    }

    /// Ends traces whose clients have gone, and says goodbye to those that have all of their events.
    fn end_what_is_over(&mut self) {
        let Some(tracer) = &self.tracer else { return };
        let failed = |trace: &Trace| {
            let progress = tracer.progress(trace.client);
            trace.pid.is_some() && progress.is_some_and(|progress| progress.failure.is_some())
        };
        let failed: Vec<ClientId> =
            self.traces.iter().filter(|trace| failed(trace)).map(|trace| trace.client).collect();
        for client in failed {
            self.begin_end(client, EndReason::ClientGone);
        }
        self.hold_last();
        let Some(tracer) = &self.tracer else { return };
        let is_over = |trace: &Trace| {
            trace.ending.as_ref().is_some_and(|ending| match &trace.held {
                Some(giving) => giving.is_over(),
                None if trace.request.overwrite => false,
                None => tracer.is_settled(trace.client) || ending.since.elapsed() >= LAST_RECORDS,
            })
        };
        let traces = std::mem::take(&mut self.traces).into_iter();
        let (mut over, rest): (Vec<Trace>, Vec<Trace>) = traces.partition(is_over);
        self.traces = rest;
        // The run's own is waited for until it is written, which is nobody else's business.
        over.sort_by_key(|trace| trace.pid.is_none());
        over.into_iter().for_each(|trace| self.finish(trace));
    }

    /// Puts back what only this client traces.
    fn begin_end(&mut self, client: ClientId, reason: EndReason) {
        let trace = self.traces.iter_mut().find(|trace| trace.client == client);
        let (Some(trace), Some(hooks), Some(tracer)) = (trace, &mut self.hooks, &mut self.tracer)
        else {
            return;
        };
        if trace.ending.is_none() {
            let lasted = trace.since.elapsed();
            let disarmed = tracer.remove(hooks, client);
            trace.ending = Some(Ending { since: Instant::now(), lasted, reason, disarmed });
        }
    }

    /// Gives the last events, and tells what the trace came to.
    fn finish(&mut self, trace: Trace) {
        if let (Some(hooks), Some(tracer), Some(ending)) =
            (&self.hooks, &mut self.tracer, &trace.ending)
            && trace.request.tracer.adds_up()
        {
            read_sums(hooks, tracer, &trace, (ending.lasted, true));
        }
        let finished = self.tracer.as_mut().and_then(|tracer| match trace.held {
            Some(giving) => tracer.finish_held(giving.held),
            None => tracer.finish(trace.client, Outbox::event),
        });
        let (Some(finished), Some(ending)) = (finished, trace.ending) else { return };
        let summary = finished.summary;
        let error = ending.disarmed.as_ref().err().map(ToString::to_string);
        let (reason, lasted) = (ending.reason, ending.lasted);
        finished.sink.end(End { reason, error, totals: Totals::from(&summary), lasted });
        if trace.pid.is_none() {
            let (written, times) = self.writer.take().map_or((Ok(()), Vec::new()), Writer::finish);
            self.ended.failure = written.err();
            self.ended.own = Some(OwnTrace { summary, lasted, times });
        }
        // Whoever stops a trace is told by its end; all others by the run's.
        let is_told = trace.pid.is_some() && reason == EndReason::Stopped;
        if self.ended.disarmed.is_ok() && !is_told {
            self.ended.disarmed = ending.disarmed;
        }
    }

    fn show(&self, progress: &mut Progress) {
        let own = self.traces.iter().find(|trace| trace.pid.is_none());
        let (Some(own), Some(tracer)) = (own, &self.tracer) else { return };
        if let Some(now) = tracer.progress(own.client) {
            progress.show(|| match own.request.overwrite {
                true => summary::recording(now.events, own.since.elapsed()),
                false => summary::progress(now.events, now.missed, own.since.elapsed()),
            });
        }
    }

    /// Ends every trace in order.
    pub fn end(mut self, reason: EndReason) -> Ended {
        let clients: Vec<ClientId> = self.traces.iter().map(|trace| trace.client).collect();
        clients.into_iter().for_each(|client| self.begin_end(client, reason));
        while !(self.traces.is_empty() && self.snapshots.is_empty()) {
            if let Some((hooks, tracer)) = self.at_work() {
                tracer.drain(hooks, Outbox::event);
            }
            let is_given = self.give_held();
            let held = self.traces.iter_mut().filter_map(|trace| trace.held.as_mut());
            let snapshots = self.snapshots.iter_mut().map(|snapshot| &mut snapshot.giving);
            held.chain(snapshots).for_each(Giving::hurry);
            self.end_what_is_over();
            if !(is_given || self.traces.is_empty()) {
                thread::sleep(LAST_LOOK);
            }
        }
        if let Some(hooks) = &mut self.hooks {
            let reverted = self.patching.end(hooks, reason);
            self.ended.disarmed = self.ended.disarmed.and(reverted);
        }
        self.ended
    }

    fn answer(&mut self, command: Command, panicked: bool) {
        let state = if panicked { State::Panicked } else { State::Ready };
        match command {
            Command::Status(answer) => {
                let counts = Counts { traces: self.traces.len(), patches: self.patching.count() };
                let kernel = Some(self.kernel);
                answer.give(Ok(self.desk.status(self.machine, kernel, state, None, counts)));
            }
            Command::Info(answer) => answer.give(Ok(self.info(state))),
            Command::Pads(glob, answer) => answer.give(self.pads(glob.as_deref())),
            Command::Trace(wanted) => self.trace(*wanted, panicked),
            Command::Snapshot(wanted) => self.snapshot(*wanted),
            Command::Stop(client) => self.begin_end(client, EndReason::Stopped),
            Command::PatchApply(wanted) => match self.patched(panicked) {
                Ok((patching, hooks)) => patching.apply(hooks, *wanted),
                Err(refusal) => wanted.answer.give(Err(refusal)),
            },
            Command::PatchList(answer) => answer.give(Ok(self.patching.list(self.hooks.as_ref()))),
            Command::PatchRevert(request, waiter, answer) => match self.patched(panicked) {
                Ok((patching, hooks)) => patching.revert(hooks, &request, waiter, answer),
                Err(refusal) => answer.give(Err(refusal)),
            },
        }
    }

    fn survey(&self) -> (Result<Pads, PadsError>, Ours) {
        let Some(hooks) = &self.hooks else {
            return (self.kernel.pads(self.machine.ram()), Ours::default());
        };
        let traced = self.tracer.as_ref().map(|tracer| tracer.armed_pads(hooks).collect());
        let patched = hooks.in_force().filter(|(_, want)| want.redirect.is_some());
        let patched = patched.map(|(at, _)| at).collect();
        (hooks.pads(), Ours { traced: traced.unwrap_or_default(), patched })
    }

    fn info(&self, state: State) -> Info {
        let who = self.traces.iter().map(|trace| {
            let progress = self.tracer.as_ref().and_then(|tracer| tracer.progress(trace.client));
            let (events, missed) = progress.map_or((0, 0), |now| (now.events, now.missed));
            TraceInfo {
                pid: trace.pid,
                request: trace.request.clone(),
                functions: trace.functions,
                events,
                missed,
                seconds: trace.since.elapsed().as_secs(),
            }
        });
        let (pads, ours) = self.survey();
        let pads = pads.ok();
        let (kernel, region) = ((self.kernel, state), self.region.get());
        let patched = self.patching.record(self.hooks.as_ref());
        let going_on = (who.collect(), patched, self.patching.count());
        self.desk.info(self.machine, kernel, (pads.as_ref(), &ours), region, going_on)
    }

    fn pads(&self, glob: Option<&str>) -> Result<Vec<Pad>, Refusal> {
        let (pads, ours) = self.survey();
        let pads = pads.map_err(|error| Refusal::new(RefusalKind::Failed, error.to_string()))?;
        Ok(list(&pads, &ours, glob.map(Glob::new).as_ref()))
    }

    fn trace(&mut self, wanted: TraceWanted, panicked: bool) {
        let TraceWanted { request, pid, outbox, answer } = wanted;
        if panicked {
            let message = "the guest's kernel has panicked: there is nothing to trace any more";
            return answer.give(Err(Refusal::new(RefusalKind::Refused, message)));
        }
        match self.begin_for_client(&request, outbox) {
            Ok((client, described)) => {
                self.began(client, Some(pid), request, described.clone());
                answer.give(Ok((client, described)));
            }
            Err(refusal) => answer.give(Err(refusal)),
        }
    }

    /// Gives what the trace that overwrites holds to somebody who asks.
    fn snapshot(&mut self, wanted: SnapshotWanted) {
        let SnapshotWanted { outbox, answer } = wanted;
        let (Some(hooks), Some(tracer), Some(trace)) =
            (&self.hooks, &mut self.tracer, self.traces.iter().find(|trace| trace.is_recording()))
        else {
            let message = "no trace of this guest keeps its last calls; vmm trace NAME func \
                           --overwrite, or vmm run with --trace func --overwrite, begins one";
            return answer.give(Err(Refusal::new(RefusalKind::Refused, message)));
        };
        if self.snapshots.len() >= MAX_SNAPSHOTS {
            let message = format!("{MAX_SNAPSHOTS} snapshots are being taken; try again later");
            return answer.give(Err(Refusal::new(RefusalKind::Busy, message)));
        }
        let Some(held) = tracer.hold(hooks, trace.client) else { return };
        let recorded_by = Some(trace.request.tracer);
        answer.give(Ok(protocol::Armed { recorded_by, ..trace.described.clone() }));
        let (client, giving, lasted) = (trace.client, Giving::new(held), trace.since.elapsed());
        self.snapshots.push(Snapshot { client, giving, outbox, lasted });
    }

    /// What patches, and what it patches.
    fn patched(&mut self, panicked: bool) -> Result<(&mut Patching<'m>, &mut Hooks<'m>), Refusal> {
        if panicked {
            let message = "the guest's kernel has panicked: there is nothing to patch any more";
            return Err(Refusal::new(RefusalKind::Refused, message));
        }
        self.hooks().map_err(|error| failed(crate::cli::sentence(&error)))?;
        let hooks = self.hooks.as_mut().expect("they were made above");
        Ok((&mut self.patching, hooks))
    }

    fn begin_for_client(
        &mut self,
        request: &TraceRequest,
        outbox: Outbox,
    ) -> Result<(ClientId, protocol::Armed), Refusal> {
        let (machine, kernel) = (self.machine, self.kernel);
        if !kernel.is_current(machine.ram()) {
            return Err(failed("the kernel that was found in the guest is no longer there"));
        }
        let (hooks, tracer) =
            self.tracer().map_err(|error| failed(crate::cli::sentence(&error)))?;
        let selection = select(hooks, request).map_err(|error| {
            let kind = match error {
                SelectError::Filter(_) | SelectError::Calls(_) => RefusalKind::Refused,
                _ => RefusalKind::Failed,
            };
            Refusal::new(kind, error.to_string())
        })?;
        let added = tracer.add(hooks, &selection, outbox);
        let (client, armed) = added.map_err(|error| {
            let kind = match error {
                ArmError::TooManyClients => RefusalKind::Busy,
                _ => RefusalKind::Failed,
            };
            Refusal::new(kind, error.to_string())
        })?;
        Ok((client, describe(hooks, tracer, &selection, &armed)))
    }
}

fn failed(message: impl Into<String>) -> Refusal {
    Refusal::new(RefusalKind::Failed, message)
}

/// Gives a trace that counts or measures what was added up in that time, for the last time or not.
fn read_sums<'m>(
    hooks: &Hooks<'m>,
    tracer: &mut Tracer<'m, Outbox>,
    trace: &Trace,
    (elapsed, last): (Duration, bool),
) {
    let reading = (trace.functions, elapsed, last);
    let calls = tracer.counts(hooks, trace.client);
    give(tracer, trace, calls, |outbox, calls| outbox.counted(reading, calls));
    let latencies = tracer.latencies(hooks, trace.client);
    give(tracer, trace, latencies, |outbox, latencies| outbox.measured(reading, latencies));
}

/// Puts what was read of a trace, if that is what it is for, into its outbox by `put`.
fn give<T: Copy>(
    tracer: &mut Tracer<'_, Outbox>,
    trace: &Trace,
    read: Option<Result<Vec<(u32, T)>, RegionError>>,
    put: impl FnOnce(&mut Outbox, &mut dyn Iterator<Item = (u32, T, &Arc<str>)>) -> io::Result<()>,
) {
    let given = match read {
        None => return,
        Some(Err(error)) => Err(io::Error::other(error)),
        Some(Ok(news)) => {
            let names: Vec<_> =
                news.iter().map(|(index, _)| Arc::clone(tracer.function(*index))).collect();
            let mut sums = news.iter().zip(&names).map(|((index, sum), name)| (*index, *sum, name));
            tracer.sink_mut(trace.client).map_or(Ok(()), |outbox| put(outbox, &mut sums))
        }
    };
    if let Err(error) = given {
        tracer.fail(trace.client, error);
    }
}

/// What a request selects in this kernel.
fn select(hooks: &Hooks<'_>, request: &TraceRequest) -> Result<Selection, SelectError> {
    let (only, arguments) = calls::divide(&request.filter)?;
    let except = request.notrace.iter().map(|glob| Glob::new(glob)).collect();
    let filter = Filter { only, except };
    let selection = match request.method {
        Method::Call => Selection::beside(hooks, &filter)?,
        Method::Trap => Selection::trapping(hooks, &filter)?,
    };
    let values = WantedValues { arguments: request.args, returned: request.ret };
    let selection = Selection { values, overwrite: request.overwrite, ..selection };
    let selection = match request.tracer {
        protocol::Tracer::Func => selection,
        protocol::Tracer::Count => return Ok(Selection { counts: true, ..selection }),
        protocol::Tracer::Latency => return Ok(selection.measured()),
        protocol::Tracer::Graph => selection.with_returns((&request.graph).into()),
    };
    let CallsRequest { pids, comm, one_in, per_second } = request.calls.clone();
    let calls = CallFilter { pids, comm, arguments, one_in, per_second };
    Ok(selection.filtered(hooks.kernel(), hooks.machine(), &calls)?)
}

/// What is said of a trace that begins.
fn describe(
    hooks: &Hooks<'_>,
    tracer: &Tracer<'_, Outbox>,
    selection: &Selection,
    armed: &Armed,
) -> protocol::Armed {
    let kernel = hooks.kernel();
    let recorded = hooks.recorded();
    let refused = refusals(&selection.refused).into_iter();
    let values = selection.values != WantedValues::default();
    let without_types = tracer.without_types().filter(|_| values);
    let missing = (recorded.and_then(RecordedTask::missing).into_iter()).chain(
        without_types.map(|why| format!("values of calls have neither names nor types: {why}")),
    );
    protocol::Armed {
        release: kernel.release().to_owned(),
        kaslr_offset: kernel.kaslr_offset(),
        symbols: kernel.symbols().len(),
        pads: selection.pads,
        cpus: hooks.machine().vcpus(),
        functions: armed.functions,
        written: armed.written,
        refused: refused.map(|(why, count)| (why.to_owned(), count)).collect(),
        stop: armed.stop.total(),
        contexts: recorded.is_some_and(|recorded| recorded.preempt_count.is_ok()),
        missing: missing.reduce(|all, more| format!("{all}; {more}")),
        interrupts: sink::interrupt_entries(kernel),
        arch: kernel.arch().name().to_owned(),
        big_endian: kernel.arch().byte_order() == ByteOrder::Big,
        recorded_by: None,
    }
}
