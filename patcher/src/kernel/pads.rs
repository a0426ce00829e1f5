//! The kernel's pads: which may be written, and which may not and why.

use std::ops::Range;
use std::sync::Arc;

use super::records::{Record, RecordsError};
use super::{Kernel, Module, ModuleCode, PAGE, ReadError};
use crate::addr::{Gpa, Gva};
use crate::arch::paging::{Leaf, WalkError};
use crate::arch::{
    Arch, MAX_PAD, PadBytes, PadLayout, PadState, Prefix, SLOT_LEN, is_but_for_breakpoint,
    read_pad, text_len,
};
use crate::mem::PhysMem;

/// The pads of a kernel at one moment.
#[derive(Debug, Clone, Default)]
pub struct Pads {
    /// Those that may be written, ascending by address within the kernel.
    pub sites: Vec<Site>,
    /// Those that may not, likewise.
    pub refused: Vec<Refused>,
    /// The modules whose pads are among them.
    pub modules: Vec<Arc<Module>>,
}

/// A pad that may be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The function's name, as the guest's available_filter_functions has it.
    pub name: Box<str>,
    /// Where the function begins.
    pub function: Gva,
    /// The address of the instruction that may be changed.
    pub at: Gva,
    /// The same in guest-physical memory.
    pub gpa: Gpa,
    /// What stands between the function's beginning and the pad.
    pub prefix: &'static Prefix,
    /// How the pad is laid out around that instruction.
    pub layout: &'static PadLayout,
    /// The bytes found in the pad.
    pub original: PadBytes,
    /// The module whose function it is; `None` for the kernel's own.
    pub module: Option<Arc<Module>>,
}

impl Site {
    /// Whether it is the first instruction of a function that has no pad.
    #[must_use]
    pub fn is_unpadded(&self) -> bool {
        *self.layout == PadLayout::NONE
    }
}

/// A pad that is left alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The function's name, as the guest's available_filter_functions has it; empty for a function
    /// of a module of which nothing is known.
    pub name: Box<str>,
    /// The pad's address.
    pub at: Gva,
    /// Why.
    pub why: Refusal,
}

/// Why a pad is left alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The guest's own tracing uses it.
    #[error("the guest's own tracing uses it")]
    GuestTraces {
        /// Where the pad branches to; `None` if the pad does not say, or the guest has counted a
        /// tracer and not changed the pad.
        target: Option<Gva>,
    },
    /// A breakpoint is where our branch would be.
    #[error("a breakpoint stands on it: the guest probes the function, or is changing the pad")]
    Changing,
    /// Its no-operations are shorter than a branch.
    #[error("its instructions are shorter than a branch, and a task may stand between two of them")]
    Several,
    /// The kernel has not come to it in its boot.
    #[error("the kernel is still booting and has not prepared it")]
    NotYet,
    /// It lies in what is left of a weak function that another one overrides.
    #[error("it is the dead code of an overridden weak function")]
    DeadWeak,
    /// It lies in code that is freed when the kernel has booted.
    #[error("it is code that the kernel frees after its boot")]
    InitText,
    /// It is a module's of which nothing is known.
    #[error(
        "it is of a module that is just being loaded or unloaded, or that the kernel does not name"
    )]
    Module,
    /// It is a module's that lies too far from the region.
    #[error("its module lies farther from the trampolines than a branch reaches")]
    OutOfReach,
    /// It holds something that no pad is known to hold.
    #[error("it holds {found}, which no pad is known to hold")]
    UnknownBytes {
        /// What it holds.
        found: PadBytes,
    },
    /// What stands in front of it is nothing known.
    #[error("what stands in front of it, {found}, is not known")]
    UnknownPrefix {
        /// What stands there.
        found: PadBytes,
    },
    /// It is the first instruction of a function without a pad, and is too short for a trap or can be executed nowhere
    /// else.
    #[error(
        "the function has no pad and begins with {found}, which is shorter than a trap or can't be \
         executed elsewhere"
    )]
    Immovable {
        /// What the function begins with.
        found: PadBytes,
    },
    /// It has no pad, and lies or may lie in code that is entered on a user's stack or page tables.
    #[error("the function has no pad, and is or may be the kernel's entry code")]
    Entry,
    /// It can be traced, but its returns not, which are wanted.
    #[error("its returns can't be recorded: {why}")]
    NoReturn {
        /// Why not.
        why: &'static str,
    },
    /// It goes on in another page.
    #[error("it crosses into another page")]
    CrossesPage,
    /// The kernel does not map it, or not where the image has it.
    #[error("the kernel does not map it where it should be")]
    NotMapped,
}

