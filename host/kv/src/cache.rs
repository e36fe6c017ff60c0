//! The cache: stores and sequences, and what keeps them consistent.

use std::collections::VecDeque;
use std::sync::Arc;

use opencoti_compute::channels::{Channels, LayerChannels};
use opencoti_compute::plan::StoreView;
use opencoti_plugin_api::PAGE_TOKENS;

use crate::arena;
use crate::config::CacheConfig;
use crate::error::{ConfigError, KvError};
use crate::planning::Pending;
use crate::prefix::{self, Prefix};
use crate::sequence::{PageEntry, Phase, Promise, SeqId, Sequence, Sequences, Table, first_held};
use crate::states::StateStore;
use crate::store::Store;

/// Pages, sequences and the step that is being run.
pub struct Cache {
    pub(crate) config: CacheConfig,
    pub(crate) stores: Vec<Store>,
    /// The store in which each group's new pages are.
    pub(crate) active: Vec<usize>,
    /// Recurrent state, if the model has any.
    pub(crate) states: Option<StateStore>,
    pub(crate) sequences: Sequences,
    pub(crate) pending: Option<Pending>,
    pub(crate) steps: u64,
    clock: u64,
}

impl Cache {
    /// Allocates every store, or says what is wrong with the sizes.
    pub fn new(config: CacheConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let asked = config.bytes()?;
        if let Some(available) = arena::available_bytes().filter(|&available| asked > available) {
            return Err(ConfigError::Memory { asked, available });
        }
        let stores: Vec<Store> =
            (0..config.groups.len()).map(|group| Store::new(&config, group as u32)).collect::<Result<_, _>>()?;
        Ok(Cache {
            active: (0..stores.len()).collect(),
            stores,
            states: StateStore::new(&config)?,
            config,
            sequences: Sequences::default(),
            pending: None,
            steps: 0,
            clock: 0,
        })
    }

    /// Prepares the channels of a group's layers before its codecs see them: for each layer those of keys and of values.
    /// `name` says whose they are; a state file with others is refused by it. Exact tokens of a stage are
    /// kept as they are. Only for a cache that has never held a token.
    ///
    /// # Errors
    /// Another number of layers than the group has, or channels of other heads.
    pub fn use_channels(&mut self, group: usize, name: &str, layers: Vec<LayerChannels>) -> Result<(), ConfigError> {
        let store = &mut self.stores[group];
        let geometry = self.config.groups[group].geometry;
        let of = |c: &Option<Arc<Channels>>, dim: usize| {
            c.as_ref().is_none_or(|c| (c.n_heads(), c.head_dim()) == (geometry.n_kv_heads, dim))
        };
        let right = |l: &LayerChannels| of(&l.k, geometry.k_head_dim) && of(&l.v, geometry.v_head_dim);
        if layers.len() != store.view.layers.len() || !layers.iter().all(right) {
            return Err(ConfigError::Channels { group: store.name.clone(), name: name.to_owned() });
        }
        for (tiles, channels) in store.view.layers.iter_mut().zip(layers) {
            (tiles.k.channels, tiles.v.channels) = (channels.k, channels.v);
        }
        store.channels = name.to_owned();
        Ok(())
    }

    /// The configuration it was made of.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The stores as executors see them, in the order to which plans refer. Valid while the cache lives.
    pub fn views(&self) -> Vec<StoreView> {
        let stages = self.stores.iter().filter_map(|s| s.stage.as_ref().map(|stage| &stage.view));
        self.stores.iter().map(|s| &s.view).chain(stages).cloned().collect()
    }

    /// A new empty sequence, with nothing promised to it.
    pub fn create(&mut self) -> SeqId {
        let n_groups = self.active.len();
        let last_used = self.tick();
        self.sequences.insert(Sequence {
            tokens: Vec::new(),
            committed: 0,
            tables: vec![Table::new(); n_groups],
            promises: vec![Promise::default(); n_groups],
            stage_promises: vec![Promise::default(); n_groups],
            exact: true,
            planes: VecDeque::new(),
            writing: Vec::new(),
            plane_quota: 0,
            wishes: Vec::new(),
            is_snapshot: false,
            is_kept: false,
            hits: 0,
            phase: Phase::Live,
            in_flight: false,
            last_used,
        })
    }

