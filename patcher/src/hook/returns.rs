//! Taking the returns of functions: the pool of slots and what stands behind it, and the functions that
//! are left to return by themselves.

use vm_memory::Bytes;

use super::{HookError, Hooks};
use crate::addr::Gva;
use crate::arch::{ReturnExit, assemble_returns};
use crate::kernel::Site;
use crate::region::{
    Part, RETURN_POOL_OFFSET, RETURN_STUBS_ALIGN, ReturnPool, ReturnPoolMemory, TakenReturns,
};

/// No returns can be taken in this guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReturnPoolError {
    /// What functions return to is not what this program would have put there.
    #[error(
        "the region holds, at {at}, what another edition of vmm has functions return to, and some may \
         still do; trace without returns (func), or end the guest"
    )]
    Other {
        /// Where the stubs are said to be.
        at: Gva,
    },
}

/// Whether the returns of a function's calls can be taken; the error is why not.
///
/// # Errors
/// The reason, as part of a sentence.
pub fn takes_return(site: &Site) -> Result<(), &'static str> {
    if site.prefix.signs {
        return Err("it has signed its return address before its pad comes");
    }
    if site.is_unpadded() {
        return Err("it has no pad");
    }
    let reason = NOT_TAKEN.iter().find(|(_, names)| names.contains(&&*site.name));
    reason.map_or(Ok(()), |(why, _)| Err(why))
}

/// Functions whose returns are not taken, and why.
///
/// What never returns (`do_exit`, `panic`) is not among them: its call only stays in its slot. Nor is what
/// sleeps, or gives its task's CPU away: a return is known by its stub, whenever and wherever it comes.
const NOT_TAKEN: [(&str, &[&str]); 4] = [
    (
        "it returns on another stack than it was called on",
        // s390x has a pad in __switch_to from 6.11 on; the others switch in code without pads.
        &["__switch_to", "cpu_switch_to", "call_on_stack", "call_on_irq_stack"],
    ),
    (
        "a new task begins by returning from it",
        &["ret_from_fork", "schedule_tail", "kernel_thread_starter"],
    ),
    (
        "it leaves this kernel, or comes back when memory has been read from a disk",
        &[
            "machine_kexec",
            "relocate_kernel",
            "swsusp_arch_suspend",
            "swsusp_arch_resume",
            "restore_image",
            "x86_acpi_suspend_lowlevel",
            "x86_acpi_enter_sleep_state",
            "cpu_suspend",
            "__cpu_suspend_enter",
            "s390_reset_system",
        ],
    ),
    (
        "the guest's own tracing of returns looks at where it returns to",
        &[
            "prepare_ftrace_return",
            "ftrace_graph_func",
            "function_graph_enter",
            "function_graph_enter_ops",
            "function_graph_enter_regs",
            "ftrace_return_to_handler",
            "arch_prepare_kretprobe",
            "arch_rethook_prepare",
            "rethook_trampoline_handler",
            "__kretprobe_trampoline_handler",
        ],
    ),
];

impl<'m> Hooks<'m> {
    /// The pool of slots. It is laid out once in the life of a guest's kernel: tasks may return through it
    /// whenever they like.
    pub(super) fn return_pool(&mut self) -> Result<ReturnPool, HookError> {
        if let Some(pool) = self.chains.pool {
            return Ok(pool);
        }
        let arch = self.kernel.arch();
        let pool = match self.taken_returns() {
            Some(TakenReturns { pool, .. }) => {
                let code = assemble_returns(arch, &self.return_exit(pool)?)?;
                if !self.holds(pool.stubs, &code) {
                    return Err(ReturnPoolError::Other { at: pool.stubs }.into());
                }
                pool
            }
            None => {
                let data = self.machine.region(Part::Data).memory;
                let memory = ReturnPoolMemory::new(&data, arch.byte_order())?;
                let at = self.return_pool_at();
                let mut stubs = Gva(0);
                let exit = self.return_exit(ReturnPool { at, stubs })?;
                self.place(|from| {
                    stubs = Gva(from.0.next_multiple_of(RETURN_STUBS_ALIGN));
                    let exit = ReturnExit { pool: ReturnPool { at, stubs }, ..exit };
                    let mut code = vec![0; (stubs.0 - from.0) as usize];
                    code.extend(assemble_returns(arch, &exit)?);
                    Ok(code)
                })?;
                memory.lay_out(stubs)?;
                ReturnPool { at, stubs }
            }
        };
        self.chains.pool = Some(pool);
        Ok(pool)
    }

    /// Where the pool is, laid out or not.
    fn return_pool_at(&self) -> Gva {
        self.region.range(Part::Data).start + RETURN_POOL_OFFSET
    }

    /// Whether these bytes are in the region's code at `at`.
    fn holds(&self, at: Gva, bytes: &[u8]) -> bool {
        let Some(offset) = at.offset_from(self.region.range(Part::Code).start) else {
            return false;
        };
        if offset.saturating_add(bytes.len() as u64) > self.region.code().used() {
            return false;
        }
        let mut found = vec![0; bytes.len()];
        let window = self.machine.region(Part::Code);
        window.memory.read_slice(&mut found, offset as usize).is_ok() && found == bytes
    }

    /// The returns that are taken in this guest, also those that an earlier process has taken; `None` if
    /// none ever was.
    #[must_use]
    pub fn taken_returns(&self) -> Option<TakenReturns<'m>> {
        let data = self.machine.region(Part::Data).memory;
        let memory = ReturnPoolMemory::new(&data, self.kernel.arch().byte_order()).ok()?;
        let pool = ReturnPool { at: self.return_pool_at(), stubs: memory.stubs()? };
        Some(TakenReturns { pool, memory })
    }

    /// How many calls found no slot that was free, so that their returns are not recorded, since the guest
    /// was started; 0 if no returns were ever taken.
    #[must_use]
    pub fn missed_returns(&self) -> u64 {
        self.taken_returns().map_or(0, |returns| returns.memory.missed())
    }
}
