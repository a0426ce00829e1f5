//! Which calls of the functions that are traced: conditions that the guest itself checks, so that what is
//! filtered out costs less than a record and never leaves it.
//!
//! `FUNCTIONS: EXPRESSION` asks for calls by their arguments, as filters of ftrace's events do by their fields:
//! comparisons of a parameter with a number, joined by `&&`, which binds more closely, and `||`.

use std::collections::BTreeMap;
use std::fmt;

use super::filter::Glob;
use crate::arch::gate::{CommBytes, Comparison, Conditions, GatedValue, Operator, Rate};
use crate::arch::{Arch, Place};
use crate::kernel::{NoPrototype, Parameter, Prototype, ValueKind};

/// The most comparisons that a function's calls are filtered by, and the most alternatives.
const MAX_COMPARISONS: usize = 64;

/// The most numbers of tasks that calls are filtered by.
pub const MAX_PIDS: usize = 64;

/// Characters that functions' names and globs don't have, one of which every expression has.
const COMPARING: [char; 4] = ['<', '>', '=', '&'];

/// Which calls are traced.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallFilter {
    /// Those of tasks with these numbers, at most [`MAX_PIDS`]; of all if there are none.
    pub pids: Vec<u32>,
    /// Those of tasks with that name.
    pub comm: Option<String>,
    /// By their arguments.
    pub arguments: Vec<ArgumentFilter>,
    /// Of each function one in so many of what all that lets through.
    pub one_in: Option<u32>,
    /// Of each function at most so many a second of that.
    pub per_second: Option<u32>,
}

/// Which calls of some functions, by their arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgumentFilter {
    glob: Glob,
    /// As it was given.
    text: String,
    any: Vec<Vec<Term>>,
}

/// One comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Term {
    parameter: String,
    operator: Operator,
    value: i128,
}

/// A filter of calls makes no sense, or asks for what can't be told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallFilterError {
    /// It can't be read.
    #[error(
        "the filter '{text}' can't be read: {what}; it is FUNCTION: PARAMETER OPERATOR NUMBER, with \
         == != < <= > >= or &, and several of them joined by && and ||"
    )]
    Syntax {
        /// The filter.
        text: String,
        /// What is wrong with it.
        what: String,
    },
    /// What the function takes is not known.
    #[error(
        "{source}, so that its calls can't be filtered by a parameter's name; arg1, arg2 and so on \
         are its argument registers, as numbers without a sign"
    )]
    Prototype {
        /// Why not.
        #[from]
        source: NoPrototype,
    },
    /// The kernel tells of no function what it takes.
    #[error(
        "calls can't be filtered by the names of parameters: {0}; arg1, arg2 and so on are the \
         argument registers, as numbers without a sign"
    )]
    NoTypes(String),
    /// There is no such parameter.
    #[error("{function} has no parameter {parameter}: it has {known}")]
    NoParameter {
        /// The function.
        function: String,
        /// What it was to have.
        parameter: String,
        /// What it has.
        known: String,
    },
    /// The parameter can't be compared.
    #[error("the parameter {parameter} of {function} can't be compared with a number: {why}")]
    NoNumber {
        /// The function.
        function: String,
        /// The parameter.
        parameter: String,
        /// Why not.
        why: &'static str,
    },
    /// The parameter can't have that value.
    #[error(
        "{value} is no value of {parameter} of {function}, which has {bytes} bytes {}",
        if *signed { "and a sign" } else { "and no sign" }
    )]
    OutOfRange {
        /// The function.
        function: String,
        /// The parameter.
        parameter: String,
        /// What it is compared with.
        value: i128,
        /// How many bytes it has.
        bytes: u64,
        /// Whether it has a sign.
        signed: bool,
    },
    /// It is too long.
    #[error("the filters of {0} come to more than {MAX_COMPARISONS} comparisons together")]
    TooLong(String),
    /// No task can be called that.
    #[error("no task can be called '{0}': names of tasks have 1 to 15 bytes")]
    Comm(String),
}

/// Whether a filter has something to say of arguments.
#[must_use]
pub fn has_expression(filter: &str) -> bool {
    filter.contains(COMPARING)
}

/// What of a selection's filters is about functions, and what about their calls.
///
/// # Errors
/// [`CallFilterError::Syntax`].
pub fn divide(filters: &[String]) -> Result<(Vec<Glob>, Vec<ArgumentFilter>), CallFilterError> {
    let (mut globs, mut arguments) = (Vec::new(), Vec::new());
    for text in filters {
        match has_expression(text) {
            true => {
                let filter = ArgumentFilter::new(text)?;
                globs.push(filter.glob.clone());
                arguments.push(filter);
            }
            false => globs.push(Glob::new(text)),
        }
    }
    Ok((globs, arguments))
}

