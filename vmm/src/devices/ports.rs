//! Which device answers which I/O port.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vm_superio::{I8042Device, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::console::Console;
use super::power::{self, I8042_PORTS, PowerRequest, SLEEP_STATUS_PORT};
use super::serial::{COM1_PORT, COM1_PORTS, Com1};

/// A guest's write to an I/O port that no device answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortWrite<'a> {
    /// The vCPU that wrote.
    pub vcpu: usize,
    /// The port.
    pub port: u16,
    /// What it wrote, little-endian.
    pub data: &'a [u8],
}

/// Called on the vCPU's thread for each [`PortWrite`]; the vCPU waits until it returns.
pub(crate) type PortHandler = Box<dyn Fn(PortWrite<'_>) + Send + Sync>;

/// All devices on I/O ports.
pub(crate) struct Ports {
    pub(super) com1: Com1,
    i8042: Mutex<I8042Device<ResetLine>>,
    reset: Arc<AtomicBool>,
    unclaimed: Option<PortHandler>,
}

impl Ports {
    pub(crate) fn new(console: &Console, unclaimed: Option<PortHandler>) -> io::Result<Self> {
        let reset = Arc::new(AtomicBool::new(false));
        let i8042 = I8042Device::new(ResetLine(Arc::clone(&reset)));
        Ok(Self { com1: Com1::new(console)?, i8042: Mutex::new(i8042), reset, unclaimed })
    }

    /// Written to when COM1 raises its interrupt.
    pub(crate) fn com1_irq(&self) -> &EventFd {
        self.com1.irq()
    }

    /// Answers a read. KVM gives the bytes of a repeated string instruction at once, so each byte
    /// is one read of the same port; nothing here has registers wider than a byte.
    pub(crate) fn read(&self, port: u16, data: &mut [u8]) {
        data.fill_with(|| self.read_byte(port));
    }

    fn read_byte(&self, port: u16) -> u8 {
        match port {
            COM1_PORT.. if port < COM1_PORT + COM1_PORTS => {
                self.com1.read((port - COM1_PORT) as u8)
            }
            SLEEP_STATUS_PORT => 0,
            _ if I8042_PORTS.contains(&port) => {
                let mut i8042 = self.i8042.lock().unwrap_or_else(PoisonError::into_inner);
                i8042.read((port - I8042_PORTS.start()) as u8)
            }
            // A bus without a device floats high.
            _ => 0xff,
        }
    }

    /// Takes a write by `vcpu`, and tells what it asks for if it asks for the guest's end.
    /// `is_wanted` tells whether that vCPU has to be elsewhere.
    pub(crate) fn write(
        &self,
        vcpu: usize,
        port: u16,
        data: &[u8],
        is_wanted: impl Fn() -> bool,
    ) -> Option<PowerRequest> {
        match port {
            COM1_PORT.. if port < COM1_PORT + COM1_PORTS => {
                for &byte in data {
                    self.com1.write((port - COM1_PORT) as u8, byte, &is_wanted);
                }
                None
            }
            _ if I8042_PORTS.contains(&port) => {
                let mut i8042 = self.i8042.lock().unwrap_or_else(PoisonError::into_inner);
                for &byte in data {
                    let Ok(()) = i8042.write((port - I8042_PORTS.start()) as u8, byte);
                }
                self.reset.load(Ordering::Relaxed).then_some(PowerRequest::Reset)
            }
            _ => {
                let request = data.iter().find_map(|&byte| power::acpi_write(port, byte));
                if request.is_none()
                    && let Some(handler) = &self.unclaimed
                {
                    handler(PortWrite { vcpu, port, data });
                }
                request
            }
        }
    }
}

/// The keyboard controller's line to the CPU's reset pin.
struct ResetLine(Arc<AtomicBool>);

impl Trigger for ResetLine {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.store(true, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports() -> Ports {
        let console = Console::new(Box::new(io::sink())).unwrap();
        Ports::new(&console, None).unwrap()
    }

    #[test]
    fn the_registers_that_end_a_guest_do_so_and_others_do_not() {
        for (port, value, request) in [
            (0x600, 0x34, Some(PowerRequest::PowerOff)),
            (0x600, 0x14, None),
            (0x600, 0x20, None),
            (0x601, 0x34, None),
            (0x602, 1, Some(PowerRequest::Reset)),
            (0x602, 0, None),
            (0x64, 0xfe, Some(PowerRequest::Reset)),
            (0x64, 0xd1, None),
            (0x60, 0xfe, None),
            (0xcf9, 6, None),
        ] {
            let found = ports().write(0, port, &[value], || false);
            assert_eq!(found, request, "port {port:#x}, value {value:#x}");
        }
    }

    #[test]
    fn absent_devices_float_high_and_the_uart_says_that_it_can_send() {
        let ports = ports();
        let mut data = [0; 4];
        ports.read(0x70, &mut data);
        assert_eq!(data, [0xff; 4]);
        let mut status = [0];
        ports.read(COM1_PORT + 5, &mut status);
        assert_eq!(status, [0x60]);
        // Linux polls the keyboard controller's "input buffer full" before it uses its reset.
        ports.read(0x64, &mut status);
        assert_eq!(status[0] & 2, 0);
    }
}
