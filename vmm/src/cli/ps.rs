//! `vmm ps`: the guests that can be reached.

use std::io::{self, Write};
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use vmm::control::protocol::{State, Status as GuestStatus};
use vmm::control::{Client, ClientError, Found, Name, Place};

use super::reach::columns;
use super::say;
use super::status::Status;

/// List the guests of this user that run
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
Exit status:
  0  the list is complete, even if it is empty
  1  something failed; standard error says what

Example:
  vmm ps";

/// How long a guest's process may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A guest, as far as it says so itself.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    /// None if it does not answer.
    #[serde(flatten)]
    status: Option<GuestStatus>,
    /// Why it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Lists guests.
///
/// # Errors
/// The directory of their sockets can't be read.
pub fn run(options: &Options) -> Result<Status> {
    let place = Place::of_this_user();
    let rows: Vec<Row> = place.names()?.iter().filter_map(|name| row(&place, name)).collect();
    let mut out = io::stdout().lock();
    if options.json {
        serde_json::to_writer_pretty(&mut out, &rows)?;
        writeln!(out)?;
    } else if rows.is_empty() {
        say(format!("no guest runs (no socket is in {})", place.path().display()));
    } else {
        out.write_all(table(&rows).as_bytes())?;
    }
    Ok(Status::Success)
}

/// What the guest of that name says; none if there is no such guest any more.
fn row(place: &Place, name: &Name) -> Option<Row> {
    if let Found::Dead = place.find(name) {
        // One that can't be removed is found dead again.
        let _ = place.remove_dead(name);
        return None;
    }
    let status = Client::connect(place, name).and_then(|mut client| client.status(PATIENCE));
    let (status, error) = match status {
        Ok(status) => (Some(status), None),
        Err(ClientError::NoGuest { .. }) => return None,
        Err(error) => (None, Some(error.to_string())),
    };
    Some(Row { name: name.to_string(), status, error })
}

fn table(rows: &[Row]) -> String {
    let head = ["NAME", "PID", "ENGINE", "ARCH", "VCPUS", "KERNEL", "STATE", "TRACES", "PATCHES"];
    let dash = || "-".to_owned();
    let rows = rows.iter().map(|row| match &row.status {
        Some(status) => [
            row.name.clone(),
            status.pid.to_string(),
            status.engine.clone(),
            status.arch.clone().unwrap_or_else(dash),
            status.vcpus.to_string(),
            status.release.clone().unwrap_or_else(dash),
            state(status.state).to_owned(),
            status.traces.to_string(),
            status.patches.to_string(),
        ],
        None => {
            let mut words: [String; 9] = std::array::from_fn(|_| dash());
            words[0] = row.name.clone();
            words[6] = "silent".into();
            words
        }
    });
    columns(&std::iter::once(head.map(ToOwned::to_owned)).chain(rows).collect::<Vec<_>>())
}

/// A state in a word.
pub fn state(state: State) -> &'static str {
    match state {
        State::Booting => "booting",
        State::Ready => "ready",
        State::Panicked => "panicked",
        State::Untraceable => "untraceable",
    }
}
