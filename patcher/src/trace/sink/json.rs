//! One JSON object a line, for programs.

use std::io::{self, Write};

use super::{
    Beginning, Event, EventKind, Gathered, Returned, Sink, Tracer, Value, Values, decimal,
};

/// JSON lines. The first line tells of the guest, each of the others of one call, and the last of the
/// whole: `docs/user-guide.md` says what is in them.
pub struct JsonLines<W> {
    text: Gathered<W>,
}

impl<W: Write> JsonLines<W> {
    /// Lines to `out`.
    pub fn new(out: W) -> Self {
        Self { text: Gathered::new(out) }
    }
}

impl<W: Write> Sink for JsonLines<W> {
    fn begin(&mut self, beginning: &Beginning<'_>) -> io::Result<()> {
        let text = &mut self.text.bytes;
        text.extend_from_slice(b"{\"type\":\"begin\",\"format\":1,\"tracer\":");
        text.extend_from_slice(match beginning.tracer {
            Tracer::Function => b"\"function\"",
            Tracer::Graph => b"\"function_graph\"",
        });
        text.extend_from_slice(b",\"cpus\":");
        decimal(text, beginning.cpus as u64, 0, b' ');
        text.extend_from_slice(b",\"release\":");
        string(text, beginning.release);
        text.extend_from_slice(b",\"arch\":");
        string(text, beginning.architecture);
        text.extend_from_slice(b"}\n");
        self.flush()
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        let text = &mut self.text.bytes;
        text.extend_from_slice(match event.kind {
            EventKind::Call => b"{\"type\":\"call\",\"time_ns\":",
            EventKind::Entry { .. } => b"{\"type\":\"entry\",\"time_ns\":",
            EventKind::Return(_) => b"{\"type\":\"return\",\"time_ns\":",
        });
        decimal(text, event.time_ns, 0, b' ');
        text.extend_from_slice(b",\"cpu\":");
        decimal(text, u64::from(event.cpu), 0, b' ');
        if let Some(task) = event.task {
            text.extend_from_slice(b",\"pid\":");
            decimal(text, u64::from(task.pid), 0, b' ');
            if let Some(comm) = task.comm {
                text.extend_from_slice(b",\"comm\":");
                string(text, comm);
            }
        }
        if let Some(context) = event.context {
            for (name, value) in [
                (&b",\"irqs_off\":"[..], context.irqs_off),
                (b",\"bh_off\":", context.bottom_halves_off),
                (b",\"need_resched\":", context.need_resched),
                (b",\"hardirq\":", context.hardirq),
                (b",\"softirq\":", context.softirq),
                (b",\"nmi\":", context.nmi),
            ] {
                if value {
                    text.extend_from_slice(name);
                    text.extend_from_slice(b"true");
                }
            }
            text.extend_from_slice(b",\"preempt_depth\":");
            decimal(text, u64::from(context.preempt_depth), 0, b' ');
        }
        if let Some(depth) = event.kind.depth() {
            text.extend_from_slice(b",\"depth\":");
            decimal(text, u64::from(depth), 0, b' ');
        }
        if let EventKind::Return(back) = event.kind {
            text.extend_from_slice(b",\"value\":\"0x");
            hexadecimal(text, back.value);
            text.push(b'"');
            if let Some(duration) = back.duration_ns {
                text.extend_from_slice(b",\"duration_ns\":");
                decimal(text, duration, 0, b' ');
            }
        }
        for (name, at, function) in [
            (&b",\"function\":"[..], &b",\"ip\":\"0x"[..], event.function),
            (b",\"caller\":", b",\"parent_ip\":\"0x", event.caller),
        ] {
            text.extend_from_slice(name);
            string(text, function.text);
            text.extend_from_slice(at);
            hexadecimal(text, function.address);
            text.push(b'"');
        }
        values(text, event.values, event.kind.is_call());
        if event.missed > 0 {
            text.extend_from_slice(b",\"missed\":");
            decimal(text, event.missed, 0, b' ');
        }
        text.extend_from_slice(b"}\n");
        self.text.write_many()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.text.flush()
    }

