//! `vmm` in the nested lab: an emulated machine with KVM, in which stock guests run.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use guest_images::{Initramfs, Lab, Outcome, RunningLab, Series, kernel};

/// How long one command in the lab may take: a guest's boot, twice emulated, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// A lab with `vmm`, the programs of this package and stock guests in it.
pub struct VmmLab {
    lab: RunningLab,
}

/// Where a guest's kernel is in the lab.
#[must_use]
pub fn guest_kernel(series: Series) -> String {
    format!("/l2/{}", series.to_string().replace('.', "_"))
}

/// Where the guests' initramfs is in the lab.
pub const INITRD: &str = "/l2/initrd";

impl VmmLab {
    /// Boots a lab that holds these guests. `cpu` is QEMU's name of its processor, if not the usual;
    /// `programs` are binaries of this package.
    ///
    /// # Panics
    /// Anything is missing or fails: this is for tests.
    #[must_use]
    pub fn boot(guests: &[Series], cpu: Option<&str>, programs: &[&str]) -> Self {
        Self::boot_with(guests, cpu, programs, &[])
    }

    /// The same with these files of this host's in `/files`.
    ///
    /// # Panics
    /// As above.
    #[must_use]
    pub fn boot_with(
        guests: &[Series],
        cpu: Option<&str>,
        programs: &[&str],
        files: &[PathBuf],
    ) -> Self {
        let own = kernel(Series::V6_1).expect("the lab's own kernel");
        let mut lab = Lab::new(&own).expect("the lab");
        if let Some(cpu) = cpu {
            lab = lab.cpu(cpu);
        }
        for series in guests {
            let guest = kernel(*series).expect("a stock kernel");
            lab = lab.host_file(&guest.vmlinuz, &guest_kernel(*series)).expect("the kernel");
        }
        let initrd = Initramfs::new().expect("the guests' initramfs").build();
        lab = lab.file(INITRD, 0o644, &initrd).expect("the guests' initramfs");
        lab = lab.program(&vmm(), "/bin/vmm").expect("vmm");
        for program in programs {
            lab = lab.program(Path::new(program), &in_lab(program)).expect("a test's program");
        }
        for file in files {
            let name = file.file_name().expect("a file's name").to_string_lossy();
            lab = lab.host_file(file, &format!("/files/{name}")).expect("a file");
        }
        Self { lab: lab.boot().expect("the lab boots") }
    }

    /// The lab itself.
    pub fn lab(&mut self) -> &mut RunningLab {
        &mut self.lab
    }

    /// Runs a shell command in the lab.
    ///
    /// # Panics
    /// It does not end, or the lab does.
    pub fn run(&mut self, command: &str) -> Outcome {
        let outcome = self.lab.run(command, PATIENCE);
        outcome.unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Runs a shell command that must succeed.
    ///
    /// # Panics
    /// It does not.
    pub fn succeed(&mut self, command: &str) -> Outcome {
        let outcome = self.run(command);
        assert_eq!(outcome.status, 0, "{command}\n{outcome}");
        outcome
    }

    /// The text of a file in the lab.
    ///
    /// # Panics
    /// There is none.
    pub fn read(&mut self, path: &str) -> String {
        let bytes = self.lab.fetch(path, PATIENCE);
        let bytes = bytes.unwrap_or_else(|error| panic!("{error}"));
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn in_lab(program: &str) -> String {
    let name = Path::new(program).file_name().expect("a program's name");
    format!("/bin/{}", name.to_string_lossy())
}

/// `vmm run` of a guest with two CPUs.
#[must_use]
pub fn vmm_run(series: Series, options: &str, cmdline: &str) -> String {
    format!(
        "vmm run --kernel {} --initrd {INITRD} --cpus 2 {options} --cmdline 'quiet {cmdline}'",
        guest_kernel(series)
    )
}

/// The `vmm` program.
///
/// # Panics
/// As [`program`].
#[must_use]
pub fn vmm() -> PathBuf {
    program("vmm", "vmm")
}

/// A program of a package's, of the profile of the one that asks, built if need be: cargo builds a
/// package's programs for its own tests only.
///
/// # Panics
/// It can't be built.
#[must_use]
pub fn program(package: &str, name: &str) -> PathBuf {
    // target/PROFILE/deps/THIS-PROGRAM
    let this = std::env::current_exe().expect("this program's path");
    let directory = this.parent().and_then(Path::parent).expect("a target directory");
    let profile = directory.file_name().and_then(OsStr::to_str).expect("a profile's name");
    let profile = if profile == "debug" { "dev" } else { profile };
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--profile", profile, "--package", package, "--bin", name])
        .status()
        .expect("cargo");
    assert!(status.success(), "{name} can't be built");
    directory.join(name)
}

/// One event of a trace in the form of tracefs.
#[derive(Debug, Clone, PartialEq)]
pub struct Line<'a> {
    /// The task's name.
    pub comm: &'a str,
    /// The task's number.
    pub pid: u32,
    /// What the CPU was in the middle of: the five letters of irq-info.
    pub context: &'a str,
    /// The CPU.
    pub cpu: usize,
    /// Microseconds.
    pub time: u64,
    /// The function.
    pub function: &'a str,
    /// Its caller.
    pub caller: &'a str,
}

/// A trace in the form of tracefs, checked line by line.
#[derive(Debug)]
pub struct Trace<'a> {
    /// Events that its header promises: in the trace, and all that there were.
    pub promised: (u64, u64),
    /// The events that are there.
    pub lines: Vec<Line<'a>>,
}

impl<'a> Trace<'a> {
    /// Reads a trace.
    ///
    /// # Panics
    /// It is not what tracefs would print.
    #[must_use]
    pub fn parse(text: &'a str) -> Self {
        let header: Vec<&str> = text.lines().take(12).map(str::trim_end).collect();
        let counts = header
            .get(2)
            .and_then(|line| line.strip_prefix("# entries-in-buffer/entries-written: "))
            .and_then(|line| line.strip_suffix("   #P:2"))
            .unwrap_or_else(|| panic!("no counts in {header:#?}"));
        let (written, entries) = counts.split_once('/').expect("two counts");
        assert_eq!(header[0], "# tracer: function");
        assert_eq!(header[4], "#                                _-----=> irqs-off/BH-disabled");
        assert_eq!(header[10], "#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION");
        assert_eq!(header[11], "#              | |         |   |||||     |         |");
        let events = text.lines().skip(12).filter(|line| !line.starts_with("CPU:"));
        Self {
            promised: (written.parse().unwrap(), entries.parse().unwrap()),
            // Between them is said where events are missing.
            lines: events.map(Line::parse).collect(),
        }
    }

