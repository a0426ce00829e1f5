//! `vmm info`: all there is to say about a guest.

use std::fmt::Write as _;
use std::io::{self, Write};

use anyhow::Result;
use clap::Args;
use vmm::control::Name;
use vmm::control::protocol::{Info, TraceInfo};

use super::patch::text::info as patch_text;
use super::ps::state;
use super::reach::{ANSWER, connect};
use super::status::Status;
use super::summary::{counted, grouped, signed_hex};

/// Show a guest's kernel, its pads, the memory provided for it, who traces what, and its patches
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// The guest, as vmm ps lists it
    name: Name,

    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
Exit status:
  0  the guest has answered
  1  something failed; standard error says what

Example:
  vmm info guest1";

/// Shows it.
///
/// # Errors
/// The guest can't be reached, or does not answer.
pub fn run(options: &Options) -> Result<Status> {
    let info = connect(&options.name)?.info(ANSWER)?;
    let mut out = io::stdout().lock();
    if options.json {
        serde_json::to_writer_pretty(&mut out, &info)?;
        writeln!(out)?;
    } else {
        out.write_all(text(&info).as_bytes())?;
    }
    Ok(Status::Success)
}

fn text(info: &Info) -> String {
    let mut lines: Vec<(&str, String)> = Vec::new();
    let status = &info.status;
    let reason = status.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    lines.push(("guest", format!("{}, controlled by process {}", status.name, status.pid)));
    let arch = status.arch.as_ref().map(|arch| format!(" {arch}")).unwrap_or_default();
    let vcpus = counted(status.vcpus as u64, "vCPU");
    lines.push(("engine", format!("{},{arch} {vcpus}", status.engine)));
    lines.push(("state", format!("{}{reason}", state(status.state))));
    if let (Some(kernel), Some(release)) = (&info.kernel, &status.release) {
        lines.push(("kernel", format!("Linux {release}")));
        lines.push(("banner", kernel.banner.clone()));
        let offset = signed_hex(kernel.kaslr_offset);
        let (base, physical) = (kernel.base, kernel.physical_base);
        lines.push(("base", format!("{base} (KASLR offset {offset}), physical {physical}")));
        lines.push(("symbols", grouped(kernel.symbols as u64)));
        let total: usize = kernel.pads.iter().map(|(_, count)| count).sum();
        let states: Vec<String> = (kernel.pads.iter())
            .map(|(state, count)| format!("{} {state}", grouped(*count as u64)))
            .collect();
        if total > 0 {
            lines.push(("pads", format!("{}: {}", grouped(total as u64), states.join(", "))));
        }
    }
    match &info.region {
        Some(region) => {
            let (code, rings) = (region.code, region.rings);
            let (code_kib, rings_kib) = (region.code_bytes >> 10, region.rings_bytes >> 10);
            let records = counted(region.ring_records, "record");
            lines.push(("code", format!("{code_kib} KiB at {code}")));
            lines.push(("rings", format!("{rings_kib} KiB at {rings}, {records} for each CPU")));
        }
        None => lines.push(("region", "not mapped until the first trace".into())),
    }
    if info.who.is_empty() {
        lines.push(("traces", "none".into()));
    }
    lines.extend(info.who.iter().map(|trace| ("trace", trace_text(trace))));
    if info.patched.is_empty() {
        lines.push(("patches", "none".into()));
    }
    lines.extend(info.patched.iter().map(|patch| ("patch", patch_text(patch))));
    let mut text = String::new();
    for (title, value) in lines {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{title:<8} {value}");
    }
    text
}

fn trace_text(trace: &TraceInfo) -> String {
    let who = trace.pid.map_or("vmm run itself".to_owned(), |pid| format!("process {pid}"));
    let globs = |option: &str, globs: &[String]| -> String {
        globs.iter().map(|glob| format!(" {option} '{glob}'")).collect()
    };
    format!(
        "{who}: func{}{}, {}, {}, {} missed, for {} s",
        globs("-f", &trace.request.filter),
        globs("-n", &trace.request.notrace),
        counted(trace.functions as u64, "function"),
        counted(trace.events, "event"),
        grouped(trace.missed),
        trace.seconds
    )
}
