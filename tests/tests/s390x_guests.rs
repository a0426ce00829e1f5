//! Stock s390x guests under QEMU's emulation: big-endian, in small pages, with hotpatch pads.

use guest_images::Architecture::S390x;
use guest_images::Series;
use tests::emulated::{
    a_panic_is_told, every_call_makes_one_record, every_function_is_armed_and_put_back,
};
use tests::graph::the_tree_is_the_guests_own;
use tests::recorder;

#[test]
fn every_call_of_a_6_1_kernel_makes_one_record() {
    every_call_makes_one_record(S390x, Series::V6_1);
}

#[test]
fn every_call_of_a_7_kernel_makes_one_record() {
    every_call_makes_one_record(S390x, Series::V7);
}

#[test]
fn every_function_of_a_6_1_kernel_is_armed_and_put_back_byte_for_byte_while_it_is_busy() {
    every_function_is_armed_and_put_back(S390x, Series::V6_1, 28_000);
}

#[test]
fn every_function_of_a_7_kernel_is_armed_and_put_back_byte_for_byte_while_it_is_busy() {
    every_function_is_armed_and_put_back(S390x, Series::V7, 34_000);
}

/// Its symbols do not name what tells a panic.
#[test]
fn a_panic_of_a_6_1_kernel_is_told() {
    a_panic_is_told(S390x, Series::V6_1);
}

#[test]
fn what_is_filtered_out_never_leaves_the_guest() {
    tests::filtered::what_is_filtered_out_never_leaves_the_guest(S390x, Series::V6_12);
}

#[test]
fn the_tree_of_calls_is_the_one_that_the_guest_sees_itself() {
    the_tree_is_the_guests_own(S390x, Series::V6_1);
}

#[test]
fn the_last_calls_before_a_panic_are_kept() {
    recorder::the_last_calls_before_a_panic_are_kept(S390x, Series::V6_1);
}
