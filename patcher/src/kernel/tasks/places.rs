//! Where the code of a trampoline finds what it records of the task that calls.
//!
//! Nothing here is believed only because a kernel of that version should have it: what a place leads to
//! is looked at, on every CPU or on one that is asked.

use super::TaskLayoutError;
use super::structure;
use super::walk::STACK_END;
use super::{Reader, layout::STACK_SIZES};
use crate::addr::Gva;
use crate::arch::{CommPlace, CpuArea, FixedArea, PerCpuVariable, PidPlace, TaskPaths, TaskPlaces};
use crate::kernel::types::{Types, TypesError};
use crate::kernel::{CpuNumberError, Kernel};
use crate::machine::Machine;
use crate::mem::PhysMem;

/// What trampolines can record of tasks, and why not what they can't.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedTask {
    /// Where the task's number is.
    pub pid: Result<PidPlace, TaskPlaceError>,
    /// Where the count is that tells of preemption and interrupts.
    pub preempt_count: Result<i32, TaskPlaceError>,
}

impl RecordedTask {
    /// What is known.
    #[must_use]
    pub fn places(&self) -> TaskPlaces {
        TaskPlaces {
            pid: self.pid.as_ref().ok().copied(),
            preempt_count: self.preempt_count.as_ref().ok().copied(),
        }
    }

    /// What is missing and why, in one sentence; `None` if nothing is.
    #[must_use]
    pub fn missing(&self) -> Option<String> {
        match (&self.pid, &self.preempt_count) {
            (Ok(_), Ok(_)) => None,
            (Err(why), Ok(_)) => Some(format!("calls do not tell their tasks: {why}")),
            (Ok(_), Err(why)) => Some(format!("calls do not tell of interrupts: {why}")),
            (Err(why), Err(_)) => {
                Some(format!("calls tell neither their tasks nor of interrupts: {why}"))
            }
        }
    }
}

