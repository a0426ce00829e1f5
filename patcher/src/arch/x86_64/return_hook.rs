//! The code that takes the return of an x86_64 function: a piece in front of it, and what it returns to.
//!
//! The piece takes a slot and puts the address of the slot's stub where the return address was. The stub
//! calls the code behind all stubs, which is how that learns which slot it is; it records, gives the slot
//! back, and returns to where the function would have, in place of the call that it was entered by: so
//! the processor's own stack of return addresses stays in step but for the one that was replaced.
//!
//! Neither takes a lock. Either may be interrupted at every instruction, by calls whose returns are taken,
//! too: a list's head changes by one locked instruction that notices any change since it was read, and a
//! task that is moved to another CPU before that changes the list of the CPU that it has left.
//!
//! Registers and flags are kept, those that hold a returned value as well.

use super::measure;
use super::trampoline::{REACH, append_then, restore_flags};
use crate::addr::Gva;
use crate::arch::{OutOfReach, PidPlace, ReturnExit, ReturnHook, Then};
use crate::region::{
    FREE_LIST_BYTES, HEADER_BYTES, RECORD_BYTES, RECORD_RETURN, RETURN_SLOT_BYTES,
    RETURN_STUB_BYTES, slot,
};

/// An address as a sign-extended displacement names it.
pub(super) fn absolute(at: Gva, to: Gva) -> Result<i32, OutOfReach> {
    i32::try_from(to.0.cast_signed()).map_err(|_| OutOfReach { from: at, to, reach: REACH })
}

