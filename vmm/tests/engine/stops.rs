//! Stops of bare guests on this host's KVM, whichever it is.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::toys::{
    CODE, COUNT, HALT, PATIENCE, PORT, PortWrites, WRITE_PORT, console, count, hardware, run, stop,
    wait_for_progress, wait_until, x86,
};
use patcher::addr::Gpa;
use patcher::machine::{Machine, StopError, Stopped, TextWrite};
use patcher::region::Part;
use vmm::kvm::{BareGuest, GuestExit, Hardware, Vm};

#[test]
fn no_stop_leaves_a_port_access_half_done() {
    const STOPS: usize = 4000;
    let (writes, guest) = PortWrites::watch(2, WRITE_PORT);
    let vm = run(2, guest);
    wait_until(|| count(&vm, 0) > 0 && count(&vm, 1) > 0);
    let mut inside_access = 0;
    for _ in 0..STOPS {
        let mut stopped = vm.stop().unwrap();
        for vcpu in 0..2 {
            let rip = stopped.registers(vcpu).unwrap().pc() - CODE;
            // The port has been written once more than was counted exactly between the two.
            let ahead = writes.of(vcpu) - count(&vm, vcpu);
            match (rip, ahead) {
                (7, 1) => inside_access += 1,
                (6 | 15, 0) => {}
                _ => panic!("vCPU {vcpu} stands at {rip} with {ahead} writes not counted"),
            }
        }
        stopped.resume().unwrap();
    }
    assert!(inside_access > 0, "no stop caught a vCPU at the access");
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
}

#[test]
fn a_vcpu_that_stands_executes_one_instruction_at_a_time_and_the_others_none() {
    let (writes, guest) = PortWrites::watch(2, WRITE_PORT);
    let vm = run(2, guest);
    wait_until(|| count(&vm, 0) > 0 && count(&vm, 1) > 0);
    let mut stopped = vm.stop().unwrap();
    let at = |stopped: &mut dyn Stopped, vcpu| stopped.registers(vcpu).unwrap().pc() - CODE;
    let other = (at(&mut *stopped, 1), count(&vm, 1), writes.of(1));
    let mut before = at(&mut *stopped, 0);
    let (mut counted, mut written) = (count(&vm, 0), writes.of(0));
    for _ in 0..300 {
        stopped.step(0).unwrap();
        let now = at(&mut *stopped, 0);
        match (before, now) {
            (6, 7) => written += 1,
            (7, 15) => counted += 1,
            (15, 6) => {}
            _ => panic!("the vCPU came from {before} to {now}"),
        }
        assert_eq!((count(&vm, 0), writes.of(0)), (counted, written));
        before = now;
    }
    assert_eq!((at(&mut *stopped, 1), count(&vm, 1), writes.of(1)), other);
    assert!(matches!(stopped.step(2), Err(StopError::NoSuchVcpu { vcpu: 2, count: 2 })));
    stopped.resume().unwrap();
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
}

#[test]
fn accesses_that_come_in_pieces_are_completed_before_a_vcpu_stands() {
    // 8 bytes across a page boundary of the read-only part are two accesses for the host:
    //  0  48 b8 imm64          mov $0x100000ffc, %rax
    // 10  48 89 18             mov %rbx, (%rax)
    // 13  48 ff 04 fd disp32   incq 0x200000(,%rdi,8)
    // 21  eb f3                jmp 10
    let code = [
        &[0x48, 0xb8, 0xfc, 0x0f, 0, 0, 1, 0, 0, 0, 0x48, 0x89, 0x18][..],
        &[0x48, 0xff, 0x04, 0xfd, 0, 0, 0x20, 0, 0xeb, 0xf3],
    ]
    .concat();
    let vm = run(1, BareGuest::new(&code));
    assert_eq!(vm.region(Part::Code).gpa, Gpa(0x1_0000_0000));
    wait_for_progress(&vm, 0);
    for _ in 0..2000 {
        let mut stopped = vm.stop().unwrap();
        let rip = stopped.registers(0).unwrap().pc() - CODE;
        let ahead = vm.refused_writes() - 2 * count(&vm, 0);
        match (rip, ahead) {
            (13, 2) | (10 | 21, 0) => {}
            _ => panic!("the vCPU stands at {rip} with {ahead} pieces not counted"),
        }
    }
    let mut first = [1; 4096];
    vm.region(Part::Code).memory.copy_to(&mut first);
    assert_eq!(first, [0; 4096], "what the guest wrote has not got there");
}