    fn end(&mut self, written: u64, entries: u64) -> io::Result<()> {
        let text = &mut self.text.bytes;
        text.extend_from_slice(b"{\"type\":\"end\",\"events\":");
        decimal(text, written, 0, b' ');
        text.extend_from_slice(b",\"missed\":");
        decimal(text, entries.saturating_sub(written), 0, b' ');
        text.extend_from_slice(b"}\n");
        self.flush()
    }
}

/// Appends what a call was given, or has returned, if that is told.
fn values(text: &mut Vec<u8>, values: Values<'_>, are_arguments: bool) {
    if !values.are_told() {
        return;
    }
    if !are_arguments {
        if let Some((_, returned)) = values.iter().next() {
            text.extend_from_slice(b",\"ret\":");
            value(text, returned);
            if let Some(error) = Returned(returned).error_name() {
                text.extend_from_slice(b",\"error\":");
                string(text, error);
            }
        }
        return;
    }
    text.extend_from_slice(b",\"args\":{");
    for (index, (name, argument)) in values.iter().enumerate() {
        if index > 0 {
            text.push(b',');
        }
        match (name, argument) {
            ("", Value::More) => string(text, "..."),
            ("", _) => string(text, &format!("arg{index}")),
            (name, _) => string(text, name),
        }
        text.push(b':');
        value(text, argument);
    }
    text.push(b'}');
}

fn value(text: &mut Vec<u8>, value: Value<'_>) {
    let address = |text: &mut Vec<u8>, value| {
        text.extend_from_slice(b"\"0x");
        hexadecimal(text, value);
        text.push(b'"');
    };
    match value {
        Value::Unknown | Value::More => text.extend_from_slice(b"null"),
        Value::Word(word) | Value::Pointer(word) => address(text, word),
        Value::Signed(value) => {
            if value < 0 {
                text.push(b'-');
            }
            decimal(text, value.unsigned_abs(), 0, b' ');
        }
        Value::Unsigned(value) => decimal(text, value, 0, b' '),
        Value::Bool(value) => text.extend_from_slice(if value == 0 { b"false" } else { b"true" }),
        Value::Char(value) => string(text, &value.escape_ascii().to_string()),
        Value::Text { address: at, text: there, is_cut } => {
            text.extend_from_slice(b"{\"address\":");
            address(text, at);
            text.extend_from_slice(b",\"text\":");
            string(text, &there.escape_ascii().to_string());
            if is_cut {
                text.extend_from_slice(b",\"cut\":true");
            }
            text.push(b'}');
        }
        Value::Enumerator { name, .. } => string(text, name),
        Value::Words(words) => {
            text.push(b'[');
            for (index, word) in words.iter().enumerate() {
                if index > 0 {
                    text.push(b',');
                }
                address(text, word);
            }
            text.push(b']');
        }
    }
}

/// Appends a JSON string.
fn string(text: &mut Vec<u8>, value: &str) {
    text.push(b'"');
    for byte in value.bytes() {
        match byte {
            b'"' | b'\\' => text.extend([b'\\', byte]),
            0..0x20 => {
                text.extend_from_slice(b"\\u00");
                text.extend([b'0' + (byte >> 4), b"0123456789abcdef"[usize::from(byte & 15)]]);
            }
            _ => text.push(byte),
        }
    }
    text.push(b'"');
}

/// Appends a number's sixteen digits.
fn hexadecimal(text: &mut Vec<u8>, value: u64) {
    let digit = |at: u32| b"0123456789abcdef"[(value >> (4 * at)) as usize & 15];
    text.extend((0..16).rev().map(digit));
}

#[cfg(test)]
mod tests {
    use super::super::tests::{BEGINNING, EVENTS};
    use super::super::{Name, Return, Task};
    use super::*;

