//! A report as a picture: a panel for each number of vCPUs, in it a line for each phase over the number
//! of functions, on an axis of time that all panels share.

use std::fmt::Write;

use super::report::{Report, Run, Summary};

/// One line of a panel.
struct Series {
    name: &'static str,
    colour: &'static str,
    /// Width of the line, in pixels.
    width: f64,
    dashes: &'static str,
    /// Whether the way from the median to the 99th percentile is shaded.
    shaded: bool,
    of: fn(&Run) -> Option<Summary>,
}

const fn thin(name: &'static str, colour: &'static str, of: fn(&Run) -> Option<Summary>) -> Series {
    Series { name, colour, width: 1.5, dashes: "", shaded: false, of }
}

/// What is drawn, the last on top. The colours are told apart also by those who see few of them (Okabe
/// and Ito's set).
const SERIES: [Series; 7] = [
    thin("kick → last vCPU out", "#56b4e9", |run| Some(run.patch.out)),
    thin("→ verified", "#e69f00", |run| run.patch.verified),
    thin("→ written", "#009e73", |run| run.patch.written),
    thin("→ all running again", "#cc79a7", |run| Some(run.patch.running)),
    Series {
        dashes: "6 4",
        width: 2.0,
        ..thin("bare stop: nothing patched", "#777777", |run| Some(run.bare.whole))
    },
    Series {
        dashes: "2 3",
        width: 2.0,
        ..thin("seen by the guest's own clock", "#000000", |run| run.patch.guest_saw)
    },
    Series {
        width: 3.0,
        shaded: true,
        ..thin("whole stop that patches", "#0072b2", |run| Some(run.patch.whole))
    },
];

/// How many of them are phases of the last.
const PHASES: usize = 4;

/// Measures in pixels.
const LEFT: f64 = 74.0;
const TOP: f64 = 78.0;
const WIDTH: f64 = 1060.0;
const PANEL_GAP: f64 = 34.0;
const HEIGHT: f64 = 330.0;
/// Below a panel: labels of the axis and what it is.
const BELOW: f64 = 76.0;
const ROW_OF_PANELS: usize = 3;
/// Between a panel's edge and its first point.
const INSET: f64 = 26.0;
const LEGEND_LINE: f64 = 24.0;
const LEGEND_COLUMN: f64 = 256.0;
const RIGHT: f64 = 26.0;

/// Times below 10 ns are none: the clock's own steps.
const LEAST: f64 = 10.0;

/// The report as an SVG. Every line is a group of the class `series`, and every point of it has its
/// figures as a title.
#[must_use]
pub fn plot(report: &Report) -> String {
    let mut cpus: Vec<usize> = report.runs.iter().map(|run| run.cpus).collect();
    cpus.dedup();
    let columns = cpus.len().clamp(1, ROW_OF_PANELS);
    let rows = cpus.len().div_ceil(ROW_OF_PANELS).max(1);
    let width = WIDTH;
    let panel_width = (width - LEFT - RIGHT + PANEL_GAP) / columns as f64 - PANEL_GAP;
    let bottom = TOP + rows as f64 * (HEIGHT + BELOW);
    let height = bottom + 2.0 * LEGEND_LINE + 6.0;

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"Helvetica, Arial, sans-serif\" \
         font-size=\"13\" fill=\"#222\">\n\
         <title>vmm bench stop-all</title>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    let head = format!("How long a {} guest stands still to be patched", report.guest.kind);
    text(&mut svg, (20.0, 28.0), "font-size=\"18\" font-weight=\"bold\"", &head);
    let host = &report.host;
    let rounds = report.runs.iter().map(|run| run.rounds).max().unwrap_or(0);
    let more = format!(
        "medians of {rounds} rounds; shaded: up to the 99th percentile · {} · host: {} CPUs, {}",
        report.guest.engine, host.cpus, host.model
    );
    text(&mut svg, (20.0, 48.0), "fill=\"#666\"", &more);
    let axis = Axis::of(report);
    for (index, cpus) in cpus.iter().enumerate() {
        let (row, column) = (index / ROW_OF_PANELS, index % ROW_OF_PANELS);
        let x = LEFT + column as f64 * (panel_width + PANEL_GAP);
        let y = TOP + row as f64 * (HEIGHT + BELOW);
        let runs: Vec<&Run> = report.runs.iter().filter(|run| run.cpus == *cpus).collect();
        panel(&mut svg, (x, y, panel_width), &axis, &runs, column == 0);
    }
    self::legend(&mut svg, bottom);
    svg.push_str("</svg>\n");
    svg
}

/// The logarithmic axis of time: whole powers of ten around everything that is drawn.
struct Axis {
    /// Exponents of the least and of the greatest time, in nanoseconds.
    from: i32,
    to: i32,
}

impl Axis {
    fn of(report: &Report) -> Self {
        let times = report.runs.iter().flat_map(|run| {
            SERIES.iter().filter_map(|series| {
                let summary = (series.of)(run)?;
                Some([summary.p50, if series.shaded { summary.p99 } else { summary.p50 }])
            })
        });
        let (mut least, mut greatest) = (f64::MAX, LEAST);
        for time in times.flatten() {
            least = least.min(time as f64);
            greatest = greatest.max(time as f64);
        }
        let from = least.max(LEAST).min(greatest).log10().floor() as i32;
        Self { from, to: (greatest.log10().ceil() as i32).max(from + 1) }
    }

