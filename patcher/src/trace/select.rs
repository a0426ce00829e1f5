//! Which of a kernel's functions are to be traced.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::calls::{CallConditions, CallFilter, CallFilterError};
use super::filter::{Filter, FilterError};
use super::graph;
use crate::hook::{Hooks, Method, takes_return};
use crate::kernel::{Kernel, Module, ModulesError, Pads, PadsError, Refusal, Refused, Site};
use crate::machine::Machine;

/// The functions that are to be traced.
#[derive(Debug)]
pub struct Selection {
    /// How those are to be traced that are not traced yet.
    pub method: Method,
    /// What of their calls and returns is given out; `None` if it is calls only.
    pub graph: Option<graph::Options>,
    /// Whether their calls are only counted.
    pub counts: bool,
    /// Which values are told.
    pub values: WantedValues,
    /// Whether records stay in the rings, where later ones overwrite them, until they are asked for: see
    /// [`Tracer::hold`](super::tracer::Tracer::hold).
    pub overwrite: bool,
    /// Which of their calls are traced; `None` if all are. Counts are of all calls.
    pub calls: Option<CallConditions>,
    /// Whether it is only added up how long their calls take.
    pub measures: bool,
    /// Those that can be.
    pub sites: Vec<Site>,
    /// Those that the filter names and that can't, with the reason.
    pub refused: Vec<Refused>,
    /// Pads that the kernel has, selected or not.
    pub pads: usize,
    /// What they were chosen by, and those of modules that are loaded later will be.
    pub filter: Filter,
    /// The modules among whose functions they were chosen.
    pub modules: Vec<Arc<Module>>,
}

/// Which values of calls are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WantedValues {
    /// Their arguments. Of functions that are traced by traps they are not known.
    pub arguments: bool,
    /// What they return, where returns are told.
    pub returned: bool,
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
    /// The filter asks for functions of modules, and those can't be told.
    #[error(transparent)]
    Modules(#[from] ModulesError),
    /// The filter of calls makes no sense.
    #[error(transparent)]
    Calls(#[from] CallFilterError),
}

impl Selection {
    /// Chooses among the pads of `kernel` as they are now. Nothing in the guest is touched.
    ///
    /// Functions that are traced already look like functions that the guest traces;
    /// [`Selection::beside`] knows our own.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn new(
        kernel: &Kernel,
        machine: &dyn Machine,
        filter: &Filter,
    ) -> Result<Self, SelectError> {
        Ok(Self::among(kernel.pads(machine.ram())?, filter)?)
    }

    /// Chooses among the pads as they are now. Those that hold something of ours may be chosen, too.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn beside(hooks: &Hooks<'_>, filter: &Filter) -> Result<Self, SelectError> {
        check_modules(hooks, filter)?;
        Ok(Self::among(hooks.pads()?, filter)?)
    }

    /// Chooses functions that are to be trapped: among the pads as they are now, and of the functions without
    /// pads those that the filter names as they are called, without a wildcard.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn trapping(hooks: &Hooks<'_>, filter: &Filter) -> Result<Self, SelectError> {
        check_modules(hooks, filter)?;
        let mut pads = hooks.pads()?;
        for glob in &filter.only {
            let name = glob.pattern();
            let mut known = pads.sites.iter().map(|site| &*site.name);
            let mut refused = pads.refused.iter().map(|refused| &*refused.name);
            if known.any(|known| known == name) || refused.any(|refused| refused == name) {
                continue;
            }
            match hooks.unpadded(name) {
                Some(Ok(site)) => pads.sites.push(site),
                Some(Err(refused)) => pads.refused.push(refused),
                None => {}
            }
        }
        Ok(Self { method: Method::Trap, ..Self::among(pads, filter)? })
    }

    /// The same functions, of which returns are wanted as well; those are refused of which they can't be
    /// recorded.
    #[must_use]
    pub fn with_returns(self, options: graph::Options) -> Self {
        Self { graph: Some(options), ..self.whose_returns_are_taken() }
    }

    /// The same functions, of which is measured how long their calls take; those are refused whose returns
    /// can't be taken.
    #[must_use]
    pub fn measured(self) -> Self {
        Self { measures: true, ..self.whose_returns_are_taken() }
    }

    fn whose_returns_are_taken(self) -> Self {
        let Self { sites, mut refused, .. } = self;
        let (sites, others): (Vec<Site>, Vec<Site>) =
            sites.into_iter().partition(|site| takes_return(site).is_ok());
        refused.extend(others.into_iter().filter_map(|site| {
            let why = takes_return(&site).err()?;
            Some(Refused { name: site.name, at: site.at, why: Refusal::NoReturn { why } })
        }));
        Self { sites, refused, ..self }
    }

    /// The same functions, of which only those calls are traced.
    ///
    /// # Errors
    /// [`CallFilterError`].
    pub fn filtered(
        self,
        kernel: &Kernel,
        machine: &dyn Machine,
        filter: &CallFilter,
    ) -> Result<Self, CallFilterError> {
        if *filter == CallFilter::default() {
            return Ok(self);
        }
        let mut types = None;
        let prototype = |function: &str| {
            let types = types.get_or_insert_with(|| kernel.prototypes(machine.ram()));
            match types {
                Ok(types) => Ok(kernel.prototype(types, function)?),
                Err(why) => Err(CallFilterError::NoTypes(why.to_string())),
            }
        };
        let functions = self.sites.iter().map(|site| &*site.name);
        let hz = machine.clock_hz();
        let calls = CallConditions::new(filter, kernel.arch(), hz, functions, prototype)?;
        Ok(Self { calls: Some(calls), ..self })
    }

    /// Chooses among these pads.
    ///
    /// # Errors
    /// The filter names nothing.
    pub fn among(pads: Pads, filter: &Filter) -> Result<Self, FilterError> {
        let Pads { mut sites, mut refused, modules } = pads;
        let pads = sites.len() + refused.len();
        filter.check(
            sites.iter().map(|site| &*site.name),
            refused.iter().map(|refused| (&*refused.name, refused.why.label())),
        )?;
        sites.retain(|site| filter.selects(&site.name));
        refused.retain(|refused| filter.selects(&refused.name));
        let (filter, method) = (filter.clone(), Method::Call);
        Ok(Self {
            method,
            graph: None,
            counts: false,
            measures: false,
            overwrite: false,
            calls: None,
            values: WantedValues::default(),
            sites,
            refused,
            pads,
            filter,
            modules,
        })
    }
}

/// Whoever waits for a module must be able to see it come.
fn check_modules(hooks: &Hooks<'_>, filter: &Filter) -> Result<(), ModulesError> {
    match filter.names_modules() {
        // A list that just changes is no reason.
        true => match hooks.kernel().modules(hooks.machine().ram()) {
            Ok(_) | Err(ModulesError::Unsound { .. }) => Ok(()),
            Err(error) => Err(error),
        },
        false => Ok(()),
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
