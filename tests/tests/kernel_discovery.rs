//! What is found in the memory of stock kernels, against what these kernels say themselves.

use std::collections::HashMap;
use std::fs;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use guest_images::Architecture::{self, Aarch64, S390x, X86_64};
use guest_images::Series;
use patcher::addr::{Gpa, Gva};
use patcher::arch::ReturnForm;
use patcher::kernel::{
    self, Kernel, Located, ModuleState, NotYet, Pads, PartMemory, Refusal, Symbols, locate,
};
use patcher::machine::Registers;
use patcher::mem::PhysMem;
use patcher::region::{Part, RegionWindow};
use tests::capture::{Captured, capture, map};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

/// A capture that is compared with what its guest said.
struct Guest(Captured);

impl Deref for Guest {
    type Target = Captured;
    fn deref(&self) -> &Captured {
        &self.0
    }
}

impl DerefMut for Guest {
    fn deref_mut(&mut self) -> &mut Captured {
        &mut self.0
    }
}

impl Guest {
    fn new(architecture: Architecture, series: Series, cpu: &str, cmdline: &str) -> Self {
        Self(Captured::new(architecture, series, cpu, cmdline))
    }

    /// Compares everything that can be with the guest's own word.
    fn check(&self) -> Kernel {
        let kernel = self.kernel();
        assert_eq!(kernel.release(), self.capture.release);

        let kallsyms = fs::read_to_string(self.capture.kallsyms()).unwrap();
        compare("symbols", &rendered(kernel.symbols()), own_lines(&kallsyms));

        let pads = kernel.pads(&self.ram).unwrap();
        let mut found: Vec<_> = pads.sites.iter().map(|site| (site.at, &*site.name)).collect();
        let own = pads.refused.iter().filter(|refused| refused.why != Refusal::Module);
        found.extend(own.map(|refused| (refused.at, &*refused.name)));
        found.sort_unstable();
        let (modules, names): (Vec<String>, Vec<String>) =
            found.iter().map(|(_, name)| (*name).to_owned()).partition(|name| name.ends_with(']'));
        let functions = fs::read_to_string(self.capture.available_filter_functions()).unwrap();
        compare("functions", &names, own_lines(&functions));
        let theirs: Vec<&str> =
            functions.lines().filter(|line| line.split_whitespace().count() > 1).collect();
        assert!(!theirs.is_empty(), "the guest has loaded modules");

        // Nothing but dead code may be refused in a guest that traces nothing, and modules where the
        // kernel does not name them. Where the list of records has no name, slots tell the pads, and only
        // the kernel's own.
        let refused = pads.refused.iter().filter(|r| r.why == Refusal::Module).count();
        let is_named = kernel.symbols().address("modules").is_some();
        let by_slots = self.capture.architecture == S390x
            && kernel.symbols().address("ftrace_pages_start").is_none();
        assert_eq!(kernel.modules(&self.ram).is_ok(), is_named);
        if is_named {
            // The guest lists them in the order in which modules came.
            let (mut modules, mut theirs) = (modules, theirs.clone());
            modules.sort_unstable();
            theirs.sort_unstable();
            compare("functions of modules", &modules, theirs.into_iter());
            self.check_module_sites(&kernel, &pads);
        } else {
            assert_eq!(modules, [] as [&str; 0]);
        }
        assert_eq!(refused, if by_slots || is_named { 0 } else { theirs.len() });
        for refused in &pads.refused {
            assert!(matches!(refused.why, Refusal::Module | Refusal::DeadWeak), "{refused:?}");
        }

        assert_eq!(kernel.readiness(&self.ram), Ok(()));
        // Also without CONFIG_KALLSYMS_ALL, where its text tells.
        assert_eq!(kernel.panicked(&self.ram), Ok(None));
        assert!(kernel.is_current(&self.ram));
        self.check_cpu_numbers(&kernel);
        self.check_mapping(&kernel);
        self.check_modules(&kernel, &kallsyms);
        kernel
    }

    /// Sites of modules are where the kernel maps them, and their functions where it says.
    fn check_module_sites(&self, kernel: &Kernel, pads: &Pads) {
        let kallsyms = fs::read_to_string(self.capture.kallsyms()).unwrap();
        let mut sites = 0;
        for site in &pads.sites {
            let Some(module) = &site.module else { continue };
            assert_eq!(kernel.root().translate(&self.ram, site.at), Ok(site.gpa));
            assert_eq!(module.state, ModuleState::Live);
            sites += 1;
            if sites % 50 == 1 {
                let name = site.name.replace(" [", "\t[");
                let line = |letter| format!("{:016x} {letter} {name}\n", site.function.0);
                assert!(kallsyms.contains(&line('t')) || kallsyms.contains(&line('T')), "{site:?}");
            }
        }
        assert!(sites > 20, "{sites} sites in modules");
    }

