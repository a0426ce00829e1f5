//! Who stands in a function: which tasks will return into it, and which vCPUs execute it.
//!
//! Nothing is unwound. A task that stands in a function has an address inside it somewhere on its
//! kernel stack, since it was called from there, or interrupted there; so every word of the part of
//! the stack that is in use is looked at. Words that mean nothing any more may be taken for such an
//! address, never the other way round: who is told to stand in a function need not, who is not told
//! does not.
//!
//! * A task on no CPU uses its stack from its saved stack pointer on.
//! * A vCPU that runs a process uses no stack of the kernel's.
//! * A vCPU in the kernel uses the stack that its stack pointer is in from there on. If that is one for
//!   interrupts or exceptions, what was interrupted is found by the addresses of other stacks in it:
//!   one of them is the stack pointer of that time, and none in use lies below.
//! * A task on a CPU that none of this leads to, as one that is just being switched away from, is taken
//!   to use all of its stack, but for those of vCPUs that run processes.
//!
//! An address that was taken off a stack so that a return is recorded is looked up by the stub that is in
//! its place. Where the guest traces returns itself, it has put other addresses in place of those on stacks, and
//! what it keeps of them is looked at, too.
//!
//! A task that is being created has not run, and is in no ring: its stack holds nothing but where it
//! begins. One that ends leaves the rings while it still runs; it is found by its CPU, or by its CPU's
//! run queue while it waits there, unless it waits as a real-time task.

use std::ops::Range;
use std::sync::Arc;

use crate::addr::Gva;
use crate::arch::{CpuArea, CpuVariable, Extent, Standing};
use crate::kernel::{
    Comm, Kernel, ReadError, Reader, Task, TaskLayout, TaskLayoutError, TasksError,
};
use crate::machine::{Registers, StopError, Stopped};
use crate::mem::PhysMem;
use crate::region::TakenReturns;

/// Code that nobody may stand in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watched {
    /// The function that it belongs to.
    pub name: Arc<str>,
    /// Its addresses. Of a function that is to be replaced it begins behind the instruction of the
    /// pad: who is about to execute that has not come into the function yet.
    pub code: Range<Gva>,
}

impl Watched {
    /// What counts of the function `name` of `kernel`, which lies at `function`, and the instruction of
    /// whose pad ends at `behind_pad`: the rest of it, and the unlikely parts that the compiler put
    /// elsewhere. If other functions have parts of that name, these count too: nothing tells whose
    /// they are.
    #[must_use]
    pub fn function(
        kernel: &Kernel,
        name: &Arc<str>,
        function: &Range<Gva>,
        behind_pad: Gva,
    ) -> Vec<Self> {
        let symbols = kernel.symbols();
        let watched = |code| Self { name: Arc::clone(name), code };
        let mut found = vec![watched(behind_pad.max(function.start)..function.end)];
        // gcc numbers the parts of functions of one name in a file.
        let cold = format!("{name}.cold");
        let parts = std::iter::once(cold.clone()).chain((0..16).map(|n| format!("{cold}.{n}")));
        for part in parts {
            found.extend(symbols.named(&part).filter_map(|symbol| {
                let end = symbols.lookup(symbol.address)?.end?;
                Some(watched(symbol.address..end))
            }));
        }
        found
    }
}

/// Somebody who stands in watched code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stander {
    /// The number of the task, 0 for a CPU's idle task.
    pub pid: u32,
    /// The task's name; empty for a vCPU of which it is not known what it runs.
    pub comm: Comm,
    /// The function.
    pub function: Arc<str>,
    /// The vCPU that executes it, or that was interrupted in it; `None` for a task that sleeps.
    pub vcpu: Option<usize>,
}

/// A check of stacks can't be prepared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StackCheckError {
    /// It can't be told where tasks are.
    #[error("who stands in a function cannot be told: {0}")]
    Layout(#[from] TaskLayoutError),
}

