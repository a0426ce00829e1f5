//! Single questions to a running kernel.

use super::records::RecordsError;
use super::types::{Types, TypesError};
use super::{Kernel, VariableError};
use crate::addr::Gva;
use crate::arch::{CpuNumber, PadState, PerCpuVariable, ReturnForm};
use crate::mem::PhysMem;

/// Why a kernel's pads must not be written yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unready {
    /// The list of pads can't be had.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// The kernel is still replacing the compiler's calls.
    #[error("the kernel is still preparing its pads: {at} is as the compiler made it")]
    PadPending {
        /// A pad that it has not come to.
        at: Gva,
    },
    /// The kernel has not yet fitted its code to the processor: its functions do not return as
    /// they will.
    #[error("the kernel has not fitted its code to the processor yet (alternatives)")]
    AlternativesPending,
}

/// It could not be told how the kernel's functions return.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReturnFormError {
    /// The text can't be read.
    #[error("the kernel's text cannot be read: {0}")]
    Text(#[from] super::ReadError),
    /// The text shows neither form often enough.
    #[error(
        "how the kernel's functions return cannot be told: \
         {plain} plain returns and {through} through a thunk in {len:#x} bytes of text"
    )]
    NoEvidence {
        /// Plain returns seen.
        plain: usize,
        /// Returns through the most frequent thunk seen.
        through: usize,
        /// Bytes looked at.
        len: usize,
    },
}

/// It could not be told where the number of a CPU is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CpuNumberError {
    /// A variable that is needed can't be read.
    #[error(transparent)]
    Variable(#[from] VariableError),
    /// The per-CPU area of a CPU can't be read.
    #[error("the per-CPU area of CPU {cpu} cannot be read: {source}")]
    Unreadable {
        /// The CPU.
        cpu: u32,
        /// Why not.
        source: super::ReadError,
    },
    /// The kernel's types do not say where a task has its CPU's number.
    #[error("where a task has its CPU's number cannot be told: {0}")]
    Types(#[from] TypesError),
    /// None of the variables that may hold the number holds it on every CPU.
    #[error("no variable of the kernel holds the number of CPU {cpu} (found {found})")]
    NotHeld {
        /// The first CPU where it is wrong.
        cpu: u32,
        /// What the variable holds there.
        found: u32,
    },
    /// None of the addresses is mapped where the kernel has it for every CPU.
    #[error("the kernel maps nothing where every CPU finds its own number")]
    NotMapped,
    /// The kernel says that it has a number of CPUs that none has.
    #[error("the kernel says that it has up to {count} CPUs")]
    Absurd {
        /// The number.
        count: u32,
    },
}

/// Where a kernel has the number of the CPU that panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PanicCpu {
    at: Gva,
    /// By its name, and not by what its text does.
    is_named: bool,
}

/// How much text is looked at for returns, in bytes: about a thousand functions.
const RETURN_SAMPLE: u64 = 1 << 20;

/// How many returns of the form that prevails are evidence.
const ENOUGH_RETURNS: usize = 256;

/// The most CPUs that a kernel can be built for (CONFIG_NR_CPUS with MAXSMP).
const MAX_CPUS: u32 = 8192;

impl Kernel {
    /// Whether the kernel is past the point of its boot from which its pads may be written: it has
    /// replaced every call of the compiler's, and fitted its code to the processor.
    ///
    /// # Errors
    /// Why not. While the kernel boots this is cheap: it looks at the records and at one pad.
    pub fn readiness(&self, ram: &dyn PhysMem) -> Result<(), Unready> {
        match self.variable_u32(ram, "alternatives_patched") {
            Ok(0) => return Err(Unready::AlternativesPending),
            // The kernel has no such step, or does not show it.
            Ok(_) | Err(VariableError::NoSymbol { .. }) => {}
            Err(error) => return Err(RecordsError::from(error).into()),
        }
        let hook = self.symbols.address(self.arch.compiler_hook_symbol());
        let text = self.text();
        if let Some(at) = self.pending_slot(ram)? {
            return Err(Unready::PadPending { at });
        }
        let expects_slots = self.expects_slots(ram);
        // The kernel goes through its records in order, so the last is the one to look at first.
        for record in self.records(ram)?.iter().rev().filter(|record| text.contains(&record.ip)) {
            let at = record.ip;
            let unreadable = |source| RecordsError::Unreadable { at, source };
            let pending = match self.pad_state_at(ram, at, hook).map_err(unreadable)? {
                PadState::NotYet => true,
                PadState::Idle if expects_slots => {
                    let mut pad = vec![0; self.arch.pad_len()];
                    self.read_virt(ram, at, &mut pad).map_err(unreadable)?;
                    self.arch.pad_slot(at, &pad).is_none()
                }
                _ => false,
            };
            if pending {
                return Err(Unready::PadPending { at });
            }
        }
        Ok(())
    }

