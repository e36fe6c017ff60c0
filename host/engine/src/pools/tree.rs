//! The tree of pools: who extends whom, and which may go.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use opencoti_kv::SeqId;

use super::pacing::Pacing;
use super::{MakePool, Placement, PoolAdmission, PoolId};

/// An ephemeral pool goes when nothing has been attached to it for so long.
const EPHEMERAL_LIVES: Duration = Duration::from_secs(60);

/// A pool.
pub(crate) struct Pool {
    /// Its prefix in the cache.
    pub(crate) seq: SeqId,
    pub(crate) prefix_len: usize,
    pub(crate) prefix_hash: u64,
    pub(crate) parent: Option<PoolId>,
    /// Tokens that it has of its parent; 0 for a root.
    pub(crate) branch_pos: usize,
    pub(crate) pinned: bool,
    pub(crate) released: bool,
    pub(crate) ephemeral: bool,
    /// When a request that was attached ended last; `None` before the first.
    pub(crate) left: Option<Instant>,
    pub(crate) hits: u64,
    pub(crate) admission: PoolAdmission,
    pub(crate) placement: Placement,
    pub(crate) pacing: Pacing,
}

impl Pool {
    /// A pool of a sequence of these tokens.
    pub(crate) fn new(seq: SeqId, tokens: &[u32], spec: &MakePool) -> Self {
        Pool {
            seq,
            prefix_len: tokens.len(),
            prefix_hash: fnv1a(tokens),
            parent: spec.parent.map(|(id, _)| id),
            branch_pos: spec.parent.and_then(|(_, at)| at).unwrap_or(0),
            pinned: spec.pinned,
            released: false,
            ephemeral: spec.ephemeral,
            left: None,
            hits: 0,
            admission: PoolAdmission::default(),
            placement: Placement::default(),
            pacing: Pacing::default(),
        }
    }

    /// Whether it may go, when nothing is attached to it and nothing extends it.
    fn is_done(&self, now: Instant) -> bool {
        let forgotten = || self.left.is_some_and(|at| now.saturating_duration_since(at) >= EPHEMERAL_LIVES);
        !self.pinned && (self.released || (self.ephemeral && forgotten()))
    }
}

/// All pools.
pub(crate) struct Pools {
    pub(crate) max: usize,
    next: PoolId,
    pools: BTreeMap<PoolId, Pool>,
}

impl Pools {
    /// At most `max` at a time.
    pub(crate) fn new(max: usize) -> Self {
        Pools { max, next: 0, pools: BTreeMap::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.pools.len()
    }

    pub(crate) fn get(&self, id: PoolId) -> Option<&Pool> {
        self.pools.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: PoolId) -> Option<&mut Pool> {
        self.pools.get_mut(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (PoolId, &Pool)> {
        self.pools.iter().map(|(&id, pool)| (id, pool))
    }

    pub(crate) fn insert(&mut self, pool: Pool) -> PoolId {
        let id = self.next;
        self.next += 1;
        self.pools.insert(id, pool);
        id
    }

    pub(crate) fn children(&self, id: PoolId) -> Vec<PoolId> {
        self.iter().filter(|(_, pool)| pool.parent == Some(id)).map(|(child, _)| child).collect()
    }

    /// Pools of the longest chain from a root.
    pub(crate) fn depth(&self) -> u32 {
        let mut depths: BTreeMap<PoolId, u32> = BTreeMap::new();
        // A parent is older than its children.
        for (id, pool) in self.iter() {
            let above = pool.parent.and_then(|parent| depths.get(&parent)).copied().unwrap_or(0);
            depths.insert(id, above + 1);
        }
        depths.into_values().max().unwrap_or(0)
    }

    pub(crate) fn remove(&mut self, id: PoolId) -> Option<Pool> {
        self.pools.remove(&id)
    }

    /// A pool that may go: released, or ephemeral and idle; not pinned, no parent, and `attached` does not hold of it. Its
    /// parent may be the next.
    pub(crate) fn done(&self, now: Instant, attached: impl Fn(PoolId) -> bool) -> Option<PoolId> {
        let done = |id: PoolId, pool: &Pool| pool.is_done(now) && self.children(id).is_empty() && !attached(id);
        self.iter().find(|(id, pool)| done(*id, pool)).map(|(id, _)| id)
    }
}

/// FNV-1a with 64 bits over the tokens' little-endian bytes (Fowler, Noll and Vo).
fn fnv1a(tokens: &[u32]) -> u64 {
    let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
