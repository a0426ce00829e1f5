//! The pages of one CPU's ring, in the form in which the kernel's ring buffer gives them out.
//!
//! ```text
//! 0   u64  time of the first event, in nanoseconds
//! 8   u64  bytes of data (bits 0 to 26), and flags: 30, a count of missed events lies behind the
//!          data; 31, events are missing in front of this page
//! 16       data: per event a word of type and time since the event before, then its fields
//! ```
//!
//! The kernel's `kernel/trace/ring_buffer.c` says so, and libtraceevent's `kbuffer-parse.c` reads it.

use std::io::{self, Write};

use super::formats::MAX_BYTES;
use crate::arch::ByteOrder;

/// Bytes of a page. It may be any power of two, and need not be the guest's.
pub const PAGE: usize = 4096;

/// Bytes of a page's own header.
pub const PAGE_HEADER: usize = 16;

/// Data ends here at the latest, so that a count of missed events has room behind it.
const DATA_END: usize = PAGE - 8;

/// Bits of an event's first word that hold the time since the event before.
const DELTA_BITS: u32 = 27;

/// The type of what adds to the next event's time.
const TIME_EXTEND: u32 = 30;

/// Bits 0 to 58 of a time since the event before are all that an event can say.
const LONGEST: u64 = (1 << (DELTA_BITS + 32)) - 1;

const MISSED_STORED: u64 = 1 << 30;
const MISSED_EVENTS: u64 = 1 << 31;

/// Bytes that are gathered before they are written out.
const GATHERED: usize = 16 * PAGE;

/// The ring of a CPU, written out page by page.
#[derive(Debug)]
pub struct Pages<S> {
    spool: S,
    order: ByteOrder,
    /// Pages that are to be written out; the last may not be full.
    bytes: Vec<u8>,
    /// Where that page begins, if one was begun.
    page: Option<usize>,
    /// Events that are missing in front of it.
    missed: u64,
    /// Time of its first event, and of its last.
    first: u64,
    last: u64,
    written: u64,
}

impl<S: Write> Pages<S> {
    /// No events yet; pages go to `spool`.
    pub fn new(spool: S, order: ByteOrder) -> Self {
        let bytes = Vec::with_capacity(GATHERED + PAGE);
        Self { spool, order, bytes, page: None, missed: 0, first: 0, last: 0, written: 0 }
    }

    /// Takes an event, in front of which `missed` others are missing. Its fields are whole words, and
    /// [`MAX_BYTES`] at most.
    ///
    /// # Errors
    /// What writing says.
    pub fn push(&mut self, time: u64, missed: u64, fields: &[u8]) -> io::Result<()> {
        // Twice a word of time, and the fields.
        debug_assert!(fields.len() <= MAX_BYTES && fields.len().is_multiple_of(4));
        let room = 12 + MAX_BYTES;
        let fits = self.page.is_some_and(|page| self.bytes.len() - page + room <= DATA_END);
        let follows = time >= self.last && time - self.last <= LONGEST;
        if !fits || !follows || missed > 0 {
            self.close()?;
            self.page = Some(self.bytes.len());
            self.bytes.resize(self.bytes.len() + PAGE_HEADER, 0);
            (self.missed, self.first, self.last) = (missed, time, time);
        }
        let delta = time - self.last;
        if delta >> DELTA_BITS > 0 {
            self.word(TIME_EXTEND, delta as u32 & ((1 << DELTA_BITS) - 1));
            self.push_u32((delta >> DELTA_BITS) as u32);
            self.word((fields.len() / 4) as u32, 0);
        } else {
            self.word((fields.len() / 4) as u32, delta as u32);
        }
        self.last = time;
        self.bytes.extend_from_slice(fields);
        Ok(())
    }

    /// The first word of an event. Where its fields lie is the compiler's choice, which goes with
    /// the byte order.
    fn word(&mut self, kind: u32, delta: u32) {
        self.push_u32(match self.order {
            ByteOrder::Little => kind | delta << 5,
            ByteOrder::Big => kind << DELTA_BITS | delta,
        });
    }

