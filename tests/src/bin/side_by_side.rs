//! What tracing costs a stock guest, by vmm and by what one would use instead, side by side.
//!
//! ```text
//! side_by_side kvm|qemu|gdbstub KERNEL INITRD
//! ```
//!
//! `kvm` needs a KVM that runs stock kernels; `qemu` and `gdbstub` emulate. Prints a table, and a line of
//! JSON for each row.

use std::fs;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_images::{Qemu as Raw, QemuOptions};
use tests::emulated::wait_for_kernel;
use tests::guest::{Guest, Transcript};
use tests::side_by_side::{Bench, HOT, Row, Shell, number_behind, print};
use vmm::devices::Console;
use vmm::kvm::{Hardware, LinuxBoot};
use vmm::qemu::{Architecture, Launch, Qemu};

/// How long a guest may take to boot: it may run under two layers of emulation.
const PATIENCE: Duration = Duration::from_secs(240);

/// What guests are told.
const CMDLINE: &str = "quiet vmm.work=shell";

/// Turns of the workload with a breakpoint in each: enough for the ratio, few enough to wait for.
const TRAPPED_TURNS: u64 = 2000;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [system, kernel, initrd] = &arguments[..] else {
        bail!("usage: side_by_side kvm|qemu|gdbstub KERNEL INITRD");
    };
    match system.as_str() {
        "kvm" => print("kvm", &kvm(kernel, initrd)?),
        "qemu" => print("qemu", &qemu(kernel, initrd)?),
        "gdbstub" => print("gdbstub", &gdbstub(kernel, initrd)?),
        other => bail!("{other} is none of kvm, qemu and gdbstub"),
    }
    Ok(())
}

fn kvm(kernel: &str, initrd: &str) -> Result<Vec<Row>> {
    let hardware = Hardware { cpus: 2, ..Hardware::default() };
    let boot =
        LinuxBoot { kernel: kernel.into(), initrd: Some(initrd.into()), cmdline: CMDLINE.into() };
    let guest = Guest::boot(&hardware, &boot)?;
    let kernel = guest.kernel(PATIENCE)?;
    guest.wait_for("VMM-READY", PATIENCE)?;
    let shell = Shell { input: guest.vm.console_input(), transcript: guest.transcript.clone() };
    Bench { machine: &guest.vm, kernel: &kernel, shell }.run(Some(TRAPPED_TURNS))
}

fn qemu(kernel: &str, initrd: &str) -> Result<Vec<Row>> {
    let transcript = Transcript::default();
    let launch = Launch {
        cpus: 2,
        rings: 64 << 20,
        initrd: Some(initrd.into()),
        cmdline: CMDLINE.into(),
        ..Launch::new(Architecture::X86_64, kernel)
    };
    let qemu = Qemu::launch(&launch, Console::new(Box::new(transcript.clone()))?)?;
    qemu.start()?;
    let kernel = wait_for_kernel(&qemu);
    let begun = Instant::now();
    while !transcript.text().contains("VMM-READY") {
        ensure!(begun.elapsed() < PATIENCE, "no shell: {}", transcript.text());
        std::thread::sleep(Duration::from_millis(20));
    }
    let shell = Shell { input: qemu.console_input(), transcript };
    Bench { machine: &qemu, kernel: &kernel, shell }.run(None)
}

