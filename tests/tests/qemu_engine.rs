//! Stock guests under QEMU's emulation, through the library and as `vmm run --accel tcg`.

use std::path::Path;
use std::process::Child;
use std::{fs, io};

use guest_images::Architecture::X86_64;
use guest_images::{Series, kernel};
use patcher::machine::{Machine, StopError, TextWrite};
use patcher::region::Part;
use tests::emulated::{
    self, Folder, LONG, every_function_is_armed_and_put_back, output, said, signal,
    wait_for_kernel, wait_until,
};
use tests::graph::the_tree_is_the_guests_own;
use tests::lab::Trace;
use tests::recorder;
use vmm::devices::Console;
use vmm::qemu::{Architecture, GuestExit, Launch, Qemu, QemuError};

/// The same folder for every test here: of x86_64 guests.
fn folder(test: &str) -> Folder {
    Folder::new(X86_64, test)
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

fn is_gone(pid: &str) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn every_call_makes_one_record() {
    emulated::every_call_makes_one_record(X86_64, Series::V6_1);
}

#[test]
fn what_is_filtered_out_never_leaves_the_guest() {
    tests::filtered::what_is_filtered_out_never_leaves_the_guest(X86_64, Series::V6_1);
}

#[test]
fn the_tree_of_calls_is_the_one_that_the_guest_sees_itself() {
    the_tree_is_the_guests_own(X86_64, Series::V6_1);
}

#[test]
fn every_function_is_armed_and_put_back_byte_for_byte_while_the_guest_is_busy() {
    every_function_is_armed_and_put_back(X86_64, Series::V6_1, 30_000);
}

#[test]
fn a_standing_guest_is_written_to_in_ram_and_nowhere_else() {
    let folder = folder("writes");
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
    let writes = [ram_end - 8, qemu.region(Part::Constants).gpa, ram_end - 16];
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
    let folder = folder("interrupt");
    let mut command = folder.run(Series::V6_1, "vmm.work=proc-read:/proc/version:100000000");
    let child = command.args(["--trace", "func", "-f", "vfs_*", "-o"]);
    let child = child.arg(folder.path("trace")).spawn().unwrap();
    wait_until("a trace", || folder.read("trace").contains("vfs_read <-"));
    let qemu = qemu_of(&child);
    signal("-INT", child.id());
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
    let folder = folder("killed");
    let mut command = folder.run(Series::V6_1, "vmm.work=proc-read:/proc/version:100000000");
    let child = command.args(["--trace", "func", "-f", "vfs_*", "-o"]);
    let child = child.arg(folder.path("trace")).spawn().unwrap();
    wait_until("a trace", || folder.read("trace").contains("vfs_read <-"));
    signal("-KILL", qemu_of(&child));
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
    let folder = folder("orphan");
    let mut command = folder.run(Series::V6_1, "vmm.work=proc-read:/proc/version:100000000");
    command.args(["--trace", "func", "-f", "vfs_*", "-o"]).arg(folder.path("trace.vmmrec"));
    let mut child = command.spawn().unwrap();
    let recorded = || fs::metadata(folder.path("trace.vmmrec")).map_or(0, |file| file.len());
    wait_until("a recording", || recorded() > 100_000);
    let qemu = qemu_of(&child);
    child.kill().unwrap();
    child.wait().unwrap();
    what_was_flushed_is_there(&folder);
    wait_until("QEMU's end", || is_gone(&qemu));
}

/// The recording of a program that was killed, also if its last block was cut.
fn what_was_flushed_is_there(folder: &Folder) {
    let said = folder.report("trace.vmmrec", "trace");
    assert!(said.contains("was not ended in order"), "{said}");
    let text = folder.read("trace");
    let whole = Trace::parse(&text);
    whole.check();
    assert!(whole.count("vfs_read") > 300, "{said}");

    let bytes = fs::read(folder.path("trace.vmmrec")).unwrap();
    fs::write(folder.path("cut.vmmrec"), &bytes[..bytes.len() / 2 + 7]).unwrap();
    let said = folder.report("cut.vmmrec", "cut");
    assert!(
        said.contains("a block is cut, and ") && said.contains(" bytes are left out"),
        "{said}"
    );
    let text = folder.read("cut");
    let cut = Trace::parse(&text);
    assert!(cut.lines.len() > 100 && whole.lines.starts_with(&cut.lines));
}

#[test]
fn a_reboot_and_a_panic_end_it_with_the_status_that_tells() {
    for (after, status) in [("reboot", 3), ("panic", 4)] {
        let folder = folder(after);
        let output =
            output(folder.run(Series::V6_1, &format!("vmm.after={after}")).spawn().unwrap());
        assert_eq!(output.status.code(), Some(status), "{after}: {}", said(&output));
    }
}

#[test]
fn what_cannot_be_started_is_said_in_one_sentence() {
    let folder = folder("refused");
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

#[test]
fn the_last_calls_before_a_panic_are_kept() {
    recorder::the_last_calls_before_a_panic_are_kept(X86_64, Series::V6_1);
}
