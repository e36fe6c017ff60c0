//! The error object of every surface but Anthropic's: `{"error": {"code", "message", "type", "param"}}`.
//!
//! `code` is the HTTP status as an integer, as llama.cpp's clients expect; `param` is the path of the field at fault
//! or null, as OpenAI's do.

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use opencoti_engine::api::EngineError;
use serde::Serialize;
use utoipa::ToSchema;

/// The body of a failed request.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorObject,
}

/// The error itself.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorObject {
    /// HTTP status.
    pub code: u16,
    /// What was found, what was expected, what to do.
    pub message: String,
    /// Class of the error.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Path of the field at fault.
    pub param: Option<String>,
    /// Length of a prompt that is too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_prompt_tokens: Option<u32>,
    /// Length of the context that was exceeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_ctx: Option<u32>,
    /// How far loading is, 0 … 1, while the model loads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<f32>,
}

/// A failed request.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    object: Box<ErrorObject>,
    retry_after: Option<u32>,
}

/// nginx's status for a request whose client no longer wants it; the standard has none.
const CANCELLED: u16 = 499;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let object = ErrorObject {
            code: status.as_u16(),
            message: message.into(),
            kind,
            param: None,
            n_prompt_tokens: None,
            n_ctx: None,
            progress: None,
        };
        ApiError { status, object: Box::new(object), retry_after: None }
    }

    /// 400 without a field.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400 that names a field; `problem` goes on after the field's name ("must be …").
    pub(crate) fn field(field: impl Into<String>, problem: impl AsRef<str>) -> Self {
        let field = field.into();
        let mut error = Self::bad_request(format!("`{field}` {}", problem.as_ref()));
        error.object.param = Some(field);
        error
    }

    /// 400 of a text that is longer than the model takes.
    pub(crate) fn too_long(field: String, n_tokens: u32, n_ctx: u32) -> Self {
        let message =
            format!("`{field}` has {n_tokens} tokens, but the model takes at most {n_ctx} at once; shorten it");
        let mut error = Self::new(StatusCode::BAD_REQUEST, "exceed_context_size_error", message);
        error.object.param = Some(field);
        error.object.n_prompt_tokens = Some(n_tokens);
        error.object.n_ctx = Some(n_ctx);
        error
    }

    /// 401.
    pub(crate) fn wrong_key() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", "Invalid API Key")
    }

    /// 403.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// 404 of a path that is no route.
    pub(crate) fn no_route() -> Self {
        Self::not_found("File Not Found")
    }

    /// 404 of a thing that a route names.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    /// 405.
    pub(crate) fn wrong_method() -> Self {
        let message = "this route does not have that method; see the Allow header or /openapi.json";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    /// 408.
    pub(crate) fn timed_out(message: impl Into<String>) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message)
    }

    /// 413.
    pub(crate) fn too_large(limit: usize) -> Self {
        let message = format!("the body is longer than the server's limit of {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// 499.
    pub(crate) fn cancelled() -> Self {
        let status = StatusCode::from_u16(CANCELLED).unwrap_or(StatusCode::BAD_REQUEST);
        Self::new(status, "cancelled_error", "the request was cancelled")
    }

    /// 500.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 501.
    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "not_supported_error", message)
    }

    /// 503.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", message)
    }

    /// 503 of a server whose model is being loaded.
    pub(crate) fn loading(progress: f32) -> Self {
        let mut error = Self::unavailable("Loading model");
        error.object.progress = Some(progress);
        error
    }

    /// HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The message.
    pub fn message(&self) -> &str {
        &self.object.message
    }

    /// Path of the field at fault.
    pub fn param(&self) -> Option<&str> {
        self.object.param.as_deref()
    }

    /// The body, for a stream that has begun.
    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody { error: (*self.object).clone() }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::Invalid { field, .. } => {
                let named = match &field {
                    Some(field) if !message.contains(field.as_str()) => format!("`{field}`: {message}"),
                    _ => message,
                };
                let mut error = Self::bad_request(named);
                error.object.param = field;
                error
            }
            EngineError::ExceedsContext { n_prompt_tokens, n_ctx } => {
                let mut error = Self::new(StatusCode::BAD_REQUEST, "exceed_context_size_error", message);
                error.object.n_prompt_tokens = Some(n_prompt_tokens);
                error.object.n_ctx = Some(n_ctx);
                error
            }
            EngineError::Rejected { retry_after, .. } => {
                let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
                error.retry_after = Some(retry_after.max(1));
                error
            }
            EngineError::Unavailable(_) => Self::unavailable(message),
            EngineError::Unsupported(_) => Self::unsupported(message),
            EngineError::NotFound(_) => Self::not_found(message),
            EngineError::Conflict(_) => Self::new(StatusCode::CONFLICT, "conflict_error", message),
            EngineError::TimedOut(_) => Self::timed_out(message),
            EngineError::Internal(_) => {
                tracing::error!(error = %message, "the engine failed a request");
                Self::internal(message)
            }
        }
    }
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        Self::bad_request(format!("the path can't be read: {}", rejection.body_text()))
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self::bad_request(format!("the query can't be read: {}", rejection.body_text()))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let retry_after = self.retry_after;
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For surfaces whose errors have another shape.
        response.extensions_mut().insert(self);
        response
    }
}
