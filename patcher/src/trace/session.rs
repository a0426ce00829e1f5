//! One tracing session: functions are chosen, armed in one stop, drained, and put back.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::filter::{Filter, FilterError};
use super::merge::Merger;
use super::names::Names;
use super::ring::{RawRecord, RingCorrupt, RingReader};
use super::sink::{Event, Sink};
use crate::arch::{Logger, OutOfReach};
use crate::kernel::{
    CpuNumberError, Kernel, MappedRegion, PadsError, Refused, ReturnFormError, Site,
};
use crate::machine::{Machine, StopError, StopTimes, Stopped};
use crate::patch::{Applied, ApplyError, Patchset, PlanError, Reverted, VerifyError};
use crate::region::RegionError;

/// The functions that a session is to trace.
#[derive(Debug)]
pub struct Selection {
    /// Those that can be.
    pub sites: Vec<Site>,
    /// Those that the filter names and that can't, with the reason.
    pub refused: Vec<Refused>,
    /// Pads that the kernel has, selected or not.
    pub pads: usize,
}

/// No functions could be chosen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelectError {
    /// The kernel's pads can't be listed.
    #[error(transparent)]
    Pads(#[from] PadsError),
    /// The filter names nothing.
    #[error(transparent)]
    Filter(#[from] FilterError),
}

impl Selection {
    /// Chooses among the pads of `kernel` as they are now. Nothing in the guest is touched.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn new(
        kernel: &Kernel,
        machine: &dyn Machine,
        filter: &Filter,
    ) -> Result<Self, SelectError> {
        let found = kernel.pads(machine.ram())?;
        let pads = found.sites.len() + found.refused.len();
        filter.check(
            found.sites.iter().map(|site| &*site.name),
            found.refused.iter().map(|refused| (&*refused.name, refused.why.label())),
        )?;
        let (mut sites, mut refused) = (found.sites, found.refused);
        sites.retain(|site| filter.selects(&site.name));
        refused.retain(|refused| filter.selects(&refused.name));
        Ok(Self { sites, refused, pads })
    }
}

/// Functions could not be armed; the guest runs on, and its text is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArmError {
    /// It could not be told how the guest's functions return.
    #[error(transparent)]
    ReturnForm(#[from] ReturnFormError),
    /// It could not be told where a CPU's number is.
    #[error(transparent)]
    CpuNumber(#[from] CpuNumberError),
    /// The region has no room for the trampoline.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// An instruction does not reach.
    #[error(transparent)]
    OutOfReach(#[from] OutOfReach),
    /// The sites can't be patched together.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The guest could not be stopped.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// A site is not what it was a moment ago.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// Writing failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A ring can't be read.
    #[error(transparent)]
    Ring(#[from] RingCorrupt),
}

/// How arming went.
#[derive(Debug, Clone, Copy)]
pub struct Armed {
    /// Functions armed.
    pub functions: usize,
    /// The stop in which they were.
    pub stop: StopTimes,
    /// The part of [`StopTimes::held`] that comparing took.
    pub verify: Duration,
    /// The part of [`StopTimes::held`] that writing and reading back took.
    pub write: Duration,
}

/// Where a session stands.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Events given to the sink.
    pub events: u64,
    /// Records that came too late to be read, by CPU.
    pub lost: Vec<u64>,
    /// Records that were reserved and never written, by CPU.
    pub unwritten: Vec<u64>,
    /// Events given out behind later ones.
    pub late: u64,
    /// Rings that the guest has spoilt.
    pub corrupt: Vec<RingCorrupt>,
    /// Calls of every function that was called, most first.
    pub functions: Vec<(Arc<str>, u64)>,
    /// Every stop of this session.
    pub stops: Vec<StopTimes>,
    /// What disarming found, once it was done.
    pub reverted: Option<Reverted>,
}

impl Summary {
    /// Records that are missing in the trace.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.lost.iter().chain(&self.unwritten).sum()
    }
}

/// The armed functions could not all be put back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DisarmError {
    /// The guest could not be stopped; its functions stay armed.
    #[error("the guest could not be stopped to put its functions back: {0}")]
    Stop(#[from] StopError),
    /// Some sites could not be written.
    #[error("{count} functions could not be put back, {first} the first of them: end this guest")]
    Failed {
        /// How many.
        count: usize,
        /// The first.
        first: Arc<str>,
    },
}

/// How often a stop is tried again when a vCPU is silent, or stands where it must not.
const STOP_TRIES: u32 = 10;

/// How long a try waits before the next; the first is followed by the shortest wait.
const STOP_BACKOFF: Duration = Duration::from_millis(2);

/// How long the last records are waited for once no function is armed any more: their writers are
/// preempted in the middle of one.
const LAST_RECORDS: Duration = Duration::from_secs(1);

/// A session that is armed.
pub struct Session<'m> {
    machine: &'m dyn Machine,
    kernel: &'m Kernel,
    applied: Option<Applied>,
    readers: Vec<RingReader>,
    merger: Merger,
    names: Names<'m>,
    ticks: Ticks,
    events: u64,
    stops: Vec<StopTimes>,
    reverted: Option<Reverted>,
}

