//! A bare guest driven from outside: rounds of calls, what it found wrong, functions armed and put
//! back, records counted.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Bare, BareFunction};
use patcher::addr::{Gpa, Gva};
use patcher::arch::gate::Conditions;
use patcher::arch::{
    Arch, ArgumentWords, Gate, GatePlaces, Logger, PidPlace, ReturnExit, ReturnForm, ReturnHook,
    TaskPaths, TaskPlaces, TaskWords, Then, Thunks, assemble_returns, assemble_stub, stub_ip,
    text_len,
};
use patcher::kernel::{Pad, Refusal, judge_pad};
use patcher::machine::{Machine, Stopped, TextWrite};
use patcher::patch::{Applied, Patchset, Reverted, Site};
use patcher::region::{
    COUNTERS_OFFSET, CodeSpace, Counters, HISTOGRAMS_OFFSET, Histograms, Part, RECORD_RETURN,
    RETURN_POOL_OFFSET, RETURN_SLOTS, RETURN_STUBS_ALIGN, ReturnPool, ReturnPoolMemory, RingLayout,
    read_counters,
};
use patcher::trace::ring::RingReader;

mod measuring;

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(120);

/// How many processors a bare guest has.
pub const CPUS: usize = 2;

/// Calls of each function from each processor in a round: `CALLS` of `bare/bare.c`.
pub const CALLS: u64 = 8;

/// Words of what is shared: rounds wanted, the one function that is called, the processor that waits
/// before each call, and whether functions may find another address to return to.
const WANTED: u64 = 0;
const ONLY: u64 = 2;
const HELD: u64 = 3;
const RETURNS: u64 = 4;

/// `struct cpu` of `bare/bare.c`, in words of eight bytes.
const CPU_WORDS: u64 = 8;
const WRONG: Range<u64> = 1..6;
const PROBES: u64 = 6;
const STUCK: u64 = 7;

/// The first of the counters that gates have for their cells here, behind those of functions.
const FIRST_CELL: u32 = 1024;

/// Where the guest sees the region.
#[derive(Debug, Clone, Copy)]
pub struct RegionAt {
    /// The trampolines.
    pub code: Gva,
    /// The rings.
    pub rings: Gva,
}

/// A bare guest that runs on some machine.
pub struct Driver<'m> {
    /// What it runs on.
    pub machine: &'m dyn Machine,
    /// Its architecture.
    pub arch: &'static dyn Arch,
    bare: Bare,
    functions: Vec<BareFunction>,
    shared: Gpa,
    cpu_number: i32,
    task: TaskPlaces,
    rings: RingLayout,
    region: RegionAt,
    code: CodeSpace,
    trampolines: BTreeMap<u16, Range<Gva>>,
    /// The trampolines of functions whose returns are taken.
    returning: BTreeMap<u16, Gva>,
    /// Once there is one of those.
    pool: Option<ReturnPool>,
    /// The code that counts, by how far behind the instruction that changes functions go on.
    counting: BTreeMap<u16, Gva>,
    /// Functions that were counted, by their counters.
    counted: Vec<String>,
    /// Functions with stubs, by the low half of the address that the records of these carry.
    stubs: BTreeMap<u32, String>,
    readers: Vec<RingReader>,
    /// Instructions from where a processor is held to the call.
    way_to_a_call: usize,
}

impl<'m> Driver<'m> {
    /// Takes over a guest whose processors wait, or are about to. A processor finds its own number
    /// at `cpu_number`, as in [`Logger::cpu_number`].
    #[must_use]
    pub fn new(
        machine: &'m dyn Machine,
        arch: &'static dyn Arch,
        bare: Bare,
        region: RegionAt,
        cpu_number: i32,
    ) -> Self {
        let window = machine.region(Part::Rings);
        let rings = RingLayout::new(region.rings, window.memory.len() as u64, CPUS).unwrap();
        Self {
            machine,
            arch,
            functions: bare.functions().unwrap(),
            shared: Gpa(bare.symbol("shared").unwrap()),
            task: task_places(arch, &bare),
            bare,
            cpu_number,
            rings,
            region,
            code: CodeSpace::new(region.code, machine.region(Part::Code).memory.len() as u64),
            trampolines: BTreeMap::new(),
            returning: BTreeMap::new(),
            pool: None,
            counting: BTreeMap::new(),
            counted: Vec::new(),
            stubs: BTreeMap::new(),
            readers: readers(machine, rings, arch),
            way_to_a_call: 0,
        }
    }

