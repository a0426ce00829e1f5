//! How `vmm run` ends, and what it leaves behind: its exit status, and the terminal as it was.
//!
//! Guests are toys of a few instructions that any KVM runs.

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::ioctl_fionread;
use rustix::pipe::fcntl_getpipe_size;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, tcgetattr};

use support::{Folder, toy_kernel, vmm};

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

/// `jmp .`
const SPIN: &[u8] = &[0xeb, 0xfe];

/// Prints "A", then powers off by ACPI's sleep register:
/// `mov $0x3f8, %dx; mov $'A', %al; out %al, %dx; mov $0x600, %dx; mov $0x34, %al; out; jmp .`
const PRINT_AND_POWER_OFF: &[u8] = &[
    0x66, 0xba, 0xf8, 0x03, 0xb0, b'A', 0xee, 0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe,
];

/// Resets the machine by the keyboard controller: `mov $0xfe, %al; out %al, $0x64; jmp .`
const REBOOT: &[u8] = &[0xb0, 0xfe, 0xe6, 0x64, 0xeb, 0xfe];

/// Loads an interrupt table of no entries and faults: `push $0; push $0; lidt (%rsp); ud2`
const TRIPLE_FAULT: &[u8] = &[0x6a, 0x00, 0x6a, 0x00, 0x0f, 0x01, 0x1c, 0x24, 0x0f, 0x0b];

/// Prints "A" for ever: `mov $0x3f8, %dx; mov $'A', %al; 1: out %al, %dx; jmp 1b`
const PRINT_FOR_EVER: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'A', 0xee, 0xeb, 0xfd];

/// Prints what is typed:
/// `1: mov $0x3fd, %dx; in %dx, %al; test $1, %al; jz 1b; mov $0x3f8, %dx; in; out; jmp 1b`
const ECHO: &[u8] = &[
    0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7, 0x66, 0xba, 0xf8, 0x03, 0xec, 0xee, 0xeb,
    0xef,
];

/// `vmm run` with a kernel of that code, on whatever KVM there is.
fn run(folder: &Folder, code: &[u8]) -> Command {
    let kernel = folder.file("vmlinuz", &toy_kernel(code));
    vmm(&["run", "--kernel", &kernel, "--memory", "128M", "--accel", "kvm"])
}

/// The program, ended with the test if not before.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    #[track_caller]
    fn ended(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < LONG, "the program did not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the guest prints: the program handles signals by then.
    fn wait_for_output(&mut self) {
        let mut byte = [0];
        self.0.stdout.as_mut().expect("it is a pipe").read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"A");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended, unless the test fails.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_guest_that_powers_off_ends_it_well_and_all_it_printed_is_there() {
    let folder = Folder::new("power-off");
    let Output { status, stdout, stderr } = run(&folder, PRINT_AND_POWER_OFF).output().unwrap();
    assert_eq!((status.code(), text(&stdout), text(&stderr)), (Some(0), "A".into(), "".into()));
}

#[test]
fn a_guest_that_reboots_or_crashes_ends_it_with_a_status_that_tells() {
    let folder = Folder::new("reboot");
    let Output { status, stderr, .. } = run(&folder, REBOOT).output().unwrap();
    assert_eq!(status.code(), Some(3));
    assert!(text(&stderr).contains("reboot"), "{}", text(&stderr));
    let Output { status, stderr, .. } = run(&folder, TRIPLE_FAULT).output().unwrap();
    assert_eq!(status.code(), Some(5));
    assert!(text(&stderr).contains("triple fault"), "{}", text(&stderr));
}

#[test]
fn a_console_in_a_file_has_what_the_guest_printed() {
    let folder = Folder::new("console");
    let console = folder.file("console", b"what was there before");
    let mut command = run(&folder, PRINT_AND_POWER_OFF);
    let Output { status, stdout, .. } = command.args(["--console", &console]).output().unwrap();
    assert_eq!((status.code(), text(&stdout)), (Some(0), "".into()));
    assert_eq!(std::fs::read_to_string(&console).unwrap(), "A");
}

#[test]
fn signals_end_it_in_order_with_their_status() {
    let folder = Folder::new("signals");
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut run = Running::start(run(&folder, PRINT_FOR_EVER).stdout(Stdio::piped()));
        run.wait_for_output();
        run.send(signal);
        assert_eq!(run.ended().code(), Some(status));
    }
}

/// Waits until nothing more goes into a pipe that is written to all the time. Its pages may be full
/// only in part, so that no number of bytes tells.
fn wait_until_full(pipe: &ChildStdout) {
    let half = fcntl_getpipe_size(pipe).unwrap() as u64 / 2;
    let (mut held, mut since, begun) = (0, Instant::now(), Instant::now());
    while held < half || since.elapsed() < Duration::from_millis(500) {
        assert!(begun.elapsed() < LONG, "the pipe does not fill");
        thread::sleep(Duration::from_millis(5));
        let holds = ioctl_fionread(pipe).unwrap();
        if holds != held {
            (held, since) = (holds, Instant::now());
        }
    }
}

#[test]
fn a_reader_that_takes_nothing_does_not_prevent_the_end_and_a_second_signal_hastens_it() {
    let folder = Folder::new("stuck");
    for (second, status) in [(None, 143), (Some(Signal::INT), 130)] {
        let mut run = Running::start(run(&folder, PRINT_FOR_EVER).stdout(Stdio::piped()));
        run.wait_for_output();
        wait_until_full(run.0.stdout.as_ref().unwrap());
        run.send(Signal::TERM);
        if let Some(second) = second {
            // The end in order waits two seconds for the reader.
            thread::sleep(Duration::from_millis(100));
            run.send(second);
        }
        assert_eq!(run.ended().code(), Some(status));
    }
}

