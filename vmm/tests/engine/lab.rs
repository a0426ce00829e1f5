//! This test program itself in the nested lab, with stock kernels.
//!
//! The bare guests of the other tests need no lab: the host's own KVM runs them.

use std::time::Duration;

use guest_images::{Initramfs, LAB_CPU, Lab, Outcome, RunningLab, Series, kernel};

use crate::stock;

/// How long one run may take: everything is emulated twice, perhaps on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Where this program is in the lab.
const SELF: &str = "/bin/engine";

/// A lab with this program, and the guest that [`stock`] boots.
fn boot(guest: Series, cpu: &str) -> RunningLab {
    let lab = Lab::new(&kernel(Series::V6_1).unwrap()).unwrap();
    lab.cpu(cpu)
        .program(&std::env::current_exe().unwrap(), SELF)
        .unwrap()
        .host_file(&kernel(guest).unwrap().vmlinuz, stock::KERNEL)
        .unwrap()
        .file(stock::INITRD, 0o644, &Initramfs::new().unwrap().build())
        .unwrap()
        .boot()
        .unwrap()
}

/// Runs this program's tests that `selection` names, and checks that some ran and all passed.
fn pass(lab: &mut RunningLab, selection: &str) -> Outcome {
    let outcome = lab.run(&format!("{SELF} {selection}"), PATIENCE).unwrap();
    let said = String::from_utf8_lossy(&outcome.stdout);
    assert_eq!(outcome.status, 0, "{outcome}");
    assert!(said.contains(" passed") && !said.contains(" 0 passed"), "{outcome}");
    outcome
}

#[test]
fn a_stock_kernel_runs_on_the_kvm_of_hardware() {
    let mut lab = boot(Series::V6_1, LAB_CPU);
    for test in [
        "a_stock_kernel_is_stopped_over_and_over_from_its_first_instruction_to_its_last",
        "a_stock_kernel_reads_what_is_typed_and_reboots_through_the_bios",
    ] {
        pass(&mut lab, &format!("--ignored --exact stock::{test}"));
    }
}

#[test]
fn five_level_paging_is_the_guests_if_the_host_has_it_and_it_is_wanted() {
    let mut lab = boot(Series::V6_12, "max,+svm,+npt");
    pass(&mut lab, "--ignored --exact stock::a_stock_kernel_gets_five_level_paging_or_not");
}
