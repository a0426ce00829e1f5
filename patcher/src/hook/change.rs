//! Changes of wants: the steps that they take, the journal before them, and what is known afterwards.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::presence::Presence;
use super::stops::{self, Failure};
use super::{Changed, Hook, HookError, Hooks, ReleaseError, Want, Witness};
use crate::addr::Gva;
use crate::arch::PadBytes;
use crate::journal::Entry;
use crate::kernel::{Module, Site};
use crate::patch::{self, Foreign, Left, Ours, Patchset};

/// What is to become of a pad.
pub(super) struct Step {
    at: Gva,
    pub want: Want,
    pub to: PadBytes,
}

impl Hooks<'_> {
    /// What has to be done for these wants, which are then noted if that is nothing.
    fn steps(&mut self, wants: &[(&Site, Want)]) -> Result<Vec<Step>, HookError> {
        let mut steps = Vec::new();
        for (site, want) in wants {
            let known = self.hooks.get(&site.at).filter(|hook| hook.is_ours());
            let known = known.map(|hook| hook.listed.clone());
            let listed = known.as_ref().unwrap_or(site);
            steps.push(Step { at: site.at, want: *want, to: self.bytes(listed, *want)? });
            if known.is_none() {
                self.hooks.insert(site.at, Hook::new(site));
            }
        }
        Ok(steps)
    }

    /// Changes what pads are wanted for: all of them in one stop, or none. Whatever the witness refuses
    /// is not done.
    ///
    /// # Errors
    /// [`HookError`]; the guest's text is then as it was, but for
    /// [`ApplyError::Torn`](patch::ApplyError::Torn). With [`Foreign::Leave`] it is none that a pad is no
    /// longer ours, or that the guest has ended or runs another kernel.
    pub fn change(
        &mut self,
        wants: &[(&Site, Want)],
        foreign: Foreign,
        witness: &mut dyn Witness,
    ) -> Result<Changed, HookError> {
        let result = self.try_change(wants, foreign, witness);
        self.forget_traps();
        result
    }

    fn try_change(
        &mut self,
        wants: &[(&Site, Want)],
        foreign: Foreign,
        witness: &mut dyn Witness,
    ) -> Result<Changed, HookError> {
        let steps = self.steps(wants)?;
        let moving: Vec<&Step> = steps.iter().filter(|step| self.moves(step)).collect();
        let mut changed = Changed::default();
        if !moving.is_empty() {
            let sites = moving.iter().map(|step| {
                let hook = &self.hooks[&step.at];
                patch::Site {
                    function: Arc::clone(&hook.function),
                    at: step.at,
                    gpa: hook.listed.gpa,
                    original: hook.now,
                    replacement: step.to,
                }
            });
            let patchset = Patchset::plan(sites.collect())?;
            self.intend(&moving)?;
            let presence = self.presence(&moving);
            match stops::apply(self.machine, self.kernel, &patchset, &presence, foreign, witness) {
                Ok(done) => changed = done,
                Err(Failure { error, torn }) => {
                    for at in torn {
                        if let Some(hook) = self.hooks.get_mut(&at) {
                            hook.torn = true;
                        }
                    }
                    self.forget_in_journal(moving.iter().map(|step| step.at));
                    return Err(error);
                }
            }
        }
        self.settle(&steps, &changed.foreign, changed.gone);
        Ok(changed)
    }

    /// Makes pads wanted for less, in one stop: as many of them as can be, since to leave a guest with
    /// something of ours is worse than to leave it with less than all. Those that are no longer ours are
    /// left alone, and a guest that has ended or runs another kernel needs nothing.
    ///
    /// # Errors
    /// [`ReleaseError`]; what could not be written is wanted as before, to be tried again.
    pub fn release(
        &mut self,
        wants: &[(&Site, Want)],
        witness: &mut dyn Witness,
    ) -> Result<Changed, ReleaseError> {
        let result = self.try_release(wants, witness);
        self.forget_traps();
        result
    }

    fn try_release(
        &mut self,
        wants: &[(&Site, Want)],
        witness: &mut dyn Witness,
    ) -> Result<Changed, ReleaseError> {
        let failed = |error| ReleaseError::Hook(Box::new(error));
        let steps = self.steps(wants).map_err(failed)?;
        let moving: Vec<&Step> = steps.iter().filter(|step| self.moves(step)).collect();
        if moving.is_empty() {
            self.settle(&steps, &[], false);
            return Ok(Changed::default());
        }
        self.intend(&moving).map_err(failed)?;
        let sites = moving.iter().map(|step| {
            let hook = &self.hooks[&step.at];
            Ours {
                function: &hook.function,
                at: step.at,
                gpa: hook.listed.gpa,
                back: &step.to,
                forms: std::slice::from_ref(&hook.now),
                torn: hook.torn,
            }
        });
        let presence = self.presence(&moving);
        let (released, result) =
            stops::release(self.machine, self.kernel, sites.collect(), &presence, witness);
        let Some(stops::Released { reverted, gone, stops }) = released else {
            return result.map(|()| Changed::default());
        };
        // What can't be read now is as little put back as what can't be written.
        let unread = reverted.foreign.iter().filter(|left| left.found.is_none());
        let failed: BTreeSet<Gva> =
            reverted.failed.iter().chain(unread).map(|left| left.at).collect();
        let (torn, done): (Vec<Step>, Vec<Step>) =
            steps.into_iter().partition(|step| failed.contains(&step.at));
        for step in torn {
            if let Some(hook) = self.hooks.get_mut(&step.at) {
                hook.torn = true;
            }
        }
        self.settle(&done, &reverted.foreign, gone);
        result.map(|()| Changed {
            written: reverted.restored,
            already: reverted.already,
            foreign: reverted.foreign,
            gone,
            stops,
            ..Changed::default()
        })
    }

    /// Puts everything back.
    ///
    /// # Errors
    /// As [`Hooks::release`].
    pub fn release_all(&mut self, witness: &mut dyn Witness) -> Result<Changed, ReleaseError> {
        let ours = self.hooks.values().filter(|hook| hook.is_ours());
        let listed: Vec<Site> = ours.map(|hook| hook.listed.clone()).collect();
        let wants: Vec<_> = listed.iter().map(|site| (site, Want::default())).collect();
        self.release(&wants, witness)
    }

    /// Forgets the pads of modules that `is_gone` says are gone, whatever is in their place now. Tells how
    /// many of them held bytes of ours.
    pub fn forget_modules(&mut self, is_gone: impl Fn(&Module) -> bool) -> usize {
        let of_gone = |hook: &Hook| hook.listed.module.as_deref().is_some_and(&is_gone);
        let gone: Vec<Gva> =
            self.hooks.iter().filter(|(_, hook)| of_gone(hook)).map(|(at, _)| *at).collect();
        let gone: Vec<Hook> = gone.iter().filter_map(|at| self.hooks.remove(at)).collect();
        if let Some(journal) = self.machine.journal() {
            // A journal that names too much does no harm.
            drop(journal.settle(gone.iter().map(|hook| hook.listed.gpa)));
        }
        self.forget_traps();
        gone.iter().filter(|hook| hook.is_ours()).count()
    }

    fn presence(&self, moving: &[&Step]) -> Presence {
        Presence::of(moving.iter().map(|step| {
            let listed = &self.hooks[&step.at].listed;
            (step.at, listed.gpa, listed.module.clone())
        }))
    }

    fn moves(&self, step: &Step) -> bool {
        self.hooks.get(&step.at).is_some_and(|hook| hook.torn || hook.now != step.to)
    }

    /// Notes what is going to be written, with everything of ours that may be there meanwhile, and what of
    /// that the engine has to know.
    fn intend(&self, moving: &[&Step]) -> Result<(), HookError> {
        self.announce_traps()?;
        let Some(journal) = self.machine.journal() else { return Ok(()) };
        let entry = |step: &&Step| {
            let hook = &self.hooks[&step.at];
            let original = hook.listed.original;
            let forms = [hook.now, step.to].into_iter().filter(|form| *form != original);
            Entry {
                function: Arc::clone(&hook.function),
                at: step.at,
                gpa: hook.listed.gpa,
                original: original.to_vec(),
                ours: forms.map(|form| form.to_vec()).collect(),
            }
        };
        Ok(journal.intend(moving.iter().map(entry))?)
    }

    /// Notes what has become of pads.
    fn settle(&mut self, steps: &[Step], foreign: &[Left], gone: bool) {
        if gone {
            let ours = self.hooks.iter().filter(|(_, hook)| hook.is_ours());
            let ours: Vec<Gva> = ours.map(|(at, _)| *at).collect();
            self.hooks.values_mut().for_each(Hook::forget);
            return self.forget_in_journal(ours.into_iter());
        }
        let foreign: BTreeSet<Gva> = foreign.iter().map(|left| left.at).collect();
        for step in steps {
            match self.hooks.get_mut(&step.at) {
                Some(hook) if foreign.contains(&step.at) => hook.forget(),
                Some(hook) => hook.settle(step),
                None => {}
            }
        }
        self.forget_in_journal(steps.iter().map(|step| step.at));
    }

    /// Has the journal forget those of these pads that hold nothing of ours.
    fn forget_in_journal(&self, pads: impl Iterator<Item = Gva>) {
        let Some(journal) = self.machine.journal() else { return };
        let clean = pads.filter_map(|at| self.hooks.get(&at).filter(|hook| !hook.is_ours()));
        // A journal that names too much does no harm.
        drop(journal.settle(clean.map(|hook| hook.listed.gpa)));
    }
}
