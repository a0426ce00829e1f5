//! What stops cost: how long all vCPUs of a guest stand still while functions are patched, where that
//! time goes, and what the guest sees of it.
//!
//! [`busy_guest`] is a guest that any KVM runs, with as many pads as a kernel has. [`StopAll`] makes
//! rounds on it or on a stock guest, and a [`Report`] tells what came of them: as a table, as JSON and
//! as a [plot](plot()).

mod gaps;
mod guest;
mod plot;
mod report;
mod stop_all;
mod table;

pub use gaps::{GapError, Gaps, SharedGaps};
pub use guest::{FUNCTIONS, busy_guest, hardware};
pub use plot::plot;
pub use report::{FORMAT, Host, Measured, Report, Run, Subject, Summary, Timing};
pub use stop_all::{Gap, Round, Stand, StopAll, StopAllError, spread};
pub use table::table;
