//! Which calls are nested in which, by the records of calls and returns of each task.
//!
//! A task's calls return in the reverse order, so its calls that have not returned are a stack, on which
//! interrupts put theirs and take them off again. A return closes the innermost open call of its
//! function. Where records were lost, or calls have no return, what lies above that is closed with it;
//! and a call whose caller is itself an open call closes what lies above its caller.

use rustc_hash::{FxHashMap, FxHashSet};

use super::filter::Glob;
use super::kind::{EventKind, Return};

#[cfg(test)]
mod tests;

/// What of calls and returns is given out.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Only calls that are nested in fewer than so many.
    pub max_depth: Option<u32>,
    /// Only functions that match, and what is called from them; all if there are none.
    pub functions: Vec<Glob>,
    /// Only returns, of calls that took no less than so many nanoseconds.
    pub threshold_ns: Option<u64>,
}

/// Whose calls are nested in each other: those of a task, or of the idle task of a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TaskKey(u64);

impl TaskKey {
    /// The task with that number that was seen on that CPU; `None` if its number is not known.
    pub fn new(pid: Option<u32>, cpu: u16) -> Self {
        match pid {
            None | Some(0) => Self(1 << 32 | u64::from(cpu)),
            Some(pid) => Self(u64::from(pid)),
        }
    }
}

/// A call as its record tells of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entered {
    /// Index of the function.
    pub function: u32,
    /// When, in nanoseconds.
    pub time_ns: u64,
    /// The caller's return address as recorded, with what lies in its other half.
    pub parent: u64,
    /// Index of the function that the call was made in, if that is traced.
    pub caller: Option<u32>,
    /// Nothing of its task can be open: it is what tasks begin with.
    pub is_first: bool,
}

/// What is known of a return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Left {
    pub kind: EventKind,
    /// The caller's return address, as in [`Entered`]; `None` if the call is not known.
    pub parent: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    function: u32,
    /// How deep it is shown, if it is.
    depth: Option<u32>,
    /// When it was made, and its caller; `None` if its record is not there any more.
    made: Option<(u64, u64)>,
    /// How often records had been lost before it.
    losses: u64,
}

/// The open calls of all tasks, for one client.
#[derive(Debug)]
pub(super) struct Graph {
    options: Options,
    /// Indices of the functions that [`Options::functions`] name.
    roots: FxHashSet<u32>,
    tasks: FxHashMap<TaskKey, Vec<Open>>,
    losses: u64,
    lost_returns: u64,
    lost_calls: u64,
}

/// Open calls of a task that are kept at most. A kernel stack has room for some hundred.
const MAX_OPEN: usize = 1024;

/// Tasks with open calls that are kept at most.
const MAX_TASKS: usize = 1 << 16;

impl Graph {
    pub fn new(options: Options, roots: FxHashSet<u32>) -> Self {
        let tasks = FxHashMap::default();
        Self { options, roots, tasks, losses: 0, lost_returns: 0, lost_calls: 0 }
    }

    /// Whether only returns are given out.
    pub fn has_threshold(&self) -> bool {
        self.options.threshold_ns.is_some()
    }

    /// Takes note that records are missing: what is open may have returned.
    pub fn lose(&mut self) {
        self.losses += 1;
    }

    /// Takes a call, and tells what is to be said of it, if anything is.
    pub fn enter(&mut self, task: TaskKey, entered: Entered) -> Option<EventKind> {
        if self.tasks.len() >= MAX_TASKS && !self.tasks.contains_key(&task) {
            self.tasks.retain(|_, open| !open.is_empty());
            if self.tasks.len() >= MAX_TASKS {
                // A guest that has so many tasks makes records of its own.
                self.lost_returns +=
                    self.tasks.drain().map(|(_, open)| open.len() as u64).sum::<u64>();
            }
        }
        let losses = self.losses;
        let open = self.tasks.entry(task).or_default();
        let keep = if entered.is_first { 0 } else { still_open(open, &entered, losses) };
        let keep = if keep >= MAX_OPEN { 0 } else { keep };
        self.lost_returns += (open.len() - keep) as u64;
        open.truncate(keep);
        let Entered { function, time_ns, parent, .. } = entered;
        let depth = depth_in(open, function, (&self.options, &self.roots));
        open.push(Open { function, depth, made: Some((time_ns, parent)), losses });
        let depth = depth.filter(|_| self.options.threshold_ns.is_none())?;
        self.is_shown(depth).then_some(EventKind::Entry { depth })
    }

