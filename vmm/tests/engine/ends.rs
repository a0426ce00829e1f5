//! How bare guests end, and what is said about it.

use std::time::Duration;

use crate::toys::{CODE, COUNT, HALT, PATIENCE, console, hardware, run, wait_for_progress};
use patcher::machine::Machine;
use patcher::region::Part;
use vmm::kvm::{BareGuest, Extension, GuestExit, KvmKind, Vm, probe};

/// `mov $port, %dx; mov $value, %al; out %al, %dx; jmp .`
fn write_once(port: u16, value: u8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xb0, value, 0xee, 0xeb, 0xfe]
}

#[test]
fn power_off_and_both_resets_end_the_guest_as_what_they_are() {
    for (port, value, exit) in [
        (0x600, 0x34, GuestExit::PowerOff),
        (0x602, 0x01, GuestExit::Reboot),
        (0x064, 0xfe, GuestExit::Reboot),
    ] {
        let vm = run(2, BareGuest::new(&write_once(port, value)));
        assert_eq!(vm.wait(Some(PATIENCE)), Some(exit.clone()), "port {port:#x}");
        assert_eq!(vm.exit(), Some(exit));
    }
}

#[test]
fn a_triple_fault_is_reported_with_the_place() {
    // Reads where nothing is mapped, without an interrupt table: no handler for the page fault,
    // none for the double fault.
    //  0  90                        nop
    //  1  48 8b 04 25 000000d0      mov 0xffffffffd0000000, %rax
    let vm = run(1, BareGuest::new(&[0x90, 0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0xd0]));
    let exit = vm.wait(Some(PATIENCE)).unwrap();
    let GuestExit::TripleFault { vcpu: 0, registers } = &exit else { panic!("{exit}") };
    // AMD's CPUs lose the registers; everywhere else the place is known.
    let lost = probe() == KvmKind::Hardware(Extension::Svm);
    let place = registers.as_ref().map(|registers| registers.rip);
    assert_eq!(place, (!lost).then_some(CODE + 1), "{exit}");
    assert!(!exit.is_orderly());
}

#[test]
fn a_guest_that_halts_for_ever_is_waited_for_and_killed() {
    let vm = run(2, BareGuest::new(HALT));
    assert_eq!(vm.wait(Some(Duration::from_millis(50))), None);
    vm.kill();
    assert_eq!(vm.wait(Some(PATIENCE)), Some(GuestExit::Killed));
}

#[test]
fn a_guest_that_was_never_started_can_be_killed_and_dropped() {
    let vm = Vm::bare(&hardware(2), BareGuest::new(COUNT), console());
    let vm = vm.unwrap();
    assert_eq!(vm.exit(), None);
    vm.kill();
    vm.kill();
    assert_eq!(vm.wait(Some(PATIENCE)), Some(GuestExit::Killed));
}

#[test]
fn the_region_is_readable_to_the_guest_and_its_data_and_rings_writable() {
    // Adds a byte of the code part and one of the constants, and puts the sum into the data and the
    // rings, then counts.
    //  0  48 b8 imm64   mov $0x100000000, %rax
    // 10  8a 18         mov (%rax), %bl
    // 12  48 05 imm32   add $0x200000, %rax
    // 18  02 18         add (%rax), %bl
    // 20  48 05 imm32   add $0x200000, %rax
    // 26  88 18         mov %bl, (%rax)
    // 28  48 05 imm32   add $0x200000, %rax
    // 34  88 18         mov %bl, (%rax)
    // 36  COUNT
    const NEXT_PART: [u8; 6] = [0x48, 0x05, 0, 0, 0x20, 0];
    let code = [
        &[0x48, 0xb8, 0, 0, 0, 0, 1, 0, 0, 0, 0x8a, 0x18][..],
        &NEXT_PART,
        &[0x02, 0x18],
        &NEXT_PART,
        &[0x88, 0x18],
        &NEXT_PART,
        &[0x88, 0x18],
        COUNT,
    ]
    .concat();
    let vm = Vm::bare(&hardware(1), BareGuest::new(&code), console());
    let vm = vm.unwrap();
    vm.region(Part::Code).memory.copy_from(&[0x5au8]);
    vm.region(Part::Constants).memory.copy_from(&[1u8]);
    vm.start();
    wait_for_progress(&vm, 0);
    for part in [Part::Data, Part::Rings] {
        let mut byte = [0u8];
        vm.region(part).memory.copy_to(&mut byte);
        assert_eq!(byte, [0x5b], "{part}");
    }
    assert_eq!(vm.refused_writes(), 0);
    assert!(vm.clock_hz() > 100_000_000, "{} Hz", vm.clock_hz());
}

#[test]
fn what_the_guest_writes_to_code_and_constants_does_not_get_there() {
    // Through page tables of its own that would let it.
    //  0  48 b8 imm64   mov $part, %rax
    // 10  c6 00 5a      movb $0x5a, (%rax)
    // 13  COUNT
    for (part, third_byte) in [(Part::Code, 0), (Part::Constants, 0x20)] {
        let store = [0x48, 0xb8, 0, 0, third_byte, 0, 1, 0, 0, 0, 0xc6, 0, 0x5a];
        let vm = Vm::bare(&hardware(1), BareGuest::new(&[&store, COUNT].concat()), console());
        let vm = vm.unwrap();
        vm.start();
        wait_for_progress(&vm, 0);
        assert_eq!(vm.refused_writes(), 1, "{part}");
        let mut byte = [1u8];
        vm.region(part).memory.copy_to(&mut byte);
        assert_eq!(byte, [0], "{part}");
    }
}
