//! Whether sites in modules are still where they were, which is asked while the guest stands.
//!
//! A module is freed by a guest that knows nothing of us, and what then has its memory is none of ours. So
//! before anything is written there, the kernel has to list the module as it did, and to map the site
//! where it was. What the site holds is compared as everywhere.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::addr::{Gpa, Gva};
use crate::kernel::{Kernel, Module, ModuleState};
use crate::mem::PhysMem;

/// The sites of modules among those that a stop is for.
#[derive(Debug, Default)]
pub(super) struct Presence {
    sites: Vec<(Gva, Gpa, Arc<Module>)>,
}

impl Presence {
    /// Of sites, those that are a module's.
    pub fn of(sites: impl Iterator<Item = (Gva, Gpa, Option<Arc<Module>>)>) -> Self {
        let sites = sites.filter_map(|(at, gpa, module)| Some((at, gpa, module?)));
        Self { sites: sites.collect() }
    }

    /// The sites that are not what they were: of modules that are gone, or, if the module has to run, that
    /// do not. None of a guest without sites in modules, which is not looked at.
    pub fn lost(&self, kernel: &Kernel, ram: &dyn PhysMem, has_to_run: bool) -> BTreeSet<Gva> {
        if self.sites.is_empty() {
            return BTreeSet::new();
        }
        // A list that can't be followed has none of them.
        let modules = kernel.modules(ram).unwrap_or_default();
        let is_there = |module: &Module| {
            modules.iter().any(|now| {
                now.is_same(module)
                    && match now.state {
                        ModuleState::Live => true,
                        ModuleState::Coming | ModuleState::Going => !has_to_run,
                        ModuleState::Unformed => false,
                    }
            })
        };
        let mut last: Option<(&Arc<Module>, bool)> = None;
        let mut lost = BTreeSet::new();
        for (at, gpa, module) in &self.sites {
            let there = match last {
                Some((same, there)) if Arc::ptr_eq(same, module) => there,
                _ => is_there(module),
            };
            last = Some((module, there));
            if !there || kernel.translate(ram, *at) != Ok(*gpa) {
                lost.insert(*at);
            }
        }
        lost
    }

    /// The module of the site at `at`.
    pub fn module(&self, at: Gva) -> Option<&Arc<Module>> {
        self.sites.iter().find(|site| site.0 == at).map(|site| &site.2)
    }
}
