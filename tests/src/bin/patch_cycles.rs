//! Applies and reverts payloads again and again while both CPUs of a stock guest call what they replace.
//!
//! ```text
//! patch_cycles KERNEL INITRD HOT-RETURN SHARED-STATE ROUNDS ROUNDS
//! ```
//!
//! Fails unless every answer that the guest got was one of the old function or one of the new, no answer
//! mixed them, the kernel's text is byte for byte what it was after each payload, and the guest's log is
//! clean. Needs a KVM that runs stock kernels.

use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patcher::kernel::MappedRegion;
use tests::cycles::Cycles;
use tests::guest::Guest;
use vmm::kvm::{GuestExit, Hardware, LinuxBoot};

/// How long to wait for the guest at any point: it may run under two layers of emulation.
const PATIENCE: Duration = Duration::from_secs(240);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kernel, initrd, hot, shared, hot_rounds, shared_rounds] = &arguments[..] else {
        anyhow::bail!("usage: patch_cycles KERNEL INITRD HOT-RETURN SHARED-STATE ROUNDS ROUNDS");
    };
    let hardware = Hardware { cpus: 2, ..Hardware::default() };
    let boot = LinuxBoot {
        kernel: kernel.into(),
        initrd: Some(initrd.into()),
        cmdline: "quiet vmm.work=shell".into(),
    };
    let guest = Guest::boot(&hardware, &boot)?;
    let mut shell = Shell { guest: &guest, asked: 0 };
    let mut run = || -> Result<()> {
        let kernel = guest.kernel(PATIENCE)?;
        let region = MappedRegion::new(&guest.vm, &kernel)?;
        let mut ask = |command: &str| shell.ask(command);
        let mut cycles = Cycles::new(&guest.vm, &kernel, &region, &mut ask);
        println!("{}", cycles.run("null-lseek", Path::new(hot), hot_rounds.parse()?)?);
        println!("{}", cycles.run("loadavg", Path::new(shared), shared_rounds.parse()?)?);
        let complaints = tests::guest::complaints(&shell.ask("dmesg")?);
        ensure!(complaints.is_empty(), "the guest complains: {complaints:#?}");
        shell.say("exit")?;
        let exit = guest.vm.wait(Some(PATIENCE)).context("the guest did not end")?;
        ensure!(matches!(exit, GuestExit::PowerOff), "the guest ended with {exit:?}");
        Ok(())
    };
    run().with_context(|| {
        let exit = guest.vm.exit();
        format!("the guest's end: {exit:?}; its console:\n{}", guest.transcript.text())
    })
}

/// The guest's shell.
struct Shell<'g> {
    guest: &'g Guest,
    asked: usize,
}

impl Shell<'_> {
    fn say(&mut self, line: &str) -> Result<()> {
        Ok(self.guest.vm.console_input().write_all(format!("{line}\n").as_bytes())?)
    }

    /// Has the guest run a command, and gives what it printed.
    fn ask(&mut self, command: &str) -> Result<String> {
        self.guest.wait_for("VMM-READY", PATIENCE)?;
        self.say(command)?;
        self.asked += 1;
        let until = Instant::now() + PATIENCE;
        loop {
            let text = self.guest.transcript.text().replace('\r', "");
            let mut answers = text.split("VMM-SHELL-END ").skip(self.asked - 1);
            if let (Some(answer), Some(status)) = (answers.next(), answers.next())
                && let Some((status, _)) = status.split_once('\n')
            {
                ensure!(status == "0", "{command} ended with status {status}");
                return Ok(answer.to_owned());
            }
            ensure!(Instant::now() < until, "{command} did not end");
            ensure!(self.guest.vm.exit().is_none(), "the guest has ended");
            thread::sleep(Duration::from_millis(20));
        }
    }
}
