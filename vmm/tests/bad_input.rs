//! Bad input: one clear sentence each, an exit status that tells, and no guest started.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use support::{Folder, toy_kernel, vmm};

/// Spins for ever: `jmp .`
const SPIN: &[u8] = &[0xeb, 0xfe];

/// Runs `command` and checks that it fails as it should: with that exit status, nothing on standard
/// output, and one sentence on standard error, which it gives.
fn refusal(mut command: Command, status: i32) -> String {
    let Output { status: ended, stdout, stderr } = command.output().expect("the program starts");
    let said = String::from_utf8(stderr).expect("messages are UTF-8");
    assert_eq!(ended.code(), Some(status), "{said}");
    assert_eq!(String::from_utf8_lossy(&stdout), "");
    assert_eq!(said.lines().count(), 1, "one sentence: {said}");
    said.strip_prefix("vmm: ").unwrap_or_else(|| panic!("the program names itself: {said}")).into()
}

/// `vmm run` with a kernel and further arguments, under KVM wherever it is.
fn run(kernel: &str, arguments: &[&str]) -> Command {
    let mut command = vmm(&["run", "--accel", "kvm", "--kernel", kernel]);
    command.args(arguments);
    command
}

#[track_caller]
fn says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "{word:?} is in: {said}");
    }
}

#[test]
fn a_kernel_that_does_not_exist_is_named() {
    says(
        &refusal(run("/nonexistent/vmlinuz", &[]), 1),
        &["there is no kernel /nonexistent/vmlinuz"],
    );
}

#[test]
fn what_is_not_a_kernel_is_told_apart() {
    let folder = Folder::new("not-a-kernel");
    let text = folder.file("notes.txt", &b"not a kernel at all\n".repeat(100));
    says(&refusal(run(&text, &[]), 1), &["notes.txt is not a bzImage"]);
    let empty = folder.file("empty", b"");
    says(&refusal(run(&empty, &[]), 1), &["empty is not a bzImage", "an empty file"]);
    says(&refusal(run("/", &[]), 1), &["a directory"]);
    let elf = folder.file("vmlinux", &fs::read(env!("CARGO_BIN_EXE_vmm")).unwrap()[..8192]);
    says(&refusal(run(&elf, &[]), 1), &["vmlinux is not a bzImage", "ELF"]);
}

#[test]
fn a_truncated_kernel_is_told_by_its_size() {
    let folder = Folder::new("truncated");
    let mut kernel = toy_kernel(SPIN);
    kernel.truncate(kernel.len() - 100);
    let expected = (kernel.len() + 100).to_string();
    let kernel = folder.file("vmlinuz", &kernel);
    says(&refusal(run(&kernel, &[]), 1), &["vmlinuz is cut short", &expected]);
}

#[test]
fn an_initrd_that_is_missing_or_larger_than_memory_is_refused() {
    let folder = Folder::new("initrd");
    let kernel = folder.file("vmlinuz", &toy_kernel(SPIN));
    let missing = folder.path("missing.img");
    says(&refusal(run(&kernel, &["--initrd", &missing]), 1), &["initrd", "missing.img"]);

    let large = folder.file("large.img", b"");
    fs::File::options().write(true).open(&large).unwrap().set_len(200 << 20).unwrap();
    let said = refusal(run(&kernel, &["--initrd", &large, "--memory", "128M"]), 1);
    says(&said, &["memory of 128 MiB is too little", "initrd"]);
}

