//! Where the sockets of this user's guests are, and under which names.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::{env, fmt};

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;

/// The environment variable that names another place.
pub const RUN_DIR: &str = "VMM_RUN_DIR";

/// What a socket's name ends with.
const SUFFIX: &str = ".sock";

/// The longest name.
const MAX_NAME: usize = 64;

/// The longest path that a Unix socket can have: `sun_path` of `struct sockaddr_un`, less its NUL.
const MAX_PATH: usize = 107;

/// How many names `guest1`, `guest2` and so on are tried.
const MAX_DEFAULT_NAMES: u32 = 1000;

/// A guest's name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name(String);

/// It is no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a name has 1 to {MAX_NAME} letters, digits, dots, dashes and underscores, and begins with a \
     letter or a digit"
)]
pub struct NameError;

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let sound = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        if begins && text.len() <= MAX_NAME && text.chars().all(sound) {
            Ok(Self(text.to_owned()))
        } else {
            Err(NameError)
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// The directory of the sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place(PathBuf);

/// A socket can't be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// The directory can't be used.
    #[error(
        "the directory {} for control sockets can't be used: {source}; set {RUN_DIR} to another",
        path.display()
    )]
    Directory {
        /// Where it is.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Somebody else could put sockets there.
    #[error(
        "the directory {} for control sockets is not this user's alone; make it so (chmod 700), or \
         set {RUN_DIR} to another",
        path.display()
    )]
    NotOurs {
        /// Where it is.
        path: PathBuf,
    },
    /// The socket's path would be too long.
    #[error(
        "{} is longer than the {MAX_PATH} bytes that a socket's path can have; choose a shorter \
         name, or set {RUN_DIR} to a shorter directory",
        path.display()
    )]
    TooLong {
        /// What it would be.
        path: PathBuf,
    },
    /// Another guest has the name.
    #[error("there is a guest named {name} already; choose another --name")]
    Taken {
        /// The name.
        name: Name,
    },
    /// The socket can't be made.
    #[error("the control socket {} can't be made: {source}", path.display())]
    Socket {
        /// Where it is.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// What a socket in the directory is.
#[derive(Debug)]
pub enum Found {
    /// Somebody listens.
    Alive(UnixStream),
    /// There is none, or nobody listens any more.
    Dead,
    /// It can't be told.
    Unknown(io::Error),
}

impl Place {
    /// `$VMM_RUN_DIR` if that is set; else /run/vmm for root, and for others `$XDG_RUNTIME_DIR/vmm`
    /// or, where there is no such directory, /tmp/vmm-UID.
    #[must_use]
    pub fn of_this_user() -> Self {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let user = geteuid();
        Self(match (set(RUN_DIR), set("XDG_RUNTIME_DIR")) {
            (Some(told), _) => told,
            (None, _) if user.is_root() => "/run/vmm".into(),
            (None, Some(runtime)) if runtime.is_dir() => runtime.join("vmm"),
            _ => format!("/tmp/vmm-{}", user.as_raw()).into(),
        })
    }

    /// This directory.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Where the directory is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where the socket of that name is.
    #[must_use]
    pub fn socket(&self, name: &Name) -> PathBuf {
        self.0.join(format!("{name}{SUFFIX}"))
    }

    /// Makes the directory if there is none, and makes sure that it is this user's alone.
    fn prepare(&self) -> Result<(), PlaceError> {
        let failed = |source| PlaceError::Directory { path: self.0.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0).map_err(failed)?;
        let found = fs::metadata(&self.0).map_err(failed)?;
        if found.uid() != geteuid().as_raw() || found.mode() & 0o022 != 0 {
            return Err(PlaceError::NotOurs { path: self.0.clone() });
        }
        Ok(())
    }

    /// Keeps others from making and removing sockets until it is dropped: between finding that a
    /// socket is dead and removing it, its name must not be taken anew.
    fn lock(&self) -> Result<File, PlaceError> {
        let failed = |source| PlaceError::Directory { path: self.0.clone(), source };
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let lock = options.open(self.0.join(".lock")).map_err(failed)?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
        Ok(lock)
    }

    /// Listens under `name`, or under `guest1`, `guest2` and so on, whichever is free first. What a
    /// guest's process left behind that is no more is removed.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn claim(&self, name: Option<&Name>) -> Result<Claim, PlaceError> {
        self.prepare()?;
        let _lock = self.lock()?;
        let Some(name) = name else {
            let names = (1..=MAX_DEFAULT_NAMES).map(|number| Name(format!("guest{number}")));
            for name in names {
                match self.claim_locked(&name) {
                    Err(PlaceError::Taken { .. }) => {}
                    result => return result,
                }
            }
            return Err(PlaceError::Taken { name: Name(format!("guest{MAX_DEFAULT_NAMES}")) });
        };
        self.claim_locked(name)
    }

    fn claim_locked(&self, name: &Name) -> Result<Claim, PlaceError> {
        let path = self.socket(name);
        if path.as_os_str().len() > MAX_PATH {
            return Err(PlaceError::TooLong { path });
        }
        let failed = |source| PlaceError::Socket { path: path.clone(), source };
        match self.find(name) {
            Found::Dead => match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            },
            Found::Alive(_) | Found::Unknown(_) => {
                return Err(PlaceError::Taken { name: name.clone() });
            }
        }
        let listener = UnixListener::bind(&path).map_err(failed)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(Claim { listener, name: name.clone(), path: path.clone() })
    }

    /// Calls on the guest of that name.
    #[must_use]
    pub fn find(&self, name: &Name) -> Found {
        match UnixStream::connect(self.socket(name)) {
            Ok(stream) => Found::Alive(stream),
            Err(error)
                if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) =>
            {
                Found::Dead
            }
            Err(error) => Found::Unknown(error),
        }
    }

    /// The names of all sockets in order, whether anybody listens or not. None if there is no
    /// directory.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn names(&self) -> Result<Vec<Name>, PlaceError> {
        let failed = |source| PlaceError::Directory { path: self.0.clone(), source };
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let file = entry.file_name();
            let name = file.to_str().and_then(|file| file.strip_suffix(SUFFIX)?.parse().ok());
            let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
            names.extend(name.filter(|_| is_socket));
        }
        names.sort();
        Ok(names)
    }

    /// Removes the socket of that name if nobody listens.
    ///
    /// # Errors
    /// The directory can't be used, or the socket not be removed.
    pub fn remove_dead(&self, name: &Name) -> Result<(), PlaceError> {
        let _lock = self.lock()?;
        let path = self.socket(name);
        if let Found::Dead = self.find(name) {
            match fs::remove_file(&path) {
                Err(source) if source.kind() != ErrorKind::NotFound => {
                    return Err(PlaceError::Socket { path, source });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// A name that is taken, and its socket, which is removed with it.
#[derive(Debug)]
pub struct Claim {
    pub(super) listener: UnixListener,
    name: Name,
    path: PathBuf,
}

impl Claim {
    /// The name.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.name
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // What can't be removed is recognised as dead by whoever comes next.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    fn place(test: &str) -> Place {
        let path = env::temp_dir().join(format!("vmm-place-{}-{test}", process::id()));
        // What an earlier run left.
        let _ = fs::remove_dir_all(&path);
        Place(path)
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn a_socket_is_its_users_alone_and_goes_with_its_claim() {
        let place = place("mode");
        let claim = place.claim(Some(&name("a"))).unwrap();
        let path = place.socket(&name("a"));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(place.path()).unwrap().mode() & 0o777, 0o700);
        assert!(matches!(place.find(&name("a")), Found::Alive(_)));
        drop(claim);
        assert!(!path.exists());
        assert!(matches!(place.find(&name("a")), Found::Dead));
        fs::remove_dir_all(place.path()).unwrap();
    }

    #[test]
    fn names_are_taken_once_and_free_ones_are_found() {
        let place = place("names");
        assert_eq!(place.names().unwrap(), []);
        let first = place.claim(None).unwrap();
        let second = place.claim(None).unwrap();
        assert_eq!([first.name(), second.name()].map(ToString::to_string), ["guest1", "guest2"]);
        let taken = place.claim(Some(&name("guest2"))).unwrap_err();
        assert!(matches!(taken, PlaceError::Taken { .. }), "{taken}");
        drop(first);
        assert_eq!(place.claim(None).unwrap().name(), &name("guest1"));
        assert_eq!(place.names().unwrap(), [name("guest2")]);
        fs::remove_dir_all(place.path()).unwrap();
    }

    #[test]
    fn what_a_dead_process_left_is_recognised_and_its_name_free() {
        let place = place("dead");
        let mut claim = place.claim(Some(&name("a"))).unwrap();
        // As by SIGKILL: the socket stays, and nobody listens.
        claim.path = "/nonexistent".into();
        drop(claim);
        assert!(place.socket(&name("a")).exists());
        assert!(matches!(place.find(&name("a")), Found::Dead));
        place.remove_dead(&name("a")).unwrap();
        assert_eq!(place.names().unwrap(), []);
        fs::remove_dir_all(place.path()).unwrap();
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_refused() {
        let place = place("shared");
        fs::create_dir(place.path()).unwrap();
        fs::set_permissions(place.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(place.claim(None), Err(PlaceError::NotOurs { .. })));
        fs::remove_dir_all(place.path()).unwrap();
    }

    #[test]
    fn a_name_never_leads_out_of_the_directory() {
        for bad in ["", "..", ".lock", "a/b", "-x", "a b", "\u{e4}", &"a".repeat(65)] {
            assert_eq!(bad.parse::<Name>(), Err(NameError), "{bad:?}");
        }
        let long = Place(env::temp_dir().join("x".repeat(100)));
        assert!(matches!(long.claim(None), Err(PlaceError::TooLong { .. })));
        fs::remove_dir_all(long.path()).unwrap();
    }
}
