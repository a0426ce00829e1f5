//! Page tables of s390x (z/Architecture Principles of Operation, "Dynamic Address Translation").
//!
//! An address-space-control element (ASCE) names the root table and, by its type, how many levels
//! there are. Linux makes every table at its full length.

use crate::addr::Gpa;
use crate::arch::paging::{AddressSpace, Bits, HighBits, Level, TableFormat};
use crate::arch::{Access, ByteOrder, Unpaged};
use crate::machine::S390xRegisters;

/// Bytes of a page.
pub(super) const PAGE: u64 = 1 << 12;
/// Bytes that an entry of a segment table maps.
pub(super) const SEGMENT: u64 = 1 << 20;

/// PSW: dynamic address translation is on.
const PSW_DAT: u64 = 1 << 58;
/// PSW: 64-bit addressing, two bits.
const PSW_64BIT: u64 = 0x1_8000_0000;

const ASCE_TYPE: u64 = 0xc;
/// ASCE: a real space, which has no tables.
const ASCE_REAL: u64 = 0x20;

/// Region and segment tables: the entry is invalid.
const INVALID: u64 = 0x20;
/// Region-third and segment tables: the entry maps a large page (format control).
const LARGE: u64 = 0x400;
/// Region tables: the offset and the length of the next table, in units of 4 KiB.
const TABLE_OFFSET: u64 = 0xc0;
const TABLE_LENGTH: u64 = 0x3;
const TYPE: u64 = 0xc;

const PTE_INVALID: u64 = 0x400;
const PTE_READ_ONLY: u64 = 0x200;
const PTE_NO_EXECUTE: u64 = 0x100;
const PTE_RESERVED: u64 = 0x800;

/// What tells the leaves that map code.
pub(super) const CODE: Bits = Bits { mask: PTE_NO_EXECUTE, value: 0 };

/// What tells the leaves that map kernel text: read-only and executable. The bits are the same in
/// leaves of every size.
pub(super) const TEXT: Bits = Bits { mask: PTE_READ_ONLY | PTE_NO_EXECUTE, value: PTE_READ_ONLY };

static LEVELS: [Level; 5] = [
    region("region-first-table entry", 53, 3, None),
    region("region-second-table entry", 42, 2, None),
    region("region-third-table entry", 31, 1, Some(Bits { mask: LARGE, value: LARGE })),
    Level {
        index_bits: 11,
        table_address: !0x7ff,
        table_type: Bits { mask: TYPE, value: 0 },
        table_reserved: 0,
        new_table: Some(0),
        ..region("segment-table entry", 20, 0, Some(Bits { mask: LARGE, value: LARGE }))
    },
    Level {
        name: "page-table entry",
        shift: 12,
        index_bits: 8,
        present: Bits { mask: PTE_INVALID, value: 0 },
        empty: PTE_INVALID,
        new_table: None,
        leaf: Some(Bits::ANY),
        table_address: 0,
        leaf_address: !(PAGE - 1),
        table_type: Bits::ANY,
        table_reserved: 0,
        leaf_reserved: PTE_RESERVED,
    },
];

const fn region(name: &'static str, shift: u32, kind: u64, leaf: Option<Bits>) -> Level {
    Level {
        name,
        shift,
        index_bits: 11,
        present: Bits { mask: INVALID, value: 0 },
        empty: kind << 2 | INVALID,
        new_table: Some(kind << 2 | TABLE_LENGTH),
        leaf,
        table_address: !0xfff,
        leaf_address: !((1 << shift) - 1),
        table_type: Bits { mask: TYPE | TABLE_LENGTH, value: kind << 2 | TABLE_LENGTH },
        table_reserved: TABLE_OFFSET,
        leaf_reserved: 0,
    }
}

/// The formats by the type in an ASCE.
static FORMATS: [TableFormat; 4] = [
    format("s390x segment", 31, 3),
    format("s390x region-third", 42, 2),
    format("s390x region-second", 53, 1),
    format("s390x region-first", 64, 0),
];

const fn format(name: &'static str, va_bits: u32, first: usize) -> TableFormat {
    TableFormat {
        name,
        byte_order: ByteOrder::Big,
        va_bits,
        above: HighBits::Zeros,
        levels: LEVELS_OF[first],
    }
}

static LEVELS_OF: [&[Level]; 4] =
    [&LEVELS, LEVELS.split_at(1).1, LEVELS.split_at(2).1, LEVELS.split_at(3).1];