    /// Starts a request: a sequence that begins with `prefix`, if there is one, with room promised for `new_tokens`
    /// more in every store at once. An idle sequence of which the prefix is the whole is taken over, any other and a
    /// snapshot are forked. A fork goes on in a page of its own; where that page is missing, an idle donor gives up what it has
    /// beyond the prefix, or the sequence starts without the prefix: [`Cache::committed`] says what it begins with. On
    /// an error nothing has changed.
    pub fn admit(&mut self, prefix: Option<Prefix>, new_tokens: usize) -> Result<SeqId, KvError> {
        let Some(Prefix { donor, tokens }) = prefix else { return self.admit_fresh(new_tokens) };
        let source = self.sequences.get(donor)?;
        let idle = source.phase == Phase::Idle;
        let attempt = match idle && source.committed == tokens && !source.is_snapshot && !source.is_kept {
            true => self.take_over(donor, tokens, new_tokens),
            false => self.admit_fork(donor, tokens, new_tokens),
        };
        let Err(error @ KvError::Full(_)) = attempt else { return attempt };
        if idle && let Ok(seq) = self.take_over(donor, tokens, new_tokens) {
            return Ok(seq);
        }
        self.admit_fresh(tokens.saturating_add(new_tokens)).map_err(|_| error)
    }

    fn admit_fresh(&mut self, new_tokens: usize) -> Result<SeqId, KvError> {
        let seq = self.create();
        match self.reserve(seq, new_tokens) {
            Ok(()) => Ok(seq),
            Err(error) => self.release(seq).and(Err(error)),
        }
    }

    fn admit_fork(&mut self, donor: SeqId, n: usize, new_tokens: usize) -> Result<SeqId, KvError> {
        let last_used = self.sequences.get(donor)?.last_used;
        let seq = self.fork(donor, n)?;
        if let Err(error) = self.reserve(seq, new_tokens) {
            self.release(seq)?;
            self.sequences.get_mut(donor)?.last_used = last_used;
            return Err(error);
        }
        Ok(seq)
    }

    /// Takes the first `n` tokens of an idle sequence into use, with room for `new_tokens` more; drops the others.
    fn take_over(&mut self, seq: SeqId, n: usize, new_tokens: usize) -> Result<SeqId, KvError> {
        let sequence = self.sequences.get(seq)?;
        if sequence.phase != Phase::Idle {
            return Err(KvError::NotIdle(seq));
        }
        let n = self.feasible(sequence, n.min(sequence.committed));
        let tables: Vec<Table> = sequence.tables.iter().map(|table| first_tokens(table, n)).collect();
        let mut promises = Vec::with_capacity(tables.len());
        for (group, table) in tables.iter().enumerate() {
            let store = &self.stores[self.active[group]];
            let promise = price(store, table, seq, new_tokens);
            let asked = cost_of_use(store, table) + promise.open();
            if asked > store.headroom() {
                return Err(store.full(asked).into());
            }
            let stage = store.stage_price(table, new_pages(store, table, seq, new_tokens));
            store.check_stage_room(stage.drawn + stage.open())?;
            promises.push((promise, stage));
        }
        let plane_quota = self.plane_quota(new_tokens);
        self.check_new_planes(usize::from(n > 0).max(plane_quota))?;
        let now = self.tick();
        let sequence = self.sequences.get_mut(seq)?;
        for (group, table) in tables.iter().enumerate() {
            for dropped in sequence.tables[group].iter().skip(table.len()) {
                self.stores[dropped.store as usize].drop_idle(dropped.page, seq.index);
            }
            table.iter().for_each(|e| self.stores[e.store as usize].wake(e.page));
            let store = &mut self.stores[self.active[group]];
            store.pool.promised += promises[group].0.open();
            store.change_stage_promise(&mut sequence.stage_promises[group], promises[group].1);
            sequence.promises[group] = promises[group].0;
        }
        if let Some(states) = &mut self.states {
            sequence.planes.retain(|entry| {
                let kept = entry.at as usize == n;
                if kept {
                    states.pool.wake(entry.plane);
                } else {
                    states.pool.drop_idle(entry.plane);
                }
                kept
            });
            sequence.plane_quota = plane_quota;
            states.pool.promised += sequence.plane_promise().open();
        }
        sequence.is_snapshot = false;
        sequence.exact = true;
        sequence.is_kept = false;
        sequence.hits += 1;
        sequence.tables = tables;
        sequence.tokens.truncate(n);
        sequence.committed = n;
        sequence.phase = Phase::Live;
        sequence.last_used = now;
        Ok(seq)
    }

