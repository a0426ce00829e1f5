//! `vmm run --trace func` on a stock guest, from the first line to the exit status. One boot of the
//! lab serves all of it.

use std::time::Duration;

use guest_images::Series;
use tests::guest::complaints;
use tests::lab::{PATIENCE, Trace, VmmLab, vmm_run};

const GUEST: Series = Series::V6_1;

#[test]
fn a_stock_guest_is_traced_in_the_lab() {
    let mut lab = VmmLab::boot(&[GUEST], None, &[]);
    every_call_makes_one_record(&mut lab);
    a_function_that_the_guest_traces_is_refused(&mut lab);
    a_glob_that_matches_nothing_ends_the_guest_untouched(&mut lab);
    signals_end_a_trace_in_order(&mut lab);
    a_panic_ends_a_trace_with_its_last_calls(&mut lab);
    a_reboot_ends_a_trace(&mut lab);
    a_full_disk_ends_a_trace_with_one_sentence(&mut lab);
    the_terminal_is_as_it_was(&mut lab);
}

/// Two CPUs call functions a known number of times, with interrupts going on.
fn every_call_makes_one_record(lab: &mut VmmLab) {
    let work =
        "vmm.work=proc-read:/proc/version:10000@0+proc-read:/proc/uptime:12000@1,faults:5000";
    let options = "--trace func -f '*_proc_show' -f handle_mm_fault -f '*timer_interrupt' \
                   -f run_timer_softirq -o /tmp/exact";
    let outcome = lab.succeed(&vmm_run(GUEST, options, work));
    let text = lab.read("/tmp/exact");
    let trace = Trace::parse(&text);
    trace.check();
    assert_eq!(trace.promised.0, trace.promised.1, "nothing was lost");
    assert_eq!(trace.count("version_proc_show"), 10_000, "{outcome}");
    assert_eq!(trace.count("uptime_proc_show"), 12_000, "{outcome}");
    assert!(trace.count("handle_mm_fault") >= 5000, "{outcome}");
    assert_ne!(trace.worker("version_proc_show"), trace.worker("uptime_proc_show"), "{outcome}");
    trace.check_interrupts("hrtimer_interrupt", "hH");
    trace.check_interrupts("run_timer_softirq", "s");
    let interrupts = trace.lines.iter().filter(|line| line.function.contains("timer_interrupt"));
    assert!(interrupts.count() > 100, "no interrupts came between: {outcome}");
    for (function, cpu) in [("version_proc_show", 0), ("uptime_proc_show", 1)] {
        for line in trace.lines.iter().filter(|line| line.function == function) {
            // The work is pinned, so that the CPU is known as well.
            assert_eq!((line.caller, line.cpu), ("seq_read_iter", cpu), "{line:?}");
        }
    }
    assert!(outcome.stderr_text().contains(" 0 lost"), "{outcome}");
    assert_eq!(complaints(&outcome.stdout_text()), [] as [&str; 0]);
}

/// The guest's own tracer is on for `vfs_read` when ours comes.
fn a_function_that_the_guest_traces_is_refused(lab: &mut VmmLab) {
    let cmdline = "ftrace=function ftrace_filter=vfs_read vmm.work=proc-read:/proc/version:200";
    let alone = lab.run(&vmm_run(GUEST, "--trace func -f vfs_read -o /tmp/none", cmdline));
    assert_eq!(alone.status, 1, "{alone}");
    let said = alone.stderr_text();
    assert!(said.contains("'vfs_read' matches only functions that can't be traced"), "{alone}");
    assert!(said.contains("vfs_read is traced by the guest"), "{alone}");

    let options = "--trace func -f vfs_read -f vfs_open -f 'vfs_*' -o /tmp/others";
    let options = options.replace("-f vfs_read ", "");
    let outcome = lab.succeed(&vmm_run(GUEST, &options, &format!("{cmdline} vmm.dump=dmesg")));
    assert!(outcome.stderr_text().contains("1 traced by the guest"), "{outcome}");
    let text = lab.read("/tmp/others");
    let trace = Trace::parse(&text);
    trace.check();
    assert_eq!(trace.count("vfs_read"), 0);
    assert!(trace.count("vfs_open") >= 200, "{outcome}");
    assert_eq!(complaints(&outcome.stdout_text()), [] as [&str; 0]);
}

