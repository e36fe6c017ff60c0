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

/// The step being run.
pub(crate) struct Pending {
    id: u64,
    sequences: Vec<SeqId>,
}

impl Cache {
    /// Allocates slots for the tokens of a batch, and planes for its states, and says what to compute. Idle sequences are
    /// evicted when pages or planes are short. On an error nothing has changed. The step must be ended before another is
    /// planned; what can be taken back is counted from its end, whether it is committed or aborted.
    pub fn plan(&mut self, batch: &[BatchItem<'_>]) -> Result<Planned, KvError> {
        self.check_batch(batch)?;
        self.make_room(batch)?;
        let mut step = Step { groups: vec![GroupPlan::default(); self.active.len()], ..Step::default() };
        let allocated = self.allocate(batch, &mut step);
        let rows = match allocated.and_then(|rows| self.plan_states(batch, &rows, &mut step).map(|()| rows)) {
            Ok(rows) => rows,
            Err(error) => {
                self.take_back(batch.iter().map(|i| i.seq))?;
                return Err(error);
            }
        };
        step.stores = self.views();
        self.steps += 1;
        self.pending = Some(Pending { id: self.steps, sequences: batch.iter().map(|i| i.seq).collect() });
        Ok(Planned { step, rows, id: StepId(self.steps) })
    }

    /// Fills a step, and gives the sequences its tokens. Returns the rows of each item.
    fn allocate(&mut self, batch: &[BatchItem<'_>], step: &mut Step) -> Result<Vec<Range<u32>>, KvError> {
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
            plan.segments = self.segments(batch, &rows, group)?;
        }
        Ok(rows)
    }

    /// Ends a step that has run: its tokens are written, snapshots are made where they were asked for, and pages that no
    /// window reaches any more are given back.
    pub fn commit(&mut self, id: StepId) -> Result<(), KvError> {
        for seq in self.end_step(&id)? {
            let sequence = self.sequences.get_mut(seq)?;
            let before = sequence.committed;
            sequence.committed = sequence.tokens.len();
            self.commit_states(seq, before)?;
            self.slide_windows(seq)?;
            self.bury_if_doomed(seq)?;
        }
        self.bound_snapshots();
        Ok(())
    }

    /// Ends a step that has not run, or failed: its tokens are taken back.
    pub fn abort(&mut self, id: StepId) -> Result<(), KvError> {
        let sequences = self.end_step(&id)?;
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

    fn end_step(&mut self, id: &StepId) -> Result<Vec<SeqId>, KvError> {
        let pending = self.pending.take_if(|p| p.id == id.0).ok_or(KvError::UnknownStep)?;
        for &seq in &pending.sequences {
            self.sequences.get_mut(seq)?.in_flight = false;
        }
        Ok(pending.sequences)
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
            let (mut pages, mut beyond_promises) = (0, 0);
            for item in batch {
                let sequence = self.sequences.get(item.seq)?;
                let need = new_pages(store, &sequence.tables[group], item.seq, item.tokens.len());
                pages += need;
                beyond_promises += need.saturating_sub(sequence.promises[group].open());
            }
            if beyond_promises > store.headroom() {
                return Err(store.full(beyond_promises).into());
            }
            needs.push((index, pages));
        }
        self.check_planes(batch)?;
        self.evict_for(&needs)?;
        self.free_planes(batch)
    }

    /// Evicts idle sequences until each store has as many free pages as asked; only those that alone hold some page of
    /// a store that is short.
    pub(crate) fn evict_for(&mut self, needs: &[(usize, usize)]) -> Result<(), KvError> {
        for &(index, pages) in needs {
            while self.stores[index].pool.free.len() < pages {
                if self.evict_holder(index).is_none() {
                    return Err(self.stores[index].full(pages).into());
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
            runs.push(AppendRun { rows: row..row + n, store: index as u32, page: last.page, first_slot: last.len });
            last.len += n;
            row += n;
            position += n;
        }
        settle(store, &mut sequence.promises[group], table.len(), taken, 0);
        Ok(())
    }

    /// Attention of the batch over one group.
    fn segments(&self, batch: &[BatchItem<'_>], rows: &[Range<u32>], group: usize) -> Result<Vec<Segment>, KvError> {
        let window = self.stores[self.active[group]].window;
        let mut readers = Vec::with_capacity(batch.len());
        for (item, rows) in batch.iter().zip(rows) {
            let sequence = self.sequences.get(item.seq)?;
            let first = sequence.committed as u32;
            let oldest = window.map_or(0, |w| (first as usize + 1).saturating_sub(w) as u32);
            let span = |e: &PageEntry| Span {
                store: e.store,
                page: PageSpan { page: e.page, start_pos: e.start_pos, len: e.len },
                shared: self.stores[e.store as usize].pool.counts[e.page as usize].live > 1,
            };
            let spans = sequence.tables[group].iter().filter(|e| e.end() > oldest).map(span).collect();
            readers.push(Reader { rows: rows.clone(), spans });
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
        }
        Ok(())
    }
}
