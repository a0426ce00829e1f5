//! `vmm run --trace func` on a stock guest, from the first line to the exit status. One boot of the
//! lab serves all of it.

use std::time::Duration;

use guest_images::Series;
use tests::graph::{FUNCTIONS, WORK, are_the_same};
use tests::guest::complaints;
use tests::lab::{INITRD, PATIENCE, Trace, VmmLab, guest_kernel, vmm_run};

const GUEST: Series = Series::V6_1;

#[test]
fn a_stock_guest_is_traced_in_the_lab() {
    let mut lab = VmmLab::boot(&[GUEST], None, &[]);
    every_call_makes_one_record(&mut lab);
    the_tree_of_calls_is_the_one_that_the_guest_sees_itself(&mut lab);
    traps_make_one_record_each_and_leave_the_guest_its_probes(&mut lab);
    a_function_that_the_guest_traces_is_refused(&mut lab);
    a_glob_that_matches_nothing_ends_the_guest_untouched(&mut lab);
    signals_end_a_trace_in_order(&mut lab);
    a_panic_ends_a_trace_with_its_last_calls(&mut lab);
    a_reboot_ends_a_trace(&mut lab);
    a_full_disk_ends_a_trace_with_one_sentence(&mut lab);
    the_terminal_is_as_it_was(&mut lab);
    stops_of_a_busy_guest_are_measured(&mut lab);
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

/// The same work, once under the guest's own `function_graph` and once traced from outside.
fn the_tree_of_calls_is_the_one_that_the_guest_sees_itself(lab: &mut VmmLab) {
    let functions = FUNCTIONS.join(",");
    let own = format!("vmm.graph={functions} vmm.graph-work={WORK}");
    let theirs = lab.succeed(&vmm_run(GUEST, "", &own)).stdout_text().replace('\r', "");
    let (_, theirs) = theirs.split_once("VMM-GRAPH-BEGIN\n").expect("its trace");
    let (theirs, _) = theirs.split_once("VMM-GRAPH-END").expect("all of its trace");
    let filters: String = FUNCTIONS.iter().map(|function| format!(" -f {function}")).collect();
    let options = format!("--trace graph --funcgraph-proc -o /tmp/graph{filters}");
    let outcome = lab.succeed(&vmm_run(GUEST, &options, &format!("vmm.work={WORK}")));
    assert!(outcome.stderr_text().contains(" 0 lost"), "{outcome}");
    assert_eq!(complaints(&outcome.stdout_text()), [] as [&str; 0]);
    are_the_same(&lab.read("/tmp/graph"), theirs);
}

/// Functions with pads and one without are trapped; the guest has a breakpoint of its own meanwhile, by a
/// probe in the middle of a function.
fn traps_make_one_record_each_and_leave_the_guest_its_probes(lab: &mut VmmLab) {
    let options = "--trace func --method trap -f version_proc_show -f uptime_proc_show -f vsnprintf \
                   -o /tmp/trap";
    let run = vmm_run(GUEST, options, "vmm.work=shell");
    let mut session = lab.lab().spawn(&run).unwrap();
    session.wait_for("VMM-READY", PATIENCE).unwrap();
    let mut input = session.input();
    // Behind the pad, whether a landing pad is in front of that or not.
    let probe = "cd /sys/kernel/tracing; echo 0 >/proc/sys/debug/kprobes-optimization; \
                 echo p:own loadavg_proc_show+9 >kprobe_events || \
                 echo p:own loadavg_proc_show+5 >kprobe_events; echo 1 >events/kprobes/enable; \
                 work proc-read:/proc/version:300@0+proc-read:/proc/uptime:200@1,proc-read:/proc/loadavg:40; \
                 echo HITS $(cat kprobe_profile); echo 0 >events/kprobes/enable";
    input.write(format!("{probe}\n").as_bytes()).unwrap();
    session.wait_for("VMM-SHELL-END", PATIENCE).unwrap();
    input.write(b"exit\n").unwrap();
    let outcome = session.wait(PATIENCE).unwrap();
    assert_eq!(outcome.status, 0, "{outcome}");
    let printed = outcome.stdout_text();
    let hits = printed.lines().find(|line| line.starts_with("HITS")).unwrap_or_default();
    assert_eq!(
        hits.split_whitespace().collect::<Vec<_>>(),
        ["HITS", "own", "40", "0"],
        "{outcome}"
    );
    let text = lab.read("/tmp/trap");
    let trace = Trace::parse(&text);
    trace.check();
    assert_eq!(trace.promised.0, trace.promised.1, "nothing was lost");
    assert_eq!(trace.count("version_proc_show"), 300, "{outcome}");
    assert_eq!(trace.count("uptime_proc_show"), 200, "{outcome}");
    // Each of these prints once into its file.
    assert!(trace.count("vsnprintf") >= 300 + 200, "{outcome}");
    for line in trace.lines.iter().filter(|line| line.function == "version_proc_show") {
        assert_eq!((line.caller, line.cpu), ("seq_read_iter", 0), "{line:?}");
    }
    let printed_to_files = trace.lines.iter().filter(|line| {
        line.function == "vsnprintf" && ["seq_printf", "seq_vprintf"].contains(&line.caller)
    });
    assert!(printed_to_files.count() >= 300 + 200, "{outcome}");
    assert_eq!(complaints(&printed), [] as [&str; 0]);
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

/// `vmm bench stop-all` of a guest that works on both CPUs: what it has patched and how long that took.
fn stops_of_a_busy_guest_are_measured(lab: &mut VmmLab) {
    let work = "vmm.work=null-lseek:/never@0+loadavg:/never@1";
    let bench = format!(
        "vmm bench stop-all --guest stock --kernel {} --initrd {INITRD} --cmdline 'quiet {work}' \
         --busy-at VMM-WORK-BEGIN --cpus 2 --sites 1,all --rounds 2 --json /tmp/stops",
        guest_kernel(GUEST)
    );
    let table = lab.succeed(&bench).stdout_text();
    let figures: serde_json::Value = serde_json::from_str(&lab.read("/tmp/stops")).unwrap();
    assert_eq!(figures["guest"]["kind"], "stock");
    let runs = figures["runs"].as_array().unwrap();
    let sites: Vec<u64> = runs.iter().map(|run| run["sites"].as_u64().unwrap()).collect();
    let [one, all] = sites[..] else { panic!("{table}") };
    assert!(one == 1 && all > 30_000, "{table}");
    for run in runs {
        assert_eq!((&run["cpus"], &run["rounds"]), (&2.into(), &2.into()), "{table}");
        let longest = |of: &str, phase: &str| run[of][phase]["max"].as_u64().unwrap();
        assert!(longest("patch", "written") > 0, "{table}");
        assert!(longest("patch", "whole") >= longest("patch", "written"), "{table}");
        assert!(longest("bare", "whole") >= longest("bare", "out"), "{table}");
    }
}
