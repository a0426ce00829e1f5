//! Everything that differs between the guests' architectures, behind one trait.
//!
//! An [`Arch`] answers with data where data will do (page-table formats, prefixes, symbol names)
//! and with code where it must (instruction encodings). The modules above it, from
//! [`kernel`](crate::kernel) on, contain no address, bit or opcode of any one architecture.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};

use object::elf;

use crate::addr::{Gpa, Gva};
use crate::machine::Registers;
use crate::region::{
    CONTINUATION_WORDS, Counters, Histograms, MAX_CONTINUATIONS, RETURN_STUB_BYTES, ReturnPool,
    RingLayout, THUNK_BLOCK_BYTES,
};

pub mod aarch64;
mod calling;
pub mod gate;
mod layout;
#[cfg(test)]
mod listing;
pub mod paging;
pub mod relocation;
pub mod s390x;
mod stacks;
mod stub;
pub mod x86_64;

pub use calling::{Aggregates, CallingConvention, Pairs, Place, Shape, ShapeClass};
pub use gate::{CommPlace, Gate, GatePlaces};
pub(crate) use layout::is_but_for_breakpoint;
pub use layout::{Form, PadLayout, Pattern, read_pad, text_len};
use paging::{AddressSpace, Bits, TableFormat};
use relocation::Relocation;
pub use stacks::{CpuArea, CpuStack, CpuVariable, Extent, Standing, TaskStacks};
pub use stub::{assemble_returns, assemble_stub, stub_ip};

/// One guest architecture.
pub trait Arch: fmt::Debug + Send + Sync {
    /// The name that the kernel's `uname -m` prints.
    fn name(&self) -> &'static str;

    /// How the guest's integers lie in memory.
    fn byte_order(&self) -> ByteOrder;

    /// The address spaces in which a vCPU with these registers may see the kernel, best guess
    /// first.
    ///
    /// More than one where the registers leave a choice: on x86_64 a vCPU under page-table
    /// isolation may stand on the user half of its root table.
    ///
    /// # Errors
    /// Why there is none yet, for a vCPU that has not come that far in its boot.
    fn address_spaces(&self, registers: &Registers) -> Result<Vec<AddressSpace>, Unpaged>;

