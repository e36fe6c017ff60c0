//! Embeddings: a prompt whose hidden states are wanted. One at a time runs beside the slots, first come first served.

use std::collections::VecDeque;

use opencoti_kv::SeqId;
use tokio::sync::oneshot;

use super::Core;
use super::start::{check_tokens, exceeds_context};
use crate::api::{EmbedRequest, Embedding, EngineError, Pooling};

type Reply = oneshot::Sender<Result<Embedding, EngineError>>;

pub(crate) struct EmbedJob {
    request: EmbedRequest,
    pooling: Pooling,
    reply: Reply,
    /// Its sequence, once it runs.
    pub(crate) seq: Option<SeqId>,
    pub(crate) fed: usize,
    vectors: Vec<Vec<f32>>,
}

impl EmbedJob {
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.request.tokens
    }

    pub(crate) fn needs_all_rows(&self) -> bool {
        self.pooling != Pooling::Last
    }

    /// Takes the hidden states of a chunk into what the pooling wants.
    fn absorb(&mut self, hidden: &[&[f32]]) {
        match self.pooling {
            Pooling::None => self.vectors.extend(hidden.iter().map(|h| h.to_vec())),
            Pooling::Last => self.vectors = hidden.last().map(|h| h.to_vec()).into_iter().collect(),
            Pooling::Cls => {
                if self.vectors.is_empty() {
                    self.vectors.extend(hidden.first().map(|h| h.to_vec()));
                }
            }
            Pooling::Mean => {
                let share = 1.0 / self.request.tokens.len() as f32;
                for h in hidden {
                    if self.vectors.is_empty() {
                        self.vectors.push(vec![0.0; h.len()]);
                    }
                    self.vectors[0].iter_mut().zip(*h).for_each(|(sum, x)| *sum += share * x);
                }
            }
        }
    }
}

impl Core {
    pub(crate) fn enqueue_embed(&mut self, request: EmbedRequest, reply: Reply) {
        if let Err(error) = self.check_embed(&request) {
            self.meters.refused(&error);
            let _ = reply.send(Err(error));
            return;
        }
        let pooling = request.pooling.unwrap_or(self.config.pooling);
        self.embeds.push_back(EmbedJob { request, pooling, reply, seq: None, fed: 0, vectors: Vec::new() });
    }

    fn check_embed(&self, request: &EmbedRequest) -> Result<(), EngineError> {
        self.check_open()?;
        if request.tokens.is_empty() {
            return Err(EngineError::Invalid {
                field: Some("input".to_owned()),
                message: "the input is empty, expected at least one token".to_owned(),
            });
        }
        check_tokens("input", &request.tokens, self.vocab.len())?;
        // More than the whole cache holds would be refused by any wait.
        let most = self.config.n_ctx.min(self.cache.config().capacity_tokens);
        if request.tokens.len() > most {
            return Err(exceeds_context(request.tokens.len(), most));
        }
        if self.embeds.len() >= self.config.max_queue.max(1) {
            return Err(EngineError::Rejected {
                retry_after: 1,
                reason: "queue",
                message: format!(
                    "{} embedding requests are waiting already, which is the most allowed",
                    self.embeds.len()
                ),
            });
        }
        Ok(())
    }

    /// Reserves room for the request at the front. When there is none now it waits for those who run.
    pub(crate) fn start_embed(&mut self) {
        let Some(job) = self.embeds.front_mut().filter(|job| job.seq.is_none()) else { return };
        match self.cache.admit(None, job.request.tokens.len()) {
            Ok(seq) => job.seq = Some(seq),
            Err(_) if self.slots.iter().any(|s| s.choice.is_some()) => {}
            Err(error) => {
                let error = self.no_room(error);
                self.meters.refused(&error);
                self.end_embed(Err(error));
            }
        }
    }

    pub(crate) fn deliver_embed(&mut self, tokens: usize, hidden: &[&[f32]]) {
        let Some(job) = self.embeds.front_mut() else { return };
        job.fed += tokens;
        job.absorb(hidden);
        if job.fed == job.request.tokens.len() {
            let vectors = std::mem::take(&mut job.vectors);
            self.end_embed(Ok(Embedding { vectors }));
        }
    }

    /// Ends the request at the front. Its sequence stays for those who begin like it.
    pub(crate) fn end_embed(&mut self, result: Result<Embedding, EngineError>) {
        let Some(job) = self.embeds.pop_front() else { return };
        self.free_embed(&job);
        let _ = job.reply.send(result);
    }

    fn free_embed(&mut self, job: &EmbedJob) {
        if let Some(Err(error)) = job.seq.map(|seq| self.cache.release(seq)) {
            tracing::error!(%error, "the sequence of an embeddings request could not be released");
        }
    }

    pub(crate) fn drop_departed_embeds(&mut self) {
        let (gone, left) = std::mem::take(&mut self.embeds).into_iter().partition(|job| job.reply.is_closed());
        self.embeds = left;
        let gone: VecDeque<EmbedJob> = gone;
        gone.iter().for_each(|job| self.free_embed(job));
    }

    pub(crate) fn refuse_embeds(&mut self, error: &EngineError) {
        while !self.embeds.is_empty() {
            self.end_embed(Err(error.clone()));
        }
    }
}