/// The address space of the kernel: control register 13, the home space.
pub(super) fn address_spaces(registers: &S390xRegisters) -> Result<Vec<AddressSpace>, Unpaged> {
    let asce = registers.cr13;
    if registers.psw_mask & PSW_DAT == 0 || asce & ASCE_REAL != 0 {
        return Err(Unpaged::PagingOff);
    }
    if registers.psw_mask & PSW_64BIT != PSW_64BIT {
        return Err(Unpaged::Not64Bit);
    }
    let format = &FORMATS[((asce & ASCE_TYPE) >> 2) as usize];
    Ok(vec![AddressSpace { root: Gpa(asce & !0xfff), format }])
}

/// The page-table entry that maps the region's memory at `gpa`.
pub(super) fn region_leaf(gpa: Gpa, access: Access) -> u64 {
    gpa.0
        | match access {
            Access::Code => PTE_READ_ONLY,
            Access::Constants => PTE_READ_ONLY | PTE_NO_EXECUTE,
            Access::Data => PTE_NO_EXECUTE,
        }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::addr::Gva;
    use crate::arch::paging::WalkError;

    /// A region-third table at 0x10000, a segment table at 0x20000, a page table at 0x30800.
    fn guest() -> (GuestMemoryMmap<()>, AddressSpace) {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let put = |at: u64, entry: u64| {
            ram.write_slice(&entry.to_be_bytes(), GuestAddress(at)).unwrap();
        };
        put(0x1_0000 + 8, 0x2_0000 | TABLE_LENGTH | 1 << 2);
        put(0x1_0000 + 16, 3 << 31 | LARGE | 1 << 2);
        put(0x1_0000 + 24, 0x2_0000 | TABLE_LENGTH | 2 << 2);
        put(0x1_0000 + 32, INVALID | 1 << 2);
        put(0x2_0000 + 8, 0x3_0800);
        put(0x2_0000 + 16, 7 << 20 | LARGE);
        put(0x3_0800 + 5 * 8, 0x5_5000 | PTE_READ_ONLY);
        put(0x3_0800 + 6 * 8, PTE_INVALID);
        let registers =
            S390xRegisters { psw_mask: PSW_DAT | PSW_64BIT, cr13: 0x1_0007, ..Default::default() };
        (ram, address_spaces(&registers).unwrap()[0])
    }

    #[test]
    fn pages_segments_and_regions_translate() {
        let (ram, space) = guest();
        assert_eq!(space.format.name, "s390x region-third");
        let cases = [
            ((1 << 31) + 0x10_5123, 0x5_5123, PAGE),
            ((1 << 31) + 0x2f_ffff, 0x7f_ffff, SEGMENT),
            ((2 << 31) + 0x1234_5678, (3 << 31) + 0x1234_5678, 1 << 31),
        ];
        for (va, gpa, size) in cases {
            let leaf = space.walk(&ram, Gva(va)).unwrap();
            assert_eq!((leaf.gpa, leaf.size), (Gpa(gpa), size));
        }
    }

    #[test]
    fn invalid_entries_tables_of_a_wrong_type_and_long_addresses_are_told_apart() {
        let (ram, space) = guest();
        let walk = |va| space.walk(&ram, Gva(va)).unwrap_err();
        let page = walk((1 << 31) + 0x10_6000);
        assert!(matches!(page, WalkError::Absent { entry: PTE_INVALID, span: PAGE, .. }));
        assert!(matches!(walk(3 << 31), WalkError::Unsound { .. }));
        assert!(matches!(walk(4 << 31), WalkError::Absent { .. }));
        assert!(matches!(walk(1 << 42), WalkError::NotCanonical { .. }));
    }

    #[test]
    fn a_vcpu_without_translation_shows_no_kernel() {
        let off = S390xRegisters { psw_mask: PSW_64BIT, ..Default::default() };
        assert_eq!(address_spaces(&off), Err(Unpaged::PagingOff));
        let narrow = S390xRegisters { psw_mask: PSW_DAT, ..Default::default() };
        assert_eq!(address_spaces(&narrow), Err(Unpaged::Not64Bit));
    }

    #[test]
    fn nothing_can_be_written_and_executed() {
        assert_eq!(region_leaf(Gpa(0x3c00_0000), Access::Code), 0x3c00_0200);
        assert_eq!(region_leaf(Gpa(0x3c00_0000), Access::Constants), 0x3c00_0300);
        assert_eq!(region_leaf(Gpa(0x3c00_0000), Access::Data), 0x3c00_0100);
    }
}
