//! Finds and decodes the kernel's own symbol table (`kallsyms`) in its image.
//!
//! Names are compressed: each is a length and as many tokens, which 256 strings and an index of
//! them expand. Nothing points at the tables, so they are found by what they hold: the ten digits
//! are always tokens of their own, in a row.
//!
//! Five tables belong together, and four orders of them are met (scripts/kallsyms.c):
//!
//! | kernels | order |
//! |---|---|
//! | up to 6.1 | offsets, base, count, names, markers, tokens, token index |
//! | 6.1 stable, 6.2, 6.3 | the same with the name-sorted sequence between markers and tokens |
//! | 6.4 to 6.19 | count, names, markers, tokens, token index, offsets, base, sequence |
//! | from 7.0 | the same without a base: an offset counts from where it is stored |

use memchr::memmem;

use super::image::Image;
use super::symbols::{Builder, PIECE, Piece, Symbols};
use crate::addr::Gva;
use crate::arch::{ByteOrder, ImageWindow};
use crate::mem::PhysMem;

/// The kernel's symbols could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KallsymsError {
    /// Nothing in the image looks like the table of tokens.
    #[error("no kallsyms token table in the image: is the kernel built with CONFIG_KALLSYMS?")]
    NoTokens,
    /// There is a table of tokens and nothing that fits it.
    #[error("a kallsyms token table at {tokens}, but no sound table of {missing} with it")]
    Incomplete {
        /// Where the tokens are.
        tokens: Gva,
        /// What is missing.
        missing: &'static str,
    },
    /// The table is sound and its symbols are not those of a kernel at this place.
    #[error("kallsyms says that {name} is at {symbol}, but the image is mapped at {mapped}")]
    OtherKernel {
        /// The symbol of an image's first byte.
        name: &'static str,
        /// Where the table has it.
        symbol: Gva,
        /// Where the page tables have it.
        mapped: Gva,
    },
}

/// The ten tokens that every table has in a row.
const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0";

/// Tokens that every table has.
const TOKENS: usize = 256;

/// How much of the image is searched at a time: little enough to stay in a CPU's cache.
const CHUNK: u64 = 1 << 20;

/// The longest token table believed, in bytes; those of distribution kernels have up to 1,384.
const MAX_TOKEN_TABLE: u64 = 16 << 10;

/// How much in front of the tokens is read to find names and what precedes them, in bytes: first
/// what distribution kernels need (240,000 symbols take up to 4 MiB), then what larger ones may.
const BEFORE: [u64; 2] = [4 << 20, 16 << 20];

/// The most symbols believed; distribution kernels have up to 240,000.
const MAX_SYMBOLS: usize = 1 << 20;

/// Each marker tells where the names of this many symbols begin.
const MARKED: usize = 256;

/// The fewest markers that are told from chance.
const MIN_MARKERS: usize = 4;

/// The bytes that the names of [`MARKED`] symbols may take: at least a length and a token each, at
/// most two bytes of length and `KSYM_NAME_LEN` tokens.
const MARKER_STEP: std::ops::RangeInclusive<u32> = 512..=256 * 514;

/// How many token tables are looked at, how many runs of markers for each of them, and how many
/// places where names seem to begin: an image that is made up to hold many is given up on.
const MAX_TABLES: usize = 16;
const MAX_RUNS: usize = 64;
const MAX_TRIES: usize = 64;

/// Finds and decodes the symbols of the kernel at `image`, which was found in `window`.
///
/// # Errors
/// What is missing, for the token table that came closest.
pub(super) fn decode(
    ram: &dyn PhysMem,
    image: &Image,
    window: &ImageWindow,
    order: ByteOrder,
) -> Result<Symbols, KallsymsError> {
    let digits = memmem::Finder::new(DIGITS);
    let overlap = DIGITS.len() as u64 - 1;
    let mut error = KallsymsError::NoTokens;
    let mut tables = MAX_TABLES;
    let mut offset = 0;
    while offset < image.len() {
        let Ok(chunk) = image.read(ram, offset, CHUNK + overlap) else {
            break;
        };
        for hit in digits.find_iter(&chunk) {
            let digits_at = offset + hit as u64;
            let Some(tokens) = Tokens::read(ram, image, order, digits_at) else { continue };
            let table = Table { ram, image, window, order, tokens: &tokens };
            match table.decode() {
                Ok(symbols) => return Ok(symbols),
                Err(closer) => error = closer,
            }
            tables -= 1;
            if tables == 0 {
                return Err(error);
            }
        }
        offset += CHUNK;
    }
    Err(error)
}

