//! Which kind of KVM this host has.
//!
//! A `/dev/kvm` that opens does not mean that a stock kernel runs: there are hosts whose KVM has no
//! hardware behind it and emulates every privileged instruction of a guest that was not written
//! for it. A stock kernel on those does not fail, it seems to hang.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use kvm_bindings::{KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};

use super::cpuid;

/// Where the kernel puts the KVM device.
pub(super) const DEVICE: &str = "/dev/kvm";

/// What is behind a KVM device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvmKind {
    /// KVM on the host CPU's virtualisation: it runs stock kernels.
    Hardware(Extension),
    /// KVM that only emulates the supervisor code of guests that were not written for it: it can
    /// run bare test guests but no stock kernel.
    Emulating {
        /// What shows it.
        reason: String,
    },
    /// There is no KVM device.
    Missing {
        /// Where it was looked for.
        device: String,
    },
    /// The KVM device is there and may not be opened.
    NotPermitted {
        /// Where it is.
        device: String,
    },
    /// Something else is where the KVM device should be.
    NotKvm {
        /// Where it is.
        device: String,
        /// What shows it.
        found: String,
    },
    /// KVM that lacks something that the stop protocol or the region needs.
    Lacking {
        /// The capability's name in the kernel's interface.
        capability: &'static str,
    },
}

/// The virtualisation extension of the host's CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extension {
    /// Intel's.
    Vmx,
    /// AMD's.
    Svm,
}

impl fmt::Display for Extension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Extension::Vmx => "vmx",
            Extension::Svm => "svm",
        })
    }
}

impl fmt::Display for KvmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvmKind::Hardware(extension) => write!(f, "KVM on {extension} runs stock kernels"),
            KvmKind::Emulating { reason } => write!(
                f,
                "the KVM of this host only emulates guest supervisor code and cannot run a stock \
                 kernel ({reason}); use a host with vmx or svm, or QEMU's emulation"
            ),
            KvmKind::Missing { device } => write!(
                f,
                "there is no {device}; load the module kvm_intel or kvm_amd, or enable nested \
                 virtualisation if this is a virtual machine itself"
            ),
            KvmKind::NotPermitted { device } => write!(
                f,
                "{device} may not be opened by this user; add the user to the group that owns it, \
                 usually kvm"
            ),
            KvmKind::NotKvm { device, found } => {
                write!(f, "{device} is not a KVM device: {found}; see which device is meant")
            }
            KvmKind::Lacking { capability } => {
                write!(f, "the KVM of this host has no {capability}; use a newer host kernel")
            }
        }
    }
}

/// Finds out which kind of KVM this host has. Runs no guest, so it cannot hang.
#[must_use]
pub fn probe() -> KvmKind {
    match open(Path::new(DEVICE)) {
        Ok((_, kind)) | Err(kind) => kind,
    }
}

/// Opens the KVM at `device` and says which kind it is, or why it is no use at all.
pub(super) fn open(device: &Path) -> Result<(Kvm, KvmKind), KvmKind> {
    let name = device.display().to_string();
    let not_kvm = |found: String| KvmKind::NotKvm { device: name.clone(), found };
    let kvm = match std::ffi::CString::new(device.as_os_str().as_encoded_bytes()) {
        Ok(path) => {
            Kvm::new_with_path(path.as_c_str()).map_err(|error| cannot_open(&name, error.into()))?
        }
        Err(_) => return Err(not_kvm("the name holds a zero byte".into())),
    };
    let version = kvm.get_api_version();
    if version < 0 {
        return Err(not_kvm("it does not tell a KVM API version".into()));
    }
    if version as u32 != KVM_API_VERSION {
        return Err(not_kvm(format!(
            "it tells API version {version} where {KVM_API_VERSION} is the only one"
        )));
    }
    for (capability, name) in [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
        (Cap::Irqfd, "KVM_CAP_IRQFD"),
        (Cap::ReadonlyMem, "KVM_CAP_READONLY_MEM"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::SyncRegs, "KVM_CAP_SYNC_REGS"),
    ] {
        if !kvm.check_extension(capability) {
            return Err(KvmKind::Lacking { capability: name });
        }
    }
    let kind = judge(&Evidence::gather(&kvm));
    Ok((kvm, kind))
}

