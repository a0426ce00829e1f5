//! What a guest has seen of a stop, by its own clock.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use patcher::machine::Machine;
use patcher::region::Part;
use vm_memory::Bytes;

use super::guest::{GAP, MEASURED, ROUNDS, SHARE, WANTED};
use super::stop_all::Gap;

/// How long a vCPU may take to answer: it may wait for a host's CPU behind many others.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tells the longest time for which a guest did not run.
pub trait Gaps {
    /// What each vCPU has measured since this was last asked; `None` where nobody measures.
    ///
    /// # Errors
    /// [`GapError`].
    fn take(&mut self) -> Result<Option<Gap>, GapError>;
}

/// Nobody measures.
impl Gaps for () {
    fn take(&mut self) -> Result<Option<Gap>, GapError> {
        Ok(None)
    }
}

/// The guest does not say what it has measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GapError {
    /// A vCPU does not run.
    #[error(
        "vCPU {vcpu} has not answered for {} s: it does not get a CPU of this host, or the guest \
         has ended",
        PATIENCE.as_secs()
    )]
    Silent {
        /// Which.
        vcpu: usize,
    },
    /// What is shared with the guest lies beyond the region's data.
    #[error("what vCPU {vcpu} shares with the host can't be reached: {source}")]
    Memory {
        /// Whose.
        vcpu: usize,
        /// Why not.
        source: vm_memory::VolatileMemoryError,
    },
}

/// What the vCPUs of a [busy guest](super::busy_guest) write into memory that they share with the host.
pub struct SharedGaps<'m> {
    machine: &'m dyn Machine,
    measure: u64,
}

impl<'m> SharedGaps<'m> {
    /// Waits until every vCPU has called every function, so that nothing is met for the first time
    /// in a measure, and begins to measure.
    ///
    /// # Errors
    /// [`GapError`].
    pub fn begin(machine: &'m dyn Machine) -> Result<Self, GapError> {
        let mut gaps = Self { machine, measure: 0 };
        gaps.wait_until(|gaps, vcpu| Ok(gaps.load(vcpu, ROUNDS)? > 0))?;
        gaps.take()?;
        Ok(gaps)
    }

    fn load(&self, vcpu: usize, word: u64) -> Result<u64, GapError> {
        let shared = self.machine.region(Part::Data).memory;
        let at = (vcpu as u64 * SHARE + word) as usize;
        let found = shared.load::<u64>(at, Ordering::SeqCst);
        found.map_err(|source| GapError::Memory { vcpu, source })
    }

    fn store(&self, vcpu: usize, word: u64, value: u64) -> Result<(), GapError> {
        let shared = self.machine.region(Part::Data).memory;
        let at = (vcpu as u64 * SHARE + word) as usize;
        let stored = shared.store(value, at, Ordering::SeqCst);
        stored.map_err(|source| GapError::Memory { vcpu, source })
    }

    fn wait_until(
        &self,
        is_there: impl Fn(&Self, usize) -> Result<bool, GapError>,
    ) -> Result<(), GapError> {
        let begun = Instant::now();
        for vcpu in 0..self.machine.vcpus() {
            while !is_there(self, vcpu)? {
                if begun.elapsed() > PATIENCE {
                    return Err(GapError::Silent { vcpu });
                }
                // Not to take the CPU from the vCPU that is waited for.
                thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }
}

impl Gaps for SharedGaps<'_> {
    fn take(&mut self) -> Result<Option<Gap>, GapError> {
        let vcpus = 0..self.machine.vcpus();
        self.measure += 1;
        for vcpu in vcpus.clone() {
            self.store(vcpu, WANTED, self.measure)?;
        }
        self.wait_until(|gaps, vcpu| Ok(gaps.load(vcpu, MEASURED)? == gaps.measure))?;
        let (mut longest, mut shortest) = (Duration::ZERO, Duration::MAX);
        for vcpu in vcpus {
            let gap = ticks(self.load(vcpu, GAP)?, self.machine.clock_hz());
            longest = longest.max(gap);
            shortest = shortest.min(gap);
        }
        Ok(Some(Gap { longest, shortest }))
    }
}

/// So many ticks of a clock of that frequency. The guest says how many: any number is taken.
fn ticks(ticks: u64, hz: u64) -> Duration {
    let nanoseconds = u128::from(ticks) * 1_000_000_000 / u128::from(hz.max(1));
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
}
