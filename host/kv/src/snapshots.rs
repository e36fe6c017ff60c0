//! Planes of running sequences, and snapshots.
//!
//! A sequence with recurrent state can be shared only where a plane of it exists, one with sliding windows only where
//! its windows still hold what the next token needs. A *snapshot* makes such a place: an idle sequence, forked at a
//! chosen position as the step that passed it is committed. It is found, evicted and saved like any idle sequence; only
//! that it is not taken over by a request while there is room to fork it.
//!
//! Planes that a running sequence needs are promised and priced. Snapshots are not: one for which no plane can be had is
//! not made.

use std::collections::VecDeque;
use std::ops::Range;

use opencoti_compute::plan::{StateRun, StateView, StateWrite, Step};

use crate::cache::Cache;
use crate::error::KvError;
use crate::planning::BatchItem;
use crate::sequence::{Phase, Promise, SeqId, Sequence, Table};
use crate::states::{PlaneEntry, StateStore};

impl Cache {
    /// Whether snapshots are of use to this cache: it keeps some, and has sequences that can't be shared at any token.
    pub fn uses_snapshots(&self) -> bool {
        let windowed = || self.config.groups.iter().any(|group| group.geometry.window.is_some());
        self.config.snapshots > 0 && !self.config.whole_texts && (self.states.is_some() || windowed())
    }

    /// Asks for snapshots of a running sequence after so many of its tokens; replaces what was asked for before.
    /// Positions that it has passed are ignored, and all of them where snapshots are of no use.
    pub fn keep_snapshots(&mut self, seq: SeqId, positions: &[usize]) -> Result<(), KvError> {
        let committed = self.live(seq)?.committed;
        let mut wishes: Vec<u32> = match self.uses_snapshots() {
            true => positions.iter().filter(|&&at| at > committed).filter_map(|&at| u32::try_from(at).ok()).collect(),
            false => Vec::new(),
        };
        wishes.sort_unstable();
        wishes.dedup();
        self.sequences.get_mut(seq)?.wishes = wishes;
        Ok(())
    }

    /// Snapshots kept.
    pub fn snapshots(&self) -> usize {
        self.idle().filter(|(_, s)| s.is_snapshot).count()
    }

    /// The planes of a sequence: after how many tokens, and which. Ascending; a running sequence can be taken back
    /// exactly to each of them.
    pub fn planes(&self, seq: SeqId) -> Result<Vec<(usize, u32)>, KvError> {
        Ok(self.sequences.get(seq)?.planes.iter().map(|p| (p.at as usize, p.plane)).collect())
    }

    /// The planes as executors see them, if the model has recurrent layers. Valid while the cache lives.
    pub fn state_view(&self) -> Option<StateView> {
        self.states.as_ref().map(|s| s.view.clone())
    }

