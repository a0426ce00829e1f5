//! The trampoline's contract, checked on the processor that runs this test.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

use std::arch::asm;

use benches::native::{COUNT, FIRST_PID, NativeGuest, Pad};
use patcher::arch::x86_64::X86_64;
use patcher::arch::{Arch, ByteOrder, TaskWords};
use patcher::trace::ring::RingReader;

/// Everything that a call may see or change.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
struct State {
    registers: [u64; 15],
    flags: u64,
}

/// Flags that arithmetic sets: CF, PF, AF, ZF, SF, OF.
const ARITHMETIC: u64 = 0x8d5;

/// Calls `address` with every register and flag as in `before` and tells what they are afterwards.
fn call_with(address: u64, before: &State) -> State {
    let mut after = State { registers: [0; 15], flags: 0 };
    // Registers in the order rax rcx rdx rbx rbp rsi rdi r8..r15; rsp is compared by the code's
    // getting back at all.
    // SAFETY: saves what the compiler may not be told is clobbered (rbx, rbp), calls a function that
    // is being tested to preserve everything, and stores within `after`.
    unsafe {
        asm!(
            "sub rsp, 128", // past the red zone
            "push rbx",
            "push rbp",
            "push rsi",
            "push rdx",
            "push qword ptr [rdi + 120]",
            "mov r15, rdi",
            "mov rax, [r15]",
            "mov rcx, [r15 + 8]",
            "mov rdx, [r15 + 16]",
            "mov rbx, [r15 + 24]",
            "mov rbp, [r15 + 32]",
            "mov rsi, [r15 + 40]",
            "mov rdi, [r15 + 48]",
            "mov r8,  [r15 + 56]",
            "mov r9,  [r15 + 64]",
            "mov r10, [r15 + 72]",
            "mov r11, [r15 + 80]",
            "mov r12, [r15 + 88]",
            "mov r13, [r15 + 96]",
            "mov r14, [r15 + 104]",
            "mov r15, [r15 + 112]",
            "popfq",
            "call [rsp]",
            "pushfq",
            "push r15",
            "mov r15, [rsp + 24]",
            "mov [r15], rax",
            "mov [r15 + 8], rcx",
            "mov [r15 + 16], rdx",
            "mov [r15 + 24], rbx",
            "mov [r15 + 32], rbp",
            "mov [r15 + 40], rsi",
            "mov [r15 + 48], rdi",
            "mov [r15 + 56], r8",
            "mov [r15 + 64], r9",
            "mov [r15 + 72], r10",
            "mov [r15 + 80], r11",
            "mov [r15 + 88], r12",
            "mov [r15 + 96], r13",
            "mov [r15 + 104], r14",
            "pop rax",
            "mov [r15 + 112], rax",
            "pop rax",
            "mov [r15 + 120], rax",
            "add rsp, 16",
            "pop rbp",
            "pop rbx",
            "add rsp, 128",
            inout("rdi") before => _,
            inout("rsi") &mut after => _,
            inout("rdx") address => _,
            out("rax") _, out("rcx") _,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            out("r12") _, out("r13") _, out("r14") _, out("r15") _,
        );
    }
    after
}

#[test]
fn every_register_and_flag_is_as_it_was() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    let mut calls = 0;
    let mut reader =
        RingReader::new(&guest.rings().memory, guest.layout(), 0, ByteOrder::Little).unwrap();
    for bits in 0..64_u64 {
        // Every combination of the six arithmetic flags; the rest (IF and the fixed bit) as usual.
        let mut flags = 0x202;
        for (bit, flag) in [0, 2, 4, 6, 7, 11].into_iter().enumerate() {
            flags |= (bits >> bit & 1) << flag;
        }
        let registers =
            std::array::from_fn(|i| 0x0123_4567_89ab_cdef_u64.rotate_left(i as u32 * 4) ^ bits);
        let before = State { registers, flags };
        let after = call_with(guest.address(Pad::Armed), &before);
        assert_eq!(after.registers, before.registers);
        assert_eq!(after.flags & ARITHMETIC, before.flags & ARITHMETIC, "flags {flags:#x}");
        calls += 1;
    }
    let mut records = Vec::new();
    reader.look(&guest.rings().memory);
    assert!(reader.read(&guest.rings().memory, &mut records, usize::MAX));
    assert_eq!(records.len(), calls);
    assert!(records.windows(2).all(|pair| pair[0].time < pair[1].time));
    let behind_pad = guest.address(Pad::Armed) as u32 + 5;
    assert!(records.iter().all(|record| record.ip == behind_pad && record.cpu == 0));
    // A process runs with interrupts on.
    let told = TaskWords { pid: FIRST_PID, irqs_off: false, preempt_count: COUNT };
    assert!(records.iter().all(|record| {
        let [task, count] = record.task;
        X86_64.task_words([(record.parent >> 32) as u32, task, count]) == told
    }));
    let caller = records[0].parent as u32;
    assert!(records.iter().all(|record| record.parent as u32 == caller));
}

#[test]
fn an_idle_pad_records_nothing() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    let mut reader =
        RingReader::new(&guest.rings().memory, guest.layout(), 0, ByteOrder::Little).unwrap();
    guest.function(Pad::Bare)();
    guest.function(Pad::Idle)();
    reader.look(&guest.rings().memory);
    let mut records = Vec::new();
    assert!(reader.read(&guest.rings().memory, &mut records, usize::MAX));
    assert_eq!(records, []);
}
