//! What a store holds, for metrics and admission.

use opencoti_plugin_api::PAGE_TOKENS;

use crate::cache::Cache;

/// State of a store, in pages of [`PAGE_TOKENS`] token slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreStats {
    /// Name of its cache group.
    pub name: String,
    /// Sliding window in tokens; `None` for full attention.
    pub window: Option<usize>,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Pages it has.
    pub total: usize,
    /// Pages that no sequence holds.
    pub free: usize,
    /// Pages that only idle sequences hold.
    pub reclaimable: usize,
    /// Pages that several sequences hold.
    pub shared: usize,
    /// Pages promised to running sequences and not yet taken.
    pub promised: usize,
    /// Pages that can still be promised to a new sequence; evicting idle sequences included.
    pub available: usize,
    /// Exact tokens beside it.
    pub stage: Option<StageStats>,
}

/// Pages of exact tokens beside a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StageStats {
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Pages it has.
    pub total: usize,
    /// Pages that no sequence holds.
    pub free: usize,
    /// Pages promised to running sequences and not yet taken.
    pub promised: usize,
    /// Whether there are fewer than the store has; otherwise nothing of it is ever short.
    pub bounded: bool,
    /// Pages that can still be promised to a new sequence; idle sequences may give up theirs.
    pub available: usize,
    /// Pages that one running sequence has at most, ordinary forks included.
    pub per_sequence: usize,
}

impl StoreStats {
    /// Bytes of all its pages, those of the stage included.
    pub fn bytes(&self) -> u64 {
        let bytes = |page: usize, pages: usize| (page as u64).saturating_mul(pages as u64);
        let stage = self.stage.map_or(0, |s| bytes(s.page_bytes, s.total));
        bytes(self.page_bytes, self.total).saturating_add(stage)
    }

    /// Pages that running sequences hold.
    pub fn used(&self) -> usize {
        self.total - self.free - self.reclaimable
    }

    /// Token slots of a number of its pages.
    pub fn tokens(pages: usize) -> usize {
        pages * PAGE_TOKENS
    }

    /// Pages available without evicting anything.
    pub fn available_free(&self) -> usize {
        self.available.saturating_sub(self.reclaimable)
    }

    /// Pages available by evicting idle sequences.
    pub fn available_reclaimable(&self) -> usize {
        self.available - self.available_free()
    }
}

/// The store of recurrent state, in planes: each is the state of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateStats {
    /// Recurrent layers.
    pub n_layers: usize,
    /// Bytes of a plane.
    pub plane_bytes: usize,
    /// Planes it has.
    pub total: usize,
    /// Planes that no sequence holds.
    pub free: usize,
    /// Planes that only idle sequences hold, snapshots included.
    pub reclaimable: usize,
    /// Planes that several sequences hold.
    pub shared: usize,
    /// Planes promised to running sequences and not yet taken.
    pub promised: usize,
    /// Planes that can still be promised to a new sequence; evicting idle sequences included.
    pub available: usize,
    /// Planes that one running sequence has at most.
    pub per_sequence: usize,
}

impl Cache {
    /// State of the store of recurrent state, if the model has any. Linear in the number of planes.
    pub fn state_stats(&self) -> Option<StateStats> {
        let states = self.states.as_ref()?;
        Some(StateStats {
            n_layers: self.config.states.layers.len(),
            plane_bytes: states.plane_size(),
            total: states.pool.len(),
            free: states.pool.free.len(),
            reclaimable: states.pool.reclaimable,
            shared: states.pool.counts.iter().filter(|c| c.refs > 1).count(),
            promised: states.pool.promised,
            available: states.headroom(),
            per_sequence: states.quota,
        })
    }

    /// State of every store. Linear in the number of pages.
    pub fn stats(&self) -> Vec<StoreStats> {
        let stats = |s: &crate::store::Store| StoreStats {
            name: s.name.clone(),
            window: s.window,
            page_bytes: s.view.page_bytes,
            total: s.pages.len(),
            free: s.pool.free.len(),
            reclaimable: s.pool.reclaimable,
            shared: s.pool.counts.iter().filter(|c| c.refs > 1).count(),
            promised: s.pool.promised,
            available: s.headroom(),
            stage: s.stage.as_ref().map(|stage| StageStats {
                page_bytes: stage.view.page_bytes,
                total: stage.pool.len(),
                free: stage.pool.free.len(),
                promised: stage.pool.promised,
                bounded: stage.plan.bounded,
                available: stage.headroom().min(stage.pool.len()),
                per_sequence: stage.plan.slot_pages,
            }),
        };
        self.stores.iter().map(stats).collect()
    }
}
