//! Bars on a logarithmic axis, as SVG.

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
/// If there are no rows, or a value is not above zero.
pub fn bars(title: &str, rows: &[(String, f64, String)]) -> String {
    let values = rows.iter().map(|(_, value, _)| *value);
    assert!(
        values.clone().all(|value| value > 0.0) && !rows.is_empty(),
        "{title}: bars have lengths"
    );
    // The axis begins at a power of ten below the least, so that each bar is seen.
    let least = values.clone().fold(f64::INFINITY, f64::min).log10();
    let first = if least.fract() == 0.0 && rows.len() > 1 { least - 1.0 } else { least.floor() };
    let last = values.fold(0.0, f64::max).log10().ceil().max(first + 1.0);
    let across =
        |value: f64| LABELS + (value.log10() - first) / (last - first) * (WIDTH - LABELS - VALUES);
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
    for power in first as i32..=last as i32 {
        let (x, bottom) = (across(10_f64.powi(power)), height - FOOT);
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {HEAD}V{bottom}\" stroke=\"#dddddd\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">{}</text>",
            bottom + 18.0,
            plain(power),
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

/// A power of ten as a person writes it.
fn plain(power: i32) -> String {
    if power < 0 {
        format!("0.{}1", "0".repeat(power.unsigned_abs() as usize - 1))
    } else {
        format!("1{}", "0".repeat(power as usize))
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_for_each_row_ends_where_its_value_is_on_the_axis() {
        let rows: Vec<_> = [1.0, 10.0, 100.0]
            .map(|value| (format!("<{value}>"), value, format!("{value} ×")))
            .into();
        let svg = bars("how & much", &rows);
        let widths: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<text") && line.contains("<rect"))
            .filter_map(|line| line.split_once("width=\"")?.1.split_once('"')?.0.parse().ok())
            .collect();
        assert_eq!(widths.len(), rows.len());
        let [one, ten, hundred] = widths[..] else { panic!("{widths:?}") };
        assert!((ten - one - (hundred - ten)).abs() < 0.2 && ten > one, "{widths:?}");
        assert!(svg.contains("&lt;10&gt;") && svg.contains("how &amp; much"), "{svg}");
    }

    #[test]
    fn powers_are_written_as_a_person_does() {
        assert_eq!([-2, -1, 0, 3].map(plain), ["0.01", "0.1", "1", "1000"]);
    }
}
