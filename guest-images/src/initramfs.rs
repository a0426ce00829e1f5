//! A guest's first and only file system: busybox, the workloads, the modules asked for.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::command::{CommandError, command, output};
use crate::cpio::{Archive, FileTooLarge};
use crate::kernel::{Kernel, KernelError};

/// PID 1 of a guest under test; its head says what the kernel's command line makes it do.
const INIT: &str = include_str!("../guest/init.sh");

/// The program whose workloads make a known number of calls, compiled by the build script.
const WORK: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/work"));

/// Where Debian's busybox is, before and after the merge of /bin into /usr/bin.
const BUSYBOX: [&str; 2] = ["/bin/busybox", "/usr/bin/busybox"];

/// An initramfs could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InitramfsError {
    /// There is no busybox, or it needs shared libraries.
    #[error(
        "no statically linked busybox was found in {}; install the package busybox-static \
         (scripts/setup.sh does)", BUSYBOX.join(" or ")
    )]
    NoBusybox,
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
}

/// An initramfs that is being put together.
#[derive(Debug, Clone)]
pub struct Initramfs {
    archive: Archive,
    modules: Vec<String>,
}

impl Initramfs {
    /// What a guest under test needs: busybox, the workloads, and an init that runs those that the
    /// kernel's command line names.
    ///
    /// # Errors
    /// There is no static busybox, or it can't be read.
    pub fn new() -> Result<Self, InitramfsError> {
        Self::with_init(INIT)
    }

    /// The same with another script as PID 1.
    ///
    /// # Errors
    /// As [`Initramfs::new`].
    pub fn with_init(script: &str) -> Result<Self, InitramfsError> {
        let (path, busybox) = static_busybox()?;
        let applets = output(&mut command(&path, ["--list"]))?;

        let mut archive = Archive::new();
        archive.file("/init", 0o755, script.as_bytes())?;
        archive.file("/bin/busybox", 0o755, &busybox)?;
        for applet in String::from_utf8_lossy(&applets).lines().filter(|name| *name != "busybox") {
            archive.symlink(&format!("/bin/{applet}"), "busybox");
        }
        archive.file("/bin/work", 0o755, WORK)?;
        // The kernel opens the console for PID 1 before anything could be mounted.
        archive.character_device("/dev/console", 0o600, 5, 1);
        for directory in ["/proc", "/sys", "/tmp", "/lib/modules"] {
            archive.directory(directory, 0o755);
        }
        Ok(Self { archive, modules: Vec::new() })
    }

    /// Adds modules, which init loads in an order that works; what they depend on comes along, and
    /// what is built into the kernel is left out.
    ///
    /// # Errors
    /// The kernel has no such module, or it can't be read.
    pub fn modules(mut self, kernel: &Kernel, names: &[&str]) -> Result<Self, InitramfsError> {
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

fn static_busybox() -> Result<(String, Vec<u8>), InitramfsError> {
    BUSYBOX
        .iter()
        .filter_map(|path| Some(((*path).to_owned(), fs::read(path).ok()?)))
        .find(|(_, elf)| !has_interpreter(elf))
        .ok_or(InitramfsError::NoBusybox)
}

/// Whether a 64-bit little-endian ELF file names a dynamic loader (a program header of the type
/// PT_INTERP), or is no such file at all.
fn has_interpreter(elf: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let field = |at: usize, len: usize| -> Option<u64> {
        let bytes = elf.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    let headers = || -> Option<(usize, usize, usize)> {
        Some((
            usize::try_from(field(32, 8)?).ok()?,
            usize::try_from(field(54, 2)?).ok()?,
            usize::try_from(field(56, 2)?).ok()?,
        ))
    };
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return true;
    }
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
        assert!(!has_interpreter(WORK));
        assert!(has_interpreter(&fs::read("/proc/self/exe").unwrap()));
        assert!(has_interpreter(b"\x7fELF\x02\x01"));
        assert!(has_interpreter(b"#!/bin/sh"));
    }

    #[test]
    fn the_same_initramfs_is_made_again() {
        let make = || Initramfs::new().unwrap().file("/etc/x", 0o644, b"x").unwrap().build();
        assert!(make() == make());
    }
}
