//! The vocabulary as decoding needs it: the bytes of each token, which tokens are special, which end a generation.
//!
//! It is a flat copy of the tokenizer's byte table, so that text, samplers and constraints share one immutable
//! object and none of them knows how a tokenizer works.

use opencoti_model::tokenizer::Tokenizer;

/// Bytes and roles of every token of a model.
#[derive(Debug, Clone)]
pub struct Vocab {
    bytes: Vec<u8>,
    /// `n_vocab + 1` offsets into `bytes`.
    offsets: Vec<usize>,
    special: Vec<bool>,
    end_of_generation: Vec<u32>,
    suppressed: Vec<u32>,
}

impl From<&Tokenizer> for Vocab {
    fn from(tokenizer: &Tokenizer) -> Self {
        let tokens = tokenizer.token_bytes_table().map(|token| (token.bytes.to_vec(), token.special)).collect();
        let mut ends = tokenizer.eog_ids().to_vec();
        // The model's own end comes first.
        ends.sort_by_key(|&id| Some(id) != tokenizer.eos());
        Vocab::new(tokens, &ends).with_suppressed(tokenizer.suppressed())
    }
}

impl Vocab {
    /// `tokens` lists the bytes of each token and whether it is special (a control token that stands for no text).
    /// `end_of_generation` lists the tokens that end an answer, the model's EOS first; ids out of range are dropped.
    pub fn new(tokens: Vec<(Vec<u8>, bool)>, end_of_generation: &[u32]) -> Self {
        let mut bytes = Vec::with_capacity(tokens.iter().map(|(text, _)| text.len()).sum());
        let mut offsets = Vec::with_capacity(tokens.len() + 1);
        let mut special = Vec::with_capacity(tokens.len());
        offsets.push(0);
        for (text, is_special) in &tokens {
            bytes.extend_from_slice(text);
            offsets.push(bytes.len());
            special.push(*is_special);
        }
        let end_of_generation = end_of_generation.iter().copied().filter(|&id| (id as usize) < tokens.len()).collect();
        Self { bytes, offsets, special, end_of_generation, suppressed: Vec::new() }
    }

    /// Tokens that are never to be sampled; ids out of range are dropped.
    pub fn with_suppressed(mut self, tokens: &[u32]) -> Self {
        self.suppressed = tokens.iter().copied().filter(|&id| (id as usize) < self.len()).collect();
        self
    }

    /// Tokens that are never to be sampled.
    pub fn suppressed(&self) -> &[u32] {
        &self.suppressed
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.special.len()
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.special.is_empty()
    }

    /// Bytes of a token; empty if `id` is out of range.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        match (self.offsets.get(id as usize), self.offsets.get(id as usize + 1)) {
            (Some(&start), Some(&end)) => &self.bytes[start..end],
            _ => &[],
        }
    }

    /// Whether a token is special: it steers the model and stands for no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Whether a token ends the answer.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_of_generation.contains(&id)
    }

    /// All tokens that end an answer, the model's EOS first.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_of_generation
    }
}
