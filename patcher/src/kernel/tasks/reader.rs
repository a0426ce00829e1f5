//! Reads of the kernel's memory that remember where its pages are.

use rustc_hash::FxHashMap;

use crate::addr::{Gpa, Gva};
use crate::kernel::{Kernel, PAGE, ReadError, read_pages};
use crate::mem::PhysMem;

/// Reads a kernel's memory. What its page tables said is remembered, so this is for one stop, or for
/// looks that may err.
pub(crate) struct Reader<'a> {
    pub kernel: &'a Kernel,
    pub ram: &'a dyn PhysMem,
    pages: FxHashMap<u64, Gpa>,
    large_pages: FxHashMap<u64, Gpa>,
}

/// What the leaves map at least that are remembered as large pages, in bytes.
const LARGE: u64 = 2 << 20;

impl<'a> Reader<'a> {
    pub fn new(kernel: &'a Kernel, ram: &'a dyn PhysMem) -> Self {
        Self { kernel, ram, pages: FxHashMap::default(), large_pages: FxHashMap::default() }
    }

    /// Fills `buf` with the bytes at `va`.
    pub fn read(&mut self, va: Gva, buf: &mut [u8]) -> Result<(), ReadError> {
        read_pages(self.ram, va, buf, |at| self.translate(at))
    }

    pub fn u64(&mut self, va: Gva) -> Result<u64, ReadError> {
        let mut bytes = [0; 8];
        self.read(va, &mut bytes)?;
        Ok(self.kernel.arch().byte_order().u64(bytes))
    }

    pub fn u32(&mut self, va: Gva) -> Result<u32, ReadError> {
        let mut bytes = [0; 4];
        self.read(va, &mut bytes)?;
        Ok(self.kernel.arch().byte_order().u32(bytes))
    }

    fn translate(&mut self, va: Gva) -> Result<Gpa, ReadError> {
        let (large, page) = (va.0 / LARGE, va.0 / PAGE);
        if let Some(&gpa) = self.large_pages.get(&large) {
            return Ok(gpa + va.0 % LARGE);
        }
        if let Some(&gpa) = self.pages.get(&page) {
            return Ok(gpa + va.0 % PAGE);
        }
        let leaf = self.kernel.root().walk(self.ram, va)?;
        if leaf.size >= LARGE {
            self.large_pages.insert(large, leaf.gpa - va.0 % LARGE);
        } else {
            self.pages.insert(page, leaf.gpa - va.0 % PAGE);
        }
        Ok(leaf.gpa)
    }
}
