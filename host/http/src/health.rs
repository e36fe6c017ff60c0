//! `GET /health`.

use axum::Json;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::state::Ready;

/// The answer of a server that serves.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    status: &'static str,
    /// Rows by which clients tell what the server can do besides text; a row that is absent can't be used.
    features: Map<String, Value>,
}

/// Handler of the route. Without an engine the extractor answers 503.
pub(crate) async fn health(_: Ready) -> Json<Health> {
    Json(Health { status: "ok", features: Map::new() })
}
