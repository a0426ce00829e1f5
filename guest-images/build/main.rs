//! Compiles the programs that run inside guests, static, so that a guest needs nothing else, and
//! those that are guests.

use std::path::Path;
use std::process::{Command, ExitStatus};

mod bare;

/// A guest's architecture, its compiler, and the packages that have the compiler.
const COMPILERS: [(&str, &str, &str); 3] = [
    ("x86_64", "gcc", "gcc and libc6-dev"),
    ("s390x", "s390x-linux-gnu-gcc", "gcc-s390x-linux-gnu and libc6-dev-s390x-cross"),
    ("aarch64", "aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu and libc6-dev-arm64-cross"),
];

fn main() {
    for program in ["work", "agent"] {
        println!("cargo::rerun-if-changed=guest/{program}.c");
    }
    for compiler in COMPILERS {
        compile("work", compiler);
    }
    // The lab's first level is a machine of this one alone.
    compile("agent", COMPILERS[0]);
    bare::compile_all();
}

/// Makes `PROGRAM-ARCHITECTURE` in the build's output directory.
fn compile(program: &str, (architecture, compiler, packages): (&str, &str, &str)) {
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let source = format!("guest/{program}.c");
    let mut command = Command::new(compiler);
    command
        .args(["-std=gnu11", "-O2", "-static", "-s", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(Path::new(&out).join(format!("{program}-{architecture}")))
        .arg(&source);
    let status = run(&mut command, packages);
    assert!(
        status.success(),
        "{compiler} could not compile {source} ({status}); if it found no C library, install the \
         packages {packages} (scripts/setup.sh does)"
    );
}

/// Runs a compiler of `packages`.
fn run(command: &mut Command, packages: &str) -> ExitStatus {
    command.status().unwrap_or_else(|error| {
        let compiler = command.get_program().display();
        panic!(
            "{compiler} cannot be started ({error}); install the packages {packages} \
             (scripts/setup.sh does)"
        )
    })
}
