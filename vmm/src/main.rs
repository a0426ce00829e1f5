//! The `vmm` program.

use std::process::ExitCode;

mod cli;
mod signals;
mod terminal;

fn main() -> ExitCode {
    cli::main()
}