/// It could not be told who stands in a function.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// The registers of a vCPU could not be read.
    #[error("who stands in a function cannot be told: {0}")]
    Registers(#[from] StopError),
    /// The tasks could not be listed. It may be possible at another moment.
    #[error("who stands in a function cannot be told: {0}")]
    Tasks(#[from] TasksError),
    /// A stack could not be read.
    #[error("the stack of {pid} ({comm}) from {at} on cannot be read: {source}")]
    Unreadable {
        /// The task's number.
        pid: u32,
        /// The task's name.
        comm: Comm,
        /// From where on.
        at: Gva,
        /// Why not.
        source: ReadError,
    },
}

/// A check that nobody stands in some code, prepared so that it takes little time in a stop.
#[derive(Debug)]
pub struct StackCheck<'k> {
    kernel: &'k Kernel,
    layout: TaskLayout,
    watched: WatchedCode,
    returns: Option<TakenReturns<'k>>,
}

impl<'k> StackCheck<'k> {
    /// Prepares the check. The guest may run meanwhile.
    ///
    /// # Errors
    /// [`StackCheckError`].
    pub fn new(
        kernel: &'k Kernel,
        ram: &dyn PhysMem,
        watched: Vec<Watched>,
    ) -> Result<Self, StackCheckError> {
        Ok(Self::with_layout(kernel, kernel.task_layout(ram)?, watched))
    }

    /// The same with the layout known from an earlier check.
    #[must_use]
    pub fn with_layout(kernel: &'k Kernel, layout: TaskLayout, watched: Vec<Watched>) -> Self {
        Self { kernel, layout, watched: WatchedCode::new(watched), returns: None }
    }

    /// Looks as well at what stubs stand for that functions return to, in a guest where some do.
    #[must_use]
    pub fn with_returns(mut self, returns: Option<TakenReturns<'k>>) -> Self {
        self.returns = returns;
        self
    }

    /// Who stands in the watched code of the guest that `stopped` holds, which has that many vCPUs: each
    /// task once a function.
    ///
    /// # Errors
    /// [`StackError`].
    pub fn run(
        &self,
        ram: &dyn PhysMem,
        stopped: &mut dyn Stopped,
        vcpus: usize,
    ) -> Result<Vec<Stander>, StackError> {
        let registers =
            (0..vcpus).map(|vcpu| stopped.registers(vcpu)).collect::<Result<Vec<_>, _>>()?;
        self.standers(ram, &registers)
    }

    /// The same of a guest that stands still with these registers of its vCPUs.
    ///
    /// # Errors
    /// [`StackError`].
    pub fn standers(
        &self,
        ram: &dyn PhysMem,
        registers: &[Registers],
    ) -> Result<Vec<Stander>, StackError> {
        if self.watched.is_empty() {
            return Ok(Vec::new());
        }
        let mut reader = Reader::new(self.kernel, ram);
        let current: Vec<Option<Gva>> =
            registers.iter().map(|registers| current(&mut reader, registers)).collect();
        let known: Vec<Gva> = current.iter().flatten().copied().collect();
        let tasks = reader.tasks(&self.layout, &known)?;
        let mut run = Run::new(self, reader, &tasks, current);
        for (vcpu, registers) in registers.iter().enumerate() {
            run.vcpu(vcpu, registers)?;
        }
        run.rest()?;
        Ok(run.standers)
    }
}

/// Watched code, in a form that is quick to search.
#[derive(Debug)]
struct WatchedCode {
    /// By where it begins, with the highest end up to there.
    code: Vec<(Watched, Gva)>,
}

impl WatchedCode {
    fn new(mut watched: Vec<Watched>) -> Self {
        watched.retain(|watched| watched.code.start < watched.code.end);
        watched.sort_by_key(|watched| watched.code.start);
        let mut reach = Gva(0);
        let with_reach = watched.into_iter().map(|watched| {
            reach = reach.max(watched.code.end);
            (watched, reach)
        });
        Self { code: with_reach.collect() }
    }

    fn is_empty(&self) -> bool {
        self.code.is_empty()
    }

