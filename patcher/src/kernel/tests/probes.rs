use super::{call, every_kind, guest};
use crate::addr::Gva;
use crate::arch::ReturnForm;
use crate::kernel::{CpuNumberError, ReturnFormError, Unready, VariableError};
use crate::synthetic::{Blueprint, Guest};

#[test]
fn a_kernel_is_ready_when_no_pad_holds_the_compilers_call() {
    let guest = guest();
    let kernel = guest.kernel();
    assert_eq!(kernel.readiness(&guest.ram), Ok(()));
    for index in [0, 1000, 1999] {
        let pad = guest.functions[index].pad;
        let idle = guest.peek(pad, 5);
        guest.poke(pad, &call(pad, guest.symbol("__fentry__")));
        assert_eq!(kernel.readiness(&guest.ram), Err(Unready::PadPending { at: pad }));
        guest.poke(pad, &idle);
    }
    guest.poke(guest.symbol("alternatives_patched"), &[0; 4]);
    assert_eq!(kernel.readiness(&guest.ram), Err(Unready::AlternativesPending));
}

#[test]
fn a_kernel_without_records_is_not_ready() {
    let guest = guest();
    guest.poke_u64(guest.symbol("ftrace_pages_start"), 0);
    assert!(matches!(guest.kernel().readiness(&guest.ram), Err(Unready::Records(_))));
}

#[test]
fn the_form_of_returns_is_what_the_text_shows() {
    assert_eq!(guest().kernel().return_form(&guest().ram), Ok(ReturnForm::Plain));
    let guest = Guest::new(&Blueprint { return_thunk: true, ..Blueprint::default() });
    let thunk = guest.symbol("its_return_thunk");
    assert_eq!(guest.kernel().return_form(&guest.ram), Ok(ReturnForm::Thunk(thunk)));
}

#[test]
fn text_without_returns_tells_no_form() {
    let guest = guest();
    let text = guest.kernel().text();
    guest.poke(text.start, &vec![0x90; (text.end.0 - text.start.0) as usize]);
    assert!(matches!(
        guest.kernel().return_form(&guest.ram),
        Err(ReturnFormError::NoEvidence { plain: 0, through: 0, .. })
    ));
}

#[test]
fn where_a_cpus_number_is_has_been_read_on_every_cpu() {
    for blueprint in every_kind() {
        let guest = Guest::new(&Blueprint { cpus: 7, ..blueprint });
        let displacement = guest.kernel().cpu_number(&guest.ram).unwrap();
        let areas = guest.symbol("__per_cpu_offset");
        for cpu in 0..7u32 {
            let area =
                u64::from_le_bytes(guest.peek(areas + 8 * u64::from(cpu), 8).try_into().unwrap());
            let at = Gva(area.wrapping_add_signed(displacement.into()));
            assert_eq!(guest.peek(at, 4), cpu.to_le_bytes());
        }
        // One CPU that disagrees is enough not to believe it.
        let areas_of_5 = guest.peek(areas + 40, 8);
        let area = u64::from_le_bytes(areas_of_5.try_into().unwrap());
        guest.poke(Gva(area.wrapping_add_signed(displacement.into())), &9u32.to_le_bytes());
        assert_eq!(
            guest.kernel().cpu_number(&guest.ram),
            Err(CpuNumberError::NotHeld { cpu: 5, found: 9 })
        );
    }
}

#[test]
fn absurd_numbers_of_cpus_are_refused() {
    let guest = guest();
    for count in [0, 8193, u32::MAX] {
        guest.poke(guest.symbol("nr_cpu_ids"), &count.to_le_bytes());
        assert_eq!(guest.kernel().cpu_number(&guest.ram), Err(CpuNumberError::Absurd { count }));
    }
}

#[test]
fn a_panic_is_seen_with_its_cpu() {
    let mut guest = guest();
    assert_eq!(guest.kernel().panicked(&guest.ram), Ok(None));
    guest.poke(guest.symbol("panic_cpu"), &1u32.to_le_bytes());
    assert_eq!(guest.kernel().panicked(&guest.ram), Ok(Some(1)));
    guest.rename_symbol("panic_cpu", "other_cpu");
    assert_eq!(
        guest.kernel().panicked(&guest.ram),
        Err(VariableError::NoSymbol { symbol: "panic_cpu" })
    );
}
