//! One stop at a time.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use patcher::machine::StopError;

/// Whose turn it is to stop the guest. Others wait, except the holder itself.
#[derive(Default)]
pub(crate) struct Turn {
    holder: Mutex<Option<ThreadId>>,
    free: Condvar,
}

impl Turn {
    /// Waits for the turn.
    ///
    /// # Errors
    /// [`StopError::AlreadyStopped`] if it is the calling thread's already.
    pub(crate) fn take(&self) -> Result<Held<'_>, StopError> {
        let this = thread::current().id();
        let mut holder = self.holder();
        while let Some(thread) = *holder {
            if thread == this {
                return Err(StopError::AlreadyStopped);
            }
            holder = self.free.wait(holder).unwrap_or_else(PoisonError::into_inner);
        }
        *holder = Some(this);
        Ok(Held(self))
    }

    fn holder(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// It is this holder's turn, until this is dropped.
pub(crate) struct Held<'a>(&'a Turn);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        *self.0.holder() = None;
        self.0.free.notify_one();
    }
}
