//! Whether the kernel is still there, and well.

use std::time::{Duration, Instant};

use patcher::kernel::Kernel;
use patcher::machine::Machine;

/// How often the kernel is looked at.
const GLANCE: Duration = Duration::from_millis(250);

/// How long a kernel that has panicked may go on, to print what it has to say and to reboot.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// Watches whether the kernel panics, which gives it time for its last words, and whether it is gone: the
/// guest may be reset, or start another kernel.
pub struct Condition<'k> {
    kernel: &'k Kernel,
    /// How often the guest had been reset when the kernel was looked for.
    resets: u64,
    asked: Instant,
    panicked: Option<Instant>,
    /// It has finished its boot: its tables and its text stay where they are.
    settled: bool,
    gone: bool,
}

impl<'k> Condition<'k> {
    /// That of a kernel which was looked for when the guest had been reset so many times.
    pub fn new(kernel: &'k Kernel, resets: u64) -> Self {
        let asked = Instant::now();
        Self { kernel, resets, asked, panicked: None, settled: false, gone: false }
    }

    /// From here on it would be missed.
    pub fn settle(&mut self) {
        self.settled = true;
    }

    /// Whether the kernel is gone, or has panicked and had its time. To be asked again and again.
    pub fn is_over(&mut self, machine: &dyn Machine) -> bool {
        self.gone |= machine.resets() != self.resets;
        if self.panicked.is_none() && self.asked.elapsed() >= GLANCE {
            self.asked = Instant::now();
            self.panicked = has_panicked(self.kernel, machine).then_some(self.asked);
            self.gone |= self.settled && !self.kernel.is_current(machine.ram());
        }
        self.gone || self.panicked.is_some_and(|panicked| panicked.elapsed() >= LAST_WORDS)
    }

    /// Whether it had panicked when it was last asked.
    pub fn has_panicked(&self) -> bool {
        self.panicked.is_some()
    }

    /// Whether it is gone without having panicked, when it was last asked.
    pub fn is_gone(&self) -> bool {
        self.gone && self.panicked.is_none()
    }
}

/// Whether the kernel has panicked; one that can't be asked has not.
pub fn has_panicked(kernel: &Kernel, machine: &dyn Machine) -> bool {
    kernel.panicked(machine.ram()).is_ok_and(|cpu| cpu.is_some())
}
