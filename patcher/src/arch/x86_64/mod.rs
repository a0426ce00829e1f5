//! x86_64 guests.

use std::ops::Range;

use object::elf;

use super::paging::{AddressSpace, Bits, TableFormat};
use super::relocation::Relocation;
use super::{
    Access, Aggregates, Arch, ByteOrder, CallingConvention, CpuArea, CpuNumber, CpuStack, Gate,
    ImageWindow, KernelPlace, Logger, OutOfReach, PID_BITS, PadBytes, PadState, Pairs, Pattern,
    PerCpuVariable, Prefix, ReturnCount, ReturnExit, ReturnHook, Standing, TaskPaths, TaskStacks,
    TaskWords, Then, ThunkShape, Thunks, Unpaged,
};
use crate::addr::{Gpa, Gva};
use crate::machine::Registers;
use crate::region::{Counters, THUNK_BLOCK_BYTES};

mod arguments;
mod counter;
mod gate;
mod measure;
mod movable;
mod pads;
pub mod paging;
mod relocations;
mod return_hook;
mod returns;
mod stacks;
mod trampoline;

pub use pads::TRAP_PORT;

/// The x86_64 architecture.
#[derive(Debug)]
pub struct X86_64;

/// Where the kernel's image may be: `__START_KERNEL_map` and the 1 GiB `KERNEL_IMAGE_SIZE` above it
/// (Documentation/arch/x86/x86_64/mm.rst).
const IMAGE_WINDOW: Range<Gva> = Gva(0xffff_ffff_8000_0000)..Gva(0xffff_ffff_c000_0000);

/// Where modules begin in a kernel that cannot be relocated, whose image has 512 MiB.
const SMALL_IMAGE_END: Gva = Gva(0xffff_ffff_a000_0000);

/// Where a kernel that was not moved begins: `CONFIG_PHYSICAL_START`, 16 MiB in every distribution's kernel.
const LINKED_AT: Gva = Gva(0xffff_ffff_8100_0000);

/// System V Application Binary Interface, AMD64 Architecture Processor Supplement, 3.2.3.
static CALLING: CallingConvention = CallingConvention {
    registers: &["rdi", "rsi", "rdx", "rcx", "r8", "r9"],
    memory_return: Some(0),
    stack: 8,
    aggregates: Aggregates::ByValue,
    returned: 16,
    pairs: Pairs::LeaveRegister,
};

