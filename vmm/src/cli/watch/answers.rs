//! What those who ask about the guest are told.

use std::collections::{BTreeMap, BTreeSet};
use std::process;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use patcher::addr::Gva;
use patcher::kernel::{Kernel, MappedRegion, Pads, Refusal as PadRefusal};
use patcher::machine::Machine;
use patcher::region::Part;
use patcher::trace::filter::Glob;
use vmm::control::Command;
use vmm::control::protocol::{
    Address, Info, KernelInfo, Pad, PadState, Patch, Refusal, RefusalKind, RegionInfo, State,
    Status, TraceInfo,
};

use super::Identity;

/// Where questions come in.
pub struct Desk {
    identity: Identity,
    commands: Option<Receiver<Command>>,
}

/// The pads that hold something of ours.
#[derive(Debug, Default)]
pub struct Ours {
    /// Those of functions that are traced, and how many clients trace each.
    pub traced: BTreeMap<Gva, u32>,
    /// Those of functions that are replaced.
    pub patched: BTreeSet<Gva>,
}

/// How much is going on.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Traces.
    pub traces: usize,
    /// Patches that are applied.
    pub patches: usize,
}

/// How far a guest has come that can't be traced, at least not yet, and why.
pub enum Phase<'a> {
    /// Its kernel is not there yet, or not ready.
    Booting(Option<&'a Kernel>, &'a str),
    /// Its kernel can't be traced, if it has one.
    Untraceable(Option<&'a Kernel>, &'a str),
}

impl Desk {
    pub fn new(identity: Identity, commands: Option<Receiver<Command>>) -> Self {
        Self { identity, commands }
    }

    /// The next question, for which it is waited at most for `patience`.
    pub fn next(&self, patience: Duration) -> Option<Command> {
        let Some(commands) = &self.commands else {
            thread::sleep(patience);
            return None;
        };
        match commands.recv_timeout(patience) {
            Ok(command) => Some(command),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                thread::sleep(patience);
                None
            }
        }
    }

    /// Answers for a while, about a guest that can't be traced.
    pub fn attend(&self, machine: &dyn Machine, phase: &Phase<'_>, patience: Duration) {
        let until = Instant::now() + patience;
        while let Some(command) = self.next(until.saturating_duration_since(Instant::now())) {
            self.answer(machine, phase, command);
        }
    }

    fn answer(&self, machine: &dyn Machine, phase: &Phase<'_>, command: Command) {
        let (state, kernel, reason) = match *phase {
            Phase::Booting(kernel, reason) => (State::Booting, kernel, reason),
            Phase::Untraceable(kernel, reason) => (State::Untraceable, kernel, reason),
        };
        let status = self.status(machine, kernel, state, Some(reason), Counts::default());
        let refusal = match state {
            State::Booting => Refusal::new(
                RefusalKind::NotReady,
                format!("the guest is not ready yet: {reason}; try again later"),
            ),
            _ => Refusal::new(RefusalKind::Refused, reason),
        };
        match command {
            Command::Status(answer) => answer.give(Ok(status)),
            Command::Info(answer) => {
                let kernel = kernel.map(|kernel| kernel_info(kernel, None));
                let (who, patched) = (Vec::new(), Vec::new());
                answer.give(Ok(Info { status, kernel, region: None, who, patched }));
            }
            Command::Pads(_, answer) => answer.give(Err(refusal)),
            Command::Trace(wanted) => wanted.answer.give(Err(refusal)),
            Command::Snapshot(wanted) => wanted.answer.give(Err(refusal)),
            // There is none.
            Command::Stop(_) => {}
            Command::PatchApply(wanted) => wanted.answer.give(Err(refusal)),
            Command::PatchList(answer) => answer.give(Ok(Vec::new())),
            Command::PatchRevert(_, _, answer) => answer.give(Err(refusal)),
        }
    }

    /// In short, what guest this is.
    pub fn status(
        &self,
        machine: &dyn Machine,
        kernel: Option<&Kernel>,
        state: State,
        reason: Option<&str>,
        counts: Counts,
    ) -> Status {
        Status {
            name: self.identity.name.clone(),
            pid: process::id(),
            engine: self.identity.engine.clone(),
            vcpus: machine.vcpus(),
            state,
            reason: reason.map(ToOwned::to_owned),
            arch: kernel.map(|kernel| kernel.arch().name().to_owned()),
            release: kernel.map(|kernel| kernel.release().to_owned()),
            traces: counts.traces,
            patches: counts.patches,
        }
    }

    /// All there is to say about a guest that can be traced.
    pub fn info(
        &self,
        machine: &dyn Machine,
        (kernel, state): (&Kernel, State),
        (pads, ours): (Option<&Pads>, &Ours),
        region: Option<&MappedRegion>,
        (who, patched, patches): (Vec<TraceInfo>, Vec<Patch>, usize),
    ) -> Info {
        let counts = Counts { traces: who.len(), patches };
        Info {
            status: self.status(machine, Some(kernel), state, None, counts),
            kernel: Some(kernel_info(kernel, pads.map(|pads| (pads, ours)))),
            region: region.map(|region| region_info(machine, region)),
            who,
            patched,
        }
    }
}

fn kernel_info(kernel: &Kernel, pads: Option<(&Pads, &Ours)>) -> KernelInfo {
    let mut counts = BTreeMap::new();
    for pad in pads.into_iter().flat_map(|(pads, ours)| list(pads, ours, None)) {
        *counts.entry(pad.state).or_insert(0) += 1;
    }
    let label = |(state, count): (PadState, usize)| (state.label().to_owned(), count);
    KernelInfo {
        banner: kernel.banner().to_owned(),
        base: Address(kernel.image().range.start.0),
        physical_base: Address(kernel.image().phys.0),
        kaslr_offset: kernel.kaslr_offset(),
        symbols: kernel.symbols().len(),
        pads: counts.into_iter().map(label).collect(),
    }
}

fn region_info(machine: &dyn Machine, region: &MappedRegion) -> RegionInfo {
    RegionInfo {
        code: Address(region.range(Part::Code).start.0),
        code_bytes: machine.region(Part::Code).memory.len() as u64,
        rings: Address(region.rings().headers().0),
        rings_bytes: machine.region(Part::Rings).memory.len() as u64,
        ring_records: region.rings().capacity(),
    }
}

/// The pads of functions that match `glob`, by address.
pub fn list(pads: &Pads, ours: &Ours, glob: Option<&Glob>) -> Vec<Pad> {
    let wanted = |name: &str| glob.is_none_or(|glob| glob.matches(name));
    let writable = pads.sites.iter().filter(|site| wanted(&site.name)).map(|site| {
        let traced_by = ours.traced.get(&site.at).copied();
        let patched = ours.patched.contains(&site.at);
        Pad {
            function: site.name.to_string(),
            address: Address(site.at.0),
            prefix: Some(site.prefix.name.to_owned()),
            state: if traced_by.is_some() || patched { PadState::Ours } else { PadState::Idle },
            reason: None,
            traced_by: traced_by.unwrap_or(0),
            patched,
        }
    });
    let refused = pads.refused.iter().filter(|refused| wanted(&refused.name)).map(|refused| Pad {
        function: refused.name.to_string(),
        address: Address(refused.at.0),
        prefix: None,
        state: match refused.why {
            PadRefusal::GuestTraces { .. } => PadState::GuestEnabled,
            _ => PadState::Refused,
        },
        reason: Some(refused.why.to_string()),
        traced_by: 0,
        patched: false,
    });
    let mut all: Vec<Pad> = writable.chain(refused).collect();
    all.sort_by_key(|pad| pad.address.0);
    all
}