    /// Fails when the planes of a batch are neither promised to its sequences nor free for anybody.
    pub(crate) fn check_planes(&self, batch: &[BatchItem<'_>]) -> Result<(), KvError> {
        let Some(states) = &self.states else { return Ok(()) };
        let mut growth = 0isize;
        for item in batch {
            let sequence = self.sequences.get(item.seq)?;
            let (now, end) = bounds(sequence, item.tokens.len());
            let kept = sequence.planes.iter().filter(|p| states.needs(p.at, now, end)).count();
            let after = kept + states.written(now, end).count();
            growth += after.max(sequence.plane_quota) as isize;
            growth -= sequence.planes.len().max(sequence.plane_quota) as isize;
        }
        match usize::try_from(growth) {
            Ok(asked) if asked > states.headroom() => Err(states.full(asked).into()),
            _ => Ok(()),
        }
    }

    /// Drops planes that a batch makes useless, and evicts idle sequences until there are free ones for it. After
    /// [`Cache::check_planes`].
    pub(crate) fn free_planes(&mut self, batch: &[BatchItem<'_>]) -> Result<(), KvError> {
        let mut asked = 0;
        for item in batch {
            self.change_planes(item.seq, |states, sequence| {
                let (now, end) = bounds(sequence, item.tokens.len());
                asked += states.written(now, end).count();
                states.keep_live(&mut sequence.planes, now, end);
            })?;
        }
        self.evict_planes(asked)
    }

    /// Evicts idle sequences until so many planes are free.
    pub(crate) fn evict_planes(&mut self, asked: usize) -> Result<(), KvError> {
        while let Some(states) = self.states.as_ref().filter(|s| s.pool.free.len() < asked) {
            let full = states.full(asked);
            if !self.evict_plane() {
                return Err(full.into());
            }
        }
        Ok(())
    }

    /// Allocates the planes that a step writes, after its sequences were given their tokens.
    pub(crate) fn plan_states(
        &mut self,
        batch: &[BatchItem<'_>],
        rows: &[Range<u32>],
        step: &mut Step,
    ) -> Result<(), KvError> {
        let Some(states) = &self.states else { return Ok(()) };
        step.states = Some(states.view.clone());
        for item in batch {
            self.change_planes(item.seq, |states, sequence| {
                states.written(sequence.committed as u32, sequence.tokens.len() as u32).try_for_each(|at| {
                    let plane = states.pool.take().ok_or_else(|| states.full(1))?;
                    sequence.writing.push(PlaneEntry { at, plane });
                    Ok::<_, KvError>(())
                })
            })?;
        }
        for item in batch {
            for at in self.wished_planes(item.seq)? {
                self.write_if_there_is_room(item.seq, at)?;
            }
        }
        for (item, rows) in batch.iter().zip(rows) {
            let sequence = self.sequences.get_mut(item.seq)?;
            sequence.writing.sort_unstable_by_key(|p| p.at);
            let now = sequence.committed as u32;
            step.state_runs.push(StateRun {
                rows: rows.clone(),
                from: sequence.planes.back().map(|p| p.plane),
                to: sequence.writing.iter().map(|p| StateWrite { after: p.at - now, plane: p.plane }).collect(),
            });
        }
        Ok(())
    }

    /// Positions inside the planned run of a sequence at which a plane is wanted for a snapshot that is not there yet.
    fn wished_planes(&self, seq: SeqId) -> Result<Vec<u32>, KvError> {
        let Some(states) = &self.states else { return Ok(Vec::new()) };
        let sequence = self.sequences.get(seq)?;
        let (now, end) = (sequence.committed as u32, sequence.tokens.len() as u32);
        let written = states.written(now, end);
        let inside = sequence.wishes.iter().copied().filter(|at| (now + 1..end).contains(at) && !written.contains(at));
        let mut wished: Vec<u32> =
            inside.filter(|&at| self.idle_copy(&sequence.tokens[..at as usize]).is_none()).collect();
        // Of more than are kept, the last ones stay.
        wished.drain(..wished.len().saturating_sub(self.config.snapshots));
        Ok(wished)
    }

    fn write_if_there_is_room(&mut self, seq: SeqId, at: u32) -> Result<(), KvError> {
        while self.states.as_ref().is_some_and(|s| s.pool.free.is_empty()) && self.evict_plane() {}
        self.change_planes(seq, |states, sequence| {
            if let Some(plane) = states.pool.take() {
                sequence.writing.push(PlaneEntry { at, plane });
            }
        })?;
        Ok(())
    }

    /// Makes the planes that a step has written those of a sequence that had `before` tokens, and the snapshots that
    /// were asked for.
    pub(crate) fn commit_states(&mut self, seq: SeqId, before: usize) -> Result<(), KvError> {
        let sequence = self.sequences.get_mut(seq)?;
        let written = std::mem::take(&mut sequence.writing);
        sequence.planes.extend(written);
        if sequence.phase == Phase::Live {
            let (passed, wishes) = sequence.wishes.iter().partition(|&&at| at as usize <= sequence.committed);
            sequence.wishes = wishes;
            let passed: Vec<u32> = passed;
            for at in passed.into_iter().filter(|&at| at as usize > before) {
                self.take_snapshot(seq, at)?;
            }
        }
        self.change_planes(seq, |states, sequence| {
            let (now, _) = bounds(sequence, 0);
            states.keep_live(&mut sequence.planes, now, now);
        })?;
        Ok(())
    }

    /// Gives back the planes that a step was to write.
    pub(crate) fn abort_states(&mut self, seq: SeqId) -> Result<(), KvError> {
        self.change_planes(seq, |states, sequence| {
            for entry in sequence.writing.drain(..) {
                states.pool.drop_live(entry.plane);
            }
        })?;
        Ok(())
    }

    /// Forks an idle sequence off a running one at `at`, if it could go on from there.
    fn take_snapshot(&mut self, seq: SeqId, at: u32) -> Result<(), KvError> {
        let source = self.sequences.get(seq)?;
        let n = at as usize;
        if self.feasible(source, n) != n {
            return Ok(());
        }
        let tokens = source.tokens[..n].to_vec();
        if let Some(copy) = self.idle_copy(&tokens) {
            return self.touch(copy);
        }
        let tables: Vec<Table> = (0..self.active.len()).map(|group| self.shared_table(source, group, n)).collect();
        let planes: VecDeque<PlaneEntry> = source.planes.iter().filter(|p| p.at == at).copied().collect();
        for entry in tables.iter().flatten() {
            let store = &mut self.stores[entry.store as usize];
            store.share(entry.page, entry.len, seq.index);
            store.sleep(entry.page);
        }
        if let Some(states) = &mut self.states {
            for entry in &planes {
                states.pool.share(entry.plane);
                states.pool.sleep(entry.plane);
            }
        }
        let snapshot = self.create();
        let child = self.sequences.get_mut(snapshot)?;
        child.committed = n;
        child.tokens = tokens;
        child.tables = tables;
        child.planes = planes;
        child.phase = Phase::Idle;
        child.is_snapshot = true;
        Ok(())
    }

    /// An idle sequence of exactly these tokens.
    pub(crate) fn idle_copy(&self, tokens: &[u32]) -> Option<SeqId> {
        self.idle().find(|(_, s)| s.tokens == tokens).map(|(seq, _)| seq)
    }

    /// Drops the snapshots used least recently beyond those that are kept.
    pub(crate) fn bound_snapshots(&mut self) {
        while self.snapshots() > self.config.snapshots {
            let oldest = self.idle().filter(|(_, s)| s.is_snapshot).min_by_key(|(_, s)| s.last_used);
            let Some((seq, _)) = oldest else { return };
            self.forget(seq);
        }
    }

    /// Drops the least recently used of the idle sequences that hold a plane which no running one holds. Whether there
    /// was one.
    fn evict_plane(&mut self) -> bool {
        let Some(states) = &self.states else { return false };
        let counts = &states.pool.counts;
        let holds = |s: &Sequence| s.planes.iter().any(|p| counts[p.plane as usize].live == 0);
        let Some((seq, _)) = self.idle().filter(|(_, s)| holds(s)).min_by_key(|(_, s)| s.last_used) else {
            return false;
        };
        self.forget(seq);
        true
    }

    /// Changes the planes of a running sequence, and brings up to date what is promised to it. `None` in a cache
    /// without state.
    pub(crate) fn change_planes<R>(
        &mut self,
        seq: SeqId,
        change: impl FnOnce(&mut StateStore, &mut Sequence) -> R,
    ) -> Result<Option<R>, KvError> {
        let sequence = self.sequences.get_mut(seq)?;
        let Some(states) = &mut self.states else { return Ok(None) };
        let before = sequence.plane_promise().open();
        let result = change(states, sequence);
        states.pool.promised = states.pool.promised - before + sequence.plane_promise().open();
        Ok(Some(result))
    }

    /// Besides `own` tokens, which a sequence can be shortened to by itself: the most of its first `n` tokens of which
    /// another sequence has the plane.
    pub(crate) fn nearest_plane(&self, seq: SeqId, own: usize, n: usize) -> Result<Option<PlaneEntry>, KvError> {
        let sequence = self.sequences.get(seq)?;
        let others = self.sequences.iter().filter(|(other, s)| *other != seq && s.phase != Phase::Doomed);
        let between = |p: &&PlaneEntry| (own + 1..=n).contains(&(p.at as usize));
        let planes = others.flat_map(|(_, s)| s.planes.iter().filter(between).map(move |p| (s, *p)));
        let fits = |(other, p): &(&Sequence, PlaneEntry)| {
            let at = p.at as usize;
            other.tokens[..at] == sequence.tokens[..at] && self.windows_reach_back(sequence, at)
        };
        Ok(planes.filter(fits).map(|(_, p)| p).max_by_key(|p| p.at))
    }
}

/// Tokens that a sequence has, and will have after `more` of them.
fn bounds(sequence: &Sequence, more: usize) -> (u32, u32) {
    (sequence.committed as u32, (sequence.committed + more) as u32)
}

impl Sequence {
    /// What it was promised in planes.
    pub(crate) fn plane_promise(&self) -> Promise {
        Promise { quota: self.plane_quota, drawn: self.planes.len() + self.writing.len() }
    }
}