    /// All functions with pads.
    #[must_use]
    pub fn functions(&self) -> &[BareFunction] {
        &self.functions
    }

    /// The function of that name.
    #[must_use]
    pub fn function(&self, name: &str) -> &BareFunction {
        let found = self.functions.iter().find(|function| function.name == name);
        found.unwrap_or_else(|| panic!("the guest has no function {name}"))
    }

    fn word(&self, index: u64) -> u64 {
        let bytes = self.machine.ram().array(self.shared + 8 * index).unwrap();
        self.arch.byte_order().u64(bytes)
    }

    fn of_cpu(&self, cpu: usize, word: u64) -> u64 {
        self.word(CPU_WORDS * (1 + cpu as u64) + word)
    }

    /// Breakpoints that the guest's processors have met.
    #[must_use]
    pub fn probes(&self) -> [u64; CPUS] {
        [0, 1].map(|cpu| self.of_cpu(cpu, PROBES))
    }

    /// Asks for `rounds` more, without waiting for them.
    pub fn ask(&self, rounds: u64) {
        self.set(WANTED, self.word(WANTED) + rounds);
    }

    /// Has the guest call one function alone from the next round on, or all again.
    pub fn call_only(&self, name: Option<&str>) {
        self.set(ONLY, name.map_or(0, |name| self.function(name).address));
    }

    /// How many rounds each processor has done.
    #[must_use]
    pub fn rounds(&self) -> [u64; CPUS] {
        [0, 1].map(|cpu| self.of_cpu(cpu, 0))
    }

    /// Only the host writes these words.
    fn set(&self, index: u64, value: u64) {
        let bytes = |value| self.arch.byte_order().bytes(value);
        let (ram, at) = (self.machine.ram(), self.shared + 8 * index);
        ram.replace_entry(at, bytes(self.word(index)), bytes(value)).unwrap();
    }

    /// Waits until all rounds that were asked for are done.
    ///
    /// # Panics
    /// If the guest finds something wrong.
    pub fn wait(&self) {
        let begun = Instant::now();
        let wanted = self.word(WANTED);
        while (0..CPUS).any(|cpu| self.of_cpu(cpu, 0) < wanted) {
            self.check();
            assert!(begun.elapsed() < LONG, "the guest does not come to an end");
            thread::sleep(Duration::from_millis(1));
        }
        self.check();
    }

    /// Has every function called `rounds` times [`CALLS`] from each processor.
    ///
    /// # Panics
    /// If the guest finds something wrong.
    pub fn run(&self, rounds: u64) {
        self.ask(rounds);
        self.wait();
    }

    /// Looks at what the guest has found.
    ///
    /// # Panics
    /// If that is something wrong.
    pub fn check(&self) {
        for cpu in 0..CPUS {
            let [wrong, function, what, expected, found] =
                [0, 1, 2, 3, 4].map(|word| self.of_cpu(cpu, WRONG.start + word));
            let name = self.functions.iter().find(|known| known.address == function);
            let name = name.map_or("what is no function", |known| &known.name);
            assert_eq!(
                wrong, 0,
                "CPU {cpu} found {wrong} things wrong, first in {name} at {function:#x}: {what} was \
                 {found:#x} instead of {expected:#x}"
            );
        }
    }

