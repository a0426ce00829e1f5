//! Live patches of stock guests of every architecture, whose QEMU somebody else has started.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use guest_images::{Architecture, Series, kernel_for};
use patcher::kernel::MappedRegion;
use tests::cycles::Cycles;
use tests::emulated::{Folder, wait_for_kernel};
use tests::guest::{complaints, text};
use tests::lab::vmm;
use tests::patched::{Here, Patched, payloads};
use tests::samples::{Sample, every_sample_takes_effect_and_is_taken_back};
use vmm::qemu::{Attach, Attached};

/// QEMU with two CPUs, a stock kernel and its console on standard input and output.
fn qemu(folder: &Folder, architecture: Architecture, series: Series) -> String {
    let kernel = kernel_for(architecture, series).unwrap().vmlinuz;
    let (machine, console) = match architecture {
        Architecture::X86_64 => ("q35", "ttyS0"),
        Architecture::S390x => ("s390-ccw-virtio", "ttysclp0"),
        Architecture::Aarch64 => ("virt", "ttyAMA0"),
    };
    format!(
        "qemu-system-{architecture} -nodefaults -display none -accel tcg,thread=multi \
         -machine {machine},memory-backend=ram -cpu max -smp 2 -m 576M -serial stdio \
         -object memory-backend-file,id=ram,share=on,size=576M,mem-path=$F/ram \
         -initrd {} -kernel {} -qmp unix:$F/qmp,server=on,wait=off \
         -append 'console={console} loglevel=5 mem=512M vmm.work=shell'",
        folder.path("initrd").display(),
        kernel.display()
    )
}

/// The text of the kernel's, as one who attaches finds it.
fn attached_text(attach: &Attach) -> Vec<u8> {
    let attached = Attached::new(attach).unwrap();
    let text = text(attached.machine(), &wait_for_kernel(attached.machine())).unwrap();
    attached.detach().unwrap();
    text
}

/// A guest that can be attached to, and what that takes.
struct Bench<'h> {
    guest: Patched<'h>,
    attach: Attach,
    payloads: String,
    before: Vec<u8>,
}

impl<'h> Bench<'h> {
    fn start(
        here: &'h mut Here,
        folder: &Folder,
        architecture: Architecture,
        series: Series,
    ) -> Self {
        let payloads = payloads(architecture, &folder.path("payloads")).display().to_string();
        let place = folder.path("guest").display().to_string();
        let guest = Patched::start(here, &place, &qemu(folder, architecture, series));
        let attach = Attach {
            qmp: folder.path("guest/qmp"),
            told: None,
            rings: 32 << 20,
            stop_deadline: Duration::from_secs(5),
            journals: folder.path("guest/state/vmm"),
            restore: false,
        };
        let before = attached_text(&attach);
        Self { guest, attach, payloads, before }
    }

    /// `vmm attach`, until it can be asked.
    fn attach(&mut self, options: &str) {
        let command = "exec env XDG_STATE_HOME=$F/state vmm attach --qmp $F/qmp --name a";
        self.guest.spawn("attach", &format!("{command} {options}"));
        self.guest.wait("vmm attach", "[ -S $F/run/a.sock ] || [ -e $F/attach.status ]");
    }

    fn apply(&mut self, file: &str) {
        self.guest.done(&format!("patch a apply {}/{file}", self.payloads));
    }

    /// Ends `vmm attach` by a signal; gives what it has said.
    fn detach(&mut self) -> String {
        self.guest.succeed("kill -INT $(cat $F/attach.pid)");
        let (status, said) = self.guest.end_of("attach");
        assert_eq!(status, 130, "{said}");
        said
    }

    fn is_as_it_was(&mut self) {
        assert!(attached_text(&self.attach) == self.before, "the text is not what it was");
        assert_eq!(complaints(&self.guest.ask("dmesg")), [] as [&str; 0]);
    }
}

/// The samples of one function each are applied, seen and reverted; what is still applied in the end is
/// taken back by whoever detaches.
fn patched_and_left_as_it_was_found(architecture: Architecture, series: Series) {
    let folder = Folder::new(architecture, &format!("patch-{architecture}-{series}"));
    let mut here = Here::default();
    let mut bench = Bench::start(&mut here, &folder, architecture, series);
    bench.attach("");
    let samples = [Sample::ProcCmdline, Sample::HotReturn];
    every_sample_takes_effect_and_is_taken_back(&mut bench.guest, &bench.payloads, &samples);
    bench.apply("hot-return.o");
    bench.apply("proc-cmdline.o");
    let said = bench.detach();
    assert!(said.contains("vmm: reverted 2 patches (hot-return.o, proc-cmdline.o)"), "{said}");
    samples.iter().for_each(|sample| sample.check(&mut bench.guest, false));
    bench.is_as_it_was();
}

#[test]
fn s390x_guests_where_the_kernel_lies_are_patched() {
    patched_and_left_as_it_was_found(Architecture::S390x, Series::V6_1);
}