#[test]
fn a_reader_that_leaves_ends_it_well() {
    let folder = Folder::new("pipe");
    let mut command = run(&folder, PRINT_FOR_EVER);
    let mut run = Running::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    run.wait_for_output();
    drop(run.0.stdout.take());
    let status = run.ended();
    let mut said = String::new();
    run.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((status.code(), said), (Some(0), String::new()));
}

#[test]
fn a_trace_of_a_guest_that_ends_before_it_has_a_kernel_is_a_failure() {
    let folder = Folder::new("early");
    let mut command = run(&folder, PRINT_AND_POWER_OFF);
    let Output { status, stdout, stderr } = command.args(["--trace", "func"]).output().unwrap();
    assert_eq!((status.code(), text(&stdout)), (Some(1), "".into()));
    assert!(text(&stderr).contains("before its kernel could be traced"), "{}", text(&stderr));
}

#[test]
fn piped_input_reaches_the_guest_as_it_is() {
    let folder = Folder::new("piped");
    let mut command = run(&folder, ECHO);
    let mut run = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
    // Escapes are keys of people.
    run.0.stdin.take().unwrap().write_all(b"hello \x01x").unwrap();
    let mut echoed = [0; 8];
    run.0.stdout.as_mut().unwrap().read_exact(&mut echoed).unwrap();
    assert_eq!(&echoed, b"hello \x01x");
    run.send(Signal::TERM);
    assert_eq!(run.ended().code(), Some(143));
}

#[test]
fn closed_standard_streams_do_no_harm() {
    let folder = Folder::new("closed");
    let command = run(&folder, PRINT_AND_POWER_OFF);
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$@\" <&- >&- 2>&-", "sh"]).arg(command.get_program());
    let status = shell.args(command.get_args()).status().unwrap();
    assert_eq!(status.code(), Some(0));
}

/// The program with a terminal of its own.
struct OnTerminal {
    program: Running,
    keys: File,
    terminal: File,
    before: Termios,
}

impl OnTerminal {
    fn run(folder: &Folder, code: &[u8], arguments: &[&str]) -> Self {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let name = ptsname(&keys, Vec::new()).unwrap();
        let open = || {
            let flags = OFlags::RDWR | OFlags::NOCTTY;
            File::from(rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap())
        };
        let terminal = open();
        let before = tcgetattr(&terminal).unwrap();
        let command = run(folder, code);
        let mut on_terminal = Command::new("setsid");
        on_terminal.arg("--ctty").arg(command.get_program()).args(command.get_args());
        on_terminal.args(arguments).stdin(open()).stdout(open()).stderr(open());
        Self { program: Running::start(&mut on_terminal), keys: keys.into(), terminal, before }
    }

    fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.terminal).unwrap().local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ISIG | LocalModes::ECHO)
    }

    fn wait_until_raw(&self) {
        let begun = Instant::now();
        while !self.is_raw() {
            assert!(begun.elapsed() < LONG, "the terminal did not become raw");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Reads what is shown until `what` is among it.
    fn wait_for(&mut self, what: &str) -> String {
        let mut shown = String::new();
        while !shown.contains(what) {
            let mut some = [0; 256];
            let length = self.keys.read(&mut some).unwrap();
            shown += &String::from_utf8_lossy(&some[..length]);
        }
        shown
    }

    #[track_caller]
    fn is_as_before(&self) {
        let now = tcgetattr(&self.terminal).unwrap();
        assert_eq!(now.local_modes, self.before.local_modes);
        assert_eq!(now.input_modes, self.before.input_modes);
        assert_eq!(now.output_modes, self.before.output_modes);
    }
}

#[test]
fn on_a_terminal_keys_are_the_guests_but_for_the_escape() {
    let folder = Folder::new("keys");
    let mut run = OnTerminal::run(&folder, ECHO, &[]);
    run.wait_until_raw();
    run.keys.write_all(b"typed \x03.\x01a.").unwrap();
    run.wait_for("typed \x03.\x01.");
    run.keys.write_all(b"\x01h").unwrap();
    run.wait_for("Ctrl-a x  end the guest");
    run.keys.write_all(b"\x01x").unwrap();
    assert_eq!(run.program.ended().code(), Some(130));
    run.is_as_before();
}

#[test]
fn the_terminal_is_as_before_after_every_signal() {
    let folder = Folder::new("restored");
    for (signal, status) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let mut run = OnTerminal::run(&folder, SPIN, &[]);
        run.wait_until_raw();
        run.program.send(signal);
        assert_eq!(run.program.ended().code(), Some(status));
        run.is_as_before();
    }
    for signal in [Signal::SEGV, Signal::BUS, Signal::ABORT, Signal::QUIT, Signal::ILL, Signal::FPE]
    {
        let mut run = OnTerminal::run(&folder, SPIN, &[]);
        run.wait_until_raw();
        run.program.send(signal);
        assert_eq!(run.program.ended().signal(), Some(signal.as_raw()), "{signal:?}");
        run.is_as_before();
    }
}

#[test]
fn a_trace_on_the_terminal_leaves_it_alone_and_ctrl_c_ends_it() {
    let folder = Folder::new("cooked");
    let mut run = OnTerminal::run(&folder, SPIN, &["--trace", "func"]);
    run.wait_for("waiting for the guest's kernel");
    run.is_as_before();
    run.keys.write_all(b"\x03").unwrap();
    assert_eq!(run.program.ended().code(), Some(130));
    run.is_as_before();
}
