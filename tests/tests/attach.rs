//! Guests of a QEMU that the test has started by itself, as somebody else would.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use std::{fs, io, process, thread};

use guest_images::{Architecture, Series, kernel_for};
use patcher::kernel::MappedRegion;
use patcher::region::Part;
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::session::{Selection, Session};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use tests::emulated::{self, LONG, Nowhere, output, said, signal, wait_for_kernel, wait_until};
use tests::guest::{complaints, text};
use tests::lab::{Trace, vmm};
use vmm::qemu::{Attach, AttachError, Attached, IvshmemError, RegionMemory};

/// A directory of a test's own, and the QEMUs that it starts, which are killed when it ends.
struct Folder {
    files: emulated::Folder,
    architecture: Architecture,
    qemus: Vec<Child>,
}

impl Folder {
    fn new(architecture: Architecture, test: &str) -> Self {
        let files = emulated::Folder::new(architecture, &format!("attach-{architecture}-{test}"));
        Self { files, architecture, qemus: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.files.path(name)
    }

    fn read(&self, name: &str) -> String {
        self.files.read(name)
    }

    /// Starts QEMU with these options, a kernel's parameters if it has one, and a monitor, and waits
    /// for that. Gives its process number.
    fn qemu(&mut self, options: &str, append: &[&str]) -> u32 {
        let folder = self.path("").display().to_string();
        let folder = folder.trim_end_matches('/');
        // An earlier one's.
        let _ = fs::remove_file(self.path("qmp"));
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", &format!("qemu-system-{}", self.architecture)]);
        command.args(["-nodefaults", "-display", "none", "-accel", "tcg,thread=multi"]);
        command.args(options.replace("DIR", folder).split_ascii_whitespace());
        command.args(append.iter().flat_map(|parameters| ["-append", parameters]));
        command.args(["-qmp", &format!("unix:{folder}/qmp,server=on,wait=off")]);
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id();
        self.qemus.push(child);
        wait_until("QEMU's monitor", || UnixStream::connect(self.path("qmp")).is_ok());
        pid
    }

    /// QEMU with two CPUs and a stock kernel that works for ever, its console in `console`; with these
    /// options as well.
    fn linux(&mut self, more: &str) -> u32 {
        let kernel = kernel_for(self.architecture, Series::V6_1).unwrap().vmlinuz;
        let (machine, console) = match self.architecture {
            Architecture::X86_64 => ("q35", "ttyS0"),
            Architecture::S390x => ("s390-ccw-virtio", "ttysclp0"),
            Architecture::Aarch64 => ("virt", "ttyAMA0"),
        };
        let options = format!(
            "-machine {machine},memory-backend=ram -cpu max -smp 2 -m 576M -serial file:DIR/console \
             -object memory-backend-file,id=ram,share=on,size=576M,mem-path=DIR/ram \
             -initrd DIR/initrd -kernel {} {more}",
            kernel.display()
        );
        let append = format!(
            "console={console} loglevel=5 mem=512M vmm.work=proc-read:/proc/version:100000000"
        );
        let pid = self.qemu(&options, &[&append]);
        wait_until("work", || self.read("console").contains("VMM-WORK-BEGIN"));
        pid
    }

    fn attach(&self) -> Attach {
        Attach {
            qmp: self.path("qmp"),
            told: None,
            rings: 32 << 20,
            stop_deadline: Duration::from_secs(5),
            journals: self.path("state/vmm"),
            restore: false,
        }
    }

    /// `vmm attach`, with journals in this folder.
    fn vmm(&self, options: &[&str]) -> Command {
        let mut command = Command::new(vmm());
        command.arg("attach").arg("--qmp").arg(self.path("qmp")).args(options);
        command.env("XDG_STATE_HOME", self.path("state")).env("VMM_RUN_DIR", self.path("run"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts a trace of the functions of the VFS and waits until it is written.
    fn trace(&self, name: &str) -> Child {
        let command = ["--trace", "func", "-f", "vfs_*", "-o"];
        let child = self.vmm(&command).arg(self.path(name)).spawn().unwrap();
        wait_until("a trace", || self.read(name).contains("vfs_read <-"));
        child
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        for child in &mut self.qemus {
            // It has ended, unless the test needed it until now.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// `vmm attach` with a terminal.
struct OnTerminal {
    child: Child,
    keys: fs::File,
    said: String,
}

impl OnTerminal {
    fn attach(folder: &Folder) -> Self {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let name = ptsname(&keys, Vec::new()).unwrap();
        let open = || {
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap()
        };
        let mut command = folder.vmm(&[]);
        command.stdin(open()).stdout(open()).stderr(open());
        let child = command.spawn().unwrap();
        Self { child, keys: keys.into(), said: String::new() }
    }

    fn wait_for(&mut self, words: &str) {
        let longest = Timespec::try_from(LONG).unwrap();
        while !self.said.contains(words) {
            let ready =
                poll(&mut [PollFd::new(&self.keys, PollFlags::IN)], Some(&longest)).unwrap();
            let mut some = [0; 1024];
            let length = if ready == 0 { Ok(0) } else { self.keys.read(&mut some) };
            let length = length.ok().filter(|length| *length > 0);
            let length = length.unwrap_or_else(|| panic!("{words:?} is not said: {}", self.said));
            self.said.push_str(&String::from_utf8_lossy(&some[..length]));
        }
    }

    fn answer(&mut self, answer: &str) {
        self.wait_for("Put them back? [y/N] ");
        self.keys.write_all(answer.as_bytes()).unwrap();
    }

    fn ended(self) -> Option<i32> {
        output(self.child).status.code()
    }
}

/// A program's exit status, and what it said.
fn told(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), said(output))
}

/// The text of the kernel's, as one who attaches finds it.
fn attached_text(attach: &Attach) -> Vec<u8> {
    let attached = Attached::new(attach).unwrap();
    let text = text(attached.machine(), &wait_for_kernel(attached.machine())).unwrap();
    attached.detach().unwrap();
    text
}

#[test]
fn a_guest_is_left_as_it_was_found_by_whoever_ends_however() {
    left_as_it_was_found(Architecture::X86_64, 30_000);
}

#[test]
fn an_s390x_guest_is_left_as_it_was_found() {
    left_as_it_was_found(Architecture::S390x, 28_000);
}

#[test]
fn an_aarch64_guest_is_left_as_it_was_found() {
    left_as_it_was_found(Architecture::Aarch64, 30_000);
}

/// Attaches to a guest again and again, and ends in every way; it has at least so many functions.
fn left_as_it_was_found(architecture: Architecture, functions: usize) {
    let mut folder = Folder::new(architecture, "life");
    let qemu = folder.linux("");
    let attach = folder.attach();
    let before = attached_text(&attach);

    // An end in order.
    let child = folder.trace("first");
    let second = told(&folder.vmm(&[]).output().unwrap());
    assert_eq!(second.0, Some(1));
    assert!(second.1.contains(&format!("by process {}", child.id())), "{}", second.1);
    signal("-INT", child.id());
    let (status, words) = told(&output(child));
    assert_eq!(status, Some(130), "{words}");
    assert!(words.contains("stops  2") && words.contains(" 0 lost"), "{words}");
    let trace = folder.read("first");
    Trace::parse(&trace).check();
    assert!(attached_text(&attach) == before, "the text is not what it was");

    // No end at all.
    let mut child = folder.trace("second");
    child.kill().unwrap();
    child.wait().unwrap();
    let (status, words) = told(&folder.vmm(&["--trace", "func"]).output().unwrap());
    assert_eq!(status, Some(1));
    assert!(words.contains("--restore") && words.contains("functions"), "{words}");
    let attached = Attached::new(&Attach { restore: true, ..attach.clone() }).unwrap();
    let restored = attached.restored().unwrap();
    assert!(restored.restored > 50 && restored.foreign.is_empty(), "{restored:?}");
    let kernel = wait_for_kernel(attached.machine());
    assert!(text(attached.machine(), &kernel).unwrap() == before, "the text is not what it was");

    // The region is where it was, and code that somebody may stand in stays.
    let region = MappedRegion::new(attached.machine(), &kernel).unwrap();
    assert!(region.code().used() > 0);
    let used = region.code().used() as usize;
    let code = |length| {
        let mut bytes = vec![0; length];
        let window = attached.machine().region(Part::Code).memory;
        vm_memory::Bytes::read_slice(&window, &mut bytes, 0).unwrap();
        bytes
    };
    let old = code(used);
    let selection = Selection::new(&kernel, attached.machine(), &Filter::default()).unwrap();
    let (mut session, armed) =
        Session::arm(attached.machine(), &kernel, &region, &selection).unwrap();
    assert!(armed.functions > functions);
    assert!(region.code().used() as usize > used && code(used) == old);
    session.disarm().unwrap();
    drop(session);
    attached.detach().unwrap();
    assert!(attached_text(&attach) == before, "the text is not what it was");

    // No end again, and somebody is asked.
    let mut child = folder.trace("third");
    child.kill().unwrap();
    child.wait().unwrap();
    let mut refusing = OnTerminal::attach(&folder);
    refusing.answer("\n");
    refusing.wait_for("--restore");
    assert_eq!(refusing.ended(), Some(1));
    let mut agreeing = OnTerminal::attach(&folder);
    agreeing.answer("y\n");
    agreeing.wait_for("put back ");
    agreeing.wait_for("attached to a guest");
    signal("-INT", agreeing.child.id());
    assert_eq!(agreeing.ended(), Some(130));
    assert!(attached_text(&attach) == before, "the text is not what it was");

    // QEMU's end.
    let child = folder.trace("fourth");
    assert_eq!(complaints(&folder.read("console")), [] as [&str; 0]);
    signal("-KILL", qemu);
    let (status, words) = told(&output(child));
    assert_eq!(status, Some(5), "{words}");
    assert!(words.contains("QEMU has ended and the guest with it"), "{words}");
}

/// Hangs up the connection to the socket at `path` that a process, this one or a child, has.
fn hang_up(process: u32, path: &Path) {
    let pid = Pid::from_raw(process as i32).unwrap();
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    let numbers = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let numbers: Vec<i32> = numbers
        .map(|entry| entry.unwrap().file_name().into_string().unwrap().parse().unwrap())
        .collect();
    let is_it =
        |stream: &UnixStream| stream.peer_addr().is_ok_and(|peer| peer.as_pathname() == Some(path));
    let copies = numbers.iter().filter_map(|number| {
        Some(UnixStream::from(pidfd_getfd(&pidfd, *number, PidfdGetfdFlags::empty()).ok()?))
    });
    let mut found: Vec<UnixStream> = copies.filter(is_it).collect();
    assert!(!found.is_empty(), "there is a connection to {}", path.display());
    found.pop().unwrap().shutdown(std::net::Shutdown::Both).unwrap();
}

#[test]
fn a_monitor_that_hangs_up_in_a_stop_leaves_the_guest_to_be_put_back_and_run() {
    let mut folder = Folder::new(Architecture::X86_64, "monitor");
    folder.linux("");
    let attach = folder.attach();
    let attached = Attached::new(&attach).unwrap();
    let kernel = wait_for_kernel(attached.machine());
    let before = text(attached.machine(), &kernel).unwrap();
    let region = MappedRegion::new(attached.machine(), &kernel).unwrap();
    let filter = Filter { only: vec![Glob::new("vfs_*")], except: vec![] };
    let selection = Selection::new(&kernel, attached.machine(), &filter).unwrap();
    let (mut session, _) = Session::arm(attached.machine(), &kernel, &region, &selection).unwrap();
    let stopped = attached.machine().stop().unwrap();
    hang_up(process::id(), &attach.qmp);
    stopped.resume().unwrap();
    assert_eq!(attached.wait(), None, "the guest lives");
    session.disarm().unwrap();
    drop(session);
    attached.detach().unwrap();
    assert!(attached_text(&attach) == before, "the text is not what it was");
    assert_eq!(complaints(&folder.read("console")), [] as [&str; 0]);
}

#[test]
fn a_connection_that_is_lost_leaves_a_guest_that_runs_and_can_be_put_back() {
    let mut folder = Folder::new(Architecture::X86_64, "lost");
    folder.linux("-gdb unix:DIR/gdb,server=on,wait=off");
    let attach = folder.attach();
    let before = attached_text(&attach);

    // Without the monitor there is the gdbstub to put everything back.
    let child = folder.trace("first");
    hang_up(child.id(), &attach.qmp);
    let (status, words) = told(&output(child));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("monitor has hung up") && words.contains("as it was found"), "{words}");
    assert!(attached_text(&attach) == before, "the text is not what it was");

    // Without the gdbstub the next has to.
    let child = folder.trace("second");
    hang_up(child.id(), &folder.path("gdb"));
    signal("-INT", child.id());
    let (status, words) = told(&output(child));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("gdbstub"), "{words}");
    let left = Attached::new(&attach).unwrap_err();
    assert!(matches!(left, AttachError::LeftBehind { sites: 50.., .. }), "{left}");
    let attached = Attached::new(&Attach { restore: true, ..attach.clone() }).unwrap();
    let restored = attached.restored().unwrap().clone();
    attached.detach().unwrap();
    assert!(restored.restored >= 50 && restored.foreign.is_empty(), "{restored:?}");
    assert!(attached_text(&attach) == before, "the text is not what it was");

    // The guest works on.
    let child = folder.trace("third");
    signal("-INT", child.id());
    assert_eq!(told(&output(child)).0, Some(130));
    assert_eq!(complaints(&folder.read("console")), [] as [&str; 0]);
}

#[test]
fn whatever_qemu_lacks_is_named_with_the_option_that_gives_it() {
    let mut folder = Folder::new(Architecture::X86_64, "missing");
    let told = Some(64 << 20);
    let attach = Attach { told, ..folder.attach() };
    let refused = |attach: &Attach| Attached::new(attach).unwrap_err();
    let error = refused(&attach).to_string();
    assert!(error.contains("-qmp unix:") && error.contains("qmp"), "{error}");

    let shared = "-object memory-backend-memfd,id=ram,share=on,size=128M \
                  -machine q35,memory-backend=ram -m 128M";
    let private = "-object memory-backend-memfd,id=ram,share=off,size=128M \
                   -machine q35,memory-backend=ram -m 128M";
    for (options, words) in [
        ("-machine q35 -m 128M", "memory-backend-memfd,id=ram,size=SIZE,share=on"),
        (private, "memory-backend-memfd,id=ram,size=SIZE,share=on"),
        (&format!("{shared} -S"), "`cont`"),
        ("-machine microvm -m 128M", "microvm"),
    ] {
        let pid = folder.qemu(options, &[]);
        let error = refused(&attach).to_string();
        assert!(error.contains(words), "{options}: {error}");
        signal("-KILL", pid);
    }

    let pid = folder.qemu(&format!("{shared} -gdb unix:DIR/gdb,server=on,wait=off"), &[]);
    let everything = refused(&Attach { told: None, ..attach.clone() });
    assert!(matches!(everything, AttachError::NoRegion { told: None, .. }), "{everything}");
    let too_much = refused(&Attach { told: Some(120 << 20), ..attach.clone() }).to_string();
    assert!(too_much.contains("mem=") && too_much.contains("64 MiB or more"), "{too_much}");

    // A gdbstub that is there is used, unless somebody else uses it, and is there afterwards.
    Attached::new(&attach).unwrap().detach().unwrap();
    let debugger = UnixStream::connect(folder.path("gdb")).unwrap();
    wait_until("QEMU's notice of a debugger", || {
        matches!(Attached::new(&attach), Err(AttachError::NotRunning(_) | AttachError::Debugged))
    });
    drop(debugger);
    signal("-KILL", pid);
}

/// The options of QEMU's that give a guest memory of which its kernel makes nothing.
const DEVICE: &str = "-object memory-backend-memfd,id=vmm,share=on,size=64M \
                      -device ivshmem-plain,memdev=vmm";

#[test]
fn a_pc_with_memory_on_both_sides_of_its_hole_keeps_all_of_it() {
    // Its gdbstub listens already.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let gdb = format!("-gdb tcp:127.0.0.1:{port}");
    a_device_has_the_region(Architecture::X86_64, Series::V6_1, "pc", "5G", &gdb);
}

#[test]
fn an_aarch64_guest_keeps_all_of_its_memory() {
    // Earlier kernels leave a device alone that they have no driver for.
    a_device_has_the_region(Architecture::Aarch64, Series::V6_12, "virt", "512M", "");
}

/// Attaches to a guest that was told of all of its memory, and has a device with more.
fn a_device_has_the_region(
    architecture: Architecture,
    series: Series,
    machine: &str,
    memory: &str,
    more: &str,
) {
    const CALLS: u64 = 10_000;
    let mut folder = Folder::new(architecture, "device");
    let kernel = kernel_for(architecture, series).unwrap().vmlinuz;
    let options = format!(
        "-machine {machine},memory-backend=ram -cpu max -smp 2 -m {memory} \
         -object memory-backend-memfd,id=ram,share=on,size={memory} {DEVICE} {more} -chardev \
         socket,id=console,path=DIR/console-socket,server=on,wait=off,logfile=DIR/console \
         -serial chardev:console -initrd DIR/initrd -kernel {}",
        kernel.display()
    );
    let console = match architecture {
        // Emulated on a busy machine, the timer of a `pc` is at times too late for the kernel's check.
        Architecture::X86_64 => "ttyS0 no_timer_check",
        _ => "ttyAMA0",
    };
    let work = format!("wait-console-line,proc-read:/proc/version:{CALLS},idle:1");
    let append =
        format!("console={console} loglevel=5 vmm.work={work},proc-read:/proc/uptime:100000000");
    folder.qemu(&options, &[&append]);
    let mut typed = UnixStream::connect(folder.path("console-socket")).unwrap();
    // What nobody reads soon fills the socket, byte by byte, and QEMU waits for room with the guest held.
    let mut printed = typed.try_clone().unwrap();
    thread::spawn(move || io::copy(&mut printed, &mut io::sink()));
    wait_until("a guest that waits", || folder.read("console").contains("VMM-READY"));

    let attach = folder.attach();
    let attached = Attached::new(&attach).unwrap();
    let chosen = attached.region_memory().clone();
    assert!(matches!(chosen, RegionMemory::Ivshmem { hidden_too: false, .. }), "{chosen:?}");
    let guest = attached.machine();
    let kernel = wait_for_kernel(guest);
    let before = text(guest, &kernel).unwrap();
    let region = MappedRegion::new(guest, &kernel).unwrap();
    let filter = Filter { only: vec![Glob::new("version_proc_show")], except: vec![] };
    let selection = Selection::new(&kernel, guest, &filter).unwrap();
    let (mut session, _) = Session::arm(guest, &kernel, &region, &selection).unwrap();
    typed.write_all(b"go\n").unwrap();
    wait_until("the calls", || {
        session.drain(&mut Nowhere).unwrap();
        folder.read("console").contains("VMM-WORK-END proc-read:/proc/version")
    });
    session.disarm().unwrap();
    let (summary, finished) = session.finish(&mut Nowhere);
    finished.unwrap();
    assert_eq!(summary.functions, [("version_proc_show".into(), CALLS)]);
    assert_eq!((summary.dropped(), summary.corrupt), (0, vec![]));
    let parts = Part::ALL.map(|part| region.range(part));
    attached.detach().unwrap();

    let mut child = folder.trace("killed");
    child.kill().unwrap();
    child.wait().unwrap();
    let left = Attached::new(&attach).unwrap_err();
    assert!(matches!(left, AttachError::LeftBehind { .. }), "{left}");
    let attached = Attached::new(&Attach { restore: true, ..attach.clone() }).unwrap();
    let restored = attached.restored().unwrap();
    assert!(restored.restored > 50 && restored.foreign.is_empty(), "{restored:?}");
    assert_eq!(*attached.region_memory(), chosen);
    let region = MappedRegion::new(attached.machine(), &kernel).unwrap();
    assert_eq!(Part::ALL.map(|part| region.range(part)), parts, "the region is where it was");
    assert!(region.code().used() > 0);
    attached.detach().unwrap();
    assert!(attached_text(&attach) == before, "the text is not what it was");
    assert_eq!(complaints(&folder.read("console")), [] as [&str; 0]);
}

#[test]
fn what_keeps_a_device_from_being_used_is_named() {
    let mut folder = Folder::new(Architecture::X86_64, "ivshmem");
    let ram = "-object memory-backend-memfd,id=ram,share=on,size=128M \
               -machine q35,memory-backend=ram -m 128M";
    let attach = folder.attach();
    let refused = |attach: &Attach| match Attached::new(attach).unwrap_err() {
        AttachError::NoRegion { instead, .. } => instead,
        other => panic!("{other}"),
    };
    let small = DEVICE.replace("64M", "4M");
    let private = DEVICE.replace("share=on", "share=off");
    let two = format!(
        "{DEVICE} -object memory-backend-memfd,id=other,share=on,size=32M \
         -device ivshmem-plain,memdev=other"
    );
    for (options, is_it) in [
        ("", (|why| matches!(why, IvshmemError::Absent)) as fn(&IvshmemError) -> bool),
        (&small, |why| matches!(why, IvshmemError::TooSmall { size: 0x40_0000, .. })),
        (&private, |why| matches!(why, IvshmemError::Private(_))),
        (&two, |why| matches!(why, IvshmemError::Several(2))),
        // No firmware has run.
        (&format!("{DEVICE} -S"), |why| matches!(why, IvshmemError::NotMapped { .. })),
    ] {
        let pid = folder.qemu(&format!("{ram} {options}"), &[]);
        let why = refused(&attach);
        assert!(is_it(&why), "{options}: {why:?}");
        signal("-KILL", pid);
        wait_until("QEMU's end", || UnixStream::connect(folder.path("qmp")).is_err());
    }
    let error = Attached::new(&attach).unwrap_err();
    assert!(matches!(error, AttachError::NoMonitor { .. }), "{error}");

    // Of two, the one whose id says so; and a device comes before RAM, unless that is in use.
    let pid = folder.qemu(&format!("{ram} {}", two.replace("=vmm -", "=vmm,id=vmm -")), &[]);
    wait_until("the firmware", || Attached::new(&attach).is_ok());
    let region_of = |told| {
        let attached = Attached::new(&Attach { told, ..attach.clone() }).unwrap();
        let region = attached.region_memory().clone();
        let code = attached.machine().region(Part::Code);
        code.memory.copy_from(&[1u8]);
        let gpa = code.gpa;
        attached.detach().unwrap();
        (region, gpa.0)
    };
    let told = Some(64 << 20);
    let (first, at) = region_of(told);
    assert!(matches!(first, RegionMemory::Ivshmem { hidden_too: true, .. }) && at > 128 << 20);
    let (second, at) = region_of(told);
    assert!(matches!(second, RegionMemory::Hidden { instead: IvshmemError::Taken(_) }));
    assert_eq!(at, 64 << 20);
    let third = Attached::new(&Attach { told, ..attach.clone() }).unwrap_err();
    assert!(matches!(third, AttachError::RegionTaken(_)), "{third}");
    assert!(matches!(refused(&attach), IvshmemError::Taken(_)));
    signal("-KILL", pid);
}
