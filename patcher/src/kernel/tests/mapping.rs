use vm_memory::Bytes;

use super::{every_kind, guest};
use crate::addr::{Gpa, Gva};
use crate::kernel::{
    InstallError, MappedRegion, Mapping, PartMemory, PlanMappingError, plan_mapping,
};
use crate::machine::Machine;
use crate::region::{Part, PayloadSizes, RegionError};
use crate::synthetic::Guest;

const LEAF: u64 = 2 << 20;
/// The parts, the rings of three leaves.
const PARTS: [PartMemory; 4] = [
    part(Part::Code, 0, LEAF),
    part(Part::Constants, 1, LEAF),
    part(Part::Data, 2, LEAF),
    part(Part::Rings, 3, 3 * LEAF),
];

const fn part(part: Part, leaves: u64, len: u64) -> PartMemory {
    PartMemory { part, gpa: Gpa((1 << 32) + leaves * LEAF), len }
}

/// The guest's kernel has a table for every leaf, so none goes into the region.
fn install(mapping: &Mapping, guest: &Guest) -> Result<(), InstallError> {
    assert!(mapping.tables.is_empty());
    mapping.install(&guest.ram, &guest.region(Part::Code))
}

fn start(mapping: &Mapping) -> Gva {
    mapping.parts[0].at
}

fn end(mapping: &Mapping) -> Gva {
    mapping.parts[3].at + mapping.parts[3].len
}

#[test]
fn parts_are_mapped_in_one_row_with_the_rights_they_need() {
    for blueprint in every_kind() {
        let guest = Guest::new(&blueprint);
        let kernel = guest.kernel();
        let mapping = plan_mapping(&kernel, &guest.ram, &PARTS).unwrap();
        assert_eq!(start(&mapping), Gva(0xffff_ffff_bf40_0000));
        assert!(kernel.translate(&guest.ram, start(&mapping)).is_err());
        install(&mapping, &guest).unwrap();

        // Present, accessed, dirty, large, global like the text; then writable, then no-execute.
        let rights = [0x1e1, 0x8000_0000_0000_01e1, 0x8000_0000_0000_01e3, 0x8000_0000_0000_01e3];
        let mut next = start(&mapping);
        for ((mapped, memory), rights) in mapping.parts.iter().zip(PARTS).zip(rights) {
            assert_eq!((mapped.part, mapped.at), (memory.part, next));
            assert_eq!((mapped.gpa, mapped.len), (memory.gpa, memory.len));
            for at in (0..mapped.len).step_by(LEAF as usize).chain([0x123, mapped.len - 8]) {
                let leaf = kernel.root().walk(&guest.ram, mapped.at + at).unwrap();
                assert_eq!((leaf.gpa, leaf.size), (memory.gpa + at, LEAF));
                assert_eq!(leaf.entry & 0x8000_0000_0000_0fff, rights, "{}", mapped.part);
            }
            next = next + mapped.len;
        }
        // Installed again, nothing changes.
        install(&mapping, &guest).unwrap();
    }
}

#[test]
fn what_is_mapped_is_found_by_its_address_and_written_within_one_part() {
    let guest = guest();
    let region = MappedRegion::new(&guest, &guest.kernel()).unwrap();
    for part in Part::ALL {
        let range = region.range(part);
        let gpa = guest.region(part).gpa;
        assert_eq!(region.gpa(range.start), Some(gpa));
        assert_eq!(region.gpa(range.end - 1), Some(gpa + (LEAF - 1)));
        region.write(&guest, range.end - 4, b"last").unwrap();
        let mut read = [0; 4];
        guest.region(part).memory.read_slice(&mut read, LEAF as usize - 4).unwrap();
        assert_eq!(&read, b"last");
        let outside = region.write(&guest, range.end - 3, b"over").unwrap_err();
        assert!(matches!(outside, RegionError::Outside { len: 4, .. }), "{outside}");
    }
    assert_eq!(region.gpa(region.range(Part::Code).start - 1), None);
    assert_eq!(region.gpa(region.range(Part::Rings).end), None);

    let sizes = PayloadSizes { text: 8, constants: 8, data: 8 };
    let placed = region.payloads().reserve(sizes, None).unwrap();
    assert_eq!(placed.text.start, region.range(Part::Code).start + LEAF / 2);
    assert_eq!(placed.constants.start, region.range(Part::Constants).start);
    assert_eq!(placed.data.start, region.range(Part::Data).start);
}

#[test]
fn the_leaves_are_not_global_where_the_text_is_not() {
    let guest = guest();
    let first = guest.image_directory() + 8 * (guest.blueprint().base.0 >> 21 & 0x1ff);
    guest.poke_u64(first, guest.blueprint().phys.0 | 0xa1);
    let mapping = plan_mapping(&guest.kernel(), &guest.ram, &PARTS).unwrap();
    assert!(mapping.entries.iter().all(|entry| u64::from_le_bytes(entry.value) & 0x100 == 0));
}

#[test]
fn entries_that_are_not_empty_are_gone_around() {
    let guest = guest();
    // Absent, but the kernel has put something there.
    guest.poke_u64(guest.image_directory() + 8 * 510, 0xdead_be00);
    let mapping = plan_mapping(&guest.kernel(), &guest.ram, &PARTS).unwrap();
    assert_eq!(end(&mapping), Gva(0xffff_ffff_bfc0_0000));
    let kernel = guest.kernel();
    for entry in (0..512).filter(|entry| entry % 3 == 0) {
        if guest.peek(guest.image_directory() + 8 * entry, 8) == [0; 8] {
            guest.poke_u64(guest.image_directory() + 8 * entry, 2);
        }
    }
    assert_eq!(
        plan_mapping(&kernel, &guest.ram, &PARTS),
        Err(PlanMappingError::NoRoom { wanted: 6, longest: 2 })
    );
}

#[test]
fn a_kernel_that_cannot_be_moved_keeps_the_upper_half_for_modules() {
    let mut guest = guest();
    guest.rename_symbol("kaslr_regions", "other_regions");
    let mapping = plan_mapping(&guest.kernel(), &guest.ram, &PARTS).unwrap();
    assert_eq!(end(&mapping), Gva(0xffff_ffff_a000_0000));
}

#[test]
fn memory_that_is_not_whole_pages_is_refused() {
    let guest = guest();
    let kernel = guest.kernel();
    for (gpa, len) in [(Gpa(0x1000), LEAF), (Gpa(0), LEAF + 1), (Gpa(0), 0)] {
        let mut parts = PARTS;
        parts[1] = PartMemory { gpa, len, ..parts[1] };
        assert!(matches!(
            plan_mapping(&kernel, &guest.ram, &parts),
            Err(PlanMappingError::Unaligned { part: Part::Constants, .. })
        ));
    }
}

#[test]
fn an_entry_that_the_guest_took_meanwhile_stops_the_installation() {
    let guest = guest();
    let mapping = plan_mapping(&guest.kernel(), &guest.ram, &PARTS).unwrap();
    guest.poke_u64(guest.image_directory() + 8 * 509, 0x1234_5063);
    let error = install(&mapping, &guest).unwrap_err();
    assert!(matches!(error, InstallError::Entry { index: 3, .. }), "{error}");
    assert_eq!(guest.peek(guest.image_directory() + 8 * 509, 8), 0x1234_5063u64.to_le_bytes());
}
