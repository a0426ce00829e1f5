//! The tasks of a synthetic guest, their stacks and run queues, and the description of the types that
//! lead to them.

use super::Guest;
use crate::addr::{Gpa, Gva};

/// A task of a synthetic guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskSpec {
    /// Its number.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Where its `struct task_struct` is.
    pub at: Gva,
    /// Where its stack begins, which has [`STACK`] bytes.
    pub stack: Gva,
    /// Its stack pointer when it last ran.
    pub sp: Gva,
}

/// The length of a task's stack, in bytes.
pub const STACK: u64 = 16 << 10;

/// Distances in `struct task_struct` and what it leads to.
pub mod field {
    /// Whether the task is on a CPU, an int.
    pub const ON_CPU: u64 = 0x34;
    /// The pointer to its stack.
    pub const STACK: u64 = 0x20;
    /// The link of the ring of tasks that wait to run.
    pub const GROUP_NODE: u64 = 0x80 + 0x28;
    /// The pointer into its run queue.
    pub const CFS_RQ: u64 = 0x80 + 0x78;
    /// The link of the ring of processes.
    pub const TASKS: u64 = 0x890;
    /// Its number and that of its process.
    pub const PID: u64 = 0x970;
    /// The pointer to its process's first thread.
    pub const GROUP_LEADER: u64 = 0x9b0;
    /// The link of the ring of a process's threads.
    pub const THREAD_NODE: u64 = 0xa30;
    /// Its name.
    pub const COMM: u64 = 0xba0;
    /// The pointer to what a process's threads share.
    pub const SIGNAL: u64 = 0xc00;
    /// Its stack pointer, in what the architecture keeps of it.
    pub const SP: u64 = 0x1500 + 0x18;
    /// How many words of a stack are in use on which the guest keeps addresses to return to.
    pub const CURR_RET_STACK: u64 = 0xd00;
    /// The pointer to that.
    pub const RET_STACK: u64 = 0xd08;
    /// The pointer to the link of the first structure that keeps such an address.
    pub const RETHOOKS: u64 = 0xd10;
    /// In such a structure, the link and the address.
    pub const LLIST: u64 = 0x10;
    /// The address.
    pub const RET_ADDR: u64 = 0x20;
    /// In what `SIGNAL` leads to, the head of the ring of threads.
    pub const THREAD_HEAD: u64 = 0x10;
    /// In what `CFS_RQ` leads to, the pointer to the run queue, in which it lies itself.
    pub const RQ: u64 = 0x130;
    /// In a run queue: what `CFS_RQ` leads to, the task that runs, the idle task, and the head of the
    /// ring of tasks that wait.
    pub const CFS: u64 = 0x100;
    /// The task that runs.
    pub const CURR: u64 = 0x970;
    /// The idle task.
    pub const IDLE: u64 = 0x978;
    /// The head of the ring of tasks that wait.
    pub const CFS_TASKS: u64 = 0xa58;
}

const TASKS: u64 = 0x120_0000;
const TASK: u64 = 0x2000;
const STACKS: u64 = 0x140_0000;
const QUEUES: u64 = 0x170_0000;
const QUEUE: u64 = 0x2000;
/// What a process's threads share lies behind its first thread.
const SIGNAL: u64 = 0x1c00;

/// In the image.
pub(super) const FIRST_TASK: u64 = 0x39_4000;
const FIRST_STACK: u64 = 0x3a_0000;
const TYPES: u64 = 0x3a_8014;

/// What stands at the beginning of each stack.
pub const STACK_END: u64 = 0x57ac_6e9d;

/// How many bytes of its stack a sleeping task uses.
const USED: u64 = 0x180;

impl Guest {
    /// The task of that name, the first of several.
    #[must_use]
    pub fn task(&self, comm: &str) -> &TaskSpec {
        let task = self.tasks.iter().find(|task| task.comm == comm);
        task.unwrap_or_else(|| panic!("no task {comm}"))
    }

    /// The run queue of a CPU.
    #[must_use]
    pub fn run_queue(&self, cpu: u32) -> Gva {
        self.direct(Gpa(QUEUES + u64::from(cpu) * QUEUE))
    }