    /// The symbols that name the kernel's own root table, best first; none where a vCPU's registers
    /// hold the kernel's root at all times.
    fn kernel_root_symbols(&self) -> &'static [&'static str];

    /// Whether `root`, under which a vCPU has a kernel, can be the kernel's own for good, although the
    /// kernel's table of symbols has none of [`kernel_root_symbols`](Arch::kernel_root_symbols) (no
    /// CONFIG_KALLSYMS_ALL); `None` where nothing but the symbol tells. `read_only_data` is the memory
    /// between the kernel's text and its init text.
    fn is_kernel_root(&self, _root: Gpa, _read_only_data: &Range<Gpa>) -> Option<bool> {
        None
    }

    /// Where the kernel's image may be in address spaces of this format, and how it is told.
    fn image_window(&self, format: &TableFormat) -> ImageWindow;

    /// Where the image of a kernel of this version begins if it was not moved, in address spaces of
    /// this format.
    fn linked_at(&self, format: &TableFormat, version: (u32, u32)) -> Gva;

    /// Where images of kernels that were not moved may begin, of any version and in any format.
    fn linked_bases(&self) -> Vec<Gva>;

    /// The relocations by which linkers leave addresses in an image to the kernel's own start, if they
    /// do that here.
    fn image_relocations(&self) -> Option<ImageRelocations> {
        None
    }

    /// The length of the one instruction of a pad that is ever changed, in bytes.
    fn pad_len(&self) -> usize;

    /// What may stand between a function's first byte and its pad; the first of them is nothing.
    fn pad_prefixes(&self) -> &'static [Prefix];

    /// How pads may be laid out around the instruction that changes. One that fits none of them is
    /// [`PadLayout::SINGLE`], and its instruction says everything.
    fn pad_layouts(&self) -> &'static [PadLayout] {
        &[]
    }

    /// How many bytes in front of a function may belong to its pad, for what the guest's tracing keeps
    /// there; a linker then lists the pad where these begin.
    fn pad_lead_in(&self) -> Option<u64> {
        None
    }

    /// What a breakpoint, as a probe of the guest's sets one, puts in the place of an instruction's
    /// first bytes; nothing if there is nothing of that kind.
    fn breakpoint(&self) -> Pattern {
        Pattern::EMPTY
    }

    /// The symbol that the compiler makes a pad call; the kernel replaces these calls as it boots.
    fn compiler_hook_symbol(&self) -> &'static str;

    /// What the bytes of the pad at `at` say. `hook` is the address of
    /// [`compiler_hook_symbol`](Arch::compiler_hook_symbol) where it is known.
    fn pad_state(&self, at: Gva, bytes: &[u8], hook: Option<Gva>) -> PadState;

    /// Where the pad at `at`, which is idle, keeps the code that the guest's own tracing would enter;
    /// `None` for a pad without any.
    fn pad_slot(&self, _at: Gva, _bytes: &[u8]) -> Option<Gva> {
        None
    }

    /// The table of the slots that the kernel gives its pads as it boots, if it has any.
    fn pad_slots(&self) -> Option<PadSlots> {
        None
    }

    /// The pad that `slot`, the first [`SLOT_LEN`] bytes of one, was given to; `None` if it was not given
    /// to any. Bytes that only look like a pad have no slot that says so.
    fn pad_of_slot(&self, _slot: &[u8; SLOT_LEN]) -> Option<Gva> {
        None
    }

    /// The bytes that make the pad at `at` branch to `to` so that the code there can tell which
    /// pad it came from.
    ///
    /// # Errors
    /// The target is farther than the instruction reaches.
    fn encode_branch(&self, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach>;

    /// The bytes that make the pad at `at` jump to the function at `to`, which is called in place of
    /// the pad's own: it finds stack, arguments and return address as its caller has left them.
    ///
    /// # Errors
    /// The target is farther than the instruction reaches.
    fn encode_jump(&self, at: Gva, to: Gva) -> Result<PadBytes, OutOfReach>;

    /// The bytes that make a vCPU leave the guest at the instruction `original`, whose length stays; `None`
    /// where no engine could tell us of that, or the instruction is too short.
    fn encode_trap(&self, _original: &[u8]) -> Option<PadBytes> {
        None
    }

    /// How long the instruction is that `text` begins with, if it does the same wherever it is executed:
    /// it neither depends on its address nor accesses memory that may not be there.
    fn movable(&self, _text: &[u8]) -> Option<usize> {
        None
    }

    /// Where the region, which is `memory`, may be mapped for such a kernel, so that every pad of
    /// its image reaches all of it.
    fn region_window(&self, kernel: &KernelPlace, memory: &Range<Gpa>) -> Range<Gva>;

    /// The size and alignment of the leaves that map the region, in bytes.
    fn region_leaf_size(&self) -> u64;

    /// The page-table entry that maps the region's memory at `gpa`, made like `text_leaf`, the
    /// leaf that maps the kernel's text.
    fn region_leaf(&self, text_leaf: u64, gpa: Gpa, access: Access) -> u64;

    /// Whether the symbol `name` is one of the thunks that a kernel's functions may return through.
    fn is_return_thunk(&self, name: &str) -> bool;

    /// The symbol of the variable that holds the address of the return thunk in use, if there is
    /// one on this architecture.
    fn return_thunk_variable(&self) -> Option<&'static str>;

    /// Counts, in kernel text `text` that begins at `at`, the instructions that return plainly and
    /// those that return through each of `thunks`.
    fn count_returns(&self, text: &[u8], at: Gva, thunks: &[Gva]) -> ReturnCount;

    /// The variables of 32 bits that `text`, which is at `at`, compares and swaps, as far as it makes their
    /// addresses itself. Branches are not followed, so others may be among them.
    fn compared_and_swapped(&self, _text: &[u8], _at: Gva) -> Vec<Gva> {
        Vec::new()
    }

    /// Where the code of a trampoline finds the number of the CPU that runs it.
    fn cpu_number(&self) -> CpuNumber;

    /// Whether a record holds the high half of its caller's address too: callers may be so far from
    /// the kernel's image, in modules, that the low half does not tell them.
    fn records_whole_callers(&self) -> bool {
        false
    }

    /// Where the code of a trampoline finds the task that it runs in.
    fn task_paths(&self) -> TaskPaths;

    /// What the words of a record tell of the task: the word behind the caller's low half, and the two
    /// behind that.
    fn task_words(&self, words: [u32; 3]) -> TaskWords;

    /// From where on addresses are the kernel's and never a process's; `None` where they have no such order,
    /// as each has all addresses for itself.
    fn kernel_addresses(&self) -> Option<Gva> {
        None
    }

    /// Where functions are given their arguments.
    fn calling_convention(&self) -> &'static CallingConvention;

    /// What a vCPU with these registers does, and on which stack.
    fn standing(&self, registers: &Registers) -> Standing;

    /// What the kernel keeps of a task that is on no CPU.
    fn task_stacks(&self) -> TaskStacks;

    /// Where the variables of a vCPU with these registers are, if it can be told.
    fn cpu_area(&self, _registers: &Registers) -> Option<CpuArea> {
        None
    }

    /// The stacks that a CPU has beside its tasks', innermost first: those for interrupts and
    /// exceptions. One that is not listed is known by what is mapped around the stack pointer.
    fn cpu_stacks(&self) -> &'static [CpuStack] {
        &[]
    }

    /// The variable of a CPU that holds the address of the task that it runs, where types do not tell
    /// of a task whether it is on a CPU.
    fn current_task(&self) -> Option<CpuVariable> {
        None
    }

    /// The address of code that `word`, found on a stack, stands for: processors sign the addresses
    /// to which functions return.
    fn code_address(&self, _format: &TableFormat, word: u64) -> u64 {
        word
    }

    /// The code of a logging trampoline, to be placed at `at`. It preserves every register and flag.
    ///
    /// # Errors
    /// The rings, the return thunk or the next piece of code are farther from `at` than an instruction
    /// reaches.
    fn assemble_logger(&self, at: Gva, logger: &Logger) -> Result<Vec<u8>, OutOfReach>;

    /// The piece of code that counts the calls of functions that come by way of their thunks, to be placed
    /// at `at`. It preserves every register and flag.
    ///
    /// # Errors
    /// The counters or what is executed behind it are farther from `at` than an instruction reaches.
    fn assemble_counter(
        &self,
        at: Gva,
        counters: Counters,
        then: Then,
    ) -> Result<Vec<u8>, OutOfReach>;

    /// The code of a gate, to be placed at `at`. It preserves every register and flag.
    ///
    /// # Errors
    /// The cells, what is asked of the task or what is executed behind it are farther from `at` than an
    /// instruction reaches.
    fn assemble_gate(&self, at: Gva, gate: &Gate<'_>) -> Result<Vec<u8>, OutOfReach>;

    /// How thunks lie in a block.
    fn thunk_shape(&self) -> ThunkShape;

    /// A block of thunks, to be placed at `at`: each is entered as the first piece of a chain is, and
    /// leads to the code that counts, or to a gate.
    ///
    /// # Errors
    /// The counters, or that code, are farther away than an instruction reaches.
    fn assemble_thunks(
        &self,
        at: Gva,
        thunks: &Thunks,
    ) -> Result<[u8; THUNK_BLOCK_BYTES as usize], OutOfReach>;

    /// The piece of code that takes the return of the function in front of which it is executed, to be
    /// placed at `at`. It preserves every register and flag but for the address to return to.
    ///
    /// # Errors
    /// The pool of slots or what is executed behind it is farther from `at` than an instruction reaches.
    fn assemble_return_hook(&self, at: Gva, hook: &ReturnHook) -> Result<Vec<u8>, OutOfReach>;

    /// The code behind all stubs, to be placed at `at`. It preserves every register and flag that the
    /// function's caller may look at.
    ///
    /// # Errors
    /// The pool of slots or the rings are farther from `at` than an instruction reaches.
    fn assemble_return_exit(&self, at: Gva, exit: &ReturnExit) -> Result<Vec<u8>, OutOfReach>;

    /// The stub at `at`, which functions return to, and which leads to the code at `exit`.
    ///
    /// # Errors
    /// That is farther away than the instruction reaches.
    fn assemble_return_stub(
        &self,
        at: Gva,
        exit: Gva,
    ) -> Result<[u8; RETURN_STUB_BYTES as usize], OutOfReach>;

    /// The number by which ELF files name the architecture (`e_machine`).
    fn elf_machine(&self) -> u16;

    /// The relocations that payloads may have.
    fn relocations(&self) -> &'static [Relocation];

    /// The names of relocations that the library for ELF files does not know yet.
    fn newer_relocation_names(&self) -> &'static [(u32, &'static str)] {
        &[]
    }

    /// The symbols that compilers make functions call as they begin, for the sake of tracing.
    fn compiler_hooks(&self) -> &'static [&'static str] {
        &["__fentry__", "_mcount", "mcount"]
    }

    /// Makes the call in a payload's `text` whose relocation is at `field` a no-operation; `false`, and
    /// nothing changed, if there is no call.
    fn silence_call(&self, text: &mut [u8], field: usize) -> bool;

    /// Whether `name` is a thunk through which code branches to computed addresses, so as not to be
    /// led astray by speculation. A guest has those that its processor needs.
    fn is_branch_thunk(&self, _name: &str) -> bool {
        false
    }

    /// The symbol of the thunk that payloads return through, if this architecture has such a one.
    fn payload_return_thunk(&self) -> Option<&'static str> {
        None
    }

    /// Makes the jump in a payload's `text` whose relocation is at `field` a plain return; `false`, and
    /// nothing changed, if there is no jump.
    fn return_plainly(&self, _text: &mut [u8], _field: usize) -> bool {
        false
    }
}

