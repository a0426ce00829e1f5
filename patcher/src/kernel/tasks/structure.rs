//! Where a kernel without a description of its types (no CONFIG_DEBUG_INFO_BTF) keeps what of its
//! tasks, told by what only tasks have, and by all of a sample of tasks.
//!
//! Every distance is at first from a task's name, which is how the first task is found.

use std::ops::Range;

use super::layout::{Fields, STACK_SIZES, TaskLayout, names_in_image};
use super::returns::KeptReturns;
use super::walk::STACK_END;
use super::{Comm, Reader, TaskLayoutError};
use crate::addr::Gva;
use crate::arch::ByteOrder;

/// How far from its name a task is looked at, in bytes, in either direction.
const REACH: u64 = 4096;

/// How many tasks are looked at, and how few must be there.
const SAMPLE: usize = 64;
const FEWEST: usize = 8;

/// How many links of rings are followed in all until the ring of processes is found.
const MAX_LINKS: usize = 1 << 20;

/// The kernel's thread that creates the others, process 2 in every kernel. It is the third in the ring.
const CREATOR: &[u8] = b"kthreadd";

/// The most bytes of a task in front of its stack (`struct thread_info` and the task's state).
const FLAGS: u64 = 256;

/// How far the run queue's pointer to its idle task may be from what a task of the kernel's waits in,
/// which is a part of the run queue, in bytes.
const QUEUE: u64 = 4096;

/// The most CPUs believed.
const MAX_CPUS: usize = 8192;

/// Finds the first task and the distances, and the idle tasks of the other CPUs, which are in no ring.
pub(super) fn find(reader: &mut Reader<'_>) -> Result<TaskLayout, TaskLayoutError> {
    let mut names = Vec::new();
    names_in_image(reader, |at| names.push(at));
    let mut links = MAX_LINKS;
    let mut error = TaskLayoutError::NoFirstTask;
    for name in names {
        for link in distances() {
            let Some(members) = ring_of_tasks(reader, name, link, &mut links) else { continue };
            match by_sample(reader, &members, link) {
                Ok(layout) => return Ok(layout),
                Err(what) => error = TaskLayoutError::NotTold { what },
            }
        }
    }
    Err(error)
}

/// Every distance, negative ones as wrapping additions.
fn distances() -> impl Iterator<Item = u64> + Clone {
    (0..2 * REACH).step_by(8).map(|from_begin| from_begin.wrapping_sub(REACH))
}

/// The places of the names of the tasks in the ring whose link is at `link` from the name at `name`, if
/// it is one of tasks.
fn ring_of_tasks(
    reader: &mut Reader<'_>,
    name: Gva,
    link: u64,
    links: &mut usize,
) -> Option<Vec<Gva>> {
    let head = name + link;
    let mut members = vec![name];
    let mut from = head;
    loop {
        *links = links.checked_sub(1)?;
        let member = Gva(reader.u64(from).ok()?);
        if !member.0.is_multiple_of(8) || reader.u64(member + 8) != Ok(from.0) {
            return None;
        }
        if member == head {
            break;
        }
        members.push(member - link);
        from = member;
    }
    let is_creator = |at: &Gva| comm(reader, *at).is_some_and(|comm| comm.bytes() == CREATOR);
    (members.len() >= FEWEST && members.get(2).is_some_and(is_creator)).then_some(members)
}

fn comm(reader: &mut Reader<'_>, at: Gva) -> Option<Comm> {
    let mut name = [0; Comm::LEN];
    reader.read(at, &mut name).ok()?;
    // The kernel keeps the last byte zero.
    (name[Comm::LEN - 1] == 0).then(|| Comm::new(name))
}

/// The bytes around a task's name.
struct Seen {
    name: Gva,
    bytes: Vec<u8>,
    order: ByteOrder,
}

impl Seen {
    /// What can't be read is zero: no field that is looked for is.
    fn new(reader: &mut Reader<'_>, name: Gva) -> Self {
        let mut bytes = vec![0; 2 * REACH as usize];
        let begin = name - REACH;
        for (index, piece) in bytes.chunks_exact_mut(8).enumerate() {
            if reader.read(begin + 8 * index as u64, piece).is_err() {
                piece.fill(0);
            }
        }
        Self { name, bytes, order: reader.kernel.arch().byte_order() }
    }

