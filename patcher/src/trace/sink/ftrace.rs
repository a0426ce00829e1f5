//! The text of tracefs.

use std::io::{self, Seek, SeekFrom, Write};

use super::super::context::UNKNOWN;
use super::graph_text::GraphLines;
use super::{
    Beginning, Event, EventKind, Gathered, GraphColumns, Sink, Tracer, Values, decimal, no_such_cpu,
};

/// The text of tracefs' `trace` file with the `function` tracer, or with `function_graph` if the trace tells
/// of returns. Of a trace whose events have no [`Context`](crate::trace::context::Context) it is what
/// tracefs shows with the option `irq-info` off; a task that is not known is shown as one whose name was
/// never recorded.
///
/// The formats are those of `print_func_help_header`, `print_func_help_header_irq`,
/// `trace_print_context`, `trace_print_lat_fmt` and `print_fn_trace` in the kernel's `kernel/trace/`
/// as of 5.19. Up to 5.14 a kernel's own text lacks the column `migrate-disable`, and up to 5.17 the
/// letters of a CPU whose bottom halves are off; here they are the same for guests of all versions.
pub struct FtraceText<W: Write> {
    text: Gathered<W>,
    tracer: Tracer,
    graph: GraphLines,
    cpus: usize,
    contexts: bool,
    /// How the header is put right at the end, where the output can be sought.
    rewrite: Option<Rewrite<W>>,
}

/// Writes a header over the one at the beginning of an output, and goes back to its end.
type Rewrite<W> = fn(&mut W, &[u8]) -> io::Result<()>;

/// Names of the columns, without the option `irq-info`.
const COLUMNS: &str = "\
#           TASK-PID     CPU#     TIMESTAMP  FUNCTION
#              | |         |         |         |
";

/// Names of the columns, with the option `irq-info`.
const COLUMNS_WITH_CONTEXT: &str = "\
#                                _-----=> irqs-off/BH-disabled
#                               / _----=> need-resched
#                              | / _---=> hardirq/softirq
#                              || / _--=> preempt-depth
#                              ||| / _-=> migrate-disable
#                              |||| /     delay
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
#              | |         |   |||||     |         |
";

impl<W: Write> FtraceText<W> {
    /// Text to something that is only appended to; its header can't tell how many events follow.
    pub fn stream(out: W) -> Self {
        let graph = GraphLines::new(GraphColumns::default(), true);
        let (text, tracer) = (Gathered::new(out), Tracer::Function);
        Self { text, tracer, graph, cpus: 0, contexts: false, rewrite: None }
    }

    /// The same with more columns, where the trace tells of returns.
    #[must_use]
    pub fn with_columns(self, columns: GraphColumns) -> Self {
        Self { graph: GraphLines::new(columns, self.rewrite.is_none()), ..self }
    }

    /// The header. Two counts of 20 digits take the same room as any other.
    fn header(&self, written: u64, entries: u64) -> String {
        let counts = format!("{written}/{entries}   #P:{}", self.cpus);
        let counts = if self.rewrite.is_some() { format!("{counts:<50}") } else { counts };
        let columns = if self.contexts { COLUMNS_WITH_CONTEXT } else { COLUMNS };
        format!(
            "# tracer: function\n#\n# entries-in-buffer/entries-written: {counts}\n#\n{columns}"
        )
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
        let file = Self { rewrite: Some(rewrite), ..Self::stream(out) };
        file.with_columns(GraphColumns::default())
    }
}

impl<W: Write> Sink for FtraceText<W> {
    fn begin(&mut self, beginning: &Beginning<'_>) -> io::Result<()> {
        (self.cpus, self.contexts) = (beginning.cpus, beginning.contexts);
        self.tracer = beginning.tracer;
        if self.tracer == Tracer::Graph {
            self.graph.begin(beginning, &mut self.text.bytes);
            return self.flush();
        }
        let header = self.header(0, 0);
        self.text.bytes.extend_from_slice(header.as_bytes());
        self.flush()
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        if event.kind != EventKind::Call {
            if usize::from(event.cpu) >= self.cpus {
                return Err(no_such_cpu(event.cpu, self.cpus));
            }
            self.graph.event(event, &mut self.text.bytes);
            return self.text.write_many();
        }
        let line = &mut self.text.bytes;
        if event.missed > 0 {
            // "CPU:%d [LOST %lu EVENTS]", as of `print_trace_line`.
            line.extend_from_slice(b"CPU:");
            decimal(line, u64::from(event.cpu), 0, b' ');
            line.extend_from_slice(b" [LOST ");
            decimal(line, event.missed, 0, b' ');
            line.extend_from_slice(b" EVENTS]\n");
        }
        // "%16s-%-7d [%03d] %c%c%c%c%c %5lu.%06lu: %s <-%s", of which irq-info is the letters.
        let (name, pid) = match &event.task {
            Some(task) => (task.shown().as_bytes(), task.pid),
            None => (UNKNOWN.as_bytes(), 0),
        };
        line.resize(line.len() + 16_usize.saturating_sub(name.len()), b' ');
        line.extend_from_slice(name);
        line.push(b'-');
        let number = line.len();
        decimal(line, u64::from(pid), 0, b' ');
        line.resize(line.len().max(number + 7), b' ');
        line.extend_from_slice(b" [");
        decimal(line, u64::from(event.cpu), 3, b'0');
        line.extend_from_slice(b"] ");
        if self.contexts {
            line.extend_from_slice(&event.context.unwrap_or_default().letters());
        }
        // As the kernel rounds (`ns2usecs`).
        let microseconds = event.time_ns.saturating_add(500) / 1000;
        line.push(b' ');
        decimal(line, microseconds / 1_000_000, 5, b' ');
        line.push(b'.');
        decimal(line, microseconds % 1_000_000, 6, b'0');
        line.extend_from_slice(b": ");
        line.extend_from_slice(event.function.as_bytes());
        arguments(line, event.values);
        line.extend_from_slice(b" <-");
        line.extend_from_slice(event.caller.as_bytes());
        line.push(b'\n');
        self.text.write_many()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.text.flush()
    }

