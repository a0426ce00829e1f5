//! What CPU the guest sees: the host's as KVM offers it, with the topology of the machine.

use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2,
};
use kvm_ioctls::{Cap, Kvm};

use super::config::La57;

// Bits of leaf 1.
const ECX_SSE3: u32 = 1 << 0;
const ECX_VMX: u32 = 1 << 5;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HTT: u32 = 1 << 28;
/// Of leaf 7.0: five-level paging.
const ECX_LA57: u32 = 1 << 16;
/// The width of a linear address with four-level paging.
const FOUR_LEVEL_BITS: u32 = 48;
/// Of leaf 0x8000_0001.
const ECX_SVM: u32 = 1 << 2;
/// Of leaf 0x4000_0001: asynchronous page faults by interrupt, which storm on AMD hosts.
const KVM_FEATURE_ASYNC_PF_INT: u32 = 1 << 14;

/// Kinds of topology level in leaves 0xb and 0x1f, ECX bits 8 to 15.
const LEVEL_SMT: u32 = 1 << 8;
const LEVEL_CORE: u32 = 2 << 8;

/// Whether the CPU that `entries` describes has SSE3.
pub(super) fn has_sse3(entries: &[kvm_cpuid_entry2]) -> bool {
    entries.iter().any(|entry| entry.function == 1 && entry.ecx & ECX_SSE3 != 0)
}

/// The width in bits of the guest-physical addresses that the CPU in `entries` has.
pub(super) fn physical_bits(entries: &[kvm_cpuid_entry2]) -> u32 {
    let leaf = entries.iter().find(|entry| entry.function == 0x8000_0008);
    // What CPUs without the leaf have that know PAE.
    leaf.map_or(36, |entry| entry.eax & 0xff)
}

/// The CPUs of one machine.
pub(super) struct Model {
    /// What all vCPUs have in common.
    common: Vec<kvm_cpuid_entry2>,
    cpus: u32,
}

impl Model {
    /// The CPU that `kvm` offers, as `cpus` cores of one package with a thread each.
    pub(super) fn new(kvm: &Kvm, cpus: usize, la57: La57) -> std::io::Result<Self> {
        let mut common = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?.as_slice().to_vec();
        let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        for entry in &mut common {
            match entry.function {
                1 => {
                    entry.ecx |= ECX_HYPERVISOR;
                    // KVM runs no guests of its guests here: their text would be out of sight.
                    entry.ecx &= !ECX_VMX;
                    if tsc_deadline {
                        entry.ecx |= ECX_TSC_DEADLINE;
                    }
                }
                7 if entry.index == 0 && la57 == La57::Off => entry.ecx &= !ECX_LA57,
                0x4000_0001 => entry.eax &= !KVM_FEATURE_ASYNC_PF_INT,
                0x8000_0001 => entry.ecx &= !ECX_SVM,
                // Linear address width, EAX 8-15.
                0x8000_0008 if la57 == La57::Off && entry.eax >> 8 & 0xff > FOUR_LEVEL_BITS => {
                    entry.eax = entry.eax & !0xff00 | FOUR_LEVEL_BITS << 8;
                }
                _ => {}
            }
        }
        Ok(Self { common, cpus: cpus as u32 })
    }

    /// The width in bits of a guest-physical address.
    pub(super) fn physical_bits(&self) -> u32 {
        physical_bits(&self.common)
    }