    /// Takes note that a task was in these calls, the outermost first, whose records are not there any more:
    /// those of their returns are.
    pub fn assume(&mut self, task: TaskKey, functions: impl Iterator<Item = u32>) {
        let open = self.tasks.entry(task).or_default();
        for function in functions.take(MAX_OPEN) {
            let depth = depth_in(open, function, (&self.options, &self.roots));
            open.push(Open { function, depth, made: None, losses: self.losses });
        }
    }

    /// For the same records, of which all is given out.
    pub fn of_everything(&self) -> Self {
        Self::new(Options::default(), FxHashSet::default())
    }

    /// With the same options, and nothing seen yet.
    pub fn anew(&self) -> Self {
        Self::new(self.options.clone(), self.roots.clone())
    }

    fn is_shown(&self, depth: u32) -> bool {
        self.options.max_depth.is_none_or(|max| depth < max)
    }

    /// Takes a return, and tells what is to be said of it, if anything is.
    pub fn leave(
        &mut self,
        task: TaskKey,
        function: u32,
        time_ns: u64,
        value: u64,
    ) -> Option<Left> {
        let open = self.tasks.get_mut(&task);
        let position =
            open.as_ref().and_then(|open| open.iter().rposition(|open| open.function == function));
        let (Some(open), Some(position)) = (open, position) else {
            return self.leave_unknown(task, value);
        };
        let call = open[position];
        self.lost_returns += (open.len() - position - 1) as u64;
        open.truncate(position);
        self.lost_calls += u64::from(call.made.is_none());
        let depth = call.depth.filter(|depth| self.is_shown(*depth))?;
        let duration_ns = call.made.map(|(made, _)| time_ns.saturating_sub(made));
        if let Some(threshold) = self.options.threshold_ns
            && duration_ns.is_none_or(|duration| duration < threshold)
        {
            return None;
        }
        let kind = EventKind::Return(Return { depth, value, duration_ns });
        Some(Left { kind, parent: call.made.map(|(_, parent)| parent) })
    }

    /// A return from a call that is not known: it was made before the trace began, or its record was lost.
    fn leave_unknown(&mut self, task: TaskKey, value: u64) -> Option<Left> {
        if self.losses == 0 {
            return None;
        }
        self.lost_calls += 1;
        if !self.options.functions.is_empty() || self.options.threshold_ns.is_some() {
            return None;
        }
        let depth = self.tasks.get(&task).map_or(0, Vec::len) as u32;
        let kind = EventKind::Return(Return { depth, value, duration_ns: None });
        self.is_shown(depth).then_some(Left { kind, parent: None })
    }

    /// Calls of which no return was seen although they have returned, and returns of which no call was
    /// seen although there was one.
    pub fn unmatched(&self) -> (u64, u64) {
        (self.lost_returns, self.lost_calls)
    }

    /// How many calls of each function have not returned.
    pub fn outstanding(&self) -> FxHashMap<u32, u64> {
        let mut calls = FxHashMap::default();
        for open in self.tasks.values().flatten().filter(|open| open.depth.is_some()) {
            *calls.entry(open.function).or_default() += 1;
        }
        calls
    }
}

/// How deep a call of that function in these open calls is shown, if it is.
fn depth_in(
    open: &[Open],
    function: u32,
    (options, roots): (&Options, &FxHashSet<u32>),
) -> Option<u32> {
    match open.last() {
        _ if options.functions.is_empty() => Some(open.len() as u32),
        Some(Open { depth: Some(depth), .. }) => Some(depth + 1),
        _ => roots.contains(&function).then_some(0),
    }
}

/// How many of a task's open calls are still open when it makes a call.
fn still_open(open: &[Open], entered: &Entered, losses: u64) -> usize {
    if let Some(caller) = entered.caller
        && let Some(position) = open.iter().rposition(|open| open.function == caller)
    {
        return position + 1;
    }
    // What was open when records were lost, and is called again from the same place: a call returns more
    // often than it calls itself.
    let again = |open: &Open| {
        let parent = open.made.map(|(_, parent)| parent);
        open.losses < losses && (open.function, parent) == (entered.function, Some(entered.parent))
    };
    open.iter().position(again).unwrap_or(open.len())
}
