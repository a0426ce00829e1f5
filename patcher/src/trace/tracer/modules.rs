//! Modules come and go while the guest is traced.
//!
//! Their list is looked at now and then while the guest runs. What a new one has of what clients ask for
//! is armed, all of it in one stop. What a module that is gone had is forgotten: its memory is the guest's,
//! and nothing is written there. One that was loaded anew into the same memory looks as before; that none
//! of its pads holds what was written there tells.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::names::MAX_FUNCTIONS;
use super::super::select::WantedValues;
use super::gates::later_gate;
use super::{ArmError, Look, Tracer, heads};
use crate::hook::{HookError, Hooks, Method, Want, takes_return};
use crate::kernel::{Module, ModuleCode, ModuleState, ModulesError, PadsError, Site};
use crate::machine::StopTimes;
use crate::patch::{ApplyError, Foreign, VerifyError};

/// How often the list is looked at, at most, and how many times as long as a look takes it rests.
const LOOK: Duration = Duration::from_millis(20);
const SHARE: u32 = 20;

/// How often it is tried to arm functions of a module that changes meanwhile.
const TRIES: u32 = 5;

/// What has become of a module.
#[derive(Debug)]
pub struct ModuleNews {
    /// Its name.
    pub module: Arc<str>,
    /// What has become of it.
    pub what: ModuleChange,
}

/// What has become of a module.
#[derive(Debug)]
pub enum ModuleChange {
    /// It was loaded, and so many of its functions are traced now, since that stop.
    Armed {
        /// How many.
        functions: usize,
        /// The stop, which may have been for several modules.
        stop: StopTimes,
    },
    /// It was loaded, and its functions could not be armed.
    Failed(ArmError),
    /// It was unloaded with so many functions that were traced.
    Gone {
        /// How many.
        functions: usize,
    },
}

/// What is known of modules.
#[derive(Debug)]
pub(super) struct Modules {
    /// Those that run and that were told of.
    known: Vec<Known>,
    /// When it is looked next; never in a kernel that does not tell its modules.
    due: Option<Instant>,
    /// Failures of the last tries.
    failures: u32,
    /// What was noticed on other occasions, to be told.
    news: Vec<ModuleNews>,
}

#[derive(Debug)]
struct Known {
    module: Module,
    /// The members that are functions of it.
    members: Vec<usize>,
}

impl Modules {
    /// None is known, and the first look is due.
    pub fn new() -> Self {
        Self { known: Vec::new(), due: Some(Instant::now()), failures: 0, news: Vec::new() }
    }

    /// Begins anew, with modules of which everything is armed that is asked for.
    pub fn begin(&mut self, known: &[Arc<Module>]) {
        self.known.clear();
        known.iter().for_each(|module| self.know(module));
        self.news.clear();
    }

    fn know(&mut self, module: &Module) {
        if !self.known.iter().any(|known| known.module.is_same(module)) {
            self.known.push(Known { module: module.clone(), members: Vec::new() });
        }
    }

    /// Takes note that a member is a function of its module, if that is known.
    pub fn note(&mut self, site: &Site, member: usize) {
        let Some(module) = &site.module else { return };
        let known = self.known.iter_mut().find(|known| known.module.is_same(module));
        if let Some(known) = known.filter(|known| !known.members.contains(&member)) {
            known.members.push(member);
        }
    }
}

impl<'m, S> Tracer<'m, S> {
    /// Follows what modules the guest has loaded and unloaded since this was last called; it looks no more
    /// often than every 20 ms. To be called between two [`Tracer::drain`]s.
    pub fn follow_modules(&mut self, hooks: &mut Hooks<'m>) -> Vec<ModuleNews> {
        let begin = Instant::now();
        let is_traced = self.clients.iter().any(Option::is_some);
        if !is_traced || self.modules.due.is_none_or(|due| begin < due) {
            return Vec::new();
        }
        match hooks.kernel().modules(self.machine.ram()) {
            Ok(now) => self.compare(hooks, &now),
            // The guest is just changing it, or has gone.
            Err(ModulesError::Unsound { .. }) => {}
            Err(_) => {
                self.modules.due = None;
                return Vec::new();
            }
        }
        let rest = LOOK.max(begin.elapsed() * SHARE);
        self.modules.due = Some(Instant::now() + rest);
        std::mem::take(&mut self.modules.news)
    }

