//! One continuation of one prompt: its phase, its sampler, and what its client hears.

use std::sync::Arc;
use std::time::Instant;

use opencoti_kv::SeqId;
use tokio::sync::mpsc::UnboundedSender;

use crate::api::{
    EngineError, Event, Finish, GenerateRequest, RequestId, StopReason, Timings, TokenProb as ApiProb, TokenProbs,
};
use crate::constraint::Matcher;
use crate::sampling::{Sampled, Sampler};
use crate::text::{OutputText, TextEnd};
use crate::vocab::Vocab;

/// What the choices of one request have in common.
pub(crate) struct Task {
    pub(crate) id: RequestId,
    pub(crate) request: GenerateRequest,
    pub(crate) events: UnboundedSender<Event>,
    pub(crate) arrived: Instant,
}

impl Task {
    /// Tells the client; one that has gone is noticed at the next step.
    pub(crate) fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// Whether the deadline has passed.
    pub(crate) fn is_late(&self) -> bool {
        self.request.deadline.is_some_and(|deadline| self.arrived.elapsed() > deadline)
    }
}

/// What a choice does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waits until request `of` in slot `leader` has written the first `tokens` tokens, which both prompts have in
    /// common.
    Attach { leader: usize, of: RequestId, tokens: usize },
    /// Waits for the first choice of its own request to finish the prompt.
    Sibling,
    /// Its prompt is being computed.
    Prefill,
    /// Generates; `next` is the token to be fed.
    Decode { next: u32 },
}

/// How a token left a choice.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Goes,
    Ends { reason: StopReason, truncated: bool },
}

pub(crate) struct Choice {
    pub(crate) task: Arc<Task>,
    pub(crate) index: u32,
    pub(crate) phase: Phase,
    /// Its sequence in the cache; what is reserved for it is reserved to this.
    pub(crate) seq: SeqId,
    /// Prompt tokens in the cache.
    pub(crate) fed: usize,
    /// Of these, tokens that were there before.
    pub(crate) cached: usize,
    pub(crate) n_decoded: u32,
    pub(crate) sampler: Sampler,
    pub(crate) matcher: Option<Matcher>,
    pub(crate) text: OutputText,
    pub(crate) prompt_probs: Vec<Option<TokenProbs>>,
    pub(crate) started: Instant,
    /// When the prompt was finished.
    pub(crate) prompt_done: Option<Instant>,
    pub(crate) last_token: Instant,
    /// Tokens that its sequence may hold.
    pub(crate) n_ctx: usize,
    /// Tokens of the answer for which room was reserved, beyond that for the prompt; `None` if it was let in without
    /// any reservation.
    pub(crate) reserved: Option<usize>,
}

impl Choice {
    pub(crate) fn prompt(&self) -> &[u32] {
        &self.task.request.prompt
    }

    pub(crate) fn timings(&self) -> Timings {
        let prompt_end = self.prompt_done.unwrap_or_else(Instant::now);
        let ms = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
        Timings {
            cache_n: self.cached as u32,
            prompt_n: (self.fed - self.cached) as u32,
            prompt_ms: ms(self.started, prompt_end),
            predicted_n: self.n_decoded,
            predicted_ms: if self.n_decoded > 0 { ms(prompt_end, self.last_token) } else { 0.0 },
        }
    }

    /// Tells how far the prompt is, if the client wants to know.
    pub(crate) fn report_progress(&self) {
        if self.task.request.return_progress {
            self.task.send(Event::Progress {
                index: self.index,
                total: self.prompt().len() as u32,
                cache: self.cached as u32,
                processed: self.fed as u32,
                time_ms: self.started.elapsed().as_secs_f64() * 1e3,
            });
        }
    }