/// The strings that names are made of.
struct Tokens {
    /// Offset of the first string in the image.
    begin: u64,
    /// Offset of the first byte behind the index.
    end: u64,
    /// The strings, cut in pieces.
    pieces: Vec<Piece>,
    /// Which pieces each string is.
    spans: [(u16, u16); TOKENS],
    /// Whether every string is one piece, whose number then is the token's.
    whole: bool,
}

impl Tokens {
    /// Reads the table that has the token `0` at the image's offset `digits_at`.
    fn read(ram: &dyn PhysMem, image: &Image, order: ByteOrder, digits_at: u64) -> Option<Self> {
        let before = digits_at.min(MAX_TOKEN_TABLE);
        let window_at = digits_at - before;
        let window = image.read(ram, window_at, before + MAX_TOKEN_TABLE + 1024).ok()?;
        let digits = before as usize;

        let mut end = digits;
        for _ in usize::from(b'0')..TOKENS {
            end += window.get(end..)?.iter().position(|&byte| byte == 0)? + 1;
        }
        // The index is aligned to 4 bytes from 7.0 on and to 8 before. Where these differ, the
        // padding in front of the right one makes the other's first two entries equal.
        [4, 8].into_iter().find_map(|align| {
            let index_at = (window_at + end as u64).next_multiple_of(align);
            let at = (index_at - window_at) as usize;
            let index = window.get(at..at + 2 * TOKENS)?;
            let entry = |token: usize| order.u16([index[2 * token], index[2 * token + 1]]);
            let begin = digits.checked_sub(usize::from(entry(usize::from(b'0'))))?;
            let bytes = &window[begin..end];
            let mut pieces = Vec::with_capacity(TOKENS);
            let mut spans = [(0, 0); TOKENS];
            let mut expected = 0;
            for (token, span) in spans.iter_mut().enumerate() {
                let string = bytes.get(expected..)?.split(|&byte| byte == 0).next()?;
                let sound = !string.is_empty() && string.iter().all(u8::is_ascii_graphic);
                if usize::from(entry(token)) != expected || !sound {
                    return None;
                }
                let first = pieces.len();
                pieces.extend(string.chunks(PIECE).map(Piece::new));
                *span = (u16::try_from(first).ok()?, u16::try_from(pieces.len()).ok()?);
                expected += string.len() + 1;
            }
            (expected == bytes.len()).then(|| Self {
                begin: window_at + begin as u64,
                end: index_at + 2 * TOKENS as u64,
                whole: pieces.len() == TOKENS,
                pieces,
                spans,
            })
        })
    }

    /// Appends to `builder` the name that is made of `tokens`.
    fn expand(&self, tokens: &[u8], builder: &mut Builder) -> Option<()> {
        if self.whole {
            let pieces = self.pieces.first_chunk::<TOKENS>()?;
            let pieces = tokens.iter().map(|&token| &pieces[usize::from(token)]);
            return builder.push_name(tokens.len(), pieces);
        }
        let spans = tokens.iter().map(|&token| {
            let (begin, end) = self.spans[usize::from(token)];
            &self.pieces[usize::from(begin)..usize::from(end)]
        });
        let count = spans.clone().map(<[Piece]>::len).sum();
        builder.push_name(count, spans.flatten())
    }
}

/// The tables that go with one token table.
struct Table<'a> {
    ram: &'a dyn PhysMem,
    image: &'a Image,
    window: &'a ImageWindow,
    order: ByteOrder,
    tokens: &'a Tokens,
}

/// Where names and count are, as offsets into the bytes in front of the tokens.
#[derive(Debug, Clone, Copy)]
struct Names {
    begin: usize,
    end: usize,
    count: usize,
    /// Whether the count is the 4 bytes in front of the names (from 7.0 on) and not the first 4 of
    /// 8.
    packed: bool,
}

