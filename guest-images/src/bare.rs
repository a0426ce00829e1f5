//! Bare guests: programs without an operating system whose functions have every pad that kernels of
//! their architecture have had. They are in `bare/`, and are built with this crate.
//!
//! Two processors call every function so many times a round, as many rounds as the host asks for, and
//! look at registers, flags and stack in the function and behind it. What they find they leave in
//! memory. Addresses are physical ones.

use std::path::{Path, PathBuf};

use object::{Object as _, ObjectSegment as _, ObjectSymbol as _};

use super::Architecture;

/// A bare guest.
#[derive(Debug, Clone)]
pub struct Bare {
    architecture: Architecture,
    elf: PathBuf,
    bytes: Vec<u8>,
}

/// A function of a bare guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BareFunction {
    /// Its symbol.
    pub name: String,
    /// Its first byte.
    pub address: u64,
    /// The instruction that a tracer changes.
    pub pad: u64,
}

/// A bare guest could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BareError {
    /// Its file, which this crate's build made.
    #[error("the bare guest {} cannot be read: {source}; build again", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file is not as it was built.
    #[error("the bare guest is not an ELF file as it was built: {0}")]
    Elf(#[from] object::Error),
    /// A symbol is missing.
    #[error("the bare guest has no symbol {0}")]
    NoSymbol(String),
}

impl Bare {
    /// The bare guest of an architecture.
    ///
    /// # Errors
    /// [`BareError`].
    pub fn new(architecture: Architecture) -> Result<Self, BareError> {
        let elf = Path::new(env!("OUT_DIR")).join(format!("bare-{architecture}.elf"));
        let bytes =
            std::fs::read(&elf).map_err(|source| BareError::File { path: elf.clone(), source })?;
        object::File::parse(&*bytes)?;
        Ok(Self { architecture, elf, bytes })
    }

    /// Its architecture.
    #[must_use]
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The ELF file, which QEMU takes for a kernel.
    #[must_use]
    pub fn elf(&self) -> &Path {
        &self.elf
    }

    /// The address of a symbol.
    ///
    /// # Errors
    /// [`BareError::NoSymbol`].
    pub fn symbol(&self, name: &str) -> Result<u64, BareError> {
        let found = self.file()?.symbol_by_name(name).map(|symbol| symbol.address());
        found.ok_or_else(|| BareError::NoSymbol(name.to_owned()))
    }

    /// What is loaded: addresses and bytes.
    ///
    /// # Errors
    /// [`BareError::Elf`].
    pub fn segments(&self) -> Result<Vec<(u64, Vec<u8>)>, BareError> {
        let file = self.file()?;
        file.segments()
            .map(|segment| {
                let mut bytes = segment.data()?.to_vec();
                bytes.resize(segment.size() as usize, 0);
                Ok((segment.address(), bytes))
            })
            .collect()
    }

    /// The functions with pads, in the order in which they are called.
    ///
    /// # Errors
    /// [`BareError`].
    pub fn functions(&self) -> Result<Vec<BareFunction>, BareError> {
        const ENTRY: usize = 3 * 8;
        let file = self.file()?;
        let (from, to) = (self.symbol("pads")?, self.symbol("pads_end")?);
        let table = self.segments()?.into_iter().find_map(|(start, bytes)| {
            let range = from.checked_sub(start)? as usize..to.checked_sub(start)? as usize;
            bytes.get(range).map(<[u8]>::to_vec)
        });
        let table = table.ok_or_else(|| BareError::NoSymbol("pads".to_owned()))?;
        let word = |bytes: &[u8]| {
            let bytes = bytes.try_into().expect("eight bytes are asked for");
            if file.is_little_endian() {
                u64::from_le_bytes(bytes)
            } else {
                u64::from_be_bytes(bytes)
            }
        };
        table
            .chunks_exact(ENTRY)
            .map(|entry| {
                let (address, pad) = (word(&entry[..8]), word(&entry[8..16]));
                let name = file
                    .symbols()
                    .filter(|symbol| symbol.address() == address && symbol.is_definition())
                    .find_map(|symbol| symbol.name().ok().filter(|name| !name.is_empty()))
                    .ok_or_else(|| BareError::NoSymbol(format!("at {address:#x}")))?;
                Ok(BareFunction { name: name.to_owned(), address, pad })
            })
            .collect()
    }

    fn file(&self) -> Result<object::File<'_>, BareError> {
        Ok(object::File::parse(&*self.bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_function_of_a_bare_guest_has_a_name_of_its_own() {
        let samples = [
            (Architecture::S390x, ["block_316", "hotpatch_0_3"]),
            (Architecture::Aarch64, ["prepared", "patchable_2"]),
            (Architecture::X86_64, ["endbr_nop", "fentry_nop"]),
        ];
        for (architecture, some) in samples {
            let bare = Bare::new(architecture).unwrap();
            let functions = bare.functions().unwrap();
            let names: BTreeSet<&str> = functions.iter().map(|function| &*function.name).collect();
            assert_eq!(names.len(), functions.len());
            assert!(some.iter().all(|name| names.contains(name)), "{names:?}");
        }
        let bare = Bare::new(Architecture::S390x).unwrap();
        assert!(matches!(bare.symbol("absent"), Err(BareError::NoSymbol(_))));
    }
}
