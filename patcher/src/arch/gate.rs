//! Gates: code in front of a chain that lets some calls through and turns the others away, so that those
//! never leave the guest.
//!
//! What is to be true of a call is data ([`Conditions`]), which each architecture makes code of. All of it is
//! looked at in the guest, while the call is made: registers, the task, and for one in so many calls or so
//! many a second the function's own cells among the region's counters.

use super::Then;
use crate::region::Counters;

/// What has to be true of a call to be let through: all of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Conditions {
    /// The task's number is one of these; any number if there are none.
    pub pids: Vec<u32>,
    /// The task's name is this one.
    pub comm: Option<CommBytes>,
    /// All comparisons of at least one of these are true; no comparison is asked for if there are none.
    pub any: Vec<Vec<Comparison>>,
    /// One in so many of the function's calls that have come so far, the first one among them.
    pub one_in: Option<u32>,
    /// So many of the function's calls that have come so far in a time.
    pub rate: Option<Rate>,
}

impl Conditions {
    /// How many cells a function has: one that counts the calls that were turned away, and what the last
    /// two conditions remember.
    #[must_use]
    pub fn cells(&self) -> u32 {
        1 + u32::from(self.one_in.is_some()) + u32::from(self.rate.is_some())
    }

    /// Where the cell is, in bytes behind the first one, that remembers how many calls there were since one
    /// of them was let through.
    pub(super) const ONE_IN_CELL: u8 = 8;

    /// Where the cell is, in bytes behind the first one, that remembers up to when calls were let through.
    pub(super) fn rate_cell(&self) -> u8 {
        8 + 8 * u8::from(self.one_in.is_some())
    }
}

/// The name of a task, with a zero behind it, as the kernel keeps it: of what is behind that the kernel's
/// versions make different things, so that it isn't compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommBytes {
    bytes: [u8; Self::LEN],
    mask: [u8; Self::LEN],
}

impl CommBytes {
    /// Bytes that a kernel has for a task's name (`TASK_COMM_LEN`, include/linux/sched.h).
    pub const LEN: usize = 16;

    /// The name of a task that is called `name`; `None` if none can be called that.
    #[must_use]
    pub fn new(name: &str) -> Option<Self> {
        let len = name.len();
        if len == 0 || len >= Self::LEN || name.contains('\0') {
            return None;
        }
        let (mut bytes, mut mask) = ([0; Self::LEN], [0; Self::LEN]);
        bytes[..len].copy_from_slice(name.as_bytes());
        mask[..=len].fill(0xff);
        Some(Self { bytes, mask })
    }

    /// What each of its two halves is to be behind a mask, as the architecture loads them by `word`: mask
    /// and value. A second half that need not be looked at is not there.
    pub(super) fn halves(&self, word: fn([u8; 8]) -> u64) -> impl Iterator<Item = (u64, u64)> {
        let (masks, _) = self.mask.as_chunks();
        let (values, _) = self.bytes.as_chunks();
        let halves: Vec<(u64, u64)> =
            masks.iter().zip(values).map(|(mask, value)| (word(*mask), word(*value))).collect();
        halves.into_iter().filter(|(mask, _)| *mask != 0)
    }
}

/// So many calls in a time, by the clock that trampolines read.
///
/// The cell remembers the time at which the next call would come if all of them came evenly. A call is let
/// through if that is no further ahead than `slack`, so that several may come at once after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate {
    /// Ticks between two calls.
    pub every: u64,
    /// How many ticks ahead calls may come.
    pub slack: u64,
}

/// A comparison of an argument with a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Comparison {
    /// Where the argument is.
    pub place: GatedValue,
    /// How many bytes of it count: 1, 2, 4 or 8.
    pub bytes: u8,
    /// Whether it has a sign.
    pub signed: bool,
    /// How it is compared.
    pub operator: Operator,
    /// What it is compared with.
    pub value: u64,
}

