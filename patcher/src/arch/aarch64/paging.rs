//! Page tables of aarch64 (Arm Architecture Reference Manual, "The AArch64 Virtual Memory System
//! Architecture"): the upper half of the address space, with pages of 4 KiB.
//!
//! How many levels there are follows from the size that `TCR_EL1.T1SZ` gives: 39 bits are translated
//! by three of them, 48 by four. 52 bits take a fifth in front, called -1, and the format of
//! `TCR_EL1.DS` (LPA2), where two bits of an entry that say how memory is shared otherwise are the
//! highest bits of the address.

use crate::addr::Gpa;
use crate::arch::paging::{AddressSpace, Bits, HighBits, Level, TableFormat};
use crate::arch::{Access, ByteOrder, Unpaged};
use crate::machine::Aarch64Registers;

/// Bytes of a page.
const PAGE: u64 = 1 << 12;
/// Bytes that a block of the last level but one maps.
pub(super) const BLOCK_SIZE: u64 = 2 << 20;

const VALID: u64 = 1 << 0;
/// Not a block: a table, or at the last level a page.
const TABLE: u64 = 1 << 1;
/// Access permissions, upper bit: the kernel only reads.
const READ_ONLY: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 10;
/// The processor may set an entry writable that is marked so (dirty bit management).
const WRITABLE: u64 = 1 << 51;
const CONTIGUOUS: u64 = 1 << 52;
/// The kernel never executes it (PXN).
pub(super) const KERNEL_NO_EXECUTE: u64 = 1 << 53;
/// User mode never executes it (UXN).
const USER_NO_EXECUTE: u64 = 1 << 54;

/// Bits 47..12.
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
/// Bits 49..12, as an entry of the 52-bit format has them.
const WIDE_ADDRESS: u64 = 0x0003_ffff_ffff_f000;
/// What are bits 51 and 50 of the address in the 52-bit format. That memory is beyond 1 PiB.
const HIGHEST_ADDRESS: u64 = 0x300;
/// A bit of a block that stands within what is its address otherwise (nT).
const BLOCK_NO_CONFLICT: u64 = 1 << 16;

static LEVELS: [Level; 4] = [
    level("level-0 descriptor", 39, 9, None, ADDRESS, 0),
    level("level-1 descriptor", 30, 9, Some(BLOCK), ADDRESS, 0),
    level("level-2 descriptor", 21, 9, Some(BLOCK), ADDRESS, 0),
    level("level-3 descriptor", 12, 9, Some(LAST), ADDRESS, 0),
];

static WIDE_LEVELS: [Level; 5] = [
    level("level -1 descriptor", 48, 4, None, WIDE_ADDRESS, HIGHEST_ADDRESS),
    level("level-0 descriptor", 39, 9, None, WIDE_ADDRESS, HIGHEST_ADDRESS),
    level("level-1 descriptor", 30, 9, Some(BLOCK), WIDE_ADDRESS, HIGHEST_ADDRESS),
    level("level-2 descriptor", 21, 9, Some(BLOCK), WIDE_ADDRESS, HIGHEST_ADDRESS),
    level("level-3 descriptor", 12, 9, Some(LAST), WIDE_ADDRESS, HIGHEST_ADDRESS),
];

const BLOCK: Bits = Bits { mask: TABLE, value: 0 };
const LAST: Bits = Bits { mask: TABLE, value: TABLE };

const fn level(
    name: &'static str,
    shift: u32,
    index_bits: u32,
    leaf: Option<Bits>,
    address: u64,
    highest: u64,
) -> Level {
    let below = (1 << shift) - 1;
    Level {
        name,
        shift,
        index_bits,
        present: Bits { mask: VALID, value: VALID },
        empty: 0,
        // A kernel that walks its own tables (it does once as it boots, to look for what is writable
        // and executable) takes the address of each for one of memory that it maps linearly. It does
        // not know the region's, so that no table can lie there.
        new_table: None,
        leaf,
        table_address: address,
        leaf_address: address & !below,
        table_type: Bits::ANY,
        // Bits 11..2 of a table's descriptor mean nothing in the other format.
        table_reserved: highest,
        leaf_reserved: address & below & !BLOCK_NO_CONFLICT | highest,
    }
}

