//! `POST /v1/requests/{id}/cancel`: ends a request by the id in its `X-Request-Id`.
//!
//! A client that wants to cancel an answer that is not streamed sends an `X-Request-Id` of its own, because the
//! server's comes with the answer.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use futures::future;
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::state::{App, Ready};

/// The answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct CancelAnswer {
    id: String,
    object: &'static str,
    /// Whether the request was there.
    cancelled: bool,
}

/// Handler of the route.
pub(crate) async fn cancel(
    State(app): State<App>,
    ready: Ready,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<CancelAnswer>, ApiError> {
    let Path(id) = id?;
    let generations = app.requests.mark_cancelled(&id);
    let cancels = generations.into_iter().map(|generation| ready.engine.cancel(generation));
    let cancelled = future::try_join_all(cancels).await?.contains(&true);
    Ok(Json(CancelAnswer { id, object: "request.cancel", cancelled }))
}
