//! Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;

/// The body of a failed request.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct AnthropicError {
    /// `error`.
    #[serde(rename = "type")]
    kind: &'static str,
    error: AnthropicErrorObject,
    /// The request's id, as in the header `request-id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}

/// The error itself.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct AnthropicErrorObject {
    /// Class of the error.
    #[serde(rename = "type")]
    kind: &'static str,
    /// What was found, what was expected, what to do.
    message: String,
}

impl AnthropicError {
    /// The error in Anthropic's words.
    pub(crate) fn new(error: &ApiError, request_id: Option<String>) -> Self {
        let object = AnthropicErrorObject { kind: kind(error.status()), message: error.message().to_owned() };
        AnthropicError { kind: "error", error: object, request_id }
    }
}

/// Anthropic's class of a status.
fn kind(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 | 504 => "timeout_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    }
}