    /// Whose code `address` lies in.
    fn find(&self, address: Gva) -> Option<&Watched> {
        let (first, (_, reach)) = (&self.code.first()?.0, self.code.last()?);
        if address < first.code.start || address >= *reach {
            return None;
        }
        let above = self.code.partition_point(|(watched, _)| watched.code.start <= address);
        let below = self.code[..above].iter().rev();
        below
            .take_while(|(_, reach)| address < *reach)
            .map(|(watched, _)| watched)
            .find(|watched| watched.code.contains(&address))
    }
}

/// The most bytes of a stack that is not known, from the stack pointer on.
const UNKNOWN_STACK: u64 = 64 << 10;

/// The most functions that have jumped to one another and all return to the same place, so that the stub
/// of each stands for that of the one before.
const MOST_TAIL_CALLS: usize = 64;

/// How much of a stack that is not known is looked at at a time: what is mapped is whole pages.
const PAGE: u64 = 4096;

/// One check.
struct Run<'a> {
    check: &'a StackCheck<'a>,
    reader: Reader<'a>,
    tasks: &'a [Task],
    /// The tasks with stacks, by where these begin.
    by_stack: Vec<(Gva, usize)>,
    /// Which tasks' stacks have been looked at as a vCPU uses them.
    seen: Vec<bool>,
    /// The task that each vCPU says it runs, where it has to be asked.
    current: Vec<Option<Gva>>,
    /// How many vCPUs run processes.
    in_user_mode: usize,
    standers: Vec<Stander>,
}

/// A stack in use by a vCPU: all of it, and from where on it is known to be in use.
#[derive(Debug, Clone)]
struct InUse {
    stack: Range<Gva>,
    task: Option<usize>,
    from: Gva,
}

impl<'a> Run<'a> {
    fn new(
        check: &'a StackCheck<'a>,
        reader: Reader<'a>,
        tasks: &'a [Task],
        current: Vec<Option<Gva>>,
    ) -> Self {
        let stack = |(index, task): (usize, &Task)| Some((task.stack.as_ref()?.start, index));
        let mut by_stack: Vec<_> = tasks.iter().enumerate().filter_map(stack).collect();
        by_stack.sort_unstable();
        Self {
            check,
            reader,
            tasks,
            by_stack,
            seen: vec![false; tasks.len()],
            current,
            in_user_mode: 0,
            standers: Vec::new(),
        }
    }

    /// Looks at what a vCPU uses.
    fn vcpu(&mut self, vcpu: usize, registers: &Registers) -> Result<(), StackError> {
        let arch = self.check.kernel.arch();
        let (sp, links) = match arch.standing(registers) {
            Standing::Elsewhere => return Ok(()),
            Standing::User => {
                self.in_user_mode += 1;
                return Ok(());
            }
            Standing::Kernel { sp, links } => (sp, links),
        };
        let mut others = self.cpu_stacks(registers);
        let mut standers = Vec::new();
        for word in links.into_iter().chain([registers.pc()]) {
            self.look(word, &mut standers);
        }
        let mut task = self.task_at(sp);
        let mut uses = vec![self.innermost(sp, task, &others)];
        // Each stack that is in use leads to those that it interrupted.
        let mut next = 0;
        while let Some(used) = uses.get(next).cloned() {
            next += 1;
            let words = self.words(used.from..used.stack.end, &used)?;
            for &word in &words {
                self.look(word, &mut standers);
            }
            if let Some(index) = used.task {
                for word in self.kept_returns(index)? {
                    self.look(word, &mut standers);
                }
                self.seen[index] = true;
                task = Some(index);
                // Tasks interrupt nobody.
                continue;
            }
            others.retain(|other| other.start != used.stack.start);
            self.follow(vcpu, &words, &others, &mut uses);
        }
        let (pid, comm) = match task {
            Some(index) => (self.tasks[index].pid, self.tasks[index].comm),
            None => (0, Comm::new([0; Comm::LEN])),
        };
        self.report(pid, comm, Some(vcpu), standers);
        Ok(())
    }

