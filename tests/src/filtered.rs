//! Calls that the guest itself leaves out.

use std::io::Write;

use guest_images::{Architecture, Series, kernel_for};
use patcher::kernel::MappedRegion;
use patcher::machine::Machine;
use patcher::trace::calls::{CallFilter, CallFilterError, divide};
use patcher::trace::filter::Filter;
use patcher::trace::graph::Options;
use patcher::trace::select::WantedValues;
use patcher::trace::session::{Selection, Session, Summary};
use patcher::trace::sink::{Beginning, JsonLines, Sink, Tracer};
use vmm::devices::Console;
use vmm::qemu::{GuestExit, Launch, Qemu};

use crate::emulated::{Folder, LONG, engine, wait_for_kernel, wait_until};
use crate::guest::{Transcript, text};

/// How often a process of that name seeks in `/dev/null`, to 0 and up to one less than this.
const SEEKS: u64 = 1000;

/// Filters, and how many of those calls they let through.
fn filters() -> Vec<(&'static str, CallFilter, u64)> {
    let all = CallFilter::default();
    vec![
        ("null_lseek: offset >= 100 && offset < 200", all.clone(), 100),
        ("null_lseek: offset & 1", all.clone(), 500),
        // What the third parameter is called depends on the kernel; it is SEEK_SET.
        ("null_lseek: offset == 5 || offset > 990 && arg3 == 0 || arg3 != 0", all.clone(), 10),
        ("null_lseek", CallFilter { comm: Some("lseeks".into()), ..all.clone() }, SEEKS),
        ("null_lseek", CallFilter { comm: Some("lseek".into()), ..all.clone() }, 0),
        ("null_lseek", CallFilter { one_in: Some(7), ..all.clone() }, 143),
        ("null_lseek: offset < 500", CallFilter { one_in: Some(10), ..all.clone() }, 50),
        ("null_lseek", CallFilter { pids: vec![1, 2], ..all.clone() }, 0),
        ("null_lseek: arg2 >= 999", CallFilter { comm: Some("lseeks".into()), ..all }, 1),
    ]
}

