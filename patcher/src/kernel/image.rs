//! The kernel's image: one physically contiguous piece of RAM.

use std::ops::Range;

use super::PAGE;
use crate::addr::{Gpa, Gva};
use crate::arch::ImageWindow;
use crate::arch::paging::{AddressSpace, WalkError};
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

/// How many bytes in a row may be missing in an image's mapping: kernels take out what they have freed
/// of it, and those under page-table isolation more.
const MAX_HOLE: u64 = 16 << 20;

/// The largest image believed, in bytes; distribution kernels have 45 to 65 MiB.
pub(super) const MAX_IMAGE: u64 = 512 << 20;

/// How many places of a window are looked at: where other things than kernels are mapped in it, so
/// many times its alignment.
const MAX_STEPS: usize = 1 << 18;

impl Image {
    /// Looks for the first text that `space` maps in the image window from `from` on, and how far the
    /// mapping goes on from there without a break in the physical addresses. `None` if what is mapped
    /// is no text.
    ///
    /// # Errors
    /// The last address of the window that was walked, if nothing is mapped in it at all.
    pub(super) fn find(
        ram: &dyn PhysMem,
        space: &AddressSpace,
        window: &ImageWindow,
        from: Gva,
    ) -> Result<Option<Self>, WalkError> {
        let Some(found) = find_text(ram, space, window, from)? else { return Ok(None) };
        let (base, phys) = first_page(ram, space, window, found);
        let mut len = window.align;
        let mut next = base + len;
        while next.0 - base.0 - len < MAX_HOLE {
            if !window.range.contains(&next) || next.0 - base.0 >= MAX_IMAGE {
                break;
            }
            match space.walk(ram, next) {
                Ok(leaf) if leaf.gpa == phys + (next.0 - base.0) => {
                    len = next.0 - base.0 + window.align;
                }
                Ok(_) => break,
                Err(_) => {}
            }
            next = next + window.align;
        }
        Ok(Some(Self { range: base..base + len, phys }))
    }

