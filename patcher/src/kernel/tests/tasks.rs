use proptest::prelude::*;

use super::guest;
use crate::addr::{Gpa, Gva};
use crate::kernel::{Task, TaskLayout, TaskLayoutError, TasksError};
use crate::synthetic::tasks::{STACK, field};
use crate::synthetic::{Blueprint, Guest};

fn layout(guest: &Guest) -> Result<TaskLayout, TaskLayoutError> {
    guest.kernel().task_layout(&guest.ram)
}

fn tasks(guest: &Guest) -> Result<Vec<Task>, TasksError> {
    guest.kernel().tasks(&guest.ram, &layout(guest).unwrap())
}

/// The tasks as they are found once the layout is known.
fn after(guest: &Guest, change: impl FnOnce(&Guest)) -> Result<Vec<Task>, TasksError> {
    let (kernel, layout) = (guest.kernel(), layout(guest).unwrap());
    change(guest);
    kernel.tasks(&guest.ram, &layout)
}

/// The same guest without symbols for what it has of tasks, or without a description of types.
fn ways() -> [Guest; 3] {
    let (named, mut unnamed, mut undescribed) = (guest(), guest(), guest());
    unnamed.rename_symbol("init_task", "something");
    undescribed.rename_symbol("init_task", "something");
    undescribed.forget_types();
    [named, unnamed, undescribed]
}

#[test]
fn every_task_is_found_once_by_types_and_by_structure() {
    for (way, guest) in ways().iter().enumerate() {
        assert_eq!(layout(guest).unwrap().stack_size(), STACK);
        let mut found = tasks(guest).unwrap();
        found.sort_by_key(|task| task.at);
        let mut expected = guest.tasks.clone();
        expected.sort_by_key(|task| task.at);
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!((found.at, found.pid, found.sp), (expected.at, expected.pid, expected.sp));
            assert_eq!(found.comm.to_string(), expected.comm);
            assert_eq!(found.stack, Some(expected.stack..expected.stack + STACK));
            let runs = expected.comm.starts_with("swapper/");
            assert_eq!(found.on_cpu, (way < 2).then_some(runs));
        }
    }
}

#[test]
fn idle_tasks_of_many_cpus_are_found_by_types_and_by_structure() {
    for described in [true, false] {
        let guest = Guest::new(&Blueprint { cpus: 40, ..Blueprint::default() });
        if !described {
            guest.forget_types();
        }
        let tasks = tasks(&guest).unwrap();
        let idle = tasks.iter().filter(|task| task.pid == 0).count();
        assert_eq!((idle, tasks.len()), (40, guest.tasks.len()));
    }
}

#[test]
fn a_task_that_has_left_the_rings_is_found_where_it_waits_to_run() {
    let guest = guest();
    let task = guest.task("sleeper/3").at;
    let tasks = after(&guest, |guest| {
        let link = task + field::TASKS;
        let [next, before] =
            [0, 8].map(|at| Gva(u64::from_le_bytes(guest.peek(link + at, 8).try_into().unwrap())));
        guest.poke_u64(before, next.0);
        guest.poke_u64(next + 8, before.0);
        let (head, node) = (guest.run_queue(1) + field::CFS_TASKS, task + field::GROUP_NODE);
        for (from, to) in [(head, node), (node, head)] {
            guest.poke_u64(from, to.0);
            guest.poke_u64(to + 8, from.0);
        }
    });
    let tasks = tasks.unwrap();
    assert_eq!(tasks.len(), guest.tasks.len());
    assert_eq!(tasks.iter().filter(|found| found.at == task).count(), 1);
}

