//! `GET /props` and `POST /props`.

use axum::Json;
use axum::extract::State;
use opencoti_engine::api::{EngineInfo, StateStats, Stats, StoreStats};
use opencoti_model::chat::Capabilities;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::body::{self, Input};
use crate::error::ApiError;
use crate::sampling::SamplingSettings;
use crate::state::{App, Ready};

/// The answer of `GET /props`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Props {
    default_generation_settings: DefaultSettings,
    total_slots: u32,
    model_alias: String,
    model_path: String,
    model_ftype: String,
    modalities: Modalities,
    /// Text models have none.
    media_marker: Option<String>,
    endpoint_slots: bool,
    endpoint_props: bool,
    endpoint_metrics: bool,
    chat_template: String,
    chat_template_caps: TemplateCaps,
    /// Where the template comes from.
    chat_template_source: String,
    bos_token: String,
    eos_token: String,
    build_info: String,
    is_sleeping: bool,
    cors_proxy_enabled: bool,
    opencoti: Extras,
}

/// What holds where a request says nothing.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct DefaultSettings {
    params: DefaultParams,
    n_ctx: u32,
}

/// Sampling and length where a request says nothing.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct DefaultParams {
    /// Most tokens to generate; −1 without a bound.
    n_predict: i64,
    #[serde(flatten)]
    sampling: SamplingSettings,
}

/// What the chat template was found to do. What it can't is written into the messages in another form.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TemplateCaps {
    supports_system_role: bool,
    supports_string_content: bool,
    supports_typed_content: bool,
    supports_tools: bool,
    supports_tool_calls: bool,
    supports_tool_responses: bool,
    supports_object_arguments: bool,
    /// Thoughts between marks of the model's family.
    supports_thinking: bool,
}

impl From<Capabilities> for TemplateCaps {
    fn from(found: Capabilities) -> Self {
        TemplateCaps {
            supports_system_role: found.system,
            supports_string_content: !found.typed_content,
            supports_typed_content: found.typed_content,
            supports_tools: found.tools,
            supports_tool_calls: found.tool_calls,
            supports_tool_responses: found.tool_results,
            supports_object_arguments: found.object_arguments,
            supports_thinking: found.thought_syntax.is_some(),
        }
    }
}

/// What the model understands besides text.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Modalities {
    vision: bool,
    audio: bool,
    video: bool,
}

/// What llama.cpp's props do not tell.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Extras {
    kv: Kv,
    residency: Residency,
    kv_reuse: KvReuse,
    /// Most requests that may wait.
    max_queue: u32,
    /// Blocks of the model that run twice; null if none do.
    repeat_layers: Option<String>,
}

/// The KV cache.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Kv {
    /// Codec of the keys as configured.
    cache_type_k: String,
    /// Codec of the values as configured.
    cache_type_v: String,
    effective: EffectiveKv,
}

/// The KV cache as it is. The numbers at the top are those of its first store.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct EffectiveKv {
    type_k: String,
    type_v: String,
    n_cells: u64,
    n_cells_resident: u64,
    /// Layers of stores that are not wholly resident.
    n_layers_spilling: u32,
    fully_resident: bool,
    /// Whether sliding-window layers have a store of their own.
    is_iswa: bool,
    stores: Vec<KvStore>,
    /// Recurrent state; null for a model without recurrent layers.
    state: Option<KvState>,
    /// Bytes of all stores and of the state together.
    n_bytes: u64,
}

/// One store: layers of one geometry.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct KvStore {
    name: String,
    type_k: String,
    type_v: String,
    n_layers: u32,
    n_cells: u64,
    n_cells_resident: u64,
    /// Slots of exact tokens beside the cells.
    n_cells_stage: u64,
    /// Those included.
    n_bytes: u64,
    n_bytes_stage: u64,
}

/// Recurrent state, beside the stores. A plane is the state of one sequence.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct KvState {
    n_layers: u32,
    n_planes: u64,
    plane_bytes: u64,
    n_bytes: u64,
}

impl KvState {
    fn new(state: &StateStats) -> Self {
        KvState {
            n_layers: state.n_layers,
            n_planes: state.planes_total,
            plane_bytes: state.plane_bytes,
            n_bytes: state.plane_bytes.saturating_mul(state.planes_total),
        }
    }
}

fn is_resident(store: &StoreStats) -> bool {
    store.cells_resident == store.cells_total
}

