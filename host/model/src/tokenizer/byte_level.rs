//! The byte alphabet of byte-level BPE: how token texts in vocabulary files spell arbitrary bytes in printable characters.
//!
//! The 188 bytes that are printable in Latin-1 stand for themselves; the other 68, in order, are written as U+0100 and up
//! (so a space is `Ġ`, U+0120). This is the mapping GPT-2 introduced.

/// Whether a byte is written as the Latin-1 character of the same number.
fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// The character for each byte.
pub(super) fn alphabet() -> [char; 256] {
    let mut table = ['\0'; 256];
    let mut shifted = 0x100..;
    for byte in 0..=255u8 {
        let code = if is_printable(byte) { u32::from(byte) } else { shifted.next().unwrap_or_default() };
        table[usize::from(byte)] = char::from_u32(code).unwrap_or_default();
    }
    table
}

/// The byte a character stands for, by character number; `None` outside the alphabet.
pub(super) struct ByteDecoder([Option<u8>; 0x144]);

impl ByteDecoder {
    pub(super) fn new() -> Self {
        let mut table = [None; 0x144];
        for (byte, c) in (0..=255u8).zip(alphabet()) {
            table[c as usize] = Some(byte);
        }
        Self(table)
    }

    /// The bytes a token text spells, or `None` if it holds a character outside the alphabet.
    pub(super) fn decode(&self, text: &str) -> Option<Vec<u8>> {
        text.chars().map(|c| self.0.get(c as usize).copied().flatten()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_has_256_different_characters_and_decodes_back() {
        let decoder = ByteDecoder::new();
        for (byte, c) in (0..=255u8).zip(alphabet()) {
            assert_eq!(decoder.decode(&c.to_string()), Some(vec![byte]));
        }
        assert_eq!(alphabet()[usize::from(b' ')], 'Ġ');
        assert_eq!(alphabet()[usize::from(b'\n')], 'Ċ');
        assert_eq!(alphabet()[0xad], '\u{143}');
        assert_eq!(decoder.decode("漢"), None);
    }
}
