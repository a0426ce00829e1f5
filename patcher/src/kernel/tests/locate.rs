use vm_memory::Bytes;

use super::{every_kind, guest};
use crate::addr::{Gpa, Gva};
use crate::arch::Unpaged;
use crate::kernel::{KallsymsError, Kernel, LocateError, Located, NotYet, locate};
use crate::machine::{Registers, X86Registers};
use crate::synthetic::{BANNER_LINE, Blueprint, Guest};

#[test]
fn a_kernel_of_every_kind_is_found_with_all_its_symbols() {
    for blueprint in every_kind() {
        let guest = Guest::new(&blueprint);
        let kernel = guest.kernel();
        assert_eq!(kernel.image().range, blueprint.base..guest.symbol("_end"), "{blueprint:?}");
        assert_eq!(kernel.image().phys, blueprint.phys);
        assert_eq!(kernel.kaslr_offset(), 0x1940_0000);
        assert_eq!(kernel.banner(), BANNER_LINE);
        assert_eq!(kernel.release(), "6.9.42-synthetic");
        assert_eq!(kernel.version(), Some((6, 9)));
        let decoded = kernel.symbols().iter();
        assert_eq!(decoded.len(), guest.symbols.len());
        for (decoded, written) in decoded.zip(&guest.symbols) {
            assert_eq!(
                (decoded.address.0, decoded.kind, decoded.name),
                (written.address, written.kind, written.name.as_str()),
                "{blueprint:?}"
            );
        }
    }
}

#[test]
fn the_kernels_own_root_is_used_and_not_the_processes() {
    for blueprint in every_kind() {
        let guest = Guest::new(&blueprint);
        let kernel = guest.kernel();
        assert_eq!(kernel.root().root, guest.physical(guest.symbol("init_top_pgt")));
        // The process ends and its root table is used for something else.
        guest.ram.write_slice(&[0xa5; 0x2000], Gpa(0x10_0000).into()).unwrap();
        let records = guest.record_groups[0].records;
        assert_eq!(kernel.translate(&guest.ram, records), Ok(guest.physical(records)));
        assert!(kernel.is_current(&guest.ram));
    }
}

#[test]
fn an_older_kernel_that_lies_in_memory_is_not_taken_for_the_one_that_runs() {
    let running = guest();
    let older = Guest::new(&Blueprint {
        base: Gva(0xffff_ffff_8520_0000),
        phys: Gpa(0x180_0000),
        ..Blueprint::default()
    });
    let image = older.peek(older.blueprint().base, 4 << 20);
    running.ram.write_slice(&image, Gpa(0x180_0000).into()).unwrap();
    assert_eq!(running.kernel().image().range.start, running.blueprint().base);
}

#[test]
fn a_kernel_that_was_replaced_is_not_current_any_more() {
    let guest = guest();
    let kernel = guest.kernel();
    assert!(kernel.is_current(&guest.ram));
    guest.poke(guest.symbol("linux_banner"), b"Linux version 7");
    assert!(!kernel.is_current(&guest.ram));
    guest.poke(guest.symbol("linux_banner"), BANNER_LINE.as_bytes());
    assert!(kernel.is_current(&guest.ram));
    guest.poke(guest.image_directory(), &[0; 4096]);
    assert!(!kernel.is_current(&guest.ram));
}

#[test]
fn a_vcpu_that_was_reset_does_not_run_the_kernel_that_is_still_there() {
    for blueprint in every_kind() {
        let guest = Guest::new(&blueprint);
        let kernel = guest.kernel();
        assert!(guest.registers.iter().all(|vcpu| kernel.is_run_by(&guest.ram, vcpu)));
        let reset = Registers::X86_64(X86Registers { cr0: 0x6000_0010, ..Default::default() });
        assert!(!kernel.is_run_by(&guest.ram, &reset));
        assert!(kernel.is_current(&guest.ram));
    }
}

