//! `POST /v1/responses` and `POST /v1/responses/input_tokens`. Nothing is stored: a conversation comes whole each time.

mod answer;
mod items;
mod output;
mod request;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use opencoti_engine::api::{EngineInfo, GenerateRequest};

use self::answer::Context;
pub(crate) use self::answer::ResponseAnswer;
pub(crate) use self::request::ResponsesRequest;
use crate::answers::{InputTokens, new_id, now};
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
    let ResponsesRequest { own, sampling, generation, conversation, form, top_logprobs, .. } =
        ResponsesRequest::parse(bytes)?;
    let asked = Asked { generation: &generation, sampling: &sampling, form, top_logprobs, separates_thoughts: true };
    let Prepared { request, output, .. } = conversation.prepare(info, config, asked)?;
    let context = Context {
        id: new_id("resp_"),
        created: now(),
        model: own.model.clone().unwrap_or_else(|| info.model_alias.clone()),
        output,
        top_logprobs,
        temperature: request.sampling.temperature,
        top_p: request.sampling.top_p,
        parallel: conversation.tools.parallel,
        own,
        delivery: generation.delivery(config),
    };
    Ok((vec![request], context))
}

/// Handler of `POST /v1/responses`.
pub(crate) async fn responses(
    State(app): State<App>,
    ready: Ready,
    id: HttpId,
    input: Input,
) -> Result<Response, ApiError> {
    run::serve(&app, &ready, &id, input, prepare).await
}

/// Handler of `POST /v1/responses/input_tokens`.
pub(crate) async fn input_tokens(ready: Ready, input: Input) -> Result<Json<InputTokens>, ApiError> {
    let info = Arc::clone(ready.engine.info());
    let count = move |bytes: &[u8]| ResponsesRequest::parse(bytes)?.conversation.count_tokens(&info);
    Ok(Json(InputTokens::new(input.compute(count).await?)))
}