/// A breakpoint in each turn of the workload, set through QEMU's gdbstub; each call is a stop of the guest,
/// a step and the way on, and nothing is read or recorded: as cheap as a debugger can have it.
fn gdbstub(kernel: &str, initrd: &str) -> Result<Vec<Row>> {
    let folder = std::env::temp_dir().join(format!("side-by-side-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let result = by_gdbstub(kernel, initrd, &folder.join("gdb"));
    fs::remove_dir_all(&folder)?;
    result
}

fn by_gdbstub(kernel: &str, initrd: &str, socket: &Path) -> Result<Vec<Row>> {
    let mut options = QemuOptions::new(kernel, fs::read(initrd)?);
    options.cmdline = CMDLINE.into();
    let server = format!("unix:{},server=on,wait=off", socket.display());
    options.arguments = ["-gdb", &server].map(Into::into).into();
    let mut guest = Raw::start(&options)?;
    guest.console().wait_for("VMM-READY", PATIENCE)?;
    let ended = |guest: &Raw| guest.console().text().matches("VMM-SHELL-END").count();
    let ask = |guest: &mut Raw, line: &str, gdb: Option<&mut Gdb>| -> Result<(String, u64)> {
        let (before, commands) = (guest.console().text().len(), ended(guest));
        guest.type_line(line)?;
        let begun = Instant::now();
        let mut hits = 0;
        let mut gdb = gdb;
        while ended(guest) == commands {
            ensure!(begun.elapsed() < PATIENCE, "{line} does not end");
            match &mut gdb {
                None => std::thread::sleep(Duration::from_millis(5)),
                Some(gdb) => hits += gdb.pass_breakpoints()?,
            }
        }
        let text = guest.console().text();
        Ok((text.get(before..).unwrap_or_default().to_owned(), hits))
    };
    let symbol = format!("grep -w {HOT} /proc/kallsyms");
    let (printed, _) = ask(&mut guest, &symbol, None)?;
    let line = printed.lines().find(|line| line.ends_with(&format!(" {HOT}")));
    let at = line.and_then(|line| line.split(' ').next()).context("the function's address")?;
    let at = u64::from_str_radix(at.trim(), 16)?;

    let mut work = |turns: u64, gdb: Option<&mut Gdb>| -> Result<(f64, u64)> {
        let (text, hits) = ask(&mut guest, &format!("work lseeks:{turns}@0"), gdb)?;
        Ok((number_behind(&text, "VMM-LSEEKS")? / turns as f64, hits))
    };
    let row = |method, what, turns, (turn_ns, events)| Row {
        method,
        what,
        turn_ns,
        events,
        turns,
        ..Row::default()
    };
    let turns = 500_000;
    let mut rows = vec![row("none", "-", turns, work(turns, None)?)];
    let mut gdb = Gdb::connect(socket)?;
    let begun = Instant::now();
    gdb.ask(&format!("Z0,{at:x},1"))?;
    let enable_ms = begun.elapsed().as_secs_f64() * 1e3;
    gdb.send("c")?;
    let trapped = row("gdb breakpoint", "one", TRAPPED_TURNS, work(TRAPPED_TURNS, Some(&mut gdb))?);
    ensure!(trapped.events >= TRAPPED_TURNS, "{} breakpoints were met", trapped.events);
    rows.push(Row { enable_ms, ..trapped });
    gdb.detach(at)?;
    rows.push(row("none", "-", turns, work(turns, None)?));
    Ok(rows)
}

/// What stops a guest, outside of any packet.
const INTERRUPT: u8 = 3;

/// Just enough of gdb's remote protocol.
struct Gdb {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Gdb {
    /// Connects, which stops the guest.
    fn connect(socket: &Path) -> Result<Self> {
        let writer = UnixStream::connect(socket)?;
        writer.set_read_timeout(Some(Duration::from_millis(100)))?;
        let reader = BufReader::new(writer.try_clone()?);
        let mut gdb = Self { writer, reader };
        gdb.ask("?")?;
        Ok(gdb)
    }

    fn send(&mut self, packet: &str) -> Result<()> {
        let sum = packet.bytes().fold(0_u8, |sum, byte| sum.wrapping_add(byte));
        Ok(self.writer.write_all(format!("${packet}#{sum:02x}").as_bytes())?)
    }

    /// Sends a packet and gives the answer to it.
    fn ask(&mut self, packet: &str) -> Result<String> {
        self.send(packet)?;
        let begun = Instant::now();
        loop {
            match self.packet()? {
                // A stop that is told unasked may come before the answer.
                Some(answer) if packet == "?" || !answer.starts_with('T') => return Ok(answer),
                _ => ensure!(begun.elapsed() < PATIENCE, "no answer to {packet}"),
            }
        }
    }

    /// The next packet; none if none begins for a while.
    fn packet(&mut self) -> Result<Option<String>> {
        let mut byte = [0];
        loop {
            match self.reader.read_exact(&mut byte) {
                Ok(()) if byte[0] == b'$' => break,
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        let mut text = Vec::new();
        loop {
            self.reader.read_exact(&mut byte)?;
            if byte[0] == b'#' {
                break;
            }
            text.push(byte[0]);
        }
        self.reader.read_exact(&mut [0; 2])?;
        // QEMU takes the acknowledgement for nothing more than that while the guest stands.
        self.writer.write_all(b"+")?;
        Ok(Some(String::from_utf8(text)?))
    }

    /// Takes the breakpoint away and lets the guest go.
    fn detach(mut self, breakpoint: u64) -> Result<()> {
        self.writer.write_all(&[INTERRUPT])?;
        let begun = Instant::now();
        while self.packet()?.is_none() {
            ensure!(begun.elapsed() < PATIENCE, "the guest does not stop");
        }
        self.ask(&format!("z0,{breakpoint:x},1"))?;
        self.ask("D").map(drop)
    }

    /// Passes what breakpoints are met until none is for a while; tells how many.
    fn pass_breakpoints(&mut self) -> Result<u64> {
        let mut hits = 0;
        while let Some(stop) = self.packet()? {
            let thread = stop.split_once("thread:").and_then(|(_, rest)| rest.split(';').next());
            let thread = thread.with_context(|| format!("{stop} names no processor"))?.to_owned();
            hits += 1;
            self.send(&format!("vCont;s:{thread}"))?;
            while self.packet()?.is_none() {}
            self.send("c")?;
        }
        Ok(hits)
    }
}
