//! Where records and what the guest prints go: opened before the guest starts, so that a path
//! that can't be written costs no boot.

use std::convert::Infallible;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, ensure};

mod counts;
mod flame;
mod format;
mod latencies;
mod nesting;
mod profile;
mod records;
mod stream;

pub use counts::CountForm;
pub use format::{Destination, Format};
pub use latencies::TimeUnit;
pub use profile::FunctionTime;
pub use records::Records;
use stream::Stream;

/// Where the records go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// To standard output.
    Stdout,
    /// To a file.
    File(PathBuf),
}

impl FromStr for Output {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "-" => Output::Stdout,
            file => Output::File(file.into()),
        })
    }
}

/// Something to write to, opened.
struct Opened {
    file: File,
    /// What it is called in messages.
    name: String,
    /// Whether it is a regular file, which starts empty and of which any place can be written.
    is_file: bool,
}

impl Output {
    /// Opens it, and refuses to write over any of `inputs`.
    fn open(&self, inputs: &[&Path]) -> Result<Opened> {
        Ok(match self {
            Output::Stdout => Opened {
                file: File::from(io::stdout().as_fd().try_clone_to_owned()?),
                name: "standard output".into(),
                is_file: false,
            },
            Output::File(path) => {
                let file = create(path, inputs)?;
                let is_file = file.metadata()?.is_file();
                Opened { file, name: path.display().to_string(), is_file }
            }
        })
    }
}

/// Opens the file that is to hold what the guest prints, empty.
///
/// # Errors
/// It can't be written, or is one of `inputs`.
pub fn console_file(path: &Path, inputs: &[&Path]) -> Result<File> {
    let file = create(path, inputs)?;
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Opens `path` for writing and leaves what it holds.
fn create(path: &Path, inputs: &[&Path]) -> Result<File> {
    let shown = path.display();
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .with_context(|| format!("{shown} can't be written"))?;
    let ours = file.metadata()?;
    for input in inputs {
        let is_input = fs::metadata(input).is_ok_and(|input| same_file(&input, &ours));
        ensure!(!is_input, "{shown} can't be written: it is an input");
    }
    Ok(file)
}

fn same_file(a: &Metadata, b: &Metadata) -> bool {
    a.is_file() && (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(test)]
mod tests {
    use std::{env, process};

    use super::*;

    #[test]
    fn inputs_are_not_written_over_whatever_they_are_called() {
        let folder = env::temp_dir();
        let path = folder.join(format!("vmm-input-{}", process::id()));
        fs::write(&path, "a kernel").unwrap();
        let alias = folder.join(".").join(path.file_name().unwrap());
        let refused = console_file(&alias, &[&path]).unwrap_err().to_string();
        let kept = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(refused.contains("is an input"), "{refused}");
        assert_eq!(kept, "a kernel");
    }
}
