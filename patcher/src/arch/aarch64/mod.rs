//! aarch64 guests, little-endian, with pages of 4 KiB.
//!
//! A processor's instruction cache need not see what is written as data. Whoever writes text for a
//! guest that runs on a real processor must, after writing and before a vCPU goes on, clean the data
//! cache to the point of unification and invalidate the instruction cache for these addresses
//! (`DC CVAU`, `DSB`, `IC IVAU`, `DSB`), as
//! [`Stopped::write_text`](crate::machine::Stopped::write_text) promises; entering the guest again
//! then is the context synchronisation that each vCPU needs. A page that the guest executes for the
//! first time, as the region's, is no exception. QEMU's emulation has no such caches.

use std::ops::Range;

use object::elf;

use super::paging::{AddressSpace, Bits, TableFormat};
use super::relocation::Relocation;
use super::{
    Access, Aggregates, Arch, ByteOrder, CallingConvention, CpuNumber, Gate, ImageRelocations,
    ImageWindow, KernelPlace, Logger, OutOfReach, PID_BITS, PadBytes, PadLayout, PadState, Pairs,
    Pattern, Prefix, ReturnCount, ReturnExit, ReturnHook, Standing, TaskPaths, TaskStacks,
    TaskWords, Then, ThunkShape, Thunks, Unpaged,
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
mod stacks;
mod swaps;
mod trampoline;

/// The aarch64 architecture.
#[derive(Debug)]
pub struct Aarch64;

/// What an image is aligned to in memory (`SEGMENT_ALIGN`), and so the size of the header for boot
/// loaders in front of `_stext`, which kernels from 5.11 on do not map, or not executable.
const IMAGE_ALIGN: u64 = 64 << 10;

/// Kernel text in one piece of memory as long as this is the image's: modules are put together from
/// single pages.
const LEAST_TEXT: u64 = 1 << 20;

/// Where a kernel that was not moved begins, by its distance from the end of the linear map and the
/// first version that has it there (`KIMAGE_VADDR`, arch/arm64/include/asm/memory.h).
const LINKED_AT: [((u32, u32), u64); 3] =
    [((0, 0), 0x1000_0000), ((5, 17), 0x800_0000), ((6, 5), 0x8000_0000)];

/// How many bits of addresses kernels may be built for (`VA_BITS_MIN`).
const ADDRESS_BITS: [u32; 5] = [36, 39, 42, 47, 48];

/// `R_AARCH64_RELATIVE`; `R_AARCH64_ABS64`, `R_AARCH64_GLOB_DAT`.
const IMAGE_RELOCATIONS: ImageRelocations =
    ImageRelocations { relative: 1027, named: &[257, 1025] };

/// A kernel that was moved lies farther than this from the end of the linear map.
const UNMOVED: u64 = 4 << 30;

/// Procedure Call Standard for the Arm 64-bit Architecture (AAPCS64), 6.8.2.
static CALLING: CallingConvention = CallingConvention {
    registers: &["x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7"],
    memory_return: None,
    stack: 0,
    aggregates: Aggregates::UpToTwoWords,
    returned: 16,
    pairs: Pairs::TakeAll,
};

impl Arch for Aarch64 {
    fn name(&self) -> &'static str {
        "aarch64"
    }

    fn byte_order(&self) -> ByteOrder {
        ByteOrder::Little
    }

    fn address_spaces(&self, registers: &Registers) -> Result<Vec<AddressSpace>, Unpaged> {
        let Registers::Aarch64(registers) = registers else { return Err(Unpaged::Foreign) };
        paging::address_spaces(registers)
    }

    fn kernel_root_symbols(&self) -> &'static [&'static str] {
        &["swapper_pg_dir"]
    }

    fn is_kernel_root(&self, root: Gpa, read_only_data: &Range<Gpa>) -> Option<bool> {
        // The tables with which a kernel boots lie at the image's end.
        Some(read_only_data.contains(&root))
    }

    fn image_window(&self, format: &TableFormat) -> ImageWindow {
        ImageWindow {
            range: Gva(paging::page_end(format))..Gva(!(IMAGE_ALIGN - 1)),
            align: IMAGE_ALIGN,
            text: Bits { mask: paging::KERNEL_NO_EXECUTE, value: 0 },
            least: LEAST_TEXT,
            first_symbol: "_stext",
            in_front: IMAGE_ALIGN,
        }
    }

    fn linked_at(&self, format: &TableFormat, version: (u32, u32)) -> Gva {
        let places = LINKED_AT.iter().rev();
        let above = places.clone().find(|(since, _)| *since <= version);
        Gva(paging::page_end(format)) + above.map_or(0, |(_, above)| *above) + IMAGE_ALIGN
    }

    fn linked_bases(&self) -> Vec<Gva> {
        let places = LINKED_AT.map(|(_, above)| above);
        ADDRESS_BITS
            .iter()
            .flat_map(|bits| places.map(|above| Gva(u64::MAX << (bits - 1)) + above))
            .collect()
    }

    fn image_relocations(&self) -> Option<ImageRelocations> {
        Some(IMAGE_RELOCATIONS)
    }

    fn pad_lead_in(&self) -> Option<u64> {
        Some(pads::LEAD_IN)
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
        // Kernels with pads have none: the compiler leaves no-operations.
        "_mcount"
    }

    fn pad_state(&self, at: Gva, bytes: &[u8], _hook: Option<Gva>) -> PadState {
        pads::state(at, bytes)
    }

    fn encode_branch(&self, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
        pads::encode_call(at, to)
    }

    fn encode_jump(&self, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach> {
        pads::encode_jump(at, to)
    }

    fn region_window(&self, kernel: &KernelPlace, _memory: &Range<Gpa>) -> Range<Gva> {
        // Everything from here on reaches the image's end, and everything up to there its beginning.
        let image = &kernel.image;
        let lowest = image.end - pads::REACH;
        let highest = image.start.checked_add(pads::REACH).unwrap_or(Gva(u64::MAX));
        // The kernel takes the lowest addresses first. In one that was moved, modules begin at a
        // random place below the image's beginning, and all else far away: the farther above, the
        // better. In one that was not, modules end where the image begins, and all else begins where
        // it ends: the farther up below it, the better.
        let linear_end = Gva(paging::page_end(kernel.format));
        if image.start < linear_end + UNMOVED {
            lowest..image.start.align_down(paging::BLOCK_SIZE)
        } else {
            lowest..highest
        }
    }

    fn region_leaf_size(&self) -> u64 {
        paging::BLOCK_SIZE
    }

    fn region_leaf(&self, text_leaf: u64, gpa: Gpa, access: Access) -> u64 {
        paging::region_leaf(text_leaf, gpa, access)
    }

    fn is_return_thunk(&self, _name: &str) -> bool {
        false
    }

    fn return_thunk_variable(&self) -> Option<&'static str> {
        None
    }

    fn count_returns(&self, text: &[u8], _at: Gva, thunks: &[Gva]) -> ReturnCount {
        // ret, ret with its address authenticated by either key
        let returns = [0xd65f_03c0_u32, 0xd65f_0bff, 0xd65f_0fff].map(u32::to_le_bytes);
        let plain = text.chunks_exact(4).filter(|word| returns.iter().any(|ret| ret == word));
        ReturnCount { plain: plain.count(), through: vec![0; thunks.len()] }
    }

    fn compared_and_swapped(&self, text: &[u8], at: Gva) -> Vec<Gva> {
        swaps::compared_and_swapped(text, at)
    }

    fn kernel_addresses(&self) -> Option<Gva> {
        // Where the addresses of TTBR1 begin, as wide as they may be.
        Some(Gva(0xfff0_0000_0000_0000))
    }

    fn calling_convention(&self) -> &'static CallingConvention {
        &CALLING
    }

    fn cpu_number(&self) -> CpuNumber {
        // 5.10 to 5.15 and since (include/linux/sched.h, arch/arm64/include/asm/thread_info.h).
        CpuNumber::CurrentTask(&[
            &[("task_struct", "cpu")],
            &[("task_struct", "thread_info"), ("thread_info", "cpu")],
        ])
    }

    fn task_paths(&self) -> TaskPaths {
        TaskPaths::CurrentTask(&[("task_struct", "thread_info"), ("thread_info", "preempt_count")])
    }

    fn task_words(&self, [_, pid, preempt_count]: [u32; 3]) -> TaskWords {
        // DAIF.I, shifted by 24.
        const INTERRUPTS_OFF: u32 = 1 << 31;
        TaskWords { pid: pid & PID_BITS, irqs_off: pid & INTERRUPTS_OFF != 0, preempt_count }
    }

    fn standing(&self, registers: &Registers) -> Standing {
        stacks::standing(registers)
    }

    fn task_stacks(&self) -> TaskStacks {
        stacks::TASK
    }

    fn code_address(&self, format: &TableFormat, word: u64) -> u64 {
        stacks::code_address(format, word)
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
        elf::EM_AARCH64.0
    }

    fn relocations(&self) -> &'static [Relocation] {
        relocations::RELOCATIONS
    }

    fn silence_call(&self, text: &mut [u8], field: usize) -> bool {
        relocations::silence_call(text, field)
    }
}
