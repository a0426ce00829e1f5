//! Guests that are reached from other terminals: `vmm ps`, `info`, `pads` and `trace`.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Mutex;

use guest_images::Architecture::X86_64;
use guest_images::{Series, kernel};
use serde_json::Value;
use tests::emulated::{self, LONG, said, signal, wait_until};
use tests::lab::{Trace, vmm};
use vmm::control::protocol::VERSION;

/// A directory of a test's own, with the control sockets of its guests in it; whatever still runs is
/// killed when the test ends.
struct Folder {
    files: emulated::Folder,
    vmm: PathBuf,
    children: Mutex<Vec<u32>>,
}

impl Folder {
    fn new(test: &str) -> Self {
        let files = emulated::Folder::new(X86_64, &format!("control-{test}"));
        Self { files, vmm: vmm(), children: Mutex::default() }
    }

    fn socket(&self, guest: &str) -> PathBuf {
        self.files.path("run").join(format!("{guest}.sock"))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.vmm);
        command.args(arguments).env("VMM_RUN_DIR", self.files.path("run"));
        command.current_dir(self.files.path("."));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn spawn(&self, command: &mut Command) -> Child {
        let child = command.spawn().unwrap();
        self.children.lock().unwrap().push(child.id());
        child
    }

    /// Starts a guest with two CPUs, its console on standard input and output.
    fn run(&self, name: &str, cmdline: &str) -> Child {
        let kernel = kernel(Series::V6_1).unwrap().vmlinuz;
        let mut command = self.command(&["run", "--accel", "tcg", "--cpus", "2", "--kernel"]);
        command.arg(kernel).args(["--initrd", "initrd", "--console", "stdio", "--name", name]);
        self.spawn(command.args(["--cmdline", &format!("quiet {cmdline}")]))
    }

    /// Starts a trace with these options, its output in the file of that name, and waits until its
    /// functions are armed.
    fn trace(&self, guest: &str, options: &[&str], file: &str) -> Tracing {
        self.trace_by("func", guest, options, file)
    }

    /// The same with another tracer.
    fn trace_by(&self, tracer: &str, guest: &str, options: &[&str], file: &str) -> Tracing {
        let mut command = self.command(&["trace", guest, tracer, "-o", file]);
        let mut child = self.spawn(command.args(options));
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut first = String::new();
        said.read_line(&mut first).unwrap();
        assert!(first.starts_with("vmm: tracing Linux 6.1."), "{first}");
        Tracing { child, said, first }
    }

    /// What a command says on standard output, which must succeed.
    fn ask(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ask(arguments)).unwrap()
    }

    /// The states of the pads that match, and by how many clients each is traced.
    fn pads(&self, guest: &str, glob: &str) -> Vec<(String, String, u64)> {
        let pads = self.json(&["pads", guest, glob, "--json"]);
        let text = |pad: &Value, key: &str| pad[key].as_str().unwrap().to_owned();
        let pad = |pad: &Value| {
            (text(pad, "function"), text(pad, "state"), pad["traced_by"].as_u64().unwrap())
        };
        pads.as_array().unwrap().iter().map(pad).collect()
    }

    fn is_nothing_ours(&self, guest: &str) -> bool {
        self.pads(guest, "*").iter().all(|(_, state, _)| state != "ours")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        for child in self.children.lock().unwrap().iter() {
            // Those that ended in order are gone, and were waited for.
            let stat = fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap_or_default();
            if stat.starts_with(&self.vmm.display().to_string()) {
                signal("-KILL", child);
            }
        }
    }
}

/// A trace of another process's guest.
struct Tracing {
    child: Child,
    said: BufReader<ChildStderr>,
    first: String,
}

impl Tracing {
    /// Its exit status, and all that it said.
    fn end(mut self) -> (Option<i32>, String) {
        wait_until("the trace's end", || self.child.try_wait().unwrap().is_some());
        self.said.read_to_string(&mut self.first).unwrap();
        (self.child.wait().unwrap().code(), self.first)
    }
}

