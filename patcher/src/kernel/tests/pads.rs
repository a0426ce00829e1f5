use super::{call, every_kind, guest};
use crate::addr::{Gpa, Gva};
use crate::kernel::{Refusal, Refused};
use crate::synthetic::{Blueprint, Guest, TableOrder};

/// The refusals of a guest's pads, by address.
fn refused(guest: &Guest) -> Vec<Refused> {
    guest.kernel().pads(&guest.ram).unwrap().refused
}

/// The one refusal beside those of init text.
fn only_refusal(guest: &Guest, at: Gva) -> Refusal {
    let mut refused = refused(guest);
    refused.retain(|refused| refused.why != Refusal::InitText);
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_eq!(refused[0].at, at);
    refused.remove(0).why
}

#[test]
fn every_pad_is_listed_with_its_function_and_prefix() {
    for blueprint in every_kind() {
        let guest = Guest::new(&blueprint);
        let pads = guest.kernel().pads(&guest.ram).unwrap();
        assert_eq!(pads.sites.len(), blueprint.functions);
        for (site, function) in pads.sites.iter().zip(&guest.functions) {
            assert_eq!(*site.name, *function.name);
            assert_eq!((site.function, site.at), (function.entry, function.pad));
            assert_eq!(site.gpa, guest.physical(function.pad));
            assert_eq!(*site.original, [0x0f, 0x1f, 0x44, 0, 0]);
            assert_eq!(site.prefix.bytes.len() as u64, function.pad.0 - function.entry.0);
        }
        assert_eq!(pads.refused.len(), 16);
        assert!(pads.refused.iter().all(|refused| refused.why == Refusal::InitText));
        let kinds = |name| pads.sites.iter().filter(|site| site.prefix.name == name).count();
        let landing = blueprint.order == TableOrder::OffsetsLast
            || blueprint.order == TableOrder::SelfRelative;
        assert_eq!(kinds("endbr64"), if landing { blueprint.functions / 4 } else { 0 });
    }
}

#[test]
fn the_idle_pads_of_older_kernels_on_amd_are_sites_too() {
    let guest = guest();
    let pad = guest.functions[9].pad;
    guest.poke(pad, &[0x66, 0x66, 0x66, 0x66, 0x90]);
    let pads = guest.kernel().pads(&guest.ram).unwrap();
    let site = pads.sites.iter().find(|site| site.at == pad).unwrap();
    assert_eq!(site.original.to_string(), "66 66 66 66 90");
}

#[test]
fn a_pad_that_is_not_idle_is_refused_for_what_it_is() {
    let target = Gva(0xffff_ffff_c020_1000);
    let guest = guest();
    let pad = guest.functions[12].pad;
    let hook = guest.symbol("__fentry__");
    let mut jump = call(pad, target);
    jump[0] = 0xe9;
    let cases: [(&[u8], Refusal); 5] = [
        (&call(pad, target), Refusal::GuestTraces { target: Some(target) }),
        (&jump, Refusal::GuestTraces { target: Some(target) }),
        (&call(pad, hook), Refusal::NotYet),
        (&[0xcc, 0x1f, 0x44, 0, 0], Refusal::Changing),
        (
            &[0xeb, 3, 0x90, 0x90, 0x90],
            Refusal::UnknownBytes {
                found: crate::arch::PadBytes::new(&[0xeb, 3, 0x90, 0x90, 0x90]),
            },
        ),
    ];
    for (bytes, why) in cases {
        guest.poke(pad, bytes);
        assert_eq!(only_refusal(&guest, pad), why);
    }
}

#[test]
fn a_record_that_the_guest_counts_a_tracer_for_is_left_to_it() {
    for flags in [1u64, 1 << 31, 0x9800_0001] {
        let guest = guest();
        guest.poke_u64(guest.record_groups[0].records + 16 * 5 + 8, flags);
        let why = only_refusal(&guest, guest.functions[5].pad);
        assert_eq!(why, Refusal::GuestTraces { target: None });
    }
    // A function that was traced once is free again.
    let guest = guest();
    guest.poke_u64(guest.record_groups[0].records + 16 * 5 + 8, 1 << 20);
    assert_eq!(refused(&guest).len(), 16);
}

#[test]
fn dead_weak_code_is_refused_under_the_name_that_the_guest_shows() {
    let guest = guest();
    let record = guest.record_groups[0].records + 16 * 5;
    // The kernel has given the record up.
    guest.poke_u64(record, guest.functions[5].pad.0 + 16);
    guest.poke_u64(record + 8, 1 << 25);
    let refused = refused(&guest);
    let dead: Vec<_> = refused.iter().filter(|r| r.why == Refusal::DeadWeak).collect();
    assert_eq!(*dead[0].name, *format!("__ftrace_invalid_address___{}", 16 + prefix(&guest, 5)));
    // Kernels before 5.19 do not: it shows by lying inside another function.
    guest.poke_u64(record + 8, 0);
    assert_eq!(only_refusal(&guest, guest.functions[5].pad + 16), Refusal::DeadWeak);
}

