//! The vocabulary: what each token id is, which bytes it prints, which ids end a generation.

use std::collections::HashMap;

use super::byte_level::ByteDecoder;
use super::{TokenizerError, TokenizerSpec};

/// What kind of token an id is (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text that merges produce.
    Normal,
    /// Stands for what the vocabulary can't spell.
    Unknown,
    /// A marker with a meaning for the model; not text.
    Control,
    /// Text added to the vocabulary; found as a whole before merging.
    UserDefined,
    /// A placeholder that never occurs.
    Unused,
    /// One byte, written `<0xNN>`.
    Byte,
}

impl TokenKind {
    fn from_gguf(value: i32) -> Option<Self> {
        Some(match value {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }

    /// Control and unknown tokens: matched in text only where markers are allowed, printed only on request.
    pub fn is_special(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }

    /// Whether merges and lookups of text may produce the token.
    pub(super) fn is_text(self) -> bool {
        matches!(self, Self::Normal | Self::UserDefined)
    }
}

/// How token texts spell what they print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// In the byte alphabet of GPT-2.
    ByteLevel,
    /// As text with `▁` for a space, and `<0xNN>` tokens for bytes.
    Metaspace,
}

/// Tokens whose text alone says that they end a turn or a document, whatever type the file gives them (some type them
/// normal by mistake). `</s>` must be typed control: to models that know HTML it is a tag.
const END_TEXTS: &[&str] = &[
    "<|im_end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_utterance>",
    "</s>",
    "<eos>",
];

/// The same for Gemma 4, where `</s>` is an ordinary token and a tool response is for us to write.
const GEMMA4_END_TEXTS: &[&str] = &["<eos>", "<turn|>", "<|tool_response>"];

pub(super) struct Vocab {
    tokens: Vec<String>,
    kinds: Vec<TokenKind>,
    by_text: HashMap<Box<str>, u32>,
    /// The bytes of all tokens, one after another; token `i` is `offsets[i]..offsets[i + 1]`.
    pieces: Vec<u8>,
    offsets: Vec<usize>,
    /// The token of each byte, where the vocabulary has one.
    pub bytes: [Option<u32>; 256],
    pub end_of_generation: Vec<u32>,
}

impl Vocab {
    pub(super) fn new(spec: &mut TokenizerSpec, spelling: Spelling) -> Result<Self, TokenizerError> {
        let tokens = std::mem::take(&mut spec.tokens);
        let mut kinds = token_kinds(spec, tokens.len())?;
        let by_text = index_by_text(&tokens)?;
        let end_of_generation = mark_ends(spec, &tokens, &by_text, &mut kinds);
        let mut vocab = Self {
            tokens,
            kinds,
            by_text,
            pieces: Vec::new(),
            offsets: vec![0],
            bytes: [None; 256],
            end_of_generation,
        };
        vocab.spell(spelling);
        Ok(vocab)
    }

    /// A vocabulary of `n` ids that print nothing, for models whose file has no tokenizer.
    pub(super) fn of_ids(n: usize) -> Self {
        Self {
            tokens: vec![String::new(); n],
            kinds: vec![TokenKind::Normal; n],
            by_text: HashMap::new(),
            pieces: Vec::new(),
            offsets: vec![0; n + 1],
            bytes: [None; 256],
            end_of_generation: Vec::new(),
        }
    }

    /// Writes out the bytes of every token and notes the tokens that are single bytes.
    fn spell(&mut self, spelling: Spelling) {
        let decoder = ByteDecoder::new();
        for id in 0..self.tokens.len() {
            let (text, kind) = (&self.tokens[id], self.kinds[id]);
            let piece = match (spelling, kind) {
                (Spelling::ByteLevel, TokenKind::Normal) => decoder.decode(text),
                (Spelling::Metaspace, TokenKind::Normal) => Some(text.replace('▁', " ").into_bytes()),
                (Spelling::Metaspace, TokenKind::Byte) => parse_byte(text).map(|byte| vec![byte]),
                _ => None,
            };
            let is_byte = match spelling {
                Spelling::ByteLevel => kind == TokenKind::Normal,
                Spelling::Metaspace => kind == TokenKind::Byte,
            };
            match piece.as_deref() {
                Some([byte]) if is_byte => {
                    let slot = &mut self.bytes[usize::from(*byte)];
                    *slot = slot.or(u32::try_from(id).ok());
                }
                _ => {}
            }
            self.pieces.extend_from_slice(piece.as_deref().unwrap_or(text.as_bytes()));
            self.offsets.push(self.pieces.len());
        }
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.by_text.get(text).copied()
    }

