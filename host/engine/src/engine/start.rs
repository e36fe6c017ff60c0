//! From the queue into slots: checks, prefix reuse, admission, reservation.

use std::sync::Arc;
use std::time::Instant;

use opencoti_kv::{KvError, Prefix, SeqId};
use opencoti_plugin_api::admission::{Decision, Request, Snapshot, Verdict};
use tokio::sync::mpsc::UnboundedSender;

use super::choice::{Choice, Phase, Task};
use super::pools::Paced;
use super::queue::{Constraint, Waiting};
use super::slots::{NoSlot, Wish, pick};
use super::{Core, ModelKind};
use crate::admission;
use crate::api::{EngineError, Event, GenerateRequest, Notice, RequestId};
use crate::compiler::Compiled;
use crate::constraint::Matcher;
use crate::pools::rate::Rate;
use crate::sampling::{SampleError, Sampler};
use crate::scheduler::common_prefix;
use crate::text::OutputText;

/// Waiting for somebody else's prompt must save so many tokens.
const LEAST_GAIN: usize = 32;

/// A sequence that shares less than one token in so many of the prompt says nothing about which slot is the right one:
/// all prompts begin alike.
const LEAST_SIMILARITY: usize = 10;

/// What came of a try to start a request.
enum Outcome {
    /// It left the queue, into slots or refused.
    Left,
    /// It waits, and those behind it may go first.
    Passed,
    /// It waits, and so do those behind it.
    Blocked,
}

/// Where the beginning of a prompt comes from.
#[derive(Clone, Copy, Default)]
struct Source {
    prefix: Option<Prefix>,
    /// A slot whose prompt is being computed, and how many tokens the prompts have in common.
    leader: Option<(usize, usize)>,
}

impl Source {
    fn shared(&self) -> usize {
        self.leader.map_or(self.prefix.map_or(0, |p| p.tokens), |(_, tokens)| tokens)
    }
}

impl Core {
    /// Checks a request and puts it into the queue, or refuses it.
    pub(crate) fn enqueue(&mut self, id: RequestId, mut request: GenerateRequest, events: UnboundedSender<Event>) {
        let constraint = request.constraint.take();
        let field = std::mem::take(&mut request.constraint_field);
        let task = Task { id, request, events, arrived: Instant::now() };
        if let Err(error) = self.check(&task.request) {
            return self.refuse(&task, error);
        }
        let constraint = match constraint.map(|c| self.compiler.compile(id, c, field)) {
            None => Constraint::None,
            Some(Ok(())) => Constraint::Compiling,
            Some(Err(error)) => return self.refuse(&task, error),
        };
        self.queue.push(Waiting { task, constraint });
    }

    /// Takes a compiled constraint to the request that waits for it, if it still does.
    pub(crate) fn accept_compiled(&mut self, compiled: Compiled) {
        let Some(at) = self.queue.find(compiled.id) else { return };
        match (compiled.matcher, self.queue.get_mut(at)) {
            (Ok(matcher), Some(waiting)) => waiting.constraint = Constraint::Ready(Box::new(matcher)),
            (Err(error), _) => self.refuse_at(at, error),
            (Ok(_), None) => {}
        }
    }

