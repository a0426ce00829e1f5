//! The clock that does not go on while somebody else has this thread's processor.
#![allow(unsafe_code)]

use std::time::Duration;

/// How long the calling thread has run. What it does while a guest stands still takes as long on a machine
/// that has nothing else to do.
#[must_use]
pub fn own_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists, and the time is written to a place for one.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}
