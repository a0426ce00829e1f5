//! Stock guests of any architecture under QEMU's emulation, and what holds for each of them.

use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use guest_images::{Architecture, Initramfs, Series, kernel_for};
use patcher::kernel::{Kernel, Located, MappedRegion, locate};
use patcher::machine::{Machine, StopError};
use patcher::trace::filter::Filter;
use patcher::trace::session::{Selection, Session};
use patcher::trace::sink::{Beginning, Event, Sink};
use vmm::devices::Console;
use vmm::qemu::{GuestExit, Launch, Qemu};

use crate::guest::{Transcript, complaints, text};
use crate::lab::{Trace, vmm};

/// Far longer than anything here takes.
pub const LONG: Duration = Duration::from_secs(180);

/// A directory of a test's own with an initramfs in it, removed when it ends.
pub struct Folder {
    path: PathBuf,
    architecture: Architecture,
}

impl Folder {
    /// Makes one for guests of that architecture.
    ///
    /// # Panics
    /// The host refuses, or something that tests need is missing.
    #[must_use]
    pub fn new(architecture: Architecture, test: &str) -> Self {
        let path = env::temp_dir().join(format!("vmm-qemu-{}-{test}", process::id()));
        fs::create_dir_all(&path).unwrap();
        let initramfs = Initramfs::for_architecture(architecture).unwrap();
        fs::write(path.join("initrd"), initramfs.build()).unwrap();
        Self { path, architecture }
    }

