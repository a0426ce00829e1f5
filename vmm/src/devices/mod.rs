//! What a guest finds on its I/O ports: a serial console, the registers that end it, and nothing.

mod console;
mod ports;
pub(crate) mod power;
mod serial;

pub(crate) use console::ConsoleEnds;
pub use console::{Console, ConsoleInput};
pub use ports::PortWrite;
pub(crate) use ports::{PortHandler, Ports};
pub(crate) use power::PowerRequest;
pub(crate) use serial::{COM1_GSI, COM1_PORT, COM1_PORTS, InputPump};
