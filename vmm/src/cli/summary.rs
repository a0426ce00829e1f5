//! What is said about a trace on standard error: pure functions, from figures to text.

use std::fmt::Write;
use std::time::Duration;

use patcher::region::RETURN_SLOTS;
use patcher::trace::tracer::{ModuleChange, ModuleNews};
use vmm::control::protocol::{Armed, Totals};

use super::output::FunctionTime;

/// How many functions the summary names.
pub const TOP: usize = 10;

/// The line that says what is traced, from here on.
pub fn armed(armed: &Armed) -> String {
    let reasons: Vec<String> = (armed.refused.iter())
        .map(|(why, count)| format!("{} {why}", grouped(*count as u64)))
        .collect();
    let refused: usize = armed.refused.iter().map(|(_, count)| count).sum();
    let refused = match refused {
        0 => "none refused".to_string(),
        count => format!("{} refused ({})", grouped(count as u64), reasons.join(", ")),
    };
    let stop = match armed.written {
        0 => "others trace them already".to_string(),
        _ => format!("the guest stood for {}", short(armed.stop)),
    };
    format!(
        "tracing Linux {}, KASLR offset {}, {}, {}: {} armed, {refused}; {stop}",
        armed.release,
        signed_hex(armed.kaslr_offset),
        counted(armed.symbols as u64, "symbol"),
        counted(armed.pads as u64, "pad"),
        counted(armed.functions as u64, "function"),
    )
}

/// What has become of a module while its guest is traced.
pub fn module(news: &ModuleNews) -> String {
    let module = &news.module;
    match &news.what {
        ModuleChange::Armed { functions, stop } => format!(
            "the guest has loaded the module {module}: {} armed; it stood for {}",
            counted(*functions as u64, "function"),
            short(stop.total())
        ),
        ModuleChange::Gone { functions } => format!(
            "the guest has unloaded the module {module}: {} forgotten",
            counted(*functions as u64, "traced function")
        ),
        ModuleChange::Failed(error) => format!(
            "the guest has loaded the module {module}, and its functions can't be traced: {error}"
        ),
    }
}

/// What is shown while a trace goes on.
pub fn progress(events: u64, lost: u64, lasted: Duration) -> String {
    let seconds = lasted.as_secs();
    format!("{}, {} lost, {seconds} s; Ctrl-C ends", counted(events, "event"), grouped(lost))
}

/// What is said of a trace that keeps only the last calls.
pub const RECORDING: &str = "only the last calls are kept; they are written when the trace ends, when the \
                             guest crashes, and by vmm trace NAME snapshot";

/// What is shown while such a trace goes on.
pub fn recording(calls: u64, lasted: Duration) -> String {
    let seconds = lasted.as_secs();
    format!("{}, the last are kept, {seconds} s; Ctrl-C ends", counted(calls, "record"))
}

/// What is said when the kernel panics meanwhile.
pub fn held_at_panic(records: u64) -> String {
    format!("the guest's kernel panics; the last {} are written out", counted(records, "record"))
}

/// What a trace of that length came to, with the calls of each function, most first: several lines,
/// each ended.
pub fn summary<N: AsRef<str>>(totals: &Totals, calls: &[(N, u64)], lasted: Duration) -> String {
    let seconds = lasted.as_secs_f64();
    let rate = if seconds > 0.0 { totals.events as f64 / seconds } else { 0.0 };
    let (events, lost) = (counted(totals.events, "event"), grouped(totals.dropped()));
    let mut text = match totals.overwritten.is_empty() {
        true => {
            let rate = grouped(rate.round() as u64);
            format!("{events} in {seconds:.1} s ({rate} a second), {lost} lost\n")
        }
        false => {
            let entries = grouped(totals.entries());
            format!("{events} kept of {entries} in {seconds:.1} s, {lost} lost\n")
        }
    };
    if totals.overrun > 0 {
        let count = counted(totals.overrun, "event");
        let _ = writeln!(text, "  missed {count} that came faster than they could be written out");
    }
    for (title, each, advice) in [
        (
            "over",
            &totals.overwritten,
            " overwritten by later ones; a larger --ring-size of vmm run would keep more",
        ),
        (
            "lost",
            &totals.lost,
            "; a larger --ring-size of vmm run, or fewer functions, would keep them",
        ),
        ("torn", &totals.unwritten, " begun and never finished"),
    ] {
        let each = each.iter().enumerate().filter(|(_, count)| **count > 0);
        let each: Vec<String> =
            each.map(|(cpu, count)| format!("CPU {cpu}: {}", grouped(*count))).collect();
        if !each.is_empty() {
            // Writing to a String does not fail.
            let _ = writeln!(text, "  {title}   {}{advice}", each.join(", "));
        }
    }
    if totals.late > 0 {
        let _ = writeln!(text, "  late   {} out of order", counted(totals.late, "event"));
    }
    for corrupt in &totals.corrupt {
        let _ = writeln!(text, "  spoilt {corrupt}");
    }
    text.push_str(&most_called(calls, 0));
    let (away, named) = named(&totals.turned_away, totals.others_turned_away);
    if away > 0 {
        let calls = counted(away, "call");
        let _ = writeln!(text, "  filter {calls} left out in the guest: {named}");
    }
    text.push_str(&unmatched(totals));
    let mut stops = totals.stops.clone();
    stops.sort_unstable();
    if let Some(longest) = stops.last() {
        let _ = writeln!(
            text,
            "  stops  {}, p50 {}, max {}",
            stops.len(),
            short(stops[(stops.len() - 1) / 2]),
            short(*longest)
        );
    }
    if totals.foreign > 0 {
        let functions = counted(totals.foreign as u64, "function");
        let _ = writeln!(text, "  left   {functions} that the guest has changed meanwhile");
    }
    text
}

