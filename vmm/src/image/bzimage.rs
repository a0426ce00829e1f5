//! The setup header of a bzImage.
//!
//! Offsets and meanings are those of the Linux/x86 boot protocol
//! (`Documentation/arch/x86/boot.rst`).

use linux_loader::loader::bootparam::setup_header;
use vm_memory::ByteValued;

/// Where the setup header lies in a bzImage.
pub(crate) const HEADER_AT: usize = 0x1f1;
pub(crate) const BOOT_FLAG: u16 = 0xaa55;
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
pub(crate) const SECTOR: u64 = 512;

/// The setup header of the bzImage that begins with `head`; `None` if it is none.
pub(crate) fn header(head: &[u8]) -> Option<setup_header> {
    let mut header = setup_header::default();
    let bytes = head.get(HEADER_AT..HEADER_AT + size_of::<setup_header>())?;
    header.as_mut_slice().copy_from_slice(bytes);
    ({ header.boot_flag } == BOOT_FLAG && { header.header } == MAGIC).then_some(header)
}

/// The size in bytes of the real-mode part in front of the protected-mode code.
pub(crate) fn setup_bytes(header: &setup_header) -> u64 {
    // "If this field contains 0, the real value is 4", not counting the boot sector.
    let sectors = match header.setup_sects {
        0 => 4,
        sectors => sectors,
    };
    (u64::from(sectors) + 1) * SECTOR
}

/// The compressed kernel in the bzImage `file`; `None` if the file ends before it does.
pub(super) fn payload<'a>(file: &'a [u8], header: &setup_header) -> Option<&'a [u8]> {
    let begin = setup_bytes(header) + u64::from(header.payload_offset);
    let end = begin + u64::from(header.payload_length);
    file.get(usize::try_from(begin).ok()?..usize::try_from(end).ok()?)
}
