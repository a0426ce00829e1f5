//! Room for payloads: reserved, and reused once nobody can be in it any more.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{ALIGN, Part, RegionError};
use crate::addr::Gva;
use crate::journal::{Journal, PayloadMarks};

/// How much a payload needs, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PayloadSizes {
    /// What is executed.
    pub text: u64,
    /// What is only read.
    pub constants: u64,
    /// What is read and written.
    pub data: u64,
}

/// Where a payload goes. What it has none of goes nowhere: the range is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// In [`Part::Code`].
    pub text: Range<Gva>,
    /// In [`Part::Constants`].
    pub constants: Range<Gva>,
    /// In [`Part::Data`].
    pub data: Range<Gva>,
    /// Whether some of `text` was there for a guest to execute before. Such bytes may be in an
    /// instruction cache, or translated by an emulator, so they are written by
    /// [`Stopped::write_text`](crate::machine::Stopped::write_text), like any text; others may be
    /// written through the region's window.
    pub text_is_used: bool,
}

/// Hands out room for payloads in three parts of the region: the first gap that is long enough.
///
/// What is released is handed out again. So it must not be until nobody stands in the text, nor
/// holds an address in the constants or the data: that is for a check of all stacks to tell.
#[derive(Debug)]
pub struct PayloadSpace {
    rooms: Mutex<Rooms>,
}

#[derive(Debug, Clone)]
struct Rooms {
    text: Room,
    constants: Room,
    data: Room,
    /// Bytes of the room for text that ever were executable, from its beginning.
    executed: u64,
}

impl PayloadSpace {
    /// All of these ranges, each of which begins at a multiple of [`ALIGN`], but for what `marks`
    /// says that earlier processes have left there.
    #[must_use]
    pub fn new(
        text: Range<Gva>,
        constants: Range<Gva>,
        data: Range<Gva>,
        marks: PayloadMarks,
    ) -> Self {
        let rooms = Rooms {
            text: Room::new(Part::Code, text, marks.text),
            constants: Room::new(Part::Constants, constants, marks.constants),
            data: Room::new(Part::Data, data, marks.data),
            executed: marks.executed.max(marks.text),
        };
        Self { rooms: Mutex::new(rooms) }
    }

    /// Reserves room for a payload, for all of it or for nothing. Whoever finds the journal later
    /// keeps clear of it.
    ///
    /// # Errors
    /// [`RegionError::PayloadTooLarge`], [`RegionError::PayloadsFull`], [`RegionError::Journal`].
    pub fn reserve(
        &self,
        sizes: PayloadSizes,
        journal: Option<&Journal>,
    ) -> Result<Placement, RegionError> {
        let mut rooms = self.rooms();
        let mut changed = rooms.clone();
        let text = changed.text.reserve(sizes.text)?;
        let executed = changed.text.at + changed.executed;
        let text_is_used = !text.is_empty() && text.start < executed;
        changed.executed = changed.executed.max(changed.text.taken_to());
        let placement = Placement {
            text,
            constants: changed.constants.reserve(sizes.constants)?,
            data: changed.data.reserve(sizes.data)?,
            text_is_used,
        };
        if let Some(journal) = journal {
            let noted = journal.note_payloads(changed.marks());
            noted.map_err(|error| RegionError::Journal(error.to_string()))?;
        }
        *rooms = changed;
        Ok(placement)
    }

    /// Gives up what was reserved; nothing happens if it was given up before.
    pub fn release(&self, placement: &Placement, journal: Option<&Journal>) {
        let mut rooms = self.rooms();
        rooms.text.release(&placement.text);
        rooms.constants.release(&placement.constants);
        rooms.data.release(&placement.data);
        if let Some(journal) = journal {
            // A journal that says more is taken does no harm.
            let _ = journal.note_payloads(rooms.marks());
        }
    }

    fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rooms {
    fn marks(&self) -> PayloadMarks {
        PayloadMarks {
            text: self.text.taken_to(),
            executed: self.executed,
            constants: self.constants.taken_to(),
            data: self.data.taken_to(),
        }
    }
}

/// What is taken of one range of addresses.
#[derive(Debug, Clone)]
struct Room {
    part: Part,
    at: Gva,
    len: u64,
    /// In bytes from `at`, ascending and apart, beginnings and ends at multiples of [`ALIGN`].
    taken: Vec<Range<u64>>,
}

impl Room {
    fn new(part: Part, range: Range<Gva>, left: u64) -> Self {
        let len = range.end.offset_from(range.start).unwrap_or_default() & !(ALIGN - 1);
        let left = left.min(len).next_multiple_of(ALIGN);
        let taken = Some(0..left).filter(|left| !left.is_empty()).into_iter().collect();
        Self { part, at: range.start, len, taken }
    }

