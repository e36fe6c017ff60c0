//! From tokens to the text that a client may see.
//!
//! Bytes are held back for two reasons: they are the beginning of a UTF-8 sequence, or they may be the beginning of a
//! stop text. What is given out is certain: whole characters that are part of no stop text.

use std::sync::Arc;

use crate::vocab::Vocab;

/// Why a token ended the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextEnd {
    /// This stop text appeared; it and what follows are not part of the text.
    Word(String),
    /// A line was indented less than `n_indent`; it is not part of the text.
    Indent,
}

/// What one token added.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    /// Text that became certain.
    pub text: String,
    /// Whether the text ends here.
    pub end: Option<TextEnd>,
}

/// The text of one generation.
#[derive(Debug, Clone)]
pub struct OutputText {
    vocab: Arc<Vocab>,
    render_special: bool,
    stops: Vec<String>,
    /// Bytes that are not certain yet.
    pending: Vec<u8>,
    indent: IndentFilter,
    has_new_line: bool,
}

impl OutputText {
    /// `stops` end the text (empty ones are ignored); `n_indent` is the least indentation of a line, 0 for any;
    /// `render_special` says whether special tokens are text.
    pub fn new(vocab: Arc<Vocab>, stops: &[String], n_indent: u32, render_special: bool) -> Self {
        Self {
            vocab,
            render_special,
            stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(),
            pending: Vec::new(),
            indent: IndentFilter { least: n_indent, ..IndentFilter::default() },
            has_new_line: false,
        }
    }

    /// Whether a newline was generated.
    pub fn has_new_line(&self) -> bool {
        self.has_new_line
    }

    /// Adds a token. After a piece with an end nothing more may be added.
    pub fn push(&mut self, token: u32) -> Piece {
        if self.render_special || !self.vocab.is_special(token) {
            self.pending.extend_from_slice(self.vocab.token_bytes(token));
        }
        if let Some((at, stop)) = self.first_stop() {
            let text = self.take(at);
            self.pending.clear();
            let mut piece = self.indent.filter(text);
            piece.end = piece.end.or(Some(TextEnd::Word(stop)));
            return piece;
        }
        let held = incomplete_tail(&self.pending).max(self.possible_stop());
        let text = self.take(self.pending.len() - held);
        self.indent.filter(text)
    }

    /// Ends the text: what was held back can no longer become a stop text.
    pub fn finish(&mut self) -> String {
        let text = self.take(self.pending.len());
        let mut piece = self.indent.filter(text);
        piece.text.push_str(&std::mem::take(&mut self.indent.held));
        piece.text
    }

    /// Removes `n` pending bytes as text; bytes that are no UTF-8 become U+FFFD.
    fn take(&mut self, n: usize) -> String {
        let text = String::from_utf8_lossy(&self.pending[..n]).into_owned();
        self.pending.drain(..n);
        self.has_new_line |= text.contains('\n');
        text
    }

    /// Place and text of the stop that appears first; of several at one place the longest.
    fn first_stop(&self) -> Option<(usize, String)> {
        let places = self.stops.iter().filter_map(|stop| find(&self.pending, stop.as_bytes()).map(|at| (at, stop)));
        places.min_by_key(|(at, stop)| (*at, usize::MAX - stop.len())).map(|(at, stop)| (at, stop.clone()))
    }

    /// Length of the longest end of the pending bytes that is the beginning of a stop text.
    fn possible_stop(&self) -> usize {
        let longest = |stop: &String| {
            let most = (stop.len() - 1).min(self.pending.len());
            (1..=most).rev().find(|&n| self.pending.ends_with(&stop.as_bytes()[..n]))
        };
        self.stops.iter().filter_map(longest).max().unwrap_or(0)
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|w| w == needle)
}

/// Length of the UTF-8 sequence at the end that lacks bytes.
fn incomplete_tail(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let byte = bytes[bytes.len() - back];
        let needed = match byte {
            0xC2..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xF4 => 4,
            0x80..=0xBF => continue,
            _ => return 0,
        };
        return if needed > back { back } else { 0 };
    }
    0
}

/// Ends the text at the first line, after the first newline, that is indented less than `least`. Blank lines pass.
#[derive(Debug, Clone, Default)]
struct IndentFilter {
    least: u32,
    /// Whether the indentation of the present line is still being read.
    measuring: bool,
    /// The blanks read so far.
    held: String,
}

