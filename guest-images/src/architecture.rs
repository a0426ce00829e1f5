//! The processor architectures of guests, and what Debian, QEMU and a kernel's command line call
//! what belongs to each.

use std::fmt;
use std::str::FromStr;

/// A processor architecture. Its name is what `uname -m` prints there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Architecture {
    /// 64-bit x86.
    X86_64,
    /// 64-bit z/Architecture, the one of big-endian byte order.
    S390x,
    /// 64-bit Arm.
    Aarch64,
}

impl Architecture {
    /// All architectures.
    pub const ALL: [Architecture; 3] =
        [Architecture::X86_64, Architecture::S390x, Architecture::Aarch64];

    /// Its name, as `uname -m` prints it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Architecture::X86_64 => "x86_64",
            Architecture::S390x => "s390x",
            Architecture::Aarch64 => "aarch64",
        }
    }

    /// The program that emulates a machine of it.
    #[must_use]
    pub fn qemu(self) -> &'static str {
        match self {
            Architecture::X86_64 => "qemu-system-x86_64",
            Architecture::S390x => "qemu-system-s390x",
            Architecture::Aarch64 => "qemu-system-aarch64",
        }
    }

    /// Debian's name of it.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Architecture::X86_64 => "amd64",
            Architecture::S390x => "s390x",
            Architecture::Aarch64 => "arm64",
        }
    }

    /// The flavour of the kernels that are used. Where there is one, it is Debian's for virtual
    /// machines, which boots twice as fast as the generic one and packs smaller; its console and
    /// its disks are the same.
    pub(crate) fn flavour(self) -> &'static str {
        match self {
            Architecture::X86_64 => "cloud-amd64",
            Architecture::S390x => "s390x",
            Architecture::Aarch64 => "cloud-arm64",
        }
    }

    /// QEMU's name of the machine.
    pub(crate) fn machine(self) -> &'static str {
        match self {
            Architecture::X86_64 => "q35",
            Architecture::S390x => "s390-ccw-virtio",
            Architecture::Aarch64 => "virt",
        }
    }

    /// The kernel's name of the console that is QEMU's first serial port.
    pub(crate) fn console(self) -> &'static str {
        match self {
            Architecture::X86_64 => "ttyS0",
            Architecture::S390x => "ttysclp0",
            Architecture::Aarch64 => "ttyAMA0",
        }
    }

    /// The guest-physical address at which RAM begins on that machine.
    #[must_use]
    pub fn ram_base(self) -> u64 {
        match self {
            Architecture::X86_64 | Architecture::S390x => 0,
            Architecture::Aarch64 => 0x4000_0000,
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there are no guests of the architecture {0:?}; there are x86_64, s390x and aarch64")]
pub struct UnknownArchitecture(String);

impl FromStr for Architecture {
    type Err = UnknownArchitecture;

    fn from_str(word: &str) -> Result<Self, UnknownArchitecture> {
        Architecture::ALL
            .into_iter()
            .find(|architecture| architecture.name() == word)
            .ok_or_else(|| UnknownArchitecture(word.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_named_as_their_kernels_name_them() {
        for architecture in Architecture::ALL {
            assert_eq!(architecture.to_string().parse(), Ok(architecture));
        }
        assert_eq!(
            "arm64".parse::<Architecture>().unwrap_err().to_string(),
            "there are no guests of the architecture \"arm64\"; there are x86_64, s390x and aarch64"
        );
    }
}
