//! The pads of a kernel that has not run: as its compiler made them.
//!
//! A linker collects where the compiler left pads between `__start_mcount_loc` and
//! `__stop_mcount_loc`, and the kernel makes its ftrace records of these as it boots. Where the symbols
//! are left out of the kernel's table (no CONFIG_KALLSYMS_ALL) the list is found by what it leads to.
//! Bytes at functions' entries alone do not tell: functions that are never to be traced have the same
//! no-operations on s390x and aarch64, and are not listed.

use super::{OfflineKernel, linked};
use crate::addr::Gva;
use crate::arch::{PadLayout, PadState, Prefix, read_pad, text_len};
use crate::kernel::VariableError;
use crate::kernel::pads::longest_lead;

/// The most places believed; distribution kernels have up to 60,000.
const MAX_PLACES: u64 = 1 << 20;

/// The fewest places that are told from chance.
const ENOUGH_PLACES: usize = 256;

/// A pad that a kernel will have when it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfflinePad {
    /// The function's name, as the guest's available_filter_functions will have it.
    pub name: Box<str>,
    /// Where the function begins.
    pub function: Gva,
    /// The address of the instruction that may be changed.
    pub at: Gva,
    /// What stands between the function's beginning and the pad.
    pub prefix: &'static Prefix,
    /// How the pad is laid out around that instruction.
    pub layout: &'static PadLayout,
}

/// The pads of a kernel's file could not be listed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OfflinePadsError {
    /// The list that the linker made can't be read.
    #[error(transparent)]
    Variable(#[from] VariableError),
    /// The list that the linker made is not one.
    #[error("the kernel's list of pads from {begin} to {end} is not sound")]
    Unsound {
        /// Where it begins.
        begin: Gva,
        /// Where it ends.
        end: Gva,
    },
    /// There is no list.
    #[error("the kernel has no list of pads: is it built with CONFIG_DYNAMIC_FTRACE?")]
    None,
}

impl OfflineKernel {
    /// Lists the pads that the kernel will have once it has booted, ascending by address: those of
    /// functions that it keeps.
    ///
    /// # Errors
    /// [`OfflinePadsError`].
    pub fn pads(&self) -> Result<Vec<OfflinePad>, OfflinePadsError> {
        let kernel = &self.kernel;
        let init_text = kernel.init_text();
        let places = match self.named_places()? {
            Some(places) => places,
            None => self.unnamed_places(),
        };
        if places.is_empty() {
            return Err(OfflinePadsError::None);
        }
        let kept = |place: &Gva| kernel.image.range.contains(place) && !init_text.contains(place);
        let mut pads: Vec<_> =
            places.into_iter().filter(kept).filter_map(|place| self.pad_of(place)).collect();
        pads.sort_unstable_by_key(|pad| pad.at);
        pads.dedup_by_key(|pad| pad.at);
        Ok(pads)
    }

    /// The places between the list's symbols; `None` if the kernel's table does not have them.
    fn named_places(&self) -> Result<Option<Vec<Gva>>, OfflinePadsError> {
        let symbols = self.kernel.symbols();
        let address = |name| symbols.address(name);
        let (begin, end) = match (address("__start_mcount_loc"), address("__stop_mcount_loc")) {
            (Some(begin), Some(end)) => (begin, end),
            _ => return Ok(None),
        };
        let len = end.offset_from(begin).filter(|len| len % 8 == 0 && len / 8 <= MAX_PLACES);
        let len = len.ok_or(OfflinePadsError::Unsound { begin, end })?;
        let mut bytes = vec![0; len as usize];
        let symbol = "__start_mcount_loc";
        self.kernel
            .read_virt(&self.memory, begin, &mut bytes)
            .map_err(|source| VariableError::Unreadable { symbol, source })?;
        Ok(Some(linked::words(&bytes, self.kernel.arch.byte_order()).map(Gva).collect()))
    }