    /// A new sequence of the first `n` tokens of `donor`, at any token and without a copy: it reads the donor's pages
    /// and goes on in its own; the recurrent state is shared too. Fails when these tokens are not written, when a window
    /// has released them, or when the donor has no recurrent state after them.
    pub fn fork(&mut self, donor: SeqId, n: usize) -> Result<SeqId, KvError> {
        let source = self.sequences.get(donor)?;
        let refuse = |reason| KvError::CannotShare { donor, asked: n, reason };
        if source.phase == Phase::Doomed {
            return Err(KvError::UnknownSequence(donor));
        }
        if n > source.committed {
            return Err(refuse("it has not written as many"));
        }
        if self.config.whole_texts {
            return Err(refuse("each of its tokens has seen all of them"));
        }
        if !self.windows_reach_back(source, n) {
            return Err(refuse("its sliding window has released tokens that they need"));
        }
        if self.feasible(source, n) != n {
            return Err(refuse("it keeps no recurrent state after them"));
        }
        let tables: Vec<Table> = (0..self.active.len()).map(|group| self.shared_table(source, group, n)).collect();
        for (group, table) in tables.iter().enumerate() {
            let store = &self.stores[self.active[group]];
            let asked = cost_of_use(store, table);
            if asked > store.headroom() {
                return Err(store.full(asked).into());
            }
            store.check_stage_room(store.staged(table))?;
        }
        let plane = source.planes.iter().find(|p| p.at as usize == n).copied();
        self.check_new_planes(usize::from(plane.is_some()))?;
        let tokens = source.tokens[..n].to_vec();
        for entry in tables.iter().flatten() {
            self.stores[entry.store as usize].share(entry.page, entry.len, donor.index);
        }
        self.touch(donor)?;
        self.sequences.get_mut(donor)?.hits += 1;
        let seq = self.create();
        let child = self.sequences.get_mut(seq)?;
        child.committed = n;
        child.tokens = tokens;
        for (group, table) in tables.iter().enumerate() {
            self.stores[self.active[group]].settle_stage(&mut child.stage_promises[group], table);
        }
        child.tables = tables;
        if let (Some(states), Some(plane)) = (&mut self.states, plane) {
            states.pool.share(plane.plane);
            child.planes.push_back(plane);
        }
        Ok(seq)
    }

    /// Says that others will begin with the whole of a sequence: it is not taken over while there is room to fork it.
    pub fn keep_whole(&mut self, seq: SeqId) -> Result<(), KvError> {
        self.sequences.get_mut(seq)?.is_kept = true;
        Ok(())
    }

    /// Marks a sequence as just used.
    pub(crate) fn touch(&mut self, seq: SeqId) -> Result<(), KvError> {
        let now = self.tick();
        self.sequences.get_mut(seq)?.last_used = now;
        Ok(())
    }

    /// Planes to be promised with room for `new_tokens`.
    fn plane_quota(&self, new_tokens: usize) -> usize {
        self.states.as_ref().filter(|_| new_tokens > 0).map_or(0, |s| s.quota)
    }

    /// Fails when so many more planes can't be held or promised.
    pub(crate) fn check_new_planes(&self, asked: usize) -> Result<(), KvError> {
        match &self.states {
            Some(states) if asked > states.headroom() => Err(states.full(asked).into()),
            _ => Ok(()),
        }
    }

