//! What functions take and return, by the kernel's description of its types.

use super::{Types, TypesError};
use crate::arch::{Place, Shape, ShapeClass};
use crate::kernel::Kernel;
use crate::mem::PhysMem;

#[cfg(test)]
mod tests;

const ENUM: u32 = 6;
const FUNCTION: u32 = 12;
const PROTOTYPE: u32 = 13;
const ARRAY: u32 = 3;
const ENUM64: u32 = 19;

/// What the second word of an integer says of it (BTF_INT_SIGNED, BTF_INT_BOOL).
const SIGNED: u32 = 1 << 24;
const BOOL: u32 = 4 << 24;

/// Parameters that a function has at most; the kernel's have 15.
const MAX_PARAMETERS: usize = 32;
/// How many fields are looked at to tell how a structure is given.
const MAX_FIELDS: usize = 1 << 10;

/// The prototypes of a kernel's functions. Those of modules have descriptions of their own, and are not
/// among them.
#[derive(Debug)]
pub struct Prototypes {
    types: Types,
    /// Where the functions are among the types, ascending by name.
    functions: Vec<u32>,
}

/// A function has no prototype that could be believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoPrototype {
    /// The types do not tell of it: the compiler has changed what it takes, it is written in assembly, or
    /// is a module's.
    #[error("the kernel's types do not tell what {0} takes")]
    Unknown(String),
    /// Several functions have that name.
    #[error("several functions are named {0}, and the kernel's types do not tell them apart")]
    Ambiguous(String),
    /// What they say makes no sense.
    #[error("what the kernel's types say of {0} is not sound")]
    Unsound(String),
}

/// What a function takes and returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prototype {
    /// What it returns; `None` for `void`.
    pub returns: Option<ValueType>,
    /// What it takes.
    pub parameters: Vec<Parameter>,
    /// Whether it takes more than that (`...`).
    pub variadic: bool,
}

/// A parameter of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name; empty if it has none.
    pub name: String,
    /// Its type.
    pub value: ValueType,
    /// Where it is when the function is entered.
    pub place: Place,
}

/// The type of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueType {
    /// What it is.
    pub kind: ValueKind,
    /// Its size in bytes.
    pub size: u64,
    /// The name by which the kernel's types call it behind all others; empty if it has none.
    pub name: String,
}

/// What a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// An integer.
    Integer {
        /// Whether it may be negative.
        signed: bool,
    },
    /// A `bool`.
    Bool,
    /// A `char`.
    Char {
        /// Whether it may be negative.
        signed: bool,
    },
    /// An address.
    Pointer {
        /// Whether it leads to `char`.
        to_text: bool,
    },
    /// An enumeration; [`Prototypes::enumerator`] names its values.
    Enumeration {
        /// Whether it may be negative.
        signed: bool,
        /// Its number among the types.
        number: u32,
    },
    /// A structure or union.
    Aggregate {
        /// Its number among the types.
        number: u32,
    },
    /// Anything else.
    Other,
}

impl Kernel {
    /// What this kernel's functions take and return.
    ///
    /// # Errors
    /// [`TypesError`]: it does not say.
    pub fn prototypes(&self, ram: &dyn PhysMem) -> Result<Prototypes, TypesError> {
        let types = Types::read(ram, self.image(), self.symbols(), self.arch().byte_order())?;
        Ok(Prototypes::new(types))
    }

    /// What the function takes and returns.
    ///
    /// # Errors
    /// [`NoPrototype`]; also if the kernel has several functions of that name, of which the types may
    /// tell of one.
    pub fn prototype(
        &self,
        prototypes: &Prototypes,
        function: &str,
    ) -> Result<Prototype, NoPrototype> {
        let is_code = |kind: u8| matches!(kind, b't' | b'T' | b'w' | b'W');
        let named = self.symbols().named(function).filter(|symbol| is_code(symbol.kind));
        if named.count() > 1 {
            return Err(NoPrototype::Ambiguous(function.to_owned()));
        }
        let mut prototype = prototypes.of(function)?;
        let returns = prototype.returns.as_ref().map(|value| prototypes.shape(value));
        let shapes: Vec<Shape> =
            (prototype.parameters.iter()).map(|this| prototypes.shape(&this.value)).collect();
        let places = self.arch().calling_convention().place(returns, &shapes);
        for (parameter, place) in prototype.parameters.iter_mut().zip(places) {
            parameter.place = place;
        }
        Ok(prototype)
    }
}

impl Prototypes {
    fn new(types: Types) -> Self {
        let is_function = |at: &&u32| {
            types.type_at(**at as usize).is_some_and(|this| this.kind == FUNCTION && this.name != 0)
        };
        let mut functions: Vec<u32> = types.index.iter().filter(is_function).copied().collect();
        functions.sort_by_key(|at| types.type_at(*at as usize).map(|this| types.string(this.name)));
        Self { types, functions }
    }

    /// What the types say of a function, but for where its arguments are.
    fn of(&self, function: &str) -> Result<Prototype, NoPrototype> {
        let name_of = |at: &u32| {
            let this = self.types.type_at(*at as usize);
            this.map_or(&[][..], |this| self.types.string(this.name))
        };
        let name = function.as_bytes();
        let first = self.functions.partition_point(|at| name_of(at) < name);
        let same = self.functions[first..].iter().take_while(|at| name_of(at) == name);
        let mut numbers = same.filter_map(|at| Some(self.types.type_at(*at as usize)?.size));
        let number = numbers.next().ok_or_else(|| NoPrototype::Unknown(function.to_owned()))?;
        // Types that are the same have one number.
        if numbers.any(|other| other != number) {
            return Err(NoPrototype::Ambiguous(function.to_owned()));
        }
        self.numbered(number).ok_or_else(|| NoPrototype::Unsound(function.to_owned()))
    }