#[test]
fn kicks_are_not_lost_however_they_fall() {
    let (_, guest) = PortWrites::watch(2, WRITE_PORT);
    let vm = run(2, guest);
    let mut delay = 1u32;
    for _ in 0..10_000 {
        // Kicks fall everywhere between two exits, also while a vCPU leaves the stop before.
        delay = delay.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (0..delay >> 22).for_each(|_| std::hint::spin_loop());
        stop(&vm).resume().unwrap();
    }
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
}

#[test]
fn text_written_in_a_stop_is_what_runs_afterwards() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&seen);
    // As WRITE_PORT, but the value is loaded each time: jmp 0 at 15.
    let mut code = WRITE_PORT.to_vec();
    code[16] = 0xef;
    let guest = BareGuest::new(&code).on_port_write(move |write| {
        let mut seen = record.lock().unwrap();
        if seen.last() != Some(&write.data[0]) {
            seen.push(write.data[0]);
        }
    });
    let vm = run(1, guest);
    for value in 0..200u8 {
        let mut stopped = vm.stop().unwrap();
        let before = count(&vm, 0);
        stopped.write_text(&[TextWrite { at: Gpa(CODE + 1), bytes: &[value] }]).unwrap();
        stopped.resume().unwrap();
        // One write may have been on its way with the old value; the next is new.
        wait_until(|| count(&vm, 0) > before + 2);
        assert_eq!(seen.lock().unwrap().last(), Some(&value));
    }
}

#[test]
fn text_outside_ram_is_refused_and_what_came_before_is_written() {
    let vm = run(1, BareGuest::new(HALT));
    let mut stopped = vm.stop().unwrap();
    let in_ram = TextWrite { at: Gpa(0x30_0000), bytes: b"new" };
    let (constants, rings) = (vm.region(Part::Constants), vm.region(Part::Rings));
    for beyond in [Gpa(4 << 20), constants.gpa, rings.gpa, Gpa(u64::MAX - 1)] {
        let outside = TextWrite { at: beyond, bytes: b"text" };
        let error = stopped.write_text(&[in_ram, outside]).unwrap_err();
        assert_eq!((error.index, error.at), (1, beyond));
    }
    assert_eq!(vm.ram().array(in_ram.at), Ok(*b"new"));

    // The region's code is text as well, to its end.
    let code = vm.region(Part::Code);
    let last = code.gpa + (code.memory.len() as u64 - 4);
    stopped.write_text(&[TextWrite { at: last, bytes: b"last" }]).unwrap();
    let over = stopped.write_text(&[TextWrite { at: last, bytes: b"beyond" }]).unwrap_err();
    assert_eq!(over.at, last);
    let mut read = [0; 4];
    code.memory.offset(code.memory.len() - 4).unwrap().copy_to(&mut read);
    assert_eq!(&read, b"last");
}

#[test]
fn halted_and_waiting_vcpus_stop_like_others() {
    for guest in [BareGuest::new(HALT), BareGuest::new(COUNT).with_waiting_processors()] {
        let vm = run(3, guest);
        for _ in 0..500 {
            vm.stop().unwrap().resume().unwrap();
        }
        assert_eq!(vm.exit(), None);
    }
    let vm = run(1, BareGuest::new(HALT));
    wait_until(|| vm.sample(0).unwrap().pc() == CODE + 1);
}

