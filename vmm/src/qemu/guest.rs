//! A guest that runs under QEMU, whoever started it: stopped, looked at, given new text.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patcher::addr::Gpa;
use patcher::journal::Journal;
use patcher::machine::{
    Machine, Registers, StopError, StopTimes, Stopped, TextWrite, TextWriteError,
};
use patcher::mem::PhysMem;
use patcher::region::{Part, RegionWindow};

use super::board::{Board, ClockRate, Field};
use super::clock::{Clock, Moment};
use super::end::End;
use super::gdb::{Gdb, GdbError, RegisterPlace};
use super::memory::Memory;
use super::process::Handle;
use crate::turn::{Held, Turn};

/// How long QEMU may take from closing its sockets to its end.
pub(super) const DEATH: Duration = Duration::from_secs(5);

const STOP: &str = "stop the guest";

/// A register: where the gdbstub has it and where it goes.
type Place = (RegisterPlace, fn(&mut Registers, u64));

/// A guest under QEMU.
pub(super) struct Guest {
    memory: Memory,
    clock: Clock,
    turn: Turn,
    gdb: Mutex<Gdb>,
    board: &'static Board,
    places: Vec<Place>,
    vcpus: usize,
    stop_deadline: Duration,
    /// How it ends.
    pub end: Arc<End>,
    /// QEMU, if it is ours to end.
    process: Option<Handle>,
    /// Why the guest can't be stopped any more, if it is not ours to end.
    lost: Mutex<Option<String>>,
    journal: Option<Journal>,
}

impl Guest {
    /// Takes over a guest that stands.
    ///
    /// # Errors
    /// What the gdbstub lacks.
    pub(super) fn new(
        memory: Memory,
        mut gdb: Gdb,
        board: &'static Board,
        stop_deadline: Duration,
        end: Arc<End>,
    ) -> Result<Self, GdbError> {
        Ok(Self {
            memory,
            clock: clock(&mut gdb, board)?,
            turn: Turn::default(),
            board,
            places: places(&gdb, board)?,
            vcpus: gdb.vcpus(),
            gdb: Mutex::new(gdb),
            stop_deadline,
            end,
            process: None,
            lost: Mutex::default(),
            journal: None,
        })
    }

    /// The same with a QEMU that is to end rather than to be lost.
    pub(super) fn owning(self, process: Handle) -> Self {
        Self { process: Some(process), ..self }
    }

    /// The same with a journal of what is written.
    pub(super) fn keeping(self, journal: Journal) -> Self {
        Self { journal: Some(journal), ..self }
    }

    /// Lets the vCPUs go, the first time.
    ///
    /// # Errors
    /// QEMU does not take it.
    pub(super) fn start(&self) -> Result<(), GdbError> {
        self.gdb().resume()
    }

    /// Ends QEMU if it is ours.
    pub(super) fn kill(&self) {
        if let Some(process) = &self.process {
            self.end.killed.store(true, Ordering::SeqCst);
            process.kill();
        }
    }

    /// Stops the guest once more and leaves it, running, to others. The gdbstub is of no use from then
    /// on.
    ///
    /// # Errors
    /// Why it may still stand.
    pub(super) fn leave(&self) -> Result<(), StopError> {
        let mut last = Standstill::new(self)?;
        last.released = true;
        let left = last.gdb.detach().map_err(|error| self.failed("leave the guest", error));
        *self.lost_why() = Some("it was left to run by itself".to_owned());
        left
    }

    fn gdb(&self) -> MutexGuard<'_, Gdb> {
        self.gdb.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost_why(&self) -> MutexGuard<'_, Option<String>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self) -> Option<String> {
        self.lost_why().clone()
    }

    /// What a failed conversation means. Once one can't be understood, nobody can tell any more
    /// whether the guest stands or runs: it is ended if it is ours, and lost if not.
    fn failed(&self, what: &'static str, error: GdbError) -> StopError {
        match error {
            // Which of them it is that does not stop QEMU does not tell.
            GdbError::Silent(waited) if what == STOP => StopError::Silent { vcpu: None, waited },
            // It is gone for whoever asks next as well.
            GdbError::Closed if self.end.wait(Some(DEATH)).is_some() => StopError::Gone,
            error => {
                self.kill();
                if self.process.is_none() {
                    *self.lost_why() = Some(error.to_string());
                }
                StopError::Engine { what, source: io::Error::other(error) }
            }
        }
    }
}

/// Where the gdbstub has the registers that are wanted.
fn places(gdb: &Gdb, board: &Board) -> Result<Vec<Place>, GdbError> {
    let mut places = Vec::new();
    for Field { name, optional, set } in board.registers.fields {
        match gdb.place(name) {
            Ok(place) => places.push((place, *set)),
            Err(_) if *optional => {}
            Err(error) => return Err(error),
        }
    }
    Ok(places)
}