    /// The id of a text that merges may produce: no control, unknown, unused or byte token.
    pub(super) fn text_id(&self, text: &str) -> Option<u32> {
        self.id(text).filter(|&id| self.kinds[id as usize].is_text())
    }

    pub(super) fn bytes_of(&self, id: u32) -> &[u8] {
        let id = id as usize;
        if id >= self.len() {
            return &[];
        }
        &self.pieces[self.offsets[id]..self.offsets[id + 1]]
    }

    /// Ids with their texts and kinds, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str, TokenKind)> {
        (0u32..).zip(&self.tokens).zip(&self.kinds).map(|((id, text), &kind)| (id, text.as_str(), kind))
    }
}

/// The kind of every token; where the file has no types, byte tokens are known by their text and the named ids are control.
fn token_kinds(spec: &TokenizerSpec, n: usize) -> Result<Vec<TokenKind>, TokenizerError> {
    let Some(types) = &spec.token_types else {
        let mut kinds = vec![TokenKind::Normal; n];
        for id in spec.special_ids().filter_map(|(_, id)| id) {
            kinds[id as usize] = TokenKind::Control;
        }
        return Ok(kinds);
    };
    if types.len() != n {
        return Err(TokenizerError::Length { field: "tokenizer.ggml.token_type", found: types.len(), tokens: n });
    }
    types
        .iter()
        .enumerate()
        .map(|(id, &value)| TokenKind::from_gguf(value).ok_or(TokenizerError::TokenType { id, value }))
        .collect()
}

/// Where a text occurs twice the lower id is the one that encoding uses.
fn index_by_text(tokens: &[String]) -> Result<HashMap<Box<str>, u32>, TokenizerError> {
    let mut by_text = HashMap::with_capacity(tokens.len());
    let mut duplicates = 0usize;
    for (id, text) in tokens.iter().enumerate() {
        let id = u32::try_from(id).map_err(|_| TokenizerError::TooManyTokens(tokens.len()))?;
        if by_text.contains_key(text.as_str()) {
            duplicates += 1;
        } else {
            by_text.insert(text.as_str().into(), id);
        }
    }
    if duplicates > 0 {
        tracing::warn!(
            duplicates,
            "the vocabulary lists some token texts more than once; the first id of each is used"
        );
    }
    Ok(by_text)
}

/// Collects the ids that end a generation, in ascending order, and makes them control tokens.
fn mark_ends(
    spec: &TokenizerSpec,
    tokens: &[String],
    by_text: &HashMap<Box<str>, u32>,
    kinds: &mut [TokenKind],
) -> Vec<u32> {
    let texts = if spec.is_gemma4() { GEMMA4_END_TEXTS } else { END_TEXTS };
    let named = [spec.eos, spec.eot, spec.eom, spec.fim_pad, spec.fim_rep, spec.fim_sep];
    let by_name = texts
        .iter()
        .filter_map(|text| by_text.get(*text).map(|&id| (text, id)))
        .filter(|(text, id)| **text != "</s>" || kinds[*id as usize] == TokenKind::Control)
        .map(|(_, id)| id);
    let mut ends: Vec<u32> = named.into_iter().flatten().chain(by_name).collect();
    ends.sort_unstable();
    ends.dedup();
    for &id in &ends {
        let kind = &mut kinds[id as usize];
        if *kind != TokenKind::Control {
            tracing::debug!(
                id,
                text = tokens[id as usize],
                "an end-of-generation token is not typed control; taken as one"
            );
            *kind = TokenKind::Control;
        }
    }
    ends
}

/// The value of a byte token's text `<0xNN>`.
fn parse_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let two_hex_digits = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    two_hex_digits.then(|| u8::from_str_radix(digits, 16).ok())?
}
