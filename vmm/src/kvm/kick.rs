//! How a vCPU thread is made to leave KVM_RUN, or not to enter it.
//!
//! Two things are needed, and both are always done. A signal ends a KVM_RUN that has begun. It is
//! lost when it arrives just before, and for that KVM has `immediate_exit`, a byte shared with the
//! kernel that makes the next KVM_RUN return at once.
#![allow(unsafe_code)]

use std::io;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use kvm_bindings::kvm_run;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler, unblock_signal};

/// The other threads' handle on one vCPU thread.
pub(super) struct Kick {
    /// A mapping of the vCPU's shared page of our own. The one inside `VcpuFd` is borrowed mutably
    /// by its thread all the time and is gone when that thread ends.
    page: NonNull<u8>,
    len: usize,
    /// Kernel thread id, 0 until the thread has entered [`Kick::enlist`].
    thread: AtomicI32,
}

// SAFETY: the mapping lives as long as the value, and only its immediate_exit byte is accessed,
// as an atomic.
unsafe impl Send for Kick {}
// SAFETY: as above.
unsafe impl Sync for Kick {}

impl Kick {
    /// Maps the shared page of `vcpu`, which is `len` bytes long.
    pub(super) fn new(vcpu: &impl AsRawFd, len: usize) -> io::Result<Self> {
        install_handler()?;
        if len < size_of::<kvm_run>() {
            return Err(io::Error::other(format!("KVM offers a vCPU page of only {len} bytes")));
        }
        // SAFETY: asks for a new mapping at an address that the kernel chooses.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(page.cast::<u8>()) {
            Some(bytes) if page != libc::MAP_FAILED => {
                Ok(Self { page: bytes, len, thread: AtomicI32::new(0) })
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Called by the vCPU thread before it first looks at its orders: from here on signals find it.
    pub(super) fn enlist(&self) {
        // The thread that built the machine may have had the signal blocked, and that is inherited.
        // Fails only for a number that is no signal.
        let _ = unblock_signal(SIGRTMIN());
        // SAFETY: gettid takes nothing and cannot fail.
        self.thread.store(unsafe { libc::gettid() }, Ordering::SeqCst);
    }

    /// Called by the vCPU thread when it will not enter KVM_RUN any more.
    pub(super) fn discharge(&self) {
        self.thread.store(0, Ordering::SeqCst);
    }

    /// Whether the next KVM_RUN returns at once.
    pub(super) fn set_immediate_exit(&self, on: bool) {
        let byte = self.page.as_ptr().wrapping_add(offset_of!(kvm_run, immediate_exit));
        // SAFETY: the byte lies within the mapping (checked in `new`), and in this process nothing
        // but this function accesses it.
        unsafe { AtomicU8::from_ptr(byte) }.store(u8::from(on), Ordering::SeqCst);
    }

    /// Makes the thread leave KVM_RUN, or return from the one that it is about to enter.
    pub(super) fn kick(&self) {
        self.set_immediate_exit(true);
        let thread = self.thread.load(Ordering::SeqCst);
        if thread != 0 {
            // SAFETY: takes three integers. Should the thread have ended meanwhile, the id names
            // nothing, or a newer thread of this process, to which the signal means nothing.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGRTMIN()) };
        }
    }
}

impl Drop for Kick {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` and no reference into it outlives `self`.
        unsafe { libc::munmap(self.page.as_ptr().cast(), self.len) };
    }
}

/// The kick signal needs a handler that does nothing: ignored signals do not interrupt KVM_RUN, and
/// the default action ends the process.
fn install_handler() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| result = register_signal_handler(SIGRTMIN(), nothing));
    result.map_err(io::Error::from)
}
