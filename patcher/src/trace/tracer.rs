//! Traces one guest for several clients at once.
//!
//! The union of all their functions is armed, by way of [`Hooks`]. What comes and goes with a client is
//! one change there: the functions that no other client traces are armed, and put back, in one stop
//! each. The trampoline, the rings and the order of time are everybody's; which records are whose is told by the function
//! that a record names, and by its index in its ring: each ring's head is looked at while the guest
//! stands for a client's sake, and the records between two such looks are that client's.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::VolatileSlice;

use super::client::{Client, Heads, Later};
use super::counts::Counts;
use super::graph::Graph;
use super::latency::Latencies;
use super::merge::Merger;
use super::names::Names;
use super::ring::{RawRecord, RingCorrupt, RingReader};
use super::select::{Selection, WantedValues};
use super::sink::Event;
use super::tasks::Tasks;
use super::values::Encoder;
use crate::addr::Gva;
use crate::arch::{ArgumentWords, ByteOrder};
use crate::hook::{GateId, HookError, Hooks, Method, ReleaseError, Want, Witness};
use crate::kernel::{Kernel, PadsError, Prototypes, Site, TypesError};
use crate::machine::{Machine, StopTimes};
use crate::patch::{Foreign, PlanError, Reverted};
use crate::region::{Histogram, Part, RegionError, RingLayout};

mod gates;
mod modules;
mod recorder;

pub use super::client::Summary;
use gates::Gated;
use modules::Modules;
pub use modules::{ModuleChange, ModuleNews};
pub use recorder::Held;

mod events;
mod values;

use events::{Ticks, Told};
use values::{Format, Memory};

/// How many clients can trace a guest at the same time.
pub const MAX_CLIENTS: usize = 16;

/// A client of a [`Tracer`]; never given out twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientId(u64);

/// Functions could not be armed; the guest runs on, and its text is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArmError {
    /// Their pads could not be changed.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// A ring can't be read.
    #[error(transparent)]
    Ring(#[from] RingCorrupt),
    /// There are as many clients as there can be.
    #[error("the guest is traced by {MAX_CLIENTS} clients already; end one of them first")]
    TooManyClients,
    /// The pads of modules that have come can't be listed.
    #[error(transparent)]
    Pads(#[from] PadsError),
    /// Modules came and went for too long.
    #[error(
        "functions of too many modules have been traced one after the other; end this trace and \
         begin another"
    )]
    TooManyFunctions,
}

/// How arming went.
#[derive(Debug, Clone, Copy, Default)]
pub struct Armed {
    /// Functions that are traced.
    pub functions: usize,
    /// Those of them that were not armed before.
    pub written: usize,
    /// The stop in which they were; of no length if there was none to arm.
    pub stop: StopTimes,
    /// The part of [`StopTimes::held`] that comparing took.
    pub verify: Duration,
    /// The part of [`StopTimes::held`] that writing and reading back took.
    pub write: Duration,
}

/// A function that is traced, or was.
struct Member {
    /// As the kernel's list of pads has it.
    listed: Site,
    /// The clients for whom it is to be armed, by their slots.
    wanted_by: u16,
    /// The clients for whom its calls are to be counted.
    counted_by: u16,
    /// The clients for whom it is to be measured how long its calls take.
    measured_by: u16,
    /// The clients that its records go to: also those that still have to get their last ones.
    heard_by: u16,
    /// What its calls and returns tell, once somebody has asked for that.
    format: Option<Arc<Format>>,
}

impl Member {
    fn new(site: &Site) -> Self {
        let listed = site.clone();
        Self { listed, wanted_by: 0, counted_by: 0, measured_by: 0, heard_by: 0, format: None }
    }

    /// The clients for whom something is wanted of it.
    fn clients(&self) -> u16 {
        self.wanted_by | self.counted_by | self.measured_by
    }

    /// Nothing is wanted of it for these clients any more.
    fn leave(&mut self, clients: u16) {
        for by in [&mut self.wanted_by, &mut self.counted_by, &mut self.measured_by] {
            *by &= !clients;
        }
    }
}

