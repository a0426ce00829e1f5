//! How long calls take: what the guest adds up itself, and what a trace of the same calls tells.

use std::collections::BTreeMap;

use patcher::hook::Hooks;
use patcher::kernel::{Kernel, MappedRegion};
use patcher::machine::Machine;
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::graph::Options;
use patcher::trace::select::Selection;
use patcher::trace::sink::{Event, EventKind};
use patcher::trace::tracer::Tracer;

/// What nobody but the work calls, which reads a file of procfs, in one kernel or another.
const FUNCTIONS: [&str; 5] =
    ["proc_reg_read_iter", "seq_read_iter", "version_proc_show", "seq_printf", "single_release"];

/// Calls and what they took together, in nanoseconds, by function.
type Times = BTreeMap<String, (u64, u64)>;

/// Has functions traced with their returns, counted, and measured while `work` has the version read twenty
/// times, and drains meanwhile: all have to tell the same calls, and the guest's measure lies within the
/// trace's.
///
/// # Panics
/// They do not.
pub fn calls_are_measured(
    machine: &dyn Machine,
    kernel: &Kernel,
    region: &MappedRegion,
    work: impl FnOnce(&mut dyn FnMut()),
) {
    let mut hooks = Hooks::new(machine, kernel, region);
    let mut tracer = Tracer::new(&mut hooks).unwrap();
    let pads = hooks.pads().unwrap();
    let has = |name: &&str| pads.sites.iter().any(|site| *site.name == **name);
    let only = FUNCTIONS.iter().copied().filter(has).map(Glob::new).collect();
    let filter = Filter { only, except: vec![] };
    let selection = || Selection::beside(&hooks, &filter).unwrap();
    let counted = Selection { counts: true, ..selection() };
    let wanted = [selection().measured(), selection().with_returns(Options::default()), counted];
    let [measuring, graph, counting] =
        wanted.map(|wanted| tracer.add(&mut hooks, &wanted, Times::new()).unwrap().0);
    let take = |times: &mut Times, event: &Event<'_>| {
        if let EventKind::Return(back) = event.kind {
            let (calls, total) = times.entry(event.function.text.to_owned()).or_default();
            *calls += 1;
            *total += back.duration_ns.expect("the call was recorded");
        }
        Ok(())
    };
    work(&mut || {
        tracer.drain(&hooks, take);
    });
    let name = |tracer: &Tracer<'_, _>, index| tracer.function(index).to_string();
    let latencies = tracer.latencies(&hooks, measuring).unwrap().unwrap().into_iter();
    let latencies = latencies
        .map(|(index, histogram)| (name(&tracer, index), (histogram.calls(), histogram.total_ns)));
    let measured: Times = latencies.collect();
    let counts = tracer.counts(&hooks, counting).unwrap().unwrap().into_iter();
    let counted: Times = counts.map(|(index, calls)| (name(&tracer, index), (calls, 0))).collect();
    tracer.remove(&mut hooks, graph).unwrap();
    tracer.drain(&hooks, take);
    let traced = tracer.finish(graph, take).unwrap();
    println!("traced {:?}, measured {measured:?}", traced.sink);
    assert_eq!((traced.summary.dropped(), traced.summary.without_slot), (0, 0));
    assert_eq!(traced.sink["version_proc_show"].0, 20);
    let calls = |times: &Times| {
        times.iter().map(|(name, (calls, _))| (name.clone(), *calls)).collect::<Vec<_>>()
    };
    assert_eq!(calls(&measured), calls(&traced.sink));
    assert_eq!(calls(&counted), calls(&traced.sink));
    for (name, (_, total)) in &measured {
        // What is measured begins behind the record of the call, and ends before that of the return. Each
        // may be told as a nanosecond less than it was.
        let (calls, traced) = traced.sink[name];
        assert!(*total <= traced + calls, "{name}");
    }
    assert!(measured.values().any(|(_, total)| *total > 0));
    for client in [measuring, counting] {
        tracer.remove(&mut hooks, client).unwrap();
        let summary = tracer.finish(client, take).unwrap().summary;
        assert_eq!((summary.without_slot, summary.outstanding.len()), (0, 0));
    }
}
