//! Debian's stock kernels, downloaded once and kept in the cache.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::apt::{AptError, Repository, Suite};
use crate::architecture::Architecture;
use crate::cache::{Cache, CacheError};
use crate::command::{CommandError, command, output};
use crate::index::{Candidate, Series, candidates, compare_releases};

/// A stock kernel could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// No suite serves a kernel of the series, or none of those served could be downloaded.
    #[error("no stock kernel {series} for {architecture} could be had: {reasons}")]
    Unavailable {
        /// What it was wanted for.
        architecture: Architecture,
        /// The series.
        series: Series,
        /// What went wrong with each suite and package, in the order tried.
        reasons: String,
    },
    /// The packages do not hold what they should.
    #[error("the packages of kernel {release} hold no {what}")]
    Incomplete {
        /// The kernel's release.
        release: String,
        /// What is missing.
        what: &'static str,
    },
    /// The kernel has no such module, neither loadable nor built in.
    #[error("kernel {release} has no module {module}")]
    NoModule {
        /// The kernel's release.
        release: String,
        /// The module's name.
        module: String,
    },
    /// Packages could not be had.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// A program of the host failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// A stock kernel in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// As `uname -r` prints it.
    pub release: String,
    /// What it runs on.
    pub architecture: Architecture,
    /// The series that it belongs to.
    pub series: Series,
    /// The bootable image, as the distribution ships it: of x86_64 a bzImage, of s390x the image
    /// with its own loader, of aarch64 an `Image` that is not packed. QEMU boots each with
    /// `-kernel`.
    pub vmlinuz: PathBuf,
    /// The build configuration, if the distribution still serves it.
    pub config: Option<PathBuf>,
    /// The directory `lib/modules/RELEASE`, with the indexes that depmod makes.
    pub modules: PathBuf,
}

/// A loadable module of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// The module's name as /proc/modules shows it.
    pub name: String,
    path: PathBuf,
}

/// The newest x86_64 kernel of that series in the cache, or else one that Debian serves.
///
/// # Errors
/// As [`Kernel::find`].
pub fn kernel(series: Series) -> Result<Kernel, KernelError> {
    kernel_for(Architecture::X86_64, series)
}

/// The newest kernel of that architecture and series in the cache, or else one that Debian serves.
///
/// # Errors
/// As [`Kernel::find`].
pub fn kernel_for(architecture: Architecture, series: Series) -> Result<Kernel, KernelError> {
    Kernel::find(&Cache::locate(), architecture, series)
}

impl Kernel {
    /// The newest kernel of that series in `cache`, or else the newest of the first suite that serves
    /// one. A kernel that can't be downloaded (indexes name some that are not there) gives way to
    /// the next older, and a suite without any to the next suite.
    ///
    /// # Errors
    /// No kernel of the series can be had, or the cache can't be used.
    pub fn find(
        cache: &Cache,
        architecture: Architecture,
        series: Series,
    ) -> Result<Self, KernelError> {
        // One lock for look-up and download, so that two processes that ask for the same series
        // get the same kernel.
        let _lock = cache.lock(&format!("series/{architecture}-{series}"))?;
        if let Some(release) = newest_cached(cache, architecture, series)? {
            return Self::open(cache, architecture, series, &release);
        }
        let mut reasons = Vec::new();
        // One after the other: a suite's lists take longer to read than its kernel.
        for suite in suites(architecture, series) {
            let served = Repository::open(cache, *suite, architecture)
                .and_then(|repository| Ok((repository.index()?, repository)));
            let (index, repository) = match served {
                Ok(served) => served,
                Err(error) => {
                    reasons.push(format!("{}: {error}", suite.name()));
                    continue;
                }
            };
            for candidate in candidates(&index, series, architecture.flavour()) {
                match download(cache, &repository, &candidate) {
                    Ok(()) => return Self::open(cache, architecture, series, &candidate.release),
                    Err(error) => reasons.push(format!("{}: {error}", candidate.release)),
                }
            }
        }
        if reasons.is_empty() {
            let suites: Vec<&str> =
                suites(architecture, series).iter().map(|suite| suite.name()).collect();
            reasons.push(match suites.as_slice() {
                [] => "no suite has any".to_owned(),
                suites => format!("none is served in {}", suites.join(", ")),
            });
        }
        Err(KernelError::Unavailable { architecture, series, reasons: reasons.join("; ") })
    }

