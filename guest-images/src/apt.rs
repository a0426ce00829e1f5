//! Packages of Debian's suites through the machine's own apt client, with an apt configuration of
//! our own: neither the machine's sources nor its package lists are touched, and root is not needed.
//!
//! The mirrors are those that the machine itself uses, whatever they are called.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::architecture::Architecture;
use crate::cache::{Cache, CacheError};
use crate::command::{CommandError, command, output};

/// How old package lists may be before they are read anew.
const LISTS_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// The keys that every suite used here is signed with.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Debian's packages could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AptError {
    /// The machine's apt sources name no Debian mirror, or their lists were never read.
    #[error(
        "this machine's apt lists name no {label} mirror; run `apt-get update`, and see that \
         its sources include Debian's"
    )]
    NoMirror {
        /// The label of the archive that was looked for.
        label: &'static str,
    },
    /// A package was downloaded, and no file is there.
    #[error("apt-get downloaded {package} and left no file in {}", directory.display())]
    NoFile {
        /// The package.
        package: String,
        /// Where it should be.
        directory: PathBuf,
    },
    /// An apt program failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// A suite of Debian, from which kernels come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Suite {
    /// A suite of the main archive, such as `trixie` or `trixie-backports`.
    Main(&'static str),
    /// A suite of the security archive, such as `trixie-security`.
    Security(&'static str),
}

impl Suite {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Suite::Main(name) | Suite::Security(name) => name,
        }
    }

    /// The label by which the archive's release files call it.
    fn label(self) -> &'static str {
        match self {
            Suite::Main(_) => "Debian",
            Suite::Security(_) => "Debian-Security",
        }
    }
}

/// The mirror that this machine uses for that archive.
fn mirror(label: &'static str) -> Result<String, AptError> {
    let rows = output(&mut command(
        "apt-get",
        [
            "indextargets",
            "--format",
            "$(REPO_URI)",
            "Created-By: Packages",
            "Origin: Debian",
            "Component: main",
            &format!("Label: {label}"),
        ],
    ))?;
    let rows = String::from_utf8_lossy(&rows);
    rows.lines().next().map(str::to_owned).ok_or(AptError::NoMirror { label })
}

/// One suite's packages for one architecture.
#[derive(Debug)]
pub(crate) struct Repository {
    /// Holds this suite's sources, lists and package cache.
    directory: PathBuf,
    /// Debian's name of it.
    architecture: &'static str,
}

impl Repository {
    /// Opens a suite, reading its package lists if there are none or they are old. Old lists serve
    /// if no new ones can be had.
    pub(crate) fn open(
        cache: &Cache,
        suite: Suite,
        architecture: Architecture,
    ) -> Result<Self, AptError> {
        let architecture = architecture.debian();
        let name = format!("apt/{}-{architecture}", suite.name());
        let _lock = cache.lock(&name)?;
        let repository = Self { directory: cache.directory(&name)?, architecture };
        let stamp = repository.directory.join("read");
        if !is_recent(&stamp) {
            match repository.read_lists(suite) {
                Ok(()) => drop(File::create(&stamp).map_err(CacheError::during("create", &stamp))?),
                Err(error) if !stamp.exists() => return Err(error),
                Err(_) => {}
            }
        }
        Ok(repository)
    }

    fn read_lists(&self, suite: Suite) -> Result<(), AptError> {
        for directory in ["lists/partial", "cache/archives/partial"] {
            let directory = self.directory.join(directory);
            fs::create_dir_all(&directory)
                .map_err(CacheError::during("create the directory", &directory))?;
        }
        let sources = format!(
            "deb [arch={} signed-by={KEYRING}] {} {} main\n",
            self.architecture,
            mirror(suite.label())?,
            suite.name()
        );
        for (file, text) in [("sources.list", sources.as_str()), ("status", "")] {
            let file = self.directory.join(file);
            fs::write(&file, text).map_err(CacheError::during("write", &file))?;
        }
        // Without this, apt calls a list that cannot be had a warning, and ends with status 0.
        output(self.apt("apt-get").args(["-o", "APT::Update::Error-Mode=any", "update"]))?;
        Ok(())
    }

    /// Every available package's control stanza, one after another, as in a `Packages` file.
    pub(crate) fn index(&self) -> Result<String, AptError> {
        let text = output(self.apt("apt-cache").arg("dumpavail"))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Downloads and verifies one package, the newest without a version; the path of its file in
    /// `directory`.
    pub(crate) fn download(
        &self,
        package: &str,
        version: Option<&str>,
        directory: &Path,
    ) -> Result<PathBuf, AptError> {
        fs::create_dir_all(directory)
            .map_err(CacheError::during("create the directory", directory))?;
        let wanted = match version {
            Some(version) => format!("{package}={version}"),
            None => package.to_owned(),
        };
        output(self.apt("apt-get").current_dir(directory).args(["download", &wanted]))?;
        find_package(directory, package).map_err(CacheError::during("list", directory))?.ok_or_else(
            || AptError::NoFile { package: package.to_owned(), directory: directory.to_owned() },
        )
    }

    /// An apt program that sees this suite alone.
    fn apt(&self, program: &str) -> Command {
        let own = |path: &str| self.directory.join(path).display().to_string();
        let mut command = Command::new(program);
        for option in [
            "quiet=2".to_owned(),
            format!("APT::Architecture={}", self.architecture),
            format!("APT::Architectures={}", self.architecture),
            // The unprivileged user that apt changes to when it runs as root may have no way into
            // this directory.
            "APT::Sandbox::User=root".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::Languages=none".to_owned(),
            format!("Dir::Etc::SourceList={}", own("sources.list")),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={}", own("lists")),
            format!("Dir::State::Status={}", own("status")),
            format!("Dir::Cache={}", own("cache")),
            // Systems made for containers turn this off, and each run then reads the lists anew.
            "Dir::Cache::pkgcache=pkgcache.bin".to_owned(),
        ] {
            command.arg("-o").arg(option);
        }
        command
    }
}

fn is_recent(stamp: &Path) -> bool {
    fs::metadata(stamp)
        .and_then(|metadata| metadata.modified())
        .is_ok_and(|read| SystemTime::now().duration_since(read).is_ok_and(|age| age < LISTS_AGE))
}

/// The file `PACKAGE_*.deb`.
fn find_package(directory: &Path, package: &str) -> io::Result<Option<PathBuf>> {
    let prefix = format!("{package}_");
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&prefix) && name.ends_with(".deb") {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}