    /// Sees that what is known fits the modules that there are, before a client comes: nothing of one that
    /// is gone may be taken for what is in its place. The first client has everything armed that it asks
    /// for of `armed`.
    pub(super) fn meet_modules(&mut self, hooks: &mut Hooks<'m>, armed: Option<&[Arc<Module>]>) {
        let now = hooks.kernel().modules(self.machine.ram());
        if let Ok(now) = &now {
            self.forget_gone(hooks, now);
        }
        if let Some(armed) = armed {
            self.modules.begin(armed);
            if let Ok(now) = &now {
                self.set_code(hooks, now);
            }
        }
    }

    fn compare(&mut self, hooks: &mut Hooks<'m>, now: &[Module]) {
        self.forget_gone(hooks, now);
        let live = now.iter().filter(|module| module.state == ModuleState::Live);
        let new: Vec<&Module> = live
            .filter(|live| !self.modules.known.iter().any(|k| k.module.is_same(live)))
            .collect();
        if !new.is_empty() {
            if !new.iter().all(|new| self.names.code().modules().any(|known| known.is_same(new))) {
                self.set_code(hooks, now);
            }
            self.arm_new(hooks, &new);
        }
    }

    /// Names callers by the modules that run now.
    fn set_code(&mut self, hooks: &Hooks<'m>, now: &[Module]) {
        let mut code = self.names.code().clone();
        code.forget(|known| !now.iter().any(|module| module.is_same(known)));
        if code.learn(hooks.kernel(), self.machine.ram(), now).is_ok() {
            self.names.set_code(code);
        }
    }

    /// Forgets what was armed in modules that are gone.
    fn forget_gone(&mut self, hooks: &mut Hooks<'m>, now: &[Module]) {
        let members = &self.members;
        let is_gone = |known: &Known| {
            let listed = now.iter().any(|module| {
                module.is_same(&known.module) && module.state != ModuleState::Unformed
            });
            let pads = || known.members.iter().map(|index| members[*index].listed.at);
            let mut armed = pads().filter(|at| hooks.want(*at).notices_calls()).peekable();
            !listed || armed.peek().is_some() && !armed.any(|at| hooks.is_in_force(at))
        };
        let gone: Vec<Known> = self.modules.known.extract_if(.., |known| is_gone(known)).collect();
        if gone.is_empty() {
            return;
        }
        hooks.forget_modules(|module| gone.iter().any(|known| known.module.is_same(module)));
        for index in gone.iter().flat_map(|known| &known.members) {
            self.members[*index].leave(u16::MAX);
        }
        let news = gone.into_iter().filter(|known| !known.members.is_empty()).map(|known| {
            let functions = known.members.len();
            ModuleNews { module: known.module.name, what: ModuleChange::Gone { functions } }
        });
        self.modules.news.extend(news);
    }

    /// Arms what clients ask for of modules that have come.
    fn arm_new(&mut self, hooks: &mut Hooks<'m>, new: &[&Module]) {
        let code = self.names.code().only(|module| new.iter().any(|new| new.is_same(module)));
        let result = self.arm_modules(hooks, &code);
        if let Err(error) = &result
            && is_passing(error)
            && self.modules.failures < TRIES
        {
            // What has changed meanwhile is looked at again.
            self.modules.failures += 1;
            return;
        }
        self.modules.failures = 0;
        new.iter().for_each(|module| self.modules.know(module));
        let news = |module: &Module, what| ModuleNews { module: Arc::clone(&module.name), what };
        match result {
            Ok(stop) => {
                for known in &self.modules.known {
                    let (module, functions) = (&known.module, known.members.len());
                    if functions > 0 && new.iter().any(|new| new.is_same(module)) {
                        let what = ModuleChange::Armed { functions, stop };
                        self.modules.news.push(news(module, what));
                    }
                }
            }
            Err(error) => {
                self.modules.news.push(news(new[0], ModuleChange::Failed(error)));
            }
        }
    }

