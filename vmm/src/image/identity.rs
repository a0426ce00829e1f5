//! What a file is, from its first bytes.

/// Enough of a file to hold the setup header of a bzImage, and the magic numbers of what else it may be:
/// the furthest is that of s390 kernels.
pub(super) const HEAD: usize = 0x1_0010;

/// What a file is that is no bzImage.
pub(crate) enum Identity {
    /// A kernel, for another architecture than x86_64.
    Kernel(&'static str),
    /// Something else.
    Other(&'static str),
}

/// Says what a file is that is no bzImage, from its first bytes.
pub(crate) fn identify(head: &[u8]) -> Identity {
    let at = |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|h| h.starts_with(magic));
    // ELF header: e_machine at 18. Its values are those of the System V ABI's registry.
    let machine = |low: u8, high: u8| at(18, &[low, high]);
    if head.is_empty() {
        Identity::Other("an empty file")
    } else if at(56, b"ARM\x64") {
        Identity::Kernel("arm64")
    } else if at(0x30, b"RISCV\0\0\0") {
        Identity::Kernel("RISC-V")
    } else if at(0x1_0008, b"S390EP") {
        Identity::Kernel("s390x")
    } else if at(0, b"\x7fELF") {
        if machine(62, 0) {
            Identity::Other("an x86_64 ELF file, perhaps a vmlinux; give the bzImage made from it")
        } else if machine(183, 0) {
            Identity::Kernel("arm64")
        } else if machine(0, 22) {
            Identity::Kernel("s390x")
        } else {
            Identity::Kernel("another architecture (ELF)")
        }
    } else if at(0, b"MZ") {
        Identity::Other("an EFI program without a Linux setup header")
    } else if at(0, b"070701") || at(0, b"070702") {
        Identity::Other("a cpio archive, perhaps an initramfs")
    } else if at(0, &[0x1f, 0x8b]) {
        Identity::Other("gzip data, perhaps an initramfs or a kernel that must be unpacked first")
    } else if at(0, &[0x28, 0xb5, 0x2f, 0xfd]) {
        Identity::Other("zstd data, perhaps an initramfs")
    } else if at(0, &[0xfd, b'7', b'z', b'X', b'Z']) {
        Identity::Other("xz data, perhaps an initramfs")
    } else {
        Identity::Other("something without a Linux setup header")
    }
}
