//! Every return that can be taken is, for two minutes of a stock guest's life: processes that come and go,
//! sleep and are sent signals, modules that are loaded and unloaded.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Architecture, Initramfs, Series, kernel_for};
use patcher::arch::ByteOrder;
use patcher::hook::{Hooks, Method, Swept, Want};
use patcher::kernel::MappedRegion;
use patcher::machine::Machine;
use patcher::patch::Foreign;
use patcher::region::{Part, RETURN_SLOTS};
use patcher::trace::filter::Filter;
use patcher::trace::graph::Options;
use patcher::trace::ring::{RawRecord, RingReader};
use patcher::trace::select::Selection;
use tests::emulated::{Folder, LONG, engine, wait_for_kernel, wait_until};
use tests::guest::{Transcript, text};
use vmm::devices::Console;
use vmm::qemu::{GuestExit, Launch, Qemu};

/// How long every return is taken while the guest is busy.
const BUSY: Duration = Duration::from_secs(120);

/// Does everything once before it says that it is ready, so that what the kernel does to its own text the
/// first time is done. Then does it until a line comes, and waits for two more.
const SCRIPT: &str = "\
insmod /m/loop.ko
processes() { (:); /bin/true; (sleep 0.01 & wait); ls /proc >/dev/null; }
signals() {
    sleep 100 & kill -TERM $!; wait $! 2>/dev/null
    (trap 'exit 3' USR1; echo >/ready; while :; do sleep 0.01; done) & child=$!
    while [ ! -e /ready ]; do sleep 0.01; done
    kill -STOP $child; kill -CONT $child; kill -USR1 $child; wait $child; rm /ready
}
modules() { insmod /m/brd.ko rd_nr=1; dd if=/dev/ram0 of=/dev/null bs=4096 count=4; rmmod brd; }
forever() { while [ ! -e /stop ]; do $1; rounds=$((rounds + 1)); done; echo \"RETURNS-$1 $rounds\"; }
{ processes; signals; modules; } 2>/dev/null
echo RETURNS-READY
read go
for what in processes processes signals modules; do forever $what 2>/dev/null & done
read go
echo >/stop
wait
echo RETURNS-QUIET
read go
{ processes; signals; modules; } 2>/dev/null
echo RETURNS-DONE
read go
";

/// What the rings tell of calls and returns of functions.
struct Told {
    readers: Vec<RingReader>,
    /// Calls less returns of each function, by the address that records of its calls carry.
    open: BTreeMap<u32, i64>,
    calls: u64,
    records: Vec<RawRecord>,
}

impl Told {
    /// Reads what there is; whether that was all that has been begun.
    fn read(&mut self, machine: &dyn Machine) -> bool {
        let window = machine.region(Part::Rings).memory;
        for reader in &mut self.readers {
            reader.look(&window);
            while !reader.read(&window, &mut self.records, 1 << 16) {}
            for record in self.records.drain(..) {
                let (function, step) = match self.open.contains_key(&record.ip) {
                    true => (record.ip, 1),
                    false => (record.ip.wrapping_sub(1), -1),
                };
                let open = self.open.get_mut(&function);
                *open.unwrap_or_else(|| panic!("{record:x?} is of no function")) += step;
                self.calls += u64::from(step > 0);
            }
        }
        self.readers.iter().all(|reader| reader.pending() == 0)
    }

    /// Calls of each function that have not returned.
    fn open(&self) -> BTreeMap<u32, i64> {
        self.open
            .iter()
            .map(|(function, open)| (*function, *open))
            .filter(|(_, n)| *n != 0)
            .collect()
    }
}

/// Calls of each function that slots hold.
fn held(hooks: &Hooks<'_>) -> BTreeMap<u32, i64> {
    let mut held = BTreeMap::new();
    let returns = hooks.taken_returns().unwrap();
    for slot in returns.memory.all().unwrap().into_iter().filter(|slot| slot.placed) {
        *held.entry(slot.function).or_insert(0) += 1;
    }
    held
}

#[test]
fn every_call_returns_or_is_told_as_outstanding_after_two_minutes_of_a_busy_guest() {
    let (architecture, series) = (Architecture::X86_64, Series::V6_1);
    let folder = Folder::new(architecture, "all-returns");
    let stock = kernel_for(architecture, series).unwrap();
    let mut initramfs = Initramfs::for_architecture(architecture)
        .unwrap()
        .file("/script", 0o755, SCRIPT.as_bytes())
        .unwrap();
    for module in stock.modules_for(&["loop", "brd"]).unwrap() {
        let path = format!("/m/{}.ko", module.name);
        initramfs = initramfs.file(&path, 0o644, &module.read().unwrap()).unwrap();
    }
    fs::write(folder.path("initrd"), initramfs.build()).unwrap();
    let transcript = Transcript::default();
    let launch = Launch {
        cpus: 2,
        rings: 512 << 20,
        initrd: Some(folder.path("initrd")),
        cmdline: "quiet vmm.script=/script".into(),
        ..Launch::new(engine(architecture), stock.vmlinuz)
    };
    let console = Console::new(Box::new(transcript.clone())).unwrap();
    let qemu = Qemu::launch(&launch, console).unwrap();
    qemu.start().unwrap();
    let kernel = wait_for_kernel(&qemu);
    let region = MappedRegion::new(&qemu, &kernel).unwrap();
    let go_on = || qemu.console_input().write_all(b"\n").unwrap();
    let says = |mark: &str| {
        assert_eq!(qemu.exit(), None, "{}", transcript.text());
        transcript.text().contains(mark)
    };
    wait_until("the script", || says("RETURNS-READY"));
    let before = text(&qemu, &kernel).unwrap();
    let pads = kernel.pads(qemu.ram()).unwrap().sites;

    let mut hooks = Hooks::new(&qemu, &kernel, &region);
    let selection = Selection::beside(&hooks, &Filter::default()).unwrap();
    let sites = selection.with_returns(Options::default()).sites;
    assert!(sites.len() > 30_000 && sites.iter().any(|site| site.module.is_some()));
    let window = qemu.region(Part::Rings).memory;
    let reader = |cpu| RingReader::new(&window, region.rings(), cpu, ByteOrder::Little).unwrap();
    let ip = |at: patcher::addr::Gva| (at.0 as u32).wrapping_add(5);
    let mut told = Told {
        readers: (0..2).map(reader).collect(),
        open: sites.iter().map(|site| (ip(site.at), 0)).collect(),
        calls: 0,
        records: Vec::new(),
    };
    let want = Want { traced: Some(Method::Call), returns: true, ..Want::default() };
    let wants: Vec<_> = sites.iter().map(|site| (site, want)).collect();
    hooks.change(&wants, Foreign::Refuse, &mut ()).unwrap();
    go_on();

    let mut given_back = 0;
    let mut tend = |hooks: &mut Hooks<'_>, told: &mut Told| {
        told.read(&qemu);
        if let Some(swept) = hooks.tend_returns(Instant::now()) {
            given_back += i64::from(swept.unwrap().freed);
        }
    };
    let begun = Instant::now();
    while begun.elapsed() < BUSY {
        tend(&mut hooks, &mut told);
        thread::sleep(Duration::from_millis(5));
        assert_eq!(qemu.exit(), None, "{}", transcript.text());
    }
    go_on();
    wait_until("the end of the work", || {
        tend(&mut hooks, &mut told);
        says("RETURNS-QUIET")
    });

    // A CPU may stand between the record of a call and its slot, or between that of a return and it; not for
    // long, as the guest has nothing to do. Calls that never returned had their slots given back.
    wait_until("accounts that agree", || {
        let stopped = qemu.stop().unwrap();
        let is_all = told.read(&qemu);
        let (open, held) = (told.open(), held(&hooks));
        stopped.resume().unwrap();
        let never: i64 = open.values().sum::<i64>() - held.values().sum::<i64>();
        let of = |held: &BTreeMap<u32, i64>, function| held.get(function).copied().unwrap_or(0);
        is_all
            && never == given_back
            && held.keys().all(|function| open.contains_key(function))
            && open.iter().all(|(function, open)| *open >= of(&held, function))
    });
    for reader in &told.readers {
        assert_eq!((reader.lost(), reader.corrupt()), (0, None));
    }
    assert_eq!(hooks.missed_returns(), 0);
    println!("{} calls of {} functions; never returned {given_back}", told.calls, sites.len());
    println!("{} open: {:x?}", held(&hooks).values().sum::<i64>(), held(&hooks));

    let wants: Vec<_> = sites.iter().map(|site| (site, Want::default())).collect();
    let changed = hooks.release(&wants, &mut ()).unwrap();
    assert_eq!((changed.written, changed.foreign.len()), (sites.len(), 0));
    assert!(text(&qemu, &kernel).unwrap() == before, "the text is not what it was");
    assert!(kernel.pads(qemu.ram()).unwrap().sites == pads, "the pads are not what they were");

    // It works on, and what is out is known of tasks that will return.
    go_on();
    wait_until("more work", || says("RETURNS-DONE"));
    let mut swept = Swept::default();
    wait_until("calls that no stack holds being given back", || {
        swept = hooks.sweep_returns(Instant::now()).unwrap();
        swept.suspected == 0
    });
    let free = hooks.taken_returns().unwrap().memory.free(2);
    println!("{} still out: {:?}", swept.outstanding.len(), swept.outstanding);
    assert_eq!(free + swept.outstanding.len() as u32, RETURN_SLOTS);
    drop(hooks);
    go_on();
    let exit = qemu.wait(Some(LONG));
    let said = transcript.text();
    assert_eq!(exit, Some(GuestExit::PowerOff), "{said}");
    for what in ["processes", "signals", "modules"] {
        assert!(said.contains(&format!("RETURNS-{what} ")), "{said}");
    }
    println!("{}", said.lines().filter(|line| line.starts_with("RETURNS-")).collect::<String>());
    assert!(!said.contains("VMM-FAILED"), "{said}");
    assert_eq!(transcript.complaints(), [] as [&str; 0]);
}