fn not_yet(guest: &Guest, registers: &[Registers]) -> NotYet {
    match locate(&guest.ram, registers) {
        Ok(Located::NotYet(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_guest_that_has_not_reached_its_kernel_says_how_far_it_is() {
    let guest = guest();
    let Registers::X86_64(running) = guest.registers[0] else { panic!("an x86_64 guest") };
    let real = Registers::X86_64(X86Registers { cr0: 0x10, ..X86Registers::default() });
    let compatible = Registers::X86_64(X86Registers { efer: 0, ..running });
    // Firmware that maps low memory only.
    let identity = Registers::X86_64(X86Registers { cr3: 0x50_0000, ..running });
    let missing = Registers::X86_64(X86Registers { cr3: 0xff_ffff_f000, ..running });

    assert_eq!(not_yet(&guest, &[]), NotYet::NoVcpus);
    assert_eq!(not_yet(&guest, &[real]), NotYet::Unpaged(Unpaged::PagingOff));
    assert_eq!(not_yet(&guest, &[compatible]), NotYet::Unpaged(Unpaged::Not64Bit));
    assert!(matches!(not_yet(&guest, &[identity]), NotYet::NoImage(_)));
    assert!(matches!(not_yet(&guest, &[missing]), NotYet::NoImage(_)));
    // Of several, the one that came farthest.
    assert!(matches!(not_yet(&guest, &[real, identity, compatible]), NotYet::NoImage(_)));
}

#[test]
fn one_vcpu_that_runs_the_kernel_is_enough() {
    let guest = guest();
    let parked = Registers::X86_64(X86Registers::default());
    let found = locate(&guest.ram, &[parked, guest.registers[1]]).unwrap();
    assert!(matches!(found, Located::Found(_)));
}

#[test]
fn a_kernel_that_has_not_built_its_own_tables_is_not_ready() {
    let guest = guest();
    guest.poke(guest.symbol("init_top_pgt"), &[0; 4096]);
    assert_eq!(not_yet(&guest, &guest.registers), NotYet::NoRoot);
}

fn error(guest: &Guest) -> LocateError {
    locate(&guest.ram, &guest.registers).map(|found| panic!("{found:?}")).unwrap_err()
}

#[test]
fn a_kernel_without_symbols_is_an_error_that_says_so() {
    let guest = guest();
    guest.poke(guest.kallsyms.start, &vec![0; 0x17_0000]);
    let error = error(&guest);
    assert!(
        matches!(&error, LocateError::Symbols { source: KallsymsError::NoTokens, .. }),
        "{error:?}"
    );
    assert_eq!(
        error.to_string(),
        "the symbols of the kernel at 0xffffffff9a400000 cannot be read: no kallsyms token table \
         in the image: is the kernel built with CONFIG_KALLSYMS?"
    );
}

#[test]
fn symbols_of_a_kernel_at_another_place_are_not_believed() {
    let moved = Guest::new(&Blueprint { base: Gva(0xffff_ffff_9a60_0000), ..Blueprint::default() });
    let guest = guest();
    let symbols = moved.peek(moved.kallsyms.start, 0x17_0000);
    guest.poke(guest.kallsyms.start, &symbols);
    assert!(matches!(
        error(&guest),
        LocateError::Symbols {
            source: KallsymsError::OtherKernel { .. } | KallsymsError::Incomplete { .. },
            ..
        }
    ));
}

#[test]
fn virtual_memory_is_read_across_pages_and_refused_where_there_is_none() {
    let guest = guest();
    let kernel: Kernel = guest.kernel();
    let records = guest.record_groups[0].records;
    guest.poke(records + 4090, b"twelve bytes");
    let mut bytes = [0; 12];
    kernel.read_virt(&guest.ram, records + 4090, &mut bytes).unwrap();
    assert_eq!(&bytes, b"twelve bytes");
    for nowhere in
        [Gva(0), Gva(0xdead_beef_0000_0000), Gva(u64::MAX - 4), Gva(0xffff_ffff_c000_0000)]
    {
        assert!(kernel.read_virt(&guest.ram, nowhere, &mut bytes).is_err(), "{nowhere}");
    }
}
