//! Payloads that are applied and reverted again and again while the guest calls what they replace.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patcher::hook::Hooks;
use patcher::kernel::{Kernel, MappedRegion};
use patcher::livepatch::{Attempt, PatchOptions, Patches, RevertAttempt};
use patcher::machine::Machine;

use crate::guest::text;

/// How long it is waited until nobody is inside a function.
const PATIENCE: Duration = Duration::from_secs(240);

/// How long a payload stays applied, and reverted.
const STAY: Duration = Duration::from_millis(2);

/// How long it is waited before it is tried again.
const AGAIN: Duration = Duration::from_millis(2);

/// A guest whose shell can be asked.
pub struct Cycles<'a> {
    machine: &'a dyn Machine,
    kernel: &'a Kernel,
    region: &'a MappedRegion,
    ask: &'a mut dyn FnMut(&str) -> Result<String>,
}

impl<'a> Cycles<'a> {
    /// Gets ready; nothing is done yet. `ask` has the guest's shell run a command, and gives what it printed.
    pub fn new(
        machine: &'a dyn Machine,
        kernel: &'a Kernel,
        region: &'a MappedRegion,
        ask: &'a mut dyn FnMut(&str) -> Result<String>,
    ) -> Self {
        Self { machine, kernel, region, ask }
    }

    /// Has both CPUs do `work`, and applies and reverts the payload in `file` so many times meanwhile. Tells
    /// what was seen.
    ///
    /// # Errors
    /// An answer that is neither the old function's nor the new one's, a mixture, text that is not what it
    /// was, or whatever fails.
    pub fn run(&mut self, work: &str, file: &Path, rounds: u64) -> Result<String> {
        let payload =
            fs::read(file).with_context(|| format!("{} can't be read", file.display()))?;
        let (machine, kernel, region) = (self.machine, self.kernel, self.region);
        let (stop, out) = (format!("/tmp/stop-{work}"), format!("/tmp/{work}"));
        (self.ask)(&format!("work {work}:{stop}@0+{work}:{stop}@1 >{out} 2>&1 &"))?;
        (self.ask)(&format!("until [ $(grep -c BEGIN {out}) = 2 ]; do usleep 10000; done"))?;
        // From here on the kernel has no reason to change its text by itself.
        let before = text(machine, kernel)?;

        let mut hooks = Hooks::new(machine, kernel, region);
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
        let differences =
            before.iter().zip(&text(machine, kernel)?).filter(|(a, b)| a != b).count();
        ensure!(differences == 0, "the text differs in {differences} bytes");

        let said = (self.ask)(&format!(
            "touch {stop}; until [ $(grep -c -e END -e FAILED {out}) = 2 ]; do usleep 10000; done; cat {out}"
        ))?;
        let mut seen = format!(
            "{work}: {rounds} rounds, {busy} times somebody was inside, longest stop {longest:?}"
        );
        let answers = said.lines().filter_map(|line| line.strip_prefix("VMM-ANSWERS "));
        let mut hammers = 0;
        for line in answers {
            write!(seen, "\n{line}")?;
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
        Ok(seen)
    }
}
