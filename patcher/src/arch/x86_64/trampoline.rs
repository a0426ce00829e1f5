//! The code that a traced x86_64 function calls: it writes one ring record and returns.
//!
//! A site's pad becomes `call` to this code, so the return address on the stack tells which
//! function was entered and the word above it who called. The code calls nothing and touches only
//! the stack, the CPU number and the ring, so it cannot recurse and may be interrupted, preempted
//! or entered again by an NMI at every instruction:
//!
//! * A slot is reserved by one locked `xadd`. The task may move to another CPU between reading the
//!   CPU number and that instruction; the record then goes, whole, to the ring of the CPU where it
//!   began.
//! * The clock is read *after* the slot is reserved. A record with a time before T therefore has its
//!   slot reserved before T, which is what lets a reader tell when it has seen everything up to T.
//! * The sequence number is written last (x86 keeps stores in order), so a reader that finds it
//!   finds the whole record.
//!
//! The flags are saved by `pushfq`, as one of them says whether interrupts are on. What it takes is made
//! up for by what `lahf` and `seto` in its place take in front of `rdtsc`. Words of 32 bits are stored in
//! pairs: the locked instruction of the next call waits for every store.
//!
//! The current task and its count are each read by one instruction, so it is this task's own even if
//! it moves to another CPU in between.
//!
//! Every register and all arithmetic flags are as they were when the code returns. It returns as
//! the guest's own functions do, through the guest's return thunk where it has one.

use super::arguments;
use crate::addr::Gva;
use crate::arch::{Logger, OutOfReach, PidPlace, ReturnForm, Then};
use crate::region::{HEADER_BYTES, RECORD_BYTES};

/// How far an absolute or relative 32-bit displacement goes, in bytes either way.
pub(super) const REACH: u64 = 1 << 31;

