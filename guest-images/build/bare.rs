//! Builds the bare guests of `bare/`: an ELF file for each architecture.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{COMPILERS, run};

/// How the bare guest of one architecture is built.
struct Guest {
    architecture: &'static str,
    /// Options for all its code.
    flags: &'static [&'static str],
    /// Assembly beside `start` and `pads`.
    more: &'static [&'static str],
    /// Functions that the compiler makes pads for: their names and the options that make them.
    compiled: &'static [(&'static str, &'static [&'static str])],
}

const GUESTS: [Guest; 3] = [
    Guest {
        architecture: "s390x",
        flags: &["-march=z10", "-msoft-float"],
        more: &[],
        compiled: &[
            ("fentry_nop", &["-pg", "-mfentry", "-mnop-mcount"]),
            ("fentry", &["-pg", "-mfentry"]),
            ("mcount", &["-pg"]),
            ("mcount_nop", &["-pg", "-mnop-mcount"]),
            ("hotpatch_0_2", &["-mhotpatch=0,2"]),
            ("hotpatch_0_3", &["-mhotpatch=0,3"]),
            ("hotpatch_0_12", &["-mhotpatch=0,12"]),
            ("hotpatch_3_3", &["-mhotpatch=3,3"]),
            ("patchable_3", &["-fpatchable-function-entry=3"]),
        ],
    },
    Guest {
        architecture: "aarch64",
        // Without its MMU a processor takes no unaligned accesses.
        flags: &["-mgeneral-regs-only", "-mstrict-align"],
        more: &[],
        compiled: &[
            ("patchable_2", &["-fpatchable-function-entry=2"]),
            ("patchable_2_bti", &["-fpatchable-function-entry=2", "-mbranch-protection=bti"]),
            ("patchable_4_2", &["-fpatchable-function-entry=4,2"]),
        ],
    },
    Guest {
        architecture: "x86_64",
        // As kernels are compiled.
        flags: &[
            "-mgeneral-regs-only",
            "-mno-red-zone",
            "-mpreferred-stack-boundary=3",
            "-fcf-protection=none",
        ],
        more: &["boot"],
        compiled: &[
            ("fentry_nop", &["-pg", "-mfentry", "-mnop-mcount"]),
            ("fentry", &["-pg", "-mfentry"]),
            ("fentry_nop_endbr", &["-pg", "-mfentry", "-mnop-mcount", "-fcf-protection=branch"]),
            ("fentry_endbr", &["-pg", "-mfentry", "-fcf-protection=branch"]),
            (
                "fentry_nop_padded",
                &["-pg", "-mfentry", "-mnop-mcount", "-fpatchable-function-entry=16,16"],
            ),
            ("patchable_5", &["-fpatchable-function-entry=5"]),
        ],
    },
];

/// For code that runs without anything below it.
const FREESTANDING: [&str; 9] = [
    "-std=gnu11",
    "-O2",
    "-ffreestanding",
    "-fno-pic",
    "-fno-pie",
    "-fno-stack-protector",
    "-Wall",
    "-Wextra",
    "-Werror",
];

/// Makes `bare-ARCHITECTURE.elf` in the build's output directory for each guest.
pub(super) fn compile_all() {
    println!("cargo::rerun-if-changed=bare");
    for guest in &GUESTS {
        guest.build();
    }
}

impl Guest {
    fn build(&self) {
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let objects = out.join(format!("bare-{}", self.architecture));
        std::fs::create_dir_all(&objects).expect("cargo's output directory can be written");
        let own = Path::new("bare").join(self.architecture);

        let mut made = Vec::new();
        let mut object = |name: &str, source: &Path, options: &[&str]| {
            let object = objects.join(name).with_extension("o");
            let mut args: Vec<&str> = [&FREESTANDING, self.flags, options, &["-c"]].concat();
            args.extend(["-include"]);
            self.gcc(|command| {
                command.args(&args).arg(own.join("bare.h")).arg("-o").arg(&object).arg(source)
            });
            made.push(object);
        };
        object("bare", Path::new("bare/bare.c"), &["-fno-asynchronous-unwind-tables"]);
        for name in ["start", "pads"].iter().chain(self.more) {
            object(name, &own.join(name).with_extension("S"), &[]);
        }
        for (name, options) in self.compiled {
            let define = format!("-DNAME={name}");
            object(name, Path::new("bare/compiled.c"), &[options, &[&*define][..]].concat());
        }
        let script = own.join("link.ld");
        let elf = out.join(format!("bare-{}.elf", self.architecture));
        self.gcc(|command| {
            command
                .args(["-nostdlib", "-static", "-no-pie", "-Wl,-z,noexecstack"])
                .arg("-Wl,--no-warn-rwx-segments")
                .args(["-Wl,--build-id=none", "-T"])
                .arg(script)
                .arg("-o")
                .arg(elf)
                .args(made)
        });
    }

    /// Runs the architecture's compiler with the arguments that `with` adds.
    fn gcc(&self, with: impl FnOnce(&mut Command) -> &mut Command) {
        let compiler = COMPILERS.iter().find(|(name, ..)| *name == self.architecture);
        let (_, compiler, packages) = compiler.expect("every architecture has a compiler");
        let mut command = Command::new(compiler);
        let status = run(with(&mut command), packages);
        assert!(status.success(), "{command:?} failed ({status})");
    }
}
