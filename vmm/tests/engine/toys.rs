//! Guests of a few instructions, and what the tests ask of them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use patcher::addr::Gpa;
use patcher::machine::{Machine, Registers, Stopped, X86Registers};
use vmm::devices::Console;
use vmm::kvm::{BareGuest, Hardware, Vm};

/// Where a toy's code lies.
pub const CODE: u64 = 1 << 20;

/// Where a toy's vCPUs count, 8 bytes each.
pub const COUNTERS: u64 = 2 << 20;

/// How long anything that must happen may take: only a failure takes as long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Counts in memory and does nothing else.
///
/// ```text
/// 0  48 ff 04 fd 00002000   incq 0x200000(,%rdi,8)
/// 8  eb f6                  jmp 0
/// ```
pub const COUNT: &[u8] = &[0x48, 0xff, 0x04, 0xfd, 0, 0, 0x20, 0, 0xeb, 0xf6];

/// Writes a port and counts, for ever.
///
/// ```text
///  0  b0 41                  mov $0x41, %al
///  2  66 ba 00 10            mov $0x1000, %dx
///  6  ee                     out %al, %dx
///  7  48 ff 04 fd 00002000   incq 0x200000(,%rdi,8)
/// 15  eb f5                  jmp 6
/// ```
pub const WRITE_PORT: &[u8] =
    &[0xb0, 0x41, 0x66, 0xba, 0x00, 0x10, 0xee, 0x48, 0xff, 0x04, 0xfd, 0, 0, 0x20, 0, 0xeb, 0xf5];

/// The port that [`WRITE_PORT`] writes.
pub const PORT: u16 = 0x1000;

/// Halts with interrupts off, and again should it wake: `hlt; jmp . - 1`.
pub const HALT: &[u8] = &[0xf4, 0xeb, 0xfd];

/// A console nobody looks at.
pub fn console() -> Console {
    Console::new(Box::new(io::sink())).unwrap()
}

/// A small machine.
pub fn hardware(cpus: usize) -> Hardware {
    Hardware { cpus, memory: 4 << 20, rings: Some(2 << 20), ..Hardware::default() }
}

/// Builds and starts a toy.
pub fn run(cpus: usize, guest: BareGuest) -> Vm {
    let vm = Vm::bare(&hardware(cpus), guest, console()).unwrap();
    vm.start();
    vm
}

/// What `vcpu` has counted.
pub fn count(vm: &Vm, vcpu: usize) -> u64 {
    vm.ram().u64_le(Gpa(COUNTERS + 8 * vcpu as u64)).unwrap()
}

/// Waits until `vcpu` has counted on from now.
pub fn wait_for_progress(vm: &Vm, vcpu: usize) {
    let before = count(vm, vcpu);
    wait_until(|| count(vm, vcpu) > before);
}

/// Waits until `done`, and fails if that takes too long.
pub fn wait_until(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "waited too long");
        std::thread::yield_now();
    }
}

/// The x86 registers in `registers`.
pub fn x86(registers: Registers) -> X86Registers {
    match registers {
        Registers::X86_64(x86) => x86,
        other => panic!("{other:?} are not x86 registers"),
    }
}

/// Counts how often each vCPU has written [`PORT`].
#[derive(Clone)]
pub struct PortWrites(Arc<[AtomicU64]>);

impl PortWrites {
    /// For a guest with `cpus` vCPUs that executes `code`.
    pub fn watch(cpus: usize, code: &[u8]) -> (Self, BareGuest) {
        let writes = Self((0..cpus).map(|_| AtomicU64::new(0)).collect());
        let counted = writes.clone();
        let guest = BareGuest::new(code).on_port_write(move |write| {
            if write.port == PORT {
                counted.0[write.vcpu].fetch_add(1, Ordering::SeqCst);
            }
        });
        (writes, guest)
    }

    /// How often `vcpu` has.
    pub fn of(&self, vcpu: usize) -> u64 {
        self.0[vcpu].load(Ordering::SeqCst)
    }
}

/// Stops a guest that has no reason to be over; says how it ended if it is.
pub fn stop(vm: &Vm) -> Box<dyn Stopped + '_> {
    vm.stop().unwrap_or_else(|error| panic!("{error}: {:?}", vm.wait(Some(Duration::from_secs(5)))))
}