#[test]
fn a_stop_that_one_vcpu_does_not_answer_names_it_and_lets_the_others_run() {
    let (release, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let inside = Arc::new(AtomicBool::new(false));
    let entered = Arc::clone(&inside);
    // vCPU 1 gets stuck in the host, answering its port.
    let guest = BareGuest::new(WRITE_PORT).on_port_write(move |write| {
        if write.vcpu == 1 {
            entered.store(true, Ordering::SeqCst);
            let _ = gate.lock().unwrap().recv();
        }
    });
    let deadline = Duration::from_millis(50);
    let hardware = Hardware { stop_deadline: deadline, ..hardware(3) };
    let vm = Vm::bare(&hardware, guest, console()).unwrap();
    vm.start();
    wait_until(|| inside.load(Ordering::SeqCst));
    for _ in 0..3 {
        match vm.stop().map(drop) {
            Err(StopError::Silent { vcpu: Some(1), waited }) => assert!(waited >= deadline),
            other => panic!("{other:?}"),
        }
        wait_for_progress(&vm, 0);
        wait_for_progress(&vm, 2);
    }
    // The others can be looked at meanwhile.
    assert!(vm.sample(0).is_ok() && vm.sample(2).is_ok());
    assert!(matches!(vm.sample(1), Err(StopError::Silent { vcpu: Some(1), .. })));
    drop(release);
    wait_for_progress(&vm, 1);
    wait_until(|| vm.stop().is_ok());
}

#[test]
fn sampling_takes_one_vcpu_out_and_leaves_the_others_alone() {
    let (_, guest) = PortWrites::watch(2, WRITE_PORT);
    let vm = run(2, guest);
    for _ in 0..500 {
        let registers = x86(vm.sample(0).unwrap());
        assert!((CODE..=CODE + 15).contains(&registers.rip), "{registers:x?}");
        assert_eq!(registers.cs, 0x10);
        assert_ne!(registers.cr0 & 1 << 31, 0, "paging is on");
        assert_eq!(registers.efer & 0x500, 0x500, "long mode is on");
    }
    let count = vm.vcpus();
    assert!(matches!(vm.sample(2), Err(StopError::NoSuchVcpu { vcpu: 2, count: c }) if c == count));
    wait_for_progress(&vm, 1);
}

#[test]
fn a_panic_in_a_stop_resumes_the_guest() {
    let vm = run(2, BareGuest::new(COUNT));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _stopped = vm.stop().unwrap();
        panic!("on purpose");
    }));
    assert!(panicked.is_err());
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
    vm.stop().unwrap().resume().unwrap();
}

#[test]
fn kicks_arrive_in_a_process_that_blocks_signals() {
    // On a thread of its own: the mask is the thread's, and is inherited by the vCPUs'.
    let builder = std::thread::spawn(|| {
        vmm_sys_util::signal::block_signal(vmm_sys_util::signal::SIGRTMIN()).unwrap();
        run(2, BareGuest::new(COUNT))
    });
    let vm = builder.join().unwrap();
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
    vm.stop().unwrap().resume().unwrap();
}

#[test]
fn nothing_runs_while_the_guest_is_stopped() {
    let vm = run(2, BareGuest::new(COUNT));
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
    let stopped = vm.stop().unwrap();
    let counts = [0, 1].map(|vcpu| count(&vm, vcpu));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!([0, 1].map(|vcpu| count(&vm, vcpu)), counts);
    let times = stopped.resume().unwrap();
    assert!(times.held >= Duration::from_millis(100), "{times:?}");
    assert!(times.quiesce < PATIENCE && times.resume < PATIENCE, "{times:?}");
}

#[test]
fn a_guest_that_was_not_started_can_be_stopped_and_stays_where_it_is() {
    let vm = Vm::bare(&hardware(2), BareGuest::new(COUNT), console()).unwrap();
    for _ in 0..200 {
        let mut stopped = vm.stop().unwrap();
        let registers = [0, 1].map(|vcpu| stopped.registers(vcpu).unwrap().pc());
        assert_eq!(registers, [CODE, CODE]);
        assert!(matches!(stopped.registers(2), Err(StopError::NoSuchVcpu { .. })));
        stopped.resume().unwrap();
    }
    assert_eq!([0, 1].map(|vcpu| count(&vm, vcpu)), [0, 0]);
    vm.start();
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
}

