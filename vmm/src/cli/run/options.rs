//! What `vmm run` can be told, and what of it makes sense together.

use std::convert::Infallible;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};

use patcher::region::{MIN_RING_BYTES, rings_window_len};
use vmm::control::Name;
use vmm::kvm::{MAX_CPUS, MAX_RINGS};
use vmm::qemu::Architecture;

use crate::cli::output::Output;
use crate::cli::size::Size;
use crate::cli::trace_options::TraceOptions;

/// Boot a Linux kernel in a virtual machine, and trace its functions from outside
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// The kernel: an image as distributions ship it in /boot
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,

    /// An initial RAM file system
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,

    /// Kernel parameters, appended to those that vmm sets; where two disagree, the kernel takes the
    /// later one
    #[arg(long, value_name = "PARAMETERS", default_value = "", hide_default_value = true)]
    pub cmdline: String,

    /// How many CPUs the guest has
    #[arg(long, value_name = "N", default_value = "1", value_parser = cpus)]
    pub cpus: NonZeroU32,

    /// How much memory the guest has: a number with K, M, G or T behind it; a bare number means MiB
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    pub memory: Size,

    /// The guest's name, by which vmm ps, info, pads and trace know it. By default guest1, guest2
    /// and so on
    #[arg(long, value_name = "NAME")]
    pub name: Option<Name>,

    /// The guest's architecture: x86_64, s390x or aarch64. By default this host's
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<Architecture>,

    /// What runs the guest
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub accel: Accel,

    /// Where the guest's console is: stdio (this terminal, both ways), off, or a file for what the
    /// guest prints. By default stdio; off if the trace goes to standard output
    #[arg(long, value_name = "stdio|off|FILE")]
    pub console: Option<Console>,

    #[command(flatten)]
    pub tracing: TraceOptions,

    /// How much each CPU's ring holds until it is read, rounded up to a power of two; a size as for
    /// --memory. By default 16M for each CPU, less with many CPUs
    #[arg(long, visible_alias = "buffer-size", value_name = "SIZE", requires = "trace")]
    pub ring_size: Option<Size>,
}

const AFTER_HELP: &str = "\
Keys, where the console is this terminal:
  Ctrl-a x  end the guest and leave
  Ctrl-a a  send Ctrl-a to the guest
  Ctrl-a h  show the keys

Exit status:
  0    the guest powered itself off, or the trace's reader closed the pipe
  1    something failed; standard error says what
  2    the command line makes no sense
  3    the guest rebooted
  4    the guest's kernel panicked
  5    the virtual machine can't go on, as after a triple fault
  129  SIGHUP
  130  SIGINT, or Ctrl-a x
  143  SIGTERM

Examples:
  Boot a kernel, with its console on this terminal:
    vmm run --kernel /boot/vmlinuz --initrd initrd.img --memory 1G --cpus 2

  Watch which functions of the VFS it calls, but for one:
    vmm run --kernel /boot/vmlinuz --initrd initrd.img --trace func -f 'vfs_*' -n vfs_getattr

  See what its reading of files calls, and how long each of it takes:
    vmm run --kernel /boot/vmlinuz --initrd initrd.img --trace graph --graph-function vfs_read

  Trace every function into a file, and use the console meanwhile:
    vmm run --kernel /boot/vmlinuz --initrd initrd.img --trace func -o trace.txt

  Trace the whole boot for ui.perfetto.dev:
    vmm run --kernel /boot/vmlinuz --initrd initrd.img --trace func -o boot.vmmrec
    vmm report boot.vmmrec -o boot.pftrace

  The same for a mainframe's kernel, which QEMU emulates:
    vmm run --arch s390x --kernel vmlinuz --initrd initrd.img --trace func -o trace.txt";

/// What runs the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Accel {
    /// KVM where it runs stock kernels, else QEMU with KVM, else QEMU's emulation; standard error
    /// says which and why
    Auto,
    /// The kernel's KVM, even one that only emulates guest kernels and will not get far with them
    Kvm,
    /// QEMU's emulation (TCG): slow, and runs every architecture everywhere
    Tcg,
}

/// Where the guest's console is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Console {
    /// On standard input and output.
    Stdio,
    /// What the guest prints is dropped, and nothing can be typed.
    Off,
    /// What the guest prints goes to a file, and nothing can be typed.
    File(PathBuf),
}