const _: () = assert!(MAX_CLIENTS <= u16::BITS as usize);

/// Traces a guest. Each client brings an `S`, which is what its events are given to.
///
/// What is armed stays so when a tracer is dropped, until the [`Hooks`] are.
pub struct Tracer<'m, S> {
    machine: &'m dyn Machine,
    kernel: &'m Kernel,
    rings: RingLayout,
    order: ByteOrder,
    readers: Vec<RingReader>,
    merger: Merger,
    names: Names<'m>,
    tasks: Tasks<'m>,
    /// By the index that `names` gives. None ever leaves: a task that was preempted in the trampoline
    /// may write a record long after its function was put back.
    members: Vec<Member>,
    /// How many of the stubs are known to `names`.
    stubs: usize,
    clients: [Option<Client<S>>; MAX_CLIENTS],
    next_id: u64,
    ticks: Ticks,
    modules: Modules,
    /// What functions take, once somebody has asked for that.
    prototypes: Option<Result<Prototypes, TypesError>>,
    encoder: Encoder,
}

impl<'m, S> Tracer<'m, S> {
    /// Prepares to trace: places the trampolines, which nothing leads to yet.
    ///
    /// # Errors
    /// [`ArmError`]; the guest's text is not touched.
    pub fn new(hooks: &mut Hooks<'m>) -> Result<Self, ArmError> {
        hooks.prepare_tracing()?;
        let machine = hooks.machine();
        Ok(Self {
            machine,
            kernel: hooks.kernel(),
            rings: hooks.region().rings(),
            order: hooks.kernel().arch().byte_order(),
            readers: Vec::new(),
            merger: Merger::default(),
            names: Names::new(hooks.kernel()),
            tasks: Tasks::new(hooks.kernel(), hooks.recorded_places()),
            members: Vec::new(),
            stubs: 0,
            clients: [const { None }; MAX_CLIENTS],
            next_id: 0,
            ticks: Ticks::new(machine.clock_hz()),
            modules: Modules::new(),
            prototypes: None,
            encoder: Encoder::default(),
        })
    }

    /// Whether events tell what a CPU was in the middle of; see
    /// [`Beginning::contexts`](super::sink::Beginning::contexts).
    #[must_use]
    pub fn contexts(&self) -> bool {
        self.tasks.contexts()
    }

    /// The addresses of the pads of functions that are traced, in no order, and for how many clients.
    pub fn armed_pads(&self, hooks: &Hooks<'m>) -> impl Iterator<Item = (Gva, u32)> {
        let members = self.members.iter().enumerate().filter(|(index, member)| {
            let at = member.listed.at;
            self.is_there(*index) && hooks.want(at).notices_calls() && hooks.is_in_force(at)
        });
        members.map(|(_, member)| (member.listed.at, member.clients().count_ones()))
    }

