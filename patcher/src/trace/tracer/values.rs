//! The values of calls: which of them are recorded, and what they are.

use std::iter;

use crate::addr::Gva;
use crate::arch::{ArgumentWords, Place};
use crate::kernel::{Kernel, Prototypes, Site, ValueKind, ValueType};
use crate::mem::PhysMem;
use crate::trace::ring::RecordedWords;
use crate::trace::values::{Encoder, MAX_TEXT, Value};

/// What a function's calls and returns tell.
#[derive(Debug)]
pub(super) struct Format {
    parameters: Vec<(Box<str>, Option<ValueType>, Place)>,
    /// Whether there are arguments behind those.
    has_more: bool,
    returns: Returns,
    words: ArgumentWords,
}

#[derive(Debug)]
enum Returns {
    Nothing,
    Value(ValueType),
    /// Nobody says whether it returns anything.
    Word,
}

/// Where values are looked up that a record only leads to.
#[derive(Clone, Copy)]
pub(super) struct Memory<'a> {
    pub kernel: &'a Kernel,
    pub ram: &'a dyn PhysMem,
    pub prototypes: Option<&'a Prototypes>,
}

impl Format {
    /// What is told of the function of `site`: by its prototype, or by the registers that the first arguments
    /// of any function are in.
    pub fn of(kernel: &Kernel, prototypes: Option<&Prototypes>, site: &Site) -> Self {
        let convention = kernel.arch().calling_convention();
        // The types of a kernel tell nothing of modules.
        let prototypes = prototypes.filter(|_| site.module.is_none());
        let prototype = prototypes.and_then(|all| kernel.prototype(all, &site.name).ok());
        let Some(prototype) = prototype else {
            let registers = convention.registers;
            let parameters = (0..).zip(registers).map(|(first, register)| {
                (Box::from(*register), None, Place::Registers { first, count: 1 })
            });
            return Self {
                parameters: parameters.collect(),
                has_more: false,
                returns: Returns::Word,
                words: ArgumentWords::new(convention, registers.len(), 0),
            };
        };
        let parameters: Vec<_> = (prototype.parameters.into_iter())
            .map(|parameter| (parameter.name.into(), Some(parameter.value), parameter.place))
            .collect();
        let (mut registers, mut stack) = (0, 0);
        for (_, _, place) in &parameters {
            match *place {
                Place::Registers { first, count } => {
                    registers = registers.max(usize::from(first) + usize::from(count));
                }
                Place::AtRegister(register) => registers = registers.max(usize::from(register) + 1),
                Place::Stack { first, count } => {
                    stack = stack.max(usize::from(first) + usize::from(count));
                }
                Place::AtStack(word) => stack = stack.max(usize::from(word) + 1),
                Place::Unknown => {}
            }
        }
        Self {
            parameters,
            has_more: prototype.variadic,
            returns: prototype.returns.map_or(Returns::Nothing, Returns::Value),
            words: ArgumentWords::new(convention, registers, stack),
        }
    }

    /// What has to be recorded of its calls.
    pub fn words(&self) -> ArgumentWords {
        self.words
    }

