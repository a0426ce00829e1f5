//! Every relocation at the edges of its reach, compared with what the toolchain's own linker takes
//! and refuses.

use std::collections::HashSet;
use std::fmt::Write;
use std::fs;

use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection};

use super::compiler::Folder;
use super::guests::{SETTINGS, Setting};
use crate::arch::relocation::{Relocation, Value};

/// Room for one place, in bytes.
const SLOT: u64 = 16;

/// The widths of fields, with and without a sign, counted in bytes or more; some others.
const BITS: [u32; 22] =
    [0, 3, 7, 8, 11, 12, 13, 15, 16, 18, 19, 20, 21, 24, 25, 27, 28, 31, 32, 33, 48, 63];

/// The linker refuses negative values here, which the ABI has and the kernel's own loader takes.
const ALSO_NEGATIVE: [&str; 2] = ["R_AARCH64_ABS32", "R_AARCH64_ABS16"];

/// What the linker always makes reach.
const VENEERED: [&str; 2] = ["R_AARCH64_CALL26", "R_AARCH64_JUMP26"];

/// One place: its relocation, and what the symbol is.
struct Case {
    relocation: &'static Relocation,
    target: u64,
}

/// Distances and addresses around every power of two that bounds a field.
fn cases(setting: &Setting) -> Vec<Case> {
    let mut cases = Vec::new();
    let rows = setting.arch.relocations().iter();
    // The assembler of these days can't name one of them.
    let rows = rows.filter(|row| {
        let name = setting.arch.relocation_name(row.kind);
        row.value != Value::Nothing && !row.value.needs_entry() && name != "R_AARCH64_PLT32"
    });
    for relocation in rows {
        let halfwords = setting.arch.relocation_name(relocation.kind).ends_with("DBL");
        for bits in BITS {
            for offset in [-4_i64, -1, 0, 1, 4] {
                // The linker ends at the first halfword at an odd address.
                if halfwords && (bits == 0 || offset % 2 != 0) {
                    continue;
                }
                for sign in [1_i64, -1] {
                    let value = sign.wrapping_shl(bits).wrapping_add(offset);
                    cases.push(Case { relocation, target: value.cast_unsigned() });
                }
            }
        }
    }
    // The place is known only now.
    for (index, case) in cases.iter_mut().enumerate() {
        if case.relocation.value.is_distance() {
            case.target = case.target.wrapping_add(place(setting, index));
        }
    }
    cases
}

fn place(setting: &Setting, index: usize) -> u64 {
    setting.room.next_multiple_of(4096) + index as u64 * SLOT
}

/// What stands in the fields before: bits around them must stay.
fn filler(setting: &Setting, case: &Case) -> [u8; SLOT as usize] {
    let mut bytes = [0; SLOT as usize];
    if setting.arch.name() == "aarch64" && case.relocation.len == 4 {
        bytes[..4].copy_from_slice(&0xd280_0000_u32.to_le_bytes());
    }
    bytes
}

#[test]
fn relocations_reach_as_far_as_the_linker_has_them() {
    for setting in SETTINGS {
        let cases = cases(&setting);
        let folder = Folder::new();
        let mut source = String::from(".text\n");
        let mut script = String::new();
        for (index, case) in cases.iter().enumerate() {
            let name = setting.arch.relocation_name(case.relocation.kind);
            writeln!(source, ".reloc ., {name}, s{index}").unwrap();
            let bytes = filler(&setting, case).map(|byte| byte.to_string()).join(",");
            writeln!(source, ".byte {bytes}").unwrap();
            writeln!(script, "s{index} = {:#x};", case.target).unwrap();
        }
        let at = place(&setting, 0);
        writeln!(script, "SECTIONS {{ .text {at:#x} : {{ *(.text) }} /DISCARD/ : {{ *(*) }} }}")
            .unwrap();
        let object = setting.compiler.compile_into(&folder, &source, ".s", &[]);
        let [file, linked] = ["script", "linked"].map(|name| folder.file(name));
        fs::write(&file, script).unwrap();
        let mut linker = setting.compiler.tool("ld");
        // All that does not fit is said, and the rest linked all the same.
        linker.args(["-static", "--no-relax", "--verbose", "--noinhibit-exec", "-e", "0"]);
        linker.args(["-m", setting.emulation, "-T"]).arg(file).arg("-o").arg(&linked).arg(object);
        let output = linker.output().expect("scripts/setup.sh installs the linker");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let refused: HashSet<u64> = said.lines().filter_map(refused_offset).collect();
        let file = fs::read(linked)
            .unwrap_or_else(|error| panic!("{error}: {}", said.lines().last().unwrap_or_default()));
        let elf = ElfFile64::<Endianness>::parse(&*file).unwrap();
        let theirs = elf.section_by_name(".text").unwrap().data().unwrap();

        let mut fitted = 0;
        let mut differences = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            let relocation = case.relocation;
            let mut bytes = filler(&setting, case);
            let value = relocation.value.compute(case.target, 0, place(&setting, index));
            let ours = (relocation.write)(&mut bytes[..relocation.len], value);
            let offset = index as u64 * SLOT;
            let they = theirs[offset as usize..].first_chunk().copied().unwrap();
            match (ours.is_ok(), refused.contains(&offset)) {
                (true, refused) => {
                    fitted += 1;
                    let name = setting.arch.relocation_name(relocation.kind);
                    let negative = value.cast_signed() < 0 && ALSO_NEGATIVE.contains(&&*name);
                    if refused != negative || bytes != they {
                        differences.push(describe(&setting, relocation, value, &bytes, &they));
                    }
                }
                (false, true) => {}
                (false, false) => {
                    // It puts branches of its own between a call and what is far away.
                    let name = setting.arch.relocation_name(relocation.kind);
                    if !VENEERED.contains(&&*name)
                        && !is_cut_off(relocation, value, filler(&setting, case), they)
                    {
                        differences.push(describe(&setting, relocation, value, &[], &they));
                    }
                }
            }
        }
        let misfits = cases.len() - fitted;
        assert!(fitted > 300 && misfits > 300, "{fitted} {misfits} {said:.2000}");
        let shown = differences
            .iter()
            .step_by(differences.len() / 40 + 1)
            .fold(String::new(), |all, one| all + one + "\n");
        assert!(differences.is_empty(), "{} of {}:\n{shown}", differences.len(), cases.len());
    }
}

/// Whether `they` is what the low bits of the value make, which fit, with or without a sign: for some
/// fields the linker does not refuse what it cuts off.
fn is_cut_off(of: &Relocation, value: u64, before: [u8; 16], they: [u8; 16]) -> bool {
    let low = (1..64).map(|bits| value << bits);
    let both = low.enumerate().flat_map(|(bits, high)| {
        [high >> (bits + 1), (high.cast_signed() >> (bits + 1)).cast_unsigned()]
    });
    // Nor does it refuse branches into the middle of instructions.
    both.chain([value & !3]).any(|value| {
        let mut bytes = before;
        (of.write)(&mut bytes[..of.len], value).is_ok() && bytes == they
    })
}

fn describe(setting: &Setting, of: &Relocation, value: u64, ours: &[u8], theirs: &[u8]) -> String {
    let name = setting.arch.relocation_name(of.kind);
    format!("{name} {value:#x}: {ours:02x?} {theirs:02x?}")
}

/// The offset in the text of which the linker says that something does not fit there.
fn refused_offset(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once("(.text+0x")?;
    let (digits, _) = rest.split_once(')')?;
    u64::from_str_radix(digits, 16).ok()
}