    fn lines(events: &[Event<'_>]) -> String {
        let mut sink = JsonLines::new(Vec::new());
        sink.begin(&BEGINNING).unwrap();
        events.iter().for_each(|event| sink.event(event).unwrap());
        sink.end(events.len() as u64, 5).unwrap();
        String::from_utf8(sink.text.out).unwrap()
    }

    #[test]
    fn each_call_is_an_object_on_a_line_of_its_own() {
        assert_eq!(
            lines(&EVENTS),
            r#"{"type":"begin","format":1,"tracer":"function","cpus":13,"release":"6.1","arch":"x86_64"}
{"type":"call","time_ns":7754083999,"cpu":1,"pid":94,"comm":"busybox","irqs_off":true,"hardirq":true,"preempt_depth":1,"function":"vfs_read","ip":"0xffffffff81000104","caller":"ksys_read","parent_ip":"0xffffffff8100024c"}
{"type":"call","time_ns":123456000001000,"cpu":12,"function":"f","ip":"0xffffffff81000300","caller":"0xffffffffc0001234","parent_ip":"0xffffffffc0001234","missed":3}
{"type":"end","events":2,"missed":3}
"#
        );
    }

    #[test]
    fn calls_and_returns_tell_how_deep_and_how_long() {
        let entry = Event { kind: EventKind::Entry { depth: 2 }, ..EVENTS[1] };
        let back = Return { depth: 2, value: 0xffff_ffff_ffff_ffea, duration_ns: Some(1500) };
        let of = |back| Event { kind: EventKind::Return(back), ..EVENTS[1] };
        let text = lines(&[entry, of(back), of(Return { duration_ns: None, ..back })]);
        let lines: Vec<&str> = text.lines().collect();
        let rest = lines[1].strip_prefix(r#"{"type":"entry","time_ns":123456000001000,"cpu":12"#);
        let rest = rest.and_then(|rest| rest.strip_prefix(r#","depth":2"#)).unwrap();
        assert!(rest.starts_with(r#","function":"f","ip":"#), "{rest}");
        let value = r#""depth":2,"value":"0xffffffffffffffea","#;
        assert!(lines[2].starts_with(r#"{"type":"return","#), "{}", lines[2]);
        assert!(lines[2].contains(&format!(r#"{value}"duration_ns":1500,"function""#)));
        assert!(lines[3].contains(&format!(r#"{value}"function""#)), "{}", lines[3]);
    }

    #[test]
    fn names_that_need_it_are_escaped() {
        let odd = Name { text: "a\"b\\c\u{1f}\u{7f}ü", ..EVENTS[0].function };
        let task = Some(Task { pid: 1, comm: Some("a b") });
        let text = lines(&[Event { function: odd, task, ..EVENTS[0] }]);
        assert!(text.contains("\"comm\":\"a b\""), "{text}");
        assert!(text.contains("\"function\":\"a\\\"b\\\\c\\u001f\u{7f}ü\""), "{text}");
    }

    #[test]
    fn values_are_an_object_and_errors_have_their_names() {
        use super::super::super::values::Encoder;
        let mut encoder = Encoder::default();
        encoder.push("dfd", &Value::Signed(-100));
        encoder.push("filename", &Value::Text { address: 16, text: b"a\"\x01", is_cut: true });
        encoder.push("", &Value::Unsigned(u64::MAX));
        encoder.push("type", &Value::Enumerator { value: 1, name: "PIDTYPE_TGID" });
        encoder.words("s", [1, 2].into_iter());
        encoder.push("x", &Value::Unknown);
        encoder.push("", &Value::More);
        let text = lines(&[Event { values: encoder.values(), ..EVENTS[1] }]);
        let args = r#""args":{"dfd":-100,"filename":{"address":"0x0000000000000010","text":"a\\\"\\x01","cut":true},"arg2":18446744073709551615,"type":"PIDTYPE_TGID","s":["0x0000000000000001","0x0000000000000002"],"x":null,"...":null}"#;
        assert!(text.contains(args), "{text}");
        let mut encoder = Encoder::default();
        encoder.push("", &Value::Signed(-2));
        let back = EventKind::Return(Return { depth: 0, value: 1, duration_ns: None });
        let text = lines(&[Event { kind: back, values: encoder.values(), ..EVENTS[1] }]);
        assert!(text.contains(r#","ret":-2,"error":"ENOENT","#), "{text}");
    }
}
