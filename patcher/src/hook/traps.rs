//! Traps: what has to be known of each before it is written, and what the engine is told.

use std::sync::Arc;

use super::{HookError, Hooks};
use crate::addr::Gva;
use crate::arch::PadBytes;
use crate::kernel::{Refused, Site};
use crate::region::{Trap, Traps};

impl Hooks<'_> {
    /// The first instruction of the function of that name, which has no pad, with its original bytes where
    /// ours are; `None` if there is no such function.
    ///
    /// # Errors
    /// Why it can't be trapped.
    #[must_use]
    pub fn unpadded(&self, name: &str) -> Option<Result<Site, Refused>> {
        let mut ours = self.hooks.values().filter(|hook| self.holds_ours(hook));
        let ours = ours.find(|hook| hook.listed.is_unpadded() && *hook.listed.name == *name);
        let ours = ours.map(|hook| Ok(hook.listed.clone()));
        ours.or_else(|| self.kernel.unpadded(self.machine.ram(), name))
    }

    /// The trap for a site, which is noted before it can be met.
    pub(super) fn trap(&mut self, site: &Site) -> Result<PadBytes, HookError> {
        let arch = self.kernel.arch();
        let bytes = arch.encode_trap(&site.original);
        let bytes = bytes.ok_or_else(|| HookError::NoTrap(arch.name()))?;
        let ip = site.at + site.original.len() as u64;
        let resume =
            if site.is_unpadded() { self.copy(site)? } else { ip + u64::from(site.layout.resume) };
        self.traps.insert(site.at, Trap { at: site.at, ip, resume });
        Ok(bytes)
    }

    /// Where a copy of the site's instruction is, which jumps behind the original.
    fn copy(&mut self, site: &Site) -> Result<Gva, HookError> {
        if let Some(at) = self.copies.get(&site.at) {
            return Ok(*at);
        }
        let arch = self.kernel.arch();
        let len = site.original.len() as u64;
        let copy = self.place(|at| {
            let mut code = site.original.to_vec();
            code.extend_from_slice(&arch.encode_jump(at + len, site.at + len)?);
            Ok(code)
        })?;
        self.copies.insert(site.at, copy);
        Ok(copy)
    }

    /// Tells the engine of all traps that are in the guest or may be in a moment. One that has none
    /// to answer is told nothing.
    pub(super) fn announce_traps(&self) -> Result<(), HookError> {
        if self.traps.is_empty() {
            return Ok(());
        }
        Ok(self.machine.set_traps(Arc::new(self.all_traps()))?)
    }

    fn all_traps(&self) -> Traps {
        let traps = self.traps.values().copied();
        Traps::new(traps, self.region.rings(), self.recorded_places())
    }

    /// Has the engine forget traps that are no longer in the guest: what comes to stand there from
    /// then on is the guest's.
    pub(super) fn forget_traps(&mut self) {
        let (arch, hooks) = (self.kernel.arch(), &self.hooks);
        let before = self.traps.len();
        self.traps.retain(|at, _| {
            hooks.get(at).is_some_and(|hook| {
                hook.torn || Some(hook.now) == arch.encode_trap(&hook.listed.original)
            })
        });
        if self.traps.len() < before {
            // It has taken traps before.
            let _ = self.machine.set_traps(Arc::new(self.all_traps()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Hooks, Method, Want};
    use super::*;
    use crate::kernel::{MappedRegion, Refusal};
    use crate::machine::Machine;
    use crate::region::{Part, TrappedCall};
    use crate::synthetic::{Blueprint, Guest};
    use crate::trace::filter::{Filter, Glob};
    use crate::trace::select::Selection;
    use crate::trace::sink::Event;
    use crate::trace::tracer::Tracer;

    /// A guest one of whose functions has no pad and begins with these bytes.
    fn guest(begin: &[u8]) -> Guest {
        let mut guest = Guest::new(&Blueprint { functions: 1100, ..Blueprint::default() });
        guest.rename_symbol("alias_of_00007", "__entry_text_start");
        guest.rename_symbol("alias_of_00507", "__entry_text_end");
        guest.rename_symbol("its_return_thunk", "without_a_pad");
        let at = guest.kernel().symbols().address("without_a_pad").unwrap();
        guest.poke(at, begin);
        guest
    }

    fn only(globs: &[&str]) -> Filter {
        Filter { only: globs.iter().map(|glob| Glob::new(glob)).collect(), except: Vec::new() }
    }

    #[test]
    fn calls_that_are_trapped_are_events_like_others_and_the_text_comes_back() {
        // push %r15; mov %rsp, %rbp
        let guest = guest(&[0x41, 0x57, 0x48, 0x89, 0xe5]);
        let kernel = guest.kernel();
        let region = MappedRegion::new(&guest, &kernel).unwrap();
        let mut hooks = Hooks::new(&guest, &kernel, &region);
        let mut tracer: Tracer<'_, Vec<(String, u64)>> = Tracer::new(&mut hooks).unwrap();
        let selection = Selection::trapping(&hooks, &only(&["vfs_*", "without_a_pad"])).unwrap();
        let sites = selection.sites.clone();
        assert_eq!(sites.iter().map(|site| &*site.name).collect::<Vec<_>>().len(), 3);
        let before: Vec<Vec<u8>> = sites.iter().map(|site| guest.peek(site.at, 8)).collect();
        let (client, armed) = tracer.add(&mut hooks, &selection, Vec::new()).unwrap();
        assert_eq!((armed.functions, armed.written), (3, 3));
        for (site, before) in sites.iter().zip(&before) {
            let now = guest.peek(site.at, 8);
            assert_eq!((&now[..2], &now[2..]), (&[0xe6, 0xe8][..], &before[2..]), "{}", site.name);
        }
        // As an engine answers them, each function once.
        let traps = guest.traps();
        let window = guest.region(Part::Rings);
        for (time, site) in (1..).zip(&sites) {
            let trap = traps.at(site.at).unwrap();
            let call = TrappedCall { cpu: 1, parent: kernel.text().start.0, task: [0; 3] };
            traps.record(&window.memory, &trap, &call, || time);
            if !site.is_unpadded() {
                assert_eq!(trap.resume, site.at + 5);
                continue;
            }
            // A copy, and the way back.
            let mut copy = [0; 7];
            let code = guest.region(Part::Code).memory;
            let offset = (trap.resume.0 - region.range(Part::Code).start.0) as usize;
            vm_memory::Bytes::read_slice(&code, &mut copy, offset).unwrap();
            assert_eq!(copy[..2], [0x41, 0x57]);
            let back = kernel.arch().encode_jump(trap.resume + 2, site.at + 2).unwrap();
            assert_eq!(copy[2..], *back);
        }
        // It is a site of nobody who looks for pads, and known again to who asks for traps.
        assert!(hooks.pads().unwrap().sites.iter().all(|site| !site.is_unpadded()));
        assert_eq!(hooks.unpadded("without_a_pad").unwrap().unwrap(), sites[2]);

        tracer.remove(&mut hooks, client).unwrap();
        let keep = |given: &mut Vec<(String, u64)>, event: &Event<'_>| {
            given.push((event.function.text.to_owned(), event.time_ns));
            Ok(())
        };
        tracer.drain(&hooks, keep);
        let finished = tracer.finish(client, keep).unwrap();
        let expected = (1..).zip(&sites).map(|(time, site)| (site.name.to_string(), time));
        assert_eq!(finished.sink, expected.collect::<Vec<_>>());
        assert_eq!(finished.summary.dropped(), 0);
        for (site, before) in sites.iter().zip(&before) {
            assert_eq!(guest.peek(site.at, 8), *before);
        }
        assert!(guest.traps().is_empty());
    }

    #[test]
    fn what_can_not_be_executed_elsewhere_is_refused_with_the_reason() {
        let refused = |guest: &Guest, name: &str| {
            let kernel = guest.kernel();
            kernel.unpadded(guest.ram(), name).map(|found| found.unwrap_err().why)
        };
        for begin in
            [&[0xc3, 0x90][..], &[0xe9, 0, 0], &[0x0f, 0x1f, 0x44, 0, 0], &[0xcc], &[0x55, 0x90]]
        {
            let why = refused(&guest(begin), "without_a_pad");
            assert!(matches!(why, Some(Refusal::Immovable { .. })), "{why:?}");
        }
        assert_eq!(refused(&guest(&[0x41, 0x57]), "no_such_function"), None);
        assert_eq!(refused(&guest(&[0x41, 0x57]), "function_00020"), Some(Refusal::Entry));
        assert_eq!(refused(&guest(&[0x41, 0x57]), "init_1"), None, "it is no text any more");
        let mut without = guest(&[0x41, 0x57]);
        without.rename_symbol("__entry_text_end", "something_else");
        assert_eq!(refused(&without, "without_a_pad"), Some(Refusal::Entry));
    }

    #[test]
    fn functions_without_pads_are_chosen_by_their_whole_names_only() {
        let guest = guest(&[0x41, 0x57]);
        let kernel = guest.kernel();
        let region = MappedRegion::new(&guest, &kernel).unwrap();
        let mut hooks = Hooks::new(&guest, &kernel, &region);
        assert!(Selection::trapping(&hooks, &only(&["without_*"])).is_err());
        assert!(Selection::beside(&hooks, &only(&["without_a_pad"])).is_err());
        let found = Selection::trapping(&hooks, &only(&["without_a_pad"])).unwrap();
        assert_eq!((found.sites.len(), found.method), (1, Method::Trap));
        // And they can be trapped only.
        let want = Want { redirect: Some(kernel.text().start), ..Want::default() };
        let result =
            hooks.change(&[(&found.sites[0], want)], crate::patch::Foreign::Refuse, &mut ());
        assert!(matches!(result, Err(HookError::NoPad(name)) if &*name == "without_a_pad"));
    }
}
