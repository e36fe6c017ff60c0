//! `POST /polykv/pools` and `POST /polykv/pools/{id}/fork`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use opencoti_engine::api::{EngineInfo, GenerateRequest};
use opencoti_engine::pools::{Capture, MakePool, Origin, PoolId};
use opencoti_model::tokenizer::EncodeOptions;
use serde::Deserialize;
use utoipa::ToSchema;

use super::{Named, Pool, Pooling};
use crate::body::{self, Input};
use crate::error::ApiError;
use crate::generation::GenerationFields;
use crate::sampling::SamplingFields;
use crate::state::App;
use crate::text;

/// The body of a new pool. It has exactly one of `prompt`, `tokens`, `from_session` and `from_slot`.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct PoolRequest {
    /// The prefix as a text.
    pub(crate) prompt: Option<String>,
    /// The prefix as tokens.
    pub(crate) tokens: Option<Vec<i64>>,
    /// The prefix is what this session holds.
    pub(crate) from_session: Option<String>,
    /// The prefix is what this slot holds.
    pub(crate) from_slot: Option<i64>,
    /// Keeps it with nothing attached.
    pub(crate) pin: Option<bool>,
    /// Removes it 60 s after the last request that was attached; true by default for the `from_` forms.
    pub(crate) ephemeral: Option<bool>,
    /// Tokens that the prefix must have; of a session or a slot the first so many are taken.
    pub(crate) expect_len: Option<i64>,
}

/// The body of a fork. It has exactly one of `prompt` and `tokens`.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct ForkRequest {
    /// The child's whole prefix as a text.
    pub(crate) prompt: Option<String>,
    /// The child's whole prefix as tokens.
    pub(crate) tokens: Option<Vec<i64>>,
    /// Shares only so many tokens of the parent; all of them without it.
    pub(crate) branch_pos: Option<i64>,
    /// Keeps it with nothing attached.
    pub(crate) pin: Option<bool>,
}

/// A prefix that must be computed, or one that is there.
enum Wanted {
    New(Vec<u32>, MakePool),
    There(Capture),
}

/// Handler of `POST /polykv/pools`.
pub(crate) async fn create(
    State(app): State<App>,
    Pooling(engine): Pooling,
    input: Input,
) -> Result<Json<Pool>, ApiError> {
    let info = Arc::clone(engine.info());
    let wanted = input.compute(move |bytes| body::parse::<PoolRequest>(bytes)?.wanted(&info)).await?;
    let pool = match wanted {
        Wanted::New(tokens, spec) => engine.make_pool(prefill(&app, engine.info(), tokens, spec)?).await?,
        Wanted::There(capture) => engine.capture_pool(capture).await?,
    };
    Ok(Json(pool.into()))
}

/// Handler of `POST /polykv/pools/{id}/fork`.
pub(crate) async fn fork(
    State(app): State<App>,
    Pooling(engine): Pooling,
    Named(parent): Named,
    input: Input,
) -> Result<Json<Pool>, ApiError> {
    let info = Arc::clone(engine.info());
    let (tokens, spec) = input.compute(move |bytes| body::parse::<ForkRequest>(bytes)?.wanted(&info, parent)).await?;
    Ok(Json(engine.make_pool(prefill(&app, engine.info(), tokens, spec)?).await?.into()))
}

/// The request that computes a pool's prefix.
fn prefill(app: &App, info: &EngineInfo, prompt: Vec<u32>, spec: MakePool) -> Result<GenerateRequest, ApiError> {
    let fields = GenerationFields { n_predict: Some(0), ..GenerationFields::default() };
    let request = fields.request(info, &app.config, &SamplingFields::default(), 0, None)?;
    Ok(GenerateRequest { prompt, make_pool: Some(spec), ..request })
}

