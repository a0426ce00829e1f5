//! Lines and bytes on a socket, with bounds on their length and on the time they take.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long one system call waits at most.
const TICK: Duration = Duration::from_millis(50);

/// Bytes read at once.
const CHUNK: usize = 64 << 10;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Wire {
    stream: UnixStream,
    /// What was read and not yet taken, from `taken` on.
    buffer: Vec<u8>,
    taken: usize,
    ended: bool,
}

/// Nothing can be read, or written, for a reason that is not the peer's fault alone.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    /// The peer has closed the connection.
    #[error("the connection was closed")]
    Closed,
    /// The peer has closed it within a message.
    #[error("the connection was closed in the middle of a message")]
    Cut,
    /// It took too long.
    #[error("nothing was said for too long")]
    TimedOut,
    /// A line is longer than it may be.
    #[error("a line is longer than {limit} bytes")]
    TooLong { limit: usize },
    /// A line is not what was expected.
    #[error("a line is no message: {0}")]
    Malformed(serde_json::Error),
    /// A line is a message, for another moment.
    #[error("this message has no meaning at this moment")]
    Unexpected,
    /// The socket fails.
    #[error("the connection failed: {0}")]
    Io(io::Error),
}

impl Wire {
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(TICK))?;
        Ok(Self { stream, buffer: Vec::new(), taken: 0, ended: false })
    }

    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Waits a moment at most for more to read.
    fn fill(&mut self) -> Result<(), WireError> {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        let before = self.buffer.len();
        self.buffer.resize(before + CHUNK, 0);
        let read = self.stream.read(&mut self.buffer[before..]);
        self.buffer.truncate(before + *read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => self.ended = true,
            Ok(_) => {}
            Err(error) if is_a_wait(&error) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => self.ended = true,
            Err(error) => return Err(WireError::Io(error)),
        }
        Ok(())
    }

    /// The next message if all of it is there.
    fn next_in_buffer<T: DeserializeOwned>(
        &mut self,
        limit: usize,
    ) -> Result<Option<T>, WireError> {
        let rest = &self.buffer[self.taken..];
        match rest.iter().take(limit + 1).position(|byte| *byte == b'\n') {
            Some(length) => {
                let message = serde_json::from_slice(&rest[..length]);
                self.taken += length + 1;
                message.map(Some).map_err(WireError::Malformed)
            }
            None if rest.len() > limit => Err(WireError::TooLong { limit }),
            None if self.ended && rest.is_empty() => Err(WireError::Closed),
            None if self.ended => Err(WireError::Cut),
            None => Ok(None),
        }
    }

    /// Reads a message of at most `limit` bytes that comes before `until`, unless `stop` says that it
    /// is not wanted any more.
    pub fn read<T: DeserializeOwned>(
        &mut self,
        limit: usize,
        until: Option<Instant>,
        stop: impl Fn() -> bool,
    ) -> Result<T, WireError> {
        loop {
            if let Some(message) = self.next_in_buffer(limit)? {
                return Ok(message);
            }
            if stop() || until.is_some_and(|until| Instant::now() >= until) {
                return Err(WireError::TimedOut);
            }
            self.fill()?;
        }
    }

    /// A message that is there already, without waiting for one.
    pub fn poll<T: DeserializeOwned>(&mut self, limit: usize) -> Result<Option<T>, WireError> {
        if let Some(message) = self.next_in_buffer(limit)? {
            return Ok(Some(message));
        }
        self.stream.set_nonblocking(true).map_err(WireError::Io)?;
        let filled = self.fill();
        self.stream.set_nonblocking(false).map_err(WireError::Io)?;
        filled?;
        self.next_in_buffer(limit)
    }

    /// Reads exactly `length` bytes, which the caller has bounded.
    pub fn read_bytes(&mut self, length: usize) -> Result<&[u8], WireError> {
        while self.buffer.len() - self.taken < length {
            if self.ended {
                return Err(WireError::Cut);
            }
            self.fill()?;
        }
        let bytes = &self.buffer[self.taken..self.taken + length];
        self.taken += length;
        Ok(bytes)
    }

    /// Takes exactly `length` bytes, which the caller has bounded, until `until`, unless `stop` says
    /// that they are not wanted any more. Memory is taken as they come.
    pub fn take_bytes(
        &mut self,
        length: usize,
        until: Instant,
        stop: impl Fn() -> bool,
    ) -> Result<Vec<u8>, WireError> {
        let mut bytes = Vec::new();
        loop {
            let here = self.buffer.len() - self.taken;
            let now = here.min(length - bytes.len());
            bytes.extend_from_slice(&self.buffer[self.taken..self.taken + now]);
            self.taken += now;
            if bytes.len() == length {
                return Ok(bytes);
            }
            if self.ended {
                return Err(WireError::Cut);
            }
            if stop() || Instant::now() >= until {
                return Err(WireError::TimedOut);
            }
            self.fill()?;
        }
    }

    /// Writes all of `bytes`. Each time the peer has taken nothing for a moment, `waiting` is asked
    /// whether to go on.
    pub fn write(
        &mut self,
        bytes: &[u8],
        mut waiting: impl FnMut(&mut Self) -> Result<(), WireError>,
    ) -> Result<(), WireError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(0) => return Err(WireError::Closed),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_a_wait(&error) => waiting(self)?,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
                    ) =>
                {
                    return Err(WireError::Closed);
                }
                Err(error) => return Err(WireError::Io(error)),
            }
        }
        Ok(())
    }

    /// Writes a message, for which the peer has until `until`.
    pub fn send(&mut self, message: &impl Serialize, until: Instant) -> Result<(), WireError> {
        self.write(&line(message), |_| match Instant::now() < until {
            true => Ok(()),
            false => Err(WireError::TimedOut),
        })
    }
}

/// A message as a line.
pub(super) fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("messages have nothing that JSON lacks");
    line.push(b'\n');
    line
}

fn is_a_wait(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