    /// Writes the arguments of a call down, of which that was recorded.
    pub fn arguments(
        &self,
        recorded: Option<&RecordedWords>,
        memory: Memory<'_>,
        into: &mut Encoder,
    ) {
        into.clear();
        let recorded = recorded.map_or(&[][..], RecordedWords::words);
        let registers = self.words.registers();
        let on_stack = registers..registers + self.words.stack();
        let (registers, on_stack) =
            (recorded.get(..registers).unwrap_or_default(), recorded.get(on_stack));
        let on_stack = on_stack.unwrap_or_default();
        let some = |words: &'_ [u64], first: usize, count: usize| {
            words.get(first..first + count).map(<[u64]>::to_vec)
        };
        for (name, value, place) in &self.parameters {
            let found = match *place {
                Place::Registers { first, count } => some(registers, first.into(), count.into()),
                Place::Stack { first, count } => some(on_stack, first.into(), count.into()),
                Place::AtRegister(register) => {
                    let word = registers.get(usize::from(register));
                    into.push(name, &word.map_or(Value::Unknown, |word| Value::Pointer(*word)));
                    continue;
                }
                Place::AtStack(word) => {
                    let word = on_stack.get(usize::from(word));
                    into.push(name, &word.map_or(Value::Unknown, |word| Value::Pointer(*word)));
                    continue;
                }
                Place::Unknown => None,
            };
            match (found.as_deref(), value) {
                (None | Some([]), _) => into.push(name, &Value::Unknown),
                (Some([word, ..]), None) => into.push(name, &Value::Word(*word)),
                (Some(words), Some(value)) => memory.push(name, value, words, into),
            }
        }
        if self.has_more {
            into.push("", &Value::More);
        }
    }

    /// Writes down what a call has returned; `false` if it returns nothing.
    pub fn returned(&self, word: u64, memory: Memory<'_>, into: &mut Encoder) -> bool {
        into.clear();
        match &self.returns {
            Returns::Nothing => return false,
            Returns::Word => into.push("", &Value::Word(word)),
            // Of what has several words one is recorded, or the address at which they are.
            Returns::Value(value) if value.size > 8 => into.push("", &Value::Unknown),
            Returns::Value(value) => match value.kind {
                ValueKind::Aggregate { .. } => {
                    let convention = memory.kernel.arch().calling_convention();
                    match value.size <= convention.returned {
                        true => into.words("", iter::once(word)),
                        false => into.push("", &Value::Unknown),
                    }
                }
                // What is returned may lie anywhere, and be gone.
                ValueKind::Pointer { .. } => into.push("", &Value::Pointer(word)),
                _ => memory.push("", value, &[word], into),
            },
        }
        true
    }
}

impl Memory<'_> {
    /// Writes down a value of that type, which has these words.
    fn push(self, name: &str, value: &ValueType, words: &[u64], into: &mut Encoder) {
        let &[word, ..] = words else { return into.push(name, &Value::Unknown) };
        let unused = 64 - 8 * value.size.clamp(1, 8) as u32;
        let unsigned = word << unused >> unused;
        let signed = (word << unused).cast_signed() >> unused;
        match value.kind {
            ValueKind::Aggregate { .. } => into.words(name, words.iter().copied()),
            _ if words.len() > 1 => into.words(name, words.iter().copied()),
            ValueKind::Integer { signed: true } => into.push(name, &Value::Signed(signed)),
            ValueKind::Integer { signed: false } => into.push(name, &Value::Unsigned(unsigned)),
            ValueKind::Bool => into.push(name, &Value::Bool(unsigned)),
            ValueKind::Char { .. } => into.push(name, &Value::Char(unsigned as u8)),
            ValueKind::Enumeration { signed: is_signed, number } => {
                let shown = if is_signed { signed } else { unsigned.cast_signed() };
                match self.prototypes.and_then(|all| all.enumerator(number, unsigned)) {
                    Some(of) => into.push(name, &Value::Enumerator { value: shown, name: &of }),
                    None => into.push(name, &Value::Signed(shown)),
                }
            }
            ValueKind::Pointer { to_text: true } => match self.text(Gva(word)) {
                Some((text, is_cut)) => {
                    into.push(name, &Value::Text { address: word, text: &text, is_cut });
                }
                None => into.push(name, &Value::Pointer(word)),
            },
            ValueKind::Pointer { to_text: false } => into.push(name, &Value::Pointer(word)),
            ValueKind::Other => into.push(name, &Value::Word(word)),
        }
    }

    /// The text at a kernel's address, and whether there is more of it.
    fn text(self, at: Gva) -> Option<(Vec<u8>, bool)> {
        let is_kernels = match self.kernel.arch().kernel_addresses() {
            Some(first) => at >= first,
            // Only the image's are nobody else's.
            None => self.kernel.image().range.contains(&at),
        };
        if !is_kernels {
            return None;
        }
        let mut text = vec![0; MAX_TEXT + 1];
        // It may end where the next page is none.
        let in_page = (PAGE - at.0 % PAGE).min(text.len() as u64) as usize;
        if self.kernel.read_virt(self.ram, at, &mut text).is_err() {
            text.truncate(in_page);
            self.kernel.read_virt(self.ram, at, &mut text).ok()?;
        }
        let length = memchr::memchr(0, &text).unwrap_or(text.len());
        let is_cut = length == text.len();
        text.truncate(length.min(MAX_TEXT));
        Some((text, is_cut))
    }
}

/// The smallest pages of every architecture have a multiple of so many bytes.
const PAGE: u64 = 4096;