    /// What the vCPU of number `index`, which is also its APIC id, sees.
    pub(super) fn of(&self, index: usize) -> std::io::Result<CpuId> {
        let id = index as u32;
        // APIC ids of a level are a power of two apart, however many there are.
        let id_space = self.cpus.next_power_of_two();
        let id_bits = id_space.trailing_zeros();
        let mut entries = self.common.clone();
        // Made anew below; and what there is to know of SVM, which the guest does not get.
        entries.retain(|entry| !matches!(entry.function, 0xb | 0x1f | 0x8000_000a));
        for entry in &mut entries {
            match entry.function {
                1 => {
                    // EBX 24-31: initial APIC id, 16-23: addressable ids in the package.
                    entry.ebx = entry.ebx & 0xffff | id << 24 | id_space.min(255) << 16;
                    if self.cpus > 1 {
                        entry.edx |= EDX_HTT;
                    }
                }
                // Caches: who shares them (EAX 14-25) and, for leaf 4, cores in the package
                // (EAX 26-31). The first two levels are a core's own.
                4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
                    let level = entry.eax >> 5 & 7;
                    let sharing = if level <= 2 { 1 } else { self.cpus };
                    entry.eax = entry.eax & !0x03ff_c000 | (sharing - 1) << 14;
                    if entry.function == 4 {
                        entry.eax = entry.eax & 0x03ff_ffff | (id_space - 1).min(63) << 26;
                    }
                }
                // AMD's core count: ECX 0-7 cores less one, 12-15 width of the core's id.
                0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | (self.cpus - 1) | id_bits << 12,
                // AMD's topology: extended APIC id; core id, one thread a core; one node.
                0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id & 0xff, 0),
                _ => {}
            }
        }
        for function in [0xb, 0x1f] {
            if function <= self.max_basic_leaf() {
                entries.extend(topology(function, id, id_bits, self.cpus));
            }
        }
        CpuId::from_entries(&entries).map_err(|error| std::io::Error::other(error.to_string()))
    }

    fn max_basic_leaf(&self) -> u32 {
        self.common.iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax)
    }
}

/// The levels of an extended topology leaf, with the APIC id in every one of them.
fn topology(function: u32, id: u32, id_bits: u32, cpus: u32) -> [kvm_cpuid_entry2; 3] {
    let level = |index: u32, eax, ebx, kind: u32| kvm_cpuid_entry2 {
        function,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax,
        ebx,
        ecx: kind | index,
        edx: id,
        ..Default::default()
    };
    [level(0, 0, 1, LEVEL_SMT), level(1, id_bits, cpus, LEVEL_CORE), level(2, 0, 0, 0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, ..Default::default() }
    }

    fn model(cpus: u32) -> Model {
        let basic = kvm_cpuid_entry2 { eax: 0xd, ..leaf(0, 0) };
        let l1 = kvm_cpuid_entry2 { eax: 0xffff_c121, ..leaf(4, 0) };
        let l3 = kvm_cpuid_entry2 { eax: 0xffff_c163, ..leaf(4, 3) };
        let common = vec![
            basic,
            leaf(1, 0),
            l1,
            l3,
            leaf(0xb, 0),
            leaf(0xb, 1),
            kvm_cpuid_entry2 { eax: 0x3030, ..leaf(0x8000_0008, 0) },
            leaf(0x8000_001e, 0),
        ];
        Model { common, cpus }
    }

    fn find(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        let mut found =
            cpuid.as_slice().iter().filter(|e| (e.function, e.index) == (function, index));
        let entry = *found.next().unwrap();
        assert!(found.next().is_none(), "leaf {function:#x}.{index} is there once");
        entry
    }

    #[test]
    fn every_place_that_tells_an_apic_id_tells_the_same() {
        for (cpus, index) in [(1, 0), (2, 1), (6, 5), (254, 253)] {
            let cpuid = model(cpus).of(index).unwrap();
            let id = index as u32;
            assert_eq!(find(&cpuid, 1, 0).ebx >> 24, id);
            for sub in 0..3 {
                assert_eq!(find(&cpuid, 0xb, sub).edx, id);
            }
            assert_eq!(find(&cpuid, 0x8000_001e, 0).eax, id);
        }
    }

    #[test]
    fn the_topology_is_cores_of_one_package_whatever_the_host_has() {
        let cpuid = model(6).of(3).unwrap();
        assert_eq!((find(&cpuid, 1, 0).ebx >> 16) & 0xff, 8);
        assert_ne!(find(&cpuid, 1, 0).edx & EDX_HTT, 0);
        let core = find(&cpuid, 0xb, 1);
        assert_eq!((core.eax, core.ebx, core.ecx), (3, 6, 0x201));
        assert_eq!(find(&cpuid, 4, 0).eax, 0x1c00_0121);
        assert_eq!(find(&cpuid, 4, 3).eax, 0x1c01_4163);
        assert_eq!(find(&cpuid, 0x8000_0008, 0).ecx, 0x3005);
        assert!(cpuid.as_slice().iter().all(|entry| entry.function != 0x1f));
        assert_eq!(model(1).of(0).unwrap().as_slice()[1].edx & EDX_HTT, 0);
    }
}
