//! Steps: slots for new tokens, attention plans, and what happens when a step ends.

use std::ops::Range;

use opencoti_compute::plan::{AppendRun, GroupPlan, Mask, PageSpan, Segment, Step};
use opencoti_plugin_api::PAGE_TOKENS;

use crate::cache::{Cache, new_pages, settle};
use crate::cascade::{self, Reader, Span};
use crate::error::KvError;
use crate::sequence::{PageEntry, Phase, SeqId};

/// Rows of a batch item of which something is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outputs {
    /// None: a chunk of a prompt that goes on.
    None,
    /// Hidden state and logits of the first one.
    First,
    /// Hidden state and logits of the last one.
    Last,
    /// Hidden states and logits of every one.
    All,
    /// Hidden states of every one, no logits.
    Hidden,
}

impl Outputs {
    /// Output rows of an item of `tokens` tokens.
    pub fn rows(self, tokens: usize) -> usize {
        match self {
            Outputs::None => 0,
            Outputs::First | Outputs::Last => 1,
            Outputs::All | Outputs::Hidden => tokens,
        }
    }

    /// Of these, the rows with logits.
    pub fn logit_rows(self, tokens: usize) -> usize {
        match self {
            Outputs::Hidden => 0,
            other => other.rows(tokens),
        }
    }
}

/// Tokens with which a sequence goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchItem<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Its next tokens; at least one.
    pub tokens: &'a [u32],
    /// What is wanted of them.
    pub outputs: Outputs,
}

/// Names a planned step. Given to [`Cache::commit`] or [`Cache::abort`].
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a planned step must be committed or aborted"]
pub struct StepId(u64);

/// A step with its slots allocated.
pub struct Planned {
    /// What to run.
    pub step: Step,
    /// Rows of each batch item, in their order.
    pub rows: Vec<Range<u32>>,
    /// To end it with.
    pub id: StepId,
}

/// Free pages that are asked of a store and of its stage.
pub(crate) struct Need {
    pub(crate) store: usize,
    pub(crate) pages: usize,
    pub(crate) exact: usize,
}

/// The step being run.
pub(crate) struct Pending {
    id: u64,
    sequences: Vec<SeqId>,
    /// Store and page of the records that it writes.
    seals: Vec<(u32, u32)>,
}

