//! Which calls are traced of the functions of a client.

use crate::arch::gate::Conditions;
use crate::hook::{GateId, HookError, Hooks, Want};
use crate::kernel::Site;
use crate::trace::calls::CallConditions;
use crate::trace::counts::Counts;
use crate::trace::select::Selection;

/// The gates of a selection's functions, in their order.
pub(super) struct Gated(Vec<Option<GateId>>);

impl Gated {
    /// The gates of the selected functions; nothing leads to those yet that are new.
    ///
    /// # Errors
    /// What a gate asks for can't be told; a function is traced already, with another gate, and a function
    /// can have but one.
    pub fn new(hooks: &mut Hooks<'_>, selection: &Selection) -> Result<Self, HookError> {
        let sites = &selection.sites;
        if selection.counts || selection.measures {
            return Ok(Self(vec![None; sites.len()]));
        }
        let gates: Result<Vec<_>, HookError> = (sites.iter())
            .map(|site| {
                let conditions = selection.calls.as_ref().and_then(|calls| calls.of(&site.name));
                gate_of(hooks, site, hooks.want(site.at), conditions)
            })
            .collect();
        gates.map(Self)
    }

    /// The gate of the function with that index in the selection.
    pub fn gate(&self, index: usize) -> Option<GateId> {
        self.0[index]
    }

    /// Counts, from now on, the calls that are turned away, by these indices of functions; `None` if none
    /// can be. To be made before they are armed.
    pub fn counts(
        &self,
        hooks: &mut Hooks<'_>,
        sites: &[Site],
        indices: &[usize],
    ) -> Result<Option<Counts>, HookError> {
        let mut counters = Vec::new();
        for ((site, index), gate) in sites.iter().zip(indices).zip(&self.0) {
            if let Some(gate) = gate {
                counters.push((*index as u32, hooks.turned_away(site, *gate)?));
            }
        }
        if counters.is_empty() {
            return Ok(None);
        }
        let mut counts = Counts::default();
        counts.add(hooks, counters)?;
        Ok(Some(counts))
    }
}

/// The gate for these conditions, if any are asked for, in front of a function that does `want`.
fn gate_of(
    hooks: &mut Hooks<'_>,
    site: &Site,
    want: Want,
    conditions: Option<Conditions>,
) -> Result<Option<GateId>, HookError> {
    let gate = match conditions.filter(|conditions| *conditions != Conditions::default()) {
        None => None,
        Some(conditions) => Some(hooks.gate(&conditions)?),
    };
    if want.traced.is_some() && want.gate != gate {
        return Err(HookError::OtherGate(site.name.clone()));
    }
    Ok(gate)
}

/// The gate of a function of a module that was loaded later, for a client with that filter of calls, if that
/// and others who want it as `want` says can have the same; `None` if the client can't trace it.
pub(super) fn later_gate(
    hooks: &mut Hooks<'_>,
    site: &Site,
    want: Want,
    calls: Option<&CallConditions>,
) -> Result<Option<Option<GateId>>, HookError> {
    let conditions = calls.map(|calls| calls.of(&site.name));
    if conditions == Some(None) {
        return Ok(None);
    }
    match gate_of(hooks, site, want, conditions.flatten()) {
        Ok(gate) => Ok(Some(gate)),
        Err(HookError::OtherGate(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
