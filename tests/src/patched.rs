//! Guests that are patched from outside and asked from inside, under `vmm` in the lab or on this host.
//!
//! Everything goes through shell scripts, so that the same test runs in both places. A guest's console
//! is a pair of files; the `shell` of its workloads reads commands from there and prints what they say.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use guest_images::Architecture;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::lab::{VmmLab, vmm};

/// What a script came to.
#[derive(Debug, Clone)]
pub struct Ran {
    /// Its exit status.
    pub status: i32,
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
}

/// Where scripts run.
pub trait Host {
    /// Runs a script to its end.
    fn run(&mut self, script: &str) -> Ran;

    /// Starts a script that has neither input nor output.
    fn spawn(&mut self, script: &str);
}

impl Host for VmmLab {
    fn run(&mut self, script: &str) -> Ran {
        let outcome = VmmLab::run(self, script);
        let (stdout, stderr) = (outcome.stdout_text(), outcome.stderr_text());
        Ran { status: outcome.status as i32, stdout, stderr }
    }

    fn spawn(&mut self, script: &str) {
        let ran = Host::run(self, &format!("({script}) </dev/null >/dev/null 2>&1 &"));
        assert_eq!(ran.status, 0, "{ran:?}");
    }
}

/// This host. What was started there is killed when it is dropped.
#[derive(Default)]
pub struct Here {
    children: Vec<Child>,
}

impl Here {
    fn command(script: &str) -> Command {
        let program = vmm();
        let own = program.parent().expect("a program is in a folder").display().to_string();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("PATH", format!("{own}:{path}")).stdin(Stdio::null());
        command
    }
}

impl Host for Here {
    fn run(&mut self, script: &str) -> Ran {
        let output = Self::command(script).output().expect("a shell");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ran {
            status: output.status.code().unwrap_or(-1),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        }
    }

    fn spawn(&mut self, script: &str) {
        let mut command = Self::command(script);
        command.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        self.children.push(command.spawn().expect("a shell"));
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        for child in &mut self.children {
            // A group whose processes have all ended is gone.
            if let (Ok(None), Some(group)) = (child.try_wait(), Pid::from_raw(child.id() as i32)) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            let _ = child.wait();
        }
    }
}

/// A guest, and the folder in which its files are.
pub struct Patched<'h> {
    host: &'h mut dyn Host,
    folder: String,
    /// Commands that its shell was asked since it booted, and before that.
    asked: usize,
    before: usize,
}

/// How long anything may take, in hundredths of a second.
const LONG: u32 = 30_000;

impl<'h> Patched<'h> {
    /// Starts `command`, a guest with its console on standard input and output and `vmm.work=shell`, and
    /// waits for its shell. What it keeps goes into `folder`, which is made.
    ///
    /// # Panics
    /// It does not come up.
    #[must_use]
    pub fn start(host: &'h mut dyn Host, folder: &str, command: &str) -> Self {
        let mut guest = Self { host, folder: folder.to_owned(), asked: 0, before: 0 };
        guest.succeed("mkdir -p $F && mkfifo $F/keys");
        guest.spawn("guest", &format!("exec 3<>$F/keys; exec {command} <&3"));
        guest.wait("the guest's shell", "grep -q VMM-READY $F/guest || [ -e $F/guest.status ]");
        assert!(guest.read("guest").contains("VMM-READY"), "{}", guest.everything());
        guest
    }

    /// Runs a script, in which `$F` is the folder.
    pub fn run(&mut self, script: &str) -> Ran {
        let folder = &self.folder;
        self.host.run(&format!("F={folder}; export VMM_RUN_DIR=$F/run; {script}"))
    }

    /// Runs a script that must succeed, and gives what it writes.
    ///
    /// # Panics
    /// It does not.
    pub fn succeed(&mut self, script: &str) -> String {
        let ran = self.run(script);
        assert_eq!(ran.status, 0, "{script}: {ran:?}\n{}", self.everything());
        ran.stdout
    }

    /// Starts a script whose outputs go to `NAME` and `NAME.said`, its process number to `NAME.pid`, and
    /// in the end its status to `NAME.status`.
    pub fn spawn(&mut self, name: &str, script: &str) {
        let folder = &self.folder;
        let inner = script.replace('\'', "'\\''");
        self.host.spawn(&format!(
            "export F={folder} VMM_RUN_DIR={folder}/run; rm -f $F/{name}.status; \
             sh -c 'echo $$ >$F/{name}.pid; {inner}' >$F/{name} 2>$F/{name}.said; \
             echo $? >$F/{name}.status.new; mv $F/{name}.status.new $F/{name}.status"
        ));
    }

    /// Waits until a condition holds.
    ///
    /// # Panics
    /// It does not.
    pub fn wait(&mut self, what: &str, condition: &str) {
        let ran = self.run(&format!(
            "i=0; until {condition}; do i=$((i + 1)); [ $i -lt {LONG} ] || exit 99; \
             usleep 10000 2>/dev/null || sleep 0.01; done"
        ));
        assert_eq!(ran.status, 0, "{what} did not come: {}", self.everything());
    }