    /// Takes off what stands in front of `begin`, if that lies in the image.
    pub(super) fn begin_at(&mut self, begin: Gva) {
        if let Some(phys) = self.translate(begin) {
            *self = Self { range: begin..self.range.end, phys };
        }
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

/// Where the text that was found at `base` begins: its first page, where images are not aligned to
/// what a window is searched by.
fn first_page(
    ram: &dyn PhysMem,
    space: &AddressSpace,
    window: &ImageWindow,
    (base, phys): (Gva, Gpa),
) -> (Gva, Gpa) {
    let before = (PAGE..window.align).step_by(PAGE as usize).take_while(|before| {
        let at = Gva(base.0.wrapping_sub(*before));
        window.range.contains(&at)
            && space.walk(ram, at).is_ok_and(|leaf| {
                window.text.hold_in(leaf.entry) && leaf.gpa.0 == phys.0.wrapping_sub(*before)
            })
    });
    let before = before.last().unwrap_or(0);
    (base - before, phys - before)
}

/// Where the first piece of text begins that is as long as a kernel's.
fn find_text(
    ram: &dyn PhysMem,
    space: &AddressSpace,
    window: &ImageWindow,
    from: Gva,
) -> Result<Option<(Gva, Gpa)>, WalkError> {
    let mut error = None;
    let mut mapped = false;
    let mut piece: Option<(Gva, Gpa)> = None;
    let mut at = from;
    for _ in 0..MAX_STEPS {
        let step = match space.walk(ram, at) {
            Ok(leaf) if window.text.hold_in(leaf.entry) => {
                let goes_on = |(base, phys): &(Gva, Gpa)| leaf.gpa == *phys + (at.0 - base.0);
                let (base, phys) = piece.filter(goes_on).unwrap_or((at, leaf.gpa));
                if at.0 - base.0 + window.align >= window.least {
                    return Ok(Some((base, phys)));
                }
                piece = Some((base, phys));
                window.align
            }
            Ok(leaf) => {
                (mapped, piece) = (true, None);
                leaf.size.max(window.align)
            }
            Err(reason) => {
                // An absent entry stands for all that it spans.
                let span = match reason {
                    WalkError::Absent { span, .. } => span.max(window.align),
                    _ => window.align,
                };
                (error, piece) = (Some(reason), None);
                span
            }
        };
        match at.align_down(step).checked_add(step) {
            Some(next) if window.range.contains(&next) => at = next,
            _ => break,
        }
    }
    match error {
        Some(error) if !mapped => Err(error),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::arch::Arch;
    use crate::arch::aarch64::Aarch64;
    use crate::machine::{Aarch64Registers, Registers};

    /// The lowest address of the window.
    const LOWEST: Gva = Gva(0xffff_8000_0000_0000);
    const BLOCK: u64 = 2 << 20;

    /// An aarch64 guest with four levels of tables that has these entries at the lowest addresses of
    /// the window, for 2 MiB each; the page table at 0x5000 has pages of text in no order.
    fn guest(entries: &[u64]) -> (GuestMemoryMmap<()>, AddressSpace) {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let put = |at: u64, entry: u64| {
            ram.write_slice(&entry.to_le_bytes(), GuestAddress(at)).unwrap();
        };
        put(0x1000 + 256 * 8, 0x2003);
        put(0x2000, 0x3003);
        for (index, entry) in entries.iter().enumerate() {
            put(0x3000 + 8 * index as u64, *entry);
        }
        for index in 0..512 {
            put(0x5000 + 8 * index, (0x8000_0000 - index * 0x1000) | 0x0040_0000_0000_0783);
        }
        let registers = Aarch64Registers {
            pstate: 5,
            ttbr1: 0x1000,
            tcr: 0x0150_01f5_b550_3510,
            sctlr: 1,
            ..Default::default()
        };
        let spaces = Aarch64.address_spaces(&Registers::Aarch64(registers)).unwrap();
        (ram, spaces[0])
    }

    fn find(entries: &[u64], from: Gva) -> Result<Option<Image>, WalkError> {
        let (ram, space) = guest(entries);
        Image::find(&ram, &space, &Aarch64.image_window(space.format), from)
    }

    const TEXT: u64 = 0x0040_0000_4020_0781;
    const DATA: u64 = 0x0060_0000_4060_0701;
    const PAGES: u64 = 0x5003;

    #[test]
    fn an_image_is_the_first_text_in_one_piece_and_what_goes_on_from_there() {
        let more_text = TEXT + BLOCK;
        let entries = [DATA + 0x1000_0000, PAGES, 0, TEXT, more_text, DATA, 0, DATA + BLOCK * 2];
        let begin = LOWEST + 3 * BLOCK;
        let image = find(&entries, LOWEST).unwrap().unwrap();
        assert_eq!(image, Image { range: begin..begin + 5 * BLOCK, phys: Gpa(0x4020_0000) });
        // Memory that lies elsewhere is none of it.
        let entries = [TEXT, more_text, DATA, DATA];
        assert_eq!(find(&entries, LOWEST).unwrap().unwrap().range.end, LOWEST + 3 * BLOCK);
        assert_eq!(find(&entries, LOWEST + 2 * BLOCK), Ok(None));
    }

    #[test]
    fn a_window_without_text_is_told_from_one_without_anything() {
        assert_eq!(find(&[DATA, PAGES, DATA], LOWEST), Ok(None));
        assert!(matches!(find(&[], LOWEST), Err(WalkError::Absent { .. })));
    }

    #[test]
    fn an_image_begins_where_its_first_symbol_is() {
        let mut image = find(&[TEXT], LOWEST).unwrap().unwrap();
        image.begin_at(LOWEST + 0x1_0000);
        assert_eq!(image.range, LOWEST + 0x1_0000..LOWEST + BLOCK);
        assert_eq!(image.phys, Gpa(0x4021_0000));
        let before = image.clone();
        image.begin_at(LOWEST);
        assert_eq!(image, before);
    }
}
