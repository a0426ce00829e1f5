//! Just enough of gdb's remote protocol to stop an emulated guest and read its registers.

use std::collections::HashMap;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::architecture::Architecture;
use crate::registers::VcpuRegisters;

/// How long QEMU may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// The longest answer that is taken in, in bytes. QEMU sends up to 4 KiB.
const ANSWER_LIMIT: usize = 1 << 16;

/// The longest document that is taken in, in bytes. That of aarch64's system registers has 17,000.
const DOCUMENT_LIMIT: usize = 1 << 20;

/// A conversation with QEMU's gdb server. The guest stands still from the connection on, and runs
/// again when this is dropped.
#[derive(Debug)]
pub(crate) struct Gdb {
    architecture: Architecture,
    writer: UnixStream,
    reader: BufReader<UnixStream>,
    /// Registers' numbers by QEMU's names of them.
    places: HashMap<String, u32>,
}

impl Gdb {
    /// Connects, which stops the guest.
    pub(crate) fn connect(socket: &Path, architecture: Architecture) -> io::Result<Self> {
        let writer = UnixStream::connect(socket)?;
        writer.set_read_timeout(Some(PATIENCE))?;
        let reader = BufReader::new(writer.try_clone()?);
        let mut gdb = Self { architecture, writer, reader, places: HashMap::new() };
        // QEMU announces the stop by itself, or with the first question; the answer to this one
        // tells that it has stopped either way.
        gdb.ask("?")?;
        gdb.describe()?;
        Ok(gdb)
    }

    /// The registers of a vCPU, numbered from 0.
    pub(crate) fn registers(&mut self, vcpu: u32) -> io::Result<VcpuRegisters> {
        // Threads are numbered from 1.
        let chosen = self.ask(&format!("Hg{:x}", vcpu + 1))?;
        if chosen != "OK" {
            return Err(invalid(format!("no vCPU {vcpu}: {chosen}")));
        }
        VcpuRegisters::read(self.architecture, |register| {
            let name = register.described;
            let place = *self
                .places
                .get(name)
                .ok_or_else(|| invalid(format!("a description without the register {name}")))?;
            let answer = self.ask(&format!("p{place:x}"))?;
            parse_value(&answer, self.architecture == Architecture::S390x)
                .ok_or_else(|| invalid(format!("{answer:?} as the value of {name}")))
        })
    }

    /// Reads where the registers are. QEMU answers for single registers only once it is asked.
    fn describe(&mut self) -> io::Result<()> {
        let target = self.document("target.xml")?;
        let mut next = 0;
        for file in tags(&target, "xi:include ").filter_map(|tag| attribute(tag, "href")) {
            let feature = self.document(file)?;
            read_description(&feature, &mut self.places, &mut next);
        }
        Ok(())
    }

    /// One of the documents of the description.
    fn document(&mut self, name: &str) -> io::Result<String> {
        let mut text = String::new();
        while text.len() < DOCUMENT_LIMIT {
            // The answer must fit QEMU's packets, of which it says that they have 4 KiB.
            let answer =
                self.ask(&format!("qXfer:features:read:{name}:{:x},{:x}", text.len(), 0xf00))?;
            // A letter tells whether there is more. Nothing in these documents needs an escape.
            let part = answer.get(1..).unwrap_or_default();
            text.push_str(part);
            match answer.as_bytes().first() {
                Some(b'l') => return Ok(text),
                Some(b'm') if !part.is_empty() => {}
                _ => return Err(invalid(format!("{answer:?} in place of {name}"))),
            }
        }
        Err(invalid(format!("an endless {name}")))
    }

    /// Sends a packet and gives the one that answers it.
    fn ask(&mut self, question: &str) -> io::Result<String> {
        let sum = checksum(question.as_bytes());
        self.writer.write_all(format!("${question}#{sum:02x}").as_bytes())?;
        loop {
            let answer = self.packet()?;
            self.writer.write_all(b"+")?;
            // A stop announced unasked may come before the answer.
            if question == "?" || !answer.starts_with('T') {
                return Ok(answer);
            }
        }
    }