fn cannot_open(device: &str, error: io::Error) -> KvmKind {
    let device = device.to_owned();
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => KvmKind::Missing { device },
        Some(libc::EACCES | libc::EPERM) => KvmKind::NotPermitted { device },
        _ => KvmKind::NotKvm { device, found: format!("it cannot be opened: {error}") },
    }
}

/// What the host shows about its KVM.
#[derive(Debug, Default)]
struct Evidence {
    vmx: bool,
    svm: bool,
    /// Modules, loaded or built in, that put something behind the KVM device.
    backends: Vec<String>,
    /// The guest CPU on offer has SSE3, which every x86_64 CPU with virtualisation has.
    sse3: bool,
}

impl Evidence {
    fn gather(kvm: &Kvm) -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
        let has = |name| flags.split_whitespace().any(|flag| flag == name);
        let modules = fs::read_dir("/sys/module").into_iter().flatten().flatten();
        let backends = modules
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.starts_with("kvm_"))
            .collect();
        let sse3 = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .is_ok_and(|cpuid| cpuid::has_sse3(cpuid.as_slice()));
        Self { vmx: has("vmx"), svm: has("svm"), backends, sse3 }
    }
}

fn judge(evidence: &Evidence) -> KvmKind {
    let backend = |name: &str| evidence.backends.iter().any(|backend| backend == name);
    let hardware = backend("kvm_intel") || backend("kvm_amd");
    let emulating = |reason: String| KvmKind::Emulating { reason };
    if let Some(other) = evidence.backends.iter().find(|name| *name == "kvm_pvm")
        && !hardware
    {
        return emulating(format!("its module is {other}, neither kvm_intel nor kvm_amd"));
    }
    match (evidence.vmx, evidence.svm) {
        (true, _) if evidence.sse3 => KvmKind::Hardware(Extension::Vmx),
        (false, true) if evidence.sse3 => KvmKind::Hardware(Extension::Svm),
        (false, false) => emulating("the host CPU shows neither vmx nor svm".into()),
        _ => emulating("the CPU that it offers to guests lacks even SSE3".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(vmx: bool, svm: bool, backends: &[&str]) -> Evidence {
        let backends = backends.iter().map(|name| name.to_string()).collect();
        Evidence { vmx, svm, backends, sse3: true }
    }

    #[test]
    fn a_kvm_is_hardware_only_with_the_cpu_and_the_module_for_it() {
        let judged = |vmx, svm, backends: &[&str]| judge(&evidence(vmx, svm, backends));
        assert_eq!(judged(true, false, &["kvm_intel"]), KvmKind::Hardware(Extension::Vmx));
        assert_eq!(judged(false, true, &["kvm_amd"]), KvmKind::Hardware(Extension::Svm));
        assert_eq!(judged(true, false, &[]), KvmKind::Hardware(Extension::Vmx));
        for (vmx, svm, backends) in [
            (false, false, &["kvm_pvm"][..]),
            (true, false, &["kvm_pvm"][..]),
            (false, false, &[][..]),
        ] {
            let kind = judged(vmx, svm, backends);
            assert!(matches!(kind, KvmKind::Emulating { .. }), "{vmx} {svm} {backends:?}: {kind}");
        }
        let without_sse3 = Evidence { sse3: false, ..evidence(true, false, &["kvm_intel"]) };
        assert!(matches!(judge(&without_sse3), KvmKind::Emulating { .. }));
    }

    #[test]
    fn what_is_no_kvm_is_told_apart_from_what_is_not_there_or_not_permitted() {
        let found = |path: &str| open(Path::new(path)).map(|(_, kind)| kind).unwrap_err();
        assert!(matches!(found("/nonexistent/kvm"), KvmKind::Missing { .. }));
        assert!(matches!(found("/dev/null"), KvmKind::NotKvm { .. }));
        assert!(matches!(found("/"), KvmKind::NotKvm { .. }));
        for (errno, permitted) in [(libc::EACCES, false), (libc::EPERM, false), (libc::EBUSY, true)]
        {
            let kind = cannot_open("/dev/kvm", io::Error::from_raw_os_error(errno));
            assert_eq!(!matches!(kind, KvmKind::NotPermitted { .. }), permitted, "{kind}");
        }
    }
}
