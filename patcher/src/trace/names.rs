//! The names of the functions in a trace.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::ring::RawRecord;
use crate::addr::Gva;
use crate::kernel::Kernel;
use crate::patch::Site;

/// Names the two addresses of a record.
#[derive(Debug)]
pub struct Names<'k> {
    kernel: &'k Kernel,
    /// The half that callers in records lack; `None` where they are whole.
    high_half: Option<u64>,
    functions: Vec<(Arc<str>, u64)>,
    /// Indices in `functions`, by the low half of the address behind the site's instruction.
    by_ip: FxHashMap<u32, u32>,
    callers: FxHashMap<u64, Arc<str>>,
}

/// Callers remembered at most: a guest that writes records of its own can name four thousand million.
const MAX_CALLERS: usize = 1 << 18;

impl<'k> Names<'k> {
    /// Names for records of these sites.
    #[must_use]
    pub fn new(kernel: &'k Kernel, sites: &[Site]) -> Self {
        let key = |site: &Site| (site.at + site.original.len() as u64).0 as u32;
        Self {
            kernel,
            high_half: (!kernel.arch().records_whole_callers())
                .then(|| kernel.text().start.0 & !u64::from(u32::MAX)),
            functions: sites.iter().map(|site| (Arc::clone(&site.function), 0)).collect(),
            by_ip: sites.iter().map(key).zip(0..).collect(),
            callers: FxHashMap::default(),
        }
    }

    /// Whether a site of the session is what `ip` lies behind.
    #[must_use]
    pub fn knows(&self, ip: u32) -> bool {
        self.by_ip.contains_key(&ip)
    }

    /// The function and the caller of a record, which is counted. A caller outside the kernel's own
    /// image is named by its address.
    pub fn of(&mut self, record: &RawRecord) -> (&str, &str) {
        if self.callers.len() >= MAX_CALLERS {
            self.callers.clear();
        }
        let kernel = self.kernel;
        let parent = match self.high_half {
            Some(high) => high | record.parent & u64::from(u32::MAX),
            None => record.parent,
        };
        let caller = self.callers.entry(parent).or_insert_with(|| {
            let address = Gva(parent);
            match kernel.symbols().lookup(address) {
                Some(place) if kernel.image().range.contains(&address) => place.symbol.name.into(),
                _ => format!("{address}").into(),
            }
        });
        let function = match self.by_ip.get(&record.ip) {
            Some(index) => {
                let (name, count) = &mut self.functions[*index as usize];
                *count += 1;
                name
            }
            None => "",
        };
        (function, caller)
    }

    /// Every function that was called and how often, most first.
    #[must_use]
    pub fn counts(&self) -> Vec<(Arc<str>, u64)> {
        let mut counts: Vec<_> =
            self.functions.iter().filter(|(_, count)| *count > 0).cloned().collect();
        counts.sort_by(|(a_name, a), (b_name, b)| b.cmp(a).then_with(|| a_name.cmp(b_name)));
        counts
    }
}
