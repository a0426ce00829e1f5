//! A bare guest that is busy as a kernel is, and measures for how long it did not run.
//!
//! Its image has what a stock kernel's has, in the forms in which it is found there: text of
//! functions that begin with pads, symbols (kallsyms), a banner, page tables, per-CPU variables and
//! the records of ftrace. So the same code finds and patches it that finds and patches stock kernels.
//! Every vCPU calls all functions, one after the other, for ever, and reads its time-stamp counter
//! after each call. The longest gap between two readings is what the guest has seen of a stop.
//!
//! ```text
//! 0xffff_ffff_8100_0000  entry and loop, then the functions       read + execute
//!                        from the next 2 MiB on, one behind the other: page tables, variables,
//!                        per-CPU areas, stacks, table of functions, records, symbols
//!                                                                read + write
//! 4 GiB + 4 MiB          the region's data: what is shared with the host, 128 bytes a vCPU:
//!   0   u64              the number of the measure that is wanted
//!   8   u64              the one whose result was written last
//!   16  u64              that result: the longest gap in ticks
//!   24  u64              how often all functions were called
//! ```

use patcher::addr::{Gpa, Gva};
use patcher::arch::ByteOrder;
use patcher::region::Part;
use patcher::synthetic::{Encoding, SymbolSpec, TableOrder, encode};

use crate::kvm::{BareGuest, Hardware, MAX_CPUS};

/// How many functions with pads the guest has: as many as a distribution's kernel (30,000 to 50,000).
pub const FUNCTIONS: usize = 40_000;

/// Where a kernel that was not moved is, and where it lies in memory.
const TEXT: Gva = Gva(0xffff_ffff_8100_0000);
const PHYS: Gpa = Gpa(16 << 20);

/// RAM, which has to hold the image.
const MEMORY: u64 = 64 << 20;

/// Memory for rings of each vCPU. Nobody reads them, and smaller ones take less of the caches.
const RINGS_PER_CPU: u64 = 256 << 10;
/// The least that all rings have.
const LEAST_RINGS: u64 = 2 << 20;

/// Where the guest sees what it shares with the host: the region's data, which lies where the engine
/// has it above so little memory.
const SHARED: u64 = (4 << 30) + Part::Data.offset();

/// Bytes of it a vCPU, so that no two write to the same cache line, or to its neighbour.
pub(super) const SHARE: u64 = 128;
/// What is where in it.
pub(super) const WANTED: u64 = 0;
pub(super) const MEASURED: u64 = 8;
pub(super) const GAP: u64 = 16;
pub(super) const ROUNDS: u64 = 24;

const PAGE: u64 = 4096;
const LARGE_PAGE: u64 = 2 << 20;
/// A vCPU's per-CPU area, of which only its number is used.
const AREA: u64 = 64;
const STACK: u64 = 1024;
/// Bytes of an ftrace record, and of what describes a group of them.
const RECORD: u64 = 16;
/// The largest group there can be has pages of this order.
const RECORDS_ORDER: u32 = 10;

/// What the guest calls itself.
const BANNER: &str = "Linux version 6.1.0-vmm-bench (vmm bench stop-all) #1 SMP";

/// A function: a pad, a return, and what fills the room up to the next one.
const FUNCTION: [u8; 10] = [0x0f, 0x1f, 0x44, 0, 0, 0xc3, 0xcc, 0xcc, 0xcc, 0xcc];
const FILLER: u8 = 0xcc;

/// Flags of page-table entries: present, accessed, dirty; writable; large; not executable.
const TABLE: u64 = 0x63;
const TEXT_LEAF: u64 = 0xe1;
const DATA_LEAF: u64 = 0x8000_0000_0000_00e3;

/// The hardware that the guest runs on.
#[must_use]
pub fn hardware(cpus: usize) -> Hardware {
    let rings = (cpus as u64 * RINGS_PER_CPU).next_power_of_two().max(LEAST_RINGS);
    Hardware { cpus, memory: MEMORY, rings: Some(rings), ..Hardware::default() }
}

/// The guest, for so many vCPUs.
#[must_use]
pub fn busy_guest(cpus: usize) -> BareGuest {
    let image = Image::build(cpus.min(MAX_CPUS));
    let phys = |at: Gva| PHYS + (at.0 - TEXT.0);
    BareGuest::new(&[]).with_memory(PHYS, &image.bytes).with_root(phys(image.root)).with_entry(TEXT)
}

