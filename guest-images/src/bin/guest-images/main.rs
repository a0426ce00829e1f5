//! `guest-images`: the guests of this project's tests and demos, for scripts.

mod lab;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use guest_images::{Architecture, CaptureOptions, Initramfs, Series};

/// Stock kernels, initramfs archives and captures of guests, made once and kept in a cache (the
/// directory in VMM_CACHE, or .cache/guests in the workspace).
#[derive(Parser)]
#[command(name = "guest-images", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Download a stock kernel, and print the path of its image
    #[command(after_help = "Example: vmm run --kernel $(guest-images kernel 6.1) ...\n\n\
        There are all series for x86_64 and aarch64, and 6.1, 6.12 and 7 for s390x.")]
    Kernel {
        /// 5.10, 6.1, 6.12, 6.18 or 7
        series: Series,
        /// What it runs on: x86_64, s390x or aarch64
        #[arg(long, value_name = "ARCH", default_value = "x86_64")]
        arch: Architecture,
    },
    /// Write an initramfs with the workloads of guest/work.c and the init of guest/init.sh
    Initramfs(InitramfsArguments),
    /// Boot a stock kernel and keep its memory, registers and symbols; print the directory
    Capture(CaptureArguments),
    /// Run a command in the nested lab: an emulated machine whose kernel has KVM
    #[command(
        after_help = "Example: guest-images lab --program target/release/vmm -- vmm doctor\n\n\
        On a terminal, the command gets a terminal too; Ctrl-] leaves the lab at once. The exit \
        status is the command's."
    )]
    Lab(lab::LabArguments),
}

#[derive(Args)]
struct InitramfsArguments {
    /// Where to write it
    #[arg(long, short, value_name = "FILE")]
    out: PathBuf,
    /// What the guest's processors are: x86_64, s390x or aarch64
    #[arg(long, value_name = "ARCH", default_value = "x86_64")]
    arch: Architecture,
    /// The kernel whose modules are meant
    #[arg(long, value_name = "SERIES", default_value = "6.1")]
    kernel: Series,
    /// A module for init to load, with what it depends on
    #[arg(long, value_name = "NAME")]
    module: Vec<String>,
    /// A file of the host to put in
    #[arg(long, value_name = "HOST:GUEST")]
    file: Vec<String>,
}

#[derive(Args)]
struct CaptureArguments {
    /// 5.10, 6.1, 6.12, 6.18 or 7
    series: Series,
    /// What the guest's processors are: x86_64, s390x or aarch64
    #[arg(long, value_name = "ARCH", default_value = "x86_64")]
    arch: Architecture,
    /// QEMU's name of the processor: of x86_64, max has 5-level paging, Skylake-Server 4 levels and PTI
    #[arg(long, default_value = "max")]
    cpu: String,
    /// Number of virtual processors
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// RAM in MiB, up to 2048
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(128..=2048))]
    memory: u32,
    /// More words for the kernel's command line, such as nokaslr or pti=on
    #[arg(long, default_value = "")]
    cmdline: String,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("guest-images: {}", sentence(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes as one sentence; many an error names its cause already.
fn sentence(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Does what was asked for; the exit status.
fn run(command: Command) -> Result<u8> {
    match command {
        Command::Kernel { series, arch } => {
            println!("{}", guest_images::kernel_for(arch, series)?.vmlinuz.display());
        }
        Command::Initramfs(arguments) => write_initramfs(&arguments)?,
        Command::Capture(arguments) => {
            let kernel = guest_images::kernel_for(arguments.arch, arguments.series)?;
            let options = CaptureOptions {
                cpu: arguments.cpu,
                cpus: arguments.cpus,
                memory_mib: arguments.memory,
                cmdline: arguments.cmdline,
            };
            println!("{}", guest_images::capture(&kernel, &options)?.directory.display());
        }
        Command::Lab(arguments) => return lab::run(&arguments),
    }
    Ok(0)
}

/// The two names of an option's value.
fn pair<'a>(option: &str, form: &str, names: &'a str) -> Result<(&'a str, &'a str)> {
    names
        .split_once(':')
        .with_context(|| format!("{option} takes {form}, and {names:?} has no colon"))
}

fn write_initramfs(arguments: &InitramfsArguments) -> Result<()> {
    let mut initramfs = Initramfs::for_architecture(arguments.arch)?;
    if !arguments.module.is_empty() {
        let names: Vec<&str> = arguments.module.iter().map(String::as_str).collect();
        let kernel = guest_images::kernel_for(arguments.arch, arguments.kernel)?;
        initramfs = initramfs.modules(&kernel, &names)?;
    }
    for names in &arguments.file {
        let (host, guest) = pair("--file", "HOST:GUEST", names)?;
        initramfs = initramfs.host_file(host.as_ref(), guest)?;
    }
    fs::write(&arguments.out, initramfs.build())
        .with_context(|| format!("cannot write {}", arguments.out.display()))
}
