//! A machine: built, started, waited for, ended.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Kvm, VmFd};
use patcher::region::Part;
use vm_memory::GuestMemoryError;
use vmm_sys_util::epoll::EventSet;

use super::bare::{self, BareGuest};
use super::boot::{BootError, LinuxBoot, Plan};
use super::config::{Hardware, HardwareError};
use super::cpuid::Model;
use super::crew::Crew;
use super::kick::Kick;
use super::layout::{self, KVM_IDENTITY_MAP, KVM_TSS};
use super::memory::Memory;
use super::probe::{self, KvmKind};
use super::shared::Shared;
use super::state::{self, Entry};
use super::vcpu::Vcpu;
use crate::devices::{COM1_GSI, Console, ConsoleInput, InputPump, PortHandler, Ports};
use crate::exit::GuestExit;
use crate::turn::Turn;

/// How long the end of a guest waits for a slow sink to take the last of its output.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A machine with its guest.
///
/// It is built with its vCPUs standing; [`start`](Self::start) lets them go. Dropping it kills the
/// guest.
pub struct Vm {
    pub(super) shared: Arc<Shared>,
    pub(super) turn: Turn,
    pub(super) stop_deadline: Duration,
    pub(super) clock_hz: u64,
    console: Console,
    threads: Vec<JoinHandle<()>>,
    /// Kept open: the interrupt line of COM1 is registered with it.
    _fd: VmFd,
}

/// A machine could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// Its description makes no sense, or is too much for this host.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// The kernel cannot be booted as asked.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// This host has no KVM that can run the guest.
    #[error("{0}")]
    Kvm(KvmKind),
    /// The bare guest does not fit into its memory.
    #[error("the bare guest does not fit into its memory: {source}; give it more")]
    Bare {
        /// What did not fit.
        source: GuestMemoryError,
    },
    /// KVM or the host refused a step.
    #[error("the machine could not be set up, the host refused to {step}: {source}")]
    SetUp {
        /// What was to be done.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// Names the step that fails.
fn step<E: Into<io::Error>>(step: &'static str) -> impl Fn(E) -> VmError {
    move |error| VmError::SetUp { step, source: error.into() }
}

impl Vm {
    /// A machine that boots a stock kernel.
    ///
    /// # Errors
    /// Anything that `boot` or `hardware` ask for and cannot have, before the host is asked for
    /// anything; then a KVM that cannot run stock kernels, unless `hardware` insists; then what the
    /// host refuses.
    pub fn linux(hardware: &Hardware, boot: &LinuxBoot, console: Console) -> Result<Self, VmError> {
        hardware.check()?;
        let plan = Plan::new(boot, hardware.memory, hardware.cpus)?;
        let kvm = match probe::open(&hardware.device) {
            Ok((kvm, KvmKind::Hardware(_))) => kvm,
            Ok((kvm, KvmKind::Emulating { .. })) if hardware.emulating => kvm,
            Ok((_, kind)) | Err(kind) => return Err(VmError::Kvm(kind)),
        };
        let load = |memory: &Memory| {
            // Real hardware has all processors but the first wait in the same state.
            Ok(vec![plan.load(memory.ram())?; hardware.cpus])
        };
        Self::build(&kvm, hardware, console, None, load)
    }

    /// A machine that runs a bare guest. Any KVM will do.
    ///
    /// # Errors
    /// As [`linux`](Self::linux).
    pub fn bare(
        hardware: &Hardware,
        mut guest: BareGuest,
        console: Console,
    ) -> Result<Self, VmError> {
        hardware.check()?;
        if hardware.memory < bare::LEAST_MEMORY {
            return Err(HardwareError::Memory { found: hardware.memory }.into());
        }
        let (kvm, _) = probe::open(&hardware.device).map_err(VmError::Kvm)?;
        let handler = guest.take_handler();
        let load = |memory: &Memory| {
            guest
                .load(memory.ram(), hardware.memory, memory.region(), hardware.cpus)
                .map_err(|source| VmError::Bare { source })
        };
        Self::build(&kvm, hardware, console, handler, load)
    }

    fn build(
        kvm: &Kvm,
        hardware: &Hardware,
        console: Console,
        port_writes: Option<PortHandler>,
        load: impl FnOnce(&Memory) -> Result<Vec<Entry>, VmError>,
    ) -> Result<Self, VmError> {
        let most = kvm.get_max_vcpus();
        if hardware.cpus > most {
            return Err(HardwareError::Cpus { found: hardware.cpus, most }.into());
        }
        let model = Model::new(kvm, hardware.cpus, hardware.la57).map_err(step("tell its CPU"))?;
        check_address_space(hardware, model.physical_bits())?;
        let fd = create_vm(kvm).map_err(step("create a virtual machine"))?;

        let memory = Memory::new(hardware.memory, hardware.ring_bytes())
            .map_err(step("map the guest's memory"))?;
        memory.install(&fd).map_err(step("give the guest its memory"))?;
        let entries = load(&memory)?;

        let mut fds = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            let vcpu = fd.create_vcpu(index as u64).map_err(step("create a vCPU"))?;
            // The CPU first: which MSRs there are depends on it.
            let cpuid = model.of(index).map_err(step("describe a vCPU's CPU"))?;
            vcpu.set_cpuid2(&cpuid).map_err(step("set a vCPU's CPUID"))?;
            state::set(&vcpu, entry).map_err(step("set a vCPU's registers"))?;
            fds.push(vcpu);
        }
        let clock_khz = fds[0].get_tsc_khz().map_err(step("tell the guest's clock frequency"))?;
        let kicks = fds.iter().map(|vcpu| Kick::new(vcpu, fd.run_size()));
        let kicks = kicks.collect::<io::Result<_>>().map_err(step("map a vCPU's page"))?;

        let ports = Ports::new(&console, port_writes).map_err(step("create events"))?;
        fd.register_irqfd(ports.com1_irq(), COM1_GSI).map_err(step("connect COM1's interrupt"))?;
        let shared = Shared::new(Crew::new(kicks), memory, ports).map_err(step("create events"))?;
        let shared = Arc::new(shared);
        let mut vm = Self {
            shared: Arc::clone(&shared),
            turn: Turn::default(),
            stop_deadline: hardware.stop_deadline,
            clock_hz: u64::from(clock_khz) * 1000,
            console,
            threads: Vec::new(),
            _fd: fd,
        };
        vm.spawn(fds).map_err(step("start the guest's threads"))?;
        Ok(vm)
    }

    fn spawn(&mut self, fds: Vec<kvm_ioctls::VcpuFd>) -> io::Result<()> {
        let events = event_loop(&self.shared)?;
        self.threads.push(thread::Builder::new().name("events".into()).spawn(events)?);
        let vcpus = fds.into_iter().enumerate();
        let vcpus = vcpus.map(|(index, fd)| Vcpu::new(index, fd, Arc::clone(&self.shared)));
        for vcpu in vcpus.collect::<io::Result<Vec<_>>>()? {
            let name = format!("vcpu{}", vcpu.index);
            self.threads.push(thread::Builder::new().name(name).spawn(move || vcpu.run())?);
        }
        Ok(())
    }

    /// Lets the vCPUs enter the guest. Once is enough, more does nothing.
    pub fn start(&self) {
        self.shared.crew.start();
    }

    /// How the guest ended, if it has. From then on nothing changes its memory.
    #[must_use]
    pub fn exit(&self) -> Option<GuestExit> {
        self.shared.exit()
    }

    /// Waits for the guest's end, at most `longest`, and for its last output to reach the
    /// console's sink.
    #[must_use]
    pub fn wait(&self, longest: Option<Duration>) -> Option<GuestExit> {
        let exit = self.shared.wait(longest)?;
        self.console.close_input();
        // A sink that is stuck does not keep the guest's end from being known.
        let _ = self.console.drain(LAST_WORDS);
        Some(exit)
    }

    /// Ends the guest, wherever it is. Nothing happens if it has ended.
    pub fn kill(&self) {
        self.shared.end(GuestExit::Killed);
    }

    /// Where to type.
    #[must_use]
    pub fn console_input(&self) -> ConsoleInput {
        self.console.input()
    }

    /// The console.
    #[must_use]
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// How many times the guest has written to those parts of the region that it may only read. None
    /// of it got there.
    #[must_use]
    pub fn refused_writes(&self) -> u64 {
        self.shared.refused_writes.load(Ordering::Relaxed)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.kill();
        self.console.close_input();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so and has ended the guest.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vm").field("exit", &self.exit()).finish_non_exhaustive()
    }
}

