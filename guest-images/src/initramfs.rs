//! A guest's first and only file system: busybox, the workloads, the modules asked for.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt::{AptError, Repository, Suite};
use crate::architecture::Architecture;
use crate::cache::{Cache, CacheError};
use crate::command::{CommandError, command, output};
use crate::cpio::{Archive, FileTooLarge};
use crate::kernel::{Kernel, KernelError};

/// PID 1 of a guest under test; its head says what the kernel's command line makes it do.
const INIT: &str = include_str!("../guest/init.sh");

/// The package that has busybox as one static program.
const BUSYBOX_PACKAGE: &str = "busybox-static";

/// Where Debian's busybox is, before and after the merge of /bin into /usr/bin.
const BUSYBOX: [&str; 2] = ["bin/busybox", "usr/bin/busybox"];

/// Whence the busybox of other architectures than x86_64 comes. Kernels come from these suites too,
/// so their package lists are read anyway.
const BUSYBOX_SUITES: [Suite; 2] = [Suite::Main("bookworm"), Suite::Main("trixie")];

/// An initramfs could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InitramfsError {
    /// There is no busybox, or it needs shared libraries.
    #[error(
        "no statically linked busybox was found in {} under {}; install the package \
         {BUSYBOX_PACKAGE} (scripts/setup.sh does)", BUSYBOX.join(" or "), root.display()
    )]
    NoBusybox {
        /// The directory it should be in: the host's root, or what a package was unpacked to.
        root: PathBuf,
    },
    /// A kernel's modules are for another architecture.
    #[error("kernel {release} is for {theirs}, and the initramfs for {ours}")]
    OtherArchitecture {
        /// The kernel's release.
        release: String,
        /// Its architecture.
        theirs: Architecture,
        /// The initramfs's.
        ours: Architecture,
    },
    /// A file that is to go in can't be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file is too large.
    #[error(transparent)]
    TooLarge(#[from] FileTooLarge),
    /// A module can't be had.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A program of the host failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Another architecture's busybox can't be had.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// An initramfs that is being put together.
#[derive(Debug, Clone)]
pub struct Initramfs {
    architecture: Architecture,
    archive: Archive,
    modules: Vec<String>,
}

impl Initramfs {
    /// What an x86_64 guest under test needs: busybox, the workloads, and an init that runs those
    /// that the kernel's command line names.
    ///
    /// # Errors
    /// There is no static busybox, or it can't be read.
    pub fn new() -> Result<Self, InitramfsError> {
        Self::for_architecture(Architecture::X86_64)
    }

    /// The same for a guest of that architecture. Another busybox than the host's is downloaded
    /// into the default cache when it is first used.
    ///
    /// # Errors
    /// There is no static busybox, or it can't be read.
    pub fn for_architecture(architecture: Architecture) -> Result<Self, InitramfsError> {
        Self::make(architecture, INIT)
    }

    /// That for an x86_64 guest with another script as PID 1.
    ///
    /// # Errors
    /// As [`Initramfs::new`].
    pub fn with_init(script: &str) -> Result<Self, InitramfsError> {
        Self::make(Architecture::X86_64, script)
    }

    fn make(architecture: Architecture, script: &str) -> Result<Self, InitramfsError> {
        let (path, hosts) = static_busybox(Path::new("/"))?;
        let busybox = match architecture {
            Architecture::X86_64 => hosts,
            other => foreign_busybox(&Cache::locate(), other)?,
        };
        // Debian configures busybox alike for all architectures; only the host's can be asked.
        let applets = output(Command::new(&path).arg("--list"))?;

        let mut archive = Archive::new();
        archive.file("/init", 0o755, script.as_bytes())?;
        archive.file("/bin/busybox", 0o755, &busybox)?;
        for applet in String::from_utf8_lossy(&applets).lines().filter(|name| *name != "busybox") {
            archive.symlink(&format!("/bin/{applet}"), "busybox");
        }
        archive.file("/bin/work", 0o755, work(architecture))?;
        // The kernel opens the console for PID 1 before anything could be mounted.
        archive.character_device("/dev/console", 0o600, 5, 1);
        for directory in ["/proc", "/sys", "/tmp", "/lib/modules"] {
            archive.directory(directory, 0o755);
        }
        Ok(Self { architecture, archive, modules: Vec::new() })
    }

    /// Adds modules, which init loads in an order that works; what they depend on comes along, and
    /// what is built into the kernel is left out.
    ///
    /// # Errors
    /// The kernel has no such module, it can't be read, or it is for another architecture.
    pub fn modules(mut self, kernel: &Kernel, names: &[&str]) -> Result<Self, InitramfsError> {
        if kernel.architecture != self.architecture {
            return Err(InitramfsError::OtherArchitecture {
                release: kernel.release.clone(),
                theirs: kernel.architecture,
                ours: self.architecture,
            });
        }
        for module in kernel.modules_for(names)? {
            if self.modules.contains(&module.name) {
                continue;
            }
            // Init loads them in the order of their names.
            let path = format!("/lib/modules/{:03}-{}.ko", self.modules.len(), module.name);
            self.archive.file(&path, 0o644, &module.read()?)?;
            self.modules.push(module.name);
        }
        Ok(self)
    }

    /// Adds a file with that content and those permission bits.
    ///
    /// # Errors
    /// The content has 4 GiB or more.
    pub fn file(mut self, path: &str, mode: u32, content: &[u8]) -> Result<Self, InitramfsError> {
        self.archive.file(path, mode, content)?;
        Ok(self)
    }

    /// Adds a copy of a host's file, executable if it is there.
    ///
    /// # Errors
    /// The file can't be read, or has 4 GiB or more.
    pub fn host_file(self, host: &Path, path: &str) -> Result<Self, InitramfsError> {
        use std::os::unix::fs::PermissionsExt;

        let read = |source| InitramfsError::Read { path: host.to_owned(), source };
        let mode = fs::metadata(host).map_err(read)?.permissions().mode() & 0o777;
        self.file(path, mode, &fs::read(host).map_err(read)?)
    }

    /// Adds a directory.
    #[must_use]
    pub fn directory(mut self, path: &str) -> Self {
        self.archive.directory(path, 0o755);
        self
    }

    /// The archive, not packed: to unpack it would cost an emulated guest more than to read it.
    #[must_use]
    pub fn build(self) -> Vec<u8> {
        self.archive.finish()
    }
}

/// The program whose workloads make a known number of calls, compiled by the build script.
fn work(architecture: Architecture) -> &'static [u8] {
    match architecture {
        Architecture::X86_64 => include_bytes!(concat!(env!("OUT_DIR"), "/work-x86_64")),
        Architecture::S390x => include_bytes!(concat!(env!("OUT_DIR"), "/work-s390x")),
        Architecture::Aarch64 => include_bytes!(concat!(env!("OUT_DIR"), "/work-aarch64")),
    }
}

