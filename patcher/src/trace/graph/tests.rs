use super::*;

const A: u32 = 0;
const B: u32 = 1;
const C: u32 = 2;

/// A client's calls, of tasks that the tests make up.
struct Calls {
    graph: Graph,
    time: u64,
}

impl Calls {
    fn new(options: Options, roots: &[u32]) -> Self {
        Self { graph: Graph::new(options, roots.iter().copied().collect()), time: 0 }
    }

    fn enter_from(&mut self, pid: u32, function: u32, caller: Option<u32>) -> Option<u32> {
        self.time += 10;
        // One call site for each function and caller.
        let parent = u64::from(function) << 8 | caller.map_or(0xff, u64::from);
        let time_ns = self.time;
        let entered = Entered { function, time_ns, parent, caller, is_first: false };
        self.graph.enter(TaskKey::new(Some(pid), 0), entered).and_then(|kind| kind.depth())
    }

    /// A call by a function that is not traced; its depth, if it is shown.
    fn enter(&mut self, pid: u32, function: u32) -> Option<u32> {
        self.enter_from(pid, function, None)
    }

    /// A return: its depth and duration, if it is shown.
    fn leave(&mut self, pid: u32, function: u32) -> Option<(u32, Option<u64>)> {
        self.time += 10;
        let task = TaskKey::new(Some(pid), 0);
        let left = self.graph.leave(task, function, self.time, 5)?;
        match left.kind {
            EventKind::Return(back) => {
                assert_eq!(back.value, 5);
                assert_eq!(left.parent.is_some(), back.duration_ns.is_some());
                Some((back.depth, back.duration_ns))
            }
            other => panic!("{other:?} of a return"),
        }
    }
}

fn all() -> Calls {
    Calls::new(Options::default(), &[])
}

fn only(functions: &[u32], options: Options) -> Calls {
    Calls::new(Options { functions: vec![Glob::new("named")], ..options }, functions)
}

#[test]
fn calls_of_each_task_are_nested_in_its_own() {
    let mut calls = all();
    assert_eq!(calls.enter(1, A), Some(0));
    assert_eq!(calls.enter(2, B), Some(0));
    assert_eq!(calls.enter(1, B), Some(1));
    assert_eq!(calls.enter(2, B), Some(1), "which calls itself");
    assert_eq!(calls.leave(1, B), Some((1, Some(20))));
    assert_eq!(calls.leave(1, A), Some((0, Some(50))));
    assert_eq!(calls.leave(2, B), Some((1, Some(30))));
    assert_eq!(calls.leave(2, B), Some((0, Some(60))));
    assert_eq!(calls.graph.unmatched(), (0, 0));
    assert!(calls.graph.outstanding().is_empty());
}

#[test]
fn idle_tasks_are_told_apart_by_their_cpus() {
    assert_ne!(TaskKey::new(Some(0), 0), TaskKey::new(Some(0), 1));
    assert_ne!(TaskKey::new(Some(0), 1), TaskKey::new(Some(1), 1));
    assert_eq!(TaskKey::new(None, 1), TaskKey::new(Some(0), 1));
    assert_eq!(TaskKey::new(Some(7), 1), TaskKey::new(Some(7), 2));
}

#[test]
fn an_interrupt_is_nested_in_what_it_interrupts() {
    let mut calls = all();
    calls.enter(1, A);
    assert_eq!(calls.enter(1, C), Some(1), "the interrupt");
    assert_eq!(calls.leave(1, C), Some((1, Some(10))));
    assert_eq!(calls.enter_from(1, B, Some(A)), Some(1));
    assert_eq!(calls.leave(1, B), Some((1, Some(10))));
    assert_eq!(calls.leave(1, A), Some((0, Some(50))));
    assert_eq!(calls.graph.unmatched(), (0, 0));
}

#[test]
fn a_tail_call_returns_before_its_caller_does() {
    let mut calls = all();
    calls.enter(1, A);
    // Its caller's address is a stub's, which is in no function.
    assert_eq!(calls.enter_from(1, B, None), Some(1));
    assert_eq!(calls.leave(1, B), Some((1, Some(10))));
    assert_eq!(calls.leave(1, A), Some((0, Some(30))));
    assert_eq!(calls.graph.unmatched(), (0, 0));
}

#[test]
fn a_return_closes_calls_whose_own_returns_were_lost() {
    let mut calls = all();
    calls.enter(1, A);
    calls.enter(1, B);
    calls.enter(1, C);
    calls.graph.lose();
    assert_eq!(calls.leave(1, A), Some((0, Some(30))));
    assert_eq!(calls.graph.unmatched(), (2, 0));
    assert_eq!(calls.enter(1, B), Some(0));
}

