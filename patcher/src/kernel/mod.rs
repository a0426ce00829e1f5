//! A guest's kernel, from its memory alone: where it is, what it is, its symbols and its pads.

use std::ops::Range;
use std::sync::OnceLock;

use crate::addr::{Gpa, Gva};
use crate::arch::Arch;
use crate::arch::paging::{AddressSpace, WalkError};
use crate::machine::Registers;
use crate::mem::{MemError, PhysMem};

mod build_id;
mod entries;
mod image;
mod kallsyms;
mod locate;
mod mapped;
mod mapping;
mod module_code;
mod modules;
pub mod offline;
mod pads;
mod probes;
mod records;
mod slots;
mod symbols;
mod tasks;
#[cfg(test)]
mod tests;
mod types;
mod unpadded;

pub use build_id::{BuildId, BuildIdError};
pub use entries::NewTable;
pub use image::Image;
pub use kallsyms::KallsymsError;
pub use locate::{LocateError, Located, NotYet, locate};
pub use mapped::{MapRegionError, MappedRegion};
pub use mapping::{
    InstallError, MappedPart, Mapping, MappingEntry, PartMemory, PlanMappingError, plan_mapping,
};
pub use module_code::{ModuleCode, ModulePlace};
pub use modules::{Module, ModuleState, ModuleSymbols, ModulesError};
pub use pads::{Pad, Pads, PadsError, Refusal, Refused, Site, judge_pad};
pub use probes::{CpuNumberError, PanicCpu, ReturnFormError, Unready};
pub use records::RecordsError;
pub use symbols::{Place, Symbol, Symbols};
pub(crate) use tasks::Reader;
pub use tasks::{
    Comm, RecordedTask, Task, TaskLayout, TaskLayoutError, TaskPlaceError, TasksError,
};
pub use types::{NoPrototype, Parameter, Prototype, Prototypes, TypesError, ValueKind, ValueType};

/// A kernel found in a guest's memory.
///
/// It holds what does not change while the kernel runs. Everything that does is read anew, through
/// the `ram` that each method is given.
#[derive(Debug)]
pub struct Kernel {
    arch: &'static dyn Arch,
    image: Image,
    root: AddressSpace,
    symbols: Symbols,
    banner: String,
    banner_at: Gva,
    /// Where it keeps what of its modules, once that was asked for.
    module_fields: OnceLock<Result<modules::Fields, ModulesError>>,
}

/// Guest-virtual memory could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The kernel's page tables do not map it.
    #[error(transparent)]
    Walk(#[from] WalkError),
    /// They map it to something that is no RAM.
    #[error(transparent)]
    Mem(#[from] MemError),
    /// The address range goes beyond the end of the address space.
    #[error("{len} bytes at {va} go beyond the end of the address space")]
    Wraps {
        /// First byte wanted.
        va: Gva,
        /// Bytes wanted.
        len: usize,
    },
}

/// A variable of the kernel could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VariableError {
    /// The kernel has no such symbol.
    #[error(
        "the kernel has no symbol {symbol}: is it older than what is supported, \
         or built without CONFIG_KALLSYMS_ALL?"
    )]
    NoSymbol {
        /// The symbol's name.
        symbol: &'static str,
    },
    /// The memory that the symbol names could not be read.
    #[error("the kernel's variable {symbol} cannot be read: {source}")]
    Unreadable {
        /// The symbol's name.
        symbol: &'static str,
        /// Why not.
        source: ReadError,
    },
}

/// Reads go page by page: the smallest pages of every architecture are a multiple of this.
const PAGE: u64 = 4096;

/// Fills `buf` with the bytes at `va`, where `translate` tells of an address in which physical memory the
/// rest of its page is.
fn read_pages(
    ram: &dyn PhysMem,
    va: Gva,
    buf: &mut [u8],
    mut translate: impl FnMut(Gva) -> Result<Gpa, ReadError>,
) -> Result<(), ReadError> {
    let len = buf.len();
    let mut at = va;
    let mut rest = buf;
    while !rest.is_empty() {
        let in_page = (PAGE - at.0 % PAGE) as usize;
        let (now, later) = rest.split_at_mut(in_page.min(rest.len()));
        ram.read(translate(at)?, now)?;
        if !later.is_empty() {
            at = at.checked_add(now.len() as u64).ok_or(ReadError::Wraps { va, len })?;
        }
        rest = later;
    }
    Ok(())
}