/// The image as it is put together.
struct Image {
    bytes: Vec<u8>,
    symbols: Vec<SymbolSpec>,
    root: Gva,
}

impl Image {
    fn build(cpus: usize) -> Self {
        let mut image = Self { bytes: vec![0; PAGE as usize], symbols: Vec::new(), root: Gva(0) };
        image.add(TEXT, b'T', "_text");
        image.add(TEXT, b'T', "_stext");
        let functions = image.functions();
        image.symbol_at_end(b'T', "__fentry__");
        image.put(&FUNCTION[5..]);
        image.symbol_at_end(b'T', "_etext");
        image.align(LARGE_PAGE);
        let data = image.end();

        let tables = image.reserve(5 * PAGE);
        image.root = tables;
        image.add(tables, b'D', "init_top_pgt");
        let variable = |image: &mut Self, name: &str, bytes: &[u8]| {
            image.align(8);
            image.symbol_at_end(b'D', name);
            image.put(bytes);
        };
        variable(&mut image, "linux_banner", format!("{BANNER}\n\0").as_bytes());
        variable(&mut image, "nr_cpu_ids", &(cpus as u32).to_le_bytes());
        let records_head = image.reserve(8);
        image.add(records_head, b'D', "ftrace_pages_start");
        let offsets: Vec<u8> =
            (1..=cpus as u64).flat_map(|cpu| (cpu * AREA).to_le_bytes()).collect();
        variable(&mut image, "__per_cpu_offset", &offsets);
        image.align(AREA);
        // What each CPU has a copy of, and then the copies.
        let template = image.reserve(AREA);
        image.add(template, b'D', "cpu_number");
        for cpu in 0..cpus as u32 {
            image.put(&cpu.to_le_bytes());
            image.align(AREA);
        }
        image.align(PAGE);
        let stacks = image.reserve(cpus as u64 * STACK);
        let table = image.end();
        let offsets = functions.iter().flat_map(|at| ((at.0 - TEXT.0) as u32).to_le_bytes());
        image.bytes.extend(offsets);
        image.records(records_head, &functions);
        image.kallsyms();

        let code = code(&Places { template, stacks, table, functions: functions.len() as u32 });
        image.bytes[..code.len()].copy_from_slice(&code);
        image.page_tables(tables, data);
        image
    }

