//! What the commands that look whether a payload fits a kernel can be told.

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use patcher::livepatch::Map;

/// What replaces what, and in which kernel.
#[derive(Debug, Args)]
pub struct Fit {
    /// The payload's function NEW replaces the kernel's OLD; of several functions named OLD the one
    /// at POSITION, counted from 1 as in /proc/kallsyms. May be given several times
    #[arg(long, value_name = "NEW=OLD[,POSITION]", value_parser = parse_map)]
    pub map: Vec<Map>,

    /// Refuse unless the kernel has this release, as uname -r prints it; * and ? stand for whatever
    #[arg(long, value_name = "RELEASE", value_parser = NonEmptyStringValueParser::new())]
    pub release: Option<String>,

    /// Refuse unless the kernel has this build-id, in hexadecimal digits
    #[arg(long, value_name = "BUILD-ID", value_parser = parse_build_id)]
    pub build_id: Option<String>,
}

fn parse_map(text: &str) -> Result<Map, String> {
    Map::parse(text).map_err(|error| error.to_string())
}

fn parse_build_id(text: &str) -> Result<String, &'static str> {
    let is_hexadecimal = text.len() >= 8 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_hexadecimal
        .then(|| text.to_ascii_lowercase())
        .ok_or("8 or more hexadecimal digits are wanted")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_id_is_hexadecimal_and_written_in_small_letters() {
        assert_eq!(parse_build_id("DEADbeef01"), Ok("deadbeef01".to_owned()));
        for wrong in ["", "beef", "0x12345678", "not a build-id"] {
            assert!(parse_build_id(wrong).is_err(), "{wrong}");
        }
    }
}
