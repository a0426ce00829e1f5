//! The nesting of calls, as events tell of it: who called whom, and what each call took itself.

use rustc_hash::FxHashMap;

use patcher::trace::sink::{Event, EventKind, Return};

/// The open calls of tasks, with their functions by number.
#[derive(Debug, Default)]
pub struct Nesting {
    numbers: FxHashMap<u64, u32>,
    by_text: FxHashMap<Box<str>, u32>,
    texts: Vec<Box<str>>,
    tasks: FxHashMap<u64, Vec<Frame>>,
    path: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Frame {
    function: u32,
    /// What calls that it made took together, in nanoseconds.
    children_ns: u64,
}

/// A call that has returned.
#[derive(Debug, PartialEq, Eq)]
pub struct Closed<'n> {
    /// The functions from the outermost call on to this one's, which is last.
    pub path: &'n [u32],
    /// What it took, in nanoseconds.
    pub total_ns: u64,
    /// What it took without the calls that it made; `None` if those are not known.
    pub self_ns: Option<u64>,
}

/// The number of what is not known.
pub const UNKNOWN: u32 = u32::MAX;

/// Levels, functions and tasks that are kept at most: events may come from a file that holds anything.
const MAX_DEPTH: usize = 512;
const MAX_FUNCTIONS: usize = 1 << 18;
const MAX_TASKS: usize = 1 << 16;

impl Nesting {
    /// Takes an event, and tells of the call that returns with it.
    pub fn event(&mut self, event: &Event<'_>) -> Option<Closed<'_>> {
        let depth = event.kind.depth()? as usize;
        if depth >= MAX_DEPTH {
            return None;
        }
        let function = self.number(event);
        if self.tasks.len() >= MAX_TASKS {
            self.tasks.clear();
        }
        let task = match event.task.map_or(0, |task| task.pid) {
            0 => 1 << 32 | u64::from(event.cpu),
            pid => u64::from(pid),
        };
        let frames = self.tasks.entry(task).or_default();
        let EventKind::Return(Return { duration_ns, .. }) = event.kind else {
            frames.resize(depth, Frame { function: UNKNOWN, children_ns: 0 });
            frames.push(Frame { function, children_ns: 0 });
            return None;
        };
        frames.truncate(depth + 1);
        let own = frames.get(depth).copied().filter(|frame| frame.function == function);
        frames.truncate(depth);
        let total_ns = duration_ns?;
        if let Some(caller) = frames.last_mut() {
            caller.children_ns = caller.children_ns.saturating_add(total_ns);
        }
        self.path.clear();
        self.path.extend(frames.iter().map(|frame| frame.function));
        self.path.push(function);
        let self_ns = own.map(|frame| total_ns.saturating_sub(frame.children_ns));
        Some(Closed { path: &self.path, total_ns, self_ns })
    }

    /// The name of the function with that number.
    pub fn text(&self, function: u32) -> &str {
        self.texts.get(function as usize).map_or("[unknown]", |text| text)
    }

    fn number(&mut self, event: &Event<'_>) -> u32 {
        let name = event.function;
        if let Some(number) = self.numbers.get(&name.id) {
            return *number;
        }
        let number = match self.by_text.get(name.text) {
            Some(number) => *number,
            None if self.texts.len() >= MAX_FUNCTIONS => return UNKNOWN,
            None => {
                let number = self.texts.len() as u32;
                self.texts.push(name.text.into());
                self.by_text.insert(name.text.into(), number);
                number
            }
        };
        if self.numbers.len() >= MAX_FUNCTIONS {
            self.numbers.clear();
        }
        self.numbers.insert(name.id, number);
        number
    }
}

#[cfg(test)]
pub mod tests {
    use patcher::trace::sink::{Name, Task, Values};

    use super::*;

    /// An event of a task: a call, or if there is a duration a return.
    pub fn event(pid: u32, text: &'static str, depth: u32, took: Option<u64>) -> Event<'static> {
        let id = u64::from(text.as_bytes()[0]);
        let name = Name { id, text, address: id, offset: 0 };
        Event {
            time_ns: 0,
            kind: match took {
                None => EventKind::Entry { depth },
                Some(took) => {
                    EventKind::Return(Return { depth, value: 0, duration_ns: Some(took) })
                }
            },
            cpu: 0,
            function: name,
            caller: name,
            task: Some(Task { pid, comm: Some("sh") }),
            context: None,
            values: Values::NONE,
            missed: 0,
        }
    }

    fn closed(nesting: &mut Nesting, event: &Event<'_>) -> Option<(Vec<String>, Option<u64>)> {
        let (path, self_ns) = {
            let closed = nesting.event(event)?;
            (closed.path.to_vec(), closed.self_ns)
        };
        Some((path.iter().map(|number| nesting.text(*number).to_owned()).collect(), self_ns))
    }

    fn path(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_call_is_told_with_its_callers_and_what_it_took_itself() {
        let mut nesting = Nesting::default();
        assert_eq!(closed(&mut nesting, &event(1, "a", 0, None)), None);
        assert_eq!(closed(&mut nesting, &event(2, "b", 0, None)), None);
        assert_eq!(closed(&mut nesting, &event(1, "b", 1, None)), None);
        let inner = closed(&mut nesting, &event(1, "b", 1, Some(30)));
        assert_eq!(inner, Some((path(&["a", "b"]), Some(30))));
        let outer = closed(&mut nesting, &event(1, "a", 0, Some(100)));
        assert_eq!(outer, Some((path(&["a"]), Some(70))));
        let other = closed(&mut nesting, &event(2, "b", 0, Some(5)));
        assert_eq!(other, Some((path(&["b"]), Some(5))));
    }

    #[test]
    fn what_is_missing_in_between_is_unknown_and_nothing_is_taken_for_it() {
        let mut nesting = Nesting::default();
        nesting.event(&event(1, "a", 2, None));
        let inner = closed(&mut nesting, &event(1, "a", 2, Some(9)));
        assert_eq!(inner, Some((path(&["[unknown]", "[unknown]", "a"]), Some(9))));
        let outer = closed(&mut nesting, &event(1, "b", 1, Some(20)));
        assert_eq!(outer, Some((path(&["[unknown]", "b"]), None)));
        assert_eq!(closed(&mut nesting, &event(1, "a", u32::MAX, None)), None);
        assert_eq!(nesting.tasks[&1].len(), 1);
    }
}
