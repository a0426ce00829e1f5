//! Stock aarch64 guests under QEMU's emulation, through the library and as `vmm run --arch aarch64`.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, thread};

use guest_images::Architecture::Aarch64;
use guest_images::{Series, kernel_for};
use patcher::kernel::{Kernel, MappedRegion, Refusal};
use patcher::machine::Machine;
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::session::{Selection, Session};
use patcher::trace::sink::{Beginning, Event, Sink};
use tests::emulated::{Folder, a_panic_is_told, every_call_makes_one_record, wait_for_kernel};
use tests::graph::the_tree_is_the_guests_own;
use tests::guest::{Transcript, complaints, text};
use tests::recorder;
use vmm::devices::Console;
use vmm::qemu::{Architecture, GuestExit, Launch, Qemu};

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(300);

/// What every guest does: work for two vCPUs, a known number of calls once it is told to go on, and
/// its own word on what can be traced.
const WORK: &str = "vmm.work=forks:400@0+proc-read:/proc/uptime:40000@1,wait-console-line,\
                    proc-read:/proc/version:3000@0+proc-read:/proc/loadavg:3000@1 vmm.dump=aff";

/// A QEMU in `folder` whose guests have that processor, whatever is asked for.
fn qemu_with(folder: &Folder, cpu: &str) -> PathBuf {
    let path = folder.path("qemu");
    let script = format!(
        "#!/bin/bash\nfor word; do [ \"$last\" = -cpu ] && word={cpu}; words+=(\"$word\"); \
         last=$word; done\nexec qemu-system-aarch64 \"${{words[@]}}\"\n"
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Counts calls by function, caller and CPU.
#[derive(Default)]
struct Calls(BTreeMap<(String, String, u16), usize>);

impl Sink for Calls {
    fn begin(&mut self, _: &Beginning<'_>) -> io::Result<()> {
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        let key = (event.function.to_string(), event.caller.to_string(), event.cpu);
        *self.0.entry(key).or_default() += 1;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn end(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// A guest that runs [`WORK`].
struct Guest {
    qemu: Qemu,
    transcript: Transcript,
    _folder: Folder,
}

impl Guest {
    fn start(series: Series, cpu: Option<&str>) -> Self {
        let folder = Folder::new(Aarch64, &format!("aarch64-{series}"));
        let vmlinuz = kernel_for(Aarch64, series).unwrap().vmlinuz;
        let mut launch = Launch {
            cpus: 2,
            rings: 32 << 20,
            initrd: Some(folder.path("initrd")),
            cmdline: format!("quiet {WORK}"),
            ..Launch::new(Architecture::Aarch64, vmlinuz)
        };
        if let Some(cpu) = cpu {
            launch.qemu = qemu_with(&folder, cpu);
        }
        let transcript = Transcript::default();
        let console = Console::new(Box::new(transcript.clone())).unwrap();
        let qemu = Qemu::launch(&launch, console).unwrap();
        qemu.start().unwrap();
        Self { qemu, transcript, _folder: folder }
    }

    fn wait_until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !done() {
            let text = || self.transcript.text();
            assert!(begun.elapsed() < LONG, "{what} did not come in {LONG:?}: {}", text());
            assert_eq!(self.qemu.exit(), None, "before {what}: {}", text());
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn wait_for(&self, mark: &str) {
        self.wait_until(mark, || self.transcript.text().contains(mark));
    }

    /// Everything that is asked of a stock kernel, in one boot of it.
    fn check(self, format: &str) {
        let kernel = wait_for_kernel(&self.qemu);
        assert_eq!(kernel.root().format.name, format);
        self.wait_for("VMM-WORK-BEGIN");
        let region = MappedRegion::new(&self.qemu, &kernel).unwrap();
        self.check_all(&kernel, &region);
        self.wait_for("VMM-READY");
        self.check_counts(&kernel, &region);
        self.check_list(&kernel);
        let exit = self.qemu.wait(Some(LONG));
        let text = self.transcript.text();
        assert_eq!(exit, Some(GuestExit::PowerOff), "{text}");
        assert!(text.contains("VMM-DONE") && !text.contains("VMM-WORK-FAILED"), "{text}");
        // Names of functions are no complaints.
        let (before, rest) = text.split_once("VMM-DUMP-BEGIN aff").unwrap();
        let (_, after) = rest.split_once("VMM-DUMP-END aff").unwrap();
        assert_eq!([complaints(before), complaints(after)].concat(), [] as [&str; 0]);
    }

    /// Every function is armed and put back byte for byte while both vCPUs are busy.
    fn check_all(&self, kernel: &Kernel, region: &MappedRegion) {
        let before = text(&self.qemu, kernel).unwrap();
        for _ in 0..2 {
            let selection = Selection::new(kernel, &self.qemu, &Filter::default()).unwrap();
            let (mut session, armed) =
                Session::arm(&self.qemu, kernel, region, &selection).unwrap();
            assert!(armed.functions > 30_000);
            let mut calls = Calls::default();
            let mut rounds = 0;
            self.wait_until("calls on both vCPUs", || {
                session.drain(&mut calls).unwrap();
                rounds += 1;
                let on = |cpu| calls.0.keys().any(|key| key.2 == cpu);
                rounds > 20 && on(0) && on(1)
            });
            session.disarm().unwrap();
            let (summary, finished) = session.finish(&mut calls);
            finished.unwrap();
            println!("{armed:?}: {} events, stops {:?}", summary.events, summary.stops);
            assert_eq!(summary.reverted.unwrap().restored, armed.functions);
            assert_eq!(summary.corrupt, []);
            assert!(text(&self.qemu, kernel).unwrap() == before, "the text is not what it was");
        }
    }

    /// Every call makes one record, with its caller and its CPU.
    fn check_counts(&self, kernel: &Kernel, region: &MappedRegion) {
        let filter = Filter { only: vec![Glob::new("*_proc_show")], except: vec![] };
        let selection = Selection::new(kernel, &self.qemu, &filter).unwrap();
        let (mut session, _) = Session::arm(&self.qemu, kernel, region, &selection).unwrap();
        self.qemu.console_input().write_all(b"\n").unwrap();
        let mut calls = Calls::default();
        self.wait_until("the end of the work", || {
            session.drain(&mut calls).unwrap();
            self.transcript.text().matches("VMM-WORK-END proc-read:/proc/").count() == 3
        });
        session.disarm().unwrap();
        let (summary, finished) = session.finish(&mut calls);
        finished.unwrap();
        assert_eq!(summary.dropped(), 0);
        for (function, cpu) in [("version_proc_show", 0), ("loadavg_proc_show", 1)] {
            let of_it: Vec<_> = calls.0.iter().filter(|(key, _)| key.0 == function).collect();
            let expected = (function.to_owned(), "seq_read_iter".to_owned(), cpu);
            assert_eq!(of_it, [(&expected, &3000)]);
        }
    }

    /// What can be traced is what the guest itself says, but for the lines that are documented.
    fn check_list(&self, kernel: &Kernel) {
        self.wait_for("VMM-DUMP-END aff");
        let pads = kernel.pads(self.qemu.ram()).unwrap();
        let mut found: Vec<_> = pads.sites.iter().map(|site| (site.at, &*site.name)).collect();
        for refused in &pads.refused {
            assert_eq!(refused.why, Refusal::DeadWeak, "{refused:?}");
            found.push((refused.at, &*refused.name));
        }
        found.sort_unstable();
        let names: Vec<&str> = found.iter().map(|(_, name)| *name).collect();
        let text = self.transcript.text().replace('\r', "");
        let (_, list) = text.split_once("VMM-DUMP-BEGIN aff\n").unwrap();
        let (list, _) = list.split_once("VMM-DUMP-END aff").unwrap();
        let theirs: Vec<&str> = list.lines().collect();
        let differs = names.iter().zip(&theirs).position(|(ours, theirs)| ours != theirs);
        if let Some(line) = differs {
            panic!("line {line}: ours is {:?}, the guest's {:?}", names[line], theirs[line]);
        }
        assert_eq!(names.len(), theirs.len());
    }
}

#[test]
fn a_5_10_kernel_is_traced_whole() {
    Guest::start(Series::V5_10, None).check("aarch64 48-bit");
}

/// No single-instruction atomics, isolated tables, a clock of another frequency.
#[test]
fn a_6_1_kernel_on_an_older_processor_is_traced_whole() {
    Guest::start(Series::V6_1, Some("cortex-a72")).check("aarch64 48-bit");
}

#[test]
fn a_6_12_kernel_with_52_bits_of_address_is_traced_whole() {
    Guest::start(Series::V6_12, None).check("aarch64 52-bit");
}

#[test]
fn the_command_traces_a_guest_of_another_architecture() {
    every_call_makes_one_record(Aarch64, Series::V6_1);
}

/// Its symbols do not name what tells a panic.
#[test]
fn a_panic_of_a_6_1_kernel_is_told() {
    a_panic_is_told(Aarch64, Series::V6_1);
}

#[test]
fn what_is_filtered_out_never_leaves_the_guest() {
    tests::filtered::what_is_filtered_out_never_leaves_the_guest(Aarch64, Series::V6_1);
}

#[test]
fn the_tree_of_calls_is_the_one_that_the_guest_sees_itself() {
    the_tree_is_the_guests_own(Aarch64, Series::V6_1);
}

#[test]
fn the_last_calls_before_a_panic_are_kept() {
    recorder::the_last_calls_before_a_panic_are_kept(Aarch64, Series::V6_1);
}