    /// Promises a running sequence the pages for `new_tokens` more, and the planes that it works on; replaces what was
    /// promised before. What it has not taken when it is released or retained is given back.
    pub fn reserve(&mut self, seq: SeqId, new_tokens: usize) -> Result<(), KvError> {
        let sequence = self.live(seq)?;
        let mut promises = Vec::with_capacity(self.active.len());
        for (group, &store) in self.active.iter().enumerate() {
            let store = &self.stores[store];
            let table = &sequence.tables[group];
            let promise = price(store, table, seq, new_tokens);
            let asked = promise.open().saturating_sub(sequence.promises[group].open());
            if asked > store.headroom() {
                return Err(store.full(asked).into());
            }
            let stage = store.stage_price(table, new_pages(store, table, seq, new_tokens));
            store.check_stage_room(stage.open().saturating_sub(sequence.stage_promises[group].open()))?;
            promises.push((promise, stage));
        }
        let quota = self.plane_quota(new_tokens);
        let open = Promise { quota, ..sequence.plane_promise() }.open();
        self.check_new_planes(open.saturating_sub(sequence.plane_promise().open()))?;
        let sequence = self.sequences.get_mut(seq)?;
        for (group, (promise, stage)) in promises.into_iter().enumerate() {
            let store = &mut self.stores[self.active[group]];
            store.pool.promised = store.pool.promised - sequence.promises[group].open() + promise.open();
            sequence.promises[group] = promise;
            store.change_stage_promise(&mut sequence.stage_promises[group], stage);
        }
        self.change_planes(seq, |_, sequence| sequence.plane_quota = quota)?;
        Ok(())
    }

    /// Shortens a sequence to at most `n` tokens and returns how many were kept: the caller goes on from there. That is
    /// `n`, but 0 where a sliding window has released what the tokens after `n` need (the last `rollback_tokens` can
    /// always be taken back), and with recurrent state the nearest position before it of which there is a plane, in
    /// this sequence or in another one that begins alike.
    pub fn truncate(&mut self, seq: SeqId, n: usize) -> Result<usize, KvError> {
        let sequence = self.live(seq)?;
        if sequence.in_flight {
            return Err(KvError::InFlight(seq));
        }
        let n = n.min(sequence.committed);
        let own = self.feasible(sequence, n);
        let Some(found) = self.nearest_plane(seq, own, n)? else {
            self.cut(seq, own)?;
            return Ok(own);
        };
        let kept = found.at as usize;
        self.cut(seq, kept)?;
        self.change_planes(seq, |states, sequence| {
            states.pool.share(found.plane);
            sequence.planes.push_back(found);
        })?;
        Ok(kept)
    }

    /// Ends a sequence. When a step is writing it, it goes as the step ends.
    pub fn release(&mut self, seq: SeqId) -> Result<(), KvError> {
        let sequence = self.sequences.get_mut(seq)?;
        if sequence.in_flight {
            sequence.phase = Phase::Doomed;
            return Ok(());
        }
        if sequence.phase != Phase::Idle {
            self.put_to_sleep(seq)?;
        }
        self.forget(seq);
        Ok(())
    }

    /// Ends a sequence, and drops the snapshots that no other sequence begins with.
    pub fn erase(&mut self, seq: SeqId) -> Result<(), KvError> {
        let tokens = self.sequences.get(seq)?.tokens.clone();
        self.release(seq)?;
        let others = || self.sequences.iter().map(|(_, s)| s).filter(|s| !s.is_snapshot && s.phase != Phase::Doomed);
        let orphan = |s: &Sequence| {
            s.is_snapshot && tokens.starts_with(&s.tokens) && !others().any(|o| o.tokens.starts_with(&s.tokens))
        };
        let orphans: Vec<SeqId> = self.idle().filter(|(_, s)| orphan(s)).map(|(seq, _)| seq).collect();
        orphans.into_iter().for_each(|seq| self.forget(seq));
        Ok(())
    }

