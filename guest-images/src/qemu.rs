//! Guests under QEMU's own processor emulation, which needs nothing of the host.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::architecture::Architecture;
use crate::console::Console;
use crate::kernel::Kernel;

/// A guest under QEMU could not be started or did not end as it should.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QemuError {
    /// QEMU could not be started.
    #[error("cannot start {program}: {source}; scripts/setup.sh installs it")]
    Start {
        /// The program.
        program: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A file for it could not be made.
    #[error("cannot make files for a guest in {}: {source}", path.display())]
    Files {
        /// The directory or file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Waiting for QEMU's end failed.
    #[error("cannot wait for QEMU's end: {0}")]
    Wait(io::Error),
    /// The guest did not end.
    #[error("the guest did not end within {} s; its console's last lines are: {tail}", waited.as_secs())]
    Timeout {
        /// How long it was waited for.
        waited: Duration,
        /// The end of the console.
        tail: String,
    },
    /// Nothing could be written to the guest's console.
    #[error("cannot write to the guest's console: {0}")]
    Console(io::Error),
}

/// A guest to be started. Its console is the first serial port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuOptions {
    /// What the guest's processors are.
    pub architecture: Architecture,
    /// The kernel's image.
    pub kernel: PathBuf,
    /// The initramfs, as [`Initramfs::build`](crate::Initramfs::build) makes it.
    pub initramfs: Vec<u8>,
    /// The kernel's command line beyond what makes the console work.
    pub cmdline: String,
    /// QEMU's name of the processor, with features.
    pub cpu: String,
    /// How many virtual processors.
    pub cpus: u32,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// Keeps the guest's RAM in this file, [`Architecture::ram_base`] at offset 0, up to 2 GiB.
    pub ram_file: Option<PathBuf>,
    /// More arguments for QEMU.
    pub arguments: Vec<OsString>,
}

impl QemuOptions {
    /// Two x86_64 processors of all features that QEMU emulates, and 512 MiB.
    #[must_use]
    pub fn new(kernel: impl Into<PathBuf>, initramfs: Vec<u8>) -> Self {
        Self::for_architecture(Architecture::X86_64, kernel, initramfs)
    }

    /// The same of that kernel's architecture.
    #[must_use]
    pub fn for_kernel(kernel: &Kernel, initramfs: Vec<u8>) -> Self {
        Self::for_architecture(kernel.architecture, &kernel.vmlinuz, initramfs)
    }

    /// The same with processors of that architecture.
    #[must_use]
    pub fn for_architecture(
        architecture: Architecture,
        kernel: impl Into<PathBuf>,
        initramfs: Vec<u8>,
    ) -> Self {
        Self {
            architecture,
            kernel: kernel.into(),
            initramfs,
            cmdline: String::new(),
            cpu: "max".to_owned(),
            cpus: 2,
            memory_mib: 512,
            ram_file: None,
            arguments: Vec::new(),
        }
    }

    fn command(&self, initramfs: &Path) -> Command {
        // The signal at its parent's death ends QEMU even if this process is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", self.architecture.qemu()]);
        command.args(["-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio"]);
        command.args(["-accel", "tcg,thread=multi", "-cpu", &self.cpu]);
        command.args(["-smp", &self.cpus.to_string(), "-m", &format!("{}M", self.memory_mib)]);
        let mut machine = self.architecture.machine().to_owned();
        match &self.ram_file {
            None => command.args(["-machine", &machine]),
            Some(path) => {
                let mut backend = OsString::from(format!(
                    "memory-backend-file,id=ram,size={}M,share=on,mem-path=",
                    self.memory_mib
                ));
                backend.push(path);
                machine.push_str(",memory-backend=ram");
                command.args(["-machine", &machine, "-object"]).arg(backend)
            }
        };
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(initramfs);
        // A kernel that panics ends the guest; warnings and worse are shown, the rest is not: an
        // emulated serial port is slow.
        let console = self.architecture.console();
        let cmdline = format!("console={console} loglevel=5 panic=-1 {}", self.cmdline);
        command.args(["-append", cmdline.trim_end()]).args(&self.arguments);
        command
    }
}

/// A guest that runs. Dropping it kills it.
#[derive(Debug)]
pub struct Qemu {
    child: Child,
    input: ChildStdin,
    console: Console,
    /// Holds the initramfs and whatever else belongs to this guest alone.
    directory: TempDir,
}

impl Qemu {
    /// Starts a guest.
    ///
    /// # Errors
    /// QEMU is not installed, or files for it can't be made. What QEMU itself objects to ends the
    /// guest at once and stands on its console.
    pub fn start(options: &QemuOptions) -> Result<Self, QemuError> {
        Self::start_in(guest_directory()?, options)
    }

    /// The same with a directory of [`guest_directory`] that holds files for it already.
    pub(crate) fn start_in(directory: TempDir, options: &QemuOptions) -> Result<Self, QemuError> {
        let initramfs = directory.path().join("initramfs");
        let files = |source| QemuError::Files { path: directory.path().to_owned(), source };
        fs::write(&initramfs, &options.initramfs).map_err(files)?;
        if let Some(path) = &options.ram_file {
            let made = File::create(path)
                .and_then(|file| file.set_len(u64::from(options.memory_mib) << 20));
            made.map_err(|source| QemuError::Files { path: path.clone(), source })?;
        }

        let mut command = options.command(&initramfs);
        command.stdin(Stdio::piped());
        // One pipe for both: what QEMU objects to is found where the guest's words are.
        let start = |source| QemuError::Start { program: options.architecture.qemu(), source };
        let (reader, writer) = io::pipe().map_err(start)?;
        command.stdout(writer.try_clone().map_err(start)?).stderr(writer);

        // The signal at the parent's death goes by thread. So the thread that starts QEMU is the
        // one that reads its output, and lives as long.
        let console = Console::default();
        let (sender, receiver) = mpsc::sync_channel(1);
        let filler = console.clone();
        std::thread::spawn(move || {
            let started = command.spawn();
            // The command holds the pipe's writing end too.
            drop(command);
            if sender.send(started).is_ok() {
                filler.fill_from(reader);
            }
        });
        let mut child =
            receiver.recv().unwrap_or_else(|gone| Err(io::Error::other(gone))).map_err(start)?;
        let input = child.stdin.take().expect("standard input is a pipe");
        Ok(Self { child, input, console, directory })
    }

    /// The guest's console.
    #[must_use]
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// A directory that lives as long as the guest.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Types a line on the guest's console.
    ///
    /// # Errors
    /// The guest has ended.
    pub fn type_line(&mut self, line: &str) -> Result<(), QemuError> {
        self.input
            .write_all(format!("{line}\n").as_bytes())
            .and_then(|()| self.input.flush())
            .map_err(QemuError::Console)
    }

    /// Waits until the guest ends by itself.
    ///
    /// # Errors
    /// It does not within `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus, QemuError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait().map_err(QemuError::Wait)? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                return Err(QemuError::Timeout { waited: timeout, tail: self.console.tail() });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // Both fail only if QEMU has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A new directory for one guest's files. Its path is short, for sockets in it.
pub(crate) fn guest_directory() -> Result<TempDir, QemuError> {
    tempfile::Builder::new()
        .prefix("guest-")
        .tempdir()
        .map_err(|source| QemuError::Files { path: std::env::temp_dir(), source })
}
