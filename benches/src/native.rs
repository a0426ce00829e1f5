//! Runs the very trampoline bytes that guests get, natively in this process.
//!
//! A trampoline needs three things of its surroundings: rings within reach of a signed 32-bit
//! displacement, which the lowest 2 GiB of a process are as well as the highest 2 GiB of a kernel; the
//! CPU number and the current task relative to GS, which user space on x86_64 leaves to whoever wants it;
//! and a call instruction that brings it there.
#![allow(unsafe_code)]

use std::io;
use std::ptr;

use patcher::addr::{Gpa, Gva};
use patcher::arch::gate::{Comparison, Conditions, GatedValue, Operator, Rate};
use patcher::arch::x86_64::X86_64;
use patcher::arch::{
    Arch, ArgumentWords, ByteOrder, Gate, GatePlaces, Logger, OutOfReach, PidPlace, ReturnExit,
    ReturnForm, ReturnHook, TaskPlaces, Then, Thunks, assemble_returns,
};
use patcher::region::{
    COUNTERS_OFFSET, Counters, HISTOGRAMS_OFFSET, Histograms, HistogramsMemory, MEASURE_CALL,
    PART_BYTES, RECORD_RETURN, RETURN_POOL_OFFSET, RETURN_SLOTS, RETURN_STUB_BYTES, RegionWindow,
    ReturnPool, ReturnPoolMemory, RingLayout, THUNK_BLOCK_BYTES, rings_window_len,
};
use vm_memory::VolatileSlice;

/// Bytes of the pages that hold pads and what they call.
const CODE_BYTES: usize = 8192;

/// Where the trampoline is in the page; the pads are before it. Behind it are that of functions whose
/// returns are recorded, too, and what takes them. The stubs are behind the page.
const TRAMPOLINE_AT: usize = 1024;
const WITH_RETURN_AT: usize = 1536;
const RETURN_HOOK_AT: usize = 2048;

/// Where what takes the returns of functions that are measured and not recorded is.
const MEASURE_HOOK_AT: usize = 2560;

/// Where the code is that counts, and the thunks that lead there.
const COUNTER_AT: usize = 3072;
const THUNKS_AT: usize = 3584;
const ARGUMENTS_AT: usize = THUNKS_AT + THUNK_BLOCK_BYTES as usize;

/// How many words of the stack are recorded of a call whose arguments are.
const STACK_WORDS: usize = 3;

/// The counter of the function that is counted.
pub const COUNTER: u32 = 2;

/// Where the gate is, and the thunks that lead there, in a page of their own.
const GATE_AT: usize = 4096;
const GATE_THUNKS_AT: usize = 6144;

/// Where the gate is that turns every call away, by its task's number, and the thunks that lead there.
const CLOSED_GATE_AT: usize = 5120;
const CLOSED_GATE_THUNKS_AT: usize = 6400;

/// The first of that gate's counters.
const CLOSED_COUNTER: u32 = 128;

/// The counter of the calls that the gate turns away.
pub const TURNED_AWAY: u32 = 16;

/// Which calls the gate lets through: every second one, of any of the first eight CPUs' tasks.
#[must_use]
pub fn gate_conditions() -> Conditions {
    let compare =
        |place, signed, operator, value| Comparison { place, bytes: 8, signed, operator, value };
    // One of two numbers that differ is not this one, and anything is at least nothing.
    let any = (0..6)
        .map(|register| {
            let place = GatedValue::Register(register);
            vec![
                compare(place, true, Operator::Equal, 1),
                compare(place, false, Operator::NotEqual, 1),
            ]
        })
        .chain([vec![compare(GatedValue::Stack(0), false, Operator::AtLeast, 0)]]);
    Conditions {
        pids: (FIRST_PID..FIRST_PID + 8).rev().collect(),
        comm: None,
        any: any.collect(),
        one_in: Some(2),
        rate: Some(Rate { every: 1, slack: u64::MAX >> 2 }),
    }
}
/// The histogram of the function that is measured.
pub const HISTOGRAM: u16 = 3;