impl Refusal {
    /// The reason in a few words, the same for every pad that is left alone for it.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Refusal::GuestTraces { .. } => "traced by the guest",
            Refusal::NoReturn { .. } => "of which returns can't be recorded",
            Refusal::Changing => "probed or being changed by the guest",
            Refusal::Several => "of short instructions",
            Refusal::NotYet => "not prepared yet",
            Refusal::DeadWeak => "dead code",
            Refusal::InitText => "init code",
            Refusal::Module => "in modules that come or go",
            Refusal::OutOfReach => "in modules too far away",
            Refusal::UnknownBytes { .. } => "of unknown bytes",
            Refusal::UnknownPrefix { .. } => "behind unknown bytes",
            Refusal::Immovable { .. } => "without a pad, and not to be trapped",
            Refusal::Entry => "entry code",
            Refusal::CrossesPage => "across two pages",
            Refusal::NotMapped => "not mapped",
        }
    }
}

/// The pads could not be listed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PadsError {
    /// The kernel's own list of them could not be read.
    #[error(transparent)]
    Records(#[from] RecordsError),
}

impl Kernel {
    /// Lists the kernel's pads and what state each is in.
    ///
    /// # Errors
    /// [`PadsError`].
    pub fn pads(&self, ram: &dyn PhysMem) -> Result<Pads, PadsError> {
        let records = self.records(ram)?;
        let in_image = |record: &Record| self.image.range.contains(&record.ip);
        // Of a kernel that does not tell its modules their functions are refused.
        let code = match records.iter().all(in_image) {
            true => ModuleCode::default(),
            false => self.module_code(ram).unwrap_or_default(),
        };
        Ok(self.survey(ram, records, &code))
    }

    /// Lists the pads of these modules.
    ///
    /// # Errors
    /// [`PadsError`].
    pub fn module_pads(&self, ram: &dyn PhysMem, code: &ModuleCode) -> Result<Pads, PadsError> {
        let mut records = self.records(ram)?;
        records.retain(|record| {
            !self.image.range.contains(&record.ip) && code.lookup(record.ip).is_some()
        });
        Ok(self.survey(ram, records, code))
    }

    fn survey(&self, ram: &dyn PhysMem, mut records: Vec<Record>, code: &ModuleCode) -> Pads {
        // A kernel's records ascend already. One that lists them otherwise, or one of them twice,
        // must not make us read its text over and over, nor list one pad as two sites.
        records.sort_by_key(|record| record.ip);
        records.dedup_by(|later, first| {
            let same = later.ip == first.ip;
            if same {
                first.flags = first.flags | later.flags;
            }
            same
        });
        let modules = code.modules().cloned().collect();
        let mut pads = Pads { modules, ..Pads::default() };
        pads.sites.reserve(records.len());
        let mut survey = Survey::new(self, ram, code);
        for record in &records {
            match survey.site(record) {
                Ok(site) => pads.sites.push(site),
                Err(refused) => pads.refused.push(refused),
            }
        }
        pads
    }
}

/// A pad that nobody uses and that may be written, as the text around it shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pad {
    /// What stands between the function's beginning and the pad.
    pub prefix: &'static Prefix,
    /// How the pad is laid out around the instruction that may be changed.
    pub layout: &'static PadLayout,
    /// That instruction.
    pub original: PadBytes,
}

