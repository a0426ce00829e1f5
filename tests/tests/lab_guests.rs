//! Every function of stock guests at once, of every kernel series, and guests that misbehave.

use guest_images::Series;
use tests::guest::complaints;
use tests::lab::{INITRD, Trace, VmmLab, guest_kernel, vmm_run};

const CYCLES: &str = env!("CARGO_BIN_EXE_cycles");
const HOSTILE: &str = env!("CARGO_BIN_EXE_hostile");

fn cycles(lab: &mut VmmLab, series: Series, rounds: u32, cmdline: &str) {
    let kernel = guest_kernel(series);
    let outcome = lab.succeed(&format!("cycles {kernel} {INITRD} {rounds} quiet {cmdline}"));
    print!("{series} {cmdline}\n{}", outcome.stdout_text());
}

/// A known number of calls, and the functions of that kernel that can't be traced.
fn exact(lab: &mut VmmLab, series: Series, cmdline: &str) {
    let work = "vmm.work=proc-read:/proc/version:10000@0+proc-read:/proc/uptime:10000@1";
    let options = "--trace func -f '*_proc_show' -o /tmp/exact";
    let outcome = lab.succeed(&vmm_run(series, options, &format!("{work} {cmdline}")));
    print!("{series} {cmdline}\n{}", outcome.stderr_text());
    let text = lab.read("/tmp/exact");
    let trace = Trace::parse(&text);
    trace.check();
    assert_eq!(trace.count("version_proc_show"), 10_000, "{outcome}");
    assert_eq!(trace.count("uptime_proc_show"), 10_000, "{outcome}");
    assert_eq!(complaints(&outcome.stdout_text()), [] as [&str; 0]);
}

#[test]
fn every_function_at_once_twenty_times_page_tables_of_every_kind_and_a_hostile_guest() {
    let mut lab = VmmLab::boot(&[Series::V6_1], None, &[CYCLES, HOSTILE]);
    cycles(&mut lab, Series::V6_1, 20, "");
    exact(&mut lab, Series::V6_1, "pti=on");
    cycles(&mut lab, Series::V6_1, 2, "pti=on");
    exact(&mut lab, Series::V6_1, "nopti nokaslr");
    a_hostile_guest_does_no_harm(&mut lab);
}

#[test]
fn page_tables_of_five_levels_are_walked() {
    let cpu = "EPYC,+svm,+npt,+la57";
    let mut lab = VmmLab::boot(&[Series::V6_12], Some(cpu), &[CYCLES]);
    exact(&mut lab, Series::V6_12, "");
    cycles(&mut lab, Series::V6_12, 2, "pti=on");
}

#[test]
fn every_series_of_kernels_is_traced() {
    let others = [Series::V5_10, Series::V6_12, Series::V6_18, Series::V7];
    let mut lab = VmmLab::boot(&others, None, &[CYCLES]);
    for series in others {
        exact(&mut lab, series, "");
        cycles(&mut lab, series, 3, "");
    }
}

fn a_hostile_guest_does_no_harm(lab: &mut VmmLab) {
    let kernel = guest_kernel(Series::V6_1);
    let outcome = lab.succeed(&format!("hostile {kernel} {INITRD}"));
    let said = outcome.stdout_text();
    print!("{said}");
    assert!(said.contains("is corrupt"), "{outcome}");
    assert!(said.contains("vfs_fallocate at 0xffffffff"), "{outcome}");
    assert!(
        said.contains("holds [0f 0b 44 00 00] where [0f 1f 44 00 00] was expected"),
        "{outcome}"
    );
}
