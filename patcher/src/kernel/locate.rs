//! Finds the kernel that a vCPU runs.
//!
//! RAM may hold more than one kernel that looks sound: a warm reset and a kexec leave the old one
//! lie. So nothing is searched for in RAM; the page tables of a vCPU say where its kernel is. Once
//! that is known the vCPU's root is dropped for the kernel's own: a process's root is freed, and
//! its page used for something else, when the process ends.

use super::image::Image;
use super::kallsyms::{self, KallsymsError};
use super::symbols::Symbols;
use super::{Kernel, VariableError};
use crate::arch::paging::{AddressSpace, WalkError};
use crate::arch::{self, Arch, Unpaged};
use crate::machine::Registers;
use crate::mem::PhysMem;

/// What [`locate`] found out.
#[derive(Debug)]
pub enum Located {
    /// The kernel.
    Found(Box<Kernel>),
    /// No vCPU runs a kernel yet that could be found; ask again later.
    NotYet(NotYet),
}

/// Why there is no kernel to be found yet; of several vCPUs, the one that had come farthest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotYet {
    /// There are no vCPUs to look at.
    #[error("the guest has no vCPUs")]
    NoVcpus,
    /// The vCPU runs firmware or a boot loader.
    #[error("the guest has not reached its kernel: {0}")]
    Unpaged(#[from] Unpaged),
    /// The vCPU's page tables map nothing where kernels are: it decompresses the kernel, or runs
    /// something else.
    #[error("no kernel is mapped yet: {0}")]
    NoImage(WalkError),
    /// The kernel has been entered and has not built its own page tables.
    #[error("the kernel has not built its own page tables yet")]
    NoRoot,
}

impl NotYet {
    /// How far a guest has come that is not ready for this reason.
    fn progress(&self) -> u8 {
        match self {
            NotYet::NoVcpus => 0,
            NotYet::Unpaged(_) => 1,
            NotYet::NoImage(_) => 2,
            NotYet::NoRoot => 3,
        }
    }
}

/// There is something where kernels are, and it is none that can be worked with.
///
/// A guest that is just being reset may give this once; one that gives it again will not change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LocateError {
    /// Its symbols can't be read.
    #[error("the symbols of the kernel at {} cannot be read: {source}", image.range.start)]
    Symbols {
        /// Where it is.
        image: Image,
        /// What is wrong.
        source: KallsymsError,
    },
    /// A symbol that every supported kernel has is missing.
    #[error(transparent)]
    Variable(#[from] VariableError),
}

/// Looks for the kernel that the vCPUs with these registers run.
///
/// This is meant to be asked again and again while a guest boots. Until the kernel is mapped it
/// reads a few entries of page tables; only then does it read symbols.
///
/// # Errors
/// [`LocateError`].
pub fn locate(ram: &dyn PhysMem, vcpus: &[Registers]) -> Result<Located, LocateError> {
    let mut not_yet = NotYet::NoVcpus;
    let mut error = None;
    let mut tried: Vec<AddressSpace> = Vec::new();
    for registers in vcpus {
        let Some(arch) = arch::of(registers) else {
            keep_farthest(&mut not_yet, Unpaged::Foreign.into());
            continue;
        };
        let spaces = match arch.address_spaces(registers) {
            Ok(spaces) => spaces,
            Err(unpaged) => {
                keep_farthest(&mut not_yet, unpaged.into());
                continue;
            }
        };
        for space in spaces {
            if tried.contains(&space) {
                continue;
            }
            tried.push(space);
            match locate_in(ram, arch, &space) {
                Ok(Located::Found(kernel)) => return Ok(Located::Found(kernel)),
                Ok(Located::NotYet(reason)) => keep_farthest(&mut not_yet, reason),
                Err(reason) => error = Some(reason),
            }
        }
    }
    error.map_or(Ok(Located::NotYet(not_yet)), Err)
}

fn keep_farthest(kept: &mut NotYet, other: NotYet) {
    if other.progress() > kept.progress() {
        *kept = other;
    }
}

fn locate_in(
    ram: &dyn PhysMem,
    arch: &'static dyn Arch,
    space: &AddressSpace,
) -> Result<Located, LocateError> {
    let mut image = match Image::find(ram, space, &arch.image_window()) {
        Ok(image) => image,
        Err(error) => return Ok(Located::NotYet(NotYet::NoImage(error))),
    };
    let symbols = kallsyms::decode(ram, &image, arch.byte_order())
        .map_err(|source| LocateError::Symbols { image: image.clone(), source })?;
    if let Some(end) = symbols.address("_end").filter(|end| image.range.contains(end)) {
        image.range.end = end;
    }
    let root_symbols = arch.kernel_root_symbols();
    let root = match root_symbols {
        [] => space.root,
        [first, ..] => root_symbols
            .iter()
            .find_map(|symbol| image.translate(symbols.address(symbol)?))
            .ok_or(VariableError::NoSymbol { symbol: first })?,
    };
    let root = AddressSpace { root, format: space.format };
    if root.translate(ram, image.range.start) != Ok(image.phys) {
        return Ok(Located::NotYet(NotYet::NoRoot));
    }
    let banner = read_banner(ram, &image, &symbols)?;
    Ok(Located::Found(Box::new(Kernel { arch, image, root, symbols, banner })))
}

/// The longest banner believed, in bytes.
const MAX_BANNER: u64 = 512;

/// Reads the banner of the kernel at `image`, without its newline.
pub(super) fn read_banner(
    ram: &dyn PhysMem,
    image: &Image,
    symbols: &Symbols,
) -> Result<String, VariableError> {
    let symbol = "linux_banner";
    let at = symbols
        .address(symbol)
        .and_then(|at| at.offset_from(image.range.start))
        .ok_or(VariableError::NoSymbol { symbol })?;
    let bytes = image
        .read(ram, at, MAX_BANNER)
        .map_err(|source| VariableError::Unreadable { symbol, source: source.into() })?;
    let line = bytes.split(|&byte| byte == 0 || byte == b'\n').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(line).into_owned())
}
