//! What is done to a pool that is there: pin, unpin, release, sampling, admission.

use std::time::Duration;

use axum::Json;
use opencoti_engine::pools::{Placement, PoolAdmission, PoolChange};
use serde::Deserialize;
use utoipa::ToSchema;

use super::{MODES, Named, Pool, Pooling, SATURATIONS};
use crate::body::{self, Input};
use crate::error::ApiError;

/// Longest settle window: an hour.
const MOST_SETTLE_MS: i64 = 3_600_000;

/// Handler of `POST /polykv/pools/{id}/pin`.
pub(crate) async fn pin(pooling: Pooling, named: Named) -> Result<Json<Pool>, ApiError> {
    change(pooling, named, PoolChange::Pin).await
}

/// Handler of `POST /polykv/pools/{id}/unpin`.
pub(crate) async fn unpin(pooling: Pooling, named: Named) -> Result<Json<Pool>, ApiError> {
    change(pooling, named, PoolChange::Unpin).await
}

/// Handler of `POST /polykv/pools/{id}/release`.
pub(crate) async fn release(pooling: Pooling, named: Named) -> Result<Json<Pool>, ApiError> {
    change(pooling, named, PoolChange::Release).await
}

/// Where the sessions of a pool are sampled.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct SamplingRequest {
    /// `auto`, `cpu` or `device`.
    placement: Option<String>,
}

/// Handler of `POST /polykv/pools/{id}/sampling`.
pub(crate) async fn sampling(pooling: Pooling, named: Named, input: Input) -> Result<Json<Pool>, ApiError> {
    let request: SamplingRequest = body::parse(&input.0)?;
    let placement = match request.placement.as_deref() {
        Some("auto") => Placement::Auto,
        Some("cpu") => Placement::Cpu,
        Some("device") => {
            return Err(ApiError::unsupported("this server samples on the CPU; `placement` can be `auto` or `cpu`"));
        }
        other => {
            let found = other.map_or("missing".to_owned(), |name| format!("{name:?}"));
            return Err(ApiError::field("placement", format!("is {found}, expected auto, cpu or device")));
        }
    };
    change(pooling, named, PoolChange::Place(placement)).await
}

/// How a pool admits sessions; a field that is left out has its default.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct AdmissionRequest {
    /// Tokens a second that each session should have; 0 has no bound.
    target_tps_per_session: Option<f64>,
    /// `advisory` or `enforced`.
    mode: Option<String>,
    /// `reject` or `warn`.
    on_saturation: Option<String>,
    /// So many sessions pass whatever the rate.
    guarantee_min_sessions: Option<i64>,
    /// Tokens of a new session after which the pool is settled.
    settle_tokens: Option<i64>,
    /// Milliseconds after which it is settled in any case.
    settle_max_ms: Option<i64>,
}

impl AdmissionRequest {
    fn admission(&self) -> Result<PoolAdmission, ApiError> {
        let default = PoolAdmission::default();
        let count = |field: &str, value: Option<i64>, default: u32| {
            let Some(value) = value else { return Ok(default) };
            u32::try_from(value).map_err(|_| ApiError::field(field, format!("is {value}, expected 0 or more")))
        };
        let target = self.target_tps_per_session.unwrap_or(default.target_tps_per_session.into());
        if !(target.is_finite() && target >= 0.0) {
            return Err(ApiError::field("target_tps_per_session", format!("is {target}, expected 0 or more")));
        }
        let most_ms = default.settle_max.as_millis() as i64;
        let settle_ms = self.settle_max_ms.unwrap_or(most_ms);
        let settle_max = u64::try_from(settle_ms).ok().filter(|_| settle_ms <= MOST_SETTLE_MS);
        Ok(PoolAdmission {
            mode: one_of("mode", self.mode.as_deref(), &MODES)?,
            target_tps_per_session: target as f32,
            on_saturation: one_of("on_saturation", self.on_saturation.as_deref(), &SATURATIONS)?,
            guarantee_min_sessions: count(
                "guarantee_min_sessions",
                self.guarantee_min_sessions,
                default.guarantee_min_sessions,
            )?,
            settle_tokens: count("settle_tokens", self.settle_tokens, default.settle_tokens)?,
            settle_max: Duration::from_millis(settle_max.ok_or_else(|| {
                ApiError::field("settle_max_ms", format!("is {settle_ms}, expected 0 to {MOST_SETTLE_MS}"))
            })?),
        })
    }
}

fn one_of<T: Copy + Default>(field: &str, value: Option<&str>, names: &[(&str, T)]) -> Result<T, ApiError> {
    let Some(value) = value else { return Ok(T::default()) };
    let found = names.iter().find(|(name, _)| *name == value).map(|(_, of)| *of);
    found.ok_or_else(|| {
        let all: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
        ApiError::field(field, format!("is {value:?}, expected {}", all.join(" or ")))
    })
}

/// Handler of `POST /polykv/pools/{id}/admission`.
pub(crate) async fn admission(pooling: Pooling, named: Named, input: Input) -> Result<Json<Pool>, ApiError> {
    let admission = body::parse::<AdmissionRequest>(&input.0)?.admission()?;
    change(pooling, named, PoolChange::Admission(admission)).await
}

async fn change(Pooling(engine): Pooling, Named(id): Named, change: PoolChange) -> Result<Json<Pool>, ApiError> {
    Ok(Json(engine.change_pool(id, change).await?.into()))
}
