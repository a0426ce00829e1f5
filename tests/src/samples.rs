//! What holds for every guest that is patched by the payloads of `samples/livepatch`, asked from inside.

use serde_json::Value;

use crate::lab::Trace;
use crate::patched::Patched;

/// A sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sample {
    /// `proc-cmdline.c`
    ProcCmdline,
    /// `hot-return.c`
    HotReturn,
    /// `shared-state.c`
    SharedState,
}

impl Sample {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::ProcCmdline, Self::HotReturn, Self::SharedState];

    fn file(self) -> &'static str {
        match self {
            Sample::ProcCmdline => "proc-cmdline.o",
            Sample::HotReturn => "hot-return.o",
            Sample::SharedState => "shared-state.o",
        }
    }

    fn functions(self) -> &'static [&'static str] {
        match self {
            Sample::ProcCmdline => &["cmdline_proc_show"],
            Sample::HotReturn => &["null_lseek"],
            Sample::SharedState => &["get_avenrun", "loadavg_proc_show", "nr_running"],
        }
    }

    /// Checks that the guest sees its effect, or does not.
    ///
    /// # Panics
    /// It is not so.
    pub fn check(self, guest: &mut Patched<'_>, applied: bool) {
        match self {
            Sample::ProcCmdline => {
                let shown = guest.ask("cat /proc/cmdline");
                if applied {
                    assert_eq!(shown, "this kernel has been patched from outside\n");
                } else {
                    assert!(shown.contains("vmm.work=shell"), "{shown}");
                }
            }
            Sample::HotReturn => {
                let (old, new) = if applied { (0, 999) } else { (999, 0) };
                answers(guest, "null-lseek", &format!("old={old} new={new} wrong=0 switches=0"));
            }
            Sample::SharedState => {
                let (old, new) = if applied { (0, 198) } else { (198, 0) };
                answers(guest, "loadavg", &format!("old={old} new={new} wrong=0 switches=0"));
            }
        }
    }
}

/// Has the guest ask its kernel, so often as the work does at least, and checks the answers.
fn answers(guest: &mut Patched<'_>, work: &str, expected: &str) {
    let said = guest.ask(&format!("work {work}:/init"));
    let answers = said.lines().find_map(|line| line.strip_prefix("VMM-ANSWERS "));
    assert_eq!(answers, Some(format!("{work}:/init {expected}").as_str()), "{said}");
}

fn json(guest: &mut Patched<'_>, arguments: &str) -> Value {
    let ran = guest.vmm(&format!("{arguments} --json"));
    assert_eq!(ran.status, 0, "vmm {arguments}: {ran:?}");
    serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {}", ran.stdout))
}

/// Each of these samples, in `payloads`, is applied to the guest `a`, seen from inside and from outside,
/// and reverted.
///
/// # Panics
/// It is not so.
pub fn every_sample_takes_effect_and_is_taken_back(
    guest: &mut Patched<'_>,
    payloads: &str,
    samples: &[Sample],
) {
    for sample in samples {
        let (file, functions) = (sample.file(), sample.functions());
        sample.check(guest, false);
        let applied = json(guest, &format!("patch a apply {payloads}/{file}"));
        let id = applied["patch"]["id"].as_u64().expect("a number");
        sample.check(guest, true);

        let listed = json(guest, "patch a list");
        assert_eq!(listed.as_array().map(Vec::len), Some(1), "{listed}");
        let mut names: Vec<&str> = (listed[0]["functions"].as_array().expect("functions").iter())
            .map(|function| function["name"].as_str().expect("a name"))
            .collect();
        names.sort_unstable();
        assert_eq!(names, functions);
        let sum = guest.succeed(&format!("sha256sum {payloads}/{file}"));
        let info = json(guest, "info a");
        let mut record = info["patched"].as_array().expect("patches").iter();
        let shown = record.find(|patch| patch["id"] == id).expect("the patch");
        assert_eq!(shown["state"], "in-force", "{info}");
        assert_eq!((&shown["file"], &shown["sites"]), (&file.into(), &functions.len().into()));
        assert!(sum.starts_with(shown["sha256"].as_str().expect("a digest")), "{sum}: {info}");
        assert_eq!(json(guest, "ps")[0]["patches"], 1);

        let said = guest.done(&format!("patch a revert {id}"));
        assert!(said.starts_with(&format!("vmm: patch {id} is reverted: ")), "{said}");
        sample.check(guest, false);
        assert_eq!(json(guest, "patch a list").as_array().map(Vec::len), Some(0));
        let info = json(guest, "info a");
        let last = info["patched"].as_array().and_then(|record| record.last()).expect("a record");
        assert_eq!((&last["id"], &last["state"]), (&id.into(), &"reverted".into()), "{info}");
    }
}

