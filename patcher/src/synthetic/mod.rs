//! An x86_64 guest made of nothing but memory: a kernel's image with functions, pads, symbols and
//! ftrace records, page tables, and registers of vCPUs that run it.
//!
//! It is for tests and benches that need a guest's memory and no guest: everything that
//! [`kernel`] reads is there, and nothing ever executes it. Whatever a test wants
//! otherwise it writes over with [`Guest::poke`].
//!
//! # Panics
//! Functions of this module panic where a blueprint does not fit the guest's memory.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use vm_memory::{Bytes, GuestMemoryMmap};

use crate::addr::{Gpa, Gva};
use crate::arch::ByteOrder;
use crate::kernel::{self, Kernel, Located};
use crate::machine::{Registers, X86Registers};
use crate::region::Traps;

#[cfg(test)]
mod faulty;
mod kallsyms;
mod machine;
pub mod tasks;

#[cfg(test)]
pub use faulty::{Faulty, Kind};
pub use kallsyms::{Encoding, SymbolSpec, TableOrder, encode};
pub use tasks::TaskSpec;

/// What a synthetic guest is to be like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blueprint {
    /// In which order the tables of symbols are; it also decides where a CPU's number is and
    /// whether functions begin with landing pads, as in the kernels that have that order.
    pub order: TableOrder,
    /// Whether page tables have five levels.
    pub five_levels: bool,
    /// Whether the first vCPU stands on the user half of an isolated root table.
    pub isolated: bool,
    /// The address of `_text`, a multiple of 2 MiB.
    pub base: Gva,
    /// The same in guest-physical memory; there are 4 MiB of image.
    pub phys: Gpa,
    /// How many functions with pads there are, at least 1,100 and at most 20,000.
    pub functions: usize,
    /// How many CPUs there are, at most 64.
    pub cpus: u32,
    /// Whether functions return through a thunk.
    pub return_thunk: bool,
}

impl Default for Blueprint {
    fn default() -> Self {
        Self {
            order: TableOrder::OffsetsLast,
            five_levels: false,
            isolated: false,
            base: Gva(0xffff_ffff_9a40_0000),
            phys: Gpa(0x80_0000),
            functions: 2000,
            cpus: 2,
            return_thunk: false,
        }
    }
}

/// A synthetic guest.
#[derive(Debug)]
pub struct Guest {
    /// Its RAM, 32 MiB from address 0 on.
    pub ram: GuestMemoryMmap<()>,
    /// The registers of its vCPUs.
    pub registers: Vec<Registers>,
    /// Its functions with pads, in order of their addresses.
    pub functions: Vec<Function>,
    /// Its tasks: those in the ring of processes, then the others.
    pub tasks: Vec<TaskSpec>,
    /// Its symbols, in order of their addresses.
    pub symbols: Vec<SymbolSpec>,
    /// Where its ftrace records are, group by group.
    pub record_groups: Vec<RecordGroup>,
    /// Where its encoded symbols are in guest-virtual memory.
    pub kallsyms: Range<Gva>,
    blueprint: Blueprint,
    region: machine::Region,
    traps: Mutex<Arc<Traps>>,
}

/// A function of a synthetic guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Where it begins.
    pub entry: Gva,
    /// Where its pad is.
    pub pad: Gva,
}

/// A group of ftrace records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordGroup {
    /// Where its `struct ftrace_page` is.
    pub descriptor: Gva,
    /// Where its first record is.
    pub records: Gva,
    /// How many records it has.
    pub count: usize,
}

/// Everything in RAM has its place.
const RAM: u64 = 32 << 20;
const PROCESS_ROOT: u64 = 0x10_0000;
const USER_ROOT: u64 = 0x10_1000;
const USER_TABLES: u64 = 0x10_2000;
const PER_CPU_AREAS: u64 = 0x20_0000;
const PER_CPU_AREA: u64 = 0x4000;
const RECORD_DESCRIPTORS: u64 = 0x100_0000;
const RECORDS: u64 = 0x101_0000;

/// And so has everything in the image, by its distance from `_text`.
const FUNCTIONS: u64 = 0x1000;
const FUNCTION: u64 = 64;
const INIT_TEXT: u64 = 0x18_0000;
const INIT_FUNCTIONS: u64 = 16;
const BANNER: u64 = 0x20_0000;
const KALLSYMS: u64 = 0x20_1000;
const VARIABLES: u64 = 0x38_0000;
const TABLES: u64 = 0x38_1000;
const PER_CPU_TEMPLATE: u64 = 0x39_0000;
const END: u64 = 0x3b_0000;