    /// The longest run of the image's words that all lead to pads.
    fn unnamed_places(&self) -> Vec<Gva> {
        let kernel = &self.kernel;
        let words = || linked::words(&self.memory.bytes, kernel.arch.byte_order()).map(Gva);
        let text = kernel.image.range.start..kernel.text().end.max(kernel.init_text().end);
        let (mut best, mut run) = (0..0, 0..0);
        for (index, place) in words().enumerate() {
            if text.contains(&place) && self.is_as_compiled(place) {
                if run.end != index {
                    run = index..index;
                }
                run.end = index + 1;
                if run.len() > best.len() {
                    best = run.clone();
                }
            }
        }
        let few = best.len() < ENOUGH_PLACES || best.len() as u64 > MAX_PLACES;
        if few { Vec::new() } else { words().skip(best.start).take(best.len()).collect() }
    }

    /// Whether what is at `place` looks like a pad as the compiler makes it, in a function or in what
    /// is left of one that another one overrides.
    fn is_as_compiled(&self, place: Gva) -> bool {
        let arch = self.kernel.arch;
        let hook = self.kernel.symbols().address(arch.compiler_hook_symbol());
        let layouts = arch.pad_layouts().iter().map(|layout| layout.before.len());
        layouts.chain([0]).any(|before| {
            let mut bytes = vec![0; before + text_len(arch)];
            self.kernel.read_virt(&self.memory, place, &mut bytes).is_ok() && {
                let (in_front, text) = bytes.split_at(before);
                let (state, layout) = read_pad(arch, place + before as u64, in_front, text, hook);
                before == layout.before.len() && is_unused(state)
            }
        })
    }

    /// The pad that the linker lists as being at `place`.
    fn pad_of(&self, place: Gva) -> Option<OfflinePad> {
        let symbols = self.kernel.symbols();
        // What the compiler leaves in front of a function is of the same no-operations, so that a
        // symbol that names the place itself would have a pad there as well.
        if let Some(lead_in) = self.kernel.arch.pad_lead_in() {
            let function = place + lead_in;
            if let Some(found) = symbols.lookup(function).filter(|found| found.offset == 0)
                && let Some(pad) = self.entry_pad(found.symbol.name, function)
            {
                return Some(pad);
            }
        }
        let found = symbols.lookup(place)?;
        if found.offset > longest_lead(self.kernel.arch) as u64 {
            return None;
        }
        let pad = self.entry_pad(found.symbol.name, found.symbol.address)?;
        (pad.recorded_at() == place).then_some(pad)
    }

    /// The pad that the compiler left at the entry of `function`.
    fn entry_pad(&self, name: &str, function: Gva) -> Option<OfflinePad> {
        let arch = self.kernel.arch;
        let hook = self.kernel.symbols().address(arch.compiler_hook_symbol());
        let mut bytes = vec![0; longest_lead(arch) + text_len(arch)];
        self.kernel.read_virt(&self.memory, function, &mut bytes).ok()?;
        arch.pad_prefixes().iter().find_map(|prefix| {
            if !bytes.starts_with(prefix.bytes) {
                return None;
            }
            let layouts = arch.pad_layouts().iter().map(|layout| layout.before.len());
            layouts.chain([0]).find_map(|before| {
                let lead = prefix.bytes.len() + before;
                let at = function + lead as u64;
                let (in_front, text) = bytes.split_at(lead);
                let text = &text[..text_len(arch).min(text.len())];
                let (state, layout) = read_pad(arch, at, in_front, text, hook);
                let whole = lead == prefix.bytes.len() + layout.before.len();
                (whole && is_unused(state)).then(|| OfflinePad {
                    name: name.into(),
                    function,
                    at,
                    prefix,
                    layout,
                })
            })
        })
    }
}

/// Whether a pad in this state is as the compiler made it.
fn is_unused(state: PadState) -> bool {
    matches!(state, PadState::NotYet | PadState::Idle)
}

impl OfflinePad {
    /// The place of the pad's first byte.
    fn recorded_at(&self) -> Gva {
        self.at - self.layout.before.len() as u64
    }
}
