//! The kernel's own description of its types (BTF), as far as the places of fields in structures go.
//!
//! Format: Documentation/bpf/btf.rst. The blob is found by its header: nothing in the table of symbols
//! need name it.

use memchr::memmem;

mod prototypes;

use super::image::Image;
use super::symbols::Symbols;
use crate::addr::Gva;
use crate::arch::ByteOrder;
use crate::mem::PhysMem;

pub use prototypes::{NoPrototype, Parameter, Prototype, Prototypes, ValueKind, ValueType};

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

/// The kinds that matter here.
const INTEGER: u32 = 1;
const POINTER: u32 = 2;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const TYPEDEF: u32 = 8;
const QUALIFIERS: std::ops::RangeInclusive<u32> = 9..=11;
/// What compilers say of a type beside that (`__user`).
const TYPE_TAG: u32 = 18;

/// How many structures without names may lie in one another.
const MAX_NESTED: usize = 8;
/// How many members of structures without names are looked at for one field.
const MAX_NESTED_MEMBERS: usize = 1 << 12;
/// Bytes of a name that are shown at most.
const MAX_NAME: usize = 128;
/// How many names a type may have for another.
const MAX_NAMES: usize = 16;

/// The types of a kernel.
#[derive(Debug)]
pub(super) struct Types {
    order: ByteOrder,
    types: Vec<u8>,
    strings: Vec<u8>,
    /// Where each type is in `types`; the first has the number 1.
    index: Vec<u32>,
    /// Where the structures are in `types` that have names.
    structures: Vec<u32>,
}

/// The head of a type.
#[derive(Debug, Clone, Copy)]
struct Type {
    kind: u32,
    name: u32,
    count: usize,
    bit_fields: bool,
    /// Its size in bytes, or the type that it is about, by kind.
    size: u32,
    /// Where what follows its head is.
    rest: usize,
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
        let mut found = Self {
            order,
            types: part(types, types_len)?,
            strings: part(strings, strings_len)?,
            index: Vec::new(),
            structures: Vec::new(),
        };
        // The first string is empty, and every kernel has tasks.
        let is_kernels = found.strings.first() == Some(&0)
            && memmem::find(&found.strings, b"\0task_struct\0").is_some();
        if !is_kernels {
            return None;
        }
        let mut at = 0;
        while at < found.types.len() {
            // The first type that can't be read ends what is known.
            let Some(next) = found.type_at(at).and_then(|this| {
                if this.kind == STRUCT && this.name != 0 {
                    found.structures.push(at as u32);
                }
                Some(this.rest + trailing(this.kind, this.count)?)
            }) else {
                break;
            };
            found.index.push(at as u32);
            at = next;
        }
        Some(found)
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
    pub fn offset(&self, structure: &'static str, field: &'static str) -> Result<u64, TypesError> {
        self.field(structure, field).map(|(bits, _)| u64::from(bits / 8))
    }

    /// How many bytes the integer `field` of `structure` has.
    pub fn width(&self, structure: &'static str, field: &'static str) -> Result<u64, TypesError> {
        let (_, number) = self.field(structure, field)?;
        match self.bare(number) {
            Some(Type { kind: INTEGER, size, .. }) => Ok(size.into()),
            _ => Err(TypesError::Unsound),
        }
    }

    /// How many bytes the structure has that the pointer `field` of `structure` leads to; `None` if
    /// it leads to anything else.
    pub fn target_size(
        &self,
        structure: &'static str,
        field: &'static str,
    ) -> Result<Option<u64>, TypesError> {
        let (_, number) = self.field(structure, field)?;
        let pointer = self.bare(number).filter(|this| this.kind == POINTER);
        let target = pointer.and_then(|pointer| self.bare(pointer.size));
        Ok(target.filter(|this| this.kind == STRUCT).map(|this| this.size.into()))
    }

    /// What the type of that number is behind other names and qualifiers.
    fn bare(&self, number: u32) -> Option<Type> {
        self.numbered(self.bare_number(number)?)
    }

    /// The number of the type that the type of that number is; 0 is `void`.
    fn bare_number(&self, mut number: u32) -> Option<u32> {
        for _ in 0..MAX_NAMES {
            if number == 0 {
                return Some(0);
            }
            let this = self.numbered(number)?;
            match this.kind {
                TYPEDEF | TYPE_TAG => number = this.size,
                kind if QUALIFIERS.contains(&kind) => number = this.size,
                _ => return Some(number),
            }
        }
        None
    }

    /// Where `field` is in `structure`, in bits, and the number of its type. Fields of structures and
    /// unions without names that lie in a structure are its own.
    fn field(
        &self,
        structure: &'static str,
        field: &'static str,
    ) -> Result<(u32, u32), TypesError> {
        for &at in &self.structures {
            let Some(this) = self.type_at(at as usize) else { continue };
            if self.is_named(this.name, structure)
                && let Some(found) = self.field_of(this, field)
            {
                return Ok(found);
            }
        }
        Err(TypesError::NoField { structure, field })
    }