    /// Looks at the stacks of all tasks that no vCPU has led to.
    fn rest(&mut self) -> Result<(), StackError> {
        let on_cpu = |run: &Self, index: usize| {
            let task = &run.tasks[index];
            task.on_cpu.unwrap_or_else(|| run.current.contains(&Some(task.at)))
        };
        let unseen: Vec<usize> = (0..self.tasks.len()).filter(|index| !self.seen[*index]).collect();
        let on_cpus = unseen.iter().filter(|index| on_cpu(self, **index)).count();
        // A vCPU that runs a process has a task, and if there are no more of these than such vCPUs they
        // are it.
        let all_in_user_mode = on_cpus <= self.in_user_mode;
        for index in unseen {
            let task = &self.tasks[index];
            let Some(stack) = task.stack.clone() else { continue };
            let is_on_cpu = on_cpu(self, index);
            if is_on_cpu && all_in_user_mode {
                continue;
            }
            let from = if is_on_cpu { stack.start } else { task.sp };
            let used = InUse { stack: stack.clone(), task: Some(index), from };
            let mut standers = Vec::new();
            for word in self.words(from..stack.end, &used)? {
                self.look(word, &mut standers);
            }
            for word in self.kept_returns(index)? {
                self.look(word, &mut standers);
            }
            if let Some((offset, count)) = self.check.layout.registers().filter(|_| !is_on_cpu) {
                let begin = task.at + offset;
                for word in self.words(begin..begin + 8 * count as u64, &used)? {
                    self.look(word, &mut standers);
                }
            }
            let vcpu = self.current.iter().position(|at| *at == Some(task.at));
            self.report(task.pid, task.comm, vcpu, standers);
        }
        Ok(())
    }

    /// The addresses to which a task returns that the guest's own tracing has taken off its stack.
    fn kept_returns(&mut self, index: usize) -> Result<Vec<u64>, TasksError> {
        self.check.layout.kept_returns(&mut self.reader, self.tasks[index].at)
    }

    /// Adds the function that `word` leads into.
    fn look(&self, word: u64, standers: &mut Vec<Arc<str>>) {
        let kernel = self.check.kernel;
        let mut word = kernel.arch().code_address(kernel.root().format, word);
        for _ in 0..MOST_TAIL_CALLS {
            if let Some(watched) = self.check.watched.find(Gva(word))
                && !standers.contains(&watched.name)
            {
                standers.push(Arc::clone(&watched.name));
            }
            let returns = self.check.returns.as_ref();
            match returns.and_then(|returns| returns.returns_to(word)) {
                Some(taken) => word = taken,
                None => break,
            }
        }
    }

    fn report(&mut self, pid: u32, comm: Comm, vcpu: Option<usize>, functions: Vec<Arc<str>>) {
        let stander = |function| Stander { pid, comm, function, vcpu };
        self.standers.extend(functions.into_iter().map(stander));
    }

