//! Where events go once they have names and an order.

use std::io::{self, Seek, SeekFrom, Write};
use std::ops::Deref;

/// The name of a function, and a number that stands for nothing else in the same trace. A name may
/// have several numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name<'a> {
    /// The number.
    pub id: u64,
    /// The name.
    pub text: &'a str,
}

impl Deref for Name<'_> {
    type Target = str;
    fn deref(&self) -> &str {
        self.text
    }
}

/// One traced call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// Nanoseconds since the guest's time-stamp clock read zero.
    pub time_ns: u64,
    /// On which CPU it began.
    pub cpu: u16,
    /// The function that was called.
    pub function: Name<'a>,
    /// The function that called it.
    pub caller: Name<'a>,
}

/// Takes events in the order of their time.
pub trait Sink {
    /// Begins a trace of a guest with `cpus` CPUs.
    ///
    /// # Errors
    /// What writing says.
    fn begin(&mut self, cpus: usize) -> io::Result<()>;

    /// Takes one event.
    ///
    /// # Errors
    /// What writing says. [`io::ErrorKind::WouldBlock`] means that there is no room for this one:
    /// it is counted as dropped, and the next one is tried.
    fn event(&mut self, event: &Event<'_>) -> io::Result<()>;

    /// Lets a reader see everything up to now.
    ///
    /// # Errors
    /// What writing says.
    fn flush(&mut self) -> io::Result<()>;

    /// Ends the trace: `written` events are in it, out of `entries` that there were.
    ///
    /// # Errors
    /// What writing says.
    fn end(&mut self, written: u64, entries: u64) -> io::Result<()>;
}

/// The text of tracefs' `trace` file with the `function` tracer, as it is with the option
/// `irq-info` off: interrupt state and preemption depth are not recorded, and neither is the task,
/// which is shown as one whose name was never recorded.
///
/// The formats are those of `print_func_help_header`, `trace_print_context` and `print_fn_trace` in
/// the kernel's `kernel/trace/`.
pub struct FtraceText<W: Write> {
    out: W,
    line: Vec<u8>,
    cpus: usize,
    /// How the header is put right at the end, where the output can be sought.
    rewrite: Option<Rewrite<W>>,
}

/// Writes a header over the one at the beginning of an output, and goes back to its end.
type Rewrite<W> = fn(&mut W, &[u8]) -> io::Result<()>;

/// Events are written out when this many bytes of text have come together.
const BUFFER: usize = 256 << 10;

impl<W: Write> FtraceText<W> {
    /// Text to something that is only appended to; its header can't tell how many events follow.
    pub fn stream(out: W) -> Self {
        Self { out, line: Vec::with_capacity(BUFFER + 512), cpus: 0, rewrite: None }
    }

    /// The header. Two counts of 20 digits take the same room as any other.
    fn header(&self, written: u64, entries: u64) -> String {
        let counts = format!("{written}/{entries}   #P:{}", self.cpus);
        let counts = if self.rewrite.is_some() { format!("{counts:<50}") } else { counts };
        format!(
            "# tracer: function\n#\n# entries-in-buffer/entries-written: {counts}\n#\n\
             #           TASK-PID     CPU#     TIMESTAMP  FUNCTION\n\
             #              | |         |         |         |\n"
        )
    }

