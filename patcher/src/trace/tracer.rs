//! Traces one guest for several clients at once.
//!
//! The union of all their functions is armed. What comes and goes with a client is one patchset: the
//! functions that no other client traces are armed, and put back, in one stop each. The trampoline,
//! the rings and the order of time are everybody's; which records are whose is told by the function
//! that a record names, and by its index in its ring: each ring's head is looked at while the guest
//! stands for a client's sake, and the records between two such looks are that client's.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;
use std::{io, iter};

use super::arm;
use super::client::Client;
use super::filter::Filter;
use super::merge::Merger;
use super::names::Names;
use super::ring::{RawRecord, RingCorrupt, RingReader};
use super::select::{SelectError, Selection};
use super::sink::Event;
use crate::addr::Gva;
use crate::arch::{Logger, PadLayout};
use crate::kernel::{Kernel, MappedRegion, Pads, PadsError, Site};
use crate::machine::{Machine, StopTimes};
use crate::patch::{self, Applied, Patchset, PlanError, Reverted};
use crate::region::{Part, RingLayout};

pub use super::arm::{ArmError, Armed, DisarmError};
pub use super::client::Summary;

/// How many clients can trace a guest at the same time.
pub const MAX_CLIENTS: usize = 16;

/// A client of a [`Tracer`]; never given out twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientId(u64);

/// A function that is traced, or was.
struct Member {
    site: patch::Site,
    /// As the kernel's list of pads has it.
    listed: Site,
    armed: bool,
    /// The clients for whom it is to be armed, by their slots.
    wanted_by: u16,
    /// The clients that its records go to: also those that still have to get their last ones.
    heard_by: u16,
}

const _: () = assert!(MAX_CLIENTS <= u16::BITS as usize);

/// Traces a guest. Each client brings an `S`, which is what its events are given to.
///
/// Dropping a tracer puts back what is armed, as well as it can.
pub struct Tracer<'m, S> {
    machine: &'m dyn Machine,
    kernel: &'m Kernel,
    rings: RingLayout,
    /// By how far behind the site's instruction functions go on.
    trampolines: BTreeMap<u16, Gva>,
    readers: Vec<RingReader>,
    merger: Merger,
    names: Names<'m>,
    /// By the index that `names` gives. None ever leaves: a task that was preempted in the trampoline
    /// may write a record long after its function was put back.
    members: Vec<Member>,
    applied: Option<Applied>,
    clients: [Option<Client<S>>; MAX_CLIENTS],
    next_id: u64,
    ticks: Ticks,
}

impl<'m, S> Tracer<'m, S> {
    /// Prepares to trace: places the trampolines, which nothing leads to yet.
    ///
    /// # Errors
    /// [`ArmError`]; the guest's text is not touched.
    pub fn new(
        machine: &'m dyn Machine,
        kernel: &'m Kernel,
        region: &MappedRegion,
    ) -> Result<Self, ArmError> {
        let arch = kernel.arch();
        let ram = machine.ram();
        let logger = Logger {
            cpu_number: kernel.cpu_number(ram)?,
            rings: region.rings(),
            clock: true,
            resume: 0,
            returns: kernel.return_form(ram)?,
        };
        let place = |resume| {
            let at = region.code().place(&machine.region(Part::Code), |at| {
                let logger = Logger { resume, ..logger };
                arch.assemble_logger(at, &logger).map_err(ArmError::from)
            })?;
            Ok((resume, at))
        };
        let resumes: BTreeSet<u16> = iter::once(&PadLayout::SINGLE)
            .chain(arch.pad_layouts())
            .map(|layout| layout.resume)
            .collect();
        let trampolines = resumes.into_iter().map(place).collect::<Result<_, ArmError>>()?;
        if let Some(journal) = machine.journal() {
            journal.note_code(region.code().used())?;
        }
        Ok(Self {
            machine,
            kernel,
            rings: region.rings(),
            trampolines,
            readers: Vec::new(),
            merger: Merger::default(),
            names: Names::new(kernel),
            members: Vec::new(),
            applied: None,
            clients: [const { None }; MAX_CLIENTS],
            next_id: 0,
            ticks: Ticks::new(machine.clock_hz()),
        })
    }

