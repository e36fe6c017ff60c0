//! Embeddings: texts whose hidden states are wanted. Several run at a time beside the slots, first come first served.

use std::collections::VecDeque;

use opencoti_kv::{Outputs, SeqId};
use tokio::sync::oneshot;

use super::start::{check_tokens, exceeds_context};
use super::{Core, ModelKind};
use crate::api::{EmbedRequest, Embedding, EngineError, Pooling};

/// Texts that hold pages at once while nobody generates.
const TEXTS_ALONE: usize = 64;
/// The same beside answers, to which the pages are worth more.
const TEXTS_BESIDE_ANSWERS: usize = 8;

type Reply = oneshot::Sender<Result<Embedding, EngineError>>;

pub(crate) struct EmbedJob {
    request: EmbedRequest,
    pooling: Pooling,
    /// Taken when the answer is sent.
    reply: Option<Reply>,
    /// Its sequence, once it runs.
    pub(crate) seq: Option<SeqId>,
    pub(crate) fed: usize,
    vectors: Vec<Vec<f32>>,
}

impl EmbedJob {
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.request.tokens
    }

    /// Tokens still to be computed.
    pub(crate) fn left(&self) -> usize {
        self.request.tokens.len() - self.fed
    }

    /// Where the second text of a pair begins.
    pub(crate) fn second(&self) -> Option<usize> {
        self.request.second
    }

    pub(crate) fn is_done(&self) -> bool {
        self.reply.is_none()
    }

    /// What is wanted of the next `tokens` tokens.
    pub(crate) fn outputs(&self, tokens: usize) -> Outputs {
        let (first, last) = (self.fed == 0, self.left() == tokens);
        match self.pooling {
            Pooling::Mean | Pooling::None => Outputs::Hidden,
            Pooling::Cls if first => Outputs::Hidden,
            Pooling::Last if last => Outputs::Hidden,
            Pooling::Rank if first => Outputs::First,
            Pooling::Cls | Pooling::Last | Pooling::Rank => Outputs::None,
        }
    }

    /// Takes the results of a chunk into what the pooling wants.
    fn absorb(&mut self, hidden: &[&[f32]], logits: &[&[f32]]) {
        let one = |row: Option<&&[f32]>| row.map(|row| row.to_vec()).into_iter().collect();
        match self.pooling {
            Pooling::None => self.vectors.extend(hidden.iter().map(|h| h.to_vec())),
            Pooling::Last => self.vectors = one(hidden.last()),
            Pooling::Cls if self.vectors.is_empty() => self.vectors = one(hidden.first()),
            Pooling::Rank if self.vectors.is_empty() => self.vectors = one(logits.first()),
            Pooling::Cls | Pooling::Rank => {}
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
        let pooling = request.pooling.unwrap_or(self.config.pooling);
        if let Err(error) = self.check_embed(&request, pooling) {
            self.meters.refused(&error);
            let _ = reply.send(Err(error));
            return;
        }
        let reply = Some(reply);
        self.embeds.push_back(EmbedJob { request, pooling, reply, seq: None, fed: 0, vectors: Vec::new() });
    }

    fn check_embed(&self, request: &EmbedRequest, pooling: Pooling) -> Result<(), EngineError> {
        self.check_open()?;
        let invalid =
            |message: &str| Err(EngineError::Invalid { field: Some("input".to_owned()), message: message.to_owned() });
        if request.tokens.is_empty() {
            return invalid("the input is empty, expected at least one token");
        }
        if pooling == Pooling::Rank && self.config.model != ModelKind::Ranker {
            return invalid("the model has no head that scores texts, so the input can't be pooled by rank");
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

    /// Reserves room for the first requests, as many as a step has tokens for. Those for which there is none now wait for
    /// those who run.
    pub(crate) fn start_embeds(&mut self) {
        let generating = self.slots.iter().any(|s| s.choice.is_some());
        let most = self.most_texts(generating);
        let (mut at, mut tokens) = (0, 0);
        while at < self.embeds.len().min(most) && tokens < self.config.budget.n_batch {
            if self.embeds[at].seq.is_none() {
                match self.cache.admit(None, self.embeds[at].request.tokens.len()) {
                    Ok(seq) => self.embeds[at].seq = Some(seq),
                    Err(_) if generating || at > 0 => break,
                    Err(error) => {
                        let error = self.no_room(error);
                        self.meters.refused(&error);
                        self.end_embed(at, Err(error));
                        self.sweep_embeds();
                        continue;
                    }
                }
            }
            tokens += self.embeds[at].left();
            at += 1;
        }
    }

    /// Texts that may hold pages at once.
    fn most_texts(&self, generating: bool) -> usize {
        let windowed = || self.cache.config().groups.iter().any(|group| group.geometry.window.is_some());
        let for_each_slot = self.cache.state_view().is_some() || windowed();
        match (for_each_slot, generating) {
            // Stores of windows and of recurrent state have room for one sequence more than there are slots.
            (true, _) => 1,
            (false, true) => TEXTS_BESIDE_ANSWERS,
            (false, false) => TEXTS_ALONE,
        }
    }

    pub(crate) fn deliver_embed(&mut self, at: usize, tokens: usize, hidden: &[&[f32]], logits: &[&[f32]]) {
        let Some(job) = self.embeds.get_mut(at) else { return };
        job.absorb(hidden, logits);
        job.fed += tokens;
        if job.left() == 0 {
            let vectors = std::mem::take(&mut job.vectors);
            self.end_embed(at, Ok(Embedding { vectors }));
        }
    }

    /// Answers a request and gives its pages back. Its place stays until the next sweep.
    pub(crate) fn end_embed(&mut self, at: usize, result: Result<Embedding, EngineError>) {
        let Some(job) = self.embeds.get_mut(at) else { return };
        let seq = job.seq.take();
        if let Some(reply) = job.reply.take() {
            let _ = reply.send(result);
        }
        self.release_embed(seq);
    }

    fn release_embed(&mut self, seq: Option<SeqId>) {
        if let Some(Err(error)) = seq.map(|seq| self.cache.release(seq)) {
            tracing::error!(%error, "the sequence of an embeddings request could not be released");
        }
    }

    /// Forgets the requests that have been answered.
    pub(crate) fn sweep_embeds(&mut self) {
        self.embeds.retain(|job| !job.is_done());
    }

    pub(crate) fn drop_departed_embeds(&mut self) {
        let gone = |job: &EmbedJob| job.reply.as_ref().is_none_or(oneshot::Sender::is_closed);
        let (gone, left): (VecDeque<_>, _) = std::mem::take(&mut self.embeds).into_iter().partition(gone);
        self.embeds = left;
        gone.iter().for_each(|job| self.release_embed(job.seq));
    }

    pub(crate) fn refuse_embeds(&mut self, error: &EngineError) {
        for at in 0..self.embeds.len() {
            self.end_embed(at, Err(error.clone()));
        }
        self.sweep_embeds();
    }
}