#[test]
fn s390x_guests_whose_kernel_is_mapped_elsewhere_are_patched() {
    patched_and_left_as_it_was_found(Architecture::S390x, Series::V6_12);
}

#[test]
fn aarch64_guests_are_patched() {
    patched_and_left_as_it_was_found(Architecture::Aarch64, Series::V6_1);
}

#[test]
fn aarch64_guests_with_52_bits_of_address_are_patched() {
    patched_and_left_as_it_was_found(Architecture::Aarch64, Series::V6_12);
}

#[test]
fn patches_end_with_a_vmm_that_is_killed_or_with_the_guests_kernel() {
    let folder = Folder::new(Architecture::X86_64, "patch-life");
    let mut here = Here::default();
    let mut bench = Bench::start(&mut here, &folder, Architecture::X86_64, Series::V6_1);

    // Killed while three functions are patched: the guest runs on with them, until somebody attaches.
    bench.attach("");
    bench.apply("shared-state.o");
    bench.guest.succeed("kill -KILL $(cat $F/attach.pid)");
    bench.guest.end_of("attach");
    Sample::SharedState.check(&mut bench.guest, true);
    bench.attach("");
    let (status, said) = bench.guest.end_of("attach");
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("has left 3 functions") && said.contains("--restore"), "{said}");
    bench.attach("--restore");
    bench.guest.wait("the restore", "grep -q 'put back 3 functions' $F/attach.said");
    Sample::SharedState.check(&mut bench.guest, false);

    // The guest reboots while it is patched, and is patched again.
    bench.apply("proc-cmdline.o");
    Sample::ProcCmdline.check(&mut bench.guest, true);
    bench.guest.reboot();
    let gone = "vmm: the guest was reset: 1 patch (proc-cmdline.o) is gone with its kernel";
    bench.guest.wait("a word on the reset", &format!("grep -qF '{gone}' $F/attach.said"));
    let listed = bench.guest.vmm("patch a list --json");
    assert_eq!((listed.status, listed.stdout.trim()), (0, "[]"), "{listed:?}");
    Sample::ProcCmdline.check(&mut bench.guest, false);
    bench.apply("proc-cmdline.o");
    Sample::ProcCmdline.check(&mut bench.guest, true);
    let said = bench.detach();
    assert!(said.contains("vmm: reverted 1 patch (proc-cmdline.o)"), "{said}");
    Sample::ProcCmdline.check(&mut bench.guest, false);
    assert_eq!(complaints(&bench.guest.ask("dmesg")), [] as [&str; 0]);
}

#[test]
fn answers_under_load_are_the_old_ones_or_the_new_ones_through_500_rounds() {
    let architecture = Architecture::X86_64;
    let folder = Folder::new(architecture, "patch-rounds");
    let mut here = Here::default();
    let Bench { mut guest, attach, payloads, .. } =
        Bench::start(&mut here, &folder, architecture, Series::V6_1);
    let attached = Attached::new(&attach).unwrap();
    let kernel = wait_for_kernel(attached.machine());
    let region = MappedRegion::new(attached.machine(), &kernel).unwrap();
    let mut ask = |command: &str| Ok(guest.ask(command));
    let mut cycles = Cycles::new(attached.machine(), &kernel, &region, &mut ask);
    for (work, file, rounds) in
        [("null-lseek", "hot-return.o", 500), ("loadavg", "shared-state.o", 100)]
    {
        let seen = cycles.run(work, &Path::new(&payloads).join(file), rounds).unwrap();
        println!("{seen}");
    }
    attached.detach().unwrap();
    assert_eq!(complaints(&guest.ask("dmesg")), [] as [&str; 0]);
}

#[test]
fn payloads_are_checked_against_the_files_of_kernels() {
    let folder = Folder::new(Architecture::X86_64, "patch-check");
    let payload = payloads(Architecture::X86_64, &folder.path("payloads")).join("shared-state.o");
    let check = |architecture, series| {
        let kernel = kernel_for(architecture, series).unwrap().vmlinuz;
        let mut command = Command::new(vmm());
        command.args(["patch", "check"]).arg(&payload).arg("--kernel").arg(kernel);
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    for series in [Series::V6_1, Series::V6_12] {
        let (status, report, said) = check(Architecture::X86_64, series);
        assert_eq!((status, &*said), (Some(0), ""), "{report}");
        for function in ["loadavg_proc_show", "get_avenrun", "nr_running"] {
            assert!(report.contains(&format!("  replaces  {function}, at _text+0x")), "{report}");
        }
        assert!(report.contains("  uses      seq_printf\n"), "{report}");
    }
    let (status, report, said) = check(Architecture::S390x, Series::V6_1);
    assert_eq!((status, &*report), (Some(1), ""));
    assert!(said.contains("the object is for x86_64 and the kernel runs on s390x"), "{said}");
}
