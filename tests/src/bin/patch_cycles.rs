//! Applies and reverts payloads again and again while both CPUs of a stock guest call what they replace.
//!
//! ```text
//! patch_cycles KERNEL INITRD HOT-RETURN SHARED-STATE ROUNDS ROUNDS
//! ```
//!
//! Fails unless every answer that the guest got was one of the old function or one of the new, no answer
//! mixed them, the kernel's text is byte for byte what it was after each payload, and the guest's log is
//! clean. Needs a KVM that runs stock kernels.

use std::fs;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patcher::hook::Hooks;
use patcher::kernel::MappedRegion;
use patcher::livepatch::{Attempt, PatchOptions, Patches, RevertAttempt};
use patcher::machine::Machine;
use tests::guest::{Guest, text};
use vmm::kvm::{GuestExit, Hardware, LinuxBoot};

/// How long to wait for the guest at any point: it may run under two layers of emulation.
const PATIENCE: Duration = Duration::from_secs(240);

/// How long a payload stays applied, and reverted.
const STAY: Duration = Duration::from_millis(2);

/// How long it is waited before it is tried again.
const AGAIN: Duration = Duration::from_millis(2);

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
        cycle(&mut shell, "null-lseek", hot, hot_rounds.parse()?)?;
        cycle(&mut shell, "loadavg", shared, shared_rounds.parse()?)?;
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

/// Has both CPUs do `work`, and applies and reverts the payload in `file` so many times meanwhile.
fn cycle(shell: &mut Shell<'_>, work: &str, file: &str, rounds: u64) -> Result<()> {
    let payload = fs::read(file).with_context(|| format!("{file} can't be read"))?;
    let guest = shell.guest;
    let kernel = guest.kernel(PATIENCE)?;
    let machine: &dyn Machine = &guest.vm;
    let region = MappedRegion::new(machine, &kernel)?;
    let before = text(machine, &kernel)?;
    let (stop, out) = (format!("/tmp/stop-{work}"), format!("/tmp/{work}"));
    shell.ask(&format!("work {work}:{stop}@0+{work}:{stop}@1 >{out} 2>&1 &"))?;
    shell.ask(&format!("until [ $(grep -c BEGIN {out}) = 2 ]; do usleep 10000; done"))?;

    let mut hooks = Hooks::new(machine, &kernel, &region);
    let mut patches = Patches::new();
    let (mut busy, mut longest) = (0_u64, Duration::ZERO);
    for _ in 0..rounds {
        let mut pending = patches.prepare(&hooks, &payload, &PatchOptions::default())?;
        let until = Instant::now() + PATIENCE;
        let id = loop {
            match patches.attempt(&mut hooks, pending)? {
                Attempt::Applied(applied) => {
                    longest = longest.max(applied.stop.total());
                    break applied.id;
                }
                Attempt::Busy(again, standers) => {
                    busy += 1;
                    ensure!(Instant::now() < until, "{standers:?} are always in the way");
                    pending = *again;
                    thread::sleep(AGAIN);
                }
            }
        };
        thread::sleep(STAY);
        let until = Instant::now() + PATIENCE;
        loop {
            match patches.revert(&mut hooks, id, None)? {
                RevertAttempt::Reverted(reverted) => {
                    longest =
                        longest.max(reverted.stop.map_or(Duration::ZERO, |stop| stop.total()));
                    break;
                }
                RevertAttempt::Busy(standers) => {
                    busy += 1;
                    ensure!(Instant::now() < until, "{standers:?} are always in the way");
                    thread::sleep(AGAIN);
                }
            }
        }
        thread::sleep(STAY);
    }
    drop(hooks);
    let differences = before.iter().zip(&text(machine, &kernel)?).filter(|(a, b)| a != b).count();
    ensure!(differences == 0, "the text differs in {differences} bytes");

    let said = shell.ask(&format!(
        "touch {stop}; until [ $(grep -c -e END -e FAILED {out}) = 2 ]; do usleep 10000; done; cat {out}"
    ))?;
    println!("{work}: {rounds} rounds, {busy} times somebody was inside, longest stop {longest:?}");
    let answers = said.lines().filter_map(|line| line.strip_prefix("VMM-ANSWERS "));
    let mut hammers = 0;
    for line in answers {
        println!("{line}");
        let figure = |name: &str| -> Result<u64> {
            let word = line.split(' ').find_map(|word| word.strip_prefix(name));
            Ok(word.with_context(|| format!("no {name} in {line}"))?.parse()?)
        };
        let (old, new, switches) = (figure("old=")?, figure("new=")?, figure("switches=")?);
        ensure!(figure("wrong=")? == 0, "{said}");
        ensure!(old > 0 && new > 0, "it saw one kind of answers only: {line}");
        // All functions of a payload change at once, and back: no more often do answers.
        ensure!(switches <= 2 * rounds, "{switches} switches in {rounds} rounds: {line}");
        hammers += 1;
    }
    ensure!(hammers == 2, "not both CPUs have worked: {said}");
    Ok(())
}
