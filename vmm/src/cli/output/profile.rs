//! Which functions took how long.

use std::io;

use super::flame::Flame;
use super::nesting::{Nesting, UNKNOWN};
use patcher::trace::sink::Event;

/// Times by function.
#[derive(Debug, Default)]
pub struct Profile {
    nesting: Nesting,
    times: Vec<Times>,
    flame: Option<Flame>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Times {
    calls: u64,
    total_ns: u64,
    self_ns: u64,
}

/// What the calls of a function took that have returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionTime {
    /// The function.
    pub function: String,
    /// How many.
    pub calls: u64,
    /// Together, in nanoseconds; of a function that calls itself only the outermost count.
    pub total_ns: u64,
    /// The same without what they have called.
    pub self_ns: u64,
}

impl Profile {
    /// One of which a picture is made as well, if there is one to be made.
    pub fn new(flame: Option<Flame>) -> Self {
        Self { flame, ..Self::default() }
    }

    /// Draws the picture, if there is one to be made.
    ///
    /// # Errors
    /// What writing says.
    pub fn draw(&mut self) -> io::Result<()> {
        self.flame.as_mut().map_or(Ok(()), |flame| flame.draw(&self.nesting))
    }

    /// Takes an event.
    pub fn event(&mut self, event: &Event<'_>) {
        let Some(closed) = self.nesting.event(event) else { return };
        if let Some(flame) = &mut self.flame {
            flame.add(event.task.and_then(|task| task.comm), &closed);
        }
        let Some((&function, callers)) = closed.path.split_last() else { return };
        if function == UNKNOWN {
            return;
        }
        let at = function as usize;
        if at >= self.times.len() {
            self.times.resize(at + 1, Times::default());
        }
        let times = &mut self.times[at];
        times.calls += 1;
        if !callers.contains(&function) {
            times.total_ns = times.total_ns.saturating_add(closed.total_ns);
        }
        times.self_ns = times.self_ns.saturating_add(closed.self_ns.unwrap_or(0));
    }

    /// The functions that took most themselves, and then in all; `count` of them at most.
    pub fn top(&self, count: usize) -> Vec<FunctionTime> {
        let mut all: Vec<(usize, Times)> =
            self.times.iter().copied().enumerate().filter(|(_, times)| times.calls > 0).collect();
        all.sort_by_key(|(_, times)| std::cmp::Reverse((times.self_ns, times.total_ns)));
        let told = all.into_iter().take(count).map(|(function, times)| FunctionTime {
            function: self.nesting.text(function as u32).to_owned(),
            calls: times.calls,
            total_ns: times.total_ns,
            self_ns: times.self_ns,
        });
        told.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::nesting::tests::event;
    use super::*;

    #[test]
    fn functions_are_told_by_what_they_took_themselves() {
        let mut profile = Profile::default();
        for event in [
            event(1, "a", 0, None),
            event(1, "b", 1, None),
            event(1, "b", 2, None),
            event(1, "b", 2, Some(40)),
            event(1, "b", 1, Some(60)),
            event(1, "a", 0, Some(100)),
        ] {
            profile.event(&event);
        }
        let time = |function: &str, calls, total_ns, self_ns| FunctionTime {
            function: function.into(),
            calls,
            total_ns,
            self_ns,
        };
        assert_eq!(profile.top(9), [time("b", 2, 60, 60), time("a", 1, 100, 40)]);
        assert_eq!(profile.top(1).len(), 1);
    }
}