    /// Draws a token from `logits` (which are changed), tells the client, and says whether the choice goes on.
    pub(crate) fn draw(&mut self, logits: &mut [f32], vocab: &Vocab) -> Result<Progress, EngineError> {
        let internal = |e: &dyn std::fmt::Display| EngineError::Internal(e.to_string());
        let mask = self.matcher.as_mut().map(Matcher::compute_mask).transpose().map_err(|e| internal(&e))?;
        let sampled = self.sampler.sample(logits, mask.as_ref()).map_err(|e| internal(&e))?;
        let token = sampled.token;
        self.sampler.accept(token);
        self.n_decoded += 1;
        self.last_token = Instant::now();
        if vocab.is_end_of_generation(token) {
            self.flush_text();
            return Ok(Progress::Ends { reason: StopReason::Eos, truncated: false });
        }
        if let Some(matcher) = &mut self.matcher {
            matcher.commit(token).map_err(|e| internal(&e))?;
        }
        let mut piece = self.text.push(token);
        let progress = self.progress(piece.end.take());
        if !matches!(progress, Progress::Goes | Progress::Ends { reason: StopReason::Word(_), .. }) {
            piece.text.push_str(&self.text.finish());
        }
        self.task.send(Event::Token {
            index: self.index,
            text: piece.text,
            tokens: vec![token],
            probs: self.probs(&sampled, vocab).into_iter().collect(),
            timings: self.timings(),
        });
        self.phase = Phase::Decode { next: token };
        Ok(progress)
    }

    fn progress(&self, end: Option<TextEnd>) -> Progress {
        let request = &self.task.request;
        let ends = |reason| Progress::Ends { reason, truncated: false };
        match end {
            Some(TextEnd::Word(word)) => return ends(StopReason::Word(word)),
            Some(TextEnd::Indent) => return ends(StopReason::Limit),
            None => {}
        }
        if self.matcher.as_ref().is_some_and(Matcher::is_finished) {
            return ends(StopReason::Eos);
        }
        if request.n_predict.is_some_and(|n| self.n_decoded >= n) || self.is_out_of_time() {
            return ends(StopReason::Limit);
        }
        // The token just drawn would be the last that fits.
        if self.prompt().len() + self.n_decoded as usize >= self.n_ctx {
            return Progress::Ends { reason: StopReason::Limit, truncated: true };
        }
        Progress::Goes
    }

    /// The time limit acts only after a newline, so that a line is not cut short.
    fn is_out_of_time(&self) -> bool {
        let spent = || self.prompt_done.map(|t| t.elapsed());
        self.text.has_new_line() && self.task.request.t_max_predict.is_some_and(|limit| spent() > Some(limit))
    }

    /// Gives out the text that was held back: it ends here.
    pub(crate) fn flush_text(&mut self) {
        let text = self.text.finish();
        if !text.is_empty() {
            self.task.send(Event::Token {
                index: self.index,
                text,
                tokens: Vec::new(),
                probs: Vec::new(),
                timings: self.timings(),
            });
        }
    }

    fn probs(&self, sampled: &Sampled, vocab: &Vocab) -> Option<TokenProbs> {
        let post = self.sampler.params().post_sampling_probs;
        let value = |logprob: f32| if post { logprob.exp() } else { logprob };
        let prob = |id, logprob| ApiProb { id, bytes: vocab.token_bytes(id).to_vec(), value: value(logprob) };
        Some(TokenProbs {
            token: prob(sampled.token, sampled.logprob?),
            top: sampled.top_logprobs.iter().map(|t| prob(t.id, t.logprob)).collect(),
        })
    }

    pub(crate) fn finish(&self, slot: usize, reason: StopReason, truncated: bool, tokens_cached: usize) -> Finish {
        Finish {
            index: self.index,
            id_slot: slot as u32,
            reason,
            truncated,
            has_new_line: self.text.has_new_line(),
            tokens_cached: tokens_cached as u32,
            seed: self.sampler.seed().into(),
            session_tps: 0.0,
            timings: self.timings(),
        }
    }
}
