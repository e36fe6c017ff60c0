//! Pools: prefixes that are computed once, stay, and that sessions begin with.
//!
//! Here are what others say to the engine about them, the tree of pools with its rules, and when a pool takes another
//! session ([`pacing`]). The engine gives each pool its sequence in the cache: a running one to which nothing is
//! promised, so that nothing evicts it and everybody can fork it.

pub(crate) mod pacing;
pub(crate) mod rate;
pub(crate) mod tree;

use std::time::Duration;

use tokio::sync::oneshot;

use crate::api::EngineError;

/// Names a pool for as long as the server lives; an id is never used again.
pub type PoolId = u32;

/// What a request to make a pool of its prompt says besides the prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MakePool {
    /// The pool that it extends or branches off, and after how many of that pool's tokens (all of them without a
    /// number).
    pub parent: Option<(PoolId, Option<usize>)>,
    /// Stays with nothing attached to it, and after a release.
    pub pinned: bool,
    /// Goes by itself once what had attached to it has gone.
    pub ephemeral: bool,
}

/// Makes a pool of what a sequence has computed already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capture {
    /// Whose sequence.
    pub from: Origin,
    /// Its first so many tokens; all of them without a number.
    pub len: Option<usize>,
    /// As in [`MakePool`].
    pub pinned: bool,
    /// As in [`MakePool`].
    pub ephemeral: bool,
}

/// A sequence by who runs it or ran it last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The session that is bound to a slot.
    Session(String),
    /// A slot.
    Slot(u32),
}

/// What happens to a new session that would bring a pool's sessions below their rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnSaturation {
    /// 429.
    #[default]
    Reject,
    /// It is let in and its answer marked.
    Warn,
}

/// Whether a pool's admission is told or enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolMode {
    /// Orchestrators ask for the capacity and heed it or not.
    #[default]
    Advisory,
    /// New sessions are held, marked or refused.
    Enforced,
}

/// How a pool admits sessions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolAdmission {
    /// Whether it is enforced.
    pub mode: PoolMode,
    /// Tokens a second that each session should have; 0 for no bound.
    pub target_tps_per_session: f32,
    /// What happens beyond that.
    pub on_saturation: OnSaturation,
    /// So many sessions are let in whatever the rate.
    pub guarantee_min_sessions: u32,
    /// A pool is settled again after a new session's so many tokens,
    pub settle_tokens: u32,
    /// or after so long.
    pub settle_max: Duration,
}

impl Default for PoolAdmission {
    fn default() -> Self {
        PoolAdmission {
            mode: PoolMode::Advisory,
            target_tps_per_session: 0.0,
            on_saturation: OnSaturation::Reject,
            guarantee_min_sessions: 1,
            settle_tokens: 48,
            settle_max: Duration::from_millis(5000),
        }
    }
}

/// Where a pool's sessions are sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Where the engine thinks best.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
}

/// A change of one pool.
#[derive(Clone, Debug, PartialEq)]
pub enum PoolChange {
    /// It stays with nothing attached to it.
    Pin,
    /// It does not any more.
    Unpin,
    /// It goes once nothing refers to it.
    Release,
    /// Sampling of its sessions.
    Place(Placement),
    /// Admission of sessions.
    Admission(PoolAdmission),
}

/// A pool, as its routes show it.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolInfo {
    /// Its id.
    pub id: PoolId,
    /// The pool that it extends.
    pub parent: Option<PoolId>,
    /// Tokens that it has of its parent.
    pub branch_pos: usize,
    /// Tokens of the whole prefix.
    pub prefix_len: usize,
    /// FNV-1a of the tokens' little-endian bytes.
    pub prefix_hash: u64,
    /// Stays with nothing attached.
    pub pinned: bool,
    /// Goes once nothing refers to it.
    pub released: bool,
    /// Goes by itself when idle.
    pub ephemeral: bool,
    /// Pools that extend it.
    pub children: Vec<PoolId>,
    /// Pinned, and nothing refers to it.
    pub orphaned_pin: bool,
    /// Sessions bound to it, running or between turns.
    pub n_sessions: u32,
    /// Requests that began with it.
    pub hits: u64,
    /// Admission.
    pub admission: PoolAdmission,
    /// Sampling.
    pub placement: Placement,
}

/// All pools.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolList {
    /// In the order of their ids.
    pub pools: Vec<PoolInfo>,
    /// Most pools at a time.
    pub max: u32,
    /// Longest chain from a root.
    pub depth: u32,
}

/// Whether a pool can take another session, and why not.
#[derive(Clone, Debug, PartialEq)]
pub struct Capacity {
    /// Whether one may come now.
    pub can_admit: bool,
    /// Why not; empty when it may.
    pub reason: String,
    /// How many may come before something is short.
    pub headroom_sessions: u32,
    /// Mean rate of the sessions that generate now and have a rate.
    pub mean_active_tps: f32,
    /// How near the fullest store, or the fullest of its sessions, is to its end: 0 … 1.
    pub compaction_pressure: f32,
    /// Token slots of the base store that are free or can be made so.
    pub free_cells: u64,
    /// A session has just come and its effect is not known yet.
    pub settling: bool,
    /// Longest time until it is.
    pub settle_remaining: Duration,
    /// Sessions that generate and have no rate yet.
    pub n_warming: u32,
    /// Sessions bound to it.
    pub n_pool_sessions: u32,
    /// The next session would be let in whatever the rate.
    pub guaranteed: bool,
    /// What the next session brings the mean to.
    pub projection: Projection,
    /// Mean loss of rate that a new session has brought.
    pub drop_per_admit: Option<f32>,
}

/// The mean rate with one session more.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Projection {
    /// By the share of n in n + 1.
    pub by_model: f32,
    /// By what earlier sessions have cost, if one has come.
    pub by_measure: Option<f32>,
    /// All sessions are between turns: it goes by what was measured last.
    pub is_idle_estimate: bool,
}

impl Projection {
    /// The better founded of the two.
    pub fn tps(&self) -> f32 {
        self.by_measure.unwrap_or(self.by_model)
    }
}

/// The rate of one session.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionRate {
    /// The session; none for a request without.
    pub session_id: Option<String>,
    /// Its slot.
    pub slot: u32,
    /// Its pool.
    pub pool: Option<PoolId>,
    /// Tokens a second while it generates, a moving average; 0 until it is known.
    pub tps: f32,
    /// Whether it generates now.
    pub active: bool,
    /// Tokens that it holds.
    pub ctx_used: u32,
    /// Tokens that it may hold.
    pub ctx_total: u32,
}

/// The rates of all sessions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// Sum of those that generate.
    pub aggregate: f32,
    /// Of those, how many have no rate yet.
    pub n_warming: u32,
    /// Each that is bound to a slot.
    pub sessions: Vec<SessionRate>,
}

/// Where an answer goes.
pub type Reply<T> = oneshot::Sender<Result<T, EngineError>>;

/// What the engine is told about pools. One of new tokens is a request like others ([`MakePool`]).
pub enum PoolCommand {
    /// Make one of what is there.
    Capture(Capture, Reply<PoolInfo>),
    /// Show all.
    List(oneshot::Sender<PoolList>),
    /// Show one.
    Get(PoolId, Reply<PoolInfo>),
    /// Change one. Of one that goes with the change, what it was is answered.
    Change(PoolId, PoolChange, Reply<PoolInfo>),
    /// Ask one for room, for a session that will use so many tokens.
    Capacity(PoolId, Option<u64>, Reply<Capacity>),
    /// Show the rates of all sessions.
    Rates(oneshot::Sender<Rates>),
}
