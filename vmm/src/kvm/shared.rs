//! What the vCPU threads of a machine and its owner share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use patcher::region::Traps;
use vmm_sys_util::eventfd::EventFd;

use super::crew::Crew;
use super::memory::Memory;
use crate::devices::Ports;
use crate::exit::GuestExit;

pub(super) struct Shared {
    pub(super) crew: Crew,
    pub(super) memory: Memory,
    pub(super) ports: Arc<Ports>,
    /// Writes of the guest to what it may only read of the region, which went nowhere.
    pub(super) refused_writes: AtomicU64,
    traps: RwLock<Arc<Traps>>,
    /// Whether there are any of them.
    trapping: AtomicBool,
    life: Mutex<Life>,
    changed: Condvar,
    /// Readable from the guest's end on.
    pub(super) ended: EventFd,
}

struct Life {
    exit: Option<GuestExit>,
    /// vCPU threads that have not left.
    threads: usize,
}

impl Shared {
    pub(super) fn new(crew: Crew, memory: Memory, ports: Ports) -> std::io::Result<Self> {
        let life = Life { exit: None, threads: crew.len() };
        Ok(Self {
            crew,
            memory,
            ports: Arc::new(ports),
            refused_writes: AtomicU64::new(0),
            traps: RwLock::default(),
            trapping: AtomicBool::new(false),
            life: Mutex::new(life),
            changed: Condvar::new(),
            ended: EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK)?,
        })
    }

    /// Has vCPUs answer these traps.
    pub(super) fn set_traps(&self, traps: Arc<Traps>) {
        let some = !traps.is_empty();
        *self.traps.write().unwrap_or_else(PoisonError::into_inner) = traps;
        self.trapping.store(some, Ordering::SeqCst);
    }

    /// The traps.
    pub(super) fn traps(&self) -> Arc<Traps> {
        Arc::clone(&self.traps.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether there are any.
    pub(super) fn is_trapping(&self) -> bool {
        self.trapping.load(Ordering::SeqCst)
    }

    /// Ends the guest. Only the first reason counts: the rest follows from it.
    pub(super) fn end(&self, exit: GuestExit) {
        self.life().exit.get_or_insert(exit);
        self.crew.end();
        // Full only when it is readable anyway.
        let _ = self.ended.write(1);
    }

    /// A vCPU thread has left.
    pub(super) fn left(&self) {
        self.life().threads -= 1;
        self.changed.notify_all();
    }

    /// How the guest ended, once it has and no vCPU touches its memory any more.
    pub(super) fn exit(&self) -> Option<GuestExit> {
        let life = self.life();
        if life.threads == 0 { life.exit.clone() } else { None }
    }

    /// Waits for that, at most `longest`.
    pub(super) fn wait(&self, longest: Option<Duration>) -> Option<GuestExit> {
        let deadline = longest.and_then(|longest| Instant::now().checked_add(longest));
        let mut life = self.life();
        while life.threads > 0 {
            life = match deadline {
                None => self.changed.wait(life).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.checked_duration_since(Instant::now())?;
                    let waited = self.changed.wait_timeout(life, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        life.exit.clone()
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
