//! Where a kernel's tasks and CPUs have their stacks, as data of each architecture.

use crate::addr::{Gpa, Gva};

/// What a vCPU does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// It runs no kernel that can be looked at: it was never started, or runs firmware.
    Elsewhere,
    /// It runs a process: the kernel's stack of its task is empty.
    User,
    /// It runs the kernel.
    Kernel {
        /// The stack pointer.
        sp: Gva,
        /// Registers that may hold an address to which the kernel returns, and that are on no stack.
        links: Vec<u64>,
    },
}

/// What the kernel keeps of a task that is on no CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskStacks {
    /// The way to the stack pointer, from `task_struct` on, as structures and fields.
    pub sp: &'static [(&'static str, &'static str)],
    /// The way to registers that it has in the task in place of its stack, and how many there are.
    pub registers: Option<(&'static [(&'static str, &'static str)], usize)>,
}

/// Where a CPU has its own variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuArea {
    /// At this distance from the addresses of the symbols of per-CPU variables.
    Offset(u64),
    /// At distances that are always the same from this address.
    Fixed(Gpa),
}

/// A variable of each CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuVariable {
    /// Its symbol, in an area at an [`Offset`](CpuArea::Offset).
    pub symbol: Option<&'static str>,
    /// How far from the symbol, or from the area's beginning, it is, in bytes.
    pub offset: u64,
}

/// A stack of a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuStack {
    /// The variable that tells where it is.
    pub at: CpuVariable,
    /// How far it goes.
    pub extent: Extent,
}

/// What an address says about a stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// The stack ends there, or in the 16 bytes behind, and has at most so many bytes.
    EndsThere {
        /// Bytes.
        at_most: u64,
    },
    /// The address lies in the stack, which has the length and alignment of a task's.
    AsTasks,
}