#[test]
fn who_stops_twice_is_told_and_others_wait_for_their_turn() {
    let vm = run(2, BareGuest::new(COUNT));
    let stopped = vm.stop().unwrap();
    assert!(matches!(vm.stop().map(drop), Err(StopError::AlreadyStopped)));
    assert!(matches!(vm.sample(0), Err(StopError::AlreadyStopped)));
    drop(stopped);

    let holders = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..300 {
                    let stopped = vm.stop().unwrap();
                    assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                    holders.fetch_sub(1, Ordering::SeqCst);
                    drop(stopped);
                }
            });
        }
    });
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
}

#[test]
fn a_guest_that_ends_during_a_storm_of_stops_ends_and_then_is_gone() {
    // As WRITE_PORT, then after so many writes on vCPU 0 the power goes off.
    for writes in [0u8, 1, 7, 40] {
        //  0  b9 imm32        mov $writes + 1, %ecx
        //  5  66 ba 00 10     mov $0x1000, %dx
        //  9  ee              out %al, %dx
        // 10  e2 fd           loop 9
        // 12  66 ba 00 06     mov $0x600, %dx
        // 16  b0 34           mov $0x34, %al
        // 18  ee              out %al, %dx
        // 19  eb fe           jmp .
        let code = [
            &[0xb9, writes + 1, 0, 0, 0, 0x66, 0xba, 0x00, 0x10, 0xee, 0xe2, 0xfd][..],
            &[0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe],
        ]
        .concat();
        let vm = run(2, BareGuest::new(&code));
        let error = loop {
            match vm.stop().and_then(|stopped| stopped.resume()) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(error, StopError::Gone), "{error}");
        assert_eq!(vm.wait(Some(PATIENCE)), Some(GuestExit::PowerOff));
        assert!(matches!(vm.stop().map(drop), Err(StopError::Gone)));
        assert!(matches!(vm.sample(0), Err(StopError::Gone)));
    }
}

#[test]
fn a_guest_killed_in_a_stop_is_over_and_the_stop_says_so() {
    let vm = run(2, BareGuest::new(COUNT));
    let mut stopped = vm.stop().unwrap();
    vm.kill();
    assert_eq!(vm.wait(Some(PATIENCE)), Some(GuestExit::Killed));
    assert!(stopped.registers(1).is_ok(), "where it stood is still known");
    assert!(matches!(stopped.resume(), Err(StopError::Gone)));
}

#[test]
fn a_vcpu_that_waits_for_a_stuck_console_can_be_stopped() {
    struct Stuck(mpsc::Receiver<()>);
    impl std::io::Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let _ = self.0.recv();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let (release, gate) = mpsc::channel();
    let console = vmm::devices::Console::new(Box::new(Stuck(gate))).unwrap();
    // WRITE_PORT, to COM1.
    let mut code = WRITE_PORT.to_vec();
    code[4..6].copy_from_slice(&0x3f8u16.to_le_bytes());
    assert_ne!(PORT, 0x3f8);
    let vm = Vm::bare(&hardware(2), BareGuest::new(&code), console).unwrap();
    vm.start();
    // Both come to wait, and stand all the same.
    wait_until(|| {
        let before = count(&vm, 0) + count(&vm, 1);
        std::thread::sleep(Duration::from_millis(50));
        count(&vm, 0) + count(&vm, 1) == before && before > 0
    });
    for _ in 0..20 {
        stop(&vm).resume().unwrap();
        vm.sample(1).unwrap();
    }
    drop(release);
    (0..2).for_each(|vcpu| wait_for_progress(&vm, vcpu));
}
