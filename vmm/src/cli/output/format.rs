//! The forms that a trace can have.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::path::PathBuf;

use clap::ValueEnum;
use patcher::trace::sink::GraphColumns;

use super::{CountForm, Output};
use crate::cli::summary::size;

/// A form of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text, as tracefs shows it
    Ftrace,
    /// A trace.dat, for trace-cmd and KernelShark
    TraceDat,
    /// A trace for Perfetto: ui.perfetto.dev
    Perfetto,
    /// One JSON object a line
    Json,
    /// A recording, which vmm report makes into any of the others; cheap to write, and there up to
    /// the last moment whatever becomes of vmm
    Vmm,
}

impl Format {
    /// The form that a file's name asks for.
    fn of(output: &Output) -> Self {
        let Output::File(path) = output else { return Self::Ftrace };
        match path.extension().and_then(OsStr::to_str) {
            Some("dat") => Self::TraceDat,
            Some("json" | "jsonl") => Self::Json,
            Some("pftrace" | "perfetto-trace") => Self::Perfetto,
            Some("vmmrec") => Self::Vmm,
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
    /// What text of a trace of returns shows beside them.
    pub columns: GraphColumns,
    /// How counts or latencies are shown, if that is what is traced.
    pub counts: Option<CountForm>,
    /// The picture that is made of a trace of returns beside it.
    pub flame: Option<PathBuf>,
}

impl Destination {
    /// The form that it has.
    pub fn format(&self) -> Format {
        self.format.unwrap_or_else(|| Format::of(&self.output))
    }

    /// Lines for the end of a summary: where the trace is, how large, and what opens it, and the same of
    /// the picture. Nothing of what is no file.
    pub fn told(&self) -> Option<String> {
        let flame = self.flame.as_ref().and_then(|path| {
            let file = fs::metadata(path).ok().filter(Metadata::is_file)?;
            let (path, size) = (path.display(), size(file.len()));
            Some(format!("  flame  {path}, {size}; open it in a browser\n"))
        });
        match (self.trace_told(), flame) {
            (None, None) => None,
            (trace, flame) => Some(trace.unwrap_or_default() + &flame.unwrap_or_default()),
        }
    }

    fn trace_told(&self) -> Option<String> {
        let Output::File(path) = &self.output else { return None };
        let file = fs::metadata(path).ok().filter(Metadata::is_file)?;
        let (path, size) = (path.display(), size(file.len()));
        let opens = match self.format() {
            _ if self.counts.is_some() => String::new(),
            Format::Ftrace => String::new(),
            Format::TraceDat => {
                format!("; trace-cmd report -O parent=1 -i {path}, or kernelshark {path}")
            }
            Format::Perfetto => "; open it in https://ui.perfetto.dev".to_owned(),
            Format::Json => format!("; jq . {path}"),
            Format::Vmm => format!("; vmm report {path}"),
        };
        Some(format!("  file   {path}, {size}{opens}\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_the_one_asked_for_or_goes_by_the_files_name() {
        let columns = GraphColumns::default();
        let form = |output: &str, format| {
            let output = output.parse().unwrap();
            Destination { output, format, columns, counts: None, flame: None }.format()
        };
        assert_eq!(form("-", None), Format::Ftrace);
        assert_eq!(form("a.dat/trace", None), Format::Ftrace);
        assert_eq!(form("dir/trace.dat", None), Format::TraceDat);
        assert_eq!(form("trace.dat", Some(Format::Ftrace)), Format::Ftrace);
        assert_eq!(form("a.jsonl", None), Format::Json);
        assert_eq!(form("a.pftrace", None), Format::Perfetto);
        assert_eq!(form("a.vmmrec", None), Format::Vmm);
    }
}