impl PoolRequest {
    fn wanted(self, info: &EngineInfo) -> Result<Wanted, ApiError> {
        let sources = [
            ("prompt", self.prompt.is_some()),
            ("tokens", self.tokens.is_some()),
            ("from_session", self.from_session.is_some()),
            ("from_slot", self.from_slot.is_some()),
        ];
        let found: Vec<&str> = sources.iter().filter(|(_, is_there)| *is_there).map(|(name, _)| *name).collect();
        if found.len() != 1 {
            return Err(ApiError::bad_request(format!(
                "a pool is made of exactly one of `prompt`, `tokens`, `from_session` and `from_slot`, found {}",
                if found.is_empty() { "none".to_owned() } else { found.join(" and ") }
            )));
        }
        let expected = self.expect_len.map(|len| length("expect_len", len)).transpose()?;
        let (pinned, ephemeral) = (self.pin.unwrap_or(false), self.ephemeral);
        let from = match (self.from_session, self.from_slot) {
            (Some(session), _) => Origin::Session(session),
            (None, Some(slot)) => Origin::Slot(slot_number(info, slot)?),
            (None, None) => {
                let tokens = prefix(info, self.prompt.as_deref(), self.tokens.as_deref())?;
                check_length(&tokens, expected)?;
                let spec = MakePool { parent: None, pinned, ephemeral: ephemeral.unwrap_or(false) };
                return Ok(Wanted::New(tokens, spec));
            }
        };
        Ok(Wanted::There(Capture { from, len: expected, pinned, ephemeral: ephemeral.unwrap_or(true) }))
    }
}

impl ForkRequest {
    fn wanted(self, info: &EngineInfo, parent: PoolId) -> Result<(Vec<u32>, MakePool), ApiError> {
        if self.prompt.is_some() == self.tokens.is_some() {
            return Err(ApiError::bad_request(
                "a fork is made of exactly one of `prompt` and `tokens`: the child's whole prefix",
            ));
        }
        let branch_pos = self.branch_pos.map(|at| length("branch_pos", at)).transpose()?;
        let tokens = prefix(info, self.prompt.as_deref(), self.tokens.as_deref())?;
        let pinned = self.pin.unwrap_or(false);
        Ok((tokens, MakePool { parent: Some((parent, branch_pos)), pinned, ephemeral: false }))
    }
}

/// The tokens of a prefix; at least one.
fn prefix(info: &EngineInfo, prompt: Option<&str>, tokens: Option<&[i64]>) -> Result<Vec<u32>, ApiError> {
    let (field, found) = match (prompt, tokens) {
        (Some(prompt), _) => {
            let options = EncodeOptions { add_special: true, parse_special: true };
            ("prompt", text::encode(info, prompt, options, "prompt")?)
        }
        (None, tokens) => {
            let ids = tokens.unwrap_or_default().iter().enumerate();
            let checked = ids.map(|(index, &id)| text::token(info, id, || format!("tokens[{index}]")));
            ("tokens", checked.collect::<Result<_, _>>()?)
        }
    };
    if found.is_empty() {
        return Err(ApiError::field(field, "has no tokens; give at least one"));
    }
    Ok(found)
}

fn check_length(tokens: &[u32], expected: Option<usize>) -> Result<(), ApiError> {
    match expected.filter(|&expected| expected != tokens.len()) {
        Some(expected) => {
            Err(ApiError::field("expect_len", format!("is {expected}, but the prefix has {} tokens", tokens.len())))
        }
        None => Ok(()),
    }
}

fn length(field: &str, value: i64) -> Result<usize, ApiError> {
    usize::try_from(value).map_err(|_| ApiError::field(field, format!("is {value}, expected a number of tokens")))
}

fn slot_number(info: &EngineInfo, slot: i64) -> Result<u32, ApiError> {
    let most = info.n_slots.saturating_sub(1);
    let found = u32::try_from(slot).ok().filter(|&slot| slot <= most);
    found.ok_or_else(|| ApiError::field("from_slot", format!("is {slot}, expected a slot from 0 to {most}")))
}
