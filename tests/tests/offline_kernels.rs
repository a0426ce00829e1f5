//! What is found in the files of stock kernels, against the same kernels as they run.

use guest_images::Architecture::{self, Aarch64, S390x, X86_64};
use guest_images::Series;
use patcher::addr::Gva;
use patcher::kernel::Kernel;
use patcher::kernel::offline::OfflineKernel;
use tests::capture::Captured;
use vmm::image;

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
        let theirs: Vec<_> = theirs.iter().map(|site| (site.at, &*site.name)).collect();
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
