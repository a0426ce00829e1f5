//! Recordings: traces as they came, cheap to write, to be read back and made into any other form.
//!
//! `docs/recording-format.md` describes the file. It is a row of blocks that are only ever appended,
//! each with a check sum, so what was flushed is there whatever became of the writer. A block that is
//! cut or spoilt ends what can be read; everything in front of it is whole.

mod block;
mod reader;
mod recorder;
#[cfg(test)]
mod tests;

pub use reader::{Recording, RecordingError, Tail};
pub use recorder::Recorder;

/// What a recording begins with. The first byte is no text's, and the last two are changed by what
/// takes it for text.
const MAGIC: [u8; 8] = *b"\x89VMMREC\n";

/// The version of the format that is written and read.
const VERSION: u32 = 3;

/// The oldest version that is read: it lacks values.
const OLDEST: u32 = 2;

/// Bytes in a block at most, beside its header.
const MAX_BLOCK: usize = 1 << 20;

/// Names that calls can refer to at a time, and tasks likewise.
const MAX_KNOWN: usize = 1 << 18;

/// Bytes that these names have together at most.
const MAX_KNOWN_BYTES: usize = 32 << 20;

/// Bytes of a name at most; longer ones are cut.
const MAX_NAME: usize = 1024;

/// Bytes of an event, without what there may be behind it.
const CALL_BYTES: usize = 24;

/// The bit of an event's context that tells that there is something behind it.
const MORE: u8 = 1 << 6;

/// The bit of the kind of what is behind an event that tells that values are behind that.
const VALUES: u8 = 1 << 7;

/// Bytes behind an event at most, with its kind and their number.
const MAX_MORE: usize = 1 << 12;
