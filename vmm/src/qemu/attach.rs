//! Takes over a guest of a QEMU that somebody else started, and leaves it again.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use patcher::journal::RegionMark;
use patcher::machine::{Machine, StopError};
use patcher::patch::{Applied, PlanError, Reverted};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value, json};

use super::board::Hole;
use super::claim::{Claim, ClaimError};
use super::end::End;
use super::gdb::Gdb;
use super::guest::{DEATH, Guest};
use super::memory::{Layout, Memory};
use super::qmp::{Commander, Qmp};
use super::{Architecture, GdbError, QmpError};
use crate::exit::GuestExit;

/// The name of what we make in QEMU: a character device, and the descriptor that it is made of.
const OURS: &str = "vmm-gdb";

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
        "there is no memory that QEMU has and the guest does not know of: QEMU has {total} MiB and the \
         guest was told of {}; start QEMU with -m and the memory backend larger by 64 MiB or more than \
         what the kernel parameter mem= says, which --mem tells if QEMU's own command line does not",
        match told { Some(told) => format!("{} MiB", told >> 20), None => "all".to_owned() }
    )]
    NothingHidden {
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
        let Found { architecture, memory } = Found::look(&mut qmp, attach, pid, journal.region())?;
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
        let mut attached =
            Self { guest, stub, restored: None, architecture, pid, left: false, _claim: claim };
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
    let Some(applied) = Applied::left_behind(journal).map_err(failed)? else { return Ok(None) };
    let mut revert = applied.prepare_revert();
    let mut stopped = guest.stop()?;
    let reverted = revert.run(guest.ram(), &mut *stopped);
    stopped.resume()?;
    if let Some(site) = reverted.failed.first() {
        let count = reverted.failed.len();
        let first = &site.function;
        return Err(AttachError::Restore(format!(
            "{count} functions could not be written, {first} the first of them"
        )));
    }
    journal.settle(applied.sites().iter().map(|site| site.gpa)).map_err(ClaimError::from)?;
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

/// The way to QEMU's gdbstub, and what has to be undone of it.
struct Stub {
    monitor: Mutex<Commander>,
    /// We have started it.
    ours: bool,
    /// It need not be left any more.
    left: bool,
}

impl Stub {
    /// Connects to the gdbstub, which stops the guest, or starts one.
    fn open(monitor: Commander) -> Result<(Self, UnixStream), AttachError> {
        let mut stub = Self { monitor: Mutex::new(monitor), ours: false, left: false };
        let devices = stub.say("query-chardev", &Value::Null)?;
        let name_of = |device: &Value, key: &str| {
            device.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let devices = devices.as_array().map(Vec::as_slice).unwrap_or_default();
        let named = |label: &str| devices.iter().find(|device| name_of(device, "label") == label);
        if named(OURS).is_some() {
            // A vmm that was killed has left it, with nobody at the other end.
            stub.human("gdbserver none")?;
        } else if let Some(theirs) = named("gdb") {
            let address = name_of(theirs, "filename");
            let address = address.strip_prefix("disconnected:").ok_or(AttachError::Debugged)?;
            let socket = connect(address).map_err(|source| AttachError::SetUp {
                step: "connect to QEMU's gdbstub",
                source,
            })?;
            return Ok((stub, socket));
        }
        let pair = UnixStream::pair();
        let (ours, theirs) =
            pair.map_err(|source| AttachError::SetUp { step: "make sockets", source })?;
        stub.monitor().give(theirs.as_fd(), OURS)?;
        let address = json!({ "type": "fd", "data": { "str": OURS } });
        let socket = json!({ "addr": address, "server": false });
        let backend = json!({ "type": "socket", "data": socket });
        stub.say("chardev-add", &json!({ "id": OURS, "backend": backend }))?;
        stub.ours = true;
        stub.human(&format!("gdbserver chardev:{OURS}"))?;
        Ok((stub, ours))
    }

    fn monitor(&self) -> MutexGuard<'_, Commander> {
        self.monitor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, command: &'static str, arguments: &Value) -> Result<Value, QmpError> {
        self.monitor().execute(command, arguments)
    }

    fn human(&self, line: &str) -> Result<Value, QmpError> {
        self.say("human-monitor-command", &json!({ "command-line": line }))
    }

    /// Has the guest run, whatever the gdbstub made of it.
    fn set_going(&self) -> Result<(), QmpError> {
        self.say("cont", &Value::Null).map(drop)
    }

    /// Ends the gdbstub if we have started it. The guest runs.
    fn close(&mut self) {
        self.left = true;
        if std::mem::take(&mut self.ours) {
            // QEMU may be gone. A gdbstub that nobody can reach does no harm.
            let _ = self.human("gdbserver none");
        }
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        if !self.left {
            // What could not be taken over stands, as its gdbstub has, or had, a client.
            self.close();
            let _ = self.set_going();
        }
    }
}

/// Connects to a character device of QEMU's that listens, by its description.
fn connect(description: &str) -> io::Result<UnixStream> {
    let address = description.split(',').next().unwrap_or_default();
    if let Some(path) = address.strip_prefix("unix:") {
        return UnixStream::connect(path);
    }
    let Some(address) = address.strip_prefix("tcp:") else {
        return Err(io::Error::other(format!("it is {description}, neither unix: nor tcp:")));
    };
    let socket = TcpStream::connect(address)?;
    socket.set_nodelay(true)?;
    // From here on one stream socket is like the other.
    Ok(OwnedFd::from(socket).into())
}

/// What was found at a monitor.
struct Found {
    architecture: Architecture,
    memory: Memory,
}

impl Found {
    /// Looks at the machine, and maps its memory. The region is as an earlier process had it, or its
    /// memory has to be unused.
    fn look(
        qmp: &mut Qmp,
        attach: &Attach,
        pid: i32,
        known: Option<RegionMark>,
    ) -> Result<Self, AttachError> {
        let target = text(&qmp.execute("query-target")?, "arch");
        let architecture: Architecture =
            target.parse().map_err(|_| AttachError::Machine(format!("a machine for {target}")))?;
        let board = architecture.board();
        let mut ask = |path: &str, property: &str| {
            qmp.execute_with("qom-get", &json!({ "path": path, "property": property }))
        };
        let machine = ask("/machine", "type")?;
        let machine = machine.as_str().unwrap_or_default();
        let hole = if machine.starts_with("pc-i440fx-") {
            Some(I440FX)
        } else if board.types.iter().any(|kind| machine.starts_with(kind)) {
            board.hole
        } else {
            return Err(AttachError::Machine(machine.chars().take(80).collect()));
        };
        let backend = ask("/machine", "memory-backend")?;
        let backend = backend.as_str().filter(|path| path.starts_with('/'));
        let backend = backend.ok_or(AttachError::MemoryNotShared)?;
        if ask(backend, "share")? != Value::Bool(true) {
            return Err(AttachError::MemoryNotShared);
        }
        let total = ask(backend, "size")?.as_u64().ok_or(AttachError::MemoryNotShared)?;
        let path = ask(backend, "mem-path").ok();
        let path = path.as_ref().and_then(Value::as_str).filter(|path| !path.is_empty());

        let told = attach.told.or_else(|| told(pid));
        let nothing = AttachError::NothingHidden { total: total >> 20, told };
        let layout = told.and_then(|told| Layout::found(board.ram_base, hole, total, told));
        let layout =
            layout.ok_or(nothing)?.with_rings(known.map_or(attach.rings, |mark| mark.rings_len));
        let (what, file) = ram(pid, path, total)?;
        let failed = |source| AttachError::Memory { what: what.clone(), source };
        let memory = Memory::of(file, &layout).map_err(failed)?;
        let empty = memory.code_is_empty().map_err(failed)?;
        if known.is_none() && !empty {
            return Err(AttachError::RegionTaken(told.unwrap_or_default()));
        }
        Ok(Self { architecture, memory })
    }
}

/// The older PC, whose hole begins elsewhere (QEMU's `hw/i386/pc_piix.c`).
const I440FX: Hole = Hole { from: 0xe000_0000, start: 0xc000_0000, end: 4 << 30 };

fn text(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).unwrap_or_default().chars().take(80).collect()
}

