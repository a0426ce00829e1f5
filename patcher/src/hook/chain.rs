//! What pads lead to: chains of pieces of code in the region.
//!
//! Each piece is entered with registers and stack as the pad's own call leaves them, keeps all of them,
//! and then goes on in the function or leads to the next piece ([`Then`]). So a piece knows nothing of
//! the others, and a chain is put together from its end. Pieces that are the same are one: what is known
//! here is never overwritten and never leaves, since a task may stand in it for as long as it likes.

use std::collections::BTreeMap;

use super::counts::KnownThunks;
use super::gates::{GateId, KnownGates};
use super::histograms::KnownHistograms;
use super::{HookError, Hooks, Want};
use crate::addr::Gva;
use crate::arch::{
    ArgumentWords, Logger, PadLayout, ReturnExit, ReturnForm, ReturnHook, TaskPlaces, Then,
};
use crate::kernel::{RecordedTask, Site};
use crate::region::{MEASURE_CALL, Part, RECORD_RETURN, ReturnPool};

/// A piece of code that can be in a chain. Two that are equal are the same code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Piece {
    /// Records the call, with these words of its arguments.
    Logger(ArgumentWords, Then),
    /// Counts the call, for functions that come by way of their thunks.
    Counter(Then),
    /// Takes the return of the call, with these duties.
    ReturnHook {
        /// See [`ReturnHook::duties`].
        duties: u32,
        then: Then,
    },
    /// Lets some calls through, and has the others go on in the function.
    Gate { gate: GateId, pass: Then, away: Then },
}

/// What is known of a kernel for the sake of pieces.
#[derive(Debug)]
pub(super) struct Ground {
    cpu_number: i32,
    returns: ReturnForm,
    pub(super) recorded: RecordedTask,
}

/// The pieces that there are.
#[derive(Debug, Default)]
pub(super) struct Chains {
    /// None until something is traced.
    ground: Option<Ground>,
    pieces: BTreeMap<Piece, Gva>,
    /// None until a return is taken.
    pub(super) pool: Option<ReturnPool>,
    pub(super) thunks: KnownThunks,
    pub(super) gates: KnownGates,
    pub(super) histograms: KnownHistograms,
}