    /// The kernel's pads as they are now. Functions that this tracer has armed are among those that
    /// may be written, with their original bytes.
    ///
    /// # Errors
    /// They can't be listed.
    pub fn pads(&self) -> Result<Pads, PadsError> {
        let mut pads = self.kernel.pads(self.machine.ram())?;
        let mut ours: Vec<&Site> = self.armed().map(|member| &member.listed).collect();
        ours.sort_unstable_by_key(|site| site.at);
        let is_ours = |at: Gva| ours.binary_search_by_key(&at, |site| site.at).is_ok();
        pads.refused.retain(|refused| !is_ours(refused.at));
        pads.sites.retain(|site| !is_ours(site.at));
        pads.sites.extend(ours.iter().copied().cloned());
        pads.sites.sort_by_key(|site| site.at);
        Ok(pads)
    }

    /// The addresses of the pads that hold this tracer's instruction, in no order, and how many
    /// clients trace the function.
    pub fn armed_pads(&self) -> impl Iterator<Item = (Gva, u32)> {
        self.armed().map(|member| (member.site.at, member.wanted_by.count_ones()))
    }

    fn armed(&self) -> impl Iterator<Item = &Member> {
        let ram = self.machine.ram();
        self.members.iter().filter(move |member| {
            let mut found = member.site.replacement;
            member.armed
                && ram.read(member.site.gpa, &mut found).is_ok()
                && found == member.site.replacement
        })
    }

