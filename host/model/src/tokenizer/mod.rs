//! Text to token ids and back, from the vocabulary that a GGUF file carries.
//!
//! [`TokenizerSpec`] is what the file says; [`Tokenizer::new`] checks it and builds one of four encoders: three that share the
//! merge loop in [`merge`], SentencePiece (`llama`), byte-level BPE (`gpt2`) and Gemma 4's BPE over characters, and WordPiece
//! (`bert`), which looks up the longest pieces. A text is
//! first split at special and user-defined tokens ([`special`]), then the rest is encoded fragment by fragment.
//!
//! Everything here is linear or n·log n in the length of the text, and no text or vocabulary makes it panic: that is why
//! the encoders are written out here and the `tokenizers` crate serves as the oracle of the tests.

mod byte_level;
mod encode;
mod merge;
mod special;
mod split;
mod utf8_stream;
mod vocab;
mod wordpiece;

use encode::Encoder;
use merge::Merger;
use special::{Fragment, Splitter};
pub use utf8_stream::Utf8Stream;
pub use vocab::TokenKind;
use vocab::{Spelling, Vocab};

/// What a model file says about its tokenizer; the fields are those of the `tokenizer.ggml.*` keys.
#[derive(Clone, Debug, Default)]
pub struct TokenizerSpec {
    /// `llama`, `gpt2`, `gemma4`, `bert`, `none` or `no_vocab`.
    pub model: String,
    /// Name of the pre-tokenizer, for `gpt2`.
    pub pre: Option<String>,
    /// Text of every token.
    pub tokens: Vec<String>,
    /// One per token; needed for `llama`.
    pub scores: Option<Vec<f32>>,
    /// One per token, 1 to 6 (see [`TokenKind`]).
    pub token_types: Option<Vec<i32>>,
    /// Pairs of token texts joined by a space, best first; needed for `gpt2` and `gemma4`.
    pub merges: Vec<String>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub eom: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    pub sep: Option<u32>,
    pub mask: Option<u32>,
    pub fim_pre: Option<u32>,
    pub fim_suf: Option<u32>,
    pub fim_mid: Option<u32>,
    pub fim_pad: Option<u32>,
    pub fim_rep: Option<u32>,
    pub fim_sep: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
    /// Whether `bert` takes capital letters as small ones.
    pub lowercase: Option<bool>,
    /// Whether `bert` drops accents; as `lowercase` if the file doesn't say.
    pub strip_accents: Option<bool>,
    /// Tokens that must never be sampled.
    pub suppress_tokens: Vec<u32>,
    /// Size of the embedding table; only `none` and `no_vocab` need it.
    pub n_vocab: Option<usize>,
}

impl TokenizerSpec {
    /// The ids the file names, with the last part of their key.
    fn special_ids(&self) -> impl Iterator<Item = (&'static str, Option<u32>)> + use<> {
        [
            ("bos_token_id", self.bos),
            ("eos_token_id", self.eos),
            ("eot_token_id", self.eot),
            ("eom_token_id", self.eom),
            ("unknown_token_id", self.unk),
            ("padding_token_id", self.pad),
            ("seperator_token_id", self.sep), // the format's own spelling
            ("mask_token_id", self.mask),
            ("fim_pre_token_id", self.fim_pre),
            ("fim_suf_token_id", self.fim_suf),
            ("fim_mid_token_id", self.fim_mid),
            ("fim_pad_token_id", self.fim_pad),
            ("fim_rep_token_id", self.fim_rep),
            ("fim_sep_token_id", self.fim_sep),
        ]
        .into_iter()
    }

    fn is_gemma4(&self) -> bool {
        self.model == "gemma4"
    }

    fn check_ids(&self) -> Result<(), TokenizerError> {
        let n = self.tokens.len();
        let suppressed = self.suppress_tokens.iter().map(|&id| ("suppress_tokens", Some(id)));
        for (key, id) in self.special_ids().chain(suppressed) {
            if let Some(id) = id.filter(|&id| id as usize >= n) {
                return Err(TokenizerError::IdOutOfRange { key, id, tokens: n });
            }
        }
        Ok(())
    }
}

