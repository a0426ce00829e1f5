//! Functions of a bare guest that are measured.

use patcher::patch::Site;
use patcher::region::{Histogram, HistogramsMemory, MEASURE_CALL, Part, RECORD_RETURN};

use super::Driver;

impl Driver<'_> {
    /// The sites of functions that are recorded with their returns, and measured by a clock of `hz`; their
    /// histograms are in the order of the names.
    ///
    /// # Panics
    /// If the pad of one may not be written.
    pub fn measuring(&mut self, names: &[&str], hz: u64) -> Vec<Site> {
        self.pool();
        let data = self.machine.region(Part::Data).memory;
        HistogramsMemory::new(data, self.arch.byte_order()).set_clock(hz).unwrap();
        let mut sites = self.sites(names);
        for (number, (site, name)) in (1..).zip(sites.iter_mut().zip(names)) {
            let resume = self.judge(name).unwrap().layout.resume;
            let to = self.recorded_with_return(RECORD_RETURN | MEASURE_CALL | number, resume);
            site.replacement = self.arch.encode_branch(site.at, to).unwrap();
        }
        sites
    }

    /// What the first so many histograms hold.
    ///
    /// # Panics
    /// If they can't be read.
    #[must_use]
    pub fn measured(&self, count: usize) -> Vec<Histogram> {
        let data = self.machine.region(Part::Data).memory;
        let memory = HistogramsMemory::new(data, self.arch.byte_order());
        memory.read(u16::try_from(count).unwrap()).unwrap()
    }
}