/// Lines with what is known of calls that did not return, and of those of which half was lost.
fn unmatched(totals: &Totals) -> String {
    let mut text = String::new();
    let (open, named) = named(&totals.outstanding, totals.others_outstanding);
    if open > 0 {
        let calls = counted(open, "call");
        // Writing to a String does not fail.
        let _ = writeln!(text, "  open   {calls} had not returned: {named}");
    }
    if totals.lost_returns + totals.lost_calls > 0 {
        let _ = writeln!(
            text,
            "  halves {} without a return that was seen, {} without a call",
            counted(totals.lost_returns, "call"),
            counted(totals.lost_calls, "return"),
        );
    }
    if totals.without_slot > 0 {
        let calls = counted(totals.without_slot, "call");
        let most = grouped(RETURN_SLOTS.into());
        let _ = writeln!(
            text,
            "  untold {calls} whose returns were not recorded, as {most} others were out; fewer functions \
             would leave room"
        );
    }
    text
}

/// How many calls there are of these functions and others, and the first of them by name.
fn named(functions: &[(String, u64)], others: u64) -> (u64, String) {
    let sum = |functions: &[(String, u64)]| {
        functions.iter().fold(0_u64, |sum, (_, calls)| sum.saturating_add(*calls))
    };
    let first = &functions[..functions.len().min(TOP)];
    let all = sum(functions).saturating_add(others);
    let told = sum(first);
    let mut named: Vec<String> =
        first.iter().map(|(function, calls)| format!("{function} {}", grouped(*calls))).collect();
    if all > told {
        named.push(format!("{} of others", grouped(all - told)));
    }
    (all, named.join(", "))
}

/// Lines with the functions that took most time themselves, most first.
pub fn times(times: &[FunctionTime]) -> String {
    let mut text = String::new();
    for (index, time) in times.iter().enumerate() {
        let title = if index == 0 { "times" } else { "" };
        let [own, total] =
            [time.self_ns, time.total_ns].map(|time| short(Duration::from_nanos(time)));
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "  {title:<5}  {own:>9} itself, {total:>9} in all  {} ({})",
            time.function,
            counted(time.calls, "call")
        );
    }
    text
}

/// What a recording of a guest with that kernel came to, by its own clock: events in it and missing,
/// the calls of each function, most first, and of all others together.
pub fn recorded<N: AsRef<str>>(
    release: &str,
    (events, missing): (u64, u64),
    calls: &[(N, u64)],
    others: u64,
    lasted: Duration,
) -> String {
    let seconds = lasted.as_secs_f64();
    let head = format!(
        "{} of Linux {release} in {seconds:.1} s of the guest, {} lost\n",
        counted(events, "event"),
        grouped(missing)
    );
    head + &most_called(calls, others)
}

/// Lines with the functions that were called most, out of `calls`, most first. Of functions that are
/// not among these there were so many more calls.
fn most_called<N: AsRef<str>>(calls: &[(N, u64)], more: u64) -> String {
    let mut text = String::new();
    let width = calls.first().map_or(0, |(_, count)| grouped(*count).len());
    for (index, (function, count)) in calls.iter().take(TOP).enumerate() {
        let title = if index == 0 { "calls" } else { "" };
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "  {title:<5}  {:>width$}  {function}",
            grouped(*count),
            function = function.as_ref()
        );
    }
    if let Some(others) = calls.get(TOP..).filter(|others| !others.is_empty()) {
        let rest: u64 = others.iter().map(|(_, count)| count).sum::<u64>() + more;
        let others = counted(others.len() as u64, "other function");
        let _ = writeln!(text, "         {:>width$}  in {others}", grouped(rest));
    }
    text
}

/// A number of bytes in the unit that suits it.
pub fn size(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64),
        None => counted(bytes, "byte"),
    }
}

/// A duration in the unit that suits it.
pub fn short(duration: Duration) -> String {
    let microseconds = duration.as_secs_f64() * 1e6;
    match microseconds {
        us if us < 100.0 => format!("{us:.1} µs"),
        us if us < 1_000.0 => format!("{us:.0} µs"),
        us if us < 1_000_000.0 => format!("{:.1} ms", us / 1e3),
        us => format!("{:.1} s", us / 1e6),
    }
}