impl<'m> Session<'m> {
    /// Arms the selected functions, all of them in one stop or none.
    ///
    /// # Errors
    /// [`ArmError`]; the guest's text is then as it was, but for [`ApplyError::Torn`].
    pub fn arm(
        machine: &'m dyn Machine,
        kernel: &'m Kernel,
        region: &MappedRegion,
        selection: &Selection,
    ) -> Result<(Self, Armed), ArmError> {
        let arch = kernel.arch();
        let ram = machine.ram();
        let logger = Logger {
            cpu_number: kernel.cpu_number(ram)?,
            rings: region.rings(),
            clock: true,
            resume: 0,
            returns: kernel.return_form(ram)?,
        };
        // One trampoline for each distance at which functions go on; most kernels know only one.
        let mut trampolines = BTreeMap::new();
        for resume in selection.sites.iter().map(|site| site.layout.resume) {
            if let Entry::Vacant(vacant) = trampolines.entry(resume) {
                vacant.insert(region.code().place(&machine.region_code(), |at| {
                    let logger = Logger { resume, ..logger };
                    arch.assemble_logger(at, &logger).map_err(ArmError::OutOfReach)
                })?);
            }
        }
        let sites = selection.sites.iter().map(|site| {
            Ok(crate::patch::Site {
                function: Arc::from(&*site.name),
                at: site.at,
                gpa: site.gpa,
                original: site.original,
                replacement: arch.encode_branch(site.at, trampolines[&site.layout.resume])?,
            })
        });
        let patchset = Patchset::plan(sites.collect::<Result<_, OutOfReach>>()?)?;

        let rings = machine.region_rings();
        let readers = (0..region.rings().cpus())
            .map(|cpu| RingReader::new(&rings.memory, region.rings(), cpu))
            .collect::<Result<Vec<_>, _>>()?;
        let (applied, armed) = apply(machine, &patchset)?;
        let session = Self {
            machine,
            kernel,
            names: Names::new(kernel, applied.sites()),
            applied: Some(applied),
            readers,
            merger: Merger::default(),
            ticks: Ticks::new(machine.clock_hz()),
            events: 0,
            stops: vec![armed.stop],
            reverted: None,
        };
        Ok((session, armed))
    }

    /// Takes what the rings hold and gives out what is in order by now.
    ///
    /// # Errors
    /// What the sink says. The events that it did not take are gone.
    pub fn drain(&mut self, sink: &mut dyn Sink) -> io::Result<()> {
        let rings = self.machine.region_rings();
        for reader in &mut self.readers {
            reader.look(&rings.memory);
        }
        for (cpu, reader) in self.readers.iter_mut().enumerate() {
            let records = self.merger.incoming();
            let before = records.len();
            while !reader.read(&rings.memory, records, READ_AT_ONCE) {}
            // What no site can have written, the guest has.
            let strange = records[before..].iter().position(|record| !self.names.knows(record.ip));
            if let Some(strange) = strange {
                let ip = records[before + strange].ip;
                records.truncate(before + strange);
                reader.give_up(RingCorrupt::Function { cpu, ip });
            }
        }
        let mut out = Out {
            names: &mut self.names,
            ticks: self.ticks,
            events: &mut self.events,
            sink,
            result: Ok(()),
        };
        let pending = self.readers.iter().map(RingReader::pending).sum();
        self.merger.pass(pending, Instant::now(), |record| out.give(record));
        out.result
    }