    /// Ends the use of a sequence but keeps it for prefix reuse until its pages are needed.
    pub fn retain(&mut self, seq: SeqId) -> Result<(), KvError> {
        let sequence = self.live(seq)?;
        if sequence.in_flight {
            return Err(KvError::InFlight(seq));
        }
        if sequence.committed == 0 {
            return self.release(seq);
        }
        let now = self.tick();
        self.put_to_sleep(seq)?.last_used = now;
        while self.idle_sequences() > self.config.recent_sequences {
            let oldest = self.idle().filter(|(_, s)| !s.is_snapshot).min_by_key(|(_, s)| s.last_used);
            let Some((oldest, _)) = oldest else { break };
            self.forget(oldest);
        }
        Ok(())
    }

    /// Takes an idle sequence into use again, as it is.
    pub fn resume(&mut self, seq: SeqId) -> Result<(), KvError> {
        self.take_over(seq, usize::MAX, 0).map(|_| ())
    }

    /// Drops the idle sequence or snapshot that was used least recently; `None` when there is neither.
    pub fn evict_lru(&mut self) -> Option<SeqId> {
        let (seq, _) = self.idle().min_by_key(|(_, s)| s.last_used)?;
        self.forget(seq);
        Some(seq)
    }

    /// Drops the least recently used of the idle sequences that hold a page of a store which no running one holds.
    pub(crate) fn evict_holder(&mut self, store: usize) -> Option<SeqId> {
        let counts = &self.stores[store].pool.counts;
        let holds = |e: &PageEntry| e.store as usize == store && counts[e.page as usize].live == 0;
        let seq = self.oldest_holder(holds)?;
        self.forget(seq);
        Some(seq)
    }

    /// Drops the least recently used of the idle sequences that hold a page of a stage which no running one holds.
    pub(crate) fn evict_staged(&mut self, store: usize) -> Option<SeqId> {
        let (counts, pages) = (&self.stores[store].pool.counts, &self.stores[store].pages);
        let holds = |e: &PageEntry| {
            let page = e.page as usize;
            e.store as usize == store && counts[page].live == 0 && pages[page].stage.is_some()
        };
        let seq = self.oldest_holder(holds)?;
        self.forget(seq);
        Some(seq)
    }

    /// The least recently used idle sequence with such an entry.
    fn oldest_holder(&self, holds: impl Fn(&PageEntry) -> bool) -> Option<SeqId> {
        let holders = self.idle().filter(|(_, s)| s.tables.iter().flatten().any(&holds));
        holders.min_by_key(|(_, s)| s.last_used).map(|(seq, _)| seq)
    }

    /// The longest prefix of `tokens` that some running or idle sequence has written and can share. To have a token
    /// left to evaluate, ask for all but the last one.
    pub fn longest_prefix(&self, tokens: &[u32]) -> Option<Prefix> {
        if self.config.whole_texts {
            return None;
        }
        let candidates = self.sequences.iter().filter(|(_, s)| s.phase != Phase::Doomed);
        prefix::longest(candidates, tokens, |sequence, n| self.feasible(sequence, n))
    }

    /// As [`Cache::longest_prefix`], of one sequence.
    pub fn prefix_of(&self, donor: SeqId, tokens: &[u32]) -> Option<Prefix> {
        let sequence = self.sequences.get(donor).ok().filter(|s| s.phase != Phase::Doomed)?;
        if self.config.whole_texts {
            return None;
        }
        prefix::longest(std::iter::once((donor, sequence)), tokens, |sequence, n| self.feasible(sequence, n))
    }

    /// The most leading ones of `tokens` that some running or idle sequence has written, whether or not it can share
    /// them.
    pub fn common_beginning(&self, tokens: &[u32]) -> usize {
        let written = self.sequences.iter().map(|(_, s)| &s.tokens[..s.committed]);
        written.map(|other| prefix::common_prefix(other, tokens)).max().unwrap_or(0)
    }

    /// Tokens of a sequence, those of a planned step included.
    pub fn tokens(&self, seq: SeqId) -> Result<&[u32], KvError> {
        Ok(&self.sequences.get(seq)?.tokens)
    }

    /// Tokens whose keys and values are written.
    pub fn committed(&self, seq: SeqId) -> Result<usize, KvError> {
        Ok(self.sequences.get(seq)?.committed)
    }

