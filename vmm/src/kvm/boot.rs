//! Puts a stock kernel into guest memory, by the 64-bit boot protocol.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::{BzImage, KernelLoader};
use patcher::addr::Gpa;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::acpi;
use super::image::{ENTRY_64, Image, ImageError};
use super::layout::{
    self, ACPI, BOOT_STACK, BOOT_TABLES, BOOT_TABLES_END, CMDLINE, GIB, HIGH_RAM, HOLE,
    LOW_RAM_END, MIB, PAGE, REBOOT_STUB, ZERO_PAGE,
};
use super::paging;
use super::state::Entry;

/// What every guest gets on its command line first; the user's own comes behind and wins.
///
/// `reboot=k` because a hardware-reduced kernel's own choice needs firmware that is not there;
/// `panic=-1` so that a panic ends the guest by a reboot; `pci=off` because there is none.
pub const BASE_CMDLINE: &str = "console=ttyS0 reboot=k panic=-1 pci=off";

/// The least RAM for a stock kernel, in bytes.
const LEAST_MEMORY: u64 = 128 * MIB;

/// Loader type "no identifier assigned" (boot protocol, `type_of_loader`).
const LOADER_UNDEFINED: u8 = 0xff;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// What a kernel jumps to in real mode when it wants the BIOS to reboot: it then resets the
/// machine through the keyboard controller.
///
/// ```text
/// b0 fe   mov $0xfe, %al
/// e6 64   out %al, $0x64
/// f4      hlt
/// eb fd   jmp . - 1
/// ```
const REBOOT_CODE: [u8; 7] = [0xb0, 0xfe, 0xe6, 0x64, 0xf4, 0xeb, 0xfd];

/// A stock kernel and what it is booted with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LinuxBoot {
    /// The kernel, a bzImage.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Appended to [`BASE_CMDLINE`].
    pub cmdline: String,
}

/// A kernel cannot be booted as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootError {
    /// The kernel file is no use.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The initrd cannot be read.
    #[error("the initrd {} cannot be read: {source}; give the path of an initramfs", path.display())]
    Initrd {
        /// Where it was looked for.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Kernel and initrd do not fit.
    #[error(
        "memory of {} MiB is too little: this kernel needs {} MiB with its initrd; give the guest \
         {} MiB or more",
        memory / MIB, needed.div_ceil(MIB), needed.div_ceil(MIB)
    )]
    MemoryTooSmall {
        /// What the guest has, in bytes.
        memory: u64,
        /// What it needs, in bytes.
        needed: u64,
    },
    /// The initrd does not fit below the kernel's limit, whatever the guest's memory.
    #[error(
        "the initrd {} of {size} bytes does not fit between the kernel and {limit:#x}, the highest \
         address that this kernel takes it at; make it smaller",
        path.display()
    )]
    InitrdTooLarge {
        /// Where it is.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The highest address of it.
        limit: u64,
    },
    /// The command line is longer than the kernel takes.
    #[error(
        "the kernel command line has {found} bytes where this kernel takes {most}; shorten it by {}",
        found - most
    )]
    CmdlineTooLong {
        /// Its length in bytes.
        found: usize,
        /// The most that the kernel takes, in bytes.
        most: usize,
    },
    /// The command line cannot be passed on.
    #[error("the kernel command line holds a zero byte at {at}; remove it")]
    CmdlineZero {
        /// Where the zero byte is.
        at: usize,
    },
    /// Guest memory could not be filled.
    #[error("the {what} could not be put into guest memory: {reason}")]
    Write {
        /// What was to be written.
        what: &'static str,
        /// Why not.
        reason: String,
    },
}

/// A kernel whose files have been opened and checked against the guest's memory.
#[derive(Debug)]
pub(super) struct Plan {
    image: Image,
    initrd: Option<Initrd>,
    cmdline: String,
    memory: u64,
    cpus: usize,
}

#[derive(Debug)]
struct Initrd {
    file: File,
    at: u64,
    size: u64,
}

