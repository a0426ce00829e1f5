//! Which engine runs the guest, and what `vmm run` wants of each.

use anyhow::{Context, Result, anyhow};
use patcher::machine::Machine;
use vmm::devices::{Console, ConsoleInput};
use vmm::kvm::{self, GuestExit, Hardware, KvmKind, LinuxBoot, Vm, VmError};
use vmm::qemu::{Launch, Qemu};

use super::options::{Accel, Options};
use crate::cli::say;

/// Memory for rings per CPU and for all, unless told otherwise, in bytes.
const RINGS_PER_CPU: u64 = 16 << 20;

/// A guest that is built and stands, whatever runs it.
pub trait Guest: Send + Sync {
    /// What runs it, in a word.
    fn engine(&self) -> &'static str;

    /// What is watched and traced.
    fn machine(&self) -> &dyn Machine;

    /// Where to type.
    fn console_input(&self) -> ConsoleInput;

    /// Lets it go.
    ///
    /// # Errors
    /// The engine is of no use any more.
    fn start(&self) -> Result<()>;

    /// Waits for its end and for its last output.
    fn wait(&self) -> Option<GuestExit>;

    /// Ends it.
    fn kill(&self);
}

impl Guest for Vm {
    fn engine(&self) -> &'static str {
        "KVM"
    }

    fn machine(&self) -> &dyn Machine {
        self
    }

    fn console_input(&self) -> ConsoleInput {
        self.console_input()
    }

    fn start(&self) -> Result<()> {
        self.start();
        Ok(())
    }

    fn wait(&self) -> Option<GuestExit> {
        self.wait(None)
    }

    fn kill(&self) {
        self.kill();
    }
}

impl Guest for Qemu {
    fn engine(&self) -> &'static str {
        "QEMU"
    }

    fn machine(&self) -> &dyn Machine {
        self
    }

    fn console_input(&self) -> ConsoleInput {
        self.console_input()
    }

    fn start(&self) -> Result<()> {
        self.start().context("QEMU can't be told to start the guest")
    }

    fn wait(&self) -> Option<GuestExit> {
        self.wait(None)
    }

    fn kill(&self) {
        self.kill();
    }
}

/// Builds the guest that `options` describe, on the engine that they, or this host, choose.
///
/// # Errors
/// What the engine says.
pub fn build(options: &Options, rings: Option<u64>, console: Console) -> Result<Box<dyn Guest>> {
    let chosen = match options.accel {
        Accel::Auto => match kvm::probe() {
            kind @ KvmKind::Hardware(_) => {
                say(format!("the guest runs under KVM: {kind}"));
                Accel::Kvm
            }
            kind => {
                say(format!("the guest runs under QEMU's emulation, which is slow: {kind}"));
                Accel::Tcg
            }
        },
        told => told,
    };
    match chosen {
        Accel::Tcg => under_qemu(options, rings, console),
        Accel::Kvm | Accel::Auto => under_kvm(options, rings, console),
    }
}

fn under_kvm(options: &Options, rings: Option<u64>, console: Console) -> Result<Box<dyn Guest>> {
    let hardware = Hardware {
        cpus: options.cpus.get() as usize,
        memory: options.memory.bytes(),
        rings,
        emulating: options.accel == Accel::Kvm,
        ..Hardware::default()
    };
    let boot = LinuxBoot {
        kernel: options.kernel.clone(),
        initrd: options.initrd.clone(),
        cmdline: options.cmdline.clone(),
    };
    match Vm::linux(&hardware, &boot, console) {
        Ok(vm) => Ok(Box::new(vm)),
        // Where KVM is what is missing, there is more to say.
        Err(error @ VmError::Kvm(_)) => {
            Err(anyhow!("{error}; `vmm doctor` says what this host can do"))
        }
        Err(error) => Err(error.into()),
    }
}

fn under_qemu(options: &Options, rings: Option<u64>, console: Console) -> Result<Box<dyn Guest>> {
    let cpus = options.cpus.get() as usize;
    let usual = (cpus as u64 * RINGS_PER_CPU).next_power_of_two().min(kvm::MAX_RINGS);
    let launch = Launch {
        cpus,
        memory: options.memory.bytes(),
        rings: rings.unwrap_or(usual),
        initrd: options.initrd.clone(),
        cmdline: options.cmdline.clone(),
        ..Launch::new(&options.kernel)
    };
    Ok(Box::new(Qemu::launch(&launch, console)?))
}
