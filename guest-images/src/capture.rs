//! Captures: the memory and registers of a stock kernel that has booted, with what the guest itself
//! says about its symbols, so that readers of guest memory can be tested against the guest's own
//! word, without a guest.
//!
//! A capture is a directory that can be read without this crate. `capture.txt` has a line for each
//! fact, `KEY VALUE`:
//!
//! ```text
//! architecture x86_64                    or s390x, aarch64
//! release 6.1.0-57-cloud-amd64
//! cpu max
//! cpus 2
//! memory_mib 512
//! ram_base 0x0                           guest-physical address of ram.bin's first byte
//! cmdline nokaslr
//! vcpu 0 rip=0xffffffff81c0b2ab rsp=0x… …
//! vcpu 1 …
//! ```
//!
//! A vCPU's line has all the registers of its architecture that [`VcpuRegisters`] lists. RAM begins
//! at guest-physical address 0 on x86_64 and s390x, and at 0x40000000 on aarch64.
//!
//! Beside it: `ram.bin` (all RAM; sparse), `kallsyms` (the whole of /proc/kallsyms, with the
//! symbols of modules), `aff` (the whole of available_filter_functions), `modules` (/proc/modules),
//! `dmesg`, `notes` (/sys/kernel/notes) and `tasks` (the line /proc/PID/task/TID/stat of each task).

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::architecture::Architecture;
use crate::cache::{Cache, CacheError};
use crate::console::ConsoleError;
use crate::gdb::Gdb;
use crate::initramfs::{Initramfs, InitramfsError};
use crate::kernel::Kernel;
use crate::qemu::{Qemu, QemuError, QemuOptions, guest_directory};
use crate::registers::VcpuRegisters;

/// How long a guest may take to boot and to write out what it knows. An idle machine needs 15 s.
const BOOT: Duration = Duration::from_secs(240);

/// What the guest is asked for, each a file of the capture.
/// The tasks come last, as they change.
const DUMPS: [&str; 6] = ["kallsyms", "aff", "modules", "dmesg", "notes", "tasks"];

/// What runs in the guest beside its init: processes that sleep in functions that are known, one of
/// them of several threads.
const BESIDE: &str = "idle:100000+pipe+threads:3";

/// Counts what a capture holds: one of another edition is another entry of the cache.
const EDITION: u32 = 2;

/// Room for the dumps, in bytes; a 7.3 kernel fills 20 MiB.
const DUMP_DISK: u64 = 128 << 20;

/// A capture could not be made or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The guest's dumps are not all there.
    #[error("the guest wrote no whole dump of {0}")]
    NoDump(&'static str),
    /// A capture in the cache is not as it should be.
    #[error("the capture in {} has no valid {key}; remove it, and it is made anew", path.display())]
    Invalid {
        /// The capture's description.
        path: PathBuf,
        /// The fact that is missing or malformed.
        key: String,
    },
    /// The registers could not be read.
    #[error("cannot read the guest's registers: {0}")]
    Registers(io::Error),
    /// The guest did not come as far as it should.
    #[error(transparent)]
    Console(#[from] ConsoleError),
    /// QEMU failed.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// The guest's initramfs could not be made.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// The guest that is captured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaptureOptions {
    /// QEMU's name of the processor. Of x86_64, `max` pages with 5 levels, `Skylake-Server` with 4
    /// and with separate page tables for user space, `EPYC` with 4 and without. Of aarch64, `max`
    /// has 52-bit addresses, and `cortex-a72` 48 and separate page tables for user space.
    pub cpu: String,
    /// How many virtual processors.
    pub cpus: u32,
    /// RAM in MiB, up to 2048.
    pub memory_mib: u32,
    /// More words for the kernel's command line, such as `nokaslr` or `pti=on`.
    pub cmdline: String,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        Self { cpu: "max".to_owned(), cpus: 2, memory_mib: 512, cmdline: String::new() }
    }
}

/// The memory and registers of a guest that has booted and idles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capture {
    /// Where its files are.
    pub directory: PathBuf,
    /// What its processors are.
    pub architecture: Architecture,
    /// The kernel's release.
    pub release: String,
    /// How much RAM the guest has, in MiB.
    pub memory_mib: u32,
    /// Registers, by vCPU.
    pub vcpus: Vec<VcpuRegisters>,
}

impl Capture {
    /// All RAM; guest-physical address [`Architecture::ram_base`] is at offset 0.
    #[must_use]
    pub fn ram(&self) -> PathBuf {
        self.directory.join("ram.bin")
    }

    /// The guest's /proc/kallsyms, modules' symbols included.
    #[must_use]
    pub fn kallsyms(&self) -> PathBuf {
        self.directory.join("kallsyms")
    }

    /// The functions that the guest's own ftrace can trace, those of modules included.
    #[must_use]
    pub fn available_filter_functions(&self) -> PathBuf {
        self.directory.join("aff")
    }

