//! The same workload in the same stock guest, traced in different ways; what each way costs.
//!
//! The guest's shell (`vmm.work=shell`) is driven by its console. All times of the workload are the
//! guest's own, all ratios are to the untraced runs before and after.

use std::io::Write as _;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patcher::hook::Hooks;
use patcher::kernel::{Kernel, MappedRegion};
use patcher::machine::Machine;
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::session::{Selection, Session};
use patcher::trace::sink::FtraceText;
use serde_json::json;
use vmm::devices::ConsoleInput;

use crate::guest::Transcript;

/// The function that the workload calls once a turn, and that is hot for that.
pub const HOT: &str = "null_lseek";

/// How long one command in the guest may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often is looked for what the guest has printed, and the rings are read meanwhile.
const LOOK: Duration = Duration::from_millis(2);

/// What the untraced workload is to take, each time.
const WANTED: Duration = Duration::from_millis(200);

/// How often it is run. The quickest counts: whatever else the machine does only makes it slower.
const RUNS: u64 = 5;

/// How long a guest is watched for standstills before and after a change.
const MARGIN: Duration = Duration::from_millis(200);

/// Records that the guest's own tracer holds for each CPU, in KiB: as much as our rings.
const GUEST_RING_KIB: u32 = 16 << 10;

const TRACING: &str = "/sys/kernel/tracing";

/// A guest's shell.
pub struct Shell {
    /// Where it reads.
    pub input: ConsoleInput,
    /// What it prints.
    pub transcript: Transcript,
}

impl Shell {
    /// Runs a line and gives what it prints. `meanwhile` is called over and over until then.
    ///
    /// # Errors
    /// It fails, or does not end.
    pub fn run(&mut self, line: &str, mut meanwhile: impl FnMut() -> Result<()>) -> Result<String> {
        const END: &str = "VMM-SHELL-END ";
        let before = self.transcript.text().len();
        self.input.write_all(format!("{line}\n").as_bytes())?;
        let begun = Instant::now();
        loop {
            meanwhile()?;
            let text = self.transcript.text();
            let text = text.get(before..).unwrap_or_default();
            if let Some((printed, status)) = text.split_once(END)
                && let Some((status, _)) = status.split_once('\n')
            {
                ensure!(status.trim() == "0", "{line} failed: {text}");
                return Ok(printed.to_owned());
            }
            ensure!(begun.elapsed() < PATIENCE, "{line} does not end: {text}");
            thread::sleep(LOOK);
        }
    }

    /// Nanoseconds that a line prints behind a mark.
    fn nanoseconds(
        &mut self,
        line: &str,
        mark: &str,
        meanwhile: impl FnMut() -> Result<()>,
    ) -> Result<f64> {
        number_behind(&self.run(line, meanwhile)?, mark)
    }

    /// Nanoseconds a turn of the workload in the quickest of all runs of `turns` each.
    fn work(&mut self, turns: u64, mut meanwhile: impl FnMut() -> Result<()>) -> Result<f64> {
        let line = format!("work lseeks:{turns}@0");
        let mut least = f64::INFINITY;
        for _ in 0..RUNS {
            least = least.min(self.nanoseconds(&line, "VMM-LSEEKS", &mut meanwhile)?);
        }
        Ok(least / turns as f64)
    }

    /// Does something while the guest's other CPU looks at its clock; gives the longest gap that it saw,
    /// in milliseconds.
    fn watched<R>(&mut self, change: impl FnOnce(&mut Self) -> Result<R>) -> Result<(R, f64)> {
        let begin = "rm -f /tmp/end /tmp/gap; work gap:/tmp/end@1 >/tmp/gap & \
                     until grep -q BEGIN /tmp/gap 2>/dev/null; do :; done";
        self.run(begin, || Ok(()))?;
        thread::sleep(MARGIN);
        let result = change(self)?;
        thread::sleep(MARGIN);
        let end = ">/tmp/end; until grep -q ns= /tmp/gap; do :; done; cat /tmp/gap";
        let gap = self.nanoseconds(end, "VMM-GAP", || Ok(()))?;
        Ok((result, gap / 1e6))
    }
}

