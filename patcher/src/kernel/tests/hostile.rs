//! Guests that mean harm: whatever they write, there is an answer, and soon.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::guest;
use crate::addr::{Gpa, Gva};
use crate::kernel::{Kernel, Located, PadsError, PartMemory, RecordsError, locate, plan_mapping};
use crate::machine::{Registers, X86Registers};
use crate::mem::PhysMem;
use crate::region::Part;
use crate::synthetic::Guest;

fn records_error(guest: &Guest) -> RecordsError {
    let PadsError::Records(error) = guest.kernel().pads(&guest.ram).unwrap_err();
    error
}

#[test]
fn a_list_of_records_that_loops_is_refused() {
    let guest = guest();
    let first = guest.record_groups[0].descriptor;
    guest.poke_u64(guest.record_groups[1].descriptor, first.0);
    assert!(matches!(records_error(&guest), RecordsError::Unsound { .. }));
    // The same with groups that hold nothing.
    for group in &guest.record_groups {
        guest.poke(group.descriptor + 16, &[0; 4]);
    }
    assert!(matches!(records_error(&guest), RecordsError::Unsound { .. }));
}

#[test]
fn groups_that_claim_more_than_their_pages_hold_are_refused() {
    for (count, order) in [(257u32, 0u32), (u32::MAX, 0), (u32::MAX, 10), (1, 11), (0, u32::MAX)] {
        let guest = guest();
        let group = guest.record_groups[0].descriptor;
        guest.poke(group + 16, &count.to_le_bytes());
        guest.poke(group + 20, &order.to_le_bytes());
        let error = records_error(&guest);
        assert!(matches!(error, RecordsError::Unsound { .. }), "{count} {order}: {error}");
    }
}

#[test]
fn a_list_that_leads_out_of_memory_is_an_error() {
    for nowhere in [8, 0xdead_0000_0000_0000, u64::MAX, 0xffff_8880_f000_0000] {
        let guest = guest();
        guest.poke_u64(guest.record_groups[0].descriptor, nowhere);
        assert!(matches!(records_error(&guest), RecordsError::Unreadable { .. }));
        guest.poke_u64(guest.symbol("ftrace_pages_start"), nowhere);
        assert!(matches!(records_error(&guest), RecordsError::Unreadable { .. }));
    }
}

#[test]
fn page_tables_that_loop_end() {
    let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
    // Every entry of this table is the table itself: as a leaf of the lowest level, RAM.
    for index in 0..512u64 {
        ram.write_slice(&0x1067u64.to_le_bytes(), GuestAddress(0x1000 + 8 * index)).unwrap();
    }
    for cr4 in [0x20, 0x1020] {
        let registers = Registers::X86_64(X86Registers {
            cr0: 0x8000_0001,
            cr3: 0x1000,
            cr4,
            efer: 0x500,
            ..X86Registers::default()
        });
        assert!(locate(&ram, &[registers]).is_err());
    }
}

/// Everything that a kernel that was found can be asked.
fn ask_everything(kernel: &Kernel, ram: &dyn PhysMem) {
    let _ = kernel.readiness(ram);
    let _ = kernel.pads(ram);
    let _ = kernel.return_form(ram);
    let _ = kernel.cpu_number(ram);
    let _ = kernel.panicked(ram);
    let _ = kernel.is_current(ram);
    let _ = kernel.is_run_by(ram, &Registers::X86_64(X86Registers::default()));
    let _ = kernel.build_id(ram);
    if let Ok(layout) = kernel.task_layout(ram) {
        let _ = kernel.tasks(ram, &layout);
    }
    let parts = Part::ALL.map(|part| PartMemory {
        part,
        gpa: Gpa(1 << 32) + part.offset(),
        len: part.len(2 << 20),
    });
    let _ = plan_mapping(kernel, ram, &parts);
}

/// Where a guest may hurt most: its variables, page tables, lists and records.
fn targets(guest: &Guest) -> Vec<(Gva, u64)> {
    vec![
        (guest.symbol("ftrace_pages_start"), 0x200),
        (guest.symbol("init_top_pgt"), 0x7000),
        (guest.record_groups[0].descriptor, 0x200),
        (guest.record_groups[0].records, 0x1000),
        (guest.functions[0].entry, 0x1000),
        (guest.kallsyms.start, guest.kallsyms.end.0 - guest.kallsyms.start.0),
        (guest.symbol("linux_banner"), 0x100),
        (guest.symbol("init_task"), 0x2000),
        (guest.tasks[1].at, 0x8000),
        (guest.tasks[1].stack, 0x4000),
        (guest.run_queue(0), 0x4000),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn nothing_that_a_guest_writes_makes_us_panic(
        changes in prop::collection::vec(
            (0usize..11, any::<prop::sample::Index>(), any::<u64>(), 0u32..64),
            1..60,
        ),
        after_it_was_found in any::<bool>(),
    ) {
        let guest = guest();
        let found = guest.kernel();
        let targets = targets(&guest);
        for (target, index, value, shift) in changes {
            let (begin, len) = targets[target];
            guest.poke_u64(begin + index.index(len as usize / 8) as u64 * 8, value >> shift);
        }
        if after_it_was_found {
            ask_everything(&found, &guest.ram);
        } else if let Ok(Located::Found(kernel)) = locate(&guest.ram, &guest.registers) {
            ask_everything(&kernel, &guest.ram);
        }
    }

    #[test]
    fn registers_of_any_kind_are_looked_at_without_harm(
        cr0 in any::<u64>(), cr3 in any::<u64>(), cr4 in any::<u64>(), efer in any::<u64>(),
        random in prop::collection::vec(any::<u8>(), 0x4000),
    ) {
        let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap();
        ram.write_slice(&random, GuestAddress(0)).unwrap();
        for (cr0, cr3) in [(cr0, cr3), (cr0 | 1 << 31, cr3 & 0x3fff)] {
            for (cr4, efer) in [(cr4, efer), (cr4 | 0x20, efer | 0x400)] {
                let registers =
                    Registers::X86_64(X86Registers { cr0, cr3, cr4, efer, ..Default::default() });
                let found = locate(&ram, &[registers]);
                prop_assert!(!matches!(found, Ok(Located::Found(_))));
            }
        }
    }
}