    fn end(&mut self, written: u64, entries: u64) -> io::Result<()> {
        self.graph.end(&mut self.text.bytes);
        self.flush()?;
        if let Some(rewrite) = self.rewrite.filter(|_| self.tracer == Tracer::Function) {
            let header = self.header(written, entries);
            rewrite(&mut self.text.out, header.as_bytes())?;
        }
        self.text.out.flush()
    }
}

/// Appends the arguments of a call between parentheses (`func-args`), if they are told.
fn arguments(line: &mut Vec<u8>, values: Values<'_>) {
    if values.are_told() {
        // A Vec takes what it is given.
        let _ = write!(line, "({values})");
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::BEGINNING;
    use super::super::{Context, EventKind, Name, Task};
    use super::*;

    const fn name(id: u64, text: &str) -> Name<'_> {
        Name { id, text, address: 0, offset: 0 }
    }

    const fn event(
        time_ns: u64,
        cpu: u16,
        function: &'static str,
        caller: &'static str,
    ) -> Event<'static> {
        let (function, caller) = (name(0, function), name(1, caller));
        let (kind, task, context) = (EventKind::Call, None, None);
        Event {
            time_ns,
            kind,
            cpu,
            function,
            caller,
            task,
            context,
            values: Values::NONE,
            missed: 0,
        }
    }

    const fn beginning(cpus: usize) -> Beginning<'static> {
        Beginning { cpus, contexts: false, ..BEGINNING }
    }

    const EVENTS: [Event<'static>; 2] = [
        event(7_754_083_999, 1, "vfs_read", "ksys_read"),
        Event { missed: 7, ..event(123_456_000_001_000, 12, "f", "0xffffffffc0001234") },
    ];

    fn trace<W: Write>(sink: &mut FtraceText<W>) {
        sink.begin(&beginning(2)).unwrap();
        EVENTS.iter().for_each(|event| sink.event(event).unwrap());
        sink.end(2, 5).unwrap();
    }

    #[test]
    fn a_stream_is_what_tracefs_prints() {
        let mut sink = FtraceText::stream(Vec::new());
        trace(&mut sink);
        assert_eq!(
            String::from_utf8(sink.text.out).unwrap(),
            "\
# tracer: function
#
# entries-in-buffer/entries-written: 0/0   #P:2
#
#           TASK-PID     CPU#     TIMESTAMP  FUNCTION
#              | |         |         |         |
           <...>-0       [001]      7.754084: vfs_read <-ksys_read
CPU:12 [LOST 7 EVENTS]
           <...>-0       [012]  123456.000001: f <-0xffffffffc0001234
"
        );
    }

    #[test]
    fn what_records_tell_of_tasks_and_interrupts_is_in_the_columns_of_tracefs() {
        let mut sink = FtraceText::stream(Vec::new());
        sink.begin(&Beginning { cpus: 2, ..BEGINNING }).unwrap();
        let task = |pid, comm| Some(Task { pid, comm });
        let none = Context::default();
        let softirq = Context { irqs_off: true, softirq: true, preempt_depth: 1, ..none };
        let busybox = event(7_754_083_000, 1, "rw_verify_area", "do_sendfile");
        for event in [
            Event { task: task(94, Some("busybox")), context: Some(none), ..busybox },
            Event { task: task(0, None), context: Some(softirq), ..busybox },
            Event { task: task(4_194_303, Some("a-name-of-fiftee")), context: None, ..busybox },
            Event { task: task(12_345_678, None), context: Some(none), ..busybox },
        ] {
            sink.event(&event).unwrap();
        }
        sink.end(4, 4).unwrap();
        assert_eq!(
            String::from_utf8(sink.text.out).unwrap(),
            "\
# tracer: function
#
# entries-in-buffer/entries-written: 0/0   #P:2
#
#                                _-----=> irqs-off/BH-disabled
#                               / _----=> need-resched
#                              | / _---=> hardirq/softirq
#                              || / _--=> preempt-depth
#                              ||| / _-=> migrate-disable
#                              |||| /     delay
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
#              | |         |   |||||     |         |
         busybox-94      [001] .....     7.754083: rw_verify_area <-do_sendfile
          <idle>-0       [001] d.s1.     7.754083: rw_verify_area <-do_sendfile
a-name-of-fiftee-4194303 [001] .....     7.754083: rw_verify_area <-do_sendfile
           <...>-12345678 [001] .....     7.754083: rw_verify_area <-do_sendfile
"
        );
    }

    #[test]
    fn a_files_header_tells_how_many_events_there_are() {
        let mut sink = FtraceText::file(io::Cursor::new(Vec::new()));
        trace(&mut sink);
        let text = String::from_utf8(sink.text.out.into_inner()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2].trim_end(), "# entries-in-buffer/entries-written: 2/5   #P:2");
        assert_eq!((lines.len(), lines[7]), (9, "CPU:12 [LOST 7 EVENTS]"));
        assert!(lines[6].starts_with("           <...>-0       [001]      7.754084: vfs_read"));
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
        assert_eq!(sink.begin(&beginning(1)).unwrap_err().kind(), io::ErrorKind::StorageFull);
        sink.event(&EVENTS[0]).unwrap();
        assert_eq!(sink.flush().unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(sink.text.bytes.is_empty());
    }
}
