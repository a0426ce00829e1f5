//! Arms functions of a stock guest that does what no guest should.
//!
//! ```text
//! hostile KERNEL INITRD
//! ```
//!
//! 1. A pad holds unknown bytes by the time of the stop: nothing may be written anywhere.
//! 2. The guest writes random words all over its rings while they are drained: no crash, no hang, the
//!    session says that the rings are corrupt, and the functions are put back.
//!
//! Needs a KVM that runs stock kernels.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use patcher::hook::HookError;
use patcher::kernel::{Kernel, MappedRegion};
use patcher::machine::{Machine, TextWrite};
use patcher::patch::VerifyError;
use patcher::region::Part;
use patcher::trace::filter::{Filter, Glob};
use patcher::trace::session::{ArmError, Selection, Session};
use patcher::trace::sink::FtraceText;
use tests::guest::{Guest, text};
use vmm::devices::Console;
use vmm::kvm::{Hardware, LinuxBoot, Vm};

/// How long to wait for the guest at any point: it may run under two layers of emulation.
const PATIENCE: Duration = Duration::from_secs(240);

/// How long the guest scribbles, in seconds.
const SCRIBBLE: u64 = 5;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kernel, initrd] = &arguments[..] else {
        bail!("usage: hostile KERNEL INITRD");
    };
    let hardware = Hardware { cpus: 2, ..Hardware::default() };
    let mut boot = LinuxBoot {
        kernel: kernel.into(),
        initrd: Some(initrd.into()),
        cmdline: "quiet vmm.after=stay".into(),
    };
    // Where the rings are is the same in every machine of this hardware. No kernel is told; a hostile
    // guest finds out.
    let machine = Vm::linux(&hardware, &boot, Console::new(Box::new(std::io::sink()))?)?;
    let (rings, len) = (machine.region(Part::Rings).gpa, machine.region(Part::Rings).memory.len());
    drop(machine);
    boot.cmdline = format!(
        "quiet vmm.work=wait-console-line,\
         scribble:{rings}:{len}:{SCRIBBLE}@0+proc-read:/proc/version:1000000@1 vmm.after=stay"
    );

    let guest = Guest::boot(&hardware, &boot)?;
    let kernel = guest.kernel(PATIENCE)?;
    guest.wait_for("VMM-READY", PATIENCE)?;
    let machine: &dyn Machine = &guest.vm;
    let region = MappedRegion::new(machine, &kernel)?;
    unknown_bytes(machine, &kernel, &region)?;
    spoilt_rings(&guest, &kernel, &region)?;
    println!("the guest was held at bay");
    Ok(())
}

fn unknown_bytes(machine: &dyn Machine, kernel: &Kernel, region: &MappedRegion) -> Result<()> {
    // A function that nobody calls before its pad is put right again.
    let filter = Filter { only: vec![Glob::new("vfs_*")], except: Vec::new() };
    let selection = Selection::new(kernel, machine, &filter)?;
    let victim = selection.sites.iter().find(|site| &*site.name == "vfs_fallocate");
    let victim = victim.context("vfs_fallocate has no pad")?;
    let write = |bytes: &[u8]| -> Result<()> {
        let mut stopped = machine.stop()?;
        stopped.write_text(&[TextWrite { at: victim.gpa, bytes }])?;
        stopped.resume()?;
        Ok(())
    };
    write(&[0x0f, 0x0b])?;
    let before = text(machine, kernel)?;
    let error = match Session::arm(machine, kernel, region, &selection) {
        Ok(_) => bail!("unknown bytes were overwritten"),
        Err(error) => error,
    };
    println!("refused: {error}");
    let ArmError::Hook(HookError::Verify(mismatch)) = &error else {
        bail!("refused for another reason: {error}");
    };
    let VerifyError::Mismatch { function, at, found, expected } = mismatch else {
        bail!("refused for another reason: {error}");
    };
    ensure!(&**function == "vfs_fallocate" && *at == victim.at);
    ensure!(*expected == victim.original && found[..2] == [0x0f, 0x0b]);
    ensure!(text(machine, kernel)? == before, "something was written");

    // What is unknown when the pads are listed is never chosen.
    let selection = Selection::new(kernel, machine, &filter)?;
    ensure!(selection.sites.iter().all(|site| &*site.name != "vfs_fallocate"));
    let refused = selection.refused.iter().find(|refused| &*refused.name == "vfs_fallocate");
    println!("refused: vfs_fallocate: {}", refused.context("it is not refused")?.why);
    write(&victim.original)
}

fn spoilt_rings(guest: &Guest, kernel: &Kernel, region: &MappedRegion) -> Result<()> {
    let machine: &dyn Machine = &guest.vm;
    let before = text(machine, kernel)?;
    let selection = Selection::new(kernel, machine, &Filter::default())?;
    let (mut session, _) = Session::arm(machine, kernel, region, &selection)?;
    let mut sink = FtraceText::stream(std::io::sink());
    let typed = guest.vm.console_input().try_send(b"go\n")?;
    ensure!(typed == 3, "the guest's console takes no input");
    guest.wait_for("VMM-WORK-BEGIN scribble", PATIENCE)?;
    let until = Instant::now() + Duration::from_secs(2 * SCRIBBLE);
    while Instant::now() < until {
        session.drain(&mut sink)?;
    }
    session.disarm()?;
    let (summary, result) = session.finish(&mut sink);
    result?;
    for corrupt in &summary.corrupt {
        println!("said: {corrupt}");
    }
    println!("{} events, {} lost", summary.events, summary.dropped());
    ensure!(!guest.transcript.text().contains("VMM-WORK-FAILED"), "{}", guest.transcript.text());
    ensure!(!summary.corrupt.is_empty(), "random words passed for records");
    ensure!(text(machine, kernel)? == before, "the text is not what it was");
    ensure!(guest.vm.exit().is_none(), "the guest ended");
    Ok(())
}
