//! What the pads of one kernel are to do, and what has been written there for it.
//!
//! A function may be traced, redirected to another one, or both, and whoever wants the one knows nothing
//! of the other. [`Hooks`] is where these wants meet: it knows of every pad what it held before us, what
//! it holds now, and what it is wanted for, from which follows what it is to hold:
//!
//! | traced | redirected | the pad | |
//! |---|---|---|---|
//! | no | no | its original bytes | |
//! | by a call | no | calls a chain of pieces of code | which goes on in the function |
//! | by a trap | no | is a trap | which leaves the guest, is recorded, and goes on behind it |
//! | no | yes | jumps to the new function | |
//! | either way | yes | jumps to a stub | which calls the chain and jumps to the new function |
//!
//! Where the calls of a function are counted, their returns recorded or measured, or only some of them traced,
//! its chain has one more piece. A function that is counted or measured and not traced calls a chain without
//! the piece that records.
//!
//! A function without a pad can be traced by a trap and in no other way: at its first instruction, which
//! is executed from a copy in the region that jumps back behind it.
//!
//! A change of wants is one [`Patchset`](crate::patch::Patchset) and one stop, whatever the pads held
//! before. Chains and stubs are never overwritten: a task may stand in them for as long as it likes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::addr::Gva;
use crate::arch::{ArgumentWords, PadBytes, PadLayout, assemble_stub, stub_ip};
use crate::kernel::{Kernel, MappedRegion, ModuleCode, Pads, PadsError, Refusal, Refused, Site};
use crate::machine::{Machine, StopTimes, Stopped};
use crate::patch::Left;
use crate::region::{Part, Trap};

mod chain;
mod change;
mod counts;
mod error;
mod gates;
mod histograms;
#[cfg(test)]
pub(crate) mod place;
mod presence;
mod returns;
mod stops;
mod sweep;
#[cfg(test)]
mod tests;
mod traps;

use chain::Chains;
use change::Step;
pub use error::{HookError, ReleaseError};
pub use gates::GateId;
pub use returns::{ReturnPoolError, takes_return};
use sweep::Sweeper;
pub use sweep::{Outstanding, SweepError, Swept};

/// How calls of a function are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Method {
    /// Its pad calls a trampoline, and the guest goes on by itself.
    #[default]
    Call,
    /// A trap takes the vCPU out of the guest, and the engine records the call.
    Trap,
}

/// What a pad is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Want {
    /// Whether its function is traced, and how.
    pub traced: Option<Method>,
    /// Whether its calls are counted.
    pub counted: bool,
    /// The function that is called in place of its own.
    pub redirect: Option<Gva>,
    /// Whether its returns are recorded as well as its calls, if it is traced by calls.
    pub returns: bool,
    /// The words of its calls' arguments that are recorded, if it is traced by calls.
    pub arguments: ArgumentWords,
    /// Which of its calls are traced; all if there is none. What is counted or measured is none of its
    /// business.
    pub gate: Option<GateId>,
    /// Whether what its calls take is added to its histogram.
    pub measured: bool,
}

impl Want {
    /// Whether its calls are to be noticed, in whatever way.
    #[must_use]
    pub fn notices_calls(&self) -> bool {
        self.traced.is_some() || self.counted || self.measured
    }
}

/// Somebody who looks at the guest while it stands for a change of wants.
pub trait Witness {
    /// Called in each stop when every site has been found to be as expected, before the first write;
    /// `since` is when the guest was asked to stop. What it refuses is not done.
    ///
    /// # Errors
    /// [`HeldBack`], of which the witness knows the reason.
    fn before(&mut self, _stopped: &mut dyn Stopped, _since: Instant) -> Result<(), HeldBack> {
        Ok(())
    }

    /// Called in each stop behind the last write.
    fn after(&mut self) {}
}

/// Nobody looks.
impl Witness for () {}

/// A witness does not want a change to be made now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldBack;

/// How a change of wants went.
#[derive(Debug, Clone, Default)]
pub struct Changed {
    /// Pads that were written.
    pub written: usize,
    /// Pads that held already what they were to hold.
    pub already: usize,
    /// Pads that were no longer ours, left as they are; they are wanted for nothing any more.
    pub foreign: Vec<Left>,
    /// Whether the guest has ended or runs another kernel: then nothing was written, and nothing of what
    /// was in force is.
    pub gone: bool,
    /// The stops that it took, also those that had to be tried again; none if there was nothing to write.
    pub stops: Vec<StopTimes>,
    /// The part of [`StopTimes::held`] of the last one that comparing took, from when the guest stood:
    /// also whether it still runs the same kernel.
    pub verify: Duration,
    /// The part of it that writing and reading back took, with what the witness did.
    pub write: Duration,
}

