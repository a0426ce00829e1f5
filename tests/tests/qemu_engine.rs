//! Stock guests under QEMU's emulation, through the library and as `vmm run --accel tcg`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use guest_images::{Initramfs, Series, kernel};
use patcher::kernel::{Kernel, Located, MappedRegion, locate};
use patcher::machine::{Machine, StopError, TextWrite};
use patcher::trace::filter::Filter;
use patcher::trace::session::{Selection, Session};
use patcher::trace::sink::{Event, Sink};
use tests::guest::{Transcript, complaints, text};
use tests::lab::{Trace, vmm};
use vmm::devices::Console;
use vmm::qemu::{Architecture, GuestExit, Launch, Qemu, QemuError};

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(180);

/// A directory of a test's own with an initramfs in it, removed when it ends.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = env::temp_dir().join(format!("vmm-qemu-{}-{test}", process::id()));
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("initrd"), Initramfs::new().unwrap().build()).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// `vmm run` of a guest with two CPUs, its console in `console`.
    fn run(&self, cmdline: &str) -> Command {
        let mut command = Command::new(vmm());
        command.args(["run", "--accel", "tcg", "--cpus", "2", "--kernel"]);
        command.arg(kernel(Series::V6_1).unwrap().vmlinuz);
        command.arg("--initrd").arg(self.path("initrd"));
        command.arg("--console").arg(self.path("console"));
        command.args(["--cmdline", &format!("quiet {cmdline}")]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What can't be removed is in a temporary folder anyway.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LONG, "{what} did not come in {LONG:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn output(mut child: Child) -> Output {
    wait_until("the program's end", || child.try_wait().unwrap().is_some());
    child.wait_with_output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The QEMU that `child` has started.
fn qemu_of(child: &Child) -> String {
    let parent = child.id().to_string();
    let is_its_child = |pid: &str| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let behind_name = stat.rsplit(") ").next().unwrap_or_default();
        behind_name.split(' ').nth(1) == Some(&parent)
    };
    let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    let pids = names.filter_map(|name| name.into_string().ok());
    pids.into_iter().find(|pid| is_its_child(pid)).expect("it has started QEMU")
}

fn signal(name: &str, pid: &str) {
    assert!(Command::new("kill").args([name, pid]).status().unwrap().success());
}

fn is_gone(pid: &str) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn every_call_makes_one_record() {
    let folder = Folder::new("exact");
    let work = "proc-read:/proc/version:10000@0+proc-read:/proc/uptime:10000@1,faults:5000";
    let mut command = folder.run(&format!("vmm.work={work}"));
    command.args(["--trace", "func", "-f", "*_proc_show", "-f", "handle_mm_fault", "-o"]);
    let output = output(command.arg(folder.path("trace")).spawn().unwrap());
    let said = said(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let text = folder.read("trace");
    let trace = Trace::parse(&text);
    trace.check();
    assert_eq!(trace.promised.0, trace.promised.1, "nothing was lost");
    assert_eq!(trace.count("version_proc_show"), 10_000, "{said}");
    assert_eq!(trace.count("uptime_proc_show"), 10_000, "{said}");
    assert!(trace.count("handle_mm_fault") >= 5000, "{said}");
    for (function, cpu) in [("version_proc_show", 0), ("uptime_proc_show", 1)] {
        let mut lines = trace.lines.iter().filter(|line| line.function == function);
        assert!(lines.all(|line| (line.caller, line.cpu) == ("seq_read_iter", cpu)));
    }
    assert!(said.contains(" 0 lost"), "{said}");
    assert_eq!(complaints(&folder.read("console")), [] as [&str; 0]);
}

/// Keeps nothing.
struct Nowhere;

impl Sink for Nowhere {
    fn begin(&mut self, _: usize) -> io::Result<()> {
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

fn wait_for_kernel(qemu: &Qemu) -> Box<Kernel> {
    let mut found = None;
    wait_until("the kernel", || {
        let registers = qemu.sample(0).unwrap();
        if let Ok(Located::Found(kernel)) = locate(qemu.ram(), &[registers]) {
            found = kernel.readiness(qemu.ram()).is_ok().then_some(kernel);
        }
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn every_function_is_armed_and_put_back_byte_for_byte_while_the_guest_is_busy() {
    let folder = Folder::new("all");
    let transcript = Transcript::default();
    let launch = Launch {
        cpus: 2,
        rings: 32 << 20,
        initrd: Some(folder.path("initrd")),
        cmdline: "quiet vmm.work=forks:400@0+proc-read:/proc/uptime:40000@1".into(),
        ..Launch::new(Architecture::X86_64, kernel(Series::V6_1).unwrap().vmlinuz)
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
        assert!(armed.functions > 30_000);
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

#[test]
fn a_standing_guest_is_written_to_in_ram_and_nowhere_else() {
    let folder = Folder::new("writes");
    let launch = Launch {
        initrd: Some(folder.path("initrd")),
        cmdline: "quiet vmm.work=idle:100".into(),
        ..Launch::new(Architecture::X86_64, kernel(Series::V6_1).unwrap().vmlinuz)
    };
    let qemu = Qemu::launch(&launch, Console::new(Box::new(io::sink())).unwrap()).unwrap();
    qemu.start().unwrap();
    let kernel = wait_for_kernel(&qemu);
    let at = kernel.text().start;
    let mut stopped = qemu.stop().unwrap();
    assert!(matches!(qemu.stop().map(drop), Err(StopError::AlreadyStopped)));
    assert!(matches!(stopped.registers(1), Err(StopError::NoSuchVcpu { vcpu: 1, count: 1 })));
    let mut text = [0; 8];
    kernel.read_virt(qemu.ram(), at, &mut text).unwrap();
    let ram_end = qemu.ram().extents()[0].end;
    let writes = [ram_end - 8, qemu.region_code().gpa, ram_end - 16];
    let writes = writes.map(|at| TextWrite { at, bytes: b"12345678" });
    let error = stopped.write_text(&writes).unwrap_err();
    assert_eq!((error.index, error.at), (1, writes[1].at));
    let mut read = [0; 24];
    qemu.ram().read(ram_end - 24, &mut read).unwrap();
    assert_eq!(&read[16..], b"12345678");
    assert_ne!(&read[8..16], b"12345678", "what stands behind a bad write is not done");
    stopped.resume().unwrap();
    qemu.kill();
    assert_eq!(qemu.wait(Some(LONG)), Some(GuestExit::Killed));
}

#[test]
fn an_interrupt_ends_a_trace_in_order_and_qemu_with_it() {
    let folder = Folder::new("interrupt");
    let mut command = folder.run("vmm.work=proc-read:/proc/version:100000000");
    let child = command.args(["--trace", "func", "-f", "vfs_*", "-o"]);
    let child = child.arg(folder.path("trace")).spawn().unwrap();
    wait_until("a trace", || folder.read("trace").contains("vfs_read <-"));
    let qemu = qemu_of(&child);
    signal("-INT", &child.id().to_string());
    let output = output(child);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("stops  2"), "the functions were put back: {said}");
    let text = folder.read("trace");
    Trace::parse(&text).check();
    assert!(is_gone(&qemu));
}

#[test]
fn a_qemu_that_is_killed_ends_a_trace_with_a_clear_error() {
    let folder = Folder::new("killed");
    let mut command = folder.run("vmm.work=proc-read:/proc/version:100000000");
    let child = command.args(["--trace", "func", "-f", "vfs_*", "-o"]);
    let child = child.arg(folder.path("trace")).spawn().unwrap();
    wait_until("a trace", || folder.read("trace").contains("vfs_read <-"));
    signal("-KILL", &qemu_of(&child));
    let output = output(child);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(
        said.contains("QEMU has ended and the guest with it: it was ended by signal 9"),
        "{said}"
    );
}

#[test]
fn qemu_does_not_outlive_a_program_that_is_killed() {
    let folder = Folder::new("orphan");
    let mut child = folder.run("vmm.work=idle:100").spawn().unwrap();
    wait_until("the guest", || folder.read("console").contains("VMM-WORK-BEGIN"));
    let qemu = qemu_of(&child);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("QEMU's end", || is_gone(&qemu));
}

#[test]
fn a_reboot_and_a_panic_end_it_with_the_status_that_tells() {
    for (after, status) in [("reboot", 3), ("panic", 4)] {
        let folder = Folder::new(after);
        let output = output(folder.run(&format!("vmm.after={after}")).spawn().unwrap());
        assert_eq!(output.status.code(), Some(status), "{after}: {}", said(&output));
    }
}

#[test]
fn what_cannot_be_started_is_said_in_one_sentence() {
    let folder = Folder::new("refused");
    let console = || Console::new(Box::new(io::sink())).unwrap();
    let good = Launch::new(Architecture::X86_64, kernel(Series::V6_1).unwrap().vmlinuz);
    let refused = |launch: Launch| Qemu::launch(&launch, console()).unwrap_err();
    let missing = refused(Launch { qemu: "/no/such/qemu".into(), ..good.clone() });
    assert!(matches!(missing, QemuError::Start { .. }), "{missing}");
    let unreadable = refused(Launch::new(Architecture::X86_64, "/no/such/kernel"));
    assert!(matches!(unreadable, QemuError::Unreadable { .. }), "{unreadable}");
    assert!(matches!(refused(Launch { cpus: 0, ..good.clone() }), QemuError::Hardware { .. }));
    let text = folder.path("text");
    fs::write(&text, "no kernel").unwrap();
    let error = refused(Launch::new(Architecture::X86_64, text)).to_string();
    assert!(error.starts_with("QEMU cannot run this guest: it ended with status 1"), "{error}");
}