    fn check(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        let invalid =
            |field: &str, message: String| Err(EngineError::Invalid { field: Some(field.to_owned()), message });
        let (n_slots, n_ctx, n_vocab) = (self.open, self.config.n_ctx, self.vocab.len());
        self.check_open()?;
        if self.config.model != ModelKind::Generator {
            let message = "this server's model is an encoder: it embeds and ranks texts and generates none; use \
                           /v1/embeddings or /v1/rerank, or start the server with a model that generates";
            return Err(EngineError::Invalid { field: None, message: message.to_owned() });
        }
        if request.prompt.is_empty() {
            return invalid("prompt", "the prompt is empty, expected at least one token".to_owned());
        }
        check_tokens("prompt", &request.prompt, n_vocab)?;
        if request.n_choices == 0 || request.n_choices as usize > n_slots {
            return invalid("n", format!("n is {}, expected 1 to {n_slots}, the number of slots", request.n_choices));
        }
        if let Some(slot) = request.id_slot.filter(|&slot| slot as usize >= n_slots) {
            return invalid("id_slot", format!("there is no slot {slot}; there are {n_slots}, counted from 0"));
        }
        request.sampling.clone().checked(n_vocab).map_err(refused_sampling)?;
        if request.prompt.len() >= n_ctx {
            return Err(exceeds_context(request.prompt.len(), n_ctx));
        }
        self.check_pools(request)?;
        let idle = self.slots.iter().any(|s| s.choice.is_none());
        if self.queue.is_full() && !(self.queue.is_empty() && idle) {
            return Err(EngineError::Rejected {
                retry_after: admission::retry_after(self.seconds_to_next_release()),
                reason: "queue",
                message: format!("{} requests are waiting already, which is the most allowed", self.queue.len()),
            });
        }
        Ok(())
    }

    /// Whether any work can be taken: not after a shutdown, and not with a codec that nobody may call any more.
    pub(crate) fn check_open(&self) -> Result<(), EngineError> {
        self.closed.clone().map_or(Ok(()), Err)
    }

    /// Closes for good, and ends everything, once a codec of the cache may not be called any more; the requests of the
    /// step in which it failed have ended before.
    pub(crate) fn heed_quarantine(&mut self) {
        let codecs = self.cache.config().groups.iter().flat_map(|group| [&group.k, &group.v]);
        let Some(codec) = codecs.into_iter().find(|codec| codec.plugin().health().is_quarantined()) else { return };
        let why = EngineError::Unavailable(format!(
            "the cache's codec `{}` can't be used: plugin `{}` is in quarantine ({}); restart the server",
            codec.name(),
            codec.plugin().name(),
            codec.plugin().health().reason().unwrap_or_default()
        ));
        self.end_with(&why);
        self.closed = Some(why);
    }

    /// Starts as many waiting requests as there is room for.
    pub(crate) fn start_waiting(&mut self) {
        self.open_slot();
        let mut at = 0;
        while at < self.queue.len() {
            match self.try_start(at) {
                Outcome::Left => {}
                Outcome::Passed => at += 1,
                Outcome::Blocked => break,
            }
        }
        self.meters.load(self.slots.iter().filter(|s| s.choice.is_some()).count(), self.queue.len());
    }

    fn try_start(&mut self, at: usize) -> Outcome {
        if self.slots[..self.open].iter().all(|s| s.choice.is_some()) {
            return Outcome::Blocked;
        }
        let Some(waiting) = self.queue.get(at) else { return Outcome::Blocked };
        if matches!(waiting.constraint, Constraint::Compiling) {
            return Outcome::Passed;
        }
        let request = &waiting.task.request;
        let crowded = match self.pace(request) {
            Ok(crowded) => crowded,
            Err(Paced::Held) => return Outcome::Passed,
            Err(Paced::Refused(error)) => {
                self.refuse_at(at, error);
                return Outcome::Left;
            }
        };
        let source = self.source(request);
        let wish = Wish {
            pinned: request.id_slot,
            session: request.session_id.as_deref(),
            donor: source.prefix.filter(|p| p.tokens * LEAST_SIMILARITY >= request.prompt.len()).map(|p| p.donor),
            n: request.n_choices as usize,
        };
        let slots = match pick(&self.slots[..self.open], wish) {
            Ok(slots) => slots,
            Err(NoSlot::PinnedBusy) => return Outcome::Passed,
            Err(NoSlot::Busy) => return Outcome::Blocked,
        };
        let asked = self.admission_request(request, source.shared());
        let snapshot = self.admission_snapshot(at);
        let decision = self.gate.decide(&asked, &snapshot);
        match decision.verdict {
            Verdict::Admit => self.admit(at, &slots, source, &decision, crowded),
            // With nothing running there is nothing to wait for.
            Verdict::Queue if self.slots.iter().any(|s| s.choice.is_some()) => Outcome::Blocked,
            Verdict::Queue | Verdict::Reject => {
                self.refuse_at(at, self.rejection(&decision));
                Outcome::Left
            }
        }
    }