/// Reads a guest's console up to a line that has `mark` in it.
fn read_to(console: &mut impl BufRead, mark: &str) {
    let mut seen = String::new();
    while !seen.lines().last().is_some_and(|line| line.contains(mark)) {
        assert!(console.read_line(&mut seen).unwrap() > 0, "no {mark} in {seen}");
    }
}

/// Says something to a socket and gives all that it answers until it closes the connection.
fn answer(socket: &Path, words: &[u8]) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    // A server that has heard enough may have closed it already.
    let _ = stream.write_all(words);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

/// Whatever is said on the socket, the guest's process answers with an error and lives on.
fn abuse(socket: &Path) {
    let hello = format!("{{\"vmm\":\"control\",\"versions\":[{VERSION}]}}\n").into_bytes();
    let after_hello = |words: &[u8]| [&hello[..], words].concat();
    for (words, kind) in [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "malformed"),
        (b"\xff\xfe\0\n".to_vec(), "malformed"),
        (vec![b'x'; 1 << 20], "malformed"),
        (b"{\"vmm\":\"control\",\"versions\":[1,99]}\n".to_vec(), "version"),
        (after_hello(b"{\"request\":\"reboot\"}\n"), "malformed"),
        (after_hello(b"{\"request\":\"stop\"}\n"), "malformed"),
        (after_hello(&[b'['; 100_000]), "malformed"),
    ] {
        let answer = answer(socket, &words);
        let last = answer.lines().last().unwrap_or_default();
        assert!(last.contains(&format!("\"kind\":\"{kind}\"")), "{answer}");
    }
    for half in [&b"{\"vmm\":"[..], &after_hello(b"{\"request\":\"trace\",")[..], b""] {
        UnixStream::connect(socket).unwrap().write_all(half).unwrap();
    }
    // More connections than there may be: those in excess are told so, and all the others still
    // have their places.
    let streams: Vec<UnixStream> = (0..40).map(|_| UnixStream::connect(socket).unwrap()).collect();
    let mut busy = String::new();
    BufReader::new(streams.last().unwrap()).read_line(&mut busy).unwrap();
    assert!(busy.contains("\"kind\":\"busy\""), "{busy}");
}

