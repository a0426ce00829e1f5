//! The trampoline's contract, checked on the processor that runs this test.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

use std::arch::asm;
use std::thread;

use benches::native::{COUNT, COUNTER, FIRST_PID, HISTOGRAM, NativeGuest, Pad, TURNED_AWAY};
use patcher::arch::x86_64::X86_64;
use patcher::arch::{Arch, ByteOrder, TaskWords};
use patcher::region::{
    HISTOGRAMS, Histogram, RETURN_POOL_OFFSET, RETURN_SLOTS, ReturnPoolMemory, read_counters,
};
use patcher::trace::ring::{RawRecord, RingReader};
use vm_memory::Bytes;

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

/// Calls the function with that pad with every combination of the six arithmetic flags, and checks that
/// all that it changes is the stack. Tells how often.
fn call_with_every_flag(guest: &NativeGuest, pad: Pad) -> usize {
    for bits in 0..64_u64 {
        // The rest (IF and the fixed bit) as usual.
        let mut flags = 0x202;
        for (bit, flag) in [0, 2, 4, 6, 7, 11].into_iter().enumerate() {
            flags |= (bits >> bit & 1) << flag;
        }
        let registers =
            std::array::from_fn(|i| 0x0123_4567_89ab_cdef_u64.rotate_left(i as u32 * 4) ^ bits);
        let before = State { registers, flags };
        let after = call_with(guest.address(pad), &before);
        assert_eq!(after.registers, before.registers, "{pad:?}");
        assert_eq!(after.flags & ARITHMETIC, before.flags & ARITHMETIC, "{pad:?} flags {flags:#x}");
    }
    64
}

/// What was recorded since the reader was made.
fn records(guest: &NativeGuest, reader: &mut RingReader) -> Vec<RawRecord> {
    let mut records = Vec::new();
    reader.look(&guest.rings().memory);
    assert!(reader.read(&guest.rings().memory, &mut records, usize::MAX));
    records
}

fn reader(guest: &NativeGuest, cpu: usize) -> RingReader {
    RingReader::new(&guest.rings().memory, guest.layout(), cpu, ByteOrder::Little).unwrap()
}

/// How many slots hold a call that has not returned.
fn outstanding(guest: &NativeGuest) -> usize {
    let pool = ReturnPoolMemory::new(&guest.data().memory, ByteOrder::Little).unwrap();
    (0..RETURN_SLOTS).filter(|index| pool.slot(*index).placed).count()
}

fn behind(guest: &NativeGuest, pad: Pad) -> u32 {
    guest.address(pad) as u32 + 5
}

/// What the counters are up to the one behind that of the function that is counted.
fn counts(guest: &NativeGuest) -> Vec<u64> {
    read_counters(&guest.data().memory, ByteOrder::Little, COUNTER + 2).unwrap()
}

#[test]
fn a_call_that_is_counted_changes_nothing_else_and_is_recorded_as_well() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    let mut reader = reader(&guest, 0);
    let calls = call_with_every_flag(&guest, Pad::Counted);
    assert_eq!(counts(&guest), [0, 0, calls as u64, 0]);
    let records = records(&guest, &mut reader);
    assert_eq!(records.len(), calls);
    let behind_pad = behind(&guest, Pad::Counted);
    assert!(records.iter().all(|record| record.ip == behind_pad));
}

/// What the counter is of the calls that were turned away.
fn turned_away(guest: &NativeGuest) -> u64 {
    let memory = guest.data().memory;
    read_counters(&memory, ByteOrder::Little, TURNED_AWAY + 1).unwrap()[TURNED_AWAY as usize]
}

#[test]
fn a_gate_changes_nothing_whether_a_call_is_let_through_or_turned_away() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    let mut reader = reader(&guest, 0);
    let calls = call_with_every_flag(&guest, Pad::Gated);
    let records = records(&guest, &mut reader);
    assert_eq!(records.len(), calls / 2);
    assert_eq!(turned_away(&guest), calls as u64 / 2);
    let behind_pad = behind(&guest, Pad::Gated);
    assert!(records.iter().all(|record| record.ip == behind_pad));
}

#[test]
fn one_call_in_two_is_one_in_two_of_all_threads() {
    const THREADS: usize = 4;
    const CALLS: u64 = 100_000;
    let guest = NativeGuest::with_cpus(THREADS, 4 << 20, false, true).unwrap();
    let mut readers: Vec<_> = (0..THREADS).map(|cpu| reader(&guest, cpu)).collect();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (cpu, function) = (guest.cpu(number), guest.function(Pad::Gated));
            scope.spawn(move || {
                cpu.enlist().unwrap();
                (0..CALLS).for_each(|_| function());
            });
        }
    });
    let recorded: usize = readers.iter_mut().map(|reader| records(&guest, reader).len()).sum();
    assert_eq!(recorded as u64, THREADS as u64 * CALLS / 2);
    assert_eq!(turned_away(&guest), THREADS as u64 * CALLS / 2);
}

