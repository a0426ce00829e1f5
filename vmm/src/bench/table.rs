//! A report as text.

use std::fmt::Write;

use super::report::{Report, Run, Summary};

/// The most columns of a line.
const COLUMNS: usize = 100;

/// The report as a table that fits 100 columns.
#[must_use]
pub fn table(report: &Report) -> String {
    let Report { host, guest, warm_up, runs, .. } = report;
    let mut head = vec![
        format!(
            "Stops of a {} guest under {}: Linux {}, {} functions that can be patched.",
            guest.kind, guest.engine, guest.kernel, guest.functions
        ),
        format!("Host: {} CPUs, {}, Linux {}.", host.cpus, host.model, host.kernel),
    ];
    head.extend(host.kvm.iter().map(|kvm| format!("KVM: {kvm}.")));
    head.push(format!(
        "Times are microseconds. The first {warm_up} rounds of each run do not count. × bare: the \
         median as a multiple of that of the stops in the same rounds in which nothing was done."
    ));
    if runs.iter().any(|run| run.patch.guest_saw.is_none()) {
        head.push("What the guest saw is not known: nobody in it measures.".into());
    }
    if runs.iter().any(|run| run.cpus > host.cpus) {
        let text = "Where there are more vCPUs than CPUs of the host, they wait for one another.";
        head.push(text.into());
    }
    let mut text: String = head.iter().map(|paragraph| wrapped(paragraph)).collect();
    runs.iter().for_each(|run| self::run(&mut text, run));
    text
}

/// A paragraph in lines of no more columns than there are.
fn wrapped(paragraph: &str) -> String {
    let mut text = String::new();
    let mut columns = 0;
    for word in paragraph.split_whitespace() {
        let len = word.chars().count();
        if columns > 0 && columns + 1 + len <= COLUMNS {
            text.push(' ');
            columns += 1 + len;
        } else {
            text.push_str(if columns == 0 { "" } else { "\n" });
            columns = len;
        }
        text.push_str(word);
    }
    text.push('\n');
    text
}

fn run(text: &mut String, run: &Run) {
    let plural = |count| if count == 1 { "" } else { "s" };
    let title = format!(
        "{} vCPU{}, {} function{}",
        run.cpus,
        plural(run.cpus),
        run.sites,
        plural(run.sites)
    );
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "\n{title:<32}{:>10}{:>10}{:>10}{:>10}{:>10}{:>8}{:>8}",
        "p50", "p90", "p99", "p99.9", "max", "count", "× bare"
    );
    let (bare, patch, revert) = (&run.bare, &run.patch, &run.revert);
    row(text, "  kick → last vCPU out", Some(patch.out), Some(bare.out));
    row(text, "  → verified", patch.verified, None);
    row(text, "  → written", patch.written, None);
    row(text, "  → all running again", Some(patch.running), Some(bare.running));
    row(text, "whole stop", Some(patch.whole), Some(bare.whole));
    row(text, "bare stop", Some(bare.whole), None);
    row(text, "reverting stop", Some(revert.whole), Some(bare.whole));
    row(text, "seen by the guest", patch.guest_saw, bare.guest_saw);
    row(text, "seen by it of the bare stop", bare.guest_saw, None);
    if run.again > 0 {
        let stops = if run.again == 1 { "stop was" } else { "stops were" };
        let _ = writeln!(text, "{} {stops} made again", run.again);
    }
}

fn row(text: &mut String, name: &str, summary: Option<Summary>, bare: Option<Summary>) {
    let Some(summary) = summary else { return };
    let _ = write!(text, "{name:<32}");
    for time in [summary.p50, summary.p90, summary.p99, summary.p99_9, summary.max] {
        let _ = write!(text, "{:>10}", microseconds(time));
    }
    let _ = write!(text, "{:>8}", summary.count);
    if let Some(bare) = bare {
        let _ = write!(text, "{:>8.2}", summary.p50 as f64 / bare.p50.max(1) as f64);
    }
    text.push('\n');
}

/// With one digit behind the point, as long as there is room.
fn microseconds(nanoseconds: u64) -> String {
    let microseconds = nanoseconds as f64 / 1000.0;
    match nanoseconds {
        0..100_000_000 => format!("{microseconds:.1}"),
        _ => format!("{microseconds:.0}"),
    }
}
