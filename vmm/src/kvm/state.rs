//! The state in which vCPUs begin, and the registers read back from them.

use std::io;

use kvm_bindings::{
    KVM_MP_STATE_RUNNABLE, Msrs, kvm_dtable, kvm_fpu, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_segment, kvm_sregs,
};
use kvm_ioctls::VcpuFd;
use patcher::machine::X86Registers;

use super::layout::GDT;
use super::paging::{CODE_SELECTOR, DATA_SELECTOR, GDT_LIMIT, TASK_SELECTOR};

const CR0_PE: u64 = 1 << 0;
const CR0_WP: u64 = 1 << 16;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const EFER_NXE: u64 = 1 << 11;
/// Bit 1 is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;

pub(super) const MSR_IA32_TSC: u32 = 0x10;
const MSR_IA32_SYSENTER_CS: u32 = 0x174;
const MSR_IA32_SYSENTER_ESP: u32 = 0x175;
const MSR_IA32_SYSENTER_EIP: u32 = 0x176;
const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;
const MSR_CSTAR: u32 = 0xc000_0083;
const MSR_SFMASK: u32 = 0xc000_0084;
pub(super) const MSR_KERNEL_GS_BASE: u32 = 0xc000_0102;

/// MISC_ENABLE bit 0: fast string operations.
const FAST_STRINGS: u64 = 1;
/// MTRRs enabled (bit 11), memory write-back (6) where they say nothing else.
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// What a CPU has after reset: all exceptions masked, round to nearest.
const FPU_CONTROL: u16 = 0x37f;
const MXCSR: u32 = 0x1f80;

/// Local vector table entries of the local APIC (Intel SDM 3A, 12.5.1), and the delivery modes
/// that a PC's firmware gives them.
const APIC_LVT_LINT0: usize = 0x350;
const APIC_LVT_LINT1: usize = 0x360;
const DELIVER_NMI: u32 = 4 << 8;
const DELIVER_EXTINT: u32 = 7 << 8;
const DELIVERY_MODE: u32 = 7 << 8;

/// Where and with what a vCPU begins, in long mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Entry {
    pub(super) rip: u64,
    pub(super) rsp: u64,
    pub(super) rsi: u64,
    pub(super) rdi: u64,
    pub(super) cr3: u64,
    /// Respect read-only pages in supervisor mode and know pages that are not executable, as a
    /// kernel that is up does. The boot protocol has neither.
    pub(super) protected: bool,
    /// Begin at once; otherwise a vCPU but the first waits to be woken as processors are.
    pub(super) at_once: bool,
}

/// Puts `vcpu` where `entry` says.
pub(super) fn set(vcpu: &VcpuFd, entry: &Entry) -> io::Result<()> {
    set_msrs(vcpu)?;
    vcpu.set_fpu(&kvm_fpu { fcw: FPU_CONTROL, mxcsr: MXCSR, ..Default::default() })?;
    let Entry { rip, rsp, rsi, rdi, .. } = *entry;
    vcpu.set_regs(&kvm_regs { rip, rsp, rsi, rdi, rflags: RFLAGS_RESERVED, ..Default::default() })?;
    let mut sregs = vcpu.get_sregs()?;
    long_mode(&mut sregs, entry);
    vcpu.set_sregs(&sregs)?;
    let mut lapic = vcpu.get_lapic()?;
    set_delivery(&mut lapic, APIC_LVT_LINT0, DELIVER_EXTINT);
    set_delivery(&mut lapic, APIC_LVT_LINT1, DELIVER_NMI);
    vcpu.set_lapic(&lapic)?;
    if entry.at_once {
        vcpu.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })?;
    }
    Ok(())
}

fn set_msrs(vcpu: &VcpuFd) -> io::Result<()> {
    let entries = [
        (MSR_IA32_SYSENTER_CS, 0),
        (MSR_IA32_SYSENTER_ESP, 0),
        (MSR_IA32_SYSENTER_EIP, 0),
        (MSR_STAR, 0),
        (MSR_CSTAR, 0),
        (MSR_KERNEL_GS_BASE, 0),
        (MSR_SFMASK, 0),
        (MSR_LSTAR, 0),
        (MSR_IA32_TSC, 0),
        (MSR_IA32_MISC_ENABLE, FAST_STRINGS),
        (MSR_MTRR_DEF_TYPE, MTRR_WRITE_BACK),
    ]
    .map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() });
    let msrs = Msrs::from_entries(&entries).map_err(|error| io::Error::other(error.to_string()))?;
    let set = vcpu.set_msrs(&msrs)?;
    match entries.get(set) {
        Some(refused) => Err(io::Error::other(format!("KVM refuses MSR {:#x}", { refused.index }))),
        None => Ok(()),
    }
}

fn long_mode(sregs: &mut kvm_sregs, entry: &Entry) {
    let segment = |selector, type_, long: u8| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: 1 - long,
        s: 1,
        l: long,
        g: 1,
        ..Default::default()
    };
    // Types: 11 is executable, readable, accessed (and, for a system segment, a busy task state
    // segment); 3 is writable, accessed.
    sregs.cs = segment(CODE_SELECTOR, 11, 1);
    let data = segment(DATA_SELECTOR, 3, 0);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment { s: 0, db: 0, ..segment(TASK_SELECTOR, 11, 0) };
    sregs.gdt = kvm_dtable { base: GDT.0, limit: GDT_LIMIT, ..Default::default() };
    sregs.idt = kvm_dtable::default();
    sregs.cr0 |= CR0_PE | CR0_PG;
    sregs.cr3 = entry.cr3;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME | EFER_LMA;
    if entry.protected {
        sregs.cr0 |= CR0_WP;
        sregs.efer |= EFER_NXE;
    }
}

fn set_delivery(lapic: &mut kvm_lapic_state, register: usize, mode: u32) {
    let bytes: [u8; 4] = std::array::from_fn(|i| lapic.regs[register + i] as u8);
    let value = u32::from_le_bytes(bytes) & !DELIVERY_MODE | mode;
    for (place, byte) in lapic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
        *place = byte as _;
    }
}

/// Joins what KVM gives in three places.
pub(super) fn registers(regs: &kvm_regs, sregs: &kvm_sregs, kernel_gs_base: u64) -> X86Registers {
    X86Registers {
        rip: regs.rip,
        rsp: regs.rsp,
        rflags: regs.rflags,
        cs: sregs.cs.selector,
        cr0: sregs.cr0,
        cr3: sregs.cr3,
        cr4: sregs.cr4,
        efer: sregs.efer,
        gs_base: sregs.gs.base,
        kernel_gs_base,
    }
}
