//! The frames between the host and the agent in the lab: a type (1 byte), the payload's length
//! (4 bytes, little-endian), the payload. `guest/agent.c` has the other end.

use std::io::{self, Read, Write};

/// The longest payload that is taken in or sent, in bytes.
pub(super) const FRAME_MAX: usize = 1 << 20;

/// What the host asks of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request<'a> {
    /// Run a script, on a terminal of that many rows and columns or on pipes.
    Run { terminal: Option<(u16, u16)>, script: &'a str },
    /// Standard input for the script that runs; at most [`FRAME_MAX`] bytes.
    Input(&'a [u8]),
    /// The end of its standard input.
    EndOfInput,
    /// A signal for its process group.
    Signal(u8),
    /// Send that file.
    Get(&'a str),
}

/// What the agent tells the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Report {
    /// It takes requests.
    Ready,
    /// The script wrote to its standard output, or its terminal.
    Stdout(Vec<u8>),
    /// The script wrote to its standard error.
    Stderr(Vec<u8>),
    /// The script ended, with that status as a shell says it.
    Exit(u32),
    /// A piece of the file asked for.
    Data(Vec<u8>),
    /// The end of the file asked for, with an error number if it couldn't be read.
    EndOfFile(u32),
}

impl Request<'_> {
    /// Sends the request as one frame.
    pub(super) fn write_to(self, mut stream: impl Write) -> io::Result<()> {
        let (kind, payload) = match self {
            Request::Run { terminal, script } => {
                let (rows, columns) = terminal.unwrap_or_default();
                let mut payload = vec![u8::from(terminal.is_some())];
                payload.extend_from_slice(&rows.to_le_bytes());
                payload.extend_from_slice(&columns.to_le_bytes());
                payload.extend_from_slice(script.as_bytes());
                (b'R', payload)
            }
            Request::Input(bytes) => (b'I', bytes.to_vec()),
            Request::EndOfInput => (b'E', Vec::new()),
            Request::Signal(number) => (b'S', vec![number]),
            Request::Get(path) => (b'G', path.as_bytes().to_vec()),
        };
        let len = u32::try_from(payload.len())
            .ok()
            .filter(|_| payload.len() <= FRAME_MAX)
            .ok_or_else(|| io::Error::other(format!("a request of {} bytes", payload.len())))?;
        let mut frame = vec![kind];
        frame.extend_from_slice(&len.to_le_bytes());
        frame.extend_from_slice(&payload);
        stream.write_all(&frame)
    }
}

impl Report {
    /// Receives one frame; `None` at the end of the stream.
    pub(super) fn read_from(mut stream: impl Read) -> io::Result<Option<Self>> {
        let mut kind = [0];
        if stream.read(&mut kind)? == 0 {
            return Ok(None);
        }
        let mut len = [0; 4];
        stream.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > FRAME_MAX {
            return Err(malformed(kind[0], len));
        }
        let mut payload = vec![0; len];
        stream.read_exact(&mut payload)?;
        let number = |payload: Vec<u8>| {
            payload.try_into().map(u32::from_le_bytes).map_err(|_| malformed(kind[0], len))
        };
        Ok(Some(match kind[0] {
            b'r' => Report::Ready,
            b'o' => Report::Stdout(payload),
            b'e' => Report::Stderr(payload),
            b'x' => Report::Exit(number(payload)?),
            b'd' => Report::Data(payload),
            b'f' => Report::EndOfFile(number(payload)?),
            _ => return Err(malformed(kind[0], len)),
        }))
    }
}

fn malformed(kind: u8, len: usize) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the lab's agent sent a frame of type {kind:#04x} and {len} bytes"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_type_length_and_payload() {
        let mut sent = Vec::new();
        Request::Run { terminal: Some((24, 80)), script: "ls" }.write_to(&mut sent).unwrap();
        assert_eq!(sent, b"R\x07\0\0\0\x01\x18\0\x50\0ls");
        sent.clear();
        Request::Run { terminal: None, script: "" }.write_to(&mut sent).unwrap();
        assert_eq!(sent, b"R\x05\0\0\0\0\0\0\0\0");
        assert!(Request::Input(&vec![0; FRAME_MAX + 1]).write_to(&mut sent).is_err());
    }

    #[test]
    fn reports_are_read_one_by_one_to_the_end() {
        let mut stream = b"r\0\0\0\0o\x02\0\0\0hix\x04\0\0\0\x03\0\0\0".as_slice();
        let mut next = || Report::read_from(&mut stream).unwrap();
        assert_eq!(next(), Some(Report::Ready));
        assert_eq!(next(), Some(Report::Stdout(b"hi".to_vec())));
        assert_eq!(next(), Some(Report::Exit(3)));
        assert_eq!(next(), None);
    }

    #[test]
    fn a_malformed_report_is_an_error() {
        for frame in
            [b"x\x01\0\0\0\0".as_slice(), b"?\0\0\0\0", b"o\xff\xff\xff\xff", b"o\x05\0\0\0x"]
        {
            assert!(Report::read_from(frame).is_err(), "{frame:?}");
        }
    }
}
