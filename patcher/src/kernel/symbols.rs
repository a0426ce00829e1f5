//! A kernel's symbols: one arena of names, looked up by address and by name.

use std::hash::{BuildHasher, RandomState};

use crate::addr::Gva;

/// The symbols of a kernel, ascending by address; several may share an address or a name.
#[derive(Debug)]
pub struct Symbols {
    addresses: Vec<u64>,
    names: Names,
    by_name: NameIndex,
}

/// One symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// Its address; for the symbols of per-CPU variables of kernels up to 6.14 the offset in each
    /// CPU's area.
    pub address: Gva,
    /// The letter that /proc/kallsyms shows: `T` and `t` for text, `D`, `d`, `B`, `b`, `R`, `r` for
    /// data, `A` for absolute values, `W` and `w` for weak symbols.
    pub kind: u8,
    /// Its name.
    pub name: &'a str,
}

/// What an address lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<'a> {
    /// The symbol that begins at or last before the address.
    pub symbol: Symbol<'a>,
    /// How far into it the address is, in bytes.
    pub offset: u64,
    /// Where the next symbol begins that is not at the same address; `None` for the last symbol.
    pub end: Option<Gva>,
}

impl Symbols {
    /// How many symbols there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.addresses.len()
    }

    /// Whether there are no symbols.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// All symbols in the order of the kernel's own table.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Symbol<'_>> {
        (0..self.len()).map(|index| self.at(index))
    }

    /// All symbols of this name, in the order of the kernel's own table.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Symbol<'a>> {
        self.by_name.chain(name).map(|index| self.at(index)).filter(move |s| s.name == name)
    }

    /// The address of the first symbol of this name.
    #[must_use]
    pub fn address(&self, name: &str) -> Option<Gva> {
        self.named(name).next().map(|symbol| symbol.address)
    }

    /// What `address` lies in. Of several symbols at one address it is the first in the table, as
    /// the kernel's own `kallsyms_lookup` has it.
    #[must_use]
    pub fn lookup(&self, address: Gva) -> Option<Place<'_>> {
        let above = self.addresses.partition_point(|&begin| begin <= address.0);
        let begin = *self.addresses.get(above.checked_sub(1)?)?;
        let first = self.addresses[..above].partition_point(|&other| other < begin);
        Some(Place {
            symbol: self.at(first),
            offset: address.0 - begin,
            end: self.addresses.get(above).copied().map(Gva),
        })
    }

    /// Symbols of these addresses, kinds and names, which ascend by address.
    ///
    /// # Panics
    /// If they do not, or one has no name.
    #[cfg(any(test, feature = "synthetic"))]
    #[must_use]
    pub fn listed(list: &[(u64, u8, &str)]) -> Self {
        let mut builder = Builder::with_capacity(list.len());
        for (address, kind, name) in list {
            let text = [&[*kind], name.as_bytes()].concat();
            let pieces: Vec<Piece> = text.chunks(PIECE).map(Piece::new).collect();
            builder.push_name(pieces.len(), pieces.iter()).expect("symbols have names");
            builder.push_address(*address);
        }
        builder.build().expect("symbols ascend by address")
    }

    fn at(&self, index: usize) -> Symbol<'_> {
        let (kind, name) = self.names.get(index);
        Symbol { address: Gva(self.addresses[index]), kind, name }
    }
}

/// Kinds and names of all symbols, in one piece of memory.
#[derive(Debug)]
struct Names {
    /// ASCII: each symbol's kind, one letter, and its name, one after the other.
    text: String,
    /// Where each symbol ends in `text`.
    ends: Vec<u32>,
}

impl Names {
    fn len(&self) -> usize {
        self.ends.len()
    }

    fn get(&self, index: usize) -> (u8, &str) {
        let begin = index.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        let end = self.ends[index] as usize;
        (self.text.as_bytes()[begin], &self.text[begin + 1..end])
    }
}

/// A piece of a name: the first `len` bytes of `bytes` count.
///
/// Pieces are copied whole, whatever their length, since a copy of fixed size is a single
/// instruction; a kernel's names are put together from millions of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    bytes: [u8; PIECE],
    len: u8,
}

/// The longest piece; longer tokens are several.
pub(super) const PIECE: usize = 16;

impl Piece {
    /// The piece that holds `bytes`, of which there are at most [`PIECE`].
    pub(super) fn new(bytes: &[u8]) -> Self {
        let mut piece = Self { bytes: [0; PIECE], len: bytes.len() as u8 };
        piece.bytes[..bytes.len()].copy_from_slice(bytes);
        piece
    }
}

/// Collects symbols into [`Symbols`].
#[derive(Debug, Default)]
pub(super) struct Builder {
    addresses: Vec<u64>,
    /// Kinds and names up to the last of `ends`, and room for more behind them.
    text: Vec<u8>,
    ends: Vec<u32>,
}

impl Builder {
    /// Room for `count` symbols.
    pub(super) fn with_capacity(count: usize) -> Self {
        Self {
            addresses: Vec::with_capacity(count),
            // A name has 22 to 30 bytes on average, by kernel. Room that stays unused costs no
            // memory: nothing touches it.
            text: vec![0; count * 48],
            ends: Vec::with_capacity(count),
        }
    }

