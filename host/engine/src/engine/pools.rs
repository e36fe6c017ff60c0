//! Pools in the engine: made of prompts or of what runs, kept while something refers to them, asked for room.

use std::time::{Duration, Instant};

use opencoti_kv::Prefix;
use opencoti_plugin_api::PAGE_TOKENS;

use super::Core;
use super::choice::{Choice, Phase};
use super::slots::Slot;
use crate::admission;
use crate::api::{EngineError, Event, GenerateRequest, RequestId};
use crate::pools::pacing::{Load, Pace};
use crate::pools::tree::Pool;
use crate::pools::{
    Capacity, Capture, MakePool, OnSaturation, Origin, PoolChange, PoolCommand, PoolId, PoolInfo, PoolList, PoolMode,
    Rates, SessionRate,
};
use crate::scheduler::common_prefix;

/// Why a session can't come although its rate would do.
const NO_CONTEXT: &str = "context headroom exhausted";
const NO_SLOT: &str = "no free slot";
const SETTLING: &str = "settling";

impl Core {
    pub(crate) fn obey_about_pools(&mut self, command: PoolCommand) {
        self.settle_pools();
        self.sweep_pools();
        match command {
            PoolCommand::Capture(capture, reply) => drop(reply.send(self.capture(&capture))),
            PoolCommand::List(reply) => drop(reply.send(self.pool_list())),
            PoolCommand::Get(id, reply) => drop(reply.send(self.pool_info(id))),
            PoolCommand::Change(id, change, reply) => drop(reply.send(self.change_pool(id, change))),
            PoolCommand::Capacity(id, expected, reply) => drop(reply.send(self.capacity(id, expected))),
            PoolCommand::Rates(reply) => drop(reply.send(self.rates())),
        }
    }

    /// Checks what a request says about pools.
    pub(crate) fn check_pools(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        let invalid =
            |field: &str, message: String| Err(EngineError::Invalid { field: Some(field.to_owned()), message });
        if let Some(id) = request.pool {
            let pool = self.pool(id)?;
            if pool.released && !self.is_known(request) {
                return Err(EngineError::NotFound(format!("pool {id} was released and takes no new session")));
            }
        }
        if let Some(slot) = request.shared_slot.map(|s| s.slot).filter(|&slot| slot as usize >= self.slots.len()) {
            let n_slots = self.slots.len();
            return invalid(
                "shared_pool_slot",
                format!("there is no slot {slot} for shared_pool_slot; there are {n_slots}, counted from 0"),
            );
        }
        match &request.make_pool {
            Some(spec) => {
                self.check_room_for_pool()?;
                self.check_branch(spec, &request.prompt)
            }
            None => Ok(()),
        }
    }

    /// A child's prefix must begin with what it shares of its parent.
    fn check_branch(&self, spec: &MakePool, prompt: &[u32]) -> Result<(), EngineError> {
        let Some((id, branch_pos)) = spec.parent else { return Ok(()) };
        let parent = self.pool(id)?;
        let invalid =
            |field: &str, message: String| Err(EngineError::Invalid { field: Some(field.to_owned()), message });
        let at = branch_pos.unwrap_or(parent.prefix_len);
        if at > parent.prefix_len {
            let len = parent.prefix_len;
            return invalid("branch_pos", format!("branch_pos is {at}, but the prefix of pool {id} has {len} tokens"));
        }
        if prompt.len() < at {
            return invalid(
                "tokens",
                format!(
                    "child prefix shorter than branch_pos: it has {} tokens, branch_pos is {at}; give the child's whole \
                     prefix, the parent's part included",
                    prompt.len()
                ),
            );
        }
        let common = common_prefix(self.cache.tokens(parent.seq).map_err(internal)?, prompt);
        if common < at {
            return invalid(
                "tokens",
                format!("the child's prefix differs from that of pool {id} at token {common}, before branch_pos {at}"),
            );
        }
        Ok(())
    }

    fn check_room_for_pool(&self) -> Result<(), EngineError> {
        let making = self.tasks().filter(|task| task.make_pool.is_some()).count();
        let (max, used) = (self.pools.max, self.pools.len() + making);
        if used < max {
            return Ok(());
        }
        let message = format!("all {max} pools are in use; release one or start the server with more");
        Err(match self.pools.iter().any(|(_, pool)| pool.ephemeral) {
            true => EngineError::Rejected { retry_after: 60, reason: "pools", message },
            false => EngineError::Conflict(message),
        })
    }