/// The code, to be placed at `at`.
///
/// # Errors
/// The rings are not within the lowest or highest 2 GiB of the address space, where a sign-extended
/// displacement names them, or the return thunk or the next piece of code is not within 2 GiB of `at`.
pub(super) fn assemble(logger: &Logger, at: Gva) -> Result<Vec<u8>, OutOfReach> {
    let out_of_reach = |to| OutOfReach { from: at, to, reach: REACH };
    let absolute = |to: Gva| i32::try_from(to.0.cast_signed()).map_err(|_| out_of_reach(to));
    let rings = &logger.rings;
    let headers = absolute(rings.headers())?;
    let slots = absolute(rings.slots())?;
    // The whole of the rings has to be within reach, not only where they begin.
    absolute(rings.end())?;
    let field = |offset: i32| slots.wrapping_add(offset).to_le_bytes();
    let [header_shift, record_shift] =
        [HEADER_BYTES, RECORD_BYTES].map(|n| n.trailing_zeros() as u8);

    let extra = logger.arguments.slots() as u8;

    let mut code = Vec::with_capacity(128);
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));

    put(&[&[0x50]]); //                       push rax
    put(&[&[0x9c]]); //                       pushfq
    put(&[&[0x51]]); //                       push rcx
    put(&[&[0x52]]); //                       push rdx
    put(&[&[0x53]]); //                       push rbx

    // Reserve: rcx = offset of the CPU's header, rbx = index of the record in that CPU's ring.
    put(&[&[0x65, 0x8b, 0x0c, 0x25], &logger.cpu_number.to_le_bytes()]); // mov ecx, gs:[cpu]
    put(&[&[0xbb, 1 + extra, 0, 0, 0]]); //   mov ebx, slots
    put(&[&[0xc1, 0xe1, header_shift]]); //   shl ecx, log2(header)
    put(&[&[0xf0, 0x48, 0x0f, 0xc1, 0x99], &headers.to_le_bytes()]); // lock xadd [rcx+h], rbx

    // Arguments have slots of their own. Rings are larger than their headers.
    let to_ring = [0x48, 0xc1, 0xe1, rings.ring_shift() - header_shift]; // shl rcx, log2(ring/header)
    if extra > 0 {
        arguments::count(&mut code, logger.arguments, headers);
        code.extend_from_slice(&to_ring);
        arguments::store(&mut code, logger.arguments, rings, slots);
    }
    let mut put = |bytes: &[&[u8]]| bytes.iter().for_each(|part| code.extend_from_slice(part));

    // rax = time.
    if logger.clock {
        put(&[&[0x0f, 0x31]]); //             rdtsc
        put(&[&[0x48, 0xc1, 0xe2, 32]]); //   shl rdx, 32
        put(&[&[0x48, 0x09, 0xd0]]); //       or rax, rdx
    }

    // rcx + rdx = offset of the slot from the first ring.
    if extra == 0 {
        put(&[&to_ring]);
    }
    put(&[&[0x89, 0xda]]); //                 mov edx, ebx
    put(&[&[0x81, 0xe2], &rings.index_mask().to_le_bytes()]); // and edx, slots - 1
    put(&[&[0xc1, 0xe2, record_shift]]); //   shl edx, log2(record)
    if logger.clock {
        put(&[&[0x48, 0x89, 0x84, 0x11], &field(0)]); //  mov [rcx+rdx+slots], rax      time
    } else {
        put(&[&[0x48, 0xc7, 0x84, 0x11], &field(0), &[0; 4]]); // mov qword [rcx+rdx+slots], 0
    }
    put(&[&[0x48, 0x8d, 0x94, 0x11], &field(0)]); //  lea rdx, [rcx+rdx+slots]
    put(&[&[0x8b, 0x44, 0x24, 0x28]]); //     mov eax, [rsp+40]
    put(&[&[0x8b, 0x4c, 0x24, 0x30]]); //     mov ecx, [rsp+48]
    put(&[&[0x48, 0xc1, 0xe1, 32]]); //       shl rcx, 32
    put(&[&[0x48, 0x09, 0xc8]]); //           or rax, rcx
    put(&[&[0x48, 0x89, 0x42, 0x08]]); //     mov [rdx+8], rax     function, caller
    match logger.task.pid {
        Some(PidPlace::InTask { current, pid }) => {
            put(&[&[0x65, 0x48, 0x8b, 0x04, 0x25], &current.to_le_bytes()]); // mov rax, gs:[current]
            put(&[&[0x8b, 0x80], &pid.to_le_bytes()]); //       mov eax, [rax+pid]
        }
        Some(PidPlace::Fixed(_)) | None => put(&[&[0x31, 0xc0]]), // xor eax, eax
    }
    put(&[&[0x8b, 0x4c, 0x24, 0x18]]); //     mov ecx, [rsp+24]
    put(&[&[0x48, 0xc1, 0xe0, 32]]); //       shl rax, 32
    put(&[&[0x48, 0x09, 0xc8]]); //           or rax, rcx
    put(&[&[0x48, 0x89, 0x42, 0x10]]); //     mov [rdx+16], rax    flags, task
    match logger.task.preempt_count {
        Some(count) => put(&[&[0x65, 0x8b, 0x04, 0x25], &count.to_le_bytes()]), // mov eax, gs:[count]
        None => put(&[&[0x31, 0xc0]]),                                          //     xor eax, eax
    }
    put(&[&[0xff, 0xc3]]); //                 inc ebx
    put(&[&[0x48, 0xc1, 0xe3, 32]]); //       shl rbx, 32
    put(&[&[0x48, 0x09, 0xc3]]); //           or rbx, rax
    put(&[&[0x48, 0x89, 0x5a, 0x18]]); //     mov [rdx+24], rbx    count, sequence

    restore_flags(&mut code);
    append_then(&mut code, at, logger.then)?;
    Ok(code)
}

/// Appends what takes back from the stack, flags included, what was pushed as rax, flags, rcx, rdx, rbx.
pub(super) fn restore_flags(code: &mut Vec<u8>) {
    code.push(0x5b); //                               pop rbx
    code.push(0x5a); //                               pop rdx
    code.push(0x59); //                               pop rcx
    code.push(0x58); //                               pop rax
    code.extend_from_slice(&[0x66, 0xc1, 0xc8, 8]); // ror ax, 8        SF ZF AF PF CF into ah
    code.extend_from_slice(&[0x24, 0x08]); //         and al, 8        OF
    code.extend_from_slice(&[0x04, 0x78]); //         add al, 0x78     overflows if al is 8: OF as it was
    code.push(0x9e); //                               sahf             the others as they were
    code.push(0x58); //                               pop rax
}

