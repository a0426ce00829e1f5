//! Variables that code compares and swaps.

use crate::addr::Gva;

/// See [`Arch::compared_and_swapped`](crate::arch::Arch::compared_and_swapped): `larl` makes an address
/// and `cs` or `csy` swaps there.
pub(super) fn compared_and_swapped(text: &[u8], at: Gva) -> Vec<Gva> {
    let mut known = [None::<u64>; 16];
    let mut found = Vec::new();
    let mut rest = text;
    let mut pc = at.0;
    while let &[first, ..] = rest {
        // The first two bits of an instruction tell how long it is.
        let length = match first >> 6 {
            0 => 2,
            1 | 2 => 4,
            _ => 6,
        };
        let Some((instruction, behind)) = rest.split_at_checked(length) else { break };
        match *instruction {
            [0xc0, to, a, b, c, d] if to & 0xf == 0 => {
                let distance = 2 * i64::from(i32::from_be_bytes([a, b, c, d]));
                known[usize::from(to >> 4)] = Some(pc.wrapping_add_signed(distance));
            }
            [0xba, _, base, low] => {
                let distance = i64::from(u16::from_be_bytes([base & 0xf, low]));
                found.extend(swapped(&known, base, distance));
            }
            [0xeb, _, base, low, high, 0x14] => {
                let low = i64::from(u16::from_be_bytes([base & 0xf, low]));
                let distance = i64::from(high.cast_signed()) << 12 | low;
                found.extend(swapped(&known, base, distance));
            }
            _ => {}
        }
        (rest, pc) = (behind, pc.wrapping_add(length as u64));
    }
    found
}

/// The address that a base register, the high half of `base`, and a distance make.
fn swapped(known: &[Option<u64>; 16], base: u8, distance: i64) -> Option<Gva> {
    // Register 0 as a base is none.
    let base = Some(usize::from(base >> 4)).filter(|base| *base != 0)?;
    known[base].map(|address| Gva(address.wrapping_add_signed(distance)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// nmi_panic of a 6.1 kernel, whose panic_cpu is at d9dfa8.
    const NMI_PANIC: [u8; 28] = [
        0xc0, 0x04, 0x00, 0x47, 0x8e, 0xcc, // brcl 0,a3a340
        0xa7, 0x18, 0xff, 0xff, // lhi %r1,-1
        0x58, 0x40, 0x03, 0xa0, // l %r4,928
        0xc0, 0x50, 0x00, 0x62, 0xac, 0xf9, // larl %r5,d9dfa8
        0xba, 0x14, 0x50, 0x00, // cs %r1,%r4,0(%r5)
        0x07, 0xfe, 0x07, 0x07, // br %r14
    ];

    #[test]
    fn a_variable_is_found_where_it_is_swapped() {
        assert_eq!(compared_and_swapped(&NMI_PANIC, Gva(0x14_85a8)), [Gva(0xd9_dfa8)]);
        // csy with a negative distance
        let far = [&NMI_PANIC[..20], &[0xeb, 0x14, 0x5f, 0xf8, 0xff, 0x14]].concat();
        assert_eq!(compared_and_swapped(&far, Gva(0x14_85a8)), [Gva(0xd9_dfa0)]);
    }

    #[test]
    fn an_address_that_the_code_was_given_is_none_that_can_be_told() {
        assert_eq!(compared_and_swapped(&NMI_PANIC[20..], Gva(0x1000)), []);
        for cut in 0..NMI_PANIC.len() {
            assert!(compared_and_swapped(&NMI_PANIC[..cut], Gva(u64::MAX)).len() <= 1);
        }
    }
}