    /// The 8 bytes at that distance from the name.
    fn u64(&self, distance: u64) -> u64 {
        let at = distance.wrapping_add(REACH) as usize;
        let bytes = self.bytes.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| self.order.u64(*bytes))
    }

    fn u32(&self, distance: u64) -> u32 {
        let at = distance.wrapping_add(REACH) as usize;
        let bytes = self.bytes.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| self.order.u32(*bytes))
    }
}

/// All distances, by the tasks whose names are at `members`. Says what could not be told.
fn by_sample(
    reader: &mut Reader<'_>,
    members: &[Gva],
    link: u64,
) -> Result<TaskLayout, &'static str> {
    let sample: Vec<Seen> =
        members.iter().take(SAMPLE).map(|name| Seen::new(reader, *name)).collect();
    let pid = pid(&sample).ok_or("number")?;
    let stack =
        only(distances().filter(|at| sample.iter().all(|task| is_stack(reader, task.u64(*at)))))
            .ok_or("stack")?;
    let begin = begin(&sample).ok_or("beginning")?;
    // Only flags come before the stack.
    if !(8..FLAGS).contains(&stack.wrapping_sub(begin)) {
        return Err("beginning");
    }
    let sp = only(distances().filter(|at| {
        sample.iter().all(|task| {
            let depth = task.u64(*at).wrapping_sub(task.u64(stack));
            depth > 0 && depth < *STACK_SIZES.end() && depth.is_multiple_of(8)
        })
    }))
    .ok_or("stack pointer")?;
    let (thread_node, signal, thread_head) = threads(reader, &sample).ok_or("threads")?;

    let from_begin = |distance: u64| distance.wrapping_sub(begin);
    let fields = Fields {
        pid: from_begin(pid),
        comm: from_begin(0),
        stack: from_begin(stack),
        sp: from_begin(sp),
        registers: None,
        tasks: from_begin(link),
        thread_node: from_begin(thread_node),
        signal: from_begin(signal),
        thread_head,
        on_cpu: None,
        queues: None,
        returns: KeptReturns::default(),
    };
    let first = members[0] + begin;
    let idle = idle_tasks(reader, &sample, first, &fields)?;
    Ok(TaskLayout { first, fields, stack_size: *STACK_SIZES.end(), idle })
}

/// The only one of them.
fn only(mut of: impl Iterator<Item = u64>) -> Option<u64> {
    let one = of.next()?;
    of.next().is_none().then_some(one)
}

/// Where tasks have their numbers: the first two in the ring are 0 and 1, the third is 2, and no two
/// are alike; the number of the process follows, which of a process's first thread is the same.
fn pid(sample: &[Seen]) -> Option<u64> {
    let halves = distances().flat_map(|at| [at, at.wrapping_add(4)]);
    only(halves.filter(|at| {
        let mut numbers: Vec<u32> = sample.iter().map(|task| task.u32(*at)).collect();
        let first = numbers.starts_with(&[0, 1, 2]);
        numbers.sort_unstable();
        let distinct = numbers.windows(2).all(|pair| pair[0] != pair[1]);
        let process = at.wrapping_add(4);
        first && distinct && sample.iter().all(|task| task.u32(process) == task.u32(*at))
    }))
}

/// Whether `stack` may be a task's kernel stack.
fn is_stack(reader: &mut Reader<'_>, stack: u64) -> bool {
    stack != 0
        && stack.is_multiple_of(*STACK_SIZES.start())
        && reader.u64(Gva(stack)) == Ok(STACK_END)
}

/// Where a task begins: the first thread of a process points to itself (`group_leader`), and nothing in
/// a task points in front of it at the same distance in every one.
fn begin(sample: &[Seen]) -> Option<u64> {
    let to_itself = |at: &u64| {
        let targets: Vec<u64> =
            sample.iter().map(|task| task.u64(*at).wrapping_sub(task.name.0)).collect();
        let target = *targets.first()?;
        let in_front = target.wrapping_neg() <= REACH;
        (in_front && targets.iter().all(|other| *other == target)).then_some(target)
    };
    // The farthest in front of the name.
    distances().filter_map(|at| to_itself(&at)).min_by_key(|target| target.cast_signed())
}