    /// Chooses among the pads as they are now.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn select(&self, filter: &Filter) -> Result<Selection, SelectError> {
        Ok(Selection::among(self.pads()?, filter)?)
    }

    /// Begins to trace the selected functions for a new client. Those that are not armed yet are, all
    /// of them in one stop or none. What is recorded from then on is given to `sink`.
    ///
    /// # Errors
    /// [`ArmError`]; the guest's text is then as it was, but for
    /// [`ApplyError::Torn`](patch::ApplyError::Torn).
    pub fn add(&mut self, selection: &Selection, sink: S) -> Result<(ClientId, Armed), ArmError> {
        let free = self.clients.iter().position(Option::is_none);
        let slot = free.ok_or(ArmError::TooManyClients)?;
        if selection.sites.is_empty() {
            return Err(PlanError::Empty.into());
        }
        if self.clients.iter().all(Option::is_none) {
            // Nobody has read the rings for a while, and nobody needs what is in them.
            self.readers = self.fresh_readers()?;
            self.merger = Merger::default();
        }
        let indices: Vec<usize> =
            selection.sites.iter().map(|site| self.member(site)).collect::<Result<_, _>>()?;
        let new = indices.iter().map(|index| &self.members[*index]).filter(|member| !member.armed);
        let new: Vec<patch::Site> = new.map(|member| member.site.clone()).collect();

        let mut armed = Armed { functions: indices.len(), ..Armed::default() };
        let (machine, kernel, readers) = (self.machine, self.kernel, &mut self.readers);
        let mut stops = Vec::new();
        if new.is_empty() {
            look(machine, readers);
        } else {
            let patchset = Patchset::plan(new)?;
            let (applied, times) =
                arm::apply(machine, kernel, &patchset, &mut || look(machine, readers))?;
            self.applied = Some(match self.applied.take() {
                Some(before) => before.join(applied),
                None => applied,
            });
            stops.push(times.stop);
            armed = Armed { functions: indices.len(), ..times };
        }
        for index in indices {
            let member = &mut self.members[index];
            member.armed = true;
            member.wanted_by |= 1 << slot;
            member.heard_by |= 1 << slot;
        }
        let id = self.next_id;
        self.next_id += 1;
        self.clients[slot] = Some(Client::new(id, sink, heads(&self.readers), stops));
        Ok((ClientId(id), armed))
    }

    /// The index of the member that `site` is, which is made if there is none.
    fn member(&mut self, site: &Site) -> Result<usize, ArmError> {
        let ip = record_ip(site.at, &site.original);
        let index = self.names.index_of(ip.0 as u32);
        if let Some(index) = index
            && self.members[index].armed
        {
            return Ok(index);
        }
        let trampoline = self.trampolines[&site.layout.resume];
        let replacement = self.kernel.arch().encode_branch(site.at, trampoline)?;
        let index = index.unwrap_or_else(|| self.names.add(&site.name, ip));
        let member = Member {
            site: patch::Site {
                function: Arc::clone(self.names.function(index)),
                at: site.at,
                gpa: site.gpa,
                original: site.original,
                replacement,
            },
            listed: site.clone(),
            armed: false,
            wanted_by: 0,
            heard_by: 0,
        };
        match self.members.get_mut(index) {
            // It was armed before; some client may still have to get its last records.
            Some(known) => *known = Member { heard_by: known.heard_by, ..member },
            None => self.members.push(member),
        }
        Ok(index)
    }

    fn fresh_readers(&self) -> Result<Vec<RingReader>, RingCorrupt> {
        let window = self.machine.region(Part::Rings);
        let cpus = 0..self.rings.cpus();
        let order = self.kernel.arch().byte_order();
        cpus.map(|cpu| RingReader::new(&window.memory, self.rings, cpu, order)).collect()
    }

    /// Ends a client's trace: what no other client traces is put back in one stop. Records until then
    /// are still to come, by [`Tracer::drain`], until [`Tracer::is_settled`] says so.
    ///
    /// # Errors
    /// [`DisarmError`]; what could not be put back is tried again with the next client that goes, or
    /// by calling this again.
    pub fn remove(&mut self, client: ClientId) -> Result<(), DisarmError> {
        let Some(slot) = self.slot(client) else { return Ok(()) };
        for member in &mut self.members {
            member.wanted_by &= !(1 << slot);
        }
        let mut stops = Vec::new();
        let result = self.put_back(&mut stops);
        if result.is_err() || stops.is_empty() {
            look(self.machine, &mut self.readers);
        }
        let heads = heads(&self.readers);
        if let Some(client) = &mut self.clients[slot] {
            client.end_at(heads);
            client.stops.append(&mut stops);
            if let Ok(reverted) = &result {
                client.reverted = Some(reverted.clone());
            }
        }
        result.map(drop)
    }

    /// Puts back every function that no client wants.
    fn put_back(&mut self, stops: &mut Vec<StopTimes>) -> Result<Reverted, DisarmError> {
        let Some(applied) = self.applied.take() else { return Ok(Reverted::default()) };
        let (names, members) = (&self.names, &mut self.members);
        let index =
            |site: &patch::Site| names.index_of(record_ip(site.at, &site.original).0 as u32);
        let is_wanted =
            |site: &patch::Site| index(site).is_some_and(|index| members[index].wanted_by != 0);
        let (staying, going) = applied.partition(is_wanted);
        let Some(going) = going else {
            self.applied = staying;
            return Ok(Reverted::default());
        };
        let (machine, readers) = (self.machine, &mut self.readers);
        let result =
            arm::revert(machine, self.kernel, &going, stops, &mut || look(machine, readers));
        match result {
            Ok(reverted) => {
                for index in going.sites().iter().filter_map(index) {
                    members[index].armed = false;
                }
                self.applied = staying;
                Ok(reverted)
            }
            Err(error) => {
                self.applied = Some(match staying {
                    Some(staying) => staying.join(going),
                    None => going,
                });
                Err(error)
            }
        }
    }

    /// Takes what the rings hold and gives out what is in order by now: each event to the sinks of
    /// those clients that trace its function, by `give`. Tells how many records there were.
    ///
    /// An error of `give` ends what that client is given, except [`io::ErrorKind::WouldBlock`]; see
    /// [`Sink::event`](super::sink::Sink::event).
    pub fn drain(&mut self, mut give: impl FnMut(&mut S, &Event<'_>) -> io::Result<()>) -> usize {
        let window = self.machine.region(Part::Rings);
        look(self.machine, &mut self.readers);
        let mut taken = 0;
        for (cpu, reader) in self.readers.iter_mut().enumerate() {
            let records = self.merger.incoming();
            let before = records.len();
            while !reader.read(&window.memory, records, READ_AT_ONCE) {}
            // What no site can have written, the guest has.
            let names = &self.names;
            let strange = records[before..].iter().position(|r| names.index_of(r.ip).is_none());
            if let Some(strange) = strange {
                let ip = records[before + strange].ip;
                records.truncate(before + strange);
                reader.give_up(RingCorrupt::Function { cpu, ip });
            }
            taken += records.len() - before;
            for client in self.clients.iter_mut().flatten() {
                client.note_losses(cpu, reader);
            }
        }
        let pending = self.readers.iter().map(RingReader::pending).sum();
        let (names, members, clients) = (&mut self.names, &self.members, &mut self.clients);
        let ticks = self.ticks;
        self.merger.pass(pending, Instant::now(), |record| {
            let Some(index) = names.index_of(record.ip) else { return };
            let mut slots = members[index].heard_by;
            if slots == 0 {
                return;
            }
            let event = event(names, ticks, record, index);
            while slots != 0 {
                let slot = slots.trailing_zeros() as usize;
                slots &= slots - 1;
                if let Some(client) = &mut clients[slot]
                    && client.owns(record)
                {
                    client.give(index, &event, &mut give);
                }
            }
        });
        taken
    }

    /// Whether every record of a client that was removed has been read. One that has not yet been
    /// written, because its writer is preempted, may never be.
    #[must_use]
    pub fn is_settled(&self, client: ClientId) -> bool {
        let Some(slot) = self.slot(client) else { return true };
        let client = self.clients[slot].as_ref();
        let pending = |client: &Client<S>| {
            let mut rings = self.readers.iter().enumerate();
            rings.any(|(cpu, reader)| client.pending(cpu, reader) > 0)
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
        let mut last: Vec<(RawRecord, usize)> = (self.merger.held().iter())
            .filter(|record| client.owns(record))
            .filter_map(|record| Some((*record, names.index_of(record.ip)?)))
            .filter(|(_, index)| members[*index].heard_by & 1 << slot != 0)
            .collect();
        last.sort_by_key(|(record, _)| record.time);
        for (record, index) in last {
            let event = event(names, self.ticks, &record, index);
            client.give(index, &event, &mut give);
        }
        for member in members {
            member.heard_by &= !(1 << slot);
        }
        let summary = client.summary(&self.readers, &self.names);
        Some(Finished { summary, sink: client.sink, failure: client.failure })
    }

    /// Where a client's trace stands; `None` if there is no such client.
    #[must_use]
    pub fn progress(&self, client: ClientId) -> Option<Progress<'_, S>> {
        let client = self.clients[self.slot(client)?].as_ref()?;
        Some(Progress {
            events: client.events(),
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

impl<S> Drop for Tracer<'_, S> {
    fn drop(&mut self) {
        for member in &mut self.members {
            member.wanted_by = 0;
        }
        // Nobody is left to be told.
        let _ = self.put_back(&mut Vec::new());
    }
}

/// Where a client's trace stands.
#[derive(Debug)]
pub struct Progress<'a, S> {
    /// Events that the client has taken.
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

/// Records taken from a ring before the next look at how many there are.
const READ_AT_ONCE: usize = 1 << 16;

/// The address that the records of the site at `at` carry: the one behind its instruction.
fn record_ip(at: Gva, instruction: &[u8]) -> Gva {
    at + instruction.len() as u64
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

fn event<'n>(
    names: &'n mut Names<'_>,
    ticks: Ticks,
    record: &RawRecord,
    index: usize,
) -> Event<'n> {
    let (function, caller) = names.of(record, index);
    Event { time_ns: ticks.nanoseconds(record.time), cpu: record.cpu, function, caller }
}

/// Turns ticks of the guest's clock into nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Ticks {
    /// Nanoseconds in 2³² ticks.
    scale: u128,
}

impl Ticks {
    fn new(hz: u64) -> Self {
        Self { scale: (1_000_000_000_u128 << 32) / u128::from(hz.max(1)) }
    }

    fn nanoseconds(self, ticks: u64) -> u64 {
        u64::try_from((u128::from(ticks) * self.scale) >> 32).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests;
