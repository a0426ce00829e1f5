//! Stock kernels under QEMU's emulation, with the initramfs of this crate.

use std::time::Duration;

use guest_images::{
    Architecture, Initramfs, Kernel, Qemu, QemuOptions, Series, kernel, kernel_for,
};

const BOOT: Duration = Duration::from_secs(120);
const WORK: Duration = Duration::from_secs(60);

fn stock_kernel() -> Kernel {
    kernel(Series::V6_1).unwrap()
}

fn start(kernel: &Kernel, initramfs: Initramfs, cmdline: &str) -> Qemu {
    let mut options = QemuOptions::for_kernel(kernel, initramfs.build());
    options.cmdline = cmdline.to_owned();
    Qemu::start(&options).unwrap()
}

/// The guest's own function tracer counts the calls that the workloads make, CPU by CPU.
#[test]
fn workloads_wait_for_a_line_and_make_the_calls_asked_for_on_the_cpus_asked_for() {
    let initramfs = Initramfs::new()
        .unwrap()
        .file(
            "/count",
            0o755,
            b"cd /sys/kernel/tracing\n\
              echo 8192 >buffer_size_kb\n\
              echo version_proc_show uptime_proc_show >set_ftrace_filter\n\
              echo function >current_tracer\n",
        )
        .unwrap()
        .file(
            "/report",
            0o755,
            b"cd /sys/kernel/tracing\n\
              echo 0 >tracing_on\n\
              for cpu in 0 1; do\n\
              echo CALLS cpu$cpu $(grep -E '^(entries|overrun|dropped)' per_cpu/cpu$cpu/stats)\n\
              done\n\
              grep -c uptime_proc_show per_cpu/cpu1/trace\n",
        )
        .unwrap();
    let mut guest = start(
        &stock_kernel(),
        initramfs,
        "vmm.work=exec:/count,wait-console-line,\
         proc-read:/proc/version:10000@0+proc-read:/proc/version:3000@1,\
         proc-read:/proc/uptime:50@1,exec:/report,forks:20,faults:3000,syscalls:500,nonsense",
    );
    guest.console().wait_for("VMM-READY", BOOT).unwrap();
    assert!(!guest.console().text().contains("BEGIN proc-read"), "it did not wait for the line");
    guest.type_line("go").unwrap();

    let status = guest.wait(WORK).unwrap();
    let text = guest.console().text();
    assert!(status.success(), "{status}: {text}");
    for line in [
        "CALLS cpu0 entries: 10000 overrun: 0 dropped events: 0",
        "CALLS cpu1 entries: 3050 overrun: 0 dropped events: 0",
        "\n50\n",
        "VMM-WORK-END forks:20 count=20 ",
        "VMM-WORK-END faults:3000 count=3000 ",
        "VMM-WORK-END syscalls:500 count=500 ",
        "VMM-WORK-FAILED nonsense: there is no such work",
        "VMM-DONE",
        "reboot: Power down",
    ] {
        assert!(text.contains(line), "{line} is missing in: {text}");
    }
}

#[test]
fn a_guest_loads_modules_dumps_what_it_knows_and_panics_when_told_to() {
    let kernel = stock_kernel();
    let initramfs = Initramfs::new().unwrap().modules(&kernel, &["virtio_blk"]).unwrap();
    let mut guest = start(&kernel, initramfs, "vmm.dump=modules,cpuinfo,x vmm.after=panic");
    guest.wait(BOOT).unwrap();
    let text = guest.console().text();
    let (_, rest) = text.split_once("VMM-DUMP-BEGIN modules\n").unwrap();
    let (modules, rest) = rest.split_once("VMM-DUMP-END modules\n").unwrap();
    let names: Vec<&str> = modules.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names, ["virtio_blk", "virtio", "virtio_ring"]);
    assert_eq!(rest.lines().filter(|line| line.starts_with("processor\t:")).count(), 2, "{text}");
    assert!(rest.contains("VMM-FAILED there is no dump x"), "{text}");
    assert!(rest.contains("Kernel panic - not syncing: sysrq triggered crash"), "{text}");
}

/// That the console takes input, that processes of both processors run, and that the end is orderly.
#[test]
fn guests_of_other_architectures_do_the_same_work() {
    for (architecture, series) in
        [(Architecture::S390x, Series::V6_1), (Architecture::Aarch64, Series::V5_10)]
    {
        let kernel = kernel_for(architecture, series).unwrap();
        let initramfs = Initramfs::for_architecture(architecture).unwrap();
        let mut guest = start(
            &kernel,
            initramfs.modules(&kernel, &["virtio_blk"]).unwrap(),
            "vmm.work=wait-console-line,proc-read:/proc/version:100@0+proc-read:/proc/version:100@1,\
             forks:20,faults:3000,syscalls:500,exec:/no/such vmm.dump=modules",
        );
        guest.console().wait_for("VMM-READY", BOOT).unwrap();
        guest.type_line("go").unwrap();
        let status = guest.wait(WORK).unwrap();
        let text = guest.console().text();
        assert!(status.success(), "{architecture}, {status}: {text}");
        for line in [
            "VMM-WORK-END wait-console-line count=1 ",
            "VMM-WORK-END proc-read:/proc/version:100@0 count=100 ",
            "VMM-WORK-END proc-read:/proc/version:100@1 count=100 ",
            "VMM-WORK-END forks:20 count=20 ",
            "VMM-WORK-END faults:3000 count=3000 ",
            "VMM-WORK-END syscalls:500 count=500 ",
            "VMM-WORK-FAILED exec:/no/such: ended with wait status 0x200",
            "\nvirtio_blk ",
            "VMM-DONE",
        ] {
            assert!(text.contains(line), "{architecture}: {line} is missing in: {text}");
        }
    }
}

#[test]
fn what_qemu_objects_to_stands_on_the_console() {
    let mut options = QemuOptions::new("/no/such/kernel", Vec::new());
    options.cpu = "no-such-cpu".to_owned();
    let mut guest = Qemu::start(&options).unwrap();
    assert!(!guest.wait(BOOT).unwrap().success());
    let error = guest.console().wait_for("VMM-INIT", BOOT).unwrap_err().to_string();
    assert!(error.contains("unable to find CPU model 'no-such-cpu'"), "{error}");
}