impl dyn Arch {
    /// The name of a kind of relocation; its number if it has none.
    #[must_use]
    pub fn relocation_name(&self, kind: u32) -> String {
        let names = elf::machine_names(elf::Machine(self.elf_machine())).r;
        let newer = self.newer_relocation_names().iter().find(|(newer, _)| *newer == kind);
        let name = names.name(elf::RelocationType(kind)).or(newer.map(|(_, name)| *name));
        name.map_or_else(|| kind.to_string(), str::to_owned)
    }
}

/// All architectures whose guests can be looked at.
pub const ALL: [&dyn Arch; 3] = [&x86_64::X86_64, &s390x::S390X, &aarch64::Aarch64];

/// The architecture that these registers belong to, if its kernels can be looked at.
#[must_use]
pub fn of(registers: &Registers) -> Option<&'static dyn Arch> {
    match registers {
        Registers::X86_64(_) => Some(&x86_64::X86_64),
        Registers::S390x(_) => Some(&s390x::S390X),
        Registers::Aarch64(_) => Some(&aarch64::Aarch64),
    }
}

/// How integers lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByteOrder {
    /// Least significant byte first.
    Little,
    /// Most significant byte first.
    Big,
}

impl ByteOrder {
    /// The 16-bit integer in these bytes.
    #[must_use]
    pub fn u16(self, bytes: [u8; 2]) -> u16 {
        match self {
            ByteOrder::Little => u16::from_le_bytes(bytes),
            ByteOrder::Big => u16::from_be_bytes(bytes),
        }
    }

