//! The encoders: how a fragment of raw text becomes token ids.

use std::borrow::Cow;
use std::collections::HashMap;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::merge::{Merge, Merger, NO_TOKEN};
use super::split::{self, PreTokenizer};
use super::vocab::Vocab;
use super::wordpiece::WordPiece;
use super::{TokenizerError, TokenizerSpec};

pub(super) enum Encoder {
    SentencePiece(SentencePiece),
    ByteLevel(ByteLevel),
    Gemma4(Gemma4),
    WordPiece(WordPiece),
    /// The file has no vocabulary.
    None,
}

impl Encoder {
    pub(super) fn new(spec: &TokenizerSpec, vocab: &Vocab) -> Result<Self, TokenizerError> {
        Ok(match spec.model.as_str() {
            "llama" => Self::SentencePiece(SentencePiece::new(spec, vocab)?),
            "bert" => Self::WordPiece(WordPiece::new(spec, vocab)?),
            "gemma4" => Self::Gemma4(Gemma4::new(spec, vocab)?),
            _ => Self::ByteLevel(ByteLevel::new(spec, vocab)?),
        })
    }

    /// Whether a beginning token is added when the file doesn't say.
    pub(super) fn adds_bos(&self) -> bool {
        match self {
            Self::SentencePiece(_) | Self::Gemma4(_) | Self::WordPiece(_) => true,
            Self::ByteLevel(encoder) => encoder.pre.add_bos,
            Self::None => false,
        }
    }

    /// Whether an end token is added when the file doesn't say.
    pub(super) fn adds_eos(&self) -> bool {
        matches!(self, Self::WordPiece(_))
    }

    pub(super) fn adds_space_prefix(&self) -> bool {
        match self {
            Self::SentencePiece(encoder) => encoder.add_space_prefix,
            Self::WordPiece(_) => true,
            Self::ByteLevel(_) | Self::Gemma4(_) | Self::None => false,
        }
    }

    /// Appends the ids of `raw`. `at_start`: the text begins here, or a special token comes before.
    pub(super) fn encode(&self, vocab: &Vocab, raw: &str, at_start: bool, merger: &mut Merger, ids: &mut Vec<u32>) {
        match self {
            Self::SentencePiece(encoder) => encoder.encode(vocab, raw, at_start, merger, ids),
            Self::ByteLevel(encoder) => encoder.encode(vocab, raw, merger, ids),
            Self::Gemma4(encoder) => encoder.encode(vocab, raw, merger, ids),
            Self::WordPiece(encoder) => encoder.encode(vocab, raw, ids),
            Self::None => {}
        }
    }
}

/// SentencePiece BPE: the pair whose text is the token with the highest score is joined first.
pub(super) struct SentencePiece {
    add_space_prefix: bool,
    unk: Option<u32>,
    /// By token: 0 for the highest score; equal scores share a rank.
    ranks: Vec<u32>,
}

impl SentencePiece {
    fn new(spec: &TokenizerSpec, vocab: &Vocab) -> Result<Self, TokenizerError> {
        let scores = spec.scores.as_deref().ok_or(TokenizerError::MissingScores)?;
        if scores.len() != vocab.len() {
            let (found, tokens) = (scores.len(), vocab.len());
            return Err(TokenizerError::Length { field: "tokenizer.ggml.scores", found, tokens });
        }
        if let Some(index) = scores.iter().position(|score| score.is_nan()) {
            return Err(TokenizerError::Score(index));
        }
        Ok(Self { add_space_prefix: spec.add_space_prefix.unwrap_or(true), unk: spec.unk, ranks: ranks_of(scores) })
    }

    fn encode(&self, vocab: &Vocab, raw: &str, at_start: bool, merger: &mut Merger, ids: &mut Vec<u32>) {
        let mut text = raw.replace(' ', "▁");
        if self.add_space_prefix && at_start {
            text.insert(0, '▁');
        }
        merger.clear();
        for c in text.chars() {
            merger.push(c.len_utf8(), NO_TOKEN);
        }
        merger.run(|left, right| {
            let token = vocab.text_id(&text[left.start..right.start + right.len])?;
            Some(Merge { rank: self.ranks[token as usize], token })
        });
        for symbol in merger.symbols() {
            let symbol_text = &text[symbol.start..symbol.start + symbol.len];
            match vocab.text_id(symbol_text) {
                Some(id) => ids.push(id),
                None => push_bytes(vocab, symbol_text.as_bytes(), self.unk, ids),
            }
        }
    }
}

