//! `GET /polykv/tps`: the rates of all sessions, once or as a stream.

use std::time::Duration;

use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use axum::response::{IntoResponse, Response};
use futures::stream;
use opencoti_engine::pools::{PoolId, Rates};
use serde::Serialize;
use utoipa::ToSchema;

use super::{Once, Pooling};
use crate::error::ApiError;
use crate::sse;

/// Time between two events of the stream.
const PERIOD: Duration = Duration::from_secs(1);

/// The answer, and each event of the stream.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct RatesAnswer {
    /// Tokens a second of all sessions that generate.
    aggregate: f32,
    /// Sessions that generate and have no rate yet.
    n_warming: u32,
    sessions: Vec<SessionRate>,
}

/// One session.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct SessionRate {
    /// Null for a request without a session.
    session_id: Option<String>,
    id_slot: u32,
    pool_id: Option<PoolId>,
    /// 0 until it is known.
    tps_ewma: f32,
    active: bool,
    ctx_used: u32,
    ctx_total: u32,
    ctx_headroom_tokens: u32,
}

impl From<Rates> for RatesAnswer {
    fn from(rates: Rates) -> Self {
        let session = |s: opencoti_engine::pools::SessionRate| SessionRate {
            session_id: s.session_id,
            id_slot: s.slot,
            pool_id: s.pool,
            tps_ewma: s.tps,
            active: s.active,
            ctx_used: s.ctx_used,
            ctx_total: s.ctx_total,
            ctx_headroom_tokens: s.ctx_total.saturating_sub(s.ctx_used),
        };
        let sessions = rates.sessions.into_iter().map(session).collect();
        RatesAnswer { aggregate: rates.aggregate, n_warming: rates.n_warming, sessions }
    }
}

/// Handler of the route. The stream ends with the engine.
pub(crate) async fn tps(
    Pooling(engine): Pooling,
    query: Result<Query<Once>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(query) = query?;
    let first = RatesAnswer::from(engine.rates().await?);
    if query.once.is_some_and(|value| !matches!(value.as_str(), "0" | "false")) {
        return Ok(Json(first).into_response());
    }
    let frames = stream::unfold(Some(first), move |now| {
        let engine = engine.clone();
        async move {
            let now = match now {
                Some(now) => now,
                None => {
                    tokio::time::sleep(PERIOD).await;
                    engine.rates().await.ok()?.into()
                }
            };
            Some((sse::data(&now), None))
        }
    });
    Ok(sse::response(frames, None, sse::COMMENT))
}
