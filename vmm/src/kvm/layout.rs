//! Where things lie in guest-physical memory.
//!
//! ```text
//! 0x0000_0500  GDT
//! 0x0000_7000  zero page (boot parameters)
//! 0x0000_8ff0  boot stack, growing down
//! 0x0000_9000  page tables for the boot: identity
//! 0x0002_0000  kernel command line
//! 0x0009_fc00  end of low RAM; from here to 1 MiB reserved
//! 0x000e_0000  RSDP, then the other ACPI tables
//! 0x000f_fff0  what a real-mode reboot jumps to
//! 0x0010_0000  kernel image as loaded; its decompressor moves it
//!              initrd: as high as it goes below 3 GiB and the kernel's own limit
//! 0xc000_0000  end of RAM below 4 GiB; from here to 4 GiB device memory
//! 0x1_0000_0000 the rest of RAM
//!              the region, unknown to the guest: at the next GiB boundary above RAM
//! ```

use std::ops::Range;

use patcher::addr::Gpa;

/// One KiB.
pub(super) const KIB: u64 = 1 << 10;
/// One MiB.
pub(super) const MIB: u64 = 1 << 20;
/// One GiB.
pub(super) const GIB: u64 = 1 << 30;

/// The smallest page.
pub(super) const PAGE: u64 = 4 * KIB;
/// What a page-directory entry maps.
pub(super) const LARGE_PAGE: u64 = 2 * MIB;

pub(super) const GDT: Gpa = Gpa(0x500);
pub(super) const ZERO_PAGE: Gpa = Gpa(0x7000);
pub(super) const BOOT_STACK: Gpa = Gpa(0x8ff0);
pub(super) const BOOT_TABLES: Gpa = Gpa(0x9000);
/// Where the boot's page tables must end.
pub(super) const BOOT_TABLES_END: Gpa = CMDLINE;
pub(super) const CMDLINE: Gpa = Gpa(0x2_0000);
/// The end of conventional memory, where a PC's BIOS data begins.
pub(super) const LOW_RAM_END: Gpa = Gpa(0x9_fc00);
/// The BIOS area that a kernel searches for the RSDP.
pub(super) const ACPI: Range<Gpa> = Gpa(0xe_0000)..REBOOT_STUB;
/// The address of f000:fff0.
pub(super) const REBOOT_STUB: Gpa = Gpa(0xf_fff0);
pub(super) const HIGH_RAM: Gpa = Gpa(MIB);

/// Where RAM stops to leave room for devices below 4 GiB.
pub(super) const HOLE: Gpa = Gpa(3 * GIB);
/// Where RAM goes on.
pub(super) const ABOVE_HOLE: Gpa = Gpa(4 * GIB);

pub(super) const IO_APIC: u32 = 0xfec0_0000;
pub(super) const LOCAL_APIC: u32 = 0xfee0_0000;
/// Three pages that KVM needs on Intel hosts without unrestricted guests, and one page of page
/// table: below the local APIC's end of the hole, as every other monitor has them.
pub(super) const KVM_TSS: usize = 0xfffb_d000;
pub(super) const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;

/// The extents of `memory` bytes of RAM.
pub(super) fn ram(memory: u64) -> Vec<Range<Gpa>> {
    let low = memory.min(HOLE.0);
    let mut extents = vec![Gpa(0)..Gpa(low)];
    if memory > low {
        extents.push(ABOVE_HOLE..ABOVE_HOLE + (memory - low));
    }
    extents
}

/// Where the region begins above `memory` bytes of RAM.
pub(super) fn region(memory: u64) -> Gpa {
    let end = ram(memory).last().map_or(0, |extent| extent.end.0).max(ABOVE_HOLE.0);
    Gpa(end.next_multiple_of(GIB))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_lies_on_both_sides_of_the_hole_and_the_region_above_all_of_it() {
        assert_eq!(ram(128 * MIB), [Gpa(0)..Gpa(128 * MIB)]);
        assert_eq!(region(128 * MIB), Gpa(4 * GIB));
        assert_eq!(ram(3 * GIB), [Gpa(0)..HOLE]);
        assert_eq!(ram(3 * GIB + 2 * MIB), [Gpa(0)..HOLE, ABOVE_HOLE..ABOVE_HOLE + 2 * MIB]);
        assert_eq!(region(3 * GIB + 2 * MIB), Gpa(5 * GIB));
        assert_eq!(region(8 * GIB), Gpa(9 * GIB));
    }
}