    /// The requests that wait or run; one with several choices more than once.
    fn tasks(&self) -> impl Iterator<Item = &GenerateRequest> {
        let running = self.slots.iter().filter_map(|s| s.choice.as_ref()).map(|c| &*c.task);
        self.queue.iter().map(|w| &w.task).chain(running).map(|task| &task.request)
    }

    fn pool(&self, id: PoolId) -> Result<&Pool, EngineError> {
        self.pools.get(id).ok_or_else(|| EngineError::NotFound(format!("there is no pool {id}")))
    }

    /// Whether a request goes on with a session that is bound to a slot.
    pub(crate) fn is_known(&self, request: &GenerateRequest) -> bool {
        let session = request.session_id.as_deref();
        session.is_some() && self.slots.iter().any(|s| s.session.as_deref() == session)
    }

    /// The prefix that a request names: its pool's, or that of a slot's sequence.
    pub(crate) fn named_prefix(&self, request: &GenerateRequest, wanted: &[u32]) -> Option<Prefix> {
        if let Some(pool) = request.pool.and_then(|id| self.pools.get(id)) {
            return self.cache.prefix_of(pool.seq, wanted);
        }
        let shared = request.shared_slot?;
        let slot = self.slots.get(shared.slot as usize)?;
        let seq = slot.choice.as_ref().map(|c| c.seq).or(slot.last)?;
        let found = self.cache.prefix_of(seq, wanted.get(..shared.tokens as usize)?);
        let found = found.filter(|p| p.tokens == shared.tokens as usize);
        if found.is_none() {
            tracing::warn!(
                slot = shared.slot,
                tokens = shared.tokens,
                "the slot's sequence can't share so many tokens with the prompt; they are computed again"
            );
        }
        found
    }

    /// A request that made a pool is done: its sequence becomes the pool's.
    pub(crate) fn found_pool(&mut self, choice: &Choice) {
        let Some(spec) = &choice.task.request.make_pool else { return };
        match self.keep_pool(choice.seq, spec) {
            Ok(info) => choice.task.send(Event::Pool(Box::new(info))),
            Err(error) => {
                let _ = self.cache.retain(choice.seq);
                choice.task.send(Event::Failed(error));
            }
        }
    }

    fn keep_pool(&mut self, seq: opencoti_kv::SeqId, spec: &MakePool) -> Result<PoolInfo, EngineError> {
        self.check_room_for_pool()?;
        let mut spec = spec.clone();
        if let Some((id, at)) = &mut spec.parent {
            *at = at.or(self.pools.get(*id).map(|parent| parent.prefix_len));
        }
        // Nothing is written to it any more.
        self.cache.reserve(seq, 0).map_err(internal)?;
        let id = self.pools.insert(Pool::new(seq, self.cache.tokens(seq).map_err(internal)?, &spec));
        self.pool_info(id)
    }

    fn capture(&mut self, capture: &Capture) -> Result<PoolInfo, EngineError> {
        self.check_open()?;
        self.check_room_for_pool()?;
        let slot = self.origin(&capture.from)?;
        let seq = slot.choice.as_ref().map(|c| c.seq).or(slot.last);
        let held = seq.and_then(|seq| Some((seq, self.cache.committed(seq).ok()?))).filter(|(_, n)| *n > 0);
        let (seq, n) = held.ok_or_else(|| EngineError::NotFound("nothing is cached for that sequence".to_owned()))?;
        let len = capture.len.unwrap_or(n);
        if len == 0 || len > n {
            return Err(EngineError::Invalid {
                field: Some("expect_len".to_owned()),
                message: format!("expect_len is {len}, but the sequence has {n} tokens"),
            });
        }
        let pool = self.cache.fork(seq, len).map_err(|error| match error {
            opencoti_kv::KvError::CannotShare { .. } => EngineError::Conflict(error.to_string()),
            error => self.no_room(error),
        })?;
        let spec = MakePool { parent: None, pinned: capture.pinned, ephemeral: capture.ephemeral };
        self.keep_pool(pool, &spec)
    }