/// A stub that was made for a function that is traced and redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stub {
    /// The pad that jumps to it.
    pub pad: Gva,
    /// Where it is.
    pub at: Gva,
    /// How long it is, in bytes.
    pub len: u64,
    /// The address that its records carry.
    pub ip: Gva,
    /// The function that it jumps to.
    pub to: Gva,
    /// The chain that it calls.
    chain: Gva,
}

/// What is known of a pad.
#[derive(Debug)]
struct Hook {
    function: Arc<str>,
    /// As the kernel's list of pads had it before us.
    listed: Site,
    /// What it holds.
    now: PadBytes,
    /// Whether a write has failed and could not be undone: it may then hold anything.
    torn: bool,
    want: Want,
}

impl Hook {
    fn new(site: &Site) -> Self {
        Self {
            function: Arc::from(&*site.name),
            listed: site.clone(),
            now: site.original,
            torn: false,
            want: Want::default(),
        }
    }

    /// Whether it may hold bytes of ours.
    fn is_ours(&self) -> bool {
        self.torn || self.now != self.listed.original
    }

    fn forget(&mut self) {
        (self.now, self.torn, self.want) = (self.listed.original, false, Want::default());
    }

    fn settle(&mut self, step: &Step) {
        (self.now, self.torn, self.want) = (step.to, false, step.want);
    }
}

/// Everything that is armed in one kernel.
///
/// Dropping it puts back what is there, as well as it can.
pub struct Hooks<'m> {
    machine: &'m dyn Machine,
    kernel: &'m Kernel,
    region: &'m MappedRegion,
    chains: Chains,
    sweeper: Sweeper,
    stubs: Vec<Stub>,
    hooks: BTreeMap<Gva, Hook>,
    /// Traps that are or may be in the guest.
    traps: BTreeMap<Gva, Trap>,
    /// Copies of the first instructions of functions without pads.
    copies: BTreeMap<Gva, Gva>,
}

impl<'m> Hooks<'m> {
    /// Nothing yet, in a kernel into which the region is mapped.
    #[must_use]
    pub fn new(machine: &'m dyn Machine, kernel: &'m Kernel, region: &'m MappedRegion) -> Self {
        Self {
            machine,
            kernel,
            region,
            chains: Chains::default(),
            sweeper: Sweeper::default(),
            stubs: Vec::new(),
            hooks: BTreeMap::new(),
            traps: BTreeMap::new(),
            copies: BTreeMap::new(),
        }
    }

