//! What traces that overwrite hold is given out piece by piece, as far as whoever it is for takes it: there
//! may be far more of it than waits for a client at other times.

use std::io;
use std::time::{Duration, Instant};

use patcher::kernel::{Kernel, PanicCpu};
use patcher::machine::Machine;
use patcher::trace::sink::Sink;
use patcher::trace::tracer::{ClientId, Held, Tracer};
use vmm::control::Outbox;
use vmm::control::protocol::{End, EndReason, Totals};

/// How often it is looked whether the kernel panics: it goes on calling functions then, and what it called
/// before is soon overwritten.
pub const LOOK: Duration = Duration::from_millis(1);

/// How many are given out for somebody who asks at the same time: each is a copy of the rings.
pub const MAX_SNAPSHOTS: usize = 4;

/// How long whoever takes nothing is waited for when the guest has ended.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many times [`Outbox::SOME`] events are given out before others have their turn.
const TURN: usize = 64;

/// What is held, on its way.
pub struct Giving {
    pub held: Held,
    /// When some of it was taken last.
    taken: Instant,
}

impl Giving {
    pub fn new(held: Held) -> Self {
        Self { held, taken: Instant::now() }
    }

    pub fn is_over(&self) -> bool {
        self.held.left() == 0
    }

    /// Gives what there is room for, to `outbox` or the client's own; whether that was anything.
    pub fn step(
        &mut self,
        tracer: &mut Tracer<'_, Outbox>,
        client: ClientId,
        mut outbox: Option<&mut Outbox>,
    ) -> bool {
        let before = self.held.left();
        for _ in 0..TURN {
            let has_room = match &outbox {
                Some(outbox) => outbox.has_room(),
                None => tracer.sink_mut(client).is_none_or(|outbox| outbox.has_room()),
            };
            if !has_room || self.is_over() {
                break;
            }
            let some = Outbox::SOME;
            tracer.give_held(&mut self.held, some, outbox.as_deref_mut(), Outbox::event);
        }
        let is_any = self.held.left() < before;
        if is_any {
            self.taken = Instant::now();
        }
        is_any
    }

    /// Why it can't be given, if so.
    pub fn failure(&self) -> Option<io::Error> {
        self.held.failure().map(|error| io::Error::new(error.kind(), error.to_string()))
    }

    /// Gives the rest up if nobody has taken any for a while.
    pub fn hurry(&mut self) {
        if self.taken.elapsed() >= PATIENCE {
            self.held.give_up();
        }
    }
}

/// What is held, on its way to somebody who has asked for it.
pub struct Snapshot {
    pub client: ClientId,
    pub giving: Giving,
    pub outbox: Outbox,
    /// How long it was recorded.
    pub lasted: Duration,
}

impl Snapshot {
    /// Gives what there is room for; whether that was anything.
    pub fn step(&mut self, tracer: &mut Tracer<'_, Outbox>) -> bool {
        self.giving.step(tracer, self.client, Some(&mut self.outbox))
    }

    /// Says what it came to.
    pub fn end(self, tracer: &Tracer<'_, Outbox>) {
        let summary = tracer.summary_of_held(&self.giving.held);
        let (reason, lasted) = (EndReason::Stopped, self.lasted);
        self.outbox.end(End { reason, error: None, totals: Totals::from(&summary), lasted });
    }
}

/// Looks whether a kernel panics, often.
pub struct PanicWatch(Option<PanicCpu>);

impl PanicWatch {
    /// Of a kernel that does not tell where it has that: it is noticed when the guest ends.
    pub fn new(kernel: &Kernel, machine: &dyn Machine) -> Self {
        Self(kernel.panic_cpu(machine.ram()).ok())
    }

    pub fn has_panicked(&self, kernel: &Kernel, machine: &dyn Machine) -> bool {
        let Some(panic_cpu) = &self.0 else { return false };
        kernel.panicked_by(machine.ram(), panic_cpu).is_ok_and(|cpu| cpu.is_some())
    }
}
