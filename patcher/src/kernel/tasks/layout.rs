//! Where a kernel keeps what of its tasks.

use memchr::memmem;

use super::returns::KeptReturns;
use super::{Comm, Reader, TaskLayoutError, TasksError};
use super::{structure, walk};
use crate::addr::Gva;
use crate::kernel::Kernel;
use crate::kernel::types::{Types, TypesError};
use crate::mem::PhysMem;

/// Where a kernel keeps what of its tasks. It does not change while the kernel runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskLayout {
    /// The first task, CPU 0's idle one, which is the head of the ring of all processes.
    pub(super) first: Gva,
    pub(super) fields: Fields,
    /// The length and alignment of a task's kernel stack, in bytes.
    pub(super) stack_size: u64,
    /// Idle tasks, where no run queue leads to them.
    pub(super) idle: Vec<Gva>,
}

/// Distances in `struct task_struct` and in what it leads to, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fields {
    pub pid: u64,
    pub comm: u64,
    pub stack: u64,
    pub sp: u64,
    /// Registers that a task keeps, and how many.
    pub registers: Option<(u64, usize)>,
    /// The link of the ring of all processes.
    pub tasks: u64,
    /// The link of the ring of a process's threads, whose head is in what `signal` points to.
    pub thread_node: u64,
    pub signal: u64,
    pub thread_head: u64,
    /// Whether it is on a CPU, and how many bytes this has.
    pub on_cpu: Option<(u64, OnCpu)>,
    pub queues: Option<QueueFields>,
    pub returns: KeptReturns,
}

/// How wide the field is that tells whether a task is on a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnCpu {
    Byte,
    Word,
}

/// Distances that lead from a task to its CPU's run queue and from there to other tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct QueueFields {
    /// In a task, the pointer to what it waits in.
    pub cfs_rq: u64,
    /// In that, the pointer to the run queue.
    pub rq: u64,
    /// In a run queue.
    pub curr: u64,
    pub idle: u64,
    /// In a run queue, the head of the ring of tasks that wait there.
    pub waiting: u64,
    /// In a task, the link of that ring.
    pub node: u64,
}

/// The shortest and the longest stack believed, in bytes.
pub(super) const STACK_SIZES: std::ops::RangeInclusive<u64> = 8 << 10..=64 << 10;

impl TaskLayout {
    /// The length and alignment of a task's kernel stack, in bytes.
    #[must_use]
    pub fn stack_size(&self) -> u64 {
        self.stack_size
    }

    /// Where a task keeps registers in place of its stack, and how many, 8 bytes each.
    pub(crate) fn registers(&self) -> Option<(u64, usize)> {
        self.fields.registers
    }

    /// The addresses to which the task at `task` returns that the guest's own tracing has taken off
    /// its stack.
    pub(crate) fn kept_returns(
        &self,
        reader: &mut Reader<'_>,
        task: Gva,
    ) -> Result<Vec<u64>, TasksError> {
        self.fields.returns.of(reader, task)
    }
}

pub(super) fn find(kernel: &Kernel, ram: &dyn PhysMem) -> Result<TaskLayout, TaskLayoutError> {
    let reader = &mut Reader::new(kernel, ram);
    let mut layout = match by_types(kernel, ram) {
        Ok(fields) => {
            let first = first_task(reader, &fields)?;
            TaskLayout { first, fields, stack_size: *STACK_SIZES.end(), idle: Vec::new() }
        }
        Err(TypesError::None) => structure::find(reader)?,
        Err(error) => return Err(error.into()),
    };
    layout.stack_size = stack_size(reader, &layout)?;
    Ok(layout)
}