/// Why a tokenizer can't be built, or can't do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error("tokenizer.ggml.model is '{0}', expected one of llama, gpt2, gemma4, bert, none, no_vocab")]
    UnknownModel(String),
    #[error(
        "tokenizer.ggml.model is '{0}', a kind of tokenizer that is not implemented; use a file with llama, gpt2, gemma4 or bert"
    )]
    UnsupportedModel(&'static str),
    #[error("tokenizer.ggml.pre is '{0}', which is not a known pre-tokenizer; known are {known}", known = split::known_names())]
    UnknownPre(String),
    #[error("tokenizer.ggml.tokens is empty; the file has no vocabulary")]
    EmptyVocabulary,
    #[error("tokenizer.ggml.tokens has {0} entries, more than token ids can count")]
    TooManyTokens(usize),
    #[error("{field} has {found} entries, expected one for each of the {tokens} tokens")]
    Length { field: &'static str, found: usize, tokens: usize },
    #[error("tokenizer.ggml.scores is missing; a llama tokenizer needs a score for each token")]
    MissingScores,
    #[error(
        "tokenizer.ggml.unknown_token_id is missing; a bert tokenizer needs a token for words that it cannot spell"
    )]
    MissingUnknown,
    #[error("tokenizer.ggml.scores[{0}] is not a number")]
    Score(usize),
    #[error("tokenizer.ggml.token_type[{id}] is {value}, expected 1 to 6")]
    TokenType { id: usize, value: i32 },
    #[error("tokenizer.ggml.{key} is {id}, but the vocabulary has {tokens} tokens")]
    IdOutOfRange { key: &'static str, id: u32, tokens: usize },
    #[error("tokenizer.ggml.merges is missing or empty; a {0} tokenizer needs it")]
    MissingMerges(&'static str),
    #[error("tokenizer.ggml.merges[{index}] is {text:?}, expected two texts with a space between")]
    Merge { index: usize, text: String },
    #[error("the special tokens can't be compiled into a matcher: {0}")]
    Matcher(#[from] aho_corasick::BuildError),
    #[error(
        "the model file has no tokenizer (tokenizer.ggml.model is '{0}'), so text can't be encoded; send token ids"
    )]
    NoVocabulary(String),
    #[error("vocabulary size is missing; a file with tokenizer.ggml.model '{0}' must have {{arch}}.vocab_size")]
    MissingSize(String),
}

/// How a text is to be encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add the beginning and end tokens that the model wants.
    pub add_special: bool,
    /// Take the texts of control tokens as these tokens; off for text that comes from outside.
    pub parse_special: bool,
}

/// What one token prints, for engines that constrain output by its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBytes<'a> {
    /// The bytes of the text; the marker's own text for a special token.
    pub bytes: &'a [u8],
    /// Control and unknown tokens: they print nothing and match no text.
    pub special: bool,
}

/// Turns text into token ids and token ids into bytes. Cheap to share, immutable.
pub struct Tokenizer {
    model: String,
    vocab: Vocab,
    encoder: Encoder,
    with_markers: Splitter,
    without_markers: Splitter,
    bos: Option<u32>,
    eos: Option<u32>,
    eot: Option<u32>,
    unk: Option<u32>,
    pad: Option<u32>,
    fim: Fim,
    add_bos: bool,
    add_eos: bool,
    suppressed: Vec<u32>,
}

/// The tokens of fill-in-the-middle prompts, where the model has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fim {
    pub prefix: Option<u32>,
    pub suffix: Option<u32>,
    pub middle: Option<u32>,
    pub repository: Option<u32>,
    pub file_separator: Option<u32>,
}

impl Tokenizer {
    /// Checks what the file says and builds the tokenizer.
    ///
    /// # Errors
    /// One sentence that names the key at fault.
    pub fn new(mut spec: TokenizerSpec) -> Result<Self, TokenizerError> {
        if matches!(spec.model.as_str(), "none" | "no_vocab") {
            return Self::without_vocabulary(spec);
        }
        let spelling = spelling_of(&spec.model)?;
        if spec.tokens.is_empty() {
            return Err(TokenizerError::EmptyVocabulary);
        }
        default_llama_ids(&mut spec);
        default_bert_ids(&mut spec);
        spec.check_ids()?;
        let vocab = Vocab::new(&mut spec, spelling)?;
        let encoder = Encoder::new(&spec, &vocab)?;
        let found_anywhere = |kind: TokenKind| kind == TokenKind::UserDefined;
        let texts = |accept: &dyn Fn(TokenKind) -> bool| {
            let found = vocab.iter().filter(|&(_, _, kind)| accept(kind)).map(|(id, text, _)| (text, id));
            Splitter::new(found.filter(|&(text, id)| vocab.id(text) == Some(id)))
        };
        Ok(Self {
            with_markers: texts(&|kind| found_anywhere(kind) || kind.is_special())?,
            without_markers: texts(&found_anywhere)?,
            add_bos: spec.is_gemma4() || spec.add_bos.unwrap_or(encoder.adds_bos()),
            add_eos: spec.add_eos.unwrap_or(encoder.adds_eos()),
            vocab,
            encoder,
            ..Self::bare(spec)
        })
    }

