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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::x86_64::X86_64;
    use crate::kernel::ValueType;

    fn parameter(name: &str, size: u64, kind: ValueKind, place: Place) -> Parameter {
        let value = ValueType { kind, size, name: String::new() };
        Parameter { name: name.into(), value, place }
    }

    /// `ssize_t vfs_read(struct file *file, char *buf, size_t count, loff_t *pos)`, and an `int` and a
    /// structure on the stack.
    fn prototype(function: &str) -> Result<Prototype, CallFilterError> {
        let register = |first| Place::Registers { first, count: 1 };
        let pointer = ValueKind::Pointer { to_text: false };
        let parameters = vec![
            parameter("file", 8, pointer, register(0)),
            parameter("buf", 8, ValueKind::Pointer { to_text: true }, register(1)),
            parameter("count", 8, ValueKind::Integer { signed: false }, register(2)),
            parameter(
                "fd",
                4,
                ValueKind::Integer { signed: true },
                Place::Stack { first: 2, count: 1 },
            ),
            parameter(
                "pair",
                16,
                ValueKind::Aggregate { number: 1 },
                Place::Stack { first: 3, count: 2 },
            ),
            parameter("lost", 4, ValueKind::Bool, Place::Unknown),
        ];
        match function {
            "vfs_read" => Ok(Prototype { returns: None, parameters, variadic: false }),
            _ => Err(NoPrototype::Unknown(function.into()).into()),
        }
    }

    fn conditions(filters: &[&str], function: &str) -> Result<Conditions, CallFilterError> {
        let filters: Vec<String> = filters.iter().map(|text| (*text).to_owned()).collect();
        let (_, arguments) = divide(&filters)?;
        let filter = CallFilter { arguments, ..CallFilter::default() };
        let functions = [function].into_iter();
        let calls = CallConditions::new(&filter, &X86_64, 1000, functions, prototype)?;
        Ok(calls.of(function).expect("it was resolved"))
    }

    fn is(
        place: GatedValue,
        bytes: u8,
        signed: bool,
        operator: Operator,
        value: i64,
    ) -> Comparison {
        Comparison { place, bytes, signed, operator, value: value.cast_unsigned() }
    }

    #[test]
    fn parameters_are_found_where_the_function_takes_them() {
        use GatedValue::{Register, Stack};
        use Operator::{AnyBit, Equal, Greater, Less, NotEqual};
        let of = |filters: &[&str]| conditions(filters, "vfs_read").unwrap().any;
        let large = is(Register(2), 8, false, Greater, 4096);
        assert_eq!(of(&["vfs_read: count > 4096"]), [[large]]);
        assert_eq!(of(&["vfs_*:count>0x1000"]), [[large]]);
        let both = [large, is(Stack(16), 4, true, Less, -1)];
        assert_eq!(of(&["vfs_read: count > 010000 && fd < -1"]), [both]);
        let other = is(Register(0), 8, false, Equal, 0);
        assert_eq!(
            of(&["vfs_read: file == 0 || count > 4096 && fd < -1"]),
            [vec![other], both.to_vec()]
        );
        // What several filters ask for has to be true of all of them.
        let raw = is(Register(5), 8, false, AnyBit, 1);
        assert_eq!(
            of(&["vfs_read: file == 0 || count > 4096", "vfs_*: arg6 & 1"]),
            [[other, raw], [large, raw]]
        );
        // A mask has no sign.
        let mask = is(Stack(16), 4, true, AnyBit, 0x8000_0000);
        assert_eq!(of(&["vfs_read: fd & 0x80000000"]), [[mask]]);
        let raw = is(Register(0), 8, false, NotEqual, 7);
        assert_eq!(conditions(&["memcpy: arg1 != 7"], "memcpy").unwrap().any, [[raw]]);
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        let wrong = |filter: &str| conditions(&[filter], "vfs_read").unwrap_err().to_string();
        for (filter, what) in [
            ("vfs_read: count >", "'' is no number"),
            ("vfs_read: count > x", "'x' is no number"),
            ("vfs_read: count > --1", "'--1' is no number"),
            ("vfs_read: count > +1", "'+1' is no number"),
            ("vfs_read: count > 0x", "'0x' is no number"),
            ("vfs_read: count > 18446744073709551616", "is no number"),
            ("vfs_read: == 5", "'== 5' does not begin with a parameter's name"),
            ("vfs_read: (count > 5)", "does not begin with a parameter's name"),
            ("vfs_read: count = 5", "no operator stands behind 'count'"),
            ("vfs_read: count > 5 &&", "'' does not begin with a parameter's name"),
            ("count > 5", "it names no function"),
            (": count > 5", "it names no function"),
            ("vfs_read: size > 5", "no parameter size: it has file, buf, count, fd, pair, lost"),
            ("vfs_read: pair == 5", "pair of vfs_read can't be compared"),
            ("vfs_read: lost == 5", "where it is can't be told"),
            ("vfs_read: arg7 == 5", "no parameter arg7"),
            ("vfs_read: arg0 == 5", "no parameter arg0"),
            ("vfs_read: fd == 2147483648", "is no value of fd"),
            ("vfs_read: count > -1", "is no value of count"),
        ] {
            assert!(wrong(filter).contains(what), "{filter}: {}", wrong(filter));
        }
        let unknown = conditions(&["memcpy: len > 5"], "memcpy").unwrap_err();
        assert!(matches!(unknown, CallFilterError::Prototype { .. }), "{unknown}");
        let terms = vec!["count > 1"; 65].join(" && ");
        assert!(wrong(&format!("vfs_read: {terms}")).contains("more than 64 comparisons"));
    }

    #[test]
    fn what_was_not_resolved_is_not_let_through() {
        let (globs, arguments) = divide(&["a*".into(), "ab: arg1 == 1".into()]).unwrap();
        assert_eq!(globs.iter().map(Glob::pattern).collect::<Vec<_>>(), ["a*", "ab"]);
        let filter = CallFilter { arguments, one_in: Some(1), ..CallFilter::default() };
        let calls = CallConditions::new(&filter, &X86_64, 1, ["a"].into_iter(), prototype).unwrap();
        assert_eq!(calls.of("a"), Some(Conditions::default()));
        assert_eq!(calls.of("ab"), None);
        let comm = CallFilter { comm: Some("sixteen bytes ...".into()), ..CallFilter::default() };
        let wrong = CallConditions::new(&comm, &X86_64, 1, [].into_iter(), prototype);
        assert!(matches!(wrong, Err(CallFilterError::Comm(_))));
        // Five a second, and five at once.
        let rate = CallFilter { per_second: Some(5), ..CallFilter::default() };
        let calls =
            CallConditions::new(&rate, &X86_64, 1000, ["a"].into_iter(), prototype).unwrap();
        assert_eq!(calls.of("a").unwrap().rate, Some(Rate { every: 200, slack: 800 }));
    }
}