#[test]
fn a_call_whose_arguments_are_recorded_changes_nothing_and_they_are_what_it_was_given() {
    // The smallest ring, so that records go over its end.
    let guest = NativeGuest::new(4096, true).unwrap();
    let mut reader = reader(&guest, 0);
    for bits in 0..300_u64 {
        let registers = std::array::from_fn(|i| {
            0x0123_4567_89ab_cdef_u64.rotate_left(i as u32 * 4) ^ bits.rotate_left(i as u32 * 9)
        });
        let before = State { registers, flags: 0x202 };
        let after = call_with(guest.address(Pad::Arguments), &before);
        assert_eq!(after.registers, before.registers);
        assert_eq!(after.flags & ARITHMETIC, before.flags & ARITHMETIC);
        let records = records(&guest, &mut reader);
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].ip, behind(&guest, Pad::Arguments));
        let words = records[0].arguments.as_ref().unwrap().words();
        // rdi, rsi, rdx, rcx, r8, r9; then what is on the stack, first the address that was called.
        let [_, rcx, rdx, _, _, rsi, rdi, r8, r9, ..] = registers;
        assert_eq!(words[..6], [rdi, rsi, rdx, rcx, r8, r9]);
        assert_eq!((words[6], words.len()), (guest.address(Pad::Arguments), 9));
        let more: u64 = reader.continuations_read().iter().map(|r| r.end - r.start).sum();
        assert_eq!((more, reader.continuations()), (3, 3 * (bits + 1)));
    }
    assert_eq!((call_with_every_flag(&guest, Pad::Arguments), reader.lost()), (64, 0));
}

#[test]
fn no_count_is_lost_between_threads() {
    const THREADS: usize = 4;
    const CALLS: u64 = 200_000;
    let guest = NativeGuest::with_cpus(THREADS, 1 << 16, false, false).unwrap();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (cpu, function) = (guest.cpu(number), guest.function(Pad::Counted));
            scope.spawn(move || {
                cpu.enlist().unwrap();
                (0..CALLS).for_each(|_| function());
            });
        }
    });
    assert_eq!(counts(&guest), [0, 0, THREADS as u64 * CALLS, 0]);
}

/// What the histogram of the function that is measured holds; all others are empty.
fn measured(guest: &NativeGuest) -> Histogram {
    let mut all = guest.histograms().read(HISTOGRAMS).unwrap();
    let measured = all.remove(usize::from(HISTOGRAM) - 1);
    assert!(all.iter().all(|other| *other == Histogram::default()));
    measured
}

#[test]
fn a_call_that_is_measured_changes_nothing_else_and_is_added_to_its_histogram() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    let mut reader = reader(&guest, 0);
    // A million nanoseconds a tick: 2²⁰ less some.
    guest.histograms().set_clock(1000).unwrap();
    let calls = call_with_every_flag(&guest, Pad::Measured) as u64;
    let histogram = measured(&guest);
    assert_eq!(histogram.calls(), calls);
    assert!(histogram.buckets[..19].iter().all(|calls| *calls == 0), "{histogram:?}");
    let lowest = histogram.buckets.iter().enumerate().map(|(bit, calls)| calls << bit).sum::<u64>();
    assert!((lowest..2 * lowest).contains(&histogram.total_ns), "{histogram:?}");
    assert_eq!(histogram.total_ns % 1_000_000, 0);
    assert_eq!((records(&guest, &mut reader), outstanding(&guest)), (vec![], 0));
}

#[test]
fn a_call_that_returns_before_it_began_took_no_time() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    guest.histograms().set_clock(1_000_000_000).unwrap();
    let calls = call_with_every_flag(&guest, Pad::Rewound) as u64;
    let histogram = measured(&guest);
    assert_eq!((histogram.buckets[0], histogram.calls(), histogram.total_ns), (calls, calls, 0));
}

#[test]
fn nothing_that_is_measured_is_lost_between_threads() {
    const THREADS: usize = 4;
    const CALLS: u64 = 200_000;
    let guest = NativeGuest::with_cpus(THREADS, 1 << 16, false, false).unwrap();
    // A nanosecond a tick.
    guest.histograms().set_clock(1_000_000_000).unwrap();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (cpu, function) = (guest.cpu(number), guest.function(Pad::Measured));
            scope.spawn(move || {
                cpu.enlist().unwrap();
                (0..CALLS).for_each(|_| function());
            });
        }
    });
    let histogram = measured(&guest);
    assert_eq!(histogram.calls(), THREADS as u64 * CALLS);
    let lowest = histogram.buckets.iter().enumerate().map(|(bit, calls)| calls << bit).sum::<u64>();
    assert!((lowest..2 * lowest).contains(&histogram.total_ns), "{histogram:?}");
    assert_eq!(outstanding(&guest), 0);
}