    /// The 32-bit integer in these bytes.
    #[must_use]
    pub fn u32(self, bytes: [u8; 4]) -> u32 {
        match self {
            ByteOrder::Little => u32::from_le_bytes(bytes),
            ByteOrder::Big => u32::from_be_bytes(bytes),
        }
    }

    /// The 64-bit integer in these bytes.
    #[must_use]
    pub fn u64(self, bytes: [u8; 8]) -> u64 {
        match self {
            ByteOrder::Little => u64::from_le_bytes(bytes),
            ByteOrder::Big => u64::from_be_bytes(bytes),
        }
    }

    /// The bytes of a 16-bit integer.
    #[must_use]
    pub fn bytes_of_u16(self, value: u16) -> [u8; 2] {
        match self {
            ByteOrder::Little => value.to_le_bytes(),
            ByteOrder::Big => value.to_be_bytes(),
        }
    }

    /// The bytes of a 32-bit integer.
    #[must_use]
    pub fn bytes_of_u32(self, value: u32) -> [u8; 4] {
        match self {
            ByteOrder::Little => value.to_le_bytes(),
            ByteOrder::Big => value.to_be_bytes(),
        }
    }

    /// The bytes of a 64-bit integer.
    #[must_use]
    pub fn bytes(self, value: u64) -> [u8; 8] {
        match self {
            ByteOrder::Little => value.to_le_bytes(),
            ByteOrder::Big => value.to_be_bytes(),
        }
    }
}

