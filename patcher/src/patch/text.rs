//! Text as this process has it mapped: looked up before a stop, read in it.

use std::fmt;
use std::hint::black_box;
use std::ops::{ControlFlow, Range};

use vm_memory::{VolatileMemory, VolatileSlice};

use crate::addr::Gpa;
use crate::arch::{MAX_PAD, PadBytes};
use crate::mem::{MemError, PhysMem};

/// Sites that are compared at a time, without a branch for each: a processor fetches as many of their
/// cache lines at once as it can.
const BATCH: usize = 64;

/// Where sites are, and what is compared with what they hold.
///
/// A stop with every function in it spends its time on reading sites and writing them. So neither
/// translations nor page faults of the host's have a place there, and what is needed of a site lies close
/// together.
pub(super) struct Text<'m> {
    ram: &'m dyn PhysMem,
    sites: Vec<Place<'m>>,
}

/// A site.
struct Place<'m> {
    /// It and what follows it, as our memory; `None` if the engine has not mapped so much.
    word: Option<VolatileSlice<'m>>,
    /// What of the word is the site.
    mask: u64,
    before: u64,
    after: u64,
    at: Gpa,
    len: usize,
}

/// What a site is expected to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// What it held first.
    Before,
    /// What it is to hold.
    After,
}

/// What a site holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// What was expected.
    Before,
    /// What is to be there, also if that was expected.
    After,
    /// Something else.
    Other(PadBytes),
    /// It can't be read.
    Unreadable(MemError),
}

impl<'m> Text<'m> {
    /// Looks up sites, of which the address, what is expected there and what is to be there are told, and
    /// has the host and its caches fetch them.
    pub(super) fn new<'s>(
        ram: &'m dyn PhysMem,
        sites: impl ExactSizeIterator<Item = (Gpa, &'s PadBytes, &'s PadBytes)>,
    ) -> Self {
        let place = |(at, before, after): (Gpa, &PadBytes, &PadBytes)| {
            let word = ram.mapped(at, MAX_PAD);
            let (mask, len) = (PadBytes::mask(before.len()), before.len());
            let place = Place { word, mask, before: before.word(), after: after.word(), at, len };
            // Reading is what brings it here; what it holds now matters to nobody.
            black_box(place.load());
            place
        };
        Self { ram, sites: sites.map(place).collect() }
    }

    /// The RAM that they are in.
    pub(super) fn ram(&self) -> &'m dyn PhysMem {
        self.ram
    }

    /// Tells `each` what those of the sites of these indices hold that do not hold what they usually do,
    /// in order, until it breaks.
    pub(super) fn unusual(
        &self,
        sites: Range<usize>,
        usual: Form,
        each: impl FnMut(usize, Found) -> ControlFlow<()>,
    ) {
        match usual {
            Form::Before => self.differing(sites, |place| place.before, &Found::Before, each),
            Form::After => self.differing(sites, |place| place.after, &Found::After, each),
        }
    }

    fn differing(
        &self,
        sites: Range<usize>,
        usual: impl Fn(&Place<'_>) -> u64,
        known: &Found,
        mut each: impl FnMut(usize, Found) -> ControlFlow<()>,
    ) {
        let mut first = sites.start;
        for batch in self.sites[sites].chunks(BATCH) {
            let differences = batch.iter().fold(0, |differences, place| {
                differences | place.load().map_or(u64::MAX, |word| word ^ usual(place))
            });
            if differences != 0 {
                let found = batch.iter().map(|place| place.find(self.ram));
                let unusual = (first..).zip(found).filter(|(_, found)| found != known);
                for (index, found) in unusual {
                    if each(index, found).is_break() {
                        return;
                    }
                }
            }
            first += batch.len();
        }
    }

    /// What one site holds.
    pub(super) fn find(&self, site: usize) -> Found {
        self.sites[site].find(self.ram)
    }
}

impl Place<'_> {
    /// The bytes; `None` if they have to be read by way of the RAM.
    fn load(&self) -> Option<u64> {
        let word = self.word.as_ref()?.get_ref::<u64>(0).ok()?.load();
        Some(u64::from_le(word) & self.mask)
    }

    fn find(&self, ram: &dyn PhysMem) -> Found {
        if let Some(word) = self.load() {
            return self.compare(word);
        }
        let mut found = PadBytes::of_word(0, self.len);
        match ram.read(self.at, &mut found) {
            Ok(()) => self.compare(found.word()),
            Err(error) => Found::Unreadable(error),
        }
    }

    fn compare(&self, word: u64) -> Found {
        match word {
            word if word == self.after => Found::After,
            word if word == self.before => Found::Before,
            word => Found::Other(PadBytes::of_word(word, self.len)),
        }
    }
}