    fn taken_to(&self) -> u64 {
        self.taken.last().map_or(0, |range| range.end)
    }

    /// The gaps between what is taken, each with the index at which one that begins in it goes.
    fn gaps(&self) -> impl Iterator<Item = (usize, Range<u64>)> {
        let begins = std::iter::once(0).chain(self.taken.iter().map(|range| range.end));
        let ends = self.taken.iter().map(|range| range.start).chain([self.len]);
        begins.zip(ends).map(|(begin, end)| begin..end).enumerate()
    }

    fn reserve(&mut self, wanted: u64) -> Result<Range<Gva>, RegionError> {
        if wanted == 0 {
            return Ok(self.at..self.at);
        }
        let (part, room) = (self.part, self.len);
        if wanted > room {
            return Err(RegionError::PayloadTooLarge { part, wanted, room });
        }
        let len = wanted.next_multiple_of(ALIGN);
        let length = |gap: &Range<u64>| gap.end - gap.start;
        let Some((index, gap)) = self.gaps().find(|(_, gap)| length(gap) >= len) else {
            let free = self.gaps().map(|(_, gap)| length(&gap)).max().unwrap_or_default();
            return Err(RegionError::PayloadsFull { part, wanted, free, room });
        };
        self.taken.insert(index, gap.start..gap.start + len);
        let at = self.at + gap.start;
        Ok(at..at + wanted)
    }