    fn push_u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&self.order.bytes_of_u32(value));
    }

    /// Ends the page that was begun, if one was.
    fn close(&mut self) -> io::Result<()> {
        let Some(page) = self.page.take() else { return Ok(()) };
        let mut commit = (self.bytes.len() - page - PAGE_HEADER) as u64;
        if self.missed > 0 {
            commit |= MISSED_EVENTS | MISSED_STORED;
            self.bytes.extend_from_slice(&self.order.bytes(self.missed));
        }
        self.bytes.resize(page + PAGE, 0);
        self.bytes[page..page + 8].copy_from_slice(&self.order.bytes(self.first));
        self.bytes[page + 8..page + 16].copy_from_slice(&self.order.bytes(commit));
        if self.bytes.len() >= GATHERED { self.write_out() } else { Ok(()) }
    }

    fn write_out(&mut self) -> io::Result<()> {
        self.written += self.bytes.len() as u64;
        let result = self.spool.write_all(&self.bytes);
        self.bytes.clear();
        result
    }

    /// Writes out what is left. Gives the spool and how many bytes it has been given, whole pages.
    ///
    /// # Errors
    /// What writing says.
    pub fn finish(mut self) -> io::Result<(S, u64)> {
        self.close()?;
        self.write_out()?;
        Ok((self.spool, self.written))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: [u8; 24] = [0xaa; 24];

    fn pages(order: ByteOrder, events: &[(u64, u64)]) -> Vec<u8> {
        let mut pages = Pages::new(Vec::new(), order);
        events.iter().for_each(|(time, missed)| pages.push(*time, *missed, &FIELDS).unwrap());
        let (bytes, written) = pages.finish().unwrap();
        assert_eq!(written, bytes.len() as u64);
        bytes
    }

    /// Times of events, and what is missing in front of them, as libtraceevent reads a page.
    fn read(page: &[u8]) -> Vec<(u64, u64)> {
        let u64_at = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
        let u32_at = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().unwrap());
        let (mut time, commit) = (u64_at(0), u64_at(8));
        let end = PAGE_HEADER + (commit & ((1 << DELTA_BITS) - 1)) as usize;
        let mut missed = if commit & MISSED_STORED != 0 { u64_at(end) } else { 0 };
        let mut events = vec![];
        let mut at = PAGE_HEADER;
        while at < end {
            let (kind, delta) = (u32_at(at) & 31, u64::from(u32_at(at) >> 5));
            at += 4;
            match kind {
                TIME_EXTEND => {
                    time += delta | u64::from(u32_at(at)) << DELTA_BITS;
                    at += 4;
                }
                words => {
                    time += delta;
                    assert_eq!(page[at..at + words as usize * 4], FIELDS);
                    at += words as usize * 4;
                    events.push((time, std::mem::take(&mut missed)));
                }
            }
        }
        events
    }

    #[test]
    fn a_page_is_as_the_kernel_would_give_it_out() {
        let bytes = pages(ByteOrder::Little, &[(0x0102, 0), (0x0105, 0)]);
        assert_eq!(bytes.len(), PAGE);
        assert_eq!(bytes[..20], [2, 1, 0, 0, 0, 0, 0, 0, 56, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0]);
        assert_eq!(bytes[44..48], [6 | 3 << 5, 0, 0, 0]);
        assert_eq!(bytes[72..], [0; PAGE - 72]);
        let bytes = pages(ByteOrder::Big, &[(0x0102, 0), (0x0105, 0)]);
        assert_eq!(bytes[..20], [0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 56, 6 << 3, 0, 0, 0]);
        assert_eq!(bytes[44..48], [6 << 3, 0, 0, 3]);
    }

    #[test]
    fn every_event_comes_back_with_its_time_and_what_is_missing_before_it() {
        let mut events = vec![(5, 0), (5, 0), (1 << 27, 0), (1 << 58, 7)];
        // One that is late, the longest steps, and more than a page holds.
        events.extend([(9, 0), (9 + LONGEST, 0), (u64::MAX, 0), (u64::MAX, 3)]);
        events.extend((0..1000).map(|step| (step * 1000, 0)));
        let bytes = pages(ByteOrder::Little, &events);
        assert_eq!(bytes.len() % PAGE, 0);
        assert_eq!(bytes.chunks(PAGE).flat_map(read).collect::<Vec<_>>(), events);
    }

    #[test]
    fn a_count_of_what_is_missing_has_room_on_a_full_page() {
        let events: Vec<_> = std::iter::once((0, 9)).chain((1..200).map(|t| (t, 0))).collect();
        let bytes = pages(ByteOrder::Little, &events);
        assert_eq!(bytes.len(), 2 * PAGE);
        assert_eq!(bytes.chunks(PAGE).flat_map(read).collect::<Vec<_>>(), events);
    }
}