impl FromStr for Console {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "stdio" => Console::Stdio,
            "off" => Console::Off,
            file => Console::File(file.into()),
        })
    }
}

fn cpus(text: &str) -> Result<NonZeroU32, String> {
    match text.parse::<u32>().map(NonZeroU32::new) {
        Ok(Some(cpus)) if cpus.get() as usize <= MAX_CPUS => Ok(cpus),
        Ok(Some(_)) => Err(format!("a guest has at most {MAX_CPUS} CPUs")),
        Ok(None) => Err("a guest has at least 1 CPU".to_string()),
        Err(_) => Err(format!("a whole number from 1 to {MAX_CPUS} is wanted")),
    }
}

impl Options {
    /// Memory for rings in bytes, as a machine wants it, or `None` for what it has anyway.
    ///
    /// # Errors
    /// It is more than there can be.
    pub fn rings(&self) -> Result<Option<u64>, Conflict> {
        let Some(size) = self.ring_size else { return Ok(None) };
        let cpus = self.cpus.get();
        let each = size.bytes().max(MIN_RING_BYTES).checked_next_power_of_two();
        each.filter(|each| *each <= MAX_RINGS)
            .map(|each| rings_window_len(cpus as usize, each).next_power_of_two())
            .filter(|all| *all <= MAX_RINGS)
            .map(Some)
            .ok_or(Conflict::Rings { size, cpus })
    }

    /// Where the console is. Records and the console never share standard output.
    ///
    /// # Errors
    /// Both were told to go to the same place.
    pub fn console(&self) -> Result<Console, Conflict> {
        let records = self.tracing.records().map(|to| to.output);
        match (&self.console, &records) {
            (None, Some(Output::Stdout)) => Ok(Console::Off),
            (None, _) => Ok(Console::Stdio),
            (Some(Console::Stdio), Some(Output::Stdout)) => Err(Conflict::BothOnStdout),
            (Some(Console::File(console)), Some(Output::File(output))) if console == output => {
                Err(Conflict::BothInFile(console.clone()))
            }
            (Some(console), _) => Ok(console.clone()),
        }
    }
}

