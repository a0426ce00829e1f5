//! What is said of calls that are counted, and when it is.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Milliseconds that there may be from one reading of counts or latencies to the next.
pub const COUNT_INTERVALS: RangeInclusive<u64> = 100..=86_400_000;

/// When counts are wanted, or latencies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountRequest {
    /// Every so many milliseconds; see [`COUNT_INTERVALS`].
    pub interval_ms: u64,
}

impl Default for CountRequest {
    fn default() -> Self {
        Self { interval_ms: 1000 }
    }
}

impl CountRequest {
    pub(super) fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

/// Functions in one [`Counted`] at most.
pub const MAX_COUNTED: usize = 128;

/// How often functions were called since the trace began, as far as that has changed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    /// Functions whose calls are counted.
    pub functions: usize,
    /// How long that has been going on.
    pub elapsed: Duration,
    /// Whether more of the same reading follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
    /// Whether it is the last reading.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub last: bool,
    /// The number by which the function is told from others, its calls, and its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<(u32, u64, String)>,
}
