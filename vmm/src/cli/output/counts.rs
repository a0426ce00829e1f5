//! Counts of calls, as bcc's funccount prints them.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use patcher::trace::sink::{Beginning, Event, Sink};
use serde_json::json;
use vmm::control::protocol::Counted;

use super::TimeUnit;
use crate::cli::clock::time_of_day;

/// How counts are shown, or latencies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CountForm {
    /// The functions, as they were asked for.
    pub pattern: String,
    /// Whether what came is printed each time, and not only at the end.
    pub each_interval: bool,
    /// Whether each table says when it was made.
    pub timestamp: bool,
    /// So many functions at most, those that were called most.
    pub top: Option<usize>,
    /// Whether a JSON object takes the place of each table.
    pub json: bool,
    /// Times in that unit take the place of counts.
    pub times: Option<TimeUnit>,
}

impl CountForm {
    /// Says that it has begun, for so many functions.
    pub(super) fn begin(&self, out: &mut impl Write, functions: usize) -> io::Result<()> {
        let pattern = &self.pattern;
        writeln!(out, "Tracing {functions} functions for \"{pattern}\"... Hit Ctrl-C to end.")
    }
}

/// How often functions were called, by the numbers by which a guest's process tells them apart.
#[derive(Debug, Default)]
pub struct CountTable(BTreeMap<u32, Row>);

#[derive(Debug)]
struct Row {
    function: String,
    calls: u64,
    shown: u64,
}

impl CountTable {
    /// Takes what came.
    pub fn take(&mut self, counted: &Counted) {
        for (number, calls, function) in &counted.calls {
            let row = || Row { function: function.clone(), calls: 0, shown: 0 };
            self.0.entry(*number).or_insert_with(row).calls = *calls;
        }
    }

    /// The functions that were called since this was last asked, and how often; ascending.
    pub fn news(&mut self, top: Option<usize>) -> Vec<(&str, u64)> {
        let mut news: Vec<(&str, u64)> = Vec::new();
        for row in self.0.values_mut() {
            let more = row.calls.saturating_sub(row.shown);
            row.shown = row.calls;
            if more > 0 {
                news.push((&row.function, more));
            }
        }
        news.sort_by(|(a_name, a), (b_name, b)| a.cmp(b).then_with(|| b_name.cmp(a_name)));
        let first = top.map_or(0, |top| news.len().saturating_sub(top));
        news.split_off(first)
    }
}

/// Prints counts.
pub struct CountText<W> {
    out: W,
    form: CountForm,
    table: CountTable,
    elapsed: Duration,
    begun: bool,
}

impl<W: Write> CountText<W> {
    /// Prints to `out`.
    pub fn new(form: CountForm, out: W) -> Self {
        Self { out, form, table: CountTable::default(), elapsed: Duration::ZERO, begun: false }
    }

    /// Takes what came, and prints it if it is time.
    ///
    /// # Errors
    /// What writing says.
    pub fn counted(&mut self, counted: &Counted) -> io::Result<()> {
        if !self.begun {
            self.begun = true;
            if !self.form.json {
                self.form.begin(&mut self.out, counted.functions)?;
            }
        }
        self.table.take(counted);
        self.elapsed = counted.elapsed;
        let is_due = self.form.each_interval && !counted.elapsed.is_zero();
        if is_due && !counted.more && !counted.last {
            self.print()?;
        }
        self.out.flush()
    }

    fn print(&mut self) -> io::Result<()> {
        let news = self.table.news(self.form.top);
        if self.form.json {
            let counts: Vec<_> = news
                .iter()
                .map(|(name, calls)| json!({"function": name, "count": calls}))
                .collect();
            let seconds = self.elapsed.as_secs_f64();
            return writeln!(self.out, "{}", json!({"seconds": seconds, "counts": counts}));
        }
        writeln!(self.out)?;
        if self.form.timestamp {
            writeln!(self.out, "{:<8}", time_of_day())?;
        }
        writeln!(self.out, "{:<36} {:>8}", "FUNC", "COUNT")?;
        for (name, calls) in news {
            writeln!(self.out, "{name:<36} {calls:>8}")?;
        }
        Ok(())
    }
}

impl<W: Write> Sink for CountText<W> {
    fn begin(&mut self, _beginning: &Beginning<'_>) -> io::Result<()> {
        Ok(())
    }

    /// What is counted is not recorded.
    fn event(&mut self, _event: &Event<'_>) -> io::Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Prints what is left.
    fn end(&mut self, _written: u64, _entries: u64) -> io::Result<()> {
        if self.begun {
            self.print()?;
            if !self.form.json {
                writeln!(self.out, "Detaching...")?;
            }
        }
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(seconds: u64, calls: &[(u32, u64, &str)]) -> Counted {
        let calls = calls.iter().map(|(number, calls, name)| (*number, *calls, (*name).into()));
        Counted {
            functions: 16,
            elapsed: Duration::from_secs(seconds),
            calls: calls.collect(),
            ..Counted::default()
        }
    }

    fn form() -> CountForm {
        CountForm {
            pattern: "tcp_send*".into(),
            each_interval: false,
            timestamp: false,
            top: None,
            json: false,
            times: None,
        }
    }

    fn printed(form: CountForm, counted: &[Counted]) -> String {
        let mut text = CountText::new(form, Vec::new());
        counted.iter().for_each(|counted| text.counted(counted).unwrap());
        text.end(0, 0).unwrap();
        String::from_utf8(text.out).unwrap()
    }

    #[test]
    fn what_was_counted_is_printed_as_funccount_does() {
        let came = [
            counted(0, &[]),
            counted(1, &[(3, 5, "tcp_send_ack")]),
            counted(2, &[(3, 93_871, "tcp_send_ack"), (1, 1, "tcp_send_active_reset")]),
        ];
        assert_eq!(
            printed(form(), &came),
            "Tracing 16 functions for \"tcp_send*\"... Hit Ctrl-C to end.\n\
             \n\
             FUNC                                    COUNT\n\
             tcp_send_active_reset                       1\n\
             tcp_send_ack                            93871\n\
             Detaching...\n"
        );
    }

    #[test]
    fn each_interval_begins_anew_and_the_last_ends_it() {
        let form = CountForm { each_interval: true, ..form() };
        let last = Counted { last: true, ..counted(2, &[(3, 9, "f")]) };
        let part = Counted { more: true, ..counted(1, &[(2, 1, "g")]) };
        let came = [counted(0, &[]), part, counted(1, &[(3, 7, "f")]), last];
        let tables = printed(form, &came);
        let head = format!("{:<36} {:>8}\n", "FUNC", "COUNT");
        let row = |name, calls| format!("{name:<36} {calls:>8}\n");
        let (_, tables) = tables.split_once("end.\n").unwrap();
        assert_eq!(
            tables,
            format!("\n{head}{}{}\n{head}{}Detaching...\n", row("g", 1), row("f", 7), row("f", 2))
        );
    }

    #[test]
    fn of_many_functions_those_that_were_called_most_are_printed() {
        let form = CountForm { top: Some(2), json: true, ..form() };
        let came = [counted(1, &[(0, 5, "a"), (1, 9, "b"), (2, 7, "c")])];
        let line: serde_json::Value = serde_json::from_str(&printed(form, &came)).unwrap();
        assert_eq!(
            line,
            json!({"seconds": 1.0, "counts": [
                {"function": "c", "count": 7}, {"function": "b", "count": 9}
            ]})
        );
    }
}
