//! The two ends of the guest's serial console: a sink for what it prints, a queue for what is
//! typed.
//!
//! vCPU threads never wait for the sink itself: they put bytes into a queue, which a thread of its
//! own empties. Should the sink be slower than the guest for long, the guest waits at the full
//! queue, except when its vCPU is wanted for a stop: then the byte is queued all the same, so that
//! a sink that is stuck does not make the guest impossible to stop.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The guest waits for the sink when so many bytes are queued.
const OUTPUT_QUEUE: usize = 64 << 10;

/// Bytes that come on top while vCPUs are wanted elsewhere are kept up to here, then counted as
/// lost.
const OUTPUT_LIMIT: usize = 2 * OUTPUT_QUEUE;

/// How often a vCPU that waits for the sink looks whether it is wanted elsewhere.
const OUTPUT_PATIENCE: Duration = Duration::from_millis(1);

/// Whoever types waits for the guest when so many bytes are queued.
const INPUT_QUEUE: usize = 4096;

/// A guest's serial console.
pub struct Console {
    output: Arc<Output>,
    input: ConsoleInput,
}

impl Console {
    /// A console that prints to `sink`, which may block: a thread of the console's own writes to
    /// it and flushes it.
    ///
    /// # Errors
    /// The host gives no more threads or file descriptors.
    pub fn new(sink: Box<dyn Write + Send>) -> io::Result<Self> {
        let output = Arc::new(Output::default());
        let queue = Arc::clone(&output);
        thread::Builder::new().name("console".into()).spawn(move || queue.serve(sink))?;
        let input = InputQueue {
            pending: Mutex::default(),
            room: Condvar::new(),
            filled: Condvar::new(),
            wake: wake_event()?,
        };
        Ok(Self { output, input: ConsoleInput(Arc::new(input)) })
    }

    /// The end to type at.
    #[must_use]
    pub fn input(&self) -> ConsoleInput {
        self.input.clone()
    }

    /// Waits until everything printed so far has reached the sink, at most `longest`; tells
    /// whether it has.
    #[must_use]
    pub fn drain(&self, longest: Duration) -> bool {
        self.output.drain(longest)
    }

    /// How many printed bytes never reached the sink, because it failed or was stuck for long.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.output.state().lost
    }

    pub(crate) fn output(&self) -> ConsoleOutput {
        ConsoleOutput(Arc::clone(&self.output))
    }

    /// The guest's ends, for an engine whose serial port is a stream.
    pub(crate) fn ends(&self) -> ConsoleEnds {
        ConsoleEnds { output: self.output(), input: TypedInput(Arc::clone(&self.input.0)) }
    }

    /// No more input is taken and whoever waits to give some is told.
    pub(crate) fn close_input(&self) {
        self.input.0.pending().closed = true;
        self.input.0.room.notify_all();
        self.input.0.filled.notify_all();
    }
}

/// The guest's ends of a console.
pub(crate) struct ConsoleEnds {
    pub(crate) output: ConsoleOutput,
    pub(crate) input: TypedInput,
}

/// What is typed, for one reader that waits for it.
pub(crate) struct TypedInput(Arc<InputQueue>);

impl TypedInput {
    /// Waits for something to be typed; `None` when there will be no more.
    pub(crate) fn take(&self) -> Option<Vec<u8>> {
        let mut pending = self.0.pending();
        while pending.bytes.is_empty() {
            if pending.closed {
                return None;
            }
            pending = self.0.filled.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
        let typed = std::mem::take(&mut pending.bytes).into();
        drop(pending);
        self.0.room.notify_all();
        Some(typed)
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").finish_non_exhaustive()
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.close_input();
        self.output.state().closed = true;
        self.output.filled.notify_all();
    }
}

/// What the guest has printed and the sink has not taken yet.
#[derive(Default)]
struct Output {
    state: Mutex<OutputState>,
    filled: Condvar,
    emptied: Condvar,
}

#[derive(Default)]
struct OutputState {
    queue: Vec<u8>,
    /// The console's thread is writing what it has taken out of the queue.
    writing: bool,
    broken: bool,
    closed: bool,
    lost: u64,
}

impl Output {
    fn state(&self) -> MutexGuard<'_, OutputState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, mut sink: Box<dyn Write + Send>) {
        let mut batch = Vec::new();
        loop {
            let mut state = self.state();
            while state.queue.is_empty() {
                if state.closed {
                    return;
                }
                state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            std::mem::swap(&mut state.queue, &mut batch);
            state.writing = true;
            let broken = state.broken;
            drop(state);
            self.emptied.notify_all();

            let failed = broken || sink.write_all(&batch).and_then(|()| sink.flush()).is_err();

            let mut state = self.state();
            if failed {
                state.broken = true;
                state.lost += batch.len() as u64;
            }
            state.writing = false;
            drop(state);
            self.emptied.notify_all();
            batch.clear();
        }
    }