impl ArgumentFilter {
    /// Reads one.
    ///
    /// # Errors
    /// [`CallFilterError::Syntax`].
    pub fn new(text: &str) -> Result<Self, CallFilterError> {
        let wrong = |what: String| CallFilterError::Syntax { text: text.to_owned(), what };
        // Globs may have `:mod:` in them, expressions have no colon.
        let (glob, expression) =
            text.rsplit_once(':').ok_or_else(|| wrong("it names no function".into()))?;
        if glob.trim().is_empty() {
            return Err(wrong("it names no function".into()));
        }
        let any: Result<Vec<Vec<Term>>, String> =
            (expression.split("||")).map(|all| all.split("&&").map(Term::new).collect()).collect();
        Ok(Self { glob: Glob::new(glob.trim()), text: text.to_owned(), any: any.map_err(wrong)? })
    }
}

impl fmt::Display for ArgumentFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Operators, those first that others begin with.
const OPERATORS: [(&str, Operator); 7] = [
    ("==", Operator::Equal),
    ("!=", Operator::NotEqual),
    ("<=", Operator::AtMost),
    (">=", Operator::AtLeast),
    ("<", Operator::Less),
    (">", Operator::Greater),
    ("&", Operator::AnyBit),
];

impl Term {
    fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let (parameter, rest) = text.split_at(end.unwrap_or(text.len()));
        if parameter.is_empty() {
            return Err(format!("'{text}' does not begin with a parameter's name"));
        }
        let rest = rest.trim_start();
        let operator = OPERATORS.iter().find(|(sign, _)| rest.starts_with(sign));
        let (sign, operator) =
            operator.ok_or_else(|| format!("no operator stands behind '{parameter}'"))?;
        let number = rest[sign.len()..].trim();
        let value = parse_number(number).ok_or_else(|| format!("'{number}' is no number"))?;
        Ok(Self { parameter: parameter.to_owned(), operator: *operator, value })
    }
}

/// A number as C has it: decimal, `0x` hexadecimal, `0` octal, perhaps with a sign. No argument has more than
/// 64 bits.
fn parse_number(text: &str) -> Option<i128> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let (digits, radix) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None if digits.len() > 1 && digits.starts_with('0') => (digits, 8),
        None => (digits, 10),
    };
    // A sign would be taken here as well.
    if !digits.starts_with(|c: char| c.is_digit(radix)) {
        return None;
    }
    let value = i128::from(u64::from_str_radix(digits, radix).ok()?);
    Some(if negative { -value } else { value })
}

/// A filter of calls, as it is in one kernel.
#[derive(Debug, Clone, Default)]
pub struct CallConditions {
    /// What holds for all functions.
    common: Conditions,
    arguments: Vec<ArgumentFilter>,
    /// What is asked of the arguments of each function that filters name.
    resolved: BTreeMap<Box<str>, Vec<Vec<Comparison>>>,
}

impl CallConditions {
    /// What the filter asks for of these functions. `prototype` tells what a function takes; the clock of
    /// trampolines has so many ticks a second.
    ///
    /// # Errors
    /// [`CallFilterError`].
    pub fn new<'a>(
        filter: &CallFilter,
        arch: &dyn Arch,
        clock_hz: u64,
        functions: impl Iterator<Item = &'a str>,
        mut prototype: impl FnMut(&str) -> Result<Prototype, CallFilterError>,
    ) -> Result<Self, CallFilterError> {
        let comm = filter
            .comm
            .as_ref()
            .map(|comm| CommBytes::new(comm).ok_or_else(|| CallFilterError::Comm(comm.clone())));
        let rate = filter.per_second.filter(|calls| *calls > 0).map(|calls| {
            let every = (clock_hz / u64::from(calls)).max(1);
            Rate { every, slack: every * u64::from(calls - 1) }
        });
        let mut pids = filter.pids.clone();
        pids.sort_unstable();
        pids.dedup();
        let one_in = filter.one_in.filter(|calls| *calls > 1);
        let common = Conditions { pids, comm: comm.transpose()?, any: Vec::new(), one_in, rate };
        let mut resolved = BTreeMap::new();
        for function in functions {
            let named: Vec<&ArgumentFilter> =
                filter.arguments.iter().filter(|this| this.glob.matches(function)).collect();
            if named.is_empty() || resolved.contains_key(function) {
                continue;
            }
            let any = resolve(&named, arch, function, &mut prototype)?;
            resolved.insert(function.into(), any);
        }
        Ok(Self { common, arguments: filter.arguments.clone(), resolved })
    }

    /// What has to be true of the calls of a function; nothing if all of them are traced. `None` of a
    /// function that filters name and of which it is not known what they ask for: one of a module that was
    /// loaded later.
    #[must_use]
    pub fn of(&self, function: &str) -> Option<Conditions> {
        match self.resolved.get(function) {
            Some(any) => Some(Conditions { any: any.clone(), ..self.common.clone() }),
            None if self.arguments.iter().any(|this| this.glob.matches(function)) => None,
            None => Some(self.common.clone()),
        }
    }
}

