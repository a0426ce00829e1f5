//! A guest under QEMU: started, stopped, looked at, ended.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ChildStderr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use patcher::addr::Gpa;
use patcher::machine::{
    Machine, RegionWindow, Registers, StopError, StopTimes, Stopped, TextWrite, TextWriteError,
};
use patcher::mem::PhysMem;

use super::board::{Board, ClockRate, Field};
use super::clock::{Clock, Moment};
use super::gdb::{Gdb, GdbError, RegisterPlace};
use super::launch::{Fds, Launch, QemuError};
use super::memory::{Layout, Memory};
use super::process::{self, Handle};
use super::qmp::Qmp;
use crate::devices::{Console, ConsoleEnds, ConsoleInput};
use crate::exit::GuestExit;
use crate::turn::{Held, Turn};

/// How long the end of a guest waits for a slow sink to take the last of its output.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long QEMU may take from closing its sockets to its end.
const DEATH: Duration = Duration::from_secs(5);

/// A register: where the gdbstub has it and where it goes.
type Place = (RegisterPlace, fn(&mut Registers, u64));

/// A guest that QEMU runs. Dropping it kills both.
pub struct Qemu {
    memory: Memory,
    clock: Clock,
    turn: Turn,
    gdb: Mutex<Gdb>,
    board: &'static Board,
    places: Vec<Place>,
    vcpus: usize,
    stop_deadline: Duration,
    process: Handle,
    end: Arc<End>,
    console: Console,
    /// Ends when QEMU has.
    keeper: Option<JoinHandle<()>>,
}

impl Qemu {
    /// Starts QEMU with a guest whose vCPUs stand; [`start`](Self::start) lets them go.
    ///
    /// # Errors
    /// What can't be had of what `launch` asks for, or what QEMU or the host says.
    pub fn launch(launch: &Launch, console: Console) -> Result<Self, QemuError> {
        let layout = launch.plan()?;
        let step = |step| move |source| QemuError::SetUp { step, source };
        let memory = Memory::new(&layout).map_err(step("map the guest's memory"))?;
        let pair = || UnixStream::pair().map_err(step("make sockets"));
        let (qmp, qmp_theirs) = pair()?;
        let (gdb, gdb_theirs) = pair()?;
        let (com1, com1_theirs) = pair()?;
        let end = Arc::new(End::default());
        let printed =
            serial(com1, console.ends(), Arc::clone(&end)).map_err(step("start a thread"))?;
        let theirs = [qmp_theirs, gdb_theirs, com1_theirs];
        let started = Keeper::start(launch, &layout, &memory, theirs, printed, Arc::clone(&end));
        let (keeper, process) = started?;
        let board = launch.arch.board();
        let speak = || -> Result<(Gdb, Vec<Place>, Clock), QemuError> {
            let mut qmp = Qmp::connect(qmp)?;
            let state = qmp.query_status()?;
            let mut gdb = Gdb::connect(gdb, board.order)?;
            let (found, wanted) = (gdb.vcpus(), launch.cpus);
            if found != wanted || !matches!(state.as_str(), "prelaunch" | "paused") {
                return Err(QemuError::Other { state, found, wanted });
            }
            let places = places(&gdb, board)?;
            let clock = clock(&mut gdb, board)?;
            let reason = Arc::clone(&end);
            thread::Builder::new()
                .name("qmp".into())
                .spawn(move || reason.listen(qmp))
                .map_err(step("start a thread"))?;
            Ok((gdb, places, clock))
        };
        match speak() {
            Ok((gdb, places, clock)) => Ok(Self {
                memory,
                clock,
                turn: Turn::default(),
                gdb: Mutex::new(gdb),
                board,
                places,
                vcpus: launch.cpus,
                stop_deadline: launch.stop_deadline,
                process,
                end,
                console,
                keeper: Some(keeper),
            }),
            Err(error) => {
                end.no_reason_comes();
                // What QEMU says of its own end tells more than that its sockets are closed.
                let closed = matches!(
                    &error,
                    QemuError::Monitor(super::QmpError::Closed) | QemuError::Gdb(GdbError::Closed)
                );
                let exit = if closed { end.wait(Some(DEATH)) } else { None };
                process.kill();
                let _ = keeper.join();
                match exit {
                    Some(GuestExit::QemuEnded { what }) => Err(QemuError::Ended(what)),
                    _ => Err(error),
                }
            }
        }
    }

    /// Lets the vCPUs go, the first time.
    ///
    /// # Errors
    /// QEMU does not take it.
    pub fn start(&self) -> io::Result<()> {
        self.gdb().resume().map_err(io::Error::other)
    }

    /// How the guest ended, if it has. From then on nothing changes its memory.
    #[must_use]
    pub fn exit(&self) -> Option<GuestExit> {
        self.end.exit()
    }

    /// Waits for the guest's end, at most `longest`, and for its last output to reach the
    /// console's sink.
    #[must_use]
    pub fn wait(&self, longest: Option<Duration>) -> Option<GuestExit> {
        let exit = self.end.wait(longest)?;
        self.console.close_input();
        // A sink that is stuck does not keep the guest's end from being known.
        let _ = self.console.drain(LAST_WORDS);
        Some(exit)
    }

