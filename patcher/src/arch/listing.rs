//! What the code that architectures make says, as a disassembler reads it: for their tests.

use capstone::prelude::*;
use capstone::{Capstone, CsResult};

use crate::addr::Gva;

/// The instructions of x86_64 code at `at`.
///
/// # Panics
/// It is none to its end.
pub(super) fn x86_64(code: &[u8], at: Gva) -> Vec<String> {
    listing(Capstone::new().x86().mode(arch::x86::ArchMode::Mode64).build(), code, at)
}

/// The same of s390x.
pub(super) fn s390x(code: &[u8], at: Gva) -> Vec<String> {
    listing(Capstone::new().sysz().mode(arch::sysz::ArchMode::Default).build(), code, at)
}

/// The same of aarch64.
pub(super) fn aarch64(code: &[u8], at: Gva) -> Vec<String> {
    listing(Capstone::new().arm64().mode(arch::arm64::ArchMode::Arm).build(), code, at)
}

fn listing(capstone: CsResult<Capstone>, code: &[u8], at: Gva) -> Vec<String> {
    let capstone = capstone.expect("capstone");
    let instructions = capstone.disasm_all(code, at.0).expect("disassembly");
    let decoded: usize = instructions.iter().map(|i| i.len()).sum();
    assert_eq!(decoded, code.len(), "the code decodes to its end");
    let text = |i: &capstone::Insn<'_>| {
        format!("{} {}", i.mnemonic().unwrap(), i.op_str().unwrap()).trim().to_owned()
    };
    instructions.iter().map(text).collect()
}