    fn drain(&self, longest: Duration) -> bool {
        let deadline = Instant::now() + longest;
        let mut state = self.state();
        while state.writing || !state.queue.is_empty() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            let waited = self.emptied.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// The guest's end of the console's output.
pub(crate) struct ConsoleOutput(Arc<Output>);

impl ConsoleOutput {
    /// Waits until there is room for more output, or `is_wanted` says that the calling vCPU has to
    /// be elsewhere.
    pub(crate) fn wait_for_room(&self, is_wanted: impl Fn() -> bool) {
        let mut state = self.0.state();
        while state.queue.len() >= OUTPUT_QUEUE && !is_wanted() {
            let waited = self.0.emptied.wait_timeout(state, OUTPUT_PATIENCE);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Write for ConsoleOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.0.state();
        let taken = bytes.len().min(OUTPUT_LIMIT.saturating_sub(state.queue.len()));
        state.lost += (bytes.len() - taken) as u64;
        state.queue.extend_from_slice(&bytes[..taken]);
        drop(state);
        self.0.filled.notify_one();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where a guest's console is typed at, from any thread.
///
/// Writing waits while the guest is behind, loses nothing, and fails with
/// [`BrokenPipe`](io::ErrorKind::BrokenPipe) once the guest has ended.
#[derive(Clone)]
pub struct ConsoleInput(pub(super) Arc<InputQueue>);

impl ConsoleInput {
    /// Takes what there is room for and tells how much that was, without waiting.
    ///
    /// # Errors
    /// `BrokenPipe` if the guest has ended.
    pub fn try_send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.0.offer(self.0.pending(), bytes)
    }
}

impl Write for ConsoleInput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut pending = self.0.pending();
        while pending.bytes.len() >= INPUT_QUEUE && !pending.closed {
            pending = self.0.room.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
        self.0.offer(pending, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for ConsoleInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleInput").finish_non_exhaustive()
    }
}

/// What was typed and the UART has not taken yet.
pub(super) struct InputQueue {
    pending: Mutex<Pending>,
    room: Condvar,
    filled: Condvar,
    /// Readable when the UART should be offered more: something was typed, or it has room again.
    pub(super) wake: EventFd,
}

#[derive(Default)]
struct Pending {
    bytes: VecDeque<u8>,
    closed: bool,
}

impl InputQueue {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn offer(&self, mut pending: MutexGuard<'_, Pending>, bytes: &[u8]) -> io::Result<usize> {
        if pending.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let taken = bytes.len().min(INPUT_QUEUE.saturating_sub(pending.bytes.len()));
        pending.bytes.extend(&bytes[..taken]);
        drop(pending);
        self.filled.notify_one();
        // Full only when the reader has 2^64 wake-ups to go: then it is not asleep.
        let _ = self.wake.write(1);
        Ok(taken)
    }

    /// Offers what is pending to `take`, which tells how many bytes of it are gone.
    pub(super) fn feed(&self, take: impl FnOnce(&[u8]) -> usize) {
        let mut pending = self.pending();
        let taken = take(pending.bytes.make_contiguous());
        pending.bytes.drain(..taken);
        drop(pending);
        if taken > 0 {
            self.room.notify_all();
        }
    }
}

pub(super) fn wake_event() -> io::Result<EventFd> {
    EventFd::new(EFD_NONBLOCK)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Takes nothing until told.
    struct Stuck(mpsc::Receiver<()>, Arc<Mutex<Vec<u8>>>);

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if let Ok(()) = self.0.recv() {}
            self.1.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_stuck_sink_holds_the_guest_up_but_not_a_vcpu_that_is_wanted() {
        let (release, gate) = mpsc::channel();
        let printed = Arc::new(Mutex::new(Vec::new()));
        let console = Console::new(Box::new(Stuck(gate, Arc::clone(&printed)))).unwrap();
        let mut output = console.output();

        output.write_all(b"x").unwrap();
        while !console.output.state().writing {
            thread::yield_now();
        }
        output.write_all(&vec![b'y'; OUTPUT_QUEUE]).unwrap();
        output.wait_for_room(|| true);
        output.write_all(b"z").unwrap();
        assert!(!console.drain(Duration::from_millis(20)), "the sink has not taken anything yet");

        thread::scope(|scope| {
            let waiting = scope.spawn(|| console.output().wait_for_room(|| false));
            thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished(), "there is no room and nobody wants the vCPU");
            drop(release);
            waiting.join().unwrap();
        });
        assert!(console.drain(Duration::from_secs(10)));
        let printed = printed.lock().unwrap();
        assert_eq!(printed.len(), OUTPUT_QUEUE + 2);
        assert_eq!((printed[0], printed.last()), (b'x', Some(&b'z')));
        assert_eq!(console.lost(), 0);
    }

    #[test]
    fn what_a_broken_sink_does_not_take_is_counted() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let console = Console::new(Box::new(Broken)).unwrap();
        console.output().write_all(b"hello").unwrap();
        assert!(console.drain(Duration::from_secs(10)));
        assert_eq!(console.lost(), 5);
    }

    #[test]
    fn typing_waits_for_the_guest_and_ends_with_it() {
        let console = Console::new(Box::new(io::sink())).unwrap();
        let mut input = console.input();
        assert_eq!(input.try_send(&[b'a'; 5000]).unwrap(), INPUT_QUEUE);
        assert_eq!(input.try_send(b"b").unwrap(), 0);

        thread::scope(|scope| {
            let typing = scope.spawn(|| console.input().write_all(&[b'b'; 3]));
            thread::sleep(Duration::from_millis(20));
            assert!(!typing.is_finished());
            console.input.0.feed(|bytes| bytes.len().min(2));
            thread::sleep(Duration::from_millis(20));
            assert!(!typing.is_finished(), "one byte is still without room");
            console.input.0.feed(|bytes| bytes.len());
            typing.join().unwrap().unwrap();
        });
        let reader = console.ends().input;
        input.write_all(b"xyz").unwrap();
        assert_eq!(reader.take().as_deref(), Some(&b"bxyz"[..]), "behind what was typed before");
        console.close_input();
        assert_eq!(reader.take(), None);
        assert_eq!(input.write(b"c").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
