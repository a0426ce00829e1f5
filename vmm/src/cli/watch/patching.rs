//! Patches a kernel for clients of the control socket: tries, and tries again while somebody is inside a
//! function concerned, between two looks at the rings.

use std::thread;
use std::time::{Duration, Instant};

use humantime::format_rfc3339_seconds;
use patcher::hook::{Hooks, ReleaseError};
use patcher::livepatch::{
    Attempt, Map, PatchError, PatchId, PatchInfo, PatchOptions, PatchState, Patches, Pending,
    RevertAttempt,
};
use patcher::stacks::Stander;
use patcher::trace::filter::Glob;
use vmm::control::protocol::{
    self, Address, EndReason, Function, MAX_FUNCTIONS, MAX_STANDERS, Patch, PatchRequest, Patched,
    Refusal, RefusalKind, RevertRequest, Reverted, Waiting,
};
use vmm::control::{Answer, PatchWanted, Waiter};

use crate::cli::patch::text::in_the_way;
use crate::cli::say;
use crate::cli::summary::{counted, short};

/// How long it is waited before it is tried again: at first, and at most. Each time it is doubled.
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// For how long nobody is found to be inside before everything is taken back all the same.
const LAST_TRIES: Duration = Duration::from_secs(2);

/// Patches that can be applied at the same time.
const MAX_PATCHES: usize = 256;

/// The patches of one kernel, and what waits to be one or to be none any more.
#[derive(Default)]
pub struct Patching<'m> {
    patches: Patches<'m>,
    /// What files were called.
    files: Vec<(PatchId, String)>,
    waiting: Option<Try<'m>>,
}

/// What somebody waits for.
struct Try<'m> {
    wanted: Wanted<'m>,
    waiter: Waiter,
    since: Instant,
    timeout: Duration,
    attempts: u64,
    next: Instant,
    wait: Duration,
}

/// What is to be done, and whom to tell what it came to.
enum Wanted<'m> {
    Apply { pending: Box<Pending<'m>>, file: String, answer: Answer<Patched> },
    Revert { id: PatchId, max_stop: Option<Duration>, answer: Answer<Reverted> },
}

impl<'m> Try<'m> {
    fn new(wanted: Wanted<'m>, waiter: Waiter, timeout_ms: u64) -> Self {
        let (since, timeout) = (Instant::now(), Duration::from_millis(timeout_ms));
        Self { wanted, waiter, since, timeout, attempts: 0, next: since, wait: FIRST_WAIT }
    }

    fn refuse(self, refusal: Refusal) {
        match self.wanted {
            Wanted::Apply { answer, .. } => answer.give(Err(refusal)),
            Wanted::Revert { answer, .. } => answer.give(Err(refusal)),
        }
    }

    /// What is to be tried again, unless the time is over.
    fn again(mut self, standers: &[Stander]) -> Option<Self> {
        let waited = self.since.elapsed();
        let news = Waiting {
            standers: standers.iter().take(MAX_STANDERS).map(named).collect(),
            more: standers.len().saturating_sub(MAX_STANDERS),
            attempts: self.attempts,
            waited,
        };
        if waited >= self.timeout {
            let message = format!(
                "nothing was changed: after {} in {} {}; try again later, or for longer (--timeout)",
                counted(self.attempts, "attempt"),
                short(waited),
                in_the_way(&news),
            );
            self.refuse(Refusal::new(RefusalKind::InUse, message));
            return None;
        }
        self.waiter.tell(news);
        self.next = Instant::now() + self.wait.min(self.timeout - waited);
        self.wait = (2 * self.wait).min(LONGEST_WAIT);
        Some(self)
    }
}

impl<'m> Patching<'m> {
    /// How many patches are applied.
    pub fn count(&self) -> usize {
        self.patches.len()
    }

    /// When it is to be tried again; far away if nothing waits.
    pub fn due(&self) -> Duration {
        let next = self.waiting.as_ref().map(|waiting| waiting.next);
        next.map_or(Duration::MAX, |next| next.saturating_duration_since(Instant::now()))
    }

    /// Applies a payload, or lets it wait.
    pub fn apply(&mut self, hooks: &mut Hooks<'m>, wanted: PatchWanted) {
        let PatchWanted { request, file, waiter, answer } = wanted;
        match self.prepare(hooks, &request, &file) {
            Ok(pending) => {
                let wanted = Wanted::Apply { pending, file: request.file, answer };
                self.begin(hooks, Try::new(wanted, waiter, request.timeout_ms));
            }
            Err(refusal) => answer.give(Err(refusal)),
        }
    }

