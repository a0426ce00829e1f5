//! Takes over a guest of a QEMU that somebody else started, and leaves it again.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use patcher::machine::{Machine, StopError};
use patcher::patch::{LeftBehind, PlanError, Reverted};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::claim::{Claim, ClaimError};
use super::end::End;
use super::found::{Found, RegionMemory};
use super::gdb::Gdb;
use super::guest::{DEATH, Guest};
use super::ivshmem::IvshmemError;
use super::qmp::Qmp;
use super::stub::Stub;
use super::{Architecture, GdbError, QmpError};
use crate::exit::GuestExit;

/// How often it is looked whether anybody still wants to know of QEMU's end.
const GLANCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// A QEMU to attach to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attach {
    /// The Unix socket of a QMP monitor that nobody else uses.
    pub qmp: PathBuf,
    /// How much RAM the guest was told of by `mem=`, in bytes; `None` to read it from QEMU's own
    /// command line.
    pub told: Option<u64>,
    /// The most memory for rings, in bytes.
    pub rings: u64,
    /// How long a stop may take to bring all vCPUs to a stand.
    pub stop_deadline: Duration,
    /// Where journals are kept.
    pub journals: PathBuf,
    /// Put back what an earlier process has left in the guest.
    pub restore: bool,
}

/// A guest could not be attached to. It runs as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// There is no monitor.
    #[error(
        "no QMP monitor can be reached at {}: {source}; start QEMU with \
         -qmp unix:{},server=on,wait=off", path.display(), path.display()
    )]
    NoMonitor {
        /// Where it was looked for.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A monitor that does not answer has a client.
    #[error(
        "the QMP monitor at {} does not answer, as if it had another client; give QEMU a further one \
         with -qmp unix:PATH,server=on,wait=off", .0.display()
    )]
    MonitorBusy(PathBuf),
    /// The monitor says something else than it should.
    #[error(transparent)]
    Monitor(#[from] QmpError),
    /// It can't be claimed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// An earlier process has left something.
    #[error(
        "an earlier vmm was killed and has left {sites} functions of the guest changed, by the journal \
         {}; put them back with --restore", journal.display()
    )]
    LeftBehind {
        /// How many.
        sites: usize,
        /// Where they are listed.
        journal: PathBuf,
    },
    /// What was left can't be put back.
    #[error("what an earlier vmm has left in the guest can't be put back: {0}")]
    Restore(String),
    /// The machine is none that is known.
    #[error("QEMU emulates {0}, and only q35, pc, s390-ccw-virtio and virt can be attached to")]
    Machine(String),
    /// RAM is QEMU's own.
    #[error(
        "the guest's memory is QEMU's alone; start QEMU with -object \
         memory-backend-memfd,id=ram,size=SIZE,share=on -machine memory-backend=ram"
    )]
    MemoryNotShared,
    /// RAM's file can't be found or mapped.
    #[error("the guest's memory, {what}, can't be mapped: {source}")]
    Memory {
        /// The file.
        what: String,
        /// Why not.
        source: io::Error,
    },
    /// There is nowhere to put the region.
    #[error(
        "the guest has no memory for trampolines and rings: {instead}, and QEMU has {total} MiB of RAM and \
         the guest was told of {}; start QEMU with {}-m and the memory backend larger by 64 MiB or more \
         than what the kernel parameter mem= says, which --mem tells if QEMU's own command line does not",
        match told { Some(told) => format!("{} MiB", told >> 20), None => "all".to_owned() },
        device_options(*architecture)
    )]
    NoRegion {
        /// Of what architecture the guest is.
        architecture: Architecture,
        /// Why no ivshmem device has memory for it.
        instead: IvshmemError,
        /// RAM in MiB.
        total: u64,
        /// What the guest was told of, in bytes.
        told: Option<u64>,
    },
    /// The hidden memory is somebody's.
    #[error(
        "the memory behind the {} MiB that the guest was told of is not empty: somebody else uses it, \
         or the journal of an earlier vmm is lost; restart QEMU", .0 >> 20
    )]
    RegionTaken(u64),
    /// A guest that is paused would be set going.
    #[error("the guest is not running but {0}; let it go first (`cont` in a monitor)")]
    NotRunning(String),
    /// The gdbstub is in use.
    #[error("a debugger is connected to QEMU's gdbstub; disconnect it first")]
    Debugged,
    /// The gdbstub is of no use.
    #[error(transparent)]
    Gdb(#[from] GdbError),
    /// The guest can't be stopped.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// The host refused a step.
    #[error("the guest can't be attached to, the host refused to {step}: {source}")]
    SetUp {
        /// What was to be done.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// The options that give a guest a device with memory, where it would have that among its own.
fn device_options(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::X86_64 | Architecture::Aarch64 => {
            "-object memory-backend-memfd,id=vmm,size=64M,share=on -device ivshmem-plain,memdev=vmm, or \
             with "
        }
        // PCI memory is reached by instructions of its own there.
        Architecture::S390x => "",
    }
}

/// A guest could not be left as it should be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DetachError {
    /// The gdbstub did not do it, and neither did the monitor.
    #[error("the guest may stand still: {stop}; say `cont` in a monitor of QEMU's")]
    Stands {
        /// Why.
        stop: StopError,
    },
}