    /// Begins to trace the selected functions for a new client. Those that are not armed yet are, all
    /// of them in one stop or none. What is recorded from then on is given to `sink`.
    ///
    /// # Errors
    /// [`ArmError`]; the guest's text is then as it was, but for
    /// [`ApplyError::Torn`](crate::patch::ApplyError::Torn).
    pub fn add(
        &mut self,
        hooks: &mut Hooks<'m>,
        selection: &Selection,
        sink: S,
    ) -> Result<(ClientId, Armed), ArmError> {
        let free = self.clients.iter().position(Option::is_none);
        let slot = free.ok_or(ArmError::TooManyClients)?;
        if selection.sites.is_empty() && !selection.filter.names_modules() {
            return Err(HookError::from(PlanError::Empty).into());
        }
        let is_first = self.clients.iter().all(Option::is_none);
        if is_first {
            // Nobody has read the rings for a while, and nobody needs what is in them.
            self.readers = self.fresh_readers()?;
            self.merger = Merger::default();
        }
        self.meet_modules(hooks, is_first.then_some(&selection.modules));
        let indices: Vec<usize> =
            selection.sites.iter().map(|site| self.member(site, hooks)).collect();
        if selection.values != WantedValues::default() {
            indices.iter().for_each(|index| self.learn_format(*index));
        }
        let gated = Gated::new(hooks, selection)?;
        let wants: Vec<(&Site, Want)> = (selection.sites.iter().zip(&indices).enumerate())
            .map(|(at, (site, index))| (site, *index, hooks.want(site.at), gated.gate(at)))
            .map(|(site, index, want, gate)| {
                (site, want, self.wanted_too(want, selection, index, gate))
            })
            .filter(|(_, want, wanted)| want != wanted)
            .map(|(site, _, wanted)| (site, wanted))
            .collect();
        let functions = indices.iter().map(|index| *index as u32);
        let counts = match selection.counts {
            true => Some(Counts::new(hooks, functions.clone().zip(selection.sites.clone()))?),
            false => None,
        };
        let latencies = match selection.measures {
            true => Some(Latencies::new(hooks, (functions, &selection.sites))?),
            false => None,
        };
        let turned_away = gated.counts(hooks, &selection.sites, &indices)?;
        let look = &mut Look { machine: self.machine, readers: &mut self.readers };
        let changed = hooks.change(&wants, Foreign::Refuse, look)?;
        if changed.stops.is_empty() {
            look.after();
        }
        self.names.divide(&heads(&self.readers).into());
        let armed = Armed {
            functions: indices.len(),
            written: changed.written,
            stop: changed.stops.last().copied().unwrap_or_default(),
            verify: changed.verify,
            write: changed.write,
        };
        for (site, &index) in selection.sites.iter().zip(&indices) {
            let member = &mut self.members[index];
            if counts.is_some() {
                member.counted_by |= 1 << slot;
            } else if latencies.is_some() {
                member.measured_by |= 1 << slot;
            } else {
                member.wanted_by |= 1 << slot;
                member.heard_by |= 1 << slot;
            }
            self.modules.note(site, index);
        }
        let id = self.next_id;
        self.next_id += 1;
        let graph = selection.graph.as_ref().map(|options| {
            let is_root = |index: &usize| {
                options.functions.iter().any(|glob| glob.matches(self.names.function(*index)))
            };
            let roots = indices.iter().filter(|index| is_root(index)).map(|index| *index as u32);
            Graph::new(options.clone(), roots.collect())
        });
        let later = Later {
            filter: selection.filter.clone(),
            method: selection.method,
            returns: selection.graph.is_some(),
            values: selection.values,
            calls: selection.calls.clone().map(Arc::new),
        };
        let heads = Heads::of(&self.readers);
        let mut client = Client::new(id, sink, (graph, counts), heads, changed.stops, later);
        client.overwrites = selection.overwrite;
        client.turned_away = turned_away;
        client.latencies = latencies;
        if client.takes_returns() {
            client.slots_missed.start = hooks.missed_returns();
        }
        self.clients[slot] = Some(client);
        Ok((ClientId(id), armed))
    }

    /// The index of the member that `site` is, which is made if there is none.
    fn member(&mut self, site: &Site, hooks: &Hooks<'m>) -> usize {
        let ip = record_ip(site.at, &site.original);
        let index = self.names.index_of(ip.0 as u32);
        if let Some(index) = index
            && hooks.want(site.at).notices_calls()
        {
            return index;
        }
        let index = self.names.add(site, ip);
        let member = Member::new(site);
        match self.members.get_mut(index) {
            // It was armed before; some client may still have to get its last records.
            Some(known) => {
                let (heard_by, format) = (known.heard_by, known.format.take());
                *known = Member { heard_by, format, ..member };
            }
            None => self.members.push(member),
        }
        index
    }

    /// Whether a member is what is at its address, and not what was there in a module that is gone.
    fn is_there(&self, index: usize) -> bool {
        let listed = &self.members[index].listed;
        let ip = record_ip(listed.at, &listed.original);
        self.names.index_of(ip.0 as u32) == Some(index)
    }