impl Kernel {
    /// The architecture.
    #[must_use]
    pub fn arch(&self) -> &'static dyn Arch {
        self.arch
    }

    /// The image, from `_text` (on aarch64 `_stext`) to `_end`, or to the last large piece of it that
    /// the kernel maps where `_end` is not among its symbols.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// The addresses of the kernel's code, from `_stext` to `_etext`; the init text, which is freed
    /// as the kernel finishes its boot, lies elsewhere.
    #[must_use]
    pub fn text(&self) -> Range<Gva> {
        let begin = self.symbols.address("_stext").unwrap_or(self.image.range.start);
        let end = self.symbols.address("_etext").unwrap_or(self.image.range.end);
        begin.max(self.image.range.start)..end.min(self.image.range.end)
    }

    /// How far the kernel was moved from where it was linked to be, in bytes. A kernel that moves
    /// itself may by chance end up where it was.
    #[must_use]
    pub fn kaslr_offset(&self) -> i64 {
        let version = self.version().unwrap_or((u32::MAX, 0));
        let linked_at = self.arch.linked_at(self.root.format, version);
        self.image.range.start.0.wrapping_sub(linked_at.0).cast_signed()
    }

    /// The line with which the kernel names itself, as in /proc/version, without the newline.
    #[must_use]
    pub fn banner(&self) -> &str {
        &self.banner
    }

    /// The kernel's release, as `uname -r` prints it.
    #[must_use]
    pub fn release(&self) -> &str {
        self.banner.split(' ').nth(2).unwrap_or_default()
    }

    /// The first two numbers of the release, if it begins with two.
    #[must_use]
    pub fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.release().split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    /// The kernel's symbols. Those of modules are not among them.
    #[must_use]
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// The kernel's own page tables.
    #[must_use]
    pub fn root(&self) -> &AddressSpace {
        &self.root
    }

    /// The guest-physical address of `va`: by its distance from `_text` within the image, which is
    /// one piece of memory, by the kernel's page tables elsewhere.
    ///
    /// # Errors
    /// Why the page tables do not translate it.
    pub fn translate(&self, ram: &dyn PhysMem, va: Gva) -> Result<Gpa, WalkError> {
        match self.image.translate(va) {
            Some(gpa) => Ok(gpa),
            None => self.root.translate(ram, va),
        }
    }

    /// Fills `buf` with the bytes at the kernel's address `va`.
    ///
    /// # Errors
    /// [`ReadError`]; `buf` is then unspecified.
    pub fn read_virt(&self, ram: &dyn PhysMem, va: Gva, buf: &mut [u8]) -> Result<(), ReadError> {
        read_pages(ram, va, buf, |at| Ok(self.translate(ram, at)?))
    }

    /// Whether this kernel is still there: its own page tables map its text where it was found, and
    /// its banner stands there. Once it is not, no address found by it means anything any more.
    ///
    /// A reset clears no memory, so a kernel that does not run any more stays there until the next
    /// one is loaded over it; [`Kernel::is_run_by`] tells.
    #[must_use]
    pub fn is_current(&self, ram: &dyn PhysMem) -> bool {
        let mapped = self.root.translate(ram, self.image.range.start);
        mapped == Ok(self.image.phys)
            && locate::read_banner(ram, &self.image, self.banner_at).as_ref() == Ok(&self.banner)
    }

    /// Whether the vCPU with these registers runs this kernel, or a process of it.
    #[must_use]
    pub fn is_run_by(&self, ram: &dyn PhysMem, registers: &Registers) -> bool {
        let spaces = self.arch.address_spaces(registers).unwrap_or_default();
        let begin = self.image.range.start;
        spaces.iter().any(|space| space.translate(ram, begin) == Ok(self.image.phys))
    }

    fn variable<const N: usize>(
        &self,
        ram: &dyn PhysMem,
        symbol: &'static str,
    ) -> Result<[u8; N], VariableError> {
        let at = self.symbols.address(symbol).ok_or(VariableError::NoSymbol { symbol })?;
        let mut bytes = [0; N];
        self.read_virt(ram, at, &mut bytes)
            .map_err(|source| VariableError::Unreadable { symbol, source })?;
        Ok(bytes)
    }

    /// Reads the kernel's 32-bit variable `symbol`.
    ///
    /// # Errors
    /// [`VariableError`].
    pub fn variable_u32(
        &self,
        ram: &dyn PhysMem,
        symbol: &'static str,
    ) -> Result<u32, VariableError> {
        Ok(self.arch.byte_order().u32(self.variable(ram, symbol)?))
    }

    /// Reads the kernel's 64-bit variable `symbol`.
    ///
    /// # Errors
    /// [`VariableError`].
    pub fn variable_u64(
        &self,
        ram: &dyn PhysMem,
        symbol: &'static str,
    ) -> Result<u64, VariableError> {
        Ok(self.arch.byte_order().u64(self.variable(ram, symbol)?))
    }
}