/// Decides by its bytes whether the pad whose changeable instruction is at `at` may be written.
/// `before` is the text from the function's first byte to `at`, `text` what follows, [`text_len`] bytes
/// of it. `hook` is the address of the compiler's hook where it is known; `read_slot` reads guest memory,
/// and tells whether it could.
///
/// # Errors
/// Why it may not.
pub fn judge_pad(
    arch: &dyn Arch,
    at: Gva,
    before: &[u8],
    text: &[u8],
    hook: Option<Gva>,
    read_slot: impl FnOnce(Gva, &mut [u8]) -> bool,
) -> Result<Pad, Refusal> {
    let original = PadBytes::new(&text[..arch.pad_len().min(text.len())]);
    let (state, layout) = read_pad(arch, at, before, text, hook);
    match state {
        PadState::Idle => {}
        PadState::GuestEnabled { target } => {
            return Err(Refusal::GuestTraces { target: Some(target) });
        }
        PadState::GuestEnabledElsewhere => return Err(Refusal::GuestTraces { target: None }),
        PadState::Changing => return Err(Refusal::Changing),
        PadState::Several => return Err(Refusal::Several),
        PadState::NotYet => return Err(Refusal::NotYet),
        PadState::Unknown => return Err(Refusal::UnknownBytes { found: original }),
    }
    // Bytes that only look like a pad have no slot that says whose it is.
    if let Some(slot_at) = arch.pad_slot(at, &original) {
        let mut slot = [0; SLOT_LEN];
        if !read_slot(slot_at, &mut slot) || arch.pad_of_slot(&slot) != Some(at) {
            return Err(Refusal::UnknownBytes { found: original });
        }
    }
    let lead = before.len().checked_sub(layout.before.len()).map_or(before, |len| &before[..len]);
    let prefix = (arch.pad_prefixes().iter())
        .find(|prefix| is_but_for_breakpoint(arch, prefix.bytes, lead))
        .ok_or(Refusal::UnknownPrefix { found: PadBytes::new(&lead[..lead.len().min(MAX_PAD)]) })?;
    Ok(Pad { prefix, layout, original })
}

/// The most bytes that may lie between a function's first byte and the instruction that changes.
pub(super) fn longest_lead(arch: &dyn Arch) -> usize {
    let prefix = arch.pad_prefixes().iter().map(|prefix| prefix.bytes.len()).max();
    let before = arch.pad_layouts().iter().map(|layout| layout.before.len()).max();
    prefix.unwrap_or(0) + before.unwrap_or(0)
}

impl Kernel {
    /// The state of the pad whose changeable instruction is at `at`, wherever it lies in its function.
    pub(super) fn pad_state_at(
        &self,
        ram: &dyn PhysMem,
        at: Gva,
        hook: Option<Gva>,
    ) -> Result<PadState, ReadError> {
        let longest = longest_lead(self.arch) as u64;
        // Kernels need not map what stands in front of their first function.
        let lead = at.offset_from(self.image.range.start).unwrap_or(longest).min(longest);
        let mut bytes = vec![0; lead as usize + text_len(self.arch)];
        self.read_virt(ram, at - lead, &mut bytes)?;
        let (before, text) = bytes.split_at(lead as usize);
        Ok(read_pad(self.arch, at, before, text, hook).0)
    }
}

/// Text is read so many bytes at a time; records ascend, so most find their text read already.
const WINDOW: u64 = 64 << 10;

/// What an address lies in.
struct Place<'a> {
    symbol: &'a str,
    function: Gva,
    offset: u64,
    module: Option<Arc<Module>>,
}

/// One pass over the kernel's pads.
struct Survey<'a> {
    kernel: &'a Kernel,
    ram: &'a dyn PhysMem,
    code: &'a ModuleCode,
    hook: Option<Gva>,
    init_text: Range<Gva>,
    /// The text read last, and where it begins.
    window: (Gva, Vec<u8>),
    /// The leaf walked last, and the addresses it maps.
    leaf: Option<(Range<Gva>, Leaf)>,
}

impl<'a> Survey<'a> {
    fn new(kernel: &'a Kernel, ram: &'a dyn PhysMem, code: &'a ModuleCode) -> Self {
        Self {
            kernel,
            ram,
            code,
            hook: kernel.symbols.address(kernel.arch.compiler_hook_symbol()),
            init_text: kernel.init_text(),
            window: (Gva(0), Vec::new()),
            leaf: None,
        }
    }