impl Cache {
    /// Allocates slots for the tokens of a batch, and planes for its states, and says what to compute. Idle sequences are
    /// evicted when pages or planes are short. On an error nothing has changed. The step must be ended before another is
    /// planned; what can be taken back is counted from its end, whether it is committed or aborted.
    pub fn plan(&mut self, batch: &[BatchItem<'_>]) -> Result<Planned, KvError> {
        self.check_batch(batch)?;
        self.make_room(batch)?;
        let mut step = Step { groups: vec![GroupPlan::default(); self.active.len()], ..Step::default() };
        let mut seals = Vec::new();
        let allocated = self.allocate(batch, &mut step, &mut seals);
        let rows = match allocated.and_then(|rows| self.plan_states(batch, &rows, &mut step).map(|()| rows)) {
            Ok(rows) => rows,
            Err(error) => {
                self.end_seals(&seals, false);
                self.take_back(batch.iter().map(|i| i.seq))?;
                return Err(error);
            }
        };
        step.stores = self.views();
        let id = self.begin_step(batch.iter().map(|i| i.seq).collect(), seals);
        Ok(Planned { step, rows, id })
    }

    /// Notes what the step that is to be run writes.
    pub(crate) fn begin_step(&mut self, sequences: Vec<SeqId>, seals: Vec<(u32, u32)>) -> StepId {
        self.steps += 1;
        self.pending = Some(Pending { id: self.steps, sequences, seals });
        StepId(self.steps)
    }

    /// Fills a step, and gives the sequences its tokens. Returns the rows of each item.
    fn allocate(
        &mut self,
        batch: &[BatchItem<'_>],
        step: &mut Step,
        seals: &mut Vec<(u32, u32)>,
    ) -> Result<Vec<Range<u32>>, KvError> {
        let mut rows = Vec::with_capacity(batch.len());
        for item in batch {
            let first_row = step.tokens.len() as u32;
            let range = first_row..first_row + item.tokens.len() as u32;
            let position = self.sequences.get(item.seq)?.tokens.len() as u32;
            step.tokens.extend_from_slice(item.tokens);
            step.positions.extend(position..position + item.tokens.len() as u32);
            let first_output = step.outputs.len() as u32;
            step.outputs.extend(match item.outputs {
                Outputs::None => range.end..range.end,
                Outputs::First => range.start..range.start + 1,
                Outputs::Last => range.end - 1..range.end,
                Outputs::All | Outputs::Hidden => range.clone(),
            });
            let with_logits = item.outputs.logit_rows(item.tokens.len()) as u32;
            step.logits.extend(first_output..first_output + with_logits);
            for (group, plan) in step.groups.iter_mut().enumerate() {
                self.append(item.seq, group, range.clone(), &mut plan.appends)?;
            }
            let sequence = self.sequences.get_mut(item.seq)?;
            sequence.tokens.extend_from_slice(item.tokens);
            sequence.in_flight = true;
            rows.push(range);
        }
        for (group, plan) in step.groups.iter_mut().enumerate() {
            plan.segments = self.segments(batch, &rows, group, seals)?;
            plan.seals = self.seal_runs(seals, group);
        }
        Ok(rows)
    }

    /// Ends a step that has run: its tokens are written, snapshots are made where they were asked for, and pages that no
    /// window reaches any more are given back.
    pub fn commit(&mut self, id: StepId) -> Result<(), KvError> {
        let Pending { sequences, seals, .. } = self.end_step(&id)?;
        self.end_seals(&seals, true);
        let mut releases: Vec<bool> =
            (0..self.stores.len()).map(|index| seals.iter().any(|s| s.0 as usize == index)).collect();
        for seq in sequences {
            let sequence = self.sequences.get_mut(seq)?;
            let before = sequence.committed;
            sequence.committed = sequence.tokens.len();
            let now = sequence.committed;
            for (index, release) in releases.iter_mut().enumerate() {
                *release |= self.crosses(index, before, now);
            }
            self.commit_states(seq, before)?;
            self.slide_windows(seq)?;
            self.bury_if_doomed(seq)?;
        }
        for (index, _) in releases.iter().enumerate().filter(|(_, release)| **release) {
            self.release_stage(index);
        }
        self.bound_snapshots();
        Ok(())
    }

    /// Ends a step that has not run, or failed: its tokens are taken back.
    pub fn abort(&mut self, id: StepId) -> Result<(), KvError> {
        let Pending { sequences, seals, .. } = self.end_step(&id)?;
        self.end_seals(&seals, false);
        self.take_back(sequences.iter().copied())?;
        sequences.into_iter().try_for_each(|seq| self.bury_if_doomed(seq))
    }

    /// Shortens sequences to what is written.
    fn take_back(&mut self, sequences: impl Iterator<Item = SeqId>) -> Result<(), KvError> {
        for seq in sequences {
            let sequence = self.sequences.get_mut(seq)?;
            sequence.in_flight = false;
            let committed = sequence.committed;
            self.abort_states(seq)?;
            self.cut(seq, committed)?;
        }
        Ok(())
    }

    fn end_step(&mut self, id: &StepId) -> Result<Pending, KvError> {
        let pending = self.pending.take_if(|p| p.id == id.0).ok_or(KvError::UnknownStep)?;
        for &seq in &pending.sequences {
            self.sequences.get_mut(seq)?.in_flight = false;
        }
        Ok(pending)
    }

    fn bury_if_doomed(&mut self, seq: SeqId) -> Result<(), KvError> {
        match self.sequences.get(seq)?.phase {
            Phase::Doomed => self.release(seq),
            _ => Ok(()),
        }
    }

    fn check_batch(&self, batch: &[BatchItem<'_>]) -> Result<(), KvError> {
        if self.pending.is_some() {
            return Err(KvError::StepPending);
        }
        let found: usize = batch.iter().map(|i| i.tokens.len()).sum();
        if found > self.config.step_tokens {
            return Err(KvError::StepTooLarge { found, limit: self.config.step_tokens });
        }
        let mut seen: Vec<SeqId> = batch.iter().map(|i| i.seq).collect();
        seen.sort_unstable();
        if let Some(twice) = seen.windows(2).find(|w| w[0] == w[1]) {
            return Err(KvError::Twice(twice[0]));
        }
        for item in batch {
            let length = self.live(item.seq)?.tokens.len();
            if item.tokens.is_empty() {
                return Err(KvError::NoTokens(item.seq));
            }
            if self.config.whole_texts && length > 0 {
                return Err(KvError::Whole(item.seq));
            }
            if u32::try_from(length + item.tokens.len()).is_err() {
                return Err(KvError::TooLong(item.seq));
            }
        }
        Ok(())
    }

    /// Evicts idle sequences until every page and plane of the batch is free. Fails, before it evicts any, when those
    /// that are not promised to others do not suffice.
    fn make_room(&mut self, batch: &[BatchItem<'_>]) -> Result<(), KvError> {
        let mut needs = Vec::with_capacity(self.active.len());
        for (group, &index) in self.active.iter().enumerate() {
            let store = &self.stores[index];
            let (mut pages, mut beyond_promises, mut beyond_stage) = (0, 0, 0usize);
            for item in batch {
                let sequence = self.sequences.get(item.seq)?;
                let need = new_pages(store, &sequence.tables[group], item.seq, item.tokens.len());
                pages += need;
                beyond_promises += need.saturating_sub(sequence.promises[group].open());
                beyond_stage += need.saturating_sub(sequence.stage_promises[group].open());
            }
            let stage = store.stage.as_ref().filter(|s| s.plan.bounded);
            if stage.is_some_and(|s| beyond_stage > s.pool.headroom_unshared()) {
                return Err(store.stage_full(beyond_stage).into());
            }
            if beyond_promises > store.headroom() {
                return Err(store.full(beyond_promises).into());
            }
            needs.push(Need { store: index, pages, exact: pages });
        }
        self.check_planes(batch)?;
        self.evict_for(&needs)?;
        self.free_planes(batch)
    }

    /// Evicts idle sequences until each store and each stage has as many free pages as asked; only those that alone hold
    /// some page of one that is short.
    pub(crate) fn evict_for(&mut self, needs: &[Need]) -> Result<(), KvError> {
        for &Need { store: index, pages, exact } in needs {
            while self.stores[index].pool.free.len() < pages {
                if self.evict_holder(index).is_none() {
                    return Err(self.stores[index].full(pages).into());
                }
            }
            while self.stores[index].stage.as_ref().is_some_and(|s| s.pool.free.len() < exact) {
                if self.evict_staged(index).is_none() {
                    return Err(self.stores[index].stage_full(exact).into());
                }
            }
        }
        Ok(())
    }

    /// Gives the rows slots in one group: the free ones of the last page, then new pages.
    fn append(&mut self, seq: SeqId, group: usize, rows: Range<u32>, runs: &mut Vec<AppendRun>) -> Result<(), KvError> {
        let index = self.active[group];
        let store = &mut self.stores[index];
        let sequence = self.sequences.get_mut(seq)?;
        let mut position = sequence.tokens.len() as u32;
        let table = &mut sequence.tables[group];
        let (mut row, mut taken) = (rows.start, 0);
        while row < rows.end {
            let last = table.back().filter(|e| e.store == index as u32 && store.may_append(e.page, e.len, seq.index));
            if last.is_none() {
                let page = store.take(seq.index).ok_or_else(|| store.full(1))?;
                table.push_back(PageEntry { store: index as u32, page, start_pos: position, len: 0 });
                taken += 1;
            }
            let Some(last) = table.back_mut() else { continue };
            store.set_writer(last.page, seq.index);
            let n = (rows.end - row).min(PAGE_TOKENS as u32 - last.len);
            let (to, page) = store.appends_to(index as u32, last.page);
            runs.push(AppendRun { rows: row..row + n, store: to, page, first_slot: last.len });
            last.len += n;
            store.pages[last.page as usize].filled = last.len;
            row += n;
            position += n;
        }
        settle(store, &mut sequence.promises[group], table.len(), taken, 0);
        store.settle_stage(&mut sequence.stage_promises[group], table);
        Ok(())
    }

    /// Attention of the batch over one group.
    fn segments(
        &mut self,
        batch: &[BatchItem<'_>],
        rows: &[Range<u32>],
        group: usize,
        seals: &mut Vec<(u32, u32)>,
    ) -> Result<Vec<Segment>, KvError> {
        let window = self.stores[self.active[group]].window;
        let mut readers = Vec::with_capacity(batch.len());
        for (item, rows) in batch.iter().zip(rows) {
            let first = self.sequences.get(item.seq)?.committed;
            let blocks = self.exact_blocks(group, first, item.tokens.len());
            let whole = blocks.len() == 1;
            for (block, exact_from) in blocks {
                let oldest = window.map_or(0, |w| (first + block.start as usize + 1).saturating_sub(w) as u32);
                // What comes after a block's last row is seen by none of its rows.
                let end = if self.config.whole_texts { u32::MAX } else { first as u32 + block.end };
                let seen = |e: &&PageEntry| e.end() > oldest && e.start_pos < end;
                let entries: Vec<PageEntry> =
                    self.sequences.get(item.seq)?.tables[group].iter().filter(seen).copied().collect();
                let mut spans = Vec::with_capacity(entries.len());
                for e in &entries {
                    let (store, page) = self.source(e, exact_from, seals);
                    let shared = !whole || self.stores[e.store as usize].pool.counts[e.page as usize].live > 1;
                    spans.push(Span { store, page: PageSpan { page, start_pos: e.start_pos, len: e.len }, shared });
                }
                readers.push(Reader { rows: rows.start + block.start..rows.start + block.end, spans });
            }
        }
        let mask = match window {
            _ if self.config.whole_texts => Mask::Full,
            Some(w) => Mask::Window(u32::try_from(w).unwrap_or(u32::MAX)),
            None => Mask::Causal,
        };
        Ok(cascade::segments(&readers, mask))
    }

    /// Gives back the pages that left the windows of a sequence.
    fn slide_windows(&mut self, seq: SeqId) -> Result<(), KvError> {
        for group in 0..self.active.len() {
            let oldest = self.oldest_needed(group, self.sequences.get(seq)?.committed);
            let sequence = self.sequences.get_mut(seq)?;
            let table = &mut sequence.tables[group];
            let mut freed = 0;
            while let Some(first) = table.front().filter(|e| e.end() <= oldest) {
                freed += usize::from(self.stores[first.store as usize].drop_live(first.page, seq.index));
                table.pop_front();
            }
            let store = &mut self.stores[self.active[group]];
            settle(store, &mut sequence.promises[group], table.len(), 0, freed);
            store.settle_stage(&mut sequence.stage_promises[group], table);
        }
        Ok(())
    }
}