    /// Where the prompt's beginning is, or will soon be. The last token is always computed, for its logits.
    fn source(&self, request: &GenerateRequest) -> Source {
        if request.prompt_logprobs.is_some() {
            return Source::default();
        }
        let wanted = &request.prompt[..request.prompt.len() - 1];
        let named = self.named_prefix(request, wanted);
        if !request.cache_prompt {
            return Source { prefix: named, leader: None };
        }
        let longest = self.cache.longest_prefix(wanted);
        let prefix = named.into_iter().chain(longest).max_by_key(|p| p.tokens);
        let found = prefix.map_or(0, |p| p.tokens);
        let in_prefill = |(slot, s): (usize, &super::slots::Slot)| {
            let choice = s.choice.as_ref().filter(|c| c.phase == Phase::Prefill)?;
            Some((slot, common_prefix(choice.prompt(), wanted)))
        };
        let leader = self.slots.iter().enumerate().filter_map(in_prefill).max_by_key(|&(_, tokens)| tokens);
        Source { prefix, leader: leader.filter(|&(_, tokens)| tokens >= found + LEAST_GAIN) }
    }

    fn admission_request(&self, request: &GenerateRequest, shared: usize) -> Request {
        Request {
            prompt_tokens: request.prompt.len() as u64,
            shared_tokens: shared as u64,
            declared_tokens: (self.declared(request) * request.n_choices as usize) as u64,
            overcommit: request.overcommit,
            known_session: self.is_known(request),
        }
    }

    /// Tokens that one choice says it may generate; 0 when it does not say, and all that its context holds where that is reserved.
    fn declared(&self, request: &GenerateRequest) -> usize {
        let rest = self.config.n_ctx - request.prompt.len();
        match request.n_predict {
            _ if self.config.reserve_context => rest,
            bound => bound.map_or(0, |n| (n as usize).min(rest)),
        }
    }

    fn admission_snapshot(&self, queued: usize) -> Snapshot {
        Snapshot {
            stores: admission::stores(&self.cache),
            slots_total: self.open as u32,
            slots_free: self.slots[..self.open].iter().filter(|s| s.choice.is_none()).count() as u32,
            queued: queued as u32,
            seconds_to_next_release: self.seconds_to_next_release(),
        }
    }

    /// When the first of those who run will have generated all they may; 0 when none has a bound.
    pub(crate) fn seconds_to_next_release(&self) -> f32 {
        let left = |c: &Choice| c.task.request.n_predict.map(|n| n.saturating_sub(c.n_decoded));
        let soonest = self.slots.iter().filter_map(|s| left(s.choice.as_ref()?)).min();
        soonest.map_or(0.0, |tokens| tokens as f32 * self.step_seconds)
    }

