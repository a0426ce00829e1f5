//! Which instructions can be executed elsewhere than where they stand.
//!
//! Functions without pads begin with a handful of instructions. Only those are known here that compute with
//! registers and constants, or push and pop: none of them accesses memory but the stack, and none knows
//! where it stands. No-operations are not among them: at the beginning of a function without a pad
//! they are places that the guest itself rewrites (jump labels, static calls). But landing pads are, and
//! what the kernel writes over them as it boots.

use super::pads::PREFIXES;

/// The length of the instruction that `text` begins with if it can be executed anywhere.
pub(super) fn length(text: &[u8]) -> Option<usize> {
    let mut landing_pads = PREFIXES.iter().map(|prefix| prefix.bytes);
    if let Some(found) = landing_pads.find(|pad| !pad.is_empty() && text.starts_with(pad)) {
        return Some(found.len());
    }
    let rex = text.first().filter(|byte| **byte & 0xf0 == 0x40);
    let wide = rex.is_some_and(|rex| rex & 8 != 0);
    let at = usize::from(rex.is_some());
    let (opcode, rest) = text.get(at..)?.split_first()?;
    let registers = rest.first().is_some_and(|modrm| modrm >> 6 == 3);
    let behind = match *opcode {
        // push and pop.
        0x50..=0x5f => 0,
        // movsxd; without a REX prefix that makes it wide nobody needs it, and decoders differ.
        0x63 if wide && registers => 1,
        // add, or, and, sub, xor, cmp between registers; test, mov.
        0x01
        | 0x03
        | 0x09
        | 0x0b
        | 0x21
        | 0x23
        | 0x29
        | 0x2b
        | 0x31
        | 0x33
        | 0x39
        | 0x3b
        | 0x84
        | 0x85
        | 0x88..=0x8b
            if registers =>
        {
            1
        }
        0x83 | 0x80 if registers => 2,
        0x81 if registers => 5,
        // mov of a constant.
        0xb8..=0xbf => {
            if wide {
                8
            } else {
                4
            }
        }
        // movzx, movsx.
        0x0f if matches!(rest, [0xb6 | 0xb7 | 0xbe | 0xbf, modrm, ..] if modrm >> 6 == 3) => 2,
        _ => return None,
    };
    let length = at + 1 + behind;
    (length <= text.len()).then_some(length)
}

#[cfg(test)]
mod tests {
    use capstone::arch::BuildsCapstone as _;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_functions_begin_with_is_known() {
        let cases: [(&[u8], usize); 9] = [
            (&[0x55], 1),
            (&[0x41, 0x57], 2),
            (&[0xf3, 0x0f, 0x1e, 0xfa], 4),
            (&[0x66, 0x0f, 0x1f, 0x00], 4),
            (&[0x48, 0x89, 0xe5], 3),
            (&[0x48, 0x83, 0xec, 0x10], 4),
            (&[0x31, 0xc0], 2),
            (&[0xb8, 1, 0, 0, 0], 5),
            (&[0x0f, 0xb6, 0xff], 3),
        ];
        for (bytes, len) in cases {
            let text = [bytes, &[0x90; 16]].concat();
            assert_eq!(length(&text), Some(len), "{bytes:02x?}");
            assert_eq!(length(&bytes[..len - 1]), None, "half of {bytes:02x?}");
        }
    }

    #[test]
    fn what_depends_on_its_place_or_may_fault_is_not() {
        let cases: [&[u8]; 10] = [
            &[0xe8, 0, 0, 0, 0],
            &[0xe9, 0, 0, 0, 0],
            &[0xeb, 0],
            &[0x74, 0],
            &[0xc3],
            &[0xcc],
            &[0x48, 0x8b, 0x05, 0, 0, 0, 0],
            &[0x48, 0x8b, 0x07],
            &[0x0f, 0x1f, 0x44, 0, 0],
            &[0x90],
        ];
        for bytes in cases {
            assert_eq!(length(&[bytes, &[0; 16]].concat()), None, "{bytes:02x?}");
        }
    }

    proptest! {
        /// Lengths are a disassembler's, and nothing that is known branches or knows its place.
        #[test]
        fn lengths_are_a_disassemblers(text in proptest::array::uniform15(any::<u8>())) {
            if let Some(len) = length(&text) {
                let capstone = capstone::Capstone::new()
                    .x86()
                    .mode(capstone::arch::x86::ArchMode::Mode64)
                    .build()
                    .unwrap();
                let one = capstone.disasm_count(&text, 0, 1).unwrap();
                let [instruction] = &one[..] else { panic!("{text:02x?} is no instruction") };
                prop_assert_eq!(instruction.bytes().len(), len);
                prop_assert!(!instruction.op_str().unwrap().contains("rip"));
            }
        }
    }
}
