use super::{call, every_kind, guest};
use crate::addr::Gva;
use crate::arch::{PidPlace, ReturnForm};
use crate::kernel::{CpuNumberError, ReturnFormError, TaskPlaceError, Unready, VariableError};
use crate::synthetic::tasks::field;
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
fn where_a_trampoline_finds_the_task_has_been_looked_at_on_every_cpu() {
    for blueprint in every_kind() {
        let guest = Guest::new(&Blueprint { cpus: 3, ..blueprint });
        let recorded = guest.kernel().recorded_task(&guest);
        let Ok(PidPlace::InTask { current, pid }) = recorded.pid else { panic!("{recorded:?}") };
        let (count, number) = (recorded.preempt_count.clone().unwrap(), guest.kernel());
        let number = number.cpu_number(&guest.ram).unwrap();
        assert_eq!((current, count), (number - 12, number - 4));
        assert_eq!(u64::try_from(pid), Ok(field::PID));
        assert_eq!(recorded.missing(), None);

        // One CPU where there is no task, or no such count, is enough not to believe it.
        let task = guest.peek(guest.current_task(2), 8);
        for nowhere in [0, 0x40_0000, guest.task("init").at.0 + 8] {
            guest.poke_u64(guest.current_task(2), nowhere);
            let recorded = guest.kernel().recorded_task(&guest);
            let why = TaskPlaceError::NotHeld { what: "the current task", cpu: 2 };
            assert_eq!(recorded.pid, Err(why));
            assert!(recorded.preempt_count.is_ok());
            assert!(recorded.missing().unwrap().starts_with("calls do not tell their tasks: "));
        }
        guest.poke(guest.current_task(2), &task);
        guest.poke(guest.preempt_count(1), &0x4000_0000_u32.to_le_bytes());
        let recorded = guest.kernel().recorded_task(&guest);
        let why = TaskPlaceError::NotHeld { what: "the count", cpu: 1 };
        assert_eq!((recorded.pid.is_ok(), recorded.preempt_count), (true, Err(why)));
    }
}

#[test]
fn a_kernel_without_types_tells_where_tasks_have_their_numbers_by_its_tasks() {
    let guest = guest();
    let described = guest.kernel().recorded_task(&guest);
    guest.forget_types();
    assert_eq!(guest.kernel().recorded_task(&guest), described);
    assert!(described.pid.is_ok());
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
