//! The rules of the cache, checked from scratch.

use opencoti_plugin_api::PAGE_TOKENS;

use crate::cache::Cache;
use crate::pool::{Counts, Pool};
use crate::sequence::{Phase, Sequence, first_held};
use crate::stage::{Record, Stage};
use crate::states::{STATE, StateStore};
use crate::store::Store;

impl Cache {
    /// Recounts everything that is counted and says what is wrong, if anything is. For tests and diagnosis.
    pub fn check(&self) -> Result<(), String> {
        for (index, store) in self.stores.iter().enumerate() {
            self.check_store(index).map_err(|e| format!("store `{}`: {e}", store.name))?;
        }
        if let Some(states) = &self.states {
            self.check_states(states).map_err(|e| format!("store `{STATE}`: {e}"))?;
        }
        ensure(self.snapshots() <= self.config.snapshots, || format!("{} snapshots", self.snapshots()))?;
        for (seq, sequence) in self.sequences.iter() {
            for (group, table) in sequence.tables.iter().enumerate() {
                let mut position = table.front().map_or(0, |e| e.start_pos);
                for entry in table {
                    ensure(entry.start_pos == position && entry.len > 0, || format!("{seq}: gap before {entry:?}"))?;
                    ensure(entry.len as usize <= PAGE_TOKENS, || format!("{seq}: {entry:?} is too long"))?;
                    position = entry.end();
                }
                ensure(position as usize == sequence.tokens.len(), || {
                    format!("{seq}: group {group} ends at {position}, not {}", sequence.tokens.len())
                })?;
                ensure(self.reaches_back(group, first_held(table), sequence.committed), || {
                    format!("{seq}: group {group} has released tokens that its window needs")
                })?;
            }
            ensure(sequence.in_flight || sequence.committed == sequence.tokens.len(), || {
                format!("{seq}: tokens neither written nor in a step")
            })?;
        }
        Ok(())
    }

    fn check_store(&self, index: usize) -> Result<(), String> {
        let store = &self.stores[index];
        let mut found = vec![Counts::default(); store.pages.len()];
        let mut writer_holds = vec![false; store.pages.len()];
        let mut promised = 0;
        for (seq, sequence) in self.sequences.iter() {
            for entry in sequence.tables.iter().flatten().filter(|e| e.store as usize == index) {
                let page = entry.page as usize;
                count(&mut found[page], sequence);
                writer_holds[page] |= store.pages[page].writer == Some(seq.index);
            }
            let promises = sequence.promises.iter().enumerate().filter(|(group, _)| self.active[*group] == index);
            for (_, promise) in promises {
                ensure(sequence.phase != Phase::Idle || promise.open() == 0, || format!("{seq}: idle, yet promised"))?;
                promised += promise.open();
            }
        }
        store.pool.check(&found, promised)?;
        if let Some(stage) = &store.stage {
            self.check_stage(index, store, stage).map_err(|e| format!("stage: {e}"))?;
        }
        for (i, page) in store.pages.iter().enumerate() {
            ensure(page.writer.is_none() || writer_holds[i], || {
                format!("page {i} has a writer that does not hold it")
            })?;
        }
        let kept = match store.window {
            Some(_) => store.pool.held,
            None => store.pool.used(),
        };
        ensure(kept + promised <= store.pages.len(), || format!("{promised} pages promised that are not there"))
    }

    /// Pages of the stage are counted as those they belong to, and no page lacks both its exact tokens and its record.
    fn check_stage(&self, index: usize, store: &Store, stage: &Stage) -> Result<(), String> {
        let mut found = vec![Counts::default(); stage.pool.len()];
        for (i, (page, counts)) in store.pages.iter().zip(&store.pool.counts).enumerate() {
            match page.stage {
                Some(unit) => found[unit as usize] = *counts,
                None => ensure(counts.refs == 0 || page.record == Record::Written, || format!("page {i} is nowhere"))?,
            }
            ensure(self.pending.is_some() || page.record != Record::Planned, || format!("page {i} is never sealed"))?;
        }
        let mut promised = 0;
        for (seq, sequence) in self.sequences.iter() {
            for (group, promise) in sequence.stage_promises.iter().enumerate().filter(|(g, _)| self.active[*g] == index)
            {
                let drawn = if sequence.phase == Phase::Idle { 0 } else { store.staged(&sequence.tables[group]) };
                ensure(promise.drawn == drawn, || format!("{seq} has drawn {drawn} pages, not {}", promise.drawn))?;
                promised += promise.open();
            }
        }
        stage.pool.check(&found, promised)?;
        let bounded = stage.plan.bounded && self.pending.is_none();
        ensure(!bounded || stage.pool.held + promised <= stage.pool.len(), || {
            format!("{promised} pages promised that are not there")
        })
    }

    fn check_states(&self, states: &StateStore) -> Result<(), String> {
        let mut found = vec![Counts::default(); states.pool.len()];
        let mut promised = 0;
        for (seq, sequence) in self.sequences.iter() {
            let entries = || sequence.planes.iter().chain(&sequence.writing);
            entries().for_each(|e| count(&mut found[e.plane as usize], sequence));
            let positions: Vec<u32> = entries().map(|e| e.at).collect();
            ensure(positions.windows(2).all(|w| w[0] < w[1]), || format!("{seq}: planes at {positions:?}"))?;
            let last = sequence.planes.back().map_or(0, |e| e.at as usize);
            ensure(last == sequence.committed, || format!("{seq}: its last plane is at {last}"))?;
            ensure(sequence.in_flight || sequence.writing.is_empty(), || format!("{seq}: writes planes in no step"))?;
            let idle = sequence.phase == Phase::Idle;
            ensure(!idle || sequence.planes.len() <= 1, || format!("{seq}: idle, with planes at {positions:?}"))?;
            ensure(!idle || sequence.plane_quota == 0, || format!("{seq}: idle, yet promised"))?;
            promised += sequence.plane_promise().open();
        }
        states.pool.check(&found, promised)?;
        // Planes that a step writes for snapshots are lent to it, until they can be reclaimed.
        ensure(self.pending.is_some() || states.pool.held + promised <= states.pool.len(), || {
            format!("{promised} planes promised that are not there")
        })
    }
}

/// Counts an entry of a sequence.
fn count(counts: &mut Counts, sequence: &Sequence) {
    counts.refs += 1;
    counts.live += u32::from(sequence.phase != Phase::Idle);
}

impl Pool {
    /// Compares with what was counted anew.
    fn check(&self, found: &[Counts], promised: usize) -> Result<(), String> {
        let mut is_free = vec![false; self.len()];
        for &unit in &self.free {
            ensure(!std::mem::replace(&mut is_free[unit as usize], true), || format!("{unit} is free twice"))?;
        }
        for (i, (counts, found)) in self.counts.iter().zip(found).enumerate() {
            ensure(counts == found, || format!("{i} counts {counts:?}, found {found:?}"))?;
            ensure(is_free[i] == (counts.refs == 0), || format!("{i} is free and used, or neither"))?;
        }
        let reclaimable = found.iter().filter(|c| c.refs > 0 && c.live == 0).count();
        ensure(self.reclaimable == reclaimable, || format!("{} reclaimable, found {reclaimable}", self.reclaimable))?;
        let held = found.iter().map(|c| c.live as usize).sum::<usize>();
        ensure(self.held == held, || format!("{} held, found {held}", self.held))?;
        ensure(self.promised == promised, || format!("{} promised, found {promised}", self.promised))
    }
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}
