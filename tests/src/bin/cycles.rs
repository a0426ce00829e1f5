//! Arms every function of a busy stock guest in one stop and puts it back, again and again.
//!
//! ```text
//! cycles KERNEL INITRD ROUNDS [CMDLINE...]
//! ```
//!
//! Prints a line a round and fails unless every round's text is byte for byte what it was, the
//! guest's work goes on until the rounds are over and then ends well, and its log is clean. Needs a KVM that runs stock kernels.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patcher::kernel::MappedRegion;
use patcher::machine::Machine;
use patcher::trace::filter::Filter;
use patcher::trace::session::{Selection, Session};
use patcher::trace::sink::{Beginning, Event, Sink, Tracer};
use tests::guest::{Guest, text};
use vmm::kvm::{GuestExit, Hardware, LinuxBoot};

/// How long a round stays armed.
const ARMED: Duration = Duration::from_millis(300);

/// Keeps both CPUs in the kernel until a line comes on the console.
const WORK: &str = "vmm.work=forks:/over@0+proc-read:/proc/uptime:/over@1+wait-console-line:/over";

/// How long to wait for the guest at any point: it may run under two layers of emulation.
const PATIENCE: Duration = Duration::from_secs(240);

/// Checks events and keeps none.
#[derive(Default)]
struct Check {
    last: Vec<u64>,
    backwards: u64,
}

impl Sink for Check {
    fn begin(&mut self, beginning: &Beginning<'_>) -> io::Result<()> {
        self.last = vec![0; beginning.cpus];
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        let last = &mut self.last[usize::from(event.cpu)];
        self.backwards += u64::from(event.time_ns < *last);
        *last = event.time_ns;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn end(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kernel, initrd, rounds, cmdline @ ..] = &arguments[..] else {
        anyhow::bail!("usage: cycles KERNEL INITRD ROUNDS [CMDLINE...]");
    };
    let rounds: u32 = rounds.parse().context("ROUNDS is not a number")?;
    let hardware = Hardware { cpus: 2, ..Hardware::default() };
    let boot = LinuxBoot {
        kernel: kernel.into(),
        initrd: Some(initrd.into()),
        cmdline: format!("{WORK} {}", cmdline.join(" ")),
    };
    let guest = Guest::boot(&hardware, &boot)?;
    cycle(&guest, rounds).with_context(|| {
        let exit = guest.vm.exit();
        format!("the guest's end: {exit:?}; its console:\n{}", guest.transcript.text())
    })
}

fn cycle(guest: &Guest, rounds: u32) -> Result<()> {
    let kernel = guest.kernel(PATIENCE)?;
    for work in ["VMM-WORK-BEGIN forks:", "VMM-WORK-BEGIN proc-read:", "VMM-READY"] {
        guest.wait_for(work, PATIENCE)?;
    }
    let machine: &dyn Machine = &guest.vm;
    let region = MappedRegion::new(machine, &kernel)?;
    let before = text(machine, &kernel)?;

    let mut total = 0;
    for round in 1..=rounds {
        let selection = Selection::new(&kernel, machine, &Filter::default())?;
        let (mut session, armed) = Session::arm(machine, &kernel, &region, &selection)?;
        let mut check = Check::default();
        check.begin(&Beginning::of(&kernel, Tracer::Function, machine.vcpus(), false))?;
        let until = Instant::now() + ARMED;
        while Instant::now() < until {
            session.drain(&mut check)?;
        }
        session.disarm()?;
        let (summary, result) = session.finish(&mut check);
        result?;
        let after = text(machine, &kernel)?;
        let differences = before.iter().zip(&after).filter(|(a, b)| a != b).count();
        println!(
            "round {round} functions={} events={} lost={} late={} backwards={} stop_us={} \
             verify_us={} write_us={} differences={differences}",
            armed.functions,
            summary.events,
            summary.dropped(),
            summary.late,
            check.backwards,
            armed.stop.total().as_micros(),
            armed.verify.as_micros(),
            armed.write.as_micros(),
        );
        ensure!(differences == 0, "the text differs in {differences} bytes");
        ensure!(summary.corrupt.is_empty(), "{:?}", summary.corrupt);
        ensure!(check.backwards == 0, "a CPU's time went backwards");
        let reverted = summary.reverted.context("nothing was reverted")?;
        ensure!(reverted.restored == armed.functions, "{reverted:?}");
        ensure!(guest.vm.exit().is_none(), "the guest's work ended before the rounds did");
        total += summary.events;
    }
    ensure!(total > 0, "nothing was recorded");

    guest.vm.console_input().write_all(b"\n").context("the guest's console")?;
    let exit = guest.vm.wait(Some(PATIENCE)).context("the guest did not end")?;
    ensure!(matches!(exit, GuestExit::PowerOff), "the guest ended with {exit:?}");
    let text = guest.transcript.text();
    for work in ["forks:", "proc-read:"] {
        let end = format!("VMM-WORK-END {work}");
        ensure!(text.contains(&end), "no {end} among what the guest said:\n{text}");
    }
    ensure!(!text.contains("VMM-WORK-FAILED"), "work failed:\n{text}");
    let complaints = guest.transcript.complaints();
    ensure!(complaints.is_empty(), "the guest complains: {complaints:#?}");
    println!("all {rounds} rounds good, {total} events");
    Ok(())
}
