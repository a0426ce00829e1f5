//! What a monitor tells of a machine that somebody else has started: its kind, and its memory.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use patcher::journal::RegionMark;
use serde_json::{Value, json};

use super::Architecture;
use super::attach::{Attach, AttachError};
use super::board::Hole;
use super::memory::{Layout, Memory};
use super::qmp::Qmp;

/// What was found at a monitor.
pub(super) struct Found {
    pub architecture: Architecture,
    pub memory: Memory,
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
            layout.ok_or(nothing)?.with_rings(known.map_or(attach.rings, |mark| mark.rings.len));
        let (what, file) = ram(pid, path, total)?;
        let failed = |source| AttachError::Memory { what: what.clone(), source };
        let memory = Memory::of(file, &layout).map_err(failed)?;
        let empty = memory.is_empty().map_err(failed)?;
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
