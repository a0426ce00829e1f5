//! s390x guests.

use std::ops::Range;

use object::elf;

use super::paging::{AddressSpace, TableFormat};
use super::relocation::Relocation;
use super::{
    Access, Aggregates, Arch, ByteOrder, CallingConvention, CpuArea, CpuNumber, CpuStack,
    CpuVariable, FixedArea, Gate, ImageRelocations, ImageWindow, KernelPlace, Logger, OutOfReach,
    PID_BITS, PadBytes, PadLayout, PadSlots, PadState, Pairs, Pattern, Prefix, ReturnCount,
    ReturnExit, ReturnHook, SLOT_LEN, Standing, TaskPaths, TaskStacks, TaskWords, Then, ThunkShape,
    Thunks, Unpaged,
};
use crate::addr::{Gpa, Gva};
use crate::machine::Registers;
use crate::region::{Counters, THUNK_BLOCK_BYTES};

mod arguments;
mod counter;
mod gate;
mod measure;
mod pads;
pub mod paging;
mod relocations;
mod return_hook;
mod returns;
mod stacks;
mod swaps;
mod trampoline;

/// The s390x architecture.
#[derive(Debug)]
pub struct S390X;

/// Where every CPU's lowcore has the CPU's number: `cpu_nr` of struct lowcore
/// (arch/s390/include/asm/lowcore.h), at this distance in 6.1, 6.12 and 7.2. The lowcore is at 0, or
/// with the parameter `relocate_lowcore` (since 6.12) at `LOWCORE_ALT_ADDRESS`, and nothing at 0.
const LOWCORE_CPU_NR: [i32; 2] = [0x3a0, 0x7_0000 + 0x3a0];

/// Where the image of a kernel that was not moved begins: up to 6.9, where addresses are those of
/// memory.
const DEFAULT_BASE: Gva = Gva(0x10_0000);

/// The same since (`CONFIG_KERNEL_IMAGE_BASE`, its default). Such kernels always move themselves, without
/// KASLR to the end of their address space.
const HIGH_BASE: Gva = Gva(0x3ff_e000_0000);

/// `R_390_RELATIVE`; `R_390_64`, `R_390_GLOB_DAT`.
const IMAGE_RELOCATIONS: ImageRelocations = ImageRelocations { relative: 12, named: &[22, 10] };

/// How far the region begins below the kernel's text: the end of the area of modules, which the
/// kernel fills from its beginning.
const BELOW_TEXT: u64 = 64 << 20;

/// ELF Application Binary Interface, s390x Supplement, 1.2.3. Values on the stack of fewer than eight bytes
/// are in the lower ones of their word, as in a register.
static CALLING: CallingConvention = CallingConvention {
    registers: &["r2", "r3", "r4", "r5", "r6"],
    memory_return: Some(0),
    stack: 160,
    aggregates: Aggregates::UpToOneWord,
    returned: 0,
    pairs: Pairs::Never,
};