/// The distances that the kernel's own description of its types gives.
fn by_types(kernel: &Kernel, ram: &dyn PhysMem) -> Result<Fields, TypesError> {
    let arch = kernel.arch();
    let types = Types::read(ram, kernel.image(), kernel.symbols(), arch.byte_order())?;
    let of = |structure, field| types.offset(structure, field);
    let path = |path: &[_]| types.first_path(&[path]);
    let kept = arch.task_stacks();
    let registers = kept.registers.map(|(way, count)| Ok((path(way)?, count))).transpose()?;
    // Kernels for one CPU do not have it; those that do not share CPUs among groups have no way
    // from a task to its queue.
    let queues = || -> Result<QueueFields, TypesError> {
        let entity = of("task_struct", "se")?;
        Ok(QueueFields {
            cfs_rq: entity + of("sched_entity", "cfs_rq")?,
            rq: of("cfs_rq", "rq")?,
            curr: of("rq", "curr")?,
            idle: of("rq", "idle")?,
            waiting: of("rq", "cfs_tasks")?,
            node: entity + of("sched_entity", "group_node")?,
        })
    };
    // An int up to 6.18, a byte with others beside it in 7.2.
    let on_cpu = || -> Result<(u64, OnCpu), TypesError> {
        let width = match types.width("task_struct", "on_cpu")? {
            1 => OnCpu::Byte,
            4 => OnCpu::Word,
            _ => return Err(TypesError::Unsound),
        };
        Ok((of("task_struct", "on_cpu")?, width))
    };
    Ok(Fields {
        pid: of("task_struct", "pid")?,
        comm: of("task_struct", "comm")?,
        stack: of("task_struct", "stack")?,
        sp: path(kept.sp)?,
        registers,
        tasks: of("task_struct", "tasks")?,
        thread_node: of("task_struct", "thread_node")?,
        signal: of("task_struct", "signal")?,
        thread_head: of("signal_struct", "thread_head")?,
        on_cpu: on_cpu().ok(),
        queues: queues().ok(),
        returns: KeptReturns::by_types(&types),
    })
}

/// How much of the image is searched at a time.
const CHUNK: u64 = 1 << 20;

/// The first task: by its symbol, or else by its name, which only it has in the image's data.
fn first_task(reader: &mut Reader<'_>, fields: &Fields) -> Result<Gva, TaskLayoutError> {
    if let Some(first) = reader.kernel.symbols().address("init_task") {
        return Ok(first);
    }
    let mut candidates = Vec::new();
    names_in_image(reader, |at| candidates.push(Gva(at.0.wrapping_sub(fields.comm))));
    let is_first = |first: &Gva| {
        let layout = TaskLayout {
            first: *first,
            fields: fields.clone(),
            stack_size: *STACK_SIZES.end(),
            idle: Vec::new(),
        };
        walk::processes(reader, &layout).is_ok_and(|tasks| tasks.len() > 2)
    };
    candidates.into_iter().find(is_first).ok_or(TaskLayoutError::NoFirstTask)
}

/// Gives every place in the kernel's image where the first task's name may be that of a task.
pub(super) fn names_in_image(reader: &Reader<'_>, mut found: impl FnMut(Gva)) {
    let mut name = [0; Comm::LEN];
    name[..9].copy_from_slice(b"swapper/0");
    let finder = memmem::Finder::new(&name);
    let image = reader.kernel.image();
    let mut offset = 0;
    while offset < image.len() {
        // What was freed of the image may hold anything, and is as good as unmapped.
        let chunk = image.read(reader.ram, offset, CHUNK + name.len() as u64).unwrap_or_default();
        for hit in finder.find_iter(&chunk).filter(|hit| hit % 8 == 0 && *hit < CHUNK as usize) {
            found(image.range.start + offset + hit as u64);
        }
        offset += CHUNK;
    }
}

/// How long stacks are: every task's pointer lies near its stack's upper end, unless the task is just
/// deep in the kernel.
fn stack_size(reader: &mut Reader<'_>, layout: &TaskLayout) -> Result<u64, TaskLayoutError> {
    let tasks = walk::tasks(reader, layout, &[])?;
    let used = tasks
        .iter()
        .filter_map(|task| Some((task.stack.as_ref()?, task.sp)))
        .filter_map(|(stack, sp)| sp.offset_from(stack.start))
        .max()
        .unwrap_or(0);
    let size = used.next_power_of_two();
    if STACK_SIZES.contains(&size) { Ok(size) } else { Err(TaskLayoutError::StackSize { used }) }
}
