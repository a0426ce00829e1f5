//! What becomes of each section of a payload, by its name and its flags.
//!
//! Nothing is left out silently: a section that would be loaded with the kernel is either placed,
//! dropped for the reason that stands here, or refused by its name.

use object::elf;

/// Where the contents of a section go. Each has a protection of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SectionPart {
    /// Executed.
    Text,
    /// Only read.
    Constants,
    /// Read and written.
    Data,
}

/// What becomes of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is placed.
    Placed(SectionPart),
    /// It is read by the loader: what the payload says about itself.
    Options,
    /// It is left out, which does no harm.
    Dropped(&'static str),
    /// It makes the payload unfit.
    Refused(&'static str),
}

/// The section of what a payload says about itself.
pub const OPTIONS_SECTION: &str = ".vmm.livepatch";

/// A name, or how it begins.
enum Name {
    Is(&'static str),
    Begins(&'static str),
}

use Name::{Begins, Is};

/// What a guest would have to do for a section that nothing from outside can do for it.
pub(super) mod advice {
    pub(in crate::livepatch) const ALTERNATIVES: &str = "it lists instructions that the guest would fit to its \
        processor, which only its own loader does; leave out what is patched for CPU features \
        (static_cpu_has, copy_to_user and the like inline) and call a function of the guest's";
    pub(in crate::livepatch) const STATIC_KEYS: &str = "its jumps are switched by the guest, which does not \
        know of them; test the key with static_key_enabled() instead of static_branch_*(), and use \
        printk() instead of pr_debug()";
    pub(in crate::livepatch) const EXCEPTIONS: &str = "the guest would not find the handlers of faults that it \
        lists; call a function of the guest's for access to user memory and for registers that \
        may not be there";
    pub(in crate::livepatch) const BUGS: &str = "the guest would take a trap of BUG() or WARN() for an invalid \
        instruction and die; test the condition and use printk() instead";
    pub(in crate::livepatch) const STATIC_CALLS: &str = "its calls are redirected by the guest, which does not \
        know of them; call through static_call_query() instead";
    pub(in crate::livepatch) const PER_CPU: &str = "each CPU would need a copy of it in an area that only the \
        guest can extend; use an array that is indexed by the CPU's number instead";
    pub(in crate::livepatch) const PARAVIRT: &str = "its calls are rewritten by the guest as it boots; call a \
        function of the guest's that does the same";
    pub(in crate::livepatch) const EXPORTS: &str = "nothing that is loaded later could find what it exports; \
        leave out EXPORT_SYMBOL";
    pub(in crate::livepatch) const INIT: &str = "nobody would call it: a payload has no beginning and no end; \
        leave out what initialises, and initialise data statically";
    pub(in crate::livepatch) const EXIT: &str = "nobody would call it: a payload has no beginning and no end; \
        leave out what cleans up";
    pub(in crate::livepatch) const TRACEPOINTS: &str = "the guest would not know its tracepoints; leave out \
        DEFINE_TRACE, trace_*() calls and trace_printk()";
    pub(in crate::livepatch) const AFTER_INIT: &str = "it is data that the guest seals once it has initialised \
        it, and nobody would; leave out __ro_after_init";
    pub(in crate::livepatch) const PARAMETERS: &str =
        "nobody would set its parameters; leave out module_param";
    pub(in crate::livepatch) const DEBUG: &str = "the guest could not switch its messages on; leave out \
        pr_debug() or define DEBUG";
    pub(in crate::livepatch) const THREADS: &str = "the kernel has no thread-local data; compile without \
        __thread and with the kernel's own flags";
    pub(in crate::livepatch) const RESTRICTED: &str = "the guest treats its own code of that section by where \
        it lies; put the function into .text";
    pub(in crate::livepatch) const KCFI: &str = "the guest would take a failed check of a call's type for an \
        invalid instruction; compile without -fsanitize=kcfi";
    pub(in crate::livepatch) const SYSCALLS: &str = "the guest would not know its system calls; leave out \
        SYSCALL_DEFINE and define the function by its name in kallsyms";
    pub(in crate::livepatch) const LIVEPATCH_MODULE: &str = "it belongs to a livepatch module of the guest's \
        own kind; give the object that was compiled from the functions alone";
}

/// In this order; the first that fits decides. What fits none goes by its flags where the name is a
/// [known one](PLACED), and is refused otherwise.
const TABLE: &[(Name, Fate)] = &[
    (Is(OPTIONS_SECTION), Fate::Options),
    // Dropped.
    (Is(".smp_locks"), Fate::Dropped("locked instructions stay locked also with one CPU")),
    (Is(".retpoline_sites"), Fate::Dropped("calls by a thunk stay calls by a thunk")),
    (Is(".return_sites"), Fate::Dropped("returns are fitted to the guest's by the loader")),
    (Is(".call_sites"), Fate::Dropped("calls are not counted by their depth")),
    (Is(".cfi_sites"), Fate::Dropped("types of called functions are not checked")),
    (Begins(".ibt_endbr_seal"), Fate::Dropped("landing pads stay")),
    (Begins(".orc_"), Fate::Dropped("the guest's unwinder does not know payloads")),
    (Is("__mcount_loc"), Fate::Dropped("the guest does not trace payloads")),
    (Is("__patchable_function_entries"), Fate::Dropped("the guest does not trace payloads")),
    (Begins(".eh_frame"), Fate::Dropped("the kernel has no use for it")),
    (Begins(".note."), Fate::Dropped("a note about the object")),
    (Is(".note"), Fate::Dropped("a note about the object")),
    (Is(".comment"), Fate::Dropped("a note about the object")),
    (Begins(".s390_indirect"), Fate::Dropped("calls by a thunk stay calls by a thunk")),
    (Begins(".s390_return"), Fate::Dropped("returns by a thunk stay returns by a thunk")),
    (Begins(".discard."), Fate::Dropped("meant for tools of the build alone")),
    (Is(".printk_index"), Fate::Dropped("messages of payloads are not in the guest's index")),
    (Is("_error_injection_whitelist"), Fate::Dropped("the guest injects no errors here")),
    (Is("_kprobe_blacklist"), Fate::Dropped("the guest does not probe payloads")),
    (Is(".modinfo"), Fate::Dropped("for the guest's own loader of modules")),
    (Is("__versions"), Fate::Dropped("for the guest's own loader of modules")),
    (Is("__version_ext_crcs"), Fate::Dropped("for the guest's own loader of modules")),
    (Is("__version_ext_names"), Fate::Dropped("for the guest's own loader of modules")),
    (Is(".gnu.linkonce.this_module"), Fate::Dropped("for the guest's own loader of modules")),
    (Is(".plt"), Fate::Dropped("room for the guest's own loader of modules")),
    (Is(".init.plt"), Fate::Dropped("room for the guest's own loader of modules")),
    (Is(".text.ftrace_trampoline"), Fate::Dropped("room for the guest's own loader of modules")),
    // Refused.
    (Begins(".altinstr"), Fate::Refused(advice::ALTERNATIVES)),
    (Is("__jump_table"), Fate::Refused(advice::STATIC_KEYS)),
    (Is("__ex_table"), Fate::Refused(advice::EXCEPTIONS)),
    (Begins("__amode31_ex_table"), Fate::Refused(advice::EXCEPTIONS)),
    (Is(".fixup"), Fate::Refused(advice::EXCEPTIONS)),
    (Is("__bug_table"), Fate::Refused(advice::BUGS)),
    (Is(".static_call_sites"), Fate::Refused(advice::STATIC_CALLS)),
    (Is(".static_call.text"), Fate::Refused(advice::STATIC_CALLS)),
    (Is(".static_call_tramp_key"), Fate::Refused(advice::STATIC_CALLS)),
    (Begins(".data..percpu"), Fate::Refused(advice::PER_CPU)),
    (Is(".parainstructions"), Fate::Refused(advice::PARAVIRT)),
    (Begins("__ksymtab"), Fate::Refused(advice::EXPORTS)),
    (Begins("___ksymtab"), Fate::Refused(advice::EXPORTS)),
    (Begins("__kcrctab"), Fate::Refused(advice::EXPORTS)),
    (Begins("___kcrctab"), Fate::Refused(advice::EXPORTS)),
    (Is(".export_symbol"), Fate::Refused(advice::EXPORTS)),
    (Begins(".initcall"), Fate::Refused(advice::INIT)),
    (Begins(".init"), Fate::Refused(advice::INIT)),
    (Begins(".ctors"), Fate::Refused(advice::INIT)),
    (Begins(".exit"), Fate::Refused(advice::EXIT)),
    (Begins(".fini"), Fate::Refused(advice::EXIT)),
    (Begins(".dtors"), Fate::Refused(advice::EXIT)),
    (Begins("__tracepoint"), Fate::Refused(advice::TRACEPOINTS)),
    (Begins("__trace_printk_fmt"), Fate::Refused(advice::TRACEPOINTS)),
    (Begins("_ftrace_"), Fate::Refused(advice::TRACEPOINTS)),
    (Begins("__bpf_raw_tp_map"), Fate::Refused(advice::TRACEPOINTS)),
    (Begins("__syscalls_metadata"), Fate::Refused(advice::SYSCALLS)),
    (Is(".data..ro_after_init"), Fate::Refused(advice::AFTER_INIT)),
    (Is("__param"), Fate::Refused(advice::PARAMETERS)),
    (Is("__verbose"), Fate::Refused(advice::DEBUG)),
    (Begins("__dyndbg"), Fate::Refused(advice::DEBUG)),
    (Begins(".tdata"), Fate::Refused(advice::THREADS)),
    (Begins(".tbss"), Fate::Refused(advice::THREADS)),
    (Begins(".noinstr.text"), Fate::Refused(advice::RESTRICTED)),
    (Begins(".entry.text"), Fate::Refused(advice::RESTRICTED)),
    (Begins(".cpuidle.text"), Fate::Refused(advice::RESTRICTED)),
    (Begins(".head.text"), Fate::Refused(advice::RESTRICTED)),
    (Begins(".kprobes.text"), Fate::Refused(advice::RESTRICTED)),
    (Is(".kcfi_traps"), Fate::Refused(advice::KCFI)),
    (Begins(".klp."), Fate::Refused(advice::LIVEPATCH_MODULE)),
    (Begins(".kpatch."), Fate::Refused(advice::LIVEPATCH_MODULE)),
];

/// What compilers call sections of code and data, and the kernel some of its own. They go by their
/// flags.
const PLACED: &[Name] = &[
    Is(".text"),
    Begins(".text."),
    Is(".ref.text"),
    Is(".sched.text"),
    Is(".spinlock.text"),
    Is(".irqentry.text"),
    Is(".softirqentry.text"),
    Is(".rodata"),
    Begins(".rodata."),
    Is(".data"),
    Begins(".data."),
    Is(".bss"),
    Begins(".bss."),
    Begins(".lbss"),
    Begins(".ldata"),
    Begins(".lrodata"),
];

/// Data that is written once, as it is relocated, before anybody reads it.
const RELOCATED_CONSTANTS: &str = ".data.rel.ro";

impl Name {
    fn fits(&self, name: &str) -> bool {
        match self {
            Is(whole) => name == *whole,
            Begins(beginning) => name.starts_with(beginning),
        }
    }
}

/// What becomes of the section, which is one that the kernel would load.
pub(super) fn fate(name: &str, flags: elf::SectionFlags) -> Fate {
    let row = TABLE.iter().find(|(row, _)| row.fits(name));
    if let Some((_, fate)) = row {
        return *fate;
    }
    if flags.contains(elf::SHF_TLS) {
        return Fate::Refused(advice::THREADS);
    }
    if !PLACED.iter().any(|known| known.fits(name)) {
        return Fate::Refused(
            "what the guest would do with it is not known here; leave out what puts something there",
        );
    }
    Fate::Placed(if flags.contains(elf::SHF_EXECINSTR) {
        SectionPart::Text
    } else if flags.contains(elf::SHF_WRITE) && !name.starts_with(RELOCATED_CONSTANTS) {
        SectionPart::Data
    } else {
        SectionPart::Constants
    })
}
