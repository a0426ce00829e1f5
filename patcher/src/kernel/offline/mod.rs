//! A kernel without a guest: its image as the file has it, laid out where it is linked.
//!
//! What a running kernel made of itself is not there: no page tables, no ftrace records, pads as the
//! compiler left them, code not fitted to any processor. Symbols, banner and types are read as from a
//! guest, so everything that needs only these works on such a kernel too.
//!
//! Where an image begins is not written in files that are nothing but the image (aarch64's, and what
//! s390x unpacks). The addresses that it holds tell: of all places where kernels are linked, the one
//! into whose image most of them lead. Where the linker left addresses to a table of relocations, as
//! it does for aarch64 up to 6.1 and s390x up to 6.9, those are applied; the table is found by its
//! structure, as nothing that these kernels name leads to it.

use std::sync::OnceLock;

use super::image::{Image, MAX_IMAGE};
use super::locate::{self, LocateError};
use super::{Kernel, kallsyms};
use crate::addr::{Gpa, Gva};
use crate::arch::paging::{AddressSpace, HighBits, TableFormat};
use crate::arch::{Arch, ByteOrder};
use crate::mem::{MemError, PhysMem};

mod linked;
mod pads;
#[cfg(test)]
mod tests;

pub use pads::{OfflinePad, OfflinePadsError};

/// A kernel as its file has it.
#[derive(Debug)]
pub struct OfflineKernel {
    kernel: Kernel,
    memory: ImageMemory,
}

/// An image is not that of a kernel that can be worked with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OfflineError {
    /// There is more of it than any kernel has.
    #[error("the kernel's image has {len} bytes, more than the {MAX_IMAGE} that are believed")]
    TooLarge {
        /// Its size in bytes.
        len: usize,
    },
    /// The image does not show where it is linked.
    #[error(
        "where the {arch} kernel is linked cannot be told: {found} of its words are addresses in \
         it if it begins at {best}, the best of the places that are known"
    )]
    NoBase {
        /// The architecture.
        arch: &'static str,
        /// The place that fits best.
        best: Gva,
        /// How many words of the image are addresses in it then.
        found: usize,
    },
    /// It has no symbols or no banner.
    #[error(transparent)]
    Kernel(#[from] LocateError),
}

impl OfflineKernel {
    /// The kernel of architecture `arch` whose image is `bytes`, from its first byte to its last or to
    /// where only zeros follow. It is linked to begin at `base`; `None` if the file does not say where.
    ///
    /// # Errors
    /// [`OfflineError`].
    pub fn new(
        arch: &'static dyn Arch,
        mut bytes: Vec<u8>,
        base: Option<Gva>,
    ) -> Result<Self, OfflineError> {
        if bytes.len() as u64 > MAX_IMAGE {
            return Err(OfflineError::TooLarge { len: bytes.len() });
        }
        let base = match base {
            Some(base) => base,
            None => linked::base(arch, &bytes)?,
        };
        linked::relocate(arch, base, &mut bytes);

        // What is linked into the first 4 GiB runs where it lies in memory (s390x); elsewhere nothing
        // depends on where that is.
        let phys = if base < RUNS_WHERE_IT_LIES { Gpa(base.0) } else { Gpa(0) };
        let mut image = Image { range: base..base + bytes.len() as u64, phys };
        let memory = ImageMemory { begin: phys, bytes };

        let root = AddressSpace { root: Gpa(0), format: &NO_TABLES };
        let window = arch.image_window(root.format);
        let symbols = kallsyms::decode(&memory, &image, &window, arch.byte_order())
            .map_err(|source| LocateError::Symbols { image: image.clone(), source })?;
        if let Some(begin) = symbols.address(window.first_symbol) {
            image.begin_at(begin);
        }
        if let Some(end) = symbols.address("_end").filter(|end| image.range.contains(end)) {
            image.range.end = end;
        }
        let (banner_at, banner) = locate::find_banner(&memory, &image, &symbols)?;
        let module_fields = OnceLock::new();
        let kernel = Kernel { arch, image, root, symbols, banner, banner_at, module_fields };
        Ok(Self { kernel, memory })
    }

    /// The kernel. It has no page tables: addresses outside of its image translate to nothing.
    #[must_use]
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// The memory that the image is all of.
    #[must_use]
    pub fn memory(&self) -> &dyn PhysMem {
        &self.memory
    }
}

/// Addresses below are those of memory.
const RUNS_WHERE_IT_LIES: Gva = Gva(4 << 30);

/// The page tables of a kernel that has not made any.
static NO_TABLES: TableFormat = TableFormat {
    name: "no",
    byte_order: ByteOrder::Little,
    va_bits: 48,
    above: HighBits::Ones,
    levels: &[],
};

/// Memory that is nothing but an image.
#[derive(Debug)]
struct ImageMemory {
    begin: Gpa,
    bytes: Vec<u8>,
}

impl PhysMem for ImageMemory {
    fn read(&self, at: Gpa, buf: &mut [u8]) -> Result<(), MemError> {
        let len = buf.len();
        let bytes = at.offset_from(self.begin).and_then(|offset| {
            let begin = usize::try_from(offset).ok()?;
            self.bytes.get(begin..begin.checked_add(len)?)
        });
        buf.copy_from_slice(bytes.ok_or(MemError::NotRam { at, len })?);
        Ok(())
    }

    fn extents(&self) -> Vec<std::ops::Range<Gpa>> {
        vec![self.begin..self.begin + self.bytes.len() as u64]
    }

    fn replace_entry(&self, at: Gpa, _old: [u8; 8], _new: [u8; 8]) -> Result<(), MemError> {
        // There are no page tables in it.
        Err(MemError::NotRam { at, len: 8 })
    }
}
