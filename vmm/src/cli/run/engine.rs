//! Which engine runs the guest, and what `vmm run` wants of each.

use std::fmt;

use anyhow::{Context, Result, anyhow, bail};
use patcher::machine::Machine;
use vmm::devices::{Console, ConsoleInput};
use vmm::kvm::{self, GuestExit, Hardware, KvmKind, LinuxBoot, Vm, VmError};
use vmm::qemu::{Accelerator, Architecture, Launch, Qemu};

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

/// What runs a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    /// Our own, on KVM.
    Kvm,
    /// QEMU.
    Qemu(Accelerator),
}

/// Builds the guest that `options` describe, on the engine that they, or this host, choose.
///
/// # Errors
/// What the engine says.
pub fn build(options: &Options, rings: Option<u64>, console: Console) -> Result<Box<dyn Guest>> {
    let host = Architecture::host();
    let arch =
        options.arch.or(host).context("this host's architecture is none of guests; say --arch")?;
    let (engine, why) = match options.accel {
        Accel::Tcg => (Engine::Qemu(Accelerator::Tcg), None),
        Accel::Kvm if Some(arch) == host => (Engine::Kvm, None),
        Accel::Kvm => bail!(
            "a guest of {arch} can't run under the KVM of this {} host; use --accel tcg",
            std::env::consts::ARCH
        ),
        Accel::Auto => {
            let (engine, why) = choose(arch, host, kvm::probe);
            (engine, Some(why))
        }
    };
    let guest = match engine {
        Engine::Kvm => under_kvm(options, rings, console),
        Engine::Qemu(accelerator) => under_qemu(options, arch, accelerator, rings, console),
    }?;
    if let Some(why) = why {
        say(why);
    }
    Ok(guest)
}

/// The engine for a guest of `arch` on a host of `host`, and why.
fn choose(
    arch: Architecture,
    host: Option<Architecture>,
    probe: impl FnOnce() -> KvmKind,
) -> (Engine, String) {
    const EMULATED: &str = "the guest runs under QEMU's emulation, which is slow";
    let emulated =
        |why: &dyn fmt::Display| (Engine::Qemu(Accelerator::Tcg), format!("{EMULATED}: {why}"));
    if Some(arch) != host {
        return emulated(&format_args!("this {} host can't run {arch}", std::env::consts::ARCH));
    }
    match probe() {
        kind @ KvmKind::Hardware(_) => (Engine::Kvm, format!("the guest runs under KVM: {kind}")),
        // What is missing is something that our own engine needs and QEMU does not.
        kind @ KvmKind::Lacking { .. } => {
            (Engine::Qemu(Accelerator::Kvm), format!("the guest runs under QEMU with KVM: {kind}"))
        }
        kind => emulated(&kind),
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
    Ok(Box::new(Vm::linux(&hardware, &boot, console).map_err(explain)?))
}

/// Where KVM is what is missing, there is more to say.
pub fn explain(error: VmError) -> anyhow::Error {
    match error {
        VmError::Kvm(_) => anyhow!("{error}; `vmm doctor` says what this host can do"),
        error => error.into(),
    }
}

fn under_qemu(
    options: &Options,
    arch: Architecture,
    accelerator: Accelerator,
    rings: Option<u64>,
    console: Console,
) -> Result<Box<dyn Guest>> {
    let cpus = options.cpus.get() as usize;
    let usual = (cpus as u64 * RINGS_PER_CPU).next_power_of_two().min(kvm::MAX_RINGS);
    let launch = Launch {
        cpus,
        memory: options.memory.bytes(),
        rings: rings.unwrap_or(usual),
        initrd: options.initrd.clone(),
        cmdline: options.cmdline.clone(),
        accelerator,
        ..Launch::new(arch, &options.kernel)
    };
    Ok(Box::new(Qemu::launch(&launch, console)?))
}

#[cfg(test)]
mod tests {
    use vmm::kvm::Extension;

    use super::*;

    #[test]
    fn the_fastest_engine_that_runs_the_guest_is_chosen_and_named_with_the_reason() {
        const X86: Architecture = Architecture::X86_64;
        let emulating = || KvmKind::Emulating { reason: "it is PVM".into() };
        let chosen = |arch, kind: KvmKind| choose(arch, Some(X86), || kind);
        for (arch, kind, engine, why) in [
            (X86, KvmKind::Hardware(Extension::Svm), Engine::Kvm, "svm"),
            (
                X86,
                KvmKind::Lacking { capability: "KVM_CAP_SYNC_REGS" },
                Engine::Qemu(Accelerator::Kvm),
                "KVM_CAP_SYNC_REGS",
            ),
            (X86, emulating(), Engine::Qemu(Accelerator::Tcg), "it is PVM"),
            (
                Architecture::S390x,
                KvmKind::Hardware(Extension::Vmx),
                Engine::Qemu(Accelerator::Tcg),
                "s390x",
            ),
        ] {
            let (found, said) = chosen(arch, kind);
            assert_eq!(found, engine);
            assert!(said.contains(why) && !said.contains('\n'), "{said}");
        }
    }
}