    fn without_vocabulary(spec: TokenizerSpec) -> Result<Self, TokenizerError> {
        let n = spec.n_vocab.ok_or_else(|| TokenizerError::MissingSize(spec.model.clone()))?;
        u32::try_from(n).map_err(|_| TokenizerError::TooManyTokens(n))?;
        let spec = TokenizerSpec { tokens: Vec::new(), ..spec };
        let ids = spec.special_ids().filter_map(|(key, id)| Some((key, id?)));
        for (key, id) in ids.chain(spec.suppress_tokens.iter().map(|&id| ("suppress_tokens", id))) {
            if id as usize >= n {
                return Err(TokenizerError::IdOutOfRange { key, id, tokens: n });
            }
        }
        let mut vocab = Vocab::of_ids(n);
        vocab.end_of_generation = [spec.eos, spec.eot, spec.eom].into_iter().flatten().collect();
        Ok(Self { vocab, ..Self::bare(spec) })
    }

    /// A tokenizer with the ids of a file and nothing to encode with.
    fn bare(spec: TokenizerSpec) -> Self {
        Self {
            vocab: Vocab::of_ids(0),
            encoder: Encoder::None,
            with_markers: Splitter::default(),
            without_markers: Splitter::default(),
            bos: spec.bos,
            eos: spec.eos,
            eot: spec.eot,
            unk: spec.unk,
            pad: spec.pad,
            fim: Fim {
                prefix: spec.fim_pre,
                suffix: spec.fim_suf,
                middle: spec.fim_mid,
                repository: spec.fim_rep,
                file_separator: spec.fim_sep,
            },
            add_bos: spec.add_bos.unwrap_or(false),
            add_eos: spec.add_eos.unwrap_or(false),
            suppressed: spec.suppress_tokens,
            model: spec.model,
        }
    }

