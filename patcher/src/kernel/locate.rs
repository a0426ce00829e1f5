//! Finds the kernel that a vCPU runs.
//!
//! RAM may hold more than one kernel that looks sound: a warm reset and a kexec leave the old one
//! lie. So nothing is searched for in RAM; the page tables of a vCPU say where its kernel is. Once
//! that is known the vCPU's root is dropped for the kernel's own: a process's root is freed, and
//! its page used for something else, when the process ends.

use std::ops::Range;
use std::sync::OnceLock;

use memchr::memmem;

use super::image::Image;
use super::kallsyms::{self, KallsymsError};
use super::symbols::Symbols;
use super::{Kernel, VariableError};
use crate::addr::{Gpa, Gva};
use crate::arch::paging::{AddressSpace, WalkError};
use crate::arch::{self, Arch, ImageWindow, Unpaged};
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
    /// The vCPU's page tables map something where kernels are, and no kernel's text.
    #[error("no kernel is mapped yet, only other things where kernels are")]
    NoText,
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
            NotYet::NoText => 3,
            NotYet::NoRoot => 4,
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
    /// It runs in a mode that is not supported.
    #[error(transparent)]
    Mode(Unpaged),
    /// Nothing in its read-only data is a banner.
    #[error(
        "the kernel at {at} has no banner in its read-only data: is it older than what is supported?"
    )]
    NoBanner {
        /// Where it is.
        at: Gva,
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
            Err(unpaged) if unpaged.is_final() => {
                error = Some(LocateError::Mode(unpaged));
                continue;
            }
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
    let window = arch.image_window(space.format);
    let mut from = window.range.start;
    let mut error = None;
    for _ in 0..MAX_IMAGES {
        let image = match Image::find(ram, space, &window, from) {
            Ok(Some(image)) => image,
            Ok(None) => break,
            Err(reason) if error.is_none() => return Ok(Located::NotYet(NotYet::NoImage(reason))),
            Err(_) => break,
        };
        from = image.range.end;
        match kallsyms::decode(ram, &image, &window, arch.byte_order()) {
            Ok(symbols) => return kernel_at(ram, arch, space, &window, image, symbols),
            Err(source) => error = Some(LocateError::Symbols { image, source }),
        }
        if !window.range.contains(&from) {
            break;
        }
    }
    error.map_or(Ok(Located::NotYet(NotYet::NoText)), Err)
}

/// How many pieces of text are taken for a kernel's, one after the other: other code may lie in the
/// window, as that of BPF programs.
const MAX_IMAGES: usize = 16;

/// The kernel at `image` that has these symbols.
fn kernel_at(
    ram: &dyn PhysMem,
    arch: &'static dyn Arch,
    space: &AddressSpace,
    window: &ImageWindow,
    mut image: Image,
    symbols: Symbols,
) -> Result<Located, LocateError> {
    if let Some(begin) = symbols.address(window.first_symbol) {
        image.begin_at(begin);
    }
    if let Some(end) = symbols.address("_end").filter(|end| image.range.contains(end)) {
        image.range.end = end;
    }
    let Some(root) = root(arch, space, &image, &symbols)? else {
        return Ok(Located::NotYet(NotYet::NoRoot));
    };
    let root = AddressSpace { root, format: space.format };
    if root.translate(ram, image.range.start) != Ok(image.phys) {
        return Ok(Located::NotYet(NotYet::NoRoot));
    }
    let (banner_at, banner) = find_banner(ram, &image, &symbols)?;
    let module_fields = OnceLock::new();
    let kernel = Kernel { arch, image, root, symbols, banner, banner_at, module_fields };
    Ok(Located::Found(Box::new(kernel)))
}

/// The kernel's own root, `None` if it has not built one yet.
fn root(
    arch: &dyn Arch,
    space: &AddressSpace,
    image: &Image,
    symbols: &Symbols,
) -> Result<Option<Gpa>, VariableError> {
    let names = arch.kernel_root_symbols();
    let Some(first) = names.first() else { return Ok(Some(space.root)) };
    if let Some(root) = names.iter().find_map(|name| image.translate(symbols.address(name)?)) {
        return Ok(Some(root));
    }
    let data = read_only_data(image, symbols);
    let begin = image.phys + (data.start.0 - image.range.start.0);
    let end = begin + data.end.offset_from(data.start).unwrap_or(0);
    match arch.is_kernel_root(space.root, &(begin..end)) {
        Some(true) => Ok(Some(space.root)),
        // It is still on the tables with which it boots.
        Some(false) => Ok(None),
        None => Err(VariableError::NoSymbol { symbol: first }),
    }
}

/// What lies between the kernel's text and its init text.
pub(super) fn read_only_data(image: &Image, symbols: &Symbols) -> Range<Gva> {
    let symbol = |name| symbols.address(name).filter(|address| image.range.contains(address));
    symbol("_etext").unwrap_or(image.range.start)..symbol("_sinittext").unwrap_or(image.range.end)
}

/// How every banner begins.
const BANNER: &str = "Linux version ";

/// The longest banner believed, in bytes.
const MAX_BANNER: u64 = 512;

/// How much of the image is searched for the banner at a time.
const CHUNK: u64 = 1 << 20;

/// Finds the banner of the kernel at `image`; gives where it is, and the line without its newline.
pub(super) fn find_banner(
    ram: &dyn PhysMem,
    image: &Image,
    symbols: &Symbols,
) -> Result<(Gva, String), LocateError> {
    if let Some(at) = symbols.address("linux_banner") {
        return Ok((at, read_banner(ram, image, at)?));
    }
    // Without CONFIG_KALLSYMS_ALL. Only the banner goes on with a number: what /proc/version is made
    // of goes on with a place for one.
    let range = read_only_data(image, symbols);
    let finder = memmem::Finder::new(BANNER);
    let mut chunk_at = range.start;
    while chunk_at < range.end {
        let offset = chunk_at.0 - image.range.start.0;
        let chunk = image.read(ram, offset, CHUNK + MAX_BANNER).unwrap_or_default();
        let is_banner =
            |at: &usize| chunk.get(at + BANNER.len()).is_some_and(|byte| byte.is_ascii_digit());
        if let Some(at) = finder.find_iter(&chunk).find(is_banner) {
            let at = chunk_at + at as u64;
            return Ok((at, read_banner(ram, image, at)?));
        }
        chunk_at = chunk_at + CHUNK;
    }
    Err(LocateError::NoBanner { at: image.range.start })
}

/// Reads the banner at `at` of the kernel at `image`, without its newline.
pub(super) fn read_banner(
    ram: &dyn PhysMem,
    image: &Image,
    at: Gva,
) -> Result<String, VariableError> {
    let symbol = "linux_banner";
    let at = at.offset_from(image.range.start).ok_or(VariableError::NoSymbol { symbol })?;
    let bytes = image
        .read(ram, at, MAX_BANNER)
        .map_err(|source| VariableError::Unreadable { symbol, source: source.into() })?;
    let line = bytes.split(|&byte| byte == 0 || byte == b'\n').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(line).into_owned())
}
