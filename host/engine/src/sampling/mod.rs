//! From logits to a token: biases, constraint mask, the chain of samplers, the draw.
//!
//! [`Sampler`] holds the state of one sequence (history, feedback, random numbers). The chain runs in the order that
//! the request gives; each stage is a plain function over [`candidates::Candidates`] in a file of its family.

mod adaptive;
mod candidates;
mod dry;
mod mirostat;
mod params;
mod penalties;
mod temperature;
mod truncation;
mod xtc;

use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;
use toktrie::SimpleVob;

use self::adaptive::Adaptive;
use self::candidates::{Candidate, Candidates};
use self::dry::Dry;
use self::mirostat::Mirostat;
pub use self::params::{SamplerKind, SamplingParams};
use self::penalties::Penalties;
use crate::vocab::Vocab;

/// Log-probability reported for a token that cannot occur; JSON has no −∞.
pub const LOGPROB_FLOOR: f32 = -9999.0;

/// Why no token could be drawn, or why parameters were refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The model produced NaN or +∞.
    #[error("the model's logit of token {token} is {value}, not a finite number")]
    NotANumber {
        /// Token id.
        token: u32,
        /// What was found.
        value: f32,
    },
    /// Biases and constraint left nothing.
    #[error("no token is left to choose from: logit_bias and the grammar rule out the whole vocabulary")]
    NoCandidate,
    /// Logits of another vocabulary.
    #[error("{found} logits were given for a vocabulary of {expected} tokens")]
    WrongLength {
        /// Length of the logits.
        found: usize,
        /// Size of the vocabulary.
        expected: usize,
    },
    /// A field is out of its range.
    #[error("{field} is {found}, expected {expected}")]
    OutOfRange {
        /// Name of the request's field.
        field: &'static str,
        /// What was found.
        found: f64,
        /// The range in words.
        expected: &'static str,
    },
    /// A field names a token that does not exist.
    #[error("{field} names token {id}, but the vocabulary has {n_vocab} tokens")]
    UnknownToken {
        /// Name of the request's field.
        field: &'static str,
        /// The token.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
}

/// A token and the natural logarithm of its probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenProb {
    /// Token id.
    pub id: u32,
    /// ln p, at least [`LOGPROB_FLOOR`].
    pub logprob: f32,
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Token id.
    pub token: u32,
    /// ln p of the token; `None` unless the request asked for probabilities.
    pub logprob: Option<f32>,
    /// The `n_probs` most probable tokens, falling. Of the raw logits, or after the chain with `post_sampling_probs`.
    pub top_logprobs: Vec<TokenProb>,
}

/// The sampler of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    vocab: Arc<Vocab>,
    seed: u32,
    rng: ChaCha12Rng,
    candidates: Candidates,
    /// All tokens of the sequence, prompt included, oldest first.
    history: Vec<u32>,
    penalties: Penalties,
    penalty_window: usize,
    dry: Dry,
    dry_window: usize,
    mirostat: Mirostat,
    adaptive: Adaptive,
    /// How many of the highest logits suffice, when the chain begins by cutting all others off.
    sufficient: Option<usize>,
}

/// Size of a window over the history, where −1 stands for all of it.
fn window(last_n: i32) -> usize {
    usize::try_from(last_n).unwrap_or(usize::MAX)
}

impl Sampler {
    /// Checks the parameters and starts a sampler with an empty history.
    pub fn new(params: SamplingParams, vocab: Arc<Vocab>) -> Result<Self, SampleError> {
        let params = params.checked(vocab.len())?;
        let seed = if params.seed < 0 { rand::rng().random() } else { params.seed as u32 };
        let mut sampler = Self {
            sufficient: None,
            seed,
            rng: ChaCha12Rng::seed_from_u64(seed.into()),
            candidates: Candidates::default(),
            history: Vec::new(),
            penalties: Penalties::new(params.repeat_penalty, params.frequency_penalty, params.presence_penalty),
            penalty_window: window(params.repeat_last_n),
            dry: Dry::new(
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length as usize,
                &params.dry_sequence_breakers,
                Arc::clone(&vocab),
            ),
            dry_window: window(params.dry_penalty_last_n),
            mirostat: Mirostat::new(params.mirostat_tau, params.mirostat_eta, vocab.len()),
            adaptive: Adaptive::new(params.adaptive_target, params.adaptive_decay),
            params,
            vocab,
        };
        sampler.sufficient = sampler.sufficient();
        Ok(sampler)
    }

