//! What a logging trampoline of x86_64 does beside if it records arguments: it writes them into slots of
//! the ring behind the record's first one, before it writes that.

use crate::arch::{ArgumentWord, ArgumentWords, CONTINUATION_FIELDS};
use crate::region::{CONTINUATIONS_AT, RECORD_BYTES, RingLayout};

/// Appends what counts the slots that were reserved beside the first: `rcx` is the offset of the CPU's header,
/// and `headers` the address of the first.
pub(super) fn count(code: &mut Vec<u8>, words: ArgumentWords, headers: i32) {
    let field = headers.wrapping_add(CONTINUATIONS_AT as i32);
    code.extend_from_slice(&[0xf0, 0x48, 0x83, 0x81]); // lock add qword [rcx+headers+8], slots
    code.extend_from_slice(&field.to_le_bytes());
    code.push(words.slots() as u8);
}

/// Appends what writes the arguments: `rcx` is the offset of the CPU's ring from the first, which is at
/// `slots`, and `ebx` the index of the record. `rax` and `rdx` are lost; on the stack are the former `rbx`,
/// `rdx`, `rcx`, the flags, `rax`, and the two addresses to return to.
pub(super) fn store(code: &mut Vec<u8>, words: ArgumentWords, rings: &RingLayout, slots: i32) {
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));
    let record_shift = RECORD_BYTES.trailing_zeros() as u8;
    for (number, words) in (1_u8..).zip(words.by_slot()) {
        put(&[&[0x8d, 0x53, number]]); //     lea edx, [rbx+number]
        put(&[&[0x81, 0xe2], &rings.index_mask().to_le_bytes()]); // and edx, slots - 1
        put(&[&[0xc1, 0xe2, record_shift]]); // shl edx, log2(record)
        put(&[&[0x48, 0x8d, 0x94, 0x11], &slots.to_le_bytes()]); // lea rdx, [rcx+rdx+slots]
        put(&[&[0xc7, 0x42, 0x08, number, 0, 0, 0]]); // mov dword [rdx+8], number
        for (word, field) in words.into_iter().zip(CONTINUATION_FIELDS) {
            let (rex, register) = match word {
                ArgumentWord::Register(0) => (0x48, 7), // rdi
                ArgumentWord::Register(1) => (0x48, 6), // rsi
                ArgumentWord::Register(4) => (0x4c, 0), // r8
                ArgumentWord::Register(5) => (0x4c, 1), // r9
                kept => {
                    let at = match kept {
                        ArgumentWord::Register(2) => 8,  // rdx
                        ArgumentWord::Register(_) => 16, // rcx
                        ArgumentWord::Stack(word) => 56 + 8 * word,
                    };
                    put(&[&[0x48, 0x8b, 0x44, 0x24, at]]); // mov rax, [rsp+at]
                    (0x48, 0)
                }
            };
            put(&[&[rex, 0x89, 0x42 | register << 3, field]]); // mov [rdx+field], register
        }
        put(&[&[0x8d, 0x43, number + 1]]); // lea eax, [rbx+number+1]
        put(&[&[0x89, 0x42, 0x1c]]); //       mov [rdx+28], eax    sequence
    }
}