/// Where a kernel's image may be mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageWindow {
    /// The addresses that its first byte may have.
    pub range: Range<Gva>,
    /// What that address is a multiple of, in bytes; likewise its guest-physical address.
    pub align: u64,
    /// What a leaf holds that may map text: any, where nothing else lies in the window.
    pub text: Bits,
    /// How many bytes of text there are at least in one piece of memory.
    pub least: u64,
    /// The symbol of its first byte.
    pub first_symbol: &'static str,
    /// How many bytes in front of that symbol may be mapped as text, at most.
    pub in_front: u64,
}

/// Relocations of a position-independent image, by their numbers in the architecture's ELF supplement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageRelocations {
    /// The addend is the address (`R_*_RELATIVE`).
    pub relative: u32,
    /// A symbol's value and the addend are (`R_*_64`, `R_*_GLOB_DAT`).
    pub named: &'static [u32],
}

/// Where a kernel is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelPlace {
    /// The addresses of its image.
    pub image: Range<Gva>,
    /// Where the image is in guest-physical memory.
    pub phys: Gpa,
    /// The format of its page tables.
    pub format: &'static TableFormat,
    /// Whether it was built to be moved (KASLR), which decides on x86_64 where modules begin.
    pub relocatable: bool,
}

/// A vCPU whose registers show no address space of a kernel yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unpaged {
    /// Paging is off.
    #[error("paging is off")]
    PagingOff,
    /// Paging is on, but not in the mode that 64-bit kernels use.
    #[error("the vCPU is not in 64-bit mode yet")]
    Not64Bit,
    /// The kernel runs as a hypervisor does, with registers of another kind.
    #[error(
        "the vCPU is in EL2, where a kernel runs that is a host of virtual machines itself: only \
         kernels in EL1 are looked at (in QEMU, those of a machine without virtualization=on)"
    )]
    Hypervisor,
    /// The kernel's pages have a size that is not supported.
    #[error("the kernel's pages have {kib} KiB; only kernels with pages of 4 KiB are supported")]
    Granule {
        /// Size of a page in KiB.
        kib: u32,
    },
    /// These are the registers of another architecture.
    #[error("the registers belong to another architecture")]
    Foreign,
}

impl Unpaged {
    /// Whether the guest's kernel has come as far as it will, and will never be one to look at.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Unpaged::Granule { .. })
    }
}

/// Where a kernel has the slots of its pads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PadSlots {
    /// The symbol of the first slot.
    pub begin: &'static str,
    /// The symbol behind the last slot.
    pub end: &'static str,
    /// How long one is, in bytes.
    pub len: u64,
    /// What leaves hold that map code, also what may still be written: the text that is freed when the
    /// kernel has booted is no code any more.
    pub code: Bits,
}