    /// Events given to the sink until now.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Records lost until now, over all CPUs.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.readers.iter().map(RingReader::lost).sum()
    }

    /// The rings that the guest has spoilt.
    pub fn corrupt(&self) -> impl Iterator<Item = &RingCorrupt> {
        self.readers.iter().filter_map(RingReader::corrupt)
    }

    /// Puts every function back in one stop. A guest that has ended needs nothing put back; memory
    /// that it has taken for something else, or a kernel that is no longer this one, is left alone.
    ///
    /// # Errors
    /// [`DisarmError`]; calling it again tries again.
    pub fn disarm(&mut self) -> Result<(), DisarmError> {
        let Some(applied) = &self.applied else { return Ok(()) };
        let mut revert = applied.prepare_revert();
        let mut tries = 0;
        let reverted = loop {
            tries += 1;
            let mut stopped = match self.machine.stop() {
                Ok(stopped) => stopped,
                Err(StopError::Gone) => break Reverted::default(),
                Err(StopError::Silent { .. }) if tries < STOP_TRIES => {
                    thread::sleep(STOP_BACKOFF * tries);
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let reverted = if is_ours(self.machine, self.kernel, &mut *stopped) {
                revert.run(self.machine.ram(), &mut *stopped)
            } else {
                Reverted::default()
            };
            match stopped.resume() {
                Ok(times) => self.stops.push(times),
                // It ends by itself: what was written is written.
                Err(StopError::Gone) => {}
                Err(error) => return Err(error.into()),
            }
            match reverted.failed.first() {
                Some(_) if tries < STOP_TRIES => thread::sleep(STOP_BACKOFF * tries),
                Some(site) => {
                    return Err(DisarmError::Failed {
                        count: reverted.failed.len(),
                        first: Arc::clone(&site.function),
                    });
                }
                None => break reverted,
            }
        };
        self.applied = None;
        self.reverted = Some(reverted);
        Ok(())
    }

    /// Reads what is left, once the session is disarmed or the guest has ended, and ends the trace.
    ///
    /// # Errors
    /// What the sink says; the summary is complete all the same.
    pub fn finish(mut self, sink: &mut dyn Sink) -> (Summary, io::Result<()>) {
        let until = Instant::now() + LAST_RECORDS;
        let mut result = self.drain(sink);
        while result.is_ok() && Instant::now() < until {
            if self.readers.iter().all(|reader| reader.pending() == 0) {
                break;
            }
            thread::sleep(Duration::from_millis(5));
            result = self.drain(sink);
        }
        let mut out = Out {
            names: &mut self.names,
            ticks: self.ticks,
            events: &mut self.events,
            sink,
            result,
        };
        self.merger.finish(|record| out.give(record));
        let result = out.result;
        let summary = self.summary();
        let entries = summary.events + summary.dropped();
        let result = result.and_then(|()| sink.end(summary.events, entries));
        (summary, result)
    }

    /// Where the session stands.
    #[must_use]
    pub fn summary(&self) -> Summary {
        Summary {
            events: self.events,
            lost: self.readers.iter().map(RingReader::lost).collect(),
            unwritten: self.readers.iter().map(|reader| reader.pending() as u64).collect(),
            late: self.merger.late(),
            corrupt: self.corrupt().cloned().collect(),
            functions: self.names.counts(),
            stops: self.stops.clone(),
            reverted: self.reverted.clone(),
        }
    }
}

/// Records taken from a ring before the next look at how many there are.
const READ_AT_ONCE: usize = 1 << 16;

/// Stops, verifies, writes, resumes; tries again while a vCPU is silent or stands inside a site.
fn apply(machine: &dyn Machine, patchset: &Patchset) -> Result<(Applied, Armed), ArmError> {
    let prepared = patchset.prepare();
    let mut tries = 0;
    loop {
        tries += 1;
        let retry = |error: ArmError| match error {
            ArmError::Stop(StopError::Silent { .. })
            | ArmError::Verify(VerifyError::VcpuInside { .. })
                if tries < STOP_TRIES =>
            {
                thread::sleep(STOP_BACKOFF * tries);
                Ok(())
            }
            other => Err(other),
        };
        let mut stopped = match machine.stop() {
            Ok(stopped) => stopped,
            Err(error) => {
                retry(error.into())?;
                continue;
            }
        };
        let begin = Instant::now();
        let result = prepared.verify(machine.ram(), &mut *stopped, machine.vcpus());
        let verified = begin.elapsed();
        let result = match result {
            Ok(ready) => ready.apply().map_err(ArmError::from),
            Err(error) => Err(error.into()),
        };
        let write = begin.elapsed() - verified;
        // A guest that ended meanwhile is told of by whoever waits for it.
        let stop = match stopped.resume() {
            Ok(times) => times,
            Err(StopError::Gone) => StopTimes::default(),
            Err(error) => return Err(error.into()),
        };
        match result {
            Ok(applied) => {
                let functions = patchset.sites().len();
                return Ok((applied, Armed { functions, stop, verify: verified, write }));
            }
            Err(error) => retry(error)?,
        }
    }
}

/// Whether the guest still runs the kernel that was armed: its tables and its banner are in place, and
/// some vCPU uses them. A warm reset leaves the former lie in RAM.
fn is_ours(machine: &dyn Machine, kernel: &Kernel, stopped: &mut dyn Stopped) -> bool {
    let ram = machine.ram();
    kernel.is_current(ram)
        && (0..machine.vcpus()).any(|vcpu| {
            stopped.registers(vcpu).is_ok_and(|registers| kernel.is_run_by(ram, &registers))
        })
}

/// Gives records to a sink until it fails.
struct Out<'a, 'm> {
    names: &'a mut Names<'m>,
    ticks: Ticks,
    events: &'a mut u64,
    sink: &'a mut dyn Sink,
    result: io::Result<()>,
}

impl Out<'_, '_> {
    fn give(&mut self, record: &RawRecord) {
        if self.result.is_err() {
            return;
        }
        let time_ns = self.ticks.nanoseconds(record.time);
        let (function, caller) = self.names.of(record);
        let event = Event { time_ns, cpu: record.cpu, function, caller };
        self.result = self.sink.event(&event);
        if self.result.is_ok() {
            *self.events += 1;
        }
    }
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

/// How many functions were refused for each reason, most first.
#[must_use]
pub fn refusals(refused: &[Refused]) -> Vec<(&'static str, usize)> {
    let mut counts = BTreeMap::new();
    for refused in refused {
        *counts.entry(refused.why.label()).or_insert(0) += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts
}
