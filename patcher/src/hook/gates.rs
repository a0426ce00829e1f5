//! Gates: which conditions there are, and the cells that functions have for them.

use std::collections::BTreeMap;
use std::sync::Arc;

use vm_memory::Bytes;

use super::counts::Together;
use super::{HookError, Hooks};
use crate::addr::Gva;
use crate::arch::gate::Conditions;
use crate::arch::{CommPlace, Gate, GatePlaces, Then};
use crate::kernel::{Site, TaskPlaceError};
use crate::region::{COUNTER_BYTES, COUNTERS, COUNTERS_OFFSET, Part, RegionError, THUNK_BLOCKS};

/// Conditions that calls are let through by, as [`Hooks::gate`] knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GateId(u32);

/// The gates that there are. As with thunks, no function's cells are ever given to another one.
#[derive(Debug, Default)]
pub(super) struct KnownGates {
    known: Vec<Known>,
    by_conditions: BTreeMap<Conditions, GateId>,
    /// Asked for once.
    comm: Option<Result<CommPlace, TaskPlaceError>>,
}

#[derive(Debug)]
struct Known {
    conditions: Conditions,
    /// Cells that were taken together, each for as many functions as have thunks in its blocks.
    runs: Vec<Run>,
    /// How many functions have cells in the last one.
    used: u32,
    /// By pad, as with counters: where a function's cells are, by run and number.
    cells: BTreeMap<Gva, (Arc<str>, usize, u32)>,
}

#[derive(Debug, Clone, Copy)]
struct Run {
    first: u32,
    blocks: u32,
}

impl Hooks<'_> {
    /// The gate for these conditions, which is the same for the same ones. Nothing leads to it yet.
    ///
    /// # Errors
    /// [`HookError::TaskUnknown`]: they ask for something of the task that can't be told in this kernel.
    pub fn gate(&mut self, conditions: &Conditions) -> Result<GateId, HookError> {
        if let Some(known) = self.chains.gates.by_conditions.get(conditions) {
            return Ok(*known);
        }
        self.gate_places(conditions)?;
        let gates = &mut self.chains.gates;
        let gate = GateId(gates.known.len() as u32);
        gates.known.push(Known {
            conditions: conditions.clone(),
            runs: Vec::new(),
            used: 0,
            cells: BTreeMap::new(),
        });
        gates.by_conditions.insert(conditions.clone(), gate);
        Ok(gate)
    }

    /// Where what conditions ask for of the task is.
    fn gate_places(&mut self, conditions: &Conditions) -> Result<GatePlaces, HookError> {
        let mut places = GatePlaces::default();
        if conditions.pids.is_empty() && conditions.comm.is_none() {
            return Ok(places);
        }
        let pid = self.ground()?.recorded.pid.clone().map_err(HookError::TaskUnknown)?;
        places.pid = Some(pid);
        if conditions.comm.is_some() {
            let (kernel, ram) = (self.kernel, self.machine.ram());
            let comm = self.chains.gates.comm.get_or_insert_with(|| kernel.comm_place(ram, pid));
            places.comm = Some(comm.clone().map_err(HookError::TaskUnknown)?);
        }
        Ok(places)
    }

    pub(super) fn place_gate(
        &mut self,
        gate: GateId,
        pass: Then,
        away: Then,
    ) -> Result<Gva, HookError> {
        let conditions = self.chains.gates.known[gate.0 as usize].conditions.clone();
        let places = self.gate_places(&conditions)?;
        let counters = self.counters();
        let gate = Gate { conditions: &conditions, counters, places, pass, away };
        self.place(|at| Ok(self.kernel.arch().assemble_gate(at, &gate)?))
    }

    /// Where the thunk of a function is that leads to the gate's code at `piece`.
    pub(super) fn gate_thunk(
        &mut self,
        site: &Site,
        gate: GateId,
        piece: Gva,
    ) -> Result<Gva, HookError> {
        let (run, number) = self.take_cells(site, gate)?;
        let known = &self.chains.gates.known[gate.0 as usize];
        let Run { first, blocks } = known.runs[run];
        let stride = known.conditions.cells();
        self.thunk_in(Together { to: piece, first, stride, blocks }, number)
    }

    /// Gives a function its cells, unless it has them: their run, and its number in that.
    fn take_cells(&mut self, site: &Site, gate: GateId) -> Result<(usize, u32), HookError> {
        let in_block = self.kernel.arch().thunk_shape().in_block;
        let chains = &mut self.chains;
        let known = &mut chains.gates.known[gate.0 as usize];
        if let Some((name, run, number)) = known.cells.get(&site.at)
            && **name == *site.name
        {
            return Ok((*run, *number));
        }
        let last = known.runs.last().map_or(0, |run| run.blocks);
        if known.used == last * in_block {
            let blocks = (last * 2).clamp(1, THUNK_BLOCKS);
            let (first, cells) =
                (chains.thunks.taken, blocks * in_block * known.conditions.cells());
            if cells > COUNTERS - first {
                return Err(HookError::CountersFull(site.name.clone()));
            }
            // An earlier process may have left something there.
            let data = self.machine.region(Part::Data).memory;
            let zeros = vec![0; cells as usize * COUNTER_BYTES as usize];
            let at = COUNTERS_OFFSET as usize + first as usize * COUNTER_BYTES as usize;
            data.write_slice(&zeros, at).map_err(|error| RegionError::Memory(error.to_string()))?;
            chains.thunks.taken += cells;
            known.runs.push(Run { first, blocks });
            known.used = 0;
        }
        let place = (known.runs.len() - 1, known.used);
        known.used += 1;
        known.cells.insert(site.at, (Arc::from(&*site.name), place.0, place.1));
        Ok(place)
    }

    /// The number of the counter that counts a function's calls that the gate turns away. The function is
    /// given its cells, unless it has them.
    ///
    /// # Errors
    /// [`HookError::CountersFull`]; the region can't be written.
    pub fn turned_away(&mut self, site: &Site, gate: GateId) -> Result<u32, HookError> {
        let (run, number) = self.take_cells(site, gate)?;
        let known = &self.chains.gates.known[gate.0 as usize];
        Ok(known.runs[run].first + number * known.conditions.cells())
    }
}