#[test]
fn a_guest_without_cpus_or_with_too_little_memory_is_refused() {
    let folder = Folder::new("sizes");
    let kernel = folder.file("vmlinuz", &toy_kernel(SPIN));
    says(&refusal(run(&kernel, &["--cpus", "0"]), 2), &["--cpus", "at least 1 CPU"]);
    says(&refusal(run(&kernel, &["--cpus", "1000"]), 2), &["--cpus", "at most 254 CPUs"]);
    says(&refusal(run(&kernel, &["--memory", "16M"]), 1), &["memory of 16 MiB is too little"]);
    says(&refusal(run(&kernel, &["--memory", "0"]), 2), &["--memory", "more than zero"]);
    says(&refusal(run(&kernel, &["--memory", "some"]), 2), &["--memory", "a whole number"]);
    let ring = ["--trace", "func", "--ring-size", "1G"];
    says(&refusal(run(&kernel, &ring), 2), &["--ring-size"]);
}

#[test]
fn an_output_that_can_not_be_written_is_found_before_the_guest_starts() {
    let folder = Folder::new("output");
    let kernel = folder.file("vmlinuz", &toy_kernel(SPIN));
    let trace = |output: &str| run(&kernel, &["--trace", "func", "-o", output]);
    says(&refusal(trace("/nonexistent/trace"), 1), &["/nonexistent/trace can't be written"]);
    says(&refusal(trace("/"), 1), &["/ can't be written"]);
    says(&refusal(trace(&kernel), 1), &["can't be written: it is an input"]);
    assert_eq!(fs::read(&kernel).unwrap(), toy_kernel(SPIN), "the kernel is as it was");
    let console = run(&kernel, &["--console", "/nonexistent/console"]);
    says(&refusal(console, 1), &["/nonexistent/console can't be written"]);
}

#[test]
fn the_console_and_the_trace_are_never_mixed() {
    let both = ["--trace", "func", "--console", "stdio"];
    says(&refusal(run("k", &both), 2), &["can't both be on standard output"]);
    let both = ["--trace", "func", "-o", "f", "--console", "f"];
    says(&refusal(run("k", &both), 2), &["can't both go to f"]);
}

#[test]
fn options_that_make_no_sense_are_usage_errors_of_one_line() {
    for arguments in [
        &["run"][..],
        &["run", "--kernel"],
        &["run", "--kernel", "k", "-f", "x"],
        &["run", "--kernel", "k", "--trace", "everything"],
        &["run", "--kernel", "k", "surplus"],
        &["walk"],
        &["doctor", "--xml"],
    ] {
        assert!(!refusal(vmm(arguments), 2).is_empty());
    }
}

#[test]
fn a_guest_of_another_architecture_is_not_for_kvm() {
    says(&refusal(run("k", &["--arch", "s390x"]), 1), &["s390x", "--accel tcg"]);
    says(&refusal(run("k", &["--arch", "vax"]), 2), &["vax", "aarch64"]);
}

/// `command`, in a mount namespace of its own where `set_up` has been run.
fn confined(set_up: &str, command: &Command) -> Command {
    let mut confined = Command::new("unshare");
    confined.args(["--mount", "sh", "-c", &format!("{set_up} && exec \"$@\""), "sh"]);
    confined.arg(command.get_program()).args(command.get_args()).stdin(std::process::Stdio::null());
    confined
}

#[test]
fn a_host_without_kvm_is_told_so() {
    let folder = Folder::new("no-kvm");
    let kernel = folder.file("vmlinuz", &toy_kernel(SPIN));
    let hidden = "mount -t tmpfs none /dev";
    says(&refusal(confined(hidden, &run(&kernel, &[])), 1), &["there is no /dev/kvm", "doctor"]);
}

#[test]
fn a_device_that_is_not_kvm_is_told_so() {
    let folder = Folder::new("not-kvm");
    let kernel = folder.file("vmlinuz", &toy_kernel(SPIN));
    let replaced = "mount --bind /dev/null /dev/kvm";
    says(&refusal(confined(replaced, &run(&kernel, &[])), 1), &["/dev/kvm is not a KVM device"]);
}

