//! Mappings in page tables that lack the tables for them, as on s390x.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, VolatileSlice};

use crate::addr::{Gpa, Gva};
use crate::arch::paging::AddressSpace;
use crate::arch::s390x::S390X;
use crate::arch::{Access, Arch};
use crate::kernel::mapping::{Mapping, PlanMappingError, plan};
use crate::kernel::{InstallError, MappedPart, MappingEntry, PartMemory};
use crate::machine::{Registers, S390xRegisters};
use crate::region::{Part, RegionWindow};

const ROOT: u64 = 0x1_0000;
const SEGMENTS: u64 = 0x1_4000;
const PAGES: u64 = 0x1_8000;
const CODE: (Gpa, u64) = (Gpa(0x40_0000), 2 << 20);
const CONSTANTS: (Gpa, u64) = (Gpa(0x60_0000), 1 << 20);
const DATA: (Gpa, u64) = (Gpa(0x70_0000), 1 << 20);
const RINGS: (Gpa, u64) = (Gpa(0x80_0000), 1 << 20);

/// The region lies in the guest's RAM here, so that a walk finds tables in it; nothing but
/// [`Mapping::install`] writes there.
fn ram() -> GuestMemoryMmap<()> {
    let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 16 << 20)]).unwrap();
    let put = |at: u64, entry: u64| {
        ram.write_slice(&entry.to_be_bytes(), GuestAddress(at)).unwrap();
    };
    // As the kernel leaves them: region-third entries empty but for the first, which names a segment
    // table; of its segments the first has a page table, in which the first 16 pages are mapped.
    for index in 0..2048 {
        put(ROOT + 8 * index, 0x24);
        put(SEGMENTS + 8 * index, 0x20);
    }
    put(ROOT, SEGMENTS | 0x7);
    put(SEGMENTS, PAGES);
    for index in 0..256 {
        put(PAGES + 8 * index, if index < 16 { index << 12 | 0x200 } else { 0x400 });
    }
    ram
}

fn space() -> AddressSpace {
    let registers = Registers::S390x(S390xRegisters {
        psw_mask: 1 << 58 | 0x1_8000_0000,
        cr13: ROOT | 7,
        ..Default::default()
    });
    S390X.address_spaces(&registers).unwrap()[0]
}

fn leaf(gpa: Gpa, access: Access) -> u64 {
    S390X.region_leaf(0, gpa, access)
}

fn plan_in(
    ram: &GuestMemoryMmap<()>,
    window: std::ops::Range<u64>,
    rings: (Gpa, u64),
) -> Result<Mapping, PlanMappingError> {
    let window = Gva(window.start)..Gva(window.end);
    let parts = [
        (Part::Code, CODE),
        (Part::Constants, CONSTANTS),
        (Part::Data, DATA),
        (Part::Rings, rings),
    ];
    let parts = parts.map(|(part, (gpa, len))| PartMemory { part, gpa, len });
    plan(&space(), ram, &window, 0x1000, &leaf, &parts)
}

fn install(ram: &GuestMemoryMmap<()>, mapping: &Mapping) -> Result<(), InstallError> {
    let mut part = vec![0; CODE.1 as usize];
    let window = RegionWindow { gpa: CODE.0, memory: VolatileSlice::from(&mut part[..]) };
    mapping.install(ram, &window)?;
    ram.write_slice(&part, CODE.0.into()).unwrap();
    Ok(())
}

/// Checks that exactly the mapped part of the region is where the mapping says.
fn check(ram: &GuestMemoryMmap<()>, mapping: &Mapping) {
    let space = space();
    let all = [CODE.1, CONSTANTS.1, DATA.1, RINGS.1];
    // Read-only, then not to be executed.
    let rights = [0x200, 0x300, 0x100, 0x100];
    for ((mapped, all), rights) in mapping.parts.iter().zip(all).zip(rights) {
        for offset in (0..all).step_by(0x1000) {
            let walk = space.walk(ram, mapped.at + offset);
            if offset < mapped.len {
                assert_eq!(walk.unwrap().entry, (mapped.gpa.0 + offset) | rights);
            } else {
                assert!(walk.is_err(), "the page tables are not mapped at {offset:#x}");
            }
        }
    }
}

fn code(mapping: &Mapping) -> MappedPart {
    mapping.parts[0]
}

fn end(mapping: &Mapping) -> Gva {
    mapping.parts[3].at + mapping.parts[3].len
}

