//! Captures of stock guests. The first run of a kernel boots it; later ones read the cache.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use guest_images::{CaptureOptions, Series, capture, kernel};

#[test]
fn a_capture_holds_the_kernel_that_ran_and_what_it_said_of_itself() {
    let kernel = kernel(Series::V6_1).unwrap();
    let capture = capture(&kernel, &CaptureOptions::default()).unwrap();
    assert_eq!(capture.release, kernel.release);

    let mut ram = Vec::new();
    File::open(capture.ram()).unwrap().read_to_end(&mut ram).unwrap();
    assert_eq!(ram.len(), 512 << 20);
    let banner = format!("Linux version {} (", kernel.release).into_bytes();
    assert!(ram.windows(banner.len()).any(|window| window == banner));

    // Paged long mode with 5 levels, in the half of the address space that goes with the privilege:
    // where a vCPU stood is chance. One of the two bases of GS is always the kernel's.
    assert_eq!(capture.vcpus.len(), 2);
    for vcpu in &capture.vcpus {
        assert!([0x10, 0x33].contains(&vcpu.cs), "{vcpu:x?}");
        assert_eq!(vcpu.rip >> 63, u64::from(vcpu.cs == 0x10), "{vcpu:x?}");
        assert!(vcpu.cr0 & 1 << 31 != 0 && vcpu.cr4 & 1 << 12 != 0, "{vcpu:x?}");
        assert!(vcpu.efer & 1 << 10 != 0, "{vcpu:x?}");
        assert!((vcpu.gs_base | vcpu.kernel_gs_base) >> 63 == 1, "{vcpu:x?}");
    }

    let kallsyms = fs::read_to_string(capture.kallsyms()).unwrap();
    let own: String =
        kallsyms.lines().filter(|line| !line.contains('[')).flat_map(|line| [line, "\n"]).collect();
    assert!(own.lines().count() > 80_000);
    assert_eq!(md5(&own), capture.kallsyms_md5);
    let functions = fs::read_to_string(capture.available_filter_functions()).unwrap();
    assert!(functions.lines().count() > 30_000);
    assert!(functions.lines().any(|line| line == "version_proc_show"));
}

fn md5(text: &str) -> String {
    let mut child = Command::new("md5sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("md5sum is part of coreutils");
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap().stdout;
    String::from_utf8(output).unwrap().split_whitespace().next().unwrap().to_owned()
}
