//! QEMU's monitor protocol, as much of it as is needed.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// How long QEMU may take to greet us and to answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// The longest message that is taken in, in bytes.
const LINE_LIMIT: usize = 1 << 20;

/// Messages that may come before an answer.
const MESSAGES_BETWEEN: usize = 1000;

/// Answers that may lie there until somebody takes them.
const ANSWERS: usize = 16;

/// QEMU's monitor gave no usable answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// QEMU has gone, or has closed the connection.
    #[error("QEMU's monitor has closed the connection")]
    Closed,
    /// No answer in time.
    #[error("QEMU's monitor did not answer within {} s", PATIENCE.as_secs())]
    Silent,
    /// The connection failed.
    #[error("the connection to QEMU's monitor failed: {0}")]
    Connection(io::Error),
    /// Something that is no message.
    #[error("QEMU's monitor sent what is not a message: {0}")]
    NotAMessage(String),
    /// A command that QEMU refuses.
    #[error("QEMU's monitor refuses {command}: {reason}")]
    Refused {
        /// The command.
        command: &'static str,
        /// What QEMU says.
        reason: String,
    },
}

/// Something that happened to the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    /// Its name, as `SHUTDOWN`.
    pub name: String,
    /// The reason that some events have.
    pub reason: Option<String>,
}

/// A conversation with a monitor.
#[derive(Debug)]
pub(super) struct Qmp {
    stream: UnixStream,
    pending: Vec<u8>,
    /// Where answers go that come while events are waited for.
    answers: Option<SyncSender<Value>>,
}

/// Gives commands while another thread waits for events.
#[derive(Debug)]
pub(super) struct Commander {
    stream: UnixStream,
    answers: Receiver<Value>,
}

impl Commander {
    /// Gives a command and waits for its answer.
    ///
    /// # Errors
    /// What the peer says.
    pub(super) fn execute(
        &mut self,
        command: &'static str,
        arguments: &Value,
    ) -> Result<Value, QmpError> {
        // An answer to a command that was given up.
        while self.answers.try_recv().is_ok() {}
        send(&mut self.stream, command, arguments)?;
        self.answer(command)
    }

    /// Gives a file descriptor to QEMU, under a name.
    ///
    /// # Errors
    /// What the peer says.
    pub(super) fn give(&mut self, fd: BorrowedFd<'_>, name: &str) -> Result<(), QmpError> {
        const COMMAND: &str = "getfd";
        let line = line(COMMAND, &json!({ "fdname": name }));
        let sent = self.stream.send_with_fd(line.as_bytes(), fd.as_raw_fd());
        let sent = sent.map_err(|error| broken(error.into()))?;
        // What did not go with the descriptor follows it.
        self.stream.write_all(&line.as_bytes()[sent.min(line.len())..]).map_err(broken)?;
        self.answer(COMMAND).map(drop)
    }

    fn answer(&mut self, command: &'static str) -> Result<Value, QmpError> {
        match self.answers.recv_timeout(PATIENCE) {
            Ok(message) => {
                answer(message, command).unwrap_or_else(|| Err(not_a_message("no answer")))
            }
            Err(RecvTimeoutError::Timeout) => Err(QmpError::Silent),
            Err(RecvTimeoutError::Disconnected) => Err(QmpError::Closed),
        }
    }
}

impl Drop for Commander {
    fn drop(&mut self) {
        // Ends the wait for events; it fails if the peer has hung up.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Qmp {
    /// Waits for the greeting and begins a conversation.
    ///
    /// # Errors
    /// What the peer says, or that it says nothing.
    pub(super) fn connect(stream: UnixStream) -> Result<Self, QmpError> {
        let mut qmp = Self { stream, pending: Vec::new(), answers: None };
        let greeting = qmp.message(Some(Instant::now() + PATIENCE))?;
        if greeting.get("QMP").is_none() {
            return Err(not_a_message(&greeting.to_string()));
        }
        qmp.execute("qmp_capabilities")?;
        Ok(qmp)
    }

    /// The state of the guest, in QEMU's words.
    ///
    /// # Errors
    /// What the peer says.
    pub(super) fn query_status(&mut self) -> Result<String, QmpError> {
        let status = self.execute("query-status")?;
        let name = status.get("status").and_then(Value::as_str).map(str::to_owned);
        name.ok_or_else(|| not_a_message(&status.to_string()))
    }

    /// Gives a command and waits for its answer; what happens meanwhile is passed over.
    ///
    /// # Errors
    /// What the peer says.
    pub(super) fn execute(&mut self, command: &'static str) -> Result<Value, QmpError> {
        self.execute_with(command, &Value::Null)
    }

    /// The same with arguments.
    ///
    /// # Errors
    /// What the peer says.
    pub(super) fn execute_with(
        &mut self,
        command: &'static str,
        arguments: &Value,
    ) -> Result<Value, QmpError> {
        send(&mut self.stream, command, arguments)?;
        self.answer(command)
    }

    /// Lets another thread give commands while events are waited for here.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn commander(&mut self) -> io::Result<Commander> {
        let (sender, answers) = mpsc::sync_channel(ANSWERS);
        self.answers = Some(sender);
        Ok(Commander { stream: self.stream.try_clone()?, answers })
    }