/// How far into a CPU's area its number is.
const CPU_NUMBER: u64 = 0x1160;

/// In front of it, the current task and the count of preemption and interrupts.
const CURRENT_TASK: u64 = CPU_NUMBER - 12;
const PREEMPT_COUNT: u64 = CPU_NUMBER - 4;

/// The symbols of these three where they are variables of their own.
const PER_CPU_NAMES: [(u64, &str); 3] = [
    (CURRENT_TASK, "current_task"),
    (PREEMPT_COUNT, "__preempt_count"),
    (CPU_NUMBER, "cpu_number"),
];

const PAGE: u64 = 0x1000;
const LARGE_PAGE: u64 = 2 << 20;
const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
const PREFIXES: [&[u8]; 4] =
    [&[0xf3, 0x0f, 0x1e, 0xfa], &[], &[0x66, 0x0f, 0x1f, 0x00], &[0x0f, 0x1f, 0x40, 0xd6]];

/// What the kernel calls itself.
pub const BANNER_LINE: &str = "Linux version 6.9.42-synthetic (nobody@nowhere) #1 SMP";

impl Guest {
    /// Builds a guest.
    #[must_use]
    pub fn new(blueprint: &Blueprint) -> Self {
        assert!((1100..=20_000).contains(&blueprint.functions) && blueprint.cpus <= 64);
        let ram = GuestMemoryMmap::from_ranges(&[(Gpa(0).into(), RAM as usize)])
            .expect("32 MiB can be had");
        let mut guest = Self {
            ram,
            registers: Vec::new(),
            functions: Vec::new(),
            tasks: Vec::new(),
            symbols: Vec::new(),
            record_groups: Vec::new(),
            kallsyms: Gva(0)..Gva(0),
            blueprint: blueprint.clone(),
            region: machine::Region::new(),
            traps: Mutex::default(),
        };
        guest.write_text();
        guest.write_records();
        guest.write_tables();
        guest.write_variables();
        guest.write_symbols();
        guest.set_registers();
        guest
    }

    /// What the guest was built to be.
    #[must_use]
    pub fn blueprint(&self) -> &Blueprint {
        &self.blueprint
    }

    /// The kernel that the guest's vCPUs run.
    #[must_use]
    pub fn kernel(&self) -> Kernel {
        match kernel::locate(&self.ram, &self.registers) {
            Ok(Located::Found(kernel)) => *kernel,
            other => panic!("the synthetic kernel is not found: {other:?}"),
        }
    }

