//! What is no generation: the slots as others see them, their files, and the numbers of the moment.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use opencoti_compute::plan::StoreView;
use opencoti_kv::{SeqId, StateError};

use super::Core;
use super::choice::{Choice, Phase};
use crate::api::{EngineError, SlotFile, SlotInfo, SlotTask, StateStats, Stats, StoreStats};
use crate::runner::StepRunner;

impl Core {
    pub(crate) fn slot_infos(&self) -> Vec<SlotInfo> {
        let info = |(id, slot): (usize, &super::slots::Slot)| {
            let seq = slot.choice.as_ref().map(|c| c.seq).or(slot.last);
            SlotInfo {
                id: id as u32,
                n_ctx: self.config.n_ctx as u32,
                task: slot.choice.as_ref().map(task),
                n_cached: seq.and_then(|seq| self.cache.committed(seq).ok()).unwrap_or(0) as u32,
                session_id: slot.session.clone(),
                pool: slot.pool,
                n_pool_shared: self.n_pool_shared(slot) as u32,
            }
        };
        self.slots.iter().enumerate().map(info).collect()
    }

    /// Writes what is cached for a slot's last sequence to a file.
    pub(crate) fn save_slot(
        &mut self,
        slot: u32,
        path: &Path,
        runner: &mut dyn StepRunner,
    ) -> Result<SlotFile, EngineError> {
        let began = Instant::now();
        let seq = self.idle_sequence(slot)?.ok_or_else(|| {
            EngineError::NotFound(format!("slot {slot} has nothing to save: no sequence is cached for it"))
        })?;
        let n_tokens = self.cache.committed(seq).map_err(internal)? as u32;
        self.pages(Some(seq), |store, pages| runner.pages_to_host(store, pages))?;
        let n_bytes = self.write_state(seq, path).map_err(|error| {
            tracing::error!(path = %path.display(), %error, "a slot could not be saved");
            EngineError::Internal(format!("slot {slot} could not be saved to `{}`: {error}", file_name(path)))
        })?;
        Ok(SlotFile { n_tokens, n_bytes, ms: began.elapsed().as_secs_f64() * 1e3 })
    }

    /// Hands on, store by store, the pages that a state file of a sequence is about. Snapshots at its beginnings have pages of
    /// their own where windows slide: there it is all of the store, which is small; without a sequence it is that alone.
    fn pages(
        &self,
        seq: Option<SeqId>,
        mut each: impl FnMut(&StoreView, &[u32]) -> Result<(), String>,
    ) -> Result<(), EngineError> {
        for (store, view) in self.cache.views().into_iter().enumerate() {
            let group = view.group as usize;
            let pages: Vec<u32> = match (self.cache.config().groups[group].geometry.window, seq) {
                (Some(_), _) => (0..view.n_pages as u32).collect(),
                (None, Some(seq)) => {
                    let table = self.cache.page_table(seq, group).map_err(internal)?;
                    table.iter().filter(|e| e.store as usize == store).map(|e| e.page).collect()
                }
                (None, None) => continue,
            };
            each(&view, &pages).map_err(EngineError::Internal)?;
        }
        Ok(())
    }