pub(super) static THREE_LEVELS: TableFormat = format("aarch64 39-bit", 39, LEVELS.split_at(1).1);
pub(super) static FOUR_LEVELS: TableFormat = format("aarch64 48-bit", 48, &LEVELS);
static FOUR_WIDE_LEVELS: TableFormat =
    format("aarch64 48-bit, 52-bit memory", 48, WIDE_LEVELS.split_at(1).1);
pub(super) static FIVE_LEVELS: TableFormat = format("aarch64 52-bit", 52, &WIDE_LEVELS);

const fn format(name: &'static str, va_bits: u32, levels: &'static [Level]) -> TableFormat {
    TableFormat { name, byte_order: ByteOrder::Little, va_bits, above: HighBits::Ones, levels }
}

/// SCTLR: translation is on.
const SCTLR_M: u64 = 1 << 0;
/// TCR: the upper half is not translated.
const TCR_EPD1: u64 = 1 << 23;
/// TCR: the 52-bit format.
const TCR_DS: u64 = 1 << 59;

/// PSTATE: the exception level, and that of a hypervisor.
const PSTATE_EL: u64 = 0xc;
const EL2: u64 = 0x8;

/// Under page-table isolation (KPTI) the root that user mode has is the second page in front of the
/// kernel's (`TRAMP_SWAPPER_OFFSET`, arch/arm64/include/asm/pgtable.h and the linker script).
const ISOLATED_ROOT: u64 = 2 * PAGE;

/// The address spaces that TTBR1 may stand for: as it is, and the one that an isolated root belongs
/// to.
pub(super) fn address_spaces(registers: &Aarch64Registers) -> Result<Vec<AddressSpace>, Unpaged> {
    if registers.pstate & PSTATE_EL == EL2 {
        return Err(Unpaged::Hypervisor);
    }
    if registers.sctlr & SCTLR_M == 0 || registers.tcr & TCR_EPD1 != 0 {
        return Err(Unpaged::PagingOff);
    }
    // TG1 counts otherwise than TG0.
    match registers.tcr >> 30 & 3 {
        0b10 => {}
        0b01 => return Err(Unpaged::Granule { kib: 16 }),
        0b11 => return Err(Unpaged::Granule { kib: 64 }),
        _ => return Err(Unpaged::PagingOff),
    }
    let unused_bits = registers.tcr >> 16 & 0x3f;
    let format = match (64 - unused_bits, registers.tcr & TCR_DS) {
        (39, _) => &THREE_LEVELS,
        (48, 0) => &FOUR_LEVELS,
        (48, TCR_DS) => &FOUR_WIDE_LEVELS,
        (52, TCR_DS) => &FIVE_LEVELS,
        _ => return Err(Unpaged::Not64Bit),
    };
    // Linux's roots are whole pages; above them is the number of the address space.
    let root = Gpa(registers.ttbr1 & ADDRESS);
    let isolated = root.checked_add(ISOLATED_ROOT);
    let roots = std::iter::once(root).chain(isolated);
    Ok(roots.map(|root| AddressSpace { root, format }).collect())
}

/// The lowest address of the half of the kernel's address space that does not map memory linearly
/// (`PAGE_END`, Documentation/arch/arm64/memory.rst): a kernel for 52 bits places it as one for 48
/// does.
pub(super) fn page_end(format: &TableFormat) -> u64 {
    u64::MAX << (format.va_bits.min(48) - 1)
}