/// Where an argument is when a function is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GatedValue {
    /// In the register for arguments of that number, counted from 0.
    Register(u8),
    /// On the stack, so many bytes behind the first that is there.
    Stack(u16),
}

/// How an argument is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operator {
    /// Equal.
    Equal,
    /// Not equal.
    NotEqual,
    /// The argument is less.
    Less,
    /// The argument is not greater.
    AtMost,
    /// The argument is greater.
    Greater,
    /// The argument is not less.
    AtLeast,
    /// They have a bit in common.
    AnyBit,
}

/// Where the code of a gate finds what it asks of the task that calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GatePlaces {
    /// The task's number, as in [`TaskPlaces`](super::TaskPlaces).
    pub pid: Option<super::PidPlace>,
    /// The task's name.
    pub comm: Option<CommPlace>,
}

/// Where the name of the current task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommPlace {
    /// Where a CPU finds the address of its current task, as in
    /// [`PidPlace::InTask`](super::PidPlace::InTask).
    pub current: i32,
    /// How far from there the name is, in bytes.
    pub comm: i32,
}

/// What the code of a gate is made for. It is entered by way of thunks, each of which tells the first cell
/// of its function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gate<'a> {
    /// What has to be true.
    pub conditions: &'a Conditions,
    /// Where cells are.
    pub counters: Counters,
    /// Where it finds the task; what conditions ask for must be known.
    pub places: GatePlaces,
    /// What is executed behind it if a call is let through.
    pub pass: Then,
    /// What is executed otherwise.
    pub away: Then,
}

/// Places in code that branches lead to before it is known where they are.
#[derive(Debug, Default)]
pub(super) struct Labels {
    places: Vec<usize>,
    branches: Vec<(usize, Label)>,
}

/// A place in code.
#[derive(Debug, Clone, Copy)]
pub(super) struct Label(usize);

impl Labels {
    /// A place that is not known yet.
    pub fn label(&mut self) -> Label {
        self.places.push(usize::MAX);
        Label(self.places.len() - 1)
    }

    /// It is here.
    pub fn set(&mut self, label: Label, here: usize) {
        self.places[label.0] = here;
    }

    /// What is here leads to it.
    pub fn branch(&mut self, here: usize, to: Label) {
        self.branches.push((here, to));
    }

    /// Everything that leads somewhere, and where to.
    pub fn branches(&self) -> impl Iterator<Item = (usize, usize)> {
        self.branches.iter().map(|(here, to)| (*here, self.places[to.0]))
    }
}

/// Conditions of every kind, for tests of what architectures make of them.
#[cfg(test)]
pub(super) fn everything() -> Conditions {
    let compare = |place, bytes, signed, operator, value| Comparison {
        place,
        bytes,
        signed,
        operator,
        value,
    };
    Conditions {
        pids: vec![42, 0x1_0001],
        comm: CommBytes::new("kworker/0"),
        any: vec![
            vec![
                compare(GatedValue::Register(2), 4, true, Operator::Greater, 4096),
                compare(GatedValue::Register(4), 1, false, Operator::NotEqual, 7),
            ],
            vec![compare(GatedValue::Stack(8), 8, false, Operator::AnyBit, 1 << 40)],
        ],
        one_in: Some(10),
        rate: Some(Rate { every: 1000, slack: 1 << 33 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared_with_the_zero_behind_them_and_no_further() {
        let halves = |name| {
            CommBytes::new(name).map(|comm| comm.halves(u64::from_le_bytes).collect::<Vec<_>>())
        };
        assert_eq!(halves("cat"), Some(vec![(0xffff_ffff, 0x0074_6163)]));
        let whole = u64::from_le_bytes(*b"kworker/");
        assert_eq!(halves("kworker/"), Some(vec![(u64::MAX, whole), (0xff, 0)]));
        assert_eq!(halves("kworker/0:0-eve").unwrap()[1].0, u64::MAX);
        for no in ["", "a name too long!", "a\0b"] {
            assert_eq!(halves(no), None, "{no:?}");
        }
    }
}