    fn packet(&mut self) -> io::Result<String> {
        while self.byte()? != b'$' {}
        let mut text = Vec::new();
        loop {
            match self.byte()? {
                b'#' => break,
                _ if text.len() >= ANSWER_LIMIT => {
                    return Err(invalid("an endless packet".to_owned()));
                }
                byte => text.push(byte),
            }
        }
        // The stream is a local socket: the checksum has nothing to tell.
        self.byte()?;
        self.byte()?;
        String::from_utf8(text).map_err(|_| invalid("a packet that is not text".to_owned()))
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.reader.read_exact(&mut byte)?;
        Ok(byte[0])
    }
}

fn invalid(found: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("QEMU's gdb server sent {found}"))
}

fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// The places of registers by their names, from QEMU's description of them: a register stands at its
/// `regnum`, or behind the one before it.
fn read_description(xml: &str, places: &mut HashMap<String, u32>, next: &mut u32) {
    for tag in tags(&without_comments(xml), "reg ") {
        if let Some(place) = attribute(tag, "regnum").and_then(|place| place.parse().ok()) {
            *next = place;
        }
        if let Some(name) = attribute(tag, "name") {
            places.insert(name.to_owned(), *next);
        }
        *next = next.saturating_add(1);
    }
}

/// QEMU's descriptions have registers in comments, which it does not count.
fn without_comments(xml: &str) -> String {
    let mut parts = xml.split("<!--");
    let before = parts.next().unwrap_or_default();
    let behind = parts.filter_map(|rest| rest.split_once("-->")).map(|(_, behind)| behind);
    std::iter::once(before).chain(behind).collect()
}

/// What stands in the start tags of that name. QEMU's descriptions have no `>` in an attribute.
fn tags<'a>(xml: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    xml.split('<').filter_map(move |rest| rest.strip_prefix(name)?.split('>').next())
}

fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    tag.split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix("=\"")?.split('"').next())
}

/// A register of up to 8 bytes, two digits a byte, in the guest's byte order.
fn parse_value(digits: &str, big_endian: bool) -> Option<u64> {
    let mut bytes: Vec<u8> = digits
        .as_bytes()
        .chunks_exact(2)
        .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())
        .collect::<Option<_>>()?;
    if bytes.is_empty() || bytes.len() > 8 || 2 * bytes.len() != digits.len() {
        return None;
    }
    if !big_endian {
        bytes.reverse();
    }
    Some(bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_have_the_places_that_the_description_gives_them() {
        let (mut places, mut next) = (HashMap::new(), 0);
        let core = r#"<?xml version="1.0"?><!-- a comment -->
            <feature name="core"><flags id="f" size="4"><field name="x" start="0" end="0"/></flags>
              <reg name="r0" bitsize="64" group="general"/>
              <!--reg name="ss_base" bitsize="64"/>
              <reg name="ds_base" bitsize="64"/-->
              <reg name="pc" bitsize="64" type="code_ptr"/></feature>"#;
        read_description(core, &mut places, &mut next);
        let system = r#"<feature name="sys"><reg name="TCR" bitsize="64" regnum="90" type="int"/><reg name="SP_EL0" bitsize="64"/></feature>"#;
        read_description(system, &mut places, &mut next);
        for (name, place) in [("r0", 0), ("pc", 1), ("TCR", 90), ("SP_EL0", 91)] {
            assert_eq!(places.get(name), Some(&place), "{name}");
        }
        assert_eq!(places.len(), 4);
    }

    #[test]
    fn values_are_read_in_the_guests_byte_order() {
        assert_eq!(parse_value("0100000000000080", false), Some(0x8000_0000_0000_0001));
        assert_eq!(parse_value("8000000000000001", true), Some(0x8000_0000_0000_0001));
        assert_eq!(parse_value("46020000", false), Some(0x246));
        for wrong in ["", "E01", "zz", "xxxxxxxxxxxxxxxx", "000102030405060708"] {
            assert_eq!(parse_value(wrong, true), None, "{wrong}");
        }
    }
}