impl Arch for X86_64 {
    fn name(&self) -> &'static str {
        "x86_64"
    }

    fn byte_order(&self) -> ByteOrder {
        ByteOrder::Little
    }

    fn address_spaces(&self, registers: &Registers) -> Result<Vec<AddressSpace>, Unpaged> {
        let Registers::X86_64(registers) = registers else { return Err(Unpaged::Foreign) };
        paging::address_spaces(registers)
    }

    fn kernel_root_symbols(&self) -> &'static [&'static str] {
        &["init_top_pgt", "swapper_pg_dir"]
    }

    fn image_window(&self, _format: &TableFormat) -> ImageWindow {
        ImageWindow {
            range: IMAGE_WINDOW,
            align: paging::LARGE_PAGE,
            text: Bits::ANY,
            least: paging::LARGE_PAGE,
            first_symbol: "_text",
            in_front: 0,
        }
    }

    fn linked_at(&self, _format: &TableFormat, _version: (u32, u32)) -> Gva {
        LINKED_AT
    }

    fn linked_bases(&self) -> Vec<Gva> {
        vec![LINKED_AT]
    }

    fn pad_len(&self) -> usize {
        pads::LEN
    }

    fn pad_prefixes(&self) -> &'static [Prefix] {
        &pads::PREFIXES
    }

    fn breakpoint(&self) -> Pattern {
        pads::BREAKPOINT
    }

    fn compiler_hook_symbol(&self) -> &'static str {
        "__fentry__"
    }

    fn pad_state(&self, at: Gva, bytes: &[u8], hook: Option<Gva>) -> PadState {
        pads::state(at, bytes, hook)
    }

    fn encode_branch(&self, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
        pads::encode_call(at, to)
    }

    fn encode_jump(&self, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
        pads::encode_jump(at, to)
    }

    fn encode_trap(&self, original: &[u8]) -> Option<PadBytes> {
        pads::encode_trap(original)
    }

    fn movable(&self, text: &[u8]) -> Option<usize> {
        movable::length(text)
    }

    fn region_window(&self, kernel: &KernelPlace, _memory: &Range<Gpa>) -> Range<Gva> {
        // Everything in the top 2 GiB is within a rel32 of everything else there, so reach sets no
        // bound; where modules begin does: the kernel takes empty entries above for its own.
        let end = if kernel.relocatable || kernel.image.end > SMALL_IMAGE_END {
            IMAGE_WINDOW.end
        } else {
            SMALL_IMAGE_END
        };
        IMAGE_WINDOW.start..end
    }

    fn region_leaf_size(&self) -> u64 {
        paging::LARGE_PAGE
    }

    fn region_leaf(&self, text_leaf: u64, gpa: Gpa, access: Access) -> u64 {
        paging::region_leaf(text_leaf, gpa, access)
    }

    fn is_return_thunk(&self, name: &str) -> bool {
        returns::is_thunk(name)
    }

    fn return_thunk_variable(&self) -> Option<&'static str> {
        Some("x86_return_thunk")
    }

    fn count_returns(&self, text: &[u8], at: Gva, thunks: &[Gva]) -> ReturnCount {
        returns::count(text, at, thunks)
    }

    fn kernel_addresses(&self) -> Option<Gva> {
        // The upper half with five levels of tables; with four it begins later.
        Some(Gva(0xff00_0000_0000_0000))
    }

    fn calling_convention(&self) -> &'static CallingConvention {
        &CALLING
    }

    fn cpu_number(&self) -> CpuNumber {
        // `cpu_number` is a variable of its own up to 6.1 and again from 6.15; between, it is the
        // third field of struct pcpu_hot (arch/x86/include/asm/current.h).
        CpuNumber::PerCpu(&[
            PerCpuVariable { symbol: "cpu_number", offset: 0 },
            PerCpuVariable { symbol: "pcpu_hot", offset: 12 },
        ])
    }

    fn task_paths(&self) -> TaskPaths {
        // As for the CPU's number.
        TaskPaths::PerCpu {
            current: &[
                PerCpuVariable { symbol: "current_task", offset: 0 },
                PerCpuVariable { symbol: "pcpu_hot", offset: 0 },
            ],
            preempt_count: &[
                PerCpuVariable { symbol: "__preempt_count", offset: 0 },
                PerCpuVariable { symbol: "pcpu_hot", offset: 8 },
            ],
        }
    }

    fn task_words(&self, [flags, pid, preempt_count]: [u32; 3]) -> TaskWords {
        const INTERRUPTS_ON: u32 = 1 << 9;
        TaskWords { pid: pid & PID_BITS, irqs_off: flags & INTERRUPTS_ON == 0, preempt_count }
    }

    fn standing(&self, registers: &Registers) -> Standing {
        stacks::standing(registers)
    }

    fn task_stacks(&self) -> TaskStacks {
        stacks::TASK
    }

    fn cpu_area(&self, registers: &Registers) -> Option<CpuArea> {
        stacks::cpu_area(registers)
    }

    fn cpu_stacks(&self) -> &'static [CpuStack] {
        &stacks::CPU
    }

    fn assemble_logger(&self, at: Gva, logger: &Logger) -> Result<Vec<u8>, OutOfReach> {
        trampoline::assemble(logger, at)
    }

    fn assemble_counter(
        &self,
        at: Gva,
        _counters: Counters,
        then: Then,
    ) -> Result<Vec<u8>, OutOfReach> {
        counter::assemble(at, then)
    }

    fn assemble_gate(&self, at: Gva, gate: &Gate<'_>) -> Result<Vec<u8>, OutOfReach> {
        gate::assemble(at, gate)
    }

    fn thunk_shape(&self) -> ThunkShape {
        counter::SHAPE
    }

    fn assemble_thunks(
        &self,
        at: Gva,
        thunks: &Thunks,
    ) -> Result<[u8; THUNK_BLOCK_BYTES as usize], OutOfReach> {
        counter::assemble_thunks(at, thunks)
    }

    fn assemble_return_hook(&self, at: Gva, hook: &ReturnHook) -> Result<Vec<u8>, OutOfReach> {
        return_hook::assemble_hook(hook, at)
    }

    fn assemble_return_exit(&self, at: Gva, exit: &ReturnExit) -> Result<Vec<u8>, OutOfReach> {
        return_hook::assemble_exit(exit, at)
    }

    fn assemble_return_stub(&self, at: Gva, exit: Gva) -> Result<[u8; 8], OutOfReach> {
        return_hook::assemble_stub(at, exit)
    }

    fn elf_machine(&self) -> u16 {
        elf::EM_X86_64.0
    }

    fn relocations(&self) -> &'static [Relocation] {
        relocations::RELOCATIONS
    }

    fn silence_call(&self, text: &mut [u8], field: usize) -> bool {
        relocations::silence_call(text, field)
    }

    fn is_branch_thunk(&self, name: &str) -> bool {
        name.starts_with("__x86_indirect_thunk_")
    }

    fn payload_return_thunk(&self) -> Option<&'static str> {
        Some("__x86_return_thunk")
    }

    fn return_plainly(&self, text: &mut [u8], field: usize) -> bool {
        relocations::plain_return(text, field)
    }
}