#[test]
fn a_ring_that_is_just_being_changed_is_no_broken_one() {
    // Taken out of the ring half-way: what follows leads back past it, or what precedes leads past it.
    for half in [false, true] {
        let guest = guest();
        let link = |name: &str| guest.task(name).at + field::TASKS;
        let (before, at, next) = (link("sleeper/2"), link("sleeper/3"), link("sleeper/4"));
        let tasks = after(&guest, |guest| {
            guest.poke_u64(next + 8, before.0);
            if half {
                guest.poke_u64(before, next.0);
            }
        });
        let found = tasks.unwrap().iter().any(|task| task.at + field::TASKS == at);
        assert_eq!(found, !half);
    }
}

#[test]
fn broken_rings_are_refused() {
    let guest = guest();
    let link = guest.task("sleeper/3").at + field::TASKS;
    let error = after(&guest, |guest| guest.poke_u64(link + 8, link.0)).unwrap_err();
    let from = guest.task("sleeper/2").at + field::TASKS;
    assert_eq!(error, TasksError::Broken { ring: "processes", member: link, back: link, from });

    // Rings that never come back to where they begin.
    let first = guest.task("kthreadd").at;
    for (at, distance, ring) in [
        (guest.task("sleeper/5").at, field::TASKS, "processes"),
        (guest.tasks[1].at, field::THREAD_NODE, "a process's threads"),
    ] {
        let guest = super::guest();
        let error = after(&guest, |guest| guest.poke_u64(at + distance, (first + distance).0));
        assert!(matches!(&error, Err(TasksError::Broken { ring: name, .. }) if *name == ring));
    }
    let guest = super::guest();
    let head = guest.run_queue(1) + field::CFS_TASKS;
    let error = after(&guest, |guest| guest.poke_u64(head, (first + field::GROUP_NODE).0));
    let ring = "tasks that wait to run";
    assert!(matches!(&error, Err(TasksError::Broken { ring: name, .. }) if *name == ring));
}

#[test]
fn pointers_that_lead_nowhere_are_refused() {
    let nowhere = [8, 0xdead_0000_0000_0000, u64::MAX, u64::MAX - 7];
    for at in [field::TASKS, field::SIGNAL, field::THREAD_NODE, field::CFS_RQ] {
        for nowhere in nowhere {
            let guest = guest();
            let task = guest.task("sleeper/3").at;
            let error = after(&guest, |guest| guest.poke_u64(task + at, nowhere)).unwrap_err();
            assert!(matches!(error, TasksError::Unreadable { .. }), "{at:#x}: {error}");
        }
    }
    for at in [field::CURR, field::IDLE, field::CFS_TASKS, field::CFS + field::RQ] {
        for nowhere in nowhere {
            let guest = guest();
            let queue = guest.run_queue(1);
            let error = after(&guest, |guest| guest.poke_u64(queue + at, nowhere)).unwrap_err();
            assert!(matches!(error, TasksError::Unreadable { .. }), "{at:#x}: {error}");
        }
    }
}

#[test]
fn stacks_that_are_none_are_refused_and_those_given_back_are_not() {
    let guest = guest();
    let task = guest.task("sleeper/3").clone();
    let error = after(&guest, |guest| guest.poke_u64(task.stack, 0)).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("task 203 (sleeper/3) has no kernel stack at"), "{error}");

    for sp in [0, task.stack.0 - 8, task.stack.0 + STACK, task.sp.0 + 4, u64::MAX] {
        let guest = super::guest();
        let error = after(&guest, |guest| guest.poke_u64(task.at + field::SP, sp)).unwrap_err();
        assert!(matches!(error, TasksError::Astray { pid: 203, .. }), "{error}");
    }

    let guest = super::guest();
    let tasks = after(&guest, |guest| guest.poke_u64(task.at + field::STACK, 0)).unwrap();
    assert_eq!(tasks.iter().find(|found| found.at == task.at).unwrap().stack, None);
}

