//! `vmm top`: the functions that a guest calls most, on a screen that is made anew every second.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use rustix::termios::tcgetwinsize;
use vmm::control::protocol::{Armed, CountRequest, Counted, EndReason, TraceRequest, Tracer};
use vmm::control::{Message, Name, Stopper};

use super::progress::Progress;
use super::status::Status;
use super::summary::grouped;
use super::trace::begin;
use super::{is_broken_pipe, say};
use crate::signals::{self, EndSignal};
use crate::terminal::RawTerminal;

/// Show the functions of a guest's kernel that are called most, as top shows tasks
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// The guest, as vmm ps lists it
    name: Name,

    /// Count only functions that match, with the globs of set_ftrace_filter: *, ?, [a-z]; may be
    /// given several times. By default every function is counted
    #[arg(short, long, value_name = "GLOB", value_parser = NonEmptyStringValueParser::new())]
    filter: Vec<String>,

    /// Don't count functions that match, even if a filter does; may be given several times
    #[arg(short, long, value_name = "GLOB", value_parser = NonEmptyStringValueParser::new())]
    notrace: Vec<String>,

    /// Seconds from one screen to the next
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,

    /// Print so many plain tables, and leave; without a terminal plain tables are printed as well
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    batch: Option<u64>,

    /// Print one plain table, and leave
    #[arg(long, conflicts_with = "batch")]
    once: bool,
}

const AFTER_HELP: &str = "\
The guest counts the calls itself, and nothing of them is recorded. On a terminal q and Ctrl-C leave.

Exit status:
  0    it was left, or the guest has ended
  1    something failed; standard error says what
  2    the command line makes no sense
  129  SIGHUP
  130  SIGINT, where there is no screen
  143  SIGTERM

Examples:
  See what a guest does most:
    vmm top guest1

  Print the calls of the VFS's functions within a second:
    vmm top guest1 -f 'vfs_*' --once";

/// Lines of a plain table at most.
const PLAIN_LINES: usize = 20;

/// The other screen, without a cursor, and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// What is known of a function.
#[derive(Debug)]
struct Row {
    function: String,
    calls: u64,
    before: u64,
}

/// What is known of all of them.
#[derive(Debug, Default)]
struct Table {
    rows: BTreeMap<u32, Row>,
    functions: usize,
    elapsed: Duration,
    before: Duration,
}

impl Table {
    fn take(&mut self, counted: &Counted) {
        if counted.elapsed != self.elapsed {
            self.before = self.elapsed;
            self.elapsed = counted.elapsed;
            self.rows.values_mut().for_each(|row| row.before = row.calls);
        }
        self.functions = counted.functions;
        for (number, calls, function) in &counted.calls {
            let row = || Row { function: function.clone(), calls: 0, before: 0 };
            self.rows.entry(*number).or_insert_with(row).calls = *calls;
        }
    }

    /// The table in that room, its lines ended by `end`.
    fn text(&self, title: &str, (columns, lines): (usize, usize), end: &str) -> String {
        let seconds = self.elapsed.saturating_sub(self.before).as_secs_f64().max(1e-3);
        let news = |row: &&Row| row.calls > row.before;
        let mut rows: Vec<&Row> = self.rows.values().filter(news).collect();
        rows.sort_by(|a, b| {
            let [by_a, by_b] = [a, b].map(|row| row.calls - row.before);
            by_b.cmp(&by_a).then_with(|| a.function.cmp(&b.function))
        });
        let all: u64 = rows.iter().fold(0, |all, row| all.saturating_add(row.calls - row.before));
        let rate = |calls: u64| grouped((calls as f64 / seconds).round() as u64);
        let mut text = String::new();
        let mut line = |line: String| {
            let cut: String = line.chars().take(columns).collect();
            // Writing to a String does not fail.
            let _ = write!(text, "{}{end}", cut.trim_end());
        };
        line(format!(
            "{title}: {} of {} functions called, {} calls/s, {} s",
            grouped(rows.len() as u64),
            grouped(self.functions as u64),
            rate(all),
            self.elapsed.as_secs()
        ));
        line(String::new());
        let bar = (columns / 4).min(30);
        line(format!("{:>12} {:>15} {:>6}  {:<bar$}  FUNCTION", "CALLS/S", "CALLS", "SHARE", ""));
        for row in rows.iter().take(lines.saturating_sub(3)) {
            let now = row.calls - row.before;
            let share = now as f64 / all as f64;
            let most = (rows[0].calls - rows[0].before) as f64;
            let bar_now = "█".repeat((now as f64 / most * bar as f64).round() as usize);
            line(format!(
                "{:>12} {:>15} {:>5.1}%  {bar_now:<bar$}  {}",
                rate(now),
                grouped(row.calls),
                share * 100.0,
                row.function
            ));
        }
        text
    }
}