/// Ranks of scores: the number of different scores above each.
fn ranks_of(scores: &[f32]) -> Vec<u32> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_unstable_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let mut ranks = vec![0; scores.len()];
    for pair in order.windows(2) {
        let (better, worse) = (pair[0], pair[1]);
        ranks[worse] = ranks[better] + u32::from(scores[worse] != scores[better]);
    }
    ranks
}

/// Appends the byte tokens of text that no token spells; a byte without a token becomes the unknown token.
fn push_bytes(vocab: &Vocab, bytes: &[u8], unk: Option<u32>, ids: &mut Vec<u32>) {
    if bytes.iter().all(|&byte| vocab.bytes[usize::from(byte)].is_some()) {
        ids.extend(bytes.iter().filter_map(|&byte| vocab.bytes[usize::from(byte)]));
    } else {
        ids.extend(unk);
    }
}

/// The merges of a file: what joining two tokens gives.
struct MergeTable(HashMap<(u32, u32), Merge>);

impl MergeTable {
    /// Reads lines `left right`. A merge of texts that are no tokens, or whose result is none, can't happen and is left out.
    fn new(spec: &TokenizerSpec, vocab: &Vocab, model: &'static str) -> Result<Self, TokenizerError> {
        if spec.merges.is_empty() {
            return Err(TokenizerError::MissingMerges(model));
        }
        let mut table = HashMap::with_capacity(spec.merges.len());
        let mut joined = String::new();
        for (rank, (index, line)) in (0u32..).zip(spec.merges.iter().enumerate()) {
            let (left, right) = split_merge(line).ok_or_else(|| TokenizerError::Merge { index, text: line.clone() })?;
            joined.clear();
            joined.extend([left, right]);
            let ids = (vocab.text_id(left), vocab.text_id(right), vocab.text_id(&joined));
            if let (Some(left), Some(right), Some(token)) = ids {
                table.entry((left, right)).or_insert(Merge { rank, token });
            }
        }
        Ok(Self(table))
    }

    fn get(&self, left: u32, right: u32) -> Option<Merge> {
        self.0.get(&(left, right)).copied()
    }
}

/// Splits at the first space that is not the first character (which may be a space itself).
fn split_merge(line: &str) -> Option<(&str, &str)> {
    let first = line.chars().next()?.len_utf8();
    let space = first + line[first..].find(' ')?;
    let (left, right) = (&line[..space], &line[space + 1..]);
    (!right.is_empty()).then_some((left, right))
}

/// Byte-level BPE: text is cut into pieces, and inside each the merge with the lowest rank comes first.
pub(super) struct ByteLevel {
    pre: PreTokenizer,
    merges: MergeTable,
    unk: Option<u32>,
    /// Tokens by the bytes they print, if whole pieces are looked up before merging.
    whole: HashMap<Box<[u8]>, u32>,
}

impl ByteLevel {
    fn new(spec: &TokenizerSpec, vocab: &Vocab) -> Result<Self, TokenizerError> {
        let name = spec.pre.as_deref().unwrap_or("default");
        let pre = split::by_name(name).ok_or_else(|| TokenizerError::UnknownPre(name.to_owned()))?;
        if name == "default" {
            tracing::warn!("the model file names no pre-tokenizer (tokenizer.ggml.pre); using GPT-2's");
        }
        report_missing(&missing_bytes(vocab));
        let mut whole = HashMap::new();
        if pre.ignore_merges {
            for (id, _, _) in vocab.iter().filter(|(_, _, kind)| kind.is_text()) {
                whole.entry(vocab.bytes_of(id).into()).or_insert(id);
            }
        }
        Ok(Self { pre, merges: MergeTable::new(spec, vocab, "gpt2")?, unk: spec.unk, whole })
    }

    fn encode(&self, vocab: &Vocab, raw: &str, merger: &mut Merger, ids: &mut Vec<u32>) {
        let text = if self.pre.nfc { compose(raw) } else { Cow::Borrowed(raw) };
        self.pre.rules.for_each_piece(&text, |piece| self.encode_piece(vocab, piece.as_bytes(), merger, ids));
    }

    fn encode_piece(&self, vocab: &Vocab, piece: &[u8], merger: &mut Merger, ids: &mut Vec<u32>) {
        if let Some(&id) = self.whole.get(piece) {
            ids.push(id);
            return;
        }
        merger.clear();
        for &byte in piece {
            merger.push(1, vocab.bytes[usize::from(byte)].unwrap_or(NO_TOKEN));
        }
        merger.run(|left, right| self.merges.get(left.token, right.token));
        for symbol in merger.symbols() {
            match symbol.token {
                NO_TOKEN => ids.extend(self.unk),
                token => ids.push(token),
            }
        }
    }
}