    /// What the pad of a function is now.
    ///
    /// # Errors
    /// Why it is none that may be written.
    pub fn judge(&self, name: &str) -> Result<Pad, Refusal> {
        let function = self.function(name);
        let lead = (function.pad - function.address) as usize;
        let mut text = vec![0; lead + text_len(self.arch)];
        self.machine.ram().read(Gpa(function.address), &mut text).unwrap();
        let hook = self.bare.symbol(self.arch.compiler_hook_symbol()).ok().map(Gva);
        let (before, rest) = text.split_at(lead);
        judge_pad(self.arch, Gva(function.pad), before, rest, hook, |slot_at, slot| {
            self.machine.ram().read(Gpa(slot_at.0), slot).is_ok()
        })
    }

    /// The trampoline for functions that go on so far behind the instruction that changes.
    pub fn trampoline(&mut self, resume: u16) -> Range<Gva> {
        let logger = Logger {
            cpu_number: self.cpu_number,
            rings: self.rings,
            clock: true,
            task: self.task,
            arguments: ArgumentWords::NONE,
            then: Then::GoOn { behind: resume, form: ReturnForm::Plain },
        };
        let (arch, code, window) = (self.arch, &self.code, self.machine.region(Part::Code));
        let place = || {
            let mut len = 0;
            let at = code.place::<anyhow::Error>(&window, |at| {
                let bytes = arch.assemble_logger(at, &logger)?;
                len = bytes.len() as u64;
                Ok(bytes)
            });
            let at = at.unwrap();
            at..at + len
        };
        self.trampolines.entry(resume).or_insert_with(place).clone()
    }

    /// The trampoline for functions that go on so far behind the instruction that changes and whose
    /// returns are taken.
    fn returning_trampoline(&mut self, resume: u16) -> Gva {
        if let Some(at) = self.returning.get(&resume) {
            return *at;
        }
        let at = self.recorded_with_return(RECORD_RETURN, resume);
        self.returning.insert(resume, at);
        at
    }

    /// Code that records a call and takes its return, for these duties.
    fn recorded_with_return(&mut self, duties: u32, resume: u16) -> Gva {
        let (arch, cpu_number, pool) = (self.arch, self.cpu_number, self.pool());
        let then = Then::GoOn { behind: resume, form: ReturnForm::Plain };
        let hook = ReturnHook { cpu_number, pool, clock: true, duties, then };
        let hook = self.place(&|at| Ok(arch.assemble_return_hook(at, &hook)?));
        let (rings, task, then) = (self.rings, self.task, Then::Next(hook));
        let arguments = ArgumentWords::NONE;
        let logger = Logger { cpu_number, rings, clock: true, task, arguments, then };
        self.place(&|at| Ok(arch.assemble_logger(at, &logger)?))
    }

    fn place(&self, assemble: &dyn Fn(Gva) -> anyhow::Result<Vec<u8>>) -> Gva {
        let window = self.machine.region(Part::Code);
        self.code.place::<anyhow::Error>(&window, assemble).unwrap()
    }

    /// The pool of slots, which is laid out with what functions return to when it is first asked for.
    fn pool(&mut self) -> ReturnPool {
        if let Some(pool) = self.pool {
            return pool;
        }
        let (arch, cpu_number, rings, task) = (self.arch, self.cpu_number, self.rings, self.task);
        let data = self.region.code + Part::Data.offset();
        let (at, histograms) = (data + RETURN_POOL_OFFSET, Histograms(data + HISTOGRAMS_OFFSET));
        let found = self.place(&|from| {
            let stubs = Gva(from.0.next_multiple_of(RETURN_STUBS_ALIGN));
            let (pool, returns) = (ReturnPool { at, stubs }, ReturnForm::Plain);
            let exit =
                ReturnExit { cpu_number, rings, clock: true, task, pool, histograms, returns };
            let mut code = vec![0; (stubs.0 - from.0) as usize];
            code.extend(assemble_returns(arch, &exit)?);
            Ok(code)
        });
        let stubs = Gva(found.0.next_multiple_of(RETURN_STUBS_ALIGN));
        let window = self.machine.region(Part::Data).memory;
        let memory = ReturnPoolMemory::new(&window, arch.byte_order()).unwrap();
        memory.lay_out(stubs).unwrap();
        *self.pool.insert(ReturnPool { at, stubs })
    }

