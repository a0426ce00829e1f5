//! What is known of a guest that outlives this process: the sites that may hold our bytes, and where
//! the region is mapped.
//!
//! A journal is written, and on the disk, before the first byte of text is. Whoever finds it after
//! this process was killed can put back what is ours. It is a text file:
//!
//! ```text
//! vmm-journal 2
//! region <guest-physical> <code, guest-virtual> <bytes> <constants> <bytes> <data> <bytes> <rings> <bytes>
//! taken <bytes of trampolines> <of payload text> <of it ever executed> <of constants> <of data>
//! site <guest-physical> <guest-virtual> <original bytes> <our bytes> <function>
//! end <number of sites>
//! ```
//!
//! Numbers are hexadecimal. While a site changes from one form of ours to another it has both, with a
//! comma between them. Each change replaces the whole file, so that it is never half-written.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::addr::{Gpa, Gva};

const HEADER: &str = "vmm-journal 2";

/// The most bytes that a journal can have: some hundred for each of more pads than any kernel has.
const LIMIT: u64 = 64 << 20;

/// Where the region is mapped in a guest's kernel, and how much of it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionMark {
    /// Where its memory begins, which is that of its code.
    pub memory: Gpa,
    /// Trampolines and payload text.
    pub code: PartMark,
    /// Constants of payloads.
    pub constants: PartMark,
    /// Data of payloads.
    pub data: PartMark,
    /// The rings.
    pub rings: PartMark,
    /// How many bytes, from the beginning of the code part, hold trampolines that a task may stand in.
    pub used: u64,
    /// How much payloads have taken.
    pub payloads: PayloadMarks,
}

/// Where a part of the region is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartMark {
    /// Where the guest sees it.
    pub at: Gva,
    /// How many bytes of it.
    pub len: u64,
}

/// Behind which bytes of the rooms for payloads nothing was taken, each counted from its room's
/// beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PayloadMarks {
    /// Text that a task may stand in.
    pub text: u64,
    /// Text that was ever there for the guest to execute: as much, or more.
    pub executed: u64,
    /// Constants.
    pub constants: u64,
    /// Data.
    pub data: u64,
}

/// A site that may hold our bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The function that it belongs to.
    pub function: Arc<str>,
    /// Where the guest executes it.
    pub at: Gva,
    /// Where it is in guest-physical memory.
    pub gpa: Gpa,
    /// The bytes that go back.
    pub original: Vec<u8>,
    /// Our bytes: each form that may be there.
    pub ours: Vec<Vec<u8>>,
}

/// A journal can't be kept, or not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The file can't be read or written.
    #[error("the journal {} can't be {doing}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was to be done.
        doing: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The file is not what was written.
    #[error(
        "the journal {} is damaged in line {line}: {what}; end the guest, or remove the journal and \
         leave the guest as it is",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong there.
        what: &'static str,
    },
}

/// The journal of one guest.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    content: Mutex<Content>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Content {
    region: Option<RegionMark>,
    sites: BTreeMap<Gpa, Entry>,
}

