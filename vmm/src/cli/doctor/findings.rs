//! What is on this host, without judgement.

use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use vmm::kvm::{self, KvmKind};

/// Guest architectures that QEMU is looked for.
const ARCHITECTURES: [&str; 3] = ["x86_64", "s390x", "aarch64"];

/// How long a QEMU binary may take to say its version; it needs some hundredths of a second.
const QEMU_DEADLINE: Duration = Duration::from_secs(10);

/// All that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Findings {
    /// The host's own architecture, as `uname -m` shows it.
    pub architecture: String,
    /// The host kernel's release.
    pub kernel: String,
    /// Whether the time-stamp counter ticks at one rate whatever the CPU does.
    pub invariant_tsc: bool,
    /// The host's KVM.
    pub kvm: KvmKind,
    /// QEMU for each guest architecture.
    pub qemu: Vec<Qemu>,
}

/// The QEMU binary for one guest architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qemu {
    /// The guest architecture.
    pub architecture: &'static str,
    /// What the binary says of itself.
    pub state: QemuState,
}

/// What a QEMU binary says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QemuState {
    /// Not in the search path.
    Missing,
    /// There, but it can't be run or says nothing sensible.
    Broken(String),
    /// There.
    Present {
        /// Major and minor version.
        version: (u32, u32),
        /// The version as the binary spells it.
        spelled: String,
        /// Whether it can emulate, without KVM.
        tcg: bool,
    },
}

impl Findings {
    /// Looks at this host.
    pub fn gather() -> Self {
        let uname = rustix::system::uname();
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            architecture: uname.machine().to_string_lossy().into_owned(),
            kernel: uname.release().to_string_lossy().into_owned(),
            invariant_tsc: has_invariant_tsc(&cpuinfo),
            kvm: kvm::probe(),
            qemu: ARCHITECTURES
                .map(|architecture| Qemu { architecture, state: QemuState::probe(architecture) })
                .into(),
        }
    }
}

/// Whether the CPU flags promise a counter that neither changes its rate nor stops.
fn has_invariant_tsc(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    let has = |flag| flags.is_some_and(|flags| flags.split_whitespace().any(|have| have == flag));
    has("constant_tsc") && has("nonstop_tsc")
}

impl QemuState {
    fn probe(architecture: &str) -> Self {
        let program = format!("qemu-system-{architecture}");
        let version = match output(&program, &["--version"]) {
            Ok(Some(version)) => version,
            Ok(None) => return QemuState::Missing,
            Err(reason) => return QemuState::Broken(reason),
        };
        let Some((version, spelled)) = parse_version(&version) else {
            return QemuState::Broken(format!("`{program} --version` gives no version"));
        };
        let tcg = match output(&program, &["-accel", "help"]) {
            Ok(accelerators) => {
                accelerators.unwrap_or_default().lines().any(|line| line.trim() == "tcg")
            }
            Err(reason) => return QemuState::Broken(reason),
        };
        QemuState::Present { version, spelled, tcg }
    }
}

/// `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)`: the numbers, and the version as spelled.
fn parse_version(said: &str) -> Option<((u32, u32), String)> {
    let spelled = said.lines().next()?.split("version ").nth(1)?.split_whitespace().next()?;
    let mut numbers = spelled.split(|c: char| !c.is_ascii_digit());
    let version = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    Some((version, spelled.to_string()))
}

/// What a program prints, `None` if there is no such program.
fn output(program: &str, arguments: &[&str]) -> Result<Option<String>, String> {
    let command = || format!("`{program} {}`", arguments.join(" "));
    let spawned = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("{} can't be run: {error}", command())),
    };
    let deadline = Instant::now() + QEMU_DEADLINE;
    // What these commands print fits a pipe, so the program ends without being read from.
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                // It may have ended in this instant; waited for it must be either way.
                let _ = child.kill();
                let _ = child.wait();
                let waited = QEMU_DEADLINE.as_secs();
                return Err(format!("{} did not end within {waited} s", command()));
            }
            Err(error) => return Err(format!("{} can't be waited for: {error}", command())),
        }
    };
    if !status.success() {
        return Err(format!("{} failed with {status}", command()));
    }
    let mut said = String::new();
    let read = child.stdout.take().map(|mut stdout| stdout.read_to_string(&mut said));
    match read {
        Some(Ok(_)) => Ok(Some(said)),
        _ => Err(format!("{} printed something that is not text", command())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_distributions_spell_them() {
        for (said, version, spelled) in [
            ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright", (7, 2), "7.2.22"),
            ("QEMU emulator version 10.0.2", (10, 0), "10.0.2"),
            ("QEMU emulator version 9.1.50-rc3 (v9.1)", (9, 1), "9.1.50-rc3"),
        ] {
            assert_eq!(parse_version(said), Some((version, spelled.to_string())));
        }
        for said in ["", "QEMU", "QEMU emulator version x", "version 7"] {
            assert_eq!(parse_version(said), None, "{said}");
        }
    }

    #[test]
    fn a_counter_that_stops_in_idle_is_not_invariant() {
        assert!(has_invariant_tsc("processor: 0\nflags\t: fpu constant_tsc nonstop_tsc sse\n"));
        assert!(!has_invariant_tsc("flags\t: fpu constant_tsc sse\n"));
        assert!(!has_invariant_tsc(""));
    }

    #[test]
    fn programs_that_are_missing_fail_or_hang_are_told_apart() {
        assert_eq!(output("no-such-program-anywhere", &[]), Ok(None));
        assert_eq!(output("echo", &["said"]), Ok(Some("said\n".into())));
        assert!(output("false", &[]).unwrap_err().contains("failed"));
    }
}
