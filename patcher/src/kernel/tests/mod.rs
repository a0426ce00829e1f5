//! The whole of this module on synthetic guests: sound ones of every kind, and hostile ones.

mod hostile;
mod locate;
mod mapping;
mod pads;
mod probes;
mod tables;
mod tables_made;
mod tasks;

use crate::addr::Gva;
use crate::synthetic::{Blueprint, Guest, TableOrder};

/// Every kind of guest: each order of tables, four and five levels, isolated and not.
fn every_kind() -> Vec<Blueprint> {
    let mut kinds = Vec::new();
    for order in TableOrder::ALL {
        for (five_levels, isolated) in [(false, false), (false, true), (true, false), (true, true)]
        {
            kinds.push(Blueprint { order, five_levels, isolated, ..Blueprint::default() });
        }
    }
    kinds
}

fn guest() -> Guest {
    Guest::new(&Blueprint::default())
}

/// The `call` of a pad at `from` to `to`.
fn call(from: Gva, to: Gva) -> [u8; 5] {
    let mut bytes = [0xe8; 5];
    bytes[1..].copy_from_slice(&(to.0.wrapping_sub(from.0 + 5) as u32).to_le_bytes());
    bytes
}
