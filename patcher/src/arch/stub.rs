//! What a pad jumps to whose function is traced and redirected, and what functions return to whose returns
//! are taken.

use super::{Arch, OutOfReach, ReturnExit};
use crate::addr::Gva;
use crate::region::{RETURN_SLOTS, RETURN_STUB_BYTES};

/// The code of a stub, to be placed at `at`, for a function that is traced and is redirected to the one
/// at `to`: it calls the logger, which goes on behind its caller whatever that is
/// ([`Then::GoOn`](super::Then::GoOn) with `behind` 0), and then jumps. Registers and stack are at both of its
/// instructions what they would be at the pad. Its records carry the address behind the first
/// ([`stub_ip`]).
///
/// # Errors
/// The logger or the function is farther from `at` than an instruction reaches.
pub fn assemble_stub(
    arch: &dyn Arch,
    at: Gva,
    logger: Gva,
    to: Gva,
) -> Result<Vec<u8>, OutOfReach> {
    let mut code = arch.encode_branch(at, logger)?.to_vec();
    code.extend_from_slice(&arch.encode_jump(stub_ip(arch, at), to)?);
    Ok(code)
}

/// The address that the records of the stub at `at` carry.
#[must_use]
pub fn stub_ip(arch: &dyn Arch, at: Gva) -> Gva {
    at + arch.pad_len() as u64
}

/// The stubs of all slots of the exit's pool, and behind them the code that they lead to: what is to be
/// placed where the pool's stubs begin.
///
/// # Errors
/// As [`Arch::assemble_return_stub`] and [`Arch::assemble_return_exit`].
pub fn assemble_returns(arch: &dyn Arch, exit: &ReturnExit) -> Result<Vec<u8>, OutOfReach> {
    let stubs = exit.pool.stub_range();
    let mut code = Vec::with_capacity((stubs.end.0 - stubs.start.0) as usize + 512);
    for index in 0..RETURN_SLOTS {
        let at = stubs.start + u64::from(index) * RETURN_STUB_BYTES;
        code.extend(arch.assemble_return_stub(at, stubs.end)?);
    }
    code.extend(arch.assemble_return_exit(stubs.end, exit)?);
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::PadState;
    use crate::arch::aarch64::Aarch64;
    use crate::arch::s390x::S390X;
    use crate::arch::x86_64::X86_64;

    #[test]
    fn a_stub_calls_the_logger_and_then_jumps() {
        let (at, logger, to) = (Gva(0x5000_0040), Gva(0x5000_0000), Gva(0x5010_0000));
        for arch in [&X86_64 as &dyn Arch, &S390X, &Aarch64] {
            let code = assemble_stub(arch, at, logger, to).unwrap();
            let (call, jump) = code.split_at(arch.pad_len());
            let enabled = PadState::GuestEnabled { target: logger };
            assert_eq!(arch.pad_state(at, call, None), enabled, "{}", arch.name());
            assert_eq!(*jump, *arch.encode_jump(stub_ip(arch, at), to).unwrap());
            let far = assemble_stub(arch, at, logger, at + (1 << 40));
            assert_eq!(far.unwrap_err().from, stub_ip(arch, at));
        }
    }
}