impl Found {
    /// The bytes, of a site that was looked up to become from `before` what `after` is.
    ///
    /// # Errors
    /// They can't be read.
    pub(super) fn bytes(self, before: &PadBytes, after: &PadBytes) -> Result<PadBytes, MemError> {
        match self {
            Found::Before => Ok(*before),
            Found::After => Ok(*after),
            Found::Other(found) => Ok(found),
            Found::Unreadable(error) => Err(error),
        }
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Text").field("sites", &self.sites.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;

    /// RAM of which nothing is mapped by the engine.
    struct Unmapped(GuestMemoryMmap<()>);

    impl PhysMem for Unmapped {
        fn read(&self, at: Gpa, buf: &mut [u8]) -> Result<(), MemError> {
            PhysMem::read(&self.0, at, buf)
        }

        fn extents(&self) -> Vec<Range<Gpa>> {
            self.0.extents()
        }

        fn replace_entry(&self, at: Gpa, old: [u8; 8], new: [u8; 8]) -> Result<(), MemError> {
            self.0.replace_entry(at, old, new)
        }
    }

    fn found(ram: &dyn PhysMem, sites: &[(Gpa, PadBytes, PadBytes)]) -> Vec<Found> {
        let text = Text::new(ram, sites.iter().map(|(at, before, after)| (*at, before, after)));
        let found: Vec<Found> = (0..sites.len()).map(|index| text.find(index)).collect();
        for (usual, known) in [(Form::Before, Found::Before), (Form::After, Found::After)] {
            let mut unusual = Vec::new();
            text.unusual(0..sites.len(), usual, |index, what| {
                unusual.push((index, what));
                ControlFlow::Continue(())
            });
            let others = found.iter().cloned().enumerate().filter(|(_, found)| *found != known);
            assert_eq!(unusual, others.collect::<Vec<_>>());
        }
        found
    }

    #[test]
    fn sites_are_read_alike_wherever_they_are_and_however_the_engine_has_them() {
        let ranges = [(GuestAddress(0), 0x2000), (GuestAddress(0x4000), 0x1000)];
        let ram = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        // More than a batch, then the last bytes of a page, of RAM that ends, and where there is none.
        let mut places: Vec<u64> = (0..2 * BATCH as u64 + 3).map(|index| index * 16).collect();
        places.extend([0xffb, 0x1000, 0x1ffb, 0x1ffc, 0x3000, 0x4ffb]);
        let (before, after, other) = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]);
        let [before, after, other] = [before, after, other].map(|bytes| PadBytes::new(&bytes));
        let sites: Vec<_> = places.iter().map(|at| (Gpa(*at), before, after)).collect();
        let mut expected = Vec::new();
        for (index, (at, ..)) in sites.iter().enumerate() {
            let (bytes, what) = match index % 3 {
                0 => (before, Found::Before),
                1 => (after, Found::After),
                _ => (other, Found::Other(other)),
            };
            // What follows a site is none of its business.
            let _ = ram.write_slice(&[0xee; 8], GuestAddress(at.0));
            let written = ram.write_slice(&bytes, GuestAddress(at.0));
            let missing = Found::Unreadable(MemError::NotRam { at: *at, len: 5 });
            expected.push(if written.is_ok() { what } else { missing });
        }
        // 0x1ffc overlaps 0x1ffb, and there is no fifth byte.
        let overlapped = places.iter().position(|at| *at == 0x1ffb).unwrap();
        ram.write_slice(&before, GuestAddress(0x1ffb)).unwrap();
        expected[overlapped] = Found::Before;
        assert_eq!(found(&ram, &sites), expected);
        assert_eq!(found(&Unmapped(ram), &sites), expected);
    }

    #[test]
    fn whoever_looks_may_stop() {
        let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let (zeros, ones) = (PadBytes::new(&[0; 4]), PadBytes::new(&[1; 4]));
        let sites: Vec<_> = (0..300).map(|index| (Gpa(index * 8), &ones, &zeros)).collect();
        let text = Text::new(&ram, sites.into_iter());
        let mut seen = Vec::new();
        text.unusual(2..299, Form::Before, |index, found| {
            seen.push((index, found));
            if index == 104 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(seen, (2..105).map(|index| (index, Found::After)).collect::<Vec<_>>());
    }
}
