//! Ways of tracing, side by side.

use std::fmt::Write;

use anyhow::{Result, bail};
use serde::Deserialize;

use crate::Figures;
use crate::bars::bars;

/// What is drawn of no slowdown at all.
const NONE: f64 = 0.01;

/// A line that the benchmark `side_by_side` has printed.
#[derive(Deserialize)]
struct Tracer {
    system: String,
    method: String,
    what: String,
    slowdown: f64,
    event_ns: f64,
    events_per_s: f64,
    enable_ms: f64,
    stop_ms: Option<f64>,
    gap_ms: f64,
    lost: u64,
}

/// A table for each system; slowdowns are drawn.
pub fn side_by_side(text: &str) -> Result<Figures> {
    let tracers: Vec<Tracer> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    if tracers.is_empty() {
        bail!("there are no figures");
    }
    let mut table = String::new();
    // What the others are measured against.
    let mut rows = vec![("untraced".to_owned(), NONE, "1.00 ×".to_owned())];
    for system in tracers.chunk_by(|one, next| one.system == next.system) {
        let (name, short) = match &*system[0].system {
            "kvm" => ("Under KVM, in the nested lab", "KVM"),
            "qemu" => ("Under QEMU's TCG", "TCG"),
            "gdbstub" => ("Under QEMU's TCG, by a debugger", "TCG"),
            other => bail!("there is no system {other}"),
        };
        let _ = writeln!(
            table,
            "**{name}**\n\n\
             | who traces | functions | slowdown | ns an event | events/s | until on, ms | our stop, ms | \
             longest gap, ms | lost |\n|---|---|--:|--:|--:|--:|--:|--:|--:|"
        );
        for tracer in system {
            let Tracer { method, what, slowdown, event_ns, events_per_s, .. } = tracer;
            let Tracer { enable_ms, stop_ms, gap_ms, lost, .. } = tracer;
            let stop = stop_ms.map_or_else(|| "–".to_owned(), |stop| format!("{stop:.2}"));
            let _ = writeln!(
                table,
                "| {method} | {what} | {slowdown:.2} | {event_ns:.0} | {events_per_s:.0} | \
                 {enable_ms:.2} | {stop} | {gap_ms:.2} | {lost} |"
            );
            if method != "none" {
                let label = format!("{short}: {method}, {what}");
                // Some are thousands of times as slow as others, and noise makes some no slower at all.
                rows.push((label, slowdown.log10().max(NONE), format!("{slowdown:.2} ×")));
            }
        }
        table.push('\n');
    }
    let title = "Slowdown of the workload, in powers of ten";
    Ok(Figures { table, plot: Some(bars(title, &rows)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_system_has_its_table_and_each_tracer_its_bar() {
        let line = |system: &str, method: &str, slowdown: f64, stop: &str| {
            format!(
                r#"{{"system":"{system}","method":"{method}","what":"one","slowdown":{slowdown},"event_ns":7.4,
"events_per_s":1000.0,"enable_ms":1.5,"stop_ms":{stop},"gap_ms":0.5,"lost":3}}"#
            )
            .replace('\n', " ")
        };
        let text = [
            line("kvm", "none", 1.0, "null"),
            line("kvm", "ours", 1.25, "0.75"),
            line("gdbstub", "gdb breakpoint", 14000.0, "null"),
        ];
        let Figures { table, plot } = side_by_side(&text.join("\n")).unwrap();
        assert!(table.contains("**Under KVM, in the nested lab**"), "{table}");
        assert!(
            table.contains("| ours | one | 1.25 | 7 | 1000 | 1.50 | 0.75 | 0.50 | 3 |"),
            "{table}"
        );
        assert!(table.contains("| gdb breakpoint | one | 14000.00 |"), "{table}");
        let plot = plot.unwrap();
        assert!(plot.contains("TCG: gdb breakpoint, one") && plot.contains("untraced"), "{plot}");
        assert!(side_by_side("").is_err());
        assert!(side_by_side(&line("sparc", "ours", 1.0, "null")).is_err());
    }
}