impl Table<'_> {
    fn decode(&self) -> Result<Symbols, KallsymsError> {
        let missing =
            |missing| KallsymsError::Incomplete { tokens: self.va(self.tokens.begin), missing };
        let (before, names) =
            BEFORE.iter().find_map(|&len| self.read_names(len)).ok_or_else(|| missing("names"))?;

        let mut builder = Builder::with_capacity(names.count);
        let mut entries = &before[names.begin..names.end];
        while builder.names() < names.count {
            let name = next_name(&mut entries).ok_or_else(|| missing("names"))?;
            self.tokens.expand(name, &mut builder).ok_or_else(|| missing("names"))?;
        }
        self.push_addresses(&before, &names, &mut builder).ok_or_else(|| missing("addresses"))?;
        let symbols = builder.build().ok_or_else(|| missing("ascending addresses"))?;
        let mapped = self.image.range.start;
        let name = self.window.first_symbol;
        let symbol = symbols.address(name).ok_or_else(|| missing("symbols that name the text"))?;
        match symbol.offset_from(mapped) {
            Some(in_front) if in_front <= self.window.in_front => Ok(symbols),
            _ => Err(KallsymsError::OtherKernel { name, symbol, mapped }),
        }
    }

    /// Finds the names in the `len` bytes in front of the tokens.
    fn read_names(&self, len: u64) -> Option<(Vec<u8>, Names)> {
        let begin = self.tokens.begin.saturating_sub(len) & !7;
        let before = self.image.read(self.ram, begin, self.tokens.begin - begin).ok()?;
        let names = self.find_names(&before)?;
        Some((before, names))
    }

    /// The virtual address of the image's byte at `offset`.
    fn va(&self, offset: u64) -> Gva {
        self.image.range.start + offset
    }

    /// The 32-bit integer at `at`.
    fn u32(&self, bytes: &[u8], at: usize) -> Option<u32> {
        let bytes = bytes.get(at..at.checked_add(4)?)?;
        Some(self.order.u32(bytes.try_into().ok()?))
    }

    /// The 64-bit integer at `at`.
    fn u64(&self, bytes: &[u8], at: usize) -> Option<u64> {
        let bytes = bytes.get(at..at.checked_add(8)?)?;
        Some(self.order.u64(bytes.try_into().ok()?))
    }

    /// Finds the markers, and by them the names, in the bytes `before` the tokens.
    ///
    /// Markers are a zero and then ascending offsets. They end where the tokens begin, or where
    /// three bytes a symbol (the name-sorted sequence) begin that end there.
    fn find_names(&self, before: &[u8]) -> Option<Names> {
        let lowest = before.len().saturating_sub(3 * MAX_SYMBOLS + 4 * MAX_SYMBOLS / MARKED + 64);
        let mut runs = MAX_RUNS;
        let mut tries = MAX_TRIES;
        // Tokens begin 4-aligned in every order, and so does everything in front of them.
        for at in (lowest..before.len().saturating_sub(3)).rev().filter(|at| at % 4 == 0) {
            if self.u32(before, at) != Some(0) {
                continue;
            }
            let markers = self.markers(before, at);
            if markers.len() < MIN_MARKERS {
                continue;
            }
            runs -= 1;
            // What follows the markers may look like one or two more of them.
            let shortest = markers.len().saturating_sub(2).max(MIN_MARKERS);
            for count in (shortest..=markers.len()).rev() {
                if let Some(names) = self.names_before(before, at, &markers[..count], &mut tries) {
                    return Some(names);
                }
            }
            if runs == 0 || tries == 0 {
                return None;
            }
        }
        None
    }

    /// The run of markers that begins at `at`.
    fn markers(&self, before: &[u8], at: usize) -> Vec<u32> {
        let mut markers = vec![0];
        while let Some(next) = self.u32(before, at + 4 * markers.len()) {
            let step = next.wrapping_sub(markers[markers.len() - 1]);
            if !MARKER_STEP.contains(&step) || markers.len() > MAX_SYMBOLS / MARKED {
                break;
            }
            markers.push(next);
        }
        markers
    }

    /// The names that `markers`, which begin at `at`, mark.
    fn names_before(
        &self,
        before: &[u8],
        at: usize,
        markers: &[u32],
        tries: &mut usize,
    ) -> Option<Names> {
        let last = *markers.last()? as usize;
        let nearest = at.checked_sub(last)?;
        let farthest = nearest.saturating_sub(*MARKER_STEP.end() as usize).max(8);
        let fits = |count: u32| (count as usize).div_ceil(MARKED) == markers.len();
        for begin in (farthest..=nearest).rev().filter(|begin| begin % 4 == 0) {
            let adjacent = self.u32(before, begin - 4)?;
            let spread = self.u32(before, begin - 8)?;
            let (count, packed) = if fits(adjacent) {
                (adjacent, true)
            } else if adjacent == 0 && fits(spread) && begin % 8 == 0 {
                (spread, false)
            } else {
                continue;
            };
            let count = count as usize;
            let behind = at + 4 * markers.len();
            if !self.leads_to_tokens(before, behind, count) {
                continue;
            }
            *tries = tries.checked_sub(1)?;
            if names_agree(&before[begin..at], markers, count) {
                return Some(Names { begin, end: at, count, packed });
            }
        }
        None
    }

    /// Whether what lies between the end of the markers and the tokens is padding, or the
    /// name-sorted sequence of `count` symbols and padding.
    fn leads_to_tokens(&self, before: &[u8], markers_end: usize, count: usize) -> bool {
        let gap = before.len().saturating_sub(markers_end);
        gap < 8 || (3 * count..3 * count + 16).contains(&gap)
    }

    /// Appends the address of each symbol.
    fn push_addresses(&self, before: &[u8], names: &Names, builder: &mut Builder) -> Option<()> {
        let len = 4 * names.count;
        if names.packed {
            let offsets = self.image.read(self.ram, self.tokens.end, len as u64).ok()?;
            let begin = self.va(self.tokens.end);
            for at in (0..len).step_by(4) {
                let distance = self.u32(&offsets, at)?.cast_signed();
                builder.push_address((begin + at as u64 + i64::from(distance) as u64).0);
            }
            return Some(());
        }
        let in_front = || {
            let base = self.u64(before, names.begin.checked_sub(16)?)?;
            let begin = (names.begin - 16).checked_sub(len.next_multiple_of(8))?;
            self.is_base(base).then(|| (base, before[begin..begin + len].to_vec()))
        };
        let behind = || {
            let begin = self.tokens.end.next_multiple_of(8);
            let padded = len.next_multiple_of(8);
            let bytes = self.image.read(self.ram, begin, padded as u64 + 8).ok()?;
            let base = self.u64(&bytes, padded)?;
            self.is_base(base).then(|| (base, bytes[..len].to_vec()))
        };
        let (base, offsets) = in_front().or_else(behind)?;
        let offsets = || (0..len).step_by(4).filter_map(|at| self.u32(&offsets, at));
        // Up to 6.14, x86_64 kernels count the symbols of per-CPU variables from zero. These have
        // offsets that are not negative, and all others have negative ones: -1 - distance.
        let negative = offsets().filter(|offset| offset.cast_signed() < 0).count();
        let per_cpu_from_zero = negative > names.count / 2;
        for offset in offsets() {
            builder.push_address(match offset.cast_signed() {
                _ if !per_cpu_from_zero => base.wrapping_add(u64::from(offset)),
                value @ 0.. => value as u64,
                _ => base.wrapping_add(u64::from(!offset)),
            });
        }
        Some(())
    }

    /// Whether `base` can be what offsets count from: the lowest symbol, at the image's beginning
    /// or, where symbols of data are left out, little above it.
    fn is_base(&self, base: u64) -> bool {
        let lowest = self.image.range.start - self.window.in_front;
        Gva(base).offset_from(lowest).is_some_and(|above| above < 2 << 20)
    }
}

/// Takes the tokens of the first of `names` off it.
fn next_name<'a>(names: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (&first, rest) = names.split_first()?;
    // From 6.1 on a length above 127 goes on in a second byte.
    let (len, rest) = match first {
        0..0x80 => (usize::from(first), rest),
        _ => {
            let (&second, rest) = rest.split_first()?;
            (usize::from(first & 0x7f) | usize::from(second) << 7, rest)
        }
    };
    let (name, rest) = rest.split_at_checked(len)?;
    *names = rest;
    Some(name)
}

/// Whether `count` names fill `bytes` but for padding, and the markers mark every 256th.
fn names_agree(bytes: &[u8], markers: &[u32], count: usize) -> bool {
    let mut rest = bytes;
    for index in 0..count {
        let at = bytes.len() - rest.len();
        if index % MARKED == 0 && markers.get(index / MARKED).is_none_or(|&m| m as usize != at) {
            return false;
        }
        if next_name(&mut rest).is_none_or(<[u8]>::is_empty) {
            return false;
        }
    }
    rest.len() < 8
}