impl Arch for S390X {
    fn name(&self) -> &'static str {
        "s390x"
    }

    fn byte_order(&self) -> ByteOrder {
        ByteOrder::Big
    }

    fn address_spaces(&self, registers: &Registers) -> Result<Vec<AddressSpace>, Unpaged> {
        let Registers::S390x(registers) = registers else { return Err(Unpaged::Foreign) };
        paging::address_spaces(registers)
    }

    fn kernel_root_symbols(&self) -> &'static [&'static str] {
        // Control register 13 holds the kernel's own root, whatever process the vCPU runs.
        &[]
    }

    fn image_window(&self, _format: &TableFormat) -> ImageWindow {
        ImageWindow {
            range: DEFAULT_BASE..Gva(1 << 53),
            align: paging::SEGMENT,
            text: paging::TEXT,
            least: paging::SEGMENT,
            first_symbol: "_text",
            in_front: 0,
        }
    }

    fn linked_at(&self, _format: &TableFormat, version: (u32, u32)) -> Gva {
        if version < (6, 10) { DEFAULT_BASE } else { HIGH_BASE }
    }

    fn linked_bases(&self) -> Vec<Gva> {
        // Those that run elsewhere are linked here too, and write their addresses anew as they start.
        vec![DEFAULT_BASE]
    }

    fn image_relocations(&self) -> Option<ImageRelocations> {
        Some(IMAGE_RELOCATIONS)
    }

    fn pad_len(&self) -> usize {
        pads::LEN
    }

    fn pad_prefixes(&self) -> &'static [Prefix] {
        &pads::PREFIXES
    }

    fn pad_layouts(&self) -> &'static [PadLayout] {
        &pads::LAYOUTS
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

    fn pad_slot(&self, at: Gva, bytes: &[u8]) -> Option<Gva> {
        pads::slot(at, bytes)
    }

    fn pad_slots(&self) -> Option<PadSlots> {
        Some(PadSlots {
            begin: "__ftrace_hotpatch_trampolines_start",
            end: "__ftrace_hotpatch_trampolines_end",
            len: pads::WHOLE_SLOT,
            code: paging::CODE,
        })
    }

    fn pad_of_slot(&self, slot: &[u8; SLOT_LEN]) -> Option<Gva> {
        pads::of_slot(slot)
    }

    fn encode_branch(&self, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
        pads::encode_call(at, to)
    }

    fn encode_jump(&self, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
        pads::encode_jump(at, to)
    }

    fn region_window(&self, kernel: &KernelPlace, memory: &Range<Gpa>) -> Range<Gva> {
        let begin = kernel.image.start;
        if begin.0 == kernel.phys.0 {
            // Up to 6.9 the kernel runs where it lies in memory, and so does everything it knows of.
            return Gva(memory.start.0)..Gva(memory.end.0);
        }
        begin - BELOW_TEXT.min(begin.0)..begin
    }

    fn region_leaf_size(&self) -> u64 {
        paging::PAGE
    }

    fn region_leaf(&self, _text_leaf: u64, gpa: Gpa, access: Access) -> u64 {
        paging::region_leaf(gpa, access)
    }

    fn is_return_thunk(&self, name: &str) -> bool {
        returns::is_thunk(name)
    }

    fn return_thunk_variable(&self) -> Option<&'static str> {
        None
    }

    fn count_returns(&self, text: &[u8], at: Gva, thunks: &[Gva]) -> ReturnCount {
        returns::count(text, at, thunks)
    }

    fn compared_and_swapped(&self, text: &[u8], at: Gva) -> Vec<Gva> {
        swaps::compared_and_swapped(text, at)
    }

    fn calling_convention(&self) -> &'static CallingConvention {
        &CALLING
    }

    fn cpu_number(&self) -> CpuNumber {
        CpuNumber::Fixed(&LOWCORE_CPU_NR)
    }

    fn records_whole_callers(&self) -> bool {
        true
    }

    fn task_paths(&self) -> TaskPaths {
        // `cpu_nr`, `current_task`, `current_pid` and `preempt_count` of struct lowcore,
        // the same from 5.10 to 7.3 (arch/s390/include/asm/lowcore.h).
        TaskPaths::FixedArea(FixedArea {
            number: LOWCORE_CPU_NR[0],
            current: 0x340,
            pid: 0x39c,
            preempt_count: 0x3a8,
        })
    }

    fn task_words(&self, [_, pid, preempt_count]: [u32; 3]) -> TaskWords {
        // The system mask's bits for interrupts of input and output and for external ones.
        const INTERRUPTS_ON: u32 = 3 << 24;
        TaskWords { pid: pid & PID_BITS, irqs_off: pid & INTERRUPTS_ON == 0, preempt_count }
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

    fn current_task(&self) -> Option<CpuVariable> {
        Some(stacks::CURRENT_TASK)
    }

    fn assemble_logger(&self, at: Gva, logger: &Logger) -> Result<Vec<u8>, OutOfReach> {
        trampoline::assemble(logger, at)
    }

    fn assemble_counter(
        &self,
        at: Gva,
        counters: Counters,
        then: Then,
    ) -> Result<Vec<u8>, OutOfReach> {
        counter::assemble(at, counters, then)
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
        elf::EM_S390.0
    }

    fn relocations(&self) -> &'static [Relocation] {
        relocations::RELOCATIONS
    }

    fn newer_relocation_names(&self) -> &'static [(u32, &'static str)] {
        relocations::NEWER_NAMES
    }

    fn silence_call(&self, text: &mut [u8], field: usize) -> bool {
        relocations::silence_call(text, field)
    }

    fn is_branch_thunk(&self, name: &str) -> bool {
        name.starts_with("__s390_indirect_jump_") || name.starts_with("__s390x_indirect_jump_")
    }
}