    /// How the kernel's own functions return on this processor, judged by the returns in its text.
    ///
    /// This is settled once the kernel is [ready](Kernel::readiness), not before.
    ///
    /// # Errors
    /// [`ReturnFormError`].
    pub fn return_form(&self, ram: &dyn PhysMem) -> Result<ReturnForm, ReturnFormError> {
        let mut thunks: Vec<Gva> = self
            .symbols
            .iter()
            .filter(|symbol| self.arch.is_return_thunk(symbol.name))
            .map(|symbol| symbol.address)
            .collect();
        let variable = self.arch.return_thunk_variable();
        thunks.extend(variable.and_then(|symbol| self.variable_u64(ram, symbol).ok()).map(Gva));
        thunks.sort_unstable();
        thunks.dedup();

        // Of the middle of the text: at its beginning is the entry code, and in newer kernels the
        // unlikely parts of functions, which do not return.
        let range = self.text();
        let whole = range.end.offset_from(range.start).unwrap_or(0);
        let len = whole.min(RETURN_SAMPLE);
        let begin = range.start + (whole - len) / 2;
        let mut text = vec![0; len as usize];
        self.read_virt(ram, begin, &mut text)?;
        let count = self.arch.count_returns(&text, begin, &thunks);
        let through = count.through.iter().copied().zip(&thunks).max_by_key(|&(times, _)| times);
        match through {
            Some((times, &thunk)) if times >= ENOUGH_RETURNS && times > count.plain => {
                Ok(ReturnForm::Thunk(thunk))
            }
            _ if count.plain >= ENOUGH_RETURNS => Ok(ReturnForm::Plain),
            _ => Err(ReturnFormError::NoEvidence {
                plain: count.plain,
                through: through.map_or(0, |(times, _)| times),
                len: text.len(),
            }),
        }
    }

    /// Where a CPU's own number, 32 bits, is, as a distance that an instruction can hold, from what
    /// [`Arch::cpu_number`](crate::arch::Arch::cpu_number) says. In a per-CPU variable it has been read
    /// for every CPU that the kernel may have.
    ///
    /// # Errors
    /// [`CpuNumberError`].
    pub fn cpu_number(&self, ram: &dyn PhysMem) -> Result<i32, CpuNumberError> {
        match self.arch.cpu_number() {
            CpuNumber::Fixed(addresses) => {
                let is_mapped = |address: &&i32| {
                    let at = Gva(i64::from(**address).cast_unsigned());
                    self.root.translate(ram, at).is_ok()
                };
                addresses.iter().find(is_mapped).copied().ok_or(CpuNumberError::NotMapped)
            }
            CpuNumber::PerCpu(variables) => self.per_cpu_number(ram, variables),
            CpuNumber::CurrentTask(paths) => {
                let types = Types::read(ram, &self.image, &self.symbols, self.arch.byte_order())?;
                let offset = types.first_path(paths)?;
                // Beyond what an instruction holds it is refused where that is made.
                Ok(i32::try_from(offset).unwrap_or(i32::MAX))
            }
        }
    }

    fn per_cpu_number(
        &self,
        ram: &dyn PhysMem,
        variables: &[PerCpuVariable],
    ) -> Result<i32, CpuNumberError> {
        let areas = self.per_cpu_areas(ram)?;
        let mut error = CpuNumberError::Variable(VariableError::NoSymbol { symbol: "cpu_number" });
        for variable in variables {
            let Some(begin) = self.symbols.address(variable.symbol) else { continue };
            let field = begin + variable.offset;
            // Up to 6.14 per-CPU symbols count from zero; since, they are addresses of the top
            // 2 GiB. Both fit a displacement that is sign-extended.
            let Ok(displacement) = i32::try_from(field.0.cast_signed()) else { continue };
            match self.check_cpu_numbers(ram, &areas, field) {
                Ok(()) => return Ok(displacement),
                Err(reason) => error = reason,
            }
        }
        Err(error)
    }