    fn origin(&self, from: &Origin) -> Result<&Slot, EngineError> {
        let found = match from {
            Origin::Slot(slot) => self.slots.get(*slot as usize),
            Origin::Session(id) => self.slots.iter().find(|s| s.session.as_deref() == Some(id)),
        };
        found.ok_or_else(|| {
            EngineError::NotFound(match from {
                Origin::Slot(slot) => {
                    format!("there is no slot {slot}; there are {}, counted from 0", self.slots.len())
                }
                Origin::Session(id) => format!("no slot has session `{id}`; it never ran or others have run since"),
            })
        })
    }

    fn pool_list(&self) -> PoolList {
        let pools = self.pools.iter().filter_map(|(id, _)| self.pool_info(id).ok()).collect();
        PoolList { pools, max: self.pools.max as u32, depth: self.pools.depth() }
    }

    fn pool_info(&self, id: PoolId) -> Result<PoolInfo, EngineError> {
        let pool = self.pool(id)?;
        let children = self.pools.children(id);
        let n_sessions = self.bound(id).count() as u32;
        Ok(PoolInfo {
            id,
            parent: pool.parent,
            branch_pos: pool.branch_pos,
            prefix_len: pool.prefix_len,
            prefix_hash: pool.prefix_hash,
            pinned: pool.pinned,
            released: pool.released,
            ephemeral: pool.ephemeral,
            orphaned_pin: pool.pinned && children.is_empty() && n_sessions == 0,
            children,
            n_sessions,
            hits: pool.hits,
            admission: pool.admission,
            placement: pool.placement,
        })
    }

    fn change_pool(&mut self, id: PoolId, change: PoolChange) -> Result<PoolInfo, EngineError> {
        self.pool(id)?;
        if let Some(pool) = self.pools.get_mut(id) {
            match change {
                PoolChange::Pin => pool.pinned = true,
                PoolChange::Unpin => pool.pinned = false,
                PoolChange::Release => pool.released = true,
                PoolChange::Place(placement) => pool.placement = placement,
                PoolChange::Admission(admission) => pool.admission = admission,
            }
        }
        let info = self.pool_info(id);
        self.sweep_pools();
        info
    }

    /// Drops the pools that nothing needs any more.
    pub(crate) fn sweep_pools(&mut self) {
        let now = Instant::now();
        while let Some(id) = self.pools.done(now, |id| self.tasks().any(|task| refers_to(task, id))) {
            let Some(pool) = self.pools.remove(id) else { return };
            tracing::debug!(pool = id, "a pool goes");
            if let Err(error) = self.cache.release(pool.seq) {
                tracing::error!(%error, pool = id, "the sequence of a pool could not be dropped");
            }
            for slot in &mut self.slots {
                slot.pool = slot.pool.filter(|of| *of != id);
            }
        }
    }

    /// Drops all pools: the engine ends.
    pub(crate) fn drop_pools(&mut self) {
        let sequences: Vec<_> = self.pools.iter().map(|(_, pool)| pool.seq).collect();
        self.pools = crate::pools::tree::Pools::new(self.pools.max);
        for seq in sequences {
            let _ = self.cache.release(seq);
        }
    }

