//! Pages of one cache group in one pair of codecs: who refers to them, who writes them, which are free.

use opencoti_compute::plan::StoreView;
use opencoti_plugin_api::PAGE_TOKENS;

use crate::arena::Arena;
use crate::config::{CacheConfig, GroupConfig};
use crate::error::{CacheFull, ConfigError};
use crate::pool::Pool;
use crate::stage::{Record, Stage};

/// Who may write a page. Its contents are in the arena, its references in the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Page {
    /// Index of the sequence that may fill free slots.
    pub(crate) writer: Option<u32>,
    /// Slots below this may be read by others than the writer, which must not rewrite them after a truncation.
    pub(crate) frozen: u32,
    /// Slots that were written.
    pub(crate) filled: u32,
    /// Where its exact tokens are, in a store with a stage.
    pub(crate) stage: Option<u32>,
    /// In a store with a stage, what there is of its record.
    pub(crate) record: Record,
}

/// An arena of pages.
pub(crate) struct Store {
    pub(crate) name: String,
    pub(crate) window: Option<usize>,
    pub(crate) slot_pages: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) view: StoreView,
    /// Name of the table by which channels are prepared; empty when they are not.
    pub(crate) channels: String,
    pub(crate) pages: Vec<Page>,
    pub(crate) pool: Pool,
    pub(crate) stage: Option<Stage>,
    arena: Arena,
}

impl Store {
    /// The store of group number `group`.
    pub(crate) fn new(config: &CacheConfig, group: u32) -> Result<Self, ConfigError> {
        let spec: &GroupConfig = &config.groups[group as usize];
        let too_large = || ConfigError::TooLarge { group: spec.name.clone() };
        let plan = config.store_plan(spec)?;
        let stage_index = config.stage_index(group as usize);
        let stage = plan.stage.map(|stage| Stage::new(stage, group, stage_index, &spec.name)).transpose()?;
        let n_pages = u32::try_from(plan.n_pages).map_err(|_| too_large())?;
        let bytes = plan.n_pages.checked_mul(plan.page_bytes).filter(|&b| isize::try_from(b).is_ok());
        let bytes = bytes.ok_or_else(too_large)?;
        let arena = Arena::new(bytes).map_err(|e| ConfigError::Refused {
            group: spec.name.clone(),
            asked: bytes as u64,
            reason: e.to_string(),
        })?;
        Ok(Store {
            name: spec.name.clone(),
            window: spec.geometry.window,
            slot_pages: plan.slot_pages,
            n_kv_heads: spec.geometry.n_kv_heads,
            view: StoreView {
                group,
                base: arena.base(),
                page_bytes: plan.page_bytes,
                n_pages: plan.n_pages,
                layers: plan.layers,
            },
            channels: String::new(),
            pages: vec![Page::default(); plan.n_pages],
            pool: Pool::new(n_pages),
            stage,
            arena,
        })
    }

    /// Pages that may go to anybody: neither used by a running sequence nor promised to one.
    ///
    /// Where windows slide, every sequence pays for the whole of its own: sharing ends when one of the sharers moves
    /// on. Elsewhere a shared page counts once.
    pub(crate) fn headroom(&self) -> usize {
        match self.window {
            Some(_) => self.pool.headroom_unshared(),
            None => self.pool.headroom_shared(),
        }
    }

    /// An error that says that `pages` more than the headroom were needed.
    pub(crate) fn full(&self, pages: usize) -> CacheFull {
        CacheFull {
            store: self.name.clone(),
            unit: "tokens",
            asked: pages.saturating_mul(PAGE_TOKENS),
            free: self.headroom() * PAGE_TOKENS,
        }
    }

    /// Takes a free page for a running sequence, and one of the stage, if there is one.
    pub(crate) fn take(&mut self, writer: u32) -> Option<u32> {
        if self.stage.as_ref().is_some_and(|s| s.pool.free.is_empty()) {
            return None;
        }
        let page = self.pool.take()?;
        let stage = self.stage.as_mut().and_then(|s| s.pool.take());
        self.pages[page as usize] = Page { writer: Some(writer), stage, ..Page::default() };
        Some(page)
    }