/// The piece in front of the function, to be placed at `at`.
///
/// # Errors
/// The pool is not within the lowest or highest 2 GiB of the address space, or what is executed behind
/// the piece not within 2 GiB of it.
pub(super) fn assemble_hook(hook: &ReturnHook, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    let pool = &hook.pool;
    let lists = absolute(at, pool.lists())?;
    let missed = absolute(at, pool.missed())?;
    absolute(at, pool.end())?;
    // Slots are counted from 1.
    let slots = absolute(at, pool.slots())?.wrapping_sub(RETURN_SLOT_BYTES as i32);
    let stubs = absolute(at, pool.stubs)?.wrapping_sub(RETURN_STUB_BYTES as i32);
    absolute(at, pool.stub_range().end)?;
    let field = |offset: u8| slots.wrapping_add(offset.into()).to_le_bytes();
    let slot_shift = RETURN_SLOT_BYTES.trailing_zeros() as u8;
    let to_stub = slot_shift - RETURN_STUB_BYTES.trailing_zeros() as u8;
    let list_shift = FREE_LIST_BYTES.trailing_zeros() as u8;

    let mut code = Vec::with_capacity(192);
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));
    put(&[&[0x50]]); //                       push rax
    put(&[&[0x9c]]); //                       pushfq
    put(&[&[0x51]]); //                       push rcx
    put(&[&[0x52]]); //                       push rdx
    put(&[&[0x53]]); //                       push rbx
    put(&[&[0x56]]); //                       push rsi

    // A slot of this CPU's list, or else of the one for all: edx = its number, times its size.
    put(&[&[0x65, 0x8b, 0x0c, 0x25], &hook.cpu_number.to_le_bytes()]); // mov ecx, gs:[cpu]
    put(&[&[0xc1, 0xe1, list_shift]]); //     shl ecx, log2(list)
    put(&[&[0x83, 0xc1, FREE_LIST_BYTES as u8]]); // add ecx, list
    put(&[&[0x48, 0x8b, 0x81], &lists.to_le_bytes()]); // 1: mov rax, [rcx+lists]
    put(&[&[0x89, 0xc2]]); //              2: mov edx, eax
    put(&[&[0x85, 0xd2]]); //                 test edx, edx
    put(&[&[0x74, 0x26]]); //                 jz 3f
    put(&[&[0xc1, 0xe2, slot_shift]]); //     shl edx, log2(slot)
    put(&[&[0x8b, 0x9a], &field(slot::NEXT)]); // mov ebx, [rdx+slots+next]
    put(&[&[0x48, 0x89, 0xc6]]); //           mov rsi, rax
    put(&[&[0x48, 0xc1, 0xee, 32]]); //       shr rsi, 32
    put(&[&[0xff, 0xc6]]); //                 inc esi
    put(&[&[0x48, 0xc1, 0xe6, 32]]); //       shl rsi, 32
    put(&[&[0x48, 0x09, 0xf3]]); //           or rbx, rsi
    put(&[&[0xf0, 0x48, 0x0f, 0xb1, 0x99], &lists.to_le_bytes()]); // lock cmpxchg [rcx+lists], rbx
    put(&[&[0x75, 0xd6]]); //                 jne 2b
    put(&[&[0xeb, 0x13]]); //                 jmp 4f
    put(&[&[0x85, 0xc9]]); //              3: test ecx, ecx
    put(&[&[0x74, 0x04]]); //                 jz none left
    put(&[&[0x31, 0xc9]]); //                 xor ecx, ecx
    put(&[&[0xeb, 0xc5]]); //                 jmp 1b
    put(&[&[0xf0, 0x48, 0xff, 0x04, 0x25], &missed.to_le_bytes()]); // lock inc qword [missed]
    let skip = [0xeb, 0]; //                  jmp behind what fills the slot
    put(&[&skip]);
    let skipped_from = code.len();
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));

    // 4: fill it, and have its stub be returned to.
    put(&[&[0x89, 0xd3]]); //                 mov ebx, edx
    if hook.clock {
        put(&[&[0x0f, 0x31]]); //             rdtsc
        put(&[&[0x89, 0x83], &field(slot::TIME)]); // mov [rbx+slots+time], eax
        put(&[&[0x89, 0x93], &field(slot::TIME + 4)]); // mov [rbx+slots+time+4], edx
    }
    put(&[&[0x48, 0x8b, 0x44, 0x24, 0x38]]); // mov rax, [rsp+56]
    put(&[&[0x48, 0x89, 0x83], &field(slot::RETURN)]); // mov [rbx+slots+return], rax
    put(&[&[0x8b, 0x44, 0x24, 0x30]]); //     mov eax, [rsp+48]
    put(&[&[0x89, 0x83], &field(slot::FUNCTION)]); // mov [rbx+slots+function], eax
    put(&[&[0xc7, 0x83], &field(slot::DUTIES), &hook.duties.to_le_bytes()]); // mov dword [..], duties
    put(&[&[0x89, 0xd8]]); //                 mov eax, ebx
    put(&[&[0xc1, 0xe8, to_stub]]); //        shr eax, log2(slot/stub)
    put(&[&[0x48, 0x8d, 0x80], &stubs.to_le_bytes()]); // lea rax, [rax+stubs]
    put(&[&[0x48, 0x89, 0x44, 0x24, 0x38]]); // mov [rsp+56], rax
    put(&[&[0xc7, 0x83], &field(slot::PLACED), &1_u32.to_le_bytes()]); // mov dword [..], 1
    let skipped = code.len() - skipped_from;
    debug_assert!(skipped < 0x80, "a short jump reaches so far");
    code[skipped_from - 1] = skipped as u8;

    code.extend_from_slice(&[0x5e]); //       pop rsi
    restore_flags(&mut code);
    append_then(&mut code, at, hook.then)?;
    Ok(code)
}

