//! `vmm doctor`: what this host can do, and what to do about what it can't.

use std::io::Write;

use clap::Args;

use super::status::Status;

mod findings;
mod report;

use findings::Findings;
use report::Report;

/// Say what this host can do, and what to do about what it can't
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
Exit status:
  0  `vmm run` boots stock kernels on this host, if only emulated
  1  it does not; the advice says what is missing

Examples:
  vmm doctor
  vmm doctor --json | jq .can.run_stock_kernels";

/// Looks at the host and says what was found.
///
/// # Errors
/// Standard output can't be written.
pub fn run(options: &Options) -> anyhow::Result<Status> {
    let report = Report::new(&Findings::gather());
    let text = if options.json { report.json() } else { report.human() };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(if report.can_run_stock_kernels() { Status::Success } else { Status::Failure })
}