    /// The notes of the kernel's ELF file, as the guest has them in /sys/kernel/notes.
    #[must_use]
    pub fn notes(&self) -> PathBuf {
        self.directory.join("notes")
    }

    /// The line `stat` of every task of the guest, threads included, shortly before the capture.
    #[must_use]
    pub fn tasks(&self) -> PathBuf {
        self.directory.join("tasks")
    }

    /// Reads a capture's description.
    ///
    /// # Errors
    /// It can't be read, or a fact is missing or malformed.
    pub fn open(directory: &Path) -> Result<Self, CaptureError> {
        let path = directory.join("capture.txt");
        let text = fs::read_to_string(&path).map_err(CacheError::during("read", &path))?;
        let invalid = |key: &str| CaptureError::Invalid { path: path.clone(), key: key.to_owned() };
        let facts: HashMap<&str, &str> =
            text.lines().filter_map(|line| line.split_once(' ')).collect();
        let fact = |key| facts.get(key).copied().ok_or_else(|| invalid(key));
        let architecture = fact("architecture")?.parse().map_err(|_| invalid("architecture"))?;
        let vcpus: Vec<VcpuRegisters> = text
            .lines()
            .filter_map(|line| line.strip_prefix("vcpu "))
            .map(|line| parse_vcpu(architecture, line).ok_or_else(|| invalid("vcpu")))
            .collect::<Result<_, _>>()?;
        if vcpus.is_empty() {
            return Err(invalid("vcpu"));
        }
        Ok(Self {
            directory: directory.to_owned(),
            architecture,
            release: fact("release")?.to_owned(),
            memory_mib: fact("memory_mib")?.parse().map_err(|_| invalid("memory_mib"))?,
            vcpus,
        })
    }
}

/// The capture of `kernel` under `options` in the default cache, made if it is not there yet.
///
/// # Errors
/// The guest does not boot or does not answer, or the cache can't be used.
pub fn capture(kernel: &Kernel, options: &CaptureOptions) -> Result<Capture, CaptureError> {
    capture_in(&Cache::locate(), kernel, options)
}

/// The same in a cache of one's own.
///
/// # Errors
/// As [`capture`].
pub fn capture_in(
    cache: &Cache,
    kernel: &Kernel,
    options: &CaptureOptions,
) -> Result<Capture, CaptureError> {
    let directory =
        cache.entry(&entry_name(kernel, options), |staging| make(kernel, options, staging))?;
    Capture::open(&directory)
}

fn entry_name(kernel: &Kernel, options: &CaptureOptions) -> String {
    let mut name = format!(
        "captures/edition-{EDITION}/{}/{}/{}-{}cpu-{}M",
        kernel.architecture, kernel.release, options.cpu, options.cpus, options.memory_mib
    );
    for word in options.cmdline.split_whitespace() {
        name.push('-');
        name.push_str(word);
    }
    // The slashes before stay; everything else that needs care in a path goes.
    let harmless = |c: char| c.is_ascii_alphanumeric() || "/+-=.".contains(c);
    name.replace(|c| !harmless(c), "_")
}

fn make(kernel: &Kernel, options: &CaptureOptions, into: &Path) -> Result<(), CaptureError> {
    let (device, modules) = dump_device(kernel.architecture);
    let initramfs =
        Initramfs::for_architecture(kernel.architecture)?.modules(kernel, modules)?.build();
    let guest_directory = guest_directory()?;
    let disk = guest_directory.path().join("dumps");
    let socket = guest_directory.path().join("gdb");
    File::create(&disk)
        .and_then(|file| file.set_len(DUMP_DISK))
        .map_err(CacheError::during("create", &disk))?;

    let mut qemu = QemuOptions::for_kernel(kernel, initramfs);
    qemu.cpu.clone_from(&options.cpu);
    qemu.cpus = options.cpus;
    qemu.memory_mib = options.memory_mib;
    qemu.ram_file = Some(into.join("ram.bin"));
    qemu.cmdline = format!(
        "{} vmm.beside={BESIDE} vmm.dump={} vmm.dump-to=/dev/vda vmm.after=stay",
        options.cmdline,
        DUMPS.join(",")
    );
    qemu.arguments = [
        "-drive".to_owned(),
        format!("if=none,id=dumps,format=raw,file={}", disk.display()),
        "-device".to_owned(),
        format!("{device},drive=dumps"),
        "-gdb".to_owned(),
        format!("unix:{},server=on,wait=off", socket.display()),
    ]
    .map(Into::into)
    .into();
    let guest = Qemu::start_in(guest_directory, &qemu)?;
    guest.console().wait_for("VMM-DONE", BOOT)?;

    let mut gdb = Gdb::connect(&socket, kernel.architecture).map_err(CaptureError::Registers)?;
    let vcpus: Vec<VcpuRegisters> = (0..options.cpus)
        .map(|vcpu| gdb.registers(vcpu))
        .collect::<Result<_, _>>()
        .map_err(CaptureError::Registers)?;
    let dumps = fs::read(&disk).map_err(CacheError::during("read", &disk))?;
    // The guest stands still; killed, it leaves its memory in the file as it is.
    drop(guest);
    drop(gdb);

    let write = |name: &str, bytes: &[u8]| {
        let path = into.join(name);
        fs::write(&path, bytes).map_err(CacheError::during("write", &path))
    };
    for name in DUMPS {
        write(name, dump(&dumps, name).ok_or(CaptureError::NoDump(name))?)?;
    }
    write("capture.txt", describe(kernel, options, &vcpus).as_bytes())?;
    Ok(())
}

