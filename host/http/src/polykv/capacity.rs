//! `GET /polykv/pools/{id}/capacity`: whether a pool takes another session.

use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use opencoti_engine::pools::Capacity;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Named, Pooling};
use crate::error::ApiError;

/// The query.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CapacityQuery {
    expected_tokens: Option<u64>,
}

/// The answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct CapacityAnswer {
    can_admit: bool,
    /// Why not; empty when it can.
    reason: String,
    /// Sessions that may come before something is short.
    headroom_sessions: u32,
    /// Mean rate of the sessions that generate and have one.
    mean_active_tps: f32,
    /// 0 … 1: how near the fullest store, or the longest of its sessions, is to its end.
    compaction_pressure: f32,
    free_cells: u64,
    settling: bool,
    settle_remaining_ms: u64,
    /// Sessions that generate and have no rate yet.
    n_warming: u32,
    n_pool_sessions: u32,
    /// The next session passes whatever the rate.
    guaranteed: bool,
    projected_mean_tps_model: f32,
    /// Null until a session's cost was measured.
    projected_mean_tps_measured: Option<f32>,
    drop_per_admit_ewma: Option<f32>,
    projected_mean_tps_if_admitted: f32,
    /// All sessions are between turns; the projection goes by what was measured last.
    projected_idle_estimate: bool,
}

impl From<Capacity> for CapacityAnswer {
    fn from(now: Capacity) -> Self {
        CapacityAnswer {
            can_admit: now.can_admit,
            reason: now.reason,
            headroom_sessions: now.headroom_sessions,
            mean_active_tps: now.mean_active_tps,
            compaction_pressure: now.compaction_pressure,
            free_cells: now.free_cells,
            settling: now.settling,
            settle_remaining_ms: u64::try_from(now.settle_remaining.as_millis()).unwrap_or(u64::MAX),
            n_warming: now.n_warming,
            n_pool_sessions: now.n_pool_sessions,
            guaranteed: now.guaranteed,
            projected_mean_tps_model: now.projection.by_model,
            projected_mean_tps_measured: now.projection.by_measure,
            drop_per_admit_ewma: now.drop_per_admit,
            projected_mean_tps_if_admitted: now.projection.tps(),
            projected_idle_estimate: now.projection.is_idle_estimate,
        }
    }
}

/// Handler of the route.
pub(crate) async fn capacity(
    Pooling(engine): Pooling,
    Named(id): Named,
    query: Result<Query<CapacityQuery>, QueryRejection>,
) -> Result<Json<CapacityAnswer>, ApiError> {
    let Query(query) = query?;
    Ok(Json(engine.pool_capacity(id, query.expected_tokens).await?.into()))
}
