//! One tracing session: functions are chosen, armed in one stop, drained, and put back.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use super::ring::RingCorrupt;
use super::sink::Sink;
use super::tracer::{ClientId, Progress, Tracer};
use crate::hook::{Hooks, ReleaseError};
use crate::kernel::{Kernel, MappedRegion};
use crate::machine::Machine;

pub use super::client::Summary;
pub use super::select::{SelectError, Selection, refusals};
pub use super::tracer::{ArmError, Armed};

/// How long the last records are waited for once no function is armed any more: their writers are
/// preempted in the middle of one.
pub const LAST_RECORDS: Duration = Duration::from_secs(1);

/// A session that is armed: a [`Tracer`] with one client, and [`Hooks`] of its own. Dropping it puts
/// back what is armed, as well as it can.
pub struct Session<'m> {
    hooks: Hooks<'m>,
    tracer: Tracer<'m, ()>,
    client: ClientId,
    /// Its records stay in the rings until it ends.
    overwrites: bool,
}

impl<'m> Session<'m> {
    /// Arms the selected functions, all of them in one stop or none.
    ///
    /// # Errors
    /// [`ArmError`]; the guest's text is then as it was, but for
    /// [`ApplyError::Torn`](crate::patch::ApplyError::Torn).
    pub fn arm(
        machine: &'m dyn Machine,
        kernel: &'m Kernel,
        region: &'m MappedRegion,
        selection: &Selection,
    ) -> Result<(Self, Armed), ArmError> {
        let mut hooks = Hooks::new(machine, kernel, region);
        let mut tracer = Tracer::new(&mut hooks)?;
        let (client, armed) = tracer.add(&mut hooks, selection, ())?;
        let overwrites = selection.overwrite;
        Ok((Self { hooks, tracer, client, overwrites }, armed))
    }

    /// Takes what the rings hold and gives out what is in order by now.
    ///
    /// # Errors
    /// What the sink says, and again whenever this is called from then on. The events that it did not
    /// take are gone.
    pub fn drain(&mut self, sink: &mut dyn Sink) -> io::Result<()> {
        self.tracer.drain(&self.hooks, |(), event| sink.event(event));
        match self.progress().failure {
            Some(failure) => Err(io::Error::new(failure.kind(), failure.to_string())),
            None => Ok(()),
        }
    }

    /// Events given to the sink until now.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.progress().events
    }

    /// Records lost until now, over all CPUs.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.progress().missed
    }

    fn progress(&self) -> Progress<'_, ()> {
        self.tracer.progress(self.client).expect("only finish() ends the client")
    }

    /// The rings that the guest has spoilt.
    pub fn corrupt(&self) -> impl Iterator<Item = &RingCorrupt> {
        self.tracer.corrupt()
    }

    /// Puts every function back in one stop. A guest that has ended needs nothing put back; memory
    /// that it has taken for something else, or a kernel that is no longer this one, is left alone.
    ///
    /// # Errors
    /// [`ReleaseError`]; calling it again tries again.
    pub fn disarm(&mut self) -> Result<(), ReleaseError> {
        self.tracer.remove(&mut self.hooks, self.client)
    }

    /// Reads what is left, once the session is disarmed or the guest has ended, and ends the trace.
    ///
    /// # Errors
    /// What the sink says; the summary is complete all the same.
    pub fn finish(mut self, sink: &mut dyn Sink) -> (Summary, io::Result<()>) {
        let until = Instant::now() + LAST_RECORDS;
        if self.overwrites {
            return self.finish_held(sink, until);
        }
        let mut result = self.drain(sink);
        while result.is_ok() && !self.tracer.is_settled(self.client) && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
            result = self.drain(sink);
        }
        let finished = self.tracer.finish(self.client, |(), event| sink.event(event));
        let finished = finished.expect("only this ends the client");
        let summary = finished.summary;
        let entries = summary.events + summary.dropped();
        let result = match finished.failure {
            Some(failure) => Err(failure),
            None => sink.end(summary.events, entries),
        };
        (summary, result)
    }

    /// The same for one whose records are all still in the rings.
    fn finish_held(mut self, sink: &mut dyn Sink, until: Instant) -> (Summary, io::Result<()>) {
        let Self { hooks, tracer, client, .. } = &mut self;
        let mut held = loop {
            let held = tracer.hold(hooks, *client).expect("it overwrites");
            if held.unwritten() == 0 || Instant::now() >= until {
                break held;
            }
            thread::sleep(Duration::from_millis(5));
        };
        let all = held.left();
        tracer.give_held(&mut held, all, None, |(), event| sink.event(event));
        let finished = tracer.finish_held(held).expect("only this ends the client");
        let result = match finished.failure {
            Some(failure) => Err(failure),
            None => sink.end(finished.summary.events, finished.summary.entries()),
        };
        (finished.summary, result)
    }
}
