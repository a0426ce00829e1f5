//! The nested lab: a machine with KVM on a machine without.
//!
//! QEMU emulates a processor with AMD's virtualisation extension. On it a stock kernel (the first
//! level, L1) loads kvm and kvm-amd, and then runs scripts that the host sends: they find
//! `/dev/kvm`, the files that were put in, and busybox. Output comes back as it is written, files on
//! request. One boot serves any number of scripts.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//!
//! use guest_images::{Lab, Series, kernel};
//!
//! let l2 = kernel(Series::V6_12)?;
//! let mut lab = Lab::new(&kernel(Series::V6_1)?)?
//!     .program("target/release/vmm".as_ref(), "/bin/vmm")?
//!     .host_file(&l2.vmlinuz, "/vmlinuz")?
//!     .boot()?;
//! let outcome = lab.run("vmm doctor", Duration::from_secs(60))?;
//! assert_eq!(outcome.status, 0, "{outcome}");
//! # Ok(())
//! # }
//! ```

mod program;
mod session;
mod wire;

use std::collections::BTreeSet;
use std::io::{self, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::console::Console;
use crate::initramfs::{Initramfs, InitramfsError};
use crate::kernel::Kernel;
use crate::qemu::{Qemu, QemuError, QemuOptions, guest_directory};

pub use self::session::{Event, Input, Outcome, Session};
use self::wire::{Report, Request};

/// PID 1 of the first-level guest.
const INIT: &str = include_str!("../../guest/lab-init.sh");

/// What runs scripts there, compiled by the build script.
const AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/agent-x86_64"));

/// The first level's processor: one with AMD's virtualisation and nested paging, less the features
/// that QEMU's emulation lacks and would complain about.
pub const LAB_CPU: &str = "EPYC,+svm,+npt,-fxsr-opt,-misalignsse,-osvw,-topoext,-nrip-save,-xsavec";

/// The first level's processors. The agent keeps scripts off the first one, which QEMU (10.0.2) does
/// not emulate right: restoring floating-point registers on any processor also writes what the first one
/// remembers of its virtualisation, without a lock (`cpu_clear_ignne` in its
/// target/i386/tcg/system/fpu_helper.c). A guest that runs on the first one is now and then left with
/// the page tables of its hypervisor, or the other way round, which is a triple fault of the one or an
/// oops of the other.
const CPUS: u32 = 3;

/// The largest file that is brought from the lab, in bytes.
const FILE_LIMIT: usize = 1 << 30;

/// How long the first-level guest may take to boot. An idle machine needs 5 s.
const BOOT: Duration = Duration::from_secs(180);

/// The lab could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// The first-level guest came up without KVM, or not at all.
    #[error(
        "the lab's first-level guest is not ready: {what}; its console's last lines are: {tail}"
    )]
    NotReady {
        /// What is missing.
        what: String,
        /// The end of the console.
        tail: String,
    },
    /// A script did not end, or did not say what was waited for.
    #[error("the lab's script did not {what} within {} s; its output's last lines are: {tail}", waited.as_secs())]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        waited: Duration,
        /// The end of its output.
        tail: String,
    },
    /// The first-level guest ended or its agent did.
    #[error("the lab ended while {what}; its console's last lines are: {tail}")]
    Ended {
        /// What was going on.
        what: String,
        /// The end of the console.
        tail: String,
    },
    /// A script is asked for something, and has ended.
    #[error(
        "the lab's script ended with status {status} before it showed {pattern:?}; its output's last lines are: {tail}"
    )]
    ScriptEnded {
        /// With which status.
        status: u32,
        /// What was waited for.
        pattern: String,
        /// The end of its output.
        tail: String,
    },
    /// A file could not be brought from the lab.
    #[error("cannot read {path} in the lab: {source}")]
    File {
        /// Its path there.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// More came from the lab than is taken in.
    #[error("the lab was given up: {what} more than {} MiB", limit >> 20)]
    TooMuch {
        /// What came.
        what: &'static str,
        /// The limit in bytes.
        limit: usize,
    },
    /// A program's shared libraries can't be told.
    #[error("cannot tell which shared libraries {} needs: {reason}", path.display())]
    Libraries {
        /// The program.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The connection to the agent failed.
    #[error("the connection to the lab failed: {0}")]
    Connection(#[from] io::Error),
    /// The first-level guest's initramfs could not be made.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// QEMU failed.
    #[error(transparent)]
    Qemu(#[from] QemuError),
}

/// A lab that is being put together.
#[derive(Debug, Clone)]
pub struct Lab {
    kernel: PathBuf,
    initramfs: Initramfs,
    /// Those that are in already; programs share most of them.
    libraries: BTreeSet<PathBuf>,
    cpu: String,
    memory_mib: u32,
}

impl Lab {
    /// A lab whose first level runs that kernel: 2 processors for scripts and one that they are kept
    /// off, 2500 MiB.
    ///
    /// # Errors
    /// Its initramfs can't be made.
    pub fn new(kernel: &Kernel) -> Result<Self, LabError> {
        let initramfs = Initramfs::with_init(INIT)?
            .file("/bin/agent", 0o755, AGENT)?
            .modules(kernel, &["virtio_pci", "virtio_console", "kvm-amd"])?;
        Ok(Self {
            kernel: kernel.vmlinuz.clone(),
            initramfs,
            libraries: BTreeSet::new(),
            cpu: LAB_CPU.to_owned(),
            memory_mib: 2500,
        })
    }

    /// QEMU's name of the processor in place of [`LAB_CPU`]. It must have `+svm,+npt`;
    /// `max,+svm,+npt` pages with 5 levels.
    #[must_use]
    pub fn cpu(mut self, cpu: &str) -> Self {
        cpu.clone_into(&mut self.cpu);
        self
    }

    /// The first level's RAM in MiB. Half of it at most holds files.
    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Puts in a file with that content and those permission bits.
    ///
    /// # Errors
    /// It is too large.
    pub fn file(mut self, path: &str, mode: u32, content: &[u8]) -> Result<Self, LabError> {
        self.initramfs = self.initramfs.file(path, mode, content)?;
        Ok(self)
    }

    /// Puts in a copy of a host's file.
    ///
    /// # Errors
    /// It can't be read.
    pub fn host_file(mut self, host: &Path, path: &str) -> Result<Self, LabError> {
        self.initramfs = self.initramfs.host_file(host, path)?;
        Ok(self)
    }

    /// Puts in a host's program with the shared libraries that it needs.
    ///
    /// # Errors
    /// The program or a library can't be read.
    pub fn program(mut self, host: &Path, path: &str) -> Result<Self, LabError> {
        for library in program::shared_libraries(host)? {
            if self.libraries.insert(library.clone()) {
                let at = library.display().to_string();
                self.initramfs = self.initramfs.host_file(&library, &at)?;
            }
        }
        self.host_file(host, path)
    }

    /// Boots the first level, and waits until it has KVM.
    ///
    /// # Errors
    /// It does not boot, or has no KVM.
    pub fn boot(self) -> Result<RunningLab, LabError> {
        let directory = guest_directory()?;
        let socket = directory.path().join("agent");
        let listener = UnixListener::bind(&socket)?;

        let mut options = QemuOptions::new(self.kernel, self.initramfs.build());
        options.cpu = self.cpu;
        options.cpus = CPUS;
        options.memory_mib = self.memory_mib;
        // The time-stamp counter that QEMU emulates is right, but the kernel doubts it when the
        // host is busy, and a KVM on another clock gives its guests a worse one.
        options.cmdline = "quiet mitigations=off tsc=reliable nowatchdog".to_owned();
        options.arguments = [
            "-device".to_owned(),
            "virtio-serial-pci".to_owned(),
            "-chardev".to_owned(),
            format!("socket,id=agent,path={},server=off", socket.display()),
            "-device".to_owned(),
            "virtserialport,chardev=agent,name=agent".to_owned(),
        ]
        .map(Into::into)
        .into();
        let qemu = Qemu::start_in(directory, &options)?;

        let stream = accept(&listener, qemu.console())?;
        let reader = BufReader::new(stream.try_clone()?);
        let (sender, reports) = mpsc::channel();
        std::thread::spawn(move || {
            let mut reader = reader;
            // The end of the stream ends the channel too.
            while let Ok(Some(report)) = Report::read_from(&mut reader) {
                if sender.send(report).is_err() {
                    break;
                }
            }
        });

        let lab = RunningLab { qemu, stream, reports };
        match lab.report(Instant::now() + BOOT) {
            Ok(Some(Report::Ready)) => {}
            Ok(_) => {
                return Err(
                    lab.not_ready(format!("its agent did not answer within {} s", BOOT.as_secs()))
                );
            }
            Err(Disconnected) => return Err(lab.not_ready("it ended".to_owned())),
        }
        let console = lab.console().text();
        match console.lines().find_map(|line| line.split_once("LAB-FAILED ")) {
            Some((_, what)) => Err(lab.not_ready(what.to_owned())),
            None => Ok(lab),
        }
    }
}

/// QEMU connects as soon as it has read its command line, or ends.
fn accept(listener: &UnixListener, console: &Console) -> Result<UnixStream, LabError> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error.into()),
            Err(_) if console.has_ended() || Instant::now() >= deadline => {
                return Err(LabError::NotReady {
                    what: "QEMU did not start".to_owned(),
                    tail: console.tail(),
                });
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// A lab that takes scripts. Dropping it ends it.
#[derive(Debug)]
pub struct RunningLab {
    qemu: Qemu,
    stream: UnixStream,
    reports: Receiver<Report>,
}

/// The agent has gone.
struct Disconnected;

impl RunningLab {
    /// The kernel console of the first level.
    #[must_use]
    pub fn console(&self) -> &Console {
        self.qemu.console()
    }

    /// Runs a shell script to its end.
    ///
    /// # Errors
    /// It does not end within `timeout` (it is killed then), or the lab ends.
    pub fn run(&mut self, script: &str, timeout: Duration) -> Result<Outcome, LabError> {
        let session = self.spawn(script)?;
        session.input().close()?;
        session.wait(timeout)
    }

    /// Starts a shell script, with pipes as its standard input and outputs.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn spawn(&mut self, script: &str) -> Result<Session<'_>, LabError> {
        Request::Run { terminal: None, script }.write_to(&self.stream)?;
        Ok(Session::new(self))
    }

    /// Starts a shell script on a terminal of its own, of `size` rows and columns. All that it
    /// writes is standard output then.
    ///
    /// # Errors
    /// The lab has ended.
    pub fn spawn_on_terminal(
        &mut self,
        script: &str,
        size: (u16, u16),
    ) -> Result<Session<'_>, LabError> {
        Request::Run { terminal: Some(size), script }.write_to(&self.stream)?;
        Ok(Session::new(self))
    }

    /// Brings a file from the lab.
    ///
    /// # Errors
    /// It can't be read, or does not come whole within `timeout`.
    pub fn fetch(&mut self, path: &str, timeout: Duration) -> Result<Vec<u8>, LabError> {
        Request::Get(path).write_to(&self.stream)?;
        let what = || format!("bringing {path}");
        let deadline = Instant::now() + timeout;
        let mut content = Vec::new();
        loop {
            match self.report(deadline).map_err(|Disconnected| self.ended(&what()))? {
                Some(Report::Data(piece)) if content.len() + piece.len() > FILE_LIMIT => {
                    return Err(LabError::TooMuch { what: "a file has", limit: FILE_LIMIT });
                }
                Some(Report::Data(piece)) => content.extend_from_slice(&piece),
                Some(Report::EndOfFile(0)) => return Ok(content),
                Some(Report::EndOfFile(errno)) => {
                    let source = io::Error::from_raw_os_error(errno.cast_signed());
                    return Err(LabError::File { path: path.to_owned(), source });
                }
                Some(_) => {}
                None => {
                    return Err(LabError::Timeout {
                        what: format!("send {path}"),
                        waited: timeout,
                        tail: self.console().tail(),
                    });
                }
            }
        }
    }

    /// The agent's next report, or `None` if none comes until `deadline`.
    fn report(&self, deadline: Instant) -> Result<Option<Report>, Disconnected> {
        match self.reports.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(report) => Ok(Some(report)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Disconnected),
        }
    }

    fn not_ready(&self, what: String) -> LabError {
        LabError::NotReady { what, tail: self.console().tail() }
    }

    fn ended(&self, what: &str) -> LabError {
        LabError::Ended { what: what.to_owned(), tail: self.console().tail() }
    }
}
