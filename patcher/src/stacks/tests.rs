//! On synthetic guests, whose CPUs run their idle tasks while all others sleep.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::addr::Gpa;
use crate::machine::{Machine, X86Registers};
use crate::synthetic::tasks::{STACK, field};
use crate::synthetic::{Blueprint, Guest};

fn guest() -> Guest {
    Guest::new(&Blueprint::default())
}

/// The function with the number `index`, of which the pad's instruction has 5 bytes.
fn watched(guest: &Guest, kernel: &Kernel, index: usize) -> Vec<Watched> {
    let function = &guest.functions[index];
    let name: Arc<str> = function.name.as_str().into();
    Watched::function(kernel, &name, &(function.entry..function.entry + 64), function.pad + 5)
}

/// Who stands in the functions with these numbers, each as task, function and vCPU.
fn standers(guest: &Guest, functions: &[usize]) -> Vec<(String, usize, Option<usize>)> {
    let kernel = guest.kernel();
    let code = functions.iter().flat_map(|index| watched(guest, &kernel, *index)).collect();
    let check = StackCheck::new(&kernel, &guest.ram, code).unwrap();
    let mut stopped = guest.stop().unwrap();
    let found = check.run(&guest.ram, &mut *stopped, guest.vcpus()).unwrap();
    let index = |name: &str| guest.functions.iter().position(|f| f.name == name).unwrap();
    let told = |s: Stander| (s.comm.to_string(), index(&s.function), s.vcpu);
    found.into_iter().map(told).collect()
}

fn registers(guest: &mut Guest, vcpu: usize) -> &mut X86Registers {
    match &mut guest.registers[vcpu] {
        Registers::X86_64(x86) => x86,
        other => panic!("{other:?}"),
    }
}

/// An address in the middle of a function.
fn inside(guest: &Guest, index: usize) -> u64 {
    guest.functions[index].pad.0 + 17
}

#[test]
fn nobody_stands_in_a_function_of_which_no_stack_tells() {
    assert_eq!(standers(&guest(), &[5, 6, 7]), []);
    assert_eq!(standers(&guest(), &[]), []);
}

#[test]
fn a_task_that_sleeps_stands_where_its_stack_says() {
    let guest = guest();
    let task = guest.task("sleeper/3");
    guest.poke_u64(task.sp + 0x40, inside(&guest, 5));
    assert_eq!(standers(&guest, &[5]), [("sleeper/3".to_owned(), 5, None)]);
    assert_eq!(standers(&guest, &[6]), []);
    // The first and the last word of what is in use count, the one below does not.
    for (at, counts) in [(task.sp, true), (task.stack + STACK - 8, true), (task.sp - 8, false)] {
        let guest = super::tests::guest();
        guest.poke_u64(at, inside(&guest, 5));
        assert_eq!(!standers(&guest, &[5]).is_empty(), counts, "{at}");
    }
}

#[test]
fn only_what_lies_behind_the_pad_counts_of_a_function() {
    let guest = guest();
    let function = &guest.functions[5];
    let word = guest.task("sleeper/3").sp + 8;
    let behind = function.pad + 5;
    let cases = [
        (function.entry, false),
        (function.pad, false),
        (behind - 1, false),
        (behind, true),
        (function.entry + 63, true),
        (function.entry + 64, false),
    ];
    for (address, counts) in cases {
        guest.poke_u64(word, address.0);
        assert_eq!(!standers(&guest, &[5]).is_empty(), counts, "{address}");
    }
}

#[test]
fn every_task_is_told_once_for_each_function_it_stands_in() {
    let guest = guest();
    for (name, functions) in
        [("sleeper/1", &[5, 9, 5][..]), ("sleeper/2", &[9]), ("kthreadd", &[11])]
    {
        for (place, index) in functions.iter().enumerate() {
            guest.poke_u64(guest.task(name).sp + 8 * place as u64, inside(&guest, *index));
        }
    }
    let mut found = standers(&guest, &[9, 5, 10]);
    found.sort();
    let expected = [("sleeper/1", 5), ("sleeper/1", 9), ("sleeper/2", 9)];
    assert_eq!(found, expected.map(|(name, index)| (name.to_owned(), index, None)));
}

#[test]
fn the_unlikely_part_of_a_function_counts_as_the_function() {
    for part in ["cold", "cold.3"] {
        let mut guest = guest();
        let name = format!("{}.{part}", guest.functions[5].name);
        let (own, symbol) = (guest.functions[100].name.clone(), guest.functions[100].entry);
        guest.rename_symbol(&own, &name);
        guest.poke_u64(guest.task("sleeper/3").sp, symbol.0);
        assert_eq!(standers(&guest, &[5]), [("sleeper/3".to_owned(), 5, None)]);
    }
}

