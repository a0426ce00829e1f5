//! Clients that have it measured how long calls take.

use super::*;
use crate::region::{
    HISTOGRAM_BYTES, HISTOGRAMS, HISTOGRAMS_OFFSET, MEASURE_CALL, RECORD_RETURN,
    RETURN_POOL_OFFSET, RETURN_SLOT_BYTES,
};

/// A guest's return of a function that is measured, after so many nanoseconds.
fn take(traced: &Traced, hooks: &Hooks<'_>, function: usize, bit: u64) {
    let pad = traced.guest.functions[function].pad;
    let number = u64::from(hooks.histogram(pad).expect("it is measured"));
    let data = traced.guest.region(Part::Data).memory;
    let at = HISTOGRAMS_OFFSET + number * HISTOGRAM_BYTES;
    let add = |word: u64, more| {
        let at = (at + 8 * word) as usize;
        data.get_atomic_ref::<AtomicU64>(at).unwrap().fetch_add(more, Ordering::AcqRel);
    };
    add(bit, 1);
    add(63, 1 << bit);
}

fn add_measuring<'m>(
    hooks: &mut Hooks<'m>,
    tracer: &mut Tracer<'m, Given>,
    globs: &[&str],
) -> Result<(ClientId, Armed), ArmError> {
    let selection = Selection::beside(hooks, &only(globs)).unwrap();
    tracer.add(hooks, &selection.measured(), Given::new())
}

/// A function, calls by the highest bit of what they took in nanoseconds, and that together.
type Latency = (String, Vec<(usize, u64)>, u64);

/// What a client was told anew.
fn measured<'m>(
    hooks: &Hooks<'m>,
    tracer: &mut Tracer<'m, Given>,
    client: ClientId,
) -> Vec<Latency> {
    let news = tracer.latencies(hooks, client).expect("it measures").unwrap();
    let parts = |histogram: &Histogram| {
        let parts = histogram.buckets.iter().copied().enumerate();
        parts.filter(|(_, calls)| *calls > 0).collect()
    };
    let named = news.iter().map(|(index, histogram)| {
        (tracer.function(*index).to_string(), parts(histogram), histogram.total_ns)
    });
    named.collect()
}

#[test]
fn each_client_that_measures_has_the_calls_of_its_own_time() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let read = traced.guest.functions[READ].pad;
    let of = |name: &str, parts: &[(usize, u64)], total| (name.to_owned(), parts.to_vec(), total);
    let measures = Want { measured: true, ..Want::default() };

    let (first, armed) = add_measuring(&mut hooks, &mut tracer, &["vfs_read"]).unwrap();
    assert_eq!((armed.functions, armed.written, hooks.want(read)), (1, 1, measures));
    take(&traced, &hooks, READ, 10);
    take(&traced, &hooks, READ, 10);
    let both = ["vfs_read", "vfs_write"];
    let (second, armed) = add_measuring(&mut hooks, &mut tracer, &both).unwrap();
    assert_eq!((armed.functions, armed.written), (2, 1));
    take(&traced, &hooks, READ, 12);
    take(&traced, &hooks, WRITE, 3);
    assert_eq!(measured(&hooks, &mut tracer, first), [of("vfs_read", &[(10, 2), (12, 1)], 6144)]);
    assert_eq!(measured(&hooks, &mut tracer, first), []);
    let both = [of("vfs_read", &[(12, 1)], 4096), of("vfs_write", &[(3, 1)], 8)];
    assert_eq!(measured(&hooks, &mut tracer, second), both);
    assert!(tracer.counts(&hooks, second).is_none());

    // A function may be recorded with its returns, counted and measured, all at once.
    let selection = Selection::beside(&hooks, &only(&["vfs_read"])).unwrap();
    let selection = selection.with_returns(crate::trace::graph::Options::default());
    let (graph, _) = tracer.add(&mut hooks, &selection, Given::new()).unwrap();
    let (counting, armed) = add_counting(&mut hooks, &mut tracer, &["vfs_read"]);
    let all = Want { traced: Some(Method::Call), returns: true, counted: true, ..measures };
    assert_eq!((armed.written, hooks.want(read)), (1, all));
    take(&traced, &hooks, READ, 1);
    count_call(&traced, &hooks, READ);
    assert_eq!(counted(&hooks, &mut tracer, counting), [("vfs_read".to_owned(), 1)]);
    end(&mut hooks, &mut tracer, graph);
    assert_eq!(hooks.want(read), Want { counted: true, ..measures });
    end(&mut hooks, &mut tracer, counting);
    assert_eq!(hooks.want(read), measures);

    let finished = end(&mut hooks, &mut tracer, first);
    assert_eq!(finished.summary.functions, [("vfs_read".into(), 4)]);
    assert_eq!((finished.summary.events, finished.summary.set_back), (4, 0));
    assert_eq!(finished.summary.outstanding, []);
    // A call that is out is told, and what comes behind the end is not its own.
    let slot = RETURN_POOL_OFFSET as usize + 0xa000 + 5 * RETURN_SLOT_BYTES as usize;
    let data = traced.guest.region(Part::Data).memory;
    let number = hooks.histogram(traced.guest.functions[WRITE].pad).unwrap();
    data.write_obj((MEASURE_CALL | RECORD_RETURN | u32::from(number)).to_le(), slot + 20).unwrap();
    data.write_obj(1_u32.to_le(), slot + 28).unwrap();
    tracer.remove(&mut hooks, second).unwrap();
    assert!(!traced.is_armed(READ) && !traced.is_armed(WRITE));
    take(&traced, &hooks, WRITE, 3);
    let summary = tracer.finish(second, keep).unwrap().summary;
    assert_eq!((summary.events, summary.outstanding), (3, vec![("vfs_write".into(), 1)]));

    // Its code is the same again.
    let before = hooks.region().code().used();
    let (third, armed) = add_measuring(&mut hooks, &mut tracer, &["vfs_write"]).unwrap();
    assert_eq!((armed.written, hooks.region().code().used()), (1, before));
    assert_eq!(measured(&hooks, &mut tracer, third), []);
    drop((tracer, hooks));

    // What a call is out for is given to no other function by a later process.
    let (mut hooks, mut tracer) = traced.tracer();
    add_measuring(&mut hooks, &mut tracer, &["vfs_*"]).unwrap();
    let mut numbers: Vec<u16> = (traced.guest.functions.iter())
        .filter_map(|function| hooks.histogram(function.pad))
        .collect();
    numbers.sort_unstable();
    let expected = (1..).filter(|other| *other != number).take(numbers.len());
    assert_eq!(numbers, expected.collect::<Vec<_>>());
}

#[test]
fn more_functions_than_there_are_histograms_are_refused_and_none_is_taken() {
    let traced = Traced::new();
    let (mut hooks, mut tracer) = traced.tracer();
    let error = add_measuring(&mut hooks, &mut tracer, &["*"]).unwrap_err().to_string();
    let left = format!("no more than {HISTOGRAMS}, of {HISTOGRAMS} in all");
    assert!(error.contains(&left) && error.contains("fewer functions by -f"), "{error}");
    assert!(add_measuring(&mut hooks, &mut tracer, &["vfs_read"]).is_ok());
    assert_eq!(hooks.histogram(traced.guest.functions[READ].pad), Some(1));
}
