//! Trapped calls of bare guests on this host's KVM.

use std::sync::Arc;

use crate::toys::{CODE, count, run, wait_for_progress, wait_until};
use patcher::addr::{Gpa, Gva};
use patcher::arch::x86_64::TRAP_PORT;
use patcher::arch::{ByteOrder, PidPlace, TaskPlaces};
use patcher::machine::{Machine, Stopped, TextWrite};
use patcher::region::{Part, RingLayout, Trap, Traps};
use patcher::trace::ring::RingReader;
use vmm::kvm::BareGuest;

/// Calls a function with a pad and counts, for ever.
///
/// ```text
///  0  e8 0b 00 00 00         call 16
///  5  48 ff 04 fd 00002000   incq 0x200000(,%rdi,8)
/// 13  eb f1                  jmp 0
/// 15  90                     nop
/// 16  0f 1f 44 00 00         nop
/// 21  c3                     ret
/// ```
const CALL: &[u8] = &[
    0xe8, 0x0b, 0, 0, 0, 0x48, 0xff, 0x04, 0xfd, 0, 0, 0x20, 0, 0xeb, 0xf1, 0x90, 0x0f, 0x1f, 0x44,
    0, 0, 0xc3,
];
const PAD: u64 = CODE + 16;

/// What a kernel keeps of its current task, at [`TASK`]: the task's address, how often preemption was
/// disabled, and, in the task, its number.
const TASK: u64 = 0x20_8000;
const PREEMPT_COUNT: u32 = 3;
const PID: u32 = 77;
const PLACES: TaskPlaces = TaskPlaces {
    pid: Some(PidPlace::InTask { current: TASK as i32, pid: 24 }),
    preempt_count: Some(TASK as i32 + 8),
};

fn task() -> Vec<u8> {
    let mut task = [TASK + 64, PREEMPT_COUNT.into()].map(u64::to_le_bytes).concat();
    task.resize(64 + 24, 0);
    task.extend_from_slice(&PID.to_le_bytes());
    task.resize(128, 0);
    task
}

#[test]
fn each_trapped_call_is_one_record_on_its_vcpu() {
    let vm = run(2, BareGuest::new(CALL).with_memory(Gpa(TASK), &task()));
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
    let window = vm.region(Part::Rings);
    let rings = RingLayout::new(Gva(0), window.memory.len() as u64, 2).unwrap();
    let reader = |cpu| RingReader::new(&window.memory, rings, cpu, ByteOrder::Little).unwrap();
    let mut readers = [0, 1].map(reader);
    let trap = Trap { at: Gva(PAD), ip: Gva(PAD + 5), resume: Gva(PAD + 5) };
    let write = |stopped: &mut dyn Stopped, bytes: [u8; 2]| {
        stopped.write_text(&[TextWrite { at: Gpa(PAD), bytes: &bytes }]).unwrap();
    };
    // Whether a vCPU that stands has been counted for its last call is told by where it stands.
    let calls = |stopped: &mut dyn Stopped| {
        [0, 1].map(|vcpu| {
            let within = matches!(stopped.registers(vcpu).unwrap().pc() - CODE, 5 | 21);
            count(&vm, vcpu) + u64::from(within)
        })
    };
    for round in 1..=3 {
        vm.set_traps(Arc::new(Traps::new([trap], rings, PLACES))).unwrap();
        let mut stopped = vm.stop().unwrap();
        write(&mut *stopped, [0xe6, TRAP_PORT as u8]);
        let before = calls(&mut *stopped);
        stopped.resume().unwrap();
        wait_until(|| {
            vm.exit().is_some() || (0..2).all(|vcpu| count(&vm, vcpu) > before[vcpu] + 50 * round)
        });
        assert_eq!(vm.exit(), None);
        let mut stopped = vm.stop().unwrap();
        write(&mut *stopped, [0x0f, 0x1f]);
        let after = calls(&mut *stopped);
        stopped.resume().unwrap();
        vm.set_traps(Arc::default()).unwrap();
        (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));

        for vcpu in 0..2 {
            let mut records = Vec::new();
            readers[vcpu].look(&window.memory);
            while !readers[vcpu].read(&window.memory, &mut records, 1000) {}
            assert_eq!(records.len() as u64, after[vcpu] - before[vcpu], "vCPU {vcpu}");
            assert!(records.is_sorted_by_key(|record| record.time), "time goes backwards");
            for record in &records {
                let parent = u64::from(record.parent as u32);
                assert_eq!((u64::from(record.ip), parent), (PAD + 5, CODE + 5));
                // The flags, of which this one is always set.
                assert_eq!(record.parent >> 32 & 2, 2, "{record:?}");
                assert_eq!(record.task, [PID, PREEMPT_COUNT]);
            }
        }
    }
}
