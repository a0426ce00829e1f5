//! What `vmm bench stop-all` can be told, and what of it makes sense together.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use vmm::bench::FUNCTIONS;
use vmm::kvm::MAX_CPUS;

use crate::cli::size::Size;

/// The most rounds: with the slowest stops they take a day.
const MAX_ROUNDS: usize = 1_000_000;

/// Measure how long all vCPUs of a busy guest stand still to patch its functions, and where that time
/// goes
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// What runs the guest; under qemu it is emulated
    #[arg(long, value_name = "ENGINE", default_value = "kvm")]
    pub engine: Engine,

    /// How many vCPUs the guest has; several numbers make as many guests, one after the other
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,4",
          value_parser = cpus)]
    pub cpus: Vec<usize>,

    /// How many functions are patched, evenly over all that can be
    #[arg(
        long,
        value_name = "N|all,...",
        value_delimiter = ',',
        default_value = "1,10,100,1000,all"
    )]
    pub sites: Vec<Sites>,

    /// How many rounds are made with each number of vCPUs and functions
    #[arg(long, value_name = "N", default_value = "100", value_parser = rounds)]
    pub rounds: usize,

    /// The guest: bare is our own, which any KVM runs; stock is the kernel of --kernel
    #[arg(long, value_name = "GUEST", default_value = "bare")]
    pub guest: Guest,

    /// The stock guest's kernel: an image as distributions ship it in /boot
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,

    /// Its initial RAM file system, which has to keep it busy
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<PathBuf>,

    /// Its kernel parameters, appended to those that vmm sets
    #[arg(
        long,
        value_name = "PARAMETERS",
        default_value = "",
        hide_default_value = true,
        requires = "kernel"
    )]
    pub cmdline: String,

    /// Its memory: a number with K, M, G or T behind it; a bare number means MiB
    #[arg(long, value_name = "SIZE", default_value = "512M", requires = "kernel")]
    pub memory: Size,

    /// What it prints when it has come to be busy; without this it is measured from when its kernel
    /// can be patched
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    pub busy_at: Option<String>,

    /// Write the figures as JSON to a file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Draw them into a file, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
Each round stops the guest and lets it go, then stops it, patches its functions and lets it go, and
then puts them back in a third stop. Of all these the table shows the phases, percentile by percentile,
and what the guest saw of them by its own clock.

Exit status:
  0    the figures are on standard output
  1    something failed; standard error says what
  2    the command line makes no sense
  129  SIGHUP
  130  SIGINT
  143  SIGTERM

Examples:
  On our own guest, which needs nothing but /dev/kvm:
    vmm bench stop-all

  One function against all of them, with a picture:
    vmm bench stop-all --cpus 2 --sites 1,all --rounds 1000 --plot stops.svg --json stops.json

  On a stock kernel that is kept busy by its initrd:
    vmm bench stop-all --guest stock --kernel /boot/vmlinuz --initrd busy.img";

/// What runs the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// The kernel's KVM
    Kvm,
    /// QEMU's emulation (TCG), which runs stock kernels everywhere
    Qemu,
}

/// What is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Guest {
    /// Our own, with as many functions as a kernel has, all of which it calls all the time
    Bare,
    /// A distribution's kernel
    Stock,
}

/// How many functions are patched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sites {
    /// So many.
    Some(NonZeroUsize),
    /// All that can be.
    All,
}

impl Sites {
    /// The number, of so many that there are.
    pub fn of(self, all: usize) -> usize {
        match self {
            Sites::Some(count) => count.get(),
            Sites::All => all,
        }
    }
}

impl FromStr for Sites {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<usize>().map(NonZeroUsize::new) {
            Ok(Some(count)) => Ok(Sites::Some(count)),
            _ if text == "all" => Ok(Sites::All),
            _ => Err("a number of functions from 1 on, or all, is wanted".to_owned()),
        }
    }
}

impl fmt::Display for Sites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sites::Some(count) => write!(f, "{count}"),
            Sites::All => f.write_str("all"),
        }
    }
}

fn cpus(text: &str) -> Result<usize, String> {
    let cpus = text.parse().ok().filter(|cpus| (1..=MAX_CPUS).contains(cpus));
    cpus.ok_or_else(|| format!("a whole number from 1 to {MAX_CPUS} is wanted"))
}

fn rounds(text: &str) -> Result<usize, String> {
    let rounds = text.parse().ok().filter(|rounds| (1..=MAX_ROUNDS).contains(rounds));
    rounds.ok_or_else(|| format!("a whole number from 1 to {MAX_ROUNDS} is wanted"))
}

/// Options that contradict each other.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// A stock guest is nothing without its kernel.
    #[error("--guest stock needs a kernel to boot; name it with --kernel FILE")]
    NoKernel,
    /// The bare guest has its own.
    #[error("--kernel is for stock guests; say --guest stock to boot it")]
    Kernel,
    /// QEMU has no door for the bare guest.
    #[error("QEMU runs stock guests only; say --guest stock and --kernel FILE, or --engine kvm")]
    BareUnderQemu,
    /// The bare guest has not so many.
    #[error("--sites {wanted}: the bare guest has {FUNCTIONS} functions; say all for all of them")]
    Sites {
        /// How many were asked for.
        wanted: usize,
    },
    /// Both would be written over each other.
    #[error("the figures and the plot can't both go to {}; name two files", .0.display())]
    BothInFile(PathBuf),
}

impl Options {
    /// Checks what can be checked before a guest runs.
    ///
    /// # Errors
    /// [`Conflict`].
    pub fn check(&self) -> Result<(), Conflict> {
        match (self.guest, self.engine, &self.kernel) {
            (Guest::Bare, Engine::Qemu, _) => return Err(Conflict::BareUnderQemu),
            (Guest::Bare, _, Some(_)) => return Err(Conflict::Kernel),
            (Guest::Stock, _, None) => return Err(Conflict::NoKernel),
            _ => {}
        }
        let most = self.sites.iter().map(|sites| sites.of(0)).max().unwrap_or(0);
        if self.guest == Guest::Bare && most > FUNCTIONS {
            return Err(Conflict::Sites { wanted: most });
        }
        match (&self.json, &self.plot) {
            (Some(json), Some(plot)) if json == plot => Err(Conflict::BothInFile(json.clone())),
            _ => Ok(()),
        }
    }
}
