//! A step: who takes part, room in the cache, the run, and what everybody gets of it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use opencoti_compute::plan::Step;
use opencoti_kv::{BatchItem, KvError, Outputs, Planned, Prefix, SeqId};

use super::choice::{Phase, Progress};
use super::embed::EmbedJob;
use super::slots::Slot;
use super::{Core, Engine, ModelKind};
use crate::api::{EngineError, Event, RequestId, StopReason, TokenProb, TokenProbs};
use crate::runner::{StepOutputs, StepRunner};
use crate::sampling::raw_logprobs;
use crate::scheduler::{Prompt, share, share_whole};
use crate::trace::TracedRows;
use crate::vocab::Vocab;

/// Who a run of rows belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Slot(usize),
    /// An embeddings request, by its place.
    Embed(usize),
}

/// A run of rows of a step.
#[derive(Debug, Clone, Copy)]
struct Work {
    who: Who,
    tokens: usize,
    outputs: Outputs,
}

impl Work {
    fn item<'a>(&self, slots: &'a [Slot], embeds: &'a VecDeque<EmbedJob>) -> Option<BatchItem<'a>> {
        let (seq, tokens): (SeqId, &[u32]) = match self.who {
            Who::Slot(slot) => {
                let choice = slots[slot].choice.as_ref()?;
                match &choice.phase {
                    Phase::Decode { next } => (choice.seq, std::slice::from_ref(next)),
                    _ => (choice.seq, &choice.prompt()[choice.fed..choice.fed + self.tokens]),
                }
            }
            Who::Embed(at) => {
                let job = embeds.get(at)?;
                (job.seq?, &job.tokens()[job.fed..job.fed + self.tokens])
            }
        };
        Some(BatchItem { seq, tokens, outputs: self.outputs })
    }

    fn n_outputs(&self) -> usize {
        self.outputs.rows(self.tokens)
    }
}

impl Engine {
    /// Composes a step, runs it and delivers its results. `false` when there is nothing to do.
    pub(crate) fn step(&mut self) -> bool {
        self.seal();
        let composed = Instant::now();
        self.core.attach_followers();
        let Some((work, planned)) = self.core.plan_step() else { return false };
        let began = Instant::now();
        let rows = self.core.traced(&work);
        let result = run_guarded(&mut *self.runner, &planned.step);
        let ran = Instant::now();
        match result {
            Ok(outputs) => match self.core.cache.commit(planned.id) {
                Ok(()) => self.core.deliver(&work, &outputs),
                Err(error) => self.core.fail_work(&work, &error.to_string()),
            },
            Err(error) => {
                if let Err(error) = self.core.cache.abort(planned.id) {
                    tracing::error!(%error, "a failed step could not be taken back");
                }
                self.core.fail_work(&work, &error);
            }
        }
        self.core.sweep_embeds();
        self.core.observe_step(began, work.len());
        self.core.trace.push([composed, began, ran, Instant::now()], self.core.queue.len(), rows.into_iter());
        #[cfg(debug_assertions)]
        self.core.check_cache();
        true
    }
}

impl Engine {
    /// Encodes pages for which no row waits: what the step before has computed is delivered.
    fn seal(&mut self) {
        let Some(planned) = self.core.cache.plan_seals() else { return };
        let runner = AssertUnwindSafe(&mut *self.runner);
        let run = || {
            let AssertUnwindSafe(runner) = { runner };
            runner.seal(&planned.step)
        };
        let sealed = catch_unwind(run).unwrap_or_else(|_| Err("the model's executor panicked".to_owned()));
        let ended = match &sealed {
            Ok(()) => self.core.cache.commit(planned.id),
            Err(_) => self.core.cache.abort(planned.id),
        };
        // Rows that need a page's record try again, and fail by themselves.
        if let Some(error) = sealed.err().or_else(|| ended.err().map(|e| e.to_string())) {
            tracing::error!(%error, "pages of the cache could not be encoded");
        }
    }
}

