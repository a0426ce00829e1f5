//! A stock guest driven through the library, as `vmm run` drives it.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use patcher::kernel::{Kernel, Located, locate};
use patcher::machine::Machine;
use vmm::devices::Console;
use vmm::kvm::{Hardware, LinuxBoot, Vm};

/// What a guest has printed until now, shared with its console.
#[derive(Debug, Clone, Default)]
pub struct Transcript(Arc<Mutex<Vec<u8>>>);

impl Transcript {
    /// Everything printed until now.
    #[must_use]
    pub fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The lines in which a kernel complains of itself.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        complaints(&self.text())
    }
}

/// The lines of a kernel's log in which it complains of itself: warnings, bugs, lockups, stalls.
#[must_use]
pub fn complaints(log: &str) -> Vec<String> {
    const SIGNS: [&str; 9] = [
        "WARNING: CPU",
        "BUG:",
        "kernel BUG",
        "Oops",
        "Call Trace",
        "lockup",
        "rcu: INFO",
        "stall",
        "ftrace bug",
    ];
    log.lines()
        .filter(|line| SIGNS.iter().any(|sign| line.contains(sign)))
        .map(Into::into)
        .collect()
}

/// The kernel's text, read in a stop.
///
/// # Errors
/// The guest can't be stopped, or its text not be read.
pub fn text(machine: &dyn Machine, kernel: &Kernel) -> Result<Vec<u8>> {
    let range = kernel.text();
    let mut text = vec![0; (range.end.0 - range.start.0) as usize];
    let stopped = machine.stop()?;
    kernel.read_virt(machine.ram(), range.start, &mut text)?;
    stopped.resume()?;
    Ok(text)
}

impl Write for Transcript {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A guest that runs.
pub struct Guest {
    /// Its machine.
    pub vm: Vm,
    /// Its console.
    pub transcript: Transcript,
}

impl Guest {
    /// Boots a kernel.
    ///
    /// # Errors
    /// What the engine says.
    pub fn boot(hardware: &Hardware, boot: &LinuxBoot) -> Result<Self> {
        let transcript = Transcript::default();
        let console = Console::new(Box::new(transcript.clone()))?;
        let vm = Vm::linux(hardware, boot, console)?;
        vm.start();
        Ok(Self { vm, transcript })
    }

    /// Waits until the console shows `mark`.
    ///
    /// # Errors
    /// It does not within `longest`, or the guest ends first.
    pub fn wait_for(&self, mark: &str, longest: Duration) -> Result<()> {
        self.poll(mark, longest, || Ok(self.transcript.text().contains(mark).then_some(())))
    }

    /// Waits for the kernel, and until its pads may be written.
    ///
    /// # Errors
    /// It does not come within `longest`, or the guest ends first.
    pub fn kernel(&self, longest: Duration) -> Result<Kernel> {
        let ram = self.vm.ram();
        self.poll("the kernel", longest, || {
            let registers = self.vm.sample(0)?;
            Ok(match locate(ram, &[registers]) {
                Ok(Located::Found(kernel)) if kernel.readiness(ram).is_ok() => Some(*kernel),
                _ => None,
            })
        })
    }

    fn poll<T>(
        &self,
        what: &str,
        longest: Duration,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let until = Instant::now() + longest;
        loop {
            if let Some(found) = look().with_context(|| format!("waiting for {what}"))? {
                return Ok(found);
            }
            if let Some(exit) = self.vm.exit() {
                bail!("the guest ended ({exit:?}) before {what}:\n{}", self.transcript.text());
            }
            if Instant::now() > until {
                bail!("{what} did not come in {longest:?}:\n{}", self.transcript.text());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}
