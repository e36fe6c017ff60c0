//! `GET /plugins` and `GET /plugins/{name}`: what is loaded, as the registry describes it.

use axum::Json;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use serde_json::Value;

use crate::error::ApiError;
use crate::state::Ready;

/// Handler of `GET /plugins`.
pub(crate) async fn list(ready: Ready) -> Json<Value> {
    Json((ready.plugins)())
}

/// Handler of `GET /plugins/{name}`: every loaded version of that name.
pub(crate) async fn by_name(ready: Ready, name: Result<Path<String>, PathRejection>) -> Result<Json<Value>, ApiError> {
    let Path(name) = name?;
    let all = (ready.plugins)();
    let found: Vec<Value> = entries(&all).iter().filter(|plugin| plugin["name"] == name.as_str()).cloned().collect();
    match found.len() {
        0 => Err(ApiError::not_found(format!("no plugin is named {name:?}; see /plugins"))),
        1 => Ok(Json(found.into_iter().next().unwrap_or_default())),
        _ => Ok(Json(Value::Array(found))),
    }
}

/// The plugins of a description: an array, or an object with the array under `plugins`.
pub(crate) fn entries(description: &Value) -> &[Value] {
    description.get("plugins").unwrap_or(description).as_array().map_or(&[], Vec::as_slice)
}
