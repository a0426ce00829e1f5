//! The forms that a trace can have.

use std::ffi::OsStr;

use clap::ValueEnum;

use super::Output;

/// A form of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text, as tracefs shows it
    Ftrace,
    /// A trace.dat, for trace-cmd and KernelShark
    TraceDat,
    /// One JSON object a line
    Json,
}

impl Format {
    /// The form that a file's name asks for.
    fn of(output: &Output) -> Self {
        let Output::File(path) = output else { return Self::Ftrace };
        match path.extension().and_then(OsStr::to_str) {
            Some("dat") => Self::TraceDat,
            Some("json" | "jsonl") => Self::Json,
            _ => Self::Ftrace,
        }
    }
}

/// Where a trace goes, and in which form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// Where.
    pub output: Output,
    /// The form that was asked for.
    pub format: Option<Format>,
}

impl Destination {
    /// The form that it has.
    pub fn format(&self) -> Format {
        self.format.unwrap_or_else(|| Format::of(&self.output))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_the_one_asked_for_or_goes_by_the_files_name() {
        let form =
            |output: &str, format| Destination { output: output.parse().unwrap(), format }.format();
        assert_eq!(form("-", None), Format::Ftrace);
        assert_eq!(form("a.dat/trace", None), Format::Ftrace);
        assert_eq!(form("dir/trace.dat", None), Format::TraceDat);
        assert_eq!(form("trace.dat", Some(Format::Ftrace)), Format::Ftrace);
        assert_eq!(form("a.jsonl", None), Format::Json);
    }
}