    /// How far below a panel's top a time is.
    fn y(&self, nanoseconds: f64) -> f64 {
        let exponent = nanoseconds.max(LEAST).log10();
        let part = (exponent - f64::from(self.from)) / f64::from(self.to - self.from);
        HEIGHT * (1.0 - part.clamp(0.0, 1.0))
    }
}

fn panel(
    svg: &mut String,
    (x, y, width): (f64, f64, f64),
    axis: &Axis,
    runs: &[&Run],
    labelled: bool,
) {
    let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">");
    for exponent in axis.from..=axis.to {
        let at = axis.y(10_f64.powi(exponent));
        let _ = writeln!(
            svg,
            "<line x1=\"0\" x2=\"{width}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>"
        );
        if labelled {
            let place = (-10.0, at + 4.5);
            text(svg, place, "text-anchor=\"end\"", &time(10_f64.powi(exponent)));
        }
    }
    let plural = if runs[0].cpus == 1 { "" } else { "s" };
    let title = format!("{} vCPU{plural}", runs[0].cpus);
    text(svg, (0.0, -8.0), "font-weight=\"bold\"", &title);
    let step = (width - 2.0 * INSET) / (runs.len().max(2) - 1) as f64;
    let at = |index: usize| match runs.len() {
        1 => width / 2.0,
        _ => INSET + step * index as f64,
    };
    for (index, run) in runs.iter().enumerate() {
        let place = (at(index), HEIGHT + 20.0);
        text(svg, place, "text-anchor=\"middle\"", &run.sites.to_string());
    }
    let place = (width / 2.0, HEIGHT + 42.0);
    text(svg, place, "text-anchor=\"middle\" fill=\"#666\"", "functions patched in one stop");
    for series in &SERIES {
        self::series(svg, series, axis, runs, &at);
    }
    let _ =
        writeln!(svg, "<path d=\"M0 0V{HEIGHT}H{width}\" fill=\"none\" stroke=\"#444\"/>\n</g>");
}

fn series(
    svg: &mut String,
    series: &Series,
    axis: &Axis,
    runs: &[&Run],
    at: &dyn Fn(usize) -> f64,
) {
    let found = runs
        .iter()
        .enumerate()
        .filter_map(|(index, run)| (series.of)(run).map(|summary| (at(index), summary, run.sites)));
    let found: Vec<(f64, Summary, usize)> = found.collect();
    if found.is_empty() {
        return;
    }
    let Series { name, colour, width, dashes, shaded, .. } = series;
    let _ = writeln!(svg, "<g class=\"series\" stroke=\"{colour}\" fill=\"{colour}\">");
    let median = |(x, summary, _): &(f64, Summary, usize)| {
        format!("{x:.1},{:.1}", axis.y(summary.p50 as f64))
    };
    let line: Vec<String> = found.iter().map(median).collect();
    if *shaded {
        let upper = found
            .iter()
            .rev()
            .map(|(x, summary, _)| format!("{x:.1},{:.1}", axis.y(summary.p99 as f64)));
        let outline: Vec<String> = line.iter().cloned().chain(upper).collect();
        let _ = writeln!(
            svg,
            "<polygon points=\"{}\" fill-opacity=\"0.14\" stroke=\"none\"/>",
            outline.join(" ")
        );
    }
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke-width=\"{width}\" \
         stroke-dasharray=\"{dashes}\" stroke-linejoin=\"round\"/>",
        line.join(" ")
    );
    for (x, summary, sites) in &found {
        let _ = writeln!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{:.1}\" r=\"{}\"><title>{}, {sites} functions: median {}, \
             p90 {}, p99 {}, longest {}</title></circle>",
            axis.y(summary.p50 as f64),
            width / 2.0 + 1.8,
            escaped(name),
            time(summary.p50 as f64),
            time(summary.p90 as f64),
            time(summary.p99 as f64),
            time(summary.max as f64),
        );
    }
    svg.push_str("</g>\n");
}

/// What each line is: what is counted as one in the first line, its phases in the second.
fn legend(svg: &mut String, bottom: f64) {
    let _ = writeln!(svg, "<g transform=\"translate(20 {})\">", bottom + 4.0);
    let (phases, wholes) = SERIES.split_at(PHASES);
    let rows = [wholes.iter().rev().collect::<Vec<_>>(), phases.iter().collect()];
    for (row, in_row) in rows.iter().enumerate() {
        for (column, series) in in_row.iter().enumerate() {
            let (x, y) = (column as f64 * LEGEND_COLUMN, row as f64 * LEGEND_LINE);
            let Series { name, colour, width, dashes, .. } = series;
            let _ = writeln!(
                svg,
                "<line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{colour}\" \
                 stroke-width=\"{width}\" stroke-dasharray=\"{dashes}\"/>",
                x + 32.0
            );
            text(svg, (x + 40.0, y + 4.5), "", name);
        }
    }
    svg.push_str("</g>\n");
}

fn text(svg: &mut String, (x, y): (f64, f64), how: &str, what: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" {how}>{}</text>", escaped(what));
}

/// A time with its unit: three digits at most, as the histograms have them.
fn time(nanoseconds: f64) -> String {
    let (value, unit) = match nanoseconds {
        ..1e3 => (nanoseconds, "ns"),
        ..1e6 => (nanoseconds / 1e3, "µs"),
        ..1e9 => (nanoseconds / 1e6, "ms"),
        _ => (nanoseconds / 1e9, "s"),
    };
    let digits = if value.fract() == 0.0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$} {unit}")
}

/// Text as XML has it.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}