/// Runs a step so that neither a panic nor missing results can harm more than those who take part.
fn run_guarded<'a>(runner: &'a mut dyn StepRunner, step: &Step) -> Result<StepOutputs<'a>, String> {
    let call = AssertUnwindSafe((runner, step));
    let run = move || {
        let AssertUnwindSafe((runner, step)) = { call };
        runner.run(step)
    };
    let outputs = catch_unwind(run).unwrap_or_else(|_| Err("the model's executor panicked".to_owned()))?;
    let (found, expected) = (outputs.logits.len(), step.outputs.len());
    if found != expected || outputs.hidden.len() != expected {
        return Err(format!("the model's executor gave {found} output rows, expected {expected}"));
    }
    Ok(outputs)
}

impl Core {
    fn plan_step(&mut self) -> Option<(Vec<Work>, Planned)> {
        self.start_embeds();
        let mut work = self.compose();
        while !work.is_empty() {
            match self.plan(&work) {
                Ok(planned) => return Some((work, planned)),
                Err(KvError::Full(full)) => self.make_way(&mut work, &KvError::Full(full)),
                Err(error) => {
                    self.fail_work(&work, &error.to_string());
                    break;
                }
            }
        }
        self.sweep_embeds();
        None
    }

    /// Recounts everything that the cache counts.
    #[cfg(debug_assertions)]
    fn check_cache(&self) {
        if let Err(problem) = self.cache.check() {
            panic!("after step {} the cache breaks a rule: {problem}", self.turn);
        }
    }

    /// Who takes part in a step, as it will be told.
    fn traced(&self, work: &[Work]) -> Vec<TracedRows> {
        let rows = |w: &Work| {
            let (slot, choice) = match w.who {
                Who::Slot(i) => (Some(i as u32), self.slots[i].choice.as_ref()),
                Who::Embed(_) => (None, None),
            };
            TracedRows {
                slot,
                request: choice.map_or(0, |c| c.task.id.0),
                tokens: w.tokens as u32,
                decodes: choice.is_some_and(|c| matches!(c.phase, Phase::Decode { .. })),
            }
        };
        work.iter().map(rows).collect()
    }

    /// One token for each who decodes, the rest of the budget for prompts.
    fn compose(&mut self) -> Vec<Work> {
        self.turn = self.turn.wrapping_add(1);
        let mut work = Vec::new();
        let mut prompts: Vec<(Who, Prompt)> = Vec::new();
        for (i, slot) in self.slots.iter().enumerate() {
            let Some(choice) = &slot.choice else { continue };
            match choice.phase {
                Phase::Decode { .. } => work.push(Work { who: Who::Slot(i), tokens: 1, outputs: Outputs::Last }),
                Phase::Prefill => {
                    let tokens = self.next_stop(i, choice.fed, choice.prompt().len()) - choice.fed;
                    let all_outputs = choice.task.request.prompt_logprobs.is_some();
                    prompts.push((Who::Slot(i), Prompt { tokens, all_outputs }));
                }
                Phase::Attach { .. } | Phase::Sibling => {}
            }
        }
        for (at, job) in self.embeds.iter().enumerate().filter(|(_, job)| job.seq.is_some()) {
            prompts.push((Who::Embed(at), Prompt { tokens: job.left(), all_outputs: false }));
        }
        let granted = self.grant(work.len(), &prompts);
        for ((who, prompt), tokens) in prompts.into_iter().zip(granted).filter(|(_, tokens)| *tokens > 0) {
            let outputs = match who {
                Who::Embed(at) => self.embeds[at].outputs(tokens),
                Who::Slot(_) if prompt.all_outputs => Outputs::All,
                Who::Slot(slot) if self.ends_prompt(slot, tokens) => Outputs::Last,
                Who::Slot(_) => Outputs::None,
            };
            work.push(Work { who, tokens, outputs });
        }
        work
    }

    /// Tokens of each prompt in a step in which so many decode.
    fn grant(&self, decoding: usize, prompts: &[(Who, Prompt)]) -> Vec<usize> {
        let wanted: Vec<Prompt> = prompts.iter().map(|p| p.1).collect();
        match self.config.model {
            ModelKind::Generator => share(self.config.budget, decoding, &wanted, self.turn),
            ModelKind::Encoder | ModelKind::Ranker => {
                share_whole(self.config.budget, &wanted.iter().map(|p| p.tokens).collect::<Vec<_>>())
            }
        }
    }

