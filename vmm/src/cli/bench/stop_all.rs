//! `vmm bench stop-all`: how long guests stand still.

use std::fs::File;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use patcher::hook::Hooks;
use patcher::kernel::MappedRegion;
use patcher::trace::filter::Filter;
use patcher::trace::select::Selection;
use vmm::bench::{self, FORMAT, Gaps, Host, Measured, Report, SharedGaps, StopAll, Subject};
use vmm::kvm;

use super::guests::Running;
use super::options::{Engine, Guest, Options};
use crate::cli::output;
use crate::cli::progress::Progress;
use crate::cli::status::Status;
use crate::signals::{self, EndSignal};

/// The most rounds that do not count.
const WARM_UP: usize = 10;

/// Columns of the bar that shows how far it is.
const BAR: usize = 30;

/// Measures.
///
/// # Errors
/// A guest can't be had, or be stopped and patched, or what was found out not be written.
pub fn run(options: &Options) -> Result<Status> {
    options.check()?;
    let inputs: Vec<&Path> =
        options.kernel.iter().chain(&options.initrd).map(PathBuf::as_path).collect();
    let open = |path: &Option<PathBuf>| -> Result<Option<(File, String)>> {
        let Some(path) = path else { return Ok(None) };
        Ok(Some((output::console_file(path, &inputs)?, path.display().to_string())))
    };
    let (json, plot) = (open(&options.json)?, open(&options.plot)?);

    let stop = Arc::new(AtomicBool::new(false));
    let signal: Arc<OnceLock<EndSignal>> = Arc::default();
    let (stopping, said) = (Arc::clone(&stop), Arc::clone(&signal));
    signals::on_end_signal(move |signal| {
        // There is one first signal.
        let _ = said.set(signal);
        stopping.store(true, Ordering::SeqCst);
    })
    .context("signals can't be handled")?;

    let mut bench = Bench::new(options, &stop);
    let result = bench.run();
    bench.progress.clear();
    if let Some(signal) = signal.get() {
        return Ok(Status::Interrupted(*signal));
    }
    result?;
    let report = bench.report;
    if let Some((mut file, name)) = json {
        let mut text = serde_json::to_string_pretty(&report)?;
        text.push('\n');
        write(&mut file, &name, &text)?;
    }
    if let Some((mut file, name)) = plot {
        write(&mut file, &name, &bench::plot(&report))?;
    }
    io::stdout().lock().write_all(bench::table(&report).as_bytes())?;
    Ok(Status::Success)
}

fn write(file: &mut File, name: &str, text: &str) -> Result<()> {
    file.write_all(text.as_bytes()).with_context(|| format!("{name} can't be written"))
}

struct Bench<'a> {
    options: &'a Options,
    stop: &'a AtomicBool,
    progress: Progress,
    report: Report,
    /// Rounds of all runs that were made.
    done: usize,
}

impl<'a> Bench<'a> {
    fn new(options: &'a Options, stop: &'a AtomicBool) -> Self {
        let engine = match options.engine {
            Engine::Kvm => "KVM",
            Engine::Qemu => "QEMU",
        };
        let kind = match options.guest {
            Guest::Bare => "bare",
            Guest::Stock => "stock",
        };
        let kvm = (options.engine == Engine::Kvm).then(|| kvm::probe().to_string());
        let report = Report {
            format: FORMAT,
            benchmark: "stop-all".into(),
            vmm: env!("CARGO_PKG_VERSION").into(),
            host: Host { kvm, ..Host::this() },
            guest: Subject {
                kind: kind.into(),
                engine: engine.into(),
                kernel: String::new(),
                functions: 0,
            },
            warm_up: options.rounds.div_ceil(10).min(WARM_UP),
            runs: Vec::new(),
        };
        Self { options, stop, progress: Progress::new(false), report, done: 0 }
    }

    fn run(&mut self) -> Result<()> {
        for &cpus in &self.options.cpus {
            if !self.stop.load(Ordering::SeqCst) {
                let plural = if cpus == 1 { "" } else { "s" };
                self.guest(cpus).with_context(|| format!("with {cpus} vCPU{plural}"))?;
            }
        }
        Ok(())
    }

    /// All runs with so many vCPUs, on one guest.
    fn guest(&mut self, cpus: usize) -> Result<()> {
        let running = Running::start(self.options, cpus)?;
        let machine = running.machine();
        let Some(kernel) = running.kernel(self.stop, &mut self.progress)? else { return Ok(()) };
        let region = MappedRegion::new(machine, &kernel)?;
        let selection = Selection::new(&kernel, machine, &Filter::default())?;
        let all = selection.sites.len();
        self.report.guest.kernel = kernel.release().to_owned();
        self.report.guest.functions = all;
        let mut gaps: Box<dyn Gaps> = match self.options.guest {
            Guest::Bare => Box::new(SharedGaps::begin(machine)?),
            Guest::Stock => Box::new(()),
        };
        let mut hooks = Hooks::new(machine, &kernel, &region);
        hooks.prepare_tracing()?;
        for &wanted in &self.options.sites {
            let count = wanted.of(all);
            ensure!(
                count <= all,
                "--sites {count}: the guest's kernel has {all} functions that can be patched; say \
                 all for all of them"
            );
            let sites = bench::spread(&selection.sites, count);
            let stop_all = StopAll {
                sites: &sites,
                warm_up: self.report.warm_up,
                rounds: self.options.rounds,
            };
            let mut measured = Measured::default();
            stop_all.run(&mut hooks, &mut *gaps, |round| {
                measured.add(round);
                self.done += 1;
                self.show(cpus, count);
                match self.stop.load(Ordering::SeqCst) {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            })?;
            if self.stop.load(Ordering::SeqCst) {
                break;
            }
            self.report.runs.push(measured.finish(cpus, count));
        }
        Ok(())
    }

    /// How far it is.
    fn show(&mut self, cpus: usize, sites: usize) {
        let Options { rounds, cpus: all_cpus, sites: all_sites, .. } = self.options;
        let all = rounds * all_cpus.len() * all_sites.len();
        let done = self.done;
        self.progress.show(|| {
            let filled = BAR * done / all;
            format!(
                "[{}{}] {:>3} %  {cpus} vCPUs, {sites} functions",
                "#".repeat(filled),
                " ".repeat(BAR - filled),
                100 * done / all,
            )
        });
    }
}
