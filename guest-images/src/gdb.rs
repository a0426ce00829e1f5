//! Just enough of gdb's remote protocol to stop an emulated x86_64 guest and read its registers.

use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long QEMU may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// The longest answer that is taken in, in bytes. A register packet has about 1,100.
const ANSWER_LIMIT: usize = 1 << 16;

/// A conversation with QEMU's gdb server. The guest stands still from the connection on, and runs
/// again when this is dropped.
#[derive(Debug)]
pub(crate) struct Gdb {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
}

/// The registers of an x86_64 vCPU that say where its kernel and its page tables are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VcpuRegisters {
    /// Instruction pointer.
    pub rip: u64,
    /// Stack pointer.
    pub rsp: u64,
    /// Flags.
    pub rflags: u64,
    /// Code segment selector.
    pub cs: u16,
    /// Control register 0.
    pub cr0: u64,
    /// Control register 3.
    pub cr3: u64,
    /// Control register 4.
    pub cr4: u64,
    /// Extended feature enable register.
    pub efer: u64,
    /// Base of GS as it is now.
    pub gs_base: u64,
    /// The GS base that SWAPGS would bring in.
    pub kernel_gs_base: u64,
}

impl VcpuRegisters {
    /// Names and values, in the order of declaration.
    pub(crate) fn fields(&self) -> [(&'static str, u64); 10] {
        [
            ("rip", self.rip),
            ("rsp", self.rsp),
            ("rflags", self.rflags),
            ("cs", self.cs.into()),
            ("cr0", self.cr0),
            ("cr3", self.cr3),
            ("cr4", self.cr4),
            ("efer", self.efer),
            ("gs_base", self.gs_base),
            ("kernel_gs_base", self.kernel_gs_base),
        ]
    }
}

impl Gdb {
    /// Connects, which stops the guest.
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        let writer = UnixStream::connect(socket)?;
        writer.set_read_timeout(Some(PATIENCE))?;
        let reader = BufReader::new(writer.try_clone()?);
        let mut gdb = Self { writer, reader };
        // QEMU announces the stop by itself, or with the first question; the answer to this one
        // tells that it has stopped either way.
        gdb.ask("?")?;
        Ok(gdb)
    }

    /// The registers of a vCPU, numbered from 0.
    pub(crate) fn registers(&mut self, vcpu: u32) -> io::Result<VcpuRegisters> {
        // Threads are numbered from 1.
        let chosen = self.ask(&format!("Hg{:x}", vcpu + 1))?;
        if chosen != "OK" {
            return Err(invalid(format!("no vCPU {vcpu}: {chosen}")));
        }
        let answer = self.ask("g")?;
        parse_registers(&answer)
            .ok_or_else(|| invalid(format!("a register packet of {} digits", answer.len())))
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

/// Reads QEMU's register packet. Its order is that of QEMU's `gdb-xml/i386-64bit.xml`: 16 general
/// registers, rip, eflags (4 bytes), cs ss ds es fs gs (4 bytes each), fs_base, gs_base, k_gs_base,
/// cr0, cr2, cr3, cr4, cr8, efer; little-endian, two digits a byte.
fn parse_registers(packet: &str) -> Option<VcpuRegisters> {
    let bytes: Vec<u8> = packet
        .as_bytes()
        .chunks_exact(2)
        .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())
        .collect::<Option<_>>()?;
    let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    Some(VcpuRegisters {
        rsp: u64_at(7 * 8)?,
        rip: u64_at(16 * 8)?,
        rflags: u32_at(17 * 8)?.into(),
        cs: u16::try_from(u32_at(17 * 8 + 4)?).ok()?,
        gs_base: u64_at(172)?,
        kernel_gs_base: u64_at(180)?,
        cr0: u64_at(188)?,
        cr3: u64_at(204)?,
        cr4: u64_at(212)?,
        efer: u64_at(228)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_read_from_their_places() {
        let mut bytes = Vec::new();
        for general in 0..17u64 {
            bytes.extend_from_slice(&(0x1000 + general).to_le_bytes());
        }
        for small in [0x246u32, 0x10, 0x18, 0, 0, 0, 0] {
            bytes.extend_from_slice(&small.to_le_bytes());
        }
        for wide in 0..9u64 {
            bytes.extend_from_slice(&(0x2000 + wide).to_le_bytes());
        }
        let packet: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            parse_registers(&packet),
            Some(VcpuRegisters {
                rip: 0x1010,
                rsp: 0x1007,
                rflags: 0x246,
                cs: 0x10,
                gs_base: 0x2001,
                kernel_gs_base: 0x2002,
                cr0: 0x2003,
                cr3: 0x2005,
                cr4: 0x2006,
                efer: 0x2008,
            })
        );
        assert_eq!(parse_registers(&packet[..400]), None);
        assert_eq!(parse_registers("zz"), None);
    }
}
