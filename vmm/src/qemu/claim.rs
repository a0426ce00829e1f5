//! The claim on a QEMU that somebody else started: at most one `vmm` at a time, and a journal that is
//! found again.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use patcher::journal::{Journal, JournalError};
use rustix::fs::{FlockOperation, flock};

/// Where journals are kept, unless told otherwise: `$XDG_STATE_HOME/vmm`, else
/// `~/.local/state/vmm`, else `/var/lib/vmm`.
#[must_use]
pub fn journals_folder() -> PathBuf {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_STATE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local/state")))
        .unwrap_or_else(|| "/var/lib".into())
        .join("vmm")
}

/// A QEMU could not be claimed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// Somebody has it.
    #[error("the guest is attached to already, by process {holder}; end that first")]
    Taken {
        /// The process, or what is known of it.
        holder: String,
    },
    /// The process is gone, or belongs to another namespace.
    #[error("QEMU, process {pid}, can't be looked at: {source}")]
    Process {
        /// Its number.
        pid: i32,
        /// Why not.
        source: io::Error,
    },
    /// The folder or a file in it can't be used.
    #[error("{} can't be used to keep a journal: {source}", path.display())]
    Folder {
        /// The folder or file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The journal can't be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// A claim, given up when it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    /// The lock goes with it.
    _lock: File,
}

impl Claim {
    /// Claims the QEMU that runs as `pid`, and opens its journal.
    ///
    /// # Errors
    /// [`ClaimError`].
    pub(super) fn new(folder: &Path, pid: i32) -> Result<(Self, Journal), ClaimError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| ClaimError::Folder { path, source }
        };
        let process = |source| ClaimError::Process { pid, source };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed(folder))?;
        let boot = boot().map_err(process)?;
        forget_the_dead(folder, &boot);
        let name = name(pid, started(pid).map_err(process)?, &boot);
        let path = folder.join(format!("{name}.lock"));
        let open = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path);
        let mut lock = open.map_err(failed(&path))?;
        if let Err(error) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            if error != rustix::io::Errno::WOULDBLOCK {
                return Err(failed(&path)(error.into()));
            }
            let mut holder = String::new();
            // It may just be about to write who it is.
            let _ = lock.take(20).read_to_string(&mut holder);
            let holder = holder.trim();
            let holder = if holder.is_empty() { "of unknown number" } else { holder };
            return Err(ClaimError::Taken { holder: holder.to_owned() });
        }
        let this = format!("{}\n", std::process::id());
        lock.set_len(0).and_then(|()| lock.write_all(this.as_bytes())).map_err(failed(&path))?;
        let journal = Journal::open(folder.join(format!("{name}.journal")))?;
        Ok((Self { _lock: lock }, journal))
    }
}

/// Names a process so that no other one, on this boot or another, has the same name.
fn name(pid: i32, started: u64, boot: &str) -> String {
    format!("qemu-{pid}-{started}-{boot}")
}

/// When a process was started, in clock ticks since boot: field 22 of proc(5)'s `stat`.
fn started(pid: i32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let behind_name = stat.rsplit_once(") ").map(|(_, behind)| behind);
    let field = behind_name.and_then(|fields| fields.split(' ').nth(19)?.parse().ok());
    field.ok_or_else(|| io::Error::other("its stat file does not tell when it was started"))
}

fn boot() -> io::Result<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(id.chars().filter(char::is_ascii_hexdigit).take(12).collect())
}

/// Removes what is kept for processes that have ended.
fn forget_the_dead(folder: &Path, boot: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let file = entry.file_name();
        let Some(stem) = file
            .to_str()
            .and_then(|file| file.strip_suffix(".journal").or_else(|| file.strip_suffix(".lock")))
        else {
            continue;
        };
        let mut parts = stem.strip_prefix("qemu-").unwrap_or_default().split('-');
        let (pid, since) = (parts.next(), parts.next());
        let (Some(Ok(pid)), Some(Ok(since))) =
            (pid.map(str::parse::<i32>), since.map(str::parse::<u64>))
        else {
            continue;
        };
        let lives = parts.next() == Some(boot) && started(pid).is_ok_and(|found| found == since);
        if !lives {
            // Another one may have removed it.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_claimed_once_and_the_holder_is_named() {
        let folder = std::env::temp_dir().join(format!("claims-{}", std::process::id()));
        let this = std::process::id() as i32;
        let (claim, journal) = Claim::new(&folder, this).unwrap();
        let error = Claim::new(&folder, this).unwrap_err().to_string();
        assert!(error.contains(&format!("process {this}")), "{error}");
        drop(claim);

        // What belongs to a process of an earlier boot is forgotten, what is somebody else's is not.
        let stale = folder.join("qemu-1-2-0123456789ab.journal");
        let foreign = folder.join("notes");
        fs::write(&stale, "").unwrap();
        fs::write(&foreign, "").unwrap();
        fs::write(journal.path(), "vmm-journal 2\nend 0\n").unwrap();
        let again = Claim::new(&folder, this).unwrap();
        assert!(!stale.exists() && foreign.exists() && journal.path().exists());
        drop(again);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_process_that_is_not_there_is_said_so() {
        let error = Claim::new(&std::env::temp_dir(), i32::MAX).unwrap_err();
        assert!(matches!(error, ClaimError::Process { .. }), "{error}");
    }
}
