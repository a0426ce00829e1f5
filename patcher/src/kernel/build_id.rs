//! The number that the linker gave a kernel: a digest of what it is made of.

use std::fmt;

use memchr::memmem;

use super::{Kernel, ReadError};
use crate::addr::Gva;
use crate::arch::ByteOrder;
use crate::mem::PhysMem;

/// What identifies a build: the description of an ELF note of type `NT_GNU_BUILD_ID`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct BuildId(Vec<u8>);

impl BuildId {
    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Hexadecimal digits, as `file` and `readelf -n` print them.
impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BuildId({self})")
    }
}

/// A kernel's build-id could not be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildIdError {
    /// The notes can't be read.
    #[error("the kernel's notes cannot be read: {0}")]
    Unreadable(#[from] ReadError),
    /// There is none.
    #[error("the kernel has no build-id: was it linked without one (--build-id)?")]
    None,
    /// There are several, and nothing tells which is the kernel's.
    #[error(
        "what may be the kernel's build-id is there more than once, at {first} and at {second}"
    )]
    Ambiguous {
        /// Where the first is.
        first: Gva,
        /// Where another one is.
        second: Gva,
    },
}

/// The most bytes of notes believed; kernels have some hundred.
const MAX_NOTES: u64 = 64 << 10;

/// A note's head: lengths of name and description, type.
const HEAD: usize = 12;
/// The type and name of the note.
const TYPE: u32 = 3;
const NAME: [u8; 4] = *b"GNU\0";

/// How long a build-id is: of 8 bytes by lld's `fast` to 32 by gold's longest.
const LENGTHS: std::ops::RangeInclusive<usize> = 8..=32;

impl Kernel {
    /// The kernel's build-id.
    ///
    /// It is in the notes between `__start_notes` and `__stop_notes`. Kernels whose symbols do not name
    /// these (no CONFIG_KALLSYMS_ALL) are searched for a note of its kind in their read-only data, but
    /// for the ELF files in there: the vDSOs have build-ids of their own.
    ///
    /// # Errors
    /// [`BuildIdError`].
    pub fn build_id(&self, ram: &dyn PhysMem) -> Result<BuildId, BuildIdError> {
        let order = self.arch.byte_order();
        let symbol = |name| self.symbols.address(name);
        if let (Some(begin), Some(end)) = (symbol("__start_notes"), symbol("__stop_notes")) {
            let len = end.offset_from(begin).unwrap_or(0).min(MAX_NOTES);
            let mut notes = vec![0; len as usize];
            self.read_virt(ram, begin, &mut notes)?;
            return in_notes(&notes, order).ok_or(BuildIdError::None);
        }
        let data = super::locate::read_only_data(&self.image, &self.symbols);
        let len = data.end.offset_from(data.start).unwrap_or(0);
        let offset = data.start.offset_from(self.image.range.start).unwrap_or(0);
        let bytes = self.image.read(ram, offset, len).map_err(ReadError::from)?;
        search(&bytes, data.start, order)
    }
}

/// The description of the note that `notes` begins with, if it is a build-id's, and how long the note
/// is.
fn first_note(notes: &[u8], order: ByteOrder) -> Option<(Option<BuildId>, usize)> {
    let word = |at: usize| Some(order.u32(*notes.get(at..)?.first_chunk()?));
    let (name_len, len, kind) = (word(0)? as usize, word(4)? as usize, word(8)?);
    let begin = HEAD.checked_add(name_len.checked_next_multiple_of(4)?)?;
    let description = notes.get(begin..begin.checked_add(len)?)?;
    let is_build_id =
        kind == TYPE && notes.get(HEAD..HEAD + name_len) == Some(&NAME) && LENGTHS.contains(&len);
    let id = is_build_id.then(|| BuildId(description.to_vec()));
    Some((id, begin + len.checked_next_multiple_of(4)?))
}

/// The build-id among notes.
fn in_notes(mut notes: &[u8], order: ByteOrder) -> Option<BuildId> {
    loop {
        match first_note(notes, order)? {
            (Some(id), _) => return Some(id),
            (None, len) => notes = notes.get(len..)?,
        }
    }
}

/// The one build-id in `bytes`, which begin at `begin`, that is in no ELF file there.
fn search(bytes: &[u8], begin: Gva, order: ByteOrder) -> Result<BuildId, BuildIdError> {
    let mut found: Option<(usize, BuildId)> = None;
    for name in memmem::find_iter(bytes, &NAME) {
        let Some(at) = name.checked_sub(HEAD).filter(|at| at % 4 == 0) else { continue };
        let Some((Some(id), _)) = first_note(&bytes[at..], order) else { continue };
        if is_in_elf_file(bytes, at, order) {
            continue;
        }
        match found {
            Some((first, _)) => {
                let place = |at| begin + at as u64;
                return Err(BuildIdError::Ambiguous { first: place(first), second: place(at) });
            }
            None => found = Some((at, id)),
        }
    }
    found.map(|(_, id)| id).ok_or(BuildIdError::None)
}