impl Journal {
    /// Reads the journal in the file at `path`; one that does not exist is empty.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, JournalError> {
        let path = path.into();
        let content = match read(&path) {
            Ok(text) => parse(&text).map_err(|(line, what)| JournalError::Damaged {
                path: path.clone(),
                line,
                what,
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Content::default(),
            Err(source) => return Err(JournalError::File { path, doing: "read", source }),
        };
        Ok(Self { path, content: Mutex::new(content) })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the region is, if it was ever mapped.
    #[must_use]
    pub fn region(&self) -> Option<RegionMark> {
        self.content().region
    }

    /// The sites that may hold our bytes.
    #[must_use]
    pub fn sites(&self) -> Vec<Entry> {
        self.content().sites.values().cloned().collect()
    }

    /// Notes where the region is.
    ///
    /// # Errors
    /// [`JournalError::File`].
    pub fn note_region(&self, mark: RegionMark) -> Result<(), JournalError> {
        self.change(|content| content.region = Some(mark))
    }

    /// Notes how many bytes of trampolines there are.
    ///
    /// # Errors
    /// [`JournalError::File`].
    pub fn note_code(&self, used: u64) -> Result<(), JournalError> {
        self.change(|content| {
            if let Some(mark) = &mut content.region {
                mark.used = mark.used.max(used);
            }
        })
    }

    /// Notes how much payloads have taken of the region.
    ///
    /// # Errors
    /// [`JournalError::File`].
    pub fn note_payloads(&self, marks: PayloadMarks) -> Result<(), JournalError> {
        self.change(|content| {
            if let Some(mark) = &mut content.region {
                mark.payloads = marks;
            }
        })
    }

    /// Notes sites that are going to be written.
    ///
    /// # Errors
    /// [`JournalError::File`]; they must not be written then.
    pub fn intend(&self, sites: impl Iterator<Item = Entry>) -> Result<(), JournalError> {
        self.change(|content| content.sites.extend(sites.map(|site| (site.gpa, site))))
    }

    /// Forgets the sites at these addresses, which hold nothing of ours any more.
    ///
    /// # Errors
    /// [`JournalError::File`]. A journal that names too many sites does no harm: they are compared
    /// before anything is put back.
    pub fn settle(&self, sites: impl Iterator<Item = Gpa>) -> Result<(), JournalError> {
        self.change(|content| {
            for gpa in sites {
                content.sites.remove(&gpa);
            }
        })
    }

    /// Removes the file: the guest has ended.
    ///
    /// # Errors
    /// [`JournalError::File`].
    pub fn discard(&self) -> Result<(), JournalError> {
        *self.content() = Content::default();
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.failed("removed")(error))
            }
            _ => Ok(()),
        }
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, doing: &'static str) -> impl Fn(io::Error) -> JournalError {
        move |source| JournalError::File { path: self.path.clone(), doing, source }
    }

    fn change(&self, change: impl FnOnce(&mut Content)) -> Result<(), JournalError> {
        let mut content = self.content();
        let mut changed = content.clone();
        change(&mut changed);
        if changed != *content {
            self.write(&changed).map_err(self.failed("written"))?;
            *content = changed;
        }
        Ok(())
    }

    /// Replaces the file, so that it and its name are on the disk.
    fn write(&self, content: &Content) -> io::Result<()> {
        let mut new = self.path.clone().into_os_string();
        new.push(".new");
        let new = PathBuf::from(new);
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(spell(content).as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        match self.path.parent() {
            Some(folder) => File::open(folder)?.sync_all(),
            None => Ok(()),
        }
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(LIMIT + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LIMIT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is larger than any journal"));
    }
    Ok(text)
}

fn spell(content: &Content) -> String {
    let mut text = format!("{HEADER}\n");
    // Writing to a String does not fail.
    if let Some(mark) = content.region {
        let _ = write!(text, "region {:x}", mark.memory.0);
        for part in [mark.code, mark.constants, mark.data, mark.rings] {
            let _ = write!(text, " {:x} {:x}", part.at.0, part.len);
        }
        text.push_str("\ntaken");
        let PayloadMarks { text: payload_text, executed, constants, data } = mark.payloads;
        for bytes in [mark.used, payload_text, executed, constants, data] {
            let _ = write!(text, " {bytes:x}");
        }
        text.push('\n');
    }
    for site in content.sites.values() {
        let _ = write!(text, "site {:x} {:x} ", site.gpa.0, site.at.0);
        let ours: Vec<String> = site.ours.iter().map(|form| digits(form)).collect();
        let _ = writeln!(text, "{} {} {}", digits(&site.original), ours.join(","), site.function);
    }
    let _ = writeln!(text, "end {:x}", content.sites.len());
    text
}

/// The content of a journal's text, or the line that is wrong and what is wrong with it.
fn parse(text: &str) -> Result<Content, (usize, &'static str)> {
    let mut content = Content::default();
    let mut lines = (1..).zip(text.lines());
    if lines.next().is_none_or(|(_, line)| line != HEADER) {
        return Err((1, "it is not a journal of this version"));
    }
    let mut last = 1;
    while let Some((number, line)) = lines.next() {
        last = number;
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match kind {
            "region" => {
                let next = lines.next().and_then(|(_, line)| line.strip_prefix("taken "));
                let mark = next.and_then(|taken| region(rest, taken));
                let mark = mark.ok_or((number, "it does not tell where the region is"))?;
                content.region = Some(mark);
            }
            "site" => {
                let site = site(rest).ok_or((number, "it does not tell what a site holds"))?;
                content.sites.insert(site.gpa, site);
            }
            "end" if number_in(rest) == Some(content.sites.len() as u64) => {
                return match lines.next() {
                    None => Ok(content),
                    Some((behind, _)) => Err((behind, "something follows its end")),
                };
            }
            _ => return Err((number, "it is none that a journal has there")),
        }
    }
    Err((last, "it ends too early"))
}

fn number_in(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

fn numbers<const N: usize>(text: &str) -> Option<[u64; N]> {
    let numbers = text.split(' ').map(number_in).collect::<Option<Vec<_>>>()?;
    numbers.try_into().ok()
}

fn region(parts: &str, taken: &str) -> Option<RegionMark> {
    let [memory, code, code_len, constants, constants_len, data, data_len, rings, rings_len] =
        numbers(parts)?;
    let [used, text, executed, constants_taken, data_taken] = numbers(taken)?;
    let part = |at, len| PartMark { at: Gva(at), len };
    Some(RegionMark {
        memory: Gpa(memory),
        code: part(code, code_len),
        constants: part(constants, constants_len),
        data: part(data, data_len),
        rings: part(rings, rings_len),
        used,
        payloads: PayloadMarks { text, executed, constants: constants_taken, data: data_taken },
    })
}

fn site(rest: &str) -> Option<Entry> {
    let mut words = rest.splitn(5, ' ');
    let gpa = Gpa(number_in(words.next()?)?);
    let at = Gva(number_in(words.next()?)?);
    let original = bytes(words.next()?)?;
    let ours = words.next()?.split(',').map(bytes).collect::<Option<_>>()?;
    Some(Entry { function: words.next()?.into(), at, gpa, original, ours })
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(digits: &str) -> Option<Vec<u8>> {
    let pair = |pair: &[u8]| {
        let digits = std::str::from_utf8(pair).ok().filter(|_| pair.len() == 2)?;
        u8::from_str_radix(digits, 16).ok()
    };
    digits.as_bytes().chunks(2).map(pair).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn a_site(gpa: u64, function: &str) -> Entry {
        Entry {
            function: Arc::from(function),
            at: Gva(0xffff_ffff_8100_0000 + gpa),
            gpa: Gpa(gpa),
            original: vec![0x0f, 0x1f, 0x44, 0, 0],
            ours: vec![vec![0xe8, 1, 2, 3, 4]],
        }
    }

    pub fn a_mark() -> RegionMark {
        let part = |at, len| PartMark { at: Gva(at), len };
        RegionMark {
            memory: Gpa(0x2000_0000),
            code: part(0xffff_ffff_bee0_0000, 2 << 20),
            constants: part(0xffff_ffff_bf00_0000, 2 << 20),
            data: part(0xffff_ffff_bf20_0000, 2 << 20),
            rings: part(0xffff_ffff_bf40_0000, 16 << 20),
            used: 128,
            payloads: PayloadMarks::default(),
        }
    }

    /// A file of a test's own, removed with it.
    struct Place(PathBuf);

    impl Place {
        fn new(test: &str) -> Self {
            Self(std::env::temp_dir().join(format!("journal-{}-{test}", std::process::id())))
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            // The test may have removed it.
            let _ = fs::remove_file(&self.0);
        }
    }

    #[test]
    fn what_is_noted_is_found_by_the_next_and_what_is_settled_is_not() {
        let place = Place::new("noted");
        let journal = Journal::open(&place.0).unwrap();
        assert_eq!((journal.sites(), journal.region()), (vec![], None));
        let changing = [vec![0xe8, 1, 2, 3, 4], vec![0xe9, 5, 6, 7, 8]].to_vec();
        let changing = Entry { ours: changing, ..a_site(0x2000, "a name with spaces") };
        let sites = [a_site(0x1000, "vfs_read"), changing];
        journal.note_region(a_mark()).unwrap();
        journal.note_code(4096).unwrap();
        let payloads = PayloadMarks { text: 64, executed: 128, constants: 192, data: 256 };
        journal.note_payloads(payloads).unwrap();
        journal.intend(sites.iter().cloned()).unwrap();

        let next = Journal::open(&place.0).unwrap();
        assert_eq!(next.region(), Some(RegionMark { used: 4096, payloads, ..a_mark() }));
        assert_eq!(next.sites(), sites);
        next.settle([Gpa(0x1000)].into_iter()).unwrap();

        let after = Journal::open(&place.0).unwrap();
        assert_eq!(after.sites(), &sites[1..]);
        after.settle(sites.iter().map(|site| site.gpa)).unwrap();
        assert_eq!(after.sites(), []);
        after.discard().unwrap();
        assert!(!place.0.exists());
    }

    #[test]
    fn a_journal_that_can_not_be_written_says_so_and_keeps_what_it_had() {
        let journal = Journal::open("/nonexistent/folder/journal").unwrap();
        let error = journal.intend([a_site(0x1000, "vfs_read")].into_iter()).unwrap_err();
        assert!(error.to_string().contains("can't be written"), "{error}");
        assert_eq!(journal.sites(), []);
    }

    #[test]
    fn a_journal_with_a_piece_missing_is_damaged_wherever_it_is_cut() {
        let mut content = Content { region: Some(a_mark()), ..Content::default() };
        for gpa in [0x1000, 0x2000] {
            content.sites.insert(Gpa(gpa), a_site(gpa, "f"));
        }
        let text = spell(&content);
        assert_eq!(parse(&text).as_ref(), Ok(&content));
        for cut in 0..text.len() - 1 {
            assert!(parse(&text[..cut]).is_err(), "cut at {cut}");
        }
        assert!(parse(&format!("{text}more")).is_err());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(vmm-journal 2\n)?(site [0-9a-fx, ]{0,40}\n|region [0-9a-f ]{0,30}\n|taken [0-9a-f ]{0,20}\n|end [0-9a-f]{0,3}\n|.{0,20}\n){0,6}") {
            let _ = parse(&text);
        }
    }
}
