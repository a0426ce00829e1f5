//! Captures of stock guests. The first run of a kernel boots it; later ones read the cache.

use std::fs::{self, File};
use std::io::Read;

use guest_images::{Architecture, Capture, CaptureOptions, Series, capture, kernel_for};

/// The capture of a stock guest, after checks of what is alike on all architectures.
fn checked(architecture: Architecture, series: Series) -> Capture {
    let kernel = kernel_for(architecture, series).unwrap();
    let capture = capture(&kernel, &CaptureOptions::default()).unwrap();
    assert_eq!(capture.architecture, architecture);
    assert_eq!(capture.release, kernel.release);
    assert_eq!(capture.vcpus.len(), 2);

    let mut ram = Vec::new();
    File::open(capture.ram()).unwrap().read_to_end(&mut ram).unwrap();
    assert_eq!(ram.len(), 512 << 20);
    let banner = format!("Linux version {} (", kernel.release).into_bytes();
    assert!(ram.windows(banner.len()).any(|window| window == banner));

    let kallsyms = fs::read_to_string(capture.kallsyms()).unwrap();
    assert!(kallsyms.lines().count() > 30_000);
    assert!(kallsyms.lines().any(|line| line.ends_with(" version_proc_show")));
    let functions = fs::read_to_string(capture.available_filter_functions()).unwrap();
    assert!(functions.lines().count() > 25_000);
    assert!(functions.lines().any(|line| line == "version_proc_show"));
    capture
}

#[test]
fn a_capture_holds_the_kernel_that_ran_and_what_it_said_of_itself() {
    // Paged long mode with 5 levels, in the half of the address space that goes with the privilege:
    // where a vCPU stood is chance. One of the two bases of GS is always the kernel's.
    for vcpu in &checked(Architecture::X86_64, Series::V6_1).vcpus {
        assert!([0x10, 0x33].contains(&vcpu["cs"]), "{vcpu:x?}");
        assert_eq!(vcpu["rip"] >> 63, u64::from(vcpu["cs"] == 0x10), "{vcpu:x?}");
        assert!(vcpu["cr0"] & 1 << 31 != 0 && vcpu["cr4"] & 1 << 12 != 0, "{vcpu:x?}");
        assert!(vcpu["efer"] & 1 << 10 != 0, "{vcpu:x?}");
        assert!((vcpu["gs_base"] | vcpu["kernel_gs_base"]) >> 63 == 1, "{vcpu:x?}");
    }
}

#[test]
fn a_capture_of_s390x_has_the_roots_of_its_address_spaces() {
    // Translation is on (PSW bit 5 from the left). The kernel's root is a table of the third region
    // or above, and each CPU has a lowcore of its own.
    let vcpus = checked(Architecture::S390x, Series::V6_1).vcpus;
    for vcpu in &vcpus {
        assert!(vcpu["pswm"] & 1 << 58 != 0, "{vcpu:x?}");
        assert!(vcpu["cr13"] >> 12 != 0 && vcpu["cr13"] & 0b0100 != 0, "{vcpu:x?}");
        assert!(vcpu["prefix"] < 512 << 20 && vcpu["prefix"] % 8192 == 0, "{vcpu:x?}");
    }
    assert_ne!(vcpus[0]["prefix"], vcpus[1]["prefix"]);
}

#[test]
fn a_capture_of_aarch64_has_the_roots_of_its_address_spaces() {
    // The MMU is on, the kernel's root is in RAM, and each CPU has variables of its own.
    let vcpus = checked(Architecture::Aarch64, Series::V5_10).vcpus;
    for vcpu in &vcpus {
        assert!(vcpu["sctlr_el1"] & 1 != 0, "{vcpu:x?}");
        let root = vcpu["ttbr1_el1"] & 0x0000_ffff_ffff_f000;
        assert!((Architecture::Aarch64.ram_base()..0x6000_0000).contains(&root), "{vcpu:x?}");
        // A kernel stands in the upper half of the address space, a process in the lower.
        assert_eq!(vcpu["pc"] >> 63, vcpu["cpsr"] >> 2 & 1, "{vcpu:x?}");
    }
    assert_ne!(vcpus[0]["tpidr_el1"], vcpus[1]["tpidr_el1"]);
}
