//! The memory that the hypervisor provides, in four parts with rights of their own.
//!
//! ```text
//! code       trampolines, 64-byte aligned, append-only            guest: read + execute
//!            from its middle on text of payloads
//!            at its end page tables that map the region, where the guest has none for it
//! constants  what payloads only read                              guest: read
//! data       what payloads read and write                         guest: read + write
//!            behind that, histograms and counters of calls; at its end the calls whose return is taken
//! rings      0       header of CPU 0: head (u64), rest unused     guest: read + write
//!            128     header of CPU 1, and so on up to 512 CPUs
//!            64 KiB  ring of CPU 0: a power of two of bytes
//!            ...     ring of CPU 1, and so on
//! ```
//!
//! A record is 32 bytes, in the guest's byte order:
//!
//! ```text
//! 0   u64  time, in ticks of the guest's time-stamp clock
//! 8   u32  low half of the address behind the site's instruction
//! 12  u32  low half of the caller's return address
//! 16  u32  high half of it, where the architecture records it; unused elsewhere
//! 20  u32  unused
//! 24  u64  sequence number: the record's index in this ring since the region was made, plus one
//! ```
//!
//! A kernel's image is smaller than 4 GiB, so that the low half of an address there tells the whole.
//! On x86_64 modules lie in the same 2 GiB.

use std::fmt;

use vm_memory::VolatileSlice;

use crate::addr::Gpa;

mod code;
mod counters;
mod histograms;
mod payloads;
mod returns;
mod rings;
mod traps;

pub use code::CodeSpace;
pub use counters::{
    COUNTER_BYTES, COUNTERS, COUNTERS_OFFSET, Counters, THUNK_BLOCK_BYTES, THUNK_BLOCKS,
    read_counters,
};
pub(crate) use histograms::SUM_AT;
pub use histograms::{
    BUCKETS, HISTOGRAM_BYTES, HISTOGRAMS, HISTOGRAMS_OFFSET, Histogram, Histograms,
    HistogramsMemory,
};
pub use payloads::{PayloadSizes, PayloadSpace, Placement};
pub(crate) use returns::slot;
pub use returns::{
    FREE_LIST_BYTES, MEASURE_CALL, RECORD_RETURN, RETURN_POOL_BYTES, RETURN_POOL_OFFSET,
    RETURN_SLOT_BYTES, RETURN_SLOTS, RETURN_STUB_BYTES, RETURN_STUBS_ALIGN, ReturnPool,
    ReturnPoolMemory, ReturnSlot, TakenReturns,
};
pub(crate) use rings::CONTINUATIONS_AT;
pub use rings::{
    CONTINUATION_WORDS, HEADER_BYTES, HEADERS_BYTES, MAX_CONTINUATIONS, MIN_RING_BYTES,
    RECORD_BYTES, RingLayout, rings_window_len,
};
pub use traps::{NoTraps, Trap, TrappedCall, Traps};

/// Unit in which region memory is mapped into guests: an x86_64 large page.
pub const LEAF_BYTES: u64 = 2 << 20;

/// Bytes of each part but the rings, whose number depends on the guest's CPUs.
pub const PART_BYTES: u64 = LEAF_BYTES;

/// Where payload text begins in the code part, in bytes: trampolines have what is in front of it.
pub const TEXT_OFFSET: u64 = PART_BYTES / 2;

/// Trampolines and sections of payloads begin on a cache line.
pub const ALIGN: u64 = 64;

/// A part of the region. What a guest may do differs from part to part, and none is both writable
/// and executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Trampolines and payload text: the guest reads and executes it.
    Code,
    /// Constants of payloads: the guest reads it.
    Constants,
    /// Data of payloads: the guest reads and writes it.
    Data,
    /// The rings: the guest reads and writes it.
    Rings,
}

impl Part {
    /// All parts, in the order in which they lie in an engine's memory, one behind the other.
    pub const ALL: [Self; 4] = [Self::Code, Self::Constants, Self::Data, Self::Rings];