    /// How far the area of each CPU that the kernel may have is from the addresses of the symbols of
    /// per-CPU variables.
    pub(super) fn per_cpu_areas(&self, ram: &dyn PhysMem) -> Result<Vec<u64>, CpuNumberError> {
        let cpus = self.variable_u32(ram, "nr_cpu_ids")?;
        if !(1..=MAX_CPUS).contains(&cpus) {
            return Err(CpuNumberError::Absurd { count: cpus });
        }
        let symbol = "__per_cpu_offset";
        let begin = self.symbols.address(symbol).ok_or(VariableError::NoSymbol { symbol })?;
        let area = |cpu| {
            let mut area = [0; 8];
            self.read_virt(ram, begin + 8 * u64::from(cpu), &mut area)
                .map_err(|source| CpuNumberError::Unreadable { cpu, source })?;
            Ok(self.arch.byte_order().u64(area))
        };
        (0..cpus).map(area).collect()
    }

    /// Whether `field` of each CPU's area holds the CPU's number.
    fn check_cpu_numbers(
        &self,
        ram: &dyn PhysMem,
        areas: &[u64],
        field: Gva,
    ) -> Result<(), CpuNumberError> {
        let order = self.arch.byte_order();
        for (cpu, area) in (0..).zip(areas) {
            let unreadable = |source| CpuNumberError::Unreadable { cpu, source };
            let mut number = [0; 4];
            self.read_virt(ram, field + *area, &mut number).map_err(unreadable)?;
            let found = order.u32(number);
            if found != cpu {
                return Err(CpuNumberError::NotHeld { cpu, found });
            }
        }
        Ok(())
    }

    /// The CPU that has panicked, if one has.
    ///
    /// # Errors
    /// [`VariableError`].
    pub fn panicked(&self, ram: &dyn PhysMem) -> Result<Option<u32>, VariableError> {
        self.panicked_by(ram, &self.panic_cpu(ram)?)
    }

    /// Where the kernel has the number of the CPU that panics. It stays there: whoever asks often finds it
    /// once, and asks by [`Kernel::panicked_by`].
    ///
    /// # Errors
    /// [`VariableError`].
    pub fn panic_cpu(&self, ram: &dyn PhysMem) -> Result<PanicCpu, VariableError> {
        let symbol = "panic_cpu";
        let named = self.symbols.address(symbol);
        let at = named.or_else(|| self.panic_cpu_in_text(ram));
        let at = at.ok_or(VariableError::NoSymbol { symbol })?;
        Ok(PanicCpu { at, is_named: named.is_some() })
    }

    /// The same as [`Kernel::panicked`], where it is known by what that is told.
    ///
    /// # Errors
    /// [`VariableError`].
    pub fn panicked_by(
        &self,
        ram: &dyn PhysMem,
        panic_cpu: &PanicCpu,
    ) -> Result<Option<u32>, VariableError> {
        let symbol = "panic_cpu";
        let mut cpu = [0; 4];
        self.read_virt(ram, panic_cpu.at, &mut cpu)
            .map_err(|source| VariableError::Unreadable { symbol, source })?;
        match self.arch.byte_order().u32(cpu) {
            // PANIC_CPU_INVALID is -1.
            u32::MAX => Ok(None),
            cpu if panic_cpu.is_named || cpu < MAX_CPUS => Ok(Some(cpu)),
            // What is no number of a CPU is another variable.
            _ => Err(VariableError::NoSymbol { symbol }),
        }
    }

    /// Where the kernel has the number of the CPU that panics, told by its text, as kernels without
    /// CONFIG_KALLSYMS_ALL do not name it: it is the one variable that `panic` (`vpanic` since 6.16)
    /// and `nmi_panic` both compare and swap.
    fn panic_cpu_in_text(&self, ram: &dyn PhysMem) -> Option<Gva> {
        const LONGEST: u64 = 16 << 10;
        let swapped = |function: &str| {
            let begin = self.symbols.address(function)?;
            let end = self.symbols.lookup(begin)?.end?;
            let mut text = vec![0; end.offset_from(begin)?.min(LONGEST) as usize];
            self.read_virt(ram, begin, &mut text).ok()?;
            Some(self.arch.compared_and_swapped(&text, begin))
        };
        let by_panic: Vec<Gva> =
            ["panic", "vpanic"].into_iter().filter_map(swapped).flatten().collect();
        let mut by_both = swapped("nmi_panic")?;
        let text = self.text();
        by_both.retain(|at| by_panic.contains(at) && at.0.is_multiple_of(4) && !text.contains(at));
        by_both.sort_unstable();
        by_both.dedup();
        if let [only] = by_both[..] { Some(only) } else { None }
    }
}