/// The block descriptor that maps the region's memory at `gpa`, with all that `text_leaf` has and that
/// is not about rights: the kind of memory, how it is shared, and whether it is global.
///
/// In the 52-bit format the bits that say how memory is shared are the highest ones of an address,
/// and zero, as the region's memory is not that far up.
pub(super) fn region_leaf(text_leaf: u64, gpa: Gpa, access: Access) -> u64 {
    let rights = READ_ONLY | WRITABLE | KERNEL_NO_EXECUTE | USER_NO_EXECUTE;
    let kept = text_leaf & !(WIDE_ADDRESS | rights | CONTIGUOUS | TABLE);
    let granted = match access {
        Access::Code => READ_ONLY | USER_NO_EXECUTE,
        Access::Constants => READ_ONLY | KERNEL_NO_EXECUTE | USER_NO_EXECUTE,
        Access::Data => WRITABLE | KERNEL_NO_EXECUTE | USER_NO_EXECUTE,
    };
    kept | gpa.0 & ADDRESS & !(BLOCK_SIZE - 1) | granted | ACCESSED | VALID
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::addr::Gva;
    use crate::arch::paging::WalkError;

    /// As a 6.1 kernel has it: 48 bits, pages of 4 KiB.
    const TCR: u64 = 0x0150_01f5_b550_3510;
    /// As a 6.12 kernel has it on a processor with 52 bits.
    const WIDE_TCR: u64 = 0x0950_01f6_b54c_350c;

    fn spaces(tcr: u64, ttbr1: u64) -> Result<Vec<AddressSpace>, Unpaged> {
        address_spaces(&Aarch64Registers { tcr, ttbr1, sctlr: 1, pstate: 5, ..Default::default() })
    }

    fn ram(entries: &[(u64, u64)]) -> GuestMemoryMmap<()> {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        for (at, entry) in entries {
            ram.write_slice(&entry.to_le_bytes(), GuestAddress(*at)).unwrap();
        }
        ram
    }

    const VA: Gva = Gva(0xffff_924e_9801_0abc);

    /// The way to [`VA`] from a root at 0x1000, by four levels, the last two entries as given.
    fn way(level_2: u64, level_3: u64) -> GuestMemoryMmap<()> {
        ram(&[
            (0x1000 + 8 * (VA.0 >> 39 & 0x1ff), 0x2003),
            (0x2000 + 8 * (VA.0 >> 30 & 0x1ff), 0x1000_0000_0000_3003),
            (0x3000 + 8 * (VA.0 >> 21 & 0x1ff), level_2),
            (0x4000 + 8 * (VA.0 >> 12 & 0x1ff), level_3),
        ])
    }

    #[test]
    fn pages_and_blocks_translate() {
        let space = spaces(TCR, 0x20_0000_0000_1001).unwrap()[0];
        assert_eq!(space.format.name, "aarch64 48-bit");
        for (level_2, level_3, gpa, size) in [
            (0x4003, 0x00d0_0000_4021_0783, 0x4021_0abc, PAGE),
            (0x0040_0000_4020_0781, 0, 0x4021_0abc, 2 << 20),
        ] {
            let leaf = space.walk(&way(level_2, level_3), VA).unwrap();
            assert_eq!((leaf.gpa, leaf.size), (Gpa(gpa), size));
        }
    }

    #[test]
    fn entries_that_are_no_pages_are_told_apart() {
        let space = spaces(TCR, 0x1000).unwrap()[0];
        let walk = |level_2, level_3| space.walk(&way(level_2, level_3), VA).unwrap_err();
        assert!(matches!(walk(0x4003, 0), WalkError::Absent { span: PAGE, entry: 0, .. }));
        // The last level has no blocks, and no block lies between two.
        assert!(matches!(walk(0x4003, 0x4021_0781), WalkError::Unsound { .. }));
        assert!(matches!(walk(0x4022_0781, 0), WalkError::Unsound { .. }));
    }

    #[test]
    fn fifty_two_bits_take_a_level_more_and_have_no_sharing_bits() {
        let space = spaces(WIDE_TCR, 0x1000).unwrap()[0];
        assert_eq!((space.format.name, space.format.levels.len()), ("aarch64 52-bit", 5));
        let walk = |level_3: u64| {
            let tables = [
                (0x1000 + 8 * 15, 0x1000_0000_0000_2003),
                (0x2000 + 8 * (VA.0 >> 39 & 0x1ff), 0x1000_0000_0000_3003),
                (0x3000 + 8 * (VA.0 >> 30 & 0x1ff), 0x4003),
                (0x4000 + 8 * (VA.0 >> 21 & 0x1ff), 0x5003),
                (0x5000 + 8 * (VA.0 >> 12 & 0x1ff), level_3),
            ];
            space.walk(&ram(&tables), VA)
        };
        assert_eq!(walk(0x00d0_0000_4021_0483).unwrap().gpa, Gpa(0x4021_0abc));
        assert_eq!(walk(0x00d1_0000_4021_0483).unwrap().gpa, Gpa(0x1_0000_4021_0abc));
        assert!(matches!(walk(0x00d0_0000_4021_0783), Err(WalkError::Unsound { .. })));
        // The linear map of such a kernel begins where one of 48 bits has no addresses.
        assert!(matches!(
            space.walk(&ram(&[]), Gva(0xfff0_0000_0000_0000)),
            Err(WalkError::Absent { span: 0x1_0000_0000_0000, .. })
        ));
    }

    #[test]
    fn a_root_may_be_the_one_that_user_mode_has() {
        let roots = spaces(TCR, 0x24_0000_4158_d001).unwrap();
        let roots: Vec<_> = roots.iter().map(|space| space.root.0).collect();
        assert_eq!(roots, [0x4158_d000, 0x4158_f000]);
    }

    #[test]
    fn modes_without_a_kernels_tables_are_told() {
        assert_eq!(spaces(TCR, 0).map(|spaces| spaces.len()), Ok(2));
        let registers = Aarch64Registers { tcr: TCR, sctlr: 1, ..Default::default() };
        let with = |change: fn(&mut Aarch64Registers)| {
            let mut registers = registers;
            change(&mut registers);
            address_spaces(&registers).unwrap_err()
        };
        assert_eq!(with(|r| r.sctlr = 0), Unpaged::PagingOff);
        assert_eq!(with(|r| r.tcr |= TCR_EPD1), Unpaged::PagingOff);
        assert_eq!(with(|r| r.tcr = TCR & !(3 << 30)), Unpaged::PagingOff);
        assert_eq!(with(|r| r.tcr = TCR & !(3 << 30) | 1 << 30), Unpaged::Granule { kib: 16 });
        assert_eq!(with(|r| r.tcr |= 3 << 30), Unpaged::Granule { kib: 64 });
        assert_eq!(with(|r| r.tcr |= 1 << 16), Unpaged::Not64Bit);
        assert_eq!(with(|r| r.pstate = 9), Unpaged::Hypervisor);
    }

    #[test]
    fn leaves_have_the_rights_they_need_and_the_texts_kind_of_memory() {
        // A contiguous page, a block, a page of a kernel with isolated tables, one of 52 bits.
        for (text, code, data) in [
            (0x00d0_0000_4021_0783, 0x00c0_0000_5e00_0781, 0x00e8_0000_5e00_0701),
            (0x0040_0000_4020_0781, 0x0040_0000_5e00_0781, 0x0068_0000_5e00_0701),
            (0x00d0_0000_4021_0f83, 0x00c0_0000_5e00_0f81, 0x00e8_0000_5e00_0f01),
            (0x00d0_0000_4021_0483, 0x00c0_0000_5e00_0481, 0x00e8_0000_5e00_0401),
        ] {
            assert_eq!(region_leaf(text, Gpa(0x5e00_0000), Access::Code), code, "{text:#x}");
            assert_eq!(region_leaf(text, Gpa(0x5e00_0000), Access::Data), data, "{text:#x}");
            let constants = code | KERNEL_NO_EXECUTE | USER_NO_EXECUTE;
            assert_eq!(region_leaf(text, Gpa(0x5e00_0000), Access::Constants), constants);
        }
    }

    #[test]
    fn the_linear_map_ends_where_a_48_bit_kernel_has_its_end() {
        assert_eq!(page_end(&FOUR_LEVELS), 0xffff_8000_0000_0000);
        assert_eq!(page_end(&FOUR_WIDE_LEVELS), 0xffff_8000_0000_0000);
        assert_eq!(page_end(&FIVE_LEVELS), 0xffff_8000_0000_0000);
        assert_eq!(page_end(&THREE_LEVELS), 0xffff_ffc0_0000_0000);
    }
}