/// Where the current task is, or what of it is, can't be told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TaskPlaceError {
    /// Where the kernel keeps things of its CPUs is not known.
    #[error(transparent)]
    Cpus(#[from] CpuNumberError),
    /// The kernel's types do not say.
    #[error(transparent)]
    Types(#[from] TypesError),
    /// The tasks that there are do not tell.
    #[error(transparent)]
    Layout(#[from] TaskLayoutError),
    /// None of the variables that may hold it holds it on every CPU.
    #[error("no variable of the kernel holds {what} of CPU {cpu}")]
    NotHeld {
        /// What it should hold.
        what: &'static str,
        /// The first CPU where it does not.
        cpu: u32,
    },
    /// No CPU has what a lowcore has.
    #[error("no CPU's lowcore is as it is known to be, or the engine does not tell where it is")]
    NoArea,
}

/// How often a CPU is looked at that may just be switching between tasks.
const TRIES: usize = 8;

/// No task has a greater number (`PID_MAX_LIMIT`, include/linux/threads.h).
const MAX_PID: u32 = 4 << 20;

/// How many bytes of a task there are at most in front of the pointer to its stack.
const BEFORE_STACK: u64 = 256;

/// The bits of the count that no kernel uses (include/linux/preempt.h).
const UNUSED_COUNT: u32 = 0x6000_0000;

impl Kernel {
    /// Finds out what trampolines can record of tasks. The guest may run meanwhile; where its CPUs have
    /// to be asked, one of them is stopped for a moment.
    #[must_use]
    pub fn recorded_task(&self, machine: &dyn Machine) -> RecordedTask {
        let ram = machine.ram();
        match self.arch().task_paths() {
            TaskPaths::PerCpu { current, preempt_count } => {
                self.per_cpu(ram, current, preempt_count)
            }
            TaskPaths::FixedArea(area) => {
                let found = self.fixed(machine, &area);
                let base = found.map(|number| number - area.number);
                RecordedTask {
                    pid: base.clone().map(|base| PidPlace::Fixed(base + area.pid)),
                    preempt_count: base.map(|base| base + area.preempt_count),
                }
            }
            TaskPaths::CurrentTask(count) => {
                let arch = self.arch();
                match Types::read(ram, self.image(), self.symbols(), arch.byte_order()) {
                    Ok(types) => RecordedTask {
                        pid: types
                            .offset("task_struct", "pid")
                            .map(|pid| PidPlace::InTask { current: 0, pid: distance(pid) })
                            .map_err(Into::into),
                        preempt_count: types.first_path(&[count]).map(distance).map_err(Into::into),
                    },
                    Err(why) => RecordedTask {
                        pid: Err(why.clone().into()),
                        preempt_count: Err(why.into()),
                    },
                }
            }
        }
    }

    /// Where code finds the name of the current task, which has its number at `pid`.
    ///
    /// # Errors
    /// [`TaskPlaceError`].
    pub(crate) fn comm_place(
        &self,
        ram: &dyn PhysMem,
        pid: PidPlace,
    ) -> Result<CommPlace, TaskPlaceError> {
        let current = match (pid, self.arch().task_paths()) {
            (PidPlace::Fixed(pid), TaskPaths::FixedArea(area)) => pid - area.pid + area.current,
            (PidPlace::InTask { current, .. }, _) => current,
            (PidPlace::Fixed(_), _) => return Err(TaskPlaceError::NoArea),
        };
        let comm = match Types::read(ram, self.image(), self.symbols(), self.arch().byte_order()) {
            Ok(types) => types.offset("task_struct", "comm")?,
            Err(TypesError::None) => structure::find(&mut Reader::new(self, ram))?.fields.comm,
            Err(why) => return Err(why.into()),
        };
        Ok(CommPlace { current, comm: distance(comm) })
    }

    fn per_cpu(
        &self,
        ram: &dyn PhysMem,
        current: &[PerCpuVariable],
        preempt_count: &[PerCpuVariable],
    ) -> RecordedTask {
        let areas = match self.per_cpu_areas(ram) {
            Ok(areas) => areas,
            Err(why) => {
                let why = TaskPlaceError::from(why);
                return RecordedTask { pid: Err(why.clone()), preempt_count: Err(why) };
            }
        };
        let reader = &mut Reader::new(self, ram);
        let count = on_every_cpu(reader, preempt_count, &areas, "the count", |reader, at| {
            reader.u32(at).is_ok_and(|count| count & UNUSED_COUNT == 0)
        });
        let pid = own_fields(reader).and_then(|(pid, stack)| {
            let holds_task = |reader: &mut Reader<'_>, at| {
                let task = reader.u64(at).ok().map(Gva);
                task.is_some_and(|task| is_task(reader, task, pid, stack))
            };
            let current = on_every_cpu(reader, current, &areas, "the current task", holds_task)?;
            Ok(PidPlace::InTask { current, pid: distance(pid) })
        });
        RecordedTask { pid, preempt_count: count }
    }

    /// Where a CPU's number is, if what is known to be beside it is there on some CPU.
    fn fixed(&self, machine: &dyn Machine, known: &FixedArea) -> Result<i32, TaskPlaceError> {
        let ram = machine.ram();
        let number = self.cpu_number(ram)?;
        let reader = &mut Reader::new(self, ram);
        let mut is_sound = |vcpu| {
            let registers = machine.sample(vcpu).ok()?;
            let CpuArea::Fixed(begin) = self.arch().cpu_area(&registers)? else { return None };
            let order = self.arch().byte_order();
            let word = |at: i32| Some(order.u32(ram.array(begin + at.unsigned_abs().into()).ok()?));
            let long = |at: i32| Some(order.u64(ram.array(begin + at.unsigned_abs().into()).ok()?));
            let task = Gva(long(known.current)?);
            let sound = word(known.pid)? <= MAX_PID
                && word(known.preempt_count)? & UNUSED_COUNT == 0
                && has_stack(reader, task);
            sound.then_some(())
        };
        // Those that were never started have nothing.
        let mut vcpus = (0..TRIES).flat_map(|_| 0..machine.vcpus());
        match vcpus.any(|vcpu| is_sound(vcpu).is_some()) {
            true => Ok(number),
            false => Err(TaskPlaceError::NoArea),
        }
    }
}

/// Beyond what an instruction holds it is refused where that is made.
fn distance(offset: u64) -> i32 {
    i32::try_from(offset).unwrap_or(i32::MAX)
}

/// Where a task has its number and the pointer to its stack.
fn own_fields(reader: &mut Reader<'_>) -> Result<(u64, u64), TaskPlaceError> {
    let kernel = reader.kernel;
    let order = kernel.arch().byte_order();
    match Types::read(reader.ram, kernel.image(), kernel.symbols(), order) {
        Ok(types) => {
            Ok((types.offset("task_struct", "pid")?, types.offset("task_struct", "stack")?))
        }
        Err(TypesError::None) => {
            let fields = structure::find(reader)?.fields;
            Ok((fields.pid, fields.stack))
        }
        Err(why) => Err(why.into()),
    }
}

/// The first of `variables` that is as it should be on every CPU, as a displacement that is
/// sign-extended.
fn on_every_cpu(
    reader: &mut Reader<'_>,
    variables: &[PerCpuVariable],
    areas: &[u64],
    what: &'static str,
    is_sound: impl Fn(&mut Reader<'_>, Gva) -> bool,
) -> Result<i32, TaskPlaceError> {
    let mut cpu = 0;
    for variable in variables {
        let Some(begin) = reader.kernel.symbols().address(variable.symbol) else { continue };
        let field = begin + variable.offset;
        let Ok(displacement) = i32::try_from(field.0.cast_signed()) else { continue };
        let is_not = |area: &u64| {
            let at = field + *area;
            !(0..TRIES).any(|_| is_sound(reader, at))
        };
        match areas.iter().position(is_not) {
            None => return Ok(displacement),
            Some(position) => cpu = position as u32,
        }
    }
    Err(TaskPlaceError::NotHeld { what, cpu })
}

/// Whether there is a task at `task`: its number is one, and its stack is one.
fn is_task(reader: &mut Reader<'_>, task: Gva, pid: u64, stack: u64) -> bool {
    task.0 != 0
        && reader.u32(task + pid).is_ok_and(|pid| pid <= MAX_PID)
        && (reader.u64(task + stack).ok().map(Gva))
            .is_some_and(|stack| stack.0 != 0 && reader.u64(stack) == Ok(STACK_END))
}

/// Whether there is a task at `task`, of which it is not known where it has what: near its beginning it
/// has the address of its stack.
fn has_stack(reader: &mut Reader<'_>, task: Gva) -> bool {
    (0..BEFORE_STACK).step_by(8).any(|field| {
        let stack = reader.u64(task + field).unwrap_or(0);
        let is_aligned = stack != 0 && stack.is_multiple_of(*STACK_SIZES.start());
        is_aligned && reader.u64(Gva(stack)) == Ok(STACK_END)
    })
}
