//! How long calls took, as bcc's funclatency prints it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use patcher::region::Histogram;
use patcher::trace::sink::{Beginning, Event, Sink};
use serde_json::{Value, json};
use vmm::control::protocol::Measured;

use super::CountForm;
use crate::cli::clock::time_of_day;

/// What times are told in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TimeUnit {
    /// Nanoseconds.
    #[default]
    Nanoseconds,
    /// Microseconds.
    Microseconds,
    /// Milliseconds.
    Milliseconds,
}

impl TimeUnit {
    /// What tools of this kind call it.
    fn name(self) -> &'static str {
        match self {
            TimeUnit::Nanoseconds => "nsecs",
            TimeUnit::Microseconds => "usecs",
            TimeUnit::Milliseconds => "msecs",
        }
    }

    /// A time in it. Histograms have their borders at powers of two of nanoseconds, so that there are
    /// decimals in the others; what is below a thousandth is cut off.
    fn shown(self, ns: u64) -> impl fmt::Display {
        match self {
            TimeUnit::Nanoseconds => format!("{ns}"),
            TimeUnit::Microseconds => format!("{}.{:03}", ns / 1000, ns % 1000),
            TimeUnit::Milliseconds => format!("{}.{:03}", ns / 1_000_000, ns / 1000 % 1000),
        }
    }
}

/// How long calls took, by the numbers by which a guest's process tells functions apart.
#[derive(Debug, Default)]
struct LatencyTable(BTreeMap<u32, Row>);

#[derive(Debug)]
struct Row {
    function: String,
    taken: Histogram,
    shown: Histogram,
}

impl LatencyTable {
    /// Takes what came.
    fn take(&mut self, measured: &Measured) {
        for latency in &measured.latencies {
            // What comes from a guest's process was looked at as it came.
            let Some(taken) = latency.histogram() else { continue };
            let function = latency.function.clone();
            let row = || Row { function, taken, shown: Histogram::default() };
            self.0.entry(latency.number).or_insert_with(row).taken = taken;
        }
    }

    /// The functions of which calls have returned since this was last asked, and how long these took; those
    /// that took most together come last, `top` of them at most.
    fn news(&mut self, top: Option<usize>) -> Vec<(&str, Histogram)> {
        let mut news: Vec<(&str, Histogram)> = Vec::new();
        for row in self.0.values_mut() {
            let more = row.taken.since(&row.shown);
            row.shown = row.taken;
            if more.calls() > 0 {
                news.push((&row.function, more));
            }
        }
        news.sort_by(|(a_name, a), (b_name, b)| {
            a.total_ns.cmp(&b.total_ns).then_with(|| b_name.cmp(a_name))
        });
        let first = top.map_or(0, |top| news.len().saturating_sub(top));
        news.split_off(first)
    }
}

/// Prints histograms.
pub struct LatencyText<W> {
    out: W,
    form: CountForm,
    unit: TimeUnit,
    table: LatencyTable,
    elapsed: Duration,
    begun: bool,
}

impl<W: Write> LatencyText<W> {
    /// Prints to `out`, with times in that unit.
    pub fn new(form: CountForm, unit: TimeUnit, out: W) -> Self {
        let table = LatencyTable::default();
        Self { out, form, unit, table, elapsed: Duration::ZERO, begun: false }
    }

    /// Takes what came, and prints it if it is time.
    ///
    /// # Errors
    /// What writing says.
    pub fn measured(&mut self, measured: &Measured) -> io::Result<()> {
        if !self.begun {
            self.begun = true;
            if !self.form.json {
                self.form.begin(&mut self.out, measured.functions)?;
            }
        }
        self.table.take(measured);
        self.elapsed = measured.elapsed;
        let is_due = self.form.each_interval && !measured.elapsed.is_zero();
        if is_due && !measured.more && !measured.last {
            self.print()?;
        }
        self.out.flush()
    }

