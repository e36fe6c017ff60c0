//! Exact tokens beside a store: pages that are encoded as a whole, and the newest and first tokens of any codec.
//!
//! A page of a store with a stage begins as a page of *exact* tokens in the stage, which appends fill. Which keys a
//! query meets exactly is decided by its position alone, never by how a prompt was cut into steps: a query in group `G` of
//! 128 positions reads pages that end before group `G - tail` as records, later ones and those of the sink from the stage.
//! A page's *record* is written once, when the first row needs it or shortly before; from then on nobody appends to the
//! page, and all who share it share the record. Its exact tokens are given back when no holder needs them any more: what
//! comes later, also after a fork or a truncation further back than `rollback_tokens`, reads the record.
//!
//! An idle sequence keeps its exact tokens until running ones need the room; then it is sealed, not forgotten.

use opencoti_compute::plan::{GroupPlan, SealRun, Step, StoreView};
use opencoti_plugin_api::PAGE_TOKENS;

use crate::arena::Arena;
use crate::cache::Cache;
use crate::config::StagePlan;
use crate::error::{CacheFull, ConfigError, KvError};
use crate::planning::Planned;
use crate::pool::Pool;
use crate::sequence::{PageEntry, Phase, Promise, SeqId, Sequence, Table};
use crate::store::Store;

/// What there is of a page's record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Record {
    /// Nothing; its tokens are in the stage, or the store has none.
    #[default]
    None,
    /// The step being run writes it.
    Planned,
    /// It may be read.
    Written,
}

/// Pages of exact tokens. Each belongs to a page of the store and is counted as that is.
pub(crate) struct Stage {
    /// Its place among a step's stores.
    pub(crate) index: u32,
    pub(crate) view: StoreView,
    pub(crate) pool: Pool,
    /// How much of it a sequence may have, and where it is exact.
    pub(crate) plan: StagePlan,
    arena: Arena,
}

impl Stage {
    pub(crate) fn new(plan: StagePlan, group: u32, index: u32, name: &str) -> Result<Self, ConfigError> {
        let too_large = || ConfigError::TooLarge { group: name.to_owned() };
        let n_pages = u32::try_from(plan.n_pages).map_err(|_| too_large())?;
        let bytes = plan.n_pages.checked_mul(plan.page_bytes).filter(|&b| isize::try_from(b).is_ok());
        let bytes = bytes.ok_or_else(too_large)?;
        let refused = |e: std::io::Error| {
            let (group, reason) = (name.to_owned(), e.to_string());
            ConfigError::Refused { group, asked: bytes as u64, reason }
        };
        let arena = Arena::new(bytes).map_err(refused)?;
        let view = StoreView {
            group,
            base: arena.base(),
            page_bytes: plan.page_bytes,
            n_pages: plan.n_pages,
            layers: plan.layers.clone(),
        };
        Ok(Stage { index, view, pool: Pool::new(n_pages), plan, arena })
    }

    /// The first position that a query at `position` meets exactly, besides the sink.
    pub(crate) fn exact_from(&self, position: usize) -> usize {
        (position / PAGE_TOKENS).saturating_sub(self.plan.tail) * PAGE_TOKENS
    }

    /// Whether a query that is exact from `from` on meets an entry exactly.
    fn wants(&self, entry: &PageEntry, from: usize) -> bool {
        entry.end() as usize > from || (entry.start_pos as usize) < self.plan.sink
    }

