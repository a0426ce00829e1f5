//! What a guest under QEMU is made of, and QEMU's command line for it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::memory::Layout;
use super::{Architecture, GdbError, QmpError};

/// What runs a guest's processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// QEMU's own emulation, of any architecture on any host.
    Tcg,
    /// The host's KVM, of its own architecture.
    Kvm,
}

/// A guest for QEMU to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The architecture of the guest.
    pub arch: Architecture,
    /// What runs its processors.
    pub accelerator: Accelerator,
    /// The program, found by `PATH` unless it has a slash.
    pub qemu: PathBuf,
    /// How many vCPUs.
    pub cpus: usize,
    /// RAM in bytes that the guest is told of, a multiple of 4 KiB.
    pub memory: u64,
    /// Memory for rings in bytes, a power of two from 2 MiB on.
    pub rings: u64,
    /// How long a stop may take to bring all vCPUs to a stand.
    pub stop_deadline: Duration,
    /// The image, as distributions ship it for that architecture.
    pub kernel: PathBuf,
    /// An initial RAM file system.
    pub initrd: Option<PathBuf>,
    /// Kernel parameters beyond [`Architecture::base_cmdline`].
    pub cmdline: String,
}

impl Launch {
    /// One emulated vCPU, 512 MiB, 16 MiB for rings.
    #[must_use]
    pub fn new(arch: Architecture, kernel: impl Into<PathBuf>) -> Self {
        Self {
            arch,
            accelerator: Accelerator::Tcg,
            qemu: arch.board().program.into(),
            cpus: 1,
            memory: 512 << 20,
            rings: 16 << 20,
            stop_deadline: Duration::from_secs(5),
            kernel: kernel.into(),
            initrd: None,
            cmdline: String::new(),
        }
    }

    /// Checks what can be checked without QEMU, and lays out the guest's memory.
    pub(super) fn plan(&self) -> Result<Layout, QemuError> {
        File::open(&self.kernel).map_err(|source| unreadable(&self.kernel, source))?;
        let initrd = match &self.initrd {
            Some(path) => fs::metadata(path).map_err(|source| unreadable(path, source))?.len(),
            None => 0,
        };
        let rings = self.rings;
        let sound = self.cpus > 0
            && self.memory > 0
            && self.memory.is_multiple_of(4096)
            && rings.is_power_of_two()
            && rings >= 2 << 20;
        Layout::new(self.arch.board(), self.memory, rings, initrd)
            .filter(|_| sound)
            .ok_or(QemuError::Hardware { cpus: self.cpus, memory: self.memory, rings })
    }

    /// The command line; file descriptors go by number.
    pub(super) fn command(&self, layout: &Layout, fds: &Fds<'_>) -> Command {
        let mut command = Command::new(&self.qemu);
        // Stopped until it is let go, and ended by a reboot.
        command.args(["-S", "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"]);
        // A kernel that stops its processors for good has panicked, which ends the guest.
        command.args(["-action", "panic=shutdown"]);
        let board = self.arch.board();
        command.args(["-machine", &format!("{},memory-backend=ram", board.machine)]);
        command.args(match self.accelerator {
            Accelerator::Tcg => ["-accel", "tcg,thread=multi", "-cpu", board.emulated_cpu],
            Accelerator::Kvm => ["-accel", "kvm", "-cpu", "host"],
        });
        command.args(["-smp", &self.cpus.to_string()]);
        command.args(["-m", &format!("{}k", layout.total >> 10)]);
        command.arg("-object").arg(format!(
            "memory-backend-file,id=ram,share=on,size={},mem-path=/proc/self/fd/{}",
            layout.total,
            fds.memory.as_raw_fd()
        ));
        for (id, socket) in [("qmp", fds.qmp), ("gdb", fds.gdb), ("com1", fds.console)] {
            command.args(["-chardev", &format!("socket,id={id},fd={}", socket.as_raw_fd())]);
        }
        command.args(["-mon", "chardev=qmp,mode=control", "-gdb", "chardev:gdb"]);
        command.args(["-serial", "chardev:com1"]);
        command.arg("-kernel").arg(&self.kernel);
        if let Some(initrd) = &self.initrd {
            command.arg("-initrd").arg(initrd);
        }
        // The kernel takes the smallest `mem=`: what is told here can't be undone.
        let mem = format!("mem={}k", layout.mem() >> 10);
        let cmdline = [board.cmdline, &mem, &self.cmdline].join(" ");
        command.arg("-append").arg(OsString::from(cmdline.trim_end()));
        command
    }
}

/// What QEMU inherits.
pub(super) struct Fds<'a> {
    pub memory: &'a File,
    pub qmp: &'a UnixStream,
    pub gdb: &'a UnixStream,
    pub console: &'a UnixStream,
}

fn unreadable(path: &Path, source: io::Error) -> QemuError {
    QemuError::Unreadable { path: path.to_owned(), source }
}

/// A guest could not be started under QEMU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QemuError {
    /// The description makes no sense.
    #[error(
        "a guest with {cpus} vCPUs, {memory} bytes of memory and {rings} bytes for rings cannot be \
         built; give it at least one vCPU, memory in pages of 4 KiB and a power of two from 2 MiB \
         for rings"
    )]
    Hardware {
        /// How many vCPUs were asked for.
        cpus: usize,
        /// How many bytes of RAM.
        memory: u64,
        /// How many bytes for rings.
        rings: u64,
    },
    /// The kernel or the initrd can't be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The program can't be started.
    #[error("{} cannot be started: {source}; install QEMU for {arch}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The architecture of the guest.
        arch: Architecture,
        /// Why not.
        source: io::Error,
    },
    /// QEMU did not come up.
    #[error("QEMU cannot run this guest: {0}")]
    Ended(String),
    /// The host refused a step.
    #[error("the guest could not be set up, the host refused to {step}: {source}")]
    SetUp {
        /// What was to be done.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// QEMU's monitor is of no use.
    #[error(transparent)]
    Monitor(#[from] QmpError),
    /// QEMU's gdbstub is of no use.
    #[error(transparent)]
    Gdb(#[from] GdbError),
    /// QEMU has not made the guest that was asked for.
    #[error(
        "QEMU has made a guest that is {state} with {found} vCPUs where one that waits with {wanted} was asked for"
    )]
    Other {
        /// What QEMU calls its state.
        state: String,
        /// How many vCPUs it has.
        found: usize,
        /// How many were asked for.
        wanted: usize,
    },
}
