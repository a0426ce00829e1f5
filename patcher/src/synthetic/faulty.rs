//! A synthetic guest on a machine of which one thing fails, whichever a test wants.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Guest;
use crate::addr::Gpa;
use crate::journal::Journal;
use crate::machine::{
    Machine, Registers, StopError, StopTimes, Stopped, TextWrite, TextWriteError,
};
use crate::mem::{MemError, PhysMem};
use crate::region::{Part, RegionWindow};

/// What may fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reading RAM.
    Read,
    /// Making a page-table entry.
    Entry,
    /// Reading a vCPU's registers.
    Registers,
    /// Stopping and resuming.
    Stop,
    /// Writing text; half of it is written then.
    Write,
}

/// The machine.
#[derive(Debug)]
pub struct Faulty<'g> {
    guest: &'g Guest,
    kinds: Vec<Kind>,
    left: AtomicUsize,
    journal: Option<Journal>,
}

impl<'g> Faulty<'g> {
    /// The `nth` thing of these kinds fails, counted from 0 over all of them together.
    pub fn new(guest: &'g Guest, kinds: &[Kind], nth: usize) -> Self {
        Self { guest, kinds: kinds.to_vec(), left: nth.into(), journal: None }
    }

    /// Nothing fails until [`Faulty::strike_at`] says so.
    pub fn sound(guest: &'g Guest, kinds: &[Kind]) -> Self {
        Self::new(guest, kinds, usize::MAX)
    }

    /// With a journal.
    pub fn with_journal(self, journal: Journal) -> Self {
        Self { journal: Some(journal), ..self }
    }

    /// The `nth` thing from now on fails.
    pub fn strike_at(&self, nth: usize) {
        self.left.store(nth, Ordering::Relaxed);
    }

    /// Nothing fails any more.
    pub fn mend(&self) {
        self.strike_at(usize::MAX);
    }

    /// Whether something has failed.
    pub fn has_struck(&self) -> bool {
        // Whoever counts on has wrapped around.
        self.left.load(Ordering::Relaxed) > usize::MAX / 2
    }

    fn strikes(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind) && self.left.fetch_sub(1, Ordering::Relaxed) == 0
    }

    fn error(&self) -> StopError {
        StopError::Engine { what: "do it", source: io::Error::other("injected") }
    }
}

impl PhysMem for Faulty<'_> {
    fn read(&self, at: Gpa, buf: &mut [u8]) -> Result<(), MemError> {
        match self.strikes(Kind::Read) {
            true => Err(MemError::NotRam { at, len: buf.len() }),
            false => self.guest.ram().read(at, buf),
        }
    }

    fn extents(&self) -> Vec<Range<Gpa>> {
        self.guest.ram().extents()
    }

    fn replace_entry(&self, at: Gpa, old: [u8; 8], new: [u8; 8]) -> Result<(), MemError> {
        match self.strikes(Kind::Entry) {
            true => Err(MemError::NotRam { at, len: 8 }),
            false => self.guest.ram().replace_entry(at, old, new),
        }
    }
}

impl Machine for Faulty<'_> {
    fn ram(&self) -> &dyn PhysMem {
        self
    }

    fn vcpus(&self) -> usize {
        self.guest.vcpus()
    }

    fn region(&self, part: Part) -> RegionWindow<'_> {
        self.guest.region(part)
    }

    fn clock_hz(&self) -> u64 {
        self.guest.clock_hz()
    }

    fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    fn sample(&self, vcpu: usize) -> Result<Registers, StopError> {
        self.guest.sample(vcpu)
    }

    fn stop(&self) -> Result<Box<dyn Stopped + '_>, StopError> {
        match self.strikes(Kind::Stop) {
            true => Err(self.error()),
            false => Ok(Box::new(FaultyStop(self, self.guest.stop()?))),
        }
    }
}

struct FaultyStop<'f>(&'f Faulty<'f>, Box<dyn Stopped + 'f>);

impl Stopped for FaultyStop<'_> {
    fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError> {
        match self.0.strikes(Kind::Registers) {
            true => Err(self.0.error()),
            false => self.1.registers(vcpu),
        }
    }

    fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError> {
        for (index, write) in writes.iter().enumerate() {
            if self.0.strikes(Kind::Write) {
                let half = TextWrite { bytes: &write.bytes[..write.bytes.len() / 2], ..*write };
                self.1.write_text(&[half])?;
                return Err(TextWriteError { index, at: write.at, reason: "injected".into() });
            }
            self.1.write_text(std::slice::from_ref(write))?;
        }
        Ok(())
    }

    fn resume(self: Box<Self>) -> Result<StopTimes, StopError> {
        let times = self.1.resume()?;
        if self.0.strikes(Kind::Stop) { Err(self.0.error()) } else { Ok(times) }
    }
}