#[test]
fn two_clients_trace_one_guest_and_each_gets_exactly_its_own() {
    let folder = Folder::new("two");
    let work = "wait-console-line,\
                proc-read:/proc/version:10000@0+proc-read:/proc/uptime:10000@1,\
                wait-console-line,proc-read:/proc/version:500@1";
    let mut guest = folder.run("a", &format!("vmm.work={work}"));
    let mut keys = guest.stdin.take().unwrap();
    let mut console = BufReader::new(guest.stdout.take().unwrap());
    wait_until("the socket", || folder.socket("a").exists());
    let mode = fs::metadata(folder.socket("a")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    // A trace may be asked for before there is a kernel.
    let all = folder.trace("a", &[], "all");
    assert!(!folder.is_nothing_ours("a"));
    read_to(&mut console, "VMM-READY");
    signal("-KILL", all.child.id());
    all.end();
    wait_until("its functions' being put back", || folder.is_nothing_ours("a"));

    let first = folder.trace("a", &["-f", "version_proc_show", "-f", "uptime_proc_show"], "first");
    let filter = ["-f", "uptime_proc_s*", "-f", "handle_mm_fault", "-n", "version*"];
    let second = folder.trace("a", &filter, "second.vmmrec");
    // Two more have the same functions counted, one of them with all others.
    let shown = ["-f", "version_proc_show", "-f", "uptime_proc_show"];
    let counted = folder.trace_by("count", "a", &shown, "counted");
    let all_counted = folder.trace_by("count", "a", &["--json"], "all-counted");
    // And one has them measured.
    let measured = folder.trace_by("latency", "a", &[&shown[..], &["-u"]].concat(), "measured");
    let armed = |function: &str, clients| (function.to_owned(), "ours".to_owned(), clients);
    assert_eq!(folder.pads("a", "uptime_proc_show"), [armed("uptime_proc_show", 5)]);
    assert_eq!(folder.pads("a", "version_proc_show"), [armed("version_proc_show", 4)]);
    let info = folder.json(&["info", "a", "--json"]);
    assert_eq!((&info["state"], &info["engine"]), (&"ready".into(), &"QEMU".into()));
    assert_eq!((&info["arch"], &info["vcpus"]), (&"x86_64".into(), &2.into()));
    assert_eq!(info["who"][0]["pid"], first.child.id());
    assert_eq!(info["who"][1]["request"]["filter"][1], "handle_mm_fault");
    abuse(&folder.socket("a"));

    keys.write_all(b"go\n").unwrap();
    read_to(&mut console, "VMM-READY");
    for counting in [counted, all_counted, measured] {
        signal("-INT", counting.child.id());
        let (status, said) = counting.end();
        assert_eq!(status, Some(130), "{said}");
    }
    assert_eq!(
        folder.files.read("counted"),
        "Tracing 2 functions for \"version_proc_show uptime_proc_show\"... Hit Ctrl-C to end.\n\n\
         FUNC                                    COUNT\n\
         version_proc_show                       10000\n\
         uptime_proc_show                        10000\n\
         Detaching...\n"
    );
    let all_counted: Value = serde_json::from_str(&folder.files.read("all-counted")).unwrap();
    let count = |function: &str| {
        let counts = all_counted["counts"].as_array().unwrap();
        counts
            .iter()
            .find(|entry| entry["function"] == function)
            .map(|entry| entry["count"].clone())
    };
    assert_eq!(count("version_proc_show"), Some(10_000.into()));
    assert_eq!(count("uptime_proc_show"), Some(10_000.into()));
    assert!(count("vfs_read").is_some_and(|reads| reads.as_u64() > Some(20_000)));
    for function in ["version_proc_show", "uptime_proc_show"] {
        let shown = folder.files.read("measured");
        let (_, shown) = shown.split_once(&format!("\nFunction = {function}\n")).unwrap();
        let (head, shown) = shown.split_once('\n').unwrap();
        assert_eq!(head, "     usecs               : count     distribution");
        let (parts, sum) = shown.split_once("\n\navg = ").unwrap();
        let calls = |part: &str| -> u64 {
            part.split([':', '|']).nth(1).unwrap().trim().parse().expect("a count")
        };
        assert_eq!(parts.lines().map(calls).sum::<u64>(), 10_000, "{shown}");
        assert!(sum.lines().next().unwrap().ends_with(" usecs, count: 10000"), "{shown}");
    }
    let top = folder.ask(&["top", "a", "-f", "vfs_*", "--once"]);
    assert!(top.starts_with("vmm top, a, Linux 6.1.") && top.contains("CALLS/S"), "{top}");
    let top = folder.ask(&["top", "a", "-f", "vfs_*", "--once", "--time"]);
    assert!(top.contains("PER CALL"), "{top}");
    signal("-INT", second.child.id());
    let (status, said) = second.end();
    assert_eq!(status, Some(130), "{said}");
    assert!(said.contains(" 0 lost") && said.contains("10,000  uptime_proc_show"), "{said}");
    assert_eq!(folder.pads("a", "uptime_proc_show"), [armed("uptime_proc_show", 1)]);
    assert_eq!(folder.pads("a", "handle_mm_fault")[0].1, "idle");

    // A function of which one trace wants some calls, and others the number and the times of all; and one
    // more trace wants the returns of what the first one traces.
    let shown = ["-f", "single_release"];
    let some = [&shown[..], &["--comm", "proc-read", "--sample", "4"]].concat();
    let some = folder.trace("a", &some, "some");
    let counted = folder.trace_by("count", "a", &shown, "counted");
    let measured = folder.trace_by("latency", "a", &shown, "measured");
    assert_eq!(folder.pads("a", "single_release"), [armed("single_release", 3)]);
    let filter = ["-f", "version_proc_show", "-f", "seq_read_iter"];
    let roots = ["--graph-function", "seq_read_iter"];
    let graph = folder.trace_by(
        "graph",
        "a",
        &[&filter[..], &["--max-depth", "2", "--flame", "graph.svg"], &roots].concat(),
        "graph.vmmrec",
    );

    // The guest ends while somebody traces it.
    keys.write_all(b"go\n").unwrap();
    let [first, some, counted, measured, graph] =
        [first, some, counted, measured, graph].map(|trace| {
            let (status, said) = trace.end();
            assert_eq!(status, Some(0), "{said}");
            assert!(said.contains("the guest has ended"), "{said}");
            said
        });
    for said in [&first, &some, &graph] {
        assert!(said.contains(" 0 lost"), "{said}");
    }
    assert!(some.contains("125  single_release"), "{some}");
    let number_behind = |text: &str, mark: &str| -> u64 {
        let (_, behind) = text.split_once(mark).unwrap_or_else(|| panic!("no {mark} in {text}"));
        let digits = |c: char| c.is_ascii_digit() || c == ',';
        let number: String = behind.trim_start().chars().take_while(|c| digits(*c)).collect();
        number.replace(',', "").parse().unwrap_or_else(|_| panic!("no number in {text}"))
    };
    let all = 125 + number_behind(&some, "filter ");
    assert!(all >= 500, "{some}");
    let table = folder.files.read("counted");
    assert_eq!(number_behind(&table, "\nsingle_release "), all, "{table}\n{counted}");
    let table = folder.files.read("measured");
    assert_eq!(number_behind(&table, "count: "), all, "{table}\n{measured}");
    folder.ask(&["report", "graph.vmmrec", "-o", "graph", "--flame", "again.svg"]);
    let tree = folder.files.read("graph");
    let lines = |call: &str| tree.lines().filter(|line| line.ends_with(call)).count();
    assert_eq!(lines("|    version_proc_show();"), 500, "{tree}");
    // The second read finds the end.
    assert_eq!(lines("|  seq_read_iter() {"), lines("|  }"), "{tree}");
    assert_eq!(lines("|  seq_read_iter() {") + lines("|  seq_read_iter();"), 1000, "{tree}");
    let picture = folder.files.read("graph.svg");
    assert!(
        graph.contains("flame  graph.svg") && picture.contains("version_proc_show ("),
        "{graph}"
    );
    assert!(picture.contains("<title>proc-read ("), "{picture}");
    assert_eq!(folder.files.read("again.svg"), picture, "a recording's picture is the same");
    let guest = guest.wait_with_output().unwrap();
    assert_eq!(guest.status.code(), Some(0), "{}", emulated::said(&guest));
    assert!(!folder.socket("a").exists());

    folder.files.report("second.vmmrec", "second");
    let (first, second) = (folder.files.read("first"), folder.files.read("second"));
    let (first, second) = (Trace::parse(&first), Trace::parse(&second));
    for trace in [&first, &second] {
        trace.check();
        assert_eq!(trace.promised.0, trace.promised.1, "nothing was lost");
    }
    let counts = |trace: &Trace<'_>| {
        ["version_proc_show", "uptime_proc_show"].map(|function| trace.count(function))
    };
    assert_eq!(counts(&first), [10_500, 10_000]);
    assert_eq!(first.lines.len(), 20_500, "nothing of what the other traces");
    assert_eq!(counts(&second), [0, 10_000]);
    assert_eq!(second.count("handle_mm_fault") + 10_000, second.lines.len());
}

