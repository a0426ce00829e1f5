//! Rings that are too small for what comes, wanted or not: the flight recorder, and losses that are counted.

use std::io::Write;

use guest_images::{Architecture, Series, kernel_for};
use patcher::hook::Hooks;
use patcher::kernel::MappedRegion;
use patcher::region::{MIN_RING_BYTES, rings_window_len};
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::graph::Options;
use patcher::trace::session::Selection;
use patcher::trace::tracer::Tracer;
use serde_json::Value;
use vmm::devices::Console;
use vmm::qemu::{GuestExit, Launch, Qemu};

use crate::emulated::{Folder, LONG, engine, output, said, wait_for_kernel, wait_until};
use crate::guest::Transcript;

/// What the guest does first: so many calls of one function on one CPU, far more than the smallest rings
/// hold.
const CALLS: u64 = 20_000;

/// How a process that asks for it has the kernel crash.
const PATH: [&str; 4] = ["write_sysrq_trigger", "__handle_sysrq", "sysrq_handle_crash", "panic"];

/// Has a guest's kernel panic while a trace of calls and returns keeps only the last of them, in the smallest
/// rings. What is kept has to show how it came to the panic, and to tell how much is not there.
///
/// # Panics
/// It does not.
pub fn the_last_calls_before_a_panic_are_kept(architecture: Architecture, series: Series) {
    let folder = Folder::new(architecture, &format!("crash-{architecture}-{series}"));
    let work = format!("vmm.work=proc-read:/proc/version:{CALLS}@0 vmm.after=panic");
    let mut command = folder.run(series, &work);
    command.args(["--trace", "graph", "--overwrite", "--buffer-size", "4K"]);
    command.args(["-f", "version_proc_show"]);
    for function in PATH {
        command.args(["-f", function]);
    }
    let output = output(command.arg("-o").arg(folder.path("crash.vmmrec")).spawn().unwrap());
    let said = said(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("events kept of "), "{said}");
    assert!(said.contains("panic 1") && said.contains(" had not returned: "), "{said}");

    folder.report("crash.vmmrec", "crash.json");
    let json = folder.read("crash.json");
    let lines: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [_, events @ .., end] = &lines[..] else { panic!("{json}") };
    let (path, reads): (Vec<&Value>, Vec<&Value>) =
        events.iter().partition(|event| PATH.iter().any(|function| event["function"] == *function));
    // Each call has two records.
    let overwritten = end["missed"].as_u64().unwrap();
    assert!(overwritten > 0 && reads.len() > 1000, "{said}");
    assert_eq!(reads.len() as u64 + overwritten, 2 * CALLS, "{said}");
    assert_eq!(events[0]["missed"], end["missed"], "they are missing in front of all others");
    for read in &reads[1..] {
        assert_eq!(read["depth"], 0, "{read}");
        assert!(read["type"] == "entry" || read["duration_ns"].as_u64() > Some(0), "{read}");
    }

    let shown = path.iter().map(|call| (&call["function"], &call["type"], &call["depth"]));
    let expected: Vec<[Value; 3]> =
        (0..).zip(PATH).map(|(depth, call)| [call.into(), "entry".into(), depth.into()]).collect();
    assert!(shown.eq(expected.iter().map(|[call, kind, depth]| (call, kind, depth))), "{path:?}");
    assert!(path.iter().all(|call| call["comm"] == "init" && call["pid"] == 1), "{path:?}");
}

/// Has a guest make more calls than the smallest rings hold while nobody reads them: first with calls traced,
/// then with returns, and both times counted by the guest as well. Nothing may be missing that is not told.
///
/// # Panics
/// Something is.
pub fn what_small_rings_lose_is_counted(architecture: Architecture, series: Series) {
    let folder = Folder::new(architecture, &format!("small-{architecture}-{series}"));
    let transcript = Transcript::default();
    let work = format!("proc-read:/proc/version:{CALLS}@0,wait-console-line");
    let launch = Launch {
        cpus: 2,
        rings: rings_window_len(2, MIN_RING_BYTES),
        initrd: Some(folder.path("initrd")),
        cmdline: format!("quiet vmm.work=wait-console-line,{work},{work}"),
        ..Launch::new(engine(architecture), kernel_for(architecture, series).unwrap().vmlinuz)
    };
    let console = Console::new(Box::new(transcript.clone())).unwrap();
    let qemu = Qemu::launch(&launch, console).unwrap();
    qemu.start().unwrap();
    let kernel = wait_for_kernel(&qemu);
    wait_until("the work's beginning", || transcript.text().contains("VMM-READY"));
    let region = MappedRegion::new(&qemu, &kernel).unwrap();
    let mut hooks = Hooks::new(&qemu, &kernel, &region);
    let mut tracer = Tracer::new(&mut hooks).unwrap();
    let filter = Filter { only: vec![Glob::new("version_proc_show")], except: vec![] };
    for (round, records_of_a_call) in (1..).zip([1, 2]) {
        let selection = Selection::beside(&hooks, &filter).unwrap();
        let counted = Selection { counts: true, ..selection };
        let (counts, _) = tracer.add(&mut hooks, &counted, ()).unwrap();
        let selection = Selection::beside(&hooks, &filter).unwrap();
        let selection = match records_of_a_call {
            1 => selection,
            _ => selection.with_returns(Options::default()),
        };
        let (records, _) = tracer.add(&mut hooks, &selection, ()).unwrap();
        qemu.console_input().write_all(b"\n").unwrap();
        wait_until("the work's end", || {
            transcript.text().matches("VMM-WORK-END proc-read").count() == round
        });
        let [records, counts] = [records, counts].map(|client| {
            tracer.remove(&mut hooks, client).unwrap();
            wait_until("the last records", || {
                tracer.drain(&hooks, |(), _| Ok(()));
                tracer.is_settled(client)
            });
            tracer.finish(client, |(), _| Ok(())).unwrap().summary
        });
        println!("{} records, {:?} lost, {} calls", records.events, records.lost, counts.events);
        assert_eq!(counts.events, CALLS);
        assert!(records.events > 0 && records.lost.iter().sum::<u64>() > 0);
        assert_eq!(records.events + records.dropped(), records_of_a_call * counts.events);
        assert_eq!((records.outstanding, records.without_slot), (vec![], 0));
        assert_eq!(records.corrupt, []);
    }
    qemu.console_input().write_all(b"\n").unwrap();
    assert_eq!(qemu.wait(Some(LONG)), Some(GuestExit::PowerOff), "{}", transcript.text());
}
