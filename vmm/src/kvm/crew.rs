//! The stop protocol: how vCPU threads are brought to a stand and let go again.
//!
//! Each vCPU has an *order*, a number that only grows: even means run, odd means stand still. The
//! vCPU answers an odd order by copying it to *held*, once it is at an instruction boundary with
//! no device access half done and has published its registers. That the orders are numbered makes
//! a stale answer harmless: a vCPU that is slow to leave one stop has not answered the next.
//!
//! No kick is lost because of the order in which things are done. The controller writes the order,
//! then `immediate_exit`, then sends the signal. The vCPU clears `immediate_exit`, *then* reads
//! its order, then enters KVM_RUN. Whatever the interleaving, either it reads the new order or its
//! KVM_RUN returns.
//!
//! A vCPU that stands can be told to execute one instruction: that is another odd order, with the
//! step wanted beside it. The answer to the order tells that the vCPU stands again.
//!
//! Between an order and its answer nothing is allocated, logged or locked by either side.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use patcher::machine::X86Registers;
use rustix::thread::futex;

use super::kick::Kick;

/// How long the controller watches for answers before it sleeps until there is one. A vCPU that
/// runs answers within tens of microseconds; sleeping costs as much again.
const SPIN: Duration = Duration::from_micros(50);

/// There is no step to do, or it is done.
const STEP_DONE: i32 = 0;

/// The vCPU is to execute one instruction.
const STEP_WANTED: i32 = 1;

/// A vCPU that was to execute one instruction stands where it stood, or is on its way.
#[derive(Debug)]
pub(super) enum NotStepped {
    /// KVM can't do it.
    Refused(io::Error),
    /// It did not come to the end of the instruction; it stands.
    Endless,
    /// It does not come to a stand any more.
    Silent,
}

/// What a vCPU thread is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Enter the guest.
    Enter,
    /// End: the guest is over.
    Leave,
}

/// All vCPUs of a machine, as the stop protocol sees them.
pub(super) struct Crew {
    stations: Vec<Station>,
    /// Changes whenever a vCPU that stands should look at its order again.
    gate: AtomicU32,
    /// Changes whenever a vCPU has come to a stand or has ended.
    arrivals: AtomicU32,
    started: AtomicBool,
    ending: AtomicBool,
}

/// One vCPU's part of the protocol.
struct Station {
    order: AtomicU32,
    held: AtomicU32,
    ended: AtomicBool,
    /// [`STEP_DONE`], [`STEP_WANTED`], or the negative number of the error that came in between.
    step: AtomicI32,
    kick: Kick,
    registers: Published,
}

impl Crew {
    pub(super) fn new(kicks: Vec<Kick>) -> Self {
        let station = |kick| Station {
            order: AtomicU32::new(0),
            held: AtomicU32::new(0),
            ended: AtomicBool::new(false),
            step: AtomicI32::new(STEP_DONE),
            kick,
            registers: Published::default(),
        };
        Self {
            stations: kicks.into_iter().map(station).collect(),
            gate: AtomicU32::new(0),
            arrivals: AtomicU32::new(0),
            started: AtomicBool::new(false),
            ending: AtomicBool::new(false),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.stations.len()
    }

    // What vCPU threads call.

    /// Takes up the station of `vcpu`; the calling thread is that vCPU until it drops the result.
    pub(super) fn enlist(&self, vcpu: usize) -> Enlisted<'_> {
        self.stations[vcpu].kick.enlist();
        Enlisted { crew: self, vcpu }
    }

    // What everybody else calls.

    /// Lets the vCPUs enter the guest for the first time.
    pub(super) fn start(&self) {
        self.started.store(true, Ordering::SeqCst);
        self.open_gate();
    }

