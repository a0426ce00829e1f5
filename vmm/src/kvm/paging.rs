//! Page tables and segments that a vCPU starts with: everything mapped where it is.

use std::ops::Range;

use patcher::addr::Gpa;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::layout::{GDT, LARGE_PAGE, PAGE};

/// Selector of the code segment, as the 64-bit boot protocol asks for.
pub(super) const CODE_SELECTOR: u16 = 0x10;
/// Selector of the data segments.
pub(super) const DATA_SELECTOR: u16 = 0x18;
/// Selector of the task state segment.
pub(super) const TASK_SELECTOR: u16 = 0x20;
/// The GDT's last byte.
pub(super) const GDT_LIMIT: u16 = (SEGMENTS.len() * 8 - 1) as u16;

/// Null, unused, 64-bit code, data, and a busy task state segment of 16 bytes. All flat.
const SEGMENTS: [u64; 6] =
    [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff, 0];

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;
/// What one table covers at each level of a four-level walk.
const PML4_ENTRY: u64 = 512 << 30;
const PDPT_ENTRY: u64 = 1 << 30;

/// Writes the GDT.
pub(super) fn write_gdt(ram: &GuestMemoryMmap<()>) -> Result<(), GuestMemoryError> {
    for (at, segment) in (GDT.0..).step_by(8).zip(SEGMENTS) {
        ram.write_obj(segment.to_le(), GuestAddress(at))?;
    }
    Ok(())
}

/// Writes four-level tables into the page-aligned `room` that map each of `ranges`, rounded out
/// to 2 MiB, to itself: writable and executable, for the supervisor.
///
/// The root lies at the beginning of `room`. Returns where the tables end.
///
/// # Errors
/// `room` is not RAM, or too small: then the address that would have been needed.
pub(super) fn write_identity(
    ram: &GuestMemoryMmap<()>,
    room: Range<Gpa>,
    ranges: &[Range<Gpa>],
) -> Result<Gpa, GuestMemoryError> {
    let mut next = room.start;
    let mut allocate = || {
        let table = next;
        next = table + PAGE;
        if next > room.end {
            return Err(GuestMemoryError::InvalidGuestAddress(GuestAddress::from(table)));
        }
        ram.write_slice(&[0; PAGE as usize], GuestAddress::from(table))?;
        Ok(table)
    };
    let root = allocate()?;
    for range in ranges {
        let (start, end) = (range.start.0 / LARGE_PAGE, range.end.0.div_ceil(LARGE_PAGE));
        for large in start..end {
            let at = large * LARGE_PAGE;
            let mut table = root;
            for span in [PML4_ENTRY, PDPT_ENTRY] {
                let entry = GuestAddress(table.0 + at / span % 512 * 8);
                let mut value: u64 = ram.read_obj(entry)?;
                if value & PRESENT == 0 {
                    value = allocate()?.0 | WRITABLE | PRESENT;
                    ram.write_obj(value, entry)?;
                }
                table = Gpa(value & !(PAGE - 1));
            }
            let entry = GuestAddress(table.0 + large % 512 * 8);
            ram.write_obj(at | LARGE | WRITABLE | PRESENT, entry)?;
        }
    }
    Ok(next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::layout::{GIB, MIB};

    #[test]
    fn ranges_far_apart_map_to_themselves_and_nothing_else_does() {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MIB as usize)]).unwrap();
        let room = Gpa(0x9000)..Gpa(0x2_0000);
        let ranges = [Gpa(0)..Gpa(3 * MIB), Gpa(4 * GIB)..Gpa(4 * GIB + 2 * MIB)];
        let end = write_identity(&ram, room.clone(), &ranges).unwrap();
        assert_eq!(end, room.start + 4 * PAGE);

        let leaf = |at: u64| {
            let entry = |table: u64, index: u64| -> u64 {
                ram.read_obj(GuestAddress((table & !0xfff) + index % 512 * 8)).unwrap()
            };
            let pdpt = entry(room.start.0, at / PML4_ENTRY);
            let directory = entry(pdpt, at / PDPT_ENTRY);
            if directory & PRESENT == 0 { 0 } else { entry(directory, at / LARGE_PAGE) }
        };
        for at in [0, 2 * MIB, 4 * GIB] {
            assert_eq!(leaf(at), at | 0x83);
        }
        for at in [4 * MIB, GIB, 4 * GIB + 2 * MIB] {
            assert_eq!(leaf(at) & PRESENT, 0, "{at:#x}");
        }
        assert!(write_identity(&ram, room.start..room.start + 3 * PAGE, &ranges).is_err());
    }
}
