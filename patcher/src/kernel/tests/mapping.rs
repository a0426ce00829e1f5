use super::{every_kind, guest};
use crate::addr::{Gpa, Gva};
use crate::kernel::{InstallError, Mapping, PlanMappingError, plan_mapping};
use crate::machine::Machine;
use crate::synthetic::Guest;

const LEAF: u64 = 2 << 20;
const CODE: (Gpa, u64) = (Gpa(1 << 32), LEAF);
const RINGS: (Gpa, u64) = (Gpa((1 << 32) + LEAF), 3 * LEAF);

/// The guest's kernel has a table for every leaf, so none goes into the region.
fn install(mapping: &Mapping, guest: &Guest) -> Result<(), InstallError> {
    assert!(mapping.tables.is_empty() && mapping.code_len == CODE.1);
    mapping.install(&guest.ram, &guest.region_code())
}

#[test]
fn code_and_rings_are_mapped_in_one_row_with_the_rights_they_need() {
    for blueprint in every_kind() {
        let guest = Guest::new(&blueprint);
        let kernel = guest.kernel();
        let mapping = plan_mapping(&kernel, &guest.ram, CODE, RINGS).unwrap();
        assert_eq!(mapping.code, Gva(0xffff_ffff_bf80_0000));
        assert_eq!(mapping.rings, mapping.code + LEAF);
        assert!(kernel.translate(&guest.ram, mapping.code).is_err());
        install(&mapping, &guest).unwrap();

        let code = kernel.root().walk(&guest.ram, mapping.code + 0x123).unwrap();
        assert_eq!((code.gpa, code.size), (CODE.0 + 0x123, LEAF));
        // Present, accessed, dirty, large, global like the text; neither writable nor no-execute.
        assert_eq!(code.entry & !CODE.0.0, 0x1e1);
        for at in [0, LEAF, 3 * LEAF - 8] {
            let ring = kernel.root().walk(&guest.ram, mapping.rings + at).unwrap();
            assert_eq!(ring.gpa, RINGS.0 + at);
            assert_eq!(ring.entry & 0x8000_0000_0000_0fff, 0x8000_0000_0000_01e3);
        }
        // Installed again, nothing changes.
        install(&mapping, &guest).unwrap();
    }
}

#[test]
fn the_leaves_are_not_global_where_the_text_is_not() {
    let guest = guest();
    let first = guest.image_directory() + 8 * (guest.blueprint().base.0 >> 21 & 0x1ff);
    guest.poke_u64(first, guest.blueprint().phys.0 | 0xa1);
    let mapping = plan_mapping(&guest.kernel(), &guest.ram, CODE, RINGS).unwrap();
    assert!(mapping.entries.iter().all(|entry| u64::from_le_bytes(entry.value) & 0x100 == 0));
}

#[test]
fn entries_that_are_not_empty_are_gone_around() {
    let guest = guest();
    // Absent, but the kernel has put something there.
    guest.poke_u64(guest.image_directory() + 8 * 510, 0xdead_be00);
    let mapping = plan_mapping(&guest.kernel(), &guest.ram, CODE, RINGS).unwrap();
    assert_eq!(mapping.rings + 3 * LEAF, Gva(0xffff_ffff_bfc0_0000));
    let kernel = guest.kernel();
    for entry in (0..512).filter(|entry| entry % 3 == 0) {
        if guest.peek(guest.image_directory() + 8 * entry, 8) == [0; 8] {
            guest.poke_u64(guest.image_directory() + 8 * entry, 2);
        }
    }
    assert_eq!(
        plan_mapping(&kernel, &guest.ram, CODE, RINGS),
        Err(PlanMappingError::NoRoom { wanted: 4, longest: 2 })
    );
}

#[test]
fn a_kernel_that_cannot_be_moved_keeps_the_upper_half_for_modules() {
    let mut guest = guest();
    guest.rename_symbol("kaslr_regions", "other_regions");
    let mapping = plan_mapping(&guest.kernel(), &guest.ram, CODE, RINGS).unwrap();
    assert_eq!(mapping.rings + 3 * LEAF, Gva(0xffff_ffff_a000_0000));
}

#[test]
fn memory_that_is_not_whole_pages_is_refused() {
    let guest = guest();
    let kernel = guest.kernel();
    for code in [(Gpa(0x1000), LEAF), (Gpa(0), LEAF + 1), (Gpa(0), 0)] {
        assert!(matches!(
            plan_mapping(&kernel, &guest.ram, code, RINGS),
            Err(PlanMappingError::Unaligned { what: "code", .. })
        ));
    }
}

#[test]
fn an_entry_that_the_guest_took_meanwhile_stops_the_installation() {
    let guest = guest();
    let mapping = plan_mapping(&guest.kernel(), &guest.ram, CODE, RINGS).unwrap();
    guest.poke_u64(guest.image_directory() + 8 * 509, 0x1234_5063);
    let error = install(&mapping, &guest).unwrap_err();
    assert!(matches!(error, InstallError::Entry { index: 1, .. }), "{error}");
    assert_eq!(guest.peek(guest.image_directory() + 8 * 509, 8), 0x1234_5063u64.to_le_bytes());
}
