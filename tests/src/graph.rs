//! Trees of calls: what the guest's own `function_graph` shows, and what a trace from outside does.

use std::collections::BTreeMap;
use std::io::Write;

use guest_images::{Architecture, Series, kernel_for};
use patcher::kernel::MappedRegion;
use patcher::machine::Machine;
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::graph::Options;
use patcher::trace::session::{Selection, Session};
use patcher::trace::sink::{Beginning, FtraceText, GraphColumns, Sink, Tracer};
use vmm::devices::Console;
use vmm::qemu::{GuestExit, Launch, Qemu};

use crate::emulated::{Folder, LONG, engine, wait_for_kernel, wait_until};
use crate::guest::{Transcript, text};
use crate::latency::calls_are_measured;

/// What the work calls that the tests look at, in one kernel or another.
const FUNCTIONS: [&str; 9] = [
    "vfs_read",
    "rw_verify_area",
    "proc_reg_read_iter",
    "seq_read_iter",
    "version_proc_show",
    "seq_printf",
    "vfs_open",
    "do_dentry_open",
    "single_release",
];

/// What is done under the one tracer and under the other, by a process of its own.
const WORK: &str = "proc-read:/proc/version:20@0";

/// Boots a guest whose own `function_graph` traces some work, then traces the same work from outside: both
/// have to see the same calls in the same places.
///
/// # Panics
/// They do not, or a call has no return, or the guest's text is not what it was afterwards.
pub fn the_tree_is_the_guests_own(architecture: Architecture, series: Series) {
    let folder = Folder::new(architecture, &format!("graph-{architecture}-{series}"));
    let transcript = Transcript::default();
    let functions = FUNCTIONS.join(",");
    let launch = Launch {
        cpus: 2,
        rings: 32 << 20,
        initrd: Some(folder.path("initrd")),
        cmdline: format!(
            "quiet vmm.graph={functions} vmm.graph-work={WORK} \
             vmm.work=wait-console-line,{WORK},wait-console-line,{WORK},wait-console-line"
        ),
        ..Launch::new(engine(architecture), kernel_for(architecture, series).unwrap().vmlinuz)
    };
    let console = Console::new(Box::new(transcript.clone())).unwrap();
    let qemu = Qemu::launch(&launch, console).unwrap();
    qemu.start().unwrap();
    let kernel = wait_for_kernel(&qemu);
    wait_until("the work's beginning", || transcript.text().contains("VMM-READY"));
    let region = MappedRegion::new(&qemu, &kernel).unwrap();
    let before = text(&qemu, &kernel).unwrap();

    let pads = kernel.pads(qemu.ram()).unwrap();
    let has = |name: &&str| pads.sites.iter().any(|site| *site.name == **name);
    let only = FUNCTIONS.iter().copied().filter(has).map(Glob::new).collect();
    let filter = Filter { only, except: vec![] };
    let selection = Selection::new(&kernel, &qemu, &filter).unwrap();
    let selection = selection.with_returns(Options::default());
    let mut ours = Vec::new();
    let columns = GraphColumns { task: true, ..GraphColumns::default() };
    let mut sink = FtraceText::stream(&mut ours).with_columns(columns);
    let (mut session, _) = Session::arm(&qemu, &kernel, &region, &selection).unwrap();
    sink.begin(&Beginning::of(&kernel, Tracer::Graph, qemu.vcpus(), true)).unwrap();
    qemu.console_input().write_all(b"\n").unwrap();
    wait_until("the work's end", || {
        session.drain(&mut sink).unwrap();
        transcript.text().matches("VMM-WORK-END proc-read").count() == 2
    });
    session.disarm().unwrap();
    let (summary, finished) = session.finish(&mut sink);
    finished.unwrap();
    drop(sink);
    assert!(text(&qemu, &kernel).unwrap() == before, "the text is not what it was");
    assert_eq!((summary.dropped(), summary.lost_returns, summary.lost_calls), (0, 0, 0));

    calls_are_measured(&qemu, &kernel, &region, |drain| {
        qemu.console_input().write_all(b"\n").unwrap();
        wait_until("the same work once more", || {
            drain();
            transcript.text().matches("VMM-WORK-END proc-read").count() == 3
        });
    });
    assert!(text(&qemu, &kernel).unwrap() == before, "the text is not what it was");

    qemu.console_input().write_all(b"\n").unwrap();
    let exit = qemu.wait(Some(LONG));
    let said = transcript.text().replace('\r', "");
    assert_eq!(exit, Some(GuestExit::PowerOff), "{said}");
    let (_, theirs) = said.split_once("VMM-GRAPH-BEGIN\n").expect("its trace");
    let (theirs, _) = theirs.split_once("VMM-GRAPH-END").expect("all of its trace");
    let ours = String::from_utf8(ours).unwrap();
    let [ours, theirs] = [tree(&ours), tree(theirs)];
    assert_eq!(ours.iter().filter(|call| call.trim() == "version_proc_show").count(), 20);
    for (line, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        assert_eq!(ours, theirs, "call {line}");
    }
    assert_eq!(ours.len(), theirs.len());
    println!("{} calls, {:?}", ours.len(), &ours[..ours.len().min(12)]);
}

/// The calls of the one task that reads the version, in their order and each as deep as it is nested. Every
/// call has its return, in the right place.
fn tree(text: &str) -> Vec<String> {
    let mut calls: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut open: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        // "CPU) TASK-PID | DURATION | CALL"
        let mut columns = line.splitn(3, '|');
        let (Some(task), Some(_), Some(call)) = (columns.next(), columns.next(), columns.next())
        else {
            continue;
        };
        let Some((_, task)) = task.split_once(')') else { continue };
        let Some((_, pid)) = task.trim().rsplit_once('-') else { continue };
        let call = call.get(2..).unwrap_or_default();
        let depth = (call.len() - call.trim_start().len()) / 2;
        if let Some(function) = call.strip_suffix("();").or_else(|| call.strip_suffix("() {")) {
            calls.entry(pid).or_default().push(function.to_owned());
        }
        let open = open.entry(pid).or_default();
        if call.ends_with('{') {
            open.push(depth);
        } else if call.trim() == "}" {
            assert_eq!(open.pop(), Some(depth), "{line} in {text}");
        }
    }
    let reads = |calls: &&Vec<String>| calls.iter().any(|call| call.trim() == "version_proc_show");
    let worker: Vec<_> = calls.values().filter(reads).collect();
    assert_eq!(worker.len(), 1, "{text}");
    worker[0].clone()
}
