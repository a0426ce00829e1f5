//! From task to task.

use rustc_hash::FxHashSet;

use super::layout::{OnCpu, QueueFields, TaskLayout};
use super::{Comm, Reader, Task, TasksError};
use crate::addr::Gva;

/// The most tasks believed: four times `PID_MAX_LIMIT` would be no kernel's.
const MAX_TASKS: usize = 4 << 20;

/// The most run queues believed (CONFIG_NR_CPUS with MAXSMP).
const MAX_QUEUES: usize = 8192;

/// What stands at the lowest address of every task's stack (`STACK_END_MAGIC`,
/// include/uapi/linux/magic.h).
pub(super) const STACK_END: u64 = 0x57ac_6e9d;

/// Members of the ring with the head at `head`, each link given to `visit`; the head is not.
pub(super) fn ring(
    reader: &mut Reader<'_>,
    name: &'static str,
    head: Gva,
    mut visit: impl FnMut(Gva),
) -> Result<(), TasksError> {
    let unreadable =
        |at| move |source| TasksError::Unreadable { what: "a list's link", at, source };
    let mut before = head;
    let mut from = head;
    let mut member = Gva(reader.u64(head).map_err(unreadable(head))?);
    for _ in 0..MAX_TASKS {
        let back = Gva(reader.u64(member + 8).map_err(unreadable(member))?);
        if back != from && back != before {
            return Err(TasksError::Broken { ring: name, member, back, from });
        }
        if member == head {
            return Ok(());
        }
        visit(member);
        before = from;
        from = member;
        member = Gva(reader.u64(member).map_err(unreadable(member))?);
    }
    Err(TasksError::TooMany { most: MAX_TASKS })
}

/// The first thread of every process, the first task first.
pub(super) fn processes(
    reader: &mut Reader<'_>,
    layout: &TaskLayout,
) -> Result<Vec<Gva>, TasksError> {
    let link = layout.fields.tasks;
    let mut found = vec![layout.first];
    ring(reader, "processes", layout.first + link, |member| found.push(member - link))?;
    Ok(found)
}

/// All tasks, and those that are known from elsewhere.
pub(super) fn tasks(
    reader: &mut Reader<'_>,
    layout: &TaskLayout,
    known: &[Gva],
) -> Result<Vec<Task>, TasksError> {
    let fields = &layout.fields;
    let mut found = Found::default();
    for idle in &layout.idle {
        found.add(*idle);
    }
    for leader in processes(reader, layout)? {
        found.add(leader);
        let unreadable = |source| TasksError::Unreadable { what: "a task", at: leader, source };
        let signal = reader.u64(leader + fields.signal).map_err(unreadable)?;
        // A process that is just being taken away may have none any more.
        if signal != 0 {
            let head = Gva(signal) + fields.thread_head;
            ring(reader, "a process's threads", head, |member| {
                found.add(member - fields.thread_node);
            })?;
        }
        if found.tasks.len() > MAX_TASKS {
            return Err(TasksError::TooMany { most: MAX_TASKS });
        }
    }
    if let Some(queues) = &fields.queues {
        add_queued(reader, queues, &mut found)?;
    }
    for task in known {
        found.add(*task);
    }
    found.tasks.iter().map(|at| task(reader, layout, *at)).collect()
}

/// The numbers and names of all threads of all processes, as far as their rings lead; whether they lead
/// to the end.
pub(super) fn names(
    reader: &mut Reader<'_>,
    layout: &TaskLayout,
    mut found: impl FnMut(u32, Comm),
) -> bool {
    let fields = &layout.fields;
    let mut leaders = vec![layout.first];
    let link = fields.tasks;
    let ended =
        ring(reader, "processes", layout.first + link, |member| leaders.push(member - link));
    let mut is_whole = ended.is_ok();
    let mut tasks = Found::default();
    for leader in leaders {
        tasks.add(leader);
        match reader.u64(leader + fields.signal) {
            Ok(0) => {}
            Ok(signal) => {
                let head = Gva(signal) + fields.thread_head;
                let threads = ring(reader, "a process's threads", head, |member| {
                    tasks.add(member - fields.thread_node);
                });
                is_whole &= threads.is_ok();
            }
            Err(_) => is_whole = false,
        }
        if tasks.tasks.len() > MAX_TASKS {
            return false;
        }
    }
    for task in tasks.tasks {
        let mut comm = [0; Comm::LEN];
        match (reader.u32(task + fields.pid), reader.read(task + fields.comm, &mut comm)) {
            (Ok(pid), Ok(())) => found(pid, Comm::new(comm)),
            _ => is_whole = false,
        }
    }
    is_whole
}

