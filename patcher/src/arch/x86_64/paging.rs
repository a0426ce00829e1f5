//! Page tables of x86_64 in its two 64-bit modes (Intel SDM vol. 3A, chapter 5; AMD APM vol. 2,
//! chapter 5), and the leaves that map the region.

use crate::addr::Gpa;
use crate::arch::paging::{AddressSpace, Bits, Level, TableFormat};
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
        leaf,
        table_address: ADDRESS,
        leaf_address: ADDRESS & !below_page,
        table_reserved: PAGE_SIZE,
        leaf_reserved: below_page & !0x1fff,
    }
}

/// 4-level paging, 48 bits of address.
pub static FOUR_LEVELS: TableFormat = TableFormat {
    name: "x86_64 4-level",
    byte_order: ByteOrder::Little,
    va_bits: 48,
    levels: LEVELS.split_at(1).1,
};

/// 5-level paging (LA57), 57 bits of address.
pub static FIVE_LEVELS: TableFormat = TableFormat {
    name: "x86_64 5-level",
    byte_order: ByteOrder::Little,
    va_bits: 57,
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
