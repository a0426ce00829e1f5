//! What is run inside the nested lab: a stock kernel under the engine.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use patcher::machine::{Machine, StopError};
use vmm::devices::Console;
use vmm::kvm::{GuestExit, Hardware, La57, LinuxBoot, Vm};

use crate::toys::{PATIENCE, wait_until, x86};

/// Where the lab has the kernel.
pub const KERNEL: &str = "/stock/vmlinuz";
/// Where the lab has the initramfs.
pub const INITRD: &str = "/stock/initrd";

/// What a guest has printed.
#[derive(Clone, Default)]
struct Transcript(Arc<Mutex<Vec<u8>>>);

impl Transcript {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    fn wait_for(&self, text: &str) {
        wait_until(|| {
            std::thread::sleep(Duration::from_millis(20));
            self.text().contains(text)
        });
    }

    /// Checks that the kernel has complained of nothing.
    fn check(&self) {
        const COMPLAINTS: [&str; 8] = [
            "WARNING: CPU",
            "BUG:",
            "Oops",
            "Call Trace",
            "lockup",
            "stall",
            "Firmware Bug",
            "mismatch",
        ];
        let text = self.text();
        for line in text.lines() {
            assert!(COMPLAINTS.iter().all(|sign| !line.contains(sign)), "{text}");
        }
    }
}

impl Write for Transcript {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn boot(hardware: &Hardware, cmdline: &str) -> (Vm, Transcript) {
    let transcript = Transcript::default();
    let console = Console::new(Box::new(transcript.clone())).unwrap();
    let boot =
        LinuxBoot { kernel: KERNEL.into(), initrd: Some(INITRD.into()), cmdline: cmdline.into() };
    let vm = Vm::linux(hardware, &boot, console).unwrap();
    (vm, transcript)
}

#[test]
#[ignore = "runs in the lab"]
fn a_stock_kernel_is_stopped_over_and_over_from_its_first_instruction_to_its_last() {
    let hardware = Hardware { cpus: 2, memory: 256 << 20, ..Hardware::default() };
    let (vm, transcript) = boot(&hardware, "");
    // Before the start, while one processor waits to be woken, while both work, at the end.
    let mut stops = 0;
    let mut started = false;
    let error = loop {
        match vm.stop().and_then(|stopped| stopped.resume()) {
            Ok(_) => stops += 1,
            Err(error) => break error,
        }
        if !std::mem::replace(&mut started, true) {
            vm.start();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(matches!(error, StopError::Gone), "{error}");
    assert_eq!(vm.wait(Some(PATIENCE)), Some(GuestExit::PowerOff), "{}", transcript.text());
    assert!(stops >= 200, "only {stops} stops");
    let text = transcript.text();
    for sign in ["2 CPUs", "ttyS0 at I/O 0x3f8 (irq = ", "VMM-DONE"] {
        assert!(text.contains(sign), "{text}");
    }
    transcript.check();
    assert_eq!(vm.refused_writes(), 0);
}

#[test]
#[ignore = "runs in the lab"]
fn a_stock_kernel_reads_what_is_typed_and_reboots_through_the_bios() {
    // RAM on both sides of the hole, and four processors, more than the lab has.
    let hardware = Hardware { cpus: 4, memory: 3328 << 20, ..Hardware::default() };
    let (vm, transcript) = boot(&hardware, "quiet reboot=bios vmm.after=shell");
    vm.start();
    transcript.wait_for("VMM-DONE");
    let mut input = vm.console_input();
    // Longer than the UART's FIFO, typed at once.
    let comment = "x".repeat(200);
    writeln!(input, "echo cpus=$(nproc) \\\n  $(grep MemTotal /proc/meminfo) # {comment}").unwrap();
    transcript.wait_for("cpus=4 MemTotal: 3");
    writeln!(input, "reboot -f").unwrap();
    assert_eq!(vm.wait(Some(PATIENCE)), Some(GuestExit::Reboot), "{}", transcript.text());
    transcript.check();
}

#[test]
#[ignore = "runs in the lab"]
fn a_stock_kernel_gets_five_level_paging_or_not() {
    const CR4_LA57: u64 = 1 << 12;
    for (la57, levels, bits) in [(La57::Auto, CR4_LA57, 57), (La57::Off, 0, 48)] {
        let hardware = Hardware { cpus: 1, memory: 256 << 20, la57, ..Hardware::default() };
        let (vm, transcript) = boot(&hardware, "quiet vmm.dump=cpuinfo vmm.after=stay");
        vm.start();
        transcript.wait_for("VMM-DONE");
        assert_eq!(x86(vm.sample(0).unwrap()).cr4 & CR4_LA57, levels, "{la57:?}");
        let expected = format!("{bits} bits virtual");
        assert!(transcript.text().contains(&expected), "{la57:?}: {}", transcript.text());
        transcript.check();
    }
}
