//! What kind of event it is: a call, or in a trace of calls and returns one of the two.

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EventKind {
    /// A call, in a trace that does not tell of returns.
    #[default]
    Call,
    /// A call, in a trace that tells of returns.
    Entry {
        /// In how many calls of the same trace it is nested.
        depth: u32,
    },
    /// A return.
    Return(Return),
}

/// A return from a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Return {
    /// In how many calls of the same trace the call was nested.
    pub depth: u32,
    /// The word in which the architecture returns values: of no meaning for functions that return none.
    pub value: u64,
    /// How long the call took, in nanoseconds; `None` if its record was lost.
    pub duration_ns: Option<u64>,
}

impl EventKind {
    /// Bytes that [`EventKind::encode`] appends at most.
    pub const MAX_BYTES: usize = 20;

    /// The number that tells kinds apart where events are written down.
    #[must_use]
    pub fn tag(&self) -> u8 {
        match self {
            Self::Call => 0,
            Self::Entry { .. } => 1,
            Self::Return(_) => 2,
        }
    }

    /// Whether it is a call, however much the trace tells of it.
    #[must_use]
    pub fn is_call(&self) -> bool {
        !matches!(self, Self::Return(_))
    }

    /// How deep the call is nested, in a trace that tells of that.
    #[must_use]
    pub fn depth(&self) -> Option<u32> {
        match self {
            Self::Call => None,
            Self::Entry { depth } | Self::Return(Return { depth, .. }) => Some(*depth),
        }
    }

    /// How many bytes [`EventKind::encode`] appends.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Call => 0,
            Self::Entry { .. } => 4,
            Self::Return(_) => 20,
        }
    }

    /// Appends what there is to say beside the tag, little-endian: of an entry the depth (u32); of a
    /// return the depth, the value (u64), and the duration (u64; all bits set if it is not known).
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        if let Some(depth) = self.depth() {
            bytes.extend_from_slice(&depth.to_le_bytes());
        }
        if let Self::Return(Return { value, duration_ns, .. }) = self {
            bytes.extend_from_slice(&value.to_le_bytes());
            bytes.extend_from_slice(&duration_ns.unwrap_or(u64::MAX).to_le_bytes());
        }
    }

    /// The kind with that tag, which the first of these bytes tell more of; `None` if it is not known or
    /// cut. Bytes behind them are somebody else's.
    #[must_use]
    pub fn decode(tag: u8, bytes: &[u8]) -> Option<Self> {
        let depth = || bytes.first_chunk().copied().map(u32::from_le_bytes);
        let word = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
        Some(match tag {
            0 => Self::Call,
            1 => Self::Entry { depth: depth()? },
            2 => Self::Return(Return {
                depth: depth()?,
                value: word(4)?,
                duration_ns: Some(word(12)?).filter(|duration| *duration != u64::MAX),
            }),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_down_is_read_back_and_nothing_that_is_cut() {
        let back = Return { depth: 7, value: u64::MAX, duration_ns: Some(12) };
        for (kind, length) in [
            (EventKind::Call, 0),
            (EventKind::Entry { depth: u32::MAX }, 4),
            (EventKind::Return(back), 20),
            (EventKind::Return(Return { duration_ns: None, ..back }), 20),
        ] {
            let mut bytes = Vec::new();
            kind.encode(&mut bytes);
            assert_eq!((bytes.len(), kind.bytes()), (length, length));
            assert!(length <= EventKind::MAX_BYTES);
            for cut in 0..length {
                assert_eq!(EventKind::decode(kind.tag(), &bytes[..cut]), None);
            }
            bytes.push(9);
            assert_eq!(EventKind::decode(kind.tag(), &bytes), Some(kind));
        }
        assert_eq!(EventKind::decode(3, &[0; 64]), None);
    }
}