impl Plan {
    /// Opens and checks everything that `boot` names, for a guest with `memory` bytes of RAM.
    pub(super) fn new(boot: &LinuxBoot, memory: u64, cpus: usize) -> Result<Self, BootError> {
        let image = Image::open(&boot.kernel)?;
        let cmdline = match boot.cmdline.trim() {
            "" => BASE_CMDLINE.to_owned(),
            user => format!("{BASE_CMDLINE} {user}"),
        };
        check_cmdline(&cmdline, image.header.cmdline_size as usize)?;

        let kernel_end = image.end_in_memory();
        let low_end = memory.min(HOLE.0);
        let initrd = boot.initrd.as_deref().map(open_initrd).transpose()?;
        let initrd_size = initrd.as_ref().map_or(0, |(_, size)| *size);
        let needed = kernel_end
            .saturating_add(initrd_size.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX))
            .max(LEAST_MEMORY);
        let limit = u64::from(image.header.initrd_addr_max).saturating_add(1).min(HOLE.0);
        if needed > limit
            && let Some(path) = &boot.initrd
        {
            let (path, limit) = (path.clone(), limit - 1);
            return Err(BootError::InitrdTooLarge { path, size: initrd_size, limit });
        }
        if needed > low_end {
            return Err(BootError::MemoryTooSmall { memory, needed });
        }
        let initrd = initrd.map(|(file, size)| {
            let at = (low_end.min(limit) - size) / PAGE * PAGE;
            Initrd { file, at, size }
        });
        Ok(Self { image, initrd, cmdline, memory, cpus })
    }

    /// Fills guest memory and tells where the first vCPU begins.
    pub(super) fn load(mut self, ram: &GuestMemoryMmap<()>) -> Result<Entry, BootError> {
        let loaded =
            BzImage::load(ram, Some(HIGH_RAM.into()), &mut self.image.file, Some(HIGH_RAM.into()))
                .map_err(write_error("kernel"))?;
        let mut params = boot_params { hdr: self.image.header, ..Default::default() };
        params.hdr.type_of_loader = LOADER_UNDEFINED;
        params.hdr.code32_start = loaded.kernel_load.0 as u32;
        params.hdr.cmd_line_ptr = CMDLINE.0 as u32;
        params.acpi_rsdp_addr = ACPI.start.0;
        if let Some(initrd) = &mut self.initrd {
            let mut file = &initrd.file;
            ram.read_exact_volatile_from(GuestAddress(initrd.at), &mut file, initrd.size as usize)
                .map_err(write_error("initrd"))?;
            params.hdr.ramdisk_image = initrd.at as u32;
            params.hdr.ramdisk_size = initrd.size as u32;
        }
        for (place, entry) in params.e820_table.iter_mut().zip(memory_map(self.memory)) {
            *place = entry;
            params.e820_entries += 1;
        }
        ram.write_obj(params, ZERO_PAGE.into()).map_err(write_error("boot parameters"))?;

        let cmdline = [self.cmdline.as_bytes(), b"\0"].concat();
        ram.write_slice(&cmdline, CMDLINE.into()).map_err(write_error("command line"))?;
        ram.write_slice(&acpi::tables(ACPI.start, self.cpus), ACPI.start.into())
            .map_err(write_error("ACPI tables"))?;
        ram.write_slice(&REBOOT_CODE, REBOOT_STUB.into()).map_err(write_error("reboot code"))?;
        paging::write_gdt(ram).map_err(write_error("GDT"))?;
        // The protocol wants the kernel, the boot parameters and the command line mapped.
        paging::write_identity(ram, BOOT_TABLES..BOOT_TABLES_END, &[Gpa(0)..Gpa(GIB)])
            .map_err(write_error("page tables"))?;
        Ok(Entry {
            rip: loaded.kernel_load.0 + ENTRY_64,
            rsp: BOOT_STACK.0,
            rsi: ZERO_PAGE.0,
            cr3: BOOT_TABLES.0,
            ..Entry::default()
        })
    }
}

fn write_error<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> BootError {
    move |error| BootError::Write { what, reason: error.to_string() }
}

fn check_cmdline(cmdline: &str, most: usize) -> Result<(), BootError> {
    if let Some(at) = cmdline.bytes().position(|byte| byte == 0) {
        return Err(BootError::CmdlineZero { at });
    }
    // The room up to the end of conventional memory is far larger than what kernels take.
    let most = most.min((LOW_RAM_END.0 - CMDLINE.0) as usize - 1);
    match cmdline.len() {
        found if found > most => Err(BootError::CmdlineTooLong { found, most }),
        _ => Ok(()),
    }
}

fn open_initrd(path: &Path) -> Result<(File, u64), BootError> {
    let failed = |source| BootError::Initrd { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(failed(io::Error::other("it is not a regular file")));
    }
    Ok((file, metadata.len()))
}