    fn release(&mut self, range: &Range<Gva>) {
        let Some(start) = range.start.offset_from(self.at) else { return };
        let Some(end) = range.end.offset_from(self.at) else { return };
        let given = start..end.next_multiple_of(ALIGN);
        if !range.is_empty() {
            self.taken.retain(|taken| *taken != given);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: Gva = Gva(0x10_0000);
    const CONSTANTS: Gva = Gva(0x20_0000);
    const DATA: Gva = Gva(0x40_0000);
    const LEN: u64 = 0x1000;

    fn with(marks: PayloadMarks) -> PayloadSpace {
        PayloadSpace::new(TEXT..TEXT + LEN, CONSTANTS..CONSTANTS + LEN, DATA..DATA + LEN, marks)
    }

    fn text(text: u64) -> PayloadSizes {
        PayloadSizes { text, ..PayloadSizes::default() }
    }

    #[test]
    fn each_kind_goes_to_its_part_and_what_a_payload_has_none_of_takes_nothing() {
        let space = with(PayloadMarks::default());
        let sizes = PayloadSizes { text: 65, constants: 0, data: 8 };
        let first = space.reserve(sizes, None).unwrap();
        assert_eq!((&first.text, &first.data), (&(TEXT..TEXT + 65), &(DATA..DATA + 8)));
        assert!(first.constants.is_empty() && !first.text_is_used);
        let second = space.reserve(PayloadSizes { constants: 1, ..sizes }, None).unwrap();
        assert_eq!((second.text.start, second.data.start), (TEXT + 128, DATA + 64));
        assert_eq!(second.constants, CONSTANTS..CONSTANTS + 1);
    }

    #[test]
    fn neighbours_that_are_released_make_one_gap_and_the_first_that_fits_is_taken() {
        let space = with(PayloadMarks::default());
        let placed: Vec<_> = (0..4).map(|_| space.reserve(text(LEN / 4), None).unwrap()).collect();
        assert!(placed.iter().all(|placed| !placed.text_is_used));
        assert_eq!(
            space.reserve(text(1), None),
            Err(RegionError::PayloadsFull { part: Part::Code, wanted: 1, free: 0, room: LEN })
        );
        space.release(&placed[2], None);
        space.release(&placed[1], None);
        space.release(&placed[1], None);
        let both = space.reserve(text(LEN / 2), None).unwrap();
        assert_eq!(both.text, placed[1].text.start..placed[2].text.end);
        assert!(both.text_is_used, "its bytes were executable before");
        space.release(&placed[0], None);
        assert_eq!(space.reserve(text(64), None).unwrap().text.start, TEXT);
    }

    #[test]
    fn a_payload_of_which_one_part_does_not_fit_takes_nothing_of_the_others() {
        let space = with(PayloadMarks::default());
        let error = space.reserve(PayloadSizes { data: LEN + 1, ..text(64) }, None).unwrap_err();
        assert_eq!(
            error,
            RegionError::PayloadTooLarge { part: Part::Data, wanted: LEN + 1, room: LEN }
        );
        assert!(error.to_string().contains("bytes of data, and the region has room for 4096"));
        assert!(space.reserve(text(u64::MAX), None).is_err());
        let placed = space.reserve(text(LEN), None).unwrap();
        assert!(placed.text.start == TEXT && !placed.text_is_used);
    }

    #[test]
    fn what_an_earlier_process_has_left_is_kept_clear_of() {
        let marks = PayloadMarks { text: 100, executed: 256, constants: 64, data: 0 };
        let space = with(marks);
        let sizes = PayloadSizes { text: 128, constants: 1, data: 1 };
        let first = space.reserve(sizes, None).unwrap();
        assert_eq!((first.text.start, first.text_is_used), (TEXT + 128, true));
        assert_eq!((first.constants.start, first.data.start), (CONSTANTS + 64, DATA));
        let second = space.reserve(sizes, None).unwrap();
        assert_eq!((second.text.start, second.text_is_used), (TEXT + 256, false));
        // Nonsense in a journal leaves no room, and does no harm.
        let full = with(PayloadMarks { text: u64::MAX, ..marks });
        assert!(matches!(
            full.reserve(text(1), None),
            Err(RegionError::PayloadsFull { free: 0, .. })
        ));
    }

    #[test]
    fn the_journal_knows_what_is_taken_before_it_is_handed_out() {
        let folder = std::env::temp_dir().join(format!("payloads-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("journal");
        let journal = Journal::open(&path).unwrap();
        journal.note_region(crate::journal::tests::a_mark()).unwrap();
        let space = with(PayloadMarks::default());
        let noted = || Journal::open(&path).unwrap().region().unwrap().payloads;
        let sizes = PayloadSizes { text: 65, constants: 1, data: 200 };
        let first = space.reserve(sizes, Some(&journal)).unwrap();
        let marks = PayloadMarks { text: 128, executed: 128, constants: 64, data: 256 };
        assert_eq!(noted(), marks);
        let second = space.reserve(text(64), Some(&journal)).unwrap();
        assert_eq!(noted(), PayloadMarks { text: 192, executed: 192, ..marks });
        space.release(&second, Some(&journal));
        assert_eq!(noted(), PayloadMarks { executed: 192, ..marks });
        space.release(&first, Some(&journal));
        assert_eq!(noted(), PayloadMarks { executed: 192, ..PayloadMarks::default() });
        std::fs::remove_dir_all(&folder).unwrap();

        // What can't be noted is not handed out.
        let error = space.reserve(sizes, Some(&journal)).unwrap_err();
        assert!(matches!(error, RegionError::Journal(_)), "{error}");
        assert_eq!(space.reserve(text(LEN), None).unwrap().text, TEXT..TEXT + LEN);
    }

    proptest! {
        /// Whatever comes and goes, what is taken never overlaps and lies in its room.
        #[test]
        fn no_two_payloads_ever_overlap(
            steps in prop::collection::vec((any::<prop::sample::Index>(), 0..1500_u64), 1..80),
        ) {
            let space = with(PayloadMarks::default());
            let mut held: Vec<Placement> = Vec::new();
            for (index, size) in steps {
                if size < 500 && !held.is_empty() {
                    space.release(&held.swap_remove(index.index(held.len())), None);
                } else if let Ok(placed) = space.reserve(text(size), None) {
                    prop_assert_eq!(placed.text.start.0 % ALIGN, 0);
                    prop_assert!(placed.text.end <= TEXT + LEN);
                    for other in &held {
                        let apart = placed.text.end <= other.text.start
                            || other.text.end <= placed.text.start;
                        prop_assert!(apart || placed.text.is_empty() || other.text.is_empty());
                    }
                    held.push(placed);
                }
            }
            while let Some(placed) = held.pop() {
                space.release(&placed, None);
            }
            prop_assert!(space.reserve(text(LEN), None).is_ok(), "all of it is one gap again");
        }
    }
}