    fn answer(&mut self, command: &'static str) -> Result<Value, QmpError> {
        let until = Instant::now() + PATIENCE;
        for _ in 0..MESSAGES_BETWEEN {
            if let Some(answer) = answer(self.message(Some(until))?, command) {
                return answer;
            }
        }
        Err(not_a_message("events without end instead of an answer"))
    }

    /// Waits for the next event, for as long as that takes.
    ///
    /// # Errors
    /// [`QmpError::Closed`] at QEMU's end, or what is wrong with the peer.
    pub(super) fn next_event(&mut self) -> Result<Event, QmpError> {
        loop {
            let message = self.message(None)?;
            if let Some(name) = message.get("event").and_then(Value::as_str) {
                let reason = message.pointer("/data/reason").and_then(Value::as_str);
                return Ok(Event { name: name.to_owned(), reason: reason.map(str::to_owned) });
            }
            if let Some(answers) = &self.answers {
                // Nobody may wait for it any more, or there are more than anybody has asked for.
                let _ = answers.try_send(message);
            }
        }
    }

    fn message(&mut self, until: Option<Instant>) -> Result<Value, QmpError> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.pending[searched..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=searched + end).collect();
                searched = 0;
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return serde_json::from_slice(&line)
                    .map_err(|_| not_a_message(&String::from_utf8_lossy(&line)));
            }
            searched = self.pending.len();
            if searched > LINE_LIMIT {
                return Err(not_a_message("a message without end"));
            }
            self.fill(until)?;
        }
    }

    fn fill(&mut self, until: Option<Instant>) -> Result<(), QmpError> {
        let mut some = [0; 4096];
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(QmpError::Silent);
            }
            self.stream.set_read_timeout(left).map_err(QmpError::Connection)?;
            match self.stream.read(&mut some) {
                Ok(0) => return Err(QmpError::Closed),
                Ok(length) => {
                    self.pending.extend_from_slice(&some[..length]);
                    return Ok(());
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted
                    | io::ErrorKind::WouldBlock
                    | io::ErrorKind::TimedOut => {}
                    _ => return Err(broken(error)),
                },
            }
        }
    }
}

fn line(command: &str, arguments: &Value) -> String {
    let mut message = json!({ "execute": command });
    if !arguments.is_null() {
        message["arguments"] = arguments.clone();
    }
    format!("{message}\n")
}

fn send(stream: &mut UnixStream, command: &str, arguments: &Value) -> Result<(), QmpError> {
    stream.set_write_timeout(Some(PATIENCE)).map_err(QmpError::Connection)?;
    stream.write_all(line(command, arguments).as_bytes()).map_err(broken)
}

/// What a message answers to a command, if it is an answer.
fn answer(mut message: Value, command: &'static str) -> Option<Result<Value, QmpError>> {
    if let Some(value) = message.get_mut("return") {
        return Some(Ok(value.take()));
    }
    let error = message.get("error")?;
    let reason = error.get("desc").and_then(Value::as_str).unwrap_or("no reason");
    let reason = reason.chars().take(200).collect();
    Some(Err(QmpError::Refused { command, reason }))
}

fn broken(error: io::Error) -> QmpError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => QmpError::Closed,
        io::ErrorKind::WouldBlock => QmpError::Silent,
        _ => QmpError::Connection(error),
    }
}