/// Tasks in the order in which they were found.
#[derive(Default)]
struct Found {
    tasks: Vec<Gva>,
    known: FxHashSet<Gva>,
}

impl Found {
    fn add(&mut self, task: Gva) {
        if self.known.insert(task) {
            self.tasks.push(task);
        }
    }
}

/// Adds the idle tasks, those that run, and those that wait to run, of all CPUs. Every CPU has threads
/// of the kernel of its own, so the tasks that are known lead to every queue.
fn add_queued(
    reader: &mut Reader<'_>,
    fields: &QueueFields,
    found: &mut Found,
) -> Result<(), TasksError> {
    let unreadable = |what, at| move |source| TasksError::Unreadable { what, at, source };
    let mut groups = FxHashSet::default();
    for &task in &found.tasks {
        groups.insert(reader.u64(task + fields.cfs_rq).map_err(unreadable("a task", task))?);
    }
    // A task that is just being taken away may have none any more.
    groups.remove(&0);
    let mut queues = FxHashSet::default();
    for group in groups.into_iter().map(Gva) {
        queues.insert(reader.u64(group + fields.rq).map_err(unreadable("a CPU's group", group))?);
    }
    if queues.len() > MAX_QUEUES {
        return Err(TasksError::TooMany { most: MAX_QUEUES });
    }
    for queue in queues.into_iter().map(Gva) {
        for pointer in [fields.idle, fields.curr] {
            let task = reader.u64(queue + pointer).map_err(unreadable("a run queue", queue))?;
            if task != 0 {
                found.add(Gva(task));
            }
        }
        ring(reader, "tasks that wait to run", queue + fields.waiting, |member| {
            found.add(member - fields.node);
        })?;
    }
    Ok(())
}

/// What there is to know of the task at `at`.
fn task(reader: &mut Reader<'_>, layout: &TaskLayout, at: Gva) -> Result<Task, TasksError> {
    let fields = &layout.fields;
    let unreadable = |source| TasksError::Unreadable { what: "a task", at, source };
    let pid = reader.u32(at + fields.pid).map_err(unreadable)?;
    let mut comm = [0; Comm::LEN];
    reader.read(at + fields.comm, &mut comm).map_err(unreadable)?;
    let comm = Comm::new(comm);
    let stack = Gva(reader.u64(at + fields.stack).map_err(unreadable)?);
    let sp = Gva(reader.u64(at + fields.sp).map_err(unreadable)?);
    let on_cpu = match fields.on_cpu {
        Some((offset, OnCpu::Word)) => Some(reader.u32(at + offset).map_err(unreadable)? != 0),
        Some((offset, OnCpu::Byte)) => {
            let mut byte = [0];
            reader.read(at + offset, &mut byte).map_err(unreadable)?;
            Some(byte != [0])
        }
        None => None,
    };
    let mut task = Task { at, pid, comm, stack: None, sp, on_cpu };
    if stack == Gva(0) {
        return Ok(task);
    }
    if reader.u64(stack) != Ok(STACK_END) {
        return Err(TasksError::NoStack { pid, comm, stack });
    }
    match sp.offset_from(stack) {
        Some(depth) if depth < layout.stack_size && sp.0.is_multiple_of(8) => {
            task.stack = stack.checked_add(layout.stack_size).map(|end| stack..end);
        }
        _ => return Err(TasksError::Astray { pid, comm, stack, sp }),
    }
    Ok(task)
}