/// What `mem=` on the command line that QEMU gives to the guest's kernel says, in bytes.
fn told(pid: i32) -> Option<u64> {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut arguments = arguments.split(|byte| *byte == 0);
    arguments.find(|argument| matches!(*argument, b"-append" | b"--append"))?;
    let parameters = String::from_utf8_lossy(arguments.next()?).into_owned();
    let sizes = parameters.split_ascii_whitespace().filter_map(|word| word.strip_prefix("mem="));
    // The kernel takes the smallest.
    sizes.filter_map(size).min()
}

/// A size as the kernel's `memparse` has it.
fn size(text: &str) -> Option<u64> {
    let (number, unit) = match text.find(|c: char| !c.is_ascii_digit()) {
        Some(end) => text.split_at(end),
        None => (text, ""),
    };
    let shift = match unit {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_shl(shift).filter(|size| *size > 0)
}

/// Opens the file that process `pid` has as the guest's RAM: the one at `path`, or else a memfd of so
/// many bytes, through the process's own descriptors. So a file without a name is found as well.
fn ram(pid: i32, path: Option<&str>, bytes: u64) -> Result<(String, File), AttachError> {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let what = path.map_or_else(|| format!("a memfd of process {pid}"), str::to_owned);
    let failed = |source| AttachError::Memory { what: what.clone(), source };
    let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).map_err(failed)?.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy();
        let is_it = match path {
            // It may be a folder in which QEMU has made a file without a name.
            Some(path) => target
                .strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '/'])),
            None => target.starts_with("/memfd:"),
        };
        if is_it && fs::metadata(entry.path()).is_ok_and(|file| file.len() == bytes) {
            found.push(entry.path());
        }
    }
    match (found.as_slice(), path) {
        ([one], _) => Ok((what.clone(), open(one).map_err(failed)?)),
        ([], Some(path)) => Ok((what.clone(), open(Path::new(path)).map_err(failed)?)),
        (several, _) => Err(failed(io::Error::other(format!(
            "{} of its open files could be it",
            several.len()
        )))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_the_kernel_reads_them() {
        assert_eq!(size("512M"), Some(512 << 20));
        assert_eq!(size("524288k"), Some(512 << 20));
        assert_eq!(size("1G"), Some(1 << 30));
        assert_eq!(size("4096"), Some(4096));
        for nonsense in ["", "M", "0", "nopentium", "512MB", "99999999999999999999"] {
            assert_eq!(size(nonsense), None, "{nonsense}");
        }
    }
}
