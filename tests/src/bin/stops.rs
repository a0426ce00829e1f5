//! What stopping a stock guest costs, phase by phase: bare, and with every function armed in it.
//!
//! ```text
//! stops KERNEL INITRD ROUNDS
//! ```
//!
//! Needs a KVM that runs stock kernels. Prints a table; both kinds of stop alternate in one run, so
//! that they meet the same noise.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use patcher::kernel::MappedRegion;
use patcher::machine::{Machine, StopTimes};
use patcher::trace::filter::Filter;
use patcher::trace::session::{Selection, Session};
use patcher::trace::sink::FtraceText;
use tests::guest::Guest;
use vmm::kvm::{Hardware, LinuxBoot};

/// How long to wait for the guest at any point: it may run under two layers of emulation.
const PATIENCE: Duration = Duration::from_secs(240);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kernel, initrd, rounds] = &arguments[..] else {
        bail!("usage: stops KERNEL INITRD ROUNDS");
    };
    let rounds: usize = rounds.parse().context("ROUNDS is not a number")?;
    let hardware = Hardware { cpus: 2, ..Hardware::default() };
    let boot = LinuxBoot {
        kernel: kernel.into(),
        initrd: Some(initrd.into()),
        cmdline: "quiet vmm.work=proc-read:/proc/version:100000000@0+\
                  proc-read:/proc/uptime:100000000@1"
            .into(),
    };
    let guest = Guest::boot(&hardware, &boot)?;
    let kernel = guest.kernel(PATIENCE)?;
    guest.wait_for("VMM-WORK-BEGIN", PATIENCE)?;
    let machine: &dyn Machine = &guest.vm;
    let region = MappedRegion::new(machine, &kernel)?;
    let selection = Selection::new(&kernel, machine, &Filter::default())?;

    let (mut bare, mut arming) = (Vec::new(), Vec::new());
    let (mut verify, mut write) = (Vec::new(), Vec::new());
    let mut sink = FtraceText::stream(std::io::sink());
    for _ in 0..rounds {
        bare.push(machine.stop()?.resume()?);
        let (mut session, armed) = Session::arm(machine, &kernel, &region, &selection)?;
        arming.push(armed.stop);
        verify.push(armed.verify);
        write.push(armed.write);
        session.disarm()?;
        session.finish(&mut sink).1?;
    }
    println!("{} functions, 2 busy vCPUs, {rounds} rounds; microseconds", selection.sites.len());
    println!("{:<44} {:>10} {:>10} {:>10}", "", "p50", "p90", "max");
    row("bare stop and resume", phases(&bare, StopTimes::total));
    row("arming stop", phases(&arming, StopTimes::total));
    row("  first kick until all vCPUs stand", phases(&arming, |times| times.quiesce));
    row("  compare", verify);
    row("  write and read back", write);
    row("  resume until all are let go", phases(&arming, |times| times.resume));
    Ok(())
}

fn phases(stops: &[StopTimes], phase: impl Fn(&StopTimes) -> Duration) -> Vec<Duration> {
    stops.iter().map(phase).collect()
}

fn row(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100].as_micros();
    println!("{name:<44} {:>10} {:>10} {:>10}", at(50), at(90), at(100));
}
