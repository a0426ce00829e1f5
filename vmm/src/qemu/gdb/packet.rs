//! How bytes are spelled in packets.

/// Whether this may name a vCPU.
pub(super) fn is_thread(id: &str) -> bool {
    !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_hexdigit() || b"p.".contains(&byte))
}

/// Appends a packet, as it is sent.
pub(super) fn frame(packet: &[u8], out: &mut Vec<u8>) {
    out.push(b'$');
    out.extend_from_slice(packet);
    out.push(b'#');
    hex(&[checksum(packet)], out);
}

/// The sum of a packet's bytes.
pub(super) fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// Appends bytes in hexadecimal digits.
pub(super) fn hex(bytes: &[u8], out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for byte in bytes {
        out.extend([DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    }
}

/// The bytes that hexadecimal digits spell, if they do.
pub(super) fn unhex(digits: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let pairs = digits.chunks(2);
    pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?)).collect()
}

/// Undoes the protocol's escapes of binary data.
pub(super) fn unescape(part: &[u8], out: &mut Vec<u8>) {
    let mut bytes = part.iter();
    while let Some(&byte) = bytes.next() {
        match byte {
            b'}' => out.extend(bytes.next().map(|escaped| escaped ^ 0x20)),
            byte => out.push(byte),
        }
    }
}
