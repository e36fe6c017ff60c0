//! `/polykv`: pools of prefixes that sessions share, and the rates of sessions.
//!
//! Every route answers 404, as if it were not there, when the server has no pools.

pub(crate) mod capacity;
pub(crate) mod change;
pub(crate) mod make;
pub(crate) mod tps;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use opencoti_engine::api::EngineHandle;
use opencoti_engine::pools::{OnSaturation, Placement, PoolAdmission, PoolId, PoolInfo, PoolMode};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::state::{App, Ready};

/// The engine of a server that has pools.
pub(crate) struct Pooling(pub(crate) EngineHandle);

impl FromRequestParts<App> for Pooling {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let ready = Ready::from_request_parts(parts, app).await?;
        match ready.engine.info().max_pools {
            0 => Err(ApiError::no_route()),
            _ => Ok(Pooling(ready.engine)),
        }
    }
}

/// The pool that a path names.
pub(crate) struct Named(pub(crate) PoolId);

impl FromRequestParts<App> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let id: Result<Path<String>, PathRejection> = Path::from_request_parts(parts, app).await;
        let Path(id) = id?;
        let id = id.parse().map_err(|_| ApiError::not_found(format!("{id:?} is no pool; pools have numbers")));
        id.map(Named)
    }
}

/// A pool.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Pool {
    pool_id: PoolId,
    /// The pool that it extends; null for a root.
    parent: Option<PoolId>,
    /// Tokens that it has of its parent.
    branch_pos: usize,
    /// Tokens of the whole prefix.
    prefix_len: usize,
    /// FNV-1a (64 bits) of the tokens' little-endian bytes, hexadecimal.
    prefix_hash: String,
    pinned: bool,
    /// It goes once nothing refers to it.
    released: bool,
    ephemeral: bool,
    children: Vec<PoolId>,
    /// Pinned, though no pool extends it and no session is attached.
    orphaned_pin: bool,
    n_sessions: u32,
    /// Requests that began with it.
    hits: u64,
    admission: Admission,
    sampling: Sampling,
}

impl From<PoolInfo> for Pool {
    fn from(pool: PoolInfo) -> Self {
        Pool {
            pool_id: pool.id,
            parent: pool.parent,
            branch_pos: pool.branch_pos,
            prefix_len: pool.prefix_len,
            prefix_hash: format!("{:016x}", pool.prefix_hash),
            pinned: pool.pinned,
            released: pool.released,
            ephemeral: pool.ephemeral,
            children: pool.children,
            orphaned_pin: pool.orphaned_pin,
            n_sessions: pool.n_sessions,
            hits: pool.hits,
            admission: pool.admission.into(),
            sampling: Sampling { placement: placement_name(pool.placement) },
        }
    }
}

/// How a pool admits sessions.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Admission {
    /// `advisory` or `enforced`.
    mode: &'static str,
    /// 0 for no bound.
    target_tps_per_session: f32,
    /// `reject` or `warn`.
    on_saturation: &'static str,
    guarantee_min_sessions: u32,
    settle_tokens: u32,
    settle_max_ms: u64,
}

/// The modes with their names.
const MODES: [(&str, PoolMode); 2] = [("advisory", PoolMode::Advisory), ("enforced", PoolMode::Enforced)];
/// What happens to a session too many, with its names.
const SATURATIONS: [(&str, OnSaturation); 2] = [("reject", OnSaturation::Reject), ("warn", OnSaturation::Warn)];

impl From<PoolAdmission> for Admission {
    fn from(admission: PoolAdmission) -> Self {
        Admission {
            mode: name_of(&MODES, &admission.mode),
            target_tps_per_session: admission.target_tps_per_session,
            on_saturation: name_of(&SATURATIONS, &admission.on_saturation),
            guarantee_min_sessions: admission.guarantee_min_sessions,
            settle_tokens: admission.settle_tokens,
            settle_max_ms: u64::try_from(admission.settle_max.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: &T) -> &'static str {
    names.iter().find(|(_, of)| of == value).map_or("", |(name, _)| name)
}

/// Where a pool's sessions are sampled.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Sampling {
    /// `auto` or `cpu`.
    placement: &'static str,
}

fn placement_name(placement: Placement) -> &'static str {
    match placement {
        Placement::Auto => "auto",
        Placement::Cpu => "cpu",
    }
}

/// The answer of `GET /polykv/pools`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct PoolList {
    pools: Vec<Pool>,
    pools_max: u32,
    /// Places of sequences that pools take.
    seq_ids_used: usize,
    /// Pools of the longest chain from a root.
    tree_depth: u32,
}

/// Handler of `GET /polykv/pools`.
pub(crate) async fn list(Pooling(engine): Pooling) -> Result<Json<PoolList>, ApiError> {
    let list = engine.pools().await?;
    Ok(Json(PoolList {
        seq_ids_used: list.pools.len(),
        pools: list.pools.into_iter().map(Pool::from).collect(),
        pools_max: list.max,
        tree_depth: list.depth,
    }))
}

/// Handler of `GET /polykv/pools/{id}`.
pub(crate) async fn get(Pooling(engine): Pooling, Named(id): Named) -> Result<Json<Pool>, ApiError> {
    Ok(Json(engine.pool(id).await?.into()))
}

/// A flag of a query that may stand without a value.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Once {
    pub(crate) once: Option<String>,
}
