//! What tests of the built program share.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs, process};

/// The program, with nothing to read.
pub fn vmm(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmm"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// A directory of a test's own, removed when it ends.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(test: &str) -> Self {
        let path = env::temp_dir().join(format!("vmm-test-{}-{test}", process::id()));
        fs::create_dir_all(&path).expect("a temporary folder can be made");
        Self(path)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("temporary paths are UTF-8").to_owned()
    }

    /// Writes a file and gives its path.
    pub fn file(&self, name: &str, content: &[u8]) -> String {
        let path = self.path(name);
        fs::write(&path, content).expect("a temporary file can be written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What can't be removed is in a temporary folder anyway.
        let _ = fs::remove_dir_all(Path::new(&self.0));
    }
}

/// A bzImage whose 64-bit entry point runs `code` and nothing else.
///
/// Offsets are those of the Linux/x86 boot protocol.
pub fn toy_kernel(code: &[u8]) -> Vec<u8> {
    const SETUP: usize = 2 * 512;
    const ENTRY_64: usize = 0x200;
    let mut image = vec![0; SETUP + 0x1000];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]); // setup_sects, beside the boot sector
    put(0x1f4, &(0x1000_u32 / 16).to_le_bytes()); // syssize
    put(0x1fe, &0xaa55_u16.to_le_bytes()); // boot_flag
    put(0x202, b"HdrS");
    put(0x206, &0x20f_u16.to_le_bytes()); // version
    put(0x211, &[1]); // loadflags: LOADED_HIGH
    put(0x214, &0x10_0000_u32.to_le_bytes()); // code32_start
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes()); // initrd_addr_max
    put(0x230, &0x20_0000_u32.to_le_bytes()); // kernel_alignment
    put(0x234, &[1]); // relocatable_kernel
    put(0x236, &1_u16.to_le_bytes()); // xloadflags: XLF_KERNEL_64
    put(0x238, &2047_u32.to_le_bytes()); // cmdline_size
    put(0x258, &0x100_0000_u64.to_le_bytes()); // pref_address
    put(0x260, &0x10_0000_u32.to_le_bytes()); // init_size
    put(SETUP + ENTRY_64, code);
    image
}
