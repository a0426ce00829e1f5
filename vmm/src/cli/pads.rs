//! `vmm pads`: the functions of a guest's kernel that can be traced, and those that can't.

use std::io::{self, BufWriter, Write};

use anyhow::{Result, bail};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use vmm::control::Name;
use vmm::control::protocol::Pad;

use super::reach::{ANSWER, columns, connect};
use super::status::Status;

/// List the pads of a guest's kernel, the places at functions' entries that the compiler left for
/// tracing, and what state each is in
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// The guest, as vmm ps lists it
    name: Name,

    /// Only functions that match, with the globs of set_ftrace_filter: *, ?, [a-z]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    glob: Option<String>,

    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
Each line has the function, the pad's address, what stands in front of the pad, and its state:
  idle           the function is neither traced nor patched
  ours           vmm traces it, for as many clients as are told, or has patched it
  guest-enabled  the guest's own tracing does; it is left alone
  refused        it is left alone, for the reason that is told

Exit status:
  0  there are such pads
  1  there are none, or something failed; standard error says what

Example:
  vmm pads guest1 'vfs_*'";

/// Lists them.
///
/// # Errors
/// The guest can't be reached, or its pads not be listed, or there are none that match.
pub fn run(options: &Options) -> Result<Status> {
    let pads = connect(&options.name)?.pads(options.glob.clone(), ANSWER)?;
    let mut out = BufWriter::new(io::stdout().lock());
    if options.json {
        serde_json::to_writer_pretty(&mut out, &pads)?;
        writeln!(out)?;
    } else {
        out.write_all(columns(&pads.iter().map(row).collect::<Vec<_>>()).as_bytes())?;
    }
    out.flush()?;
    match &options.glob {
        Some(glob) if pads.is_empty() => bail!("no function with a pad matches '{glob}'"),
        _ => Ok(Status::Success),
    }
}

fn row(pad: &Pad) -> [String; 4] {
    let function = if pad.function.is_empty() { "-" } else { &pad.function };
    let state = pad.state.label();
    let more = match (&pad.reason, pad.traced_by, pad.patched) {
        (Some(reason), ..) => format!(": {reason}"),
        (None, 0, false) => String::new(),
        (None, 0, true) => " (patched)".to_owned(),
        (None, clients, false) => format!(" ({clients})"),
        (None, clients, true) => format!(" ({clients}, patched)"),
    };
    [
        function.to_owned(),
        pad.address.to_string(),
        pad.prefix.clone().filter(|prefix| !prefix.is_empty()).unwrap_or_else(|| "-".into()),
        format!("{state}{more}"),
    ]
}