    /// The sites of functions that are counted, and traced as well if `traced` says so; their counters
    /// are in the order of the names.
    ///
    /// # Panics
    /// If the pad of one may not be written.
    pub fn counting(&mut self, names: &[&str], traced: bool) -> Vec<Site> {
        let mut sites = self.sites(names);
        let (arch, form) = (self.arch, ReturnForm::Plain);
        let counters = Counters(self.region.code + Part::Data.offset() + COUNTERS_OFFSET);
        let shape = arch.thunk_shape();
        for (index, (site, name)) in sites.iter_mut().zip(names).enumerate() {
            let behind = self.judge(name).unwrap().layout.resume;
            let then = match traced {
                true => Then::Next(self.trampoline(behind).start),
                false => Then::GoOn { behind, form },
            };
            let window = self.machine.region(Part::Code);
            let place = |assemble: &dyn Fn(Gva) -> anyhow::Result<Vec<u8>>| {
                self.code.place::<anyhow::Error>(&window, assemble).unwrap()
            };
            let place_counter = || place(&|at| Ok(arch.assemble_counter(at, counters, then)?));
            let counter = match traced {
                true => place_counter(),
                false => *self.counting.entry(behind).or_insert_with(place_counter),
            };
            let within = index as u32 % shape.in_block;
            let thunks = Thunks { counters, first: index as u32 - within, stride: 1, to: counter };
            let block = place(&|at| Ok(arch.assemble_thunks(at, &thunks)?.to_vec()));
            let thunk = block + u64::from(within) * shape.bytes;
            site.replacement = arch.encode_branch(site.at, thunk).unwrap();
        }
        self.counted = names.iter().map(|name| (*name).to_owned()).collect();
        sites
    }

    /// The sites of functions of which only those calls are traced that these conditions let through; the
    /// cells of each follow those of the one before it.
    ///
    /// # Panics
    /// If the pad of one may not be written.
    pub fn gating(&mut self, names: &[&str], conditions: &Conditions) -> Vec<Site> {
        let mut sites = self.sites(names);
        let (arch, form) = (self.arch, ReturnForm::Plain);
        let counters = Counters(self.region.code + Part::Data.offset() + COUNTERS_OFFSET);
        let stride = conditions.cells();
        for (index, (site, name)) in (0_u32..).zip(sites.iter_mut().zip(names)) {
            let behind = self.judge(name).unwrap().layout.resume;
            let pass = Then::Next(self.trampoline(behind).start);
            let away = Then::GoOn { behind, form };
            let window = self.machine.region(Part::Code);
            let place = |assemble: &dyn Fn(Gva) -> anyhow::Result<Vec<u8>>| {
                self.code.place::<anyhow::Error>(&window, assemble).unwrap()
            };
            let places = GatePlaces::default();
            let gate = Gate { conditions, counters, places, pass, away };
            let to = place(&|at| Ok(arch.assemble_gate(at, &gate)?));
            let first = FIRST_CELL + index * stride;
            let thunks = Thunks { counters, first, stride, to };
            let block = place(&|at| Ok(arch.assemble_thunks(at, &thunks)?.to_vec()));
            site.replacement = arch.encode_branch(site.at, block).unwrap();
        }
        sites
    }

    /// How many calls of the first `functions` that [`gating`](Self::gating) was last asked for were turned
    /// away.
    ///
    /// # Panics
    /// If the region can't be read.
    #[must_use]
    pub fn turned_away(&self, functions: u32, conditions: &Conditions) -> Vec<u64> {
        let window = self.machine.region(Part::Data).memory;
        let cells = FIRST_CELL + functions * conditions.cells();
        let cells = read_counters(&window, self.arch.byte_order(), cells).unwrap();
        cells[FIRST_CELL as usize..].iter().step_by(conditions.cells() as usize).copied().collect()
    }

