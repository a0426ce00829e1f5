//! The price of one traced call: a padded function that does nothing else is called natively, through the
//! very trampoline that guests get.
//!
//! ```text
//! cargo bench --bench price [-- --batches N] [--json FILE]
//! ```
//!
//! Kinds of calls alternate in batches of a few tens of microseconds, of which most are not interrupted; what
//! is told is the quickest tenth's slowest.

use std::collections::BTreeMap;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use benches::figures::{Figures, argument, publish};
use benches::native::{Cpu, NativeGuest, Pad};
use capstone::prelude::*;

/// Calls in a batch.
const CALLS: u32 = 5000;

/// Bytes of a ring: as much as a CPU's second-level cache has, so that it is in use as in a guest.
const RING: u64 = 1 << 20;

/// Nanoseconds of a call, in a batch.
fn batch(function: extern "C" fn()) -> f64 {
    let begun = Instant::now();
    for _ in 0..CALLS {
        black_box(function)();
    }
    begun.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}

/// What a call takes if nothing comes in between: of many batches, a quick one.
fn quick(batches: &mut [f64]) -> f64 {
    batches.sort_by(f64::total_cmp);
    batches[batches.len() / 10]
}

/// What every batch of one CPU takes while another one does the same.
fn two_at_once(guest: &NativeGuest, batches: usize) -> f64 {
    let function = guest.function(Pad::Armed);
    let here = AtomicUsize::new(0);
    let over = AtomicBool::new(false);
    let run = |cpu: Cpu| {
        cpu.enlist().expect("a GS base");
        here.fetch_add(1, Ordering::SeqCst);
        while here.load(Ordering::SeqCst) < 2 {
            spin_loop();
        }
        let mut times = Vec::with_capacity(batches);
        while times.len() < batches && !over.load(Ordering::Relaxed) {
            times.push(batch(function));
        }
        over.store(true, Ordering::Relaxed);
        times
    };
    let (run, first, second) = (&run, guest.cpu(0), guest.cpu(1));
    let mut times = thread::scope(|scope| {
        let both = [first, second].map(|cpu| scope.spawn(move || run(cpu)));
        both.map(|thread| thread.join().expect("no panic")).concat()
    });
    quick(&mut times)
}

/// Instructions that a record takes, with the call of the trampoline and the return from it. There is no
/// branch among them.
fn instructions(guest: &NativeGuest) -> usize {
    let decoder = Capstone::new().x86().mode(arch::x86::ArchMode::Mode64).build();
    let decoder = decoder.expect("a decoder of x86_64");
    let code = guest.trampoline();
    let decoded = decoder.disasm_all(&code, 0).expect("instructions");
    let names: Vec<_> = decoded.iter().map(|one| one.mnemonic().unwrap_or_default()).collect();
    let end = names.iter().position(|name| *name == "ret").expect("a return");
    assert!(!names[..end].iter().any(|name| name.starts_with('j') || *name == "call"));
    1 + end + 1
}

fn main() {
    let batches: usize =
        argument("--batches").map_or(4000, |count| count.parse().expect("a number"));
    let guest = |clock, task| NativeGuest::with_cpus(2, RING, clock, task).expect("low memory");
    let [without, with] = [false, true].map(|clock| guest(clock, true));
    let [less_without, less_with] = [false, true].map(|clock| guest(clock, false));
    // Either's CPU does: the number is all that is looked at.
    with.cpu(0).enlist().expect("a GS base");

    let kinds = [
        ("bare call", with.function(Pad::Bare)),
        ("pad disabled", with.function(Pad::Idle)),
        ("left out by name", with.function(Pad::Idle)),
        ("left out by task", with.function(Pad::TurnedAway)),
        ("record without clock", without.function(Pad::Armed)),
        ("record with clock", with.function(Pad::Armed)),
        ("no task, no clock", less_without.function(Pad::Armed)),
        ("no task, with clock", less_with.function(Pad::Armed)),
        ("counted, and recorded", with.function(Pad::Counted)),
        ("recorded, and its return", with.function(Pad::Returning)),
        ("measured", with.function(Pad::Measured)),
    ];
    let mut times: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for _ in 0..batches {
        for (name, function) in kinds {
            times.entry(name).or_default().push(batch(function));
        }
    }
    let mut figures = Figures::new("one call of a function that does nothing");
    let [less, more] = [&without, &with].map(instructions);
    for (name, _) in kinds {
        let note = match name {
            "pad disabled" => "1 instruction".to_owned(),
            // A glob decides what is armed: nothing is asked at a call.
            "left out by name" => "a pad that is left alone; 1 instruction".to_owned(),
            "left out by task" => "a gate asks for the task's number, and counts".to_owned(),
            "counted, and recorded" => "with clock".to_owned(),
            "recorded, and its return" => "two records with clock, and a slot".to_owned(),
            "measured" => "a slot, and the clock twice; nothing is recorded".to_owned(),
            "record without clock" => format!("{less} instructions"),
            "record with clock" => format!("{more} instructions, of which rdtsc takes most"),
            "no task, no clock" | "no task, with clock" => {
                "what is told of the task is zero".to_owned()
            }
            _ => String::new(),
        };
        figures.add(name, times.get_mut(name).map_or(f64::NAN, |times| quick(times)), note);
    }
    for (name, guest) in [("two CPUs without clock", &without), ("two CPUs with clock", &with)] {
        figures.add(name, two_at_once(guest, batches), "each, at once, into rings of their own");
    }
    publish(&[figures]).expect("figures that can be written");
}
