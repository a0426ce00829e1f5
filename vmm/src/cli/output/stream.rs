//! Writing to what may take its time.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::PIPE_BUF;

/// How long whoever reads the trace may stand in the way of its end.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often a reader that takes nothing is asked again.
const ASK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Where what is written goes.
pub enum Out {
    /// A regular file.
    File(File),
    /// A pipe, a terminal, a device.
    Stream(Stream),
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.write(bytes),
            Self::Stream(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::File(file) => file.flush(),
            Self::Stream(stream) => stream.flush(),
        }
    }
}

/// A file that may take nothing for as long as it pleases.
pub struct Stream {
    /// What it is.
    pub out: File,
    /// Once this is set, it is not waited for much longer.
    pub stop: Arc<AtomicBool>,
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stopped = None;
        loop {
            let mut ready = [PollFd::new(&self.out, PollFlags::OUT)];
            match poll(&mut ready, Some(&ASK)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => break,
                Err(error) => return Err(error.into()),
            }
            if self.stop.load(Ordering::SeqCst) {
                let since = *stopped.get_or_insert_with(Instant::now);
                if since.elapsed() >= PATIENCE {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "its reader takes nothing",
                    ));
                }
            }
        }
        // A pipe that is ready takes that much at once; more might be waited for.
        self.out.write(&bytes[..bytes.len().min(PIPE_BUF)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::thread;

    use super::*;

    #[test]
    fn a_reader_that_takes_nothing_does_not_hold_up_the_end() {
        let (mut reader, writer) = io::pipe().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let out = File::from(std::os::fd::OwnedFd::from(writer));
        let mut stream = Stream { out, stop: Arc::clone(&stop) };
        thread::scope(|scope| {
            let writing = scope.spawn(|| {
                let result = stream.write_all(&[b'x'; 1 << 20]);
                drop(stream);
                result
            });
            stop.store(true, Ordering::SeqCst);
            assert_eq!(writing.join().unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        });
        let mut taken = vec![];
        reader.read_to_end(&mut taken).unwrap();
        assert!(!taken.is_empty() && taken.len() < 1 << 20);
    }

    #[test]
    fn a_reader_that_is_gone_is_a_broken_pipe() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let out = File::from(std::os::fd::OwnedFd::from(writer));
        let error = Stream { out, stop: Arc::default() }.write(b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