    /// How often the functions were called that [`counting`](Self::counting) was last asked for, since
    /// the guest began.
    ///
    /// # Panics
    /// If the region can't be read.
    #[must_use]
    pub fn counted(&self) -> BTreeMap<String, u64> {
        let window = self.machine.region(Part::Data).memory;
        let counters = read_counters(&window, self.arch.byte_order(), self.counted.len() as u32);
        self.counted.iter().cloned().zip(counters.unwrap()).collect()
    }

    /// The sites of functions whose returns are taken.
    ///
    /// # Panics
    /// If the pad of one may not be written.
    pub fn returning(&mut self, names: &[&str]) -> Vec<Site> {
        let mut sites = self.sites(names);
        for (site, name) in sites.iter_mut().zip(names) {
            let resume = self.judge(name).unwrap().layout.resume;
            let trampoline = self.returning_trampoline(resume);
            site.replacement = self.arch.encode_branch(site.at, trampoline).unwrap();
        }
        sites
    }

    /// Whether the guest is to put up with functions that find another address to return to.
    pub fn allow_other_returns(&self, may_be: bool) {
        self.set(RETURNS, may_be.into());
    }

    /// How many calls have not returned, how many slots are free, and how many calls found none.
    ///
    /// # Panics
    /// If no return was ever taken.
    #[must_use]
    pub fn slots(&self) -> (usize, u32, u64) {
        let window = self.machine.region(Part::Data).memory;
        let memory = ReturnPoolMemory::new(&window, self.arch.byte_order()).unwrap();
        assert_eq!(memory.stubs(), self.pool.map(|pool| pool.stubs));
        let placed = (0..RETURN_SLOTS).filter(|index| memory.slot(*index).placed).count();
        (placed, memory.free(CPUS), memory.missed())
    }

    /// The sites of functions whose pads may be written.
    ///
    /// # Panics
    /// If one may not.
    pub fn sites(&mut self, names: &[&str]) -> Vec<Site> {
        let site = |name: &&str| {
            let pad = self.judge(name).unwrap_or_else(|why| panic!("{name}: {why}"));
            let at = Gva(self.function(name).pad);
            let trampoline = self.trampoline(pad.layout.resume).start;
            Site {
                function: Arc::from(*name),
                at,
                gpa: Gpa(at.0),
                original: pad.original,
                replacement: self.arch.encode_branch(at, trampoline).unwrap(),
            }
        };
        names.iter().map(site).collect()
    }

    /// Whether a function has signed its return address when its pad comes.
    ///
    /// # Panics
    /// If its pad may not be written.
    #[must_use]
    pub fn signs(&self, name: &str) -> bool {
        self.judge(name).unwrap_or_else(|why| panic!("{name}: {why}")).prefix.signs
    }

    /// The site of a function that is redirected to another one.
    ///
    /// # Panics
    /// If its pad may not be written.
    #[must_use]
    pub fn redirected(&self, name: &str, to: &str) -> Site {
        self.jump(name, Gva(self.symbol(to)))
    }

    /// The same for one that is traced as well: by way of a stub.
    ///
    /// # Panics
    /// If its pad may not be written.
    pub fn redirected_and_traced(&mut self, name: &str, to: &str) -> Site {
        let (arch, to, logger) = (self.arch, Gva(self.symbol(to)), self.trampoline(0).start);
        let window = self.machine.region(Part::Code);
        let stub = self
            .code
            .place::<anyhow::Error>(&window, |at| Ok(assemble_stub(arch, at, logger, to)?));
        let stub = stub.unwrap();
        self.stubs.insert(stub_ip(arch, stub).0 as u32, name.to_owned());
        self.jump(name, stub)
    }

