//! What a monitor tells of a machine that somebody else has started: its kind, and its memory.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;

use patcher::addr::Gpa;
use patcher::journal::RegionMark;
use patcher::region::{LEAF_BYTES, Part};
use serde_json::{Value, json};

use super::attach::{Attach, AttachError};
use super::board::Hole;
use super::ivshmem::{self, Device, IvshmemError};
use super::memory::{Layout, Memory};
use super::qmp::Qmp;
use super::{Architecture, QmpError};

/// What was found at a monitor.
pub(super) struct Found {
    pub architecture: Architecture,
    pub memory: Memory,
    pub region: RegionMemory,
}

/// Which memory of a guest's the region lies in, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionMemory {
    /// RAM that QEMU has and the parameter `mem=` keeps from the guest's kernel.
    Hidden {
        /// Why it is not an ivshmem device's.
        instead: IvshmemError,
    },
    /// An ivshmem device's.
    Ivshmem {
        /// What the device is called.
        name: String,
        /// Where it is in the guest.
        at: Gpa,
        /// There is hidden RAM too.
        hidden_too: bool,
    },
}

impl fmt::Display for RegionMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegionMemory::Hidden { instead } => {
                write!(f, "trampolines and rings lie in RAM that mem= hides from the guest")?;
                match instead {
                    IvshmemError::Absent => Ok(()),
                    instead => write!(f, ": {instead}"),
                }
            }
            RegionMemory::Ivshmem { name, at, hidden_too } => {
                write!(f, "trampolines and rings lie in the memory of {name}, at {at}")?;
                match hidden_too {
                    true => write!(f, ", which is preferred to RAM that mem= hides from the guest"),
                    false => Ok(()),
                }
            }
        }
    }
}

impl Found {
    /// Looks at the machine, and maps its memory. The region is as an earlier process had it, or its
    /// memory has to be unused.
    ///
    /// # Errors
    /// What is missing, or what the monitor or the host says.
    pub(super) fn look(
        qmp: &mut Qmp,
        attach: &Attach,
        pid: i32,
        known: Option<RegionMark>,
    ) -> Result<Self, AttachError> {
        let target = text(&qmp.execute("query-target")?, "arch");
        let architecture: Architecture =
            target.parse().map_err(|_| AttachError::Machine(format!("a machine for {target}")))?;
        let board = architecture.board();
        let machine = ask(qmp, "/machine", "type")?;
        let machine = machine.as_str().unwrap_or_default();
        let hole = if machine.starts_with("pc-i440fx-") {
            Some(I440FX)
        } else if board.types.iter().any(|kind| machine.starts_with(kind)) {
            board.hole
        } else {
            return Err(AttachError::Machine(machine.chars().take(80).collect()));
        };
        let backend = ask(qmp, "/machine", "memory-backend")?;
        let backend = backend.as_str().filter(|path| path.starts_with('/'));
        let backend = backend.ok_or(AttachError::MemoryNotShared)?;
        if ask(qmp, backend, "share")? != Value::Bool(true) {
            return Err(AttachError::MemoryNotShared);
        }
        let total = ask(qmp, backend, "size")?.as_u64().ok_or(AttachError::MemoryNotShared)?;
        let ram = Backing::open(qmp, pid, backend, total)?;

        let told = attach.told.or_else(|| told(pid));
        let hidden = told.and_then(|told| Layout::found(board.ram_base, hole, total, told));
        let is_known = |at: Gpa| known.is_some_and(|mark| mark.memory == at);
        let most = |at: Gpa| match known {
            Some(mark) if is_known(at) => mark.rings.len,
            _ => attach.rings,
        };
        let instead = match ivshmem::find(qmp)? {
            Ok(_) if hidden.is_some_and(|hidden| is_known(Gpa(hidden.region()))) => {
                IvshmemError::Later
            }
            Ok(Device { name, gpa, size, backend }) => {
                let region = Backing::open(qmp, pid, &backend, size)?;
                let layout = Layout::whole(board.ram_base, hole, total);
                let rings = (size - Part::Rings.offset()).min(most(gpa));
                let rings = rings - rings % LEAF_BYTES;
                let memory = Memory::beside(ram.file()?, &layout, &region.file, gpa, rings);
                let memory = memory.map_err(|source| region.failed(source))?;
                if is_known(gpa) || memory.is_empty().map_err(|source| region.failed(source))? {
                    let hidden_too = hidden.is_some();
                    let region = RegionMemory::Ivshmem { name, at: gpa, hidden_too };
                    return Ok(Self { architecture, memory, region });
                }
                IvshmemError::Taken(name)
            }
            Err(instead) => instead,
        };
        let Some(layout) = hidden else {
            return Err(AttachError::NoRegion { architecture, instead, total: total >> 20, told });
        };
        let at = Gpa(layout.region());
        let memory = Memory::of(ram.file()?, &layout.with_rings(most(at)));
        let memory = memory.map_err(|source| ram.failed(source))?;
        if !is_known(at) && !memory.is_empty().map_err(|source| ram.failed(source))? {
            return Err(AttachError::RegionTaken(told.unwrap_or_default()));
        }
        Ok(Self { architecture, memory, region: RegionMemory::Hidden { instead } })
    }
}

fn ask(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value, QmpError> {
    qmp.execute_with("qom-get", &json!({ "path": path, "property": property }))
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

/// The file behind a memory backend of QEMU's.
struct Backing {
    /// What it is called.
    what: String,
    file: File,
}

impl Backing {
    /// Opens the file that process `pid` has for so many bytes of memory: the one at the backend's path,
    /// or else a memfd, through the process's own descriptors. So a file without a name is found as well.
    fn open(qmp: &mut Qmp, pid: i32, backend: &str, bytes: u64) -> Result<Self, AttachError> {
        let path = ask(qmp, backend, "mem-path").ok();
        let path = path.as_ref().and_then(Value::as_str).filter(|path| !path.is_empty());
        let what = path.map_or_else(|| format!("a memfd of process {pid}"), str::to_owned);
        match open(pid, path, bytes) {
            Ok(file) => Ok(Self { what, file }),
            Err(source) => Err(AttachError::Memory { what, source }),
        }
    }

    fn file(&self) -> Result<File, AttachError> {
        self.file.try_clone().map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> AttachError {
        AttachError::Memory { what: self.what.clone(), source }
    }
}

fn open(pid: i32, path: Option<&str>, bytes: u64) -> io::Result<File> {
    let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
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
        ([one], _) => open(one),
        ([], Some(path)) => open(Path::new(path)),
        (several, _) => Err(io::Error::other(format!(
            "{} of its open files could be it; give each memory backend a size of its own",
            several.len()
        ))),
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