/// The code behind all stubs, to be placed at `at`.
///
/// # Errors
/// As [`assemble_hook`]; also for the rings.
pub(super) fn assemble_exit(exit: &ReturnExit, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    let (pool, rings) = (&exit.pool, &exit.rings);
    let lists = absolute(at, pool.lists())?.to_le_bytes();
    let slots = absolute(at, pool.slots())?;
    absolute(at, pool.end())?;
    // Where the call of the first stub returns to.
    let first = pool.stubs + CALL_BYTES;
    let headers = absolute(at, rings.headers())?.to_le_bytes();
    let records = absolute(at, rings.slots())?.to_le_bytes();
    absolute(at, rings.end())?;
    let field = |offset: u8| slots.wrapping_add(offset.into()).to_le_bytes();
    let slot_shift = RETURN_SLOT_BYTES.trailing_zeros() as u8;
    let from_stub = slot_shift - RETURN_STUB_BYTES.trailing_zeros() as u8;
    let list_shift = FREE_LIST_BYTES.trailing_zeros() as u8;
    let [header_shift, record_shift] =
        [HEADER_BYTES, RECORD_BYTES].map(|n| n.trailing_zeros() as u8);

    let mut code = Vec::with_capacity(256);
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));
    put(&[&[0x50]]); //                       push rax
    put(&[&[0x9c]]); //                       pushfq
    put(&[&[0x51]]); //                       push rcx
    put(&[&[0x52]]); //                       push rdx
    put(&[&[0x53]]); //                       push rbx
    put(&[&[0x56]]); //                       push rsi
    put(&[&[0x57]]); //                       push rdi

    // ebx = the slot's number, from 0, times its size.
    put(&[&[0x8b, 0x5c, 0x24, 0x38]]); //     mov ebx, [rsp+56]
    put(&[&[0x81, 0xeb], &(first.0 as u32).to_le_bytes()]); // sub ebx, first
    put(&[&[0xc1, 0xe3, from_stub]]); //      shl ebx, log2(slot/stub)
    put(&[&[0x65, 0x8b, 0x0c, 0x25], &exit.cpu_number.to_le_bytes()]); // mov ecx, gs:[cpu]
    measure::append(&mut code, at, exit)?;
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));
    put(&[&[0xf7, 0x83], &field(slot::DUTIES), &RECORD_RETURN.to_le_bytes()]); // test dword [..], record
    put(&[&[0x0f, 0x84, 0, 0, 0, 0]]); //     jz 1f
    let unrecorded_from = code.len();
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));

    // The record, as for a call: rsi = its index, rdi = its place.
    put(&[&[0xbe, 1, 0, 0, 0]]); //           mov esi, 1
    put(&[&[0x89, 0xca]]); //                 mov edx, ecx
    put(&[&[0xc1, 0xe2, header_shift]]); //   shl edx, log2(header)
    put(&[&[0xf0, 0x48, 0x0f, 0xc1, 0xb2], &headers]); // lock xadd [rdx+headers], rsi
    put(&[&[0x89, 0xcf]]); //                 mov edi, ecx
    put(&[&[0x48, 0xc1, 0xe7, rings.ring_shift()]]); // shl rdi, log2(ring)
    put(&[&[0x89, 0xf2]]); //                 mov edx, esi
    put(&[&[0x81, 0xe2], &rings.index_mask().to_le_bytes()]); // and edx, records - 1
    put(&[&[0xc1, 0xe2, record_shift]]); //   shl edx, log2(record)
    put(&[&[0x48, 0x8d, 0xbc, 0x17], &records]); // lea rdi, [rdi+rdx+records]
    if exit.clock {
        put(&[&[0x0f, 0x31]]); //             rdtsc
        put(&[&[0x48, 0xc1, 0xe2, 32]]); //   shl rdx, 32
        put(&[&[0x48, 0x09, 0xd0]]); //       or rax, rdx
    } else {
        put(&[&[0x31, 0xc0]]); //             xor eax, eax
    }
    put(&[&[0x48, 0x89, 0x07]]); //           mov [rdi], rax
    put(&[&[0x8b, 0x83], &field(slot::FUNCTION)]); // mov eax, [rbx+slots+function]
    put(&[&[0xff, 0xc0]]); //                 inc eax
    put(&[&[0x89, 0x47, 0x08]]); //           mov [rdi+8], eax
    put(&[&[0x48, 0x8b, 0x44, 0x24, 0x30]]); // mov rax, [rsp+48]
    put(&[&[0x48, 0x89, 0x47, 0x0c]]); //     mov [rdi+12], rax         the value returned
    match exit.task.pid {
        Some(PidPlace::InTask { current, pid }) => {
            put(&[&[0x65, 0x48, 0x8b, 0x04, 0x25], &current.to_le_bytes()]); // mov rax, gs:[current]
            put(&[&[0x8b, 0x80], &pid.to_le_bytes()]); //  mov eax, [rax+pid]
        }
        Some(PidPlace::Fixed(_)) | None => put(&[&[0x31, 0xc0]]), // xor eax, eax
    }
    put(&[&[0x89, 0x47, 0x14]]); //           mov [rdi+20], eax         task
    match exit.task.preempt_count {
        Some(count) => put(&[&[0x65, 0x8b, 0x04, 0x25], &count.to_le_bytes()]), // mov eax, gs:[count]
        None => put(&[&[0x31, 0xc0]]),                                          //     xor eax, eax
    }
    put(&[&[0x89, 0x47, 0x18]]); //           mov [rdi+24], eax         count
    put(&[&[0xff, 0xc6]]); //                 inc esi
    put(&[&[0x89, 0x77, 0x1c]]); //           mov [rdi+28], esi         sequence
    let unrecorded = (code.len() - unrecorded_from) as u32;
    code[unrecorded_from - 4..unrecorded_from].copy_from_slice(&unrecorded.to_le_bytes());
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));

    // 1: the slot is free from here on, so what it says is read before.
    put(&[&[0x48, 0x8b, 0xbb], &field(slot::RETURN)]); // mov rdi, [rbx+slots+return]
    put(&[&[0xc7, 0x83], &field(slot::PLACED), &0_u32.to_le_bytes()]); // mov dword [..], 0
    // Before another call can have the slot: who looks at the stack finds one or the other.
    put(&[&[0x48, 0x89, 0x7c, 0x24, 0x38]]); // mov [rsp+56], rdi
    put(&[&[0xc1, 0xe1, list_shift]]); //     shl ecx, log2(list)
    put(&[&[0x83, 0xc1, FREE_LIST_BYTES as u8]]); // add ecx, list
    put(&[&[0x48, 0x8b, 0x81], &lists]); //   mov rax, [rcx+lists]
    put(&[&[0x89, 0x83], &field(slot::NEXT)]); // 2: mov [rbx+slots+next], eax
    put(&[&[0x48, 0x89, 0xc2]]); //           mov rdx, rax
    put(&[&[0x48, 0xc1, 0xea, 32]]); //       shr rdx, 32
    put(&[&[0xff, 0xc2]]); //                 inc edx
    put(&[&[0x48, 0xc1, 0xe2, 32]]); //       shl rdx, 32
    put(&[&[0x89, 0xde]]); //                 mov esi, ebx
    put(&[&[0xc1, 0xee, slot_shift]]); //     shr esi, log2(slot)
    put(&[&[0xff, 0xc6]]); //                 inc esi
    put(&[&[0x48, 0x09, 0xf2]]); //           or rdx, rsi
    put(&[&[0xf0, 0x48, 0x0f, 0xb1, 0x91], &lists]); // lock cmpxchg [rcx+lists], rdx
    put(&[&[0x75, 0xd8]]); //                 jne 2b
    put(&[&[0x5f]]); //                       pop rdi
    put(&[&[0x5e]]); //                       pop rsi
    restore_flags(&mut code);
    append_then(&mut code, at, Then::GoOn { behind: 0, form: exit.returns })?;
    Ok(code)
}

