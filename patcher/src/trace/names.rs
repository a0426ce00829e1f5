//! The names of the functions in a trace.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::sink::Name;
use crate::addr::Gva;
use crate::kernel::{Kernel, Site};

/// Names the two addresses of a record.
#[derive(Debug)]
pub struct Names<'k> {
    kernel: &'k Kernel,
    /// The half that callers in records lack; `None` where they are whole.
    high_half: Option<u64>,
    /// Every function that was ever traced.
    functions: Vec<Named>,
    /// Indices in `functions`, by the low half of the address behind the site's instruction.
    by_ip: FxHashMap<u32, u32>,
    /// Those with the same indices, by where they begin.
    by_beginning: FxHashMap<u64, u32>,
    /// Of other addresses that records of a function may carry the low halves, and of the one that it
    /// was added with.
    aliases: FxHashMap<u32, u32>,
    callers: FxHashMap<u64, Named>,
    next_id: u64,
}

/// What a [`Name`] is made of.
#[derive(Debug)]
struct Named {
    id: u64,
    text: Arc<str>,
    address: Gva,
    offset: u64,
}

impl Named {
    fn name(&self) -> Name<'_> {
        Name { id: self.id, text: &self.text, address: self.address.0, offset: self.offset }
    }
}

/// Callers remembered at most: a guest that writes records of its own can name four thousand million.
const MAX_CALLERS: usize = 1 << 18;

impl<'k> Names<'k> {
    /// Names for records of functions of this kernel, which are yet to be added.
    #[must_use]
    pub fn new(kernel: &'k Kernel) -> Self {
        Self {
            kernel,
            high_half: (!kernel.arch().records_whole_callers())
                .then(|| kernel.text().start.0 & !u64::from(u32::MAX)),
            functions: Vec::new(),
            by_ip: FxHashMap::default(),
            by_beginning: FxHashMap::default(),
            aliases: FxHashMap::default(),
            callers: FxHashMap::default(),
            next_id: 0,
        }
    }

    /// Adds the function of a site, whose records carry `ip`, and gives its index: they count from 0.
    pub fn add(&mut self, site: &Site, ip: Gva) -> usize {
        let index = self.functions.len();
        self.functions.push(Named {
            id: self.next_id,
            text: (&*site.name).into(),
            address: site.at,
            offset: site.at.0.wrapping_sub(site.function.0),
        });
        self.by_ip.insert(ip.0 as u32, index as u32);
        self.by_beginning.insert(site.function.0, index as u32);
        self.next_id += 1;
        index
    }

    /// Has records that carry `alias` taken for records of the function of `ip`, whether that was added
    /// already or will be.
    pub fn add_alias(&mut self, ip: Gva, alias: Gva) {
        self.aliases.insert(alias.0 as u32, ip.0 as u32);
    }

    /// The index of the function whose records carry an `ip` with this low half.
    #[must_use]
    pub fn index_of(&self, ip: u32) -> Option<usize> {
        let alias = || self.by_ip.get(self.aliases.get(&ip)?);
        self.by_ip.get(&ip).or_else(alias).map(|index| *index as usize)
    }

    /// The index of the function whose records carry an `ip` with this low half, and whether the record
    /// is of a return: these carry one more than the records of calls, which no site's do.
    #[must_use]
    pub fn record_of(&self, ip: u32) -> Option<(usize, bool)> {
        let call = self.index_of(ip).map(|index| (index, false));
        call.or_else(|| Some((self.index_of(ip.wrapping_sub(1))?, true)))
    }

    /// Whether a record with that may be of a return from a call that an earlier session has hooked, which
    /// comes whenever it comes.
    #[must_use]
    pub fn may_be_earlier(&self, ip: u32) -> bool {
        let text = self.kernel.text();
        u64::from(ip.wrapping_sub(text.start.0 as u32)) <= text.end.0.saturating_sub(text.start.0)
    }

    /// The name of the function with that index.
    #[must_use]
    pub fn function(&self, index: usize) -> &Arc<str> {
        &self.functions[index].text
    }

    /// The names of the function with that index and of its caller, of which the record of the call
    /// has `parent`. A caller outside the kernel's own image is named by its address, and one that is
    /// not known by 0.
    pub fn of(&mut self, parent: Option<u64>, index: usize) -> (Name<'_>, Name<'_>) {
        let caller = match (parent, self.high_half) {
            (None, _) => 0,
            (Some(parent), Some(high)) => high | parent & u64::from(u32::MAX),
            (Some(parent), None) => parent,
        };
        self.learn_caller(caller);
        (self.functions[index].name(), self.callers[&caller].name())
    }

    /// The index of the function that begins at that address.
    #[must_use]
    pub fn index_of_beginning(&self, begins: u64) -> Option<u32> {
        self.by_beginning.get(&begins).copied()
    }

    fn learn_caller(&mut self, parent: u64) {
        if self.callers.len() >= MAX_CALLERS {
            self.callers.clear();
        }
        let (kernel, next_id) = (self.kernel, &mut self.next_id);
        self.callers.entry(parent).or_insert_with(|| {
            let address = Gva(parent);
            let (text, offset) = match kernel.symbols().lookup(address) {
                Some(place) if kernel.image().range.contains(&address) => {
                    (place.symbol.name.into(), place.offset)
                }
                _ => (format!("{address}").into(), 0),
            };
            *next_id += 1;
            Named { id: *next_id - 1, text, address, offset }
        });
    }
}
