//! `POST /embedding`: native embeddings.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::body::Input;
use crate::error::ApiError;
use crate::openai::embeddings::{self, Embedded};
use crate::state::{App, Ready};

/// The vectors of one input: one, or one a token without pooling.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct NativeEmbedding {
    index: usize,
    embedding: Vec<Vec<f32>>,
}

/// Handler of the route.
pub(crate) async fn embedding(
    State(app): State<App>,
    ready: Ready,
    input: Input,
) -> Result<Json<Vec<NativeEmbedding>>, ApiError> {
    let Embedded { vectors, .. } = embeddings::compute(&app, &ready, input, embeddings::Surface::Native).await?;
    let answers = vectors.into_iter().enumerate().map(|(index, embedding)| NativeEmbedding { index, embedding });
    Ok(Json(answers.collect()))
}