    /// Encodes a text. Never adds a second beginning token in front of one that the text already spells.
    ///
    /// # Errors
    /// If the model file has no vocabulary.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, TokenizerError> {
        if matches!(self.encoder, Encoder::None) {
            return Err(TokenizerError::NoVocabulary(self.model.clone()));
        }
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        let bos = self.bos.filter(|_| options.add_special && self.add_bos);
        ids.extend(bos);
        let splitter = if options.parse_special { &self.with_markers } else { &self.without_markers };
        let mut merger = Merger::default();
        let mut at_start = true;
        splitter.split(text, |fragment| match fragment {
            Fragment::Token(id) => {
                ids.push(id);
                at_start = true;
            }
            Fragment::Raw(raw) => {
                self.encoder.encode(&self.vocab, raw, at_start, &mut merger, &mut ids);
                at_start = false;
            }
        });
        if bos.is_some() && ids.get(1) == bos.as_ref() {
            ids.remove(0);
        }
        let eos = self.eos.filter(|eos| options.add_special && self.add_eos && ids.last() != Some(eos));
        ids.extend(eos);
        Ok(ids)
    }

    /// Encodes a pair of texts as one input of an encoder, `[CLS] a [SEP] b [SEP]`, with the texts' own markers taken as text; the
    /// number is where the second part begins.
    ///
    /// # Errors
    /// If the model file has no vocabulary.
    pub fn encode_pair(&self, a: &str, b: &str) -> Result<(Vec<u32>, usize), TokenizerError> {
        let mut ids = self.encode(a, EncodeOptions { add_special: true, parse_special: false })?;
        let second = ids.len();
        ids.extend(self.encode(b, EncodeOptions { add_special: false, parse_special: false })?);
        ids.extend(self.eos.filter(|_| self.add_eos));
        Ok((ids, second))
    }

    /// The bytes a token adds to the output: nothing for special tokens unless `render_special`, nor for ids out of range.
    ///
    /// A stream of output is the pieces as they come, with no clean-up; see [`Utf8Stream`] for making text of them.
    pub fn piece(&self, id: u32, render_special: bool) -> &[u8] {
        match self.vocab.kind(id) {
            Some(kind) if kind.is_special() && !render_special => &[],
            _ => self.vocab.bytes_of(id),
        }
    }

    /// The bytes of a whole text: the inverse of `encode`, so the space that encoding puts in front of a text (and
    /// after each marker) is taken off again.
    pub fn decode(&self, ids: &[u32], render_special: bool) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        let mut at_start = self.encoder.adds_space_prefix();
        for &id in ids {
            let piece = self.piece(id, render_special);
            let splits_text = !matches!(self.vocab.kind(id), Some(TokenKind::Normal | TokenKind::Byte));
            let prefixed = at_start && !splits_text;
            bytes.extend_from_slice(piece.strip_prefix(b" ").filter(|_| prefixed).unwrap_or(piece));
            at_start = splits_text && self.encoder.adds_space_prefix();
        }
        bytes
    }

    /// Number of token ids.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The end-of-turn token.
    pub fn eot(&self) -> Option<u32> {
        self.eot
    }

    /// The token for what can't be spelled.
    pub fn unk(&self) -> Option<u32> {
        self.unk
    }

    /// The padding token.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// The fill-in-the-middle tokens.
    pub fn fim(&self) -> Fim {
        self.fim
    }

    /// Whether `encode` with `add_special` puts the beginning token in front.
    pub fn add_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }

    /// Whether a generation ends with this token.
    pub fn is_eog(&self, id: u32) -> bool {
        self.vocab.end_of_generation.contains(&id)
    }

    /// All tokens that end a generation, ascending.
    pub fn eog_ids(&self) -> &[u32] {
        &self.vocab.end_of_generation
    }

    /// Tokens that the file asks never to sample.
    pub fn suppressed(&self) -> &[u32] {
        &self.suppressed
    }

    /// Whether the token is a control or unknown token: no text, not printed unless asked for.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocab.kind(id).is_some_and(TokenKind::is_special)
    }

    /// What kind of token an id is; `None` out of range.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.vocab.kind(id)
    }

    /// The text of a token as the vocabulary spells it; `None` out of range.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.text(id)
    }

    /// The id of the token that the vocabulary spells like this.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.vocab.id(text)
    }

    /// `tokenizer.ggml.model` and, where it matters, the pre-tokenizer's family: what a boot summary shows.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// What every token prints, by id.
    pub fn token_bytes_table(&self) -> impl ExactSizeIterator<Item = TokenBytes<'_>> {
        (0..self.n_vocab()).map(|id| {
            let id = u32::try_from(id).unwrap_or(u32::MAX);
            TokenBytes { bytes: self.vocab.bytes_of(id), special: self.is_special(id) }
        })
    }
}

fn spelling_of(model: &str) -> Result<Spelling, TokenizerError> {
    Ok(match model {
        "llama" | "gemma4" | "bert" => Spelling::Metaspace,
        "gpt2" => Spelling::ByteLevel,
        "t5" => return Err(TokenizerError::UnsupportedModel("t5")),
        "rwkv" => return Err(TokenizerError::UnsupportedModel("rwkv")),
        "plamo2" => return Err(TokenizerError::UnsupportedModel("plamo2")),
        other => return Err(TokenizerError::UnknownModel(other.to_owned())),
    })
}

/// Old `llama` files leave out the ids that every SentencePiece model of that family had.
fn default_llama_ids(spec: &mut TokenizerSpec) {
    if spec.model != "llama" {
        return;
    }
    let default = |text: &str, id: u32| (spec.tokens.get(id as usize).map(String::as_str) == Some(text)).then_some(id);
    let (unk, bos, eos) = (default("<unk>", 0), default("<s>", 1), default("</s>", 2));
    spec.unk = spec.unk.or(unk);
    spec.bos = spec.bos.or(bos);
    spec.eos = spec.eos.or(eos);
}

/// Files of BERT models need not name the markers; their texts are fixed. What ends a text is the separator.
fn default_bert_ids(spec: &mut TokenizerSpec) {
    if spec.model != "bert" {
        return;
    }
    let by_text = |text: &str| spec.tokens.iter().position(|token| token == text).and_then(|id| u32::try_from(id).ok());
    let (unk, cls, sep) = (by_text("[UNK]"), by_text("[CLS]"), by_text("[SEP]"));
    spec.unk = spec.unk.or(unk);
    spec.bos = spec.bos.or(cls);
    spec.sep = spec.sep.or(sep).or(spec.eos);
    spec.eos = spec.sep;
}
