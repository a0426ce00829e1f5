//! Kernels that are nothing but symbols, and room for payloads where kernels have it.

use super::compiler::{AARCH64, Compiler, S390X, X86_64};
use crate::addr::Gva;
use crate::arch::{self, Arch, ReturnForm};
use crate::kernel::Symbols;
use crate::livepatch::{KernelView, Resolved};
use crate::region::{PayloadSizes, Placement};

/// An architecture's toolchain, and where its kernels and payloads lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting {
    pub(super) arch: &'static dyn Arch,
    pub(super) compiler: Compiler,
    /// The emulation that the linker is told (`-m`).
    pub(super) emulation: &'static str,
    /// Where the kernel's text begins.
    pub(super) kernel: u64,
    /// Where payloads' text may be; constants follow 2 MiB behind, data another 2 MiB.
    pub(super) room: u64,
    /// How many bytes a linker puts in front of its table of addresses.
    pub(super) table_header: u64,
}

pub(super) const SETTINGS: [Setting; 3] = [
    Setting {
        arch: &arch::x86_64::X86_64,
        compiler: X86_64,
        emulation: "elf_x86_64",
        kernel: 0xffff_ffff_8100_0000,
        room: 0xffff_ffff_bee1_0040,
        table_header: 0,
    },
    Setting {
        arch: &arch::s390x::S390X,
        compiler: S390X,
        emulation: "elf64_s390",
        kernel: 0x3ff_e000_0000,
        room: 0x3ff_dc01_0040,
        table_header: 24,
    },
    Setting {
        arch: &arch::aarch64::Aarch64,
        compiler: AARCH64,
        emulation: "aarch64linux",
        kernel: 0xffff_8000_8001_0000,
        room: 0xffff_8000_8601_0040,
        table_header: 8,
    },
];

/// How much text a kernel of these has.
const TEXT: u64 = 16 << 20;

impl Setting {
    pub(super) fn of(name: &str) -> Self {
        let found = SETTINGS.into_iter().find(|setting| setting.arch.name() == name);
        found.expect("there are three")
    }

    /// The symbols of a kernel with these functions, 64 bytes each, from the beginning of its text on.
    pub(super) fn functions<'a>(&self, names: &[&'a str]) -> Vec<(u64, u8, &'a str)> {
        let places = (0..).map(|index| self.kernel + 64 * index);
        let mut list: Vec<_> = places.zip(names).map(|(at, name)| (at, b'T', *name)).collect();
        list.push((self.kernel + TEXT, b'T', "_etext"));
        list
    }

    /// A kernel with these symbols.
    pub(super) fn view<'a>(&self, symbols: &'a Symbols, returns: ReturnForm) -> KernelView<'a> {
        let text = Gva(self.kernel)..Gva(self.kernel + TEXT);
        KernelView { arch: self.arch, symbols, text, returns, modules: Box::new(|_| None) }
    }

    /// Room for a payload.
    pub(super) fn placement(&self, resolved: &Resolved) -> Placement {
        let PayloadSizes { text, constants, data } = resolved.sizes();
        let range = |index: u64, len: u64| {
            let start = Gva(self.room + index * (2 << 20));
            start..start + len
        };
        Placement {
            text: range(0, text),
            constants: range(1, constants),
            data: range(2, data),
            text_is_used: false,
        }
    }
}