/// The busybox of Debian's package under a root directory, with its path.
fn static_busybox(root: &Path) -> Result<(PathBuf, Vec<u8>), InitramfsError> {
    BUSYBOX
        .iter()
        .filter_map(|path| Some((root.join(path), fs::read(root.join(path)).ok()?)))
        .find(|(_, elf)| !has_interpreter(elf))
        .ok_or_else(|| InitramfsError::NoBusybox { root: root.to_owned() })
}

/// Another architecture's busybox, from the cache or from Debian. Nothing is installed.
fn foreign_busybox(cache: &Cache, architecture: Architecture) -> Result<Vec<u8>, InitramfsError> {
    let directory = cache.entry(
        &format!("busybox/{architecture}"),
        |staging| -> Result<(), InitramfsError> {
            let mut got = Err(InitramfsError::NoBusybox { root: staging.to_owned() });
            for suite in BUSYBOX_SUITES {
                got = Repository::open(cache, suite, architecture)
                    .and_then(|suite| suite.download(BUSYBOX_PACKAGE, None, staging))
                    .map_err(InitramfsError::from);
                if got.is_ok() {
                    break;
                }
            }
            let file = got?;
            output(command("dpkg-deb", ["--extract"]).args([&file, staging]))?;
            fs::remove_file(&file).map_err(CacheError::during("remove", &file))?;
            Ok(())
        },
    )?;
    Ok(static_busybox(&directory)?.1)
}

/// Whether a 64-bit ELF file names a dynamic loader (a program header of the type PT_INTERP), or is
/// no such file at all.
fn has_interpreter(elf: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let big_endian = match elf.get(..6) {
        Some(b"\x7fELF\x02\x01") => false,
        Some(b"\x7fELF\x02\x02") => true,
        _ => return true,
    };
    let field = |at: usize, len: usize| -> Option<u64> {
        let bytes = elf.get(at..at.checked_add(len)?)?;
        let push = |value, byte: &u8| value << 8 | u64::from(*byte);
        Some(if big_endian { bytes.iter().fold(0, push) } else { bytes.iter().rev().fold(0, push) })
    };
    let headers = || -> Option<(usize, usize, usize)> {
        Some((
            usize::try_from(field(32, 8)?).ok()?,
            usize::try_from(field(54, 2)?).ok()?,
            usize::try_from(field(56, 2)?).ok()?,
        ))
    };
    let Some((offset, size, count)) = headers() else { return true };
    (0..count).any(|index| {
        let header = index.checked_mul(size).and_then(|skip| offset.checked_add(skip));
        header.and_then(|at| field(at, 4)).is_none_or(|kind| kind == u64::from(PT_INTERP))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamically_linked_program_is_told_from_a_static_one() {
        for architecture in Architecture::ALL {
            assert!(!has_interpreter(work(architecture)), "{architecture}");
        }
        assert!(has_interpreter(&fs::read("/proc/self/exe").unwrap()));
        assert!(has_interpreter(b"\x7fELF\x02\x01"));
        assert!(has_interpreter(b"\x7fELF\x02\x02"));
        assert!(has_interpreter(b"#!/bin/sh"));
    }

    #[test]
    fn the_same_initramfs_is_made_again() {
        let make = || Initramfs::new().unwrap().file("/etc/x", 0o644, b"x").unwrap().build();
        assert!(make() == make());
    }
}