    /// The slots of a pool's sessions, running or between turns.
    fn bound(&self, id: PoolId) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(move |s| s.pool == Some(id) && (s.choice.is_some() || s.session.is_some()))
    }

    fn load(&self, id: PoolId) -> Load {
        let mut load = Load::default();
        for slot in self.bound(id) {
            load.sessions += 1;
            let generates = slot.choice.as_ref().is_some_and(|c| matches!(c.phase, Phase::Decode { .. }));
            match slot.rate.tps() {
                _ if slot.choice.is_none() => {}
                tps if tps > 0.0 && generates => {
                    load.rated += 1;
                    load.tps += tps;
                }
                _ => load.warming += 1,
            }
        }
        load
    }

    /// Whether a request may attach to its pool now: `None` for yes, a pool's name when its answer is to be marked.
    pub(crate) fn pace(&self, request: &GenerateRequest) -> Result<Option<String>, Paced> {
        let Some((id, pool)) = request.pool.and_then(|id| Some((id, self.pools.get(id)?))) else { return Ok(None) };
        let free = pool.admission.mode == PoolMode::Advisory || request.overcommit || self.is_known(request);
        if free {
            return Ok(None);
        }
        match (pool.pacing.judge(&pool.admission, &self.load(id), Instant::now()), pool.admission.on_saturation) {
            (Pace::Free, _) => Ok(None),
            (Pace::Hold, _) => Err(Paced::Held),
            (Pace::Saturated(_), OnSaturation::Warn) => Ok(Some(format!("pool-{id}"))),
            (Pace::Saturated(tps), OnSaturation::Reject) => Err(Paced::Refused(EngineError::Rejected {
                retry_after: admission::retry_after(self.seconds_to_next_release()),
                reason: "pool",
                message: format!(
                    "pool {id} is saturated: another session would bring its sessions to {tps:.1} tokens/s, below the \
                     target of {:.1}; try again later",
                    pool.admission.target_tps_per_session
                ),
            })),
        }
    }

    /// Takes note of a request that attaches to its pool, before it has its slot. How many more may come, where that is
    /// enforced.
    pub(crate) fn attached(&mut self, request: &GenerateRequest, task: RequestId) -> Option<u32> {
        let id = request.pool?;
        let is_new = !self.is_known(request);
        let load = self.load(id);
        let pool = self.pools.get_mut(id)?;
        pool.hits += 1;
        pool.left = None;
        if is_new {
            pool.pacing.admitted(task, &load, Instant::now());
        }
        let enforced = pool.admission.mode == PoolMode::Enforced;
        let capacity = self.capacity(id, None).ok().filter(|_| enforced)?;
        Some(capacity.headroom_sessions.saturating_sub(u32::from(is_new)))
    }

    /// Takes note of a request that has left its slot.
    pub(crate) fn detached(&mut self, slot: usize) {
        self.slots[slot].rate.pause();
        if let Some(pool) = self.slots[slot].pool.and_then(|id| self.pools.get_mut(id)) {
            pool.left = Some(Instant::now());
        }
        if self.slots[slot].session.is_none() {
            self.slots[slot].pool = None;
        }
    }

    /// Takes note of a token that was generated in a slot.
    pub(crate) fn observe_token(&mut self, slot: usize) {
        let Some(task) = self.slots[slot].choice.as_ref().map(|c| c.task.id) else { return };
        self.slots[slot].rate.token(Instant::now());
        if let Some(pool) = self.slots[slot].pool.and_then(|id| self.pools.get_mut(id)) {
            pool.pacing.token(task);
        }
    }

    /// Ends the settle windows that are over.
    pub(crate) fn settle_pools(&mut self) {
        let now = Instant::now();
        let ids: Vec<PoolId> = self.pools.iter().map(|(id, _)| id).collect();
        for id in ids {
            let load = self.load(id);
            let running: Vec<RequestId> = self.bound(id).filter_map(|s| Some(s.choice.as_ref()?.task.id)).collect();
            if let Some(pool) = self.pools.get_mut(id) {
                let settings = pool.admission;
                pool.pacing.settle(&settings, &load, now, |task| running.contains(&task));
            }
        }
    }

    fn capacity(&self, id: PoolId, expected: Option<u64>) -> Result<Capacity, EngineError> {
        let pool = self.pool(id)?;
        let (load, now) = (self.load(id), Instant::now());
        let stores = admission::stores(&self.cache);
        // Of every store, how many sessions of this size it holds.
        let size = expected.unwrap_or_else(|| self.mean_private(id)).max(1);
        let room = |s: &opencoti_plugin_api::admission::Store| {
            (s.free + s.reclaimable) / if s.window > 0 { size.min(s.window) } else { size }
        };
        let by_context = stores.iter().map(room).min().unwrap_or(0);
        // Slots that are not open yet may be.
        let free_slots = self.slots.iter().filter(|s| s.choice.is_none()).count() as u64;
        let settings = &pool.admission;
        let remaining = pool.pacing.remaining(settings, now);
        let projection = pool.pacing.project(&load, now);
        let guaranteed = load.sessions < settings.guarantee_min_sessions;
        let reason = match pool.pacing.judge(settings, &load, now) {
            _ if by_context == 0 => NO_CONTEXT.to_owned(),
            _ if free_slots == 0 => NO_SLOT.to_owned(),
            Pace::Free => String::new(),
            Pace::Hold => SETTLING.to_owned(),
            Pace::Saturated(tps) => format!(
                "another session would bring the mean to {tps:.1} tokens/s, below the target of {:.1}",
                settings.target_tps_per_session
            ),
        };
        let by_rate = match load.mean() {
            Some(mean) if settings.target_tps_per_session > 0.0 => {
                let fit = load.rated as f32 * (mean / settings.target_tps_per_session);
                (fit as u64).saturating_sub(load.rated.into()).max(u64::from(guaranteed))
            }
            _ => u64::MAX,
        };
        Ok(Capacity {
            can_admit: reason.is_empty(),
            reason,
            headroom_sessions: u32::try_from(by_context.min(free_slots).min(by_rate)).unwrap_or(u32::MAX),
            mean_active_tps: load.mean().unwrap_or(0.0),
            compaction_pressure: self.pressure(id, &stores),
            free_cells: stores.first().map_or(0, |s| s.free + s.reclaimable),
            settling: remaining.is_some(),
            settle_remaining: remaining.unwrap_or(Duration::ZERO),
            n_warming: load.warming,
            n_pool_sessions: load.sessions,
            guaranteed,
            projection: projection.unwrap_or_default(),
            drop_per_admit: pool.pacing.drop_per_admit(),
        })
    }

    /// Tokens that a pool's sessions have beyond its prefix, on the mean; a page before there are any.
    fn mean_private(&self, id: PoolId) -> u64 {
        let prefix = self.pools.get(id).map_or(0, |p| p.prefix_len);
        let own: Vec<u64> = self.bound(id).map(|s| self.held(s).saturating_sub(prefix) as u64).collect();
        let mean = own.iter().sum::<u64>().checked_div(own.len() as u64).unwrap_or(0);
        mean.max(PAGE_TOKENS as u64)
    }

    /// Tokens of a slot's sequence.
    fn held(&self, slot: &Slot) -> usize {
        let seq = slot.choice.as_ref().map(|c| c.seq).or(slot.last);
        seq.and_then(|seq| self.cache.committed(seq).ok()).unwrap_or(0)
    }

    fn pressure(&self, id: PoolId, stores: &[opencoti_plugin_api::admission::Store]) -> f32 {
        let used =
            |s: &opencoti_plugin_api::admission::Store| 1.0 - (s.free + s.reclaimable) as f32 / s.total.max(1) as f32;
        let longest = self.bound(id).map(|s| self.held(s) as f32 / self.config.n_ctx as f32);
        stores.iter().map(used).chain(longest).fold(0.0, f32::max).clamp(0.0, 1.0)
    }

    fn rates(&self) -> Rates {
        let mut rates = Rates::default();
        for (i, slot) in self.slots.iter().enumerate() {
            let active = slot.choice.as_ref().is_some_and(|c| matches!(c.phase, Phase::Decode { .. }));
            if slot.choice.is_none() && slot.session.is_none() {
                continue;
            }
            let tps = slot.rate.tps();
            if active {
                rates.aggregate += tps;
                rates.n_warming += u32::from(tps == 0.0);
            }
            rates.sessions.push(SessionRate {
                session_id: slot.session.clone(),
                slot: i as u32,
                pool: slot.pool,
                tps,
                active,
                ctx_used: self.held(slot) as u32,
                ctx_total: self.config.n_ctx as u32,
            });
        }
        rates
    }

    /// Tokens of a slot's sequence that it has in common with its pool.
    pub(crate) fn n_pool_shared(&self, slot: &Slot) -> usize {
        let seq = slot.choice.as_ref().map(|c| c.seq).or(slot.last);
        let tokens = |seq| self.cache.tokens(seq).unwrap_or_default();
        let pool = slot.pool.and_then(|id| self.pools.get(id)).map(|p| p.seq);
        seq.zip(pool).map_or(0, |(seq, pool)| common_prefix(tokens(seq), tokens(pool)))
    }
}

/// Why a request does not attach to its pool now.
pub(crate) enum Paced {
    /// It waits until another session has settled.
    Held,
    /// It is refused.
    Refused(EngineError),
}

/// Whether a request begins with a pool or makes a child of it.
fn refers_to(request: &GenerateRequest, id: PoolId) -> bool {
    let parent = request.make_pool.as_ref().and_then(|spec| spec.parent);
    request.pool == Some(id) || parent.is_some_and(|(parent, _)| parent == id)
}

fn internal(error: impl std::fmt::Display) -> EngineError {
    EngineError::Internal(error.to_string())
}