    fn write_out(&mut self) -> io::Result<()> {
        let result = self.out.write_all(&self.line);
        self.line.clear();
        result
    }
}

impl<W: Write + Seek> FtraceText<W> {
    /// Text to a file; the counts in its header are put right at the end.
    pub fn file(out: W) -> Self {
        let rewrite = |out: &mut W, header: &[u8]| {
            out.seek(SeekFrom::Start(0))?;
            out.write_all(header)?;
            out.seek(SeekFrom::End(0)).map(drop)
        };
        Self { rewrite: Some(rewrite), ..Self::stream(out) }
    }
}

impl<W: Write> Sink for FtraceText<W> {
    fn begin(&mut self, cpus: usize) -> io::Result<()> {
        self.cpus = cpus;
        let header = self.header(0, 0);
        self.line.extend_from_slice(header.as_bytes());
        self.flush()
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        let line = &mut self.line;
        // "%16s-%-7d [%03d]  %5lu.%06lu: %s <-%s"
        line.extend_from_slice(b"           <...>-0       [");
        decimal(line, u64::from(event.cpu), 3, b'0');
        line.extend_from_slice(b"] ");
        let microseconds = event.time_ns / 1000;
        line.push(b' ');
        decimal(line, microseconds / 1_000_000, 5, b' ');
        line.push(b'.');
        decimal(line, microseconds % 1_000_000, 6, b'0');
        line.extend_from_slice(b": ");
        line.extend_from_slice(event.function.as_bytes());
        line.extend_from_slice(b" <-");
        line.extend_from_slice(event.caller.as_bytes());
        line.push(b'\n');
        if line.len() >= BUFFER { self.write_out() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_out()?;
        self.out.flush()
    }

    fn end(&mut self, written: u64, entries: u64) -> io::Result<()> {
        self.flush()?;
        if let Some(rewrite) = self.rewrite {
            let header = self.header(written, entries);
            rewrite(&mut self.out, header.as_bytes())?;
        }
        self.out.flush()
    }
}

/// Appends a decimal number at least `width` wide; `write!` would take most of the time that an
/// event costs.
fn decimal(line: &mut Vec<u8>, mut value: u64, width: usize, pad: u8) {
    let mut digits = [0_u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    let len = digits.len() - at;
    line.resize(line.len() + width.saturating_sub(len), pad);
    line.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn event(
        time_ns: u64,
        cpu: u16,
        function: &'static str,
        caller: &'static str,
    ) -> Event<'static> {
        let (function, caller) = (Name { id: 0, text: function }, Name { id: 1, text: caller });
        Event { time_ns, cpu, function, caller }
    }

    const EVENTS: [Event<'static>; 2] = [
        event(7_754_083_999, 1, "vfs_read", "ksys_read"),
        event(123_456_000_001_000, 12, "f", "0xffffffffc0001234"),
    ];

    fn trace<W: Write>(sink: &mut FtraceText<W>) {
        sink.begin(2).unwrap();
        EVENTS.iter().for_each(|event| sink.event(event).unwrap());
        sink.end(2, 5).unwrap();
    }

    #[test]
    fn a_stream_is_what_tracefs_prints() {
        let mut sink = FtraceText::stream(Vec::new());
        trace(&mut sink);
        assert_eq!(
            String::from_utf8(sink.out).unwrap(),
            "\
# tracer: function
#
# entries-in-buffer/entries-written: 0/0   #P:2
#
#           TASK-PID     CPU#     TIMESTAMP  FUNCTION
#              | |         |         |         |
           <...>-0       [001]      7.754083: vfs_read <-ksys_read
           <...>-0       [012]  123456.000001: f <-0xffffffffc0001234
"
        );
    }

    #[test]
    fn a_files_header_tells_how_many_events_there_are() {
        let mut sink = FtraceText::file(io::Cursor::new(Vec::new()));
        trace(&mut sink);
        let text = String::from_utf8(sink.out.into_inner()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2].trim_end(), "# entries-in-buffer/entries-written: 2/5   #P:2");
        assert_eq!(lines.len(), 8);
        assert!(lines[6].starts_with("           <...>-0       [001]      7.754083: vfs_read"));
    }

    #[test]
    fn what_can_not_be_written_is_an_error_and_not_kept() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut sink = FtraceText::stream(Full);
        assert_eq!(sink.begin(1).unwrap_err().kind(), io::ErrorKind::StorageFull);
        sink.event(&EVENTS[0]).unwrap();
        assert_eq!(sink.flush().unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(sink.line.is_empty());
    }
}
