//! What is found in the files of stock kernels, against the same kernels as they run.

use std::fs;
use std::process::Command;

use guest_images::Architecture::{self, Aarch64, S390x, X86_64};
use guest_images::Series;
use patcher::addr::Gva;
use patcher::arch::Place;
use patcher::kernel::offline::OfflineKernel;
use patcher::kernel::{Kernel, Symbol, ValueKind};
use patcher::livepatch::{CheckError, CheckOptions, Map, Payload};
use patcher::trace::filter::Glob;
use tests::capture::Captured;
use vmm::image;
use vmm_sys_util::tempdir::TempDir;

/// The kernel's file, and a guest that runs it.
struct Pair {
    offline: OfflineKernel,
    guest: Captured,
    running: Kernel,
    /// How far the guest's kernel was moved, in bytes.
    moved: u64,
}

impl Pair {
    fn new(architecture: Architecture, series: Series) -> Self {
        let file = guest_images::kernel_for(architecture, series).unwrap();
        let offline = image::open(&file.vmlinuz).unwrap();
        let guest = Captured::new(architecture, series, "max", "");
        let running = guest.kernel();
        let begin = |kernel: &Kernel| kernel.image().range.start.0;
        let moved = begin(&running).wrapping_sub(begin(offline.kernel()));
        Self { offline, guest, running, moved }
    }

    /// What the file says is what the guest says.
    fn check(&self) {
        let offline = self.offline.kernel();
        assert_eq!(offline.banner(), self.running.banner());
        assert_eq!(offline.release(), self.guest.capture.release);
        self.check_symbols();
        self.check_pads();
        self.check_payloads();
    }

    fn check_symbols(&self) {
        let (offline, running) = (self.offline.kernel().symbols(), self.running.symbols());
        assert_eq!(offline.len(), running.len());
        let begin = self.offline.kernel().image().range.start;
        for (ours, theirs) in offline.iter().zip(running.iter()) {
            // Absolute values, as those of per-CPU variables, do not move.
            let moved = if ours.address < begin - (1 << 20) { 0 } else { self.moved };
            let there = Gva(ours.address.0.wrapping_add(moved));
            assert_eq!((there, ours.kind, ours.name), (theirs.address, theirs.kind, theirs.name));
        }
    }

    fn check_pads(&self) {
        let ours: Vec<_> = self.offline.pads().unwrap();
        let ours: Vec<_> = ours.iter().map(|pad| (pad.at + self.moved, &*pad.name)).collect();
        let theirs = self.running.pads(&self.guest.ram).unwrap().sites;
        // Modules are in other files.
        let theirs = theirs.iter().filter(|site| site.module.is_none());
        let theirs: Vec<_> = theirs.map(|site| (site.at, &*site.name)).collect();
        let only = |some: &[(Gva, &str)], others: &[(Gva, &str)]| -> Vec<String> {
            let only = some.iter().filter(|pad| others.binary_search(pad).is_err());
            only.take(20).map(|(at, name)| format!("{name} at {at}")).collect()
        };
        assert_eq!(only(&ours, &theirs), [""; 0], "only in the file, of {}", ours.len());
        assert_eq!(only(&theirs, &ours), [""; 0], "only in the guest, of {}", theirs.len());
        assert!(ours.len() > 20_000);
    }
}

#[test]
fn the_files_of_x86_64_kernels_say_what_their_guests_say() {
    for series in [Series::V5_10, Series::V6_1, Series::V6_12, Series::V6_18, Series::V7] {
        Pair::new(X86_64, series).check();
    }
}

#[test]
fn the_files_of_aarch64_kernels_say_what_their_guests_say() {
    for series in [Series::V5_10, Series::V6_1, Series::V6_12, Series::V7] {
        Pair::new(Aarch64, series).check();
    }
}

#[test]
fn the_files_of_s390x_kernels_say_what_their_guests_say() {
    for series in [Series::V6_1, Series::V6_12, Series::V7] {
        Pair::new(S390x, series).check();
    }
}

