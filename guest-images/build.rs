//! Compiles the programs that run inside guests: static, so that a guest needs nothing else.

use std::path::Path;
use std::process::Command;

fn main() {
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    for program in ["work", "agent"] {
        let source = format!("guest/{program}.c");
        println!("cargo::rerun-if-changed={source}");
        let status = Command::new("gcc")
            .args(["-std=gnu11", "-O2", "-static", "-s", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(Path::new(&out).join(program))
            .arg(&source)
            .status()
            .expect("gcc must be installed: scripts/setup.sh installs it");
        assert!(status.success(), "gcc could not compile {source}");
    }
}