    /// Every symbol of a module is known to be that module's, in a kernel that names its list of them.
    fn check_modules(&self, kernel: &Kernel, kallsyms: &str) {
        let mut owners: HashMap<&str, Vec<&str>> = HashMap::new();
        for line in kallsyms.lines() {
            let Some((symbol, owner)) = line.split_once("\t[") else { continue };
            let owner = owner.trim_end_matches(']');
            let name = symbol.rsplit(' ').next().unwrap();
            // An assembler's own labels have a control character in them.
            let is_name = name.bytes().all(|byte| byte.is_ascii_graphic());
            if is_name && owner != "bpf" && !owner.starts_with("__builtin__") {
                owners.entry(name).or_default().push(owner);
            }
        }
        assert!(owners.len() > 20, "the guest has loaded modules");
        let found = kernel.module_symbols(&self.ram);
        if kernel.symbols().address("modules").is_none() {
            assert!(found.is_empty());
            return;
        }
        for (name, owners) in owners {
            let module = found.module_of(name);
            assert!(
                module.as_deref().is_some_and(|one| owners.contains(&one)),
                "{name} {module:?}"
            );
        }
        assert_eq!(found.module_of("vfs_read"), None);
    }

    /// Where each vCPU's own base leads to by the distance found, the vCPU's number stands.
    fn check_cpu_numbers(&self, kernel: &Kernel) {
        let distance = kernel.cpu_number(&self.ram).unwrap().into();
        for (cpu, vcpu) in self.capture.vcpus.iter().enumerate() {
            let mut number = [0; 4];
            match self.capture.architecture {
                X86_64 => {
                    // Which of the two is the kernel's is not told by the privilege: a vCPU may
                    // stand between an entry and its SWAPGS. A process can't have a base in the
                    // kernel's half.
                    let bases = [vcpu["gs_base"], vcpu["kernel_gs_base"]];
                    let base = *bases.iter().find(|base| **base >> 63 == 1).unwrap();
                    let at = Gva(base.wrapping_add_signed(distance));
                    kernel.read_virt(&self.ram, at, &mut number).unwrap();
                }
                // The prefix is where this CPU has the lowest addresses.
                Architecture::S390x => {
                    let at = Gpa(vcpu["prefix"].wrapping_add_signed(distance));
                    self.ram.read(at, &mut number).unwrap();
                }
                // The current task, unless it is in user mode or has just come from there.
                Aarch64 if vcpu["sp_el0"] >> 63 == 0 => continue,
                Aarch64 => {
                    let at = Gva(vcpu["sp_el0"].wrapping_add_signed(distance));
                    kernel.read_virt(&self.ram, at, &mut number).unwrap();
                }
            }
            assert_eq!(kernel.arch().byte_order().u32(number) as usize, cpu);
        }
    }

    /// The region can be mapped, and the tables of the processes that run have it at once.
    fn check_mapping(&self, kernel: &Kernel) {
        let leaf = 2 << 20;
        // Above the guest's own memory, and within what is reached from it.
        let (at, rings) = (Gpa(2 << 30), 4 * leaf);
        let all = Part::Rings.offset() + rings;
        let region = MmapRegionBuilder::new(all as usize)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .build()
            .unwrap();
        let region = Arc::new(GuestRegionMmap::new(region, GuestAddress(at.0)).unwrap());
        let ram = self.ram.insert_region(region.clone()).unwrap();

        let parts = Part::ALL.map(|part| PartMemory {
            part,
            gpa: at + part.offset(),
            len: part.len(rings),
        });
        let mapping = kernel::plan_mapping(kernel, &ram, &parts).unwrap();
        let window = RegionWindow { gpa: at, memory: region.as_volatile_slice().unwrap() };
        mapping.install(&ram, &window).unwrap();
        for (mapped, memory) in mapping.parts.iter().zip(parts) {
            assert_eq!(mapped.part, memory.part);
            // Page tables take little of the code part, and none of the others.
            let tables = memory.len - mapped.len;
            let most = if mapped.part == Part::Code { leaf / 16 } else { 0 };
            assert!(tables <= most, "{tables:#x} bytes of the {}", mapped.part);
            let rights = rights(self.capture.architecture, mapped.part);
            let step = kernel.arch().region_leaf_size();
            for offset in (0..mapped.len).step_by(step as usize) {
                let found = kernel.root().walk(&ram, mapped.at + offset).unwrap();
                assert_eq!((found.gpa, found.size), (memory.gpa + offset, step));
                assert_eq!(found.entry & rights.0, rights.1, "{}: {:#x}", mapped.part, found.entry);
            }
        }
        let rings = mapping.parts[3];
        for registers in &self.vcpus {
            let spaces = kernel.arch().address_spaces(registers).unwrap();
            // Without isolated tables the first guess may be wrong.
            let seen = |at| spaces.iter().find_map(|space| space.translate(&ram, at).ok());
            assert_eq!(seen(rings.at + 3 * leaf + 8), Some(rings.gpa + 3 * leaf + 8));
        }
    }