/// Bytes of the stubs and what they lead to.
const RETURN_CODE_BYTES: usize = (RETURN_SLOTS as u64 * RETURN_STUB_BYTES) as usize + CODE_BYTES;

/// What a CPU has in the page that its GS points to, beside its number: the address of its task, and the
/// count that tells of preemption and interrupts.
const TASK_AT: usize = 8;
const COUNT_AT: usize = 16;

/// Where a task, which lies in the same page, has its number.
const PID_AT: usize = 2416;

/// The number of the first CPU's task; the others count from there.
pub const FIRST_PID: u32 = 1000;

/// The count of every CPU.
pub const COUNT: u32 = 0x8000_0001;

/// A pad of a function that does nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pad {
    /// No pad: the function returns at once.
    Bare,
    /// The five-byte no-operation of a function that nobody traces.
    Idle,
    /// A call of the trampoline.
    Armed,
    /// The same, and the return is taken.
    Returning,
    /// The same; the function calls that with [`Pad::Returning`].
    Nested,
    /// The same; the function ends in a jump to that with [`Pad::Returning`].
    Tail,
    /// A call of a thunk: the function is counted, and then recorded.
    Counted,
    /// A call of a thunk: only those calls are recorded that the gate lets through.
    Gated,
    /// The same, of a gate that turns every call away by its task, if tasks are told.
    TurnedAway,
    /// A call of what has the call measured, and records nothing.
    Measured,
    /// The same, and until it returns the clock is set back.
    Rewound,
    /// A call of a trampoline that records all registers of arguments, and some words of the stack.
    Arguments,
}

impl Pad {
    fn offset(self) -> usize {
        match self {
            Pad::Bare => 0,
            Pad::Idle => 64,
            Pad::Armed => 128,
            Pad::Returning => 192,
            Pad::Nested => 256,
            Pad::Tail => 320,
            Pad::Counted => 384,
            Pad::Measured => 448,
            Pad::Rewound => 512,
            Pad::Gated => 576,
            Pad::TurnedAway => 704,
            Pad::Arguments => 640,
        }
    }
}

/// Functions and rings in this process.
#[derive(Debug)]
pub struct NativeGuest {
    code: LowMemory,
    /// The region's data, with the calls at its end whose returns are taken.
    data: LowMemory,
    rings: LowMemory,
    layout: RingLayout,
    gs: LowMemory,
    len: usize,
}

/// One CPU of such a guest, for the thread that is to be it.
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    gs: u64,
}

impl Cpu {
    /// Makes the calling thread this CPU: what it calls from now on is recorded as this one's.
    ///
    /// # Errors
    /// What the system says to its GS base.
    pub fn enlist(self) -> io::Result<()> {
        set_gs_base(self.gs)
    }
}

impl NativeGuest {
    /// A guest of one CPU with a ring of `ring_bytes`, whose records carry the time if `clock` says
    /// so. The calling thread's GS base is taken for it: what it calls has to be called from this
    /// thread.
    ///
    /// # Errors
    /// What the system says to the mappings.
    pub fn new(ring_bytes: u64, clock: bool) -> io::Result<Self> {
        let guest = Self::with_cpus(1, ring_bytes, clock, true)?;
        guest.cpu(0).enlist()?;
        Ok(guest)
    }

