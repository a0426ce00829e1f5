//! Machines that cannot be built say why, before anything runs.

use std::io;
use std::path::PathBuf;

use vmm::devices::Console;
use vmm::kvm::{BareGuest, Hardware, HardwareError, KvmKind, LinuxBoot, Vm, VmError, probe};

fn console() -> Console {
    Console::new(Box::new(io::sink())).unwrap()
}

fn bare(hardware: &Hardware) -> VmError {
    Vm::bare(hardware, BareGuest::new(&[0xf4]), console()).map(drop).unwrap_err()
}

#[test]
fn a_device_that_is_no_kvm_or_not_there_is_named() {
    for (device, missing) in [("/nonexistent/kvm", true), ("/dev/zero", false), ("/etc", false)] {
        let hardware = Hardware { device: PathBuf::from(device), ..Hardware::default() };
        let error = bare(&hardware);
        match &error {
            VmError::Kvm(KvmKind::Missing { device: named }) if missing => {
                assert_eq!(named, device);
            }
            VmError::Kvm(KvmKind::NotKvm { device: named, .. }) if !missing => {
                assert_eq!(named, device);
            }
            other => panic!("{device}: {other}"),
        }
        assert!(error.to_string().contains(device), "{error}");
    }
}

#[test]
fn hardware_is_checked_before_the_kernel_and_the_kernel_before_the_host() {
    let nowhere = Hardware { device: "/nonexistent/kvm".into(), ..Hardware::default() };
    let boot = LinuxBoot { kernel: "/nonexistent/vmlinuz".into(), ..LinuxBoot::default() };
    let refused =
        |hardware: &Hardware| Vm::linux(hardware, &boot, console()).map(drop).unwrap_err();
    assert!(matches!(
        refused(&Hardware { cpus: 0, ..nowhere.clone() }),
        VmError::Hardware(HardwareError::Cpus { found: 0, .. })
    ));
    assert!(matches!(refused(&nowhere), VmError::Boot(_)));
}

#[test]
fn memory_beyond_the_cpus_address_space_is_refused() {
    // A page below 2^52, which is as wide as addresses get.
    let error = bare(&Hardware { memory: (1 << 52) - 4096, ..Hardware::default() });
    assert!(matches!(error, VmError::Hardware(HardwareError::AddressSpace { .. })), "{error}");
}

#[test]
fn a_bare_guest_that_does_not_fit_is_refused() {
    let hardware = Hardware { memory: 2 << 20, ..Hardware::default() };
    let guest = BareGuest::new(&vec![0x90; 2 << 20]);
    let error = Vm::bare(&hardware, guest, console()).map(drop).unwrap_err();
    assert!(matches!(error, VmError::Bare { .. }), "{error}");
}

#[test]
fn every_kind_of_kvm_says_in_a_sentence_what_to_try() {
    let kind = probe();
    let sentence = kind.to_string();
    assert!(sentence.len() > 20 && !sentence.contains('\n'), "{sentence}");
}
