//! The tasks that are found in the memory of stock kernels, who stands where, and which build it is,
//! against what these kernels say themselves.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use guest_images::Architecture::{self, Aarch64, S390x, X86_64};
use guest_images::Series;
use patcher::addr::Gva;
use patcher::kernel::{Kernel, Task};
use patcher::stacks::{StackCheck, Stander, Watched};
use tests::capture::Captured;

struct Guest {
    captured: Captured,
    kernel: Kernel,
    tasks: Vec<Task>,
}

impl Guest {
    fn new(architecture: Architecture, series: Series, cpu: &str, cmdline: &str) -> Self {
        let captured = Captured::new(architecture, series, cpu, cmdline);
        let kernel = captured.kernel();
        let layout = kernel.task_layout(&captured.ram).unwrap();
        // All distributions' kernels have 16 KiB of stack.
        assert_eq!(layout.stack_size(), 16 << 10);
        let tasks = kernel.tasks(&captured.ram, &layout).unwrap();
        Self { captured, kernel, tasks }
    }

    fn check(&self) {
        self.check_tasks();
        self.check_standers();
        let notes = fs::read(self.captured.capture.notes()).unwrap();
        let id = self.kernel.build_id(&self.captured.ram).unwrap();
        assert_eq!(id.bytes().len(), 20);
        assert!(notes.windows(20).any(|window| window == id.bytes()), "{id}");
    }

    /// Every task that the guest has told of is found under its name, threads included, and beside
    /// them only what comes and goes, and the idle tasks.
    fn check_tasks(&self) {
        let said = fs::read_to_string(self.captured.capture.tasks()).unwrap();
        let mut theirs: BTreeMap<u32, &str> = said
            .lines()
            .map(|line| {
                let (pid, rest) = line.split_once(" (").unwrap();
                (pid.parse().unwrap(), rest.rsplit_once(") ").unwrap().0)
            })
            .collect();
        assert!(theirs.len() > 40, "{said}");
        let mut idle = Vec::new();
        let mut more = Vec::new();
        for task in &self.tasks {
            let comm = task.comm.to_string();
            if task.pid == 0 {
                idle.push(comm);
                continue;
            }
            match theirs.remove(&task.pid) {
                // The guest shows longer names of the kernel's threads than the tasks have.
                Some(name) => assert!(name.starts_with(&comm), "{task:?} {name}"),
                None => more.push(comm),
            }
        }
        idle.sort();
        assert_eq!(idle, ["swapper/0", "swapper/1"]);
        // When init has told of the tasks it starts a process that syncs, which may still be ending, and
        // one that sleeps.
        let comes_and_goes = |name: &str| {
            name.starts_with("kworker/") || ["init", "exe", "sync", "sleep"].contains(&name)
        };
        assert!(more.iter().all(|name| comes_and_goes(name)), "{more:?}");
        assert!(theirs.values().all(|name| comes_and_goes(name)), "missing {theirs:?}");
        for (name, count) in [("threads", 4), ("pipe", 1), ("idle", 1), ("kthreadd", 1)] {
            assert_eq!(self.named(name).len(), count, "{name}");
        }
        assert_eq!(self.named("kthreadd")[0].pid, 2);
    }

    fn named(&self, name: &str) -> Vec<&Task> {
        self.tasks.iter().filter(|task| task.comm.bytes() == name.as_bytes()).collect()
    }

    fn standers(&self, functions: &[&str]) -> Vec<Stander> {
        let symbols = self.kernel.symbols();
        let watched = functions.iter().flat_map(|name| {
            let name: Arc<str> = (*name).into();
            let begin = symbols.address(&name).unwrap_or_else(|| panic!("no function {name}"));
            let end = symbols.lookup(begin).unwrap().end.unwrap();
            Watched::function(&self.kernel, &name, &(begin..end), begin + 8)
        });
        let check = StackCheck::new(&self.kernel, &self.captured.ram, watched.collect()).unwrap();
        check.standers(&self.captured.ram, &self.captured.vcpus).unwrap()
    }

    /// Those who stand in a function, by name.
    fn in_function(&self, function: &str) -> Vec<String> {
        let standers = self.standers(&[function]);
        assert!(standers.iter().all(|stander| *stander.function == *function));
        standers.iter().map(|stander| stander.comm.to_string()).collect()
    }

