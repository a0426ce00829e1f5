//! The names that calls in batches refer to by number, on the side that receives them.

use patcher::trace::sink::{Event, Name, Task};
use rustc_hash::FxHashMap;

use super::protocol::{BatchHeader, Call};

/// The names that calls refer to, and how often each function was called.
#[derive(Debug, Default)]
pub struct Names {
    current: Vec<Known>,
    /// Whether calls tell what their CPU was in the middle of.
    contexts: bool,
    /// How often all names were forgotten.
    generation: u64,
    /// Calls of functions whose names were forgotten.
    earlier: FxHashMap<String, u64>,
}

#[derive(Debug)]
struct Known {
    text: String,
    address: u64,
    offset: u64,
    calls: u64,
}

impl Names {
    /// No names yet, of a trace whose calls tell what their CPU was in the middle of if `contexts` says so.
    #[must_use]
    pub fn new(contexts: bool) -> Self {
        Self { contexts, ..Self::default() }
    }

    /// Takes the names that come with calls, after all others were forgotten if the header says so.
    pub fn learn(&mut self, header: &mut BatchHeader) {
        if header.forget {
            self.generation += 1;
            self.put_by();
        }
        let places = header.places.drain(..).chain(std::iter::repeat((0, 0)));
        let known = header.names.drain(..).zip(places);
        let known =
            known.map(|(text, (address, offset))| Known { text, address, offset, calls: 0 });
        self.current.extend(known);
    }

    fn put_by(&mut self) {
        for known in self.current.drain(..).filter(|known| known.calls > 0) {
            *self.earlier.entry(known.text).or_default() += known.calls;
        }
    }

    /// Gives all calls of a batch whose names were learnt to `take`, and counts them.
    ///
    /// `None` at a call that refers to no name, or is none.
    pub fn events(
        &mut self,
        header: &BatchHeader,
        calls: &[u8],
        mut take: impl FnMut(&Event<'_>),
    ) -> Option<()> {
        let mut gaps = header.gaps.iter().peekable();
        let mut rest = calls;
        for index in 0..header.calls {
            let (call, behind) = Call::decode(rest)?;
            rest = behind;
            let mut missed = 0;
            while let Some((_, count)) = gaps.next_if(|(call, _)| *call <= index) {
                missed = count.saturating_add(missed);
            }
            let event = self.event(&call)?;
            take(&Event { missed, ..event });
        }
        rest.is_empty().then_some(())
    }

    fn event<'e>(&'e mut self, call: &Call<'e>) -> Option<Event<'e>> {
        let counted = u64::from(call.kind.is_call());
        self.current.get_mut(call.function as usize)?.calls += counted;
        let generation = self.generation << 32;
        let name = |number: u32| {
            let Known { text, address, offset, .. } = self.current.get(number as usize)?;
            let id = generation | u64::from(number);
            Some(Name { id, text, address: *address, offset: *offset })
        };
        Some(Event {
            time_ns: call.time_ns,
            kind: call.kind,
            cpu: call.cpu,
            function: name(call.function)?,
            caller: name(call.caller)?,
            task: match (call.pid, call.comm) {
                (None, _) => None,
                (Some(pid), None) => Some(Task { pid, comm: None }),
                (Some(pid), Some(comm)) => Some(Task { pid, comm: Some(name(comm)?.text) }),
            },
            context: self.contexts.then_some(call.context),
            values: call.values,
            missed: 0,
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