    /// How many events there are of a function.
    #[must_use]
    pub fn count(&self, function: &str) -> usize {
        self.lines.iter().filter(|line| line.function == function).count()
    }

    /// Checks that one process of the workload that reads made all calls of a function, at any time but in
    /// interrupts, and gives its number. It takes a name of its own before the first of them, which is
    /// noticed a moment later, as is where a kernel without a description of its types has its tasks. A
    /// name that is just being set may be read while the second of its words is still the old one.
    ///
    /// # Panics
    /// It did not, or its name is not known.
    #[must_use]
    pub fn worker(&self, function: &str) -> u32 {
        let mut calls = self.lines.iter().filter(|line| line.function == function);
        let first = calls.next().unwrap_or_else(|| panic!("no call of {function}"));
        let mut name = first.comm;
        for line in [first].into_iter().chain(calls) {
            let is_known = [name, "work", "proc-read", "proc-rea"].contains(&line.comm);
            assert!(is_known && line.pid == first.pid, "{line:?}");
            name = line.comm;
            let [irqs, _, interrupt, depth, _] = line.context.as_bytes() else {
                panic!("{line:?}")
            };
            assert_eq!([irqs, interrupt, depth], [&b'.'; 3], "{line:?}");
        }
        assert!(["<...>", "work", "proc-read"].contains(&first.comm), "{first:?}");
        assert_eq!(name, "proc-read", "the last calls of {function}");
        first.pid
    }

    /// Checks that there are calls of a function, all of them made while an interrupt was served that
    /// one of those letters stands for.
    ///
    /// # Panics
    /// There are none, or one was made at another time.
    pub fn check_interrupts(&self, function: &str, letters: &str) {
        let mut calls = self.lines.iter().filter(|line| line.function == function).peekable();
        assert!(calls.peek().is_some(), "no call of {function}");
        for line in calls {
            assert!(line.context[2..3].contains(|letter| letters.contains(letter)), "{line:?}");
        }
    }

    /// Checks what holds for every trace: the header tells how many events there are, and time never
    /// goes backwards on a CPU.
    ///
    /// # Panics
    /// It does not hold.
    pub fn check(&self) {
        assert_eq!(self.promised.0, self.lines.len() as u64);
        let mut last = [0; 2];
        for line in &self.lines {
            assert!(line.time >= last[line.cpu], "time goes backwards at {line:?}");
            last[line.cpu] = line.time;
        }
    }
}

impl<'a> Line<'a> {
    fn parse(text: &'a str) -> Self {
        let parse = || {
            let (task, rest) = text.split_once(" [")?;
            let (comm, pid) = task.trim().rsplit_once('-')?;
            let (cpu, rest) = rest.split_once("] ")?;
            let (context, rest) = rest.split_at_checked(5)?;
            let (time, rest) = rest.split_once(": ")?;
            let (seconds, microseconds) = time.trim_start().split_once('.')?;
            let (function, caller) = rest.split_once(" <-")?;
            let seconds: u64 = seconds.parse().ok()?;
            Some(Self {
                comm,
                pid: pid.parse().ok()?,
                context,
                cpu: cpu.parse().ok()?,
                time: seconds * 1_000_000 + microseconds.parse::<u64>().ok()?,
                function,
                caller,
            })
        };
        parse().unwrap_or_else(|| panic!("not a line of a trace: {text:?}"))
    }
}