#[test]
fn guests_are_listed_and_those_that_are_no_more_are_not() {
    let folder = Folder::new("ps");
    let refused = |arguments: &[&str], sentence: &str| {
        let output = folder.command(arguments).output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("vmm: ") && said.lines().count() == 1, "{said}");
        assert!(said.contains(sentence), "{said}");
    };
    assert_eq!(folder.json(&["ps", "--json"]), Value::Array(Vec::new()));
    let unknown = "there is no guest named b; `vmm ps` lists those that there are";
    for command in [&["info", "b"][..], &["pads", "b"], &["trace", "b", "func"]] {
        refused(command, unknown);
    }
    let mut guests: Vec<Child> =
        ["a", "b"].map(|name| folder.run(name, "vmm.work=idle:1000")).into();
    wait_until("both guests", || ["a", "b"].iter().all(|name| folder.socket(name).exists()));
    let listed = folder.json(&["ps", "--json"]);
    let names = listed.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap());
    assert_eq!(names.collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(listed[1]["pid"], guests[1].id());
    refused(
        &["run", "--accel", "tcg", "--kernel", "initrd", "--name", "b"],
        "there is a guest named b already; choose another --name",
    );

    let b = guests.remove(1);
    signal("-KILL", b.id());
    b.wait_with_output().unwrap();
    assert!(folder.socket("b").exists(), "nobody was left to remove it");
    assert_eq!(folder.ask(&["ps"]).lines().count(), 2, "a head, and one guest");
    assert!(!folder.socket("b").exists());
    refused(&["info", "b"], unknown);
    signal("-TERM", guests[0].id());
    assert_eq!(guests.remove(0).wait_with_output().unwrap().status.code(), Some(143));
    assert!(!folder.socket("a").exists());
}

