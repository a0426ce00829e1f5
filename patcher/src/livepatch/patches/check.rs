//! What is looked at in the stop of a patch before its first write.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::PatchError;
use crate::addr::Gva;
use crate::hook::{HeldBack, Witness};
use crate::kernel::Comm;
use crate::machine::{Machine, Stopped, TextWrite};
use crate::stacks::{StackCheck, StackError, Stander};

/// What standers in loggers and stubs are said to be in.
pub(super) const TRAMPOLINE: &str = "a trampoline";

/// Looks who stands where nobody may, and how long that has taken, and writes what can be written only
/// while the guest stands. The first thing that is not as it must be ends it.
pub(super) struct Check<'a> {
    pub machine: &'a dyn Machine,
    /// Who stands in watched code.
    pub stacks: Option<&'a StackCheck<'a>>,
    /// Where loggers and stubs are.
    pub trampolines: Range<Gva>,
    /// Whether somebody who stands there is a reason not to go on.
    pub is_strict: bool,
    /// How long the guest may have stood by the first write.
    pub max_stop: Option<Duration>,
    /// Writes of code that nothing leads to yet.
    pub text: &'a [TextWrite<'a>],
    pub found: Found,
}

/// What a check found.
#[derive(Debug, Default)]
pub(super) enum Found {
    /// It has not come to its end.
    #[default]
    Nothing,
    /// Nobody stands in watched code, if that was asked.
    Clear,
    /// These do.
    Standers(Vec<Stander>),
    /// Something is wrong.
    Wrong(PatchError),
}

impl Check<'_> {
    fn look(&mut self, stopped: &mut dyn Stopped, since: Instant) -> Result<(), HeldBack> {
        let standers = match self.standers(stopped) {
            Ok(standers) => standers,
            Err(error) => return self.end(Found::Wrong(error.into())),
        };
        let is_clear = standers.is_empty();
        self.found = if is_clear { Found::Clear } else { Found::Standers(standers) };
        if self.is_strict && !is_clear {
            return Err(HeldBack);
        }
        let took = since.elapsed();
        if let Some(limit) = self.max_stop.filter(|limit| took > *limit) {
            return self.end(Found::Wrong(PatchError::TooLong { took, limit }));
        }
        match stopped.write_text(self.text) {
            Ok(()) => Ok(()),
            Err(error) => self.end(Found::Wrong(error.into())),
        }
    }

    fn end(&mut self, found: Found) -> Result<(), HeldBack> {
        self.found = found;
        Err(HeldBack)
    }

    /// Who stands in watched code. The address to which a trampoline goes back may be in a register and
    /// nowhere else: a vCPU in one may be on its way to anywhere.
    pub fn standers(&self, stopped: &mut dyn Stopped) -> Result<Vec<Stander>, StackError> {
        let Some(stacks) = self.stacks else { return Ok(Vec::new()) };
        let vcpus = self.machine.vcpus();
        let mut standers = stacks.run(self.machine.ram(), stopped, vcpus)?;
        for vcpu in 0..vcpus {
            if self.trampolines.contains(&Gva(stopped.registers(vcpu)?.pc())) {
                standers.push(Stander {
                    pid: 0,
                    comm: Comm::new([0; Comm::LEN]),
                    function: Arc::from(TRAMPOLINE),
                    vcpu: Some(vcpu),
                });
            }
        }
        Ok(standers)
    }
}

impl Witness for Check<'_> {
    fn before(&mut self, stopped: &mut dyn Stopped, since: Instant) -> Result<(), HeldBack> {
        self.look(stopped, since)
    }
}
