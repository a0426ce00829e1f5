//! What tracing costs a stock guest, by vmm and by what one would use instead, in one run: in the nested
//! lab under KVM, and under QEMU's emulation. See `tests/src/bin/side_by_side.rs`, which can be run by hand
//! where KVM runs stock kernels.
//!
//! Everything is emulated here, so that only ratios within one table mean anything.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs, process};

use guest_images::{Initramfs, Series, kernel};
use tests::lab::{INITRD, VmmLab, guest_kernel, program};

fn main() {
    let program = program("tests", "side_by_side");

    let initrd: PathBuf = env::temp_dir().join(format!("side-by-side-initrd-{}", process::id()));
    fs::write(&initrd, Initramfs::new().expect("an initramfs").build()).expect("a file");
    let path = program.to_str().expect("a path of ASCII");
    let mut lab = VmmLab::boot(&[Series::V6_1], None, &[path]);
    let command = format!("side_by_side kvm {} {INITRD}", guest_kernel(Series::V6_1));
    print!("{}", lab.succeed(&command).stdout_text());
    drop(lab);

    let vmlinuz = kernel(Series::V6_1).expect("a stock kernel").vmlinuz;
    for system in ["qemu", "gdbstub"] {
        let status = Command::new(&program).arg(system).arg(&vmlinuz).arg(&initrd).status();
        assert!(status.expect("side_by_side").success(), "{system} failed");
    }
    fs::remove_file(&initrd).expect("the bench's own file");
}
