//! A guest under QEMU: started, stopped, looked at, ended.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ChildStderr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use patcher::machine::{Machine, Registers, StopError, Stopped};
use patcher::mem::PhysMem;
use patcher::region::{Part, RegionWindow};

use super::end::End;
use super::gdb::{Gdb, GdbError};
use super::guest::{DEATH, Guest};
use super::launch::{Fds, Launch, QemuError};
use super::memory::{Layout, Memory};
use super::process::{self, Handle};
use super::qmp::Qmp;
use crate::devices::{Console, ConsoleEnds, ConsoleInput};
use crate::exit::GuestExit;

/// How long the end of a guest waits for a slow sink to take the last of its output.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A guest that QEMU runs. Dropping it kills both.
pub struct Qemu {
    guest: Guest,
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
        let speak = || -> Result<Guest, QemuError> {
            let mut qmp = Qmp::connect(qmp)?;
            let state = qmp.query_status()?;
            let gdb = Gdb::connect(gdb, board.order)?;
            let (found, wanted) = (gdb.vcpus(), launch.cpus);
            if found != wanted || !matches!(state.as_str(), "prelaunch" | "paused") {
                return Err(QemuError::Other { state, found, wanted });
            }
            let guest = Guest::new(memory, gdb, board, launch.stop_deadline, Arc::clone(&end))?;
            let reason = Arc::clone(&end);
            thread::Builder::new()
                .name("qmp".into())
                .spawn(move || reason.listen(qmp))
                .map_err(step("start a thread"))?;
            Ok(guest)
        };
        match speak() {
            Ok(guest) => Ok(Self { guest: guest.owning(process), console, keeper: Some(keeper) }),
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
        self.guest.start().map_err(io::Error::other)
    }

    /// How the guest ended, if it has. From then on nothing changes its memory.
    #[must_use]
    pub fn exit(&self) -> Option<GuestExit> {
        self.guest.end.exit()
    }

    /// Waits for the guest's end, at most `longest`, and for its last output to reach the
    /// console's sink.
    #[must_use]
    pub fn wait(&self, longest: Option<Duration>) -> Option<GuestExit> {
        let exit = self.guest.end.wait(longest)?;
        self.console.close_input();
        // A sink that is stuck does not keep the guest's end from being known.
        let _ = self.console.drain(LAST_WORDS);
        Some(exit)
    }

    /// Ends the guest, wherever it is. Nothing happens if it has ended.
    pub fn kill(&self) {
        self.guest.kill();
    }

    /// Where to type.
    #[must_use]
    pub fn console_input(&self) -> ConsoleInput {
        self.console.input()
    }
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
        self.guest.ram()
    }

    fn vcpus(&self) -> usize {
        self.guest.vcpus()
    }

    fn region(&self, part: Part) -> RegionWindow<'_> {
        self.guest.region(part)
    }

    fn clock_hz(&self) -> u64 {
        self.guest.clock_hz()
    }

    fn sample(&self, vcpu: usize) -> Result<Registers, StopError> {
        self.guest.sample(vcpu)
    }

    fn stop(&self) -> Result<Box<dyn Stopped + '_>, StopError> {
        self.guest.stop()
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
