//! Counts on their way to a client.

use super::*;
use crate::control::wire::line;

/// All that a feed holds.
fn fed(feed: &Feed) -> (Vec<Counted>, bool) {
    let mut counted = Vec::new();
    loop {
        match feed.next(Duration::ZERO) {
            Fed::Counted(some) => counted.push(some),
            Fed::End(_) => return (counted, true),
            Fed::Nothing => return (counted, false),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_client_that_is_slow_gets_one_reading_with_all_that_it_missed() {
    let (mut outbox, feed) = Outbox::new();
    let names: Vec<Arc<str>> = (0..300).map(|number| format!("f{number}").into()).collect();
    let seconds = Duration::from_secs;
    let mut give = |numbers: std::ops::Range<usize>, calls, reading| {
        let some = numbers.map(|number| (number as u32, calls, &names[number]));
        outbox.counted(reading, some).unwrap();
    };
    give(0..0, 0, (300, seconds(0), false));
    let (begun, _) = fed(&feed);
    assert_eq!(begun, [Counted { functions: 300, ..Counted::default() }]);

    give(0..300, 5, (300, seconds(1), false));
    give(10..20, 7, (300, seconds(2), true));
    outbox.end(end(1500));
    let (counted, ended) = fed(&feed);
    assert!(ended && counted.len() == 300_usize.div_ceil(MAX_COUNTED));
    let all: Vec<_> = counted.iter().flat_map(|counted| counted.calls.clone()).collect();
    let expected = |number: usize| {
        let calls = if (10..20).contains(&number) { 7 } else { 5 };
        (number as u32, calls, format!("f{number}"))
    };
    assert_eq!(all, (0..300).map(expected).collect::<Vec<_>>());
    for (index, counted) in counted.iter().enumerate() {
        assert_eq!((counted.elapsed, counted.last), (seconds(2), true));
        assert_eq!(counted.more, index < 2);
    }
}

#[test]
fn counts_with_the_longest_names_fit_into_a_line() {
    let (mut outbox, feed) = Outbox::new();
    // Each byte takes six when it is told.
    let name: Arc<str> = "\u{1}".repeat(5000).into();
    let calls = (0..MAX_COUNTED as u32).map(|number| (number, u64::MAX, &name));
    outbox.counted((1, Duration::MAX, false), calls).unwrap();
    let Fed::Counted(counted) = feed.next(Duration::ZERO) else { panic!("there are counts") };
    assert_eq!(counted.calls.len(), MAX_COUNTED);
    assert!(line(&Reply::Counted(counted)).len() < MAX_REPLY);
    drop(feed);
    assert!(outbox.counted((1, Duration::MAX, false), std::iter::empty()).is_err());
}