    /// Writes a state file. Until it is whole it has another name, so that a failure leaves an older file as it was.
    fn write_state(&self, seq: SeqId, path: &Path) -> Result<u64, StateError> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".part");
        let unfinished = Path::new(&unfinished);
        let write = || {
            let mut file = BufWriter::new(File::create(unfinished)?);
            let n_bytes = self.cache.save(seq, &mut file, &self.model)?;
            file.flush()?;
            std::fs::rename(unfinished, path)?;
            Ok(n_bytes)
        };
        write().inspect_err(|_| drop(std::fs::remove_file(unfinished)))
    }

    /// Puts the sequence of a file in the place of a slot's last one.
    pub(crate) fn restore_slot(
        &mut self,
        slot: u32,
        path: &Path,
        runner: &mut dyn StepRunner,
    ) -> Result<SlotFile, EngineError> {
        let began = Instant::now();
        self.idle_sequence(slot)?;
        let file = File::open(path).map_err(|e| {
            EngineError::NotFound(format!("the state file `{}` could not be opened: {e}", file_name(path)))
        })?;
        let n_bytes = file.metadata().map(|m| m.len()).unwrap_or(0);
        // Stores with windows are handed back whole, with what others have in them.
        self.pages(None, |store, pages| runner.pages_to_host(store, pages))?;
        let seq =
            self.cache.restore(&mut BufReader::new(file), &self.model).map_err(|e| self.refused_state(path, e))?;
        self.pages(Some(seq), |store, pages| runner.pages_from_host(store, pages))?;
        let n_tokens = self.cache.committed(seq).map_err(internal)? as u32;
        self.forget(slot);
        self.retain(slot as usize, seq);
        Ok(SlotFile { n_tokens, n_bytes, ms: began.elapsed().as_secs_f64() * 1e3 })
    }

    /// Drops what is cached for a slot's last sequence.
    pub(crate) fn erase_slot(&mut self, slot: u32) -> Result<SlotFile, EngineError> {
        let began = Instant::now();
        let n_tokens = match self.idle_sequence(slot)? {
            Some(seq) => self.cache.committed(seq).map_err(internal)? as u32,
            None => 0,
        };
        if let Some(seq) = self.slots[slot as usize].last.take() {
            // The cache may have evicted it already.
            let _ = self.cache.erase(seq);
        }
        Ok(SlotFile { n_tokens, n_bytes: 0, ms: began.elapsed().as_secs_f64() * 1e3 })
    }

    /// The sequence kept for an idle slot, if the cache still has it.
    fn idle_sequence(&self, slot: u32) -> Result<Option<SeqId>, EngineError> {
        let n_slots = self.slots.len();
        let place = self.slots.get(slot as usize).ok_or_else(|| {
            EngineError::NotFound(format!("there is no slot {slot}; there are {n_slots}, counted from 0"))
        })?;
        match &place.choice {
            Some(_) => {
                Err(EngineError::Unavailable(format!("slot {slot} is running a request; try again when it is idle")))
            }
            None => Ok(place.last.filter(|&seq| self.cache.committed(seq).is_ok())),
        }
    }

    fn forget(&mut self, slot: u32) {
        if let Some(seq) = self.slots[slot as usize].last.take() {
            // The cache may have evicted it already.
            let _ = self.cache.release(seq);
        }
    }

    fn refused_state(&self, path: &Path, error: StateError) -> EngineError {
        match error {
            StateError::Cache(error) => self.no_room(error),
            error => EngineError::Invalid {
                field: Some("filename".to_owned()),
                message: format!("`{}`: {error}", file_name(path)),
            },
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let tokens = |pages: usize| opencoti_kv::StoreStats::tokens(pages) as u64;
        let groups = &self.cache.config().groups;
        let stores = self.cache.stats().into_iter().map(|s| {
            let group = groups.iter().find(|g| g.name == s.name);
            let codec = |side: fn(&opencoti_kv::GroupConfig) -> &str| group.map(side).unwrap_or_default().to_owned();
            StoreStats {
                codecs: (codec(|g| g.k.name()), codec(|g| g.v.name())),
                n_layers: group.map_or(0, |g| g.n_layers as u32),
                cells_total: tokens(s.total),
                // The cache takes the memory of all its pages at the start and never moves one.
                cells_resident: tokens(s.total),
                cells_used: tokens(s.total - s.free),
                cells_shared: tokens(s.shared),
                cells_reclaimable: tokens(s.reclaimable),
                bytes: s.bytes(),
                stage_cells: s.stage.map_or(0, |stage| tokens(stage.total)),
                stage_bytes: s.stage.map_or(0, |stage| (stage.total as u64).saturating_mul(stage.page_bytes as u64)),
                cpu_tiles: (
                    group.is_some_and(|g| g.k.cpu_tiles().is_some()),
                    group.is_some_and(|g| g.v.cpu_tiles().is_some()),
                ),
                name: s.name,
            }
        });
        let state = self.cache.state_stats().map(|s| StateStats {
            n_layers: s.n_layers as u32,
            plane_bytes: s.plane_bytes as u64,
            planes_total: s.total as u64,
            planes_used: (s.total - s.free) as u64,
            planes_shared: s.shared as u64,
            planes_reclaimable: s.reclaimable as u64,
        });
        Stats {
            stores: stores.collect(),
            state,
            snapshots: self.cache.snapshots() as u32,
            processing: self.slots.iter().filter(|s| s.choice.is_some()).count() as u32,
            deferred: self.queue.len() as u32,
            retained: self.cache.idle_sequences() as u32,
        }
    }
}

fn task(choice: &Choice) -> SlotTask {
    let request = &choice.task.request;
    let fed = if choice.phase == Phase::Sibling { 0 } else { choice.fed };
    SlotTask {
        id: choice.task.id,
        n_prompt_tokens: request.prompt.len() as u32,
        n_prompt_tokens_processed: fed as u32,
        n_prompt_tokens_cache: choice.cached as u32,
        n_decoded: choice.n_decoded,
        n_remain: request.n_predict.map(|n| n.saturating_sub(choice.n_decoded)),
        has_new_line: choice.text.has_new_line(),
        sampling: choice.sampler.params().clone(),
    }
}

/// A file as its client knows it: where it is on the server is nobody else's business.
fn file_name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

fn internal(error: impl std::fmt::Display) -> EngineError {
    EngineError::Internal(error.to_string())
}