    fn open(
        cache: &Cache,
        architecture: Architecture,
        series: Series,
        release: &str,
    ) -> Result<Self, KernelError> {
        let directory = cache.directory(&entry_name(release))?;
        let config = directory.join("config");
        Ok(Self {
            release: release.to_owned(),
            architecture,
            series,
            vmlinuz: directory.join("vmlinuz"),
            config: config.exists().then_some(config),
            modules: directory.join("lib/modules").join(release),
        })
    }

    /// The modules that must be loaded for `names` to be, in an order in which insmod succeeds:
    /// what a module depends on comes before it. What is built into the kernel is left out.
    ///
    /// # Errors
    /// [`KernelError::NoModule`], or the indexes can't be read.
    pub fn modules_for(&self, names: &[&str]) -> Result<Vec<Module>, KernelError> {
        let dependencies = self.read_index("modules.dep")?;
        let built_in = self.read_index("modules.builtin")?;
        let mut modules: Vec<Module> = Vec::new();
        for wanted in names {
            let wanted = normalized(wanted);
            let line = dependencies
                .lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(path, _)| module_name(path) == wanted);
            let Some((path, needed)) = line else {
                if built_in.lines().any(|path| module_name(path) == wanted) {
                    continue;
                }
                return Err(KernelError::NoModule {
                    release: self.release.clone(),
                    module: wanted,
                });
            };
            // depmod lists what is needed so that reading from the end gives the order to load.
            for path in needed.split_whitespace().rev().chain([path]) {
                let name = module_name(path);
                if modules.iter().all(|module| module.name != name) {
                    modules.push(Module { name, path: self.modules.join(path) });
                }
            }
        }
        Ok(modules)
    }

    fn read_index(&self, name: &str) -> Result<String, CacheError> {
        let path = self.modules.join(name);
        match fs::read_to_string(&path) {
            // Kernels whose package linux-base is served no more have no list of what is built in.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            read => read.map_err(CacheError::during("read", &path)),
        }
    }
}

impl Module {
    /// The module, unpacked: busybox's insmod takes no other.
    ///
    /// # Errors
    /// The file can't be read or unpacked.
    pub fn read(&self) -> Result<Vec<u8>, KernelError> {
        let packer = match self.path.extension().and_then(|extension| extension.to_str()) {
            Some("xz") => "xz",
            Some("zst") => "zstd",
            _ => {
                return fs::read(&self.path)
                    .map_err(|source| CacheError::during("read", &self.path)(source).into());
            }
        };
        Ok(output(command(packer, ["-d", "-c", "-q"]).arg(&self.path))?)
    }
}

/// Where kernels of a series are looked for, the likeliest first.
fn suites(architecture: Architecture, series: Series) -> &'static [Suite] {
    match series {
        // Debian 11 is served for it no more, and trixie-backports only with indexes that fail
        // their own checksums.
        Series::V5_10 | Series::V6_18 if architecture == Architecture::S390x => &[],
        Series::V7 if architecture == Architecture::S390x => {
            &[Suite::Main("forky"), Suite::Main("sid")]
        }
        Series::V5_10 => &[Suite::Main("bullseye"), Suite::Security("bullseye-security")],
        Series::V6_1 => &[Suite::Security("bookworm-security"), Suite::Main("bookworm")],
        Series::V6_12 => &[
            Suite::Security("trixie-security"),
            Suite::Main("trixie"),
            Suite::Main("bookworm-backports"),
        ],
        Series::V6_18 => &[Suite::Main("trixie-backports")],
        Series::V7 => &[Suite::Main("trixie-backports"), Suite::Main("forky"), Suite::Main("sid")],
    }
}

fn entry_name(release: &str) -> String {
    format!("kernels/{release}")
}

fn newest_cached(
    cache: &Cache,
    architecture: Architecture,
    series: Series,
) -> Result<Option<String>, CacheError> {
    let flavour = format!("-{}", architecture.flavour());
    let directory = cache.directory("kernels")?;
    let entries = fs::read_dir(&directory).map_err(CacheError::during("list", &directory))?;
    Ok(entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|release| series.contains(release) && release.ends_with(&flavour))
        .max_by(|a, b| compare_releases(a, b)))
}