    fn jump(&self, name: &str, to: Gva) -> Site {
        let pad = self.judge(name).unwrap_or_else(|why| panic!("{name}: {why}"));
        let at = Gva(self.function(name).pad);
        Site {
            function: Arc::from(name),
            at,
            gpa: Gpa(at.0),
            original: pad.original,
            replacement: self.arch.encode_jump(at, to).unwrap(),
        }
    }

    /// Arms sites in one stop.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn arm(&self, sites: Vec<Site>) -> Applied {
        let patchset = Patchset::plan(sites).unwrap();
        let prepared = patchset.prepare(self.machine.ram());
        self.stopped(|stopped| prepared.verify(stopped, CPUS).unwrap().apply().unwrap())
    }

    /// Puts sites back in one stop.
    pub fn disarm(&self, applied: &Applied) -> Reverted {
        self.stopped(|stopped| applied.prepare_revert(self.machine.ram()).run(stopped))
    }

    /// Writes text in a stop of its own.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let write = TextWrite { at: Gpa(at), bytes };
        self.stopped(|stopped| stopped.write_text(&[write]).unwrap());
    }

    /// Does something to the stopped guest.
    pub fn stopped<R>(&self, work: impl FnOnce(&mut dyn Stopped) -> R) -> R {
        let mut stopped = self.machine.stop().unwrap();
        let result = work(&mut *stopped);
        stopped.resume().unwrap();
        result
    }

    /// Begins a round in which the first processor waits before its first call, the other one's being
    /// done.
    ///
    /// # Panics
    /// If the guest finds something wrong.
    pub fn hold_before_a_call(&self) {
        self.set(HELD, 1);
        self.ask(1);
        let (begun, wanted, stuck) = (Instant::now(), self.word(WANTED), self.of_cpu(0, STUCK));
        while self.of_cpu(0, STUCK) == stuck || self.of_cpu(1, 0) < wanted {
            self.check();
            assert!(begun.elapsed() < LONG, "the guest does not come to a call");
            thread::yield_now();
        }
    }

    /// Steps the first processor, which is [held](Self::hold_before_a_call), to the beginning of the
    /// function that it calls.
    ///
    /// # Panics
    /// If it does not come there.
    pub fn step_to(&mut self, stopped: &mut dyn Stopped, name: &str) {
        const MOST: usize = 1000;
        /// Instructions of the loop in which it is held, or more. It is anywhere in there.
        const LOOP: usize = 16;
        self.set(HELD, 0);
        // To step is quick, to look where that leads is not.
        for _ in 0..self.way_to_a_call.saturating_sub(LOOP) {
            stopped.step(0).unwrap();
        }
        let start = self.function(name).address;
        let looked = (0..MOST).position(|_| self.step(stopped) == start);
        let looked = looked.unwrap_or_else(|| panic!("the processor does not come to {name}"));
        self.way_to_a_call = self.way_to_a_call.saturating_sub(LOOP) + 1 + looked;
    }

    /// Has the first processor execute one instruction, none of which leads to itself; tells where it
    /// stands then.
    ///
    /// # Panics
    /// If it stays where it is.
    pub fn step(&self, stopped: &mut dyn Stopped) -> u64 {
        const TRIES: usize = 3;
        let from = stopped.registers(0).unwrap().pc();
        // Now and then QEMU says that a processor has stepped that has not executed anything.
        let mut steps = (0..TRIES).map(|_| {
            stopped.step(0).unwrap();
            stopped.registers(0).unwrap().pc()
        });
        steps.find(|pc| *pc != from).unwrap_or_else(|| panic!("it stays at {from:#x}"))
    }

    /// The address of a symbol.
    #[must_use]
    pub fn symbol(&self, name: &str) -> u64 {
        self.bare.symbol(name).unwrap()
    }

    /// The trampoline that a function that may be armed would have.
    pub fn trampoline_of(&mut self, name: &str) -> Range<Gva> {
        let pad = self.judge(name).unwrap();
        self.trampoline(pad.layout.resume)
    }

    /// The text of each function, and what lies in front of it.
    #[must_use]
    pub fn text(&self) -> Vec<(String, [u8; 64])> {
        let read = |function: &BareFunction| {
            let bytes = self.machine.ram().array(Gpa(function.address - 16)).unwrap();
            (function.name.clone(), bytes)
        };
        self.functions.iter().map(read).collect()
    }

    /// Passes over what was recorded while nobody read it: the rings may have run over.
    pub fn forget_recorded(&mut self) {
        self.readers = readers(self.machine, self.rings, self.arch);
    }

    /// What was recorded since it was last asked: how often each function was called from each
    /// processor.
    ///
    /// # Panics
    /// If a record is lost, names no function, or tells another task than its processor's.
    pub fn recorded(&mut self) -> BTreeMap<String, [u64; CPUS]> {
        let window = self.machine.region(Part::Rings);
        let mut counts = BTreeMap::new();
        let (functions, stubs) = (&self.functions, &self.stubs);
        let name_of = |ip: u32| {
            let behind = |function: &&BareFunction| {
                function.pad + self.arch.pad_len() as u64 == u64::from(ip)
            };
            let from = functions.iter().find(behind);
            from.map(|from| &from.name).or_else(|| stubs.get(&ip))
        };
        for (cpu, reader) in self.readers.iter_mut().enumerate() {
            let mut records = Vec::new();
            reader.look(&window.memory);
            while !reader.read(&window.memory, &mut records, usize::MAX) {}
            assert_eq!((reader.lost(), reader.corrupt()), (0, None));
            for record in records {
                let words = [(record.parent >> 32) as u32, record.task[0], record.task[1]];
                let (told, task) = (self.arch.task_words(words), task_of(self.arch, cpu));
                if let Some(name) = name_of(record.ip.wrapping_sub(1)) {
                    assert_eq!((told.pid, told.preempt_count), (task.pid, task.preempt_count));
                    counts.entry(format!("{name} returns")).or_insert([0; CPUS])[cpu] += 1;
                    continue;
                }
                assert_eq!(told, task, "{record:x?}");
                let name = name_of(record.ip);
                let name = name.unwrap_or_else(|| panic!("{record:x?} names no function"));
                counts.entry(name.clone()).or_insert([0; CPUS])[cpu] += 1;
            }
        }
        counts
    }
}

