//! The guest's ACPI tables: hardware-reduced, with the processors, COM1 and the registers that end
//! the guest.
//!
//! An MP table is not given: stock kernels are built without a parser for it. What is absent is
//! declared absent, or Linux waits seconds for it: no VGA, no RTC, no keyboard controller.

use acpi_tables::Aml;
use acpi_tables::aml::{self, EISAName, Interrupt, Name, Package, Path, ResourceTemplate};
use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use patcher::addr::Gpa;

use super::layout::{IO_APIC, LOCAL_APIC};
use crate::devices::{COM1_GSI, COM1_PORT, COM1_PORTS, power};

const OEM: [u8; 6] = *b"VMM   ";
const TABLE: [u8; 8] = *b"VMMGUEST";
const REVISION: u32 = 1;
/// Size of the header that all tables begin with.
const HEADER: u32 = 36;
/// DSDT revision 2: integers are 64 bits wide.
const DSDT_REVISION: u8 = 2;

/// FADT IA-PC boot architecture flags: no VGA to probe, no CMOS real-time clock. Bit 1 stays
/// clear: no 8042 keyboard controller.
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_RTC: u16 = 1 << 5;

/// All tables, laid out to be put at `at`, where the RSDP comes to lie.
pub(super) fn tables(at: Gpa, cpus: usize) -> Vec<u8> {
    let dsdt = dsdt(cpus);
    let madt = bytes(&madt(cpus));

    // The RSDP first, where it is searched for; the others behind it, each 16-byte aligned.
    let mut blob = vec![0; Rsdp::len()];
    let mut append = |table: &[u8]| {
        blob.resize(blob.len().next_multiple_of(16), 0);
        let address = at.0 + blob.len() as u64;
        blob.extend_from_slice(table);
        address
    };
    let dsdt = append(&dsdt);
    let fadt = append(&bytes(&fadt(dsdt)));
    let madt = append(&madt);
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = append(&bytes(&xsdt));
    let rsdp = bytes(&Rsdp::new(OEM, xsdt));
    blob[..rsdp.len()].copy_from_slice(&rsdp);
    blob
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: u64) -> FADT {
    let register =
        |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port));
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = (NO_VGA | NO_CMOS_RTC).into();
    fadt.reset_reg = register(power::RESET_PORT);
    fadt.reset_value = power::RESET_VALUE;
    fadt.sleep_control_reg = register(power::SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = register(power::SLEEP_STATUS_PORT);
    fadt.finalize()
}

fn madt(cpus: usize) -> MADT {
    let mut madt = MADT::new(OEM, TABLE, REVISION, LocalInterruptController::Address(LOCAL_APIC));
    madt.add_structure(IoApic::new(0, IO_APIC, 0));
    for cpu in 0..cpus as u8 {
        madt.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    madt
}

fn dsdt(cpus: usize) -> Vec<u8> {
    let com1_ports = aml::IO::new(COM1_PORT, COM1_PORT, 1, COM1_PORTS as u8);
    let (consumer, edge, active_low, shared) = (true, true, false, false);
    let com1_irq = Interrupt::new(consumer, edge, active_low, shared, COM1_GSI);
    let crs = ResourceTemplate::new(vec![&com1_ports, &com1_irq]);
    let hid = EISAName::new("PNP0501");
    let names = [
        Name::new(Path::new("_HID"), &hid),
        Name::new(Path::new("_UID"), &aml::ZERO),
        Name::new(Path::new("_CRS"), &crs),
    ];
    let names = names.iter().map(|name| name as &dyn Aml).collect();
    let mut devices = bytes(&aml::Device::new(Path::new("COM1"), names));
    for cpu in 0..cpus as u8 {
        let hid = Name::new(Path::new("_HID"), &"ACPI0007");
        let uid = Name::new(Path::new("_UID"), &cpu);
        let name = format!("C{cpu:03X}");
        devices.extend(bytes(&aml::Device::new(Path::new(&name), vec![&hid, &uid])));
    }

    let mut sdt = Sdt::new(*b"DSDT", HEADER, DSDT_REVISION, OEM, TABLE, REVISION);
    sdt.append_slice(&aml::Scope::raw(Path::new("_SB_"), devices));
    // The first element is the sleep type for PM1a; hardware-reduced systems use that one.
    let soft_off = Package::new(vec![&power::S5_SLEEP_TYPE]);
    sdt.append_slice(&bytes(&Name::new(Path::new("_S5_"), &soft_off)));
    sdt.as_slice().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Gpa = Gpa(0xe_0000);

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn u64_at(blob: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(blob[offset..offset + 8].try_into().unwrap())
    }

    /// The table at guest-physical `at`, its length taken from its header.
    fn table(blob: &[u8], at: u64) -> &[u8] {
        let offset = (at - AT.0) as usize;
        let len = u32::from_le_bytes(blob[offset + 4..offset + 8].try_into().unwrap());
        &blob[offset..offset + len as usize]
    }

    #[test]
    fn every_table_is_reached_from_the_rsdp_and_sums_to_zero() {
        for cpus in [1, 2, 254] {
            let blob = tables(AT, cpus);
            assert!(blob.len() < 0x1_fff0, "{} bytes for {cpus} CPUs", blob.len());
            assert_eq!(&blob[..8], b"RSD PTR ");
            assert_eq!((sum(&blob[..20]), sum(&blob[..36])), (0, 0));
            let xsdt = table(&blob, u64_at(&blob, 24));
            assert_eq!((&xsdt[..4], sum(xsdt)), (&b"XSDT"[..], 0));
            let fadt = table(&blob, u64_at(xsdt, 36));
            assert_eq!((&fadt[..4], sum(fadt), fadt.len()), (&b"FACP"[..], 0, 276));
            let madt = table(&blob, u64_at(xsdt, 44));
            assert_eq!((&madt[..4], sum(madt)), (&b"APIC"[..], 0));
            assert_eq!(madt.len(), 44 + 12 + 8 * cpus);
            let dsdt = table(&blob, u64_at(fadt, 140));
            assert_eq!((&dsdt[..4], sum(dsdt)), (&b"DSDT"[..], 0));
        }
    }

    #[test]
    fn the_fadt_names_the_registers_that_the_devices_answer() {
        let blob = tables(AT, 1);
        let xsdt = table(&blob, u64_at(&blob, 24));
        let fadt = table(&blob, u64_at(xsdt, 36));
        assert_eq!(u32::from_le_bytes(fadt[112..116].try_into().unwrap()), 0x10_0430);
        assert_eq!(u16::from_le_bytes([fadt[109], fadt[110]]), 0x24);
        let io_register = |offset: usize| (fadt[offset], u64_at(fadt, offset + 4));
        assert_eq!((io_register(116), fadt[128]), ((1, 0x602), 1));
        assert_eq!((io_register(244), io_register(256)), ((1, 0x600), (1, 0x601)));
    }
}