    /// Ends the guest, wherever it is. Nothing happens if it has ended.
    pub fn kill(&self) {
        self.end.killed.store(true, Ordering::SeqCst);
        self.process.kill();
    }

    /// Where to type.
    #[must_use]
    pub fn console_input(&self) -> ConsoleInput {
        self.console.input()
    }

    fn gdb(&self) -> MutexGuard<'_, Gdb> {
        self.gdb.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a failed conversation means. One that can't be understood ends the guest: nobody could
    /// tell any more whether it stands or runs.
    fn failed(&self, what: &'static str, error: GdbError) -> StopError {
        match error {
            GdbError::Silent(waited) if what == STOP => StopError::Silent { vcpu: 0, waited },
            GdbError::Closed => {
                // It is gone for whoever asks next as well.
                let _ = self.end.wait(Some(DEATH));
                StopError::Gone
            }
            error => {
                self.kill();
                StopError::Engine { what, source: io::Error::other(error) }
            }
        }
    }
}

const STOP: &str = "stop the guest";

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

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
        self.console.close_input();
        if let Some(keeper) = self.keeper.take() {
            // A thread that panicked has said so.
            let _ = keeper.join();
        }
    }
}

impl std::fmt::Debug for Qemu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qemu").field("exit", &self.exit()).finish_non_exhaustive()
    }
}

impl Machine for Qemu {
    fn ram(&self) -> &dyn PhysMem {
        self.memory.ram()
    }

    fn vcpus(&self) -> usize {
        self.vcpus
    }

    fn region_code(&self) -> RegionWindow<'_> {
        self.memory.code()
    }

    fn region_rings(&self) -> RegionWindow<'_> {
        self.memory.rings()
    }

    fn clock_hz(&self) -> u64 {
        self.clock.frequency()
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
    qemu: &'a Qemu,
    gdb: MutexGuard<'a, Gdb>,
    quiesce: Duration,
    since: Instant,
    released: bool,
    /// Given up last, after the guest was let go.
    _turn: Held<'a>,
}

impl<'a> Standstill<'a> {
    fn new(qemu: &'a Qemu) -> Result<Self, StopError> {
        let turn = qemu.turn.take()?;
        if qemu.exit().is_some() {
            return Err(StopError::Gone);
        }
        let begun = Instant::now();
        let mut gdb = qemu.gdb();
        gdb.stop(qemu.stop_deadline).map_err(|error| qemu.failed(STOP, error))?;
        let since = Instant::now();
        Ok(Self { qemu, gdb, quiesce: since - begun, since, released: false, _turn: turn })
    }

    fn release(&mut self) -> Result<StopTimes, StopError> {
        let asked = Instant::now();
        if !std::mem::replace(&mut self.released, true) {
            self.gdb.resume().map_err(|error| self.qemu.failed("resume the guest", error))?;
        }
        let (quiesce, held) = (self.quiesce, asked - self.since);
        Ok(StopTimes { quiesce, held, resume: asked.elapsed() })
    }
}