/// Options that contradict each other.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The console and the records would be mixed on standard output.
    #[error(
        "the trace and the guest's console can't both be on standard output; send one of them to \
         a file with -o FILE or --console FILE"
    )]
    BothOnStdout,
    /// The console and the records would be mixed in one file.
    #[error("the trace and the guest's console can't both go to {}; name two files", .0.display())]
    BothInFile(PathBuf),
    /// Rings so large can't be brought into a guest.
    #[error(
        "--ring-size {size} for each of {cpus} CPUs is more than the {} MiB that all rings and \
         their headers can have; choose a smaller one",
        MAX_RINGS >> 20
    )]
    Rings {
        /// What was asked for.
        size: Size,
        /// For how many CPUs.
        cpus: u32,
    },
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use patcher::addr::Gva;
    use patcher::region::{RECORD_BYTES, RingLayout};

    use super::*;
    use crate::cli::trace_options::Tracer;

    #[derive(Debug, Parser)]
    struct Run {
        #[command(flatten)]
        options: Options,
    }

    fn parse(line: &str) -> Result<Options, String> {
        let words = ["run", "--kernel", "k"].into_iter().chain(line.split_whitespace());
        Run::try_parse_from(words).map(|run| run.options).map_err(|error| error.to_string())
    }

    fn refused(line: &str, reason: &str) {
        let error = parse(line).unwrap_err();
        assert!(error.contains(reason), "{line:?} is refused with: {error}");
    }

    #[test]
    fn a_kernel_is_all_that_is_needed() {
        let options = parse("").unwrap();
        assert_eq!(options.kernel, PathBuf::from("k"));
        assert_eq!(options.cpus.get(), 1);
        assert_eq!(options.memory.bytes(), 512 << 20);
        assert_eq!(options.accel, Accel::Auto);
        assert_eq!(options.tracing.records(), None);
        assert_eq!(options.console(), Ok(Console::Stdio));
        assert!(Run::try_parse_from(["run"]).unwrap_err().to_string().contains("--kernel"));
    }

    #[test]
    fn filters_are_collected_in_order() {
        let options =
            parse("--trace func -f vfs_* --filter ext4_* -n vfs_get* --notrace x -o out").unwrap();
        assert_eq!(options.tracing.trace, Some(Tracer::Func));
        assert_eq!(options.tracing.filter, ["vfs_*", "ext4_*"]);
        assert_eq!(options.tracing.notrace, ["vfs_get*", "x"]);
        assert_eq!(options.tracing.records().unwrap().output, Output::File("out".into()));
    }

    #[test]
    fn options_of_a_trace_need_a_trace() {
        for line in ["-f x", "-n x", "-o x", "--ring-size 1M", "--buffer-size 1M", "--overwrite"] {
            refused(line, "--trace");
        }
    }

    #[test]
    fn values_out_of_range_are_refused_with_their_reason() {
        refused("--cpus 0", "a guest has at least 1 CPU");
        refused("--cpus 255", "a guest has at most 254 CPUs");
        refused("--cpus two", "a whole number from 1 to 254");
        refused("--cpus -1", "unexpected argument");
        refused("--memory 0", "a size must be more than zero");
        refused("--memory lots", "a size is a whole number");
        refused("--trace stack", "invalid value 'stack'");
        refused("--trace graph --max-depth 0", "0 is not in 1..");
        refused("--trace graph --threshold 0s", "a time must be more than zero");
        refused("--accel xen", "invalid value 'xen'");
        assert!(Run::try_parse_from(["r", "--kernel", "k", "--trace", "func", "-f", ""]).is_err());
    }

    #[test]
    fn what_a_graph_is_to_show_needs_a_graph() {
        let request = |line: &str| parse(line).unwrap().tracing.request();
        let options = "--max-depth 3 --graph-function vfs_* --threshold 10us";
        let graph = request(&format!("--trace graph {options}")).unwrap().unwrap().graph;
        assert_eq!((graph.max_depth, graph.threshold_ns), (Some(3), Some(10_000)));
        assert_eq!(graph.functions, ["vfs_*"]);
        for line in [options.to_owned(), format!("--trace func {options}")] {
            assert!(request(&line).unwrap_err().to_string().contains("graph"), "{line}");
        }
        let trapped = request("--trace graph --method trap").unwrap_err();
        assert!(trapped.to_string().contains("not by traps"), "{trapped}");
    }

    #[test]
    fn only_what_is_recorded_can_be_overwritten() {
        let request = |line: &str| parse(line).unwrap().tracing.request();
        for tracer in ["func", "graph"] {
            assert!(request(&format!("--trace {tracer} --overwrite")).unwrap().unwrap().overwrite);
        }
        assert!(!request("--trace func").unwrap().unwrap().overwrite);
        let refused = request("--trace count --overwrite").unwrap_err().to_string();
        assert!(refused.contains("nothing to overwrite"), "{refused}");
    }

    #[test]
    fn rings_are_as_large_as_asked_for_or_refused() {
        let rings = |line: &str| parse(&format!("--trace func {line}")).unwrap().rings();
        assert_eq!(rings("--cpus 2"), Ok(None));
        for (line, cpus, each) in
            [("--ring-size 1K", 1, 4 << 10), ("--cpus 3 --buffer-size 5M", 3, 8 << 20)]
        {
            let window = rings(line).unwrap().unwrap();
            let layout = RingLayout::new(Gva(0), window, cpus).unwrap();
            assert!(layout.capacity() * RECORD_BYTES >= each, "{line}");
        }
        for line in ["--ring-size 1G", "--ring-size 16777215T", "--cpus 100 --ring-size 4M"] {
            assert!(matches!(rings(line), Err(Conflict::Rings { .. })), "{line}");
        }
    }

    #[test]
    fn the_console_gives_way_to_records_on_standard_output() {
        let console = |line: &str| parse(line).unwrap().console();
        assert_eq!(console("--trace func"), Ok(Console::Off));
        assert_eq!(console("--trace func -o -"), Ok(Console::Off));
        assert_eq!(console("--trace func -o t"), Ok(Console::Stdio));
        assert_eq!(console("--trace func --console c"), Ok(Console::File("c".into())));
        assert_eq!(console("--trace func --console off -o t"), Ok(Console::Off));
        assert_eq!(console("--trace func --console stdio"), Err(Conflict::BothOnStdout));
        assert_eq!(console("--trace func --console t -o t"), Err(Conflict::BothInFile("t".into())));
    }
}