    fn prepare(
        &mut self,
        hooks: &Hooks<'m>,
        request: &PatchRequest,
        file: &[u8],
    ) -> Result<Box<Pending<'m>>, Refusal> {
        self.is_free()?;
        let refused = |message: String| Refusal::new(RefusalKind::Refused, message);
        if self.patches.len() >= MAX_PATCHES {
            let message = format!("{MAX_PATCHES} patches are applied already; revert some first");
            return Err(refused(message));
        }
        let maps = request.maps.iter().map(|map| Map::parse(map)).collect::<Result<_, _>>();
        let options = PatchOptions {
            maps: maps.map_err(|error| refused(error.to_string()))?,
            replace: request.replace,
            consistent: request.consistent,
            max_stop: request.max_stop_us.map(Duration::from_micros),
            release: request.release.as_deref().map(Glob::new),
            build_id: request.build_id.clone(),
        };
        let pending = self.patches.prepare(hooks, file, &options);
        pending.map(Box::new).map_err(|error| not_applied(&request.file, &error))
    }

    /// Takes a patch back, or lets that wait.
    pub fn revert(
        &mut self,
        hooks: &mut Hooks<'m>,
        request: &RevertRequest,
        waiter: Waiter,
        answer: Answer<Reverted>,
    ) {
        if let Err(refusal) = self.is_free() {
            return answer.give(Err(refusal));
        }
        let max_stop = request.max_stop_us.map(Duration::from_micros);
        let wanted = Wanted::Revert { id: PatchId(request.id), max_stop, answer };
        self.begin(hooks, Try::new(wanted, waiter, request.timeout_ms));
    }

    fn is_free(&self) -> Result<(), Refusal> {
        if self.waiting.is_none() {
            return Ok(());
        }
        let message = "another patch waits for somebody to leave a function; try again later";
        Err(Refusal::new(RefusalKind::Busy, message))
    }

    fn begin(&mut self, hooks: &mut Hooks<'m>, new: Try<'m>) {
        self.waiting = Some(new);
        self.step(hooks);
    }

    /// Tries what waits, if it is time to.
    pub fn step(&mut self, hooks: &mut Hooks<'m>) {
        let Some(mut waiting) = self.waiting.take() else { return };
        if waiting.waiter.has_gone() {
            let message = "it was given up, and nothing was changed";
            return waiting.refuse(Refusal::new(RefusalKind::Stopped, message));
        }
        if Instant::now() < waiting.next {
            self.waiting = Some(waiting);
            return;
        }
        waiting.attempts += 1;
        self.waiting = match waiting.wanted {
            Wanted::Apply { .. } => self.try_to_apply(hooks, waiting),
            Wanted::Revert { .. } => self.try_to_revert(hooks, waiting),
        };
    }

    fn try_to_apply(&mut self, hooks: &mut Hooks<'m>, waiting: Try<'m>) -> Option<Try<'m>> {
        let Try { wanted, waiter, since, timeout, attempts, next, wait } = waiting;
        let Wanted::Apply { pending, file, answer } = wanted else { return None };
        match self.patches.attempt(hooks, *pending) {
            Ok(Attempt::Applied(applied)) => {
                self.files.push((applied.id, file));
                let listed = self.patches.list(hooks);
                // What is not remembered any more needs no name.
                self.files.retain(|(id, _)| listed.iter().any(|info| info.id == *id));
                let info = listed.iter().find(|info| info.id == applied.id)?;
                let mut patch = self.describe(info);
                patch.functions.truncate(MAX_FUNCTIONS);
                answer.give(Ok(Patched {
                    patch,
                    functions: applied.functions,
                    replaced: applied.replaced.iter().map(|id| id.0).collect(),
                    attempts,
                    waited: since.elapsed(),
                }));
                None
            }
            Ok(Attempt::Busy(pending, standers)) => {
                let wanted = Wanted::Apply { pending, file, answer };
                let again = Try { wanted, waiter, since, timeout, attempts, next, wait };
                again.again(&standers)
            }
            Err(error) => {
                answer.give(Err(not_applied(&file, &error)));
                None
            }
        }
    }

    fn try_to_revert(&mut self, hooks: &mut Hooks<'m>, waiting: Try<'m>) -> Option<Try<'m>> {
        let Wanted::Revert { id, max_stop, .. } = &waiting.wanted else { return None };
        let result = match self.patches.revert(hooks, *id, *max_stop) {
            Ok(RevertAttempt::Busy(standers)) => return waiting.again(&standers),
            Ok(RevertAttempt::Reverted(reverted)) => Ok(Reverted {
                id: reverted.id.0,
                functions: reverted.functions,
                foreign: reverted.foreign.len(),
                stop: reverted.stop.map_or(Duration::ZERO, |stop| stop.total()),
                attempts: waiting.attempts,
                waited: waiting.since.elapsed(),
            }),
            Err(error) => Err(Refusal::new(kind(&error), error.to_string())),
        };
        if let Wanted::Revert { answer, .. } = waiting.wanted {
            answer.give(result);
        }
        None
    }

    /// What is applied, in order.
    pub fn list(&self, hooks: Option<&Hooks<'m>>) -> Vec<Patch> {
        let all = hooks.map(|hooks| self.patches.list(hooks)).unwrap_or_default();
        all.iter().filter(|info| is_applied(info)).map(|info| self.describe(info)).collect()
    }

    /// The same and what was, without the functions.
    pub fn record(&self, hooks: Option<&Hooks<'m>>) -> Vec<Patch> {
        let all = hooks.map(|hooks| self.patches.list(hooks)).unwrap_or_default();
        all.iter().map(|info| Patch { functions: Vec::new(), ..self.describe(info) }).collect()
    }

    fn describe(&self, info: &PatchInfo) -> Patch {
        let mine = info.functions.iter().filter(|function| function.in_force == Some(info.id));
        let state = match info.state {
            PatchState::Replaced(_) => protocol::PatchState::Replaced,
            PatchState::Reverted => protocol::PatchState::Reverted,
            PatchState::Gone => protocol::PatchState::Gone,
            PatchState::Applied | PatchState::Superseded(_) => match mine.count() {
                0 => protocol::PatchState::Covered,
                some if some < info.functions.len() => protocol::PatchState::Partly,
                _ => protocol::PatchState::InForce,
            },
        };
        let functions = info.functions.iter().map(|function| Function {
            name: function.name.to_string(),
            old: Address(function.old.0),
            new: Address(function.new.0),
            in_force: function.in_force.map(|id| id.0),
        });
        Patch {
            id: info.id.0,
            file: self.file(info.id).to_owned(),
            sha256: info.digest.clone(),
            applied: format_rfc3339_seconds(info.applied).to_string(),
            state,
            sites: info.functions.len(),
            stop: info.stop.total(),
            functions: functions.collect(),
        }
    }

    fn file(&self, id: PatchId) -> &str {
        self.files.iter().find(|(known, _)| *known == id).map_or("", |(_, file)| file)
    }

    /// Takes everything back, as the kernel is gone or is to be left, and says so. Whoever is inside is
    /// waited for only so long: what is taken back is never written over.
    ///
    /// # Errors
    /// The guest can't be stopped, or its text not be written.
    pub fn end(&mut self, hooks: &mut Hooks<'m>, reason: EndReason) -> Result<(), ReleaseError> {
        if let Some(waiting) = self.waiting.take() {
            waiting.refuse(match reason {
                EndReason::GuestReset => {
                    let message = "the guest was reset, and its kernel is gone";
                    Refusal::new(RefusalKind::Failed, message)
                }
                _ => Refusal::ended(),
            });
        }
        let active: Vec<PatchId> = self
            .patches
            .list(hooks)
            .iter()
            .rev()
            .filter(|info| is_applied(info))
            .map(|info| info.id)
            .collect();
        if active.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = active.iter().rev().map(|id| self.file(*id)).collect();
        let names = format!("{} ({})", patches(active.len()), names.join(", "));
        let are = if active.len() == 1 { "is" } else { "are" };
        if reason == EndReason::GuestReset {
            self.patches.forget();
            say(format!("the guest was reset: {names} {are} gone with its kernel"));
            return Ok(());
        }
        let mut inside = None;
        let until = Instant::now() + LAST_TRIES;
        for id in active {
            loop {
                match self.patches.revert(hooks, id, None) {
                    Ok(RevertAttempt::Busy(_)) if Instant::now() < until => {
                        thread::sleep(FIRST_WAIT);
                        continue;
                    }
                    Ok(RevertAttempt::Busy(standers)) => inside = Some(standers),
                    // What failed is tried below for all that is left.
                    Ok(RevertAttempt::Reverted(_)) | Err(_) => {}
                }
                break;
            }
        }
        let left = hooks.release_all(&mut ())?;
        if left.gone || !hooks.kernel().is_current(hooks.machine().ram()) {
            say(format!("{names} {are} gone with the guest's kernel"));
            return Ok(());
        }
        let inside = inside.map(|standers| {
            let standers = standers.iter().map(named).collect();
            let news = Waiting { standers, more: 0, attempts: 0, waited: LAST_TRIES };
            format!(", although {}", in_the_way(&news))
        });
        say(format!("reverted {names}{}", inside.unwrap_or_default()));
        Ok(())
    }
}

fn is_applied(info: &PatchInfo) -> bool {
    matches!(info.state, PatchState::Applied | PatchState::Superseded(_))
}

fn patches(count: usize) -> String {
    match count {
        1 => "1 patch".to_owned(),
        count => format!("{count} patches"),
    }
}

fn named(stander: &Stander) -> protocol::Stander {
    protocol::Stander {
        pid: stander.pid,
        comm: stander.comm.to_string(),
        function: stander.function.to_string(),
        vcpu: stander.vcpu,
    }
}

fn not_applied(file: &str, error: &PatchError) -> Refusal {
    Refusal::new(kind(error), format!("{file} can't be applied: {error}"))
}

/// Whether it would be refused at any time.
fn kind(error: &PatchError) -> RefusalKind {
    match error {
        PatchError::Payload(_)
        | PatchError::Resolve(_)
        | PatchError::Release { .. }
        | PatchError::BuildId { .. }
        | PatchError::Functions(_)
        | PatchError::Link(_)
        | PatchError::TooLong { .. }
        | PatchError::NoSuchPatch(_)
        | PatchError::NotApplied { .. } => RefusalKind::Refused,
        _ => RefusalKind::Failed,
    }
}
