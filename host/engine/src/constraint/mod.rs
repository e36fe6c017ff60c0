//! Constrained decoding: which tokens may come next.
//!
//! A [`ConstraintFactory`] holds the trie of the vocabulary and is shared; a [`Matcher`] is one constraint in the
//! middle of one text. JSON schemas and Lark grammars go through `llguidance`, GBNF through [`gbnf`]. Everything fails
//! closed: what cannot be enforced is an error before the request starts, and a text that cannot go on is an error.

mod gbnf;
mod gbnf_parser;
mod schema;

use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::{JsonCompileOptions, ParserFactory};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use self::gbnf::GbnfMatcher;
use crate::api::EngineError;
use crate::vocab::Vocab;

/// Why a constraint cannot be enforced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConstraintError {
    /// The grammar or schema is wrong.
    #[error("{0}")]
    Invalid(String),
    /// A place in a schema is wrong or cannot be enforced.
    #[error("{message} (at {})", if path.is_empty() { "the root" } else { path })]
    Schema {
        /// Path of the keyword within the schema; empty for the root.
        path: String,
        /// What is wrong.
        message: String,
    },
    /// The text broke the constraint or cannot go on.
    #[error("{0}")]
    Violated(String),
}

/// What to constrain by.
#[derive(Debug, Clone, Copy)]
pub enum Grammar<'a> {
    /// GBNF text.
    Gbnf(&'a str),
    /// A JSON schema.
    JsonSchema(&'a Value),
    /// Any JSON object.
    JsonObject,
    /// A Lark grammar in llguidance's dialect.
    Lark(&'a str),
}

impl ConstraintError {
    /// As the error of a request whose body has the constraint in `field`.
    pub fn in_field(self, field: &str) -> EngineError {
        let (path, message) = match self {
            ConstraintError::Schema { path, message } if !path.is_empty() => (format!("{field}.{path}"), message),
            ConstraintError::Schema { message, .. } => (field.to_owned(), message),
            other => (field.to_owned(), other.to_string()),
        };
        EngineError::Invalid { message: format!("Field '{path}': {message}"), field: Some(path) }
    }
}

/// Whitespace between JSON tokens. It is bounded, because small models otherwise go on with it without end.
const JSON_WHITESPACE: &str = r"[\x20\x09]{1,2}|\r?\n[\x20\x09]{0,40}";

/// llguidance's trie cannot hold longer tokens; these are never allowed.
const MAX_TOKEN_BYTES: usize = 1000;

/// The vocabulary as a trie, and what grammars are compiled with. Built once a model.
pub struct ConstraintFactory {
    env: TokEnv,
    parsers: ParserFactory,
    end_of_generation: Vec<u32>,
}

impl ConstraintFactory {
    /// Builds the trie.
    pub fn new(vocab: &Vocab) -> Result<Self, ConstraintError> {
        let words: Vec<Vec<u8>> = (0..vocab.len() as u32).map(|id| trie_word(vocab, id)).collect();
        let end_of_generation = vocab.end_of_generation().to_vec();
        let eos = end_of_generation.first().copied().unwrap_or(toktrie::INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(vocab.len() as u32, eos), &words);
        if !end_of_generation.is_empty() {
            trie = trie.with_eos_tokens(&end_of_generation);
        }
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut parsers = ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(invalid)?;
        parsers.quiet();
        *parsers.limits_mut() = ParserLimits { verbose_errors: false, ..ParserLimits::default() };
        Ok(Self { env, parsers, end_of_generation })
    }

    /// Compiles a grammar. May take milliseconds for a large schema.
    pub fn compile(&self, grammar: Grammar<'_>) -> Result<Matcher, ConstraintError> {
        let state = match grammar {
            Grammar::Gbnf(text) => State::Gbnf(Box::new(GbnfMatcher::new(text)?)),
            Grammar::JsonSchema(schema) => self.llguidance(TopLevelGrammar::from_json_schema(json_schema(schema)?))?,
            Grammar::JsonObject => {
                self.llguidance(TopLevelGrammar::from_json_schema(json_schema(&json!({"type": "object"}))?))?
            }
            Grammar::Lark(text) => self.llguidance(TopLevelGrammar::from_lark(text.to_owned()))?,
        };
        let mut matcher =
            Matcher { state, env: Arc::clone(&self.env), end_of_generation: self.end_of_generation.clone() };
        // The first mask shows whether the grammar can begin at all.
        if !matcher.is_finished() {
            matcher.compute_mask().map_err(|e| ConstraintError::Invalid(e.to_string()))?;
        }
        Ok(matcher)
    }

    fn llguidance(&self, grammar: TopLevelGrammar) -> Result<State, ConstraintError> {
        let mut matcher = llguidance::Matcher::new(self.parsers.create_parser(grammar));
        match matcher.get_error() {
            Some(message) => Err(ConstraintError::Invalid(one_line(&message))),
            None => match matcher.grammar_warnings().first() {
                Some(warning) => Err(ConstraintError::Invalid(one_line(warning))),
                None => Ok(State::Llguidance(Box::new(matcher))),
            },
        }
    }
}

/// llguidance knows special tokens by a first byte that no text has.
fn trie_word(vocab: &Vocab, id: u32) -> Vec<u8> {
    let bytes = vocab.token_bytes(id);
    match bytes.len() {
        0 => Vec::new(),
        n if n > MAX_TOKEN_BYTES => Vec::new(),
        _ if vocab.is_special(id) => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        _ => bytes.to_vec(),
    }
}

/// A schema as a Lark grammar may hold it in `%json`: every keyword is known to be enforced or to say nothing.
///
/// # Errors
/// A keyword that can't be enforced, by its path.
pub fn json_schema(schema: &Value) -> Result<Value, ConstraintError> {
    let mut schema = match schema::enforceable(schema)? {
        Value::Bool(true) => json!({}),
        Value::Object(object) => Value::Object(object),
        _ => {
            return Err(ConstraintError::Invalid("the schema is false: no JSON value satisfies it".to_owned()));
        }
    };
    let options =
        JsonCompileOptions { whitespace_pattern: Some(JSON_WHITESPACE.to_owned()), ..JsonCompileOptions::default() };
    options.apply_to(&mut schema);
    Ok(schema)
}

fn invalid(error: impl std::fmt::Display) -> ConstraintError {
    ConstraintError::Invalid(one_line(&error.to_string()))
}

/// The first line of a message, without llguidance's dump of its state.
fn one_line(message: &str) -> String {
    message.split("<non-verbose/>").next().unwrap_or(message).trim().replace('\n', "; ")
}

#[derive(Clone)]
enum State {
    Llguidance(Box<llguidance::Matcher>),
    Gbnf(Box<GbnfMatcher>),
}

/// One constraint in the middle of one text.
#[derive(Clone)]
pub struct Matcher {
    state: State,
    env: TokEnv,
    end_of_generation: Vec<u32>,
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match &self.state {
            State::Llguidance(_) => "llguidance",
            State::Gbnf(_) => "gbnf",
        };
        f.debug_struct("Matcher").field("kind", &kind).finish_non_exhaustive()
    }
}

impl Matcher {
    /// The tokens that may come next, one bit a token. Tokens that end the answer are among them only where the
    /// grammar may end. An empty set is an error: the text cannot go on.
    pub fn compute_mask(&mut self) -> Result<SimpleVob, ConstraintError> {
        let mask = match &mut self.state {
            State::Llguidance(m) => m.compute_mask_or_eos().map_err(violated)?,
            State::Gbnf(m) => {
                let mut mask = m.mask(self.env.tok_trie())?;
                // A token that ends the answer is no text, whatever the grammar says of its bytes.
                for &id in &self.end_of_generation {
                    if m.is_accepting() { mask.allow_token(id) } else { mask.disallow_token(id) }
                }
                mask
            }
        };
        if mask.is_zero() && !self.is_finished() {
            return Err(ConstraintError::Violated(
                "the grammar allows no token of this vocabulary to come next".to_owned(),
            ));
        }
        Ok(mask)
    }

    /// Reads a token that the mask allowed.
    pub fn commit(&mut self, token: u32) -> Result<(), ConstraintError> {
        match &mut self.state {
            State::Llguidance(m) => m.consume_token(token).map_err(violated),
            State::Gbnf(_) if self.end_of_generation.contains(&token) => Ok(()),
            State::Gbnf(m) => m.commit(self.env.tok_trie().token(token)),
        }
    }

    /// Whether the text is complete and nothing can follow.
    pub fn is_finished(&self) -> bool {
        match &self.state {
            State::Llguidance(m) => m.is_stopped() && !m.is_error(),
            State::Gbnf(m) => m.is_finished(),
        }
    }
}

fn violated(error: impl std::fmt::Display) -> ConstraintError {
    ConstraintError::Violated(one_line(&error.to_string()))
}

#[cfg(test)]
mod tests;