fn clock(gdb: &mut Gdb, board: &Board) -> Result<Clock, GdbError> {
    Ok(match board.clock {
        ClockRate::HostTsc => Clock::HostTsc(Moment::now()),
        ClockRate::Fixed(hz) => Clock::Fixed(hz),
        ClockRate::Register(name) => {
            let place = gdb.place(name)?;
            Clock::Fixed(gdb.registers(0, &[place])?.first().copied().unwrap_or_default())
        }
    })
}

impl Machine for Guest {
    fn ram(&self) -> &dyn PhysMem {
        self.memory.ram()
    }

    fn vcpus(&self) -> usize {
        self.vcpus
    }

    fn region(&self, part: Part) -> RegionWindow<'_> {
        self.memory.part(part)
    }

    fn clock_hz(&self) -> u64 {
        self.clock.frequency()
    }

    fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    fn resets(&self) -> u64 {
        self.end.resets.load(Ordering::SeqCst)
    }

    fn sample(&self, vcpu: usize) -> Result<Registers, StopError> {
        Standstill::new(self)?.registers(vcpu)
    }

    fn stop(&self) -> Result<Box<dyn Stopped + '_>, StopError> {
        Ok(Box::new(Standstill::new(self)?))
    }
}

/// A guest that stands, until this is dropped.
struct Standstill<'a> {
    guest: &'a Guest,
    gdb: MutexGuard<'a, Gdb>,
    /// The registers of vCPUs that were asked for; they stay as they are until the vCPU goes on.
    registers: Vec<Option<Registers>>,
    quiesce: Duration,
    since: Instant,
    released: bool,
    /// Given up last, after the guest was let go.
    _turn: Held<'a>,
}

impl<'a> Standstill<'a> {
    fn new(guest: &'a Guest) -> Result<Self, StopError> {
        let turn = guest.turn.take()?;
        if guest.end.exit().is_some() {
            return Err(StopError::Gone);
        }
        if let Some(why) = guest.lost() {
            return Err(StopError::Engine { what: STOP, source: io::Error::other(why) });
        }
        let begun = Instant::now();
        let mut gdb = guest.gdb();
        gdb.stop(guest.stop_deadline).map_err(|error| guest.failed(STOP, error))?;
        let since = Instant::now();
        let registers = vec![None; guest.vcpus];
        let quiesce = since - begun;
        Ok(Self { guest, gdb, registers, quiesce, since, released: false, _turn: turn })
    }

    fn release(&mut self) -> Result<StopTimes, StopError> {
        let asked = Instant::now();
        if !std::mem::replace(&mut self.released, true) {
            self.gdb.resume().map_err(|error| self.guest.failed("resume the guest", error))?;
        }
        let (quiesce, held) = (self.quiesce, asked - self.since);
        Ok(StopTimes { quiesce, held, resume: asked.elapsed() })
    }
}

impl Stopped for Standstill<'_> {
    fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError> {
        let count = self.guest.vcpus;
        match self.registers.get(vcpu) {
            None => return Err(StopError::NoSuchVcpu { vcpu, count }),
            Some(Some(known)) => return Ok(*known),
            Some(None) => {}
        }
        let places: Vec<_> = self.guest.places.iter().map(|(place, _)| *place).collect();
        let values = self.gdb.registers(vcpu, &places);
        let values = values.map_err(|error| self.guest.failed("read a vCPU's registers", error))?;
        let mut registers = (self.guest.board.registers.blank)();
        for ((_, set), value) in self.guest.places.iter().zip(values) {
            set(&mut registers, value);
        }
        self.registers[vcpu] = Some(registers);
        Ok(registers)
    }

    fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError> {
        let error = |index: usize, reason| {
            let at = writes.get(index).map_or(Gpa(0), |write| write.at);
            TextWriteError { index, at, reason }
        };
        // QEMU would take a write to nowhere without a word.
        let mut extents = self.guest.memory.ram().extents();
        let code = self.guest.region(Part::Code);
        extents.push(code.gpa..code.gpa + code.memory.len() as u64);
        let in_ram = |write: &TextWrite<'_>| {
            let end = write.at.checked_add(write.bytes.len() as u64);
            end.is_some_and(|end| extents.iter().any(|ram| ram.start <= write.at && end <= ram.end))
        };
        let good = writes.iter().position(|write| !in_ram(write)).unwrap_or(writes.len());
        let packets = writes[..good].iter().map(|write| (write.at.0, write.bytes));
        self.gdb.write(packets).map_err(|(index, failure)| {
            error(index, self.guest.failed("write guest text", failure).to_string())
        })?;
        match good {
            all if all == writes.len() => Ok(()),
            bad => Err(error(bad, "it is neither guest RAM nor the region's code".to_owned())),
        }
    }

    fn step(&mut self, vcpu: usize) -> Result<(), StopError> {
        if let Some(known) = self.registers.get_mut(vcpu) {
            *known = None;
        }
        self.gdb.step(vcpu).map_err(|error| self.guest.failed("step a vCPU", error))
    }

    fn resume(mut self: Box<Self>) -> Result<StopTimes, StopError> {
        self.release()
    }
}

impl Drop for Standstill<'_> {
    fn drop(&mut self) {
        // A guest that can't be let go has been ended.
        let _ = self.release();
    }
}
