//! The registers by which a guest ends itself: ACPI's sleep and reset registers, and the reset
//! line of the keyboard controller.

/// ACPI sleep control register (FADT: SLEEP_CONTROL_REG).
pub(crate) const SLEEP_CONTROL_PORT: u16 = 0x600;
/// ACPI sleep status register (FADT: SLEEP_STATUS_REG); reads as 0, no wake event.
pub(crate) const SLEEP_STATUS_PORT: u16 = 0x601;
/// ACPI reset register (FADT: RESET_REG).
pub(crate) const RESET_PORT: u16 = 0x602;
/// The value that the reset register wants (FADT: RESET_VALUE).
pub(crate) const RESET_VALUE: u8 = 1;
/// The sleep type that the DSDT's `\_S5_` gives for soft-off.
pub(crate) const S5_SLEEP_TYPE: u8 = 5;

/// First and last I/O port of the keyboard controller.
pub(crate) const I8042_PORTS: std::ops::RangeInclusive<u16> = 0x60..=0x64;

/// SLEEP_CONTROL: sleep type in bits 2 to 4, sleep enable in bit 5 (ACPI 6.5, 4.8.3.7).
const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u8 = 2;

/// What a guest asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PowerRequest {
    PowerOff,
    Reset,
}

/// What writing `value` to the ACPI register at `port` asks for.
pub(crate) fn acpi_write(port: u16, value: u8) -> Option<PowerRequest> {
    match (port, value) {
        (SLEEP_CONTROL_PORT, value)
            if value & SLEEP_ENABLE != 0 && (value >> SLEEP_TYPE_SHIFT) & 7 == S5_SLEEP_TYPE =>
        {
            Some(PowerRequest::PowerOff)
        }
        (RESET_PORT, RESET_VALUE) => Some(PowerRequest::Reset),
        _ => None,
    }
}