/// Of two patches of one function the later one is in force, in whichever order they are reverted.
///
/// # Panics
/// It is not so.
pub fn patches_of_one_function_are_stacked(guest: &mut Patched<'_>, payloads: &str) {
    let shown = |guest: &mut Patched<'_>| guest.ask("cat /proc/cmdline");
    let states = |guest: &mut Patched<'_>| -> Vec<(u64, String)> {
        let listed = json(guest, "patch a list");
        let patches = listed.as_array().expect("patches").iter();
        let word = |patch: &Value| patch["state"].as_str().expect("a state").to_owned();
        patches.map(|patch| (patch["id"].as_u64().expect("a number"), word(patch))).collect()
    };
    let apply = |guest: &mut Patched<'_>, file: &str| {
        let applied = json(guest, &format!("patch a apply {payloads}/{file}"));
        applied["patch"]["id"].as_u64().expect("a number")
    };
    let before = shown(guest);
    let first = apply(guest, "proc-cmdline.o");
    let second = apply(guest, "second-cmdline.o");
    assert_eq!(shown(guest), "and patched again\n");
    assert_eq!(states(guest), [(first, "covered".into()), (second, "in-force".into())]);
    guest.done(&format!("patch a revert {first}"));
    assert_eq!(shown(guest), "and patched again\n");
    let third = apply(guest, "proc-cmdline.o");
    assert_eq!(shown(guest), "this kernel has been patched from outside\n");
    guest.done(&format!("patch a revert {third}"));
    assert_eq!(shown(guest), "and patched again\n");

    // One that takes the place of all others: what it does not replace is put back.
    let replacing = json(guest, &format!("patch a apply {payloads}/hot-return.o --replace"));
    assert_eq!(replacing["replaced"], serde_json::json!([second]));
    assert_eq!(shown(guest), before);
    Sample::HotReturn.check(guest, true);
    let id = replacing["patch"]["id"].as_u64().expect("a number");
    assert_eq!(states(guest), [(id, "in-force".into())]);
    guest.done(&format!("patch a revert {id}"));
    Sample::HotReturn.check(guest, false);
}

/// A function that is traced and patched is recorded once a call and answers as the new one; without
/// the one it still is the other.
///
/// # Panics
/// It is not so.
pub fn traced_and_patched_at_once(guest: &mut Patched<'_>, payloads: &str) {
    let apply = format!("patch a apply {payloads}/hot-return.o");
    guest.spawn("trace", "exec vmm trace a func -f null_lseek -o $F/calls");
    guest.wait("a trace", "grep -q armed $F/trace.said");
    Sample::HotReturn.check(guest, false);
    let id = json(guest, &apply)["patch"]["id"].as_u64().expect("a number");
    Sample::HotReturn.check(guest, true);
    guest.done(&format!("patch a revert {id}"));
    Sample::HotReturn.check(guest, false);
    let id = json(guest, &apply)["patch"]["id"].as_u64().expect("a number");
    Sample::HotReturn.check(guest, true);
    guest.succeed("kill -INT $(cat $F/trace.pid)");
    let (status, said) = guest.end_of("trace");
    assert_eq!(status, 130, "{said}");
    assert!(said.contains(" 0 lost"), "{said}");
    Sample::HotReturn.check(guest, true);
    guest.done(&format!("patch a revert {id}"));
    Sample::HotReturn.check(guest, false);
    let calls = guest.read("calls");
    let trace = Trace::parse(&calls);
    trace.check();
    assert_eq!(trace.count("null_lseek"), 4 * 999, "once a call, until the trace ended");
    assert_eq!(trace.lines.len(), 4 * 999);
}

