//! COM1, a 16550A by vm-superio.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_manager::{EventOps, Events, MutEventSubscriber};
use vm_superio::serial::SerialEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

use super::console::{Console, ConsoleInput, ConsoleOutput, InputQueue, wake_event};

/// First I/O port of COM1, by PC convention.
pub(crate) const COM1_PORT: u16 = 0x3f8;
/// How many ports a 16550A has.
pub(crate) const COM1_PORTS: u16 = 8;
/// The interrupt line of COM1, by PC convention.
pub(crate) const COM1_GSI: u32 = 4;

/// Offset of the transmit holding register (divisor latch while LCR's DLAB is set).
const DATA: u8 = 0;
/// Offset of the modem control register, whose bit 4 is the loopback mode.
const MODEM_CONTROL: u8 = 4;

/// The first serial port.
pub(crate) struct Com1 {
    uart: Mutex<Serial<IrqLine, Wake, ConsoleOutput>>,
    output: ConsoleOutput,
    input: Arc<InputQueue>,
    irq: EventFd,
}

impl Com1 {
    pub(crate) fn new(console: &Console) -> io::Result<Self> {
        let irq = wake_event()?;
        let ConsoleInput(input) = console.input();
        let uart = Serial::with_events(
            IrqLine(irq.try_clone()?),
            Wake(Arc::clone(&input)),
            console.output(),
        );
        Ok(Self { uart: Mutex::new(uart), output: console.output(), input, irq })
    }

    /// Written to when the UART raises its interrupt, an edge.
    pub(crate) fn irq(&self) -> &EventFd {
        &self.irq
    }

    pub(crate) fn read(&self, offset: u8) -> u8 {
        self.uart().read(offset)
    }

    /// `is_wanted` tells whether the vCPU that writes has to be elsewhere.
    pub(crate) fn write(&self, offset: u8, value: u8, is_wanted: impl Fn() -> bool) {
        if offset == DATA {
            // Not under the UART's lock: another vCPU that needs it must stay stoppable.
            self.output.wait_for_room(is_wanted);
        }
        // The console's queue takes every byte and an interrupt line that is asserted already
        // needs no more edges, so there is no error to handle.
        let _ = self.uart().write(offset, value);
        if offset == MODEM_CONTROL {
            // The UART takes no input while it is looped back; this may have ended.
            let _ = self.input.wake.write(1);
        }
    }

    fn uart(&self) -> MutexGuard<'_, Serial<IrqLine, Wake, ConsoleOutput>> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the UART as much input as it takes.
    fn pump(&self) {
        self.input.feed(|bytes| {
            let mut uart = self.uart();
            let count = bytes.len().min(uart.fifo_capacity());
            uart.enqueue_raw_bytes(&bytes[..count]).unwrap_or(0)
        });
    }
}

/// The UART's interrupt line.
struct IrqLine(EventFd);

impl Trigger for IrqLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Asks for more input when the UART has none left.
struct Wake(Arc<InputQueue>);

impl SerialEvents for Wake {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        let _ = self.0.wake.write(1);
    }
}

/// Moves what is typed into the UART, on the event thread.
pub(crate) struct InputPump(pub(crate) Arc<super::Ports>);

impl MutEventSubscriber for InputPump {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // The descriptor is new and ours, and the manager has just been made.
        let wake = &self.0.com1.input.wake;
        ops.add(Events::new(wake, EventSet::IN)).expect("an eventfd can be polled");
    }

    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        // Emptied first: what is typed from here on wakes us again.
        let _ = self.0.com1.input.wake.read();
        self.0.com1.pump();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const LINE_STATUS: u8 = 5;
    const LOOPBACK: u8 = 0x10;

    fn read_all(com1: &Com1) -> Vec<u8> {
        let mut bytes = Vec::new();
        while com1.read(LINE_STATUS) & 1 == 1 {
            bytes.push(com1.read(DATA));
        }
        bytes
    }

    #[test]
    fn input_longer_than_the_fifo_arrives_whole_and_in_order() {
        let console = Console::new(Box::new(io::sink())).unwrap();
        let com1 = Com1::new(&console).unwrap();
        let typed: Vec<u8> = (0..=255).collect();
        console.input().write_all(&typed).unwrap();
        let mut arrived = Vec::new();
        while com1.input.wake.read().is_ok() {
            com1.pump();
            arrived.extend(read_all(&com1));
        }
        assert_eq!(arrived, typed);
    }

    #[test]
    fn input_that_comes_during_loopback_arrives_afterwards() {
        let console = Console::new(Box::new(io::sink())).unwrap();
        let com1 = Com1::new(&console).unwrap();
        com1.write(MODEM_CONTROL, LOOPBACK, || false);
        console.input().write_all(b"abc").unwrap();
        com1.input.wake.read().unwrap();
        com1.pump();
        assert_eq!(read_all(&com1), b"");
        com1.write(MODEM_CONTROL, 0, || false);
        com1.input.wake.read().expect("leaving loopback asks for input");
        com1.pump();
        assert_eq!(read_all(&com1), b"abc");
    }
}
