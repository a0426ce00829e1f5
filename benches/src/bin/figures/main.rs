//! Writes the figures of a run of the benchmarks into the document that tells of them.
//!
//! ```text
//! figures RESULTS DOCUMENT
//! ```
//!
//! RESULTS is the folder with what the benchmarks have written (`scripts/bench.sh` says which files).
//! In DOCUMENT, what is between `<!-- figures: FILE -->` and `<!-- end of figures -->` is replaced by
//! what is in that file; all else stays as a person has written it. Some are drawn too, into the folder
//! that is named as the document is.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use self::bars::bars;
use self::side_by_side::side_by_side;

mod bars;
mod side_by_side;

const BEGIN: &str = "<!-- figures: ";
const END: &str = "<!-- end of figures -->";

fn main() -> Result<()> {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let [results, document] = &arguments[..] else { bail!("usage: figures RESULTS DOCUMENT") };
    let (results, document) = (Path::new(results), Path::new(document));
    let text =
        fs::read_to_string(document).with_context(|| format!("reading {}", document.display()))?;
    let plots = document.with_extension("");
    let text = rewritten(&text, |name| {
        let figures = read(results, name)?;
        if let Some(plot) = figures.plot {
            let path = plots.join(name).with_extension("svg");
            fs::write(&path, plot).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(figures.table)
    })?;
    fs::write(document, text).with_context(|| format!("writing {}", document.display()))
}

/// The figures of one file.
struct Figures {
    /// In Markdown.
    table: String,
    /// As SVG.
    plot: Option<String>,
}

/// The document with new figures.
fn rewritten(document: &str, table: impl Fn(&str) -> Result<String>) -> Result<String> {
    let mut new = String::new();
    let mut rest = document;
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) = after.split_once(" -->\n").context("a mark of figures has no end")?;
        let (_, after) = after
            .split_once(END)
            .with_context(|| format!("the figures of {name} have no {END} behind them"))?;
        // Writing to a string does not fail.
        let _ = write!(new, "{before}{BEGIN}{name} -->\n\n{}\n{END}", table(name)?);
        rest = after;
    }
    Ok(new + rest)
}

/// The figures in a file.
fn read(results: &Path, name: &str) -> Result<Figures> {
    let path = results.join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let read = match name {
        "stop-all.json" => stops(&text),
        "side-by-side.jsonl" => side_by_side(&text),
        _ => prices(&text),
    };
    read.with_context(|| format!("understanding {}", path.display()))
}

/// A line that `benches::figures` has written.
#[derive(Deserialize)]
struct Price {
    group: String,
    name: String,
    ns: f64,
    ratio: f64,
    note: String,
}

/// A table for each group, in the order in which they come; the first is drawn.
fn prices(text: &str) -> Result<Figures> {
    let mut tables = String::new();
    let prices: Vec<Price> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    if prices.is_empty() {
        bail!("there are no figures");
    }
    for group in prices.chunk_by(|one, next| one.group == next.group) {
        let base = group[0].ns;
        let _ = writeln!(tables, "**{}**\n", group[0].group);
        tables.push_str("| | ratio | ns | ns beyond the first | |\n|---|--:|--:|--:|---|\n");
        for Price { name, ns, ratio, note, .. } in group {
            let (ns, beyond) = (digits(*ns), digits(ns - base));
            let _ = writeln!(tables, "| {name} | {ratio:.2} | {ns} | {beyond} | {note} |");
        }
        tables.push('\n');
    }
    let first = prices.chunk_by(|one, next| one.group == next.group).next().unwrap_or_default();
    let rows: Vec<_> = first
        .iter()
        .map(|price| (price.name.clone(), price.ns, format!("{} ns", digits(price.ns))))
        .collect();
    let plot = bars(&format!("{}, in nanoseconds", first[0].group), &rows);
    Ok(Figures { table: tables, plot: Some(plot) })
}

/// No more digits than a measurement has.
fn digits(ns: f64) -> String {
    let text = if ns.abs() < 100.0 { format!("{ns:.2}") } else { format!("{ns:.0}") };
    if text == "-0.00" { "0.00".to_owned() } else { text }
}