    fn check_standers(&self) {
        let symbols = self.kernel.symbols();
        // What each is known to sleep in, and nobody else is.
        assert_eq!(self.in_function("kthreadd"), ["kthreadd"]);
        let mut sleep = self.in_function("hrtimer_nanosleep");
        sleep.retain(|name| name != "sleep");
        assert_eq!(sleep, ["idle"]);
        let pipe_read = ["anon_pipe_read", "pipe_read"];
        let pipe_read = pipe_read.iter().find(|name| symbols.address(name).is_some()).unwrap();
        assert_eq!(self.in_function(pipe_read), ["pipe"]);
        let poll = self.in_function("do_sys_poll");
        assert_eq!(poll, ["threads"; 4]);
        let rcu = self.in_function("rcu_gp_kthread");
        assert!(rcu.iter().any(|name| name.starts_with("rcu_")), "{rcu:?}");
        // Nobody has called these, or comes back from them.
        let never = self.standers(&["panic", "kernel_init_freeable", "machine_restart"]);
        assert_eq!(never, []);
        // Everybody who waits does so in here, and each is told once for all of its threads.
        let waiting = self.in_function("schedule");
        assert!(waiting.len() > self.tasks.len() - 8, "{waiting:?}");
        // Idle tasks never leave this, on a CPU or not. Within it, `do_idle` may give the CPU up by a jump
        // to the scheduler, and stand no more in what waits for them.
        let mut idle = self.in_function("cpu_startup_entry");
        idle.sort();
        assert_eq!(idle, ["swapper/0", "swapper/1"]);
        // Several functions at once are told apart.
        let several = self.standers(&["kthreadd", pipe_read, "panic"]);
        let mut functions: Vec<&str> = several.iter().map(|stander| &*stander.function).collect();
        functions.sort_unstable();
        let mut expected = ["kthreadd", pipe_read];
        expected.sort_unstable();
        assert_eq!(functions, expected);
        // The vCPUs are where their registers say.
        for (number, vcpu) in self.captured.vcpus.iter().enumerate() {
            let pc = Gva(vcpu.pc());
            if self.kernel.text().contains(&pc)
                && !matches!(vcpu, patcher::machine::Registers::S390x(_))
            {
                let code = pc..pc + 1;
                let watched = vec![Watched { name: "here".into(), code }];
                let ram = &self.captured.ram;
                let check = StackCheck::new(&self.kernel, ram, watched).unwrap();
                let standers = check.standers(ram, &self.captured.vcpus).unwrap();
                assert!(
                    standers.iter().any(|stander| stander.vcpu == Some(number)),
                    "{standers:?}"
                );
            }
        }
    }
}

#[test]
fn the_tasks_of_a_5_10_kernel_are_found() {
    Guest::new(X86_64, Series::V5_10, "max", "").check();
}

#[test]
fn the_tasks_of_a_6_1_kernel_are_found() {
    Guest::new(X86_64, Series::V6_1, "max", "").check();
}

#[test]
fn the_tasks_of_a_6_1_kernel_with_isolated_tables_are_found() {
    Guest::new(X86_64, Series::V6_1, "Skylake-Server", "pti=on").check();
}

#[test]
fn the_tasks_of_a_6_12_kernel_are_found() {
    Guest::new(X86_64, Series::V6_12, "max", "").check();
}

#[test]
fn the_tasks_of_a_6_18_kernel_are_found() {
    Guest::new(X86_64, Series::V6_18, "max", "").check();
}

#[test]
fn the_tasks_of_a_7_kernel_are_found() {
    Guest::new(X86_64, Series::V7, "max", "").check();
}

#[test]
fn the_tasks_of_an_s390x_6_1_kernel_that_does_not_describe_its_types_are_found() {
    Guest::new(S390x, Series::V6_1, "max", "").check();
}

#[test]
fn the_tasks_of_an_s390x_6_12_kernel_are_found() {
    Guest::new(S390x, Series::V6_12, "max", "").check();
}

#[test]
fn the_tasks_of_an_s390x_7_kernel_are_found() {
    Guest::new(S390x, Series::V7, "max", "").check();
}

#[test]
fn the_tasks_of_an_aarch64_5_10_kernel_are_found() {
    Guest::new(Aarch64, Series::V5_10, "max", "").check();
}

#[test]
fn the_tasks_of_an_aarch64_6_1_kernel_are_found() {
    Guest::new(Aarch64, Series::V6_1, "max", "").check();
}

#[test]
fn the_tasks_of_an_aarch64_6_12_kernel_with_52_bit_addresses_are_found() {
    Guest::new(Aarch64, Series::V6_12, "max", "").check();
}

#[test]
fn the_tasks_of_an_aarch64_6_12_kernel_with_isolated_tables_are_found() {
    Guest::new(Aarch64, Series::V6_12, "cortex-a72", "").check();
}

#[test]
fn the_tasks_of_an_aarch64_7_kernel_are_found() {
    Guest::new(Aarch64, Series::V7, "max", "").check();
}
