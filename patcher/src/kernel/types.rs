//! The kernel's own description of its types (BTF), as far as the places of fields in structures go.
//!
//! Format: Documentation/bpf/btf.rst. The blob is found by its header: nothing in the table of symbols
//! need name it.

use memchr::memmem;

use super::image::Image;
use super::symbols::Symbols;
use crate::addr::Gva;
use crate::arch::ByteOrder;
use crate::mem::PhysMem;

/// The kernel's types do not say what they are asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TypesError {
    /// There is no description in the image.
    #[error(
        "the kernel has no description of its types: is it built without CONFIG_DEBUG_INFO_BTF?"
    )]
    None,
    /// The description is not sound.
    #[error("the kernel's description of its types is not sound")]
    Unsound,
    /// A field is missing.
    #[error("the kernel's types have no field {field} in struct {structure}")]
    NoField {
        /// The structure's name.
        structure: &'static str,
        /// The field's name.
        field: &'static str,
    },
}

const VERSION: u8 = 1;
/// Bytes of the header that count; newer kernels have more of them.
const HEADER: usize = 24;
/// The most bytes believed; distribution kernels have 3 to 7 MiB.
const MAX_LEN: u64 = 64 << 20;
/// How much of the image is searched at a time.
const CHUNK: u64 = 1 << 20;
/// How many headers are looked at: a kernel has a copy of the one that counts.
const MAX_HEADERS: usize = 64;

/// A kind that describes a structure.
const STRUCT: u32 = 4;

/// The types of a kernel.
#[derive(Debug)]
pub(super) struct Types {
    order: ByteOrder,
    types: Vec<u8>,
    strings: Vec<u8>,
}

impl Types {
    /// Finds the description in the kernel's image and reads it.
    pub fn read(
        ram: &dyn PhysMem,
        image: &Image,
        symbols: &Symbols,
        order: ByteOrder,
    ) -> Result<Self, TypesError> {
        if let Some(at) = symbols.address("__start_BTF") {
            return Self::at(ram, image, order, at).ok_or(TypesError::Unsound);
        }
        // Magic number, version, no flags.
        let header = match order {
            ByteOrder::Big => [0xeb, 0x9f, VERSION, 0],
            ByteOrder::Little => [0x9f, 0xeb, VERSION, 0],
        };
        let finder = memmem::Finder::new(&header);
        let mut headers = MAX_HEADERS;
        let mut error = TypesError::None;
        let mut begin = image.range.start;
        while begin < image.range.end {
            let offset = begin.0 - image.range.start.0;
            let chunk = image.read(ram, offset, CHUNK + 3).unwrap_or_default();
            for hit in finder.find_iter(&chunk) {
                if let Some(types) = Self::at(ram, image, order, begin + hit as u64) {
                    return Ok(types);
                }
                headers -= 1;
                if headers == 0 {
                    return Err(TypesError::Unsound);
                }
                error = TypesError::Unsound;
            }
            begin = begin + CHUNK;
        }
        Err(error)
    }

    /// Reads the description that begins at `at`, if one does that describes a kernel.
    fn at(ram: &dyn PhysMem, image: &Image, order: ByteOrder, at: Gva) -> Option<Self> {
        let offset = at.offset_from(image.range.start)?;
        let header = image.read(ram, offset, HEADER as u64).ok()?;
        let field = |at: usize| -> Option<u64> {
            Some(order.u32(header.get(at..at + 4)?.try_into().ok()?).into())
        };
        let (len, types, types_len) = (field(4)?, field(8)?, field(12)?);
        let (strings, strings_len) = (field(16)?, field(20)?);
        if len < HEADER as u64 || types_len > MAX_LEN || strings_len > MAX_LEN {
            return None;
        }
        let part = |begin: u64, want: u64| {
            let bytes = image.read(ram, offset + len + begin, want).ok()?;
            (bytes.len() as u64 == want).then_some(bytes)
        };
        let found =
            Self { order, types: part(types, types_len)?, strings: part(strings, strings_len)? };
        // The first string is empty, and every kernel has tasks.
        let is_kernels = found.strings.first() == Some(&0)
            && memmem::find(&found.strings, b"\0task_struct\0").is_some();
        is_kernels.then_some(found)
    }

    /// Where the first of `paths` leads of which the types have every field: the sum of the fields'
    /// offsets in their structures, in bytes.
    pub fn first_path(&self, paths: &[&[(&'static str, &'static str)]]) -> Result<u64, TypesError> {
        let mut error = TypesError::Unsound;
        for path in paths {
            let offsets = path.iter().map(|(structure, field)| self.offset(structure, field));
            match offsets.sum::<Result<u64, _>>() {
                Ok(sum) => return Ok(sum),
                Err(reason) => error = reason,
            }
        }
        Err(error)
    }

    /// Where `field` is in `structure`, in bytes.
    fn offset(&self, structure: &'static str, field: &'static str) -> Result<u64, TypesError> {
        let mut at = 0;
        while at < self.types.len() {
            let header = self.words::<3>(at).ok_or(TypesError::Unsound)?;
            let [name, info, _] = header;
            let (kind, count) = (info >> 24 & 0x1f, info as usize & 0xffff);
            let members = at + 12;
            if kind == STRUCT && self.is_named(name, structure) {
                let bit_fields = info >> 31 == 1;
                let found = (0..count).find_map(|index| {
                    let [name, _, offset] = self.words::<3>(members + 12 * index)?;
                    self.is_named(name, field).then_some(offset)
                });
                if let Some(offset) = found {
                    // With bit fields the upper 8 bits are the field's width.
                    let bits = if bit_fields { offset & 0xff_ffff } else { offset };
                    return Ok(u64::from(bits / 8));
                }
            }
            at = members + trailing(kind, count).ok_or(TypesError::Unsound)?;
        }
        Err(TypesError::NoField { structure, field })
    }

    fn words<const N: usize>(&self, at: usize) -> Option<[u32; N]> {
        let bytes = self.types.get(at..at.checked_add(4 * N)?)?;
        let mut words = [0; N];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = self.order.u32(bytes.try_into().ok()?);
        }
        Some(words)
    }

    fn is_named(&self, at: u32, name: &str) -> bool {
        let string = self.strings.get(at as usize..).unwrap_or_default();
        string.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
    }
}

/// How many bytes follow the twelve that every type begins with.
fn trailing(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        // pointers, forward declarations, typedefs and qualifiers, functions, floats, tags of types
        2 | 7..=12 | 16 | 18 => 0,
        // integers, variables, tags of declarations
        1 | 14 | 17 => 4,
        // arrays
        3 => 12,
        // enumerations, prototypes
        6 | 13 => 8 * count,
        // structures, unions, sections, enumerations of 64 bits
        4 | 5 | 15 | 19 => 12 * count,
        _ => return None,
    })
}