    /// See the field.
    fn sufficient(&self) -> Option<usize> {
        let p = &self.params;
        let greedy = p.temperature <= 0.0;
        if p.mirostat > 0 && !greedy {
            return None;
        }
        for kind in &p.samplers {
            match kind {
                SamplerKind::Penalties if self.penalties.is_active() => return None,
                SamplerKind::Dry if self.dry.is_active() => return None,
                SamplerKind::TopK if p.top_k > 0 && !greedy => return Some((p.top_k as usize).max(p.min_keep)),
                SamplerKind::TopNSigma if p.top_n_sigma > 0.0 && !greedy => return None,
                SamplerKind::TypicalP if p.typical_p < 1.0 && !greedy => return None,
                SamplerKind::TopP if p.top_p < 1.0 && !greedy => return None,
                SamplerKind::MinP if p.min_p > 0.0 && !greedy => return None,
                SamplerKind::Xtc if p.xtc_probability > 0.0 && !greedy => return None,
                SamplerKind::Temperature if !greedy => return None,
                _ => {}
            }
        }
        greedy.then_some(1)
    }

    /// The seed in use: the request's, or the random one that was drawn.
    pub fn seed(&self) -> u32 {
        self.seed
    }

    /// The parameters after clamping.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// A sampler for the `index`-th of several answers to one prompt: same history, a random stream of its own.
    pub fn fork(&self, index: u32) -> Self {
        let mut fork = self.clone();
        fork.seed = self.seed.wrapping_add(index);
        fork.rng = ChaCha12Rng::seed_from_u64(fork.seed.into());
        fork
    }

    /// Adds a token, of the prompt or drawn, to the history that the penalties look at.
    pub fn accept(&mut self, token: u32) {
        self.history.push(token);
        if self.penalty_window > 0 {
            let leaving =
                self.history.len().checked_sub(self.penalty_window.saturating_add(1)).map(|i| self.history[i]);
            self.penalties.slide(token, leaving);
        }
        if self.dry.is_active() {
            self.dry.accept(token);
        }
    }

    /// Draws the next token.
    ///
    /// `logits` has one entry a token and is left as the model made it but for biases; −∞ rules a token out, and so
    /// does a zero bit of `mask`. The drawn token is not yet part of the history: [`Sampler::accept`] adds it.
    pub fn sample(&mut self, logits: &mut [f32], mask: Option<&SimpleVob>) -> Result<Sampled, SampleError> {
        self.check(logits)?;
        let raw = self.raw_probabilities(logits);
        self.apply_bias(logits);
        match mask {
            Some(mask) => self.gather(logits, |id| (id as usize) < mask.len() && mask.is_allowed(id)),
            None => self.gather(logits, |_| true),
        }
        if self.candidates.len() == 0 {
            return Err(SampleError::NoCandidate);
        }
        let drawn = if self.params.temperature <= 0.0 { self.draw_greedy() } else { self.draw_by_chain() };
        let drawn = drawn.ok_or(SampleError::NoCandidate)?;
        Ok(match raw {
            Some(raw) => Sampled {
                token: drawn.id,
                logprob: Some(raw.logprob(drawn.id)),
                top_logprobs: raw.top(self.params.n_probs),
            },
            None => Sampled {
                token: drawn.id,
                logprob: (self.params.n_probs > 0).then(|| floor_ln(drawn.p)),
                top_logprobs: self.chain_probabilities(),
            },
        })
    }

    fn gather(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) {
        match self.sufficient {
            Some(k) => self.candidates.fill_highest(logits, k, allowed),
            None => self.candidates.fill(logits, allowed),
        }
    }

    fn check(&self, logits: &[f32]) -> Result<(), SampleError> {
        if logits.len() != self.vocab.len() {
            return Err(SampleError::WrongLength { found: logits.len(), expected: self.vocab.len() });
        }
        // One comparison rules out NaN and +∞; without an early exit it is done on whole vectors.
        let sound = |l: &f32| *l < f32::INFINITY;
        if logits.iter().fold(true, |all, l| all & sound(l)) {
            return Ok(());
        }
        match logits.iter().position(|l| !sound(l)) {
            Some(i) => Err(SampleError::NotANumber { token: i as u32, value: logits[i] }),
            None => Ok(()),
        }
    }

    fn apply_bias(&self, logits: &mut [f32]) {
        for &(id, bias) in &self.params.logit_bias {
            let logit = &mut logits[id as usize];
            // −∞ stays −∞: a banned token is not brought back by an infinite bias.
            *logit = if *logit == f32::NEG_INFINITY { *logit } else { (*logit + bias).min(f32::MAX) };
        }
        let banned_ends = if self.params.ignore_eos { self.vocab.end_of_generation() } else { &[] };
        for &id in self.vocab.suppressed().iter().chain(banned_ends) {
            logits[id as usize] = f32::NEG_INFINITY;
        }
    }

    /// The newest tokens, at most `window`.
    fn recent(history: &[u32], window: usize) -> &[u32] {
        &history[history.len().saturating_sub(window)..]
    }

