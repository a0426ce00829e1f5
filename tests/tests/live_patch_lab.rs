//! Live patches of stock x86_64 guests under the KVM engine. One boot of the lab serves all of it.

use std::env;
use std::fs;
use std::path::PathBuf;

use guest_images::{Architecture, Series};
use tests::guest::complaints;
use tests::lab::{VmmLab, vmm_run};
use tests::patched::{Patched, payloads};
use tests::samples::{
    Sample, a_patch_waits_until_nobody_is_inside, every_sample_takes_effect_and_is_taken_back,
    patches_of_one_function_are_stacked, traced_and_patched_at_once, what_does_not_fit_is_refused,
};

const CYCLES: &str = env!("CARGO_BIN_EXE_patch_cycles");

/// Compiled payloads for two architectures, removed when it is dropped.
struct Objects(PathBuf);

impl Objects {
    fn new() -> (Self, Vec<PathBuf>) {
        let folder = env::temp_dir().join(format!("vmm-payloads-{}", std::process::id()));
        let ours = payloads(Architecture::X86_64, &folder);
        let foreign = payloads(Architecture::S390x, &folder).join("hot-return.o");
        let other = folder.join("s390x.o");
        fs::copy(foreign, &other).unwrap();
        let files = fs::read_dir(ours).unwrap().map(|entry| entry.unwrap().path());
        let files = files.chain([other]).collect();
        (Self(folder), files)
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        // What can't be removed is in a temporary folder anyway.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn stock_guests_are_patched_in_the_lab() {
    let (_objects, files) = Objects::new();
    let mut lab = VmmLab::boot_with(&[Series::V6_1, Series::V6_12], None, &[CYCLES], &files);
    for series in [Series::V6_1, Series::V6_12] {
        let run = vmm_run(series, "--accel kvm --console stdio --name a", "vmm.work=shell");
        let mut guest = Patched::start(&mut lab, &format!("/tmp/{series}"), &run);
        every_sample_takes_effect_and_is_taken_back(&mut guest, "/files", &Sample::ALL);
        patches_of_one_function_are_stacked(&mut guest, "/files");
        if series == Series::V6_1 {
            traced_and_patched_at_once(&mut guest, "/files");
            a_patch_waits_until_nobody_is_inside(&mut guest, "/files");
            what_does_not_fit_is_refused(&mut guest, "/files");
        }
        assert_eq!(complaints(&guest.ask("dmesg")), [] as [&str; 0]);
        // What is applied goes with the vmm that controls the guest.
        guest.done("patch a apply /files/hot-return.o");
        guest.succeed("kill -INT $(cat $F/guest.pid)");
        let (status, said) = guest.end_of("guest");
        assert_eq!(status, 130, "{said}");
        assert!(said.contains("vmm: reverted 1 patch (hot-return.o)"), "{said}");
    }
    // Many more rounds are made where a processor is emulated once, in `live_patch`.
    under_load(&mut lab, Series::V6_1, "40 20");
    under_load(&mut lab, Series::V6_12, "10 10");
}

/// Applies and reverts payloads while both CPUs call what they replace.
fn under_load(lab: &mut VmmLab, series: Series, rounds: &str) {
    let kernel = tests::lab::guest_kernel(series);
    let initrd = tests::lab::INITRD;
    let outcome = lab.succeed(&format!(
        "patch_cycles {kernel} {initrd} /files/hot-return.o /files/shared-state.o {rounds}"
    ));
    print!("{series}\n{}", outcome.stdout_text());
}