    /// The words of a stack.
    fn words(&mut self, range: Range<Gva>, used: &InUse) -> Result<Vec<u64>, StackError> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        // Words lie at multiples of their length.
        let begin = range.start.align_down(8);
        let mut bytes = vec![0; range.end.offset_from(begin).unwrap_or(0) as usize];
        self.reader.read(begin, &mut bytes).map_err(|source| {
            let task = used.task.map(|index| &self.tasks[index]);
            StackError::Unreadable {
                pid: task.map_or(0, |task| task.pid),
                comm: task.map_or(Comm::new([0; Comm::LEN]), |task| task.comm),
                at: begin,
                source,
            }
        })?;
        let order = self.check.kernel.arch().byte_order();
        let (words, _) = bytes.as_chunks();
        Ok(words.iter().map(|word| order.u64(*word)).collect())
    }

    /// The task in whose stack `address` lies.
    fn task_at(&self, address: Gva) -> Option<usize> {
        let above = self.by_stack.partition_point(|(begin, _)| *begin <= address);
        let (_, index) = self.by_stack[..above].last()?;
        self.tasks[*index].stack.as_ref()?.contains(&address).then_some(*index)
    }

    /// The stack that the stack pointer `sp` is in.
    fn innermost(&mut self, sp: Gva, task: Option<usize>, others: &[Range<Gva>]) -> InUse {
        if let Some(stack) = task.and_then(|index| self.tasks[index].stack.clone()) {
            return InUse { stack, task, from: sp };
        }
        if let Some(stack) = others.iter().find(|stack| stack.contains(&sp)) {
            return InUse { stack: stack.clone(), task: None, from: sp };
        }
        // What is mapped in one piece, and may be more than the stack.
        let mut end = sp;
        while end.0 - sp.0 < UNKNOWN_STACK && self.reader.u64(end.align_down(8)).is_ok() {
            match end.align_down(PAGE).checked_add(PAGE) {
                Some(next) => end = next,
                None => break,
            }
        }
        InUse { stack: sp..end, task: None, from: sp }
    }

    /// Adds the stacks that `words`, which are in use by a vCPU, lead into to those in use, each from the
    /// lowest address on that one of the words is.
    fn follow(&self, vcpu: usize, words: &[u64], others: &[Range<Gva>], uses: &mut Vec<InUse>) {
        let known = self.current[vcpu];
        let may_run = |index: &usize| {
            let task = &self.tasks[*index];
            // Stacks of tasks that wait are pointed to by those that they wait for.
            task.on_cpu.unwrap_or_else(|| known.is_none_or(|at| at == task.at))
        };
        let first = uses.len();
        for address in words.iter().copied().map(Gva) {
            let (stack, task) = match self.task_at(address).filter(may_run) {
                Some(index) => (self.tasks[index].stack.as_ref(), Some(index)),
                None => (others.iter().find(|other| other.contains(&address)), None),
            };
            let Some(stack) = stack else { continue };
            match uses[first..].iter_mut().find(|used| used.stack == *stack) {
                Some(used) => used.from = used.from.min(address),
                None => uses.push(InUse { stack: stack.clone(), task, from: address }),
            }
        }
    }

    /// The stacks of the vCPU with these registers beside its tasks'.
    fn cpu_stacks(&mut self, registers: &Registers) -> Vec<Range<Gva>> {
        let arch = self.check.kernel.arch();
        let Some(area) = arch.cpu_area(registers) else { return Vec::new() };
        let size = self.check.layout.stack_size();
        let mut found: Vec<Range<Gva>> = Vec::new();
        for stack in arch.cpu_stacks() {
            let at = cpu_variable(&mut self.reader, area, stack.at);
            let Some(at) = at.filter(|at| at.0 != 0) else { continue };
            let range = match stack.extent {
                Extent::EndsThere { at_most } => {
                    let end = (at + 15).align_down(16);
                    Gva(end.0.saturating_sub(at_most))..end
                }
                Extent::AsTasks => at.align_down(size)..at.align_down(size) + size,
            };
            if range.start < range.end && !found.contains(&range) {
                found.push(range);
            }
        }
        found
    }
}

/// Which task the vCPU with these registers runs, where it is the vCPU that has to be asked.
fn current(reader: &mut Reader<'_>, registers: &Registers) -> Option<Gva> {
    let arch = reader.kernel.arch();
    if arch.standing(registers) == Standing::Elsewhere {
        return None;
    }
    let task = cpu_variable(reader, arch.cpu_area(registers)?, arch.current_task()?)?;
    (task.0 != 0).then_some(task)
}

fn cpu_variable(reader: &mut Reader<'_>, area: CpuArea, variable: CpuVariable) -> Option<Gva> {
    let value = match area {
        CpuArea::Offset(offset) => {
            let symbol = reader.kernel.symbols().address(variable.symbol?)?;
            reader.u64(symbol + offset + variable.offset).ok()?
        }
        CpuArea::Fixed(begin) => {
            let bytes = reader.ram.array(begin + variable.offset).ok()?;
            reader.kernel.arch().byte_order().u64(bytes)
        }
    };
    Some(Gva(value))
}

#[cfg(test)]
mod tests;
