//! Where an image is linked, and the addresses in it that its linker did not write.

use super::OfflineError;
use crate::addr::Gva;
use crate::arch::{Arch, ByteOrder};

/// The fewest addresses that are told from chance; distribution kernels hold 130,000 and more.
const ENOUGH_ADDRESSES: usize = 4096;

/// The size of a relocation: `Elf64_Rela { r_offset, r_info, r_addend }`.
const RELOCATION: usize = 24;

/// The fewest relocations that are told from chance; distribution kernels have 110,000 and more.
const ENOUGH_RELOCATIONS: usize = 256;

/// The size of a symbol: `Elf64_Sym { st_name, st_info, st_other, st_shndx, st_value, st_size }`.
const SYMBOL: usize = 24;
/// Where in it the value is.
const SYMBOL_VALUE: usize = 8;

/// The most symbols behind the last one that a relocation names.
const MAX_UNNAMED_SYMBOLS: usize = 1024;

/// Where the image `bytes` begins: of all the places where kernels are linked, the one into whose
/// image most of its own words lead.
pub(super) fn base(arch: &dyn Arch, bytes: &[u8]) -> Result<Gva, OfflineError> {
    let order = arch.byte_order();
    let len = bytes.len() as u64;
    let mut votes: Vec<(usize, Gva)> =
        arch.linked_bases().into_iter().map(|base| (0, base)).collect();
    for word in words(bytes, order) {
        for (found, base) in &mut votes {
            if word.wrapping_sub(base.0) < len {
                *found += 1;
            }
        }
    }
    let (found, best) = votes.into_iter().max().unwrap_or_default();
    if found < ENOUGH_ADDRESSES {
        return Err(OfflineError::NoBase { arch: arch.name(), best, found });
    }
    Ok(best)
}

/// Writes the addresses that the image's linker left to a table of relocations, if it did, as they are
/// for an image that begins at `base`.
pub(super) fn relocate(arch: &dyn Arch, base: Gva, bytes: &mut [u8]) {
    let Some(kinds) = arch.image_relocations() else { return };
    let order = arch.byte_order();
    let Some((begin, count)) = relative_relocations(bytes, order, kinds.relative.into()) else {
        return;
    };
    // Those that name a symbol stand behind those that don't; the symbols in front of all of them.
    let at = |index: usize| {
        let at = begin + index * RELOCATION;
        [0, 1, 2].map(|field| word(bytes, at + 8 * field, order))
    };
    let most = (bytes.len() - begin) / RELOCATION;
    let is_named = |info: u64| kinds.named.contains(&(info as u32)) && info >> 32 != 0;
    let named = (count..most).take_while(|index| is_named(at(*index)[1])).count();
    let last = (count..count + named).map(|index| (at(index)[1] >> 32) as usize).max();
    let symbols = last.and_then(|last| symbols(bytes, order, begin, last, base));
    let mut values = Vec::with_capacity(count + named);
    for index in 0..count + named {
        let [place, info, addend] = at(index);
        let value = match (index < count, symbols) {
            (true, _) => addend,
            (false, Some(symbols)) => {
                let symbol = symbols + SYMBOL * (info >> 32) as usize;
                word(bytes, symbol + SYMBOL_VALUE, order).wrapping_add(addend)
            }
            (false, None) => break,
        };
        values.push((place.wrapping_sub(base.0), value));
    }
    // The tables themselves are never relocated; one that says so is made up.
    let tables = symbols.unwrap_or(begin) as u64..(begin + RELOCATION * (count + named)) as u64;
    for (place, value) in values {
        let end = place.checked_add(8).filter(|end| *end <= bytes.len() as u64);
        if let Some(end) = end.filter(|end| *end <= tables.start || place >= tables.end) {
            bytes[place as usize..end as usize].copy_from_slice(&order.bytes(value));
        }
    }
}

/// The longest run of relocations of the kind `relative`, which name no symbol: where it begins and
/// how many there are.
fn relative_relocations(bytes: &[u8], order: ByteOrder, relative: u64) -> Option<(usize, usize)> {
    let mut best = None;
    // One word in three is the kind; which of the three is not known.
    let mut runs = [(0, 0); 3];
    for (index, found) in words(bytes, order).enumerate() {
        let run = &mut runs[index % 3];
        if found == relative {
            if run.1 == 0 {
                run.0 = index;
            }
            run.1 += 1;
            if best.is_none_or(|(_, most)| run.1 > most) {
                best = Some(*run);
            }
        } else {
            run.1 = 0;
        }
    }
    let (first, count) =
        best.filter(|(first, count)| *count >= ENOUGH_RELOCATIONS && *first > 0)?;
    let begin = (first - 1) * 8;
    // The last one's addend may be missing in an image that is cut there.
    let count = count.min((bytes.len() - begin) / RELOCATION);
    Some((begin, count))
}

/// Where the table of symbols begins that ends at `end` and has more than `last`: its first symbol is
/// nothing, and all others are undefined or in the image.
fn symbols(bytes: &[u8], order: ByteOrder, end: usize, last: usize, base: Gva) -> Option<usize> {
    let counts = last.checked_add(1)?..=last.checked_add(1 + MAX_UNNAMED_SYMBOLS)?;
    let mut begins = counts.filter_map(|count| end.checked_sub(count.checked_mul(SYMBOL)?));
    let is_in_image = |value: u64| {
        // What is zero until the kernel writes it lies behind what its file has.
        value == 0 || value.wrapping_sub(base.0) < 2 * bytes.len() as u64
    };
    begins.find(|begin| {
        let (first, others) = bytes[*begin..end].split_at(SYMBOL);
        let mut values =
            others.chunks_exact(SYMBOL).map(|symbol| word(symbol, SYMBOL_VALUE, order));
        first.iter().all(|byte| *byte == 0) && values.all(is_in_image)
    })
}

/// The image's words of 64 bits.
pub(super) fn words(bytes: &[u8], order: ByteOrder) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks().0.iter().map(move |word| order.u64(*word))
}

fn word(bytes: &[u8], at: usize, order: ByteOrder) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| order.u64(*word))
}
