//! Objects as compilers make them for kernels.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Flags of every kernel's build (Makefile), whatever the architecture.
const COMMON: &[&str] = &[
    "-c",
    "-O2",
    "-std=gnu11",
    "-ffreestanding",
    "-fno-strict-aliasing",
    "-fno-common",
    "-fno-delete-null-pointer-checks",
    "-fno-asynchronous-unwind-tables",
    "-fno-stack-protector",
    "-Wall",
    "-Werror",
];

/// A toolchain and the flags with which a kernel is built by it.
#[derive(Debug, Clone, Copy)]
pub(in crate::livepatch) struct Compiler {
    /// What the names of its programs begin with.
    pub(in crate::livepatch) prefix: &'static str,
    flags: &'static [&'static str],
}

/// arch/x86/Makefile
pub(in crate::livepatch) const X86_64: Compiler = Compiler {
    prefix: "",
    flags: &[
        "-m64",
        "-mno-sse",
        "-mno-mmx",
        "-mno-80387",
        "-mno-red-zone",
        "-mcmodel=kernel",
        "-fno-PIE",
        "-fno-jump-tables",
    ],
};

/// arch/s390/Makefile
pub(in crate::livepatch) const S390X: Compiler = Compiler {
    prefix: "s390x-linux-gnu-",
    flags: &["-m64", "-march=z10", "-mbackchain", "-mpacked-stack", "-msoft-float"],
};

/// arch/arm64/Makefile
pub(in crate::livepatch) const AARCH64: Compiler = Compiler {
    prefix: "aarch64-linux-gnu-",
    flags: &["-mgeneral-regs-only", "-mno-outline-atomics", "-mabi=lp64", "-fno-PIE"],
};

/// A folder that is gone with its owner.
#[derive(Debug)]
pub(in crate::livepatch) struct Folder(PathBuf);

impl Folder {
    pub(in crate::livepatch) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vmm-payload-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a folder for objects can be made");
        Self(path)
    }

    pub(in crate::livepatch) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a tool of the toolchain, which has to succeed.
pub(in crate::livepatch) fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/setup.sh installs it"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
}

impl Compiler {
    /// One of the toolchain's programs.
    pub(in crate::livepatch) fn tool(&self, name: &str) -> Command {
        Command::new(format!("{}{name}", self.prefix))
    }

    /// Compiles C, or with `.s` as the suffix assembly, into `folder`.
    pub(in crate::livepatch) fn compile_into(
        &self,
        folder: &Folder,
        source: &str,
        suffix: &str,
        flags: &[&str],
    ) -> PathBuf {
        let (input, output) = (folder.file(&format!("payload{suffix}")), folder.file("payload.o"));
        fs::write(&input, source).expect("the folder can be written");
        let mut command = self.tool("gcc");
        run(command.args(COMMON).args(self.flags).args(flags).arg(input).arg("-o").arg(&output));
        output
    }

    /// The object made of this assembly.
    pub(in crate::livepatch) fn assemble(&self, source: &str) -> Vec<u8> {
        let folder = Folder::new();
        let object = self.compile_into(&folder, source, ".s", &[]);
        fs::read(object).expect("the assembler has written it")
    }

    /// The object made of this C.
    pub(in crate::livepatch) fn compile(&self, source: &str, flags: &[&str]) -> Vec<u8> {
        let folder = Folder::new();
        let object = self.compile_into(&folder, source, ".c", flags);
        fs::read(object).expect("the compiler has written it")
    }
}