    /// A guest of `cpus` CPUs with a ring of `ring_bytes` each, whose records tell of the task if `task`
    /// says so. What is called has to be called from
    /// threads that were made its CPUs.
    ///
    /// # Errors
    /// What the system says to the mappings.
    pub fn with_cpus(cpus: usize, ring_bytes: u64, clock: bool, task: bool) -> io::Result<Self> {
        let rings_len = rings_window_len(cpus, ring_bytes) as usize;
        let rings = LowMemory::new(rings_len)?;
        let data = LowMemory::new(PART_BYTES as usize)?;
        let mut code = LowMemory::new(CODE_BYTES + RETURN_CODE_BYTES)?;
        // A page for each CPU that its GS points to, with the CPU number, 32 bits, at its beginning.
        let mut gs = LowMemory::new(cpus * CODE_BYTES)?;
        for cpu in 0..cpus {
            let page = cpu * CODE_BYTES;
            gs.write(page, &(cpu as u32).to_le_bytes());
            let task = gs.address() + page as u64;
            gs.write(page + TASK_AT, &task.to_le_bytes());
            gs.write(page + COUNT_AT, &COUNT.to_le_bytes());
            gs.write(page + PID_AT, &(FIRST_PID + cpu as u32).to_le_bytes());
        }

        let layout = RingLayout::new(Gva(rings.address()), rings_len as u64, cpus)
            .map_err(io::Error::other)?;
        let places = TaskPlaces {
            pid: Some(PidPlace::InTask { current: TASK_AT as i32, pid: PID_AT as i32 }),
            preempt_count: Some(COUNT_AT as i32),
        };
        let task = if task { places } else { TaskPlaces::default() };
        let logger = Logger {
            cpu_number: 0,
            rings: layout,
            clock,
            task,
            arguments: ArgumentWords::NONE,
            then: Then::GoOn { behind: 0, form: ReturnForm::Plain },
        };
        let base = code.address();
        let trampoline = Gva(base + TRAMPOLINE_AT as u64);
        let bytes = X86_64.assemble_logger(trampoline, &logger).map_err(io::Error::other)?;
        code.write(TRAMPOLINE_AT, &bytes);
        let pool = ReturnPool {
            at: Gva(data.address() + RETURN_POOL_OFFSET),
            stubs: Gva(base + CODE_BYTES as u64),
        };
        let histograms = Histograms(Gva(data.address() + HISTOGRAMS_OFFSET));
        write_return_code(&mut code, &logger, (pool, histograms)).map_err(io::Error::other)?;
        let returning = Gva(base + WITH_RETURN_AT as u64);
        let counters = Counters(Gva(data.address() + COUNTERS_OFFSET));
        let convention = X86_64.calling_convention();
        let arguments = ArgumentWords::new(convention, convention.registers.len(), STACK_WORDS);
        let with_arguments = Gva(base + ARGUMENTS_AT as u64);
        let recording = X86_64.assemble_logger(with_arguments, &Logger { arguments, ..logger });
        code.write(ARGUMENTS_AT, &recording.map_err(io::Error::other)?);
        let counter = Gva(base + COUNTER_AT as u64);
        let counting = X86_64.assemble_counter(counter, counters, Then::Next(trampoline));
        code.write(COUNTER_AT, &counting.map_err(io::Error::other)?);
        let thunks = Gva(base + THUNKS_AT as u64);
        let block =
            X86_64.assemble_thunks(thunks, &Thunks { counters, first: 0, stride: 1, to: counter });
        code.write(THUNKS_AT, &block.map_err(io::Error::other)?);
        // No CPU's task has that number.
        let closed = Conditions { pids: vec![1], ..Conditions::default() };
        let [gated, turned_away] = [
            (gate_conditions(), GATE_AT, GATE_THUNKS_AT, TURNED_AWAY),
            (closed, CLOSED_GATE_AT, CLOSED_GATE_THUNKS_AT, CLOSED_COUNTER),
        ]
        .map(|gate| write_gate(&mut code, counters, task.pid, trampoline, gate));
        let gated = gated.map_err(io::Error::other)?;
        let turned_away = turned_away.map_err(io::Error::other)?;
        let thunk = thunks + u64::from(COUNTER) * X86_64.thunk_shape().bytes;
        for pad in [
            Pad::Bare,
            Pad::Idle,
            Pad::Armed,
            Pad::Returning,
            Pad::Nested,
            Pad::Tail,
            Pad::Counted,
            Pad::Gated,
            Pad::TurnedAway,
            Pad::Measured,
            Pad::Rewound,
            Pad::Arguments,
        ] {
            let at = Gva(base + pad.offset() as u64);
            let to = match pad {
                Pad::Armed => trampoline,
                Pad::Counted => thunk,
                Pad::Arguments => Gva(base + ARGUMENTS_AT as u64),
                Pad::Gated => gated,
                Pad::TurnedAway => turned_away,
                Pad::Measured | Pad::Rewound => Gva(base + MEASURE_HOOK_AT as u64),
                _ => returning,
            };
            let call = X86_64.encode_branch(at, to).map_err(io::Error::other)?;
            let behind = at + call.len() as u64;
            let inner = Gva(base + Pad::Returning.offset() as u64);
            let inner = match pad {
                Pad::Nested => X86_64.encode_branch(behind, inner),
                _ => X86_64.encode_jump(behind, inner),
            };
            let inner = inner.map_err(io::Error::other)?;
            // The first slot's time of the call is put off: mov byte [time+7], 0x7f.
            let time = (pool.slots().0 as u32 + 8 + 7).to_le_bytes();
            let rewind = [&[0xc6, 0x04, 0x25][..], &time, &[0x7f]].concat();
            let instructions: &[&[u8]] = match pad {
                Pad::Bare => &[&[0xc3]],
                Pad::Idle => &[&[0x0f, 0x1f, 0x44, 0, 0], &[0xc3]],
                Pad::Armed
                | Pad::Returning
                | Pad::Counted
                | Pad::Measured
                | Pad::Gated
                | Pad::TurnedAway
                | Pad::Arguments => &[&call, &[0xc3]],
                Pad::Nested => &[&call, &inner, &[0xc3]],
                Pad::Tail => &[&call, &inner],
                Pad::Rewound => &[&call, &rewind, &[0xc3]],
            };
            code.write(pad.offset(), &instructions.concat());
        }
        code.make_executable()?;
        let guest = Self { code, data, rings, layout, gs, len: bytes.len() };
        let memory = ReturnPoolMemory::new(&guest.data().memory, ByteOrder::Little);
        memory.and_then(|memory| memory.lay_out(pool.stubs)).map_err(io::Error::other)?;
        Ok(guest)
    }

