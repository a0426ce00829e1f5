//! Page tables of x86_64 in its two 64-bit modes (Intel SDM vol. 3A, chapter 5; AMD APM vol. 2,
//! chapter 5), and the leaves that map the region.

use crate::addr::Gpa;
use crate::arch::paging::{AddressSpace, Bits, HighBits, Level, TableFormat};
use crate::arch::{Access, ByteOrder, Unpaged};
use crate::machine::X86Registers;

/// What a leaf of the second-lowest level maps, in bytes.
pub const LARGE_PAGE: u64 = 2 << 20;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const PAGE_SIZE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;

/// Bits 51..12: the widest physical address that the architecture has room for.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

const IS_PRESENT: Bits = Bits { mask: PRESENT, value: PRESENT };
const IS_LARGE: Bits = Bits { mask: PAGE_SIZE, value: PAGE_SIZE };
const ALWAYS: Bits = Bits { mask: 0, value: 0 };

/// The levels of 5-level paging; 4-level paging is all but the first.
static LEVELS: [Level; 5] = [
    table_level("page-map level-5 entry", 48, None),
    table_level("page-map level-4 entry", 39, None),
    table_level("page-directory-pointer entry", 30, Some(IS_LARGE)),
    table_level("page-directory entry", 21, Some(IS_LARGE)),
    Level { leaf: Some(ALWAYS), leaf_reserved: 0, ..table_level("page-table entry", 12, None) },
];

const fn table_level(name: &'static str, shift: u32, leaf: Option<Bits>) -> Level {
    // The bits between a large page's address and bit 12, which is its PAT bit, are reserved.
    let below_page = (1 << shift) - 1;
    Level {
        name,
        shift,
        index_bits: 9,
        present: IS_PRESENT,
        empty: 0,
        new_table: None,
        leaf,
        table_address: ADDRESS,
        leaf_address: ADDRESS & !below_page,
        table_type: Bits::ANY,
        table_reserved: PAGE_SIZE,
        leaf_reserved: below_page & !0x1fff,
    }
}

/// 4-level paging, 48 bits of address.
pub static FOUR_LEVELS: TableFormat = TableFormat {
    name: "x86_64 4-level",
    byte_order: ByteOrder::Little,
    va_bits: 48,
    above: HighBits::AsHighest,
    levels: LEVELS.split_at(1).1,
};

/// 5-level paging (LA57), 57 bits of address.
pub static FIVE_LEVELS: TableFormat = TableFormat {
    name: "x86_64 5-level",
    byte_order: ByteOrder::Little,
    va_bits: 57,
    above: HighBits::AsHighest,
    levels: &LEVELS,
};

const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;

/// Under page-table isolation the user half of a process's root is the page behind the kernel half,
/// which is 8 KiB-aligned (arch/x86/include/asm/pgtable.h, PTI_PGTABLE_SWITCH_BIT).
const PTI_USER_ROOT: u64 = 1 << 12;

/// The address spaces that CR3 may stand for: the kernel half of an isolated root before the root
/// as it is, whose bit 12 may be plain address.
pub(super) fn address_spaces(registers: &X86Registers) -> Result<Vec<AddressSpace>, Unpaged> {
    if registers.cr0 & CR0_PG == 0 {
        return Err(Unpaged::PagingOff);
    }
    if registers.efer & EFER_LMA == 0 || registers.cr4 & CR4_PAE == 0 {
        return Err(Unpaged::Not64Bit);
    }
    let format = if registers.cr4 & CR4_LA57 == 0 { &FOUR_LEVELS } else { &FIVE_LEVELS };
    let root = registers.cr3 & ADDRESS;
    let mut roots = vec![root & !PTI_USER_ROOT];
    if root & PTI_USER_ROOT != 0 {
        roots.push(root);
    }
    Ok(roots.into_iter().map(|root| AddressSpace { root: Gpa(root), format }).collect())
}