    /// Reserves what was decided and puts the request into its slots.
    fn admit(
        &mut self,
        at: usize,
        slots: &[usize],
        source: Source,
        decision: &Decision,
        crowded: Option<String>,
    ) -> Outcome {
        let Some(waiting) = self.queue.get(at) else { return Outcome::Blocked };
        let request = &waiting.task.request;
        let bound = self.declared(request);
        let demand = usize::try_from(decision.demand_tokens).unwrap_or(usize::MAX);
        let bound = bound.min(demand);
        let shares_by_hand = request.shared_slot.is_some();
        let may_pass = decision.warn || request.overcommit || demand == 0;
        let stores = &self.cache.config().groups;
        let short = || {
            let store = decision.short_store.and_then(|i| stores.get(i)).map(|group| group.name.clone());
            store.unwrap_or_else(|| "state".to_owned())
        };
        let mut saturated = decision.warn.then(short).or(crowded);
        let mut reserved = (demand > 0).then_some(bound);
        let mut from = source;
        if let Some(prefix) = source.prefix.filter(|_| shares_by_hand) {
            // A donor that has gone is noticed when it is to be shared.
            let _ = self.cache.keep_whole(prefix.donor);
        }
        let mut seated = self.seat(slots.len(), from, demand, bound);
        if may_pass && matches!(seated, Err(KvError::Full(_))) {
            saturated = saturated.or_else(|| Some("kv".to_owned()));
            reserved = None;
            seated = self.seat(slots.len(), from, 0, 0);
        }
        if may_pass && matches!(seated, Err(KvError::Full(_))) {
            from = Source::default();
            seated = self.seat(slots.len(), from, 0, 0);
        }
        match seated {
            Ok(sequences) => {
                if let Some(waiting) = self.queue.remove(at) {
                    self.place(waiting, slots, &sequences, from, reserved, saturated);
                }
            }
            Err(error) => self.refuse_at(at, self.no_room(error)),
        }
        Outcome::Left
    }

    /// Sequences for `n` choices with `demand` tokens reserved in all, `bound` of them for each choice's answer.
    fn seat(&mut self, n: usize, source: Source, demand: usize, bound: usize) -> Result<Vec<SeqId>, KvError> {
        let first = demand.saturating_sub(bound * (n - 1));
        let mut seated = Vec::with_capacity(n);
        for i in 0..n {
            let sequence = match (i, source.leader) {
                (0, None) => self.cache.admit(source.prefix, first),
                (0, Some(_)) => self.cache.admit(None, first),
                _ => self.cache.admit(None, bound),
            };
            match sequence {
                Ok(sequence) => seated.push(sequence),
                Err(error) => {
                    // The first may be an idle sequence that was taken over: it goes back to being idle.
                    seated.into_iter().try_for_each(|s| self.cache.retain(s))?;
                    return Err(error);
                }
            }
        }
        self.disown(seated[0]);
        Ok(seated)
    }

    /// A sequence that is taken into use again is no slot's last one any more.
    pub(crate) fn disown(&mut self, seq: SeqId) {
        for slot in &mut self.slots {
            slot.last.take_if(|last| *last == seq);
        }
    }

    fn place(
        &mut self,
        waiting: Waiting,
        slots: &[usize],
        sequences: &[SeqId],
        source: Source,
        reserved: Option<usize>,
        saturated: Option<String>,
    ) {
        let matcher = match waiting.constraint {
            Constraint::Ready(matcher) => Some(*matcher),
            Constraint::None | Constraint::Compiling => None,
        };
        let task = Arc::new(waiting.task);
        let mut sampler = match Sampler::new(task.request.sampling.clone(), Arc::clone(&self.vocab)) {
            Ok(sampler) => sampler,
            Err(error) => {
                for &seq in sequences {
                    let _ = self.cache.retain(seq);
                }
                return self.refuse(&task, refused_sampling(error));
            }
        };
        task.request.prompt.iter().for_each(|&token| sampler.accept(token));
        let sessions_remaining = self.attached(&task.request, task.id);
        let mut notice = Notice { saturated, sessions_remaining, session_tps: None };
        for (index, (&slot, &seq)) in slots.iter().zip(sequences).enumerate() {
            let phase = match (index, source.leader) {
                (0, None) => Phase::Prefill,
                (0, Some((leader, tokens))) => self.attach_to(leader, tokens),
                _ => Phase::Sibling,
            };
            let choice = Choice {
                phase,
                reserved,
                ..self.choice(&task, index as u32, seq, sampler.fork(index as u32), matcher.clone())
            };
            self.occupy(slot, choice, &mut notice);
            self.keep_snapshots(slot);
        }
    }

    fn attach_to(&self, leader: usize, tokens: usize) -> Phase {
        match &self.slots[leader].choice {
            Some(choice) => Phase::Attach { leader, of: choice.task.id, tokens },
            None => Phase::Prefill,
        }
    }

