//! `GET /v1/models` and `GET /v1/models/{model}`.

use std::time::UNIX_EPOCH;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use opencoti_engine::api::EngineInfo;
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::state::{App, Ready};

/// The answer of the route: OpenAI's list, and the same for Ollama's clients.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
    models: Vec<OllamaModel>,
}

/// A model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    aliases: Vec<String>,
    tags: Vec<String>,
    meta: Meta,
}

/// Facts about a model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Meta {
    architecture: String,
    /// Kind of tokenizer.
    vocab_type: String,
    n_vocab: usize,
    n_ctx: u32,
    n_ctx_train: u32,
    n_embd: u32,
    n_params: u64,
    /// Bytes of the weights.
    size: u64,
    ftype: String,
}

/// A model as Ollama lists it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct OllamaModel {
    name: String,
    model: String,
    #[serde(rename = "type")]
    kind: &'static str,
    capabilities: [&'static str; 1],
    details: OllamaDetails,
}

/// Details of a model as Ollama lists them.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct OllamaDetails {
    format: &'static str,
    family: String,
    parameter_size: String,
    quantization_level: String,
}

fn model(app: &App, info: &EngineInfo) -> Model {
    Model {
        id: info.model_alias.clone(),
        object: "model",
        created: app.started.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        owned_by: "opencoti",
        aliases: app.config.aliases.clone(),
        tags: Vec::new(),
        meta: Meta {
            architecture: info.architecture.clone(),
            vocab_type: info.tokenizer.model().to_owned(),
            n_vocab: info.tokenizer.n_vocab(),
            n_ctx: info.n_ctx,
            n_ctx_train: info.n_ctx_train,
            n_embd: info.n_embd,
            n_params: info.n_params,
            size: info.model_bytes,
            ftype: info.file_type.clone(),
        },
    }
}

/// Handler of `GET /v1/models/{model}`.
pub(crate) async fn by_name(
    State(app): State<App>,
    ready: Ready,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(name) = name?;
    let info = ready.engine.info();
    if name != info.model_alias && !app.config.aliases.contains(&name) {
        return Err(ApiError::not_found(format!("no model is named {name:?}; this server has {:?}", info.model_alias)));
    }
    Ok(Json(model(&app, info)))
}

/// Handler of `GET /v1/models`.
pub(crate) async fn list(State(app): State<App>, ready: Ready) -> Json<ModelList> {
    let info = ready.engine.info();
    let ollama = OllamaModel {
        name: info.model_alias.clone(),
        model: info.model_alias.clone(),
        kind: "model",
        capabilities: [if info.generates { "completion" } else { "embedding" }],
        details: OllamaDetails {
            format: "gguf",
            family: info.architecture.clone(),
            parameter_size: parameter_size(info.n_params),
            quantization_level: info.file_type.clone(),
        },
    };
    Json(ModelList { object: "list", data: vec![model(&app, info)], models: vec![ollama] })
}

/// `135M`, `8.0B`.
fn parameter_size(n_params: u64) -> String {
    match n_params {
        0..1_000_000 => format!("{:.0}K", n_params as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.0}M", n_params as f64 / 1e6),
        _ => format!("{:.1}B", n_params as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::parameter_size;

    #[test]
    fn sizes_are_written_as_people_say_them() {
        assert_eq!(parameter_size(260_000), "260K");
        assert_eq!(parameter_size(134_515_008), "135M");
        assert_eq!(parameter_size(8_030_000_000), "8.0B");
    }
}