/// What asks for the end once there is something to end, and what has asked for it.
#[derive(Default)]
struct Ends {
    stop: AtomicBool,
    signal: Mutex<Option<EndSignal>>,
    stopper: Mutex<Option<Stopper>>,
}

impl Ends {
    fn ask(&self) {
        self.stop.store(true, Ordering::SeqCst);
        // Once is enough.
        let stopper = self.stopper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut stopper) = stopper {
            stopper.stop();
        }
    }
}

/// The screen; dropping it leaves the terminal as it was.
struct Screen {
    _raw: RawTerminal,
}

impl Screen {
    /// Takes the terminal, if there is one; keys that leave ask for the end.
    fn enter(ends: &Arc<Ends>) -> Result<Option<Self>> {
        if !io::stdout().is_terminal() {
            return Ok(None);
        }
        let Some(raw) = RawTerminal::enter(io::stdin().as_fd())? else { return Ok(None) };
        let ends = Arc::clone(ends);
        thread::Builder::new().name("keys".into()).spawn(move || {
            let leaves = |key: &u8| matches!(key, b'q' | b'Q' | 3);
            let mut keys = [0; 16];
            // It ends with the process, if not before.
            while let Ok(typed @ 1..) = io::stdin().lock().read(&mut keys) {
                if keys[..typed].iter().any(leaves) {
                    return ends.ask();
                }
            }
        })?;
        put(ENTER)?;
        Ok(Some(Self { _raw: raw }))
    }

    fn show(&self, table: &Table, title: &str) -> io::Result<()> {
        let size = tcgetwinsize(io::stdout())?;
        let room = (usize::from(size.ws_col).max(20), usize::from(size.ws_row).max(4));
        // What a line leaves is cleared behind it, and then all below the last.
        let text = table.text(title, room, "\x1b[K\r\n");
        put(&format!("\x1b[H{}\x1b[J", text.trim_end_matches("\r\n")))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = put(LEAVE);
    }
}