    /// Pages that may go to anybody, where there are not as many as the store has anyway. What a step takes for a
    /// while is kept for steps.
    pub(crate) fn headroom(&self) -> usize {
        match self.plan.bounded {
            true => self.pool.headroom_unshared().saturating_sub(self.plan.step_pages),
            false => usize::MAX,
        }
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

impl Store {
    /// Pages of a table whose exact tokens are there; each holder pays for all of them.
    pub(crate) fn staged(&self, table: &Table) -> usize {
        match self.stage {
            Some(_) => table.iter().filter(|e| self.pages[e.page as usize].stage.is_some()).count(),
            None => 0,
        }
    }

    /// What must be promised of the stage to a sequence that holds `table` and takes `new_pages` more.
    pub(crate) fn stage_price(&self, table: &Table, new_pages: usize) -> Promise {
        let held = self.staged(table);
        let Some(stage) = self.stage.as_ref().filter(|s| s.plan.bounded) else {
            return Promise { quota: 0, drawn: held };
        };
        let is_cut = |e: &&PageEntry| (e.len as usize) < PAGE_TOKENS && self.pages[e.page as usize].stage.is_some();
        let most = stage.plan.slot_pages.saturating_add(table.iter().filter(is_cut).count());
        Promise { quota: held.saturating_add(new_pages).min(most).max(held), drawn: held }
    }

    /// Fails when so many more pages of the stage can't be held or promised.
    pub(crate) fn check_stage_room(&self, asked: usize) -> Result<(), KvError> {
        match &self.stage {
            Some(stage) if asked > stage.headroom() => Err(self.stage_full(asked).into()),
            _ => Ok(()),
        }
    }

    /// An error that says that `pages` more of the stage were needed.
    pub(crate) fn stage_full(&self, pages: usize) -> CacheFull {
        let free = self.stage.as_ref().map_or(0, Stage::headroom);
        CacheFull {
            store: format!("{} stage", self.name),
            unit: "tokens",
            asked: pages.saturating_mul(PAGE_TOKENS),
            free: free.saturating_mul(PAGE_TOKENS),
        }
    }

    /// Exchanges a promise of the stage.
    pub(crate) fn change_stage_promise(&mut self, promise: &mut Promise, to: Promise) {
        if let Some(stage) = &mut self.stage {
            stage.pool.promised = stage.pool.promised - promise.open() + to.open();
            *promise = to;
        }
    }

    /// Brings a promise of the stage up to date with what a sequence holds.
    pub(crate) fn settle_stage(&mut self, promise: &mut Promise, table: &Table) {
        if self.stage.is_some() {
            let drawn = self.staged(table);
            self.change_stage_promise(promise, Promise { drawn, ..*promise });
        }
    }

    /// Gives back the exact tokens of a page.
    fn unstage(&mut self, page: u32) {
        if let (Some(stage), Some(unit)) = (&mut self.stage, self.pages[page as usize].stage.take()) {
            stage.pool.clear(unit);
        }
    }
}

impl Cache {
    /// Blocks of the rows of a sequence that meet the same pages exactly: rows, and the first exact position. One block
    /// for a store without a stage.
    pub(crate) fn exact_blocks(&self, group: usize, first: usize, n: usize) -> Vec<(std::ops::Range<u32>, usize)> {
        let Some(stage) = &self.stores[self.active[group]].stage else {
            return std::iter::once((0..n as u32, 0)).collect();
        };
        let mut blocks: Vec<(std::ops::Range<u32>, usize)> = Vec::new();
        let mut row = 0;
        while row < n {
            let position = first + row;
            let end = n.min(row + PAGE_TOKENS - position % PAGE_TOKENS);
            let from = stage.exact_from(position);
            match blocks.last_mut() {
                Some((rows, same)) if *same == from => rows.end = end as u32,
                _ => blocks.push((row as u32..end as u32, from)),
            }
            row = end;
        }
        blocks
    }

    /// Where rows that are exact from `from` on read an entry: its place among a step's stores, and the page there. A
    /// record that is missing is planned.
    pub(crate) fn source(&mut self, entry: &PageEntry, from: usize, seals: &mut Vec<(u32, u32)>) -> (u32, u32) {
        let record = (entry.store, entry.page);
        let store = &self.stores[entry.store as usize];
        let page = &store.pages[entry.page as usize];
        let (Some(stage), Some(unit)) = (&store.stage, page.stage) else { return record };
        let exact = (stage.index, unit);
        if stage.wants(entry, from) {
            return exact;
        }
        match page.record {
            Record::None if !self.may_seal(entry) => exact,
            Record::None => {
                self.stores[entry.store as usize].pages[entry.page as usize].record = Record::Planned;
                seals.push(record);
                record
            }
            Record::Planned | Record::Written => record,
        }
    }

    /// Whether nobody who runs may still append to the page of an entry: it is full, or whoever could has gone on
    /// elsewhere.
    fn may_seal(&self, entry: &PageEntry) -> bool {
        let page = &self.stores[entry.store as usize].pages[entry.page as usize];
        if entry.len as usize == PAGE_TOKENS {
            return true;
        }
        let goes_on = |s: &Sequence| {
            let last = s.tables.iter().filter_map(|t| t.back()).any(|e| (e.store, e.page) == (entry.store, entry.page));
            s.phase == Phase::Live && last
        };
        !page.writer.and_then(|index| self.sequences.at(index)).is_some_and(goes_on)
    }

    /// What an executor does to write records.
    pub(crate) fn seal_runs(&self, seals: &[(u32, u32)], group: usize) -> Vec<SealRun> {
        let index = self.active[group] as u32;
        let run = |&(store, page): &(u32, u32)| {
            let from = &self.stores[store as usize];
            let (stage, from_page) = from.stage.as_ref().zip(from.pages[page as usize].stage)?;
            let filled = from.pages[page as usize].filled;
            Some(SealRun { from_store: stage.index, from_page, filled, store, page })
        };
        seals.iter().filter(|(store, _)| *store == index).filter_map(run).collect()
    }

    /// Plans records that no row of a step waits for, to be written between steps: those that the next group of
    /// positions will need, and those of idle sequences whose exact tokens take the room of running ones. `None` when there
    /// is nothing to do or a step is being run. Ended as any step, by [`Cache::commit`] or [`Cache::abort`].
    pub fn plan_seals(&mut self) -> Option<Planned> {
        if self.pending.is_some() {
            return None;
        }
        let mut seals = Vec::new();
        for index in 0..self.stores.len() {
            if self.stores[index].stage.is_some() {
                self.seals_ahead(index, &mut seals);
                self.seal_idle(index, &mut seals);
            }
        }
        if seals.is_empty() {
            return None;
        }
        let plan = |group| GroupPlan { seals: self.seal_runs(&seals, group), ..GroupPlan::default() };
        let groups = (0..self.active.len()).map(plan).collect();
        let step = Step { groups, stores: self.views(), ..Step::default() };
        let id = self.begin_step(Vec::new(), seals);
        Some(Planned { step, rows: Vec::new(), id })
    }

    /// Records of full pages that the next group of positions of a running sequence will read.
    fn seals_ahead(&mut self, index: usize, seals: &mut Vec<(u32, u32)>) {
        let store = &self.stores[index];
        let Some(stage) = &store.stage else { return };
        let mut found: Vec<u32> = Vec::new();
        for (_, sequence) in self.sequences.iter().filter(|(_, s)| s.phase == Phase::Live) {
            let soon = stage.exact_from(sequence.committed + PAGE_TOKENS);
            let settled = sequence.committed.saturating_sub(self.config.rollback_tokens);
            let entries = sequence.tables.iter().flatten().filter(|e| e.store as usize == index);
            let ready = |e: &&PageEntry| {
                let (page, end) = (&store.pages[e.page as usize], e.end() as usize);
                page.record == Record::None && e.len as usize == PAGE_TOKENS && end <= settled && !stage.wants(e, soon)
            };
            found.extend(entries.filter(ready).map(|e| e.page));
        }
        self.plan_records(index, found, seals);
    }

    fn plan_records(&mut self, index: usize, pages: Vec<u32>, seals: &mut Vec<(u32, u32)>) {
        for page in pages {
            let record = &mut self.stores[index].pages[page as usize].record;
            if *record == Record::None {
                *record = Record::Planned;
                seals.push((index as u32, page));
            }
        }
    }

    /// Lets idle sequences give up their exact tokens, the least recently used first, until the next step finds room.
    fn seal_idle(&mut self, index: usize, seals: &mut Vec<(u32, u32)>) {
        let Some(stage) = self.stores[index].stage.as_ref().filter(|s| s.plan.bounded) else { return };
        let wanted = stage.plan.step_pages + stage.pool.promised;
        let mut free = stage.pool.free.len();
        let mut gave_up = false;
        while free < wanted {
            let store = &self.stores[index];
            let mine = |e: &&PageEntry| {
                let page = &store.pages[e.page as usize];
                let alone = store.pool.counts[e.page as usize].live == 0;
                e.store as usize == index && alone && page.stage.is_some()
            };
            let holds = |s: &Sequence| s.exact && s.tables.iter().flatten().any(|e| mine(&e));
            let Some((seq, sequence)) = self.idle().filter(|(_, s)| holds(s)).min_by_key(|(_, s)| s.last_used) else {
                break;
            };
            let pages: Vec<u32> = sequence.tables.iter().flatten().filter(mine).map(|e| e.page).collect();
            free += pages.len();
            self.plan_records(index, pages, seals);
            if let Ok(sequence) = self.sequences.get_mut(seq) {
                sequence.exact = false;
                gave_up = true;
            }
        }
        // Otherwise when the seals are written.
        if gave_up && seals.iter().all(|s| s.0 as usize != index) {
            self.release_stage(index);
        }
    }

    /// Marks planned records as written, or as not there.
    pub(crate) fn end_seals(&mut self, seals: &[(u32, u32)], written: bool) {
        for &(store, page) in seals {
            let page = &mut self.stores[store as usize].pages[page as usize];
            // A page that was given back in between is nobody's.
            if page.record == Record::Planned {
                page.record = if written { Record::Written } else { Record::None };
            }
        }
    }

    /// Gives back exact tokens that no holder needs: neither for what follows it, nor after `rollback_tokens` are taken back.
    pub(crate) fn release_stage(&mut self, index: usize) {
        let store = &self.stores[index];
        let Some(stage) = &store.stage else { return };
        let mut needed = vec![false; store.pages.len()];
        for (_, sequence) in self.sequences.iter().filter(|(_, s)| s.exact) {
            let from = stage.exact_from(sequence.committed.saturating_sub(self.config.rollback_tokens));
            let entries = sequence.tables.iter().flatten().filter(|e| e.store as usize == index);
            entries.filter(|e| stage.wants(e, from)).for_each(|e| needed[e.page as usize] = true);
        }
        let surplus = |(i, page): (usize, &crate::store::Page)| {
            (page.record == Record::Written && page.stage.is_some() && !needed[i]).then_some(i as u32)
        };
        let surplus: Vec<u32> = store.pages.iter().enumerate().filter_map(surplus).collect();
        let store = &mut self.stores[index];
        surplus.into_iter().for_each(|page| store.unstage(page));
        let live: Vec<SeqId> =
            self.sequences.iter().filter(|(_, s)| s.phase != Phase::Idle).map(|(seq, _)| seq).collect();
        for seq in live {
            let Ok(sequence) = self.sequences.get_mut(seq) else { continue };
            for (group, table) in sequence.tables.iter().enumerate().filter(|(group, _)| self.active[*group] == index) {
                self.stores[index].settle_stage(&mut sequence.stage_promises[group], table);
            }
        }
    }

    /// Whether exact tokens can have become superfluous as a sequence went on from `before` tokens.
    pub(crate) fn crosses(&self, index: usize, before: usize, now: usize) -> bool {
        let rollback = self.config.rollback_tokens;
        let from = |stage: &Stage, n: usize| stage.exact_from(n.saturating_sub(rollback));
        self.stores[index].stage.as_ref().is_some_and(|s| from(s, before) != from(s, now))
    }
}
