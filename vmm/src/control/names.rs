//! The names that calls in batches refer to by number, on the side that receives them.

use patcher::trace::sink::{Event, Name, Task};
use rustc_hash::FxHashMap;

use super::protocol::Call;

/// The names that calls refer to, and how often each function was called.
#[derive(Debug, Default)]
pub struct Names {
    current: Vec<(String, u64)>,
    /// Whether calls tell what their CPU was in the middle of.
    contexts: bool,
    /// How often all names were forgotten.
    generation: u64,
    /// Calls of functions whose names were forgotten.
    earlier: FxHashMap<String, u64>,
}

impl Names {
    /// No names yet, of a trace whose calls tell what their CPU was in the middle of if `contexts` says so.
    #[must_use]
    pub fn new(contexts: bool) -> Self {
        Self { contexts, ..Self::default() }
    }

    /// Takes names that come with calls, after all others were forgotten if `forget` says so.
    pub fn learn(&mut self, forget: bool, names: Vec<String>) {
        if forget {
            self.generation += 1;
            self.put_by();
        }
        self.current.extend(names.into_iter().map(|name| (name, 0)));
    }

    fn put_by(&mut self) {
        for (name, count) in self.current.drain(..).filter(|(_, count)| *count > 0) {
            *self.earlier.entry(name).or_default() += count;
        }
    }

    /// Counts a call, and names its functions.
    ///
    /// `None` for a call that refers to no name.
    pub fn event(&mut self, call: &Call) -> Option<Event<'_>> {
        self.current.get_mut(call.function as usize)?.1 += 1;
        let generation = self.generation << 32;
        let name = |number: u32| {
            let (text, _) = self.current.get(number as usize)?;
            Some(Name { id: generation | u64::from(number), text })
        };
        Some(Event {
            time_ns: call.time_ns,
            cpu: call.cpu,
            function: name(call.function)?,
            caller: name(call.caller)?,
            task: match (call.pid, call.comm) {
                (None, _) => None,
                (Some(pid), None) => Some(Task { pid, comm: None }),
                (Some(pid), Some(comm)) => Some(Task { pid, comm: Some(name(comm)?.text) }),
            },
            context: self.contexts.then_some(call.context),
        })
    }

    /// How many names can be referred to.
    #[must_use]
    pub fn in_force(&self) -> usize {
        self.current.len()
    }

    /// Calls of every function that was called, most first.
    #[must_use]
    pub fn counts(mut self) -> Vec<(String, u64)> {
        self.put_by();
        let mut counts: Vec<_> = self.earlier.into_iter().collect();
        counts.sort_by(|(a_name, a), (b_name, b)| b.cmp(a).then_with(|| a_name.cmp(b_name)));
        counts
    }
}
