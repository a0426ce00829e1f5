//! `guest-images lab`: a command in the nested lab, as if it ran here.

use std::fs;
use std::io::{self, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use guest_images::{Event, Input, Lab, RunningLab, Series, Session};
use rustix::termios::{self, OptionalActions, Termios};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::pair;

/// Ctrl-]: leaves the lab at once, whatever runs there.
const LEAVE: u8 = 0x1d;

/// How often signals to this process are looked for while the script is silent.
const GLANCE: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(crate) struct LabArguments {
    /// The first level's kernel: 5.10, 6.1, 6.12, 6.18 or 7
    #[arg(long, value_name = "SERIES", default_value = "6.1")]
    kernel: Series,
    /// QEMU's name of the first level's processor
    #[arg(long, default_value = guest_images::LAB_CPU, hide_default_value = true)]
    cpu: String,
    /// The first level's RAM in MiB
    #[arg(long, value_name = "MIB", default_value_t = 2500)]
    memory: u32,
    /// A program of the host to put in, with its shared libraries; into /bin if no path is given
    #[arg(long, visible_alias = "binary", value_name = "HOST[:GUEST]")]
    program: Vec<String>,
    /// A file of the host to put in
    #[arg(long, value_name = "HOST:GUEST")]
    file: Vec<String>,
    /// A file to bring back when the command has ended
    #[arg(long, value_name = "GUEST:HOST")]
    fetch: Vec<String>,
    /// Where to write what the first level's kernel says
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Seconds that the command may take; 0 is no limit
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    timeout: u64,
    /// The command, for a shell in the lab
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    script: Vec<String>,
}

/// Runs the command; its exit status.
pub(crate) fn run(arguments: &LabArguments) -> Result<u8> {
    let mut lab = put_together(arguments)?.boot()?;
    let result = attend(&mut lab, &arguments.script.join(" "), arguments.timeout);
    if let Some(path) = &arguments.console {
        fs::write(path, lab.console().text())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let status = result?;
    for names in &arguments.fetch {
        let (guest, host) = pair("--fetch", "GUEST:HOST", names)?;
        let content = lab.fetch(guest, Duration::from_secs(300))?;
        fs::write(host, content).with_context(|| format!("cannot write {host}"))?;
    }
    Ok(u8::try_from(status).unwrap_or(u8::MAX))
}

fn put_together(arguments: &LabArguments) -> Result<Lab> {
    let mut lab = Lab::new(&guest_images::kernel(arguments.kernel)?)?
        .cpu(&arguments.cpu)
        .memory_mib(arguments.memory);
    for names in &arguments.program {
        let (host, guest) = match names.split_once(':') {
            Some((host, guest)) => (host, guest.to_owned()),
            None => {
                let name = names.rsplit('/').next().unwrap_or(names);
                (names.as_str(), format!("/bin/{name}"))
            }
        };
        lab = lab.program(host.as_ref(), &guest)?;
    }
    for names in &arguments.file {
        let (host, guest) = pair("--file", "HOST:GUEST", names)?;
        lab = lab.host_file(host.as_ref(), guest)?;
    }
    Ok(lab)
}

/// Runs a script with this process's own standard streams, on a terminal if this process has one.
fn attend(lab: &mut RunningLab, script: &str, timeout: u64) -> Result<u32> {
    let signals = Arc::new(AtomicUsize::new(0));
    for number in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register_usize(number, signals.clone(), number.unsigned_abs() as usize)
            .context("cannot catch signals")?;
    }
    let raw = RawTerminal::enter();
    let mut session = match &raw {
        Some(terminal) => lab.spawn_on_terminal(script, terminal.size())?,
        None => lab.spawn(script)?,
    };
    let on_terminal = raw.is_some();
    let input = session.input();
    let leave = signals.clone();
    // It stands in a read when the script ends, and goes with the process.
    std::thread::spawn(move || forward_input(input, on_terminal, &leave));
    show_output(&mut session, &signals, timeout)
}

fn show_output(session: &mut Session<'_>, signals: &AtomicUsize, timeout: u64) -> Result<u32> {
    let begin = Instant::now();
    let (mut out, mut err) = (io::stdout(), io::stderr());
    loop {
        match session.next_event(GLANCE)? {
            Some(Event::Stdout(bytes)) => {
                out.write_all(&bytes).and_then(|()| out.flush()).context("cannot write output")?;
            }
            Some(Event::Stderr(bytes)) => err.write_all(&bytes).context("cannot write output")?,
            Some(Event::Exit(status)) => return Ok(status),
            None => {}
        }
        match u8::try_from(signals.swap(0, Ordering::Relaxed)) {
            Ok(0) => {}
            Ok(LEAVE) => bail!("left the lab while the command was running"),
            // The command decides what it means, and its status is ours.
            Ok(number) => session.input().signal(number).context("cannot pass on a signal")?,
            Err(_) => unreachable!("only small numbers are stored"),
        }
        if timeout > 0 && begin.elapsed() >= Duration::from_secs(timeout) {
            bail!("the command did not end within {timeout} s");
        }
    }
}

/// Passes standard input on. If the lab has gone, the other thread says so.
fn forward_input(mut input: Input, on_terminal: bool, leave: &AtomicUsize) {
    let mut buffer = [0; 4096];
    let mut stdin = io::stdin();
    while let Ok(got @ 1..) = stdin.read(&mut buffer) {
        if on_terminal && buffer[..got].contains(&LEAVE) {
            leave.store(LEAVE.into(), Ordering::Relaxed);
        }
        if input.write(&buffer[..got]).is_err() {
            return;
        }
    }
    // An error means the same: the lab has gone.
    let _ = input.close();
}

/// The user's terminal, passing keys on as they come. Dropping it restores the terminal.
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    /// `None` if standard input or output is no terminal.
    fn enter() -> Option<Self> {
        let stdin = io::stdin();
        if !stdin.is_terminal() || !io::stdout().is_terminal() {
            return None;
        }
        let before = termios::tcgetattr(&stdin).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(&stdin, OptionalActions::Now, &raw).ok()?;
        Some(Self { before })
    }

    /// Rows and columns; those of the classic terminal if this one does not say.
    fn size(&self) -> (u16, u16) {
        match termios::tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
            _ => (24, 80),
        }
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Nothing is left to do about a terminal that has gone.
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}