impl Stopped for Standstill<'_> {
    fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError> {
        let count = self.qemu.vcpus;
        if vcpu >= count {
            return Err(StopError::NoSuchVcpu { vcpu, count });
        }
        let places: Vec<_> = self.qemu.places.iter().map(|(place, _)| *place).collect();
        let values = self.gdb.registers(vcpu, &places);
        let values = values.map_err(|error| self.qemu.failed("read a vCPU's registers", error))?;
        let mut registers = (self.qemu.board.registers.blank)();
        for ((_, set), value) in self.qemu.places.iter().zip(values) {
            set(&mut registers, value);
        }
        Ok(registers)
    }

    fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError> {
        let error = |index: usize, reason| {
            let at = writes.get(index).map_or(Gpa(0), |write| write.at);
            TextWriteError { index, at, reason }
        };
        // QEMU would take a write to nowhere without a word.
        let extents = self.qemu.memory.ram().extents();
        let in_ram = |write: &TextWrite<'_>| {
            let end = write.at.checked_add(write.bytes.len() as u64);
            end.is_some_and(|end| extents.iter().any(|ram| ram.start <= write.at && end <= ram.end))
        };
        let good = writes.iter().position(|write| !in_ram(write)).unwrap_or(writes.len());
        let packets = writes[..good].iter().map(|write| (write.at.0, write.bytes));
        self.gdb.write(packets).map_err(|(index, failure)| {
            error(index, self.qemu.failed("write guest text", failure).to_string())
        })?;
        match good {
            all if all == writes.len() => Ok(()),
            bad => Err(error(bad, "it is not guest RAM".to_owned())),
        }
    }

    fn step(&mut self, vcpu: usize) -> Result<(), StopError> {
        self.gdb.step(vcpu).map_err(|error| self.qemu.failed("step a vCPU", error))
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

/// How the guest ended.
#[derive(Default)]
struct End {
    /// QEMU has ended.
    over: AtomicBool,
    killed: AtomicBool,
    state: Mutex<EndState>,
    changed: Condvar,
}

#[derive(Default)]
struct EndState {
    /// What QEMU's monitor said about it.
    reason: Option<GuestExit>,
    /// The monitor says no more.
    all_said: bool,
    exit: Option<GuestExit>,
}

impl End {
    fn state(&self) -> MutexGuard<'_, EndState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exit(&self) -> Option<GuestExit> {
        self.state().exit.clone()
    }

    fn wait(&self, longest: Option<Duration>) -> Option<GuestExit> {
        let until = longest.map(|longest| Instant::now() + longest);
        let mut state = self.state();
        while state.exit.is_none() {
            state = match until {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.checked_duration_since(Instant::now())?;
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        state.exit.clone()
    }

    /// Waits for what the monitor says about the guest's end.
    fn listen(&self, mut qmp: Qmp) {
        while let Ok(event) = qmp.next_event() {
            if event.name == "SHUTDOWN" {
                self.state().reason = match event.reason.as_deref() {
                    Some("guest-shutdown") => Some(GuestExit::PowerOff),
                    Some("guest-reset" | "subsystem-reset") => Some(GuestExit::Reboot),
                    Some("guest-panic") => Some(GuestExit::Panicked),
                    _ => None,
                };
            }
        }
        self.no_reason_comes();
    }

    fn no_reason_comes(&self) {
        self.state().all_said = true;
        self.changed.notify_all();
    }

    /// QEMU has ended, by itself or not.
    fn conclude(&self, what: String) {
        let mut state = self.state();
        while !state.all_said {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let killed = self.killed.load(Ordering::SeqCst).then_some(GuestExit::Killed);
        let exit = state.reason.take().or(killed).unwrap_or(GuestExit::QemuEnded { what });
        state.exit = Some(exit);
        self.changed.notify_all();
    }
}

/// The thread that starts QEMU and waits for its end: the signal that ends QEMU with its parent
/// goes by thread.
struct Keeper;

impl Keeper {
    fn start(
        launch: &Launch,
        layout: &Layout,
        memory: &Memory,
        [qmp, gdb, console]: [UnixStream; 3],
        printed: JoinHandle<()>,
        end: Arc<End>,
    ) -> Result<(JoinHandle<()>, Handle), QemuError> {
        let setup = |source| QemuError::SetUp { step: "start a thread", source };
        let file = memory.file().try_clone().map_err(setup)?;
        let fds = Fds { memory: &file, qmp: &qmp, gdb: &gdb, console: &console };
        let command = launch.command(layout, &fds);
        let (sender, receiver) = mpsc::sync_channel(1);
        let run = move || {
            let fds = [file.as_fd(), qmp.as_fd(), gdb.as_fd(), console.as_fd()];
            let started = process::spawn(command, &fds);
            // Only QEMU has the other ends now, and closes them when it ends.
            drop((file, qmp, gdb, console));
            Self::keep(started, &sender, printed, &end);
        };
        let keeper = thread::Builder::new().name("qemu".into()).spawn(run).map_err(setup)?;
        let process = receiver.recv().unwrap_or_else(|gone| Err(io::Error::other(gone)));
        let start =
            |source| QemuError::Start { program: launch.qemu.clone(), arch: launch.arch, source };
        Ok((keeper, process.map_err(start)?))
    }

    fn keep(
        started: io::Result<(std::process::Child, Handle)>,
        sender: &SyncSender<io::Result<Handle>>,
        printed: JoinHandle<()>,
        end: &End,
    ) {
        let (mut child, handle) = match started {
            Ok(started) => started,
            Err(error) => return drop(sender.send(Err(error))),
        };
        let said: Option<ChildStderr> = child.stderr.take();
        // The one that waits for it is there, as nothing can go wrong in between.
        let _ = sender.send(Ok(handle));
        let said = said.map(process::last_words).unwrap_or_default();
        let what = match child.wait() {
            Ok(status) => process::ended(status, &said),
            Err(error) => format!("how is not known: {error}"),
        };
        end.over.store(true, Ordering::SeqCst);
        // Everything that the guest has printed is in the console's queue then.
        let _ = printed.join();
        end.conclude(what);
    }
}

/// Carries what the guest prints on its serial port, and what is typed, on two threads that end with
/// QEMU or the console; gives the one that carries what is printed.
fn serial(socket: UnixStream, ends: ConsoleEnds, end: Arc<End>) -> io::Result<JoinHandle<()>> {
    let ConsoleEnds { mut output, input } = ends;
    let mut typed = socket.try_clone()?;
    let mut printed = socket;
    thread::Builder::new().name("typed".into()).spawn(move || {
        while let Some(bytes) = input.take() {
            if typed.write_all(&bytes).is_err() {
                return;
            }
        }
    })?;
    thread::Builder::new().name("printed".into()).spawn(move || {
        let mut some = [0; 4096];
        while let Ok(length @ 1..) = printed.read(&mut some) {
            output.wait_for_room(|| end.over.load(Ordering::SeqCst));
            // The queue takes what there is room for and counts the rest.
            let _ = output.write_all(&some[..length]);
        }
    })
}