/// Where a guest has what is recorded of the task.
fn task_places(arch: &dyn Arch, bare: &Bare) -> TaskPlaces {
    let symbol = |name| i32::try_from(bare.symbol(name).unwrap()).unwrap();
    match arch.task_paths() {
        TaskPaths::FixedArea(area) => TaskPlaces {
            pid: Some(PidPlace::Fixed(area.pid)),
            preempt_count: Some(area.preempt_count),
        },
        paths => TaskPlaces {
            pid: Some(PidPlace::InTask {
                current: match paths {
                    TaskPaths::PerCpu { .. } => symbol("current_task"),
                    _ => 0,
                },
                pid: symbol("task_pid"),
            }),
            preempt_count: Some(symbol("preempt_count")),
        },
    }
}

/// What records of that processor tell of its task: guest-images/bare/task.h, and on x86_64 interrupts
/// are off on both.
fn task_of(arch: &dyn Arch, cpu: usize) -> TaskWords {
    TaskWords {
        pid: 101 + cpu as u32,
        irqs_off: cpu == 0 || arch.name() == "x86_64",
        preempt_count: [0x8001_0203, 5][cpu],
    }
}

/// A reader for each processor's ring, from where it stands now.
fn readers(machine: &dyn Machine, rings: RingLayout, arch: &dyn Arch) -> Vec<RingReader> {
    let window = machine.region(Part::Rings);
    let reader = |cpu| RingReader::new(&window.memory, rings, cpu, arch.byte_order()).unwrap();
    (0..CPUS).map(reader).collect()
}