    fn print(&mut self) -> io::Result<()> {
        let news = self.table.news(self.form.top);
        if self.form.json {
            let latencies: Vec<_> =
                news.iter().map(|(name, histogram)| as_json(name, histogram)).collect();
            let seconds = self.elapsed.as_secs_f64();
            return writeln!(self.out, "{}", json!({"seconds": seconds, "latencies": latencies}));
        }
        if self.form.timestamp {
            writeln!(self.out, "\n{:<8}", time_of_day())?;
        }
        for (name, histogram) in news {
            print(&mut self.out, name, &histogram, self.unit)?;
        }
        Ok(())
    }
}

/// What calls took on average.
fn average(histogram: &Histogram) -> u64 {
    histogram.total_ns.checked_div(histogram.calls()).unwrap_or(0)
}

/// The parts of a histogram up to the last that has calls: from which time on, up to which, and calls.
fn parts(histogram: &Histogram) -> impl Iterator<Item = (u64, u64, u64)> {
    let last = histogram.buckets.iter().rposition(|calls| *calls > 0).map_or(0, |last| last + 1);
    let parts = histogram.buckets.iter().enumerate().take(last);
    parts.map(|(bit, calls)| {
        let from = if bit == 0 { 0 } else { 1 << bit };
        (from, (1 << bit << 1) - 1, *calls)
    })
}

fn as_json(name: &str, histogram: &Histogram) -> Value {
    let parts = parts(histogram).filter(|(_, _, calls)| *calls > 0);
    let parts = parts
        .map(|(from, to, calls)| json!({"from_ns": from, "to_ns": to, "count": calls}))
        .collect::<Vec<_>>();
    json!({
        "function": name,
        "count": histogram.calls(),
        "total_ns": histogram.total_ns,
        "avg_ns": average(histogram),
        "histogram": parts,
    })
}

/// Prints one histogram, in two widths as bcc has them.
fn print(
    out: &mut impl Write,
    name: &str,
    histogram: &Histogram,
    unit: TimeUnit,
) -> io::Result<()> {
    let is_wide = histogram.buckets[32..].iter().any(|calls| *calls > 0);
    let (width, most_stars) = if is_wide { (20, 20) } else { (10, 40) };
    let most = histogram.buckets.iter().copied().max().unwrap_or(0).max(1);
    let unit_name = unit.name();
    writeln!(out, "\nFunction = {name}")?;
    let lead = width - 5;
    let title = width + 9;
    writeln!(out, "{:lead$}{unit_name:<title$} : count     distribution", "")?;
    for (from, to, calls) in parts(histogram) {
        let stars = (u128::from(calls) * most_stars as u128 / u128::from(most)) as usize;
        let (from, to) = (unit.shown(from).to_string(), unit.shown(to).to_string());
        let bar = "*".repeat(stars);
        writeln!(out, "{from:>width$} -> {to:<width$} : {calls:<8} |{bar:<most_stars$}|")?;
    }
    let [average, total] = [average(histogram), histogram.total_ns].map(|ns| unit.shown(ns));
    let calls = histogram.calls();
    writeln!(out, "\navg = {average} {unit_name}, total: {total} {unit_name}, count: {calls}")
}

impl<W: Write> Sink for LatencyText<W> {
    fn begin(&mut self, _beginning: &Beginning<'_>) -> io::Result<()> {
        Ok(())
    }

    /// What is measured is not recorded.
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
    use vmm::control::protocol::Latency;

    use super::*;

    fn latency(number: u32, function: &str, calls: &[u64], total_ns: u64) -> Latency {
        Latency { number, function: function.into(), total_ns, calls: calls.into() }
    }

    fn measured(seconds: u64, latencies: &[Latency]) -> Measured {
        Measured {
            functions: 2,
            elapsed: Duration::from_secs(seconds),
            latencies: latencies.to_vec(),
            ..Measured::default()
        }
    }