    /// What stands between functions and their pads, by name.
    fn prefixes(&self, kernel: &Kernel) -> Vec<&'static str> {
        let pads = kernel.pads(&self.ram).unwrap();
        let mut names: Vec<_> = pads.sites.iter().map(|site| site.prefix.name).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// The bits of a leaf that say what may be done with its memory, and how they stand for a part of the
/// region, as the manuals have them.
fn rights(architecture: Architecture, part: Part) -> (u64, u64) {
    // Intel SDM: present, writable, user; execute-disable. Arm ARM: valid; AP[1] (user), AP[2]
    // (read-only); DBM (may become writable), PXN, UXN. z/Architecture PoP: invalid, protection,
    // no-execute.
    let (mask, read, write, no_execute) = match architecture {
        X86_64 => (1 << 63 | 0b111, 1, 1 << 1, 1 << 63),
        Aarch64 => {
            (1 | 3 << 6 | 1 << 51 | 3 << 53, 1 | 1 << 7 | 1 << 54, 1 << 51 | 1 << 7, 1 << 53)
        }
        S390x => (0x700, 0x200, 0x200, 0x100),
    };
    let rights = match (part, architecture) {
        (Part::Code, _) => read,
        (Part::Constants, _) => read | no_execute,
        (Part::Data | Part::Rings, X86_64) => read | write | no_execute,
        // Read-only is a bit that goes, and on aarch64 another comes.
        (Part::Data | Part::Rings, _) => (read ^ write) | no_execute,
    };
    (mask, rights)
}

/// The lines of one of the guest's own lists that are about the kernel and no module.
fn own_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.contains('['))
}

/// The lines of /proc/kallsyms.
fn rendered(symbols: &Symbols) -> Vec<String> {
    symbols
        .iter()
        .map(|s| format!("{:016x} {} {}", s.address.0, char::from(s.kind), s.name))
        .collect()
}

fn compare<'a>(what: &str, ours: &[String], theirs: impl Iterator<Item = &'a str>) {
    let theirs: Vec<&str> = theirs.collect();
    let differs = ours.iter().zip(&theirs).position(|(ours, theirs)| ours != theirs);
    if let Some(line) = differs {
        panic!("{what}, line {line}: ours is {:?}, the guest's {:?}", ours[line], theirs[line]);
    }
    assert_eq!(ours.len(), theirs.len(), "{what}");
    assert!(!ours.is_empty(), "{what}");
}

#[test]
fn a_5_10_kernel_is_as_it_says_itself() {
    let guest = Guest::new(X86_64, Series::V5_10, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.version(), Some((5, 10)));
    assert_eq!(guest.prefixes(&kernel), ["none"]);
    // On this processor it prepares pads in the older of the two forms.
    let pads = kernel.pads(&guest.ram).unwrap();
    assert!(pads.sites.iter().all(|site| *site.original == [0x66, 0x66, 0x66, 0x66, 0x90]));
}

#[test]
fn a_6_1_kernel_with_five_levels_of_tables_is_as_it_says_itself() {
    let guest = Guest::new(X86_64, Series::V6_1, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.root().format.levels.len(), 5);
    assert_eq!(kernel.return_form(&guest.ram), Ok(ReturnForm::Plain));
}

#[test]
fn a_6_1_kernel_that_is_not_moved_is_as_it_says_itself() {
    let guest = Guest::new(X86_64, Series::V6_1, "max", "nokaslr");
    assert_eq!(guest.check().kaslr_offset(), 0);
}

#[test]
fn a_6_1_kernel_with_isolated_tables_is_as_it_says_itself() {
    let guest = Guest::new(X86_64, Series::V6_1, "Skylake-Server", "pti=on");
    let kernel = guest.check();
    assert_eq!(kernel.root().format.levels.len(), 4);
    // This processor needs a return thunk.
    let form = kernel.return_form(&guest.ram);
    let Ok(ReturnForm::Thunk(thunk)) = form else { panic!("{form:?}") };
    let place = kernel.symbols().lookup(thunk).unwrap();
    assert!(place.offset == 0 && place.symbol.name.ends_with("return_thunk"), "{place:?}");
}

#[test]
fn a_6_12_kernel_with_five_levels_of_tables_is_as_it_says_itself() {
    let guest = Guest::new(X86_64, Series::V6_12, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.root().format.levels.len(), 5);
    assert_eq!(guest.prefixes(&kernel), ["endbr64", "none", "sealed endbr64 (nopw)"]);
}

