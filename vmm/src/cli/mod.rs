//! The command line: one module a subcommand, and what they share.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

mod attach;
mod bench;
mod call_options;
mod clock;
mod count_options;
mod doctor;
mod graph_options;
mod info;
mod output;
mod pads;
mod patch;
mod progress;
mod ps;
mod reach;
mod report;
mod run;
mod serving;
mod size;
mod status;
mod summary;
mod top;
mod trace;
mod trace_options;
mod value_options;
mod watch;

use status::Status;

/// Boots Linux guests and traces their kernel functions from outside, with nothing put into them
#[derive(Debug, Parser)]
#[command(name = "vmm", version, after_help = EXAMPLE, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Options>),
    Attach(attach::Options),
    Ps(ps::Options),
    Info(info::Options),
    Pads(pads::Options),
    Trace(trace::Options),
    Top(top::Options),
    Report(report::Options),
    Patch(patch::Options),
    Bench(bench::Options),
    Doctor(doctor::Options),
}

const EXAMPLE: &str = "\
Example:
  vmm doctor
  vmm run --kernel /boot/vmlinuz --initrd initrd.img --trace func -f 'vfs_*'";

/// Runs the program and says how it ended.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return without_command(&error).into(),
    };
    let result = match cli.command {
        Command::Run(options) => run::run(&options),
        Command::Attach(options) => attach::run(&options),
        Command::Ps(options) => ps::run(&options),
        Command::Info(options) => info::run(&options),
        Command::Pads(options) => pads::run(&options),
        Command::Trace(options) => trace::run(&options),
        Command::Top(options) => top::run(&options),
        Command::Report(options) => report::run(&options),
        Command::Patch(options) => patch::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Doctor(options) => doctor::run(&options),
    };
    result.unwrap_or_else(|error| fail(&error)).into()
}

/// Help and version that were asked for, and command lines that make no sense.
fn without_command(error: &clap::Error) -> Status {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A reader that left has what it wanted.
            let _ = error.print();
            Status::Success
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Status::Usage
        }
        _ => {
            say(usage_sentence(&error.render().to_string()));
            Status::Usage
        }
    }
}

/// What clap says over several paragraphs, as one sentence.
fn usage_sentence(rendered: &str) -> String {
    let said = rendered.split("\nUsage:").next().unwrap_or(rendered);
    let paragraphs = said.split("\n\n").filter(|paragraph| !paragraph.contains("try '--help'"));
    let sentence: Vec<String> = paragraphs
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|paragraph| !paragraph.is_empty())
        .collect();
    let sentence = sentence.join("; ");
    sentence.strip_prefix("error: ").unwrap_or(&sentence).to_string()
}

/// Says on stderr, in one sentence, what failed and why.
fn fail(error: &anyhow::Error) -> Status {
    if is_broken_pipe(error) {
        return Status::Success;
    }
    say(sentence(error));
    let is_usage = error.is::<run::Conflict>()
        || error.is::<bench::Conflict>()
        || error.is::<graph_options::Contradiction>();
    if is_usage { Status::Usage } else { Status::Failure }
}

/// Whether whoever read our output has what they wanted and left.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind == Some(io::ErrorKind::BrokenPipe)
}

/// Whether the guest has left the terminal's last line unfinished.
static LINE_OPEN: AtomicBool = AtomicBool::new(false);

/// Says something on standard error, in the program's name and on a line of its own. That nobody
/// listens is no reason to fail.
fn say(message: impl fmt::Display) {
    let begin = if LINE_OPEN.swap(false, Ordering::Relaxed) { "\n" } else { "" };
    let _ = writeln!(io::stderr(), "{begin}vmm: {message}");
}

/// An error and its causes, joined. A cause that its effect's message has spelled out already is
/// not repeated.
fn sentence(error: &anyhow::Error) -> String {
    let mut sentence = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if sentence.contains(&cause) {
            continue;
        }
        if !sentence.is_empty() {
            sentence.push_str(": ");
        }
        sentence.push_str(&cause);
    }
    sentence
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        let mut cli = Cli::command();
        assert!(cli.render_long_help().to_string().contains("Example"));
        for command in cli.get_subcommands_mut() {
            assert!(command.render_long_help().to_string().contains("Example"), "{command}");
        }
    }

    #[test]
    fn a_cause_is_said_once() {
        let inner = io::Error::other("no such thing");
        let error = anyhow::Error::new(inner).context("can't open x: no such thing");
        assert_eq!(sentence(&error), "can't open x: no such thing");
        let error = error.context("can't start");
        assert_eq!(sentence(&error), "can't start: can't open x: no such thing");
    }

    #[test]
    fn a_usage_error_becomes_one_line() {
        let error = Cli::try_parse_from(["vmm", "run", "--kernel", "k", "--cpus", "0"]);
        let said = usage_sentence(&error.unwrap_err().render().to_string());
        assert_eq!(said.lines().count(), 1);
        assert_eq!(said, "invalid value '0' for '--cpus <N>': a guest has at least 1 CPU");
    }
}
