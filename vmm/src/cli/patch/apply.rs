//! `vmm patch NAME apply`: applies a payload.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use humantime::parse_duration;
use patcher::livepatch::Map;
use vmm::control::Name;
use vmm::control::protocol::{MAX_FILE_NAME, MAX_PAYLOAD, PatchRequest};

use super::fit::Fit;
use super::waiting::{Waiting, parse_timeout};
use super::{EXIT_STATUS, text};
use crate::cli::say;
use crate::cli::status::Status;

/// Apply a payload: its functions replace those of the kernel that have the same names
#[derive(Debug, Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_STATUS}\n\n{EXAMPLE}"))]
pub struct Options {
    /// The payload: a relocatable object (.o) for the guest's architecture
    file: PathBuf,

    #[command(flatten)]
    fit: Fit,

    /// Take the place of all patches that are applied: what the payload does not replace is put back
    #[arg(long)]
    replace: bool,

    /// Nobody may be inside a function that is replaced, also if the payload replaces only one
    #[arg(long)]
    consistent: bool,

    /// How long to try while somebody is inside a function that is replaced
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
All functions are replaced in one stop of the guest, or none. If there are several, or with
--consistent, nobody may be inside one of them: it is tried again until nobody is, and said meanwhile
who is. Times are such as 100ms, 10s and 2min.";

const EXAMPLE: &str = "\
Examples:
  Apply a payload to a kernel of one release only, in a stop of 50 ms at most:
    vmm patch guest1 apply fix.o --release '6.1.0-*-amd64' --max-stop 50ms

  Replace cmdline_proc_show by the payload's function my_show:
    vmm patch guest1 apply fix.o --map my_show=cmdline_proc_show";

/// A map as it is given.
fn written(map: &Map) -> String {
    let Map { new, old, position } = map;
    match position {
        Some(position) => format!("{new}={old},{position}"),
        None => format!("{new}={old}"),
    }
}

/// Applies it.
///
/// # Errors
/// The file can't be read, the guest not be reached, or the payload not be applied.
pub fn run(name: &Name, options: &Options) -> Result<Status> {
    let file = read(&options.file)?;
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let request = PatchRequest {
        bytes: file.len(),
        file: file_name(&options.file),
        maps: options.fit.map.iter().map(written).collect(),
        replace: options.replace,
        consistent: options.consistent,
        timeout_ms: 0,
        max_stop_us: options.max_stop.map(micros),
        release: options.fit.release.clone(),
        build_id: options.fit.build_id.clone(),
    };
    let mut waiting = Waiting::new(options.timeout)?;
    let patched = waiting.until_done(name, |client, left, stop, tell| {
        let request = PatchRequest { timeout_ms: left, ..request.clone() };
        client.patch_apply(request, &file, stop, tell)
    });
    let patched = match patched? {
        Ok(patched) => patched,
        Err(status) => return Ok(status),
    };
    if options.json {
        let mut out = io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, &patched)?;
        writeln!(out)?;
    } else {
        say(text::patched(&patched));
    }
    Ok(Status::Success)
}

/// Reads a payload.
///
/// # Errors
/// It can't be read, or is larger than any payload may be.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let unreadable = || format!("{} can't be read", path.display());
    let mut bytes = Vec::new();
    let mut file = File::open(path).with_context(unreadable)?.take(MAX_PAYLOAD as u64 + 1);
    file.read_to_end(&mut bytes).with_context(unreadable)?;
    ensure!(
        bytes.len() <= MAX_PAYLOAD,
        "{} has more than {} MiB, and a payload has at most that",
        path.display(),
        MAX_PAYLOAD >> 20
    );
    Ok(bytes)
}

/// What a file is called in lists.
fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let mut length = name.len().min(MAX_FILE_NAME);
    while !name.is_char_boundary(length) {
        length -= 1;
    }
    name[..length].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_sent_as_they_are_given() {
        for text in ["new=old", "new=old,2"] {
            assert_eq!(written(&Map::parse(text).unwrap()), text);
        }
        assert!(Map::parse("old").unwrap_err().to_string().contains("NEW=OLD"));
    }

    #[test]
    fn a_file_is_called_by_its_name_without_the_folder() {
        assert_eq!(file_name(Path::new("build/x86_64/fix.o")), "fix.o");
        assert_eq!(file_name(Path::new(&"é".repeat(600))).len(), MAX_FILE_NAME - 1);
    }
}