/// Boots a guest and traces a known number of calls through each of some filters: what is let through and
/// what is turned away is known exactly.
///
/// # Panics
/// It is not so, or the guest's text is not what it was afterwards.
pub fn what_is_filtered_out_never_leaves_the_guest(architecture: Architecture, series: Series) {
    let folder = Folder::new(architecture, &format!("filtered-{architecture}-{series}"));
    let transcript = Transcript::default();
    let filters = filters();
    let rounds = filters.len() + 3;
    let work = vec![format!("wait-console-line,lseeks:{SEEKS}"); rounds].join(",");
    let launch = Launch {
        cpus: 2,
        rings: 32 << 20,
        initrd: Some(folder.path("initrd")),
        cmdline: format!("quiet vmm.work={work},wait-console-line"),
        ..Launch::new(engine(architecture), kernel_for(architecture, series).unwrap().vmlinuz)
    };
    let console = Console::new(Box::new(transcript.clone())).unwrap();
    let qemu = Qemu::launch(&launch, console).unwrap();
    qemu.start().unwrap();
    let kernel = wait_for_kernel(&qemu);
    let region = MappedRegion::new(&qemu, &kernel).unwrap();
    let mut round = 0;
    let select = |text: &str, filter: &CallFilter| {
        let (only, arguments) = divide(&[text.to_owned()]).unwrap();
        let filter = CallFilter { arguments, ..filter.clone() };
        let names = Filter { only, except: vec![] };
        let selection = Selection::new(&kernel, &qemu, &names).unwrap();
        selection.filtered(&kernel, &qemu, &filter)
    };
    let mut trace = |selection: &Selection| -> (Summary, String) {
        round += 1;
        wait_until("the work's beginning", || {
            transcript.text().matches("VMM-READY").count() == round
        });
        let mut written = Vec::new();
        let mut sink = JsonLines::new(&mut written);
        let (mut session, _) = Session::arm(&qemu, &kernel, &region, selection).unwrap();
        let tracer = if selection.graph.is_some() { Tracer::Graph } else { Tracer::Function };
        sink.begin(&Beginning::of(&kernel, tracer, qemu.vcpus(), true)).unwrap();
        qemu.console_input().write_all(b"\n").unwrap();
        wait_until("the work's end", || {
            session.drain(&mut sink).unwrap();
            transcript.text().matches("VMM-WORK-END lseeks").count() == round
        });
        session.disarm().unwrap();
        let (summary, finished) = session.finish(&mut sink);
        finished.unwrap();
        drop(sink);
        (summary, String::from_utf8(written).unwrap())
    };
    wait_until("the work's beginning", || transcript.text().contains("VMM-READY"));
    let before = text(&qemu, &kernel).unwrap();
    let away = |summary: &Summary| summary.turned_away.iter().map(|(_, calls)| calls).sum::<u64>();

    for (what, filter, passed) in &filters {
        let (summary, _) = trace(&select(what, filter).unwrap());
        let counts = (summary.events, away(&summary), summary.dropped(), summary.set_back);
        assert_eq!(counts, (*passed, SEEKS - passed, 0, 0), "{what} {filter:?}");
    }

    // What is turned away has no return either.
    let selection = select("null_lseek: offset < 10", &CallFilter::default()).unwrap();
    let (summary, lines) = trace(&selection.with_returns(Options::default()));
    assert_eq!((summary.events, away(&summary), summary.dropped()), (20, SEEKS - 10, 0), "{lines}");
    assert_eq!((summary.lost_returns, summary.lost_calls), (0, 0));

    // What is let through tells what it was given and what it returned.
    let selection = select("null_lseek: offset > 998 || offset == 7", &CallFilter::default());
    let selection = selection.unwrap().with_returns(Options::default());
    let values = WantedValues { arguments: true, returned: true };
    let (summary, lines) = trace(&Selection { values, ..selection });
    let told: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |kind: &str, value: &str| -> Vec<serde_json::Value> {
        let lines = told.iter().filter(|line| line["type"] == kind);
        lines.map(|line| line.pointer(value).cloned().unwrap_or_default()).collect()
    };
    assert_eq!(of("entry", "/args/offset"), [7, 999], "{lines}");
    assert!(of("entry", "/args/file").iter().all(serde_json::Value::is_string), "{lines}");
    assert_eq!(of("return", "/ret"), [0, 0], "{lines}");
    assert_eq!((summary.events, away(&summary), summary.dropped()), (4, SEEKS - 2, 0), "{lines}");

    // At most five at once, and five a second from then on: in whatever time the calls took.
    let selection =
        select("null_lseek", &CallFilter { per_second: Some(5), ..CallFilter::default() });
    let (summary, lines) = trace(&selection.unwrap());
    assert_eq!((summary.events + away(&summary), summary.dropped()), (SEEKS, 0));
    let lines = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let times: Vec<u64> = lines.filter_map(|line| line["time_ns"].as_u64()).collect();
    let span = times.last().unwrap() - times.first().unwrap();
    let most = 5 + span.div_ceil(200_000_000);
    assert!((5..=most).contains(&summary.events), "{times:?}");

    // What can't be told is said.
    let wrong = select("null_lseek: nothing == 1", &CallFilter::default()).unwrap_err();
    assert!(matches!(wrong, CallFilterError::NoParameter { .. }), "{wrong}");
    let wrong = select("null_lseek: offset > 0xffffffffffffffff", &CallFilter::default());
    assert!(matches!(wrong, Err(CallFilterError::OutOfRange { .. })), "{wrong:?}");

    assert!(text(&qemu, &kernel).unwrap() == before, "the text is not what it was");
    qemu.console_input().write_all(b"\n").unwrap();
    let exit = qemu.wait(Some(LONG));
    assert_eq!(exit, Some(GuestExit::PowerOff), "{}", transcript.text());
}
