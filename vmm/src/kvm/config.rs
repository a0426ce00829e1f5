//! What a machine is made of.

use std::path::PathBuf;
use std::time::Duration;

use super::layout::{LARGE_PAGE, MIB, PAGE};

/// The most vCPUs a machine may have: local APIC ids are 8 bits wide without x2APIC, and 255 means
/// all.
pub const MAX_CPUS: usize = 254;

/// Ring memory per vCPU unless told otherwise, in bytes.
const RINGS_PER_CPU: u64 = 16 * MIB;
/// The most ring memory, in bytes: one fixed stretch of the kernel's page tables has to hold it.
pub const MAX_RINGS: u64 = 256 * MIB;

/// The hardware of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    /// How many vCPUs, 1 to [`MAX_CPUS`].
    pub cpus: usize,
    /// RAM in bytes, a multiple of 4 KiB.
    pub memory: u64,
    /// Memory for rings in bytes, a power of two from 2 MiB to [`MAX_RINGS`]; 16 MiB per vCPU,
    /// rounded up and limited, if not given.
    pub rings: Option<u64>,
    /// Five-level paging.
    pub la57: La57,
    /// How long a stop may take to bring all vCPUs to a stand.
    pub stop_deadline: Duration,
    /// The KVM device.
    pub device: PathBuf,
    /// A stock kernel is tried even on a KVM that only emulates; it seems to hang there.
    pub emulating: bool,
}

impl Default for Hardware {
    fn default() -> Self {
        Self {
            cpus: 1,
            memory: 512 * MIB,
            rings: None,
            la57: La57::Auto,
            stop_deadline: Duration::from_secs(5),
            device: PathBuf::from(super::probe::DEVICE),
            emulating: false,
        }
    }
}

/// Whether the guest is offered five-level page tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum La57 {
    /// If the host has them.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// A machine of this description cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HardwareError {
    /// No vCPU at all, or more than there can be.
    #[error("a machine with {found} vCPUs cannot be built; give it 1 to {most}")]
    Cpus {
        /// How many were asked for.
        found: usize,
        /// How many there may be.
        most: usize,
    },
    /// RAM that is no multiple of a page, or none.
    #[error("memory of {found} bytes is not a multiple of 4 KiB above zero; try {} MiB",
        (found / MIB).max(128))]
    Memory {
        /// How many bytes were asked for.
        found: u64,
    },
    /// A size of ring memory that the kernel's page tables cannot take.
    #[error(
        "ring memory of {found} bytes is not a power of two from 2 MiB to {} MiB",
        MAX_RINGS / MIB
    )]
    Rings {
        /// How many bytes were asked for.
        found: u64,
    },
    /// RAM and the region do not fit below the highest address that the CPU has.
    #[error(
        "{memory} bytes of memory and the region above it do not fit below 2^{bits}, the end of \
         guest-physical memory on this host; give the guest less memory"
    )]
    AddressSpace {
        /// How many bytes of RAM were asked for.
        memory: u64,
        /// Width of a guest-physical address.
        bits: u32,
    },
}

impl Hardware {
    /// Checks what can be checked without a host.
    pub(super) fn check(&self) -> Result<(), HardwareError> {
        if !(1..=MAX_CPUS).contains(&self.cpus) {
            return Err(HardwareError::Cpus { found: self.cpus, most: MAX_CPUS });
        }
        if self.memory == 0 || !self.memory.is_multiple_of(PAGE) {
            return Err(HardwareError::Memory { found: self.memory });
        }
        let rings = self.ring_bytes();
        if !rings.is_power_of_two() || !(LARGE_PAGE..=MAX_RINGS).contains(&rings) {
            return Err(HardwareError::Rings { found: rings });
        }
        Ok(())
    }

    /// The size of the rings' memory in bytes.
    pub(super) fn ring_bytes(&self) -> u64 {
        self.rings.unwrap_or_else(|| {
            (self.cpus as u64 * RINGS_PER_CPU).next_power_of_two().min(MAX_RINGS)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_that_cannot_be_built_is_refused_with_what_was_found() {
        let good = Hardware::default();
        assert_eq!(good.check(), Ok(()));
        for (bad, error) in [
            (Hardware { cpus: 0, ..good.clone() }, HardwareError::Cpus { found: 0, most: 254 }),
            (Hardware { cpus: 255, ..good.clone() }, HardwareError::Cpus { found: 255, most: 254 }),
            (Hardware { memory: 0, ..good.clone() }, HardwareError::Memory { found: 0 }),
            (Hardware { memory: 4097, ..good.clone() }, HardwareError::Memory { found: 4097 }),
            (Hardware { rings: Some(0), ..good.clone() }, HardwareError::Rings { found: 0 }),
            (
                Hardware { rings: Some(3 * LARGE_PAGE), ..good.clone() },
                HardwareError::Rings { found: 3 * LARGE_PAGE },
            ),
            (
                Hardware { rings: Some(2 * MAX_RINGS), ..good.clone() },
                HardwareError::Rings { found: 2 * MAX_RINGS },
            ),
        ] {
            assert_eq!(bad.check(), Err(error));
        }
    }

    #[test]
    fn ring_memory_grows_with_the_vcpus_up_to_its_limit() {
        let rings = |cpus| Hardware { cpus, ..Hardware::default() }.ring_bytes();
        assert_eq!([1, 2, 3, 64].map(rings), [16, 32, 64, 256].map(|mib| mib * MIB));
    }
}
