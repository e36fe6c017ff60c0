//! Turning a stream of token bytes into text as it comes, without ever showing half a character.

/// Decodes bytes that arrive in arbitrary pieces. A sequence that may still become a character is held back; a byte that
/// can't is replaced by U+FFFD as soon as that is known, just as `String::from_utf8_lossy` would do on the whole.
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    held: Vec<u8>,
}

impl Utf8Stream {
    /// A stream with nothing held back.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes and returns the text that is complete by now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let keep = incomplete_tail(&self.held);
        let complete = self.held.len() - keep;
        let text = String::from_utf8_lossy(&self.held[..complete]).into_owned();
        self.held.drain(..complete);
        text
    }

    /// Ends the stream: an incomplete sequence becomes U+FFFD.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }

    /// Bytes of an incomplete character that wait for the rest.
    pub fn held(&self) -> &[u8] {
        &self.held
    }
}

/// How many bytes at the end begin a character that more bytes could complete (0 to 3).
fn incomplete_tail(bytes: &[u8]) -> usize {
    let start = bytes.len().saturating_sub(3);
    (start..bytes.len()).find(|&i| is_boundary(bytes[i]) && is_incomplete(&bytes[i..])).map_or(0, |i| bytes.len() - i)
}

/// Whether a byte begins a sequence (is no continuation byte).
fn is_boundary(byte: u8) -> bool {
    byte & 0xc0 != 0x80
}

fn is_incomplete(sequence: &[u8]) -> bool {
    matches!(std::str::from_utf8(sequence), Err(e) if e.valid_up_to() == 0 && e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn half_a_character_is_held_until_the_rest_comes() {
        let mut stream = Utf8Stream::new();
        assert_eq!(stream.push(&[0xf0, 0x9f]), "");
        assert_eq!(stream.push(&[0x98]), "");
        assert_eq!(stream.push(&[0x80, b'!']), "😀!");
        assert_eq!(stream.flush(), "");
    }

    #[test]
    fn impossible_bytes_are_replaced_at_once_and_incomplete_ones_at_the_end() {
        let mut stream = Utf8Stream::new();
        assert_eq!(stream.push(&[0xff, b'a', 0xe4]), "\u{fffd}a");
        assert_eq!(stream.push(b"b"), "\u{fffd}b");
        assert_eq!(stream.push(&[0xe4, 0xbd]), "");
        assert_eq!(stream.flush(), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_text_of_the_whole(bytes in proptest::collection::vec(any::<u8>(), 0..64), cut in 1usize..7) {
            let mut stream = Utf8Stream::new();
            let mut text: String = bytes.chunks(cut).map(|chunk| stream.push(chunk)).collect();
            text += &stream.flush();
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
