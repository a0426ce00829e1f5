//! Running the host's programs: package tools, compressors, the C compiler.

use std::ffi::OsStr;
use std::io;
use std::process::{Command, ExitStatus, Stdio};

/// A program of the host could not do what it was run for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The program could not be started.
    #[error("cannot start {program}: {source}; scripts/setup.sh installs what is needed")]
    Start {
        /// The program's name.
        program: String,
        /// Why not.
        source: io::Error,
    },
    /// The program ran and failed.
    #[error("{program} failed ({status}): {message}")]
    Failed {
        /// The program's name and first argument.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// The last lines that it wrote to standard error.
        message: String,
    },
}

/// Runs `command` to its end and gives its standard output.
///
/// # Errors
/// The program does not start, or ends with another status than 0.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>, CommandError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = match command.env("LC_ALL", "C").stdin(Stdio::null()).output() {
        Ok(done) => done,
        Err(source) => return Err(CommandError::Start { program, source }),
    };
    if done.status.success() {
        return Ok(done.stdout);
    }
    Err(CommandError::Failed {
        program,
        status: done.status,
        message: last_lines(&String::from_utf8_lossy(&done.stderr)),
    })
}

/// The last three lines that say something, as one line.
fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    match lines.as_slice() {
        [] => "it said nothing".to_owned(),
        lines => lines[lines.len().saturating_sub(3)..].join("; "),
    }
}

/// A command with its arguments, in one expression.
pub(crate) fn command<I, S>(program: &str, arguments: I) -> Command
where
    I: IntoIterator<Item = S>,
    S: AsRef<OsStr>,
{
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_is_quoted() {
        let error = output(&mut command("sh", ["-c", "echo no such thing >&2; exit 3"]))
            .unwrap_err()
            .to_string();
        assert_eq!(error, "sh failed (exit status: 3): no such thing");
    }

    #[test]
    fn a_program_that_is_missing_is_named() {
        let error = output(&mut Command::new("no-such-program")).unwrap_err().to_string();
        assert!(error.starts_with("cannot start no-such-program: "), "{error}");
    }
}