    /// The address of a symbol.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Gva {
        let symbol = self.symbols.iter().find(|symbol| symbol.name == name);
        Gva(symbol.unwrap_or_else(|| panic!("no symbol {name}")).address)
    }

    /// Where an address of the image or of the direct map is in guest-physical memory.
    #[must_use]
    pub fn physical(&self, va: Gva) -> Gpa {
        match va.offset_from(self.blueprint.base) {
            Some(offset) => self.blueprint.phys + offset,
            None => Gpa(va.offset_from(self.direct(Gpa(0))).expect("image or direct map")),
        }
    }

    /// Writes memory at an address of the image or of the direct map.
    pub fn poke(&self, va: Gva, bytes: &[u8]) {
        self.ram.write_slice(bytes, self.physical(va).into()).expect("within RAM");
    }

    /// Writes a 64-bit value at an address of the image or of the direct map.
    pub fn poke_u64(&self, va: Gva, value: u64) {
        self.poke(va, &value.to_le_bytes());
    }

    /// The traps that it was last told to answer.
    #[must_use]
    pub fn traps(&self) -> Arc<Traps> {
        Arc::clone(&self.traps.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads memory at an address of the image or of the direct map.
    #[must_use]
    pub fn peek(&self, va: Gva, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_slice(&mut bytes, self.physical(va).into()).expect("within RAM");
        bytes
    }

    /// Where the direct map has guest-physical memory.
    #[must_use]
    pub fn direct(&self, gpa: Gpa) -> Gva {
        // page_offset_base of a kernel that does not move it (Documentation/arch/x86/x86_64/mm.rst).
        let base =
            if self.blueprint.five_levels { 0xff11_0000_0000_0000 } else { 0xffff_8880_0000_0000 };
        Gva(base) + gpa.0
    }

    /// The page that holds the entries for the image's 1 GiB: `level2_kernel_pgt`.
    #[must_use]
    pub fn image_directory(&self) -> Gva {
        self.at(TABLES + 3 * PAGE)
    }

    /// Gives a symbol another name, of any length.
    pub fn rename_symbol(&mut self, name: &str, new: &str) {
        self.change_symbol(name, |symbol| symbol.name = new.to_owned());
    }

    /// Changes a symbol; it must stay between its neighbours.
    pub fn change_symbol(&mut self, name: &str, change: impl FnOnce(&mut SymbolSpec)) {
        let symbol = self.symbols.iter_mut().find(|symbol| symbol.name == name);
        change(symbol.unwrap_or_else(|| panic!("no symbol {name}")));
        self.poke(self.at(KALLSYMS), &[0; (VARIABLES - KALLSYMS) as usize]);
        self.encode_symbols();
    }

    fn at(&self, offset: u64) -> Gva {
        self.blueprint.base + offset
    }

    fn add_symbol(&mut self, offset: u64, kind: u8, name: &str) {
        let address = self.at(offset).0;
        self.symbols.push(SymbolSpec { address, kind, name: name.to_owned() });
    }

    /// Functions, the compiler's hook, a return thunk, and init text.
    fn write_text(&mut self) {
        self.add_symbol(0, b'T', "_text");
        self.add_symbol(0, b'T', "_stext");
        let count = self.blueprint.functions as u64;
        let hook = FUNCTIONS + count * FUNCTION;
        let thunk = hook + FUNCTION;
        let landing_pads =
            matches!(self.blueprint.order, TableOrder::OffsetsLast | TableOrder::SelfRelative);
        for index in 0..count {
            let name = match index {
                0 => "vfs_read".to_owned(),
                1 => "vfs_write".to_owned(),
                _ => format!("function_{index:05}"),
            };
            let prefix = if landing_pads { PREFIXES[index as usize % 4] } else { &[] };
            self.add_function(FUNCTIONS + index * FUNCTION, name, prefix, thunk);
            if index % 500 == 7 {
                let name = format!("alias_of_{index:05}");
                self.add_symbol(FUNCTIONS + index * FUNCTION, b't', &name);
            }
        }
        self.add_symbol(hook, b'T', "__fentry__");
        self.poke(self.at(hook), &[0xc3, 0xcc, 0xcc, 0xcc, 0xcc]);
        self.add_symbol(thunk, b'T', "its_return_thunk");
        self.add_symbol(thunk + FUNCTION, b'T', "_etext");
        self.add_symbol(INIT_TEXT, b'T', "_sinittext");
        for index in 0..INIT_FUNCTIONS {
            let name = format!("init_{index}");
            self.add_function(INIT_TEXT + index * FUNCTION, name, &[], thunk);
        }
        self.add_symbol(INIT_TEXT + INIT_FUNCTIONS * FUNCTION, b'T', "_einittext");
    }

    fn add_function(&mut self, offset: u64, name: String, prefix: &[u8], thunk: u64) {
        self.add_symbol(offset, b't', &name);
        let (entry, pad) = (self.at(offset), self.at(offset + prefix.len() as u64));
        self.poke(entry, &[0x90; FUNCTION as usize]);
        self.poke(entry, prefix);
        self.poke(pad, &NOP);
        let mut ret = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];
        if self.blueprint.return_thunk {
            ret[0] = 0xe9;
            let distance = thunk.wrapping_sub(offset + 37) as u32;
            ret[1..].copy_from_slice(&distance.to_le_bytes());
        }
        self.poke(entry + 32, &ret);
        self.functions.push(Function { name, entry, pad });
    }

    /// Groups of one and two pages of records, in turn.
    fn write_records(&mut self) {
        let pads: Vec<Gva> = self.functions.iter().map(|function| function.pad).collect();
        let mut rest = pads.as_slice();
        let mut records_at = Gpa(RECORDS);
        let mut order = 0;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(256 << order));
            let records = self.direct(records_at);
            for (index, pad) in now.iter().enumerate() {
                self.poke_u64(records + 16 * index as u64, pad.0);
            }
            let descriptor = RECORD_DESCRIPTORS + 32 * self.record_groups.len() as u64;
            let descriptor = self.direct(Gpa(descriptor));
            if let Some(last) = self.record_groups.last() {
                self.poke_u64(last.descriptor, descriptor.0);
            }
            self.poke_u64(descriptor, 0);
            self.poke_u64(descriptor + 8, records.0);
            self.poke(descriptor + 16, &(now.len() as u32).to_le_bytes());
            self.poke(descriptor + 20, &(order as u32).to_le_bytes());
            self.record_groups.push(RecordGroup { descriptor, records, count: now.len() });
            records_at = records_at + (PAGE << order);
            rest = later;
            order ^= 1;
        }
    }

    /// The kernel's own tables, and the root of a process.
    fn write_tables(&mut self) {
        let table = |index: u64| self.at(TABLES + index * PAGE);
        let link = |va: Gva| self.physical(va).0 | 0x63;
        let (root, p4d, pud, pmd) = (table(0), table(1), table(2), self.image_directory());
        let (direct_p4d, direct_pud, direct_pmd) = (table(4), table(5), table(6));
        let direct = self.direct(Gpa(0)).0;
        let slot = |shift: u32| (direct >> shift & 0x1ff) * 8;
        if self.blueprint.five_levels {
            self.poke_u64(root + 511 * 8, link(p4d));
            self.poke_u64(p4d + 511 * 8, link(pud));
            self.poke_u64(root + slot(48), link(direct_p4d));
            self.poke_u64(direct_p4d + slot(39), link(direct_pud));
        } else {
            self.poke_u64(root + 511 * 8, link(pud));
            self.poke_u64(root + slot(39), link(direct_pud));
        }
        self.poke_u64(pud + 510 * 8, link(pmd));
        self.poke_u64(direct_pud + slot(30), link(direct_pmd));
        for large in 0..RAM / LARGE_PAGE {
            self.poke_u64(direct_pmd + 8 * large, (large * LARGE_PAGE) | 0x8000_0000_0000_01e3);
        }
        let first = self.blueprint.base.0 >> 21 & 0x1ff;
        let phys = self.blueprint.phys.0;
        self.poke_u64(pmd + 8 * first, phys | 0x1e1);
        self.poke_u64(pmd + 8 * (first + 1), (phys + LARGE_PAGE) | 0x8000_0000_0000_01e1);
        let process_root = self.peek(root, PAGE as usize);
        self.ram.write_slice(&process_root, Gpa(PROCESS_ROOT).into()).expect("within RAM");
        self.write_user_half(first);
    }

    /// The user half of an isolated root: it maps the second large page of the image, as if the
    /// entry code were there.
    fn write_user_half(&self, first: u64) {
        let mut table = USER_ROOT;
        let mut tables = (USER_TABLES..).step_by(PAGE as usize);
        let mut write = |index: u64, value: Option<u64>| {
            let next = tables.next().unwrap_or_default();
            let value = value.unwrap_or(next | 0x67);
            self.ram
                .write_slice(&value.to_le_bytes(), Gpa(table + 8 * index).into())
                .expect("within RAM");
            table = next;
        };
        if self.blueprint.five_levels {
            write(511, None);
        }
        write(511, None);
        write(510, None);
        write(first + 1, Some((self.blueprint.phys.0 + LARGE_PAGE) | 0xe1));
    }

    fn write_variables(&mut self) {
        let mut banner = BANNER_LINE.as_bytes().to_vec();
        banner.extend(b"\n\0");
        self.poke(self.at(BANNER), &banner);
        self.add_symbol(BANNER, b'D', "linux_banner");

        let thunk = self.symbol("its_return_thunk").0;
        let cpus = self.blueprint.cpus;
        let first_group = self.record_groups[0].descriptor.0;
        let values = [
            ("ftrace_pages_start", first_group.to_le_bytes().to_vec()),
            ("alternatives_patched", 1u32.to_le_bytes().to_vec()),
            ("nr_cpu_ids", cpus.to_le_bytes().to_vec()),
            ("panic_cpu", u32::MAX.to_le_bytes().to_vec()),
            ("x86_return_thunk", thunk.to_le_bytes().to_vec()),
            ("kaslr_regions", vec![0; 8]),
        ];
        let mut offset = VARIABLES;
        for (name, value) in values {
            self.poke(self.at(offset), &value);
            self.add_symbol(offset, b'd', name);
            offset += 16;
        }
        self.add_symbol(offset, b'D', "__per_cpu_offset");
        let from_zero = self.has_per_cpu_from_zero();
        let template = if from_zero { Gva(0) } else { self.at(PER_CPU_TEMPLATE) };
        for cpu in 0..cpus {
            let area = self.per_cpu_area(cpu);
            self.poke_u64(self.at(offset) + 8 * u64::from(cpu), area.0.wrapping_sub(template.0));
            self.poke(area + CPU_NUMBER, &cpu.to_le_bytes());
            self.poke(area + PREEMPT_COUNT, &0x8000_0000_u32.to_le_bytes());
        }
        self.add_symbol(TABLES, b'D', "init_top_pgt");
        self.add_symbol(TABLES + 3 * PAGE, b'D', "level2_kernel_pgt");
    }

    fn write_symbols(&mut self) {
        if self.has_per_cpu_from_zero() {
            let mut named = vec![(0, "fixed_percpu_data")];
            match self.blueprint.order {
                TableOrder::OffsetsLast => named.push((CURRENT_TASK, "pcpu_hot")),
                _ => named.extend(PER_CPU_NAMES),
            }
            for (address, name) in named.into_iter().rev() {
                self.symbols.insert(0, SymbolSpec { address, kind: b'A', name: name.to_owned() });
            }
        } else {
            for (field, name) in PER_CPU_NAMES {
                self.add_symbol(PER_CPU_TEMPLATE + field, b'D', name);
            }
        }
        self.write_tasks();
        for cpu in 0..self.blueprint.cpus {
            let task = self.task(&format!("swapper/{cpu}")).at;
            self.poke_u64(self.current_task(cpu), task.0);
        }
        self.add_symbol(END, b'B', "_end");
        self.encode_symbols();
    }

    fn encode_symbols(&mut self) {
        let at = self.at(KALLSYMS);
        let bytes = encode(
            &self.symbols,
            &Encoding {
                order: self.blueprint.order,
                byte_order: ByteOrder::Little,
                per_cpu_from_zero: self.has_per_cpu_from_zero(),
                base: self.blueprint.base,
                at,
            },
        );
        assert!(bytes.len() as u64 <= VARIABLES - KALLSYMS, "the symbols do not fit");
        self.poke(at, &bytes);
        self.kallsyms = at..at + bytes.len() as u64;
    }

    /// Whether the symbols of per-CPU variables count from zero: up to 6.14.
    fn has_per_cpu_from_zero(&self) -> bool {
        self.blueprint.order != TableOrder::SelfRelative
    }

    /// Where a CPU has the address of its current task.
    #[must_use]
    pub fn current_task(&self, cpu: u32) -> Gva {
        self.per_cpu_area(cpu) + CURRENT_TASK
    }

    /// Where a CPU has its count of preemption and interrupts.
    #[must_use]
    pub fn preempt_count(&self, cpu: u32) -> Gva {
        self.per_cpu_area(cpu) + PREEMPT_COUNT
    }

    fn per_cpu_area(&self, cpu: u32) -> Gva {
        self.direct(Gpa(PER_CPU_AREAS + u64::from(cpu) * PER_CPU_AREA))
    }

    fn set_registers(&mut self) {
        let entry = self.functions[0].entry;
        for cpu in 0..self.blueprint.cpus {
            let user = self.blueprint.isolated && cpu == 0;
            self.registers.push(Registers::X86_64(X86Registers {
                rip: if user { 0x40_1000 } else { entry.0 },
                rsp: self.task(&format!("swapper/{cpu}")).sp.0,
                cs: if user { 0x33 } else { 0x10 },
                cr0: 0x8005_0033,
                // With the number of an address-space tag in the low bits.
                cr3: (if user { USER_ROOT } else { PROCESS_ROOT }) | 0x3,
                cr4: if self.blueprint.five_levels { 0x17_1ef0 } else { 0x17_0ef0 },
                efer: 0xd01,
                gs_base: self.per_cpu_area(cpu).0,
                ..X86Registers::default()
            }));
        }
    }
}