    /// The CPU of that number.
    #[must_use]
    pub fn cpu(&self, number: usize) -> Cpu {
        Cpu { gs: self.gs.address() + (number * CODE_BYTES) as u64 }
    }

    /// The trampoline's bytes.
    #[must_use]
    pub fn trampoline(&self) -> Vec<u8> {
        let begin = self.code.pointer.cast::<u8>();
        // SAFETY: that many bytes were written there, and nothing writes there any more.
        unsafe { std::slice::from_raw_parts(begin.add(TRAMPOLINE_AT), self.len) }.to_vec()
    }

    /// The function with that pad.
    #[must_use]
    pub fn function(&self, pad: Pad) -> extern "C" fn() {
        let address = self.code.address() as usize + pad.offset();
        // SAFETY: the page is executable, the bytes there are a whole function that touches nothing
        // but the rings, and it lives as long as `self`, which the benchmarks keep.
        unsafe { std::mem::transmute::<usize, extern "C" fn()>(address) }
    }

    /// Where the function with that pad begins.
    #[must_use]
    pub fn address(&self, pad: Pad) -> u64 {
        self.code.address() + pad.offset() as u64
    }

    /// The layout of the rings.
    #[must_use]
    pub fn layout(&self) -> RingLayout {
        self.layout
    }

    /// The region's data.
    #[must_use]
    pub fn data(&self) -> RegionWindow<'_> {
        // SAFETY: as in `rings`.
        let memory = unsafe { VolatileSlice::new(self.data.pointer.cast(), self.data.len) };
        RegionWindow { gpa: Gpa(0), memory }
    }

    /// The histograms in them.
    #[must_use]
    pub fn histograms(&self) -> HistogramsMemory<'_> {
        HistogramsMemory::new(self.data().memory, ByteOrder::Little)
    }

    /// The rings as a reader gets them.
    #[must_use]
    pub fn rings(&self) -> RegionWindow<'_> {
        // SAFETY: the mapping lives as long as the borrow of `self`; all access goes through
        // volatile slices or the trampoline's own stores.
        let memory = unsafe { VolatileSlice::new(self.rings.pointer.cast(), self.rings.len) };
        RegionWindow { gpa: Gpa(0), memory }
    }
}

