//! The nested lab, from boot to power-off. One boot serves all of it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use guest_images::{Event, Lab, RunningLab, Series, kernel};

const SHORT: Duration = Duration::from_secs(60);

#[test]
fn a_lab_has_kvm_and_gives_back_status_output_and_files() {
    let directory = tempfile::tempdir().unwrap();
    let probe = compile(directory.path());
    let mut lab = Lab::new(&kernel(Series::V6_1).unwrap())
        .unwrap()
        .host_file(&probe, "/bin/kvm-probe")
        .unwrap()
        .program(Path::new("/usr/bin/env"), "/opt/env")
        .unwrap()
        .boot()
        .unwrap();

    kvm_runs_a_guest(&mut lab);
    outputs_and_status_come_back_apart(&mut lab);
    a_dynamically_linked_program_runs(&mut lab);
    a_large_output_comes_back_whole(&mut lab);
    files_come_back_or_say_why_not(&mut lab);
    input_is_read_as_it_is_written(&mut lab);
    a_signal_reaches_the_script(&mut lab);
    a_terminal_turns_keys_into_signals(&mut lab);
    a_script_that_hangs_is_killed_and_the_lab_goes_on(&mut lab);
}

fn compile(directory: &Path) -> std::path::PathBuf {
    let program = directory.join("kvm-probe");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kvm_probe.c");
    let status = Command::new("gcc")
        .args(["-O2", "-static", "-Wall", "-Werror", "-o"])
        .args([&program, &source])
        .status()
        .expect("gcc must be installed: scripts/setup.sh installs it");
    assert!(status.success());
    program
}

fn kvm_runs_a_guest(lab: &mut RunningLab) {
    let outcome = lab.run("kvm-probe", SHORT).unwrap();
    assert_eq!((outcome.status, outcome.stdout_text().as_str()), (0, "KVM-SUM 42\n"), "{outcome}");
}

fn outputs_and_status_come_back_apart(lab: &mut RunningLab) {
    let outcome = lab.run("echo out; echo err >&2; exit 7", SHORT).unwrap();
    assert_eq!(outcome.status, 7);
    assert_eq!(outcome.stdout, b"out\n");
    assert_eq!(outcome.stderr, b"err\n");
    assert_eq!(lab.run("kill -TERM $$", SHORT).unwrap().status, 128 + 15);
    assert_eq!(lab.run("exec cat", SHORT).unwrap().status, 0, "standard input is at its end");
}

fn a_dynamically_linked_program_runs(lab: &mut RunningLab) {
    let outcome = lab.run("/opt/env X=1 /opt/env", SHORT).unwrap();
    assert!(outcome.stdout_text().contains("X=1\n"), "{outcome}");
}

fn a_large_output_comes_back_whole(lab: &mut RunningLab) {
    let outcome = lab.run("head -c 5000000 /dev/zero | tr '\\0' x", SHORT).unwrap();
    assert_eq!(outcome.status, 0);
    assert_eq!(outcome.stdout.len(), 5_000_000);
    assert!(outcome.stdout.iter().all(|byte| *byte == b'x'));
}

fn files_come_back_or_say_why_not(lab: &mut RunningLab) {
    lab.run("seq 100000 >/tmp/numbers", SHORT).unwrap();
    let numbers = String::from_utf8(lab.fetch("/tmp/numbers", SHORT).unwrap()).unwrap();
    assert_eq!(numbers.lines().count(), 100_000);
    assert_eq!(numbers.lines().last(), Some("100000"));
    assert_eq!(
        lab.fetch("/tmp/nothing", SHORT).unwrap_err().to_string(),
        "cannot read /tmp/nothing in the lab: No such file or directory (os error 2)"
    );
}

fn input_is_read_as_it_is_written(lab: &mut RunningLab) {
    let mut session = lab.spawn("while read -r line; do echo got $line; done; echo end").unwrap();
    let mut input = session.input();
    input.write(b"one\n").unwrap();
    session.wait_for("got one", SHORT).unwrap();
    input.write(b"two\n").unwrap();
    session.wait_for("got two", SHORT).unwrap();
    input.close().unwrap();
    assert_eq!(session.wait(SHORT).unwrap().stdout_text(), "got one\ngot two\nend\n");
}

fn a_signal_reaches_the_script(lab: &mut RunningLab) {
    let mut session = lab
        .spawn("trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.1; done")
        .unwrap();
    session.wait_for("ready", SHORT).unwrap();
    session.input().signal(2).unwrap();
    let outcome = session.wait(SHORT).unwrap();
    assert_eq!((outcome.status, outcome.stdout_text().as_str()), (3, "ready\ncaught\n"));
}

fn a_terminal_turns_keys_into_signals(lab: &mut RunningLab) {
    let mut session = lab
        .spawn_on_terminal("stty size; test -t 2 && echo terminal; sleep 1000", (33, 99))
        .unwrap();
    session.wait_for("33 99", SHORT).unwrap();
    session.wait_for("terminal", SHORT).unwrap();
    session.input().write(b"\x03").unwrap();
    let mut status = None;
    while let Some(event) = session.next_event(SHORT).unwrap() {
        if let Event::Exit(found) = event {
            status = Some(found);
        }
    }
    assert_eq!(status, Some(128 + 2), "Ctrl-C ends what runs on the terminal");
}

fn a_script_that_hangs_is_killed_and_the_lab_goes_on(lab: &mut RunningLab) {
    let error = lab.run("echo so far; sleep 1000", Duration::from_secs(2)).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "the lab's script did not end within 2 s; its output's last lines are: so far"
        ),
        "{error}"
    );
    assert_eq!(lab.run("pgrep sleep || echo none", SHORT).unwrap().stdout, b"none\n");
}