    /// Makes every vCPU thread leave for good.
    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        for station in &self.stations {
            station.kick.kick();
        }
        self.open_gate();
    }

    /// Whether the guest is over.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// Whether somebody waits for `vcpu` to come to a stand or to end.
    pub(super) fn is_wanted(&self, vcpu: usize) -> bool {
        let order = self.stations[vcpu].order.load(Ordering::SeqCst);
        is_hold(order) || self.is_ending()
    }

    /// Brings the vCPUs in `which` to a stand, all of them or none: on failure they are let go
    /// again before this returns.
    ///
    /// Only one thread at a time may be between `hold` and the matching [`release`](Self::release).
    ///
    /// # Errors
    /// The number of a vCPU that did not answer before `deadline` had passed.
    pub(super) fn hold(&self, which: Range<usize>, deadline: Duration) -> Result<(), usize> {
        let begun = Instant::now();
        let stations = &self.stations[which.clone()];
        for station in stations {
            station.order.fetch_add(1, Ordering::SeqCst);
        }
        for station in stations {
            station.kick.kick();
        }
        if !self.started.load(Ordering::SeqCst) {
            // They sleep at the gate, where a signal that comes too early is lost.
            self.open_gate();
        }
        self.wait_for(which.clone(), begun, deadline).inspect_err(|_| self.release(which))
    }

    /// Waits until the vCPUs in `which` stand, or for `deadline` since `begun`.
    ///
    /// # Errors
    /// The number of one that does not stand then.
    fn wait_for(
        &self,
        which: Range<usize>,
        begun: Instant,
        deadline: Duration,
    ) -> Result<(), usize> {
        let stations = &self.stations[which.clone()];
        loop {
            let arrivals = self.arrivals.load(Ordering::SeqCst);
            let Some(silent) = stations.iter().position(|station| !station.stands()) else {
                return Ok(());
            };
            let waited = begun.elapsed();
            if waited < SPIN {
                std::hint::spin_loop();
            } else if let Some(left) = deadline.checked_sub(waited) {
                sleep(&self.arrivals, arrivals, Some(left));
            } else {
                return Err(which.start + silent);
            }
        }
    }

    /// Has `vcpu`, which stands, execute one instruction.
    ///
    /// # Errors
    /// [`NotStepped`].
    pub(super) fn step(&self, vcpu: usize, deadline: Duration) -> Result<(), NotStepped> {
        let station = &self.stations[vcpu];
        let which = vcpu..vcpu + 1;
        station.step.store(STEP_WANTED, Ordering::SeqCst);
        // From one odd order to the next.
        station.order.fetch_add(2, Ordering::SeqCst);
        self.open_gate();
        let stands = self.wait_for(which.clone(), Instant::now(), deadline);
        let step = station.step.swap(STEP_DONE, Ordering::SeqCst);
        if stands.is_err() {
            station.kick.kick();
            let stands = self.wait_for(which, Instant::now(), deadline);
            return Err(stands.map_or(NotStepped::Silent, |()| NotStepped::Endless));
        }
        match step {
            STEP_DONE => Ok(()),
            // It has ended.
            STEP_WANTED => Err(NotStepped::Silent),
            refused => Err(NotStepped::Refused(io::Error::from_raw_os_error(-refused))),
        }
    }

    /// Lets the vCPUs in `which` go, which [`hold`](Self::hold) has brought to a stand.
    pub(super) fn release(&self, which: Range<usize>) {
        for station in &self.stations[which] {
            station.order.fetch_add(1, Ordering::SeqCst);
        }
        self.open_gate();
    }

    /// The registers with which `vcpu` last came to a stand.
    pub(super) fn registers(&self, vcpu: usize) -> X86Registers {
        self.stations[vcpu].registers.load()
    }

    fn open_gate(&self) {
        bump(&self.gate);
    }
}

impl Station {
    /// Whether the order in force has been answered, or never will be because the vCPU has ended.
    fn stands(&self) -> bool {
        self.held.load(Ordering::SeqCst) == self.order.load(Ordering::SeqCst)
            || self.ended.load(Ordering::SeqCst)
    }
}

/// A vCPU thread in its place. Dropping it, also by a panic, says that the vCPU has ended.
pub(super) struct Enlisted<'a> {
    crew: &'a Crew,
    vcpu: usize,
}