/// What `vmm bench stop-all --json` has written, as far as it is shown.
#[derive(Deserialize)]
struct StopAll {
    host: Host,
    guest: Guest,
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Host {
    cpus: usize,
    model: String,
}

#[derive(Deserialize)]
struct Guest {
    kind: String,
    engine: String,
    functions: usize,
}

#[derive(Deserialize)]
struct Run {
    cpus: usize,
    sites: usize,
    rounds: u64,
    ratio: f64,
    bare: Timing,
    patch: Timing,
}

#[derive(Deserialize)]
struct Timing {
    out: Summary,
    verified: Option<Summary>,
    written: Option<Summary>,
    running: Summary,
    whole: Summary,
    guest_saw: Option<Summary>,
}

/// In nanoseconds.
#[derive(Deserialize)]
struct Summary {
    p50: u64,
    p99: u64,
    p99_9: u64,
    max: u64,
}

/// A row for each number of vCPUs and of functions.
fn stops(text: &str) -> Result<Figures> {
    let StopAll { host, guest, runs } = serde_json::from_str(text)?;
    let mut table = format!(
        "A {} guest of {} functions under {}, on {} CPUs ({}). Times are microseconds; those of phases are \
         medians.\n\n\
         | vCPUs | functions | rounds | × bare | bare stop | whole stop: p50 | p99 | p99.9 | max | last \
         out | verified | written | running | guest saw: p50 | p99 |\n\
         |--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        guest.kind, guest.functions, guest.engine, host.cpus, host.model
    );
    let known = |summary: &Option<Summary>, of: fn(&Summary) -> u64| {
        summary.as_ref().map_or_else(|| "–".to_owned(), |summary| microseconds(of(summary)))
    };
    for Run { cpus, sites, rounds, ratio, bare, patch } in &runs {
        let Timing { out, verified, written, running, whole, guest_saw } = patch;
        let cells = [
            cpus.to_string(),
            sites.to_string(),
            rounds.to_string(),
            format!("{ratio:.2}"),
            microseconds(bare.whole.p50),
            microseconds(whole.p50),
            microseconds(whole.p99),
            microseconds(whole.p99_9),
            microseconds(whole.max),
            microseconds(out.p50),
            known(verified, |summary| summary.p50),
            known(written, |summary| summary.p50),
            microseconds(running.p50),
            known(guest_saw, |summary| summary.p50),
            known(guest_saw, |summary| summary.p99),
        ];
        let _ = writeln!(table, "| {} |", cells.join(" | "));
    }
    Ok(Figures { table, plot: None })
}

fn microseconds(nanoseconds: u64) -> String {
    let microseconds = nanoseconds as f64 / 1000.0;
    if microseconds < 100.0 { format!("{microseconds:.1}") } else { format!("{microseconds:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_person_wrote_stays_and_figures_are_replaced() {
        let document = "# One\n<!-- figures: a -->\nold\n<!-- end of figures -->\ntwo\n\
                        <!-- figures: b -->\n<!-- end of figures -->\n";
        let new = rewritten(document, |name| Ok(format!("new {name}\n"))).unwrap();
        assert!(
            new.starts_with(
                "# One\n<!-- figures: a -->\n\nnew a\n\n<!-- end of figures -->\ntwo\n"
            ),
            "{new}"
        );
        assert!(new.contains("new b") && !new.contains("old"), "{new}");
        // What was rewritten can be again.
        assert_eq!(rewritten(&new, |name| Ok(format!("new {name}\n"))).unwrap(), new);
        let open = rewritten("<!-- figures: a -->\n", |_| Ok(String::new())).unwrap_err();
        assert!(open.to_string().contains("the figures of a have no"), "{open}");
    }

    #[test]
    fn prices_are_tabled_by_group_beside_their_first() {
        let text = r#"{"group":"call","name":"bare","ns":2.0,"ratio":1.0,"note":""}
{"group":"call","name":"traced","ns":5.0,"ratio":2.5,"note":"9 instructions"}
{"group":"stop","name":"bare","ns":1000.0,"ratio":1.0,"note":""}
"#;
        let Figures { table, plot } = prices(text).unwrap();
        assert!(table.contains("| traced | 2.50 | 5.00 | 3.00 | 9 instructions |"), "{table}");
        assert!(table.contains("**stop**") && table.contains("| bare | 1.00 | 1000 | 0.00 |  |"));
        assert!(plot.unwrap().contains("call, in nanoseconds"));
        assert!(prices("").is_err() && prices("{}").is_err());
    }
}