/// How many bytes of a pad's slot tell whose it is.
pub const SLOT_LEN: usize = 16;

/// The most bytes that [`PadBytes`] holds.
pub const MAX_PAD: usize = 8;

/// The bytes of the instruction in a pad.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PadBytes {
    len: u8,
    bytes: [u8; MAX_PAD],
}

impl PadBytes {
    /// Holds a copy of `bytes`.
    ///
    /// # Panics
    /// If there are more than [`MAX_PAD`]: pads have the length their [`Arch`] gives, never one
    /// that a guest chose.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        let mut held = [0; MAX_PAD];
        held[..bytes.len()].copy_from_slice(bytes);
        // At most MAX_PAD, or the line above would have panicked.
        Self { len: bytes.len() as u8, bytes: held }
    }

    /// Holds the first `len` bytes, at most [`MAX_PAD`], of a little-endian word.
    #[must_use]
    pub(crate) fn of_word(word: u64, len: usize) -> Self {
        let len = len.min(MAX_PAD);
        Self { len: len as u8, bytes: (word & Self::mask(len)).to_le_bytes() }
    }

    /// The bytes as a little-endian word, with zeros behind them.
    #[must_use]
    pub(crate) fn word(&self) -> u64 {
        u64::from_le_bytes(self.bytes) & Self::mask(self.len.into())
    }

    /// What leaves the first `len` bytes of a little-endian word, at most [`MAX_PAD`].
    #[must_use]
    pub(crate) fn mask(len: usize) -> u64 {
        u64::MAX.checked_shr(64 - 8 * len.min(MAX_PAD) as u32).unwrap_or(0)
    }
}

impl Deref for PadBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl DerefMut for PadBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Display for PadBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.iter().enumerate() {
            let space = if i == 0 { "" } else { " " };
            write!(f, "{space}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for PadBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{self}]")
    }
}

/// What may stand between a function's first byte and its pad.
#[derive(Debug, PartialEq, Eq)]
pub struct Prefix {
    /// What it is called in messages and lists.
    pub name: &'static str,
    /// Its bytes; none for a pad that is the function's first instruction.
    pub bytes: &'static [u8],
    /// Whether it signs the return address: no other function can be entered behind it, since that one
    /// would sign the address once more and take off one signature only.
    pub signs: bool,
}

/// What the bytes of a pad say about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PadState {
    /// A no-operation that the guest put there: nobody traces the function.
    Idle,
    /// The guest's own tracing branches away from here.
    GuestEnabled {
        /// Where to.
        target: Gva,
    },
    /// The guest's own tracing is entered from here, by an address that it keeps elsewhere.
    GuestEnabledElsewhere,
    /// A breakpoint stands on the pad: the guest probes the function, or is about to change the pad.
    Changing,
    /// No-operations shorter than a branch: a task may stand between two of them, so that no one
    /// instruction can take their place.
    Several,
    /// Still the compiler's own call: the kernel has not come to this pad in its boot.
    NotYet,
    /// Nothing that a pad is known to hold.
    Unknown,
}

/// A branch target is farther away than the instruction reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a branch at {from} cannot reach {to}: it reaches {reach:#x} bytes either way")]
pub struct OutOfReach {
    /// Address of the branch.
    pub from: Gva,
    /// Where it was to go.
    pub to: Gva,
    /// How far it could, in bytes.
    pub reach: u64,
}

/// What the guest may do with a part of the region. Nothing is both writable and executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and execute: trampolines, payload text.
    Code,
    /// Read: constants of payloads.
    Constants,
    /// Read and write: data of payloads, rings.
    Data,
}

/// How a guest's own functions return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReturnForm {
    /// A plain return instruction.
    Plain,
    /// A jump to the return thunk that the guest chose for its CPU (retbleed, SRSO, call depth).
    Thunk(Gva),
}