/// The device behind /dev/vda, and the modules that drive it. What a machine has in place of PCI is
/// built into its kernels.
fn dump_device(architecture: Architecture) -> (&'static str, &'static [&'static str]) {
    match architecture {
        Architecture::X86_64 | Architecture::Aarch64 => {
            ("virtio-blk-pci", &["virtio_pci", "virtio_blk"])
        }
        Architecture::S390x => ("virtio-blk-ccw", &["virtio_blk"]),
    }
}

/// The bytes of one dump: all between its two marks.
fn dump<'a>(stream: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let find = |mark: &str, from: usize| {
        let mark = format!("VMM-DUMP-{mark} {name}\n").into_bytes();
        let at = stream[from..].windows(mark.len()).position(|window| window == mark)?;
        Some((from + at, from + at + mark.len()))
    };
    let (_, begin) = find("BEGIN", 0)?;
    let (end, _) = find("END", begin)?;
    Some(&stream[begin..end])
}

fn describe(kernel: &Kernel, options: &CaptureOptions, vcpus: &[VcpuRegisters]) -> String {
    let mut text = format!(
        "architecture {}\nrelease {}\ncpu {}\ncpus {}\nmemory_mib {}\nram_base {:#x}\ncmdline {}\n",
        kernel.architecture,
        kernel.release,
        options.cpu,
        options.cpus,
        options.memory_mib,
        kernel.architecture.ram_base(),
        options.cmdline
    );
    for (number, vcpu) in vcpus.iter().enumerate() {
        write!(text, "vcpu {number}").expect("a string takes all");
        for (name, value) in vcpu.fields() {
            write!(text, " {name}={value:#x}").expect("a string takes all");
        }
        text.push('\n');
    }
    text
}

/// Reads what follows the word `vcpu`.
fn parse_vcpu(architecture: Architecture, line: &str) -> Option<VcpuRegisters> {
    let values: HashMap<&str, u64> = line
        .split_whitespace()
        .skip(1)
        .map(|word| {
            let (name, value) = word.split_once('=')?;
            Some((name, u64::from_str_radix(value.strip_prefix("0x")?, 16).ok()?))
        })
        .collect::<Option<_>>()?;
    VcpuRegisters::read(architecture, |register| values.get(register.name).copied().ok_or(())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Series;

    fn kernel(architecture: Architecture) -> Kernel {
        Kernel {
            release: "6.1.0-1-test".to_owned(),
            architecture,
            series: Series::V6_1,
            vmlinuz: PathBuf::new(),
            config: None,
            modules: PathBuf::new(),
        }
    }

    #[test]
    fn a_description_is_read_back_as_it_was_written() {
        for architecture in Architecture::ALL {
            let directory = tempfile::tempdir().unwrap();
            let vcpus = [0x10, 0xffff_ffff_81c0_b2ab]
                .map(|value| VcpuRegisters::read(architecture, |_| Ok::<u64, ()>(value)).unwrap());
            let kernel = kernel(architecture);
            let text = describe(&kernel, &CaptureOptions::default(), &vcpus);
            fs::write(directory.path().join("capture.txt"), &text).unwrap();
            let capture = Capture::open(directory.path()).unwrap();
            assert_eq!(capture.architecture, architecture);
            assert_eq!(capture.release, "6.1.0-1-test");
            assert_eq!(capture.memory_mib, 512);
            assert_eq!(capture.vcpus, vcpus);

            let broken = text.replacen("=0x10", "=?", 1);
            fs::write(directory.path().join("capture.txt"), broken).unwrap();
            let error = Capture::open(directory.path()).unwrap_err().to_string();
            assert!(error.contains("no valid vcpu; remove it"), "{error}");
        }
    }

    #[test]
    fn a_dump_is_what_stands_between_its_marks() {
        let stream = b"VMM-DUMP-BEGIN a\n1\n2\nVMM-DUMP-END a\nVMM-DUMP-BEGIN ab\n3\n";
        assert_eq!(dump(stream, "a"), Some(b"1\n2\n".as_slice()));
        assert_eq!(dump(stream, "ab"), None);
    }

    #[test]
    fn captures_of_other_options_are_other_entries() {
        let options = CaptureOptions { cmdline: "nokaslr  a,b".to_owned(), ..Default::default() };
        assert_eq!(
            entry_name(&kernel(Architecture::S390x), &options),
            "captures/edition-2/s390x/6.1.0-1-test/max-2cpu-512M-nokaslr-a_b"
        );
    }
}