    fn choice(&self, task: &Arc<Task>, index: u32, seq: SeqId, sampler: Sampler, matcher: Option<Matcher>) -> Choice {
        let request = &task.request;
        let cached = self.cache.committed(seq).unwrap_or(0);
        let now = Instant::now();
        Choice {
            index,
            phase: Phase::Prefill,
            seq,
            fed: cached,
            cached,
            n_decoded: 0,
            sampler,
            matcher,
            text: OutputText::new(Arc::clone(&self.vocab), &request.stop, request.n_indent, request.render_special),
            prompt_probs: Vec::new(),
            started: now,
            prompt_done: None,
            last_token: now,
            n_ctx: self.config.n_ctx,
            reserved: None,
            task: Arc::clone(task),
        }
    }

    fn occupy(&mut self, slot: usize, choice: Choice, notice: &mut Notice) {
        let now = self.tick();
        let place = &mut self.slots[slot];
        let request = &choice.task.request;
        place.last_used = now;
        // A prompt that becomes a pool leaves nothing in the slot.
        if request.make_pool.is_none() {
            if place.session.is_none() || place.session != request.session_id {
                place.rate = Rate::default();
            }
            place.session.clone_from(&request.session_id);
            place.pool = request.pool;
            place.last = None;
        }
        notice.session_tps = Some(place.rate.tps()).filter(|tps| *tps > 0.0);
        choice.task.send(Event::Started { index: choice.index, id_slot: slot as u32, notice: notice.clone() });
        place.choice = Some(choice);
    }

    fn refuse_at(&mut self, at: usize, error: EngineError) {
        if let Some(waiting) = self.queue.remove(at) {
            self.refuse(&waiting.task, error);
        }
    }

    fn rejection(&self, decision: &Decision) -> EngineError {
        let reason = if decision.short_store.is_some() { "kv" } else { "policy" };
        // Recurrent state is listed after the stores of pages; a policy speaks of tokens.
        let short_of_state = decision.short_store.is_some_and(|store| store >= self.cache.config().groups.len());
        let message = match decision.reason.as_str() {
            _ if short_of_state => {
                "the cache has no room for the recurrent state of another sequence; try again later".to_owned()
            }
            "" => "the admission policy refused the request; try again later".to_owned(),
            reason => reason.to_owned(),
        };
        EngineError::Rejected { retry_after: decision.retry_after_seconds, reason, message }
    }

    /// The error of a request for which the cache has no room.
    pub(crate) fn no_room(&self, error: KvError) -> EngineError {
        match error {
            KvError::Full(full) => EngineError::Rejected {
                retry_after: admission::retry_after(self.seconds_to_next_release()),
                reason: "kv",
                message: format!("{full}; try again later or ask for less"),
            },
            other => EngineError::Internal(other.to_string()),
        }
    }
}

pub(crate) fn exceeds_context(n_tokens: usize, n_ctx: usize) -> EngineError {
    EngineError::ExceedsContext { n_prompt_tokens: n_tokens as u32, n_ctx: n_ctx as u32 }
}

/// Refuses ids that the vocabulary does not have.
pub(crate) fn check_tokens(field: &str, tokens: &[u32], n_vocab: usize) -> Result<(), EngineError> {
    match tokens.iter().find(|&&token| token as usize >= n_vocab) {
        Some(token) => Err(EngineError::Invalid {
            field: Some(field.to_owned()),
            message: format!("{field} has token {token}, but the vocabulary has {n_vocab} tokens"),
        }),
        None => Ok(()),
    }
}

fn refused_sampling(error: SampleError) -> EngineError {
    let field = match &error {
        SampleError::OutOfRange { field, .. } | SampleError::UnknownToken { field, .. } => Some((*field).to_owned()),
        _ => None,
    };
    EngineError::Invalid { field, message: error.to_string() }
}