    fn end(&self) -> Gva {
        TEXT + self.bytes.len() as u64
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn align(&mut self, to: u64) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to as usize), 0);
    }

    fn reserve(&mut self, bytes: u64) -> Gva {
        self.align(8);
        let at = self.end();
        self.bytes.resize(self.bytes.len() + bytes as usize, 0);
        at
    }

    fn poke(&mut self, at: Gva, value: u64) {
        let at = (at.0 - TEXT.0) as usize;
        self.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    fn add(&mut self, at: Gva, kind: u8, name: &str) {
        self.symbols.push(SymbolSpec { address: at.0, kind, name: name.to_owned() });
    }

    fn symbol_at_end(&mut self, kind: u8, name: &str) {
        self.add(self.end(), kind, name);
    }

    /// Functions of 48 to 624 bytes, 13 MiB in all, as kernels have them; always the same.
    fn functions(&mut self) -> Vec<Gva> {
        let mut random = 1_u32;
        let place = |index| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let len = 16 * (3 + (random >> 16) % 37) as usize;
            let at = self.end();
            self.add(at, b't', &format!("function_{index:05}"));
            self.put(&FUNCTION);
            self.bytes.resize(self.bytes.len() + len - FUNCTION.len(), FILLER);
            at
        };
        (0..FUNCTIONS).map(place).collect()
    }

    /// One group of records, as `struct ftrace_page` and `struct dyn_ftrace` (include/linux/ftrace.h)
    /// have them.
    fn records(&mut self, head: Gva, functions: &[Gva]) {
        self.align(PAGE);
        let records = self.reserve(functions.len() as u64 * RECORD);
        for (at, function) in (records.0..).step_by(RECORD as usize).zip(functions) {
            self.poke(Gva(at), function.0);
        }
        let group = self.end();
        self.put(&0_u64.to_le_bytes());
        self.put(&records.0.to_le_bytes());
        self.put(&(functions.len() as u32).to_le_bytes());
        self.put(&RECORDS_ORDER.to_le_bytes());
        self.poke(head, group.0);
    }

    fn kallsyms(&mut self) {
        self.align(PAGE);
        let at = self.end();
        let encoding = Encoding {
            order: TableOrder::SelfRelative,
            byte_order: ByteOrder::Little,
            per_cpu_from_zero: false,
            base: TEXT,
            at,
        };
        // The table names the image's end, and is what it ends with: one symbol takes less than a page.
        let len = encode(&self.symbols, &encoding).len() as u64;
        let end = Gva((at + len + PAGE).0.next_multiple_of(LARGE_PAGE));
        self.add(end, b'B', "_end");
        let bytes = encode(&self.symbols, &encoding);
        self.put(&bytes);
        self.bytes.resize((end.0 - TEXT.0) as usize, 0);
    }

    /// Four levels: the image where kernels are, and what is shared with the host where it lies.
    fn page_tables(&mut self, tables: Gva, data: Gva) {
        let table = |index: u64| tables + index * PAGE;
        let [root, image_gib, image, shared_gib, shared] = [0, 1, 2, 3, 4].map(table);
        let link = |at: Gva| (PHYS.0 + (at.0 - TEXT.0)) | TABLE;
        let mut set = |table: Gva, va: u64, shift: u32, value| {
            self.poke(table + (va >> shift & 0x1ff) * 8, value);
        };
        set(root, TEXT.0, 39, link(image_gib));
        set(image_gib, TEXT.0, 30, link(image));
        set(root, SHARED, 39, link(shared_gib));
        set(shared_gib, SHARED, 30, link(shared));
        set(shared, SHARED, 21, SHARED | DATA_LEAF);
        let end = TEXT.0 + self.bytes.len() as u64;
        for va in (TEXT.0..end).step_by(LARGE_PAGE as usize) {
            let flags = if va < data.0 { TEXT_LEAF } else { DATA_LEAF };
            let entry = image + (va >> 21 & 0x1ff) * 8;
            self.poke(entry, (PHYS.0 + (va - TEXT.0)) | flags);
        }
    }
}

/// What the code has to know.
struct Places {
    template: Gva,
    stacks: Gva,
    table: Gva,
    functions: u32,
}

