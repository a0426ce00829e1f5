//! How fast the guest's clock runs.
#![allow(unsafe_code)]

use std::arch::x86_64::_rdtsc;
use std::thread;
use std::time::{Duration, Instant};

/// Enough to know the frequency to a few parts in a hundred thousand.
const LEAST: Duration = Duration::from_millis(50);

/// What the guest takes time stamps from.
#[derive(Debug)]
pub(super) enum Clock {
    /// This host's time-stamp counter, emulated or not.
    HostTsc(Moment),
    /// A clock that ticks so many times a second.
    Fixed(u64),
}

impl Clock {
    /// Its frequency in Hz.
    pub(super) fn frequency(&self) -> u64 {
        match self {
            Clock::HostTsc(since) => since.frequency(),
            Clock::Fixed(hz) => (*hz).max(1),
        }
    }
}

/// The time-stamp counter at a moment.
#[derive(Debug)]
pub(super) struct Moment {
    ticks: u64,
    at: Instant,
}

impl Moment {
    pub(super) fn now() -> Self {
        // SAFETY: every x86_64 processor has the instruction, and Linux leaves it to user mode.
        Self { ticks: unsafe { _rdtsc() }, at: Instant::now() }
    }

    /// The frequency in Hz, the more exact the longer it is since this moment.
    fn frequency(&self) -> u64 {
        thread::sleep(LEAST.saturating_sub(self.at.elapsed()));
        let now = Self::now();
        let ticks = u128::from(now.ticks.wrapping_sub(self.ticks));
        let nanoseconds = (now.at - self.at).as_nanos().max(1);
        u64::try_from(ticks * 1_000_000_000 / nanoseconds).unwrap_or(u64::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree() {
        let (first, second) = (Moment::now().frequency(), Moment::now().frequency());
        assert!(first.abs_diff(second) < first / 20, "{first} Hz and {second} Hz");
    }
}