#[test]
fn names_that_are_no_text_are_shown_all_the_same() {
    let guest = guest();
    let task = guest.task("sleeper/3").at;
    let tasks =
        after(&guest, |guest| guest.poke(task + field::COMM, b"\xffa\n\x1b[0m\0rest")).unwrap();
    let found = tasks.iter().find(|found| found.at == task).unwrap();
    assert_eq!(found.comm.to_string(), r"\xffa\n\x1b[0m");
    let tasks = after(&guest, |guest| guest.poke(task + field::COMM, &[b'x'; 16])).unwrap();
    let found = tasks.iter().find(|found| found.at == task).unwrap();
    assert_eq!(found.comm.to_string(), "x".repeat(16));
}

#[test]
fn what_is_missing_of_a_layout_is_said() {
    let mut guest = guest();
    guest.rename_symbol("init_task", "something");
    guest.poke(guest.tasks[0].at + field::COMM, b"anything ");
    assert_eq!(layout(&guest), Err(TaskLayoutError::NoFirstTask));

    // Every thing by which a structure is told.
    let spoil: [(&str, u64, u64); 6] = [
        ("number", field::PID, 2),
        ("stack", field::STACK, 0),
        ("beginning", field::GROUP_LEADER, 0),
        ("stack pointer", field::SP, 0),
        ("threads", field::SIGNAL, 0),
        ("idle tasks", field::CFS_RQ, 0),
    ];
    for (what, at, value) in spoil {
        let guest = super::guest();
        guest.forget_types();
        for name in ["sleeper/3", "ksoftirqd/1"] {
            guest.poke_u64(guest.task(name).at + at, value);
        }
        assert_eq!(layout(&guest), Err(TaskLayoutError::NotTold { what }));
    }
}

#[test]
fn stacks_as_short_or_as_long_as_no_kernels_are_refused() {
    for used in [0x800, STACK * 4 + 8] {
        let guest = guest();
        for task in &guest.tasks {
            guest.poke_u64(task.at + field::SP, (task.stack + used).0);
        }
        let error = layout(&guest).unwrap_err();
        let is_expected = match error {
            TaskLayoutError::StackSize { used: found } => found == used,
            TaskLayoutError::Tasks(TasksError::Astray { .. }) => used > STACK,
            _ => false,
        };
        assert!(is_expected, "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn no_memory_makes_the_search_for_tasks_panic_or_go_on_for_ever(
        described in any::<bool>(),
        found_before in any::<bool>(),
        changes in prop::collection::vec(
            (0usize..24, 0u64..0x400, 0usize..24, 0u64..0x400, any::<bool>(), any::<u64>()),
            1..40,
        ),
    ) {
        let guest = guest();
        if !described {
            guest.forget_types();
        }
        let kernel = guest.kernel();
        let before = kernel.task_layout(&guest.ram).unwrap();
        // Places in tasks come to lead to other such places, or anywhere.
        let places: Vec<Gva> = guest.tasks.iter().map(|task| task.at).collect();
        for (from, at, to, into, anywhere, value) in changes {
            let from = places[from % places.len()] + at * 8;
            let to = places[to % places.len()] + into * 8;
            guest.poke_u64(from, if anywhere { value } else { to.0 });
        }
        let layout = if found_before { Ok(before) } else { kernel.task_layout(&guest.ram) };
        let _ = layout.map(|layout| kernel.tasks(&guest.ram, &layout));
    }
}

#[test]
fn the_build_id_is_the_kernels() {
    let guest = guest();
    assert!(guest.kernel().build_id(&guest.ram).is_err());
    let mut note = Vec::new();
    for word in [4u32, 20, 3] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"GNU\0");
    note.extend([0xab; 20]);
    // In the read-only data, of which only the place is known.
    let at = guest.symbol("_etext") + 0x1000;
    guest.poke(at, &note);
    let id = guest.kernel().build_id(&guest.ram).unwrap();
    assert_eq!(id.to_string(), "ab".repeat(20));
    assert_eq!(guest.physical(at) - guest.blueprint().phys.0, Gpa(at.0 - guest.blueprint().base.0));
}