#[test]
fn a_vcpu_stands_where_it_executes_and_where_its_stack_says() {
    let mut guest = guest();
    let task = guest.task("swapper/1").clone();
    registers(&mut guest, 1).rip = inside(&guest, 5);
    assert_eq!(standers(&guest, &[5]), [("swapper/1".to_owned(), 5, Some(1))]);
    registers(&mut guest, 1).rip = guest.functions[5].pad.0;
    assert_eq!(standers(&guest, &[5]), []);
    // In use is what the stack pointer says, not what was when the task last slept.
    registers(&mut guest, 1).rsp = task.sp.0 - 0x100;
    guest.poke_u64(task.sp - 0x80, inside(&guest, 5));
    guest.poke_u64(task.sp - 0x108, inside(&guest, 6));
    assert_eq!(standers(&guest, &[5, 6]), [("swapper/1".to_owned(), 5, Some(1))]);
}

/// Has the second vCPU handle an interrupt on a stack of its own, or on one that is not known; gives
/// the stack pointer.
fn interrupted(guest: &mut Guest, known: bool) -> Gva {
    let stack = guest.direct(Gpa(0x1a0_0000));
    if known {
        // Where its end is, is in a field behind the number of the CPU.
        let Registers::X86_64(x86) = guest.registers[1] else { unreachable!() };
        let hot = guest.symbols.iter().find(|symbol| symbol.name == "pcpu_hot").unwrap().address;
        guest.poke_u64(Gva(x86.gs_base) + hot + 32, (stack + STACK - 8).0);
    }
    let sp = stack + STACK - 0x200;
    registers(guest, 1).rsp = sp.0;
    sp
}

#[test]
fn an_interrupt_is_followed_to_what_it_interrupted() {
    for known in [true, false] {
        let mut guest = guest();
        let sp = interrupted(&mut guest, known);
        let task = guest.task("swapper/1").clone();
        // Of the task's stack, what lies above the lowest address that the interrupt's holds.
        let from = task.stack + 0x1000;
        guest.poke_u64(sp + 0x80, (from + 0x100).0);
        guest.poke_u64(sp + 0x100, from.0);
        guest.poke_u64(from, inside(&guest, 5));
        guest.poke_u64(from - 8, inside(&guest, 6));
        guest.poke_u64(sp + 0x40, inside(&guest, 7));
        guest.poke_u64(sp - 8, inside(&guest, 8));
        // Stacks of tasks that sleep are not in use up there, whoever points to them.
        let other = guest.task("sleeper/3").clone();
        guest.poke_u64(sp + 0x48, (other.sp - 0x400).0);
        guest.poke_u64(other.sp - 0x300, inside(&guest, 9));
        let mut found = standers(&guest, &[5, 6, 7, 8, 9]);
        found.sort();
        let expected = [5, 7].map(|index| ("swapper/1".to_owned(), index, Some(1)));
        assert_eq!(found, expected, "{known}");
    }
}

#[test]
fn a_task_on_a_cpu_that_no_stack_pointer_leads_to_is_taken_to_use_all_of_its_stack() {
    let mut guest = guest();
    interrupted(&mut guest, true);
    let task = guest.task("swapper/1").clone();
    guest.poke_u64(task.stack + 0x10, inside(&guest, 5));
    assert_eq!(standers(&guest, &[5]), [("swapper/1".to_owned(), 5, None)]);
}

#[test]
fn what_is_left_on_the_stacks_of_vcpus_that_run_processes_does_not_count() {
    let mut guest = guest();
    let task = guest.task("swapper/1").clone();
    guest.poke_u64(task.sp + 0x10, inside(&guest, 5));
    registers(&mut guest, 1).cs = 0x33;
    // Neither do its registers, whatever is in them.
    registers(&mut guest, 1).rip = inside(&guest, 5);
    registers(&mut guest, 1).rsp = task.sp.0;
    assert_eq!(standers(&guest, &[5]), []);
    // With a task more on CPUs than there are such vCPUs, any of them may be in the kernel.
    let other = guest.task("sleeper/3").at;
    guest.poke(other + field::ON_CPU, &1u32.to_le_bytes());
    assert_eq!(standers(&guest, &[5]), [("swapper/1".to_owned(), 5, None)]);
}