fn prefix(guest: &Guest, index: usize) -> u64 {
    guest.functions[index].pad.0 - guest.functions[index].entry.0
}

#[test]
fn pads_behind_an_unknown_prefix_are_refused() {
    let guest = guest();
    let function = &guest.functions[4];
    assert_eq!(function.pad, function.entry + 4);
    guest.poke(function.entry, &[0x0f, 0x1f, 0x40, 0x00]);
    assert!(matches!(only_refusal(&guest, function.pad), Refusal::UnknownPrefix { .. }));
}

#[test]
fn records_outside_the_image_are_a_modules() {
    let guest = guest();
    let module = Gva(0xffff_ffff_c012_3450);
    guest.poke_u64(guest.record_groups[1].records, module.0);
    assert_eq!(only_refusal(&guest, module), Refusal::Module);
}

#[test]
fn text_that_the_kernel_does_not_map_where_the_image_has_it_is_refused() {
    let guest = guest();
    let kernel = guest.kernel();
    let entry = guest.image_directory() + 8 * (guest.blueprint().base.0 >> 21 & 0x1ff);
    guest.poke_u64(entry, 0);
    let pads = kernel.pads(&guest.ram).unwrap();
    assert!(pads.sites.is_empty());
    guest.poke_u64(entry, 0x2001e1);
    assert!(kernel.pads(&guest.ram).unwrap().sites.is_empty());
}

#[test]
fn a_pad_in_two_pages_is_refused() {
    let mut guest = guest();
    // The last function of a page, moved to where its pad does not fit any more.
    let function = guest.functions[63].clone();
    let crossing = function.entry + 0x3d;
    assert_eq!(crossing.0 % 0x1000, 0xffd);
    guest.change_symbol(&function.name, |symbol| symbol.address = crossing.0);
    guest.poke_u64(guest.record_groups[0].records + 16 * 63, crossing.0);
    assert_eq!(only_refusal(&guest, crossing), Refusal::CrossesPage);
}

#[test]
fn a_record_that_is_listed_twice_is_one_pad_and_in_use_if_either_is() {
    let guest = guest();
    let records = guest.record_groups[0].records;
    guest.poke_u64(records + 16 * 7, guest.functions[100].pad.0);
    let sites = guest.kernel().pads(&guest.ram).unwrap().sites;
    assert_eq!(sites.len(), guest.blueprint().functions - 1);
    guest.poke_u64(records + 16 * 7 + 8, 1);
    let why = only_refusal(&guest, guest.functions[100].pad);
    assert_eq!(why, Refusal::GuestTraces { target: None });
}

#[test]
fn without_the_lists_symbol_the_same_records_are_found_by_what_leads_to_them() {
    for order in TableOrder::ALL {
        let mut guest = Guest::new(&Blueprint { order, ..Blueprint::default() });
        let listed = guest.kernel().pads(&guest.ram).unwrap();
        guest.rename_symbol("ftrace_pages_start", "something_else_here");
        let kernel = guest.kernel();
        assert_eq!(kernel.symbols().address("ftrace_pages_start"), None);
        let scanned = kernel.pads(&guest.ram).unwrap();
        assert!(scanned.sites == listed.sites);
    }
}

#[test]
fn of_several_variables_that_lead_to_records_the_first_of_the_list_counts() {
    let mut guest = guest();
    guest.rename_symbol("ftrace_pages_start", "something_else_here");
    let before = guest.kernel().pads(&guest.ram).unwrap().sites.len();
    // One to the list's last group, and one to a group of ascending addresses of text that are no
    // pads, as in a table of exceptions.
    let spare = guest.symbol("linux_banner") - 16;
    let last = guest.record_groups.last().unwrap().descriptor;
    let fake = guest.direct(Gpa(0x1f0_0000));
    guest.poke_u64(spare, last.0);
    guest.poke_u64(spare + 8, fake.0);
    let records = fake + 0x1000;
    guest.poke_u64(fake + 8, records.0);
    guest.poke(fake + 16, &[0, 1, 0, 0, 10, 0, 0, 0]);
    for index in 0..256 {
        guest.poke_u64(records + 16 * index, guest.functions[0].entry.0 + 32 + 64 * index);
    }
    assert_eq!(guest.kernel().pads(&guest.ram).unwrap().sites.len(), before);
    // With the variable gone, there is nothing but the last group.
    guest.poke_u64(guest.symbol("something_else_here"), 0);
    let left = guest.record_groups.last().unwrap().count;
    let pads = guest.kernel().pads(&guest.ram).unwrap();
    assert_eq!(pads.sites.len() + pads.refused.len(), left);
}