/// What all of these filters ask for of a function's arguments, as alternatives.
fn resolve(
    filters: &[&ArgumentFilter],
    arch: &dyn Arch,
    function: &str,
    prototype: &mut impl FnMut(&str) -> Result<Prototype, CallFilterError>,
) -> Result<Vec<Vec<Comparison>>, CallFilterError> {
    let mut known = None;
    let mut any = vec![Vec::new()];
    for filter in filters {
        let mut more: Vec<Vec<Comparison>> = Vec::new();
        for terms in &filter.any {
            let mut all = Vec::new();
            for term in terms {
                let registers = arch.calling_convention().registers.len();
                if let Some(register) = raw_register(&term.parameter, registers) {
                    let value = Numeric { bytes: 8, signed: false };
                    let place = GatedValue::Register(register);
                    all.push(compare(function, term, place, value)?);
                    continue;
                }
                if known.is_none() {
                    known = Some(prototype(function)?);
                }
                let parameters = known.as_ref().map_or(&[][..], |known| &known.parameters);
                all.push(named(function, term, parameters)?);
            }
            more.push(all);
        }
        let joined: Vec<Vec<Comparison>> = (any.iter())
            .flat_map(|left: &Vec<Comparison>| {
                more.iter().map(|right| left.iter().chain(right).copied().collect())
            })
            .collect();
        any = joined;
        if any.iter().map(Vec::len).sum::<usize>() > MAX_COMPARISONS {
            return Err(CallFilterError::TooLong(function.to_owned()));
        }
    }
    Ok(any)
}

/// The register that `arg1` and so on name.
fn raw_register(parameter: &str, registers: usize) -> Option<u8> {
    let number: usize = parameter.strip_prefix("arg")?.parse().ok()?;
    (1..=registers).contains(&number).then(|| (number - 1) as u8)
}

/// How wide a number is.
#[derive(Debug, Clone, Copy)]
struct Numeric {
    bytes: u64,
    signed: bool,
}

fn named(
    function: &str,
    term: &Term,
    parameters: &[Parameter],
) -> Result<Comparison, CallFilterError> {
    let Some(parameter) = parameters.iter().find(|this| this.name == term.parameter) else {
        let known: Vec<&str> = parameters.iter().map(|this| this.name.as_str()).collect();
        let known = if known.is_empty() { "none".into() } else { known.join(", ") };
        return Err(CallFilterError::NoParameter {
            function: function.to_owned(),
            parameter: term.parameter.clone(),
            known,
        });
    };
    let no_number = |why| CallFilterError::NoNumber {
        function: function.to_owned(),
        parameter: term.parameter.clone(),
        why,
    };
    let signed = match parameter.value.kind {
        ValueKind::Integer { signed }
        | ValueKind::Char { signed }
        | ValueKind::Enumeration { signed, .. } => signed,
        ValueKind::Bool | ValueKind::Pointer { .. } => false,
        ValueKind::Aggregate { .. } => return Err(no_number("it is a structure")),
        ValueKind::Other => return Err(no_number("its type is no number's")),
    };
    let bytes = parameter.value.size;
    if !matches!(bytes, 1 | 2 | 4 | 8) {
        return Err(no_number("it is wider than a register"));
    }
    let place = match parameter.place {
        Place::Registers { first, count: 1 } => GatedValue::Register(first),
        Place::Stack { first, count: 1 } => GatedValue::Stack(8 * first),
        _ => return Err(no_number("where it is can't be told")),
    };
    compare(function, term, place, Numeric { bytes, signed })
}

fn compare(
    function: &str,
    term: &Term,
    place: GatedValue,
    Numeric { bytes, signed }: Numeric,
) -> Result<Comparison, CallFilterError> {
    let bits = 8 * bytes;
    let range = match signed {
        true => -(1_i128 << (bits - 1))..1 << (bits - 1),
        false => 0..1 << bits,
    };
    // Masks are written without a sign, whatever they are of.
    let is_mask = term.operator == Operator::AnyBit && (0..1 << bits).contains(&term.value);
    if !range.contains(&term.value) && !is_mask {
        return Err(CallFilterError::OutOfRange {
            function: function.to_owned(),
            parameter: term.parameter.clone(),
            value: term.value,
            bytes,
            signed,
        });
    }
    let (operator, value) = (term.operator, term.value as u64);
    Ok(Comparison { place, bytes: bytes as u8, signed, operator, value })
}
