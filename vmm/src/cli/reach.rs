//! What the commands that talk to a guest's process share.

use std::time::Duration;

use anyhow::Result;
use vmm::control::{Client, Name, Place};

/// How long a guest's process may take to answer a question: it may be arming every function of an
/// emulated guest for somebody else.
pub const ANSWER: Duration = Duration::from_secs(60);

/// Calls on the guest of that name.
///
/// # Errors
/// There is none, or it can't be reached.
pub fn connect(name: &Name) -> Result<Client> {
    Ok(Client::connect(&Place::of_this_user(), name)?)
}

/// Rows of words as columns of text, each but the last as wide as its widest word.
pub fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (word, width) in row.iter().zip(widths) {
            line.push_str(&format!("{word:<width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_word() {
        let rows = [["NAME", "STATE"], ["a", "ready"], ["longer", "x"]];
        let rows = rows.map(|row| row.map(ToOwned::to_owned));
        assert_eq!(columns(&rows), "NAME    STATE\na       ready\nlonger  x\n");
    }
}
