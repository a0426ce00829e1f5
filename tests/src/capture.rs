//! The memory of stock guests, captured once and kept.

use std::fs::File;

use guest_images::{Capture, CaptureOptions, Series};
use patcher::kernel::{self, Kernel, Located};
use patcher::machine::{Registers, X86Registers};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// A stock kernel's memory and registers.
pub struct Captured {
    /// The files.
    pub capture: Capture,
    /// Guest RAM; what is written to it does not change the capture.
    pub ram: GuestMemoryMmap<()>,
    /// The registers of each vCPU.
    pub vcpus: Vec<Registers>,
}

/// The capture of a kernel that ran on QEMU's processor `cpu` with `cmdline` added to its own.
///
/// # Panics
/// It can't be had: this is for tests.
#[must_use]
pub fn capture(series: Series, cpu: &str, cmdline: &str) -> Capture {
    let kernel = guest_images::kernel(series).unwrap();
    let options = CaptureOptions { cpu: cpu.into(), cmdline: cmdline.into(), ..Default::default() };
    guest_images::capture(&kernel, &options).unwrap()
}

/// Maps a capture's RAM at `at`; what is written to it does not change the capture.
///
/// # Panics
/// The host refuses.
#[must_use]
pub fn map(capture: &Capture, at: u64) -> GuestRegionMmap<()> {
    let file = File::open(capture.ram()).unwrap();
    let len = usize::try_from(file.metadata().unwrap().len()).unwrap();
    let region = MmapRegionBuilder::new(len)
        .with_file_offset(FileOffset::new(file, 0))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE)
        .build()
        .unwrap();
    GuestRegionMmap::new(region, GuestAddress(at)).unwrap()
}

impl Captured {
    /// The same, mapped.
    ///
    /// # Panics
    /// It can't be had.
    #[must_use]
    pub fn new(series: Series, cpu: &str, cmdline: &str) -> Self {
        let capture = capture(series, cpu, cmdline);
        let ram = GuestMemoryMmap::from_regions(vec![map(&capture, 0)]).unwrap();
        let vcpus = capture
            .vcpus
            .iter()
            .map(|vcpu| {
                Registers::X86_64(X86Registers {
                    rip: vcpu.rip,
                    rsp: vcpu.rsp,
                    rflags: vcpu.rflags,
                    cs: vcpu.cs,
                    cr0: vcpu.cr0,
                    cr3: vcpu.cr3,
                    cr4: vcpu.cr4,
                    efer: vcpu.efer,
                    gs_base: vcpu.gs_base,
                    kernel_gs_base: vcpu.kernel_gs_base,
                })
            })
            .collect();
        Self { capture, ram, vcpus }
    }

    /// The kernel in it.
    ///
    /// # Panics
    /// There is none.
    #[must_use]
    pub fn kernel(&self) -> Kernel {
        match kernel::locate(&self.ram, &self.vcpus) {
            Ok(Located::Found(kernel)) => *kernel,
            other => panic!("{}: {other:?}", self.capture.release),
        }
    }
}
