//! `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use opencoti_engine::api::{EngineInfo, GenerateRequest};
use serde::Serialize;
use utoipa::ToSchema;

use super::answer::Context;
pub(crate) use super::answer::MessageAnswer;
pub(crate) use super::request::MessagesRequest;
use crate::answers::new_id;
use crate::body::Input;
use crate::chat::{Asked, Prepared};
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::run;
use crate::state::{App, HttpId, Ready};

fn prepare(
    info: &Arc<EngineInfo>,
    config: &ServerConfig,
    bytes: &[u8],
) -> Result<(Vec<GenerateRequest>, Context), ApiError> {
    let MessagesRequest { own, sampling, generation, conversation, form, omits_thoughts, .. } =
        MessagesRequest::parse(bytes)?;
    let asked =
        Asked { generation: &generation, sampling: &sampling, form, top_logprobs: None, separates_thoughts: true };
    let Prepared { request, output, .. } = conversation.prepare(info, config, asked)?;
    let context = Context {
        id: new_id("msg_"),
        model: own.model.unwrap_or_else(|| info.model_alias.clone()),
        output,
        omits_thoughts,
        delivery: generation.delivery(config),
    };
    Ok((vec![request], context))
}

/// Handler of `POST /v1/messages`.
pub(crate) async fn messages(
    State(app): State<App>,
    ready: Ready,
    id: HttpId,
    input: Input,
) -> Result<Response, ApiError> {
    run::serve(&app, &ready, &id, input, prepare).await
}

/// The answer of `POST /v1/messages/count_tokens`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenCount {
    /// Tokens of the whole prompt.
    input_tokens: usize,
}

/// Handler of `POST /v1/messages/count_tokens`.
pub(crate) async fn count_tokens(ready: Ready, input: Input) -> Result<Json<TokenCount>, ApiError> {
    let info = Arc::clone(ready.engine.info());
    let count = move |bytes: &[u8]| MessagesRequest::parse_prompt(bytes)?.conversation.count_tokens(&info);
    Ok(Json(TokenCount { input_tokens: input.compute(count).await? }))
}
