//! Rings that are too small for what comes, wanted or not: the flight recorder, and losses that are counted.

use guest_images::{Architecture, Series};
use serde_json::Value;

use crate::emulated::{Folder, output, said};

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
