//! Bars on an axis that begins at nothing, as SVG.

use std::fmt::Write;

/// Measures in pixels.
const WIDTH: f64 = 860.0;
const LABELS: f64 = 300.0;
const VALUES: f64 = 90.0;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
const HEAD: f64 = 54.0;
const FOOT: f64 = 34.0;

/// A picture of `rows`, each a label, a value above zero and what is written behind its bar; `title`
/// tells what the values are.
///
/// # Panics
/// If no row has a value above zero.
pub fn bars(title: &str, rows: &[(String, f64, String)]) -> String {
    let most = rows.iter().map(|(_, value, _)| *value).fold(0.0, f64::max);
    assert!(most > 0.0, "{title}: bars have lengths");
    let step = step(most);
    let last = (most / step).ceil() as u32;
    let across = |value: f64| LABELS + value / (f64::from(last) * step) * (WIDTH - LABELS - VALUES);
    let height = HEAD + ROW * rows.len() as f64 + FOOT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\" role=\"img\">\n\
         <title>{title}</title>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"16\" y=\"26\" font-size=\"15\" font-weight=\"bold\">{title}</text>\n",
        title = escaped(title),
    );
    // Writing to a string does not fail.
    for tick in 0..=last {
        let value = f64::from(tick) * step;
        let (x, bottom) = (across(value), height - FOOT);
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {HEAD}V{bottom}\" stroke=\"#dddddd\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">{value}</text>",
            bottom + 18.0,
        );
    }
    for (index, (label, value, text)) in rows.iter().enumerate() {
        let top = HEAD + ROW * index as f64 + (ROW - BAR) / 2.0;
        let (base, end) = (top + BAR - 3.5, across(*value));
        // The first is what the others are measured against.
        let colour = if index == 0 { "#999999" } else { "#0072b2" };
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{base:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LABELS}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{base:.1}\">{}</text>",
            LABELS - 8.0,
            escaped(label),
            end - LABELS,
            end + 6.0,
            escaped(text),
        );
    }
    svg + "</svg>\n"
}

/// One, two or five times a power of ten, of which at most ten are in `most`.
fn step(most: f64) -> f64 {
    let power = 10_f64.powf((most / 10.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|times| times * power)
        .into_iter()
        .find(|step| most / step <= 10.0)
        .unwrap_or(most)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_for_each_row_ends_where_its_value_is_on_the_axis() {
        let rows: Vec<_> =
            [1.0, 2.0, 3.0].map(|value| (format!("<{value}>"), value, format!("{value} ×"))).into();
        let svg = bars("how & much", &rows);
        let widths: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<text") && line.contains("<rect"))
            .filter_map(|line| line.split_once("width=\"")?.1.split_once('"')?.0.parse().ok())
            .collect();
        assert_eq!(widths.len(), rows.len());
        let [one, two, three] = widths[..] else { panic!("{widths:?}") };
        assert!((two - 2.0 * one).abs() < 0.2 && (three - 3.0 * one).abs() < 0.3, "{widths:?}");
        assert!(svg.contains("&lt;2&gt;") && svg.contains("how &amp; much"), "{svg}");
    }

    #[test]
    fn steps_are_those_that_a_person_would_take() {
        assert_eq!([0.9, 7.0, 13.0, 40.0, 99.0].map(step), [0.1, 1.0, 2.0, 5.0, 10.0]);
    }
}