/// The e820 map. The region is not in it.
fn memory_map(memory: u64) -> Vec<boot_e820_entry> {
    let entry =
        |from: u64, to: u64, kind| boot_e820_entry { addr: from, size: to - from, r#type: kind };
    let mut map =
        vec![entry(0, LOW_RAM_END.0, E820_RAM), entry(LOW_RAM_END.0, HIGH_RAM.0, E820_RESERVED)];
    for extent in layout::ram(memory) {
        map.push(entry(extent.start.0.max(HIGH_RAM.0), extent.end.0, E820_RAM));
    }
    map
}

#[cfg(test)]
mod tests {
    use linux_loader::loader::bootparam::setup_header;
    use vm_memory::GuestMemoryBackend;

    use super::super::image::tests::{file, kernel};
    use super::*;

    const MEMORY: u64 = 128 * MIB;

    /// What comes of booting the synthetic kernel.
    fn plan(memory: u64, cmdline: &str, initrd_size: Option<u64>) -> Result<Plan, BootError> {
        let (_kernel_dir, kernel) = file(&kernel());
        let (_initrd_dir, initrd) = file(b"");
        if let Some(size) = initrd_size {
            File::options().write(true).open(&initrd).unwrap().set_len(size).unwrap();
        }
        let initrd = initrd_size.map(|_| initrd);
        Plan::new(&LinuxBoot { kernel, initrd, cmdline: cmdline.into() }, memory, 2)
    }

    #[test]
    fn too_little_memory_is_refused_with_what_would_do() {
        for (memory, initrd, needed) in [
            (16 * MIB, None, MEMORY),
            (16 * MIB, Some(1), MEMORY),
            (MEMORY - PAGE, None, MEMORY),
            (MEMORY, Some(61 * MIB), 0x437_8000 + 61 * MIB),
        ] {
            match plan(memory, "", initrd).unwrap_err() {
                BootError::MemoryTooSmall { memory: m, needed: n } => {
                    assert_eq!((m, n), (memory, needed));
                }
                other => panic!("{other}"),
            }
            assert!(plan(needed, "", initrd).is_ok(), "what is asked for is enough");
        }
    }

    #[test]
    fn an_initrd_beyond_the_kernels_limit_is_refused_whatever_the_memory() {
        let error = plan(16 * GIB, "", Some(2 * GIB)).unwrap_err();
        assert!(matches!(error, BootError::InitrdTooLarge { limit: 0x7fff_ffff, .. }), "{error}");
    }

    #[test]
    fn a_missing_initrd_and_a_directory_are_refused() {
        let (_dir, kernel) = file(&kernel());
        for path in ["/nonexistent/initrd", "/"] {
            let initrd = Some(path.into());
            let boot = LinuxBoot { kernel: kernel.clone(), initrd, cmdline: String::new() };
            let error = Plan::new(&boot, MEMORY, 1).unwrap_err();
            assert!(matches!(error, BootError::Initrd { .. }), "{error}");
        }
    }

    #[test]
    fn the_command_line_may_be_as_long_as_the_kernel_says() {
        let room = 2047 - BASE_CMDLINE.len() - 1;
        let plan = |len| plan(MEMORY, &"x".repeat(len), None);
        assert_eq!(plan(room).unwrap().cmdline.len(), 2047);
        assert!(matches!(
            plan(room + 1).unwrap_err(),
            BootError::CmdlineTooLong { found: 2048, most: 2047 }
        ));
    }

    #[test]
    fn a_command_line_with_a_zero_byte_is_refused() {
        let at = BASE_CMDLINE.len() + 2;
        let error = plan(MEMORY, "a\0b", None).unwrap_err();
        assert!(matches!(error, BootError::CmdlineZero { at: found } if found == at), "{error}");
    }

    #[test]
    fn the_kernel_finds_its_parameters_in_the_zero_page() {
        let memory = 3 * GIB + 512 * MIB;
        let ram = GuestMemoryMmap::<()>::from_ranges(
            &layout::ram(memory)
                .into_iter()
                .map(|extent| (extent.start.into(), (extent.end.0 - extent.start.0) as usize))
                .collect::<Vec<_>>(),
        )
        .unwrap();
        let entry = plan(memory, "quiet", Some(5000)).unwrap().load(&ram).unwrap();
        assert_eq!((entry.rip, entry.rsi), (0x10_0200, ZERO_PAGE.0));

        let params: boot_params = ram.read_obj(ZERO_PAGE.into()).unwrap();
        let header: setup_header = params.hdr;
        assert_eq!((header.type_of_loader, { header.cmd_line_ptr }), (0xff, 0x2_0000));
        assert_eq!({ params.acpi_rsdp_addr }, ACPI.start.0);
        let (initrd, size) = (header.ramdisk_image, header.ramdisk_size);
        assert_eq!((initrd, size), (0x7fff_e000, 5000), "as high as the kernel takes it");

        let mut cmdline = [0; BASE_CMDLINE.len() + 7];
        ram.read_slice(&mut cmdline, CMDLINE.into()).unwrap();
        assert_eq!(cmdline, [BASE_CMDLINE.as_bytes(), b" quiet\0"].concat()[..]);
        let mut stub = [0; 7];
        ram.read_slice(&mut stub, REBOOT_STUB.into()).unwrap();
        assert_eq!(stub, REBOOT_CODE);

        let table = { params.e820_table };
        let map: Vec<_> = table[..usize::from(params.e820_entries)]
            .iter()
            .map(|entry| ({ entry.addr }, entry.addr + entry.size, { entry.r#type }))
            .collect();
        assert_eq!(
            map,
            [
                (0, 0x9_fc00, E820_RAM),
                (0x9_fc00, 0x10_0000, E820_RESERVED),
                (0x10_0000, 3 * GIB, E820_RAM),
                (4 * GIB, 4 * GIB + 512 * MIB, E820_RAM),
            ]
        );
        let usable: u64 = map.iter().filter(|e| e.2 == E820_RAM).map(|e| e.1 - e.0).sum();
        let all: u64 = ram.iter().map(vm_memory::GuestMemoryRegion::len).sum();
        assert!(usable < all && layout::region(memory).0 >= map.last().unwrap().1);
    }
}