    fn form() -> CountForm {
        CountForm {
            pattern: "vfs_*".into(),
            each_interval: false,
            timestamp: false,
            top: None,
            json: false,
            times: Some(TimeUnit::Nanoseconds),
        }
    }

    fn printed(form: CountForm, unit: TimeUnit, came: &[Measured]) -> String {
        let mut text = LatencyText::new(form, unit, Vec::new());
        came.iter().for_each(|measured| text.measured(measured).unwrap());
        text.end(0, 0).unwrap();
        String::from_utf8(text.out).unwrap()
    }

    #[test]
    fn a_histogram_is_printed_as_funclatency_does() {
        let came = [
            measured(0, &[]),
            measured(1, &[latency(3, "vfs_read", &[0, 1, 0, 2], 25)]),
            measured(2, &[latency(3, "vfs_read", &[0, 1, 0, 4], 45)]),
        ];
        assert_eq!(
            printed(form(), TimeUnit::Nanoseconds, &came),
            "\
Tracing 2 functions for \"vfs_*\"... Hit Ctrl-C to end.

Function = vfs_read
     nsecs               : count     distribution
         0 -> 1          : 0        |                                        |
         2 -> 3          : 1        |**********                              |
         4 -> 7          : 0        |                                        |
         8 -> 15         : 4        |****************************************|

avg = 9 nsecs, total: 45 nsecs, count: 5
Detaching...
"
        );
    }

    #[test]
    fn what_takes_seconds_has_wider_columns_and_units_have_decimals() {
        let mut calls = [0; 33];
        (calls[11], calls[32]) = (3, 6);
        let came = [measured(1, &[latency(3, "f", &calls, 25_769_809_920)])];
        let text = printed(form(), TimeUnit::Microseconds, &came);
        let head = "               usecs                         : count     distribution\n";
        assert!(text.contains(head), "{text}");
        let short =
            "               2.048 -> 4.095                : 3        |**********          |\n";
        assert!(text.contains(short), "{text}");
        let long =
            "         4294967.296 -> 8589934.591          : 6        |********************|\n";
        assert!(text.contains(long), "{text}");
        let sum = "avg = 2863312.213 usecs, total: 25769809.920 usecs, count: 9\n";
        assert!(text.contains(sum), "{text}");
        let text = printed(form(), TimeUnit::Milliseconds, &came);
        assert!(
            text.contains("               0.002 -> 0.004                : 3        |"),
            "{text}"
        );
        assert!(
            text.contains("avg = 2863.312 msecs, total: 25769.809 msecs, count: 9\n"),
            "{text}"
        );
    }

    #[test]
    fn each_interval_begins_anew_and_those_that_took_most_come_last() {
        let form = CountForm { each_interval: true, json: true, top: Some(2), ..form() };
        let first = [
            latency(0, "a", &[0, 9], 20),
            latency(1, "b", &[0, 0, 1], 5),
            latency(2, "c", &[0; 6], 0),
        ];
        let second = latency(1, "b", &[0, 0, 1, 0, 2], 40);
        let part = Measured { more: true, ..measured(1, &first[..1]) };
        let last = Measured { last: true, ..measured(2, &[second]) };
        let came = [measured(0, &[]), part, measured(1, &first[1..]), last];
        let lines: Vec<Value> = (printed(form, TimeUnit::Nanoseconds, &came).lines())
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let latency = |function, count, total, average, from, to| {
            json!({
                "function": function,
                "count": count,
                "total_ns": total,
                "avg_ns": average,
                "histogram": [{"from_ns": from, "to_ns": to, "count": count}],
            })
        };
        let first = [latency("b", 1, 5, 5, 4, 7), latency("a", 9, 20, 2, 2, 3)];
        let second = [latency("b", 2, 35, 17, 16, 31)];
        assert_eq!(
            lines,
            [
                json!({"seconds": 1.0, "latencies": first}),
                json!({"seconds": 2.0, "latencies": second})
            ]
        );
    }
}
