//! Encodes symbol tables as the kernel's build does (scripts/kallsyms.c), in every order of tables
//! and either byte order.

use crate::addr::Gva;
use crate::arch::ByteOrder;

/// The order of a kernel's tables of symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableOrder {
    /// Up to 6.1.
    OffsetsFirst,
    /// 6.1 stable, 6.2 and 6.3: with the name-sorted sequence between markers and tokens.
    OffsetsFirstWithSequence,
    /// 6.4 to 6.19.
    OffsetsLast,
    /// From 7.0: offsets count from where they are stored.
    SelfRelative,
}

impl TableOrder {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::OffsetsFirst, Self::OffsetsFirstWithSequence, Self::OffsetsLast, Self::SelfRelative];
}

/// One symbol to be encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SymbolSpec {
    /// Its address.
    pub address: u64,
    /// Its letter.
    pub kind: u8,
    /// Its name, ASCII.
    pub name: String,
}

/// How symbols are to be encoded.
#[derive(Debug, Clone, Copy)]
pub struct Encoding {
    /// The order of the tables.
    pub order: TableOrder,
    /// The order of bytes.
    pub byte_order: ByteOrder,
    /// Whether addresses below the base are absolute values, as for x86_64's per-CPU variables up
    /// to 6.14. Tables that are self-relative have none such.
    pub per_cpu_from_zero: bool,
    /// What offsets count from: the address of `_text`.
    pub base: Gva,
    /// Where the encoded bytes will be, a multiple of 8.
    pub at: Gva,
}

/// Strings that names have in common, beside single characters. One is longer than any that
/// decoders would find convenient.
const COMMON: [&str; 6] =
    ["function_", "__", "tinit_", "Tvfs_", "read", "exceptionally_long_token_of_a_name"];

/// Encodes `symbols`, which ascend by address and whose names have at most 16 KiB.
#[must_use]
pub fn encode(symbols: &[SymbolSpec], encoding: &Encoding) -> Vec<u8> {
    let mut out = Out { bytes: Vec::new(), encoding };
    let tokens = tokens();
    let mut names = Vec::new();
    let mut markers = Vec::new();
    for (index, symbol) in symbols.iter().enumerate() {
        if index % 256 == 0 {
            markers.push(names.len() as u32);
        }
        let compressed = compress(symbol, &tokens);
        match compressed.len() {
            len @ 0..0x80 => names.push(len as u8),
            len => names.extend([len as u8 & 0x7f | 0x80, (len >> 7) as u8]),
        }
        names.extend(compressed);
    }
    match encoding.order {
        TableOrder::OffsetsFirst | TableOrder::OffsetsFirstWithSequence => {
            out.offsets(symbols);
            out.base();
            out.names(symbols.len(), &names, &markers);
            if encoding.order == TableOrder::OffsetsFirstWithSequence {
                out.sequence(symbols);
            }
            out.tokens(&tokens);
        }
        TableOrder::OffsetsLast => {
            out.names(symbols.len(), &names, &markers);
            out.tokens(&tokens);
            out.offsets(symbols);
            out.base();
            out.sequence(symbols);
        }
        TableOrder::SelfRelative => {
            out.names(symbols.len(), &names, &markers);
            out.tokens(&tokens);
            out.offsets(symbols);
            out.sequence(symbols);
        }
    }
    out.bytes
}

/// Each token's string: printable characters stand for themselves, the rest for strings that names
/// have in common or that none has.
fn tokens() -> Vec<String> {
    let mut common = COMMON.iter().map(|&string| string.to_owned());
    (0..=u8::MAX)
        .map(|token| {
            if token.is_ascii_graphic() {
                char::from(token).to_string()
            } else {
                common.next().unwrap_or_else(|| format!("<unused_{token}>"))
            }
        })
        .collect()
}

fn compress(symbol: &SymbolSpec, tokens: &[String]) -> Vec<u8> {
    let string = format!("{}{}", char::from(symbol.kind), symbol.name);
    let mut rest = string.as_str();
    let mut compressed = Vec::new();
    while let Some(first) = rest.bytes().next() {
        let longer = tokens.iter().position(|token| token.len() > 1 && rest.starts_with(token));
        compressed.push(longer.map_or(first, |token| token as u8));
        rest = &rest[longer.map_or(1, |token| tokens[token].len())..];
    }
    compressed
}

struct Out<'a> {
    bytes: Vec<u8>,
    encoding: &'a Encoding,
}

impl Out<'_> {
    fn align(&mut self) {
        let align = if self.encoding.order == TableOrder::SelfRelative { 4 } else { 8 };
        self.bytes.resize(self.bytes.len().next_multiple_of(align), 0);
    }

    fn u16(&mut self, value: u16) {
        self.bytes.extend(self.encoding.byte_order.bytes_of_u16(value));
    }

    fn u32(&mut self, value: u32) {
        self.bytes.extend(self.encoding.byte_order.bytes_of_u32(value));
    }

    fn base(&mut self) {
        self.align();
        let base = self.encoding.base.0;
        self.bytes.extend(self.encoding.byte_order.bytes(base));
    }

    fn offsets(&mut self, symbols: &[SymbolSpec]) {
        self.align();
        for symbol in symbols {
            let from_base = symbol.address.wrapping_sub(self.encoding.base.0) as u32;
            self.u32(match self.encoding.order {
                TableOrder::SelfRelative => {
                    let here = self.encoding.at + self.bytes.len() as u64;
                    symbol.address.wrapping_sub(here.0) as u32
                }
                _ if !self.encoding.per_cpu_from_zero => from_base,
                _ if symbol.address < self.encoding.base.0 => symbol.address as u32,
                _ => !from_base,
            });
        }
    }

    fn names(&mut self, count: usize, names: &[u8], markers: &[u32]) {
        self.align();
        self.u32(count as u32);
        self.align();
        self.bytes.extend(names);
        self.align();
        for &marker in markers {
            self.u32(marker);
        }
    }

    fn sequence(&mut self, symbols: &[SymbolSpec]) {
        self.align();
        let mut sequence: Vec<u32> = (0..symbols.len() as u32).collect();
        sequence.sort_by_key(|&index| &symbols[index as usize].name);
        for index in sequence {
            // Three bytes, the most significant first, in either byte order.
            self.bytes.extend(&index.to_be_bytes()[1..]);
        }
    }

    fn tokens(&mut self, tokens: &[String]) {
        self.align();
        let mut index = Vec::new();
        let begin = self.bytes.len();
        for token in tokens {
            index.push((self.bytes.len() - begin) as u16);
            self.bytes.extend(token.as_bytes());
            self.bytes.push(0);
        }
        self.align();
        for at in index {
            self.u16(at);
        }
    }
}