    /// What `record` is: a site, or why it is none.
    fn site(&mut self, record: &Record) -> Result<Site, Refused> {
        let at = record.ip;
        let Some(place) = self.place(at) else {
            return Err(Refused { name: Box::default(), at, why: Refusal::Module });
        };
        let Place { module, .. } = &place;
        let named = |name: String| match module {
            Some(module) => format!("{name} [{}]", module.name).into_boxed_str(),
            None => name.into(),
        };
        if record.flags.disabled() {
            // How the guest's available_filter_functions shows such a record.
            let name = format!("__ftrace_invalid_address___{}", place.offset);
            return Err(Refused { name: named(name), at, why: Refusal::DeadWeak });
        }
        let name = named(place.symbol.to_owned());
        match self.judge(record, &place) {
            Ok((gpa, Pad { prefix, layout, original })) => {
                let (function, module) = (place.function, place.module);
                Ok(Site { name, function, at, gpa, prefix, layout, original, module })
            }
            Err(why) => Err(Refused { name, at, why }),
        }
    }

    /// What `at` lies in; `None` if that is not known.
    fn place(&self, at: Gva) -> Option<Place<'a>> {
        let kernel = self.kernel;
        if kernel.image.range.contains(&at) {
            let place = kernel.symbols.lookup(at)?;
            let (symbol, function) = (place.symbol.name, place.symbol.address);
            return Some(Place { symbol, function, offset: place.offset, module: None });
        }
        let place = self.code.lookup(at)?;
        Some(Place {
            symbol: place.symbol,
            function: place.function,
            offset: place.offset,
            module: Some(Arc::clone(place.module)),
        })
    }

    /// Where the pad of `record` is and what it is like, or why it may not be written.
    fn judge(&mut self, record: &Record, place: &Place<'_>) -> Result<(Gpa, Pad), Refusal> {
        let (at, arch) = (record.ip, self.kernel.arch);
        if self.init_text.contains(&at) {
            return Err(Refusal::InitText);
        }
        if place.offset > longest_lead(arch) as u64 {
            return Err(Refusal::DeadWeak);
        }
        if at.0 % PAGE + arch.pad_len() as u64 > PAGE {
            return Err(Refusal::CrossesPage);
        }
        let gpa = self.mapped(at).ok_or(Refusal::NotMapped)?;
        let (kernel, ram, hook) = (self.kernel, self.ram, self.hook);
        let (lead, is_modules) = (place.offset as usize, place.module.is_some());
        let bytes = self.text(place.function, lead + text_len(arch), is_modules);
        let (before, text) = bytes.ok_or(Refusal::NotMapped)?.split_at(lead);
        let read_slot = |at, slot: &mut [u8]| kernel.read_virt(ram, at, slot).is_ok();
        match judge_pad(arch, at, before, text, hook, read_slot) {
            Ok(_) if record.flags.in_use() => Err(Refusal::GuestTraces { target: None }),
            judged => judged.map(|pad| (gpa, pad)),
        }
    }

    /// The `len` bytes of text at `at`, a few at most, of the image or of a module.
    fn text(&mut self, at: Gva, len: usize, is_modules: bool) -> Option<&[u8]> {
        let offset = at.offset_from(self.window.0).map(|offset| offset as usize);
        let hit = offset.filter(|offset| offset + len <= self.window.1.len());
        let offset = match hit {
            Some(offset) => offset,
            None if is_modules => {
                // What follows it need not be mapped.
                let mut bytes = vec![0; len];
                self.kernel.read_virt(self.ram, at, &mut bytes).ok()?;
                self.window = (at, bytes);
                0
            }
            None => {
                let image = &self.kernel.image;
                let begin = at.offset_from(image.range.start)?;
                self.window = (at, image.read(self.ram, begin, WINDOW).ok()?);
                0
            }
        };
        self.window.1.get(offset..offset + len)
    }

    /// Where the kernel maps `va`, if that is where it should: the image is in one piece.
    fn mapped(&mut self, va: Gva) -> Option<Gpa> {
        if !self.leaf.as_ref().is_some_and(|(range, _)| range.contains(&va)) {
            let walked: Result<Leaf, WalkError> = self.kernel.root.walk(self.ram, va);
            self.leaf = walked.ok().map(|leaf| {
                let begin = va.align_down(leaf.size);
                (begin..begin + leaf.size, leaf)
            });
        }
        let (range, leaf) = self.leaf.as_ref()?;
        let gpa = leaf.gpa.align_down(leaf.size) + (va.0 - range.start.0);
        self.kernel.image.translate(va).is_none_or(|there| there == gpa).then_some(gpa)
    }
}