impl Enlisted<'_> {
    /// To be called before each KVM_RUN. Returns when the vCPU may enter the guest or must leave
    /// for good; in between it stands still as long as it is told to.
    ///
    /// `settle` is called to come to a stand: it executes an instruction if [a step](Self::step) is
    /// wanted, completes what device access is under way and gives the registers, or nothing if the
    /// guest came to its end over this.
    pub(super) fn next(&self, mut settle: impl FnMut(&Self) -> Option<X86Registers>) -> Next {
        let crew = self.crew;
        let station = &crew.stations[self.vcpu];
        loop {
            // Cleared before the order is read, never after.
            station.kick.set_immediate_exit(false);
            let order = station.order.load(Ordering::SeqCst);
            if crew.is_ending() {
                return Next::Leave;
            }
            let started = crew.started.load(Ordering::SeqCst);
            if is_hold(order) {
                let Some(registers) = settle(self) else { return Next::Leave };
                station.registers.store(&registers);
                station.held.store(order, Ordering::SeqCst);
                bump(&crew.arrivals);
            } else if started {
                return Next::Enter;
            }
            loop {
                let gate = crew.gate.load(Ordering::SeqCst);
                let as_before = station.order.load(Ordering::SeqCst) == order
                    && crew.started.load(Ordering::SeqCst) == started;
                if crew.is_ending() || !as_before {
                    break;
                }
                sleep(&crew.gate, gate, None);
            }
        }
    }

    /// Whether the vCPU is to execute one instruction.
    pub(super) fn is_step_wanted(&self) -> bool {
        self.crew.stations[self.vcpu].step.load(Ordering::SeqCst) == STEP_WANTED
    }

    /// Tells what became of the step.
    pub(super) fn stepped(&self, how: Result<(), kvm_ioctls::Error>) {
        let told = how.map_or_else(|error| -error.errno().max(2), |()| STEP_DONE);
        // Whoever does not want it any more is not told.
        let _ = self.crew.stations[self.vcpu].step.compare_exchange(
            STEP_WANTED,
            told,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
    }

    /// Makes the next KVM_RUN return as soon as it has completed the device access under way.
    pub(super) fn only_complete(&self) {
        self.crew.stations[self.vcpu].kick.set_immediate_exit(true);
    }
}

impl Drop for Enlisted<'_> {
    fn drop(&mut self) {
        let station = &self.crew.stations[self.vcpu];
        station.kick.discharge();
        station.ended.store(true, Ordering::SeqCst);
        bump(&self.crew.arrivals);
    }
}

fn is_hold(order: u32) -> bool {
    order % 2 == 1
}

/// Changes `word` and wakes those who sleep on it.
fn bump(word: &AtomicU32) {
    word.fetch_add(1, Ordering::SeqCst);
    // Fails only for an address that is no futex, which a reference to an atomic rules out.
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// Sleeps until `word` is no longer `seen`, a signal comes, or `longest` has passed. The caller
/// looks again in any case, so why it woke does not matter.
fn sleep(word: &AtomicU32, seen: u32, longest: Option<Duration>) {
    let longest = longest.and_then(|longest| futex::Timespec::try_from(longest).ok());
    let _ = futex::wait(word, futex::Flags::PRIVATE, seen, longest.as_ref());
}

/// Registers on their way from the vCPU's thread to the controller's. The vCPU writes them before
/// it answers an order and the controller reads them after, so plain loads and stores do.
#[derive(Default)]
struct Published([AtomicU64; 10]);

impl Published {
    fn store(&self, registers: &X86Registers) {
        let X86Registers { rip, rsp, rflags, cs, cr0, cr3, cr4, efer, gs_base, kernel_gs_base } =
            *registers;
        let values =
            [rip, rsp, rflags, u64::from(cs), cr0, cr3, cr4, efer, gs_base, kernel_gs_base];
        for (place, value) in self.0.iter().zip(values) {
            place.store(value, Ordering::Relaxed);
        }
    }

    fn load(&self) -> X86Registers {
        let [rip, rsp, rflags, cs, cr0, cr3, cr4, efer, gs_base, kernel_gs_base] =
            self.0.each_ref().map(|place| place.load(Ordering::Relaxed));
        X86Registers {
            rip,
            rsp,
            rflags,
            cs: cs as u16,
            cr0,
            cr3,
            cr4,
            efer,
            gs_base,
            kernel_gs_base,
        }
    }
}
