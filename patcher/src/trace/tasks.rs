//! The names of the tasks that records tell the numbers of.
//!
//! The guest is not asked: its lists of tasks are read while it runs, when a record has a number that is
//! not known, and now and then, since a task takes another name when it executes another program and a
//! number is given to another task in time. Who has ended is remembered.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::context::{Context, Task, WIDE_INTERRUPTS};
use super::ring::RawRecord;
use crate::arch::{TaskPaths, TaskPlaces, TaskWords};
use crate::kernel::{Comm, Kernel, TaskLayout};
use crate::mem::PhysMem;

/// How long the lists are left alone after they were read, at least, and how many times as long as
/// reading them took.
const REST: Duration = Duration::from_millis(5);
const SHARE: u32 = 20;

/// After that time names are read again although all numbers are known.
const STALE: Duration = Duration::from_millis(100);

/// How long it takes at least until it is tried again to tell where tasks are.
const RETRY: Duration = Duration::from_millis(500);

/// Names remembered at most: a guest that writes records of its own can name millions.
const MAX_NAMES: usize = 1 << 17;

/// Names tasks, and tells what records say of them.
pub(super) struct Tasks<'k> {
    kernel: &'k Kernel,
    places: TaskPlaces,
    layout: Option<TaskLayout>,
    /// `None` for a number of which no list tells.
    names: FxHashMap<u32, Option<Box<str>>>,
    /// A number is missed that some record has.
    is_missed: bool,
    /// When the lists may be read again, and when names are old.
    rested: Instant,
    stale: Instant,
    /// Whether bit 31 of the count says that a task need not leave the CPU: seen in some record, where it
    /// is not so in every kernel.
    has_wish: bool,
    /// Whether the count is of the wide kind: seen in some record. On x86_64, where kernels have either
    /// that or bit 31, also while neither was seen.
    is_wide: bool,
}

impl<'k> Tasks<'k> {
    pub fn new(kernel: &'k Kernel, places: TaskPlaces) -> Self {
        let now = Instant::now();
        Self {
            kernel,
            places,
            layout: None,
            names: FxHashMap::default(),
            is_missed: false,
            rested: now,
            stale: now,
            has_wish: matches!(kernel.arch().task_paths(), TaskPaths::CurrentTask(_)),
            is_wide: false,
        }
    }

    /// Whether records tell of tasks' contexts.
    pub fn contexts(&self) -> bool {
        self.places.preempt_count.is_some()
    }

    /// Takes note of the tasks in records that will be given out, and reads the lists if it is time.
    pub fn meet(&mut self, records: &[RawRecord], ram: &dyn PhysMem, now: Instant) {
        if self.places.pid.is_none() {
            return;
        }
        let mut last = 0;
        for record in records {
            let pid = self.words(record.parent, record.task).pid;
            // Idle tasks are known by their number, and mostly a task makes many calls in a row.
            if pid != last && pid != 0 {
                last = pid;
                self.is_missed |= !self.names.contains_key(&pid);
                if self.is_missed {
                    break;
                }
            }
        }
        if now >= self.rested && (self.is_missed || !records.is_empty() && now >= self.stale) {
            self.read(records, ram);
        }
    }

    /// Reads the lists if it is time, though no record is looked at: tasks that have records may have ended
    /// when these are.
    pub fn remember(&mut self, ram: &dyn PhysMem, now: Instant) {
        if self.places.pid.is_some() && now >= self.rested && now >= self.stale {
            self.read(&[], ram);
        }
    }

    /// Takes note of the tasks in records that are given out now, and reads the lists whenever that was
    /// done last.
    pub fn meet_last(&mut self, records: &[RawRecord], ram: &dyn PhysMem) {
        if self.places.pid.is_some() {
            self.read(records, ram);
        }
    }

    fn read(&mut self, records: &[RawRecord], ram: &dyn PhysMem) {
        if self.layout.is_none() {
            self.layout = self.kernel.task_layout(ram).ok();
        }
        let Some(layout) = &self.layout else {
            // While the kernel boots there may be too few tasks to tell by.
            self.rested = Instant::now() + RETRY;
            return;
        };
        // What was found out once, above, is no measure of what reading takes.
        let begun = Instant::now();
        if self.names.len() >= MAX_NAMES {
            self.names.clear();
        }
        let names = &mut self.names;
        let is_whole = self.kernel.task_names(ram, layout, |pid, comm| {
            if names.len() < MAX_NAMES {
                names.insert(pid, Some(printable(comm)));
            }
        });
        if is_whole {
            for record in records {
                let pid = self.words(record.parent, record.task).pid;
                if self.names.len() < MAX_NAMES {
                    self.names.entry(pid).or_insert(None);
                }
            }
        }
        self.is_missed = false;
        let now = Instant::now();
        self.rested = now + REST.max((now - begun) * SHARE);
        self.stale = now + STALE;
    }

    fn words(&self, parent: u64, [task, count]: [u32; 2]) -> TaskWords {
        self.kernel.arch().task_words([(parent >> 32) as u32, task, count])
    }

    /// The number of a record's task; `None` if records do not tell.
    pub fn pid(&self, record: &RawRecord) -> Option<u32> {
        self.places.pid.map(|_| self.words(record.parent, record.task).pid)
    }

    /// What a record with that caller and these words says of its task and its context.
    pub fn of(&mut self, parent: u64, task: [u32; 2]) -> (Option<Task<'_>>, Option<Context>) {
        let words = self.words(parent, task);
        self.has_wish |= words.preempt_count >> 31 != 0;
        self.is_wide |= words.preempt_count & WIDE_INTERRUPTS != 0;
        let has_wish = self.has_wish;
        let per_cpu = matches!(self.kernel.arch().task_paths(), TaskPaths::PerCpu { .. });
        let is_wide = self.is_wide || per_cpu && !has_wish;
        let context = self.contexts().then(|| Context {
            irqs_off: words.irqs_off,
            need_resched: has_wish && words.preempt_count >> 31 == 0,
            ..Context::of_count(words.preempt_count, is_wide)
        });
        let task = self.places.pid.map(|_| Task {
            pid: words.pid,
            comm: self.names.get(&words.pid).and_then(Option::as_deref),
        });
        (task, context)
    }
}

/// A name of which nothing can disturb a terminal or a line.
fn printable(comm: Comm) -> Box<str> {
    let shown = |byte: &u8| match byte {
        b' '..=b'~' => char::from(*byte),
        _ => '?',
    };
    comm.bytes().iter().map(shown).collect()
}