/// A guest that somebody else's QEMU runs. Dropping it detaches from it.
pub struct Attached {
    guest: Guest,
    stub: Stub,
    restored: Option<Reverted>,
    architecture: Architecture,
    region: RegionMemory,
    pid: i32,
    left: bool,
    _claim: Claim,
}

impl Attached {
    /// Attaches to a guest, which stands still for a moment and runs on.
    ///
    /// # Errors
    /// [`AttachError`]; the guest then runs as before.
    pub fn new(attach: &Attach) -> Result<Self, AttachError> {
        let unreachable = |source| AttachError::NoMonitor { path: attach.qmp.clone(), source };
        let socket = UnixStream::connect(&attach.qmp).map_err(unreachable)?;
        let peer = socket_peercred(&socket).map_err(|error| unreachable(error.into()))?;
        let pid = peer.pid.as_raw_nonzero().get();
        let (claim, journal) = Claim::new(&attach.journals, pid)?;
        let left = journal.sites().len();
        if left > 0 && !attach.restore {
            let journal = journal.path().to_owned();
            return Err(AttachError::LeftBehind { sites: left, journal });
        }
        let mut qmp = Qmp::connect(socket).map_err(|error| match error {
            QmpError::Silent => AttachError::MonitorBusy(attach.qmp.clone()),
            other => other.into(),
        })?;
        let Found { architecture, memory, region } =
            Found::look(&mut qmp, attach, pid, journal.region())?;
        let state = qmp.query_status()?;
        // A vmm that was killed in a stop has left the guest standing.
        if state != "running" && left == 0 {
            return Err(AttachError::NotRunning(state));
        }

        let set_up = |step| move |source: io::Error| AttachError::SetUp { step, source };
        let thread = set_up("start a thread");
        let end = Arc::new(End::default());
        let monitor = qmp.commander().map_err(set_up("share the monitor's socket"))?;
        let listener = Arc::clone(&end);
        let listen = move || listener.listen(qmp);
        thread::Builder::new().name("qmp".into()).spawn(listen).map_err(thread)?;
        watch(pid, Arc::clone(&end)).map_err(thread)?;
        let (stub, gdb) = Stub::open(monitor)?;
        let board = architecture.board();
        let gdb = Gdb::connect(gdb, board.order)?;
        let guest = Guest::new(memory, gdb, board, attach.stop_deadline, end)?.keeping(journal);
        guest.start()?;
        let mut attached = Self {
            guest,
            stub,
            restored: None,
            architecture,
            region,
            pid,
            left: false,
            _claim: claim,
        };
        if left > 0 {
            attached.restored = restore(&attached.guest)?;
        }
        Ok(attached)
    }