/// The number behind `ns=` on the line with a mark.
///
/// # Errors
/// There is none.
pub fn number_behind(text: &str, mark: &str) -> Result<f64> {
    let line = text.lines().find(|line| line.contains(mark));
    let number = line.and_then(|line| line.split_once("ns=")).map(|(_, number)| number.trim());
    let number = number.with_context(|| format!("no {mark} in {text}"))?;
    number.parse().with_context(|| format!("{number:?} is no number"))
}

/// One way of tracing, as measured.
#[derive(Debug, Default)]
pub struct Row {
    /// Who traces.
    pub method: &'static str,
    /// What is traced.
    pub what: &'static str,
    /// Nanoseconds a turn of the workload.
    pub turn_ns: f64,
    /// Events in the measured runs, lost ones among them.
    pub events: u64,
    /// Turns of the measured runs.
    pub turns: u64,
    /// How long it took until tracing was on: by the host's clock for ours, by the guest's for its own.
    pub enable_ms: f64,
    /// How long our stop took; none for those that stop nobody.
    pub stop_ms: Option<f64>,
    /// The longest gap in the guest's time while tracing was turned on.
    pub gap_ms: f64,
    /// Events that were lost.
    pub lost: u64,
}

/// Prints rows as a table and as lines of JSON; ratios are to those of method `none`.
pub fn print(system: &str, rows: &[Row]) {
    let untraced: Vec<f64> =
        rows.iter().filter(|row| row.method == "none").map(|row| row.turn_ns).collect();
    let base = untraced.iter().sum::<f64>() / untraced.len() as f64;
    println!("{system}: {base:.0} ns a turn untraced");
    println!(
        "{:<14} {:<6} {:>10} {:>12} {:>11} {:>10} {:>10} {:>10} {:>6}",
        "method",
        "what",
        "slowdown",
        "ns/event",
        "events/s",
        "enable ms",
        "stop ms",
        "gap ms",
        "lost"
    );
    for row in rows {
        let seconds = row.turn_ns * row.turns as f64 / 1e9;
        let per_turn = row.events as f64 / row.turns as f64;
        let rate = row.events as f64 / seconds;
        let slowdown = row.turn_ns / base;
        let event_ns = if per_turn > 0.0 { (row.turn_ns - base) / per_turn } else { 0.0 };
        let stop = row.stop_ms.map_or_else(|| "-".to_owned(), |stop| format!("{stop:.2}"));
        println!(
            "{:<14} {:<6} {slowdown:>9.2}x {event_ns:>12.0} {rate:>11.0} {:>10.2} {stop:>10} {:>10.2} {:>6}",
            row.method, row.what, row.enable_ms, row.gap_ms, row.lost
        );
        let line = json!({
            "system": system, "method": row.method, "what": row.what, "slowdown": slowdown,
            "turn_ns": row.turn_ns, "event_ns": event_ns, "events": row.events, "turns": row.turns,
            "events_per_s": rate, "enable_ms": row.enable_ms, "stop_ms": row.stop_ms,
            "standstill_ms": row.stop_ms.unwrap_or(row.gap_ms), "gap_ms": row.gap_ms,
            "lost": row.lost,
        });
        println!("{line}");
    }
}

/// A guest under one of our engines.
pub struct Bench<'a> {
    /// Its machine.
    pub machine: &'a dyn Machine,
    /// Its kernel, ready.
    pub kernel: &'a Kernel,
    /// Its shell.
    pub shell: Shell,
}