/// Creates a VM with the interrupt controllers and the timer of a PC.
fn create_vm(kvm: &Kvm) -> io::Result<VmFd> {
    let fd = kvm.create_vm()?;
    fd.set_identity_map_address(KVM_IDENTITY_MAP)?;
    fd.set_tss_address(KVM_TSS)?;
    fd.create_irq_chip()?;
    // Without the dummy speaker every access to port 0x61 would exit.
    fd.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() })?;
    Ok(fd)
}

/// Refuses what would not fit below 2^`bits`; there are never more than 52.
fn check_address_space(hardware: &Hardware, bits: u32) -> Result<(), HardwareError> {
    let memory = hardware.memory;
    let end = 1u64 << bits.min(52);
    let region = Part::Rings.offset() + hardware.ring_bytes();
    let fits = memory < end && layout::region(memory).0 + region <= end;
    if fits { Ok(()) } else { Err(HardwareError::AddressSpace { memory, bits }) }
}

/// Makes the loop that feeds the UART with what is typed, until the guest ends.
fn event_loop(shared: &Arc<Shared>) -> io::Result<impl FnMut() + Send + use<>> {
    let failed = |error: event_manager::Error| io::Error::other(format!("{error:?}"));
    let mut manager: EventManager<Box<dyn MutEventSubscriber + Send>> =
        EventManager::new().map_err(failed)?;
    let over = Arc::new(AtomicBool::new(false));
    manager.add_subscriber(Box::new(InputPump(Arc::clone(&shared.ports))));
    manager.add_subscriber(Box::new(EndWatch(Arc::clone(shared), Arc::clone(&over))));
    Ok(move || {
        // An error here is one of epoll's own on descriptors that stay open: none is left.
        while !over.load(Ordering::Relaxed) && manager.run().is_ok() {}
    })
}

/// Ends the event loop when the guest ends.
struct EndWatch(Arc<Shared>, Arc<AtomicBool>);

impl MutEventSubscriber for EndWatch {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let ended = &self.0.ended;
        ops.add(Events::new(ended, EventSet::IN)).expect("an eventfd can be polled");
    }

    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        self.1.store(true, Ordering::Relaxed);
    }
}
