//! `vmm patch NAME list`: what is patched, function by function.

use std::io::{self, Write};

use anyhow::Result;
use clap::Args;
use vmm::control::Name;

use super::text;
use crate::cli::reach::{ANSWER, connect};
use crate::cli::say;
use crate::cli::status::Status;

/// List the patches that are applied, oldest first, and what is in force for each function
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
Each patch is in one of these states:
  in force  all of its functions are
  partly    later patches replace some of them
  covered   later patches replace all of them; they are in force again when those are reverted

Exit status:
  0  the list is complete, even if it is empty
  1  something failed; standard error says what

Example:
  vmm patch guest1 list";

/// Lists them.
///
/// # Errors
/// The guest can't be reached, or does not answer.
pub fn run(name: &Name, options: &Options) -> Result<Status> {
    let patches = connect(name)?.patches(ANSWER)?;
    let mut out = io::stdout().lock();
    if options.json {
        serde_json::to_writer_pretty(&mut out, &patches)?;
        writeln!(out)?;
    } else if patches.is_empty() {
        say(format!("the guest {name} has no patches"));
    } else {
        out.write_all(text::list(&patches).as_bytes())?;
    }
    Ok(Status::Success)
}
