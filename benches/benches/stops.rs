//! What stopping a stock guest costs, in the nested lab: see `tests/src/bin/stops.rs`, which can be
//! run by hand where KVM runs stock kernels.
//!
//! Everything is emulated there, so that only the ratios mean anything: the lab's writes to kernel
//! text make the emulator throw its translations of that text away.

use guest_images::Series;
use tests::lab::{INITRD, VmmLab, guest_kernel, program};

fn main() {
    let program = program("tests", "stops");

    let program = program.to_str().expect("a path of ASCII");
    let mut lab = VmmLab::boot(&[Series::V6_1], None, &[program]);
    let kernel = guest_kernel(Series::V6_1);
    print!("{}", lab.succeed(&format!("stops {kernel} {INITRD} 20")).stdout_text());
}