    /// Where a prompt's chunk must end at the latest: at its end, or where others wait to share what is before it (a
    /// sliding window may have released that a chunk later).
    fn next_stop(&self, leader: usize, fed: usize, end: usize) -> usize {
        let stop = |slot: &Slot| match slot.choice.as_ref()?.phase {
            Phase::Attach { leader: of, tokens, .. } if of == leader && tokens > fed => Some(tokens),
            _ => None,
        };
        self.slots.iter().filter_map(stop).min().unwrap_or(end).min(end)
    }

    fn ends_prompt(&self, slot: usize, tokens: usize) -> bool {
        self.slots[slot].choice.as_ref().is_some_and(|c| c.fed + tokens == c.prompt().len())
    }

    fn plan(&mut self, work: &[Work]) -> Result<Planned, KvError> {
        let batch: Vec<BatchItem<'_>> = work.iter().filter_map(|w| w.item(&self.slots, &self.embeds)).collect();
        let mut planned = self.cache.plan(&batch)?;
        self.mark_second_texts(work, &mut planned);
        Ok(planned)
    }

    /// Gives the second texts of pairs their token type.
    fn mark_second_texts(&self, work: &[Work], planned: &mut Planned) {
        for (w, rows) in work.iter().zip(&planned.rows) {
            let Who::Embed(at) = w.who else { continue };
            let Some(second) = self.embeds.get(at).and_then(EmbedJob::second) else { continue };
            let types = &mut planned.step.token_types;
            types.resize(planned.step.tokens.len(), 0);
            let first = (rows.start as usize + second.saturating_sub(self.embeds[at].fed)).min(rows.end as usize);
            types[first..rows.end as usize].fill(1);
        }
    }

    /// Shortens a step for which the cache has no room. Whoever cannot go on even alone has outgrown what was reserved
    /// for it: of those who decode the youngest ends; prompts wait while somebody else goes on, who will make room, and
    /// otherwise the youngest is refused. When each alone could go on, somebody sits this step out.
    fn make_way(&mut self, work: &mut Vec<Work>, full: &KvError) {
        let stuck: Vec<bool> = work.iter().map(|w| self.is_stuck(w)).collect();
        let others_run = stuck.iter().any(|stuck| !stuck);
        let decodes = |w: &Work| matches!(w.who, Who::Slot(i) if self.decodes(i));
        let stuck_at = |decoding: bool| {
            let candidates = (0..work.len()).filter(|&i| stuck[i] && decodes(&work[i]) == decoding);
            candidates.max_by_key(|&i| self.age(&work[i]))
        };
        match (stuck_at(true), stuck_at(false)) {
            (Some(i), _) => {
                if let Who::Slot(slot) = work.remove(i).who {
                    self.end_truncated(slot);
                }
            }
            (None, Some(i)) => {
                let prompt = work.remove(i);
                if !others_run {
                    self.fail_item(&prompt, self.no_room(full.clone()));
                }
            }
            (None, None) => {
                work.pop();
            }
        }
    }

    fn is_stuck(&mut self, work: &Work) -> bool {
        match self.plan(std::slice::from_ref(work)) {
            Ok(planned) => {
                if let Err(error) = self.cache.abort(planned.id) {
                    tracing::error!(%error, "a step that was only tried could not be taken back");
                }
                false
            }
            Err(_) => true,
        }
    }

    fn decodes(&self, slot: usize) -> bool {
        self.slots[slot].choice.as_ref().is_some_and(|c| matches!(c.phase, Phase::Decode { .. }))
    }

    /// Greater for those who came later.
    fn age(&self, work: &Work) -> Option<RequestId> {
        match work.who {
            Who::Slot(slot) => self.slots[slot].choice.as_ref().map(|c| c.task.id),
            Who::Embed(_) => None,
        }
    }

    fn end_truncated(&mut self, slot: usize) {
        if let Some(choice) = &mut self.slots[slot].choice {
            choice.flush_text();
        }
        self.finish(slot, StopReason::Limit, true);
    }

