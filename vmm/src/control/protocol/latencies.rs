//! What is said of how long calls took.

use std::time::Duration;

use patcher::region::Histogram;
use serde::{Deserialize, Serialize};

/// Functions in one [`Measured`] at most.
pub const MAX_MEASURED: usize = 64;

/// How long calls of functions took since the trace began, as far as any have returned since it was last said.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Functions whose calls are measured.
    pub functions: usize,
    /// How long that has been going on.
    pub elapsed: Duration,
    /// Whether more of the same reading follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
    /// Whether it is the last reading.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub last: bool,
    /// One for each function.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub latencies: Vec<Latency>,
}

/// How long the calls of a function took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// The number by which the function is told from others.
    pub number: u32,
    /// Its name.
    pub function: String,
    /// What its calls took together, in nanoseconds.
    pub total_ns: u64,
    /// The calls of 0 and 1 ns, of 2 and 3, of 4 to 7, and so on, up to those that took longest; so many
    /// numbers at most: [`BUCKETS`](patcher::region::BUCKETS).
    pub calls: Vec<u64>,
}

impl Latency {
    /// What is said of this function.
    #[must_use]
    pub fn new(number: u32, function: &str, histogram: &Histogram) -> Self {
        let used =
            histogram.buckets.iter().rposition(|calls| *calls > 0).map_or(0, |last| last + 1);
        Self {
            number,
            function: function.to_owned(),
            total_ns: histogram.total_ns,
            calls: histogram.buckets[..used].to_vec(),
        }
    }

    /// The histogram; `None` if that has more parts than any has.
    #[must_use]
    pub fn histogram(&self) -> Option<Histogram> {
        let mut histogram = Histogram { total_ns: self.total_ns, ..Histogram::default() };
        histogram.buckets.get_mut(..self.calls.len())?.copy_from_slice(&self.calls);
        Some(histogram)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_empty_at_the_end_of_a_histogram_is_not_said() {
        let mut histogram = Histogram { total_ns: 5000, ..Histogram::default() };
        (histogram.buckets[0], histogram.buckets[10]) = (1, 4);
        let latency = Latency::new(3, "vfs_read", &histogram);
        assert_eq!(latency.calls, [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4]);
        assert_eq!(latency.histogram(), Some(histogram));
        let empty = Latency::new(3, "vfs_read", &Histogram::default());
        assert_eq!((empty.calls.len(), empty.histogram()), (0, Some(Histogram::default())));
        let long = Latency { calls: vec![0; patcher::region::BUCKETS + 1], ..empty };
        assert_eq!(long.histogram(), None);
    }
}
