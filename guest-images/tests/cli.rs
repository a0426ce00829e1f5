//! The program `guest-images`, as scripts use it.

use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};

fn guest_images(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_guest-images"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn a_command_in_the_lab_has_this_ones_input_output_status_and_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    fs::write(path("in"), "a file\n").unwrap();
    let done = guest_images(
        &[
            "lab",
            "--file",
            &format!("{}:/data/in", path("in")),
            "--fetch",
            &format!("/data/out:{}", path("out")),
            "--console",
            &path("console"),
            "--",
            "cat /data/in - | tee /data/out; test -c /dev/kvm || exit 1; echo err >&2; exit 42",
        ],
        "typed\n",
    );
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    assert_eq!(text(&done.stderr), "err\n");
    assert_eq!(text(&done.stdout), "a file\ntyped\n");
    assert_eq!(done.status.code(), Some(42));
    assert_eq!(fs::read_to_string(path("out")).unwrap(), "a file\ntyped\n");
    assert!(fs::read_to_string(path("console")).unwrap().contains("LAB-INIT"));
}

#[test]
fn bad_arguments_are_one_clear_sentence_and_a_failure() {
    for (arguments, sentence) in [
        (&["kernel", "6.2"] as &[&str], "there is no kernel series \"6.2\""),
        (&["lab", "--file", "x", "--", "true"], "--file takes HOST:GUEST, and \"x\" has no colon"),
        (
            &["lab", "--program", "/no/such", "--", "true"],
            "cannot tell which shared libraries /no/such needs",
        ),
        (
            &["lab", "--file", "/no/such:/x", "--", "true"],
            "guest-images: cannot read /no/such: No such file or directory (os error 2)\n",
        ),
        (
            &["initramfs", "--out", "/no/such/file"],
            "guest-images: cannot write /no/such/file: No such file or directory (os error 2)\n",
        ),
        (&["initramfs", "--out", "/dev/null", "--module", "nope"], " has no module nope\n"),
        (&["capture", "6.1", "--memory", "4096"], "4096 is not in 128..=2048"),
    ] {
        let done = guest_images(arguments, "");
        let stderr = String::from_utf8(done.stderr).unwrap();
        assert!(!done.status.success(), "{arguments:?}");
        assert!(stderr.contains(sentence), "{arguments:?}: {stderr}");
    }
}

#[test]
fn an_initramfs_holds_the_files_and_modules_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("initramfs").display().to_string();
    let done = guest_images(
        &["initramfs", "-o", &out, "--module", "virtio_blk", "--file", "/etc/hostname:/etc/name"],
        "",
    );
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let listing = Command::new("cpio")
        .args(["-t", "--quiet", "-F", &out])
        .output()
        .expect("cpio must be installed: scripts/setup.sh installs it");
    let names = String::from_utf8(listing.stdout).unwrap();
    for name in ["init", "bin/work", "lib/modules/002-virtio_blk.ko", "etc/name"] {
        assert!(names.lines().any(|line| line == name), "{name} is missing in {names}");
    }
}
