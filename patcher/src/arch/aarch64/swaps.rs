//! Variables that code compares and swaps.

use crate::addr::Gva;

/// See [`Arch::compared_and_swapped`](crate::arch::Arch::compared_and_swapped). The kernel has both
/// ways in its text, one of which it takes: `cas` with its variants, and `ldxr` with `stxr`.
pub(super) fn compared_and_swapped(text: &[u8], at: Gva) -> Vec<Gva> {
    let mut known = [None::<u64>; 32];
    let mut found = Vec::new();
    let words =
        text.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    for (index, word) in words.enumerate() {
        let pc = at.0.wrapping_add(4 * index as u64);
        let (to, from) = (word as usize & 31, word as usize >> 5 & 31);
        if word & 0x9f00_0000 == 0x9000_0000 {
            // adrp: 21 bits of pages, the low two of them apart.
            let pages = (word >> 5 & 0x7_ffff) << 2 | (word >> 29 & 3);
            let pages = i64::from((pages << 11).cast_signed() >> 11);
            known[to] = Some((pc & !0xfff).wrapping_add_signed(pages << 12));
        } else if word & 0xffc0_0000 == 0x9100_0000 {
            // add, of 12 bits that are not shifted
            let more = u64::from(word >> 10 & 0xfff);
            known[to] = known[from].map(|address| address.wrapping_add(more));
        } else if word & 0xffa0_7c00 == 0x88a0_7c00 || word & 0xffff_7c00 == 0x885f_7c00 {
            found.extend(known[from].map(Gva));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Assembles words.
    fn text(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn a_variable_is_found_by_either_way_to_swap_it() {
        // As in nmi_panic of a 6.1 kernel, whose panic_cpu is at ffffa48926034630.
        let at = Gva(0xffff_a489_2489_34f4);
        let singly = text(&[
            0xb000_bd03, // adrp x3, ffffa48926034000
            0x9115_4063, // add x3, x3, #0x550
            0x9103_8060, // add x0, x3, #0xe0
            0x1280_0001, // mov w1, #-1
            0x88e4_fc02, // casal w4, w2, [x0]
        ]);
        assert_eq!(compared_and_swapped(&singly, at), [Gva(0xffff_a489_2603_4630)]);
        let by_two = text(&[
            0xb000_bd04, // adrp x4, ffffa48926034000
            0x9115_4084, // add x4, x4, #0x550
            0x9103_8084, // add x4, x4, #0xe0
            0x885f_7c83, // ldxr w3, [x4]
            0x8801_fc82, // stlxr w1, w2, [x4]
        ]);
        let at = Gva(0xffff_a489_2489_3538);
        assert_eq!(compared_and_swapped(&by_two, at), [Gva(0xffff_a489_2603_4630)]);
        // Pages in front of the code.
        let before = text(&[0x90ff_ffe1, 0x885f_7c23]);
        assert_eq!(compared_and_swapped(&before, Gva(0x10_0ffc)), [Gva(0xf_c000)]);
    }

    #[test]
    fn an_address_that_the_code_was_given_is_none_that_can_be_told() {
        assert_eq!(compared_and_swapped(&text(&[0x88e4_fc02, 0x885f_7c83]), Gva(0x1000)), []);
        assert_eq!(compared_and_swapped(&[0x02, 0xfc, 0xe4], Gva(u64::MAX - 1)), []);
    }
}