/// What a logging trampoline is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Logger {
    /// Where a CPU finds its own number, 32 bits, by its distance from what [`CpuNumber`] says.
    pub cpu_number: i32,
    /// Where the rings are.
    pub rings: RingLayout,
    /// Whether the clock is read; records carry time 0 if not.
    pub clock: bool,
    /// Where it finds what it records of the task; what is not known is recorded as 0.
    pub task: TaskPlaces,
    /// The arguments that it records as well.
    pub arguments: ArgumentWords,
    /// What is executed behind it.
    pub then: Then,
}

/// Which words of a call's arguments are recorded: the first of the registers, and behind them the first of
/// the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ArgumentWords {
    registers: u8,
    stack: u8,
}

impl ArgumentWords {
    /// None.
    pub const NONE: Self = Self { registers: 0, stack: 0 };

    /// As many registers, of those that a convention has, and then words of the stack as a record holds.
    #[must_use]
    pub fn new(convention: &CallingConvention, registers: usize, stack: usize) -> Self {
        let most = CONTINUATION_WORDS * MAX_CONTINUATIONS;
        let registers = registers.min(convention.registers.len()).min(most);
        // Neither is more than a record holds.
        Self { registers: registers as u8, stack: stack.min(most - registers) as u8 }
    }

    /// How many registers.
    #[must_use]
    pub fn registers(self) -> usize {
        self.registers.into()
    }

    /// How many words of the stack.
    #[must_use]
    pub fn stack(self) -> usize {
        self.stack.into()
    }

    /// How many slots of a ring they take.
    #[must_use]
    pub fn slots(self) -> usize {
        (self.registers() + self.stack()).div_ceil(CONTINUATION_WORDS)
    }

    /// Where the words are that each of the slots takes.
    pub(crate) fn by_slot(self) -> Vec<Vec<ArgumentWord>> {
        let registers = (0..self.registers).map(ArgumentWord::Register);
        let words: Vec<_> = registers.chain((0..self.stack).map(ArgumentWord::Stack)).collect();
        words.chunks(CONTINUATION_WORDS).map(<[_]>::to_vec).collect()
    }
}

/// Where a word of a call's arguments is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArgumentWord {
    /// In that register of the convention's.
    Register(u8),
    /// On the stack, that far behind the first one there, in words.
    Stack(u8),
}

/// Where the words of a slot are that is there for more of a record, in bytes.
pub(crate) const CONTINUATION_FIELDS: [u8; CONTINUATION_WORDS] = [0, 12, 20];

/// How thunks lie in a block: one behind the other from its beginning on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThunkShape {
    /// Bytes of each.
    pub bytes: u64,
    /// How many a block has.
    pub in_block: u32,
}

/// What a block of thunks is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thunks {
    /// Where the counters are.
    pub counters: Counters,
    /// The counter of the first thunk.
    pub first: u32,
    /// How far the others' counters are from each other.
    pub stride: u32,
    /// Where the code is that they lead to: the code that counts ([`Arch::assemble_counter`]), or a gate
    /// ([`Arch::assemble_gate`]).
    pub to: Gva,
}

/// What a piece of code that takes the return of a function is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReturnHook {
    /// As in a [`Logger`].
    pub cpu_number: i32,
    /// Where slots come from.
    pub pool: ReturnPool,
    /// Whether the slot tells the time of the call.
    pub clock: bool,
    /// What is to be done at the return: [`RECORD_RETURN`](crate::region::RECORD_RETURN), and
    /// [`MEASURE_CALL`](crate::region::MEASURE_CALL) with the number of a histogram.
    pub duties: u32,
    /// What is executed behind it.
    pub then: Then,
}