    fn numbered(&self, number: u32) -> Option<Prototype> {
        let this = self.types.numbered(number).filter(|this| this.kind == PROTOTYPE)?;
        if this.count > MAX_PARAMETERS {
            return None;
        }
        let mut parameters = Vec::with_capacity(this.count);
        let mut variadic = false;
        for index in 0..this.count {
            let [name, number] = self.types.words(this.rest + 8 * index)?;
            if number == 0 {
                variadic = index + 1 == this.count;
                if !variadic {
                    return None;
                }
                continue;
            }
            let value = self.value(number);
            let (name, place) = (self.types.shown(name), Place::Unknown);
            parameters.push(Parameter { name, value, place });
        }
        let returns = (this.size != 0 && !self.is_void(this.size)).then(|| self.value(this.size));
        Some(Prototype { returns, parameters, variadic })
    }

    /// Whether a type is another name of `void`.
    fn is_void(&self, number: u32) -> bool {
        self.types.bare_number(number) == Some(0)
    }

    fn value(&self, number: u32) -> ValueType {
        let unknown = ValueType { kind: ValueKind::Other, size: 0, name: String::new() };
        let bare = self.types.bare_number(number);
        let Some((number, this)) = bare.and_then(|bare| Some((bare, self.types.numbered(bare)?)))
        else {
            return unknown;
        };
        let (kind, size) = match this.kind {
            super::INTEGER => {
                let encoding = self.types.words(this.rest).map_or(0, |[word]| word);
                let signed = encoding & SIGNED != 0;
                let is_char = this.size == 1 && self.types.is_named(this.name, "char");
                let kind = match encoding {
                    _ if this.size > 16 => ValueKind::Other,
                    encoding if encoding & BOOL != 0 => ValueKind::Bool,
                    _ if is_char => ValueKind::Char { signed },
                    _ => ValueKind::Integer { signed },
                };
                (kind, this.size.into())
            }
            super::POINTER => {
                let target = self.types.bare(this.size);
                let to_text = target.is_some_and(|target| {
                    target.kind == super::INTEGER && self.types.is_named(target.name, "char")
                });
                (ValueKind::Pointer { to_text }, 8)
            }
            ENUM | ENUM64 if this.size <= 8 => {
                let kind = ValueKind::Enumeration { signed: this.bit_fields, number };
                (kind, this.size.into())
            }
            super::STRUCT | super::UNION => (ValueKind::Aggregate { number }, this.size.into()),
            _ => return unknown,
        };
        ValueType { kind, size, name: self.types.shown(this.name) }
    }

    /// The name of a value of the enumeration with that number: as many low bits count as it has.
    #[must_use]
    pub fn enumerator(&self, number: u32, value: u64) -> Option<String> {
        let this = self.types.numbered(number)?;
        for index in 0..this.count {
            let (name, found) = match this.kind {
                ENUM => {
                    let [name, value] = self.types.words(this.rest + 8 * index)?;
                    (name, value.into())
                }
                ENUM64 => {
                    let [name, low, high] = self.types.words(this.rest + 12 * index)?;
                    (name, u64::from(high) << 32 | u64::from(low))
                }
                _ => return None,
            };
            let bits = 8 * this.size.min(8);
            if bits != 0 && (found ^ value) << (64 - bits) == 0 {
                return Some(self.types.shown(name)).filter(|name| !name.is_empty());
            }
        }
        None
    }

    /// What decides where a value of that type is given.
    fn shape(&self, value: &ValueType) -> Shape {
        let unknown = Shape { size: 0, wide: false, class: ShapeClass::Unknown };
        let class = match value.kind {
            ValueKind::Other => return unknown,
            ValueKind::Aggregate { number } => match self.alignment(number) {
                Some((align, unaligned)) => {
                    let class = ShapeClass::Aggregate { unaligned };
                    return Shape { size: value.size, wide: align >= 16, class };
                }
                None => return unknown,
            },
            _ => ShapeClass::Scalar,
        };
        Shape { size: value.size, wide: value.size == 16, class }
    }

    /// The largest alignment of a field of that structure, in bytes, and whether a field is not aligned so;
    /// `None` if one is a floating-point number, or what it is can't be told.
    fn alignment(&self, number: u32) -> Option<(u64, bool)> {
        let (mut align, mut unaligned) = (1, false);
        let mut left = MAX_FIELDS;
        let mut within = vec![(number, 0_u64)];
        while let Some((number, begin)) = within.pop() {
            left = left.checked_sub(1)?;
            let this = self.types.bare(number)?;
            let own = match this.kind {
                super::STRUCT | super::UNION => {
                    for index in 0..this.count.min(left + 1) {
                        let [_, number, offset] = self.types.words(this.rest + 12 * index)?;
                        let is_bits = this.bit_fields && offset >> 24 != 0;
                        let bits = if this.bit_fields { offset & 0xff_ffff } else { offset };
                        // What a field of bits is aligned to is that of its type, which may begin earlier.
                        let bits = if is_bits { 0 } else { u64::from(bits) };
                        within.push((number, begin.checked_add(bits)?));
                    }
                    continue;
                }
                ARRAY => {
                    let [element, _, _] = self.types.words(this.rest)?;
                    within.push((element, begin));
                    continue;
                }
                super::INTEGER | ENUM | ENUM64 => u64::from(this.size),
                super::POINTER => 8,
                _ => return None,
            };
            if !own.is_power_of_two() || own > 16 {
                return None;
            }
            align = align.max(own);
            unaligned |= !begin.is_multiple_of(8 * own);
        }
        Some((align, unaligned))
    }
}