impl Bench<'_> {
    /// Measures everything; `trapped_turns` of the workload by breakpoints, if there are any.
    ///
    /// # Errors
    /// Anything fails.
    pub fn run(&mut self, trapped_turns: Option<u64>) -> Result<Vec<Row>> {
        let region = MappedRegion::new(self.machine, self.kernel)?;
        let first = 2000;
        let turn = self.shell.work(first, || Ok(()))?;
        let turns = ((WANTED.as_nanos() as f64 / turn) as u64).clamp(first, 2_000_000);
        let all = Filter::default();
        let hot = Filter { only: vec![Glob::new(HOT)], except: Vec::new() };
        let mut rows = vec![self.untraced(turns)?];
        for (what, filter) in [("one", &hot), ("all", &all)] {
            let selection = Selection::new(self.kernel, self.machine, filter)?;
            rows.push(self.ours("ours", what, turns, &region, &selection)?);
        }
        if let Some(turns) = trapped_turns {
            let selection = {
                let hooks = Hooks::new(self.machine, self.kernel, &region);
                Selection::trapping(&hooks, &hot)?
            };
            rows.push(self.ours("trap", "one", turns, &region, &selection)?);
        }
        rows.push(self.untraced(turns)?);
        rows.push(self.guests_own("one", turns)?);
        rows.push(self.guests_own("all", turns)?);
        rows.push(self.untraced(turns)?);
        Ok(rows)
    }

    fn untraced(&mut self, turns: u64) -> Result<Row> {
        let ((), gap_ms) = self.shell.watched(|_| Ok(()))?;
        let turn_ns = self.shell.work(turns, || Ok(()))?;
        Ok(Row {
            method: "none",
            what: "-",
            turn_ns,
            turns: RUNS * turns,
            gap_ms,
            ..Row::default()
        })
    }

    fn ours(
        &mut self,
        method: &'static str,
        what: &'static str,
        turns: u64,
        region: &MappedRegion,
        selection: &Selection,
    ) -> Result<Row> {
        let (machine, kernel) = (self.machine, self.kernel);
        let ((mut session, armed, enable), gap_ms) = self.shell.watched(|_| {
            let begun = Instant::now();
            let (session, armed) = Session::arm(machine, kernel, region, selection)?;
            Ok((session, armed, begun.elapsed()))
        })?;
        let mut sink = FtraceText::stream(std::io::sink());
        // What one pass has read is given out by the next, when it is known to be in order. Only what
        // comes in the measured run counts.
        let mut counts = |session: &mut Session<'_>| -> Result<(u64, u64)> {
            for _ in 0..2 {
                session.drain(&mut sink)?;
            }
            Ok((session.events(), session.lost()))
        };
        let (events_before, lost_before) = counts(&mut session)?;
        let turn_ns = self.shell.work(turns, || counts(&mut session).map(drop))?;
        let (events, lost) = counts(&mut session)?;
        let lost = lost - lost_before;
        let events = events - events_before + lost;
        session.disarm()?;
        session.finish(&mut sink).1?;
        let turns = RUNS * turns;
        ensure!(events >= turns, "{events} events in {turns} turns");
        Ok(Row {
            method,
            what,
            turn_ns,
            events,
            turns,
            enable_ms: enable.as_secs_f64() * 1e3,
            stop_ms: Some(armed.stop.total().as_secs_f64() * 1e3),
            gap_ms,
            lost,
        })
    }

    fn guests_own(&mut self, what: &'static str, turns: u64) -> Result<Row> {
        let filter = if what == "one" { HOT } else { "" };
        let prepare = format!(
            "cd {TRACING}; echo 1 >tracing_on; echo {GUEST_RING_KIB} >buffer_size_kb; \
             echo {filter} >set_ftrace_filter"
        );
        self.shell.run(&prepare, || Ok(()))?;
        let on = format!("work put:{TRACING}/current_tracer:function@0");
        let (enable, gap_ms) =
            self.shell.watched(|shell| shell.nanoseconds(&on, "VMM-PUT", || Ok(())))?;
        // The buffer holds as much as ours and nobody reads it: what is overwritten is lost.
        self.shell.run(&format!("cd {TRACING}; echo >trace"), || Ok(()))?;
        let turn_ns = self.shell.work(turns, || Ok(()))?;
        let turns = RUNS * turns;
        let line = format!("cd {TRACING}; echo 0 >tracing_on; cat per_cpu/cpu*/stats");
        let printed = self.shell.run(&line, || Ok(()))?;
        let sum = |name: &str| -> u64 {
            let values = printed.lines().filter_map(|line| line.strip_prefix(name));
            values.filter_map(|value| value.trim().parse::<u64>().ok()).sum()
        };
        let lost = sum("overrun:") + sum("dropped events:") + sum("commit overrun:");
        let events = sum("entries:") + lost;
        ensure!(
            events >= turns,
            "the guest's tracer has {events} events of {turns} turns: {printed}"
        );
        let off =
            format!("cd {TRACING}; echo nop >current_tracer; echo >set_ftrace_filter; echo >trace");
        self.shell.run(&off, || Ok(()))?;
        Ok(Row {
            method: "guest's ftrace",
            what,
            turn_ns,
            events,
            turns,
            enable_ms: enable / 1e6,
            stop_ms: None,
            gap_ms,
            lost,
        })
    }
}