/// A distance in bytes.
pub fn signed_hex(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{:#x}", bytes.unsigned_abs())
}

/// A number with its thousands set apart.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of things, `what` being one of them.
pub fn counted(number: u64, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {what}{plural}", grouped(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_tells_rate_losses_calls_and_stops() {
        let came_to = Totals {
            events: 12_345,
            overrun: 5,
            lost: vec![0, 1_200, 34],
            unwritten: vec![1, 0, 0],
            late: 2,
            corrupt: vec!["the ring of CPU 2 is corrupt: its head went from 9 to 1".into()],
            stops: [803, 412, 20_000].map(Duration::from_micros).into(),
            ..Totals::default()
        };
        let calls = [("vfs_read", 12_000), ("vfs_write", 345)];
        assert_eq!(
            summary(&came_to, &calls, Duration::from_secs(5)),
            "\
12,345 events in 5.0 s (2,469 a second), 1,240 lost
  missed 5 events that came faster than they could be written out
  lost   CPU 1: 1,200, CPU 2: 34; a larger --ring-size of vmm run, or fewer functions, would keep them
  torn   CPU 0: 1 begun and never finished
  late   2 events out of order
  spoilt the ring of CPU 2 is corrupt: its head went from 9 to 1
  calls  12,000  vfs_read
            345  vfs_write
  stops  3, p50 803 µs, max 20.0 ms
"
        );
    }

    #[test]
    fn a_summary_of_a_graph_tells_what_took_long_and_what_is_open() {
        let totals = Totals {
            outstanding: vec![("do_wait".into(), 1000), ("do_exit".into(), 2)],
            others_outstanding: 3,
            lost_returns: 4,
            lost_calls: 1,
            without_slot: 2,
            ..Totals::default()
        };
        let text = summary::<&str>(&totals, &[], Duration::ZERO);
        let open = "  open   1,005 calls had not returned: do_wait 1,000, do_exit 2, 3 of others\n";
        let halves = "  halves 4 calls without a return that was seen, 1 return without a call\n";
        let untold = "  untold 2 calls whose returns were not recorded, as 16,384 others were out; fewer \
                      functions would leave room\n";
        assert!(text.ends_with(&[open, halves, untold].concat()), "{text}");
        let time = |function: &str, calls, total_ns, self_ns| FunctionTime {
            function: function.into(),
            calls,
            total_ns,
            self_ns,
        };
        assert_eq!(
            times(&[time("vfs_read", 12, 2_500_000, 1_500_000), time("f", 1, 900, 900)]),
            "  times     1.5 ms itself,    2.5 ms in all  vfs_read (12 calls)\n            \
             0.9 µs itself,    0.9 µs in all  f (1 call)\n"
        );
    }

    #[test]
    fn a_summary_of_the_last_calls_tells_how_many_there_were() {
        let totals = Totals { events: 128, overwritten: vec![1000, 0], ..Totals::default() };
        assert_eq!(
            summary(&totals, &[("f", 128)], Duration::from_secs(5)),
            "128 events kept of 1,128 in 5.0 s, 0 lost\n  over   CPU 0: 1,000 overwritten by later ones; \
             a larger --ring-size of vmm run would keep more\n  calls  128  f\n"
        );
    }

    #[test]
    fn functions_beyond_the_tenth_are_added_up() {
        let calls: Vec<_> = (1..=12).rev().map(|n| (format!("f{n}"), n)).collect();
        let text = summary(&Totals::default(), &calls, Duration::ZERO);
        assert!(text.contains("  calls  12  f12\n         11  f11\n"), "{text}");
        assert!(text.ends_with("          3  f3\n          3  in 2 other functions\n"), "{text}");
    }

    #[test]
    fn a_recording_is_summed_up_by_its_guests_clock() {
        assert_eq!(
            recorded("6.1", (1234, 5), &[("f", 1000), ("g", 234)], 0, Duration::from_millis(1500)),
            "1,234 events of Linux 6.1 in 1.5 s of the guest, 5 lost\n  calls  1,000  f\n           234  g\n"
        );
    }

    #[test]
    fn a_trace_of_nothing_has_a_summary_too() {
        let totals = Totals { lost: vec![0, 0], ..Totals::default() };
        let text = summary::<&str>(&totals, &[], Duration::ZERO);
        assert_eq!(text, "0 events in 0.0 s (0 a second), 0 lost\n");
    }

    #[test]
    fn numbers_and_times_are_written_to_be_read() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0x20_0000, -0x1000, 0].map(signed_hex), ["0x200000", "-0x1000", "0x0"]);
        let sizes = [1, 1000, 1024, 1_500_000, 3 << 31].map(size);
        assert_eq!(sizes, ["1 byte", "1,000 bytes", "1.0 KiB", "1.4 MiB", "6.0 GiB"]);
        assert_eq!(counted(1, "pad"), "1 pad");
        assert_eq!(counted(1000, "pad"), "1,000 pads");
        let shown =
            [1_500, 412_000, 20_000_000, 3_200_000_000].map(Duration::from_nanos).map(short);
        assert_eq!(shown, ["1.5 µs", "412 µs", "20.0 ms", "3.2 s"]);
    }
}