fn a_glob_that_matches_nothing_ends_the_guest_untouched(lab: &mut VmmLab) {
    let options = "--trace func -f no_such_function_* -o /tmp/none";
    let outcome = lab.run(&vmm_run(GUEST, options, "vmm.work=idle:60"));
    assert_eq!(outcome.status, 1, "{outcome}");
    let said = outcome.stderr_text();
    let last = said.lines().last().unwrap_or_default();
    assert_eq!(last, "vmm: no traceable function matches 'no_such_function_*'", "{outcome}");
    assert!(!said.contains("armed"), "{outcome}");
}

fn signals_end_a_trace_in_order(lab: &mut VmmLab) {
    for (signal, status) in [(2, 130), (15, 143)] {
        let options = "--trace func -f 'vfs_*' -o /tmp/signal";
        let work = "vmm.work=proc-read:/proc/version:1000000";
        let command = format!("exec {}", vmm_run(GUEST, options, work));
        let mut session = lab.lab().spawn(&command).unwrap();
        session.wait_for("VMM-WORK-BEGIN", PATIENCE).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        session.input().signal(signal).unwrap();
        let outcome = session.wait(PATIENCE).unwrap();
        assert_eq!(outcome.status, status, "{outcome}");
        let said = outcome.stderr_text();
        // Armed in one stop and put back in another.
        assert!(said.contains("stops  2"), "{outcome}");
        let text = lab.read("/tmp/signal");
        let trace = Trace::parse(&text);
        trace.check();
        assert!(trace.count("vfs_read") > 100, "{outcome}");
    }
}

fn a_panic_ends_a_trace_with_its_last_calls(lab: &mut VmmLab) {
    let options = "--trace func -f 'vfs_*' -f 'sysrq_*' -f panic -o /tmp/panic";
    let outcome = lab.run(&vmm_run(GUEST, options, "vmm.after=panic"));
    assert_eq!(outcome.status, 4, "{outcome}");
    assert!(outcome.stderr_text().contains("the guest's kernel has panicked"), "{outcome}");
    let text = lab.read("/tmp/panic");
    let trace = Trace::parse(&text);
    trace.check();
    assert_eq!(trace.count("sysrq_handle_crash"), 1, "{outcome}");
    let last = trace.lines.last().expect("events");
    assert_eq!(last.function, "panic", "{last:?}");
}

fn a_reboot_ends_a_trace(lab: &mut VmmLab) {
    let options = "--trace func -f 'vfs_*' -f native_machine_emergency_restart -f kernel_restart \
                   -o /tmp/reboot";
    let outcome = lab.run(&vmm_run(GUEST, options, "vmm.after=reboot"));
    assert_eq!(outcome.status, 3, "{outcome}");
    let text = lab.read("/tmp/reboot");
    let trace = Trace::parse(&text);
    trace.check();
    assert_eq!(trace.count("kernel_restart"), 1, "{outcome}");
}

fn a_full_disk_ends_a_trace_with_one_sentence(lab: &mut VmmLab) {
    lab.succeed("mkdir -p /small && mount -t tmpfs -o size=512k tmpfs /small");
    let options = "--trace func -f 'vfs_*' -o /small/trace";
    let outcome = lab.run(&vmm_run(GUEST, options, "vmm.work=proc-read:/proc/version:1000000"));
    assert_eq!(outcome.status, 1, "{outcome}");
    let said = outcome.stderr_text();
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("vmm: ") && last.contains("/small/trace"), "{outcome}");
    assert!(last.contains("No space left on device"), "{outcome}");
    assert!(said.contains("stops  2"), "the functions were put back: {outcome}");
    lab.succeed("umount /small");
}

/// Ctrl-C goes to the guest in raw mode; the escape leaves, and the terminal is what it was.
fn the_terminal_is_as_it_was(lab: &mut VmmLab) {
    let run = vmm_run(GUEST, "--trace func -f 'vfs_*' -o /tmp/terminal", "vmm.work=idle:100");
    let script = format!("stty -a >/tmp/before; {run}; echo status $?; stty -a >/tmp/after");
    let mut session = lab.lab().spawn_on_terminal(&script, (24, 100)).unwrap();
    session.wait_for("VMM-WORK-BEGIN", PATIENCE).unwrap();
    session.input().write(b"\x03").unwrap();
    std::thread::sleep(Duration::from_secs(1));
    session.input().write(b"\x01x").unwrap();
    let outcome = session.wait(PATIENCE).unwrap();
    assert!(outcome.stdout_text().contains("status 130"), "{outcome}");
    let (before, after) = (lab.read("/tmp/before"), lab.read("/tmp/after"));
    assert!(before.contains("isig"), "{before}");
    assert_eq!(before, after);
}
