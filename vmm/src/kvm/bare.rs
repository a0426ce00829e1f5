//! Guests without an operating system, for tests of everything that does not need one. They run
//! where stock kernels can't, on a KVM that only emulates.

use std::fmt;
use std::ops::Range;

use patcher::addr::{Gpa, Gva};
use vm_memory::{Bytes, GuestMemoryMmap};

use super::layout::{self, BOOT_TABLES, BOOT_TABLES_END, HIGH_RAM, LARGE_PAGE, LOW_RAM_END};
use super::paging;
use super::state::Entry;
use crate::devices::{PortHandler, PortWrite};

/// Each vCPU has so many bytes of stack, below the end of conventional memory.
const STACK: u64 = 1024;

/// Device memory that the default page tables map: I/O APIC and local APIC.
const APICS: Range<Gpa> = Gpa(0xfec0_0000)..Gpa(0xff00_0000);

/// A guest that is only a piece of code.
///
/// All its vCPUs begin at once, at the code's first byte, in 64-bit supervisor mode with
/// interrupts off: `rdi` holds the number of the vCPU, `rsp` the top of a stack of 1 KiB. Unless
/// told otherwise RAM and the region are mapped where they are, writable and executable, by page
/// tables in the first 128 KiB; a guest's own must keep CR0.WP and EFER.NXE in mind, which are on.
///
/// Power and serial ports are as in every guest; what it writes to other ports can be seen.
pub struct BareGuest {
    entry: Gva,
    memory: Vec<(Gpa, Vec<u8>)>,
    root: Option<Gpa>,
    all_at_once: bool,
    on_port_write: Option<PortHandler>,
}

impl BareGuest {
    /// A guest that executes `code`, which is put at guest-physical 1 MiB.
    #[must_use]
    pub fn new(code: &[u8]) -> Self {
        Self {
            entry: Gva(HIGH_RAM.0),
            memory: vec![(HIGH_RAM, code.to_vec())],
            root: None,
            all_at_once: true,
            on_port_write: None,
        }
    }

    /// Puts `bytes` at `at` too.
    #[must_use]
    pub fn with_memory(mut self, at: Gpa, bytes: &[u8]) -> Self {
        self.memory.push((at, bytes.to_vec()));
        self
    }

    /// Begins with the four-level page tables whose root is at `root`, brought along by
    /// [`with_memory`](Self::with_memory).
    #[must_use]
    pub fn with_root(mut self, root: Gpa) -> Self {
        self.root = Some(root);
        self
    }

    /// Begins at `entry`, as its page tables have it, and not with the first byte of its code.
    #[must_use]
    pub fn with_entry(mut self, entry: Gva) -> Self {
        self.entry = entry;
        self
    }

    /// Has all vCPUs but the first wait to be woken by it, as the processors of a PC do.
    #[must_use]
    pub fn with_waiting_processors(mut self) -> Self {
        self.all_at_once = false;
        self
    }

    /// Calls `handler` for every write to a port that no device answers, on the thread of the vCPU
    /// that writes. The vCPU waits until it returns.
    #[must_use]
    pub fn on_port_write(
        mut self,
        handler: impl Fn(PortWrite<'_>) + Send + Sync + 'static,
    ) -> Self {
        self.on_port_write = Some(Box::new(handler));
        self
    }

    pub(super) fn take_handler(&mut self) -> Option<PortHandler> {
        self.on_port_write.take()
    }

    /// Fills guest memory and tells where each of `cpus` vCPUs begins.
    pub(super) fn load(
        &self,
        ram: &GuestMemoryMmap<()>,
        memory: u64,
        region: Range<Gpa>,
        cpus: usize,
    ) -> Result<Vec<Entry>, vm_memory::GuestMemoryError> {
        paging::write_gdt(ram)?;
        let root = match self.root {
            Some(root) => root,
            None => {
                let mut ranges = layout::ram(memory);
                ranges.extend([APICS, region]);
                paging::write_identity(ram, BOOT_TABLES..BOOT_TABLES_END, &ranges)?;
                BOOT_TABLES
            }
        };
        for (at, bytes) in &self.memory {
            ram.write_slice(bytes, (*at).into())?;
        }
        let entry = |vcpu: usize| Entry {
            rip: self.entry.0,
            rsp: LOW_RAM_END.align_down(STACK).0 - vcpu as u64 * STACK,
            rdi: vcpu as u64,
            cr3: root.0,
            protected: true,
            at_once: self.all_at_once || vcpu == 0,
            ..Entry::default()
        };
        Ok((0..cpus).map(entry).collect())
    }
}

impl fmt::Debug for BareGuest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BareGuest").field("entry", &self.entry).finish_non_exhaustive()
    }
}

/// Bare guests need the code's page, and room for the boot tables and stacks.
pub(super) const LEAST_MEMORY: u64 = LARGE_PAGE;