impl Hooks<'_> {
    /// Finds out what has to be known of the kernel to trace, and places the logger, which nothing leads
    /// to yet, if that was not done before.
    ///
    /// # Errors
    /// [`HookError`]; the guest's text is not touched.
    pub fn prepare_tracing(&mut self) -> Result<(), HookError> {
        let form = self.ground()?.returns;
        let behind = PadLayout::SINGLE.resume;
        self.piece(Piece::Logger(ArgumentWords::NONE, Then::GoOn { behind, form })).map(drop)
    }

    /// What records tell of tasks, and why not the rest; `None` until something is traced.
    #[must_use]
    pub fn recorded(&self) -> Option<&RecordedTask> {
        self.chains.ground.as_ref().map(|ground| &ground.recorded)
    }

    pub(crate) fn recorded_places(&self) -> TaskPlaces {
        self.recorded().map(RecordedTask::places).unwrap_or_default()
    }

    /// What a pad has to call so that the calls of its function, which goes on so far behind the pad's
    /// instruction, are counted and recorded as `want` says.
    pub(super) fn chain(&mut self, site: &Site, want: Want, behind: u16) -> Result<Gva, HookError> {
        let form = self.ground()?.returns;
        let mut rest = Then::GoOn { behind, form };
        // What is measured has pieces of its own, and counts at their end: so thunks lead to the code that
        // counts for all.
        let counts_last = want.counted && want.measured;
        if counts_last {
            rest = Then::Next(self.counted(site, rest, true)?);
        }
        let then = self.returning(site, want, rest)?;
        let gate = want.gate.filter(|_| want.traced.is_some());
        let then = match (want.traced, gate) {
            (None, _) => then,
            (Some(_), None) => Then::Next(self.piece(Piece::Logger(want.arguments, then))?),
            (Some(_), Some(gate)) => {
                let pass = Then::Next(self.piece(Piece::Logger(want.arguments, then))?);
                // A call that is turned away is measured as any other.
                let away = self.returning(site, Want { returns: false, ..want }, rest)?;
                let piece = self.piece(Piece::Gate { gate, pass, away })?;
                Then::Next(self.gate_thunk(site, gate, piece)?)
            }
        };
        match then {
            // What leads to a thunk is its function's own.
            then if want.counted && !counts_last => self.counted(site, then, gate.is_none()),
            Then::Next(piece) => Ok(piece),
            // Nothing at all is wanted of a pad that leads somewhere nevertheless.
            Then::GoOn { .. } => self.piece(Piece::Logger(want.arguments, then)),
        }
    }

    /// What takes the returns of a function, if they are wanted, and then goes on with `rest`.
    fn returning(&mut self, site: &Site, want: Want, rest: Then) -> Result<Then, HookError> {
        Ok(match self.duties(site, want)? {
            Some(duties) => Then::Next(self.piece(Piece::ReturnHook { duties, then: rest })?),
            None => rest,
        })
    }

    /// What counts the calls of a function and then goes on; it is the same code for many if `shared`.
    fn counted(&mut self, site: &Site, then: Then, shared: bool) -> Result<Gva, HookError> {
        let counter = self.piece(Piece::Counter(then))?;
        self.thunk(site, counter, shared)
    }

    /// What is to be done when a call of a function returns, if anything is.
    fn duties(&mut self, site: &Site, want: Want) -> Result<Option<u32>, HookError> {
        let record = if want.returns { RECORD_RETURN } else { 0 };
        let measure = match want.measured {
            true => {
                let histogram = self.take_histograms([site].into_iter())?[0];
                MEASURE_CALL | u32::from(histogram)
            }
            false => 0,
        };
        Ok(Some(record | measure).filter(|duties| *duties != 0))
    }

    pub(super) fn ground(&mut self) -> Result<&Ground, HookError> {
        let ground = match self.chains.ground.take() {
            Some(ground) => ground,
            None => Ground {
                cpu_number: self.kernel.cpu_number(self.machine.ram())?,
                returns: self.kernel.return_form(self.machine.ram())?,
                recorded: self.kernel.recorded_task(self.machine),
            },
        };
        Ok(self.chains.ground.insert(ground))
    }

    /// Where a piece is, which is placed if it is not there yet.
    fn piece(&mut self, piece: Piece) -> Result<Gva, HookError> {
        if let Some(at) = self.chains.pieces.get(&piece) {
            return Ok(*at);
        }
        let at = match piece {
            Piece::Logger(arguments, then) => {
                let rings = self.region.rings();
                let ground = self.ground()?;
                let (cpu_number, task) = (ground.cpu_number, ground.recorded.places());
                let logger = Logger { cpu_number, rings, clock: true, task, arguments, then };
                self.place(|at| Ok(self.kernel.arch().assemble_logger(at, &logger)?))?
            }
            Piece::Counter(then) => {
                let counters = self.counters();
                self.place(|at| Ok(self.kernel.arch().assemble_counter(at, counters, then)?))?
            }
            Piece::ReturnHook { duties, then } => {
                let pool = self.return_pool()?;
                let cpu_number = self.ground()?.cpu_number;
                let clock = duties & MEASURE_CALL != 0;
                let hook = ReturnHook { cpu_number, pool, clock, duties, then };
                self.place(|at| Ok(self.kernel.arch().assemble_return_hook(at, &hook)?))?
            }
            Piece::Gate { gate, pass, away } => self.place_gate(gate, pass, away)?,
        };
        self.chains.pieces.insert(piece, at);
        Ok(at)
    }

    /// What functions return to whose returns are taken, once there are any.
    pub(super) fn return_exit(&mut self, pool: ReturnPool) -> Result<ReturnExit, HookError> {
        let (rings, histograms) = (self.region.rings(), self.histograms());
        let ground = self.ground()?;
        Ok(ReturnExit {
            cpu_number: ground.cpu_number,
            rings,
            clock: true,
            task: ground.recorded.places(),
            pool,
            histograms,
            returns: ground.returns,
        })
    }

    /// Places code that nothing leads to yet.
    pub(super) fn place(
        &self,
        assemble: impl FnOnce(Gva) -> Result<Vec<u8>, HookError>,
    ) -> Result<Gva, HookError> {
        let code = self.region.code();
        let at = code.place(&self.machine.region(Part::Code), assemble)?;
        if let Some(journal) = self.machine.journal() {
            journal.note_code(code.used())?;
        }
        Ok(at)
    }
}