    /// Waits for the end of what was spawned by that name; gives its exit status, and what it said on
    /// standard error.
    ///
    /// # Panics
    /// It does not end.
    pub fn end_of(&mut self, name: &str) -> (i32, String) {
        self.wait(name, &format!("[ -e $F/{name}.status ]"));
        let status = self.read(&format!("{name}.status"));
        (status.trim().parse().expect("a status"), self.read(&format!("{name}.said")))
    }

    /// The text of a file in the folder; nothing if there is none.
    pub fn read(&mut self, name: &str) -> String {
        self.run(&format!("cat $F/{name} 2>/dev/null")).stdout.replace('\r', "")
    }

    /// Has the guest's shell run a command, and gives what it printed.
    ///
    /// # Panics
    /// It does not, or the command fails.
    pub fn ask(&mut self, command: &str) -> String {
        self.asked += 1;
        let quoted = command.replace('\'', "'\\''");
        self.succeed(&format!("printf '%s\\n' '{quoted}' >$F/keys"));
        let answered = format!(
            "[ $(grep -c 'VMM-SHELL-END [0-9]' $F/guest) -ge {} ] || [ -e $F/guest.status ]",
            self.before + self.asked
        );
        self.wait(command, &answered);
        let console = self.read("guest");
        let (_, mut rest) = console.rsplit_once("VMM-READY\n").expect("a shell");
        let (mut answer, mut status) = ("", "");
        for _ in 0..self.asked {
            let next = rest.split_once("VMM-SHELL-END ");
            (answer, rest) = next.unwrap_or_else(|| panic!("no answer to {command}: {console}"));
            (status, rest) = rest.split_once('\n').unwrap_or((rest, ""));
        }
        let answer = answer.to_owned();
        assert_eq!(status, "0", "{command}: {answer}");
        answer
    }

    /// Has the guest reboot, and waits for its shell.
    ///
    /// # Panics
    /// It does not come up again.
    pub fn reboot(&mut self) {
        let boots = self.succeed("grep -c VMM-READY $F/guest");
        self.succeed("echo 'echo b >/proc/sysrq-trigger' >$F/keys");
        let booted = format!("[ $(grep -c VMM-READY $F/guest) -gt {} ]", boots.trim());
        self.wait("the shell of the guest that reboots", &booted);
        self.before += std::mem::take(&mut self.asked);
    }

    /// Runs `vmm` with these arguments.
    pub fn vmm(&mut self, arguments: &str) -> Ran {
        self.run(&format!("vmm {arguments}"))
    }

    /// Runs `vmm` with these arguments, which must succeed, and gives what it says on standard error.
    ///
    /// # Panics
    /// It does not.
    pub fn done(&mut self, arguments: &str) -> String {
        let ran = self.vmm(arguments);
        assert_eq!(ran.status, 0, "vmm {arguments}: {ran:?}\n{}", self.everything());
        ran.stderr
    }

    /// Runs `vmm` with these arguments, which must fail with that status and one sentence that has
    /// `words` in it.
    ///
    /// # Panics
    /// It does not.
    pub fn refused(&mut self, arguments: &str, status: i32, words: &[&str]) {
        let ran = self.vmm(arguments);
        let said = &ran.stderr;
        assert_eq!(ran.status, status, "vmm {arguments}: {ran:?}");
        assert!(said.starts_with("vmm: ") && said.lines().count() == 1, "vmm {arguments}: {said}");
        for word in words {
            assert!(said.contains(word), "vmm {arguments} does not say {word:?}: {said}");
        }
    }

    /// What the guest's console and its `vmm` have said.
    fn everything(&mut self) -> String {
        let show = "for f in $F/guest $F/*.said; do echo \"== $f\"; tail -n 40 $f; done";
        self.run(show).stdout
    }
}

/// Compiles the payloads of `samples/livepatch` and of `tests/payloads` for an architecture, as
/// `docs/live-patching.md` says; gives the folder in which they are, `NAME.o` each.
///
/// # Panics
/// They can't be compiled.
#[must_use]
pub fn payloads(architecture: Architecture, folder: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let ours = root.join("tests/payloads");
    let objects = folder.join(architecture.to_string());
    let sources =
        fs::read_dir(&ours).expect("the payloads of tests").map(|entry| entry.unwrap().path());
    let targets = sources.map(|source| {
        let name = source.file_stem().expect("a source's name").to_string_lossy().into_owned();
        objects.join(format!("{name}.o"))
    });
    let status = Command::new("make")
        .args(["--silent", "-C"])
        .arg(root.join("samples/livepatch"))
        .arg(format!("ARCH={architecture}"))
        .arg(format!("O={}", folder.display()))
        .arg(format!("VPATH={}", ours.display()))
        .arg("samples")
        .args(targets)
        .status()
        .expect("make");
    assert!(status.success(), "the payloads can't be compiled");
    objects
}