/// Composes the 2 MiB leaf for region memory at `gpa`.
///
/// Accessed and dirty are set beforehand, so that the processor has no reason to write the entry.
/// Global follows the text's leaf: a kernel under page-table isolation has no global pages.
pub(super) fn region_leaf(text_leaf: u64, gpa: Gpa, access: Access) -> u64 {
    let rights = match access {
        Access::Code => 0,
        Access::Constants => NO_EXECUTE,
        Access::Data => WRITABLE | NO_EXECUTE,
    };
    (gpa.0 & ADDRESS & !(LARGE_PAGE - 1))
        | PRESENT
        | ACCESSED
        | DIRTY
        | PAGE_SIZE
        | (text_leaf & GLOBAL)
        | rights
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::addr::Gva;
    use crate::arch::paging::WalkError;

    /// RAM with entries at their addresses.
    fn ram(entries: &[(u64, u64)]) -> GuestMemoryMmap<()> {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        for (at, entry) in entries {
            ram.write_slice(&entry.to_le_bytes(), GuestAddress(*at)).unwrap();
        }
        ram
    }

    const ROOT: AddressSpace = AddressSpace { root: Gpa(0x1000), format: &FOUR_LEVELS };
    const VA: Gva = Gva(0xffff_ffff_8123_4567);

    /// The way to [`VA`] down to `depth` entries, the last of them as given.
    fn way(depth: usize, last: u64) -> GuestMemoryMmap<()> {
        let mut entries = vec![
            (0x1000 + 511 * 8, 0x2063),
            (0x2000 + 510 * 8, 0x3063),
            (0x3000 + 9 * 8, 0x4063),
            (0x4000 + 0x34 * 8, 0x5063),
        ];
        entries.truncate(depth);
        entries[depth - 1].1 = last;
        ram(&entries)
    }

    #[test]
    fn leaves_of_each_size_translate() {
        for (depth, last, gpa, size) in [
            (4, 0x8000_0000_0aaa_a163, 0x0aaa_a567, 0x1000),
            (3, 0x0000_0000_0a60_01e1, 0x0a63_4567, 2 << 20),
            // With its PAT bit, 12, set.
            (3, 0x0000_0000_0a60_11e1, 0x0a63_4567, 2 << 20),
            (2, 0x0000_0001_4000_01e1, 0x1_4123_4567, 1 << 30),
        ] {
            let leaf = ROOT.walk(&way(depth, last), VA).unwrap();
            assert_eq!((leaf.gpa, leaf.size, leaf.entry), (Gpa(gpa), size, last), "depth {depth}");
        }
    }

    #[test]
    fn an_absent_entry_tells_where_it_is_and_what_it_spans() {
        for (depth, span) in [(1, 1 << 39), (2, 1 << 30), (3, 2 << 20), (4, 0x1000)] {
            let error = ROOT.walk(&way(depth, 0xabc0), VA).unwrap_err();
            assert!(
                matches!(error, WalkError::Absent { entry: 0xabc0, span: found, .. } if found == span),
                "{error}"
            );
        }
        let error = ROOT.walk(&way(3, 0), VA).unwrap_err();
        assert_eq!(
            error.to_string(),
            "0xffffffff81234567 is not mapped: the page-directory entry at guest-physical 0x3048 \
             holds 0x0"
        );
    }

    #[test]
    fn bits_that_no_entry_has_are_refused() {
        for (depth, last) in [
            (1, 0x20e3),                // a leaf at the root
            (2, 0x0000_0001_4000_81e1), // a 1 GiB page that is not aligned
            (3, 0x0000_0000_0a61_01e1), // a 2 MiB page that is not aligned
        ] {
            let error = ROOT.walk(&way(depth, last), VA).unwrap_err();
            assert!(matches!(error, WalkError::Unsound { .. }), "{error}");
        }
    }

    #[test]
    fn tables_outside_ram_are_an_error() {
        let error = ROOT.walk(&way(2, 0x000f_ffff_ffff_f063), VA).unwrap_err();
        assert!(matches!(error, WalkError::TableNotRam { .. }), "{error}");
    }

    #[test]
    fn addresses_that_a_format_does_not_translate_are_refused() {
        let five = AddressSpace { root: Gpa(0x1000), format: &FIVE_LEVELS };
        let ram = ram(&[]);
        let refused = |space: AddressSpace, va| {
            matches!(space.walk(&ram, Gva(va)), Err(WalkError::NotCanonical { .. }))
        };
        assert!(refused(ROOT, 0xff11_0000_0000_0000));
        assert!(!refused(five, 0xff11_0000_0000_0000));
        assert!(refused(five, 0xfe00_0000_0000_0000));
        assert!(refused(ROOT, 0x0000_8000_0000_0000));
        assert!(!refused(ROOT, 0x0000_7fff_ffff_ffff));
    }

    #[test]
    fn five_levels_are_walked_by_nine_bits_more() {
        let ram = ram(&[
            (0x1000 + 511 * 8, 0x2063),
            (0x2000 + 511 * 8, 0x3063),
            (0x3000 + 510 * 8, 0x4063),
            (0x4000 + 9 * 8, 0x0a60_01e1),
        ]);
        let space = AddressSpace { root: Gpa(0x1000), format: &FIVE_LEVELS };
        assert_eq!(space.translate(&ram, VA), Ok(Gpa(0x0a63_4567)));
    }

    #[test]
    fn an_odd_root_may_be_the_user_half_or_a_root_of_its_own() {
        let registers = X86Registers {
            cr0: 0x8000_0001,
            cr3: 0x1234_5803,
            cr4: 0x1020,
            efer: 0x500,
            ..Default::default()
        };
        let roots = |cr3| {
            let spaces = address_spaces(&X86Registers { cr3, ..registers }).unwrap();
            assert!(spaces.iter().all(|space| *space.format == FIVE_LEVELS));
            spaces.iter().map(|space| space.root.0).collect::<Vec<_>>()
        };
        assert_eq!(roots(0x1234_4803), [0x1234_4000]);
        assert_eq!(roots(0x1234_5803), [0x1234_4000, 0x1234_5000]);
        // Bit 63 says that the address space's translations may be kept.
        assert_eq!(roots(0x8000_0000_1234_4803), [0x1234_4000]);
    }
}