    /// Finds out what the calls and returns of a function tell.
    fn learn_format(&mut self, index: usize) {
        let (kernel, ram) = (self.kernel, self.machine.ram());
        let prototypes = self.prototypes.get_or_insert_with(|| kernel.prototypes(ram));
        let member = &mut self.members[index];
        member.format.get_or_insert_with(|| {
            Arc::new(Format::of(kernel, prototypes.as_ref().ok(), &member.listed))
        });
    }

    /// Why the values of calls have no types, if somebody has asked for them and that is so.
    #[must_use]
    pub fn without_types(&self) -> Option<&TypesError> {
        self.prototypes.as_ref()?.as_ref().err()
    }

    /// What the pad of the member with that index is to do that does what `want` says, for a client with that
    /// selection as well. Returns and arguments are recorded only of what is traced by calls, and only traces
    /// are of calls that a gate lets through.
    fn wanted_too(
        &self,
        want: Want,
        selection: &Selection,
        index: usize,
        gate: Option<GateId>,
    ) -> Want {
        let calls_code = want.counted || want.measured;
        let method = if calls_code { Method::Call } else { selection.method };
        let mut wanted = match selection.graph {
            // A pad that is a trap calls nothing.
            _ if selection.counts => {
                Want { counted: true, traced: want.traced.map(|_| Method::Call), ..want }
            }
            _ if selection.measures => {
                Want { measured: true, traced: want.traced.map(|_| Method::Call), ..want }
            }
            Some(_) => Want { traced: Some(Method::Call), returns: true, gate, ..want },
            None => Want { traced: want.traced.or(Some(method)), gate, ..want },
        };
        if selection.values.arguments {
            wanted.traced = Some(Method::Call);
            wanted.arguments = self.argument_words(index);
        }
        wanted
    }

    /// The words of the arguments of a member that are recorded where somebody asks for them.
    fn argument_words(&self, index: usize) -> ArgumentWords {
        self.members[index].format.as_ref().map_or(ArgumentWords::NONE, |format| format.words())
    }

    fn fresh_readers(&self) -> Result<Vec<RingReader>, RingCorrupt> {
        let window = self.machine.region(Part::Rings);
        let cpus = 0..self.rings.cpus();
        cpus.map(|cpu| RingReader::new(&window.memory, self.rings, cpu, self.order)).collect()
    }

    /// Ends a client's trace: what no other client traces is put back in one stop. Records until then
    /// are still to come, by [`Tracer::drain`], until [`Tracer::is_settled`] says so.
    ///
    /// # Errors
    /// [`ReleaseError`]; what could not be put back is tried again with the next client that goes, or
    /// by calling this again.
    pub fn remove(&mut self, hooks: &mut Hooks<'m>, client: ClientId) -> Result<(), ReleaseError> {
        let Some(slot) = self.slot(client) else { return Ok(()) };
        for member in &mut self.members {
            member.leave(1 << slot);
        }
        let wants: Vec<(&Site, Want)> = (self.members.iter().enumerate())
            .filter(|(index, _)| self.is_there(*index))
            .map(|(_, member)| (member, hooks.want(member.listed.at)))
            .filter_map(|(member, want)| Some((&member.listed, self.still_wanted(member, want)?)))
            .collect();
        let look = &mut Look { machine: self.machine, readers: &mut self.readers };
        let result = hooks.release(&wants, look);
        if result.as_ref().map_or(true, |changed| changed.stops.is_empty()) {
            look.after();
        }
        let heads = Heads::of(&self.readers);
        if let Some(client) = &mut self.clients[slot] {
            client.end_at(heads);
            for counts in [&mut client.counts, &mut client.turned_away].into_iter().flatten() {
                if let Err(error) = counts.end(hooks) {
                    client.failure.get_or_insert(io::Error::other(error));
                }
            }
            if let Some(latencies) = &mut client.latencies
                && let Err(error) = latencies.end(hooks)
            {
                client.failure.get_or_insert(io::Error::other(error));
            }
            if client.takes_returns() {
                client.slots_missed.end = hooks.missed_returns();
            }
            if let Ok(changed) = &result {
                client.stops.extend(&changed.stops);
                client.reverted = Some(Reverted {
                    restored: changed.written,
                    already: changed.already,
                    foreign: changed.foreign.clone(),
                    failed: Vec::new(),
                });
            }
        }
        result.map(drop)
    }