    /// Appends a name that is put together from at most `count` pieces; the first byte of it is the
    /// symbol's kind. Returns `None` for a symbol without kind or name, and when names take more
    /// than 4 GiB.
    pub(super) fn push_name<'a>(
        &mut self,
        count: usize,
        pieces: impl Iterator<Item = &'a Piece>,
    ) -> Option<()> {
        let begin = self.ends.last().map_or(0, |&end| end as usize);
        let most = begin + (count + 1) * PIECE;
        if self.text.len() < most {
            self.text.resize(most * 2, 0);
        }
        let mut end = begin;
        for piece in pieces {
            self.text[end..end + PIECE].copy_from_slice(&piece.bytes);
            end += usize::from(piece.len);
        }
        if end - begin < 2 {
            return None;
        }
        self.ends.push(u32::try_from(end).ok()?);
        Some(())
    }

    /// Appends the address of the next symbol that has none yet.
    pub(super) fn push_address(&mut self, address: u64) {
        self.addresses.push(address);
    }

    /// How many names there are.
    pub(super) fn names(&self) -> usize {
        self.ends.len()
    }

    /// The finished symbols; `None` if addresses do not ascend, if there is not one for each name,
    /// or if a name is not text.
    pub(super) fn build(self) -> Option<Symbols> {
        if self.addresses.len() != self.ends.len() || !self.addresses.is_sorted() {
            return None;
        }
        let Self { addresses, mut text, ends } = self;
        text.truncate(ends.last().map_or(0, |&end| end as usize));
        let text = String::from_utf8(text).ok().filter(|text| text.is_ascii())?;
        let names = Names { text, ends };
        let by_name = NameIndex::new(&names);
        Some(Symbols { addresses, names, by_name })
    }
}

/// No symbol.
const NONE: u32 = u32::MAX;

/// A hash table of chains of symbol numbers, each chain ascending.
///
/// Names come from the guest, so the hash is keyed with a random key; and as a kernel may have any
/// number of symbols of one name, inserting one never looks at those that are there.
#[derive(Debug)]
struct NameIndex {
    hasher: RandomState,
    heads: Vec<u32>,
    next: Vec<u32>,
}

impl NameIndex {
    fn new(names: &Names) -> Self {
        let hasher = RandomState::new();
        let mut heads = vec![NONE; names.len().next_power_of_two()];
        let mut next = vec![NONE; names.len()];
        // Backwards, so that what is put at a chain's head ends up in ascending order.
        for index in (0..names.len()).rev() {
            let (_, name) = names.get(index);
            let head = &mut heads[slot(&hasher, name, names.len())];
            next[index] = std::mem::replace(head, index as u32);
        }
        Self { hasher, heads, next }
    }

    /// The numbers of all symbols whose names hash like `name`.
    fn chain(&self, name: &str) -> impl Iterator<Item = usize> {
        let head = self.heads.get(slot(&self.hasher, name, self.next.len())).copied();
        std::iter::successors(head, |&index| self.next.get(index as usize).copied())
            .take_while(|&index| index != NONE)
            .map(|index| index as usize)
    }
}

/// Where the chain of `name` begins among the heads for `count` symbols.
fn slot(hasher: &RandomState, name: &str, count: usize) -> usize {
    hasher.hash_one(name) as usize & (count.next_power_of_two() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols(list: &[(u64, &str)]) -> Symbols {
        let mut builder = Builder::default();
        for (address, name) in list {
            builder.push_name(1, [Piece::new(name.as_bytes())].iter()).unwrap();
            builder.push_address(*address);
        }
        builder.build().unwrap()
    }

    #[test]
    fn an_address_belongs_to_the_first_of_the_symbols_that_begin_last_before_it() {
        let symbols =
            symbols(&[(0x10, "Tfirst"), (0x20, "Talias_a"), (0x20, "talias_b"), (0x30, "Tlast")]);
        let place = symbols.lookup(Gva(0x24)).unwrap();
        assert_eq!(place.symbol.name, "alias_a");
        assert_eq!((place.offset, place.end), (4, Some(Gva(0x30))));
        assert_eq!(symbols.lookup(Gva(0xf)), None);
        let last = symbols.lookup(Gva(u64::MAX)).unwrap();
        assert_eq!((last.symbol.name, last.end), ("last", None));
    }

    #[test]
    fn every_symbol_of_a_name_is_found_in_table_order() {
        let symbols = symbols(&[(1, "tdup"), (2, "Tother"), (3, "ddup"), (4, "tdup")]);
        let found: Vec<_> = symbols.named("dup").map(|s| (s.address.0, s.kind)).collect();
        assert_eq!(found, [(1, b't'), (3, b'd'), (4, b't')]);
        assert_eq!(symbols.address("other"), Some(Gva(2)));
        assert_eq!(symbols.address("absent"), None);
    }

    #[test]
    fn no_symbols_at_all_are_looked_up_in_without_harm() {
        let symbols = Builder::default().build().unwrap();
        assert!(symbols.is_empty());
        assert_eq!(symbols.address("any"), None);
        assert_eq!(symbols.lookup(Gva(0)), None);
    }

    #[test]
    fn tables_that_do_not_ascend_or_are_no_text_are_refused() {
        let mut builder = Builder::default();
        for address in [2, 1] {
            builder.push_name(1, [Piece::new(b"Tx")].iter()).unwrap();
            builder.push_address(address);
        }
        assert!(builder.build().is_none());
        let mut builder = Builder::default();
        builder.push_name(1, [Piece::new(b"T\xff")].iter()).unwrap();
        builder.push_address(1);
        assert!(builder.build().is_none());
        assert!(Builder::default().push_name(1, [Piece::new(b"T")].iter()).is_none());
    }
}