    /// Where it begins, in bytes from the region's beginning.
    #[must_use]
    pub const fn offset(self) -> u64 {
        match self {
            Part::Code => 0,
            Part::Constants => PART_BYTES,
            Part::Data => 2 * PART_BYTES,
            Part::Rings => 3 * PART_BYTES,
        }
    }

    /// How long it is in a region with so many bytes for rings.
    #[must_use]
    pub const fn len(self, rings: u64) -> u64 {
        match self {
            Part::Code | Part::Constants | Part::Data => PART_BYTES,
            Part::Rings => rings,
        }
    }

    /// Whether the guest may write it. What it may not write an engine keeps from it also where the
    /// guest's own page tables would not, if it can.
    #[must_use]
    pub const fn is_writable(self) -> bool {
        matches!(self, Part::Data | Part::Rings)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Code => "code",
            Part::Constants => "constants",
            Part::Data => "data",
            Part::Rings => "rings",
        })
    }
}

/// A part of the region as an engine has it.
#[derive(Debug)]
pub struct RegionWindow<'a> {
    /// Where the guest's page tables must point to reach it; 2 MiB-aligned.
    pub gpa: Gpa,
    /// The same memory in this process.
    pub memory: VolatileSlice<'a>,
}

/// Rings could not be laid out, or code or a payload not be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The window is too small for that many CPUs.
    #[error(
        "the region has {len:#x} bytes for the rings of {cpus} CPUs, and each needs at least \
         {MIN_RING_BYTES:#x} beside {HEADERS_BYTES:#x} for all; give it more memory"
    )]
    TooSmall {
        /// Bytes of the window.
        len: u64,
        /// CPUs to serve.
        cpus: usize,
    },
    /// The headers do not suffice.
    #[error("the region has ring headers for {most} CPUs and the guest has {cpus}", most = HEADERS_BYTES / HEADER_BYTES)]
    TooManyCpus {
        /// CPUs to serve.
        cpus: usize,
    },
    /// No room for more code.
    #[error("{wanted} bytes of trampoline code do not fit: {used} of the region's {len} are taken")]
    CodeFull {
        /// Bytes wanted.
        wanted: usize,
        /// Bytes taken.
        used: usize,
        /// Bytes that there are for code.
        len: usize,
    },
    /// A payload has more of something than the region ever had room for.
    #[error(
        "the payload has {wanted} bytes of {}, and the region has room for {room}; make it smaller{}",
        payload_word(*part),
        if *part == Part::Code { ", or the rings, whose page tables may need the same memory" } else { "" }
    )]
    PayloadTooLarge {
        /// The part that it was to go to.
        part: Part,
        /// Bytes wanted.
        wanted: u64,
        /// Bytes that there are for payloads.
        room: u64,
    },
    /// Other payloads are in the way.
    #[error(
        "the payload has {wanted} bytes of {}, and no more than {free} in a row are free of the \
         region's {room}: revert a patch that is no longer needed, and apply this one then",
        payload_word(*part)
    )]
    PayloadsFull {
        /// The part that it was to go to.
        part: Part,
        /// Bytes wanted.
        wanted: u64,
        /// The longest row of free bytes.
        free: u64,
        /// Bytes that there are for payloads.
        room: u64,
    },
    /// Bytes were to go where the region is not mapped.
    #[error("{len} bytes at {at} do not lie within one part of the region")]
    Outside {
        /// Where they were to go.
        at: crate::addr::Gva,
        /// How many.
        len: usize,
    },
    /// What is taken must be on the disk before it is used.
    #[error("what a payload takes of the region can't be noted: {0}")]
    Journal(String),
    /// The memory failed.
    #[error("the region's memory could not be written: {0}")]
    Memory(String),
}

/// What those who write payloads call the part's content.
fn payload_word(part: Part) -> &'static str {
    match part {
        Part::Code => "text",
        Part::Constants => "constants",
        Part::Data | Part::Rings => "data",
    }
}
