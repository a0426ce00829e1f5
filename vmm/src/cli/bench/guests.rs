//! The guests that are stopped.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use patcher::kernel::{Kernel, Located, locate};
use patcher::machine::Machine;
use vmm::bench;
use vmm::devices::Console;
use vmm::kvm::{Hardware, LinuxBoot, Vm};
use vmm::qemu::{Architecture, Launch, Qemu};

use super::options::{Engine, Guest as Kind, Options};
use crate::cli::progress::Progress;
use crate::cli::run::engine::{Guest, explain};

/// How often a guest that boots is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// How long a guest may take until it is busy: it may be emulated, twice.
const PATIENCE: Duration = Duration::from_secs(600);

/// A guest that runs. It is killed when this is dropped.
pub struct Running {
    guest: Box<dyn Guest>,
    busy: Arc<AtomicBool>,
}

impl Running {
    /// Builds the guest that `options` describe, with so many vCPUs, and lets it go.
    ///
    /// # Errors
    /// What the engine says.
    pub fn start(options: &Options, cpus: usize) -> Result<Self> {
        let busy = Arc::new(AtomicBool::new(options.busy_at.is_none()));
        let mark = options.busy_at.clone().unwrap_or_default().into_bytes();
        let sink = Mark { mark, seen: Arc::clone(&busy), tail: Vec::new() };
        let console = Console::new(Box::new(sink)).context("the guest's console can't be had")?;
        let guest: Box<dyn Guest> = match (options.guest, options.engine, &options.kernel) {
            (Kind::Stock, Engine::Kvm, Some(kernel)) => {
                let memory = options.memory.bytes();
                let hardware = Hardware { cpus, memory, ..Hardware::default() };
                let boot = LinuxBoot {
                    kernel: kernel.clone(),
                    initrd: options.initrd.clone(),
                    cmdline: options.cmdline.clone(),
                };
                Box::new(Vm::linux(&hardware, &boot, console).map_err(explain)?)
            }
            (Kind::Stock, Engine::Qemu, Some(kernel)) => {
                let launch = Launch {
                    cpus,
                    memory: options.memory.bytes(),
                    initrd: options.initrd.clone(),
                    cmdline: options.cmdline.clone(),
                    ..Launch::new(Architecture::X86_64, kernel)
                };
                Box::new(Qemu::launch(&launch, console)?)
            }
            _ => {
                let guest = bench::busy_guest(cpus);
                Box::new(Vm::bare(&bench::hardware(cpus), guest, console).map_err(explain)?)
            }
        };
        guest.start()?;
        Ok(Self { guest, busy })
    }

    /// What is stopped.
    pub fn machine(&self) -> &dyn Machine {
        self.guest.machine()
    }

    /// Waits for the kernel, until its pads may be written, and until it is busy; `None` if `stop` is
    /// set meanwhile.
    ///
    /// # Errors
    /// None of that comes, or the guest ends before.
    pub fn kernel(&self, stop: &AtomicBool, progress: &mut Progress) -> Result<Option<Kernel>> {
        let machine = self.machine();
        let begun = Instant::now();
        loop {
            let registers = (0..machine.vcpus()).map(|vcpu| machine.sample(vcpu));
            let registers = registers.collect::<Result<Vec<_>, _>>()?;
            let reason = match locate(machine.ram(), &registers) {
                Ok(Located::Found(kernel)) => match kernel.readiness(machine.ram()) {
                    Ok(()) if self.busy.load(Ordering::SeqCst) => return Ok(Some(*kernel)),
                    Ok(()) => "its console does not yet show what --busy-at says".to_owned(),
                    Err(reason) => reason.to_string(),
                },
                Ok(Located::NotYet(reason)) => reason.to_string(),
                Err(reason) => reason.to_string(),
            };
            if stop.load(Ordering::SeqCst) {
                return Ok(None);
            }
            if begun.elapsed() > PATIENCE {
                bail!("the guest can't be measured after {} s: {reason}", PATIENCE.as_secs());
            }
            progress.show(|| {
                let seconds = begun.elapsed().as_secs();
                format!("waiting for the guest to be busy ({seconds} s): {reason}")
            });
            thread::sleep(LOOK);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.guest.kill();
    }
}

/// Sees whether a guest prints something.
struct Mark {
    mark: Vec<u8>,
    seen: Arc<AtomicBool>,
    /// What may be the beginning of the mark.
    tail: Vec<u8>,
}

impl Write for Mark {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.seen.load(Ordering::SeqCst) {
            self.tail.extend_from_slice(bytes);
            if memchr::memmem::find(&self.tail, &self.mark).is_some() {
                self.seen.store(true, Ordering::SeqCst);
            }
            let keep = self.tail.len().min(self.mark.len());
            self.tail.drain(..self.tail.len() - keep);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_seen_however_it_is_cut_into_writes() {
        for cut in 0..10 {
            let seen = Arc::new(AtomicBool::new(false));
            let mut mark =
                Mark { mark: b"BEGIN".to_vec(), seen: Arc::clone(&seen), tail: Vec::new() };
            mark.write_all(&vec![b'B'; 1000]).unwrap();
            assert!(!seen.load(Ordering::SeqCst));
            let (first, second) = b"xxBEGINyyy".split_at(cut);
            mark.write_all(first).unwrap();
            mark.write_all(second).unwrap();
            assert!(seen.load(Ordering::SeqCst), "cut at {cut}");
        }
    }
}