#[test]
fn every_register_and_flag_is_as_it_was() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    let mut reader = reader(&guest, 0);
    let calls = call_with_every_flag(&guest, Pad::Armed);
    let records = records(&guest, &mut reader);
    assert_eq!(records.len(), calls);
    assert!(records.windows(2).all(|pair| pair[0].time < pair[1].time));
    let behind_pad = behind(&guest, Pad::Armed);
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
    let mut reader = reader(&guest, 0);
    guest.function(Pad::Bare)();
    guest.function(Pad::Idle)();
    assert_eq!(records(&guest, &mut reader), []);
}

#[test]
fn a_return_that_is_taken_leaves_every_register_and_flag_and_tells_what_was_returned() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    let mut reader = reader(&guest, 0);
    let calls = call_with_every_flag(&guest, Pad::Returning);
    let records = records(&guest, &mut reader);
    assert_eq!(records.len(), 2 * calls);
    assert!(records.windows(2).all(|pair| pair[0].time < pair[1].time));
    let caller = records[0].parent as u32;
    for (bits, pair) in records.chunks(2).enumerate() {
        let [call, back] = pair else { panic!("{pair:?}") };
        assert_eq!((call.ip, call.parent as u32), (behind(&guest, Pad::Returning), caller));
        assert_eq!((back.ip, back.parent), (call.ip + 1, 0x0123_4567_89ab_cdef ^ bits as u64));
        assert_eq!(back.task, [FIRST_PID, COUNT]);
    }
    assert_eq!(outstanding(&guest), 0);
}

#[test]
fn calls_in_calls_and_jumps_to_other_functions_return_in_their_order() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    let mut reader = reader(&guest, 0);
    for outer in [Pad::Nested, Pad::Tail] {
        let calls = call_with_every_flag(&guest, outer);
        let records = records(&guest, &mut reader);
        let [outer, inner] = [outer, Pad::Returning].map(|pad| behind(&guest, pad));
        assert_eq!(records.len(), 4 * calls);
        for four in records.chunks(4) {
            let order: Vec<u32> = four.iter().map(|record| record.ip).collect();
            assert_eq!(order, [outer, inner, inner + 1, outer + 1]);
        }
    }
    assert_eq!(outstanding(&guest), 0);
}

#[test]
fn without_a_free_slot_a_call_returns_by_itself_and_is_counted() {
    let guest = NativeGuest::new(1 << 20, true).unwrap();
    let pool = ReturnPoolMemory::new(&guest.data().memory, ByteOrder::Little).unwrap();
    // The list for all, and that of this CPU, end here.
    let window = guest.data().memory;
    window.write_obj(0_u64, RETURN_POOL_OFFSET as usize + 0x1000).unwrap();
    let mut reader = reader(&guest, 0);
    let calls = call_with_every_flag(&guest, Pad::Returning);
    let records = records(&guest, &mut reader);
    assert!(records.iter().all(|record| record.ip == behind(&guest, Pad::Returning)));
    assert_eq!((records.len(), pool.missed()), (calls, calls as u64));
}

#[test]
fn two_cpus_take_slots_from_one_list_and_give_all_of_them_back() {
    const CALLS: usize = 200_000;
    let guest = NativeGuest::with_cpus(2, 1 << 25, true, true).unwrap();
    let mut readers = [0, 1].map(|cpu| reader(&guest, cpu));
    let nested = guest.function(Pad::Nested);
    thread::scope(|scope| {
        for cpu in [0, 1] {
            let cpu = guest.cpu(cpu);
            scope.spawn(move || {
                cpu.enlist().unwrap();
                (0..CALLS).for_each(|_| nested());
            });
        }
    });
    let (outer, inner) = (behind(&guest, Pad::Nested), behind(&guest, Pad::Returning));
    for reader in &mut readers {
        let records = records(&guest, reader);
        assert_eq!(records.len(), 4 * CALLS);
        let mut fours = records.chunks(4);
        assert!(fours.all(|four| {
            [outer, inner, inner + 1, outer + 1].into_iter().eq(four.iter().map(|record| record.ip))
        }));
    }
    let pool = ReturnPoolMemory::new(&guest.data().memory, ByteOrder::Little).unwrap();
    assert_eq!((outstanding(&guest), pool.missed()), (0, 0));
    assert_eq!(pool.free(2), RETURN_SLOTS, "every slot is in a list once");
}