fn download(
    cache: &Cache,
    repository: &Repository,
    candidate: &Candidate,
) -> Result<(), KernelError> {
    cache.entry::<KernelError>(&entry_name(&candidate.release), |staging| {
        let unpacked = staging.join("unpacked");
        for package in &candidate.packages {
            let file = repository.download(&package.name, Some(&package.version), staging)?;
            output(command("dpkg-deb", ["--extract"]).args([&file, &unpacked]))?;
            fs::remove_file(&file).map_err(CacheError::during("remove", &file))?;
        }
        keep_kernel(&unpacked, staging, &candidate.release)?;
        fs::remove_dir_all(&unpacked).map_err(CacheError::during("remove", &unpacked))?;
        output(command("depmod", ["-b"]).arg(staging).arg(&candidate.release))?;
        Ok(())
    })?;
    Ok(())
}

/// Moves a kernel's parts from where its packages have them to where [`Kernel::open`] expects them.
fn keep_kernel(unpacked: &Path, kept: &Path, release: &str) -> Result<(), KernelError> {
    let modules = kept.join("lib/modules");
    fs::create_dir_all(&modules).map_err(CacheError::during("create the directory", &modules))?;
    let boot = |name: &str| unpacked.join("boot").join(format!("{name}-{release}"));
    // Since the merge of /usr into one tree, packages say /usr/lib; before it, they said /lib.
    let library = |prefix: &str| unpacked.join(prefix).join("lib/modules").join(release);
    let parts = [
        ("vmlinuz", [boot("vmlinuz"), library("usr").join("vmlinuz")], kept.join("vmlinuz")),
        ("config", [boot("config"), library("usr").join("config")], kept.join("config")),
        ("modules", [library(""), library("usr")], modules.join(release)),
    ];
    for (what, places, to) in parts {
        match places.iter().find(|place| place.exists()) {
            Some(from) => fs::rename(from, &to).map_err(CacheError::during("move", from))?,
            None if what == "config" => {}
            None => return Err(KernelError::Incomplete { release: release.to_owned(), what }),
        }
    }
    Ok(())
}

/// `kvm_amd` of `kernel/arch/x86/kvm/kvm-amd.ko.xz`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    normalized(file.split('.').next().unwrap_or(file))
}

/// Files say `kvm-amd`, the kernel says `kvm_amd`.
fn normalized(name: &str) -> String {
    name.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel_with(dependencies: &str, built_in: &str) -> (tempfile::TempDir, Kernel) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("modules.dep"), dependencies).unwrap();
        fs::write(directory.path().join("modules.builtin"), built_in).unwrap();
        let kernel = Kernel {
            release: "6.1.0-1-test".to_owned(),
            architecture: Architecture::X86_64,
            series: Series::V6_1,
            vmlinuz: PathBuf::new(),
            config: None,
            modules: directory.path().to_owned(),
        };
        (directory, kernel)
    }

    const DEPENDENCIES: &str = "\
kernel/arch/x86/kvm/kvm-amd.ko.xz: kernel/drivers/crypto/ccp/ccp.ko.xz kernel/arch/x86/kvm/kvm.ko.xz kernel/virt/lib/irqbypass.ko.xz
kernel/arch/x86/kvm/kvm.ko.xz: kernel/virt/lib/irqbypass.ko.xz
kernel/virt/lib/irqbypass.ko.xz:
";

    #[test]
    fn what_a_module_depends_on_comes_before_it_and_once() {
        let (_directory, kernel) = kernel_with(DEPENDENCIES, "kernel/drivers/virtio/virtio.ko\n");
        let names = |wanted: &[&str]| -> Vec<String> {
            kernel.modules_for(wanted).unwrap().into_iter().map(|module| module.name).collect()
        };
        assert_eq!(names(&["kvm_amd"]), ["irqbypass", "kvm", "ccp", "kvm_amd"]);
        assert_eq!(names(&["kvm", "virtio", "kvm-amd"]), ["irqbypass", "kvm", "ccp", "kvm_amd"]);
    }

    #[test]
    fn a_module_that_is_nowhere_is_an_error() {
        let (_directory, kernel) = kernel_with(DEPENDENCIES, "");
        assert_eq!(
            kernel.modules_for(&["kvm-intel"]).unwrap_err().to_string(),
            "kernel 6.1.0-1-test has no module kvm_intel"
        );
    }
}