/// A task sleeps inside a function that is to be replaced: that waits and says who it is, until the
/// task leaves; and changes nothing if it does not leave in time, or nobody wants to wait any more.
///
/// # Panics
/// It is not so.
pub fn a_patch_waits_until_nobody_is_inside(guest: &mut Patched<'_>, payloads: &str) {
    guest.ask("work pipe-read:/tmp/go >/tmp/sleeper 2>&1 &");
    guest
        .ask("until cat /proc/[0-9]*/wchan 2>/dev/null | grep -q pipe_read; do usleep 10000; done");
    let apply = format!("patch a apply {payloads}/pipe-read.o --timeout");
    let sleeper = ["pipe-read (", " sleeps in pipe_read", "nothing was changed"];
    guest.refused(&format!("{apply} 700ms"), 6, &sleeper);
    assert_eq!(json(guest, "patch a list"), Value::Array(Vec::new()));

    guest.spawn("given-up", &format!("exec vmm {apply} 1h"));
    guest.wait("who is in the way", "grep -q 'sleeps in pipe_read' $F/given-up.said");
    guest.refused(&format!("patch a apply {payloads}/hot-return.o"), 1, &["another"]);
    guest.succeed("kill -INT $(cat $F/given-up.pid)");
    let (status, said) = guest.end_of("given-up");
    assert_eq!(status, 130, "{said}");
    assert!(said.contains("nothing was changed"), "{said}");
    assert_eq!(json(guest, "patch a list"), Value::Array(Vec::new()));

    guest.spawn("patient", &format!("exec vmm {apply} 1h"));
    guest.wait("who is in the way", "grep -q 'sleeps in pipe_read' $F/patient.said");
    guest.ask("touch /tmp/go");
    let (status, said) = guest.end_of("patient");
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("is applied") && said.contains(", at attempt "), "{said}");
    guest.ask("until grep -q VMM-WORK-END /tmp/sleeper; do usleep 10000; done");
    assert!(guest.ask("cat /tmp/sleeper").contains("pipe-read:/tmp/go count=1 "), "a byte came");
    let read = guest.ask("work pipe-read:/tmp/go");
    assert!(read.contains("pipe-read:/tmp/go count=0 "), "the pipe is at its end: {read}");
    let id = json(guest, "patch a list")[0]["id"].as_u64().expect("a number");
    guest.done(&format!("patch a revert {id}"));
    assert!(guest.ask("work pipe-read:/tmp/go").contains("pipe-read:/tmp/go count=1 "));
}

/// Whatever does not fit is refused with one sentence, and nothing is changed.
///
/// # Panics
/// It is not so.
pub fn what_does_not_fit_is_refused(guest: &mut Patched<'_>, payloads: &str) {
    let before = guest.ask("cat /proc/cmdline");
    let good = format!("{payloads}/proc-cmdline.o");
    guest.succeed(&format!(
        "head -c 600 {good} >$F/cut.o; echo 'no object' >$F/text.o; : >$F/empty.o"
    ));
    let apply = |file: &str| format!("patch a apply {file}");
    for (arguments, words) in [
        (apply("$F/cut.o"), &["cut.o"][..]),
        (apply("$F/text.o"), &["text.o"]),
        (apply("$F/empty.o"), &["empty.o"]),
        (apply("$F/none.o"), &["none.o", "No such file"]),
        (apply(&format!("{payloads}/s390x.o")), &["s390x", "x86_64"]),
        (apply(&format!("{payloads}/undefined.o")), &["no_such_function", "nor_this_one"]),
        (apply(&format!("{payloads}/no-pad.o")), &["sched_clock", "pad"]),
        (apply(&format!("{payloads}/other-release.o")), &["2.4.*"]),
        (apply(&format!("{good} --release '5.99.*'")), &["5.99.*"]),
        (apply(&format!("{good} --build-id 0123456789abcdef")), &["0123456789abcdef"]),
        (apply(&format!("{good} --map cmdline_proc_show=no_such_function")), &["no_such_function"]),
        (apply(&format!("{good} --max-stop 1us")), &["--max-stop"]),
        ("patch a revert 99999".to_owned(), &["99999"]),
        ("patch b list".to_owned(), &["there is no guest named b"]),
    ] {
        guest.refused(&arguments, 1, words);
    }
    for arguments in [
        "patch a apply",
        "patch a revert one",
        "patch a apply fix.o --map old",
        "patch a apply fix.o --timeout long",
        "patch a apply fix.o --timeout 25h",
        "patch a apply fix.o --build-id xyz",
    ] {
        guest.refused(arguments, 2, &[]);
    }
    assert_eq!(json(guest, "patch a list"), Value::Array(Vec::new()));
    assert_eq!(guest.ask("cat /proc/cmdline"), before);
}
