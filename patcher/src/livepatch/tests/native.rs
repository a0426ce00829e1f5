//! x86_64 payloads that run: linked for memory of this process, and called.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

use std::ptr;

use super::compiler::X86_64;
use crate::addr::Gva;
use crate::arch::{self, ReturnForm};
use crate::kernel::Symbols;
use crate::livepatch::{KernelView, Linked, Map, Payload, Resolved};
use crate::region::{PayloadSizes, Placement};

/// Memory of this process within 2 GiB of everything that a payload may refer to.
struct Memory {
    at: *mut libc::c_void,
    len: usize,
}

impl Memory {
    fn new(len: usize) -> Self {
        let len = len.max(1).next_multiple_of(4096);
        let (read, write) = (libc::PROT_READ, libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
        // SAFETY: a new anonymous mapping, wherever the system likes.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, read | write, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Self { at, len }
    }

    fn start(&self) -> Gva {
        Gva(self.at as u64)
    }

    fn fill(&self, bytes: &[u8], protection: libc::c_int) {
        assert!(bytes.len() <= self.len);
        // SAFETY: the mapping is ours, as long as that, and nothing else refers to it yet.
        let result = unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.cast(), bytes.len());
            libc::mprotect(self.at, self.len, protection)
        };
        assert_eq!(result, 0);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and what was called in it has returned.
        unsafe { libc::munmap(self.at, self.len) };
    }
}

/// A payload in this process.
struct Loaded {
    linked: Linked,
    _memory: [Memory; 3],
}

impl Loaded {
    fn new(resolved: &Resolved) -> Self {
        let PayloadSizes { text, constants, data } = resolved.sizes();
        let memory = [text, constants, data].map(|len| Memory::new(len as usize));
        let range = |index: usize, len: u64| {
            let start = memory[index].start();
            start..start + len
        };
        let placement = Placement {
            text: range(0, text),
            constants: range(1, constants),
            data: range(2, data),
            text_is_used: false,
        };
        let linked = resolved.link(&placement).unwrap();
        memory[0].fill(&linked.text, libc::PROT_READ | libc::PROT_EXEC);
        memory[1].fill(&linked.constants, libc::PROT_READ);
        memory[2].fill(&linked.data, libc::PROT_READ | libc::PROT_WRITE);
        Self { linked, _memory: memory }
    }

    fn call(&self, entry: usize, argument: u64) -> u64 {
        let at = self.linked.entries[entry].0 as usize;
        // SAFETY: the address is that of a compiled function of this type, linked for where it lies;
        // the mappings live as long as `self`.
        let function = unsafe { std::mem::transmute::<usize, extern "C" fn(u64) -> u64>(at) };
        function(argument)
    }
}

/// What stands for a kernel: code in this process.
struct Kernel {
    symbols: Symbols,
    memory: Memory,
}

const SLOT: u64 = 64;

impl Kernel {
    /// Functions of these names and bytes.
    fn new(functions: &[(&str, &[u8])]) -> Self {
        let memory = Memory::new(functions.len() * SLOT as usize);
        let mut code = vec![0xcc; functions.len() * SLOT as usize];
        let mut list = Vec::new();
        for (index, (name, bytes)) in functions.iter().enumerate() {
            let begin = index * SLOT as usize;
            code[begin..begin + bytes.len()].copy_from_slice(bytes);
            list.push((memory.start().0 + begin as u64, b'T', *name));
        }
        list.push((memory.start().0 + code.len() as u64, b'T', "_etext"));
        memory.fill(&code, libc::PROT_READ | libc::PROT_EXEC);
        Self { symbols: Symbols::listed(&list), memory }
    }

    fn view(&self, returns: ReturnForm) -> KernelView<'_> {
        let start = self.memory.start();
        KernelView {
            arch: &arch::x86_64::X86_64,
            symbols: &self.symbols,
            text: start..start + self.memory.len as u64,
            returns,
            modules: Box::new(|_| None),
        }
    }
}

/// `lea 1(%rdi), %rax; ret`
const ADD_ONE: &[u8] = &[0x48, 0x8d, 0x47, 0x01, 0xc3];

#[test]
fn a_function_runs_with_its_helpers_constants_and_data() {
    let source = r#"
        extern unsigned long guest_add_one(unsigned long);
        static unsigned long count;
        static unsigned long step = 100;
        static const char text[] = "abcdefgh";
        static __attribute__((noinline)) unsigned long pick(unsigned long at) { return text[at & 7]; }
        unsigned long victim(unsigned long value) {
            count += step;
            return guest_add_one(value) * 1000000 + count * 1000 + pick(value);
        }
    "#;
    let kernel = Kernel::new(&[("victim", &[0xc3]), ("guest_add_one", ADD_ONE)]);
    for flags in [&[][..], &["-fcf-protection=branch"], &["-mcmodel=small", "-fPIE"]] {
        let payload = Payload::parse(&X86_64.compile(source, flags)).unwrap();
        let resolved = payload.resolve(&kernel.view(ReturnForm::Plain), &[]).unwrap();
        let replaced: Vec<_> = resolved.replacements().iter().map(|one| &*one.name).collect();
        assert_eq!(replaced, ["victim"], "{flags:?}");
        let start = kernel.memory.start();
        assert_eq!(resolved.replacements()[0].old, start..start + SLOT);

        let loaded = Loaded::new(&resolved);
        assert_eq!(loaded.call(0, 2), 3 * 1_000_000 + 100_000 + u64::from(b'c'), "{flags:?}");
        assert_eq!(loaded.call(0, 3), 4 * 1_000_000 + 200_000 + u64::from(b'd'), "{flags:?}");
    }
}

#[test]
fn a_map_says_which_function_is_replaced() {
    let source = "unsigned long better(unsigned long value) { return value + 5; }";
    let kernel = Kernel::new(&[("worse", ADD_ONE)]);
    let payload = Payload::parse(&X86_64.compile(source, &[])).unwrap();
    let maps = [Map::parse("better=worse").unwrap()];
    let resolved = payload.resolve(&kernel.view(ReturnForm::Plain), &maps).unwrap();
    assert_eq!(&*resolved.replacements()[0].name, "worse");
    assert_eq!(Loaded::new(&resolved).call(0, 1), 6);
}
