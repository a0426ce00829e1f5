//! The directory that holds what is slow to make: kernels, package lists, captures.
//!
//! An entry is made in a staging directory and renamed into place, so that what carries an entry's
//! name is whole, whoever was killed meanwhile; a file lock per entry lets several test processes
//! ask for the same one, which is then made once.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The cache could not be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}: {source}", path.display())]
pub struct CacheError {
    /// What was tried.
    pub what: &'static str,
    /// On which file or directory.
    pub path: PathBuf,
    /// Why it failed.
    pub source: io::Error,
}

impl CacheError {
    /// An adapter for `map_err`.
    pub(crate) fn during(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self { what, path, source }
    }
}

/// A directory of things that were made once.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

/// An exclusive lock on one entry; dropping it releases it.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Cache {
    /// The cache that the environment names in `VMM_CACHE`, or else `.cache/guests` in this
    /// workspace.
    #[must_use]
    pub fn locate() -> Self {
        let root = std::env::var_os("VMM_CACHE").filter(|path| !path.is_empty()).map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/guests"),
            PathBuf::from,
        );
        Self::at(root)
    }

    /// The cache in that directory, which need not exist yet.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The path of an entry, made or not.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// A directory of the cache, made if need be, with its absolute path.
    pub(crate) fn directory(&self, name: &str) -> Result<PathBuf, CacheError> {
        let path = self.root.join(name);
        fs::create_dir_all(&path).map_err(CacheError::during("create the directory", &path))?;
        path.canonicalize().map_err(CacheError::during("resolve", &path))
    }

    /// Waits for the exclusive right to the entry `name`.
    pub(crate) fn lock(&self, name: &str) -> Result<Lock, CacheError> {
        let path = self.directory("locks")?.join(name.replace('/', "_"));
        let file = File::create(&path).map_err(CacheError::during("create", &path))?;
        file.lock().map_err(CacheError::during("lock", &path))?;
        Ok(Lock { _file: file })
    }

    /// The directory `name`, which `make` fills if it is not there yet.
    ///
    /// `make` gets an empty directory that nobody else sees; only when it succeeds does that become
    /// the entry.
    pub(crate) fn entry<E: From<CacheError>>(
        &self,
        name: &str,
        make: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let path = self.root.join(name);
        let _lock = self.lock(name)?;
        if !path.exists() {
            // Under the lock nobody else stages this entry: what is there was left by a process
            // that was killed.
            let staging = self.directory(".staging")?.join(name.replace('/', "_"));
            remove_tree(&staging)?;
            fs::create_dir_all(&staging)
                .map_err(CacheError::during("create the directory", &staging))?;
            if let Err(error) = make(&staging) {
                remove_tree(&staging)?;
                return Err(error);
            }
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)
                    .map_err(CacheError::during("create the directory", parent))?;
            }
            fs::rename(&staging, &path).map_err(CacheError::during("create", &path))?;
        }
        path.canonicalize().map_err(|source| CacheError::during("resolve", &path)(source).into())
    }
}

/// Removes a directory and all in it; it need not exist.
fn remove_tree(path: &Path) -> Result<(), CacheError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CacheError::during("remove", path)(error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn an_entry_that_failed_is_not_there_and_is_made_anew() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        let error = cache
            .entry("things/one", |staging| {
                fs::write(staging.join("half"), "").unwrap();
                Err(CacheError::during("make", staging)(io::Error::other("no")))
            })
            .unwrap_err();
        assert_eq!(error.what, "make");
        assert!(!cache.path("things/one").exists());

        let path = cache
            .entry::<CacheError>("things/one", |staging| {
                assert!(!staging.join("half").exists());
                fs::write(staging.join("whole"), "").unwrap();
                Ok(())
            })
            .unwrap();
        assert!(path.join("whole").exists());
    }

    #[test]
    fn many_that_ask_at_once_get_the_one_that_was_made() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        let made = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let path = cache
                        .entry::<CacheError>("one", |staging| {
                            made.fetch_add(1, Ordering::Relaxed);
                            fs::write(staging.join("file"), "text").unwrap();
                            Ok(())
                        })
                        .unwrap();
                    assert_eq!(fs::read_to_string(path.join("file")).unwrap(), "text");
                });
            }
        });
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }
}