fn put(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Shows them.
///
/// # Errors
/// The guest can't be reached, its functions not be armed, or nothing be shown.
pub fn run(options: &Options) -> Result<Status> {
    let ends = Arc::new(Ends::default());
    let on_signal = Arc::clone(&ends);
    signals::on_end_signal(move |signal| {
        *on_signal.signal.lock().unwrap_or_else(PoisonError::into_inner) = Some(signal);
        on_signal.ask();
    })
    .context("signals can't be handled")?;
    let request = TraceRequest {
        tracer: Tracer::Count,
        filter: options.filter.clone(),
        notrace: options.notrace.clone(),
        count: CountRequest { interval_ms: options.interval * 1000 },
        ..TraceRequest::default()
    };
    let mut progress = Progress::new(false);
    let begun = begin(&options.name, &request, &ends.stop, &mut progress);
    progress.clear();
    let result = begun?.map_or(Ok(()), |(client, armed)| watch(client, &armed, options, &ends));
    match result {
        Err(error) if !is_broken_pipe(&error) => return Err(error),
        _ => {}
    }
    let signal = *ends.signal.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(signal.map_or(Status::Success, Status::Interrupted))
}

fn watch(
    client: vmm::control::Client,
    armed: &Armed,
    options: &Options,
    ends: &Arc<Ends>,
) -> Result<()> {
    let title = format!("vmm top, {}, Linux {}", options.name, armed.release);
    let mut calls = client.into_calls(armed);
    let stopper = calls.stopper().context("the connection can't be shared")?;
    *ends.stopper.lock().unwrap_or_else(PoisonError::into_inner) = Some(stopper);
    if ends.stop.load(Ordering::SeqCst) {
        ends.ask();
    }
    let mut left = if options.once { Some(1) } else { options.batch };
    let screen = if left.is_none() { Screen::enter(ends)? } else { None };
    let mut table = Table::default();
    let mut shown = Ok(());
    let end = loop {
        match calls.next(|_| ())? {
            Message::Calls(_) | Message::Measured(_) => {}
            Message::End(end) => break end,
            Message::Counted(counted) => {
                table.take(&counted);
                let is_over = counted.last || left == Some(0) || shown.is_err();
                if counted.more || counted.elapsed.is_zero() || is_over {
                    continue;
                }
                shown = match &screen {
                    Some(screen) => screen.show(&table, &title),
                    None => {
                        let text = table.text(&title, (usize::MAX, PLAIN_LINES + 3), "\n");
                        put(&format!("{text}\n"))
                    }
                };
                left = left.map(|left| left - 1);
                if left == Some(0) || shown.is_err() {
                    ends.ask();
                }
            }
        }
    };
    drop(screen);
    shown?;
    match (end.error, end.reason) {
        (Some(error), _) => bail!(error),
        (None, EndReason::GuestPanicked) => say("the guest's kernel has panicked"),
        (None, EndReason::GuestReset) => say("the guest was reset, and its kernel is gone"),
        (None, EndReason::GuestEnded) => say("the guest has ended, or its vmm was told to"),
        (None, EndReason::Stopped | EndReason::ClientGone) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(seconds: u64, calls: &[(u32, u64, &str)]) -> Counted {
        let calls = calls.iter().map(|(number, calls, name)| (*number, *calls, (*name).into()));
        Counted {
            functions: 5000,
            elapsed: Duration::from_secs(seconds),
            calls: calls.collect(),
            ..Counted::default()
        }
    }

    #[test]
    fn what_was_called_most_in_the_last_second_comes_first() {
        let mut table = Table::default();
        table.take(&counted(0, &[]));
        table.take(&counted(1, &[(1, 9000, "once_hot"), (2, 10, "vfs_read")]));
        table.take(&counted(2, &[(2, 3010, "vfs_read"), (7, 1000, "vfs_write")]));
        let text = table.text("vmm top", (80, 24), "\n");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "vmm top: 2 of 5,000 functions called, 4,000 calls/s, 2 s");
        let head = format!("{:>12} {:>15} {:>6}  {:20}  FUNCTION", "CALLS/S", "CALLS", "SHARE", "");
        assert_eq!(lines[1..3], ["", &head]);
        let row = |rate, calls, share, bar, name| {
            let bar = "█".repeat(bar);
            format!("{rate:>12} {calls:>15} {share:>6}  {bar:<20}  {name}")
        };
        assert_eq!(
            lines[3..],
            [
                row("3,000", "3,010", "75.0%", 20, "vfs_read"),
                row("1,000", "1,000", "25.0%", 7, "vfs_write"),
            ]
        );
    }

    #[test]
    fn nothing_is_wider_or_longer_than_the_screen() {
        let mut table = Table::default();
        let calls: Vec<(u32, u64, &str)> =
            (0..100).map(|number| (number, 1 + u64::from(number), "a_function")).collect();
        table.take(&counted(1, &calls));
        for (columns, lines) in [(20, 4), (80, 24), (200, 60)] {
            let text = table.text("vmm top", (columns, lines), "\n");
            assert_eq!(text.lines().count(), lines);
            assert!(text.lines().all(|line| line.chars().count() <= columns), "{text}");
        }
        // A guest that does nothing is shown as one.
        table.take(&counted(2, &[]));
        assert_eq!(table.text("vmm top", (80, 24), "\n").lines().count(), 3);
    }
}