    fn field_of(&self, structure: Type, field: &str) -> Option<(u32, u32)> {
        let mut nested = vec![(structure, 0, 0)];
        let mut seen = 0;
        while let Some((this, begin, depth)) = nested.pop() {
            for index in 0..this.count {
                let [name, number, offset] = self.words::<3>(this.rest + 12 * index)?;
                // With bit fields the upper 8 bits are the field's width.
                let bits = if this.bit_fields { offset & 0xff_ffff } else { offset };
                let bits = bits.checked_add(begin)?;
                if name == 0 && depth < MAX_NESTED && seen < MAX_NESTED_MEMBERS {
                    let inner = self.numbered(number);
                    let inner = inner.filter(|inner| matches!(inner.kind, STRUCT | UNION));
                    seen += inner.map_or(0, |inner| inner.count);
                    nested.extend(inner.map(|inner| (inner, bits, depth + 1)));
                } else if self.is_named(name, field) {
                    return Some((bits, number));
                }
            }
        }
        None
    }

    fn numbered(&self, number: u32) -> Option<Type> {
        let index = (number as usize).checked_sub(1)?;
        self.type_at(*self.index.get(index)? as usize)
    }

    fn type_at(&self, at: usize) -> Option<Type> {
        let [name, info, size] = self.words::<3>(at)?;
        Some(Type {
            kind: info >> 24 & 0x1f,
            name,
            count: info as usize & 0xffff,
            bit_fields: info >> 31 == 1,
            size,
            rest: at + 12,
        })
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

    /// The string at `at`, or what there is of it.
    fn string(&self, at: u32) -> &[u8] {
        let string = self.strings.get(at as usize..).unwrap_or_default();
        &string[..memchr::memchr(0, string).unwrap_or(string.len())]
    }

    /// A name as it may be shown: what is no letter, digit or underscore is left out.
    fn shown(&self, at: u32) -> String {
        let letters = self.string(at).iter().take(MAX_NAME);
        letters
            .filter(|byte| byte.is_ascii_alphanumeric() || **byte == b'_' || **byte == b' ')
            .map(|byte| char::from(*byte))
            .collect()
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::addr::Gpa;
    use crate::kernel::symbols;

    const BASE: Gva = Gva(0xffff_9000_0001_0000);
    const LEN: u64 = 0x10_0000;
    /// Where the description is in the image: at no round address.
    pub(super) const AT: u64 = 0x8_0014;

    const STRINGS: &str =
        "\0task_struct\0thread_info\0cpu\0pid\0flags\0int\0u8\0inner\0char\0vfs_read\0vfs_write\0";

    pub(super) fn string(name: &str) -> u32 {
        STRINGS.find(&format!("\0{name}\0")).unwrap() as u32 + 1
    }

    /// An integer, an array, a structure with bit fields and one that contains it.
    fn types(task_fields: &[(&str, u32)]) -> Vec<u32> {
        let mut types = vec![string("int"), 1 << 24, 4, 0x0100_0020];
        types.extend([0, 3 << 24, 0, 1, 1, 16]);
        types.extend([string("thread_info"), 1 << 31 | STRUCT << 24 | 2, 24]);
        types.extend([string("flags"), 1, 3 << 24 | 5, string("cpu"), 1, 128]);
        types.extend([string("task_struct"), STRUCT << 24 | task_fields.len() as u32, 4096]);
        types.extend(task_fields.iter().flat_map(|(name, bits)| [string(name), 1, *bits]));
        types
    }

    pub(super) fn blob(order: ByteOrder, types: &[u32]) -> Vec<u8> {
        let len = types.len() as u32 * 4;
        let header = [24, 0, len, len, STRINGS.len() as u32];
        let word = |word: &u32| order.bytes_of_u32(*word);
        let mut blob = match order {
            ByteOrder::Little => vec![0x9f, 0xeb, 1, 0],
            ByteOrder::Big => vec![0xeb, 0x9f, 1, 0],
        };
        blob.extend(header.iter().chain(types).flat_map(word));
        blob.extend(STRINGS.as_bytes());
        blob
    }

    pub(super) fn read(order: ByteOrder, pieces: &[(u64, &[u8])]) -> Result<Types, TypesError> {
        let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap();
        for (at, bytes) in pieces {
            ram.write_slice(bytes, GuestAddress(*at)).unwrap();
        }
        let image = Image { range: BASE..BASE + LEN, phys: Gpa(0) };
        Types::read(&ram, &image, &symbols::Builder::default().build().unwrap(), order)
    }

    /// As in kernels before 5.16, and since.
    const PATHS: [&[(&str, &str)]; 2] =
        [&[("task_struct", "cpu")], &[("task_struct", "thread_info"), ("thread_info", "cpu")]];

    #[test]
    fn a_field_is_found_where_the_types_have_it_in_either_byte_order() {
        for order in [ByteOrder::Little, ByteOrder::Big] {
            for (fields, offset) in
                [(&[("pid", 64), ("cpu", 576)][..], 72), (&[("pid", 64), ("thread_info", 256)], 48)]
            {
                // A header without anything behind it, as of a copy, is gone over.
                let copy = &blob(order, &[])[..24];
                let whole = blob(order, &types(fields));
                let types = read(order, &[(0x1000, copy), (AT, &whole)]).unwrap();
                assert_eq!(types.first_path(&PATHS), Ok(offset), "{order:?}");
            }
        }
    }

    #[test]
    fn what_is_missing_is_said() {
        let order = ByteOrder::Little;
        assert_eq!(read(order, &[]).unwrap_err(), TypesError::None);
        let header = &blob(order, &[])[..24];
        assert_eq!(read(order, &[(AT, header)]).unwrap_err(), TypesError::Unsound);
        let types = read(order, &[(AT, &blob(order, &types(&[("pid", 64)])))]).unwrap();
        let error = types.first_path(&PATHS).unwrap_err();
        assert_eq!(error, TypesError::NoField { structure: "task_struct", field: "thread_info" });
    }

    /// A union without a name, number 1, in which a structure without a name lies, number 2; what a name
    /// stands for, numbers 3 and 4; the structure that has the union, and a pointer, number 6, to
    /// something constant, number 7.
    fn nested() -> Vec<u32> {
        let mut types = vec![0, UNION << 24 | 2, 8, string("pid"), 4, 0, 0, 2, 0];
        types.extend([0, STRUCT << 24 | 2, 8, string("flags"), 4, 0, string("inner"), 3, 32]);
        types.extend([string("u8"), TYPEDEF << 24, 4]);
        types.extend([string("int"), INTEGER << 24, 1, 8]);
        types.extend([string("task_struct"), STRUCT << 24 | 3, 4096]);
        types.extend([string("cpu"), 4, 0, 0, 1, 640, string("flags"), 6, 704]);
        types.extend([0, POINTER << 24, 7, 0, 9 << 24, 2]);
        types
    }

    #[test]
    fn fields_of_structures_without_names_are_those_of_what_they_lie_in() {
        let order = ByteOrder::Big;
        let types = read(order, &[(AT, &blob(order, &nested()))]).unwrap();
        assert_eq!(types.offset("task_struct", "cpu"), Ok(0));
        assert_eq!(types.offset("task_struct", "pid"), Ok(80));
        assert_eq!(types.offset("task_struct", "inner"), Ok(84));
        assert_eq!(types.width("task_struct", "inner"), Ok(1));
        assert_eq!(types.width("task_struct", "pid"), Ok(1));
        assert_eq!(types.width("task_struct", "flags"), Err(TypesError::Unsound));
        assert_eq!(types.target_size("task_struct", "flags"), Ok(Some(8)));
        assert_eq!(types.target_size("task_struct", "cpu"), Ok(None));
    }

    #[test]
    fn types_that_contain_themselves_or_are_names_of_themselves_end() {
        let order = ByteOrder::Little;
        let mut types = nested();
        // The inner structure's first field is the union; the name stands for itself.
        types[12..14].copy_from_slice(&[0, 1]);
        types[20] = 3;
        let types = read(order, &[(AT, &blob(order, &types))]).unwrap();
        let missing = types.offset("task_struct", "thread_info").unwrap_err();
        assert!(matches!(missing, TypesError::NoField { .. }));
        assert_eq!(types.width("task_struct", "inner"), Err(TypesError::Unsound));
    }

    proptest! {
        #[test]
        fn no_types_make_us_panic(
            words in prop::collection::vec(any::<u32>(), 0..200),
            begin in any::<prop::sample::Index>(), len in any::<u32>(),
        ) {
            let order = ByteOrder::Little;
            let mut spoilt = types(&[("pid", 64), ("cpu", 576)]);
            let begin = begin.index(spoilt.len());
            spoilt.truncate(begin);
            spoilt.extend(&words);
            let mut blob = blob(order, &spoilt);
            for (at, len) in [(12, len), (20, len.rotate_left(16))] {
                let _ = read(order, &[(AT, &blob)]).map(|types| {
                    (
                        types.first_path(&PATHS),
                        types.width("task_struct", "cpu"),
                        types.target_size("task_struct", "cpu"),
                    )
                });
                blob[at..at + 4].copy_from_slice(&len.to_le_bytes());
            }
            let _ = read(order, &[(AT, &blob)]).map(|types| types.first_path(&PATHS));
        }
    }
}
