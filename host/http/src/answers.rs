//! Parts that the answers of several routes share: times, usage, probabilities.

use std::time::{SystemTime, UNIX_EPOCH};

use opencoti_engine::api::{Timings, TokenProb, TokenProbs};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::text;

/// Log-probability of what can't happen; JSON has no −∞.
const LOGPROB_FLOOR: f32 = -9999.0;

/// `PREFIX-` and 32 characters.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}{}", Uuid::new_v4().simple())
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// `timings`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TimingsBody {
    cache_n: u32,
    prompt_n: u32,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    predicted_n: u32,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
}

impl From<&Timings> for TimingsBody {
    fn from(timings: &Timings) -> Self {
        let per_token = |ms: f64, n: u32| if n == 0 { 0.0 } else { ms / f64::from(n) };
        let per_second = |ms: f64, n: u32| if ms > 0.0 { 1e3 * f64::from(n) / ms } else { 0.0 };
        TimingsBody {
            cache_n: timings.cache_n,
            prompt_n: timings.prompt_n,
            prompt_ms: timings.prompt_ms,
            prompt_per_token_ms: per_token(timings.prompt_ms, timings.prompt_n),
            prompt_per_second: per_second(timings.prompt_ms, timings.prompt_n),
            predicted_n: timings.predicted_n,
            predicted_ms: timings.predicted_ms,
            predicted_per_token_ms: per_token(timings.predicted_ms, timings.predicted_n),
            predicted_per_second: per_second(timings.predicted_ms, timings.predicted_n),
        }
    }
}

/// `prompt_progress`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ProgressBody {
    /// Tokens of the prompt.
    pub(crate) total: u32,
    /// Of these, from the cache.
    pub(crate) cache: u32,
    /// Processed, cached ones included.
    pub(crate) processed: u32,
    /// Milliseconds since the processing began.
    pub(crate) time_ms: f64,
}

/// OpenAI's `usage`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokensDetails,
    completion_tokens_details: CompletionTokensDetails,
}

/// What the prompt's tokens were.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct PromptTokensDetails {
    cached_tokens: u32,
}

/// What the answer's tokens were.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct CompletionTokensDetails {
    reasoning_tokens: u32,
}

impl Usage {
    /// Adds what one prompt and its answers used. `choices` of one prompt share it, so it counts once.
    pub(crate) fn add_prompt<'a>(&mut self, choices: impl IntoIterator<Item = &'a Timings>) {
        let mut prompt = (0, 0);
        for timings in choices {
            prompt = prompt.max((timings.cache_n + timings.prompt_n, timings.cache_n));
            self.completion_tokens += timings.predicted_n;
        }
        // The first choice computes the prompt; the others find it in the cache, which is no saving to report.
        self.prompt_tokens += prompt.0;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }

    /// Tokens that were in the cache before the request.
    pub(crate) fn add_cached(&mut self, tokens: u32) {
        self.prompt_tokens_details.cached_tokens += tokens;
    }

    /// Tokens spent on thinking.
    pub(crate) fn set_reasoning(&mut self, tokens: u32) {
        self.completion_tokens_details.reasoning_tokens = tokens;
    }
}

/// Usage over prompts with `n` choices each.
pub(crate) fn usage(timings: &[Timings], n: usize) -> Usage {
    let mut usage = Usage::default();
    for choices in timings.chunks(n.max(1)) {
        usage.add_prompt(choices);
        usage.add_cached(choices.iter().map(|timings| timings.cache_n).min().unwrap_or(0));
    }
    usage
}

/// How many tokens the prompt of a request has.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct InputTokens {
    object: &'static str,
    input_tokens: usize,
}

impl InputTokens {
    /// So many.
    pub(crate) fn new(input_tokens: usize) -> Self {
        InputTokens { object: "response.input_tokens", input_tokens }
    }
}

/// A token of OpenAI's `logprobs.content`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenLogprob {
    /// Its id.
    id: u32,
    token: String,
    bytes: Vec<u8>,
    logprob: f32,
    top_logprobs: Vec<TopLogprob>,
}

/// An alternative of OpenAI's `top_logprobs`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TopLogprob {
    id: u32,
    token: String,
    bytes: Vec<u8>,
    logprob: f32,
}

/// A token with its probability after the chain of samplers.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenProbability {
    id: u32,
    token: String,
    bytes: Vec<u8>,
    prob: f32,
    top_probs: Vec<TopProbability>,
}

/// An alternative after the chain of samplers.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TopProbability {
    id: u32,
    token: String,
    bytes: Vec<u8>,
    prob: f32,
}

/// The probabilities of a token, of the raw logits or after the chain.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Probabilities {
    /// Natural logarithms, of the raw logits.
    Raw(TokenLogprob),
    /// Probabilities, after the chain.
    AfterChain(TokenProbability),
}

/// A log-probability that JSON can hold.
pub(crate) fn finite(logprob: f32) -> f32 {
    if logprob.is_nan() { LOGPROB_FLOOR } else { logprob.max(LOGPROB_FLOOR) }
}

/// One entry of `logprobs.content` or of the native `completion_probabilities`.
pub(crate) fn probabilities(probs: &TokenProbs, after_chain: bool) -> Probabilities {
    let TokenProb { id, bytes, value } = &probs.token;
    let (id, token, bytes) = (*id, text::piece(bytes), bytes.clone());
    if after_chain {
        let top = |top: &TokenProb| TopProbability {
            id: top.id,
            token: text::piece(&top.bytes),
            bytes: top.bytes.clone(),
            prob: top.value,
        };
        Probabilities::AfterChain(TokenProbability {
            id,
            token,
            bytes,
            prob: *value,
            top_probs: probs.top.iter().map(top).collect(),
        })
    } else {
        let top = |top: &TokenProb| TopLogprob {
            id: top.id,
            token: text::piece(&top.bytes),
            bytes: top.bytes.clone(),
            logprob: finite(top.value),
        };
        Probabilities::Raw(TokenLogprob {
            id,
            token,
            bytes,
            logprob: finite(*value),
            top_logprobs: probs.top.iter().map(top).collect(),
        })
    }
}