    /// What the pad of a function is still to do, if that is less than `want`, which it does now.
    fn still_wanted(&self, member: &Member, want: Want) -> Option<Want> {
        let slots = (0..MAX_CLIENTS).filter(|slot| member.wanted_by & 1 << slot != 0);
        let clients: Vec<_> = slots.filter_map(|slot| self.clients[slot].as_ref()).collect();
        let returns = clients.iter().any(|client| client.graph.is_some());
        let counted = want.counted && member.counted_by != 0;
        let measured = want.measured && member.measured_by != 0;
        let mut still = Want { counted, measured, ..want };
        if member.wanted_by == 0 {
            (still.traced, still.gate) = (None, None);
        }
        if !clients.iter().any(|client| client.values.arguments) {
            still.arguments = ArgumentWords::NONE;
        }
        still.returns &= returns && still.traced.is_some();
        (still != want).then_some(still)
    }

    /// Takes what the rings hold and gives out what is in order by now: each event to the sinks of
    /// those clients that trace its function, by `give`. Tells how many records there were. Of those that
    /// are given nothing until they ask ([`Tracer::hold`]) nothing is read.
    ///
    /// An error of `give` ends what that client is given, except [`io::ErrorKind::WouldBlock`]; see
    /// [`Sink::event`](super::sink::Sink::event).
    pub fn drain(
        &mut self,
        hooks: &Hooks<'m>,
        mut give: impl FnMut(&mut S, &Event<'_>) -> io::Result<()>,
    ) -> usize {
        self.learn_stubs(hooks);
        let window = self.machine.region(Part::Rings);
        look(self.machine, &mut self.readers);
        let now = Instant::now();
        if self.clients.iter().flatten().all(|client| client.overwrites) {
            self.tasks.remember(self.machine.ram(), now);
            return 0;
        }
        let mut taken = 0;
        for (cpu, reader) in self.readers.iter_mut().enumerate() {
            let records = self.merger.incoming();
            let before = records.len();
            read_ring(reader, &window.memory, cpu, &self.names, records);
            taken += records.len() - before;
            self.tasks.meet(&records[before..], self.machine.ram(), now);
            for client in self.clients.iter_mut().flatten().filter(|client| !client.overwrites) {
                client.note_losses(cpu, reader);
            }
        }
        let pending = self.readers.iter().map(RingReader::pending).sum();
        let (names, members, clients) = (&mut self.names, &self.members, &mut self.clients);
        let tasks = &mut self.tasks;
        let ticks = self.ticks;
        let (memory, encoder) =
            (memory(self.kernel, self.machine, &self.prototypes), &mut self.encoder);
        self.merger.pass(pending, Instant::now(), |record| {
            let Some(told) = Told::of(record, names) else { return };
            let mut slots = members[told.index].heard_by;
            while slots != 0 {
                let slot = slots.trailing_zeros() as usize;
                slots &= slots - 1;
                if let Some(client) = &mut clients[slot]
                    && !client.overwrites
                    && client.owns(record)
                    && let Some(event) = told.event(client.graph.as_mut(), names, tasks, ticks)
                {
                    let format = members[told.index].format.as_deref();
                    let values = told.values(&event, client.values, format, memory, encoder);
                    client.give(record, told.index, &Event { values, ..event }, &mut give);
                }
            }
        });
        taken
    }

    /// Names the stubs that were made since this was last called. No record of one can have been read
    /// yet: whoever makes stubs lends the hooks to nobody who drains meanwhile.
    fn learn_stubs(&mut self, hooks: &Hooks<'m>) {
        for stub in &hooks.stubs()[self.stubs..] {
            let pad_ip = stub.pad + (stub.ip.0 - stub.at.0);
            self.names.add_alias(pad_ip, stub.ip);
        }
        self.stubs = hooks.stubs().len();
    }

    /// Whether every record of a client that was removed has been read. One that has not yet been
    /// written, because its writer is preempted, may never be.
    #[must_use]
    pub fn is_settled(&self, client: ClientId) -> bool {
        let Some(slot) = self.slot(client) else { return true };
        let client = self.clients[slot].as_ref();
        let pending = |client: &Client<S>| {
            let mut rings = self.readers.iter().enumerate();
            // Whoever asks for what is held sees himself what is not written of it.
            !client.overwrites && rings.any(|(cpu, reader)| client.pending(cpu, reader) > 0)
        };
        !client.is_some_and(pending)
    }

    /// Gives a client that was removed what is left of its events, and forgets it. `None` if there is
    /// no such client.
    pub fn finish(
        &mut self,
        client: ClientId,
        mut give: impl FnMut(&mut S, &Event<'_>) -> io::Result<()>,
    ) -> Option<Finished<S>> {
        let slot = self.slot(client)?;
        let mut client = self.clients[slot].take()?;
        let (names, members) = (&mut self.names, &mut self.members);
        let (memory, encoder) =
            (memory(self.kernel, self.machine, &self.prototypes), &mut self.encoder);
        let mut last: Vec<Told<'_>> = (self.merger.held().iter())
            .filter(|record| !client.overwrites && client.owns(record))
            .filter_map(|record| Told::of(record, names))
            .filter(|told| members[told.index].heard_by & 1 << slot != 0)
            .collect();
        last.sort_by_key(|told| told.record.time);
        for told in last {
            let graph = client.graph.as_mut();
            if let Some(event) = told.event(graph, names, &mut self.tasks, self.ticks) {
                let format = members[told.index].format.as_deref();
                let values = told.values(&event, client.values, format, memory, encoder);
                client.give(told.record, told.index, &Event { values, ..event }, &mut give);
            }
        }
        for member in members {
            member.heard_by &= !(1 << slot);
        }
        let summary = client.summary(&self.readers, &self.names);
        Some(Finished { summary, sink: client.sink, failure: client.failure })
    }

    /// For a client that counts: looks at the counters, and tells which functions were called since this
    /// was last asked, each by its index and how often it was called since the beginning. `None` for any
    /// other client.
    ///
    /// # Errors
    /// The region can't be read.
    pub fn counts(
        &mut self,
        hooks: &Hooks<'m>,
        client: ClientId,
    ) -> Option<Result<Vec<(u32, u64)>, RegionError>> {
        let slot = self.slot(client)?;
        let counts = self.clients[slot].as_mut()?.counts.as_mut()?;
        Some(counts.look(hooks).map(|()| counts.news()))
    }

    /// For a client that measures: looks at the histograms, and tells of which functions calls have returned
    /// since this was last asked, each by its index and how long its calls took since the beginning. `None`
    /// for any other client.
    ///
    /// # Errors
    /// The region can't be read.
    pub fn latencies(
        &mut self,
        hooks: &Hooks<'m>,
        client: ClientId,
    ) -> Option<Result<Vec<(u32, Histogram)>, RegionError>> {
        let slot = self.slot(client)?;
        let latencies = self.clients[slot].as_mut()?.latencies.as_mut()?;
        Some(latencies.look(hooks).map(|()| latencies.news()))
    }

    /// The name of the function with that index.
    #[must_use]
    pub fn function(&self, index: u32) -> &Arc<str> {
        self.names.function(index as usize)
    }

    /// Where a client's trace stands; `None` if there is no such client.
    #[must_use]
    pub fn progress(&self, client: ClientId) -> Option<Progress<'_, S>> {
        let client = self.clients[self.slot(client)?].as_ref()?;
        Some(Progress {
            events: match client.overwrites {
                true => client.records(&self.readers),
                false => client.events(),
            },
            missed: client.missed(),
            sink: &client.sink,
            failure: client.failure.as_ref(),
        })
    }

    /// What a client's events are given to; `None` if there is no such client.
    pub fn sink_mut(&mut self, client: ClientId) -> Option<&mut S> {
        let slot = self.slot(client)?;
        self.clients[slot].as_mut().map(|client| &mut client.sink)
    }

    /// Takes note that a client's sink has failed outside of [`Tracer::drain`]: it is given nothing
    /// any more.
    pub fn fail(&mut self, client: ClientId, error: io::Error) {
        let client = self.slot(client).and_then(|slot| self.clients[slot].as_mut());
        if let Some(client) = client {
            client.failure.get_or_insert(error);
        }
    }

    /// The rings that the guest has spoilt.
    pub fn corrupt(&self) -> impl Iterator<Item = &RingCorrupt> {
        self.readers.iter().filter_map(RingReader::corrupt)
    }

    fn slot(&self, id: ClientId) -> Option<usize> {
        self.clients.iter().position(|client| client.as_ref().is_some_and(|c| c.id == id.0))
    }
}

/// Where a client's trace stands.
#[derive(Debug)]
pub struct Progress<'a, S> {
    /// Events that the client has taken; of one that overwrites, records until now.
    pub events: u64,
    /// Those that it had no room for, and records that were lost.
    pub missed: u64,
    /// What its events are given to.
    pub sink: &'a S,
    /// Why it is given nothing any more.
    pub failure: Option<&'a io::Error>,
}

