//! `GET /slots`, and saving, restoring and erasing one.

use std::path::PathBuf;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use opencoti_engine::api::{EngineInfo, SlotInfo, SlotTask};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::body::{self, Input};
use crate::error::ApiError;
use crate::sampling::SamplingSettings;
use crate::state::{App, Ready};

/// One slot of `GET /slots`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Slot {
    id: u32,
    n_ctx: u32,
    speculative: bool,
    is_processing: bool,
    #[serde(flatten)]
    task: Option<Task>,
    opencoti: SlotExtras,
}

/// What a busy slot does.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Task {
    id_task: u64,
    n_prompt_tokens: u32,
    n_prompt_tokens_processed: u32,
    n_prompt_tokens_cache: u32,
    params: Box<SamplingSettings>,
    next_token: [NextToken; 1],
}

/// How far the generation is.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct NextToken {
    has_next_token: bool,
    has_new_line: bool,
    n_remain: i64,
    n_decoded: u32,
}

/// What llama.cpp's slots do not tell.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct SlotExtras {
    session_id: Option<String>,
    n_cached: u32,
    /// Pool of its session.
    pool_id: Option<u32>,
    /// Tokens of its sequence that are those of the pool.
    n_pool_shared: u32,
}

impl Slot {
    fn new(info: &EngineInfo, slot: SlotInfo) -> Self {
        Slot {
            id: slot.id,
            n_ctx: slot.n_ctx,
            speculative: false,
            is_processing: slot.task.is_some(),
            task: slot.task.map(|task| Task::new(info, &task)),
            opencoti: SlotExtras {
                session_id: slot.session_id,
                n_cached: slot.n_cached,
                pool_id: slot.pool,
                n_pool_shared: slot.n_pool_shared,
            },
        }
    }
}

impl Task {
    fn new(info: &EngineInfo, task: &SlotTask) -> Self {
        Task {
            id_task: task.id.0,
            n_prompt_tokens: task.n_prompt_tokens,
            n_prompt_tokens_processed: task.n_prompt_tokens_processed,
            n_prompt_tokens_cache: task.n_prompt_tokens_cache,
            params: Box::new(SamplingSettings::new(info, &task.sampling)),
            next_token: [NextToken {
                has_next_token: task.n_remain != Some(0),
                has_new_line: task.has_new_line,
                n_remain: task.n_remain.map_or(-1, i64::from),
                n_decoded: task.n_decoded,
            }],
        }
    }
}

/// The query of `GET /slots`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SlotsQuery {
    fail_on_no_slot: Option<String>,
}

/// Handler of `GET /slots`.
pub(crate) async fn list(
    State(app): State<App>,
    ready: Ready,
    query: Result<Query<SlotsQuery>, QueryRejection>,
) -> Result<Json<Vec<Slot>>, ApiError> {
    if !app.config.slots {
        return Err(ApiError::unsupported("this server does not show its slots; start it without --no-slots"));
    }
    let Query(query) = query?;
    let slots = ready.engine.slots().await?;
    let must_have_one = query.fail_on_no_slot.is_some_and(|value| !matches!(value.as_str(), "0" | "false"));
    if must_have_one && slots.iter().all(|slot| slot.task.is_some()) {
        return Err(ApiError::unavailable("no slot is available"));
    }
    let info = ready.engine.info();
    Ok(Json(slots.into_iter().map(|slot| Slot::new(info, slot)).collect()))
}

/// The query of `POST /slots/{id}`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ActionQuery {
    action: Option<String>,
}

/// The body of a save or a restore.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct SlotFileRequest {
    /// A name without path separators, in the folder of saved slots.
    filename: Option<String>,
}

/// The answer of a save, a restore or an erase.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum SlotAnswer {
    /// Saved.
    Saved { id_slot: u32, filename: String, n_saved: u32, n_written: u64, timings: SaveTimings },
    /// Restored.
    Restored { id_slot: u32, filename: String, n_restored: u32, n_read: u64, timings: RestoreTimings },
    /// Erased.
    Erased { id_slot: u32, n_erased: u32 },
}

/// How long a save took.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct SaveTimings {
    save_ms: f64,
}

/// How long a restore took.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct RestoreTimings {
    restore_ms: f64,
}

/// Handler of `POST /slots/{id}?action=…`.
pub(crate) async fn act(
    State(app): State<App>,
    ready: Ready,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<ActionQuery>, QueryRejection>,
    input: Input,
) -> Result<Response, ApiError> {
    let Some(folder) = &app.config.slot_save_path else {
        return Err(ApiError::unsupported("this server does not save slots; start it with --slot-save-path"));
    };
    let (Path(id), Query(query)) = (id?, query?);
    let engine = &ready.engine;
    let n_slots = engine.info().n_slots;
    let id_slot = id.parse::<u32>().ok().filter(|&slot| slot < n_slots);
    let id_slot = id_slot.ok_or_else(|| {
        ApiError::bad_request(format!("{id:?} is no slot; the slots are 0 to {}", n_slots.saturating_sub(1)))
    })?;
    let answer = match query.action.as_deref() {
        Some("save") => {
            let (filename, path) = file(folder, &input.0)?;
            let saved = engine.save_slot(id_slot, path).await?;
            let timings = SaveTimings { save_ms: saved.ms };
            SlotAnswer::Saved { id_slot, filename, n_saved: saved.n_tokens, n_written: saved.n_bytes, timings }
        }
        Some("restore") => {
            let (filename, path) = file(folder, &input.0)?;
            let read = engine.restore_slot(id_slot, path).await?;
            let timings = RestoreTimings { restore_ms: read.ms };
            SlotAnswer::Restored { id_slot, filename, n_restored: read.n_tokens, n_read: read.n_bytes, timings }
        }
        Some("erase") => SlotAnswer::Erased { id_slot, n_erased: engine.erase_slot(id_slot).await?.n_tokens },
        other => {
            let problem = format!("is {:?}, expected save, restore or erase", other.unwrap_or_default());
            return Err(ApiError::field("action", problem));
        }
    };
    Ok(Json(answer).into_response())
}

fn file(folder: &std::path::Path, bytes: &[u8]) -> Result<(String, PathBuf), ApiError> {
    let request: SlotFileRequest = body::parse(bytes)?;
    let name = request.filename.ok_or_else(|| ApiError::field("filename", "is missing; give the file's name"))?;
    check_name(&name).map_err(|problem| ApiError::field("filename", format!("{name:?} {problem}")))?;
    let path = folder.join(&name);
    Ok((name, path))
}

/// A name that stays in its folder on every file system.
fn check_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() || name.len() > 255 {
        return Err("is not 1 to 255 bytes long");
    }
    if name.chars().any(|c| matches!(c, '/' | '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|') || c.is_control()) {
        return Err("has a character that file names must not have");
    }
    if name.starts_with('.') || name.ends_with(['.', ' ']) || name.starts_with(' ') {
        return Err("must not start with a dot or a space, or end with one");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check_name;

    #[test]
    fn a_file_name_can_not_leave_its_folder() {
        for good in ["slot1.bin", "a b", "ключ", "x..y"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "..", ".", "../x", "a/b", "a\\b", "c:x", ".hidden", "x.", "a\0b", "a\nb", &"x".repeat(256)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