    fn fail_item(&mut self, work: &Work, error: EngineError) {
        match work.who {
            Who::Slot(slot) => {
                if let Some(id) = self.slots[slot].choice.as_ref().map(|c| c.task.id) {
                    self.meters.refused(&error);
                    self.fail(id, error);
                }
            }
            Who::Embed(at) => self.end_embed(at, Err(error)),
        }
    }

    /// Ends everybody who took part in a step that failed.
    fn fail_work(&mut self, work: &[Work], message: &str) {
        tracing::error!(error = message, "a step failed");
        for w in work {
            self.fail_item(w, EngineError::Internal(format!("the step failed: {message}")));
        }
    }

    /// Lets those go on who waited for somebody else's prompt and whose part of it is written, or will not be.
    pub(crate) fn attach_followers(&mut self) {
        for slot in 0..self.slots.len() {
            let Some(Phase::Attach { leader, of, tokens }) = self.slots[slot].choice.as_ref().map(|c| c.phase) else {
                continue;
            };
            let waits = self.slots[leader]
                .choice
                .as_ref()
                .is_some_and(|c| c.task.id == of && c.phase == Phase::Prefill && c.fed < tokens);
            if !waits {
                self.attach(slot);
            }
        }
    }

    /// Exchanges the empty sequence, to which room was reserved, for one that begins with the best prefix there is.
    fn attach(&mut self, slot: usize) {
        let Some(choice) = &self.slots[slot].choice else { return };
        let id = choice.task.id;
        let prompt = choice.prompt();
        let prefix = self.cache.longest_prefix(&prompt[..prompt.len() - 1]);
        let rest = prompt.len() - prefix.map_or(0, |p| p.tokens);
        let demand = choice.reserved.map_or(0, |bound| rest + bound);
        if let Err(error) = self.exchange(slot, prefix, demand) {
            return self.fail(id, self.no_room(error));
        }
        self.prefill(slot);
    }

    /// Lets a choice compute what its sequence lacks of the prompt.
    fn prefill(&mut self, slot: usize) {
        if let Some(choice) = &mut self.slots[slot].choice {
            choice.phase = Phase::Prefill;
        }
        self.keep_snapshots(slot);
    }

    /// Gives up a choice's empty sequence, and what is reserved to it, for one with a prefix and `demand` tokens
    /// reserved. On an error it has an empty sequence again, with nothing reserved.
    fn exchange(&mut self, slot: usize, prefix: Option<Prefix>, demand: usize) -> Result<(), KvError> {
        let Some(choice) = &mut self.slots[slot].choice else { return Ok(()) };
        self.cache.release(choice.seq)?;
        let admitted = self.cache.admit(prefix, demand);
        choice.seq = match &admitted {
            Ok(seq) => *seq,
            Err(_) => self.cache.create(),
        };
        choice.fed = self.cache.committed(choice.seq)?;
        choice.cached = choice.fed;
        let seq = choice.seq;
        self.disown(seq);
        admitted.map(|_| ())
    }

    /// Gives everybody their part of the results.
    fn deliver(&mut self, work: &[Work], outputs: &StepOutputs<'_>) {
        let mut row = 0;
        for w in work {
            let rows = row..row + w.n_outputs();
            row = rows.end;
            match w.who {
                Who::Slot(slot) => self.deliver_slot(slot, w.tokens, &outputs.logits[rows]),
                Who::Embed(at) => {
                    self.deliver_embed(at, w.tokens, &outputs.hidden[rows.clone()], &outputs.logits[rows]);
                }
            }
        }
    }

    fn deliver_slot(&mut self, slot: usize, tokens: usize, logits: &[&[f32]]) {
        let Some(choice) = &mut self.slots[slot].choice else { return };
        if choice.phase != Phase::Prefill {
            if let Some(logits) = logits.last() {
                self.draw(slot, logits);
            }
            return;
        }
        if let Some(n) = choice.task.request.prompt_logprobs {
            let next = &choice.task.request.prompt[choice.fed + 1..];
            let probs = logits
                .iter()
                .zip(next)
                .map(|(logits, &token)| Some(prompt_prob(&self.vocab, logits, token, n as usize)));
            choice.prompt_probs.extend(probs);
        }
        choice.fed += tokens;
        choice.report_progress();
        if choice.fed == choice.prompt().len()
            && let Some(logits) = logits.last()
        {
            self.end_prompt(slot, logits);
        }
    }