/// What a client leaves behind.
#[derive(Debug)]
pub struct Finished<S> {
    /// What its trace came to.
    pub summary: Summary,
    /// What its events were given to.
    pub sink: S,
    /// Why that was given nothing any more, if so.
    pub failure: Option<io::Error>,
}

/// Where values are looked up.
fn memory<'a>(
    kernel: &'a Kernel,
    machine: &'a dyn Machine,
    prototypes: &'a Option<Result<Prototypes, TypesError>>,
) -> Memory<'a> {
    let prototypes = prototypes.as_ref().and_then(|all| all.as_ref().ok());
    Memory { kernel, ram: machine.ram(), prototypes }
}

/// Records taken from a ring before the next look at how many there are.
const READ_AT_ONCE: usize = 1 << 16;

/// The address that the records of the site at `at` carry: the one behind its instruction.
fn record_ip(at: Gva, instruction: &[u8]) -> Gva {
    at + instruction.len() as u64
}

/// Appends to `records` what a ring holds that was not read yet. What no site can have written, the guest
/// has: nothing is believed from there on.
fn read_ring(
    reader: &mut RingReader,
    window: &VolatileSlice<'_>,
    cpu: usize,
    names: &Names<'_>,
    records: &mut Vec<RawRecord>,
) {
    let before = records.len();
    while !reader.read(window, records, READ_AT_ONCE) {}
    let is_strange =
        |record: &RawRecord| names.record_of(record).is_none() && !names.may_be_earlier(record.ip);
    if let Some(strange) = records[before..].iter().position(is_strange) {
        let ip = records[before + strange].ip;
        records.truncate(before + strange);
        reader.give_up(RingCorrupt::Function { cpu, ip });
    }
}

/// Looks at the heads of the rings while the guest stands.
struct Look<'a> {
    machine: &'a dyn Machine,
    readers: &'a mut Vec<RingReader>,
}

impl Witness for Look<'_> {
    fn after(&mut self) {
        look(self.machine, self.readers);
    }
}

fn look(machine: &dyn Machine, readers: &mut [RingReader]) {
    let window = machine.region(Part::Rings);
    for reader in readers {
        reader.look(&window.memory);
    }
}

fn heads(readers: &[RingReader]) -> Vec<u64> {
    readers.iter().map(RingReader::head).collect()
}

#[cfg(test)]
mod tests;
