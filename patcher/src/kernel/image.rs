//! The kernel's image: one physically contiguous piece of RAM.

use std::ops::Range;

use crate::addr::{Gpa, Gva};
use crate::arch::paging::{AddressSpace, WalkError};
use crate::arch::{Arch, ImageWindow};
use crate::mem::{MemError, PhysMem};

/// Where a kernel's image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Its virtual addresses, from `_text` to `_end`; rounded up to whole large pages until the
    /// symbols are known.
    pub range: Range<Gva>,
    /// The guest-physical address of its first byte.
    pub phys: Gpa,
}

/// How many neighbouring large pages in a row may be missing in an image's mapping: kernels under
/// page-table isolation unmap what they have freed of it.
const MAX_HOLE: u64 = 8;

/// The largest image believed, in bytes; distribution kernels have 45 to 65 MiB.
const MAX_IMAGE: u64 = 512 << 20;

impl Image {
    /// Looks for the first address of the image window that `space` maps, and how far the mapping
    /// goes on without a break in the physical addresses.
    ///
    /// # Errors
    /// The walk of the window's last address, if nothing is mapped in it at all.
    pub(super) fn find(
        ram: &dyn PhysMem,
        space: &AddressSpace,
        window: &ImageWindow,
    ) -> Result<Self, WalkError> {
        let mut at = window.range.start;
        let (base, phys) = loop {
            match space.walk(ram, at) {
                Ok(leaf) => break (at, leaf.gpa),
                Err(error) => {
                    // An absent entry stands for all that it spans.
                    let step = match error {
                        WalkError::Absent { span, .. } => span.max(window.align),
                        _ => window.align,
                    };
                    at = at.align_down(step) + step;
                    if !window.range.contains(&at) {
                        return Err(error);
                    }
                }
            }
        };
        let mut len = window.align;
        let mut hole = 0;
        while hole < MAX_HOLE {
            let next = base + len + hole * window.align;
            if !window.range.contains(&next) || next.0 - base.0 >= MAX_IMAGE {
                break;
            }
            match space.walk(ram, next) {
                Ok(leaf) if leaf.gpa == phys + (next.0 - base.0) => {
                    len = next.0 - base.0 + window.align;
                    hole = 0;
                }
                Ok(_) => break,
                Err(_) => hole += 1,
            }
        }
        Ok(Self { range: base..base + len, phys })
    }

    /// The image's length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.range.end.0.saturating_sub(self.range.start.0)
    }

    /// Whether the image has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The guest-physical address of `va`, if it lies in the image.
    #[must_use]
    pub fn translate(&self, va: Gva) -> Option<Gpa> {
        self.range.contains(&va).then(|| self.phys + (va.0 - self.range.start.0))
    }

    /// Copies the bytes of the image from `offset` on, as many as `len` if the image goes that far.
    ///
    /// # Errors
    /// [`MemError::NotRam`].
    pub(super) fn read(
        &self,
        ram: &dyn PhysMem,
        offset: u64,
        len: u64,
    ) -> Result<Vec<u8>, MemError> {
        let len = len.min(self.len().saturating_sub(offset));
        // Never more than MAX_IMAGE.
        let mut bytes = vec![0; len as usize];
        ram.read(self.phys + offset, &mut bytes)?;
        Ok(bytes)
    }
}

/// How far the kernel was moved from where it was linked to be, in bytes.
pub(super) fn kaslr_offset(arch: &dyn Arch, base: Gva) -> i64 {
    base.0.wrapping_sub(arch.image_window().default_base.0) as i64
}
