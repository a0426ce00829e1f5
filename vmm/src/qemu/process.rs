//! The QEMU process: started with its sockets, never left behind.
#![allow(unsafe_code)]

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{
    Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal, set_parent_process_death_signal,
};

/// What QEMU says last is kept, up to so many bytes.
const SAID_LIMIT: usize = 2048;

/// A handle on the process that never means another one.
#[derive(Debug)]
pub(super) struct Handle(OwnedFd);

impl Handle {
    /// Ends the process, at once and whatever it does.
    pub(super) fn kill(&self) {
        // It fails if the process has ended.
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }
}

/// Starts `command` so that it inherits `fds` under their numbers and dies with the calling thread.
///
/// # Errors
/// What the host says.
pub(super) fn spawn(mut command: Command, fds: &[BorrowedFd<'_>]) -> io::Result<(Child, Handle)> {
    let numbers: Vec<RawFd> = fds.iter().map(std::os::fd::AsRawFd::as_raw_fd).collect();
    // Keys like Ctrl-C on the terminal are for this program alone.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let parent = rustix::process::getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::other("its parent has ended"));
        }
        for &number in &numbers {
            // SAFETY: the parent keeps these open until the child has been started.
            let fd = unsafe { BorrowedFd::borrow_raw(number) };
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec it only makes system calls; the one allocation is that of an
    // error for a parent that is dead.
    unsafe { command.pre_exec(prepare) };
    let mut child = command.spawn()?;
    let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    match handle {
        Ok(handle) => Ok((child, Handle(handle))),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error.into())
        }
    }
}

/// Reads what a process says until its end, and keeps the last of it.
pub(super) fn last_words(mut from: impl Read + AsFd) -> String {
    let mut said = Vec::new();
    let mut some = [0; 512];
    loop {
        match from.read(&mut some) {
            Ok(0) => break,
            Ok(length) => {
                said.extend_from_slice(&some[..length]);
                let excess = said.len().saturating_sub(SAID_LIMIT);
                said.drain(..excess);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&said).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// How the process ended, in words.
pub(super) fn ended(status: ExitStatus, said: &str) -> String {
    let how = match (status.code(), status.signal()) {
        (_, Some(signal)) => format!("it was ended by signal {signal}"),
        (Some(code), _) => format!("it ended with status {code}"),
        _ => "it ended".to_owned(),
    };
    if said.is_empty() { how } else { format!("{how} and said: {said}") }
}
