//! Writes the run's own trace in a thread of its own: whoever reads it, and takes his time, holds up
//! neither the rings nor anybody else's trace.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use patcher::trace::sink::Sink;
use vmm::control::{Fed, Feed, Names, Outbox};

use crate::cli::output::{FunctionTime, Records};
use crate::cli::summary;

/// How long it is waited for calls at a time.
const PATIENCE: Duration = Duration::from_secs(1);

/// The thread.
#[derive(Debug)]
pub struct Writer(JoinHandle<(io::Result<()>, Vec<FunctionTime>)>);

impl Writer {
    /// Writes what is put into the outbox to `records`, which have begun; calls tell what their CPU was
    /// in the middle of if `contexts` says so.
    ///
    /// # Errors
    /// The thread can't be had.
    pub fn start(records: Records, contexts: bool) -> io::Result<(Self, Outbox)> {
        let (outbox, feed) = Outbox::new();
        let thread = thread::Builder::new().name("trace-writer".into()).spawn(move || {
            let mut records = records;
            let written = write(&mut records, &feed, Names::new(contexts));
            (written, records.times(summary::TOP))
        })?;
        Ok((Self(thread), outbox))
    }

    /// Waits until all is written that was put in, and tells whether it could be and which functions
    /// took most time.
    pub fn finish(self) -> (io::Result<()>, Vec<FunctionTime>) {
        self.0.join().unwrap_or_else(|_| {
            (Err(io::Error::other("the thread that writes has panicked")), Vec::new())
        })
    }
}

fn write(records: &mut Records, feed: &Feed, mut names: Names) -> io::Result<()> {
    let (mut events, mut missed) = (0, 0);
    loop {
        match feed.next(PATIENCE) {
            Fed::Batch(mut batch) => {
                names.learn(&mut batch.header);
                missed = batch.header.missed;
                let mut written = Ok(());
                // What our own outbox sends refers to names that it has sent.
                names.events(&batch.header, &batch.calls, |event| {
                    if written.is_ok() {
                        written = records.event(event);
                        events += 1;
                    }
                });
                written.and_then(|()| records.flush())?;
            }
            Fed::Counted(counted) => records.counted(&counted)?,
            Fed::Measured(measured) => records.measured(&measured)?,
            Fed::End(end) => {
                return records.end(end.totals.events, end.totals.entries());
            }
            Fed::Nothing => {}
            // What there is until now is worth having.
            Fed::Gone => return records.end(events, events + missed),
        }
    }
}
