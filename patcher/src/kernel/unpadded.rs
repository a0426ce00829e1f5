//! Functions without pads, which can be trapped at their first instruction.

use super::{Kernel, PAGE, Refusal, Refused, Site};
use crate::arch::{MAX_PAD, PadBytes, PadLayout};
use crate::mem::PhysMem;

/// Bytes of text from which an instruction's length is told: as long as any is.
const LONGEST: u64 = 16;

/// What begins and ends the code that runs between a user's address space and the kernel's, where neither
/// the stack nor the page tables need be the kernel's.
const ENTRY_TEXT: [&str; 2] = ["__entry_text_start", "__entry_text_end"];

impl Kernel {
    /// The first instruction of the function of that name, which has no pad; `None` if there is none of that
    /// name.
    ///
    /// # Errors
    /// Why it can't be trapped.
    #[must_use]
    pub fn unpadded(&self, ram: &dyn PhysMem, name: &str) -> Option<Result<Site, Refused>> {
        let text = self.text();
        let mut named = self.symbols.named(name).map(|symbol| symbol.address);
        let at = named.find(|at| text.contains(at))?;
        let refused = |why| Some(Err(Refused { name: name.into(), at, why }));
        if self.init_text().contains(&at) {
            return refused(Refusal::InitText);
        }
        let [begin, end] = ENTRY_TEXT.map(|symbol| self.symbols.address(symbol));
        match begin.zip(end) {
            Some((begin, end)) if !(begin..end).contains(&at) => {}
            _ => return refused(Refusal::Entry),
        }
        let mut bytes = [0; LONGEST as usize];
        let len = (text.end.0 - at.0).min(LONGEST) as usize;
        let place = self.image.translate(at).filter(|gpa| self.root.translate(ram, at) == Ok(*gpa));
        let (Some(gpa), Ok(())) = (place, self.read_virt(ram, at, &mut bytes[..len])) else {
            return refused(Refusal::NotMapped);
        };
        let movable = self
            .arch
            .movable(&bytes[..len])
            .filter(|len| *len <= MAX_PAD && self.arch.encode_trap(&bytes[..*len]).is_some());
        let Some(len) = movable else {
            let found = PadBytes::new(&bytes[..MAX_PAD]);
            return refused(Refusal::Immovable { found });
        };
        if at.0 % PAGE + len as u64 > PAGE {
            return refused(Refusal::CrossesPage);
        }
        Some(Ok(Site {
            name: name.into(),
            function: at,
            at,
            gpa,
            prefix: &self.arch.pad_prefixes()[0],
            layout: &PadLayout::NONE,
            original: PadBytes::new(&bytes[..len]),
            module: None,
        }))
    }
}
