//! The way to the gdbstub of a QEMU that somebody else has started.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::QmpError;
use super::attach::AttachError;
use super::qmp::Commander;

/// The name of what we make in QEMU: a character device, and the descriptor that it is made of.
const OURS: &str = "vmm-gdb";

/// The way to QEMU's gdbstub, and what has to be undone of it.
pub(super) struct Stub {
    monitor: Mutex<Commander>,
    /// We have started it.
    ours: bool,
    /// It need not be left any more.
    left: bool,
}

impl Stub {
    /// Connects to the gdbstub, which stops the guest, or starts one.
    ///
    /// # Errors
    /// It is in use, or what QEMU or the host says.
    pub(super) fn open(monitor: Commander) -> Result<(Self, UnixStream), AttachError> {
        let mut stub = Self { monitor: Mutex::new(monitor), ours: false, left: false };
        let devices = stub.say("query-chardev", &Value::Null)?;
        let name_of = |device: &Value, key: &str| {
            device.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let devices = devices.as_array().map(Vec::as_slice).unwrap_or_default();
        let named = |label: &str| devices.iter().find(|device| name_of(device, "label") == label);
        if named(OURS).is_some() {
            // A vmm that was killed has left it, with nobody at the other end.
            stub.human("gdbserver none")?;
        } else if let Some(theirs) = named("gdb") {
            let address = name_of(theirs, "filename");
            let address = address.strip_prefix("disconnected:").ok_or(AttachError::Debugged)?;
            let socket = connect(address).map_err(|source| AttachError::SetUp {
                step: "connect to QEMU's gdbstub",
                source,
            })?;
            return Ok((stub, socket));
        }
        let pair = UnixStream::pair();
        let (ours, theirs) =
            pair.map_err(|source| AttachError::SetUp { step: "make sockets", source })?;
        stub.monitor().give(theirs.as_fd(), OURS)?;
        let address = json!({ "type": "fd", "data": { "str": OURS } });
        let socket = json!({ "addr": address, "server": false });
        let backend = json!({ "type": "socket", "data": socket });
        stub.say("chardev-add", &json!({ "id": OURS, "backend": backend }))?;
        stub.ours = true;
        stub.human(&format!("gdbserver chardev:{OURS}"))?;
        Ok((stub, ours))
    }

    fn monitor(&self) -> MutexGuard<'_, Commander> {
        self.monitor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, command: &'static str, arguments: &Value) -> Result<Value, QmpError> {
        self.monitor().execute(command, arguments)
    }

    fn human(&self, line: &str) -> Result<Value, QmpError> {
        self.say("human-monitor-command", &json!({ "command-line": line }))
    }

    /// Has the guest run, whatever the gdbstub made of it.
    ///
    /// # Errors
    /// What the monitor says.
    pub(super) fn set_going(&self) -> Result<(), QmpError> {
        self.say("cont", &Value::Null).map(drop)
    }

    /// Ends the gdbstub if we have started it. The guest runs.
    pub(super) fn close(&mut self) {
        self.left = true;
        if std::mem::take(&mut self.ours) {
            // QEMU may be gone. A gdbstub that nobody can reach does no harm.
            let _ = self.human("gdbserver none");
        }
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        if !self.left {
            // What could not be taken over stands, as its gdbstub has, or had, a client.
            self.close();
            let _ = self.set_going();
        }
    }
}

/// Connects to a character device of QEMU's that listens, by its description.
fn connect(description: &str) -> io::Result<UnixStream> {
    let address = description.split(',').next().unwrap_or_default();
    if let Some(path) = address.strip_prefix("unix:") {
        return UnixStream::connect(path);
    }
    let Some(address) = address.strip_prefix("tcp:") else {
        return Err(io::Error::other(format!("it is {description}, neither unix: nor tcp:")));
    };
    let socket = TcpStream::connect(address)?;
    socket.set_nodelay(true)?;
    // From here on one stream socket is like the other.
    Ok(OwnedFd::from(socket).into())
}
