//! All tasks of a kernel, threads and idle tasks included, and where their stacks are.
//!
//! Three ways lead to them, since none leads to all: the ring of all processes and each one's ring of
//! threads; the run queues, for the idle tasks, which are in no ring; and what waits on a run queue,
//! for tasks that have left the rings in their last moments and still run.
//!
//! A guest may be stopped while it changes a ring. So a member's link back may lead to the member
//! before the last as well, as it does half-way through an insertion or a removal.

use std::fmt;
use std::ops::Range;

use super::types::TypesError;
use super::{Kernel, ReadError};
use crate::addr::Gva;
use crate::mem::PhysMem;

mod layout;
mod places;
mod reader;
mod returns;
mod structure;
mod walk;

pub use layout::TaskLayout;
pub use places::{RecordedTask, TaskPlaceError};
pub(crate) use reader::Reader;

/// A task of the kernel: a process's first or other thread, a thread of the kernel's own, or a CPU's
/// idle task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// Where its `struct task_struct` is.
    pub at: Gva,
    /// The thread's number, 0 for idle tasks.
    pub pid: u32,
    /// Its name.
    pub comm: Comm,
    /// Its kernel stack; `None` once it has none any more, as a process that has ended and waits for
    /// its parent.
    pub stack: Option<Range<Gva>>,
    /// The stack pointer with which it last left a CPU; in `stack`, if it has one.
    pub sp: Gva,
    /// Whether it is on a CPU, or just coming to or leaving one; `None` where the kernel's types do
    /// not say.
    pub on_cpu: Option<bool>,
}

/// A task's name, as the task has set it: any bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Comm([u8; Comm::LEN]);

impl Comm {
    /// `TASK_COMM_LEN`.
    pub(crate) const LEN: usize = 16;

    /// The name in the field `comm` of a task.
    #[must_use]
    pub fn new(field: [u8; Self::LEN]) -> Self {
        Self(field)
    }

    /// The bytes of the name.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.0.split(|&byte| byte == 0).next().unwrap_or_default()
    }
}

impl fmt::Display for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bytes().escape_ascii())
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// It could not be told where the kernel keeps what of its tasks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TaskLayoutError {
    /// The types that the kernel describes do not say.
    #[error("where the kernel keeps its tasks cannot be told: {0}")]
    Types(#[from] TypesError),
    /// The first task is not found.
    #[error("the kernel's first task is not found: nothing in its data is named swapper/0")]
    NoFirstTask,
    /// What tasks are found does not tell.
    #[error(
        "where the kernel keeps its tasks cannot be told: it does not describe its types, and of the \
         tasks that are found the {what} can't be told"
    )]
    NotTold {
        /// What of them.
        what: &'static str,
    },
    /// The tasks are not as tasks are.
    #[error("the kernel's tasks are not as expected: {0}")]
    Tasks(#[from] TasksError),
    /// No stack is used to a depth that tells how long stacks are.
    #[error("how long the kernel's stacks are cannot be told: {used:#x} bytes of one are used")]
    StackSize {
        /// The farthest that a stack pointer is from its stack's beginning, in bytes.
        used: u64,
    },
}

/// The kernel's tasks could not be listed. Of a guest that is sound this happens only while it
/// starts or ends a task; then another try helps.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TasksError {
    /// Memory could not be read.
    #[error("{what} at {at} cannot be read: {source}")]
    Unreadable {
        /// What it is.
        what: &'static str,
        /// Where it should be.
        at: Gva,
        /// Why not.
        source: ReadError,
    },
    /// A ring's member does not lead back to where it was come from.
    #[error("the ring of {ring} is broken: {member} leads back to {back}, not to {from}")]
    Broken {
        /// Which ring.
        ring: &'static str,
        /// The member.
        member: Gva,
        /// Where its link back leads.
        back: Gva,
        /// Where it should.
        from: Gva,
    },
    /// There are more tasks than any kernel has.
    #[error("the kernel has more than {most} tasks: its lists are not sound")]
    TooMany {
        /// The most that are believed.
        most: usize,
    },
    /// The guest's own tracing seems to keep more of a task than it can.
    #[error("the guest's own tracing keeps more than {most} calls of the task at {task}")]
    EndlessReturns {
        /// Where the task is.
        task: Gva,
        /// The most that are believed.
        most: usize,
    },
    /// What should be a task's stack is none.
    #[error("task {pid} ({comm}) has no kernel stack at {stack}: its end is not marked as one's")]
    NoStack {
        /// The task's number.
        pid: u32,
        /// Its name.
        comm: Comm,
        /// Where the stack should be.
        stack: Gva,
    },
    /// A task's stack pointer does not point into its stack.
    #[error("task {pid} ({comm}) has a stack pointer {sp} that is not in its stack at {stack}")]
    Astray {
        /// The task's number.
        pid: u32,
        /// Its name.
        comm: Comm,
        /// Where its stack is.
        stack: Gva,
        /// Its stack pointer.
        sp: Gva,
    },
}

impl Kernel {
    /// Finds out where this kernel keeps what of its tasks: by the types that it describes, or where
    /// it describes none by what its tasks have in common. This takes some 10 ms; the guest may run
    /// meanwhile.
    ///
    /// # Errors
    /// [`TaskLayoutError`].
    pub fn task_layout(&self, ram: &dyn PhysMem) -> Result<TaskLayout, TaskLayoutError> {
        layout::find(self, ram)
    }

    /// All tasks, each once. Of a guest that runs meanwhile some may be missing.
    ///
    /// # Errors
    /// [`TasksError`].
    pub fn tasks(&self, ram: &dyn PhysMem, layout: &TaskLayout) -> Result<Vec<Task>, TasksError> {
        walk::tasks(&mut Reader::new(self, ram), layout, &[])
    }
}

impl Kernel {
    /// Gives the number and the name of each task that is found, of a guest that may run meanwhile:
    /// where a list is being changed the rest of it is left out. Tells whether all of them were found.
    pub(crate) fn task_names(
        &self,
        ram: &dyn PhysMem,
        layout: &TaskLayout,
        found: impl FnMut(u32, Comm),
    ) -> bool {
        walk::names(&mut Reader::new(self, ram), layout, found)
    }
}

impl Reader<'_> {
    /// All tasks, and those at `known`: who runs may be in no list any more.
    pub(crate) fn tasks(
        &mut self,
        layout: &TaskLayout,
        known: &[Gva],
    ) -> Result<Vec<Task>, TasksError> {
        walk::tasks(self, layout, known)
    }
}