    fn draw_greedy(&mut self) -> Option<Candidate> {
        for kind in &self.params.samplers {
            match kind {
                SamplerKind::Penalties => self.penalties.apply(&mut self.candidates),
                SamplerKind::Dry => {
                    self.dry.apply(&mut self.candidates, Self::recent(&self.history, self.dry_window));
                }
                _ => {}
            }
        }
        self.candidates.keep_highest(1);
        self.candidates.softmax();
        self.candidates.items.first().copied()
    }

    fn draw_by_chain(&mut self) -> Option<Candidate> {
        if self.params.mirostat > 0 {
            return self.draw_by_mirostat();
        }
        for i in 0..self.params.samplers.len() {
            self.run(self.params.samplers[i]);
        }
        if self.params.adaptive_target >= 0.0 {
            self.adaptive.transform(&mut self.candidates);
            let drawn = self.draw()?;
            self.adaptive.observe(drawn.id);
            return Some(drawn);
        }
        self.candidates.softmax();
        self.draw()
    }

    fn draw_by_mirostat(&mut self) -> Option<Candidate> {
        temperature::temperature(&mut self.candidates, self.params.temperature, 0.0, 1.0);
        match self.params.mirostat {
            1 => self.mirostat.truncate_v1(&mut self.candidates),
            _ => self.mirostat.truncate_v2(&mut self.candidates),
        }
        let drawn = self.draw()?;
        self.mirostat.observe(&drawn);
        Some(drawn)
    }

    fn run(&mut self, kind: SamplerKind) {
        let p = &self.params;
        let c = &mut self.candidates;
        match kind {
            SamplerKind::Penalties => self.penalties.apply(c),
            SamplerKind::Dry => self.dry.apply(c, Self::recent(&self.history, self.dry_window)),
            SamplerKind::TopNSigma => truncation::top_n_sigma(c, p.top_n_sigma, p.min_keep),
            SamplerKind::TopK => truncation::top_k(c, p.top_k as usize, p.min_keep),
            SamplerKind::TypicalP => truncation::typical(c, p.typical_p, p.min_keep),
            SamplerKind::TopP => truncation::top_p(c, p.top_p, p.min_keep),
            SamplerKind::MinP => truncation::min_p(c, p.min_p, p.min_keep),
            SamplerKind::Xtc if p.xtc_probability > 0.0 => {
                xtc::xtc(c, p.xtc_probability, p.xtc_threshold, p.min_keep, self.rng.random());
            }
            SamplerKind::Temperature => {
                temperature::temperature(c, p.temperature, p.dynatemp_range, p.dynatemp_exponent);
            }
            SamplerKind::Xtc | SamplerKind::AdaptiveP => {}
        }
    }

    fn draw(&mut self) -> Option<Candidate> {
        self.candidates.at_quantile(self.rng.random())
    }

    fn raw_probabilities(&self, logits: &[f32]) -> Option<RawProbabilities> {
        (self.params.n_probs > 0 && !self.params.post_sampling_probs).then(|| RawProbabilities::of(logits))
    }

    /// The most probable candidates that the chain left.
    fn chain_probabilities(&mut self) -> Vec<TokenProb> {
        if self.params.n_probs == 0 {
            return Vec::new();
        }
        self.candidates.sort();
        let top = self.candidates.items.iter().take(self.params.n_probs);
        top.map(|c| TokenProb { id: c.id, logprob: floor_ln(c.p) }).collect()
    }
}

fn floor_ln(p: f32) -> f32 {
    if p > 0.0 { p.ln() } else { LOGPROB_FLOOR }
}

/// The log-softmax of the model's own logits.
struct RawProbabilities {
    logits: Vec<f32>,
    log_sum: f32,
}

impl RawProbabilities {
    fn of(logits: &[f32]) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
        Self { logits: logits.to_vec(), log_sum: max + sum.ln() as f32 }
    }

    fn logprob(&self, id: u32) -> f32 {
        (self.logits[id as usize] - self.log_sum).max(LOGPROB_FLOOR)
    }

    fn top(&self, n: usize) -> Vec<TokenProb> {
        let mut c = Candidates::default();
        c.fill_highest(&self.logits, n, |_| true);
        c.items.iter().map(|c| TokenProb { id: c.id, logprob: self.logprob(c.id) }).collect()
    }
}

/// ln p of `token` in the softmax of a model's own logits, and the `n` most probable tokens.
pub(crate) fn raw_logprobs(logits: &[f32], token: u32, n: usize) -> (f32, Vec<TokenProb>) {
    let raw = RawProbabilities::of(logits);
    (raw.logprob(token), raw.top(n))
}

#[cfg(test)]
mod tests;