/// Writes a gate in front of the trampoline, its code and its thunks at these offsets, and gives the first thunk,
/// which has that counter.
fn write_gate(
    code: &mut LowMemory,
    counters: Counters,
    pid: Option<PidPlace>,
    trampoline: Gva,
    (conditions, gate_at, thunks_at, first): (Conditions, usize, usize, u32),
) -> Result<Gva, OutOfReach> {
    let at = |offset: usize| Gva(code.address() + offset as u64);
    let (to, thunks) = (at(gate_at), at(thunks_at));
    let gate = Gate {
        conditions: &conditions,
        counters,
        places: GatePlaces { pid, comm: None },
        pass: Then::Next(trampoline),
        away: Then::GoOn { behind: 0, form: ReturnForm::Plain },
    };
    let stride = conditions.cells();
    let thunks_of = Thunks { counters, first, stride, to };
    let (gate, block) =
        (X86_64.assemble_gate(to, &gate)?, X86_64.assemble_thunks(thunks, &thunks_of)?);
    code.write(gate_at, &gate);
    code.write(thunks_at, &block);
    Ok(thunks)
}

/// Writes what functions call whose returns are recorded, and what they return to.
fn write_return_code(
    code: &mut LowMemory,
    logger: &Logger,
    (pool, histograms): (ReturnPool, Histograms),
) -> Result<(), OutOfReach> {
    let base = code.address();
    let hook_at = Gva(base + RETURN_HOOK_AT as u64);
    let hook = ReturnHook {
        cpu_number: logger.cpu_number,
        pool,
        clock: false,
        duties: RECORD_RETURN,
        then: logger.then,
    };
    code.write(RETURN_HOOK_AT, &X86_64.assemble_return_hook(hook_at, &hook)?);
    let measure_at = Gva(base + MEASURE_HOOK_AT as u64);
    let duties = MEASURE_CALL | u32::from(HISTOGRAM);
    let measure = ReturnHook { clock: true, duties, ..hook };
    code.write(MEASURE_HOOK_AT, &X86_64.assemble_return_hook(measure_at, &measure)?);
    let logger = Logger { then: Then::Next(hook_at), ..*logger };
    let at = Gva(base + WITH_RETURN_AT as u64);
    code.write(WITH_RETURN_AT, &X86_64.assemble_logger(at, &logger)?);
    let exit = ReturnExit {
        cpu_number: logger.cpu_number,
        rings: logger.rings,
        clock: logger.clock,
        task: logger.task,
        pool,
        histograms,
        returns: ReturnForm::Plain,
    };
    code.write((pool.stubs.0 - base) as usize, &assemble_returns(&X86_64, &exit)?);
    Ok(())
}

/// Makes GS of this thread point to `base`.
fn set_gs_base(base: u64) -> io::Result<()> {
    // asm/prctl.h
    const ARCH_SET_GS: libc::c_long = 0x1001;
    // SAFETY: user space's GS is unused on x86_64 Linux; nothing else in this process reads it.
    let result = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Memory in the lowest 2 GiB of this process.
#[derive(Debug)]
struct LowMemory {
    pointer: *mut libc::c_void,
    len: usize,
}

impl LowMemory {
    fn new(len: usize) -> io::Result<Self> {
        // SAFETY: a new anonymous mapping, wherever the system likes.
        let pointer = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        if pointer == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { pointer, len })
    }

    fn address(&self) -> u64 {
        self.pointer as u64
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        // SAFETY: within the mapping, as just checked, which nothing executes or reads yet.
        unsafe {
            ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.pointer.cast::<u8>().add(offset),
                bytes.len(),
            );
        }
    }

    fn make_executable(&mut self) -> io::Result<()> {
        // SAFETY: changes the protection of a mapping that is ours alone.
        let result =
            unsafe { libc::mprotect(self.pointer, self.len, libc::PROT_READ | libc::PROT_EXEC) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for LowMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more.
        unsafe { libc::munmap(self.pointer, self.len) };
    }
}
