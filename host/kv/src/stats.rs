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
}

impl StoreStats {
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

impl Cache {
    /// State of every store. Linear in the number of pages.
    pub fn stats(&self) -> Vec<StoreStats> {
        let stats = |s: &crate::store::Store| StoreStats {
            name: s.name.clone(),
            window: s.window,
            page_bytes: s.view.page_bytes,
            total: s.pages.len(),
            free: s.free.len(),
            reclaimable: s.reclaimable,
            shared: s.pages.iter().filter(|p| p.refs > 1).count(),
            promised: s.promised,
            available: s.headroom(),
        };
        self.stores.iter().map(stats).collect()
    }
}