#[test]
fn a_user_who_may_not_open_kvm_is_told_which_group_may() {
    let folder = Folder::new("not-permitted");
    let kernel = folder.file("vmlinuz", &toy_kernel(SPIN));
    // Where the program lies, other users may have no access.
    let program = folder.path("vmm");
    fs::copy(env!("CARGO_BIN_EXE_vmm"), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(program);
    command.args(["run", "--accel", "kvm", "--kernel", &kernel]).uid(65534).gid(65534);
    says(&refusal(command, 1), &["/dev/kvm may not be opened", "group"]);
}

#[test]
fn a_benchmark_that_makes_no_sense_is_refused() {
    let folder = Folder::new("bench");
    let bench = |arguments: &str| {
        let mut command = vmm(&["bench", "stop-all"]);
        command.args(arguments.split_whitespace());
        command
    };
    for (arguments, words) in [
        ("--cpus 0", "a whole number from 1 to 254"),
        ("--cpus 1,x", "a whole number from 1 to 254"),
        ("--sites 1,none", "a number of functions from 1 on, or all"),
        ("--sites 0", "a number of functions from 1 on, or all"),
        ("--sites 40001", "the bare guest has 40000 functions"),
        ("--rounds 0", "a whole number from 1 to 1000000"),
        ("--guest stock", "--kernel FILE"),
        ("--kernel k", "--guest stock"),
        ("--initrd i", "--kernel"),
        ("--engine qemu", "--guest stock"),
        ("--engine xen", "invalid value 'xen'"),
        ("--json f --plot f", "name two files"),
    ] {
        says(&refusal(bench(arguments), 2), &[words]);
    }
    let nowhere = format!("--plot {}", folder.path("no/such/folder.svg"));
    says(&refusal(bench(&nowhere), 1), &["folder.svg can't be written"]);
    let kernel = folder.file("vmlinuz", &toy_kernel(SPIN));
    let input = format!("--guest stock --kernel {kernel} --json {kernel}");
    says(&refusal(bench(&input), 1), &["vmlinuz can't be written", "it is an input"]);
    let missing = format!("--guest stock --kernel {}", folder.path("missing"));
    says(&refusal(bench(&missing), 1), &["with 1 vCPU: there is no kernel"]);
}

#[test]
fn what_is_no_recording_is_refused_and_one_is_not_written_over() {
    let folder = Folder::new("report");
    let report = |recording: &str, arguments: &[&str]| {
        let mut command = vmm(&["report", recording]);
        command.args(arguments);
        command
    };
    says(&refusal(report(&folder.path("none"), &[]), 1), &["none can't be read: No such file"]);
    let text = folder.file("trace.txt", b"# tracer: function\n");
    says(
        &refusal(report(&text, &[]), 1),
        &["trace.txt can't be read: it is no recording of vmm's"],
    );
    let empty = folder.file("empty", b"");
    says(&refusal(report(&empty, &[]), 1), &["empty can't be read: it is no recording of vmm's"]);
    let newer = folder.file("newer", b"\x89VMMREC\n\x63\0\0\0");
    says(&refusal(report(&newer, &[]), 1), &["it is a recording of version 99"]);
    let mut recording = b"\x89VMMREC\n\x02\0\0\0".to_vec();
    let cut = folder.file("cut", &recording);
    says(&refusal(report(&cut, &[]), 1), &["it ends before it tells of which guest it is"]);
    // A first block of a guest with one CPU and all else zero or empty.
    recording.extend_from_slice(b"\x01\0\0\0\x19\0\0\0\x58\xe8\xc1\xcc");
    recording.extend_from_slice(&[0; 19]);
    recording.extend_from_slice(&[1, 0, 0, 0, 0, 0]);
    let whole = folder.file("whole", &recording);
    says(&refusal(report(&whole, &["-o", &whole]), 1), &["can't be written: it is an input"]);
    let piped = refusal(report(&whole, &["--format", "trace-dat"]), 1);
    says(&piped, &["a trace.dat can't be written to standard output"]);
    assert_eq!(fs::read(&whole).unwrap(), recording, "it is as it was");
}