/// What every vCPU executes. It begins with its number in `edi`.
fn code(places: &Places) -> Vec<u8> {
    const MSR_GS_BASE: u32 = 0xc000_0101;
    /// vCPUs begin with different functions, this many apart.
    const APART: u32 = 7919;
    let low = |at: Gva| (at.0 as u32).to_le_bytes();
    let mut code = Vec::new();
    let mut put = |bytes: &[&[u8]]| {
        bytes.iter().for_each(|part| code.extend_from_slice(part));
        code.len()
    };
    // The base of GS is the distance of the vCPU's own copy from the template of per-CPU variables.
    debug_assert!(places.template.0.is_multiple_of(AREA));
    put(&[&[0x8d, 0x47, 0x01]]); //                         lea eax, [rdi + 1]
    put(&[&[0xc1, 0xe0, AREA.trailing_zeros() as u8]]); //  shl eax, log2(area)
    put(&[&[0x31, 0xd2]]); //                               xor edx, edx
    put(&[&[0xb9], &MSR_GS_BASE.to_le_bytes()]); //         mov ecx, MSR_GS_BASE
    put(&[&[0x0f, 0x30]]); //                               wrmsr
    put(&[&[0x8d, 0x67, 0x01]]); //                         lea esp, [rdi + 1]
    put(&[&[0xc1, 0xe4, STACK.trailing_zeros() as u8]]); // shl esp, log2(stack)
    put(&[&[0x48, 0x81, 0xc4], &low(places.stacks)]); //    add rsp, stacks
    put(&[&[0x89, 0xf8]]); //                               mov eax, edi
    put(&[&[0xc1, 0xe0, SHARE.trailing_zeros() as u8]]); // shl eax, log2(share)
    put(&[&[0x48, 0xbb], &SHARED.to_le_bytes()]); //        mov rbx, shared
    put(&[&[0x48, 0x01, 0xc3]]); //                         add rbx, rax
    put(&[&[0x48, 0xc7, 0xc6], &low(places.table)]); //     mov rsi, table
    put(&[&[0x49, 0xc7, 0xc0], &low(TEXT)]); //             mov r8, text
    put(&[&[0x41, 0xbc], &places.functions.to_le_bytes()]); // mov r12d, functions
    // ebp = the next function; r10 = the longest gap; r11 = the number of the measure.
    put(&[&[0x69, 0xc7], &APART.to_le_bytes()]); //         imul eax, edi, apart
    put(&[&[0x31, 0xd2]]); //                               xor edx, edx
    put(&[&[0x41, 0xf7, 0xf4]]); //                         div r12d
    put(&[&[0x89, 0xd5]]); //                               mov ebp, edx
    put(&[&[0x45, 0x31, 0xd2]]); //                         xor r10d, r10d
    put(&[&[0x45, 0x31, 0xdb]]); //                         xor r11d, r11d
    put(&[&[0x0f, 0x31]]); //                               rdtsc
    put(&[&[0x48, 0xc1, 0xe2, 32]]); //                     shl rdx, 32
    put(&[&[0x48, 0x09, 0xd0]]); //                         or rax, rdx
    let begin = put(&[&[0x49, 0x89, 0xc1]]); //             mov r9, rax
    put(&[&[0x8b, 0x04, 0xae]]); //                         mov eax, [rsi + 4 * rbp]
    put(&[&[0x4c, 0x01, 0xc0]]); //                         add rax, r8
    put(&[&[0xff, 0xd0]]); //                               call rax
    put(&[&[0xff, 0xc5]]); //                               inc ebp
    put(&[&[0x44, 0x39, 0xe5]]); //                         cmp ebp, r12d
    put(&[&[0x72, 6]]); //                                  jb over the next two
    put(&[&[0x31, 0xed]]); //                               xor ebp, ebp
    put(&[&[0x48, 0xff, 0x43, ROUNDS as u8]]); //           inc qword [rbx + rounds]
    // What is wanted is looked at before the clock is read: whoever sees a new measure wanted has read
    // the clock behind every stop that was over before.
    put(&[&[0x4c, 0x8b, 0x6b, WANTED as u8]]); //           mov r13, [rbx + wanted]
    put(&[&[0x0f, 0x31]]); //                               rdtsc
    put(&[&[0x48, 0xc1, 0xe2, 32]]); //                     shl rdx, 32
    put(&[&[0x48, 0x09, 0xd0]]); //                         or rax, rdx
    put(&[&[0x48, 0x89, 0xc2]]); //                         mov rdx, rax
    put(&[&[0x4c, 0x29, 0xca]]); //                         sub rdx, r9
    put(&[&[0x49, 0x89, 0xc1]]); //                         mov r9, rax
    put(&[&[0x4c, 0x39, 0xd2]]); //                         cmp rdx, r10
    put(&[&[0x4c, 0x0f, 0x47, 0xd2]]); //                   cmova r10, rdx
    let jump = put(&[&[0x4d, 0x39, 0xdd]]); //              cmp r13, r11
    put(&[&[0x74, back(jump, begin)]]); //                  je begin
    put(&[&[0x4c, 0x89, 0x53, GAP as u8]]); //              mov [rbx + gap], r10
    put(&[&[0x45, 0x31, 0xd2]]); //                         xor r10d, r10d
    put(&[&[0x4d, 0x89, 0xeb]]); //                         mov r11, r13
    let jump = put(&[&[0x4c, 0x89, 0x6b, MEASURED as u8]]); // mov [rbx + measured], r13
    put(&[&[0xeb, back(jump, begin)]]); //                  jmp begin
    code
}

/// The displacement of a short jump at `from` back to `to`.
fn back(from: usize, to: usize) -> u8 {
    (to as i64 - (from as i64 + 2)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_is_as_large_as_a_kernels_and_fits_its_memory() {
        for cpus in [1, MAX_CPUS] {
            let image = Image::build(cpus);
            let etext = image.symbols.iter().find(|symbol| symbol.name == "_etext").unwrap();
            assert!((10 << 20..16 << 20).contains(&(etext.address - TEXT.0)));
            assert!(PHYS.0 + image.bytes.len() as u64 <= MEMORY);
            let end = image.symbols.last().unwrap();
            assert_eq!((&*end.name, end.address), ("_end", image.end().0));
            assert!(image.symbols.is_sorted_by_key(|symbol| symbol.address));
        }
    }
}