/// What the code that functions return to, by way of their stubs, is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReturnExit {
    /// As in a [`Logger`].
    pub cpu_number: i32,
    /// Where the rings are.
    pub rings: RingLayout,
    /// Whether the clock is read; records carry time 0 if not.
    pub clock: bool,
    /// Where it finds what it records of the task; what is not known is recorded as 0.
    pub task: TaskPlaces,
    /// Where the slots are.
    pub pool: ReturnPool,
    /// Where the histograms are.
    pub histograms: Histograms,
    /// How the guest's functions return.
    pub returns: ReturnForm,
}

/// What is executed behind a piece of code that a pad leads to. Registers and stack are then as they
/// were when the piece was entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Then {
    /// The function whose pad it is.
    GoOn {
        /// How far behind the pad's instruction that goes on, in bytes ([`PadLayout::resume`]); 0 on an
        /// architecture that has no other.
        behind: u16,
        /// How the guest's functions return.
        form: ReturnForm,
    },
    /// Another piece of code, entered as the first one was.
    Next(Gva),
}

/// Where the code of a trampoline finds what it records of the task that calls, by distances from what
/// [`TaskPaths`] says; `None` for what is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TaskPlaces {
    /// The task's number, 32 bits.
    pub pid: Option<PidPlace>,
    /// The count that says how often preemption is disabled and what interrupts are served.
    pub preempt_count: Option<i32>,
}

/// Where the number of the current task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PidPlace {
    /// At the same address on every CPU.
    Fixed(i32),
    /// In the current task.
    InTask {
        /// Where a CPU finds the address of its current task; not looked at on an architecture that
        /// has it in a register.
        current: i32,
        /// How far from there the number is, in bytes.
        pid: i32,
    },
}

/// What the words of a record say, beside its time and its function, that are told of the task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskWords {
    /// The task's number.
    pub pid: u32,
    /// Whether interrupts were off.
    pub irqs_off: bool,
    /// The kernel's count (include/linux/preempt.h), bit 31 of which is clear if the task is to leave
    /// the CPU, where the kernel keeps that there.
    pub preempt_count: u32,
}

/// The bits of a record's word that hold the task's number, which is less than 2²²
/// (`PID_MAX_LIMIT`, include/linux/threads.h).
pub(crate) const PID_BITS: u32 = 0x00ff_ffff;

/// How many returns of each form were seen in a piece of text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReturnCount {
    /// Plain return instructions.
    pub plain: usize,
    /// Branches to each of the thunks asked about, in their order.
    pub through: Vec<usize>,
}

/// Where the code of a trampoline finds the number of the CPU that runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuNumber {
    /// At the same address on every CPU: the first of these that the kernel maps.
    Fixed(&'static [i32]),
    /// In a per-CPU variable, by its distance from the base of the CPU's area; most recent kernels
    /// first.
    PerCpu(&'static [PerCpuVariable]),
    /// In the current task. Each entry leads from the task to the number: through fields of the
    /// kernel's types, by type and name. The entry counts whose fields there all are.
    CurrentTask(&'static [&'static [(&'static str, &'static str)]]),
}

/// Where the code of a trampoline finds the task that it runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskPaths {
    /// In per-CPU variables, most recent kernels first: the address of the current task, and the count.
    PerCpu {
        /// The address of the current task.
        current: &'static [PerCpuVariable],
        /// The count.
        preempt_count: &'static [PerCpuVariable],
    },
    /// Where the CPU's number is, at the same address on every CPU.
    FixedArea(FixedArea),
    /// In the current task, whose address is in a register: the way to the count, from `task_struct` on.
    CurrentTask(&'static [(&'static str, &'static str)]),
}

/// What a CPU has at addresses that are the same on every CPU, by distances from the area's beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FixedArea {
    /// Its number, 32 bits.
    pub number: i32,
    /// The address of its current task.
    pub current: i32,
    /// That task's number, 32 bits.
    pub pid: i32,
    /// The count, 32 bits.
    pub preempt_count: i32,
}

/// A field of a per-CPU variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerCpuVariable {
    /// The variable's symbol.
    pub symbol: &'static str,
    /// Where in the variable the field begins, in bytes.
    pub offset: u64,
}