    /// Takes a free page whose record alone there will be.
    pub(crate) fn take_record(&mut self, writer: u32) -> Option<u32> {
        let page = self.pool.take()?;
        self.pages[page as usize] = Page { writer: Some(writer), record: Record::Written, ..Page::default() };
        Some(page)
    }

    /// The pool of the stage and a page's place in it.
    fn staged_page(&mut self, page: u32) -> Option<(&mut Pool, u32)> {
        let unit = self.pages[page as usize].stage?;
        self.stage.as_mut().map(|stage| (&mut stage.pool, unit))
    }

    /// One running entry becomes idle.
    pub(crate) fn sleep(&mut self, page: u32) {
        self.pool.sleep(page);
        if let Some((pool, unit)) = self.staged_page(page) {
            pool.sleep(unit);
        }
    }

    /// One idle entry becomes running.
    pub(crate) fn wake(&mut self, page: u32) {
        self.pool.wake(page);
        if let Some((pool, unit)) = self.staged_page(page) {
            pool.wake(unit);
        }
    }

    /// Where rows are appended to a page: a place among a step's stores, and the page there.
    pub(crate) fn appends_to(&self, index: u32, page: u32) -> (u32, u32) {
        match (&self.stage, self.pages[page as usize].stage) {
            (Some(stage), Some(unit)) => (stage.index, unit),
            _ => (index, page),
        }
    }

    /// Adds a running reader of the first `len` slots. An only holder becomes the writer, so that it does not lose the
    /// free slots on which it counts.
    pub(crate) fn share(&mut self, page: u32, len: u32, holder: u32) {
        let only_holder = self.pool.counts[page as usize].refs == 1;
        self.pool.share(page);
        if let Some((pool, unit)) = self.staged_page(page) {
            pool.share(unit);
        }
        let page = &mut self.pages[page as usize];
        if only_holder {
            page.writer = Some(holder);
        }
        page.frozen = page.frozen.max(len);
    }

    /// Drops an idle entry of sequence `holder`. Says whether the page is free now.
    pub(crate) fn drop_idle(&mut self, page: u32, holder: u32) -> bool {
        let left = self.pool.drop_idle(page);
        if let Some((pool, unit)) = self.staged_page(page) {
            pool.drop_idle(unit);
        }
        let page = &mut self.pages[page as usize];
        if page.writer == Some(holder) {
            page.writer = None;
        }
        match left {
            0 => *page = Page::default(),
            1 => page.frozen = 0,
            _ => {}
        }
        left == 0
    }

    /// Drops a running entry of sequence `holder`. Says whether the page is free now.
    pub(crate) fn drop_live(&mut self, page: u32, holder: u32) -> bool {
        self.sleep(page);
        self.drop_idle(page, holder)
    }

    /// Whether `holder`, whose last entry has `len` slots of `page`, may fill the next one.
    pub(crate) fn may_append(&self, page: u32, len: u32, holder: u32) -> bool {
        let refs = self.pool.counts[page as usize].refs;
        let page = &self.pages[page as usize];
        (len as usize) < PAGE_TOKENS
            && page.record == Record::None
            && (refs == 1 || (page.writer == Some(holder) && len >= page.frozen))
    }

    /// Makes `holder` the writer of a page that it may append to.
    pub(crate) fn set_writer(&mut self, page: u32, holder: u32) {
        self.pages[page as usize].writer = Some(holder);
    }

    /// A page's bytes.
    ///
    /// # Safety
    /// No executor writes the page while the slice lives.
    pub(crate) unsafe fn page_bytes(&self, page: u32) -> &[u8] {
        let len = self.view.page_bytes;
        // SAFETY: passed on.
        unsafe { self.arena.bytes(page as usize * len, len) }
    }

    /// A page's bytes, to fill a page that was just taken.
    ///
    /// # Safety
    /// Nobody reads or writes the page while the slice lives.
    pub(crate) unsafe fn page_bytes_mut(&mut self, page: u32) -> &mut [u8] {
        let len = self.view.page_bytes;
        // SAFETY: passed on.
        unsafe { self.arena.bytes_mut(page as usize * len, len) }
    }
}