/// The link of the ring of a process's threads, the pointer to what has its head, and where in that.
/// Of a process of one thread the ring has two links, of which the other is in what the pointer leads
/// to, and not far from its beginning.
fn threads(reader: &mut Reader<'_>, sample: &[Seen]) -> Option<(u64, u64, u64)> {
    /// How far from the beginning of `struct signal_struct` the head may be, in bytes.
    const HEAD: Range<u64> = 8..64;
    let mut found = None;
    for node in distances() {
        let mut heads = Vec::new();
        for task in sample {
            let (next, back) = (task.u64(node), task.u64(node.wrapping_add(8)));
            let own = task.name + node;
            // The ring of a process with several threads tells nothing.
            if next != back {
                continue;
            }
            let is_ring = next != own.0
                && reader.u64(Gva(next)) == Ok(own.0)
                && reader.u64(Gva(next) + 8) == Ok(own.0);
            if !is_ring {
                heads.clear();
                break;
            }
            heads.push((task, next));
        }
        if heads.len() < FEWEST {
            continue;
        }
        for signal in distances() {
            let head = heads[0].1.wrapping_sub(heads[0].0.u64(signal));
            let is_same = |(task, next): &(&Seen, u64)| next.wrapping_sub(task.u64(signal)) == head;
            if HEAD.contains(&head) && heads.iter().all(is_same) {
                if found.is_some() {
                    return None;
                }
                found = Some((node, signal, head));
            }
        }
    }
    found
}

/// The idle tasks of all CPUs but the first. The first one's tells where a task of the kernel's that is
/// bound to a CPU leads to it, and so where those of other CPUs lead to theirs.
fn idle_tasks(
    reader: &mut Reader<'_>,
    sample: &[Seen],
    first: Gva,
    fields: &Fields,
) -> Result<Vec<Gva>, &'static str> {
    let mut bound: Vec<Option<&Seen>> = Vec::new();
    for task in sample {
        let name = comm(reader, task.name).ok_or("name")?;
        let number = name.bytes().strip_prefix(b"ksoftirqd/");
        let number = number.and_then(|number| std::str::from_utf8(number).ok()?.parse().ok());
        let Some(number) = number.filter(|number: &usize| *number < MAX_CPUS) else { continue };
        bound.resize(bound.len().max(number + 1), None);
        bound[number] = Some(task);
    }
    let Some(Some(of_first)) = bound.first() else { return Err("idle tasks") };
    let mut ways = Vec::new();
    for pointer in distances() {
        let queue = of_first.u64(pointer);
        if !queue.is_multiple_of(8) || reader.u64(Gva(queue)).is_err() {
            continue;
        }
        for step in (0..2 * QUEUE).step_by(8) {
            let step = step.wrapping_sub(QUEUE);
            if reader.u64(Gva(queue) + step) == Ok(first.0) {
                ways.push((pointer, step));
            }
        }
    }
    let others = bound.iter().enumerate().skip(1);
    others
        .filter_map(|(cpu, task)| Some((cpu, (*task)?)))
        .map(|(cpu, task)| {
            let idle = ways.iter().filter_map(|(pointer, step)| {
                reader.u64(Gva(task.u64(*pointer)) + *step).ok().map(Gva)
            });
            let idle: Vec<Gva> = idle.collect();
            let is_idle = |at: &Gva| is_idle_task(reader, *at, cpu, fields);
            idle.into_iter().find(is_idle).ok_or("idle tasks")
        })
        .collect()
}

fn is_idle_task(reader: &mut Reader<'_>, at: Gva, cpu: usize, fields: &Fields) -> bool {
    let name = format!("swapper/{cpu}");
    comm(reader, at + fields.comm).is_some_and(|comm| comm.bytes() == name.as_bytes())
        && reader.u32(at + fields.pid) == Ok(0)
        && reader.u64(at + fields.stack).is_ok_and(|stack| is_stack(reader, stack))
}