fn not_a_message(found: &str) -> QmpError {
    QmpError::NotAMessage(found.trim_end().chars().take(200).collect())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    /// What a client makes of a peer that says all of this at once and hangs up.
    fn told(script: &[u8]) -> Result<Qmp, QmpError> {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let script = script.to_vec();
        // It reads until the client hangs up, which may be after this has returned.
        thread::spawn(move || {
            // The client may have hung up on nonsense.
            let _ = peer.write_all(&script);
            let _ = peer.shutdown(std::net::Shutdown::Write);
            let _ = peer.read_to_end(&mut Vec::new());
        });
        Qmp::connect(ours)
    }

    const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";
    const DONE: &str = "{\"return\": {}}\r\n";

    #[test]
    fn events_before_an_answer_are_passed_over_and_later_ones_are_told() {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let script = format!(
            "{GREETING}{{\"event\": \"NIC_RX\"}}\r\n{DONE}\
             {{\"return\": {{\"status\": \"prelaunch\", \"running\": false}}}}\r\n\
             {{\"event\": \"SHUTDOWN\", \"data\": {{\"guest\": true, \"reason\": \"guest-reset\"}}}}\r\n"
        );
        peer.write_all(script.as_bytes()).unwrap();
        let mut qmp = Qmp::connect(ours).unwrap();
        assert_eq!(qmp.query_status().unwrap(), "prelaunch");
        let event = qmp.next_event().unwrap();
        assert_eq!(
            (event.name.as_str(), event.reason.as_deref()),
            ("SHUTDOWN", Some("guest-reset"))
        );
        drop(peer);
        assert!(matches!(qmp.next_event(), Err(QmpError::Closed)));
    }

    #[test]
    fn what_a_peer_gets_wrong_is_named() {
        assert!(matches!(told(b""), Err(QmpError::Closed)));
        assert!(matches!(told(b"hello\n"), Err(QmpError::NotAMessage(_))));
        assert!(matches!(told(b"{\"return\": {}}\n"), Err(QmpError::NotAMessage(_))));
        assert!(matches!(told(&vec![b'x'; LINE_LIMIT * 2]), Err(QmpError::NotAMessage(_))));
        let refused = format!("{GREETING}{{\"error\": {{\"desc\": \"not now\"}}}}\n");
        let error = told(refused.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "QEMU's monitor refuses qmp_capabilities: not now");
        let flood = format!("{GREETING}{}", "{\"event\": \"E\"}\n".repeat(MESSAGES_BETWEEN + 1));
        assert!(matches!(told(flood.as_bytes()), Err(QmpError::NotAMessage(_))));
    }

    #[test]
    fn commands_are_answered_while_events_are_waited_for() {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        peer.write_all(format!("{GREETING}{DONE}").as_bytes()).unwrap();
        let mut qmp = Qmp::connect(ours).unwrap();
        let mut commander = qmp.commander().unwrap();
        let listener = thread::spawn(move || {
            let mut seen = Vec::new();
            while let Ok(event) = qmp.next_event() {
                seen.push(event.name);
            }
            seen
        });
        let echo = thread::spawn(move || {
            let mut asked = String::new();
            let mut lines = std::io::BufReader::new(peer.try_clone().unwrap());
            std::io::BufRead::read_line(&mut lines, &mut asked).unwrap();
            while !asked.contains("query-kvm") {
                asked.clear();
                std::io::BufRead::read_line(&mut lines, &mut asked).unwrap();
            }
            peer.write_all(b"{\"event\": \"STOP\"}\n{\"error\": {\"desc\": \"no\"}}\n").unwrap();
            lines.read_to_end(&mut Vec::new()).unwrap();
        });
        let error = commander.execute("query-kvm", &json!({})).unwrap_err();
        assert!(matches!(error, QmpError::Refused { command: "query-kvm", .. }), "{error}");
        drop(commander);
        assert_eq!(listener.join().unwrap(), ["STOP"]);
        echo.join().unwrap();
    }

    proptest! {
        #[test]
        fn no_peer_makes_it_panic_or_hang(
            noise in proptest::collection::vec(any::<u8>(), 0..300),
            cut in 0..GREETING.len() + DONE.len(),
        ) {
            let proper = [GREETING, DONE].concat();
            let script = [&proper.as_bytes()[..cut], &noise].concat();
            // It may even be a proper conversation; then it ends when the peer hangs up.
            if let Ok(mut qmp) = told(&script) {
                while qmp.next_event().is_ok() {}
            }
        }
    }
}
