//! Addresses to which a task returns and that are not on its stack: the guest's own tracing of returns
//! (function_graph, kretprobes) puts others in their places and keeps them elsewhere.

use super::{Reader, TasksError};
use crate::addr::Gva;
use crate::kernel::ReadError;
use crate::kernel::types::{Types, TypesError};

/// Where such addresses are kept. What a kernel does not have is empty: one that keeps none, and one
/// that does not describe its types.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct KeptReturns {
    shadow: Option<Shadow>,
    chains: Vec<Chain>,
}

/// A stack of its own that the guest has for them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shadow {
    /// In a task, the pointer to it.
    stack: u64,
    /// In a task, how much of it is in use, an int that counts what has `unit` bytes.
    used: u64,
    unit: u64,
    /// What that counts from: up to 6.10 it is the number of the last entry.
    from: i64,
}

/// A chain of structures, each of which keeps one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Chain {
    /// In a task, the pointer to the link of the first.
    head: u64,
    /// In such a structure, the link to the next, and the address.
    link: u64,
    address: u64,
}

/// The most bytes of a shadow stack (50 entries up to 6.10, `SHADOW_STACK_SIZE` since).
const MAX_SHADOW: u64 = 4096;

/// The most members of a chain believed: a stack has no room for so many calls.
const MAX_CHAIN: usize = 4096;

impl KeptReturns {
    pub fn by_types(types: &Types) -> Self {
        let shadow = || -> Result<Shadow, TypesError> {
            let (task, stack) = ("task_struct", "ret_stack");
            let entry = types.target_size(task, stack)?;
            Ok(Shadow {
                stack: types.offset(task, stack)?,
                used: types.offset(task, "curr_ret_stack")?,
                // Since 6.11 it is a stack of words.
                unit: entry.unwrap_or(8),
                from: if entry.is_some() { -1 } else { 0 },
            })
        };
        let chain = |head, of| -> Result<Chain, TypesError> {
            Ok(Chain {
                head: types.offset("task_struct", head)?,
                link: types.offset(of, "llist")?,
                address: types.offset(of, "ret_addr")?,
            })
        };
        let chains =
            [chain("rethooks", "rethook_node"), chain("kretprobe_instances", "kretprobe_instance")];
        Self { shadow: shadow().ok(), chains: chains.into_iter().flatten().collect() }
    }

    /// The addresses that are kept of the task at `task`.
    pub fn of(&self, reader: &mut Reader<'_>, task: Gva) -> Result<Vec<u64>, TasksError> {
        let unreadable = |source: ReadError| TasksError::Unreadable {
            what: "what the guest's own tracing keeps of a task",
            at: task,
            source,
        };
        let mut found = Vec::new();
        if let Some(shadow) = &self.shadow {
            let stack = reader.u64(task + shadow.stack).map_err(unreadable)?;
            let used = reader.u32(task + shadow.used).map_err(unreadable)?.cast_signed();
            let used = u64::try_from(i64::from(used) - shadow.from).unwrap_or(0);
            let len = used.saturating_mul(shadow.unit).min(MAX_SHADOW);
            if stack != 0 {
                for at in (0..len).step_by(8) {
                    found.push(reader.u64(Gva(stack) + at).map_err(unreadable)?);
                }
            }
        }
        for chain in &self.chains {
            let mut link = Gva(reader.u64(task + chain.head).map_err(unreadable)?);
            let mut members = 0;
            while link != Gva(0) {
                if members == MAX_CHAIN {
                    return Err(TasksError::EndlessReturns { task, most: MAX_CHAIN });
                }
                let address = link - chain.link + chain.address;
                found.push(reader.u64(address).map_err(unreadable)?);
                link = Gva(reader.u64(link).map_err(unreadable)?);
                members += 1;
            }
        }
        Ok(found)
    }
}