#[test]
fn returns_that_the_guest_traces_itself_count() {
    let guest = guest();
    let shadow = guest.direct(Gpa(0x1b0_0000));
    for (index, word) in [inside(&guest, 5), 0, inside(&guest, 6)].into_iter().enumerate() {
        guest.poke_u64(shadow + 8 * index as u64, word);
    }
    // Of a task that sleeps and one that runs; the third word is none in use.
    for name in ["sleeper/3", "swapper/0"] {
        let task = guest.task(name).at;
        guest.poke_u64(task + field::RET_STACK, shadow.0);
        guest.poke(task + field::CURR_RET_STACK, &2u32.to_le_bytes());
    }
    let mut found = standers(&guest, &[5, 6]);
    found.sort();
    let expected = [("sleeper/3".to_owned(), 5, None), ("swapper/0".to_owned(), 5, Some(0))];
    assert_eq!(found, expected);

    let guest = super::tests::guest();
    let [first, second] = [0x1b0_0000, 0x1b0_0100].map(|at| guest.direct(Gpa(at)));
    let task = guest.task("sleeper/3").at;
    guest.poke_u64(task + field::RETHOOKS, (first + field::LLIST).0);
    guest.poke_u64(first + field::LLIST, (second + field::LLIST).0);
    guest.poke_u64(second + field::RET_ADDR, inside(&guest, 5));
    assert_eq!(standers(&guest, &[5]), [("sleeper/3".to_owned(), 5, None)]);

    let kernel = guest.kernel();
    let check = StackCheck::new(&kernel, &guest.ram, watched(&guest, &kernel, 5)).unwrap();
    guest.poke_u64(second + field::LLIST, (first + field::LLIST).0);
    let error = check.standers(&guest.ram, &guest.registers).unwrap_err();
    assert!(matches!(error, StackError::Tasks(TasksError::EndlessReturns { .. })), "{error}");
}

#[test]
fn a_vcpu_that_was_never_started_stands_nowhere() {
    let mut guest = guest();
    *registers(&mut guest, 1) = X86Registers { rip: inside(&guest, 5), ..Default::default() };
    assert_eq!(standers(&guest, &[5]), []);
}

#[test]
fn code_that_lies_in_code_is_found_by_either_name() {
    let watched = |name: &str, code| Watched { name: name.into(), code };
    let code = WatchedCode::new(vec![
        watched("long", Gva(0x100)..Gva(0x200)),
        watched("short", Gva(0x120)..Gva(0x130)),
        watched("empty", Gva(0x140)..Gva(0x140)),
        watched("far", Gva(0x300)..Gva(0x310)),
    ]);
    let name = |address| code.find(Gva(address)).map(|watched| &*watched.name);
    let names = [0xff, 0x100, 0x125, 0x140, 0x1ff, 0x200, 0x30f, 0x310].map(name);
    let (long, short, far) = (Some("long"), Some("short"), Some("far"));
    assert_eq!(names, [None, long, short, long, long, None, far, None]);
}

#[test]
fn a_broken_list_of_tasks_is_an_error() {
    let guest = guest();
    let kernel = guest.kernel();
    let check = StackCheck::new(&kernel, &guest.ram, watched(&guest, &kernel, 5)).unwrap();
    guest.poke_u64(guest.task("sleeper/3").at + field::TASKS, 8);
    let error = check.standers(&guest.ram, &guest.registers).unwrap_err();
    assert!(matches!(error, StackError::Tasks(_)), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn no_stacks_and_no_registers_make_a_check_panic_or_go_on_for_ever(
        described in any::<bool>(),
        rsp in any::<u64>(), gs_base in any::<u64>(), cs in any::<u16>(), choice in 0usize..4,
        words in prop::collection::vec((0u64..0x4000, 0usize..40, 0u64..0x4000, any::<u64>()), 0..200),
    ) {
        let mut guest = guest();
        if !described {
            guest.forget_types();
        }
        let kernel = guest.kernel();
        let check = StackCheck::new(&kernel, &guest.ram, watched(&guest, &kernel, 5)).unwrap();
        let stacks: Vec<Gva> = guest.tasks.iter().map(|task| task.stack).collect();
        let sp = interrupted(&mut guest, true);
        for (at, to, into, value) in words {
            // Behind the mark at a stack's beginning.
            let from = [stacks[to % stacks.len()], sp.align_down(STACK)][to % 2];
            let value = if to < 36 { (stacks[to % stacks.len()] + into).0 } else { value };
            guest.poke_u64(from + (at & !7).max(8), value);
        }
        let x86 = registers(&mut guest, 1);
        match choice {
            0 => x86.rsp = rsp,
            1 => x86.rsp = sp.0.wrapping_add(rsp % STACK),
            2 => x86.gs_base = gs_base,
            _ => x86.cs = cs,
        }
        let _ = check.standers(&guest.ram, &guest.registers);
    }
}