    /// Where a file of that name is.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The text of a file, nothing if there is none yet.
    #[must_use]
    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// `vmm run` of a guest with two CPUs, its console in `console`.
    ///
    /// # Panics
    /// There is no such kernel.
    #[must_use]
    pub fn run(&self, series: Series, cmdline: &str) -> Command {
        let mut command = Command::new(vmm());
        command.args(["run", "--accel", "tcg", "--cpus", "2"]);
        command.args(["--arch", &self.architecture.to_string(), "--kernel"]);
        command.arg(kernel_for(self.architecture, series).unwrap().vmlinuz);
        command.arg("--initrd").arg(self.path("initrd"));
        command.arg("--console").arg(self.path("console"));
        command.args(["--cmdline", &format!("quiet {cmdline}")]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Makes a recording into the form that the name of `output` asks for. Gives what is said of it.
    ///
    /// # Panics
    /// It can't be read.
    pub fn report(&self, recording: &str, output: &str) -> String {
        let mut command = Command::new(vmm());
        command.arg("report").arg(self.path(recording)).arg("-o").arg(self.path(output));
        let output = command.output().expect("the program starts");
        let said = said(&output);
        assert!(output.status.success(), "{said}");
        said
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What can't be removed is in a temporary folder anyway.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Waits until something is done.
///
/// # Panics
/// It is not within [`LONG`].
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LONG, "{what} did not come in {LONG:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for a program's end.
///
/// # Panics
/// It does not end within [`LONG`].
#[must_use]
pub fn output(mut child: Child) -> Output {
    wait_until("the program's end", || child.try_wait().unwrap().is_some());
    child.wait_with_output().unwrap()
}

/// What a program said on its standard error.
#[must_use]
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Sends a signal, such as `-INT`.
///
/// # Panics
/// There is no such process.
pub fn signal(name: &str, pid: impl Display) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

/// Keeps nothing.
pub struct Nowhere;

impl Sink for Nowhere {
    fn begin(&mut self, _: &Beginning<'_>) -> io::Result<()> {
        Ok(())
    }

    fn event(&mut self, _: &Event<'_>) -> io::Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn end(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// Waits for the guest's kernel, and until its pads may be written.
///
/// # Panics
/// It does not come within [`LONG`].
#[must_use]
pub fn wait_for_kernel(machine: &dyn Machine) -> Box<Kernel> {
    let mut found: Option<Box<Kernel>> = None;
    wait_until("the kernel", || {
        if found.is_none() {
            let vcpus = 0..machine.vcpus();
            let registers: Vec<_> = vcpus.map(|vcpu| machine.sample(vcpu).unwrap()).collect();
            if let Ok(Located::Found(kernel)) = locate(machine.ram(), &registers) {
                found = Some(kernel);
            }
        }
        found.as_ref().is_some_and(|kernel| kernel.readiness(machine.ram()).is_ok())
    });
    found.unwrap()
}

/// Runs a guest by `vmm run` and checks that every call makes one record, with its caller and its CPU.
///
/// # Panics
/// It does not.
pub fn every_call_makes_one_record(architecture: Architecture, series: Series) {
    let folder = Folder::new(architecture, &format!("exact-{architecture}-{series}"));
    let work = "proc-read:/proc/version:10000@0+proc-read:/proc/uptime:10000@1,faults:5000";
    let mut command = folder.run(series, &format!("vmm.work={work}"));
    command.args(["--trace", "func", "-f", "*_proc_show", "-f", "handle_mm_fault"]);
    command.args(["-f", "hrtimer_interrupt", "-f", "run_timer_softirq", "-o"]);
    let output = output(command.arg(folder.path("trace.vmmrec")).spawn().unwrap());
    let said = said(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("; vmm report "), "{said}");
    folder.report("trace.vmmrec", "trace");
    let text = folder.read("trace");
    let trace = Trace::parse(&text);
    trace.check();
    assert_eq!(trace.promised.0, trace.promised.1, "nothing was lost");
    assert_eq!(trace.count("version_proc_show"), 10_000, "{said}");
    assert_eq!(trace.count("uptime_proc_show"), 10_000, "{said}");
    assert!(trace.count("handle_mm_fault") >= 5000, "{said}");
    assert_ne!(trace.worker("version_proc_show"), trace.worker("uptime_proc_show"));
    trace.check_interrupts("hrtimer_interrupt", "hH");
    trace.check_interrupts("run_timer_softirq", "s");
    for (function, cpu) in [("version_proc_show", 0), ("uptime_proc_show", 1)] {
        let mut lines = trace.lines.iter().filter(|line| line.function == function);
        assert!(lines.all(|line| (line.caller, line.cpu) == ("seq_read_iter", cpu)));
    }
    assert!(said.contains(" 0 lost"), "{said}");
    assert_eq!(complaints(&folder.read("console")), [] as [&str; 0]);
    every_form_tells_the_same(&folder, &trace);
}

/// Makes a recording into each form, and checks that other programs read what our text says.
fn every_form_tells_the_same(folder: &Folder, trace: &Trace<'_>) {
    folder.report("trace.vmmrec", "trace.dat");
    let mut command = Command::new("trace-cmd");
    command.args(["report", "-O", "parent=1", "-O", "indent=0", "-i"]);
    let output = command.arg(folder.path("trace.dat")).output();
    let output = output.expect("trace-cmd, which scripts/setup.sh installs");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let report = String::from_utf8(output.stdout).unwrap();
    let mut shown = report.lines().skip(1);
    for line in &trace.lines {
        // "TASK-PID [CPU] TIME: function: FUNCTION <-- CALLER"
        let (begin, calls) = shown.next().unwrap().split_once(": function: ").unwrap();
        assert_eq!(calls.trim(), format!("{} <-- {}", line.function, line.caller));
        let (task, time) = begin.rsplit_once("] ").unwrap();
        assert!(task.ends_with(&format!("[{:03}", line.cpu)), "{begin} is {line:?}");
        let (seconds, microseconds) = (line.time / 1_000_000, line.time % 1_000_000);
        assert_eq!(time.trim(), format!("{seconds}.{microseconds:06}"));
    }
    assert_eq!(shown.next(), None);

    folder.report("trace.vmmrec", "trace.json");
    let json = folder.read("trace.json");
    let mut objects = json.lines().map(|line| {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|_| panic!("{line}"))
    });
    assert_eq!(objects.next().unwrap()["cpus"], 2);
    for (line, call) in trace.lines.iter().zip(objects.by_ref()) {
        assert_eq!((&call["function"], &call["cpu"]), (&line.function.into(), &line.cpu.into()));
        let time = call["time_ns"].as_u64().unwrap();
        assert_eq!((time + 500) / 1000, line.time);
    }
    assert_eq!(objects.next().unwrap()["events"], trace.lines.len());

    // Of this form the tests of its own know more.
    folder.report("trace.vmmrec", "trace.pftrace");
    let perfetto = fs::read(folder.path("trace.pftrace")).unwrap();
    let raw = Command::new("protoc")
        .arg("--decode_raw")
        .stdin(fs::File::open(folder.path("trace.pftrace")).unwrap())
        .output()
        .expect("protoc, which scripts/setup.sh installs");
    assert!(raw.status.success() && perfetto.len() > trace.lines.len() * 20);
    // `type: TYPE_INSTANT`
    let instants = String::from_utf8_lossy(&raw.stdout).matches("\n    9: 3\n").count();
    assert_eq!(instants, trace.lines.len());
}

/// Has a guest's kernel panic, which `vmm run` has to tell from a reboot.
///
/// # Panics
/// It does not.
pub fn a_panic_is_told(architecture: Architecture, series: Series) {
    let folder = Folder::new(architecture, &format!("panic-{architecture}-{series}"));
    let output = output(folder.run(series, "vmm.after=panic").spawn().unwrap());
    let said = said(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("the guest's kernel has panicked"), "{said}");
}

/// Boots a guest with two CPUs, both busy, and arms all its functions, at least so many, three times.
///
/// # Panics
/// Its text is not byte for byte what it was afterwards, or the guest notices.
pub fn every_function_is_armed_and_put_back(
    architecture: Architecture,
    series: Series,
    functions: usize,
) {
    let folder = Folder::new(architecture, &format!("all-{architecture}-{series}"));
    let transcript = Transcript::default();
    let launch = Launch {
        cpus: 2,
        rings: 32 << 20,
        initrd: Some(folder.path("initrd")),
        cmdline: "quiet vmm.work=forks:400@0+proc-read:/proc/uptime:40000@1".into(),
        ..Launch::new(engine(architecture), kernel_for(architecture, series).unwrap().vmlinuz)
    };
    let console = Console::new(Box::new(transcript.clone())).unwrap();
    let qemu = Qemu::launch(&launch, console).unwrap();
    qemu.start().unwrap();
    let kernel = wait_for_kernel(&qemu);
    wait_until("work", || transcript.text().contains("VMM-WORK-BEGIN"));
    let region = MappedRegion::new(&qemu, &kernel).unwrap();
    let before = text(&qemu, &kernel).unwrap();
    let mut events = 0;
    for _ in 0..3 {
        let selection = Selection::new(&kernel, &qemu, &Filter::default()).unwrap();
        let (mut session, armed) = Session::arm(&qemu, &kernel, &region, &selection).unwrap();
        assert!(armed.functions > functions);
        let until = Instant::now() + Duration::from_millis(300);
        while Instant::now() < until {
            session.drain(&mut Nowhere).unwrap();
        }
        session.disarm().unwrap();
        let (summary, finished) = session.finish(&mut Nowhere);
        finished.unwrap();
        println!("{:?}: {} events, stops {:?}", armed, summary.events, summary.stops);
        assert_eq!(summary.reverted.unwrap().restored, armed.functions);
        assert_eq!(summary.corrupt, []);
        assert!(text(&qemu, &kernel).unwrap() == before, "the text is not what it was");
        events += summary.events;
    }
    assert!(events > 0);
    let exit = qemu.wait(Some(LONG));
    let text = transcript.text();
    assert_eq!(exit, Some(GuestExit::PowerOff), "{text}");
    assert!(text.contains("VMM-DONE") && !text.contains("VMM-WORK-FAILED"), "{text}");
    assert_eq!(transcript.complaints(), [] as [&str; 0]);
    assert!(matches!(qemu.stop().map(drop), Err(StopError::Gone)));
}

/// What the engine calls an architecture.
///
/// # Panics
/// Never.
#[must_use]
pub fn engine(architecture: Architecture) -> vmm::qemu::Architecture {
    architecture.to_string().parse().expect("both have the names of uname -m")
}
