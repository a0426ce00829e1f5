//! `vmm patch check`: tells whether a payload fits a kernel, by the kernel's file alone.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use patcher::livepatch::{CheckOptions, CheckReport, Payload};
use patcher::trace::filter::Glob;
use serde::Serialize;
use vmm::image;

use super::apply::read;
use super::fit::Fit;
use crate::cli::status::Status;
use crate::cli::summary::counted;

/// See whether a payload fits a kernel, without a guest: everything that apply does but the writing
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// The payload: a relocatable object (.o) for the kernel's architecture
    file: PathBuf,

    /// The kernel, as distributions install it in /boot, or a vmlinux
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,

    #[command(flatten)]
    fit: Fit,

    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
What is shown as kept are copies that the compiler has made of a function for some of its callers:
they are functions of their own, and stay as they are unless the payload replaces them too.

Exit status:
  0  the payload fits the kernel
  1  it does not, or a file can't be read; standard error says why
  2  the command line makes no sense

Example:
  vmm patch check fix.o --kernel /boot/vmlinuz";

/// Checks.
///
/// # Errors
/// A file can't be read, or the payload does not fit the kernel.
pub fn run(options: &Options) -> Result<Status> {
    let bytes = read(&options.file)?;
    let kernel = image::open(&options.kernel)?;
    let name = options.file.display();
    let payload = Payload::parse(&bytes).with_context(|| format!("{name} can't be applied"))?;
    let wanted = CheckOptions {
        maps: options.fit.map.clone(),
        release: options.fit.release.as_deref().map(Glob::new),
        build_id: options.fit.build_id.as_deref().map(Arc::from),
    };
    let report = payload.check(&kernel, &wanted);
    let report = report.with_context(|| format!("{name} can't be applied"))?;
    let mut out = io::stdout().lock();
    if options.json {
        serde_json::to_writer_pretty(&mut out, &Report::from(&report))?;
        writeln!(out)?;
    } else {
        out.write_all(text(&name.to_string(), &report).as_bytes())?;
    }
    Ok(Status::Success)
}

/// A report as JSON.
#[derive(Debug, Serialize)]
struct Report {
    release: String,
    build_id: Option<String>,
    functions: Vec<Function>,
    helpers: Vec<String>,
    symbols: Vec<String>,
    text_bytes: u64,
    constants_bytes: u64,
    data_bytes: u64,
    consistent: bool,
}

/// A function that would be replaced. Offsets are bytes from the kernel's beginning.
#[derive(Debug, Serialize)]
struct Function {
    name: String,
    new: String,
    offset: u64,
    pad: u64,
    copies: Vec<String>,
}

fn owned(names: &[Arc<str>]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

impl From<&CheckReport> for Report {
    fn from(report: &CheckReport) -> Self {
        let functions = report.functions.iter().map(|function| Function {
            name: function.name.to_string(),
            new: function.new.to_string(),
            offset: function.offset,
            pad: function.pad,
            copies: owned(&function.copies),
        });
        Self {
            release: report.release.clone(),
            build_id: report.build_id.clone(),
            functions: functions.collect(),
            helpers: owned(&report.helpers),
            symbols: report.symbols.iter().map(|(name, _)| name.to_string()).collect(),
            text_bytes: report.sizes.text,
            constants_bytes: report.sizes.constants,
            data_bytes: report.sizes.data,
            consistent: report.consistent,
        }
    }
}

fn text(name: &str, report: &CheckReport) -> String {
    let build_id = report.build_id.as_deref().unwrap_or("none");
    let mut text = format!("{name} fits Linux {} (build-id {build_id})\n", report.release);
    // Writing to a String does not fail.
    for function in &report.functions {
        let by = match function.new == function.name {
            true => String::new(),
            false => format!(" by {}", function.new),
        };
        let _ =
            writeln!(text, "  replaces  {}{by}, at _text+{:#x}", function.name, function.offset);
        for copy in &function.copies {
            let _ =
                writeln!(text, "  keeps     {copy}, a copy of {} for some callers", function.name);
        }
    }
    for helper in &report.helpers {
        let _ = writeln!(text, "  has       {helper}");
    }
    for (symbol, _) in &report.symbols {
        let _ = writeln!(text, "  uses      {symbol}");
    }
    let sizes = report.sizes;
    let bytes = |count, what| format!("{} of {what}", counted(count, "byte"));
    let _ = writeln!(
        text,
        "  takes     {}, {}, {}",
        bytes(sizes.text, "code"),
        bytes(sizes.constants, "constants"),
        bytes(sizes.data, "variables")
    );
    if report.consistent {
        let _ = writeln!(text, "  waits     until nobody is inside what it replaces");
    }
    text
}