    /// A sequence's page table in one group, oldest first.
    pub fn page_table(&self, seq: SeqId, group: usize) -> Result<Vec<PageEntry>, KvError> {
        Ok(self.sequences.get(seq)?.tables[group].iter().copied().collect())
    }

    /// Sequences in use.
    pub fn live_sequences(&self) -> usize {
        self.sequences.iter().filter(|(_, s)| s.phase != Phase::Idle).count()
    }

    /// Idle sequences, snapshots not included.
    pub fn idle_sequences(&self) -> usize {
        self.idle().filter(|(_, s)| !s.is_snapshot).count()
    }

    pub(crate) fn idle(&self) -> impl Iterator<Item = (SeqId, &Sequence)> {
        self.sequences.iter().filter(|(_, s)| s.phase == Phase::Idle)
    }

    pub(crate) fn live(&self, seq: SeqId) -> Result<&Sequence, KvError> {
        let sequence = self.sequences.get(seq)?;
        match sequence.phase {
            Phase::Live => Ok(sequence),
            Phase::Idle => Err(KvError::Idle(seq)),
            Phase::Doomed => Err(KvError::UnknownSequence(seq)),
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// The most tokens, at most `n`, after which a sequence could go on: the last that have a plane, in a cache with
    /// state. A window that does not reach back far enough for them does not for fewer.
    pub(crate) fn feasible(&self, sequence: &Sequence, n: usize) -> usize {
        let n = match &self.states {
            None => n,
            Some(_) => sequence.planes.iter().rev().map(|p| p.at as usize).find(|&at| at <= n).unwrap_or(0),
        };
        if self.windows_reach_back(sequence, n) { n } else { 0 }
    }

    /// Whether a sequence holds what its windows need to go on after `n` tokens.
    pub(crate) fn windows_reach_back(&self, sequence: &Sequence, n: usize) -> bool {
        let mut tables = sequence.tables.iter().enumerate();
        n == 0 || tables.all(|(group, table)| self.reaches_back(group, first_held(table), n))
    }

    /// Whether a sequence that holds a group's positions from `first` on can go on after `n` tokens.
    pub(crate) fn reaches_back(&self, group: usize, first: u32, n: usize) -> bool {
        match self.stores[self.active[group]].window {
            // A window of 1 needs nothing before the query, but a table must hold a page to know where it ends.
            Some(window) => first == 0 || n + 1 >= first as usize + window.max(2),
            None => first == 0,
        }
    }

    /// The entries that a fork at `n` shares in one group.
    pub(crate) fn shared_table(&self, source: &Sequence, group: usize, n: usize) -> Table {
        let oldest = self.oldest_needed(group, n);
        let mut table = first_tokens(&source.tables[group], n);
        table.retain(|e| e.end() > oldest);
        table
    }

    /// First position that a sequence of `n` tokens must keep in a group, so that it can go on and be shortened by
    /// `rollback_tokens`.
    pub(crate) fn oldest_needed(&self, group: usize, n: usize) -> u32 {
        match self.stores[self.active[group]].window {
            None => 0,
            Some(window) => (n + 1).saturating_sub(window + self.config.rollback_tokens) as u32,
        }
    }

    /// Shortens a running sequence to `n` tokens, for which its tables reach back far enough.
    pub(crate) fn cut(&mut self, seq: SeqId, n: usize) -> Result<(), KvError> {
        let sequence = self.sequences.get_mut(seq)?;
        for group in 0..self.active.len() {
            let mut freed = 0;
            let table = &mut sequence.tables[group];
            while let Some(last) = table.back_mut() {
                if (last.start_pos as usize) < n {
                    last.len = last.len.min(n as u32 - last.start_pos);
                    break;
                }
                freed += usize::from(self.stores[last.store as usize].drop_live(last.page, seq.index));
                table.pop_back();
            }
            let store = &mut self.stores[self.active[group]];
            settle(store, &mut sequence.promises[group], table.len(), 0, freed);
            store.settle_stage(&mut sequence.stage_promises[group], table);
        }
        sequence.tokens.truncate(n);
        sequence.committed = sequence.committed.min(n);
        self.change_planes(seq, |states, sequence| {
            while let Some(last) = sequence.planes.back().filter(|p| p.at as usize > n) {
                states.pool.drop_live(last.plane);
                sequence.planes.pop_back();
            }
        })?;
        Ok(())
    }

    /// Makes a running sequence idle and gives back what it was promised.
    pub(crate) fn put_to_sleep(&mut self, seq: SeqId) -> Result<&mut Sequence, KvError> {
        self.change_planes(seq, |states, sequence| {
            sequence.plane_quota = 0;
            sequence.wishes.clear();
            // What it can be taken back to is of use to a running sequence only.
            while sequence.planes.len() > 1
                && let Some(earlier) = sequence.planes.pop_front()
            {
                states.pool.drop_live(earlier.plane);
            }
            sequence.planes.iter().for_each(|entry| states.pool.sleep(entry.plane));
        })?;
        let sequence = self.sequences.get_mut(seq)?;
        for entry in sequence.tables.iter().flatten() {
            self.stores[entry.store as usize].sleep(entry.page);
        }
        for (group, promise) in sequence.stage_promises.iter_mut().enumerate() {
            self.stores[self.active[group]].change_stage_promise(promise, Promise::default());
        }
        for (group, promise) in sequence.promises.iter_mut().enumerate() {
            self.stores[self.active[group]].pool.promised -= promise.open();
            *promise = Promise::default();
        }
        sequence.phase = Phase::Idle;
        Ok(sequence)
    }

    /// Removes an idle sequence.
    pub(crate) fn forget(&mut self, seq: SeqId) {
        if let Some(sequence) = self.sequences.remove(seq) {
            tracing::debug!(sequence = %seq, tokens = sequence.committed, "forgetting a sequence");
            for entry in sequence.tables.iter().flatten() {
                self.stores[entry.store as usize].drop_idle(entry.page, seq.index);
            }
            for entry in sequence.planes {
                if let Some(states) = &mut self.states {
                    states.pool.drop_idle(entry.plane);
                }
            }
        }
    }
}

/// The part of a table before position `n`.
fn first_tokens(table: &Table, n: usize) -> Table {
    let before = table.iter().take_while(|e| (e.start_pos as usize) < n);
    before.map(|e| PageEntry { len: e.len.min(n as u32 - e.start_pos), ..*e }).collect()
}

/// Pages of a store's headroom that it costs to use a table besides those who use its pages now.
fn cost_of_use(store: &Store, table: &Table) -> usize {
    match store.window {
        Some(_) => table.len(),
        None => table.iter().filter(|e| store.pool.counts[e.page as usize].live == 0).count(),
    }
}

/// What must be promised to `seq`, which holds `table`, for `new_tokens` more.
fn price(store: &Store, table: &Table, seq: SeqId, new_tokens: usize) -> Promise {
    let pages = new_pages(store, table, seq, new_tokens);
    if store.window.is_none() {
        return Promise { quota: pages, drawn: 0 };
    }
    // Pages that forks have cut short take their place for as long as the window holds them.
    let cut = table.iter().filter(|e| (e.len as usize) < PAGE_TOKENS).count();
    let most = store.slot_pages.saturating_add(cut);
    let quota = pages.saturating_add(table.len()).min(most).max(table.len());
    Promise { quota, drawn: table.len() }
}

/// Pages that `n` more tokens take after what a table ends with.
pub(crate) fn new_pages(store: &Store, table: &Table, seq: SeqId, n: usize) -> usize {
    let spare = match table.back() {
        Some(last) if store.may_append(last.page, last.len, seq.index) => PAGE_TOKENS - last.len as usize,
        _ => 0,
    };
    n.saturating_sub(spare).div_ceil(PAGE_TOKENS)
}

/// Brings a sequence's promise up to date after it took and freed pages and holds `held` now.
pub(crate) fn settle(store: &mut Store, promise: &mut Promise, held: usize, taken: usize, freed: usize) {
    let before = promise.open();
    promise.drawn = match store.window {
        Some(_) => held,
        // What a sequence frees itself it may take again.
        None => (promise.drawn + taken).min(promise.quota).saturating_sub(freed),
    };
    store.pool.promised = store.pool.promised - before + promise.open();
}