    /// What is watched and traced.
    #[must_use]
    pub fn machine(&self) -> &dyn Machine {
        &self.guest
    }

    /// What was put back that an earlier process had left.
    #[must_use]
    pub fn restored(&self) -> Option<&Reverted> {
        self.restored.as_ref()
    }

    /// The architecture of the guest.
    #[must_use]
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// Which memory trampolines and rings lie in.
    #[must_use]
    pub fn region_memory(&self) -> &RegionMemory {
        &self.region
    }

    /// The process that QEMU is.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits for the guest's end. `None` when it lives and its monitor has hung up, or
    /// [`Attached::stop_waiting`] was called.
    #[must_use]
    pub fn wait(&self) -> Option<GuestExit> {
        if !self.guest.end.wait_for_silence() {
            return None;
        }
        let exit = self.guest.end.wait(Some(DEATH))?;
        if let Some(journal) = self.guest.journal() {
            // What is left of it is removed when the next guest is attached to.
            let _ = journal.discard();
        }
        Some(exit)
    }

    /// Lets go whoever waits for the guest's end.
    pub fn stop_waiting(&self) {
        self.guest.end.release();
    }

    /// Leaves the guest, running, as it was found. Everything that was armed has to be put back by
    /// then. A guest that has ended is left all the same.
    ///
    /// # Errors
    /// [`DetachError`].
    pub fn detach(mut self) -> Result<(), DetachError> {
        self.leave()
    }

    fn leave(&mut self) -> Result<(), DetachError> {
        if std::mem::replace(&mut self.left, true) {
            return Ok(());
        }
        let left = match self.guest.leave() {
            Err(StopError::Gone) => Ok(()),
            other => other,
        };
        let result = match left {
            Ok(()) => Ok(()),
            // The monitor can tell what the gdbstub can't any more.
            Err(stop) => self.stub.set_going().map_err(|_| DetachError::Stands { stop }),
        };
        self.stub.close();
        self.guest.end.release();
        result
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = self.leave();
    }
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// Puts back what the guest's journal says that an earlier process has left.
fn restore(guest: &Guest) -> Result<Option<Reverted>, AttachError> {
    let Some(journal) = guest.journal() else { return Ok(None) };
    let failed = |error: PlanError| AttachError::Restore(error.to_string());
    let Some(left) = LeftBehind::new(journal).map_err(failed)? else { return Ok(None) };
    let mut revert = left.prepare_revert(guest.ram());
    let mut stopped = guest.stop()?;
    let reverted = revert.run(&mut *stopped);
    stopped.resume()?;
    if let Some(site) = reverted.failed.first() {
        let count = reverted.failed.len();
        let first = &site.function;
        return Err(AttachError::Restore(format!(
            "{count} functions could not be written, {first} the first of them"
        )));
    }
    journal.settle(left.sites().iter().map(|site| site.gpa)).map_err(ClaimError::from)?;
    Ok(Some(reverted))
}

/// Tells `end` when the process `pid` has ended, until nobody wants to know.
fn watch(pid: i32, end: Arc<End>) -> io::Result<()> {
    let gone = || io::Error::from_raw_os_error(libc::ESRCH);
    let process = pidfd_open(Pid::from_raw(pid).ok_or_else(gone)?, PidfdFlags::empty())?;
    let watch = move || {
        while !end.is_released() {
            let mut fds = [PollFd::new(&process, PollFlags::IN)];
            if poll(&mut fds, Some(&GLANCE)).is_ok_and(|ready| ready > 0) {
                return end.conclude("it was ended by somebody else".to_owned());
            }
        }
    };
    thread::Builder::new().name("qemu".into()).spawn(watch).map(drop)
}