    /// The prompt is computed: its siblings fork from it, and everybody draws a first token of their own.
    fn end_prompt(&mut self, slot: usize, logits: &[f32]) {
        let Some(choice) = &mut self.slots[slot].choice else { return };
        choice.prompt_done = Some(Instant::now());
        let id = choice.task.id;
        let donor = Prefix { donor: choice.seq, tokens: choice.fed };
        let probs = std::mem::take(&mut choice.prompt_probs);
        self.meters.prompt(&choice.timings());
        let sibling = |s: &Slot| s.choice.as_ref().is_some_and(|c| c.task.id == id && c.phase == Phase::Sibling);
        let siblings: Vec<usize> = (0..self.slots.len()).filter(|&i| sibling(&self.slots[i])).collect();
        for &sibling in &siblings {
            if let Err(error) = self.fork(sibling, donor) {
                return self.fail(id, self.no_room(error));
            }
        }
        for slot in std::iter::once(slot).chain(siblings) {
            // A fork for which there was no room started afresh: it needs the prompt for itself.
            match self.slots[slot].choice.as_ref().is_some_and(|c| c.fed < c.prompt().len()) {
                true => self.prefill(slot),
                false => self.begin_answer(slot, &probs, logits),
            }
        }
    }

    fn fork(&mut self, sibling: usize, donor: Prefix) -> Result<(), KvError> {
        let Some(choice) = &mut self.slots[sibling].choice else { return Ok(()) };
        choice.prompt_done = Some(Instant::now());
        let bound = choice.reserved.unwrap_or(0);
        self.exchange(sibling, Some(donor), bound)
    }

    fn begin_answer(&mut self, slot: usize, prompt_probs: &[Option<TokenProbs>], logits: &[f32]) {
        let Some(choice) = &self.slots[slot].choice else { return };
        if choice.task.request.prompt_logprobs.is_some() {
            let mut probs = vec![None];
            probs.extend_from_slice(prompt_probs);
            choice.task.send(Event::PromptLogprobs { index: choice.index, probs });
        }
        if choice.task.request.n_predict == Some(0) {
            return self.finish(slot, StopReason::None, false);
        }
        self.meters.first_token(choice.task.arrived.elapsed());
        self.draw(slot, logits);
    }

    fn draw(&mut self, slot: usize, logits: &[f32]) {
        let Some(choice) = &mut self.slots[slot].choice else { return };
        let since_last = choice.last_token.elapsed();
        if choice.n_decoded > 0 {
            self.meters.inter_token(since_last);
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        let id = choice.task.id;
        let drawn = choice.draw(&mut self.logits, &self.vocab);
        self.observe_token(slot);
        match drawn {
            Ok(Progress::Goes) => {}
            Ok(Progress::Ends { reason, truncated }) => self.finish(slot, reason, truncated),
            Err(error) => self.fail(id, error),
        }
    }

    fn observe_step(&mut self, began: Instant, busy: usize) {
        let seconds = began.elapsed().as_secs_f32();
        self.step_seconds = if self.step_seconds == 0.0 { seconds } else { 0.9 * self.step_seconds + 0.1 * seconds };
        self.meters.step(busy);
        if self.turn.is_multiple_of(32) || !self.is_running() {
            let stats = self.cache.stats();
            self.meters.cells(&stats);
        }
    }
}

/// Log-probability of a prompt's token, and the `n` most probable ones.
fn prompt_prob(vocab: &Vocab, logits: &[f32], token: u32, n: usize) -> TokenProbs {
    let (logprob, top) = raw_logprobs(logits, token, n);
    let prob = |id, value| TokenProb { id, bytes: vocab.token_bytes(id).to_vec(), value };
    TokenProbs { token: prob(token, logprob), top: top.iter().map(|t| prob(t.id, t.logprob)).collect() }
}