    /// Arms what clients ask for of this code, in one stop if there is anything.
    fn arm_modules(
        &mut self,
        hooks: &mut Hooks<'m>,
        code: &ModuleCode,
    ) -> Result<StopTimes, ArmError> {
        let pads = hooks.module_pads(code)?;
        let mut chosen: Vec<(Site, u16, Want, (bool, bool))> = Vec::new();
        for site in pads.sites {
            let mut want = hooks.want(site.at);
            let mut slots = 0;
            let (mut has_values, mut has_arguments) = (false, false);
            for (slot, client) in self.clients.iter().enumerate() {
                let Some(later) = client.as_ref().and_then(|client| client.later()) else {
                    continue;
                };
                let fits = !later.returns || takes_return(&site).is_ok();
                if fits
                    && later.filter.selects(&site.name)
                    && let Some(gate) = later_gate(hooks, &site, want, later.calls.as_deref())?
                {
                    slots |= 1 << slot;
                    want.gate = gate;
                    want.traced = match later.returns {
                        true => Some(Method::Call),
                        false => want.traced.or(Some(later.method)),
                    };
                    want.returns |= later.returns;
                    has_values |= later.values != WantedValues::default();
                    has_arguments |= later.values.arguments;
                }
            }
            if slots != 0 {
                chosen.push((site, slots, want, (has_values, has_arguments)));
            }
        }
        if chosen.is_empty() {
            return Ok(StopTimes::default());
        }
        if self.names.len() + chosen.len() > MAX_FUNCTIONS {
            return Err(ArmError::TooManyFunctions);
        }
        let indices: Vec<usize> =
            chosen.iter().map(|(site, ..)| self.member(site, hooks)).collect();
        for (index, (_, _, want, (has_values, has_arguments))) in indices.iter().zip(&mut chosen) {
            if *has_values {
                self.learn_format(*index);
            }
            if *has_arguments {
                want.traced = Some(Method::Call);
                want.arguments = self.argument_words(*index);
            }
        }
        let wants: Vec<(&Site, Want)> =
            chosen.iter().map(|(site, _, want, _)| (site, *want)).collect();
        for ((site, slots, want, _), index) in chosen.iter().zip(&indices) {
            let Some(gate) = want.gate else { continue };
            let counter = hooks.turned_away(site, gate).map_err(ArmError::Hook)?;
            let clients = self.clients.iter_mut().enumerate();
            for (_, client) in clients.filter(|(slot, _)| slots & 1 << slot != 0) {
                let counts =
                    client.as_mut().map(|client| client.turned_away.get_or_insert_default());
                if let Some(counts) = counts {
                    counts.add(hooks, vec![(*index as u32, counter)]).map_err(HookError::Region)?;
                }
            }
        }
        let look = &mut Look { machine: self.machine, readers: &mut self.readers };
        let changed = hooks.change(&wants, Foreign::Refuse, look)?;
        self.names.divide(&heads(&self.readers).into());
        for (index, (site, slots, ..)) in indices.into_iter().zip(&chosen) {
            self.members[index].wanted_by |= slots;
            self.members[index].heard_by |= slots;
            site.module.iter().for_each(|module| self.modules.know(module));
            self.modules.note(site, index);
        }
        for client in self.clients.iter_mut().flatten().filter(|client| client.later().is_some()) {
            client.stops.extend(&changed.stops);
        }
        Ok(changed.stops.last().copied().unwrap_or_default())
    }
}

/// Whether it may well be otherwise in a moment.
fn is_passing(error: &ArmError) -> bool {
    matches!(
        error,
        ArmError::Pads(PadsError::Records(_))
            | ArmError::Hook(
                HookError::ModuleGone(_)
                    | HookError::Verify(
                        VerifyError::Mismatch { .. } | VerifyError::Unreadable { .. }
                    )
                    | HookError::Apply(ApplyError::RolledBack { .. })
            )
    )
}
