//! Boots a stock kernel with its console on this terminal, and stops it many times meanwhile.
//!
//! ```text
//! boot KERNEL INITRD CPUS MEMORY_MIB STOPS [CMDLINE]
//! ```

use std::process::ExitCode;
use std::time::{Duration, Instant};

use patcher::machine::Machine;
use vmm::devices::Console;
use vmm::kvm::{GuestExit, Hardware, La57, LinuxBoot, Vm};

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = || args.next().ok_or("boot KERNEL INITRD CPUS MEMORY_MIB STOPS [CMDLINE]");
    let boot =
        LinuxBoot { kernel: next()?.into(), initrd: Some(next()?.into()), cmdline: String::new() };
    let hardware = Hardware {
        cpus: next()?.parse()?,
        memory: next()?.parse::<u64>()? << 20,
        la57: if std::env::var_os("NO_LA57").is_some() { La57::Off } else { La57::Auto },
        ..Hardware::default()
    };
    let stops: usize = next()?.parse()?;
    let boot = LinuxBoot { cmdline: args.collect::<Vec<_>>().join(" "), ..boot };

    let begun = Instant::now();
    let vm = Vm::linux(&hardware, &boot, Console::new(Box::new(std::io::stdout()))?)?;
    eprintln!("[boot] built in {:?}, clock {} Hz", begun.elapsed(), vm.clock_hz());
    vm.start();
    let mut input = vm.console_input();
    std::thread::spawn(move || std::io::copy(&mut std::io::stdin(), &mut input));

    let mut total = Vec::new();
    while total.len() < stops && vm.exit().is_none() {
        std::thread::sleep(Duration::from_millis(20));
        match vm.stop().and_then(|stopped| stopped.resume()) {
            Ok(times) => total.push(times.total()),
            Err(error) => eprintln!("[boot] stop {}: {error}", total.len()),
        }
    }
    total.sort();
    if let (Some(max), Some(median)) = (total.last(), total.get(total.len() / 2)) {
        eprintln!("[boot] {} stops, median {median:?}, longest {max:?}", total.len());
    }
    let exit = vm.wait(None).ok_or("the guest has no end")?;
    eprintln!("[boot] {exit}; code writes {}; after {:?}", vm.code_writes(), begun.elapsed());
    Ok(match exit {
        GuestExit::PowerOff => ExitCode::SUCCESS,
        GuestExit::Reboot => ExitCode::from(3),
        _ => ExitCode::FAILURE,
    })
}
