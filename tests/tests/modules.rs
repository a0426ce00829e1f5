//! Functions of modules that stock guests load and unload while they are traced.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};

use guest_images::{Architecture, Initramfs, Series, kernel_for};
use patcher::hook::Hooks;
use patcher::kernel::{MappedRegion, Site};
use patcher::machine::Machine;
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::select::Selection;
use patcher::trace::sink::Event;
use patcher::trace::tracer::{ModuleChange, Tracer};
use tests::emulated::{Folder, LONG, engine, wait_for_kernel, wait_until};
use tests::guest::Transcript;
use vmm::devices::Console;
use vmm::qemu::{GuestExit, Launch, Qemu};

/// How often each module is loaded, and how often it is used each time.
const ROUNDS: u64 = 4;
const USES: u64 = 50;

/// Loads and unloads two modules in turn. Each is used a known number of times, when the host has had
/// the time to arm it, and unloaded when it has had the time to read what was recorded. At the end it waits for a
/// line.
fn script() -> String {
    format!(
        "for round in $(seq {ROUNDS}); do
             insmod /m/loop.ko; sleep 2
             for i in $(seq {USES}); do losetup /dev/loop0 2>/dev/null; done
             rmmod loop
             insmod /m/brd.ko rd_nr=1; sleep 2
             dd if=/dev/zero of=/dev/ram0 bs=4096 count={USES} oflag=direct 2>/dev/null
             rmmod brd
         done
         echo MODULES-DONE
         read go"
    )
}

/// Calls by function and caller.
#[derive(Default)]
struct Counts(BTreeMap<(String, String), u64>);

impl Counts {
    fn take(&mut self, event: &Event<'_>) -> io::Result<()> {
        let key = (event.function.text.to_owned(), event.caller.text.to_owned());
        *self.0.entry(key).or_default() += 1;
        Ok(())
    }

    fn of(&self, function: &str) -> u64 {
        self.0.iter().filter(|((name, _), _)| name == function).map(|(_, count)| count).sum()
    }
}

fn modules_are_traced_in_turn(architecture: Architecture, series: Series) {
    let folder = Folder::new(architecture, &format!("modules-{architecture}-{series}"));
    let stock = kernel_for(architecture, series).unwrap();
    let mut initramfs = Initramfs::for_architecture(architecture)
        .unwrap()
        .file("/script", 0o755, script().as_bytes())
        .unwrap();
    for module in stock.modules_for(&["loop", "brd"]).unwrap() {
        let path = format!("/m/{}.ko", module.name);
        initramfs = initramfs.file(&path, 0o644, &module.read().unwrap()).unwrap();
    }
    fs::write(folder.path("initrd"), initramfs.build()).unwrap();

    let transcript = Transcript::default();
    let launch = Launch {
        cpus: 2,
        rings: 32 << 20,
        initrd: Some(folder.path("initrd")),
        cmdline: "quiet vmm.script=/script".into(),
        ..Launch::new(engine(architecture), stock.vmlinuz)
    };
    let console = Console::new(Box::new(transcript.clone())).unwrap();
    let qemu = Qemu::launch(&launch, console).unwrap();
    qemu.start().unwrap();
    let kernel = wait_for_kernel(&qemu);
    let region = MappedRegion::new(&qemu, &kernel).unwrap();
    // Its jump labels a guest changes as it likes; its pads it leaves alone.
    let own_pads = || -> Vec<Site> {
        let sites = kernel.pads(qemu.ram()).unwrap().sites;
        sites.into_iter().filter(|site| site.module.is_none()).collect()
    };
    let before = own_pads();

    let mut hooks = Hooks::new(&qemu, &kernel, &region);
    let mut tracer = Tracer::new(&mut hooks).unwrap();
    let only = [":mod:loop", "brd_*:mod:brd", "bdev_release"].map(Glob::new).into();
    let filter = Filter { only, except: Vec::new() };
    let selection = Selection::beside(&hooks, &filter).unwrap();
    assert!(selection.sites.len() == 1, "neither module is there yet");
    let (client, armed) = tracer.add(&mut hooks, &selection, Counts::default()).unwrap();
    assert_eq!(armed.functions, 1);

    let (mut loaded, mut unloaded) = (BTreeMap::new(), BTreeMap::new());
    wait_until("the end of the script", || {
        tracer.drain(&hooks, Counts::take);
        for news in tracer.follow_modules(&mut hooks) {
            println!("{}: {:?}", news.module, news.what);
            match news.what {
                ModuleChange::Armed { functions, .. } => {
                    assert!(functions > 3);
                    *loaded.entry(news.module.to_string()).or_insert(0) += 1;
                }
                ModuleChange::Gone { .. } => {
                    *unloaded.entry(news.module.to_string()).or_insert(0) += 1;
                }
                ModuleChange::Failed(error) => panic!("{}: {error}", news.module),
            }
        }
        qemu.exit().is_some() || transcript.text().contains("MODULES-DONE")
    });
    tracer.remove(&mut hooks, client).unwrap();
    assert!(own_pads() == before, "the pads are not what they were");
    let finished = tracer.finish(client, Counts::take).unwrap();
    let (summary, counts) = (finished.summary, finished.sink);
    println!("{:#?}\n{:?}", counts.0, summary.reverted);
    assert_eq!(summary.dropped(), 0);
    assert_eq!(summary.corrupt, []);
    let rounds = BTreeMap::from(["brd", "loop"].map(|name| (name.to_owned(), ROUNDS)));
    assert_eq!(loaded, rounds);
    assert_eq!(unloaded.get("loop"), Some(&ROUNDS));
    assert_eq!(counts.of("lo_ioctl [loop]"), ROUNDS * USES);
    assert_eq!(counts.of("brd_submit_bio [brd]"), ROUNDS * USES);
    drop(hooks);
    // What is put back is put back before the guest ends.
    qemu.console_input().write_all(b"\n").unwrap();
    let exit = qemu.wait(Some(LONG));
    let text = transcript.text();
    assert_eq!(exit, Some(GuestExit::PowerOff), "{text}");
    assert!(!text.contains("VMM-FAILED"), "{text}");
    assert_eq!(transcript.complaints(), [] as [&str; 0]);
}

#[test]
fn modules_of_an_x86_64_guest_are_traced_one_in_the_place_of_the_other() {
    modules_are_traced_in_turn(Architecture::X86_64, Series::V6_12);
}

#[test]
fn modules_of_an_s390x_guest_are_traced_one_in_the_place_of_the_other() {
    modules_are_traced_in_turn(Architecture::S390x, Series::V6_12);
}
