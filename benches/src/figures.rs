//! Figures beside what they are measured against: a table for people, JSON lines for programs.

use std::fs::File;
use std::io::{self, Write};

/// One figure.
#[derive(Debug, Clone)]
struct Row {
    name: String,
    ns: f64,
    note: String,
}

/// Figures of one kind, of which the first is what the others are measured against.
#[derive(Debug)]
pub struct Figures {
    title: String,
    rows: Vec<Row>,
}

impl Figures {
    /// None yet.
    #[must_use]
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), rows: Vec::new() }
    }

    /// Adds a figure in nanoseconds, and what else is to be said of it.
    pub fn add(&mut self, name: &str, ns: f64, note: impl Into<String>) {
        self.rows.push(Row { name: name.to_owned(), ns, note: note.into() });
    }

    fn base(&self) -> f64 {
        self.rows.first().map_or(f64::NAN, |row| row.ns)
    }

    /// Writes the table.
    ///
    /// # Errors
    /// What writing says.
    pub fn table(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}", self.title)?;
        writeln!(out, "{:<36} {:>12} {:>9} {:>12}", "", "ns", "ratio", "beyond")?;
        let base = self.base();
        for Row { name, ns, note } in &self.rows {
            let (ratio, beyond) = (ns / base, ns - base);
            let line = format!("{name:<36} {ns:>12.2} {ratio:>9.2} {beyond:>12.2}  {note}");
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    /// Writes a line of JSON for each figure: `{"group", "name", "ns", "ratio", "note"}`.
    ///
    /// # Errors
    /// What writing says.
    pub fn json(&self, out: &mut dyn Write) -> io::Result<()> {
        let base = self.base();
        for Row { name, ns, note } in &self.rows {
            let line = serde_json::json!({
                "group": self.title, "name": name, "ns": ns, "ratio": ns / base, "note": note,
            });
            writeln!(out, "{line}")?;
        }
        Ok(())
    }
}

/// What stands behind `name` among the program's arguments.
#[must_use]
pub fn argument(name: &str) -> Option<String> {
    std::env::args().skip_while(|argument| argument != name).nth(1)
}

/// Prints tables, and writes lines of JSON where the program's arguments say: `--json FILE`, which
/// is begun anew.
///
/// # Errors
/// What writing says.
pub fn publish(all: &[Figures]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for figures in all {
        figures.table(&mut out)?;
        writeln!(out)?;
    }
    if let Some(path) = argument("--json") {
        let mut file = File::create(path)?;
        for figures in all {
            figures.json(&mut file)?;
        }
    }
    Ok(())
}

/// The middle of `values`, by size.
///
/// # Panics
/// If there are none.
#[must_use]
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