/// What stock kernels say of functions whose sources are known (fs/open.c, fs/read_write.c, mm/mmap.c).
#[test]
fn the_files_of_kernels_with_types_tell_what_functions_take() {
    for (architecture, series) in [
        (X86_64, Series::V6_1),
        (X86_64, Series::V7),
        (S390x, Series::V6_12),
        (Aarch64, Series::V6_1),
    ] {
        let file = guest_images::kernel_for(architecture, series).unwrap();
        let offline = image::open(&file.vmlinuz).unwrap();
        let kernel = offline.kernel();
        let all = kernel.prototypes(offline.memory()).unwrap();
        let open = kernel.prototype(&all, "do_sys_openat2").unwrap();
        let register = |first| Place::Registers { first, count: 1 };
        let signed = ValueKind::Integer { signed: true };
        let unsigned = ValueKind::Integer { signed: false };
        let text = ValueKind::Pointer { to_text: true };
        let pointer = ValueKind::Pointer { to_text: false };
        let told: Vec<_> = (open.parameters.iter())
            .map(|this| (this.name.as_str(), this.value.kind, this.value.size, this.place))
            .collect();
        assert_eq!(
            told[..2],
            [("dfd", signed, 4, register(0)), ("filename", text, 8, register(1))]
        );
        let read = kernel.prototype(&all, "vfs_read").unwrap();
        let told: Vec<_> = (read.parameters.iter())
            .map(|this| (this.name.as_str(), this.value.kind, this.value.size, this.place))
            .collect();
        assert_eq!(
            told,
            [
                ("file", pointer, 8, register(0)),
                ("buf", text, 8, register(1)),
                ("count", unsigned, 8, register(2)),
                ("pos", pointer, 8, register(3)),
            ]
        );
        assert_eq!(read.returns.map(|value| (value.kind, value.size)), Some((signed, 8)));
        let map = kernel.prototype(&all, "do_mmap").unwrap();
        let last = map.parameters.last().unwrap();
        // The seventh and those behind it are on the stack where there are no more registers.
        let on_stack = matches!(last.place, Place::Stack { count: 1, .. });
        assert_eq!(on_stack, architecture != Aarch64 || map.parameters.len() > 8, "{map:?}");
        assert!(kernel.prototype(&all, "no_such_function").is_err());
        // Of all functions that can be traced most have a prototype, with a place for each argument.
        let pads = offline.pads().unwrap();
        let told = pads.iter().filter_map(|pad| kernel.prototype(&all, &pad.name).ok());
        let whole = told.filter(|prototype| {
            prototype.parameters.iter().all(|parameter| parameter.place != Place::Unknown)
        });
        let whole = whole.count();
        assert!(whole * 10 > pads.len() * 7, "{whole} of {}", pads.len());
    }
    let file = guest_images::kernel_for(S390x, Series::V6_1).unwrap();
    let offline = image::open(&file.vmlinuz).unwrap();
    assert!(offline.kernel().prototypes(offline.memory()).is_err(), "it has no types");
}