/// Appends to `code`, which is for `at`, what leads to what is executed behind it.
///
/// # Errors
/// It is not within 2 GiB.
pub(super) fn append_then(code: &mut Vec<u8>, at: Gva, then: Then) -> Result<(), OutOfReach> {
    let to = match then {
        Then::GoOn { form: ReturnForm::Plain, .. } => {
            // The int3 keeps the CPU from speculating past the return, as the kernel's own has it.
            code.extend_from_slice(&[0xc3, 0xcc]);
            return Ok(());
        }
        Then::GoOn { form: ReturnForm::Thunk(to), .. } | Then::Next(to) => to,
    };
    let behind = at + code.len() as u64 + 5;
    let distance = i32::try_from(to.0.wrapping_sub(behind.0).cast_signed())
        .map_err(|_| OutOfReach { from: at, to, reach: REACH })?;
    code.push(0xe9); // jmp to
    code.extend_from_slice(&distance.to_le_bytes());
    code.push(0xcc);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::listing::x86_64 as listing;
    use crate::arch::{ArgumentWords, TaskPlaces};
    use crate::region::RingLayout;

    fn logger(form: ReturnForm) -> Logger {
        Logger {
            cpu_number: 0x1_f0c0,
            rings: RingLayout::new(Gva(0xffff_ffff_be20_0000), 0x400_0000 + (2 << 20), 2).unwrap(),
            clock: true,
            arguments: ArgumentWords::NONE,
            then: Then::GoOn { behind: 0, form },
            task: TaskPlaces {
                pid: Some(PidPlace::InTask { current: 0x1_fb80, pid: 2416 }),
                preempt_count: Some(0x1_fb88),
            },
        }
    }

    #[test]
    fn the_code_is_what_its_comments_say() {
        let at = Gva(0xffff_ffff_be00_0000);
        let code = assemble(&logger(ReturnForm::Plain), at).unwrap();
        assert_eq!(
            listing(&code, at),
            [
                "push rax",
                "pushfq",
                "push rcx",
                "push rdx",
                "push rbx",
                "mov ecx, dword ptr gs:[0x1f0c0]",
                "mov ebx, 1",
                "shl ecx, 7",
                "lock xadd qword ptr [rcx - 0x41e00000], rbx",
                "rdtsc",
                "shl rdx, 0x20",
                "or rax, rdx",
                "shl rcx, 0x12",
                "mov edx, ebx",
                "and edx, 0xfffff",
                "shl edx, 5",
                "mov qword ptr [rcx + rdx - 0x41df0000], rax",
                "lea rdx, [rcx + rdx - 0x41df0000]",
                "mov eax, dword ptr [rsp + 0x28]",
                "mov ecx, dword ptr [rsp + 0x30]",
                "shl rcx, 0x20",
                "or rax, rcx",
                "mov qword ptr [rdx + 8], rax",
                "mov rax, qword ptr gs:[0x1fb80]",
                "mov eax, dword ptr [rax + 0x970]",
                "mov ecx, dword ptr [rsp + 0x18]",
                "shl rax, 0x20",
                "or rax, rcx",
                "mov qword ptr [rdx + 0x10], rax",
                "mov eax, dword ptr gs:[0x1fb88]",
                "inc ebx",
                "shl rbx, 0x20",
                "or rbx, rax",
                "mov qword ptr [rdx + 0x18], rbx",
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
    }

    #[test]
    fn without_a_clock_the_time_is_zero() {
        let logger = Logger { clock: false, ..logger(ReturnForm::Plain) };
        let at = Gva(0xffff_ffff_be00_0000);
        let listing = listing(&assemble(&logger, at).unwrap(), at);
        assert!(listing.contains(&"mov qword ptr [rcx + rdx - 0x41df0000], 0".to_owned()));
        assert!(!listing.contains(&"rdtsc".to_owned()), "{listing:?}");
    }

    #[test]
    fn what_is_not_known_of_tasks_is_recorded_as_zero() {
        let logger = Logger { task: TaskPlaces::default(), ..logger(ReturnForm::Plain) };
        let at = Gva(0xffff_ffff_be00_0000);
        let listing = listing(&assemble(&logger, at).unwrap(), at);
        let zeros = listing.iter().filter(|line| *line == "xor eax, eax").count();
        let by_gs = listing.iter().filter(|line| line.contains("gs:")).count();
        assert_eq!((zeros, by_gs), (2, 1), "{listing:?}");
    }

    #[test]
    fn the_guests_return_thunk_is_kept() {
        let at = Gva(0xffff_ffff_be00_0000);
        let thunk = Gva(0xffff_ffff_8222_2260);
        let code = assemble(&logger(ReturnForm::Thunk(thunk)), at).unwrap();
        let listing = listing(&code, at);
        assert_eq!(listing[listing.len() - 2..], [format!("jmp {:#x}", thunk.0), "int3".into()]);
    }

    #[test]
    fn another_piece_of_code_is_entered_as_this_one_was() {
        let at = Gva(0xffff_ffff_be00_0000);
        let next = Gva(0xffff_ffff_be00_1000);
        let then = Then::Next(next);
        let code = assemble(&Logger { then, ..logger(ReturnForm::Plain) }, at).unwrap();
        let listing = listing(&code, at);
        let end = listing.len() - 3;
        assert_eq!(listing[end..], ["pop rax".into(), format!("jmp {:#x}", next.0), "int3".into()]);
    }

    #[test]
    fn what_no_instruction_can_reach_is_refused() {
        let at = Gva(0xffff_ffff_be00_0000);
        let far = Gva(0xffff_8880_0000_0000);
        let refused = |logger: Logger| assemble(&logger, at).unwrap_err();
        assert_eq!(refused(logger(ReturnForm::Thunk(far))).to, far);
        let plain = logger(ReturnForm::Plain);
        let far_rings = RingLayout::new(far, 4 << 20, 1).unwrap();
        assert_eq!(refused(Logger { rings: far_rings, ..plain }).to, far);
    }

    #[test]
    fn arguments_are_written_into_the_slots_behind() {
        use crate::arch::Arch;
        let convention = crate::arch::x86_64::X86_64.calling_convention();
        let arguments = ArgumentWords::new(convention, 3, 2);
        let logger = Logger { arguments, ..logger(ReturnForm::Plain) };
        let at = Gva(0xffff_ffff_be00_0000);
        let code = listing(&assemble(&logger, at).unwrap(), at);
        assert_eq!(
            code[5..38],
            [
                "mov ecx, dword ptr gs:[0x1f0c0]",
                "mov ebx, 3",
                "shl ecx, 7",
                "lock xadd qword ptr [rcx - 0x41e00000], rbx",
                "lock add qword ptr [rcx - 0x41dffff8], 2",
                "shl rcx, 0x12",
                "lea edx, [rbx + 1]",
                "and edx, 0xfffff",
                "shl edx, 5",
                "lea rdx, [rcx + rdx - 0x41df0000]",
                "mov dword ptr [rdx + 8], 1",
                "mov qword ptr [rdx], rdi",
                "mov qword ptr [rdx + 0xc], rsi",
                "mov rax, qword ptr [rsp + 8]",
                "mov qword ptr [rdx + 0x14], rax",
                "lea eax, [rbx + 2]",
                "mov dword ptr [rdx + 0x1c], eax",
                "lea edx, [rbx + 2]",
                "and edx, 0xfffff",
                "shl edx, 5",
                "lea rdx, [rcx + rdx - 0x41df0000]",
                "mov dword ptr [rdx + 8], 2",
                "mov rax, qword ptr [rsp + 0x38]",
                "mov qword ptr [rdx], rax",
                "mov rax, qword ptr [rsp + 0x40]",
                "mov qword ptr [rdx + 0xc], rax",
                "lea eax, [rbx + 3]",
                "mov dword ptr [rdx + 0x1c], eax",
                "rdtsc",
                "shl rdx, 0x20",
                "or rax, rdx",
                "mov edx, ebx",
                "and edx, 0xfffff",
            ]
        );
    }
}
