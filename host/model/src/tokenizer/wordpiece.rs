//! WordPiece, the tokenizer of BERT: text is cleaned and cut into words and single punctuation characters, and each word into
//! the longest pieces of the vocabulary, from its beginning on.
//!
//! Files write a piece that begins a word as `▁piece`, one that goes on as it is (elsewhere the former stands bare, the latter as
//! `##piece`). Where a file does not say whether the model is cased, it is if its vocabulary has capital letters.

use unicode_normalization::UnicodeNormalization;
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

use super::vocab::{TokenKind, Vocab};
use super::{TokenizerError, TokenizerSpec};

/// Words of more characters are unknown.
const MAX_WORD_CHARS: usize = 100;
/// In front of pieces that begin a word.
const BEGINS_WORD: char = '▁';

pub(super) struct WordPiece {
    unk: u32,
    /// Capital letters become small.
    lowercase: bool,
    /// Accents and other marks are dropped.
    strip_accents: bool,
}

impl WordPiece {
    pub(super) fn new(spec: &TokenizerSpec, vocab: &Vocab) -> Result<Self, TokenizerError> {
        let unk = spec.unk.ok_or(TokenizerError::MissingUnknown)?;
        let word = |&(_, text, kind): &(u32, &str, TokenKind)| kind.is_text() && !text.ends_with(']');
        let cased = || vocab.iter().filter(word).any(|(_, text, _)| text.chars().any(char::is_uppercase));
        let lowercase = spec.lowercase.unwrap_or_else(|| !cased());
        Ok(Self { unk, lowercase, strip_accents: spec.strip_accents.unwrap_or(lowercase) })
    }

    /// Appends the ids of `raw`.
    pub(super) fn encode(&self, vocab: &Vocab, raw: &str, ids: &mut Vec<u32>) {
        let text = self.normalize(raw);
        let mut word = String::new();
        for part in text.split_whitespace() {
            for c in part.chars() {
                if is_punctuation(c) {
                    self.end_word(vocab, &mut word, ids);
                    push(&mut word, c);
                    self.end_word(vocab, &mut word, ids);
                } else {
                    push(&mut word, c);
                }
            }
            self.end_word(vocab, &mut word, ids);
        }
    }

    /// Drops control characters, sets ideographs apart, and drops accents and capitals if the model wants it so.
    fn normalize(&self, raw: &str) -> String {
        let cleaned = raw.chars().filter(|&c| !is_dropped(c)).flat_map(|c| match c {
            c if c.is_whitespace() => [Some(' '), None, None],
            c if is_ideograph(c) => [Some(' '), Some(c), Some(' ')],
            c => [Some(c), None, None],
        });
        let mut text: String = cleaned.flatten().collect();
        if self.strip_accents {
            text = text.nfd().filter(|c| c.general_category() != GeneralCategory::NonspacingMark).collect();
        }
        if self.lowercase {
            text = text.chars().flat_map(char::to_lowercase).collect();
        }
        text
    }

    /// Appends the pieces of a word, which begins with the marker, and clears it. A word with a part that no piece spells is
    /// unknown as a whole.
    fn end_word(&self, vocab: &Vocab, word: &mut String, ids: &mut Vec<u32>) {
        if word.is_empty() {
            return;
        }
        let before = ids.len();
        let mut rest = word.as_str();
        let known = word.chars().count() <= 1 + MAX_WORD_CHARS;
        while known && !rest.is_empty() {
            let Some((id, len)) = longest(vocab, rest, rest.len() == word.len()) else { break };
            ids.push(id);
            rest = &rest[len..];
        }
        if !rest.is_empty() {
            ids.truncate(before);
            ids.push(self.unk);
        }
        word.clear();
    }
}

fn push(word: &mut String, c: char) {
    if word.is_empty() {
        word.push(BEGINS_WORD);
    }
    word.push(c);
}

/// The longest piece at the beginning of `rest` and its length in bytes. At the start of a word the marker alone is no piece.
fn longest(vocab: &Vocab, rest: &str, at_start: bool) -> Option<(u32, usize)> {
    let least = if at_start { BEGINS_WORD.len_utf8() } else { 0 };
    let ends = rest.char_indices().rev().map(|(at, c)| at + c.len_utf8()).take_while(|&end| end > least);
    { ends }.find_map(|end| vocab.text_id(&rest[..end]).map(|id| (id, end)))
}

/// Control and format characters but those that separate, and what stands for lost characters.
fn is_dropped(c: char) -> bool {
    match c {
        '\t' | '\n' | '\r' => false,
        '\0' | '\u{fffd}' => true,
        c => matches!(
            c.general_category(),
            GeneralCategory::Control | GeneralCategory::Format | GeneralCategory::PrivateUse
        ),
    }
}

/// The blocks of CJK ideographs of which each is a word.
fn is_ideograph(c: char) -> bool {
    matches!(u32::from(c),
        0x4E00..=0x9FFF | 0x3400..=0x4DBF | 0x20000..=0x2A6DF | 0x2A700..=0x2B73F | 0x2B740..=0x2B81F
        | 0x2B920..=0x2CEAF | 0xF900..=0xFAFF | 0x2F800..=0x2FA1F)
}

/// ASCII symbols count as punctuation too.
fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.general_category_group() == GeneralCategoryGroup::Punctuation
}
