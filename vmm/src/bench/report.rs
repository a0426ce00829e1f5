//! What came of the rounds, as it is printed, written and drawn.

use std::fs;
use std::thread;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::stop_all::{Gap, Round, Stand};

/// The version of a report's form, which `docs/user-guide.md` describes. A field that is added changes
/// nothing of it; one that is removed, or means something else, does.
pub const FORMAT: u32 = 1;

/// What `vmm bench stop-all` has found out. All times are in nanoseconds, by the host's monotonic clock
/// unless they are told to be the guest's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: u32,
    /// What was measured: `stop-all`.
    pub benchmark: String,
    /// The version of vmm.
    pub vmm: String,
    /// Where.
    pub host: Host,
    /// On what.
    pub guest: Subject,
    /// Rounds of each run before those that count.
    pub warm_up: usize,
    /// One for each number of vCPUs and of functions.
    pub runs: Vec<Run>,
}

/// The host, as far as times depend on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// CPUs that this process may use.
    pub cpus: usize,
    /// What they call themselves.
    pub model: String,
    /// The kernel's release.
    pub kernel: String,
    /// What its KVM is like, in a sentence; where that runs the guest.
    pub kvm: Option<String>,
}

/// The guest that was stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// `bare` or `stock`.
    pub kind: String,
    /// `kvm` or `qemu`.
    pub engine: String,
    /// The release of its kernel.
    pub kernel: String,
    /// Functions that could be patched.
    pub functions: usize,
}

/// Rounds with one number of vCPUs and one of functions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// How many vCPUs the guest has.
    pub cpus: usize,
    /// How many functions were patched in each round.
    pub sites: usize,
    /// Rounds that count.
    pub rounds: u64,
    /// Stops that had to be made again, because a vCPU was silent or stood inside a site.
    pub again: u64,
    /// The stops in which nothing was done.
    pub bare: Timing,
    /// The stops that patched.
    pub patch: Timing,
    /// The stops that put back what was there.
    pub revert: Timing,
    /// The median of a stop that patches, as a multiple of the median of one that does nothing.
    pub ratio: f64,
}

/// The phases of one kind of stop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// From the first kick until the last vCPU was out of the guest.
    pub out: Summary,
    /// From then until every site was verified; only of stops that patch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified: Option<Summary>,
    /// From then until every site was written and read back; only of stops that patch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written: Option<Summary>,
    /// From the last vCPU's way out until the resume was asked for: these two together.
    pub held: Summary,
    /// From then until all vCPUs were let go.
    pub running: Summary,
    /// From the first kick until then.
    pub whole: Summary,
    /// By the guest's own clock: the longest time for which one of its vCPUs did not run. Absent where
    /// nobody in the guest measures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_saw: Option<Summary>,
}

/// A histogram in short, exact to three digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// How many values.
    pub count: u64,
    /// The least.
    pub min: u64,
    /// The median.
    pub p50: u64,
    /// What nine of ten values do not exceed.
    pub p90: u64,
    /// What 99 of 100 do not.
    pub p99: u64,
    /// What 999 of 1000 do not.
    pub p99_9: u64,
    /// The greatest.
    pub max: u64,
}

/// The histograms of one run.
pub struct Measured {
    rounds: u64,
    again: u64,
    bare: Histograms,
    patch: Histograms,
    revert: Histograms,
}

/// One of each phase.
struct Histograms {
    out: Histogram<u64>,
    verified: Histogram<u64>,
    written: Histogram<u64>,
    held: Histogram<u64>,
    running: Histogram<u64>,
    whole: Histogram<u64>,
    guest_saw: Histogram<u64>,
}

impl Default for Measured {
    fn default() -> Self {
        let [bare, patch, revert] = std::array::from_fn(|_| Histograms::new());
        Self { rounds: 0, again: 0, bare, patch, revert }
    }
}

impl Measured {
    /// Takes a round in.
    pub fn add(&mut self, round: &Round) {
        self.rounds += 1;
        self.again += round.again as u64;
        self.bare.add(&round.bare, round.bare_gap);
        self.patch.add(&round.patch, round.patch_gap);
        self.revert.add(&round.revert, round.revert_gap);
    }

    /// What the rounds came to, with so many vCPUs and functions.
    #[must_use]
    pub fn finish(&self, cpus: usize, sites: usize) -> Run {
        let (bare, patch) = (self.bare.timing(false), self.patch.timing(true));
        let ratio = patch.whole.p50 as f64 / bare.whole.p50.max(1) as f64;
        Run {
            cpus,
            sites,
            rounds: self.rounds,
            again: self.again,
            bare,
            patch,
            revert: self.revert.timing(false),
            // No more digits than there are.
            ratio: (ratio * 1000.0).round() / 1000.0,
        }
    }
}

impl Histograms {
    fn new() -> Self {
        // Each grows by itself to whatever is recorded.
        let [out, verified, written, held, running, whole, guest_saw] =
            std::array::from_fn(|_| Histogram::new(3).expect("three digits can be had"));
        Self { out, verified, written, held, running, whole, guest_saw }
    }

    fn add(&mut self, stand: &Stand, gap: Option<Gap>) {
        let mut record = |histogram: fn(&mut Self) -> &mut Histogram<u64>, time: Duration| {
            let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            histogram(self).record(time).expect("a histogram that grows takes every value");
        };
        record(|all| &mut all.out, stand.out);
        record(|all| &mut all.verified, stand.verified);
        record(|all| &mut all.written, stand.written);
        record(|all| &mut all.held, stand.held());
        record(|all| &mut all.running, stand.running);
        record(|all| &mut all.whole, stand.whole());
        if let Some(gap) = gap {
            record(|all| &mut all.guest_saw, gap.longest);
        }
    }

    fn timing(&self, patches: bool) -> Timing {
        let measures = !self.guest_saw.is_empty();
        Timing {
            out: Summary::of(&self.out),
            verified: patches.then(|| Summary::of(&self.verified)),
            written: patches.then(|| Summary::of(&self.written)),
            held: Summary::of(&self.held),
            running: Summary::of(&self.running),
            whole: Summary::of(&self.whole),
            guest_saw: measures.then(|| Summary::of(&self.guest_saw)),
        }
    }
}

impl Summary {
    fn of(histogram: &Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile);
        Self {
            count: histogram.len(),
            min: histogram.min(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            max: histogram.max(),
        }
    }
}

impl Host {
    /// This one.
    #[must_use]
    pub fn this() -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| line.strip_prefix("model name"));
        let model = model.map(|rest| rest.trim_start_matches([' ', '\t', ':']).trim().to_owned());
        Self {
            cpus: thread::available_parallelism().map_or(1, usize::from),
            model: model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            kvm: None,
        }
    }
}