    /// Every CPU's idle task runs; all others sleep.
    pub(super) fn write_tasks(&mut self) {
        let cpus = self.blueprint.cpus;
        let mut names = vec![(0, "swapper/0".to_owned()), (1, "init".to_owned())];
        names.push((2, "kthreadd".to_owned()));
        names.extend((0..cpus).map(|cpu| (10 + cpu, format!("ksoftirqd/{cpu}"))));
        names.extend((0..8).map(|number| (200 + number, format!("sleeper/{number}"))));
        let leaders = names.len();
        // Behind the ring: a second thread of process 1, and idle tasks.
        names.push((150, "init".to_owned()));
        names.extend((1..cpus).map(|cpu| (0, format!("swapper/{cpu}"))));
        for (index, (pid, comm)) in names.into_iter().enumerate() {
            let number = index as u64;
            let (at, stack) = match index {
                0 => (self.at(FIRST_TASK), self.at(FIRST_STACK)),
                _ => {
                    let at = self.direct(Gpa(TASKS + number * TASK));
                    (at, self.direct(Gpa(STACKS + number * STACK)))
                }
            };
            let spec = TaskSpec { pid, comm, at, stack, sp: stack + (STACK - USED) };
            self.write_task(&spec, index < leaders);
            self.tasks.push(spec);
        }
        let link = |guest: &Self, links: &[Gva]| {
            for (index, from) in links.iter().enumerate() {
                let to = links[(index + 1) % links.len()];
                guest.poke_u64(*from, to.0);
                guest.poke_u64(to + 8, from.0);
            }
        };
        let ring: Vec<Gva> =
            self.tasks[..leaders].iter().map(|task| task.at + field::TASKS).collect();
        link(self, &ring);
        let node = |task: &TaskSpec| task.at + field::THREAD_NODE;
        for (index, task) in self.tasks.iter().enumerate() {
            let head = task.at + SIGNAL + field::THREAD_HEAD;
            match index {
                1 => link(self, &[head, node(task), node(&self.tasks[leaders])]),
                _ if index == leaders => {}
                _ => link(self, &[head, node(task)]),
            }
        }
        let (second, first) = (self.tasks[leaders].at, self.tasks[1].at);
        self.poke_u64(second + field::SIGNAL, (first + SIGNAL).0);
        self.poke(second + field::PID + 4, &1u32.to_le_bytes());
        self.poke_u64(second + field::GROUP_LEADER, first.0);
        for cpu in 0..cpus {
            let queue = self.run_queue(cpu);
            let idle = self.task(&format!("swapper/{cpu}")).at;
            self.poke_u64(queue + field::CFS + field::RQ, queue.0);
            self.poke_u64(queue + field::CURR, idle.0);
            self.poke_u64(queue + field::IDLE, idle.0);
            link(self, &[queue + field::CFS_TASKS]);
            self.poke(idle + field::ON_CPU, &1u32.to_le_bytes());
        }
        self.poke(self.at(TYPES), &types());
        self.add_symbol(FIRST_TASK, b'D', "init_task");
    }

    fn write_task(&self, task: &TaskSpec, is_leader: bool) {
        let cpu = task.comm.rsplit('/').next().and_then(|cpu| cpu.parse().ok()).unwrap_or(0);
        let queue = self.run_queue(cpu % self.blueprint.cpus);
        self.poke_u64(task.at + field::STACK, task.stack.0);
        self.poke_u64(task.at + field::CFS_RQ, (queue + field::CFS).0);
        self.poke(task.at + field::PID, &task.pid.to_le_bytes());
        self.poke(task.at + field::PID + 4, &task.pid.to_le_bytes());
        self.poke_u64(task.at + field::GROUP_LEADER, task.at.0);
        self.poke(task.at + field::COMM, task.comm.as_bytes());
        self.poke_u64(task.at + field::SIGNAL, (task.at + SIGNAL).0);
        self.poke_u64(task.at + field::SP, task.sp.0);
        let node = task.at + field::GROUP_NODE;
        self.poke_u64(node, node.0);
        self.poke_u64(node + 8, node.0);
        if !is_leader {
            let link = task.at + field::TASKS;
            self.poke_u64(link, link.0);
            self.poke_u64(link + 8, link.0);
        }
        self.poke_u64(task.stack, STACK_END);
    }

    /// Takes the description of types away, as of a kernel that is built without.
    pub fn forget_types(&self) {
        self.poke(self.at(TYPES), &[0; 24]);
    }
}

/// A field: its name, the number of its type, its distance in bytes.
type Field = (&'static str, u32, u64);

/// The types, in the format that Documentation/bpf/btf.rst describes.
fn types() -> Vec<u8> {
    const INT: u32 = 1;
    let structures: [(&str, &[Field]); 7] = [
        (
            "task_struct",
            &[
                ("stack", INT, field::STACK),
                ("on_cpu", INT, field::ON_CPU),
                ("se", 3, 0x80),
                ("tasks", INT, field::TASKS),
                ("pid", INT, field::PID),
                ("thread_node", INT, field::THREAD_NODE),
                ("comm", INT, field::COMM),
                ("signal", INT, field::SIGNAL),
                ("thread", 4, 0x1500),
                ("curr_ret_stack", INT, field::CURR_RET_STACK),
                ("ret_stack", INT, field::RET_STACK),
                ("rethooks", INT, field::RETHOOKS),
            ],
        ),
        (
            "sched_entity",
            &[("group_node", INT, field::GROUP_NODE - 0x80), ("cfs_rq", INT, field::CFS_RQ - 0x80)],
        ),
        ("thread_struct", &[("sp", INT, field::SP - 0x1500)]),
        ("signal_struct", &[("thread_head", INT, field::THREAD_HEAD)]),
        ("rethook_node", &[("llist", INT, field::LLIST), ("ret_addr", INT, field::RET_ADDR)]),
        ("cfs_rq", &[("rq", INT, field::RQ)]),
        (
            "rq",
            &[
                ("curr", INT, field::CURR),
                ("idle", INT, field::IDLE),
                ("cfs_tasks", INT, field::CFS_TASKS),
            ],
        ),
    ];
    let mut strings = vec![0];
    let mut string = |name: &str| {
        let at = strings.len() as u32;
        strings.extend(name.as_bytes());
        strings.push(0);
        at
    };
    // The integer is type 1, the structures follow.
    let mut words = vec![string("int"), 1 << 24, 4, 32];
    for (name, fields) in structures {
        words.extend([string(name), 4 << 24 | fields.len() as u32, 0x1800]);
        for (name, kind, offset) in fields {
            words.extend([string(name), *kind, *offset as u32 * 8]);
        }
    }
    let len = words.len() as u32 * 4;
    let header = [24, 0, len, len, strings.len() as u32];
    let mut blob = vec![0x9f, 0xeb, 1, 0];
    blob.extend(header.iter().chain(&words).flat_map(|word| word.to_le_bytes()));
    blob.extend(strings);
    blob
}
