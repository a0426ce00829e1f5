//! The names of the functions in a trace.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::ring::RawRecord;
use super::sink::Name;
use crate::addr::Gva;
use crate::kernel::{Kernel, ModuleCode, Site};

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
    /// What functions were at the addresses in `by_ip` before: code of modules that are gone.
    earlier: FxHashMap<u32, Vec<Earlier>>,
    callers: FxHashMap<u64, Named>,
    /// The code of modules; of one that is gone until others come.
    code: ModuleCode,
    next_id: u64,
}

/// The heads of all rings at some moment, by CPU: it divides the records of a trace.
pub(super) type Heads = Arc<[u64]>;

/// A function that was where another is now.
#[derive(Debug)]
struct Earlier {
    index: u32,
    /// Which records are its own; all, until it is known since when the other one is armed.
    until: Option<Heads>,
}

impl Earlier {
    fn owns(&self, record: &RawRecord) -> bool {
        self.until.as_ref().is_none_or(|until| is_before(record, until))
    }
}

fn is_before(record: &RawRecord, heads: &Heads) -> bool {
    heads.get(usize::from(record.cpu)).is_some_and(|head| record.index < *head)
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

/// How many functions of modules that are gone are remembered of one address: beyond that, records that
/// nobody has read for so long get the names of what came later.
const MAX_EARLIER: usize = 16;

/// Functions remembered at most: a guest that loads modules for ever can have any number.
pub(super) const MAX_FUNCTIONS: usize = 1 << 20;

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
            earlier: FxHashMap::default(),
            callers: FxHashMap::default(),
            code: ModuleCode::default(),
            next_id: 0,
        }
    }

    /// Adds the function of a site, whose records carry `ip`, and gives its index: they count from 0. One
    /// that was there before keeps its index. What else was there before, in a module that is gone, keeps
    /// its records until [`Names::divide`].
    pub fn add(&mut self, site: &Site, ip: Gva) -> usize {
        let low = ip.0 as u32;
        let is_it = |index: u32| {
            let known = &self.functions[index as usize];
            *known.text == *site.name && known.address == site.at
        };
        if let Some(now) = self.by_ip.get(&low).copied() {
            if is_it(now) {
                return now as usize;
            }
            let earlier = self.earlier.entry(low).or_default();
            let known = earlier.iter().map(|earlier| earlier.index).find(|index| is_it(*index));
            if earlier.len() >= MAX_EARLIER {
                earlier.remove(0);
            }
            earlier.push(Earlier { index: now, until: None });
            if let Some(index) = known {
                self.by_ip.insert(low, index);
                return index as usize;
            }
        }
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

    /// The index of the function whose record that is, and whether it is of a return: these carry one more
    /// than the records of calls, which no site's do.
    #[must_use]
    pub fn record_of(&self, record: &RawRecord) -> Option<(usize, bool)> {
        let call = self.writer(record.ip, record).map(|index| (index, false));
        call.or_else(|| Some((self.writer(record.ip.wrapping_sub(1), record)?, true)))
    }

    /// The index of the function that wrote a record which carries `ip`.
    fn writer(&self, ip: u32, record: &RawRecord) -> Option<usize> {
        if !self.earlier.is_empty()
            && let Some(earlier) = self.earlier.get(&ip)
            && let Some(earlier) = earlier.iter().find(|earlier| earlier.owns(record))
        {
            return Some(earlier.index as usize);
        }
        self.index_of(ip)
    }

    /// How many functions there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.functions.len()
    }

    /// Says that functions which were added since this was last called are armed since those heads.
    pub fn divide(&mut self, heads: &Heads) {
        for earlier in self.earlier.values_mut().flatten() {
            earlier.until.get_or_insert_with(|| Arc::clone(heads));
        }
    }

    /// The code of modules by which callers are named.
    #[must_use]
    pub fn code(&self) -> &ModuleCode {
        &self.code
    }

    /// Takes other code of modules: callers are named by it from here on.
    pub fn set_code(&mut self, code: ModuleCode) {
        self.code = code;
        let image = &self.kernel.image().range;
        self.callers.retain(|address, _| image.contains(&Gva(*address)));
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
    /// has `parent`. A caller that is neither the kernel's own nor a module's is named by its address, and
    /// one that is not known by 0.
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
        let code = &self.code;
        self.callers.entry(parent).or_insert_with(|| {
            let address = Gva(parent);
            let in_image = kernel.image().range.contains(&address);
            let place = kernel.symbols().lookup(address).filter(|_| in_image);
            let (text, offset) = match (place, code.lookup(address)) {
                (Some(place), _) => (place.symbol.name.into(), place.offset),
                (None, Some(place)) if !in_image => (place.to_string().into(), place.offset),
                _ => (format!("{address}").into(), 0),
            };
            *next_id += 1;
            Named { id: *next_id - 1, text, address, offset }
        });
    }
}