/// Flags with which a kernel's own functions are compiled, as far as they matter to a function this small.
fn compiler(architecture: Architecture) -> (&'static str, &'static [&'static str]) {
    match architecture {
        X86_64 => {
            ("gcc", &["-mcmodel=kernel", "-mno-sse", "-mno-red-zone", "-fcf-protection=none"])
        }
        Aarch64 => ("aarch64-linux-gnu-gcc", &["-mgeneral-regs-only", "-mno-outline-atomics"]),
        S390x => ("s390x-linux-gnu-gcc", &["-march=z13", "-msoft-float", "-mpacked-stack"]),
    }
}

/// A payload for the architecture that changes what /proc/cmdline shows.
fn payload(architecture: Architecture, more: &str) -> Payload {
    let source = format!(
        r#"
        extern void seq_printf(void *file, const char *format, ...);
        static unsigned long calls;
        static __attribute__((noinline)) unsigned long count(void) {{ return ++calls; }}
        int cmdline_proc_show(void *file, void *unused) {{
            seq_printf(file, count() > 1 ? "again\n" : "once\n");
            return 0;
        }}
        #define SAYS(text) \
            static const char said[] __attribute__((used, section(".vmm.livepatch"))) = text;
        {more}"#
    );
    let folder = TempDir::new().unwrap();
    let (input, output) = (folder.as_path().join("fix.c"), folder.as_path().join("fix.o"));
    fs::write(&input, source).unwrap();
    let (program, flags) = compiler(architecture);
    let mut command = Command::new(program);
    command.args(["-c", "-O2", "-ffreestanding", "-fno-pic", "-fno-pie", "-fno-common"]);
    command.args(["-fno-asynchronous-unwind-tables", "-fno-stack-protector"]).args(flags);
    let status = command.arg(&input).arg("-o").arg(&output).status().unwrap();
    assert!(status.success(), "{command:?}");
    Payload::parse(&fs::read(output).unwrap()).unwrap()
}

impl Pair {
    /// What a check of payloads says is what the guest would say.
    fn check_payloads(&self) {
        let architecture = self.guest.capture.architecture;
        let fix = payload(architecture, "");
        let report = fix.check(&self.offline, &CheckOptions::default()).unwrap();
        let [function] = &report.functions[..] else { panic!("{report:?}") };
        let pads = self.running.pads(&self.guest.ram).unwrap();
        let site = pads.sites.iter().find(|site| &*site.name == "cmdline_proc_show").unwrap();
        let at = self.running.image().range.start + function.offset;
        assert_eq!((at, at + function.pad), (site.function, site.at));
        assert!(report.helpers.iter().any(|name| &**name == "count"), "{report:?}");
        let seq_printf = self.running.symbols().address("seq_printf").unwrap();
        let used = report.symbols.iter().find(|(name, _)| &**name == "seq_printf").unwrap();
        assert_eq!(self.running.image().range.start + used.1.cast_unsigned(), seq_printf);
        assert!(report.sizes.text > 0 && report.sizes.data > 0 && !report.consistent);
        let running = self.running.build_id(&self.guest.ram).unwrap().to_string();
        assert_eq!(report.build_id.as_deref(), Some(&*running));

        self.check_guards(architecture, &running);
        let without = self.function_without_pad();
        let map = Map::parse(&format!("cmdline_proc_show={without}")).unwrap();
        let options = CheckOptions { maps: vec![map], ..Default::default() };
        match fix.check(&self.offline, &options).unwrap_err() {
            CheckError::NoPad { names } => assert_eq!(names, [without]),
            other => panic!("{other}"),
        }
    }

    fn check_guards(&self, architecture: Architecture, build_id: &str) {
        let check = |says: &str, options| {
            let more = if says.is_empty() { String::new() } else { format!("SAYS(\"{says}\")") };
            payload(architecture, &more).check(&self.offline, &options)
        };
        let series = self.running.version().unwrap();
        let given = CheckOptions {
            release: Some(Glob::new(&format!("{}.{}*", series.0, series.1))),
            build_id: Some(build_id[..8].into()),
            ..Default::default()
        };
        check(&format!("build-id={build_id}"), given).unwrap();
        for (says, release) in [("release=4.19.*", None), ("", Some(Glob::new("4.19.*")))] {
            let error = check(says, CheckOptions { release, ..Default::default() }).unwrap_err();
            assert!(matches!(error, CheckError::Release { .. }), "{error}");
        }
        for (says, build_id) in [("build-id=0123456789", None), ("", Some("0123456789".into()))] {
            let error = check(says, CheckOptions { build_id, ..Default::default() }).unwrap_err();
            assert!(matches!(error, CheckError::BuildId { .. }), "{error}");
        }
    }

    /// A function of the kernel's that can't be traced and whose name no other has.
    fn function_without_pad(&self) -> String {
        let kernel = self.offline.kernel();
        let pads = self.offline.pads().unwrap();
        let symbols = kernel.symbols();
        let suits = |symbol: &Symbol<'_>| {
            kernel.text().contains(&symbol.address)
                && symbol.kind == b'T'
                && symbols.named(symbol.name).count() == 1
                && pads.binary_search_by_key(&symbol.address, |pad| pad.function).is_err()
        };
        symbols.iter().find(suits).unwrap().name.to_owned()
    }
}