/// Byte values of UTF-8 text that no token stands for. C0, C1 and F5 to FF are in no such text.
fn missing_bytes(vocab: &Vocab) -> Vec<u8> {
    let in_text = (0..=0xF4).filter(|byte| !matches!(byte, 0xC0 | 0xC1));
    in_text.filter(|&byte| vocab.bytes[usize::from(byte)].is_none()).collect()
}

/// Whether only text that nobody writes has the byte: control characters other than tab and line ends, and the first
/// bytes of planes 4 to 11, which have no characters.
fn is_unwritten(byte: u8) -> bool {
    matches!(byte, 0xF1 | 0xF2) || (byte.is_ascii_control() && !matches!(byte, b'\t' | b'\n' | b'\r'))
}

fn report_missing(missing: &[u8]) {
    let list = || missing.iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>().join(" ");
    let what = "the vocabulary has no token for some bytes; text that holds them loses them";
    if missing.iter().any(|&byte| !is_unwritten(byte)) {
        tracing::warn!(bytes = list(), "{what}");
    } else if !missing.is_empty() {
        tracing::debug!(bytes = list(), "{what}");
    }
}

/// Canonical composition, without a copy for the usual text that is composed already.
fn compose(text: &str) -> Cow<'_, str> {
    match is_nfc_quick(text.chars()) {
        IsNormalized::Yes => Cow::Borrowed(text),
        _ => Cow::Owned(text.nfc().collect()),
    }
}

/// Gemma 4: BPE over characters, cut only at runs of line breaks, with byte tokens for what is left.
pub(super) struct Gemma4 {
    merges: MergeTable,
    unk: Option<u32>,
}

impl Gemma4 {
    fn new(spec: &TokenizerSpec, vocab: &Vocab) -> Result<Self, TokenizerError> {
        Ok(Self { merges: MergeTable::new(spec, vocab, "gemma4")?, unk: spec.unk })
    }

    fn encode(&self, vocab: &Vocab, raw: &str, merger: &mut Merger, ids: &mut Vec<u32>) {
        let text = raw.replace(' ', "▁");
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let starts_with_newline = rest.starts_with('\n');
            let end = rest.find(|c| (c == '\n') != starts_with_newline).unwrap_or(rest.len());
            let (piece, after) = rest.split_at(end);
            match vocab.text_id(piece).filter(|_| starts_with_newline) {
                Some(id) => ids.push(id),
                None => self.encode_piece(vocab, piece, merger, ids),
            }
            rest = after;
        }
    }

    fn encode_piece(&self, vocab: &Vocab, piece: &str, merger: &mut Merger, ids: &mut Vec<u32>) {
        merger.clear();
        let mut utf8 = [0; 4];
        for c in piece.chars() {
            let token = vocab.text_id(c.encode_utf8(&mut utf8)).unwrap_or(NO_TOKEN);
            merger.push(c.len_utf8(), token);
        }
        merger.run(|left, right| self.merges.get(left.token, right.token));
        for symbol in merger.symbols() {
            match symbol.token {
                NO_TOKEN => {
                    let bytes = &piece.as_bytes()[symbol.start..symbol.start + symbol.len];
                    push_bytes(vocab, bytes, self.unk, ids);
                }
                token => ids.push(token),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::byte_level::alphabet;
    use super::super::vocab::Spelling;
    use super::*;

    #[test]
    fn only_bytes_that_text_may_hold_are_missed() {
        let missing_without = |left_out: &[u8]| {
            let bytes = (0..=255u8).filter(|byte| !left_out.contains(byte));
            let tokens = bytes.map(|byte| alphabet()[usize::from(byte)].to_string()).collect();
            let mut spec = TokenizerSpec { model: "gpt2".to_owned(), tokens, ..TokenizerSpec::default() };
            missing_bytes(&Vocab::new(&mut spec, Spelling::ByteLevel).unwrap())
        };
        assert!(missing_without(&[0xC0, 0xC1, 0xF5, 0xFF]).is_empty());
        assert_eq!(missing_without(&[0x04, b'a', 0xC0, 0xF1]), [0x04, b'a', 0xF1]);
        assert_eq!(
            [0x04, b'\n', b'a', 0x7F, 0xC3, 0xF1, 0xF3].map(is_unwritten),
            [true, false, false, true, false, true, false]
        );
    }
}