#[test]
fn page_tables_that_are_missing_are_made_at_the_end_of_the_code_part() {
    let ram = ram();
    let mapping = plan_in(&ram, 0x40_0000..0x90_0000, RINGS).unwrap();
    assert_eq!((code(&mapping).at, mapping.parts[1].at), (Gva(0x40_0000), Gva(0x60_0000)));
    // Five segments, a page table of 2 KiB each.
    assert_eq!(mapping.tables.len(), 5);
    assert_eq!(mapping.entries.len(), 5);
    assert_eq!(code(&mapping).len, CODE.1 - 3 * 0x1000);
    for (index, entry) in mapping.entries.iter().enumerate() {
        assert_eq!(entry.at, Gpa(SEGMENTS + 8 * (4 + index as u64)));
        assert_eq!(entry.empty, 0x20_u64.to_be_bytes());
    }
    install(&ram, &mapping).unwrap();
    check(&ram, &mapping);
    install(&ram, &mapping).unwrap();
}

#[test]
fn tables_of_several_levels_are_made_where_all_are_missing() {
    let ram = ram();
    let begin = 0x3ff_fa80_0000;
    let mapping = plan_in(&ram, begin..begin + (64 << 20), RINGS).unwrap();
    assert_eq!(end(&mapping), Gva(begin + (64 << 20)), "the end of the window");
    // One segment table of 16 KiB, linked last of all, and a page table for each segment.
    assert_eq!(mapping.tables.len(), 6);
    let root_entry = ROOT + 8 * (begin >> 31);
    let linked: Vec<_> =
        mapping.tables.iter().filter(|table| table.bytes.len() == 0x4000).collect();
    assert_eq!(linked.len(), 1);
    let value = (linked[0].at.0 | 0x7).to_be_bytes();
    let entry = MappingEntry { at: Gpa(root_entry), empty: 0x24_u64.to_be_bytes(), value };
    assert_eq!(mapping.entries, [entry]);
    install(&ram, &mapping).unwrap();
    check(&ram, &mapping);
    // What the new tables do not map is absent, not unsound.
    let absent = space().walk(&ram, code(&mapping).at - (1 << 20));
    assert!(matches!(absent, Err(crate::arch::paging::WalkError::Absent { entry: 0x20, .. })));
}

#[test]
fn tables_that_exist_are_used_and_what_they_map_is_left_alone() {
    let ram = ram();
    // The first segment's page table has room for 240 pages behind what it maps.
    let mapping = plan_in(&ram, 0x5000..0x51_0000, RINGS).unwrap();
    assert_eq!(code(&mapping).at, Gva(0x1_0000));
    assert_eq!(mapping.entries[0].at, Gpa(SEGMENTS + 8));
    let in_pages = |entry: &&MappingEntry| (PAGES..PAGES + 0x800).contains(&entry.at.0);
    assert_eq!(mapping.entries.iter().filter(in_pages).count(), 240);
    install(&ram, &mapping).unwrap();
    check(&ram, &mapping);
    assert_eq!(space().translate(&ram, Gva(0xf123)), Ok(Gpa(0xf123)));

    // Now only the pages that the tables themselves are in are left.
    let tables = (CODE.1 - code(&mapping).len) / 0x1000;
    let taken = plan_in(&ram, 0x5000..0x51_0000, RINGS);
    assert_eq!(taken, Err(PlanMappingError::NoRoom { wanted: 0x500, longest: tables }));
}

#[test]
fn an_entry_that_is_invalid_and_not_empty_is_gone_around() {
    let ram = ram();
    let at = SEGMENTS + 8 * 12;
    ram.write_slice(&0x5555_0020_u64.to_be_bytes(), GuestAddress(at)).unwrap();
    let mapping = plan_in(&ram, 0x40_0000..0xe0_0000, RINGS).unwrap();
    assert_eq!(end(&mapping), Gva(0xc0_0000));
}

#[test]
fn tables_that_would_leave_no_room_for_code_are_refused() {
    let ram = ram();
    let rings = (Gpa(1 << 32), 2 << 30);
    let result = plan_in(&ram, 1 << 33..(1 << 33) + (3 << 30), rings);
    assert_eq!(result, Err(PlanMappingError::NoRoomForTables { len: CODE.1 }));
}

#[test]
fn a_table_that_the_guest_made_meanwhile_stops_the_installation() {
    let ram = ram();
    let mapping = plan_in(&ram, 0x40_0000..0x90_0000, RINGS).unwrap();
    let taken = 0x9_9000_u64.to_be_bytes();
    ram.write_slice(&taken, mapping.entries[2].at.into()).unwrap();
    let error = install(&ram, &mapping).unwrap_err();
    assert!(matches!(error, InstallError::Entry { index: 2, .. }), "{error}");
    let mut found = [0; 8];
    ram.read_slice(&mut found, mapping.entries[2].at.into()).unwrap();
    assert_eq!(found, taken);
}