impl EffectiveKv {
    fn new(stats: &Stats) -> Self {
        let spilling = stats.stores.iter().filter(|store| !is_resident(store));
        let store = |store: &StoreStats| KvStore {
            name: store.name.clone(),
            type_k: store.codecs.0.clone(),
            type_v: store.codecs.1.clone(),
            n_layers: store.n_layers,
            n_cells: store.cells_total,
            n_cells_resident: store.cells_resident,
            n_bytes: store.bytes,
            n_cells_stage: store.stage_cells,
            n_bytes_stage: store.stage_bytes,
        };
        let main = stats.stores.first();
        let state = stats.state.as_ref().map(KvState::new);
        let state_bytes = state.as_ref().map_or(0, |state| state.n_bytes);
        let (type_k, type_v) = main.map(|store| store.codecs.clone()).unwrap_or_default();
        EffectiveKv {
            type_k,
            type_v,
            n_cells: main.map_or(0, |store| store.cells_total),
            n_cells_resident: main.map_or(0, |store| store.cells_resident),
            n_layers_spilling: spilling.map(|store| store.n_layers).sum(),
            fully_resident: stats.stores.iter().all(is_resident),
            is_iswa: stats.stores.iter().any(|store| store.name.starts_with("swa")),
            stores: stats.stores.iter().map(store).collect(),
            n_bytes: stats.stores.iter().map(|store| store.bytes).sum::<u64>() + state_bytes,
            state,
        }
    }
}

/// Where the cache lives.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Residency {
    /// `resident`, or `spilling` when some cells are not.
    kv_residency_mode: &'static str,
    /// Plugin that decides it; null when none is listed.
    policy: Option<String>,
}

/// Who shares the cache.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct KvReuse {
    n_parallel: u32,
    kv_unified: bool,
}

fn token_text(info: &EngineInfo, token: Option<u32>) -> String {
    token.and_then(|id| info.tokenizer.token_text(id)).unwrap_or_default().to_owned()
}

/// Handler of `GET /props`.
pub(crate) async fn get(State(app): State<App>, ready: Ready) -> Result<Json<Props>, ApiError> {
    let info = ready.engine.info();
    let stats = ready.engine.stats().await?;
    let effective = EffectiveKv::new(&stats);
    Ok(Json(Props {
        default_generation_settings: DefaultSettings {
            params: DefaultParams {
                n_predict: info.default_n_predict.map_or(-1, i64::from),
                sampling: SamplingSettings::new(info, &info.default_sampling),
            },
            n_ctx: info.n_ctx,
        },
        total_slots: info.n_slots,
        model_alias: info.model_alias.clone(),
        model_path: info.model_path.clone(),
        model_ftype: info.file_type.clone(),
        modalities: Modalities { vision: false, audio: false, video: false },
        media_marker: None,
        endpoint_slots: app.config.slots,
        endpoint_props: app.config.props,
        endpoint_metrics: app.config.metrics.is_some(),
        chat_template: info.template.source().to_owned(),
        chat_template_caps: info.template.capabilities().into(),
        chat_template_source: info.template_source.clone(),
        bos_token: token_text(info, info.tokenizer.bos()),
        eos_token: token_text(info, info.tokenizer.eos()),
        build_info: app.config.build.clone(),
        is_sleeping: false,
        cors_proxy_enabled: false,
        opencoti: Extras {
            residency: Residency {
                kv_residency_mode: if effective.fully_resident { "resident" } else { "spilling" },
                policy: info.residency_policy.clone(),
            },
            kv: Kv { cache_type_k: info.kv_codecs.0.clone(), cache_type_v: info.kv_codecs.1.clone(), effective },
            kv_reuse: KvReuse { n_parallel: info.n_slots, kv_unified: info.kv_unified },
            max_queue: info.max_queue,
            repeat_layers: info.repeat_layers.clone(),
        },
    }))
}

/// Handler of `POST /props`. No property can be changed while the server runs, so only an empty object is taken.
pub(crate) async fn set(State(app): State<App>, _: Ready, input: Input) -> Result<Json<Value>, ApiError> {
    if !app.config.props {
        return Err(ApiError::unsupported("this server's properties can't be changed; start it with --props"));
    }
    let body = body::object(&input.0)?;
    match body.as_object().and_then(|fields| fields.keys().next()) {
        Some(field) => Err(ApiError::field(field, "is no property that can be changed while the server runs")),
        None => Ok(Json(json!({"success": true}))),
    }
}