#[test]
fn a_snapshot_shows_what_is_held_and_the_trace_goes_on() {
    const CALLS: u64 = 20_000;
    let folder = Folder::new("snapshot");
    let work = format!(
        "vmm.work=wait-console-line,proc-read:/proc/version:{CALLS}@0,wait-console-line,\
         proc-read:/proc/version:7@0"
    );
    let kernel = kernel(Series::V6_1).unwrap().vmlinuz;
    let mut command = folder.command(&["run", "--accel", "tcg", "--cpus", "2", "--kernel"]);
    command.arg(kernel).args(["--initrd", "initrd", "--console", "stdio", "--name", "r"]);
    command.args(["--trace", "func", "--overwrite", "--ring-size", "4K", "-o", "last.json"]);
    command.args(["-f", "version_proc_show", "--cmdline", &format!("quiet {work}")]);
    let mut guest = folder.spawn(&mut command);
    let mut keys = guest.stdin.take().unwrap();
    let mut console = BufReader::new(guest.stdout.take().unwrap());
    read_to(&mut console, "VMM-READY");
    // Beside the recorder somebody is given every call.
    let all = folder.trace("r", &["-f", "version_proc_show"], "all.json");
    keys.write_all(b"\n").unwrap();
    read_to(&mut console, "VMM-WORK-END proc-read");
    folder.ask(&["trace", "r", "snapshot", "-o", "snapshot.json"]);
    keys.write_all(b"\n").unwrap();
    let output = emulated::output(guest);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let (status, told) = all.end();
    assert_eq!(status, Some(0), "{told}");

    // How many calls are there, and how many are missing.
    let calls = |file: &str| {
        let text = folder.files.read(file);
        let end: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        let calls = text.lines().filter(|line| line.contains("\"version_proc_show\"")).count();
        assert_eq!(end["events"], calls, "{file}");
        (calls as u64, end["missed"].as_u64().unwrap())
    };
    let [snapshot, last, all] = ["snapshot.json", "last.json", "all.json"].map(calls);
    assert_eq!(snapshot.0 + snapshot.1, CALLS);
    assert_eq!(
        (last.0, last.0 + last.1),
        (snapshot.0, CALLS + 7),
        "it is as full, and has gone on"
    );
    assert!(snapshot.1 > 0);
    assert_eq!(all.0 + all.1, CALLS + 7, "{told}");
    assert!(said.contains("events kept of 20,007 "), "{said}");
}
