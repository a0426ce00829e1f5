//! `vmm patch NAME revert`: takes a patch back.

use std::io::{self, Write};
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use humantime::parse_duration;
use vmm::control::Name;
use vmm::control::protocol::RevertRequest;

use super::waiting::{Waiting, parse_timeout};
use super::{EXIT_STATUS, text};
use crate::cli::say;
use crate::cli::status::Status;

/// Take a patch back: for each of its functions what was in force before is again
#[derive(Debug, Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_STATUS}\n\n{EXAMPLE}"))]
pub struct Options {
    /// The patch's number, as vmm patch NAME list shows it
    id: u64,

    /// How long to try while somebody is inside a function of the patch
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_timeout)]
    timeout: Duration,

    /// The longest that the guest may stand; if it would be longer nothing is changed
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    max_stop: Option<Duration>,

    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
Patches can be reverted in any order. A function that a later patch replaces as well stays replaced.";

const EXAMPLE: &str = "\
Example:
  vmm patch guest1 revert 1";

/// Takes it back.
///
/// # Errors
/// The guest can't be reached, or the patch not be reverted.
pub fn run(name: &Name, options: &Options) -> Result<Status> {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let (id, max_stop_us) = (options.id, options.max_stop.map(micros));
    let mut waiting = Waiting::new(options.timeout)?;
    let reverted = waiting.until_done(name, |client, left, stop, tell| {
        client.patch_revert(&RevertRequest { id, timeout_ms: left, max_stop_us }, stop, tell)
    });
    let reverted = match reverted? {
        Ok(reverted) => reverted,
        Err(status) => return Ok(status),
    };
    if options.json {
        let mut out = io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, &reverted)?;
        writeln!(out)?;
    } else {
        say(text::reverted(&reverted));
    }
    Ok(Status::Success)
}
