//! `vmm patch`: replaces functions of a running guest's kernel, and takes them back.

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use vmm::control::Name;

use super::status::Status;

mod apply;
mod check;
mod fit;
mod list;
mod revert;
pub mod text;
mod waiting;

/// Replace functions of a guest's kernel while it runs, and take them back
#[derive(Debug, Args)]
#[command(
    after_help = AFTER_HELP,
    override_usage = "vmm patch <NAME> apply [OPTIONS] <FILE>\n       \
                      vmm patch <NAME> list [OPTIONS]\n       \
                      vmm patch <NAME> revert [OPTIONS] <ID>\n       \
                      vmm patch check --kernel <KERNEL> [OPTIONS] <FILE>"
)]
pub struct Options {
    /// The guest, as vmm ps lists it; none for check
    name: Option<Name>,

    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Apply(apply::Options),
    List(list::Options),
    Revert(revert::Options),
    Check(check::Options),
}

const AFTER_HELP: &str = "\
A patch stays until it is reverted, or until the vmm that controls the guest ends: then the guest is
left as it was found.

Examples:
  Replace what fix.o has functions for, and take them back:
    vmm patch guest1 apply fix.o
    vmm patch guest1 revert 1

  See which functions of which patches are in force:
    vmm patch guest1 list

  See whether fix.o fits a kernel, without a guest:
    vmm patch check fix.o --kernel /boot/vmlinuz";

/// What exit statuses mean for those commands that change a guest.
const EXIT_STATUS: &str = "\
Exit status:
  0    it is done
  1    it is refused or failed, and nothing was changed; standard error says why
  2    the command line makes no sense
  6    until the time was over somebody was inside a function concerned; nothing was changed
  129  SIGHUP
  130  SIGINT
  143  SIGTERM";

/// Patches.
///
/// # Errors
/// It can't be done.
pub fn run(options: &Options) -> Result<Status> {
    if let What::Check(options) = &options.what {
        return check::run(options);
    }
    let Some(name) = &options.name else {
        // clap takes a guest of the name of a subcommand for that subcommand.
        bail!("which guest? say `vmm patch NAME …`; `vmm ps` lists those that there are");
    };
    match &options.what {
        What::Apply(options) => apply::run(name, options),
        What::List(options) => list::run(name, options),
        What::Revert(options) => revert::run(name, options),
        What::Check(options) => check::run(options),
    }
}
