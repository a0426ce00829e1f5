//! Trampoline code: placed once, for good.

use std::sync::{Mutex, PoisonError};

use vm_memory::Bytes;

use super::{ALIGN, RegionError, RegionWindow};
use crate::addr::Gva;

/// Hands out trampoline code, never the same bytes twice.
///
/// A task may be preempted inside a trampoline and stay there for as long as it likes, so code that
/// was once reachable is neither overwritten nor reused; only a check of all stacks could clear it.
#[derive(Debug)]
pub struct CodeSpace {
    base: Gva,
    len: usize,
    used: Mutex<usize>,
}

impl CodeSpace {
    /// An empty code window, of which the guest sees `len` bytes at `base`.
    #[must_use]
    pub fn new(base: Gva, len: u64) -> Self {
        Self::with_code(base, len, 0)
    }

    /// The same with `used` bytes of code at its beginning, which stay.
    #[must_use]
    pub fn with_code(base: Gva, len: u64, used: u64) -> Self {
        let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        Self { base, len: size(len), used: Mutex::new(size(used)) }
    }

    /// How many bytes are taken.
    #[must_use]
    pub fn used(&self) -> u64 {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) as u64
    }

    /// Places the code that `assemble` makes for the address it is given; nothing is taken when
    /// `assemble` fails.
    ///
    /// # Errors
    /// [`RegionError::CodeFull`], or what `assemble` says.
    pub fn place<E: From<RegionError>>(
        &self,
        window: &RegionWindow<'_>,
        assemble: impl FnOnce(Gva) -> Result<Vec<u8>, E>,
    ) -> Result<Gva, E> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.base + *used as u64;
        let code = assemble(at)?;
        let len = self.len.min(window.memory.len());
        let end = used
            .checked_add(code.len())
            .filter(|end| *end <= len)
            .ok_or(RegionError::CodeFull { wanted: code.len(), used: *used, len })?;
        window
            .memory
            .write_slice(&code, *used)
            .map_err(|error| RegionError::Memory(error.to_string()))?;
        *used = end.next_multiple_of(ALIGN as usize);
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::VolatileSlice;

    use super::*;
    use crate::addr::Gpa;

    #[test]
    fn code_is_appended_and_never_overwritten() {
        let mut bytes = vec![0_u8; 512];
        let window = RegionWindow { gpa: Gpa(0), memory: VolatileSlice::from(&mut bytes[..]) };
        let space = CodeSpace::new(Gva(0x1000), 256);
        let place = |code: Vec<u8>| space.place::<RegionError>(&window, |_| Ok(code));
        assert_eq!(place(vec![1; 65]), Ok(Gva(0x1000)));
        assert_eq!(place(vec![2; 100]), Ok(Gva(0x1080)));
        assert_eq!(
            place(vec![3; 1]),
            Err(RegionError::CodeFull { wanted: 1, used: 256, len: 256 })
        );
        assert_eq!(bytes[..65], [1; 65]);
        assert_eq!(bytes[128..228], [2; 100]);
    }
}