/// What a kernel aligns the ELF files in it to, and the most bytes of one: a vDSO has a few pages.
const PAGE: usize = 4096;
const MAX_ELF: usize = 256 << 10;

/// Whether `at` lies in an ELF file that begins at a page.
fn is_in_elf_file(bytes: &[u8], at: usize, order: ByteOrder) -> bool {
    let first = at.saturating_sub(MAX_ELF).next_multiple_of(PAGE);
    (first..=at)
        .step_by(PAGE)
        .any(|begin| elf_len(&bytes[begin..], order).is_some_and(|len| begin + len > at))
}

/// How long the ELF file is that `bytes` begin with, by its table of sections, which is its last part.
fn elf_len(bytes: &[u8], order: ByteOrder) -> Option<usize> {
    let class = match bytes.get(..5)? {
        b"\x7fELF\x01" => 1,
        b"\x7fELF\x02" => 2,
        _ => return None,
    };
    let half = |at: usize| Some(usize::from(order.u16(*bytes.get(at..)?.first_chunk()?)));
    let (table, entry) = if class == 2 {
        (order.u64(*bytes.get(40..)?.first_chunk()?), 58)
    } else {
        (order.u32(*bytes.get(32..)?.first_chunk()?).into(), 46)
    };
    usize::try_from(table).ok()?.checked_add(half(entry)? * half(entry + 2)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn note(order: ByteOrder, name: &[u8], kind: u32, description: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for value in [name.len() as u32, description.len() as u32, kind] {
            note.extend(order.bytes_of_u32(value));
        }
        for part in [name, description] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    /// An ELF file of two pages with nothing in it but a build-id in the second.
    fn elf(order: ByteOrder, id: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 2 * PAGE];
        file[..5].copy_from_slice(b"\x7fELF\x02");
        let table = 2 * PAGE as u64 - 64;
        file[40..48].copy_from_slice(&order.bytes(table));
        file[58..62].copy_from_slice(&match order {
            ByteOrder::Little => [64, 0, 1, 0],
            ByteOrder::Big => [0, 64, 0, 1],
        });
        let note = note(order, b"GNU\0", TYPE, id);
        file[PAGE..PAGE + note.len()].copy_from_slice(&note);
        file
    }

    #[test]
    fn it_is_found_behind_other_notes_in_either_byte_order() {
        for order in [ByteOrder::Little, ByteOrder::Big] {
            let mut notes = note(order, b"Xen\0", TYPE, &[9; 20]);
            notes.extend(note(order, b"Linux\0", 0x100, &[]));
            notes.extend(note(order, b"GNU\0", TYPE, &[7; 20]));
            let id = in_notes(&notes, order).unwrap();
            assert_eq!(id.to_string(), "07".repeat(20));
            assert_eq!(in_notes(&notes[..notes.len() - 1], order), None);
        }
    }

    #[test]
    fn the_one_of_a_vdso_is_not_taken_for_the_kernels() {
        for order in [ByteOrder::Little, ByteOrder::Big] {
            let mut bytes = vec![0; PAGE];
            bytes.extend(elf(order, &[1; 20]));
            assert_eq!(search(&bytes, Gva(0), order), Err(BuildIdError::None));
            // The kernel's stands right behind it.
            let own = note(order, b"GNU\0", TYPE, &[2; 20]);
            bytes.extend(&own);
            assert_eq!(search(&bytes, Gva(0), order), Ok(BuildId(vec![2; 20])));
            let second = bytes.len() as u64;
            bytes.extend(&own);
            let error = search(&bytes, Gva(0x10_0000), order).unwrap_err();
            let (first, second) = (Gva(0x10_0000 + 3 * PAGE as u64), Gva(0x10_0000 + second));
            assert_eq!(error, BuildIdError::Ambiguous { first, second });
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_us_panic(
            mut bytes in prop::collection::vec(any::<u8>(), 0..300), at in any::<prop::sample::Index>(),
        ) {
            for order in [ByteOrder::Little, ByteOrder::Big] {
                let _ = (in_notes(&bytes, order), search(&bytes, Gva(0), order));
                for piece in [&b"\x7fELF\x02"[..], b"\0\0\0\x04\0\0\0\x14\0\0\0\x03GNU\0"] {
                    if bytes.len() > piece.len() {
                        let at = at.index(bytes.len() - piece.len());
                        bytes[at..at + piece.len()].copy_from_slice(piece);
                    }
                    let _ = (in_notes(&bytes, order), search(&bytes, Gva(0), order));
                }
                let _ = elf_len(&bytes, order);
            }
        }
    }
}