#[test]
fn a_6_12_kernel_with_four_levels_and_isolated_tables_is_as_it_says_itself() {
    let guest = Guest::new(X86_64, Series::V6_12, "Skylake-Server", "pti=on");
    let kernel = guest.check();
    assert_eq!(kernel.root().format.levels.len(), 4);
    assert!(matches!(kernel.return_form(&guest.ram), Ok(ReturnForm::Thunk(_))));
}

#[test]
fn a_6_18_kernel_is_as_it_says_itself() {
    let guest = Guest::new(X86_64, Series::V6_18, "max", "");
    let kernel = guest.check();
    assert_eq!(guest.prefixes(&kernel), ["endbr64", "none", "sealed endbr64 (nopl)"]);
    assert_eq!(kernel.return_form(&guest.ram), Ok(ReturnForm::Plain));
}

#[test]
fn a_7_kernel_is_as_it_says_itself() {
    let guest = Guest::new(X86_64, Series::V7, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.version().map(|(major, _)| major), Some(7));
    assert_eq!(kernel.return_form(&guest.ram), Ok(ReturnForm::Plain));
}

#[test]
fn a_whole_other_guest_that_lies_in_memory_is_not_taken_for_the_one_that_runs() {
    let mut guest = Guest::new(X86_64, Series::V6_1, "max", "");
    let other = capture(X86_64, Series::V6_1, "max", "nokaslr");
    let regions = vec![map(&guest.capture, 0), map(&other, 1 << 30)];
    guest.ram = GuestMemoryMmap::from_regions(regions).unwrap();
    guest.check();
}

#[test]
fn an_s390x_6_1_kernel_that_lies_where_it_runs_is_as_it_says_itself() {
    let guest = Guest::new(S390x, Series::V6_1, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.image().range.start.0, kernel.image().phys.0);
    assert_eq!(kernel.symbols().address("ftrace_pages_start"), None);
    assert_eq!(kernel.return_form(&guest.ram), Ok(ReturnForm::Plain));
}

#[test]
fn an_s390x_6_12_kernel_at_the_end_of_its_address_space_is_as_it_says_itself() {
    let guest = Guest::new(S390x, Series::V6_12, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.image().range.end, Gva(1 << 42));
}

#[test]
fn an_s390x_7_kernel_is_as_it_says_itself() {
    let guest = Guest::new(S390x, Series::V7, "max", "");
    assert_eq!(guest.check().version().map(|(major, _)| major), Some(7));
}

#[test]
fn an_aarch64_5_10_kernel_is_as_it_says_itself() {
    let guest = Guest::new(Aarch64, Series::V5_10, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.version(), Some((5, 10)));
}

#[test]
fn an_aarch64_6_1_kernel_is_as_it_says_itself() {
    let guest = Guest::new(Aarch64, Series::V6_1, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.version(), Some((6, 1)));
}

/// Its symbols do not name the root; that a vCPU has another one while it boots is no error.
#[test]
fn an_aarch64_6_1_kernel_on_the_tables_with_which_it_boots_is_not_ready_yet() {
    let mut guest = Guest::new(Aarch64, Series::V6_1, "max", "");
    let mut table = [0; 4096];
    PhysMem::read(&guest.ram, guest.check().root().root, &mut table).unwrap();
    // Page tables lie at the end of RAM, none at its beginning.
    let elsewhere = guest.ram.extents()[0].start;
    vm_memory::Bytes::write_slice(&guest.ram, &table, elsewhere.into()).unwrap();
    for registers in &mut guest.vcpus {
        let Registers::Aarch64(registers) = registers else { panic!("{registers:?}") };
        registers.ttbr1 = elsewhere.0;
    }
    let located = locate(&guest.ram, &guest.vcpus);
    assert!(matches!(located, Ok(Located::NotYet(NotYet::NoRoot))), "{located:?}");
}

#[test]
fn an_aarch64_6_12_kernel_with_52_bit_addresses_is_as_it_says_itself() {
    let guest = Guest::new(Aarch64, Series::V6_12, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.version(), Some((6, 12)));
    assert_eq!(kernel.root().format.levels.len(), 5);
}

#[test]
fn an_aarch64_6_12_kernel_with_48_bit_addresses_and_isolated_tables_is_as_it_says_itself() {
    let guest = Guest::new(Aarch64, Series::V6_12, "cortex-a72", "");
    let kernel = guest.check();
    assert_eq!(kernel.root().format.levels.len(), 4);
}

#[test]
fn an_aarch64_7_kernel_is_as_it_says_itself() {
    let guest = Guest::new(Aarch64, Series::V7, "max", "");
    let kernel = guest.check();
    assert_eq!(kernel.version().map(|(major, _)| major), Some(7));
}