#[test]
fn a_call_by_an_open_call_closes_what_lies_above_it() {
    let mut calls = all();
    calls.enter(1, A);
    calls.enter_from(1, B, Some(A));
    calls.graph.lose();
    assert_eq!(calls.enter_from(1, C, Some(A)), Some(1), "B has returned");
    assert_eq!(calls.graph.unmatched(), (1, 0));
    assert_eq!(calls.leave(1, C), Some((1, Some(10))));
    assert_eq!(calls.leave(1, A), Some((0, Some(40))));
}

#[test]
fn what_was_open_when_records_were_lost_and_is_called_again_has_returned() {
    let mut calls = all();
    for _ in 0..5 {
        assert_eq!(calls.enter(1, A), Some(0));
        assert_eq!(calls.enter(1, B), Some(1));
        calls.graph.lose();
    }
    assert_eq!(calls.graph.unmatched(), (8, 0));
    // Without a loss the same is a function that calls itself.
    let mut calls = all();
    assert_eq!((calls.enter(1, A), calls.enter(1, A)), (Some(0), Some(1)));
}

#[test]
fn a_return_without_a_call_is_shown_only_where_the_calls_record_may_be_lost() {
    let mut calls = all();
    assert_eq!(calls.leave(1, A), None, "called before the trace began");
    calls.enter(1, B);
    calls.graph.lose();
    assert_eq!(calls.leave(1, A), Some((1, None)));
    assert_eq!(calls.graph.unmatched(), (0, 1));
    assert_eq!(calls.leave(1, B), Some((0, Some(20))));
}

#[test]
fn a_new_task_has_nothing_open() {
    let mut calls = all();
    calls.enter(1, A);
    let entered = Entered { function: B, time_ns: 100, parent: 0, caller: None, is_first: true };
    let kind = calls.graph.enter(TaskKey::new(Some(1), 0), entered);
    assert_eq!(kind, Some(EventKind::Entry { depth: 0 }));
}

#[test]
fn calls_beyond_the_depth_are_not_shown_and_count_as_levels() {
    let mut calls = Calls::new(Options { max_depth: Some(1), ..Options::default() }, &[]);
    assert_eq!(calls.enter(1, A), Some(0));
    assert_eq!(calls.enter(1, B), None);
    assert_eq!(calls.enter(1, C), None);
    assert_eq!(calls.leave(1, C), None);
    assert_eq!(calls.leave(1, B), None);
    assert_eq!(calls.leave(1, A), Some((0, Some(50))));
}

#[test]
fn only_what_named_functions_call_is_shown_and_they_are_the_first_level() {
    let mut calls = only(&[B], Options { max_depth: Some(2), ..Options::default() });
    assert_eq!(calls.enter(1, A), None);
    assert_eq!(calls.enter(1, B), Some(0));
    assert_eq!(calls.enter(1, A), Some(1));
    assert_eq!(calls.enter(1, C), None, "too deep");
    assert_eq!(calls.leave(1, C), None);
    assert_eq!(calls.leave(1, A), Some((1, Some(30))));
    assert_eq!(calls.leave(1, B), Some((0, Some(50))));
    assert_eq!(calls.enter(1, C), None);
    calls.enter(1, B);
    assert_eq!(calls.graph.outstanding(), [(B, 1)].into_iter().collect());
}

#[test]
fn with_a_threshold_only_returns_that_took_as_long_are_shown() {
    let mut calls = Calls::new(Options { threshold_ns: Some(30), ..Options::default() }, &[]);
    assert_eq!(calls.enter(1, A), None);
    assert_eq!(calls.enter(1, B), None);
    assert_eq!(calls.leave(1, B), None);
    assert_eq!(calls.leave(1, A), Some((0, Some(30))));
}

#[test]
fn what_is_kept_has_a_bound() {
    let mut calls = all();
    for _ in 0..3 * MAX_OPEN {
        calls.enter(1, A);
        assert!(calls.graph.tasks[&TaskKey(1)].len() <= MAX_OPEN);
    }
    for pid in 0..2 * MAX_TASKS as u32 {
        calls.enter(pid, A);
        assert!(calls.graph.tasks.len() <= MAX_TASKS);
    }
    let (lost, _) = calls.graph.unmatched();
    let open: u64 = calls.graph.outstanding().values().sum();
    assert_eq!(lost + open, 3 * MAX_OPEN as u64 + 2 * MAX_TASKS as u64);
}