/// Bytes of a relative call.
const CALL_BYTES: u64 = 5;

/// The stub at `at`, which leads to the code at `exit`.
///
/// # Errors
/// That is not within 2 GiB.
pub(super) fn assemble_stub(at: Gva, exit: Gva) -> Result<[u8; 8], OutOfReach> {
    let distance = exit.0.wrapping_sub(at.0 + CALL_BYTES).cast_signed();
    let distance =
        i32::try_from(distance).map_err(|_| OutOfReach { from: at, to: exit, reach: REACH })?;
    let mut stub = [0xcc; 8];
    stub[0] = 0xe8; // call exit
    stub[1..5].copy_from_slice(&distance.to_le_bytes());
    Ok(stub)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::listing::x86_64 as listing;
    use crate::arch::{ReturnForm, TaskPlaces, Then};
    use crate::region::{Histograms, RECORD_RETURN, ReturnPool, RingLayout};

    const AT: Gva = Gva(0xffff_ffff_be00_0000);
    const POOL: ReturnPool =
        ReturnPool { at: Gva(0xffff_ffff_be50_0000), stubs: Gva(0xffff_ffff_be01_0000) };

    #[test]
    fn the_code_is_what_its_comments_say() {
        let then = Then::GoOn { behind: 0, form: ReturnForm::Plain };
        let hook = ReturnHook {
            cpu_number: 0x1_f0c0,
            pool: POOL,
            clock: true,
            duties: RECORD_RETURN,
            then,
        };
        assert_eq!(
            listing(&assemble_hook(&hook, AT).unwrap(), AT),
            [
                "push rax",
                "pushfq",
                "push rcx",
                "push rdx",
                "push rbx",
                "push rsi",
                "mov ecx, dword ptr gs:[0x1f0c0]",
                "shl ecx, 6",
                "add ecx, 0x40",
                "mov rax, qword ptr [rcx - 0x41aff000]",
                "mov edx, eax",
                "test edx, edx",
                "je 0xffffffffbe000047",
                "shl edx, 5",
                "mov ebx, dword ptr [rdx - 0x41af6008]",
                "mov rsi, rax",
                "shr rsi, 0x20",
                "inc esi",
                "shl rsi, 0x20",
                "or rbx, rsi",
                "lock cmpxchg qword ptr [rcx - 0x41aff000], rbx",
                "jne 0xffffffffbe00001b",
                "jmp 0xffffffffbe00005a",
                "test ecx, ecx",
                "je 0xffffffffbe00004f",
                "xor ecx, ecx",
                "jmp 0xffffffffbe000014",
                "lock inc qword ptr [0xffffffffbe500040]",
                "jmp 0xffffffffbe0000a5",
                "mov ebx, edx",
                "rdtsc",
                "mov dword ptr [rbx - 0x41af6018], eax",
                "mov dword ptr [rbx - 0x41af6014], edx",
                "mov rax, qword ptr [rsp + 0x38]",
                "mov qword ptr [rbx - 0x41af6020], rax",
                "mov eax, dword ptr [rsp + 0x30]",
                "mov dword ptr [rbx - 0x41af6010], eax",
                "mov dword ptr [rbx - 0x41af600c], 0x80000000",
                "mov eax, ebx",
                "shr eax, 2",
                "lea rax, [rax - 0x41ff0008]",
                "mov qword ptr [rsp + 0x38], rax",
                "mov dword ptr [rbx - 0x41af6004], 1",
                "pop rsi",
                "pop rbx",
                "pop rdx",
                "pop rcx",
                "pop rax",
                "ror ax, 8",
                "and al, 8",
                "add al, 0x78",
                "sahf",
                "pop rax",
                "ret",
                "int3",
            ]
        );
        let exit = ReturnExit {
            cpu_number: 0x1_f0c0,
            rings: RingLayout::new(AT + (4 << 20), 0x400_0000 + (2 << 20), 2).unwrap(),
            clock: true,
            task: TaskPlaces {
                pid: Some(PidPlace::InTask { current: 0x1_fb80, pid: 2416 }),
                preempt_count: Some(0x1_fb88),
            },
            pool: POOL,
            histograms: Histograms(Gva(0xffff_ffff_be44_0000)),
            returns: ReturnForm::Plain,
        };
        assert_eq!(
            listing(&assemble_exit(&exit, AT).unwrap(), AT),
            [
                "push rax",
                "pushfq",
                "push rcx",
                "push rdx",
                "push rbx",
                "push rsi",
                "push rdi",
                "mov ebx, dword ptr [rsp + 0x38]",
                "sub ebx, 0xbe010005",
                "shl ebx, 2",
                "mov ecx, dword ptr gs:[0x1f0c0]",
                "test dword ptr [rbx - 0x41af5fec], 0x20000000",
                "je 0xffffffffbe000071",
                "rdtsc",
                "shl rdx, 0x20",
                "or rax, rdx",
                "sub rax, qword ptr [rbx - 0x41af5ff8]",
                "jae 0xffffffffbe00003c",
                "xor eax, eax",
                "mul qword ptr [0xffffffffbe440000]",
                "shrd rax, rdx, 0x20",
                "btr rax, 0x3f",
                "movzx edi, word ptr [rbx - 0x41af5fec]",
                "shl edi, 9",
                "lock add qword ptr [rdi - 0x41bbfe08], rax",
                "or rax, 1",
                "bsr rax, rax",
                "lock inc qword ptr [rdi + rax*8 - 0x41bc0000]",
                "test dword ptr [rbx - 0x41af5fec], 0x80000000",
                "je 0xffffffffbe0000ef",
                "mov esi, 1",
                "mov edx, ecx",
                "shl edx, 7",
                "lock xadd qword ptr [rdx - 0x41c00000], rsi",
                "mov edi, ecx",
                "shl rdi, 0x19",
                "mov edx, esi",
                "and edx, 0xfffff",
                "shl edx, 5",
                "lea rdi, [rdi + rdx - 0x41bf0000]",
                "rdtsc",
                "shl rdx, 0x20",
                "or rax, rdx",
                "mov qword ptr [rdi], rax",
                "mov eax, dword ptr [rbx - 0x41af5ff0]",
                "inc eax",
                "mov dword ptr [rdi + 8], eax",
                "mov rax, qword ptr [rsp + 0x30]",
                "mov qword ptr [rdi + 0xc], rax",
                "mov rax, qword ptr gs:[0x1fb80]",
                "mov eax, dword ptr [rax + 0x970]",
                "mov dword ptr [rdi + 0x14], eax",
                "mov eax, dword ptr gs:[0x1fb88]",
                "mov dword ptr [rdi + 0x18], eax",
                "inc esi",
                "mov dword ptr [rdi + 0x1c], esi",
                "mov rdi, qword ptr [rbx - 0x41af6000]",
                "mov dword ptr [rbx - 0x41af5fe4], 0",
                "mov qword ptr [rsp + 0x38], rdi",
                "shl ecx, 6",
                "add ecx, 0x40",
                "mov rax, qword ptr [rcx - 0x41aff000]",
                "mov dword ptr [rbx - 0x41af5fe8], eax",
                "mov rdx, rax",
                "shr rdx, 0x20",
                "inc edx",
                "shl rdx, 0x20",
                "mov esi, ebx",
                "shr esi, 5",
                "inc esi",
                "or rdx, rsi",
                "lock cmpxchg qword ptr [rcx - 0x41aff000], rdx",
                "jne 0xffffffffbe000112",
                "pop rdi",
                "pop rsi",
                "pop rbx",
                "pop rdx",
                "pop rcx",
                "pop rax",
                "ror ax, 8",
                "and al, 8",
                "add al, 0x78",
                "sahf",
                "pop rax",
                "ret",
                "int3",
            ]
        );
        let stub = assemble_stub(AT, AT + 0x800).unwrap();
        assert_eq!(listing(&stub, AT)[0], "call 0xffffffffbe000800");
        assert!(assemble_stub(AT, AT + (8 << 30)).is_err());
    }
}
