//! Text as this process has it mapped: looked up before a stop, read in it.

use std::fmt;
use std::hint::black_box;
use std::ops::{ControlFlow, Range};

use vm_memory::{VolatileMemory, VolatileSlice};

use crate::addr::Gpa;
use crate::arch::{MAX_PAD, PadBytes};
use crate::mem::{MemError, PhysMem};

const PAGE: u64 = 4096;

/// Sites whose text is fetched before any of it is compared. Each is in a cache line of its own, and a
/// processor fetches as many lines at once as it is not kept from by what it does with the first.
const BATCH: usize = 64;

/// Where sites are, and what is compared with what they hold.
///
/// A stop with every function in it spends its time on reading sites and writing them. So neither
/// translations nor page faults of the host's have a place there, and what is needed of a site lies close
/// together.
pub(super) struct Text<'m> {
    ram: &'m dyn PhysMem,
    pages: Vec<Page<'m>>,
    places: Vec<Place>,
    forms: Vec<Forms>,
}

/// A page that sites are in.
struct Page<'m> {
    begin: Gpa,
    /// It, and a few bytes more if there are: sites are read by the word. `None` if the engine has not
    /// mapped it.
    memory: Option<VolatileSlice<'m>>,
}

/// Where a site is.
#[derive(Clone, Copy)]
struct Place {
    /// Index of its page.
    page: u32,
    offset: u16,
    len: u16,
}

/// What a site may hold, as words.
#[derive(Clone, Copy)]
struct Forms {
    before: u64,
    after: u64,
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
        let mut text = Self {
            ram,
            pages: Vec::new(),
            places: Vec::with_capacity(sites.len()),
            forms: Vec::with_capacity(sites.len()),
        };
        for (at, before, after) in sites {
            let begin = Gpa(at.0 & !(PAGE - 1));
            if text.pages.last().is_none_or(|page| page.begin != begin) {
                let mut lengths = [MAX_PAD, 0].map(|more| PAGE as usize + more).into_iter();
                let memory = lengths.find_map(|len| ram.mapped(begin, len));
                text.pages.push(Page { begin, memory });
            }
            let place = Place {
                page: text.pages.len() as u32 - 1,
                offset: (at.0 - begin.0) as u16,
                len: before.len() as u16,
            };
            // Reading is what brings it here; what it holds now matters to nobody.
            black_box(text.word(place));
            text.places.push(place);
            text.forms.push(Forms { before: before.word(), after: after.word() });
        }
        text
    }

    /// The RAM that they are in.
    pub(super) fn ram(&self) -> &'m dyn PhysMem {
        self.ram
    }

    /// Tells `each` what the sites of these indices hold, in order, until it breaks.
    pub(super) fn look(
        &self,
        sites: Range<usize>,
        mut each: impl FnMut(usize, Found) -> ControlFlow<()>,
    ) {
        let mut words = [None; BATCH];
        let mut next = sites.start;
        let (places, forms) = (&self.places[sites.clone()], &self.forms[sites]);
        for (places, forms) in places.chunks(BATCH).zip(forms.chunks(BATCH)) {
            for (word, place) in words.iter_mut().zip(places) {
                *word = self.word(*place);
            }
            for ((place, forms), word) in places.iter().zip(forms).zip(words) {
                if each(next, self.found(*place, forms, word)).is_break() {
                    return;
                }
                next += 1;
            }
        }
    }

    /// What one site holds.
    pub(super) fn find(&self, site: usize) -> Found {
        let (place, forms) = (self.places[site], &self.forms[site]);
        self.found(place, forms, self.word(place))
    }

    /// What a site holds whose `word` is this, or has to be read by way of the RAM.
    fn found(&self, place: Place, forms: &Forms, word: Option<u64>) -> Found {
        match word {
            Some(word) => forms.compare(word, place),
            None => self.read(place, forms),
        }
    }

    /// The bytes of a site; `None` if they have to be read by way of the RAM.
    fn word(&self, place: Place) -> Option<u64> {
        let page = self.pages[place.page as usize].memory.as_ref()?;
        let word = page.get_ref::<u64>(place.offset.into()).ok()?.load();
        Some(u64::from_le(word) & PadBytes::mask(place.len.into()))
    }

    fn read(&self, place: Place, forms: &Forms) -> Found {
        let mut found = PadBytes::of_word(0, place.len.into());
        let at = self.pages[place.page as usize].begin + u64::from(place.offset);
        match self.ram.read(at, &mut found) {
            Ok(()) => forms.compare(found.word(), place),
            Err(error) => Found::Unreadable(error),
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

impl Forms {
    fn compare(&self, word: u64, place: Place) -> Found {
        match word {
            word if word == self.after => Found::After,
            word if word == self.before => Found::Before,
            word => Found::Other(PadBytes::of_word(word, place.len.into())),
        }
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pages, sites) = (self.pages.len(), self.places.len());
        f.debug_struct("Text").field("pages", &pages).field("sites", &sites).finish_non_exhaustive()
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
        let mut found = Vec::new();
        text.look(0..sites.len(), |index, what| {
            assert_eq!((index, &what), (found.len(), &text.find(index)));
            found.push(what);
            ControlFlow::Continue(())
        });
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
        let zeros = PadBytes::new(&[0; 4]);
        let text =
            Text::new(&ram, (0..8_u32).map(|index| (Gpa(u64::from(index) * 8), &zeros, &zeros)));
        let mut seen = Vec::new();
        text.look(2..7, |index, found| {
            seen.push((index, found));
            if index == 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(seen, [2, 3, 4].map(|index| (index, Found::After)));
    }
}
