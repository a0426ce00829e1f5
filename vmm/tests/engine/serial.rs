//! The serial console, both ways, with a bare guest at the other end.

use std::io::{self, Write};
use std::sync::mpsc;
use std::thread;

use vmm::devices::Console;
use vmm::kvm::{BareGuest, GuestExit, Vm};

use crate::toys::{PATIENCE, hardware};

/// Prints what is typed, until a zero byte comes; then powers off.
///
/// ```text
///  0  66 ba fd 03   mov $0x3fd, %dx
///  4  ec            in %dx, %al
///  5  a8 01         test $1, %al
///  7  74 fb         je 4
///  9  66 ba f8 03   mov $0x3f8, %dx
/// 13  ec            in %dx, %al
/// 14  ee            out %al, %dx
/// 15  84 c0         test %al, %al
/// 17  75 ed         jne 0
/// 19  66 ba 00 06   mov $0x600, %dx
/// 23  b0 34         mov $0x34, %al
/// 25  ee            out %al, %dx
/// 26  eb fe         jmp .
/// ```
const ECHO: &[u8] = &[
    0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xfb, 0x66, 0xba, 0xf8, 0x03, 0xec, 0xee, 0x84,
    0xc0, 0x75, 0xed, 0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe,
];

/// Sends on what is printed.
struct Printed(mpsc::Sender<Vec<u8>>);

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes.to_vec()).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn everything_typed_is_read_and_everything_printed_arrives_before_the_end_is_known() {
    let (sender, printed) = mpsc::channel();
    let console = Console::new(Box::new(Printed(sender))).unwrap();
    let vm = Vm::bare(&hardware(1), BareGuest::new(ECHO), console).unwrap();
    vm.start();
    // Much more than the queue and the UART's FIFO hold.
    let mut typed: Vec<u8> = (1..=255).cycle().take(6000).collect();
    typed.push(0);
    let mut input = vm.console_input();
    let typist = {
        let typed = typed.clone();
        thread::spawn(move || input.write_all(&typed))
    };
    assert_eq!(vm.wait(Some(PATIENCE)), Some(GuestExit::PowerOff));
    typist.join().unwrap().unwrap();
    assert_eq!(printed.try_iter().flatten().collect::<Vec<_>>(), typed);
    assert_eq!(vm.console().lost(), 0);

    let error = vm.console_input().write(b"x").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe, "nobody reads any more");
}
