//! The memory of stock guests, captured once and kept.

use std::fs::File;

use guest_images::{Architecture, Capture, CaptureOptions, Series, VcpuRegisters};
use patcher::kernel::{self, Kernel, Located};
use patcher::machine::{Aarch64Registers, Registers, S390xRegisters, X86Registers};
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
pub fn capture(architecture: Architecture, series: Series, cpu: &str, cmdline: &str) -> Capture {
    let kernel = guest_images::kernel_for(architecture, series).unwrap();
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

/// The registers of a vCPU as an engine gives them.
fn registers(architecture: Architecture, vcpu: &VcpuRegisters) -> Registers {
    match architecture {
        Architecture::X86_64 => Registers::X86_64(X86Registers {
            rip: vcpu["rip"],
            rsp: vcpu["rsp"],
            rflags: vcpu["rflags"],
            cs: vcpu["cs"].try_into().expect("a selector has 16 bits"),
            cr0: vcpu["cr0"],
            cr3: vcpu["cr3"],
            cr4: vcpu["cr4"],
            efer: vcpu["efer"],
            gs_base: vcpu["gs_base"],
            kernel_gs_base: vcpu["kernel_gs_base"],
        }),
        Architecture::S390x => Registers::S390x(S390xRegisters {
            psw_mask: vcpu["pswm"],
            psw_addr: vcpu["pswa"],
            gprs: std::array::from_fn(|number| vcpu[format!("r{number}").as_str()]),
            cr1: vcpu["cr1"],
            cr7: vcpu["cr7"],
            cr13: vcpu["cr13"],
            prefix: Some(vcpu["prefix"]),
        }),
        Architecture::Aarch64 => Registers::Aarch64(Aarch64Registers {
            pc: vcpu["pc"],
            sp: vcpu["sp"],
            pstate: vcpu["cpsr"],
            sp_el0: vcpu["sp_el0"],
            ttbr1: vcpu["ttbr1_el1"],
            tcr: vcpu["tcr_el1"],
            sctlr: vcpu["sctlr_el1"],
            mair: vcpu["mair_el1"],
            tpidr_el1: vcpu["tpidr_el1"],
            links: ["x9", "x16", "x17", "x30"].map(|name| vcpu[name]),
        }),
    }
}

impl Captured {
    /// The same, mapped.
    ///
    /// # Panics
    /// It can't be had.
    #[must_use]
    pub fn new(architecture: Architecture, series: Series, cpu: &str, cmdline: &str) -> Self {
        let capture = capture(architecture, series, cpu, cmdline);
        let region = map(&capture, architecture.ram_base());
        let ram = GuestMemoryMmap::from_regions(vec![region]).unwrap();
        let vcpus = capture.vcpus.iter().map(|vcpu| registers(architecture, vcpu)).collect();
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