impl IndentFilter {
    fn filter(&mut self, text: String) -> Piece {
        if self.least == 0 {
            return Piece { text, end: None };
        }
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                '\n' => {
                    out.push_str(&self.held);
                    self.held.clear();
                    self.measuring = true;
                    out.push(c);
                }
                ' ' | '\t' if self.measuring => self.held.push(c),
                _ if self.measuring && (self.held.len() as u64) < u64::from(self.least) => {
                    self.held.clear();
                    return Piece { text: out, end: Some(TextEnd::Indent) };
                }
                _ => {
                    out.push_str(&self.held);
                    self.held.clear();
                    self.measuring = false;
                    out.push(c);
                }
            }
        }
        Piece { text: out, end: None }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A vocabulary of the given pieces; the last one is special.
    fn vocab(pieces: &[&[u8]]) -> Arc<Vocab> {
        let last = pieces.len() - 1;
        Arc::new(Vocab::new(pieces.iter().enumerate().map(|(i, p)| (p.to_vec(), i == last)).collect(), &[]))
    }

    /// Pushes the pieces one by one; gives what each added, and the end.
    fn run(pieces: &[&[u8]], stops: &[&str], n_indent: u32) -> (Vec<String>, Option<TextEnd>) {
        let mut all: Vec<&[u8]> = pieces.to_vec();
        all.push(b"<special>");
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut text = OutputText::new(vocab(&all), &stops, n_indent, false);
        let mut out = Vec::new();
        for id in 0..pieces.len() {
            let piece = text.push(id as u32);
            out.push(piece.text);
            if piece.end.is_some() {
                return (out, piece.end);
            }
        }
        out.push(text.finish());
        (out, None)
    }

    fn strings(s: &[&str]) -> Vec<String> {
        s.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn a_character_split_over_tokens_appears_whole() {
        assert_eq!(run(&[b"a\xE2", b"\x82", b"\xAC!"], &[], 0).0, strings(&["a", "", "€!", ""]));
    }

    #[test]
    fn bytes_that_are_no_utf8_become_replacement_characters() {
        assert_eq!(run(&[b"a\xFFb"], &[], 0).0, strings(&["a\u{FFFD}b", ""]));
        assert_eq!(run(&[b"a\xE2\x82"], &[], 0).0, strings(&["a", "\u{FFFD}"]));
    }

    #[test]
    fn a_stop_text_across_token_borders_is_cut_off_and_never_shown() {
        let (out, end) = run(&[b"hello EN", b"D of", b" it"], &["END"], 0);
        assert_eq!(out, strings(&["hello ", ""]));
        assert_eq!(end, Some(TextEnd::Word("END".to_owned())));
    }

    #[test]
    fn what_looked_like_a_stop_text_comes_out_when_it_is_none() {
        let (out, end) = run(&[b"hello EN", b"OUGH", b" E"], &["END"], 0);
        assert_eq!(out, strings(&["hello ", "ENOUGH", " ", "E"]));
        assert_eq!(end, None);
    }

    #[test]
    fn a_stop_text_that_overlaps_itself_is_found() {
        let (out, end) = run(&[b"aab", b"aabc"], &["aabaabc"], 0);
        assert_eq!((out.concat(), end), (String::new(), Some(TextEnd::Word("aabaabc".to_owned()))));
        let (out, end) = run(&[b"xaaa", b"b"], &["aab"], 0);
        assert_eq!((out.concat(), end), ("xa".to_owned(), Some(TextEnd::Word("aab".to_owned()))));
    }

    #[test]
    fn the_first_of_several_stop_texts_wins() {
        let (out, end) = run(&[b"one two three"], &["three", "two", "two th"], 0);
        assert_eq!((out.concat(), end), ("one ".to_owned(), Some(TextEnd::Word("two th".to_owned()))));
    }

    #[test]
    fn special_tokens_are_text_only_when_asked_for() {
        for (render, expected) in [(false, "a"), (true, "a<end>")] {
            let mut text = OutputText::new(vocab(&[b"a", b"<end>"]), &[], 0, render);
            assert_eq!(text.push(0).text + &text.push(1).text, expected);
        }
    }

    #[test]
    fn a_line_indented_too_little_ends_the_text() {
        let (out, end) = run(&[b"def f():\n", b"    a\n", b"\n", b"    ", b"b\n", b" c"], &[], 4);
        assert_eq!(out.concat(), "def f():\n    a\n\n    b\n");
        assert_eq!(end, Some(TextEnd::Indent));
    }

    #[test]
    fn newlines_are_noticed() {
        let mut text = OutputText::new(vocab(&[b"a", b"b\n", b""]), &[], 0, false);
        text.push(0);
        assert!(!text.has_new_line());
        text.push(1);
        assert!(text.has_new_line());
    }

    proptest! {
        /// However the bytes are cut into tokens, the text is the same.
        #[test]
        fn the_text_does_not_depend_on_how_it_is_cut(
            text in "[ab€\\n ]{0,20}",
            cuts in proptest::collection::vec(1usize..4, 0..40),
            stop in "[ab€]{1,3}",
        ) {
            let mut pieces: Vec<&[u8]> = Vec::new();
            let mut rest = text.as_bytes();
            for cut in cuts {
                let (piece, tail) = rest.split_at(cut.min(rest.len()));
                pieces.push(piece);
                rest = tail;
            }
            pieces.push(rest);
            let expected = text.split(&stop).next().unwrap_or_default();
            prop_assert_eq!(run(&pieces, &[&stop], 0).0.concat(), expected);
        }
    }
}