    /// The machine that the kernel runs on.
    #[must_use]
    pub fn machine(&self) -> &'m dyn Machine {
        self.machine
    }

    /// The kernel whose pads these are.
    #[must_use]
    pub fn kernel(&self) -> &'m Kernel {
        self.kernel
    }

    /// The region as that kernel sees it.
    #[must_use]
    pub fn region(&self) -> &'m MappedRegion {
        self.region
    }

    /// The kernel's pads as they are now. Those that hold bytes of ours are among those that may be
    /// written, with their original bytes; those that can't reach the region are not.
    ///
    /// # Errors
    /// They can't be listed.
    pub fn pads(&self) -> Result<Pads, PadsError> {
        Ok(self.among_ours(self.kernel.pads(self.machine.ram())?, |_| true))
    }

    /// The same of these modules only.
    ///
    /// # Errors
    /// They can't be listed.
    pub fn module_pads(&self, code: &ModuleCode) -> Result<Pads, PadsError> {
        let pads = self.kernel.module_pads(self.machine.ram(), code)?;
        Ok(self.among_ours(pads, |at| code.lookup(at).is_some()))
    }

    /// These pads, which are all that `listed` is true of, with those that hold bytes of ours.
    fn among_ours(&self, mut pads: Pads, listed: impl Fn(Gva) -> bool) -> Pads {
        let ours: BTreeMap<Gva, &Site> = (self.hooks.values())
            .filter(|hook| listed(hook.listed.at) && self.holds_ours(hook))
            .map(|hook| (hook.listed.at, &hook.listed))
            .collect();
        pads.refused.retain(|refused| !ours.contains_key(&refused.at));
        pads.sites.retain(|site| !ours.contains_key(&site.at));
        let padded = ours.into_values().filter(|site| !site.is_unpadded());
        pads.sites.extend(padded.cloned());
        let (near, far): (Vec<Site>, Vec<Site>) =
            pads.sites.into_iter().partition(|site| site.module.is_none() || self.reaches(site.at));
        pads.sites = near;
        pads.sites.sort_by_key(|site| site.at);
        let far = far.into_iter();
        let why = Refusal::OutOfReach;
        pads.refused.extend(far.map(|Site { name, at, .. }| Refused {
            name,
            at,
            why: why.clone(),
        }));
        pads
    }

    /// Whether a branch at `at` reaches all code of the region, and `at` is so near that the low half of
    /// an address there is no other's.
    fn reaches(&self, at: Gva) -> bool {
        let (arch, code) = (self.kernel.arch(), self.region.range(Part::Code));
        let near = at.0.abs_diff(code.start.0) < 1 << 31;
        near && [code.start, code.end].into_iter().all(|to| arch.encode_branch(at, to).is_ok())
    }

    /// What the pad at `at` is wanted for.
    #[must_use]
    pub fn want(&self, at: Gva) -> Want {
        self.hooks.get(&at).map_or_else(Want::default, |hook| hook.want)
    }

    /// Whether the pad at `at` does what it is wanted for: whether our bytes are still there.
    #[must_use]
    pub fn is_in_force(&self, at: Gva) -> bool {
        self.hooks.get(&at).is_some_and(|hook| self.holds_ours(hook))
    }

    /// The pads that hold bytes of ours, ascending by address, and what they are wanted for.
    pub fn in_force(&self) -> impl Iterator<Item = (Gva, Want)> {
        let hooks = self.hooks.values().filter(|hook| self.holds_ours(hook));
        hooks.map(|hook| (hook.listed.at, hook.want))
    }

    fn holds_ours(&self, hook: &Hook) -> bool {
        let mut found = hook.now;
        hook.now != hook.listed.original
            && self.machine.ram().read(hook.listed.gpa, &mut found).is_ok()
            && found == hook.now
    }

    /// All stubs that were ever made, in the order in which they were.
    #[must_use]
    pub fn stubs(&self) -> &[Stub] {
        &self.stubs
    }

    /// The stub for the pad of `site` if its function is redirected to `to`, and traced or counted.
    fn stub(&mut self, site: &Site, to: Gva, want: Want) -> Result<Gva, HookError> {
        let pad = site.at;
        let chain = self.chain(site, want, PadLayout::SINGLE.resume)?;
        let mut stubs = self.stubs.iter();
        let is_it = |stub: &&Stub| (stub.pad, stub.to, stub.chain) == (pad, to, chain);
        if let Some(known) = stubs.find(is_it) {
            return Ok(known.at);
        }
        let arch = self.kernel.arch();
        let mut len = 0;
        let at = self.place(|at| {
            let code = assemble_stub(arch, at, chain, to)?;
            len = code.len() as u64;
            Ok(code)
        })?;
        self.stubs.push(Stub { pad, at, len, ip: stub_ip(arch, at), to, chain });
        Ok(at)
    }

    /// What the pad of `site` has to hold.
    fn bytes(&mut self, site: &Site, want: Want) -> Result<PadBytes, HookError> {
        let arch = self.kernel.arch();
        if site.is_unpadded() {
            return match want {
                Want { counted: true, .. } => Err(HookError::NotCounted(site.name.clone())),
                Want { measured: true, .. } => Err(not_taken(site, "it has no pad")),
                Want { traced: None, redirect: None, .. } => Ok(site.original),
                Want { redirect: Some(_), .. } => Err(HookError::NoPad(site.name.clone())),
                Want { gate: Some(_), .. } => Err(HookError::TrapGate(site.name.clone())),
                Want { .. } => self.trap(site),
            };
        }
        if want.traced.is_some() {
            self.prepare_tracing()?;
        }
        if want.gate.is_some() && want.traced == Some(Method::Trap) {
            return Err(HookError::TrapGate(site.name.clone()));
        }
        if want.returns || want.measured {
            takes_return(site).map_err(|why| not_taken(site, why))?;
        }
        if want.redirect.is_some() && site.prefix.signs {
            return Err(HookError::Signed {
                function: site.name.clone(),
                prefix: site.prefix.name,
            });
        }
        let calls = want.notices_calls();
        let is_trap = want.traced == Some(Method::Trap) && !want.counted && !want.measured;
        Ok(match want.redirect {
            None if is_trap => self.trap(site)?,
            None if calls => {
                arch.encode_branch(site.at, self.chain(site, want, site.layout.resume)?)?
            }
            None => site.original,
            Some(to) if calls => arch.encode_jump(site.at, self.stub(site, to, want)?)?,
            Some(to) => arch.encode_jump(site.at, to)?,
        })
    }
}

fn not_taken(site: &Site, why: &'static str) -> HookError {
    HookError::ReturnNotTaken { function: site.name.clone(), why }
}

impl Drop for Hooks<'_> {
    fn drop(&mut self) {
        // Nobody is left to be told.
        drop(self.release_all(&mut ()));
    }
}
